"""Paged attention: the reference against the definition in float64, the CPU's against the reference."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import reference
from octavo.kernels.cpu import attention
from octavo.kernels.cpu import ops as cpu
from octavo.kernels.metadata import RaggedBatch
from tests.kernels.pool import BOTH, Case, make_case, naive_attention, relative_error

MIXED = ([5, 1, 1, 7, 3], [5, 1, 9, 30, 11])  # prompt, first token's decode, decode, chunk, chunk


def attend(ops: ModuleType, case: Case, window: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"window": window, "return_lse": True, "sinks": case.sinks}
    out, lse = ops.paged_attention(case.q, case.kv_layer, case.batch, scale=case.scale, **options)
    return out, lse


@BOTH
@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 80, 128])
def test_every_head_dim(ops: ModuleType, head_dim: int) -> None:
    case = make_case(*MIXED, head_dim=head_dim)
    out, lse = attend(ops, case)
    expected, expected_lse = naive_attention(case)
    assert relative_error(out, expected) < 2e-6
    assert relative_error(lse, expected_lse) < 2e-6


@BOTH
@pytest.mark.parametrize(("num_kv_heads", "group_size"), [(1, 1), (3, 1), (1, 7), (3, 3), (2, 8), (1, 16)])
def test_every_sharing_of_kv_heads(ops: ModuleType, num_kv_heads: int, group_size: int) -> None:
    case = make_case(*MIXED, num_kv_heads=num_kv_heads, group_size=group_size)
    assert relative_error(attend(ops, case)[0], naive_attention(case)[0]) < 2e-6


@BOTH
@pytest.mark.parametrize("block_size", [1, 2, 8, 16, 256])
@pytest.mark.parametrize("window", [0, 1, 4, 9, 100])
def test_every_block_size_and_window(ops: ModuleType, block_size: int, window: int) -> None:
    case = make_case(*MIXED, block_size=block_size)
    out, lse = attend(ops, case, window)
    expected, expected_lse = naive_attention(case, window)
    assert relative_error(out, expected) < 2e-6
    assert relative_error(lse, expected_lse) < 2e-6


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 256])
@pytest.mark.parametrize("window", [0, 9])
def test_int8_keys_and_values(ops: ModuleType, dtype: torch.dtype, head_dim: int, window: int) -> None:
    """Exact products of what the cache holds: nothing is lost but the rounding of the result."""
    case = make_case(*MIXED, head_dim=head_dim, dtype=dtype, int8_kv=True)
    out, lse = attend(ops, case, window)
    expected, expected_lse = naive_attention(case, window)
    assert out.dtype == dtype
    assert relative_error(out, expected) < (2e-6 if dtype == torch.float32 else 2e-2)
    assert relative_error(lse, expected_lse) < (2e-6 if dtype == torch.float32 else 4e-3)


@BOTH
@pytest.mark.parametrize("window", [0, 1, 9])
@pytest.mark.parametrize("int8_kv", [False, True])
@pytest.mark.parametrize(("num_kv_heads", "group_size"), [(1, 1), (2, 3), (1, 16)])
def test_a_sink_is_one_more_score_of_its_head(
    ops: ModuleType, num_kv_heads: int, group_size: int, int8_kv: bool, window: int
) -> None:
    case = make_case(*MIXED, num_kv_heads=num_kv_heads, group_size=group_size, int8_kv=int8_kv, sinks=True)
    out, lse = attend(ops, case, window)
    expected, expected_lse = naive_attention(case, window)
    assert relative_error(out, expected) < 2e-6
    assert relative_error(lse, expected_lse) < 2e-6


@BOTH
@pytest.mark.parametrize("sink", [-200.0, 200.0])
def test_sinks_far_from_all_scores(ops: ModuleType, sink: float) -> None:
    case = make_case(*MIXED)
    expected, expected_lse = attend(ops, case)
    out, lse = attend(ops, dataclasses.replace(case, sinks=torch.full((case.q.shape[1],), sink)))
    if sink < 0:
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    else:
        assert not out.any() and (lse == sink).all()


@pytest.mark.parametrize("sinks", [False, True])
def test_the_reference_is_exact_in_float64(sinks: bool) -> None:
    case = make_case(*MIXED, dtype=torch.float64, sinks=sinks)
    out, lse = attend(reference, case)
    expected, expected_lse = naive_attention(case)
    assert out.dtype == lse.dtype == torch.float64
    assert relative_error(out, expected) < 1e-14
    assert relative_error(lse, expected_lse) < 1e-14


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sinks", [False, True])
def test_cpu_attention_supports_every_dtype(dtype: torch.dtype, sinks: bool) -> None:
    case = make_case(*MIXED, dtype=dtype, head_dim=64, sinks=sinks)
    out, lse = attend(cpu, case)
    assert out.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    assert relative_error(out, naive_attention(case)[0]) < tolerance
    assert relative_error(lse, naive_attention(case)[1]) < (1e-12 if dtype == torch.float64 else 1e-4)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_cpu_attention_equals_the_reference(data: st.DataObject) -> None:
    lens = data.draw(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=6))
    query_lens = [1 if q % 3 else q for q, _ in lens]
    case = make_case(
        query_lens,
        [q + context for q, (_, context) in zip(query_lens, lens, strict=True)],
        num_kv_heads=data.draw(st.integers(1, 3)),
        group_size=data.draw(st.sampled_from([1, 2, 3, 7])),
        head_dim=data.draw(st.sampled_from([8, 24, 64])),
        block_size=data.draw(st.sampled_from([1, 2, 8, 16, 256])),
        seed=data.draw(st.integers(0, 1000)),
        sinks=data.draw(st.booleans()),
    )
    window = data.draw(st.sampled_from([0, 0, 1, 50]))
    out, lse = attend(cpu, case, window)
    expected, expected_lse = attend(reference, case.double, window)
    assert relative_error(out, expected) < 5e-6
    # The lse may be near 0 everywhere, so its error is absolute; scores are of the order of 1.
    assert float((lse - expected_lse).abs().max()) < 1e-5


@BOTH
def test_chunked_prefill_equals_whole_prefill(ops: ModuleType) -> None:
    whole = make_case([37], [37])
    expected = attend(ops, whole)[0]
    rows = []
    for start, end in ((0, 1), (1, 6), (6, 36), (36, 37)):
        batch = RaggedBatch.from_lists([end - start], [end], whole.tables, 4)
        chunk = dataclasses.replace(whole, q=whole.q[start:end], batch=batch)
        rows.append(attend(ops, chunk)[0])
    assert relative_error(torch.cat(rows), expected.double()) < 2e-6


@BOTH
def test_batched_decode_equals_single_decode(ops: ModuleType) -> None:
    """Contexts of 1 to 300 tokens, so that the CPU makes several groups, some of them padded."""
    seq_lens = [300, 1, 33, 290, 64, 63, 17, 280, 5]
    together = make_case([1] * len(seq_lens), seq_lens, block_size=16, head_dim=64, num_kv_heads=3)
    out = attend(ops, together)[0]
    for s, seq_len in enumerate(seq_lens):
        batch = RaggedBatch.from_lists([1], [seq_len], [together.tables[s]], 16)
        alone = dataclasses.replace(together, q=together.q[s : s + 1], batch=batch)
        assert relative_error(out[s : s + 1], attend(ops, alone)[0].double()) < 2e-6, s


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([15, 100, 3, 95], [[100, 95], [15, 3]]),  # 24 KiB a block: padding 15 to 100 costs more than a call
        ([300, 300], [[300], [300]]),  # more than GROUP_BYTES together
        ([4, 4, 4], [[4, 4, 4]]),
        ([], []),
    ],
)
def test_contexts_of_similar_length_are_grouped(lengths: list[int], groups: list[list[int]]) -> None:
    spans = [attention._Span(s, s, s + 1, 0, n, 0, n) for s, n in enumerate(lengths)]
    assert [[span.num_blocks for span in g] for g in attention._group_by_length(spans, block_bytes=24 << 10)] == groups


@BOTH
def test_sequences_that_share_blocks(ops: ModuleType) -> None:
    """A forked sequence reads its parent's blocks: same table, same query, same result."""
    case = make_case([1], [10])
    batch = RaggedBatch.from_lists([1, 1], [10, 10], case.tables * 2, 4)
    out = attend(ops, dataclasses.replace(case, q=case.q.repeat(2, 1, 1), batch=batch))[0]
    assert torch.equal(out[0], out[1])
    assert relative_error(out[:1], naive_attention(case)[0]) < 2e-6


