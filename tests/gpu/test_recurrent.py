"""Gated DeltaNets on a GPU: the tests of tests/kernels/triton/recurrent, a real layer, graphs, and tiny hybrids."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo import LLM
from octavo.kernels import reference
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton import ops as cuda
from tests.gpu.test_engine import params
from tests.kernels.pool import norm_error
from tests.kernels.reference.test_recurrent import ranges
from tests.kernels.triton.conftest import seed  # noqa: F401
from tests.kernels.triton.recurrent.cases import Slices
from tests.kernels.triton.recurrent.test_causal_conv import *  # noqa: F403
from tests.kernels.triton.recurrent.test_delta_chunks import *  # noqa: F403
from tests.kernels.triton.recurrent.test_delta_rule import *  # noqa: F403
from tests.kernels.triton.recurrent.test_gates import *  # noqa: F403
from tests.models.tiny import HYBRIDS, make_tiny_checkpoint
from tests.proof.ways import OPTIONS, WAYS
from tests.runner.test_stub_platform import completions

NUM_KEYS, NUM_HEADS, DIM, SIZE = 16, 32, 128, 4
"""Of a layer of Qwen3.5-35B-A3B."""
NUM_CHANNELS = (2 * NUM_KEYS + NUM_HEADS) * DIM
NUM_CONV, NUM_STATE = NUM_CHANNELS * (SIZE - 1), NUM_HEADS * DIM * DIM
WIDTH = 320 * 256
"""Numbers of a block of 16 tokens."""
STATE_BLOCKS = -(-(NUM_CONV + NUM_STATE) // WIDTH)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-3}
SLICES: dict[str, Slices] = {
    "prompts": [(1000, 1000), (64, 64), (73, 73), (2100, 2100)],
    "decoding": [(1, 100 + s) for s in range(40)],
    "mixed": [(1, 900), (700, 1500), (1, 1), (8, 30), (9, 9), (0, 0), (1, 77), (130, 131)],
}


class Layer:
    """A convolution and a recurrence over the same states, which lie in shuffled blocks."""

    def __init__(self, num_seqs: int, dtype: torch.dtype) -> None:
        ids = torch.randperm(num_seqs * STATE_BLOCKS, device="cuda") + 1
        self.dtype, self.tables = dtype, ids.int().view(num_seqs, STATE_BLOCKS)
        self.pool = torch.randn(1 + len(ids), WIDTH, device="cuda") * 0.1
        self.weight = torch.randn(NUM_CHANNELS, SIZE, device="cuda") * 0.5

    def batch(self, slices: Slices) -> RaggedBatch:
        lens, seq_lens = zip(*slices, strict=True)
        batch = RaggedBatch.from_lists(lens, seq_lens, [[0] * 200] * len(slices), 16, device="cuda")
        return replace(batch, state_tables=self.tables[: len(slices)], state_reads=self.tables[: len(slices)])

    def inputs(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, decay, beta"""
        x = torch.randn(num_tokens, NUM_CHANNELS, device="cuda").to(self.dtype)
        decay, beta = torch.rand(2, num_tokens, NUM_HEADS, device="cuda")
        return x, -decay * torch.logspace(-3, 1, NUM_HEADS, device="cuda"), beta

    def __call__(
        self, inputs: tuple[Tensor, Tensor, Tensor], pool: Tensor, batch: RaggedBatch, wide: bool = False
    ) -> Tensor:
        ops, (x, decay, beta) = reference if wide else cuda, inputs
        qkv = ops.causal_conv(x, self.weight, pool, 0, batch)
        q, k, v = torch.split(qkv, [NUM_KEYS * DIM, NUM_KEYS * DIM, NUM_HEADS * DIM], dim=1)
        q, k, v = (part.view(len(x), -1, DIM) for part in (q, k, v))
        return ops.gated_delta_rule(q, k, v, decay, beta, pool, NUM_CONV, batch)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("slices", SLICES.values(), ids=SLICES)
def test_a_real_layer_matches_the_reference(slices: Slices, dtype: torch.dtype) -> None:
    layer = Layer(len(slices), dtype)
    batch, inputs = layer.batch(slices), layer.inputs(sum(n for n, _ in slices))
    pool, expected_pool = layer.pool.clone(), layer.pool.clone()
    out, expected = layer(inputs, pool, batch), layer(inputs, expected_pool, batch, wide=True)
    assert norm_error(out, expected.double()) < TOLERANCE[dtype]
    used = layer.tables[[s for s, (count, _) in enumerate(slices) if count]].flatten().long()
    assert norm_error(pool[used], expected_pool[used].double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_bits_do_not_depend_on_a_real_layers_batch(dtype: torch.dtype) -> None:
    slices = SLICES["mixed"]
    layer = Layer(len(slices), dtype)
    inputs, together = layer.inputs(sum(n for n, _ in slices)), layer.pool.clone()
    out = layer(inputs, together, layer.batch(slices))
    for s, part in enumerate(ranges(slices)):
        if slices[s][0]:
            alone = layer.pool.clone()
            x, decay, beta = (tensor[part] for tensor in inputs)
            own = layer.tables[s : s + 1]
            batch = replace(layer.batch([slices[s]]), state_tables=own, state_reads=own)
            assert torch.equal(layer((x, decay, beta), alone, batch), out[part])
            blocks = layer.tables[s].long()
            assert torch.equal(alone[blocks], together[blocks])


@pytest.mark.parametrize("lens", [[1] * 6, [150, 300, 1]], ids=["steps", "prompts"])
def test_a_graph_replays_with_other_lengths(lens: list[int]) -> None:
    layer = Layer(len(lens), torch.bfloat16)
    batch, inputs = layer.batch([(n, n + 5) for n in lens]), layer.inputs(sum(lens))
    pool = layer.pool.clone()
    layer(inputs, pool, batch)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(inputs, pool, batch)
    replays = [lens, lens[::-1]] if max(lens) == 1 else [lens, [1, 214, 236], [300, 0, 151], [8, 443, 0]]
    for now in replays:
        for more in (0, 9):
            batch.query_start.copy_(torch.tensor([0, *itertools.accumulate(now)]))
            batch.seq_lens.copy_(torch.tensor(now) + more)
            pool.copy_(layer.pool)
            expected_pool = layer.pool.clone()
            graph.replay()
            expected = layer(inputs, expected_pool, layer.batch([(n, n + more) for n in now]))
            assert torch.equal(out, expected) and torch.equal(pool, expected_pool)


@pytest.mark.parametrize("way", ["graphs", "eager", "windows", "chunks", "no overlap"])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_tokens_of_tiny_hybrids_equal_the_cpu_engines(kind: str, way: str, tmp_path: Path) -> None:
    """Also of prompts whose checkpoints are cached."""
    directory = str(make_tiny_checkpoint(kind, tmp_path / kind))
    prompts = [[3 + (7 * i + j * j) % 90 for j in range(3 + 5 * i % 23)] for i in range(len(params()))]
    options = OPTIONS | {"num_gpu_blocks_override": 600}
    with LLM(directory, device="cpu", **options) as llm:
        expected = completions(llm.generate(prompts, params(), use_tqdm=False))
    with LLM(directory, device="cuda", **(options | WAYS[way])) as llm:
        for _ in range(2):
            assert completions(llm.generate(prompts, params(), use_tqdm=False)) == expected
