"""The figures of the paper (SOSP'23) and published walk-throughs of it, with their block ids."""

from __future__ import annotations

from hashlib import sha256

import pytest

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import BlockCopy, StepPlan, TableWrite
from octavo.core.request import Sequence
from octavo.core.types import block_hashes, block_key
from tests.core.lab import Worlds, arrange, fork, sequence


def filled(cache: KVCacheManager, seq: Sequence) -> list[tuple[int, int]]:
    """The paper's block table: (physical block, filled slots)."""
    size = cache.block_size
    return [(b, min(size, seq.num_computed - i * size)) for i, b in enumerate(seq.block_ids)]


def compute(cache: KVCacheManager, seq: Sequence, count: int, plan: StepPlan | None = None) -> StepPlan:
    """`count` positions are computed, and the sequence then knows one token more than it has computed."""
    plan = StepPlan() if plan is None else plan  # an empty plan is falsy
    if not seq.block_ids:
        cache.attach(seq, cache.prefixes.lookup(seq))
        count -= seq.num_computed
    cache.grow(seq, count, plan)
    seq.num_computed += count
    missing = seq.num_computed + 1 - len(seq.token_ids)
    seq.token_ids.extend(range(100, 100 + max(0, missing)))
    cache.prefixes.seal(seq)
    return plan


def test_figure_6_a_request_through_prompt_and_two_decode_steps(world: Worlds) -> None:
    """Seven prompt tokens lie in blocks 7 and 1. The first decode fills the last slot, the second allocates block 3."""
    lab = world(8, block_size=4)
    arrange(lab.pool, 7, 1, 3)
    request = lab.add("fathers", [4, 2, 1, 0, 3, 3, 1], 8)
    plan = lab.plan()
    (seq,) = request.sequences
    assert filled(lab.cache, seq) == [(7, 4), (1, 3)]
    assert plan.table_writes == [TableWrite(seq.row, 0, (7, 1))]
    lab.land()

    plan = lab.plan()
    assert filled(lab.cache, seq) == [(7, 4), (1, 4)]  # 3 -> 4
    assert plan.table_writes == []
    lab.land()

    plan = lab.plan()
    assert filled(lab.cache, seq) == [(7, 4), (1, 4), (3, 1)]
    assert plan.table_writes == [TableWrite(seq.row, 2, (3,))]


def test_figure_7_two_requests_side_by_side(world: Worlds) -> None:
    """Logical neighbours need not be physical neighbours, and both requests use the same pool."""
    lab = world(8, block_size=4)
    arrange(lab.pool, 7, 1, 5, 2, 3, 8)
    a = lab.add("A", [4, 2, 1, 0, 3, 3, 1], 6)
    b = lab.add("B", [1, 1, 0, 2, 4, 0], 6)
    lab.step()
    assert filled(lab.cache, a.sequences[0]) == [(7, 4), (1, 3)]
    assert filled(lab.cache, b.sequences[0]) == [(5, 4), (2, 2)]
    lab.step()
    lab.step()
    assert filled(lab.cache, a.sequences[0]) == [(7, 4), (1, 4), (3, 1)]
    assert filled(lab.cache, b.sequences[0]) == [(5, 4), (2, 4)]
    lab.step()
    assert filled(lab.cache, b.sequences[0]) == [(5, 4), (2, 4), (8, 1)]
    assert lab.cache.stats().num_unfilled_slots == 2 + 3 <= 2 * (4 - 1)


def test_figure_8_parallel_sampling_copies_on_write(world: Worlds) -> None:
    """Two samples share 7 and 1. A1 writes: 1 is copied to 3, its references go from 2 to 1. A2 writes in place."""
    lab = world(8, block_size=4)
    arrange(lab.pool, 7, 1, 3)
    request = lab.add("A", [4, 2, 1, 0, 3, 3, 1], 3, width=2)
    lab.step()
    a1, a2 = request.sequences
    assert a1.block_ids == a2.block_ids == [7, 1]
    assert [lab.pool.refs[b] for b in (7, 1, 3)] == [2, 2, 0]
    assert lab.cache.stats().num_saved_by_sharing == 2

    plan = lab.plan()
    assert plan.copies == [BlockCopy(1, 3)]
    assert a1.block_ids == [7, 3]
    assert a2.block_ids == [7, 1]
    assert [lab.pool.refs[b] for b in (7, 1, 3)] == [2, 1, 1]
    assert lab.cache.num_copied == 1
    lab.land()
    lab.run()
    assert lab.cache.num_copied == 1  # only the last block of the prompt is ever copied


