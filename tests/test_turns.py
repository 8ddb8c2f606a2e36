"""Fair sharing between tenants: rooms and turns, against invariants in random worlds."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.turns import Room, Turns

LIMIT = 12
TENANTS = st.integers(0, 3)


def test_the_newest_items_of_the_fullest_tenant_are_dropped() -> None:
    dropped: list[str] = []
    room: Room[str] = Room(10, dropped.append)
    assert all(room.take(name, 0, 2) for name in "abcd") and room.take("x", 1, 2)
    room.keep("d")
    assert not room.take("e", 0, 1), "nobody uses more"
    assert room.take("y", 1, 2) and dropped == ["c"]
    assert not room.would_fit(1, 3) and not room.take("z", 1, 3) and room.take("z", 2, 3)
    assert dropped == ["c", "b", "a"], "d is kept"
    assert room.used == {0: 2, 1: 4, 2: 3} and room.total == 9


def test_an_item_may_grow_and_a_single_one_may_exceed_the_limit() -> None:
    dropped: list[str] = []
    room: Room[str] = Room(10, dropped.append)
    assert room.take("a", 0, 8) and room.take("a", 0, 8) and room.total == 16
    assert room.would_fit(1, 1) and room.take("b", 1, 1) and dropped == ["a"]
    room.release("a")
    room.release("b")
    assert not room.used and not room.total


def test_turns_go_to_the_tenant_with_fewest_slots_then_to_the_longest_ago() -> None:
    turns: Turns[str] = Turns(2, 100, lambda item: None, spare=False)
    for item in ("a0", "a1", "a2", "b0", "b1", "c0"):
        turns.add(item, ord(item[0]), 1)
    order = []
    taken = [turns.take(), turns.take()]
    while taken[0] is not None:
        order.append(taken[0])
        turns.done(taken.pop(0))
        taken.append(turns.take())
    assert order == ["a0", "b0", "c0", "a1", "b1", "a2"]


def test_slow_items_leave_one_slot_and_a_tenant_without_any_has_a_spare_one() -> None:
    turns: Turns[str] = Turns(2, 100, lambda item: None)
    for item in ("slow 0", "slow 1"):
        turns.add(item, 0, 1, slow=True)
    assert turns.take() == "slow 0" and turns.take() is None
    turns.add("fast", 0, 1)
    turns.add("other", 1, 1, slow=True)
    assert {turns.take(), turns.take()} == {"fast", "other"} and turns.take() is None
    assert turns.withdraw("slow 1") and not turns.withdraw("slow 1") and not turns.waiting


class RoomMachine(RuleBasedStateMachine):
    """A room against a list of its items."""

    def __init__(self) -> None:
        super().__init__()
        self.room: Room[int] = Room(LIMIT, self.drop)
        self.items: dict[int, tuple[int, int]] = {}
        self.kept: set[int] = set()
        self.num = 0
        self.taker = (0, 0)

    def drop(self, item: int) -> None:
        tenant, amount = self.items.pop(item)
        mine, new = self.taker
        assert item not in self.kept and tenant != mine
        sums = self.sums()
        sums[tenant] += amount
        assert sums[tenant] == max(sums[t] for t in {tenant, *self.droppable()}) and sums[tenant] > sums[mine] + new
        assert all(other < item for other, (t, _) in self.items.items() if t == tenant and other not in self.kept)

    def droppable(self) -> set[int]:
        return {tenant for item, (tenant, _) in self.items.items() if item not in self.kept}

    def sums(self) -> Counter[int]:
        sums: Counter[int] = Counter()
        for tenant, amount in self.items.values():
            sums[tenant] += amount
        return sums

    @rule(tenant=TENANTS, amount=st.integers(1, 7))
    def take(self, tenant: int, amount: int) -> None:
        self.num, self.taker = self.num + 1, (tenant, amount)
        if self.room.would_fit(tenant, amount):
            before = self.room.total
            if self.room.take(self.num, tenant, amount):
                self.items[self.num] = tenant, amount
            else:
                assert before > 0  # dropping all that may be dropped would not suffice
        else:
            before, sums = self.room.total, self.sums()
            assert not self.room.take(self.num, tenant, amount) and (self.room.total, self.sums()) == (before, sums)

    @precondition(lambda self: self.items)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data: st.DataObject, keep: bool) -> None:
        item = data.draw(st.sampled_from(sorted(self.items)))
        if keep:
            self.room.keep(item)
            self.kept.add(item)
        else:
            self.room.release(item)
            del self.items[item]

    @invariant()
    def counts(self) -> None:
        sums = self.sums()
        assert self.room.used == sums and self.room.total == sums.total()
        assert self.room.total <= LIMIT or len(self.items) == 1


TestRoom = RoomMachine.TestCase


@settings(max_examples=200)
@given(
    st.integers(1, 3),
    st.lists(st.tuples(TENANTS, st.booleans(), st.sampled_from(["add", "take", "done", "withdraw"])), max_size=60),
)
def test_slots_are_never_exceeded_and_nobody_is_forgotten(num_slots: int, moves: list[tuple[int, bool, str]]) -> None:
    turns: Turns[int] = Turns(num_slots, 1000, lambda item: None)
    waiting: list[tuple[int, int]] = []
    taken: list[tuple[int, int]] = []
    for number, (tenant, slow, move) in enumerate(moves):
        if move == "add":
            turns.add(number, tenant, 1, slow=slow)
            waiting.append((number, tenant))
        elif move == "done" and taken:
            turns.done(taken.pop(tenant % len(taken))[0])
        elif move == "withdraw" and waiting:
            assert turns.withdraw(waiting.pop(tenant % len(waiting))[0])
        elif move == "take" and (item := turns.take()) is not None:
            entry = next(pair for pair in waiting if pair[0] == item)
            waiting.remove(entry)
            taken.append(entry)
        slots = Counter(tenant for _, tenant in taken)
        assert turns.num_taken == slots and slots.total() <= num_slots + 1
        assert sorted(turns.waiting) == sorted(item for item, _ in waiting)
    while waiting or taken:
        while (item := turns.take()) is not None:
            taken.append(next(pair for pair in waiting if pair[0] == item))
            waiting.remove(taken[-1])
        turns.done(taken.pop()[0])
    assert not turns.room.used and not turns.num_taken
