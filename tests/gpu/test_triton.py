"""The Triton kernels on a GPU: the tests of tests/kernels/triton, and those that need a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.groups import GroupForm
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference.norms import NormedResidual
from octavo.kernels.triton import ops as cuda
from octavo.kernels.triton.attention.prefill_tuning import supports_hopper_prefill
from octavo.kernels.triton.linear.tuning import HopperTuning
from tests.kernels.pool import Case, make_case, norm_error, relative_error
from tests.kernels.triton.attention.checks import attend, check
from tests.kernels.triton.attention.test_cascade import *  # noqa: F403
from tests.kernels.triton.attention.test_decode import *  # noqa: F403
from tests.kernels.triton.attention.test_decode_schedule import *  # noqa: F403
from tests.kernels.triton.attention.test_paged_attention import *  # noqa: F403
from tests.kernels.triton.attention.test_prefill import *  # noqa: F403
from tests.kernels.triton.attention.test_prefill_merge import *  # noqa: F403
from tests.kernels.triton.attention.test_query_tiles import *  # noqa: F403
from tests.kernels.triton.conftest import seed  # noqa: F401
from tests.kernels.triton.kv.test_block_copy import *  # noqa: F403
from tests.kernels.triton.kv.test_swap import *  # noqa: F403
from tests.kernels.triton.kv.test_write import *  # noqa: F403
from tests.kernels.triton.linear.test_grouped import *  # noqa: F403
from tests.kernels.triton.linear.test_grouped import FLOAT8, INT4, make_groups, pack
from tests.kernels.triton.linear.test_skinny import *  # noqa: F403
from tests.kernels.triton.sampling.test_logits_processors import *  # noqa: F403
from tests.kernels.triton.sampling.test_sample import *  # noqa: F403
from tests.kernels.triton.sampling.test_step_inputs import *  # noqa: F403
from tests.kernels.triton.sampling.test_top_logprobs import *  # noqa: F403
from tests.kernels.triton.test_activation import *  # noqa: F403
from tests.kernels.triton.test_norms import *  # noqa: F403
from tests.kernels.triton.test_ops import *  # noqa: F403


def test_a_decode_graph_replays_with_other_lengths() -> None:
    block_size, tables = 16, [[1 + s * 20 + i for i in range(20)] for s in range(4)]
    batch = RaggedBatch.from_lists([1] * 4, [300, 1, 64, 65], tables, block_size, device="cuda")
    kv = torch.randn(81, 1, 2, 2, block_size, 64, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(4, 8, 64, device="cuda", dtype=torch.bfloat16)
    cuda.paged_attention(q, kv[:, 0], batch, scale=0.1)  # compiled before the capture
    batch.derived.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cuda.paged_attention(q, kv[:, 0], batch, scale=0.1)
    for lens in ([300, 1, 64, 65], [1, 0, 0, 320], [0, 0, 0, 0], [17, 300, 129, 2]):
        batch.seq_lens.copy_(torch.tensor(lens))
        graph.replay()
        expected = reference.paged_attention(q.double(), kv[:, 0].double(), batch, scale=0.1)
        assert float((out.double() - expected).norm()) <= 5e-3 * float(expected.norm())


def test_the_last_block_of_a_pool_past_2_to_the_32_elements() -> None:
    block_size, heads, head_dim = 16, 8, 128
    num_blocks = (1 << 32) // (2 * heads * block_size * head_dim) + 2
    if torch.cuda.mem_get_info()[0] < 3 * num_blocks * heads * block_size * head_dim * 2:
        pytest.skip("needs 13 GB of free GPU memory")
    kv = torch.empty(num_blocks + 1, 1, 2, heads, block_size, head_dim, device="cuda", dtype=torch.bfloat16)
    kv[-11:] = math.nan
    for query_len, seq_len in ((1, 9), (9, 9), (140, 150)):  # one for each kernel
        ids = list(range(num_blocks, num_blocks - 10, -1))  # the pool's last block comes first
        batch = RaggedBatch.from_lists([query_len], [seq_len], [ids], block_size, device="cuda")
        k, v = torch.randn(2, seq_len, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        position = torch.arange(seq_len, device="cuda")
        cuda.kv_write(k, v, kv[:, 0], (num_blocks - position // block_size) * block_size + position % block_size)
        assert torch.equal(kv[num_blocks, 0, 0, :, :9].transpose(0, 1), k[:9])
        q = torch.randn(query_len, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        out = cuda.paged_attention(q, kv[:, 0], batch, scale=0.1)
        near = [i - num_blocks + 10 for i in ids]
        batch = RaggedBatch.from_lists([query_len], [seq_len], [near], block_size, device="cuda")
        expected = reference.paged_attention(q.double(), kv[-11:, 0].double(), batch, scale=0.1)
        assert relative_error(out, expected) < 1.5e-2 and norm_error(out, expected) < 5e-3
    for write in (rope_and_write, project_rope_and_write):  # compared with a small pool of the last blocks
        slots = num_blocks * block_size + torch.arange(9, device="cuda")
        kv[-11:] = math.nan
        small = kv[-11:].clone()
        assert torch.equal(write(kv[:, 0], slots), write(small[:, 0], slots - (num_blocks - 10) * block_size))
        assert torch.equal(kv[-11:].nan_to_num(7.0), small.nan_to_num(7.0))
        assert int(small.isnan().any(-1).logical_not().sum()) == 2 * heads * 9
    cuda.block_copy(kv, torch.tensor([num_blocks], device="cuda"), torch.tensor([1], device="cuda"))
    assert torch.equal(kv[1, 0, :, :, :9], kv[num_blocks, 0, :, :, :9])
    host = torch.zeros(2, *kv.shape[1:], dtype=torch.bfloat16, pin_memory=True)
    cuda.swap_out(kv, host, torch.tensor([num_blocks], device="cuda"), torch.tensor([1], device="cuda"))
    torch.cuda.synchronize()
    assert torch.equal(host[1, 0, :, :, :9], kv[1, 0, :, :, :9].cpu()) and not host[0].any()
    kv[num_blocks] = 0.0
    cuda.swap_in(host, kv, torch.tensor([1], device="cuda"), torch.tensor([num_blocks], device="cuda"))
    assert torch.equal(kv[1, 0, :, :, :9], kv[num_blocks, 0, :, :, :9])


def rope_and_write(kv_layer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Nine tokens with 16 query heads, at positions from 100 on."""
    torch.manual_seed(1)
    q, k, v = random(9, 32, 128).split([16, 8, 8], dim=1)
    table = reference.rope_table(128, 1000, 10000.0, device="cuda")
    return cuda.rope_kv_write(q, k, v, torch.arange(100, 109, device="cuda"), table, kv_layer, slots)


