"""Fair sharing between tenants outside the scheduler: `Room` for what they hold, `Turns` at what few can use at a time.

A tenant is a number, as in the scheduler's fair sharing (`core.tenants`). One that holds nothing and waits for nothing
leaves no trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Room(Generic[T]):
    """A bounded amount that tenants share: bytes, queued requests, waiting jobs.

    A tenant may use all of it while no other needs any. When it is full, the newest items of the tenant that uses most,
    among those with items that may be dropped, leave in favour of one that uses less even with its new item.

    limit  of the sum; a single item may be larger
    drop   called with each item that is dropped, after it has left
    """

    def __init__(self, limit: float, drop: Callable[[T], None]) -> None:
        self.limit = limit
        self.used: Counter[int] = Counter()
        """Amount by tenant."""
        self.total = 0
        self._drop = drop
        self._items: dict[T, tuple[int, int]] = {}  # item -> tenant, amount
        self._droppable: dict[int, dict[T, None]] = {}  # tenant -> its items that may be dropped, oldest first

    def would_fit(self, tenant: int, amount: int) -> bool:
        """Whether a new item of this amount would be accepted now."""
        free = self.limit - self.total
        most = max(self._droppable, key=self.used.__getitem__, default=tenant)
        return amount <= free or not self.total or self.used[most] > self.used[tenant] + amount

    def take(self, item: T, tenant: int, amount: int) -> bool:
        """Add to the amount of a new or known item. Returns False if there is no room for it: nothing has changed."""
        held = self._items.get(item, (tenant, 0))[1]
        while self.total + amount > self.limit and self.total > held:
            most = max(self._droppable, key=self.used.__getitem__, default=tenant)
            if self.used[most] <= self.used[tenant] + amount:
                return False
            newest = next(reversed(self._droppable[most]))
            self.release(newest)
            self._drop(newest)
        if not held:
            self._droppable.setdefault(tenant, {})[item] = None
        self._items[item] = tenant, held + amount
        self.used[tenant] += amount
        self.total += amount
        return True

    def keep(self, item: T) -> None:
        """From now on, the item is not dropped."""
        if item in self._items:
            self._forget(item, self._items[item][0])

    def release(self, item: T) -> None:
        """The item leaves. One that was dropped or released is ignored."""
        if item not in self._items:
            return
        tenant, amount = self._items.pop(item)
        self._forget(item, tenant)
        self.total -= amount
        self.used[tenant] -= amount
        if not self.used[tenant]:
            del self.used[tenant]

    def _forget(self, item: T, tenant: int) -> None:
        items = self._droppable.get(tenant, {})
        items.pop(item, None)
        if not items:
            self._droppable.pop(tenant, None)


class Turns(Generic[T]):
    """Items of tenants that wait for one of `num_slots` slots.

    The next item is of the tenant with the fewest slots, and among those of the one whose last turn is longest ago.
    Slow items leave one slot to others. With `spare`, one slot more is open to a tenant that has none: it need not wait
    for the slow items of another.

    room  the sum of the sizes of waiting and taken items; an item that is dropped from it waits no longer
    """

    def __init__(self, num_slots: int, room: float, drop: Callable[[T], None], *, spare: bool = True) -> None:
        self.room: Room[T] = Room(room, self._on_drop)
        self._drop = drop
        self.num_taken: Counter[int] = Counter()
        """Slots by tenant."""
        self._num_slots, self._spare = num_slots, spare
        self._in_spare: T | None = None
        self._num_slow = 0  # outside the spare slot
        self._queues: dict[tuple[int, bool], dict[T, None]] = {}  # tenant, slow -> waiting items in order
        self._keys: dict[T, tuple[int, bool]] = {}  # of waiting and taken items
        self._last_turns: dict[tuple[int, bool], int] = {}  # of queues
        self._num_turns = 0

    def add(self, item: T, tenant: int, size: int, *, slow: bool = False) -> bool:
        """Let an item wait. Returns False if there is no room for it."""
        if not self.room.take(item, tenant, size):
            return False
        self._keys[item] = tenant, slow
        self._queues.setdefault((tenant, slow), {})[item] = None
        return True

    def take(self) -> T | None:
        """The next item, which has a slot now, until `done`; None if none waits or no slot is free for it."""
        ready = [key for key in self._queues if self._has_slot(key[1]) or self._may_use_spare(key[0])]
        if not ready:
            return None
        key = min(ready, key=lambda key: (self.num_taken[key[0]], self._last_turns.get(key, 0)))
        item = next(iter(self._queues[key]))
        self._leave_queue(item, key)
        self.room.keep(item)
        self._num_turns += 1
        self._last_turns[key] = self._num_turns
        if self._has_slot(key[1]):
            self._num_slow += key[1]
        else:
            self._in_spare = item
        self.num_taken[key[0]] += 1
        return item

    def done(self, item: T) -> None:
        """Free the slot of a taken item."""
        tenant, slow = self._keys.pop(item)
        self.room.release(item)
        self.num_taken[tenant] -= 1
        if item == self._in_spare:
            self._in_spare = None
        else:
            self._num_slow -= slow
        if not self.num_taken[tenant]:
            del self.num_taken[tenant]
        self._forget(tenant)

    def withdraw(self, item: T) -> bool:
        """Remove a waiting item. Returns False if it does not wait: it was taken, dropped or withdrawn."""
        if item not in self._queues.get(self._keys.get(item, (0, False)), ()):
            return False
        self.room.release(item)
        self._leave(item)
        return True

    @property
    def waiting(self) -> list[T]:
        return [item for queue in self._queues.values() for item in queue]

    def _on_drop(self, item: T) -> None:
        self._leave(item)
        self._drop(item)

    def _has_slot(self, slow: bool) -> bool:
        num_free = self._num_slots - self.num_taken.total() + (self._in_spare is not None)
        return num_free > 0 and not (slow and self._num_slow >= max(1, self._num_slots - 1))

    def _may_use_spare(self, tenant: int) -> bool:
        return self._spare and self._in_spare is None and not self.num_taken[tenant]

    def _leave(self, item: T) -> None:
        key = self._keys.pop(item)
        self._leave_queue(item, key)
        self._forget(key[0])

    def _leave_queue(self, item: T, key: tuple[int, bool]) -> None:
        del self._queues[key][item]
        if not self._queues[key]:
            del self._queues[key]

    def _forget(self, tenant: int) -> None:
        for key in (tenant, False), (tenant, True):
            if not self.num_taken[tenant] and key not in self._queues:
                self._last_turns.pop(key, None)
