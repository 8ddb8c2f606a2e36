"""Fair sharing of steps between tenants: deficit round robin over positions.

A tenant is, for example, the holder of one API key; its number has no meaning here. Positions are counted only while
several tenants have requests: with one tenant this module has no effect.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping

from octavo.core.request import Request, Sequence, Status


class Tenant:
    """A tenant with unfinished requests.

    served   positions planned for it while several tenants were present; starts at the smallest count among the others
    waiting  its waiting requests, in the policy's order
    num_rows  rows of its running requests
    """

    __slots__ = ("num_requests", "num_rows", "number", "served", "waiting")

    def __init__(self, number: int, served: int) -> None:
        self.number = number
        self.served = served
        self.num_requests = self.num_rows = 0
        self.waiting: list[Request] = []


class Tenants:
    """The tenants with unfinished requests, by number.

    A tenant without requests is forgotten. A new one starts level with the least served tenant: idle time earns no
    credit.
    """

    def __init__(self) -> None:
        self.present: dict[int, Tenant] = {}
        self.several = False  # len(present) > 1, stored because every step reads it

    def enter(self, request: Request) -> None:
        tenant = self.present.get(request.tenant)
        if tenant is None:
            level = min((other.served for other in self.present.values()), default=0)
            tenant = self.present[request.tenant] = Tenant(request.tenant, level)
        tenant.num_requests += 1
        self.several = len(self.present) > 1

    def leave(self, request: Request) -> None:
        tenant = self.present[request.tenant]
        tenant.num_requests -= 1
        if not tenant.num_requests:
            del self.present[request.tenant]
            self.several = len(self.present) > 1

    def snapshot(self) -> list[tuple[int, int]]:
        return [(tenant.number, tenant.served) for tenant in self.present.values()]

    def restore(
        self, served: Iterable[tuple[int, int]], requests: Iterable[Request], waiting: Iterable[Request]
    ) -> None:
        """Take the counts of a snapshot, all unfinished requests, and those that wait."""
        self.present = {number: Tenant(number, positions) for number, positions in served}
        for request in requests:
            self.enter(request)
            self.present[request.tenant].num_rows += request.width * (request.status is Status.RUNNING)
        for request in waiting:
            self.wait(request)

    def wait(self, request: Request) -> None:
        insort(self.present[request.tenant].waiting, request)

    def stop_waiting(self, request: Request) -> None:
        self.present[request.tenant].waiting.remove(request)

    def serve(self, sequences: Iterable[Sequence], counts: Iterable[int]) -> None:
        """Add the positions that the plan has so far to each tenant's count."""
        for seq, count in zip(sequences, counts, strict=True):
            self.present[seq.request.tenant].served += count

    def shares(self, budget: int, wants: Mapping[int, int], spent: Mapping[int, int]) -> dict[int, int]:
        """Divide a step's positions between tenants.

        The least served tenant comes first, until all are level or have what they want. The rest is divided in the same
        way regardless of wants. `spent` holds the positions that each tenant gets of the step in any case.
        """
        heights = {number: tenant.served + spent[number] for number, tenant in self.present.items()}
        shares = water_fill(budget, wants, heights)
        left = budget - sum(shares.values())
        more = water_fill(left, dict.fromkeys(wants, left), {n: height + shares[n] for n, height in heights.items()})
        return {number: share + more[number] for number, share in shares.items()}


def catch_up_shares(budget: int, tenants: Iterable[Tenant]) -> dict[int, int]:
    """Divide positions so that the least served tenants catch up first, regardless of wants."""
    served = {tenant.number: tenant.served for tenant in tenants}
    return water_fill(budget, dict.fromkeys(served, budget), served)


def water_fill(amount: int, wants: Mapping[int, int], heights: Mapping[int, int]) -> dict[int, int]:
    """Water-filling: pour `amount` into vessels, each from its height on and at most its want.

    The lowest vessels rise together until they are level with the next. A remainder that does not divide evenly goes to
    the first ones. The time is linear in the number of vessels, apart from sorting.
    """
    wanting = [number for number in wants if wants[number] > 0]
    ends = {number: heights[number] + wants[number] for number in wanting}
    changes = sorted([(heights[number], 1) for number in wanting] + [(ends[number], -1) for number in wanting])
    level = num_open = 0
    for height, change in changes:
        rise = min(height - level, amount // num_open) if num_open else height - level
        amount -= rise * num_open
        level += rise
        if level < height:
            break
        num_open += change
    got = {number: max(0, min(level - heights[number], wants[number])) for number in wants}
    for number in wanting:
        if amount and heights[number] <= level < ends[number]:
            got[number] += 1
            amount -= 1
    return got
