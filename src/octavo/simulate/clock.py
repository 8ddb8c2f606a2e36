"""Time that passes only when somebody says so."""

from __future__ import annotations


class VirtualClock:
    """Seconds since the simulation began. An engine takes it for its clock."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance_to(self, time_s: float) -> None:
        """Never backwards: a time that has passed changes nothing."""
        if time_s > self.now:
            self.now = time_s
