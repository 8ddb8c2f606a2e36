"""A virtual clock for simulations."""

from __future__ import annotations


class VirtualClock:
    """Seconds since the simulation began, used as the engine's clock."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance_to(self, time_s: float) -> None:
        """Advance the clock; a time in the past has no effect."""
        if time_s > self.now:
            self.now = time_s
