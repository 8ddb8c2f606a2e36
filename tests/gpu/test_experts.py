"""Mixtures of experts on a GPU: the tests of tests/kernels/triton/experts, real shapes, graphs, and equal bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.kernels import reference
from octavo.kernels.groups import GroupForm
from octavo.kernels.reference import ExpertGate, Routing
from octavo.kernels.triton import ops as cuda
from octavo.kernels.triton.experts.assign import assign
from tests.kernels.pool import norm_error, relative_error
from tests.kernels.triton.conftest import seed  # noqa: F401
from tests.kernels.triton.experts.test_assign import *  # noqa: F403
from tests.kernels.triton.experts.test_expert_products import *  # noqa: F403
from tests.kernels.triton.experts.test_expert_products import GATES, Layer
from tests.kernels.triton.experts.test_grouped_experts import *  # noqa: F403
from tests.kernels.triton.experts.test_grouped_experts import MXFP4, random_groups
from tests.kernels.triton.experts.test_route import *  # noqa: F403
from tests.models.quantization import test_mxfp4
from tests.models.tiny import make_tiny_checkpoint
from tests.proof.ways import OPTIONS, WAYS

TOP_K, SIZES = 8, (128, 2048, 768)
"""Of Qwen3-30B-A3B: experts, hidden and inner size."""


def rows(routing: Routing, tokens: slice) -> Routing:
    return Routing(routing.experts[tokens], routing.weights[tokens])


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 33, 64, 65, 300, 1000, 5000])
def test_a_real_shape_matches_the_reference_in_float32(num_tokens: int) -> None:
    layer = Layer(*SIZES, torch.bfloat16)
    x, routing = layer.tokens(num_tokens), layer.route(num_tokens, TOP_K)
    h, y = layer(x, routing)
    expected = reference.experts_in(x.float(), layer.gate_up, layer.biases[0], routing, SIZES[0], GATES[0])
    assert norm_error(h, expected.double()) < 5e-3
    expected = reference.experts_out(h.float(), layer.down, layer.biases[1], routing, SIZES[0])
    assert norm_error(y, expected.double()) < 5e-3 and relative_error(y, expected.double()) < 1e-2


@pytest.mark.parametrize("kind", GATES, ids=[kind.name for kind in GATES])
@pytest.mark.parametrize("sizes", [SIZES, (32, 2880, 2880)], ids=str)
def test_a_real_shapes_bits_do_not_depend_on_the_batch(sizes: tuple[int, int, int], kind: ExpertGate) -> None:
    """Batches of every way to tile, tokens alone, and tiles of every size."""
    layer = Layer(*sizes, torch.bfloat16)
    x, routing = layer.tokens(5000), layer.route(5000, 4)
    h, y = layer(x, routing, kind)
    parts = [slice(0, n) for n in (1, 2, 16, 32, 64, 65, 300, 1500)] + [slice(n, n + 1) for n in (17, 299, 4999)]
    for part in parts:
        some = layer(x[part], rows(routing, part), kind)
        assert torch.equal(some[0], h[part]) and torch.equal(some[1], y[part]), part
    part = slice(0, 600)
    for tile in (16, 32, 64, 128):
        some = layer(x[part], assign(rows(routing, part), sizes[0], tile), kind)
        assert torch.equal(some[0], h[part]) and torch.equal(some[1], y[part]), tile


@pytest.mark.parametrize("num_tokens", [1, 16, 64, 300])
def test_a_graph_replays_with_other_tokens_and_experts(num_tokens: int) -> None:
    layer = Layer(*SIZES, torch.bfloat16)
    x, logits = layer.tokens(num_tokens), torch.randn(num_tokens, SIZES[0], device="cuda")

    def run() -> Tensor:
        routing = cuda.route(logits, TOP_K, softmax_first=True, renormalise=True)
        return layer(x, routing)[1]

    run()  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for scale in (1.0, 1.0, 0.0, 30.0):  # with equal logits, all tokens choose the first experts
        x.copy_(layer.tokens(num_tokens))
        logits.normal_().mul_(scale)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, run())


def test_kernels_that_overlap_match_separate_ones() -> None:
    """Each kernel begins before its predecessor has ended; a replay equals launches with a synchronization each."""
    layers = [Layer(*SIZES, torch.bfloat16) for _ in range(3)]
    x, logits = layers[0].tokens(4), torch.randn(4, SIZES[0], device="cuda")

    def run(wait: bool) -> Tensor:
        y = x
        for layer in layers:
            routing = cuda.route(logits + y[:, : SIZES[0]], TOP_K, softmax_first=True, renormalise=True)
            if wait:
                torch.cuda.synchronize()
            h = cuda.experts_in(y, layer.gate_up, layer.biases[0], routing, SIZES[0], GATES[0])
            if wait:
                torch.cuda.synchronize()
            y = cuda.experts_out(h, layer.down, layer.biases[1], routing, SIZES[0])
        return y

    run(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(wait=False)
    for _ in range(5):
        x.copy_(layers[0].tokens(4))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, run(wait=True))


@pytest.mark.parametrize("num_tokens", [1, 16, 64, 65, 300, 2000])
@pytest.mark.parametrize("form", [MXFP4, GroupForm(4, 32, has_zeros=True), GroupForm(8, 64, zero=128)], ids=str)
def test_quantised_weights_of_a_real_shape(form: GroupForm, num_tokens: int) -> None:
    """Those of gpt-oss with fewer experts: the bits of the products in bfloat16."""
    num_experts, size, gate = 5, 2880, GATES[2]
    x, logits = torch.randn(num_tokens, size, device="cuda").bfloat16(), torch.randn(num_tokens, num_experts).cuda()
    routing = reference.route(logits, 4, softmax_first=False, renormalise=False)
    up, down = random_groups(form, 2 * size, size), random_groups(form, size, size)
    packed = [cuda.pack_experts(groups, num_experts) for groups in (up, down)]
    assert packed[0] is not None and packed[1] is not None
    h = packed[0].experts_in(x, None, routing, gate)
    assert torch.equal(h, cuda.experts_in(x, up.dequantised().bfloat16(), None, routing, num_experts, gate))
    expected = cuda.experts_out(h, down.dequantised().bfloat16(), None, routing, num_experts)
    assert torch.equal(packed[1].experts_out(h, None, routing), expected)


def test_tokens_of_mxfp4_are_those_of_the_dequantised_model(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("gpt_oss", tmp_path / "model", **test_mxfp4.SIZES)
    twin = test_mxfp4.quantise(directory, torch.bfloat16)
    prompts = [[3 + (7 * i + j * j) % 90 for j in range(3 + 5 * i % 23)] for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    for way in ("graphs", "eager", "windows"):
        found = []
        for path in (directory, twin):
            with LLM(str(path), device="cuda", **(OPTIONS | {"dtype": "bfloat16"} | WAYS[way])) as llm:
                found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
        assert found[0] == found[1], way


def test_offsets_past_2_to_the_31() -> None:
    num_tokens = 140_000
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GB of free GPU memory")
    layer = Layer(*SIZES, torch.bfloat16)
    x, routing = layer.tokens(num_tokens), layer.route(num_tokens, TOP_K)
    assert num_tokens * TOP_K * SIZES[1] > 1 << 31
    h, y = layer(x, routing)
    for part in (slice(0, 40), slice(num_tokens - 40, num_tokens)):
        some = layer(x[part], rows(routing, part))
        assert torch.equal(some[0], h[part]) and torch.equal(some[1], y[part])
