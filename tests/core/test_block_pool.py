"""Rules of docs/memory.md that `BlockPool` and `SwapSpace` keep, in its order."""

from __future__ import annotations

import pytest

from octavo.core import events as ev
from octavo.core.block_pool import GROUP_KEY_BYTES, BlockPool, SwapSpace, group_key, pack_key
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.types import NULL_BLOCK, SealId
from tests.core.lab import Lab, sequence

# -- Memory 1: three states --------------------------------------------------------------------------------------------


def test_three_states_partition_the_pool() -> None:
    pool = BlockPool(4)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 0, 4)
    a, b = pool.allocate(), pool.allocate()
    assert (pool.num_used, pool.num_cached, pool.num_free) == (2, 0, 2)
    pool.seal(a, (-1, b"a"))
    pool.release(a)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (1, 1, 2)
    pool.release(b)
    assert (pool.num_used, pool.num_cached, pool.num_free, pool.num_available) == (0, 1, 3, 4)
    pool.share(a)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (1, 0, 3)


def test_the_null_block_is_never_allocated() -> None:
    pool = BlockPool(3)
    assert [pool.allocate() for _ in range(3)] == [1, 2, 3]


def test_a_new_pool_fills_no_list() -> None:
    """Ids from the high-water mark on were never written to any list."""
    pool = BlockPool(1_000_000)
    assert pool.snapshot()["freed"] == [] and [pool.allocate(), pool.allocate()] == [1, 2]
    assert pool.snapshot()["freed"] == [] and pool.num_free == 999_998


# -- Memory 2: sealing and the index -----------------------------------------------------------------------------------


def test_seal_ids_are_never_used_twice() -> None:
    pool = BlockPool(1)
    seen = []
    for _ in range(3):
        block = pool.allocate()
        seen.append(pool.seal(block, (-1, b"same")))
        pool.release(block)
        pool.evict_all_cached()
    assert seen == [1, 2, 3] and pool.last_seal_id == 3 == pool.num_sealed


def test_the_parent_of_a_first_block_is_its_salt() -> None:
    """The key also encodes the salt's length, so salt and tokens cannot be confused."""
    pool = BlockPool(8)
    keys = [(b"", b"abc"), (b"a", b"bc"), (b"ab", b"c"), (1, b"abc"), (b"\1\0\0\0\0\0\0\0", b"abc")]
    blocks = [pool.allocate() for _ in keys]
    for block, key in zip(blocks, keys, strict=True):
        pool.seal(block, key)
    assert [pool.find(key) for key in keys] == blocks
    assert [pool.key_of(block) for block in blocks] == keys


def test_a_sealed_block_keeps_its_seal() -> None:
    """Its parent was evicted and sealed again elsewhere: a second key would index it twice."""
    pool = BlockPool(4)
    block = pool.allocate()
    seal = pool.seal(block, (7, b"x"))
    assert pool.seal(block, (8, b"x")) == seal
    assert pool.num_indexed == pool.num_sealed == 1
    assert pool.find((7, b"x")) == block and pool.find((8, b"x")) == NULL_BLOCK


