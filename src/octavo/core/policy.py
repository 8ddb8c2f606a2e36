"""Scheduling policy: the order of requests, and which request is preempted in which way."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from octavo.core.request import Request
from octavo.core.snapshot import Fields, State

if TYPE_CHECKING:
    from octavo.core.kv_cache_manager import KVCacheManager


class PreemptionMode(Enum):
    RECOMPUTE = "recompute"
    """Drop the keys and values. The prompt and the output so far are one prefill when the request resumes."""
    SWAP = "swap"
    """Move the keys and values to the swap space on the host."""


class VictimPolicy(Enum):
    LATEST = "latest"
    """The last running request: the latest arrival, or the lowest priority."""
    LEAST_LOST = "least_lost"
    """The request that takes the least time to resume; among equals the latest."""


class PreemptionChoice(NamedTuple):
    """How to preempt a victim, and the reason."""

    mode: PreemptionMode
    why: str  # "forced", "cheaper", or "rule" if costs are unknown


EMA_WEIGHT = 0.2
"""Weight of a new measurement in the exponential moving averages."""
INITIAL_HEADROOM = 16
"""Positions that all running requests can grow by when a request resumes after its first preemption."""
ARRIVALS_PER_INDEX = 32
"""Later arrivals that may overtake a request per earlier prompt of the same call."""


@dataclass(slots=True)
class PreemptionCosts:
    """Costs of resuming a preempted request, measured by the engine, in seconds; 0: not known.

    token_s   one prefill position, in a step with other work
    move_s    moving one block between device and host, one way
    step_s    a step without prefill
    kept      share of a preempted request's positions that the prefix cache still has when it is recomputed
    """

    SAVED: ClassVar = Fields("token_s move_s step_s kept")

    token_s: float = 0.0
    move_s: float = 0.0
    step_s: float = 0.0
    kept: float = 0.0

    def snapshot(self) -> State:
        return self.SAVED.save(self)

    def restore(self, state: State) -> None:
        self.SAVED.load(self, state)

    @property
    def known(self) -> bool:
        return self.token_s > 0 and self.move_s > 0

    def recompute_s(self, num_positions: int) -> float:
        return num_positions * (1 - self.kept) * self.token_s

    def swap_s(self, num_blocks: int) -> float:
        """Return the time of swapping out and back in."""
        return 2 * num_blocks * self.move_s

    def record_step(self, num_prompt: int, seconds: float) -> None:
        """Record the time of a step with `num_prompt` prefill positions."""
        if num_prompt == 0:
            self.step_s = _moving_average(self.step_s, seconds)
        elif num_prompt >= 64 and seconds > self.step_s:  # fewer are lost in the noise of the step's other work
            self.token_s = _moving_average(self.token_s, (seconds - self.step_s) / num_prompt)

    def record_return(self, num_found: int, num_known: int) -> None:
        """Record how many positions of a preempted request the prefix cache still had when it resumed."""
        self.kept += EMA_WEIGHT * (num_found / num_known - self.kept)


def _moving_average(before: float, now: float) -> float:
    return now if before == 0 else before + EMA_WEIGHT * (now - before)


@dataclass(slots=True)
class Policy:
    """First come, first served, or by priority (lower first) and then first come, first served.

    by_priority  order by priority first
    ageing       with priorities: limit of later arrivals that overtake a request per step of priority between them, so
                 that no request waits for ever; 0: no limit
    mode         preemption mode. None picks the one that costs less time by `costs`. While costs are unknown it follows
                 the paper (section 4.5 and its artifact): a single sequence is recomputed in one prefill, and a group
                 is swapped, because recomputation loses the sharing between its sequences
    victims      which running request is preempted
    long_prefill_token_threshold  a prefill with more positions due is long and computes at most that many per step; 0:
                 none is long
    max_long_partial_prefills  long prefills of a tenant that run at the same time. Further ones wait, and short ones
                 pass them

    Subclasses must not raise: the scheduler calls these methods mid-step, and an exception there ends the engine.
    """

    SETTINGS: ClassVar = Fields(
        "by_priority mode ageing victims long_prefill_token_threshold max_long_partial_prefills"
    )

    by_priority: bool = False
    mode: PreemptionMode | None = None
    ageing: int = 0
    victims: VictimPolicy = VictimPolicy.LATEST
    long_prefill_token_threshold: int = 0
    max_long_partial_prefills: int = 1
    costs: PreemptionCosts = field(default_factory=PreemptionCosts)

    def settings(self) -> State:
        """The arguments that the policy is made with."""
        return self.SETTINGS.save(self)

    @classmethod
    def from_settings(cls, settings: State) -> Policy:
        arguments = {name: settings[name] for name in cls.SETTINGS.attributes}
        mode = arguments.pop("mode")
        victims = VictimPolicy(arguments.pop("victims"))
        return cls(mode=None if mode is None else PreemptionMode(mode), victims=victims, **arguments)

    def order(self, request: Request, arrival: int) -> tuple[int, int]:
        """Return the request's sort key; the smallest runs first.

        The key never changes. Requests that wait longer arrived earlier, so ageing is a head start given once.
        """
        place = arrival + ARRIVALS_PER_INDEX * request.index_in_call
        if not self.by_priority:
            return (0, place)
        if self.ageing:
            return (request.priority * self.ageing + place, place)
        return (request.priority, place)

    def victim(self, running: Seq[Request], request: Request, cache: KVCacheManager) -> Request:
        """Return the running request to preempt for `request`: a later one, or `request` itself if it is the last.

        Running requests are planned in order, so the victim has no slice yet in the current plan. The first request is
        never preempted for another one, so the scheduler always makes progress.
        """
        if self.victims is VictimPolicy.LATEST or running[-1] is request:
            return running[-1]
        later = running[running.index(request) + 1 :]
        return min(reversed(later), key=lambda r: self._resume_s(r, cache))

    def _resume_s(self, victim: Request, cache: KVCacheManager) -> float:
        num_blocks, num_positions = cache.swapping.count_private_blocks(victim)
        if not self.costs.known:
            return num_positions
        swap_s, recompute_s = self.costs.swap_s(num_blocks), self.costs.recompute_s(num_positions)
        if self.mode is None:
            return min(swap_s, recompute_s)
        return swap_s if self.mode is PreemptionMode.SWAP else recompute_s

    def preemption_mode(self, victim: Request, num_blocks: int, num_positions: int) -> PreemptionChoice:
        """Pick how to preempt a victim with `num_blocks` private blocks and `num_positions` positions in them."""
        if self.mode is not None:
            return PreemptionChoice(self.mode, "forced")
        if self.costs.known:
            swaps = self.costs.swap_s(num_blocks) < self.costs.recompute_s(num_positions)
            return PreemptionChoice(PreemptionMode.SWAP if swaps else PreemptionMode.RECOMPUTE, "cheaper")
        group = len(victim.sequences) > 1
        return PreemptionChoice(PreemptionMode.SWAP if group else PreemptionMode.RECOMPUTE, "rule")

    def headroom(self, request: Request) -> int:
        """Return the positions that every running request, itself included, can grow by when `request` resumes.

        They double with each preemption. A request is therefore preempted fewer times than its output has doublings.
        """
        return INITIAL_HEADROOM << min(request.num_preemptions - 1, 20) if request.num_preemptions else 0
