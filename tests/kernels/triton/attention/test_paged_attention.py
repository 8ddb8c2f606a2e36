"""Paged attention of every dtype, block size, window and shape of heads, against the definition."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton import ops as cuda
from tests.kernels.pool import make_case, naive_attention, relative_error
from tests.kernels.triton.attention.checks import DECODE, MIXED, attend, check
from tests.kernels.triton.device import DEVICE, DTYPES, on_device


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_every_dtype(lens: tuple[list[int], list[int]], dtype: torch.dtype) -> None:
    check(make_case(*lens, dtype=dtype))


@pytest.mark.parametrize(("block_size", "window"), [(8, 0), (256, 0), (16, 1), (16, 65), (64, 100)])
@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_every_block_size_and_window(lens: tuple[list[int], list[int]], block_size: int, window: int) -> None:
    check(make_case(*lens, block_size=block_size), window)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim"), [(1, 1, 40), (2, 7, 16), (1, 16, 80), (5, 1, 64), (1, 8, 512)]
)
@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_every_head_shape(lens: tuple[list[int], list[int]], kv_heads: int, group: int, head_dim: int) -> None:
    check(make_case(*lens, num_kv_heads=kv_heads, group_size=group, head_dim=head_dim))


@pytest.mark.parametrize(("kv_heads", "group", "window"), [(1, 1, 0), (2, 7, 0), (2, 7, 65), (1, 16, 1), (5, 1, 30)])
@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_sinks(lens: tuple[list[int], list[int]], kv_heads: int, group: int, window: int) -> None:
    check(make_case(*lens, num_kv_heads=kv_heads, group_size=group, sinks=True), window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_sinks_of_every_dtype(lens: tuple[list[int], list[int]], dtype: torch.dtype) -> None:
    check(make_case(*lens, dtype=dtype, sinks=True))


@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_a_sink_may_have_all_the_weight_or_none(lens: tuple[list[int], list[int]]) -> None:
    case = make_case(*lens)
    expected, expected_lse = attend(case)
    case.sinks = torch.full((case.q.shape[1],), 200.0)
    case.sinks[::2] = -200.0
    out, lse = attend(case)
    assert torch.equal(out[:, ::2], expected[:, ::2]) and torch.equal(lse[:, ::2], expected_lse[:, ::2])
    assert not out[:, 1::2].any() and relative_error(lse[:, 1::2], torch.tensor(200.0)) < 3e-6


@pytest.mark.parametrize(
    ("group", "head_dim"), [(9, 24), (10, 56), (11, 72), (13, 136), (14, 200), (15, 248), (8, 512)]
)
def test_odd_group_and_head_sizes(group: int, head_dim: int) -> None:
    """With a prefill and a decode in one batch."""
    check(make_case([5, 1], [9, 70], num_kv_heads=1, group_size=group, head_dim=head_dim, dtype=torch.float16))


@pytest.mark.parametrize("query_lens", [[1, 0, 1], [3, 0, 1]], ids=["decode", "mixed"])
def test_a_sequence_without_queries_is_skipped(query_lens: list[int]) -> None:
    check(make_case(query_lens, [9, 5, 40]))


def test_rows_without_keys_are_zero() -> None:
    """A padding row has a query but no keys; the other row is real."""
    case = make_case([1, 1], [40, 1])
    case.batch.seq_lens[1] = 0
    out, lse = attend(case)
    assert relative_error(out[:1], naive_attention(case)[0][:1]) < 3e-6
    assert bool((out[1] == 0).all()) and bool((lse[1] == -torch.inf).all())


def test_the_schedule_is_made_once_for_all_layers() -> None:
    case = make_case(*MIXED)
    batch, kv = on_device(case.batch), case.kv.to(DEVICE)
    first = cuda.paged_attention(case.q.to(DEVICE), kv[:, 1], batch, scale=1.0)
    derived = dict(batch.derived)
    second = cuda.paged_attention(case.q.to(DEVICE), kv[:, 1], batch, scale=1.0)
    assert len(derived) == 2 and all(batch.derived[key] is value for key, value in derived.items())
    assert torch.equal(first, second)


@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_blocks_before_the_window_may_be_released(lens: tuple[list[int], list[int]]) -> None:
    """Their entries in the block table are then 0, the null block, which is NaN here."""
    window = 20
    case = make_case(*lens)
    for s, (query_len, seq_len) in enumerate(zip(*lens, strict=True)):
        case.batch.block_tables[s, : max(seq_len - query_len - window + 1, 0) // 4] = 0
    check(case, window)


def test_q_may_be_a_view_of_a_fused_projection() -> None:
    case = make_case(*DECODE)
    fused = torch.randn(case.q.shape[0], case.q.shape[1] + 4, case.q.shape[2], device=DEVICE)
    fused[:, 2:-2] = case.q.to(DEVICE)
    kv, batch = case.kv.to(DEVICE), on_device(case.batch)
    strided = cuda.paged_attention(fused[:, 2:-2], kv[:, 1], batch, scale=case.scale)
    assert torch.equal(strided.cpu(), attend(case)[0])


def test_empty_inputs_are_accepted() -> None:
    empty = torch.empty(0, 4, 16, device=DEVICE)
    kv = torch.randn(3, 2, 2, 4, 8, 16, device=DEVICE)
    before = kv.clone()
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    cuda.kv_write(empty, empty, kv[:, 0], none)
    batch = on_device(RaggedBatch.from_lists([0], [5], [[1]], 8))
    assert cuda.paged_attention(empty, kv[:, 0], batch, scale=1.0).shape == (0, 4, 16)
    assert torch.equal(kv, before)
