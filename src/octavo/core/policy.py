"""Who goes first, who gives way, and how: the choices that the scheduler leaves to others."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from octavo.core.request import Request


class PreemptionMode(Enum):
    RECOMPUTE = "recompute"
    """Forget the keys and values; prompt and output so far make one prefill when the request comes back."""
    SWAP = "swap"
    """Keep them on the host."""


@dataclass(slots=True)
class Policy:
    """First come, first served; or by priority (lower first), and within one priority first come, first served.

    mode   how a victim gives way: None chooses per victim as the paper does (section 4.5 and its artifact): a single
           sequence is recomputed in one prefill, a group is swapped, because recomputing loses what its sequences share
    """

    by_priority: bool = False
    mode: PreemptionMode | None = None

    def order(self, request: Request, arrival: int) -> tuple[int, int]:
        """Its place in line; the smallest is served first."""
        return (request.priority if self.by_priority else 0, arrival)

    def victim(self, running: list[Request]) -> Request:
        """The last of those running. They are planned in order, so it has no slice yet in the plan being made."""
        return running[-1]

    def preemption_mode(self, victim: Request) -> PreemptionMode:
        if self.mode is not None:
            return self.mode
        return PreemptionMode.SWAP if len(victim.sequences) > 1 else PreemptionMode.RECOMPUTE