@BOTH
def test_padding_gives_zeros_and_leaves_other_rows_unchanged(ops: ModuleType) -> None:
    """Sequences without queries and sequences of length 0, as in the padding of CUDA graphs."""
    case = make_case([3, 1], [3, 9])
    expected, expected_lse = attend(ops, case)
    padded = RaggedBatch(
        positions=torch.tensor([0, 1, 2, 8, 0]),
        slot_mapping=torch.zeros(5, dtype=torch.int64),
        query_start=torch.tensor([0, 3, 3, 4, 5], dtype=torch.int32),
        seq_lens=torch.tensor([3, 7, 9, 0], dtype=torch.int32),
        block_tables=torch.tensor([[*case.tables[0], 0, 0], [0, 0, 0], case.tables[1], [0, 0, 0]], dtype=torch.int32),
        max_query_len=3,
        max_seq_len=9,
    )
    q = torch.cat((case.q, torch.full((1, *case.q.shape[1:]), 7.0)))
    out, lse = attend(ops, dataclasses.replace(case, q=q, batch=padded))
    assert torch.equal(out[:4], expected)
    assert torch.equal(lse[:4], expected_lse)
    assert torch.equal(out[4:], torch.zeros_like(out[4:]))
    assert bool((lse[4:] == -torch.inf).all())


