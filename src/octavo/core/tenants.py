"""Who shares the scheduler, and how a step is shared between them: deficit round robin over positions.

A tenant is a holder of one key, say; its number means nothing here. What each is served is counted only while several
have requests: with one tenant nothing of this has an effect.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping

from octavo.core.plan import StepPlan
from octavo.core.request import Request


class Tenant:
    """One that has unfinished requests.

    served   positions planned for it beside others, counted from the least that any of them had when it came
    waiting  its requests that wait, in the policy's order
    """

    __slots__ = ("num_requests", "number", "served", "waiting")

    def __init__(self, number: int, served: int) -> None:
        self.number = number
        self.served = served
        self.num_requests = 0
        self.waiting: list[Request] = []


class Tenants:
    """Those present, by number. Who leaves is forgotten, and who comes starts level with the least served: an idle
    tenant saves nothing up."""

    def __init__(self) -> None:
        self.present: dict[int, Tenant] = {}
        self.several = False  # kept, and not worked out: every step asks

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

    def wait(self, request: Request) -> None:
        insort(self.present[request.tenant].waiting, request)

    def stop_waiting(self, request: Request) -> None:
        self.present[request.tenant].waiting.remove(request)

    def serve(self, plan: StepPlan) -> None:
        """Count what a plan has so far."""
        for seq, count in zip(plan.sequences, plan.counts, strict=True):
            self.present[seq.request.tenant].served += count

    def shares(self, budget: int, wants: Mapping[int, int], spent: Mapping[int, int]) -> dict[int, int]:
        """Divide a step's positions: the least served first, until all are level or have what they want; and what is
        left then once more, whatever they want. `spent`: what each gets of the step in any case."""
        heights = {number: tenant.served + spent[number] for number, tenant in self.present.items()}
        shares = fill(budget, wants, heights)
        left = budget - sum(shares.values())
        more = fill(left, dict.fromkeys(wants, left), {n: height + shares[n] for n, height in heights.items()})
        return {number: share + more[number] for number, share in shares.items()}


def level(budget: int, tenants: Iterable[Tenant]) -> dict[int, int]:
    """Divide positions so that those served least catch up first, whatever they want."""
    served = {tenant.number: tenant.served for tenant in tenants}
    return fill(budget, dict.fromkeys(served, budget), served)


def fill(amount: int, wants: Mapping[int, int], heights: Mapping[int, int]) -> dict[int, int]:
    """Pour into vessels, each from its height on and up to its want: the lowest rise until they are level with the
    next. What does not divide evenly goes to the first."""
    got = dict.fromkeys(wants, 0)
    open_ones = [number for number in wants if wants[number] > 0]
    while amount > 0 and open_ones:
        height = {number: heights[number] + got[number] for number in open_ones}
        low = min(height.values())
        lowest = [number for number in open_ones if height[number] == low]
        rise = min([wants[n] - got[n] for n in lowest] + [h - low for h in height.values() if h > low])
        if rise * len(lowest) > amount:
            rise, extra = divmod(amount, len(lowest))
            for number in lowest[:extra]:
                got[number] += 1
            amount = 0
        for number in lowest:
            got[number] += rise
        amount -= rise * len(lowest)
        open_ones = [number for number in open_ones if got[number] < wants[number]]
    return got
