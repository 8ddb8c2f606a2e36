"""The Triton kernels on small shapes, against the definition and the reference.

No `test_` in the name: pytest meets these in Triton's interpreter (test_triton_interpreter.py, in a process of its own)
and on a GPU (tests/gpu/test_triton.py).
"""

from __future__ import annotations

import itertools
import math
import os
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton import ops as cuda
from octavo.kernels.triton.attention.decode_schedule import BEGIN, FEW_SHARERS, NUMBER, DecodeTuning, make_schedule
from octavo.kernels.triton.attention.prefill_hopper import _merge
from octavo.kernels.triton.attention.query_tiles import query_tiles
from octavo.kernels.triton.kv.swap import Grid, move
from tests.kernels import fixed_order
from tests.kernels.pool import Case, make_case, naive_attention, norm_error, relative_error

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if INTERPRETED:
    fixed_order.install()
# The interpreter multiplies bfloat16 as the integers that it keeps them in.
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Of the number that is furthest off; and of all of them together, as docs/gpu-kernels.md has it:"""
NORM_TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
DECODE = ([1, 1, 1, 1], [70, 1, 300, 64])
MIXED = ([5, 1, 1, 7, 33], [5, 1, 90, 130, 40])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def on_device(batch: RaggedBatch) -> RaggedBatch:
    return RaggedBatch(
        batch.positions.to(DEVICE),
        batch.slot_mapping.to(DEVICE),
        batch.query_start.to(DEVICE),
        batch.seq_lens.to(DEVICE),
        batch.block_tables.to(DEVICE),
        batch.max_query_len,
        batch.max_seq_len,
        fixed_split=batch.fixed_split,
    )


def synchronize() -> None:
    """Before the host reads what the device writes into pinned memory."""
    if not INTERPRETED:
        torch.cuda.synchronize()


def attend(case: Case, window: int = 0) -> tuple[Tensor, Tensor]:
    out, lse = cuda.paged_attention(
        case.q.to(DEVICE),
        case.kv.to(DEVICE)[:, 1],
        on_device(case.batch),
        scale=case.scale,
        window=window,
        return_lse=True,
    )
    return out.cpu(), lse.cpu()


def check(case: Case, window: int = 0) -> None:
    """All but the tokens' own slots is NaN in the case's pool."""
    out, lse = attend(case, window)
    expected, expected_lse = naive_attention(case, window)
    assert relative_error(out, expected) < TOLERANCE[case.q.dtype]
    assert norm_error(out, expected) < NORM_TOLERANCE[case.q.dtype]
    assert relative_error(lse, expected_lse) < 3e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_attention_of_every_dtype(lens: tuple[list[int], list[int]], dtype: torch.dtype) -> None:
    check(make_case(*lens, dtype=dtype))


@pytest.mark.parametrize(("block_size", "window"), [(8, 0), (256, 0), (16, 1), (16, 65), (64, 100)])
@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_attention_of_every_block_size_and_window(
    lens: tuple[list[int], list[int]], block_size: int, window: int
) -> None:
    check(make_case(*lens, block_size=block_size), window)


@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(1, 1, 40), (2, 7, 16), (1, 16, 80), (5, 1, 64)])
@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_attention_of_every_head_shape(
    lens: tuple[list[int], list[int]], kv_heads: int, group: int, head_dim: int
) -> None:
    check(make_case(*lens, num_kv_heads=kv_heads, group_size=group, head_dim=head_dim))


@pytest.mark.parametrize(("group", "head_dim"), [(9, 24), (10, 56), (11, 72), (13, 136), (14, 200), (15, 248)])
def test_attention_of_sizes_that_nothing_divides(group: int, head_dim: int) -> None:
    """Both kernels in one batch."""
    check(make_case([5, 1], [9, 70], num_kv_heads=1, group_size=group, head_dim=head_dim, dtype=torch.float16))


def test_many_programs_share_one_sequence_and_one_program_has_many() -> None:
    check(make_case([1], [1500], num_kv_heads=1, group_size=1))
    check(make_case([1] * 20, [3] * 19 + [70], num_kv_heads=1, group_size=2))
    check(make_case([1] * 40, [3] * 19 + [170] + [5] * 20, num_kv_heads=2, group_size=2))


@pytest.mark.parametrize("gap", [0, 1, 3])
@pytest.mark.parametrize(("num_seqs", "programs"), [(1, 4), (1, 16), (3, 40), (40, 4)])
def test_programs_share_out_every_tile_once(num_seqs: int, programs: int, gap: int) -> None:
    rnd = random.Random(num_seqs)
    for longest in (0, 20, 300, 3000):
        seq_lens = [rnd.choice([0, 1, rnd.randint(0, longest)]) if longest else 0 for _ in range(num_seqs)]
        batch = on_device(RaggedBatch.from_lists([1] * num_seqs, [1] * num_seqs, [[1]] * num_seqs, 16))
        batch.seq_lens[:] = torch.tensor(seq_lens)
        tuning = DecodeTuning(16, 1, 2, programs, gap=gap)
        schedule = make_schedule(batch, tuning, 0, num_kv_heads=3, group_size=1, head_dim=16, window=0)
        num_tiles, stretch = schedule.totals[:2].tolist()

        segments, place = [], 0
        for seq, n in enumerate(seq_lens):
            if n:
                first = place + gap
                place = first + math.ceil(n / 16)
                segments.append([first, place, n, seq, seq])
        assert num_tiles == place
        assert schedule.segments[: len(segments), :5].tolist() == segments

        starts = schedule.starts.tolist()
        begins = [line[BEGIN.value] for line in starts]
        assert begins[-1] == 3 * num_tiles
        owners: dict[tuple[int, int], list[int]] = {}
        for program, (begin, end) in enumerate(itertools.pairwise(begins)):
            assert begin <= end <= begin + stretch + gap
            if begin < end:
                number = starts[program][NUMBER.value]
                assert starts[program][:5] == segments[number]
                assert segments[number][0] <= begin % num_tiles < segments[number][1]
            for head, (number, (first, last, *_)) in itertools.product(range(3), enumerate(segments)):
                if begin < head * num_tiles + last and end > head * num_tiles + first:
                    owners.setdefault((head, number), []).append(program)
        assert len(owners) == 3 * len(segments)
        merges = [
            [segments[number][3], head, own[0], own[-1], int(begins[own[0]] != head * num_tiles + segments[number][0])]
            for (head, number), own in owners.items()
            if len(own) > 1
        ]
        found = [column for column in schedule.merges.T.tolist() if column[0] >= 0]
        assert len(schedule.merges[0]) == (3 * num_seqs if schedule.num_sharers > FEW_SHARERS else 0)
        assert sorted(found) == (sorted(merges) if schedule.num_sharers > FEW_SHARERS else [])


@pytest.mark.parametrize("query_lens", [[1, 0, 1], [3, 0, 1]], ids=["decode", "mixed"])
def test_a_sequence_without_a_query_is_left_alone(query_lens: list[int]) -> None:
    check(make_case(query_lens, [9, 5, 40]))


def test_a_token_without_keys_gets_zero() -> None:
    """A padding row that has a query but no length, beside a real one."""
    case = make_case([1, 1], [40, 1])
    case.batch.seq_lens[1] = 0
    out, lse = attend(case)
    assert relative_error(out[:1], naive_attention(case)[0][:1]) < 3e-6
    assert bool((out[1] == 0).all()) and bool((lse[1] == -torch.inf).all())


def test_the_schedule_is_made_once_a_step() -> None:
    case = make_case(*MIXED)
    batch, kv = on_device(case.batch), case.kv.to(DEVICE)
    first = cuda.paged_attention(case.q.to(DEVICE), kv[:, 1], batch, scale=1.0)
    derived = dict(batch.derived)
    second = cuda.paged_attention(case.q.to(DEVICE), kv[:, 1], batch, scale=1.0)
    assert len(derived) == 2 and all(batch.derived[key] is value for key, value in derived.items())
    assert torch.equal(first, second)


@pytest.mark.parametrize("skip_single", [False, True])
@pytest.mark.parametrize("queries", [4, 21])
def test_tiles_of_queries_come_longest_first_and_cover_everything(queries: int, skip_single: bool) -> None:
    rnd = random.Random(queries)
    for num_seqs in (1, 2, 7, 40):
        query_lens = [rnd.choice([0, 1, 2, 7, 16, 33]) for _ in range(num_seqs)]
        seq_lens = [n + rnd.choice([0, 3, 16]) for n in query_lens]
        batch = on_device(RaggedBatch.from_lists(query_lens, seq_lens, [[1] * 4] * num_seqs, 16))
        found = query_tiles(batch, queries, 8, sum(query_lens), skip_single=skip_single)
        count, tiles = int(found.count), found.tiles.tolist()
        expected, token = [], 0
        for seq, (n, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            if n > int(skip_single):
                expected += [(seq, token + i, min(queries, n - i), seq_len - n + i) for i in range(0, n, queries)]
            token += n
        expected.sort(key=lambda tile: (-math.ceil((tile[2] + tile[3]) / 8), tile[0], -tile[1]))
        assert [tuple(tile) for tile in tiles[:count]] == expected
        assert all(seq == -1 for seq, *_ in tiles[count:])


@pytest.mark.parametrize("window", [0, 600])
@pytest.mark.parametrize("query_len", [1, 3], ids=["decode", "mixed"])
def test_with_a_fixed_split_a_sequence_gets_the_same_bits_in_any_batch(query_len: int, window: int) -> None:
    lens = [1300, 5, 512, 700]
    case = make_case([query_len, 1, 1, 1], lens, num_kv_heads=1, group_size=2, block_size=16)
    case.batch = replace(case.batch, fixed_split=True)
    together = attend(case, window)
    expected, expected_lse = naive_attention(case, window)
    assert relative_error(together[0], expected) < 3e-6 and relative_error(together[1], expected_lse) < 3e-6
    begin = 0
    for s, n in enumerate([query_len, 1, 1, 1]):
        batch = RaggedBatch.from_lists([n], lens[s : s + 1], case.tables[s : s + 1], 16)
        alone = Case(case.q[begin : begin + n], case.kv, replace(batch, fixed_split=True), [], [], [], case.scale)
        for of_both, own in zip(together, attend(alone, window), strict=True):
            assert torch.equal(of_both[begin : begin + n], own)
        begin += n


@pytest.mark.parametrize(("dtype", "window"), [*((dtype, 0) for dtype in DTYPES), (torch.float16, 50)], ids=str)
def test_with_a_fixed_split_order_chunks_and_cached_prefixes_change_no_bit(dtype: torch.dtype, window: int) -> None:
    """Prompts as a whole, beside others that decode: then in another order, one by one, in chunks, and behind what
    another sequence has in its blocks. (A chunk of one token is decoded, by the other kernel.)"""
    size, lens, query_lens = 16, [70, 45, 600, 130], [70, 45, 1, 1]
    case = make_case(query_lens, lens, num_kv_heads=1, group_size=2, block_size=size, dtype=dtype)
    queries = case.q.split(query_lens)

    def run(*parts: tuple[int, int, int]) -> list[tuple[Tensor, Tensor]]:
        """(sequence, first and last position) of each -> its rows of the result."""
        rows = [(s, begin - lens[s] + query_lens[s], end - lens[s] + query_lens[s]) for s, begin, end in parts]
        counts, ends = [end - begin for _, begin, end in parts], [end for _, _, end in parts]
        batch = RaggedBatch.from_lists(counts, ends, [case.tables[s] for s, _, _ in parts], size)
        q = torch.cat([queries[s][begin:end] for s, begin, end in rows])
        now = Case(q, case.kv, replace(batch, fixed_split=True), [], [], [], case.scale)
        return list(zip(*(x.split(counts) for x in attend(now, window)), strict=True))

    all_parts = [(s, n - num, n) for s, (n, num) in enumerate(zip(lens, query_lens, strict=True))]
    whole = run(*all_parts)
    out, lse = (torch.cat(parts) for parts in zip(*whole, strict=True))
    expected, expected_lse = naive_attention(case, window)
    assert norm_error(out, expected) < NORM_TOLERANCE[dtype] and norm_error(lse, expected_lse) < 3e-6

    used = {block for table in case.tables for block in table}
    copy = next(block for block in range(1, case.kv.shape[0]) if block not in used)
    case.kv[copy] = case.kv[case.tables[0][-1]]  # the last block of a sequence that has found all others in the cache
    case.tables.append([*case.tables[0][:-1], copy])
    lens, query_lens, queries = [*lens, 70], [*query_lens, 70], (*queries, queries[0])

    def same(found: list[tuple[Tensor, Tensor]], *parts: tuple[int, int, int]) -> None:
        for (s, begin, end), results in zip(parts, found, strict=True):
            first = begin - lens[s] + query_lens[s]
            for mine, wanted in zip(results, whole[s % 4], strict=True):
                assert torch.equal(mine, wanted[first : first + end - begin]), (s, begin, end)

    for parts in (
        all_parts[::-1],
        *([part] for part in all_parts),
        all_parts[2:],  # no prompt beside those that decode
        [all_parts[3], (0, 0, 20), all_parts[2]],
        [(0, 20, 57), (1, 12, 45)],
        [(0, 57, 70)],
        [(4, 64, 70), all_parts[2], (1, 0, 12)],
    ):
        same(run(*parts), *parts)


def test_more_parts_than_are_merged_at_a_time() -> None:
    """Of 18 pieces, 16 and then 2. A program has several of one sequence, and then some of the next."""
    case = make_case([1, 1], [17 * 512 + 3, 6 * 512 + 5], num_kv_heads=1, group_size=2, block_size=16)
    case.batch = replace(case.batch, fixed_split=True)
    check(case)


@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_blocks_before_the_window_may_be_released(lens: tuple[list[int], list[int]]) -> None:
    """Their entries in the table are 0 then, the null block, which is NaN here."""
    window = 20
    case = make_case(*lens)
    for s, (query_len, seq_len) in enumerate(zip(*lens, strict=True)):
        case.batch.block_tables[s, : max(seq_len - query_len - window + 1, 0) // 4] = 0
    check(case, window)


def test_parts_of_a_tile_are_merged_by_their_weights() -> None:
    """4 programs for 1 item of 9 tiles of keys: 4 parts, one of which no key of some rows is in."""
    num_parts, heads, head_dim, num_queries = 4, 2, 40, 3
    tiles = torch.tensor([[0, 1, num_queries, 70]], dtype=torch.int32, device=DEVICE)
    count = torch.ones(1, dtype=torch.int32, device=DEVICE)
    partial = torch.randn(num_parts, 8, 64, device=DEVICE)
    logs = torch.randn(num_parts, 8, device=DEVICE)
    logs[1, :4] = -1e30
    out, lse = torch.zeros(5, heads, head_dim, device=DEVICE), torch.zeros(5, heads, device=DEVICE)
    _merge[(2, 8)](
        out, lse, partial, logs, tiles, count, num_parts,
        NUM_HEADS=heads, PACKED=heads, HEAD_DIM=head_dim, HEAD_DIM_PADDED=64, KEYS=8, ROWS=8, PARTS=2, WITH_LSE=True,
    )  # fmt: skip
    share = (logs.double() * math.log(2)).softmax(0)
    rows = (share[:, :, None] * partial.double()).sum(0)[: num_queries * heads, :head_dim]
    expected = torch.zeros(5, heads, head_dim, dtype=torch.float64, device=DEVICE)
    expected[1:4] = rows.view(num_queries, heads, head_dim)
    assert close(out, expected)
    total = (logs.double() * math.log(2)).logsumexp(0)[: num_queries * heads]
    assert close(lse[1:4], total.view(num_queries, heads))


def test_a_query_may_be_a_view_of_a_fused_projection() -> None:
    case = make_case(*DECODE)
    fused = torch.randn(case.q.shape[0], case.q.shape[1] + 4, case.q.shape[2], device=DEVICE)
    fused[:, 2:-2] = case.q.to(DEVICE)
    kv, batch = case.kv.to(DEVICE), on_device(case.batch)
    strided = cuda.paged_attention(fused[:, 2:-2], kv[:, 1], batch, scale=case.scale)
    assert torch.equal(strided.cpu(), attend(case)[0])


# -- the other kernels ------------------------------------------------------------------------------------------------


def close(actual: Tensor, expected: Tensor, tolerance: float = 3e-6) -> bool:
    return relative_error(actual.cpu(), expected.cpu().double()) < tolerance


@pytest.mark.parametrize("size", [40, 576])
def test_norms(size: int) -> None:
    x, residual = torch.randn(2, 5, size, device=DEVICE)
    weight = torch.randn(size, device=DEVICE)
    normed, total = cuda.add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_total = reference.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-5)
    assert close(normed, expected) and close(total, expected_total)
    assert close(cuda.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5))


def test_a_wider_weight_is_applied_before_rounding() -> None:
    x, residual = torch.randn(2, 5, 40, device=DEVICE).half()
    weight = torch.randn(40, device=DEVICE)
    expected, _ = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(cuda.add_rms_norm(x, residual, weight, 1e-5)[0], expected)

    q, k, v = torch.randn(6, 5 + 3 + 3, 40, device=DEVICE).half().split([5, 3, 3], dim=1)
    positions, slots = torch.randint(99, (6,), device=DEVICE), torch.randperm(32, device=DEVICE)[:6] + 8
    table = reference.rope_table(40, 99, 10000.0, device=DEVICE)
    kv = torch.zeros(5, 2, 3, 8, 40, device=DEVICE).half()
    wanted = kv.clone()
    norms = {"q_norm": weight, "k_norm": weight + 1, "eps": 1e-5}
    expected = reference.rope_kv_write(q, k, v, positions, table, wanted, slots, **norms)
    out = cuda.rope_kv_write(q, k, v, positions, table, kv, slots, **norms)
    assert close(out, expected, 1e-3) and close(kv, wanted, 1e-3)  # all but a last digit, here and there
    assert (out == expected).float().mean() > 0.9 and (kv == wanted).float().mean() > 0.9


def test_gated_activations() -> None:
    gate_up = torch.randn(3, 2 * 1100, device=DEVICE) * 2
    assert close(cuda.silu_mul(gate_up), reference.silu_mul(gate_up.double()))
    assert close(cuda.gelu_mul(gate_up), reference.gelu_mul(gate_up.double()))


def test_rope_and_writing_alone_and_in_one() -> None:
    q, k, v = torch.randn(6, 5 + 3 + 3, 40, device=DEVICE).split([5, 3, 3], dim=1)
    positions = torch.randint(99, (6,), device=DEVICE)
    table = reference.rope_table(40, 99, 10000.0, device=DEVICE)
    turned_q, turned_k = reference.apply_rope(q, k, positions, table)

    before = torch.randn(5, 2, 2, 3, 8, 40, device=DEVICE)
    slots = torch.randperm(32, device=DEVICE)[:6] + 8
    expected, kv = before.clone(), before.clone()
    reference.kv_write(turned_k, v, expected[:, 1], slots)
    cuda.kv_write(turned_k, v, kv[:, 1], slots)
    assert torch.equal(kv, expected)

    kv = before.clone()
    assert close(cuda.rope_kv_write(q, k, v, positions, table, kv[:, 1], slots), turned_q)
    assert close(kv, expected) and torch.equal(kv[:, 0], expected[:, 0])

    kv, q_norm, k_norm = before.clone(), torch.randn(40, device=DEVICE), torch.randn(40, device=DEVICE)
    out = cuda.rope_kv_write(q, k, v, positions, table, kv[:, 1], slots, q_norm=q_norm, k_norm=k_norm, eps=1e-5)
    normed_q, normed_k = reference.rms_norm(q, q_norm, 1e-5), reference.rms_norm(k, k_norm, 1e-5)
    wide_q, wide_k = reference.apply_rope(normed_q, normed_k, positions, table)
    reference.kv_write(wide_k, v, expected[:, 1], slots)
    assert close(out, wide_q) and close(kv, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_block_copy_reads_all_before_it_writes_any(dtype: torch.dtype) -> None:
    kv = torch.randn(8, 3, 2, 2, 4, 8, device=DEVICE).to(dtype)
    expected = kv.clone()
    src, dst = torch.tensor([1, 2, 3, 1], device=DEVICE), torch.tensor([2, 3, 1, 6], device=DEVICE)
    reference.block_copy(expected, src, dst)
    cuda.block_copy(kv, src, dst)
    assert torch.equal(kv, expected)
    cuda.block_copy(kv, src[:0], dst[:0])
    assert torch.equal(kv, expected)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 2, 2, 4, 8), torch.float16), ((2, 2, 1, 4, 6), torch.float32), ((1, 2, 1, 8, 8), torch.float16)],
    ids=["pieces", "a rest", "one piece"],
)
def test_swaps_move_whole_blocks_and_nothing_else(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of more pieces than programs, and of blocks that a piece does not divide; host_kv is larger and elsewhere."""
    host = torch.full((12, *shape), -1.0, dtype=dtype, pin_memory=not INTERPRETED)
    kv = torch.randn(9, *shape, device=DEVICE).to(dtype)
    original, before = kv.clone(), host.clone()
    ids = torch.tensor([[5, 2, 7, 1, 8], [11, 0, 3, 1, 6]], device=DEVICE)
    for grid in (Grid(2, 512, 4), Grid(), Grid(64, 256, 1)):
        host.copy_(before)
        kv.copy_(original)
        assert move(kv, host, ids[0], ids[1], grid)
        synchronize()
        assert torch.equal(host[ids[1].cpu()], original[ids[0]].cpu()) and torch.equal(kv, original)
        others = torch.tensor([2, 4, 5, 7, 8, 9, 10])
        assert torch.equal(host[others], before[others])
        kv[ids[0]] = 0.0  # somebody else's now
        expected = kv.clone()
        targets = torch.tensor([0, 8, 3, 2, 6], device=DEVICE)
        reference.swap_in(host, expected, ids[1], targets)
        assert move(host, kv, ids[1], targets, grid)
        assert torch.equal(kv, expected) and torch.equal(kv[targets], original[ids[0]])