@BOTH
def test_blocks_before_the_sliding_window_are_not_read(ops: ModuleType) -> None:
    case = make_case([1, 2], [40, 30])
    expected = attend(ops, case, window=6)[0]
    for s, first_key in ((0, 34), (1, 23)):
        case.batch.block_tables[s, : first_key // 4] = 0  # freed: the null block, full of NaN
    case.batch.derived.clear()
    assert torch.equal(attend(ops, case, window=6)[0], expected)


@pytest.mark.parametrize("sinks", [False, True])
def test_merged_parts_equal_attention_over_all_keys(sinks: bool) -> None:
    """Attention over keys [0, 24), with the sinks, and [24, 30), merged, is attention over keys [0, 30)."""
    case = make_case([1], [30], dtype=torch.float64, sinks=sinks)
    expected, expected_lse = attend(reference, case)
    parts = []
    for table, length, own in ((case.tables[0][:6], 24, case.sinks), (case.tables[0][6:], 6, None)):
        batch = RaggedBatch.from_lists([1], [length], [table], 4)
        parts.append(attend(reference, dataclasses.replace(case, batch=batch, sinks=own)))
    empty = (torch.zeros_like(expected), torch.full_like(expected_lse, -torch.inf))
    outs, lses = zip(*parts, empty, strict=True)
    out, lse = reference.merge_attention(torch.stack(outs), torch.stack(lses))
    assert relative_error(out, expected) < 1e-14
    assert relative_error(lse, expected_lse) < 1e-14


def test_merging_parts_without_keys_gives_zeros() -> None:
    out, lse = reference.merge_attention(torch.zeros(2, 1, 3, 4), torch.full((2, 1, 3), -torch.inf))
    assert torch.equal(out, torch.zeros(1, 3, 4))
    assert bool((lse == -torch.inf).all())


def test_large_scores_do_not_overflow() -> None:
    case = make_case([3, 1], [9, 20])
    case.q.mul_(300.0)
    for ops in (reference, cpu):
        assert relative_error(attend(ops, case)[0], naive_attention(case)[0]) < 1e-4


def test_a_view_of_some_heads_falls_back_to_the_reference() -> None:
    """The rows of one head of a larger KV cache are not contiguous blocks; its attention is still correct."""
    case = make_case(*MIXED, num_kv_heads=2, sinks=True)
    assert case.sinks is not None
    one_head = dataclasses.replace(case, q=case.q[:, :3], kv=case.kv[:, :, :, :1], sinks=case.sinks[:3])
    assert torch.equal(attend(cpu, one_head)[0], attend(reference, one_head)[0])
    sliced = dataclasses.replace(case, kv=torch.cat((case.kv, case.kv), dim=-1)[..., :16])
    assert torch.equal(attend(cpu, sliced)[0], attend(reference, sliced)[0])
    assert relative_error(attend(cpu, sliced)[0], naive_attention(case)[0]) < 2e-6


def test_the_plan_of_a_batch_is_shared_by_all_layers() -> None:
    case = make_case(*MIXED)
    case.kv[:, 0] = case.kv[:, 1].flip(-1)
    first = attend(cpu, case)[0]
    (plan,) = case.batch.derived.values()
    other = cpu.paged_attention(case.q.flip(-1), case.kv[:, 0], case.batch, scale=case.scale)
    assert list(case.batch.derived.values()) == [plan]
    assert relative_error(other.flip(-1), first.double()) < 2e-6


def test_layers_with_and_without_a_sliding_window_share_a_batch() -> None:
    case = make_case(*MIXED)
    for window in (0, 3, 0):
        assert relative_error(attend(cpu, case, window)[0], naive_attention(case, window)[0]) < 2e-6