def test_the_index_is_split_over_several_dicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single dict of millions of entries would pause everything while it grows. The key alone determines its dict."""
    monkeypatch.setattr("octavo.core.block_pool.BLOCKS_PER_SHARD", 4)
    pool = BlockPool(40)
    keys = [(-1 - i % 3, bytes([i]) * 4) for i in range(40)]
    for key in keys:
        pool.seal(pool.allocate(), key)
    sizes = [len(shard) for shard in pool._shards]
    assert len(sizes) == 16 and sum(sizes) == 40 == pool.num_indexed and max(sizes) < 20
    for block in range(1, 41, 2):
        pool.unseal(block)
    assert [pool.find(key) for key in keys] == [0 if block % 2 else block for block in range(1, 41)]


# -- Memory 4: release and eviction ------------------------------------------------------------------------------------


def test_eviction_drops_the_entry_of_exactly_that_block() -> None:
    pool = BlockPool(2)
    a, b = pool.allocate(), pool.allocate()
    pool.seal(a, (-1, b"a")), pool.seal(b, (-1, b"b"))
    pool.release(a), pool.release(b)
    assert pool.allocate() == a
    assert (pool.find((-1, b"a")), pool.find((-1, b"b")), pool.seal_id[a]) == (NULL_BLOCK, b, 0)


# -- Memory 8: freeing -------------------------------------------------------------------------------------------------


def test_misuse_fails_an_assertion() -> None:
    pool, host, lab = BlockPool(2), SwapSpace(2), Lab(4)
    for tier, full in ((pool, "pool is empty"), (host, "swap space is full")):
        one, two = tier.allocate(), tier.allocate()
        with pytest.raises(AssertionError, match=full):
            tier.allocate()
        tier.release(one), tier.release(two)
        with pytest.raises(AssertionError, match="more often"):
            tier.release(one)
    for misuse in (NULL_BLOCK, -1, 3):
        with pytest.raises(AssertionError):
            pool.share(misuse)
    with pytest.raises(AssertionError):
        host.share(1)
    assert (pool.num_used, host.num_used) == (0, 0)
    with pytest.raises(AssertionError, match="not sealed"):
        pool.unseal(pool.allocate())
    with pytest.raises(AssertionError, match="empty prompt"):
        sequence([])
    with pytest.raises(AssertionError, match="at most as large"):
        KVCacheManager(4, 2, 5)
    lab.add("A", [1], 3)
    with pytest.raises(AssertionError, match="A"):
        lab.add("A", [1], 1)
    step = lab.step()
    with pytest.raises(AssertionError):  # its result has arrived
        lab.scheduler.fail(step.in_flight)


# -- Memory 17 to 26: window groups ------------------------------------------------------------------------------------


def windowed(num_windows: int = 2) -> tuple[BlockPool, SealId, list[int]]:
    """A full block and a block of each window group over the same positions, sealed and released in this order."""
    pool = BlockPool(6, num_windows=num_windows)
    blocks = [pool.allocate() for _ in range(1 + num_windows)]
    seal = pool.seal(blocks[0], (b"", b"abcd"))
    for group, block in enumerate(blocks[1:]):
        pool.seal(block, group_key(seal, group))
    for block in blocks:
        pool.release(block)
    return pool, seal, blocks


def test_an_evicted_full_block_takes_its_window_blocks_with_it() -> None:
    pool, seal, blocks = windowed()
    other = pool.allocate()
    other_seal = pool.seal(other, (b"", b"efgh"))
    below = pool.allocate()
    pool.seal(below, group_key(other_seal, 0))
    while pool.num_free:
        pool.allocate()
    assert pool.allocate() == blocks[0]
    assert [pool.find(group_key(seal, group)) for group in range(2)] == [NULL_BLOCK] * 2
    assert (pool.num_cached, pool.num_free, pool.num_indexed, pool.num_evicted) == (0, 2, 2, 3)
    assert pool.find(group_key(other_seal, 0)) == below


def test_a_window_block_in_use_loses_its_seal_alone() -> None:
    pool, _, (full, used, cached) = windowed()
    pool.share(used)
    pool.unseal(full)
    assert (pool.refs[used], pool.seal_id[used], pool.seal_id[cached]) == (1, 0, 0)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (1, 0, 5)
    pool.release(used)
    assert pool.num_free == 6


def test_an_evicted_window_block_leaves_its_full_block_and_its_siblings() -> None:
    pool, seal, (full, first, second) = windowed()
    pool.unseal(first)
    assert pool.find((b"", b"abcd")) == full and pool.find(group_key(seal, 1)) == second
    assert (pool.num_cached, pool.num_evicted) == (2, 1)


def test_a_reset_evicts_window_blocks_once_and_events_have_its_reason() -> None:
    pool, _, blocks = windowed()
    seen: list[ev.Event] = []
    pool.events.subscribe(seen.append, blocks=True)
    pool.evict_all_cached()
    assert [(e.block_id, e.why) for e in seen if isinstance(e, ev.Evicted)] == [(b, "reset") for b in blocks]
    assert (pool.num_free, pool.num_cached, pool.num_indexed) == (6, 0, 0)


def test_the_key_of_a_window_block_is_shorter_than_any_other() -> None:
    assert {len(pack_key(group_key(seal, group))) for seal in (1, 1 << 40) for group in (0, 255)} == {GROUP_KEY_BYTES}
    others = [(parent, b"abcd" * n) for parent in (7, b"", b"a", b"ab", b"abcde") for n in (1, 2)]
    assert min(len(pack_key(key)) for key in others) > GROUP_KEY_BYTES


@pytest.mark.parametrize("num_windows", [0, 1])
def test_a_full_block_that_is_computed_again_is_renewed_if_windows_hang_on_it(num_windows: int) -> None:
    """What the sequence seals in a window from now on is lost with the cached block."""
    pool = BlockPool(6, num_windows=num_windows)
    keys = [(b"", b"abcd"), (b"", b"efgh")]
    first, second = [pool.allocate() for _ in keys]
    for block, key in zip((first, second), keys, strict=True):
        pool.seal(block, key)
        pool.release(block)
    assert pool.seal(pool.allocate(), keys[0]) == pool.seal_id[first]
    assert list(pool.cached()) == ([second, first] if num_windows else [first, second])
    pool.share(first)
    assert pool.seal(pool.allocate(), keys[0]) == pool.seal_id[first] and list(pool.cached()) == [second]