def test_figure_9_beam_search_shares_as_its_tree_grows_and_shrinks() -> None:
    """Four beams share block 0, and beams 0 to 2 share three blocks. Then beams 0 and 3 end: blocks 2, 4, 5 and 8
    are freed, and the continuations of beams 1 and 2 allocate 9 to 12."""
    cache = KVCacheManager(13, 2, num_rows=0, enable_prefix_caching=False)
    arrange(cache.pool, 13, 1, 3, 4, 2, 5, 6, 7, 8)
    zero, one, three, four, two, five, six, seven, eight = 13, 1, 3, 4, 2, 5, 6, 7, 8
    beam = [sequence([1, 2])]
    compute(cache, beam[0], 2)
    assert beam[0].block_ids == [zero]

    beam.append(fork(cache, beam[0]))  # candidate 3 differs from the second block on
    shared, apart = beam
    compute(cache, shared, 2)
    compute(cache, shared, 2)
    assert shared.block_ids == [zero, one, three]
    compute(cache, apart, 2)
    compute(cache, apart, 2)
    assert apart.block_ids == [zero, four, two]
    beam = [shared, fork(cache, shared), fork(cache, shared), apart]
    for seq in beam[:3]:
        compute(cache, seq, 2)
    compute(cache, apart, 2)
    assert [s.block_ids[3:] for s in beam] == [[five], [six], [seven], [eight]]
    assert [cache.pool.refs[b] for b in (zero, one, three, four, two)] == [4, 3, 3, 1, 1]
    assert cache.pool.num_used == 9

    heirs = [beam[1], fork(cache, beam[1]), beam[2], fork(cache, beam[2])]
    cache.free(beam[0])
    cache.free(beam[3])
    assert [cache.pool.refs[b] for b in (four, two, five, eight)] == [0, 0, 0, 0]
    assert [cache.pool.refs[b] for b in (zero, one, three, six, seven)] == [4, 4, 4, 2, 2]
    assert cache.pool.num_free == 13 - 5
    before = cache.num_copied
    for heir in heirs:
        compute(cache, heir, 1)
    assert len({h.block_ids[-1] for h in heirs}) == 4  # a new block each
    assert cache.num_copied == before  # full blocks are never copied
    for heir in heirs:
        cache.free(heir)
    assert cache.pool.num_used == 0


def test_a_lesson_64_tokens_forked_three_times() -> None:
    """Blocks of 16: 64 tokens fill 4 blocks, referenced once; three forks make it 4 each, and cost nothing. Ten tokens
    more for each of the four then take a block each: 8 in all, not 12. Nothing is copied, for no tail was partial."""
    cache = KVCacheManager(64, 16)
    parent = sequence(list(range(65)))
    compute(cache, parent, 64)
    assert parent.block_ids == [1, 2, 3, 4]
    assert [cache.pool.refs[b] for b in parent.block_ids] == [1] * 4
    children = [fork(cache, parent) for _ in range(3)]
    assert [cache.pool.refs[b] for b in parent.block_ids] == [4] * 4
    assert cache.pool.num_used == 4 and cache.stats().num_saved_by_sharing == 12
    plan = StepPlan()
    for seq in [parent, *children]:
        compute(cache, seq, 10, plan)
    assert cache.pool.num_used == 8
    assert plan.copies == []
    naive = sum(len(s.block_ids) for s in [parent, *children])
    assert naive == 20 and naive / cache.pool.num_used == 2.5


def test_a_session_by_hand_allocate_generate_fork_free() -> None:
    """Prompts hit cached blocks, forks share blocks, statistics count, and finishing frees everything."""
    cache = KVCacheManager(10, 4)

    def allocate(tokens: list[int]) -> Sequence:
        seq = sequence(tokens)
        cache.prefixes.count_lookup(seq, cache.prefixes.lookup(seq))
        compute(cache, seq, len(tokens))
        return seq

    first = allocate([1, 2, 3, 4, 5, 6, 7, 8, 9])
    stats = cache.stats()
    assert (stats.num_hits, stats.num_misses, stats.hit_rate) == (0, 3, 0.0)
    second = allocate([1, 2, 3, 4, 5, 6, 7, 8, 10])
    assert second.block_ids[:2] == first.block_ids[:2]
    stats = cache.stats()
    assert (stats.num_hits, stats.num_misses, stats.num_used, stats.num_free) == (2, 4, 4, 6)
    assert stats.hit_rate == pytest.approx(1 / 3)
    assert (stats.num_hit_tokens, stats.num_queried_tokens) == (8, 18)
    cache.free(first)
    assert [cache.pool.refs[b] for b in second.block_ids] == [1, 1, 1]
    cache.free(second)
    cache.free(second)
    stats = cache.stats()
    assert (stats.num_used, stats.num_cached, stats.num_free) == (0, 2, 8)
    third = allocate([1, 2, 3, 4, 5, 6, 7, 8, 11])  # freed blocks keep their content until they are allocated again
    assert third.num_computed == 9 and cache.stats().num_hits == 4
    assert stats.as_dict()["num_cached"] == 2


