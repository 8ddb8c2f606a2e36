"""Cascade attention: a shared prefix is read once for several sequences."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.attention.cascade import PREFIX_ALIGNMENT, CascadeTuning, plan_cascade
from octavo.kernels.triton.attention.decode import decode_attention
from tests.kernels.pool import Case, make_case, naive_attention, relative_error
from tests.kernels.triton.device import DEVICE, DTYPES, INTERPRETED, TOLERANCE, on_device

SMALL = CascadeTuning(
    rows=16, tile=16, num_warps=4, num_stages=2, programs_per_multiprocessor=2, min_prefix_len=PREFIX_ALIGNMENT
)


def make_shared_case(seq_lens: list[int], common: list[int], *, block_size: int = 16, **shape: object) -> Case:
    """A case in which sequence i shares the blocks of its first common[i] tokens with sequence i - 1.

    On a GPU the sequences are repeated twenty times: with few sequences, many programs share each, and no prefix is
    read once for several.
    """
    if not INTERPRETED:
        seq_lens, common = seq_lens * 20, common * 20
    case = make_case([1] * len(seq_lens), seq_lens, block_size=block_size, **shape)  # type: ignore[arg-type]
    for i, num_tokens in enumerate(common):
        if num_tokens:
            assert num_tokens % block_size == 0 and num_tokens < min(seq_lens[i - 1 : i + 1])
            case.tables[i][: num_tokens // block_size] = case.tables[i - 1][: num_tokens // block_size]
            for rows in (case.keys, case.values):
                rows[i][:, :num_tokens] = rows[i - 1][:, :num_tokens]
    batch = RaggedBatch.from_lists([1] * len(seq_lens), seq_lens, case.tables, block_size)
    case.batch = replace(batch, common_prefix_lens=torch.tensor(common, dtype=torch.int32))
    return case


def to_device(case: Case) -> RaggedBatch:
    assert case.batch.common_prefix_lens is not None
    return replace(on_device(case.batch), common_prefix_lens=case.batch.common_prefix_lens.to(DEVICE))


def attend(case: Case, tuning: CascadeTuning | None) -> tuple[Tensor, Tensor]:
    q, batch = case.q.to(DEVICE), to_device(case)
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device=DEVICE)
    layer, sinks = case.kv.to(DEVICE)[:, 1], None if case.sinks is None else case.sinks.to(DEVICE)
    options = {"scale": case.scale, "window": 0, "decode_only": True, "sinks": sinks, "cascade": tuning}
    for _ in range(2):  # the first layer of a step, and a later one
        decode_attention(q, layer, batch, out, lse, **options)
    (schedule,) = batch.derived.values()
    assert schedule.cascade is not None
    return out.cpu(), lse.cpu()


def check(case: Case, tuning: CascadeTuning | None = SMALL) -> None:
    out, lse = attend(case, tuning)
    expected, expected_lse = naive_attention(case)
    assert relative_error(out, expected) < TOLERANCE[case.q.dtype]
    assert relative_error(lse, expected_lse) < 3e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_results_with_a_shared_prefix_are_exact(dtype: torch.dtype, sinks: bool) -> None:
    case = make_shared_case([200, 150, 333, 130, 90, 7], [0, 128, 144, 112, 64, 0], dtype=dtype, sinks=sinks)
    check(case)
    check(case, None)


@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(1, 1, 40), (2, 7, 16), (1, 8, 80), (5, 2, 64)])
def test_every_head_shape_with_a_shared_prefix(kv_heads: int, group: int, head_dim: int) -> None:
    lens, sizes = [400] * 5 + [90, 100], {"num_kv_heads": kv_heads, "group_size": group, "head_dim": head_dim}
    check(make_shared_case(lens, [0, 320, 320, 384, 320, 64, 64], **sizes, sinks=kv_heads > 1))


@pytest.mark.parametrize("block_size", [8, 64, 256])
def test_every_block_size_with_a_shared_prefix(block_size: int) -> None:
    check(make_shared_case([700, 600, 520, 515], [0, 512, 512, 512], block_size=block_size))


def test_only_the_first_sequence_of_a_group_has_its_prefix_read() -> None:
    """The other sequences' table entries of the prefix are poisoned, and not read."""
    case = make_shared_case([300, 300, 300], [0, 256, 256])
    expected, _ = naive_attention(case)
    assert case.batch.common_prefix_lens is not None
    case.batch.block_tables[case.batch.common_prefix_lens > 0, :16] = 0  # the null block is NaN
    assert relative_error(attend(case, SMALL)[0], expected) < TOLERANCE[case.q.dtype]


@pytest.mark.parametrize("num_seqs", [2, 9, 40, 130])
def test_groups_and_splits_cover_the_shared_prefix(num_seqs: int) -> None:
    rnd = random.Random(num_seqs)
    for min_prefix_len, max_common in ((64, 0), (64, 1000), (256, 4000), (512, 4000)):
        common = [0] + [rnd.choice([0, rnd.randint(0, max_common // 8) * 8]) for _ in range(num_seqs - 1)]
        if rnd.random() < 0.5:
            common = [0] + [max(common)] * (num_seqs - 1)
        batch = on_device(RaggedBatch.from_lists([1] * num_seqs, [1] * num_seqs, [[1]] * num_seqs, 16))
        batch = replace(batch, common_prefix_lens=torch.tensor(common, dtype=torch.int32, device=DEVICE))
        tuning = replace(SMALL, min_prefix_len=min_prefix_len)
        plan = plan_cascade(batch, tuning, 5, num_kv_heads=2, group_size=4, head_dim=16)
        prefixes, splits = plan.prefixes.view(-1, 4).tolist(), plan.splits.view(-1, 8).tolist()
        count = int(plan.count[0])
        assert count <= len(splits)
        slots: dict[int, tuple[int, int, int]] = {}  # slot -> (sequence, first key, end key)
        for first, size, begin, end, slot, *_ in splits[:count]:
            assert (
                2 <= size <= tuning.rows // 4
                and begin % PREFIX_ALIGNMENT == end % PREFIX_ALIGNMENT == 0
                and begin < end
            )
            assert end <= min(common[first + 1 : first + size]), "keys beyond the shared prefix"
            for i in range(size):
                assert slot + i not in slots, "two parts in one slot"
                slots[slot + i] = (first + i, begin, end)
        assert not slots or max(slots) < len(plan.partial) // (2 * 4 * 16)
        for seq, (keys, slot, step, num) in enumerate(prefixes):
            parts = [slots.pop(slot + i * step) for i in range(num)]
            assert [part[0] for part in parts] == [seq] * num
            bounds = [0, *(part[2] for part in parts)]
            assert [part[1] for part in parts] == bounds[:-1] and bounds[-1] == keys
        assert not slots, "parts that are never merged"


def test_groups_split_where_the_shared_prefix_is_much_shorter() -> None:
    batch = on_device(RaggedBatch.from_lists([1] * 8, [1] * 8, [[1]] * 8, 16))
    common = torch.tensor([0, 1024, 1024, 1024, 256, 1024, 1024, 1024], dtype=torch.int32, device=DEVICE)
    plan = plan_cascade(replace(batch, common_prefix_lens=common), SMALL, 5, num_kv_heads=1, group_size=1, head_dim=16)
    assert plan.prefixes.view(-1, 4)[:, 0].tolist() == [1024] * 8
