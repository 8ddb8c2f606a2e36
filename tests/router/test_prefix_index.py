"""`PrefixIndex` against sets of blocks, and its bounds."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from octavo.router.prefix_index import PrefixIndex, members

REPLICAS = st.integers(0, 2)
HASHES = st.lists(st.integers(0, 5), max_size=6)


class IndexMachine(RuleBasedStateMachine):
    """The index beside one set, and one multiset, of hashes for each replica."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.cached: dict[int, set[int]] = {r: set() for r in range(3)}
        self.coming: dict[int, Counter[int]] = {r: Counter() for r in range(3)}
        self.requests: list[tuple[int, list[int]]] = []

    @rule(replica=REPLICAS, hashes=HASHES)
    def store(self, replica: int, hashes: list[int]) -> None:
        self.index.store(replica, hashes)
        self.cached[replica] |= set(hashes)

    @rule(replica=REPLICAS, hashes=HASHES)
    def remove(self, replica: int, hashes: list[int]) -> None:
        self.index.remove(replica, hashes)
        self.cached[replica] -= set(hashes)

    @rule(replica=REPLICAS)
    def clear(self, replica: int) -> None:
        self.index.clear(replica)
        self.cached[replica].clear()

    @rule(replica=REPLICAS, hashes=HASHES)
    def expect(self, replica: int, hashes: list[int]) -> None:
        self.index.expect(replica, hashes)
        self.coming[replica].update(hashes)
        self.requests.append((replica, hashes))

    @rule()
    def settle(self) -> None:
        if self.requests:
            replica, hashes = self.requests.pop(0)
            self.index.settle(replica, hashes)
            self.coming[replica].subtract(hashes)

    @rule(prompt=HASHES, among=st.integers(0, 7))
    def look_up(self, prompt: list[int], among: int) -> None:
        expected = {}
        for replica in members(among):
            known = self.cached[replica] | set(+self.coming[replica])
            misses = [depth for depth, block in enumerate(prompt) if block not in known]
            expected[replica] = misses[0] if misses else len(prompt)
        assert self.index.hits(prompt, among) == expected

    @invariant()
    def has_only_what_is_cached(self) -> None:
        assert len(self.index) == len(set.union(*self.cached.values()))
        assert [self.index.num_cached(r) for r in range(3)] == [len(self.cached[r]) for r in range(3)]
        assert len(self.index._coming) == len(set[int]().union(*(+c for c in self.coming.values())))


TestIndexMachine = IndexMachine.TestCase


@given(st.sets(st.integers(0, 2000)))
def test_members_are_the_bits_of_a_set(numbers: set[int]) -> None:
    assert list(members(sum(1 << number for number in numbers))) == sorted(numbers)