def project_rope_and_write(kv_layer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The same from the residual; on Hopper in one kernel."""
    torch.manual_seed(1)
    residual = cuda.make_normed_residual(random(9, 1024), 1 + random(1024, scale=0.1))
    batch = RaggedBatch.from_lists([1] * 9, [1] * 9, [[0]] * 9, 16, device="cuda")
    batch = replace(batch, positions=torch.arange(100, 109, device="cuda"), slot_mapping=slots)
    table = reference.rope_table(128, 1000, 10000.0, device="cuda")
    return cuda.project_qkv(residual, 1e-5, random(32 * 128, 1024, scale=0.05), None, kv_layer, batch, table)


HOPPER = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).bfloat16()


@HOPPER
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 33, 64, 130])
@pytest.mark.parametrize(
    "tuning",
    [
        *(HopperTuning(128, 64, 1, 3), HopperTuning(128, 64, 4, 5)),
        *(HopperTuning(64, 128, 2, 2), HopperTuning(128, 64, 16, 3)),  # shares of 32 and of 8 rows
        HopperTuning(64, 128, 2, 4, registers=232),
    ],
    ids=str,
)
@pytest.mark.parametrize("gate", ["", "silu", "gelu"])
def test_hopper_skinny_products_match_the_reference(gate: Any, tuning: HopperTuning, num_tokens: int) -> None:
    """Rows and columns end within a tile; three launches give the same bits, so the barriers are reusable."""
    size, num_in, num_out = 328, 1200, 200
    residual = cuda.make_normed_residual(random(num_tokens, size), 1 + random(size, scale=0.1))
    expected = NormedResidual(residual.x.double(), residual.weighted.double(), residual.squares.double())
    weight, bias = random(num_out * (2 if gate else 1), size, scale=0.05), random(num_out * (2 if gate else 1))
    products = [cuda.norm_linear(residual, 1e-5, weight, bias, gate, tuning=tuning) for _ in range(3)]
    expected_product = reference.norm_linear(expected, 1e-5, weight.double(), bias.double(), gate)
    assert relative_error(products[0], expected_product) < 5e-3 and all(torch.equal(p, products[0]) for p in products)
    x, down, bias = random(num_tokens, num_in + 8)[:, :num_in], random(size, num_in, scale=0.03), random(size)
    norm = 1 + random(size, scale=0.1)
    residuals = [cuda.add_linear(residual, x, down, bias, norm, tuning=tuning) for _ in range(3)]
    expected_product = reference.add_linear(expected, x.double(), down.double(), bias.double(), norm.double())
    for actual in residuals:
        assert torch.equal(actual.x, residuals[0].x) and torch.equal(actual.weighted, residuals[0].weighted)
    assert (
        relative_error(actual.x, expected_product.x) < 5e-3
        and relative_error(actual.weighted, expected_product.weighted) < 6e-3
    )
    assert relative_error(actual.squares.sum(0)[:num_tokens], expected_product.squares.sum(0)) < 5e-3


@HOPPER
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "inner"),
    [(3, 2048, 8192), (32, 2048, 8192), (64, 2048, 8192), (70, 1024, 3072), (150, 896, 4864), (256, 1024, 3072)],
)
def test_overlapping_hopper_products_match_separate_ones(num_tokens: int, hidden: int, inner: int) -> None:
    """Each product begins before the previous one has ended; a replay equals launches with a synchronization each."""
    layers = 4
    weights = [(random(2 * inner, hidden, scale=0.02), random(hidden, inner, scale=0.01)) for _ in range(layers)]
    assert all(cuda.max_small_batch_tokens(w) >= num_tokens for pair in weights for w in pair)
    x, norm = random(num_tokens, hidden), 1 + random(hidden, scale=0.1)

    def run(wait: bool) -> NormedResidual:
        residual = cuda.make_normed_residual(x, norm)
        for gate_up, down in weights:
            between = cuda.norm_linear(residual, 1e-5, gate_up, None, "silu")
            if wait:
                torch.cuda.synchronize()
            residual = cuda.add_linear(residual, between, down, None, norm)
            if wait:
                torch.cuda.synchronize()
        return residual

    run(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(wait=False)
    for _ in range(5):
        x.copy_(random(num_tokens, hidden))
        out.x.fill_(math.nan)
        graph.replay()
        assert torch.equal(out.x, run(wait=True).x)


@HOPPER
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 17, 33, 64, 70, 130, 200, 256])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "size", "normed", "biased"),
    [(16, 8, 128, 1024, True, False), (12, 2, 128, 1536, False, True), (32, 8, 128, 4096, False, False),
     (14, 2, 64, 896, False, True), (9, 3, 64, 576, True, False)],
)  # fmt: skip
def test_hopper_project_qkv_matches_separate_kernels(
    heads: int, kv_heads: int, head_dim: int, size: int, normed: bool, biased: bool, num_tokens: int
) -> None:
    weight = random((heads + 2 * kv_heads) * head_dim, size, scale=0.05)
    multiply = partial(cuda.norm_linear, weight=weight)
    check_projection(
        partial(cuda.project_qkv, weight=weight), multiply, (heads, kv_heads, head_dim), size, num_tokens,
        normed=normed, biased=biased,
    )  # fmt: skip


@HOPPER
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(
    ("heads", "size"), [((32, 8, 128), 4096), ((12, 2, 128), 1536), ((4, 1, 128), 8192), ((9, 3, 64), 768)], ids=str
)
@pytest.mark.parametrize("form", [INT4, GroupForm(4, 32, has_zeros=True), GroupForm(8, 32, zero=128), FLOAT8], ids=str)
def test_hopper_project_qkv_of_a_quantised_weight_matches_separate_kernels(
    form: GroupForm, heads: tuple[int, int, int], size: int, num_tokens: int
) -> None:
    weight = pack(make_groups(form, (heads[0] + 2 * heads[1]) * heads[2], size, torch.bfloat16))
    if num_tokens <= weight.max_small_batch_tokens:
        for normed, biased in ((True, False), (False, True)):
            check_projection(
                weight.project_qkv, weight.norm_linear, heads, size, num_tokens, normed=normed, biased=biased
            )


def check_projection(
    project: Callable[..., Tensor],
    multiply: Callable[..., Tensor],
    heads: tuple[int, int, int],
    size: int,
    num_tokens: int,
    *,
    normed: bool,
    biased: bool,
) -> None:
    """Compared with the product and `rope_kv_write`; three launches give the same bits, and no other slot changes.

    heads  of q, of K, and their size
    """
    num_heads, kv_heads, head_dim = heads
    residual = cuda.make_normed_residual(random(num_tokens, size), 1 + random(size, scale=0.1))
    bias = random((num_heads + 2 * kv_heads) * head_dim) if biased else None
    norms: dict[str, Any] = {"q_norm": None, "k_norm": None}
    if normed:
        norms = {"q_norm": 1 + random(head_dim, scale=0.1), "k_norm": 1 + random(head_dim, scale=0.1)}
    batch = RaggedBatch.from_lists([1] * num_tokens, [1] * num_tokens, [[0]] * num_tokens, 16, device="cuda")
    batch.positions.copy_(torch.randint(900, (num_tokens,)))
    batch.slot_mapping.copy_(torch.randperm(64 * 16)[:num_tokens])
    table = reference.rope_table(head_dim, 1000, 10000.0, device="cuda")
    before = random(64, 3, 2, kv_heads, 16, head_dim)
    pools = [before.clone() for _ in range(4)]
    rest: dict[str, Any] = {"batch": batch, "cos_sin": table, "norm_eps": 1e-6, **norms}
    q = [project(residual, 1e-5, bias=bias, kv_layer=kv[:, 1], **rest) for kv in pools[:3]]
    parts = reference.split_heads(multiply(residual, 1e-5, bias=bias), pools[3][:, 1])
    expected = cuda.rope_kv_write(*parts, batch.positions, table, pools[3][:, 1], batch.slot_mapping, eps=1e-6, **norms)
    assert all(torch.equal(x, q[0]) for x in q) and all(torch.equal(kv, pools[0]) for kv in pools[:3])
    assert relative_error(q[0], expected.double()) < 1e-2 and relative_error(pools[0], pools[3].double()) < 1e-2
    slots = torch.zeros(64 * 16, dtype=torch.bool, device="cuda")
    slots[batch.slot_mapping] = True
    untouched = ~slots.view(64, 16)
    assert torch.equal(pools[0][:, 0], before[:, 0]) and torch.equal(pools[0][:, 2], before[:, 2])
    assert torch.equal(pools[0][:, 1].permute(0, 3, 1, 2, 4)[untouched], before[:, 1].permute(0, 3, 1, 2, 4)[untouched])


LONG = ([130, 1, 65, 140, 7], [130, 90, 65, 500, 300])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_size"),
    [(2, 4, 128, 16), (2, 7, 64, 64), (1, 12, 80, 8), (3, 1, 96, 128), (1, 16, 256, 256), (2, 2, 40, 32)],
)
def test_long_prefills_match_the_definition(
    kv_heads: int, group: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    """Queries long enough for Hopper's kernel, and single ones; slots without a token are NaN."""
    shape = {"num_kv_heads": kv_heads, "group_size": group, "head_dim": head_dim, "block_size": block_size}
    case = make_case(*LONG, dtype=dtype, **shape)
    check(case, window=2000 if group == 7 else 0)  # longer than every sequence


@pytest.mark.parametrize(
    ("group", "head_dim", "block_size"),
    [(9, 24, 16), (10, 56, 16), (11, 72, 8), (13, 136, 64), (14, 200, 16), (15, 248, 32)],
)
def test_long_prefills_with_odd_group_and_head_sizes(group: int, head_dim: int, block_size: int) -> None:
    """Tiles of 128 queries of one head, or of 64 queries of two heads."""
    dtype = torch.float16 if group % 2 else torch.bfloat16
    shape = {"num_kv_heads": 1, "group_size": group, "head_dim": head_dim, "block_size": block_size}
    case = make_case([130, 1, 7], [140, 90, 300], dtype=dtype, **shape)
    if torch.cuda.get_device_capability() == (9, 0):
        assert supports_hopper_prefill(case.q.cuda(), case.kv.cuda()[:, 1])
    check(case)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_fixed_split_gives_the_same_bits_alone_and_among_forty(head_dim: int) -> None:
    """Neither does their order. Many sequences are decoded with another tuning than few."""
    lens = [1 + 37 * i % 1300 for i in range(40)]
    case = make_case([1] * 40, lens, group_size=4, head_dim=head_dim, block_size=16, dtype=torch.bfloat16)

    def run(seqs: list[int]) -> torch.Tensor:
        batch = RaggedBatch.from_lists([1] * len(seqs), [lens[s] for s in seqs], [case.tables[s] for s in seqs], 16)
        return attend(Case(case.q[seqs], case.kv, replace(batch, fixed_split=True), [], [], [], case.scale))[0]

    together = run(list(range(40)))
    assert torch.equal(run(list(range(39, -1, -1))).flip(0), together)
    assert torch.equal(run([35, 3, 0]), together[[35, 3, 0]])
    assert all(torch.equal(run([s])[0], together[s]) for s in (0, 17, 35))


def test_a_prefill_graph_replays_with_other_lengths() -> None:
    """Query tiles, their context lengths and their number are computed on the device."""
    block_size, tables = 16, [[1 + s * 80 + i for i in range(80)] for s in range(3)]
    batch = RaggedBatch.from_lists([150, 300, 1], [1200, 300, 7], tables, block_size, device="cuda")
    kv = torch.randn(241, 1, 2, 2, block_size, 128, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(451, 8, 128, device="cuda", dtype=torch.bfloat16)
    cuda.paged_attention(q, kv[:, 0], batch, scale=0.1)  # compiled before the capture
    batch.derived.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cuda.paged_attention(q, kv[:, 0], batch, scale=0.1)
    for query_lens, seq_lens in (
        ([150, 300, 1], [1200, 300, 7]),
        ([1, 214, 236], [1, 1000, 236]),
        ([300, 0, 151], [300, 0, 951]),
    ):
        batch.query_start.copy_(torch.tensor([0, *itertools.accumulate(query_lens)]))
        batch.seq_lens.copy_(torch.tensor(seq_lens))
        graph.replay()
        now = RaggedBatch.from_lists(query_lens, seq_lens, tables, block_size, device="cuda")
        expected = reference.paged_attention(q.double(), kv[:, 0].double(), now, scale=0.1)
        assert float((out.double() - expected).norm()) <= 5e-3 * float(expected.norm())