@pytest.mark.parametrize(
    ("block_size", "num_tokens", "blocks", "last"),
    [(16, 64, [1, 3, 4, 2], 16), (256, 768, [12, 7, 19], 256), (16, 48, [7, 2, 14], 16), (16, 36, [5, 12, 23], 4)],
)
def test_published_block_tables(block_size: int, num_tokens: int, blocks: list[int], last: int) -> None:
    """Diagrams of block tables. All blocks but the last are full."""
    cache = KVCacheManager(24, block_size)
    arrange(cache.pool, *blocks)
    seq = sequence(list(range(num_tokens)))
    compute(cache, seq, num_tokens)
    *full, tail = filled(cache, seq)
    assert full == [(block, block_size) for block in blocks[:-1]] and tail == (blocks[-1], last)


def test_a_freed_block_serves_the_next_sequence() -> None:
    """A sequence in 5, 12 and 23 ends, and the next one is in 5."""
    cache = KVCacheManager(24, 16, enable_prefix_caching=False)
    arrange(cache.pool, 5, 12, 23)
    first, second = sequence(list(range(36))), sequence([1, 2, 3])
    compute(cache, first, 36)
    cache.free(first)
    compute(cache, second, 3)
    assert (first.block_ids, second.block_ids) == ([], [5])
    cache.free(second)
    assert cache.pool.num_free == 24


def test_a_padded_batch_against_blocks() -> None:
    """Lengths 128, 64, 32 and 8. Padded to 128, 54.7 % of 512 slots are empty; of the 240 slots of 15 blocks, 3.3 %.
    The published 67 % is causal attention of a prefill: pairs of a query and a key."""
    cache, lengths = KVCacheManager(32, 16), [128, 64, 32, 8]
    seqs = [sequence([100 * i + n for n in range(length)]) for i, length in enumerate(lengths)]
    for seq, length in zip(seqs, lengths, strict=True):
        compute(cache, seq, length)
    assert [len(seq.block_ids) for seq in seqs] == [8, 4, 2, 1]
    stats = cache.stats()
    assert (stats.num_used, stats.num_unfilled_slots) == (15, 8)
    assert round(100 * stats.num_unfilled_slots / (16 * stats.num_used), 1) == 3.3
    assert round(100 * (1 - sum(lengths) / (4 * 128)), 1) == 54.7
    pairs = [length * (length + 1) // 2 for length in lengths]
    assert round(100 * (1 - sum(pairs) / (4 * max(pairs)))) == 67


def test_recomputation_is_one_prefill_of_prompt_and_output(world: Worlds) -> None:
    """Section 4.5: the tokens generated at eviction join the prompt; one step computes them all."""
    lab = world(8, block_size=4, caching=False)
    request = lab.add("A", [1, 2, 3], 6)
    for _ in range(4):
        lab.step()
    (seq,) = request.sequences
    lab.preempt(request)
    assert seq.block_ids == [] and len(seq.token_ids) == 7
    plan = lab.plan()
    assert (plan.starts, plan.counts, plan.num_sampled) == ([0], [7], [1])


# -- names -------------------------------------------------------------------------------------------------------------


def test_block_hashes_chain_from_parent_to_child() -> None:
    a = list(block_hashes([1, 2, 3, 4, 5, 6, 7, 8, 9], 4))
    assert len(a) == 2  # full blocks alone
    root = sha256(b"").digest()
    first = sha256(root + bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0])).digest()
    assert a[0] == first
    assert a[1] == sha256(first + bytes([5, 0, 0, 0, 6, 0, 0, 0, 7, 0, 0, 0, 8, 0, 0, 0])).digest()


def test_tenants_with_different_salts_have_no_hash_in_common() -> None:
    ours, theirs = (set(block_hashes(range(16), 4, salt=salt)) for salt in (b"ours", b"theirs"))
    assert not ours & theirs


def test_key_of_a_block_is_the_end_of_its_hash() -> None:
    (block_hash,) = block_hashes([1, 2, 3, 4], 4)
    assert block_key(block_hash) == int(block_hash[-8:].hex(), 16)
    assert block_key(bytes(24) + b"\0\0\0\0\0\0\1\2") == 258


def test_block_hashes_with_another_digest() -> None:
    xxhash = pytest.importorskip("xxhash")
    names = list(block_hashes(range(8), 4, digest=xxhash.xxh3_128_digest))
    assert [len(n) for n in names] == [16, 16] and names[0] != names[1]
