"""Who goes first, who gives way, and how: the choices that the scheduler leaves to others."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from octavo.core.request import Request

if TYPE_CHECKING:
    from octavo.core.kv_cache_manager import KVCacheManager


class PreemptionMode(Enum):
    RECOMPUTE = "recompute"
    """Forget the keys and values; prompt and output so far make one prefill when the request comes back."""
    SWAP = "swap"
    """Keep them on the host."""


class VictimPolicy(Enum):
    LATEST = "latest"
    """Who stands last in the line of those running: the latest arrival, or the lowest priority."""
    LEAST_LOST = "least_lost"
    """Whose return takes the least time; of equals the latest."""


class PreemptionChoice(NamedTuple):
    """How a victim gives way, and why."""

    mode: PreemptionMode
    why: str  # "forced", "cheaper", or "rule" where costs are not known


EMA_WEIGHT = 0.2
"""Weight of the newest of what is measured again and again."""
INITIAL_HEADROOM = 16
"""Positions that all running requests may grow by before a request comes back that was preempted once."""


ARRIVALS_PER_INDEX = 32
"""Later arrivals that may overtake a request for each one of the same call that stands before it."""


@dataclass(slots=True)
class PreemptionCosts:
    """What it takes to bring a request back, in seconds; 0 is not known. An engine measures these while it works.

    token_s   one position of a prompt, computed beside what else a step computes
    move_s    one block between the device and the host, one way
    step_s    a step that computes no prompt
    kept      share of a request's positions that the prefix cache still has when it comes back to be recomputed
    """

    token_s: float = 0.0
    move_s: float = 0.0
    step_s: float = 0.0
    kept: float = 0.0

    @property
    def known(self) -> bool:
        return self.token_s > 0 and self.move_s > 0

    def recompute_s(self, num_positions: int) -> float:
        return num_positions * (1 - self.kept) * self.token_s

    def swap_s(self, num_blocks: int) -> float:
        """There and back."""
        return 2 * num_blocks * self.move_s

    def record_step(self, num_prompt: int, seconds: float) -> None:
        """A step took so long and computed so many positions whose tokens the host had."""
        if num_prompt == 0:
            self.step_s = _moving_average(self.step_s, seconds)
        elif num_prompt >= 64 and seconds > self.step_s:  # of fewer, one cannot tell them from the rest of the step
            self.token_s = _moving_average(self.token_s, (seconds - self.step_s) / num_prompt)

    def record_return(self, num_found: int, num_known: int) -> None:
        """A request that had been preempted to be recomputed came back, and the cache still had so much of it."""
        self.kept += EMA_WEIGHT * (num_found / num_known - self.kept)


def _moving_average(before: float, now: float) -> float:
    return now if before == 0 else before + EMA_WEIGHT * (now - before)


@dataclass(slots=True)
class Policy:
    """First come, first served; or by priority (lower first), and within one priority first come, first served.

    ageing  by priority, a request is overtaken by at most so many later arrivals for each step of priority between
            them, so that nobody waits for ever; 0: by any number
    mode    how a victim gives way. None chooses what takes less time to undo by `costs`; while these are not known, as
            the paper does (section 4.5 and its artifact): a single sequence is recomputed in one prefill, a group is
            swapped, because recomputing loses what its sequences share
    victims who gives way
    long_prefill_token_threshold  a prompt of which more is due is long, and computes so many positions a step at most;
            0: none is
    max_long_partial_prefills  long prompts of a tenant that are computed at a time. The next one waits, and short ones
            pass it

    Whoever makes another must not raise in it: it is asked in the middle of `Scheduler.schedule`, and an exception
    there ends the engine.
    """

    by_priority: bool = False
    mode: PreemptionMode | None = None
    ageing: int = 0
    victims: VictimPolicy = VictimPolicy.LATEST
    long_prefill_token_threshold: int = 0
    max_long_partial_prefills: int = 1
    costs: PreemptionCosts = field(default_factory=PreemptionCosts)

    def order(self, request: Request, arrival: int) -> tuple[int, int]:
        """Its place in line; the smallest is served first. It never changes: who waits for longer has arrived earlier,
        so ageing is an advance given once."""
        place = arrival + ARRIVALS_PER_INDEX * request.index_in_call
        if not self.by_priority:
            return (0, place)
        if self.ageing:
            return (request.priority * self.ageing + place, place)
        return (request.priority, place)

    def victim(self, running: Seq[Request], asker: Request, cache: KVCacheManager) -> Request:
        """Of those running, somebody behind the asker, or the asker itself when nobody is.

        They are planned in order, so it has no slice yet in the plan being made; and the first of all only ever gives
        way to itself, so somebody always gets on.
        """
        if self.victims is VictimPolicy.LATEST or running[-1] is asker:
            return running[-1]
        behind = running[running.index(asker) + 1 :]
        return min(reversed(behind), key=lambda r: self._return_s(r, cache))

    def _return_s(self, victim: Request, cache: KVCacheManager) -> float:
        num_blocks, num_positions = cache.count_private_blocks(victim)
        if not self.costs.known:
            return num_positions
        swap_s, recompute_s = self.costs.swap_s(num_blocks), self.costs.recompute_s(num_positions)
        if self.mode is None:
            return min(swap_s, recompute_s)
        return swap_s if self.mode is PreemptionMode.SWAP else recompute_s

    def preemption_mode(self, victim: Request, num_blocks: int, num_positions: int) -> PreemptionChoice:
        """The victim alone holds so many blocks, with so many positions in them."""
        if self.mode is not None:
            return PreemptionChoice(self.mode, "forced")
        if self.costs.known:
            swaps = self.costs.swap_s(num_blocks) < self.costs.recompute_s(num_positions)
            return PreemptionChoice(PreemptionMode.SWAP if swaps else PreemptionMode.RECOMPUTE, "cheaper")
        group = len(victim.sequences) > 1
        return PreemptionChoice(PreemptionMode.SWAP if group else PreemptionMode.RECOMPUTE, "rule")

    def headroom(self, request: Request) -> int:
        """Positions that all who run, itself included, can grow by when it comes back: twice as many each time that it
        was preempted, so that it loses its place fewer times than its output has doublings."""
        return INITIAL_HEADROOM << min(request.num_preemptions - 1, 20) if request.num_preemptions else 0