def test_swaps_that_the_kernel_leaves_to_torch() -> None:
    """Blocks of no whole number of accesses; and nothing at all."""
    kv, host = torch.randn(5, 1, 2, 1, 1, 3, device=DEVICE), torch.zeros(4, 1, 2, 1, 1, 3, pin_memory=not INTERPRETED)
    original, ids = kv.clone(), torch.tensor([[4, 1], [0, 3]], device=DEVICE)
    assert not move(kv, host, ids[0], ids[1], Grid())
    cuda.swap_out(kv, host, ids[0], ids[1])
    assert torch.equal(host[[0, 3]], original[[4, 1]].cpu())
    cuda.swap_in(host, kv, ids[1], ids[0].flip(0))
    assert torch.equal(kv[[1, 4]], original[[4, 1]])
    kv, host = torch.randn(2, 5, 1, 2, 1, 4, 4, device=DEVICE)
    before = kv.clone()
    assert move(kv, host, ids[0, :0], ids[1, :0], Grid())
    assert torch.equal(kv, before)


def test_nothing_to_do_is_fine() -> None:
    empty = torch.empty(0, 4, 16, device=DEVICE)
    kv = torch.randn(3, 2, 2, 4, 8, 16, device=DEVICE)
    before = kv.clone()
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    cuda.kv_write(empty, empty, kv[:, 0], none)
    batch = on_device(RaggedBatch.from_lists([0], [5], [[1]], 8))
    assert cuda.paged_attention(empty, kv[:, 0], batch, scale=1.0).shape == (0, 4, 16)
    assert torch.equal(kv, before)


def test_the_module_has_every_operation_of_the_cpus() -> None:
    from octavo.kernels.cpu import ops as cpu

    assert set(cpu.__all__) <= set(cuda.__all__) and all(hasattr(cuda, name) for name in cuda.__all__)
