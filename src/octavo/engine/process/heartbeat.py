"""Heartbeats of the engine process: report that it lives, how far it is, and how long its current step may take."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable

from octavo.core import events as ev
from octavo.engine.executor import Executor
from octavo.engine.process.ipc import Heartbeat, Lifeline

NUM_WARM_UP_STEPS = 3
"""First steps, which compile kernels and fill caches: they predict nothing, and each may take WARM_UP_S."""
WARM_UP_S = 300.0
TOLERANCE = 5
"""A step may take this many times as long as expected."""


class StepTimes:
    """Expected step times by number of positions, from earlier steps.

    Steps are grouped by powers of two. The slowest step of a group counts, for larger groups, too. Beyond the largest
    group its time grows in proportion to the size, which overestimates rather than underestimates.

    One thread may record while another one reads.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._slowest: dict[int, float] = {}  # bit length of the number of positions -> seconds

    def record(self, num_positions: int, seconds: float) -> None:
        self.num_steps += 1
        if self.num_steps > NUM_WARM_UP_STEPS:
            bits = num_positions.bit_length()
            self._slowest[bits] = max(seconds, 0.98 * self._slowest.get(bits, 0.0))  # a slow outlier decays slowly

    def allowed_s(self, num_positions: int) -> float:
        """The time limit of a step, in seconds."""
        slowest, bits = self._slowest.copy(), num_positions.bit_length()  # a copy: the other thread may add groups
        if not slowest:
            return WARM_UP_S
        nearest = min((size for size in slowest if size >= bits), default=max(slowest))
        scaled = slowest[nearest] * float(1 << max(0, bits - nearest))
        return TOLERANCE * max([scaled, *(slowest[size] for size in slowest if size <= bits)])


class HeartbeatSender:
    """Sends heartbeats over the lifeline from its own thread, which calls `on_end` when the client is gone.

    executor   its `describe` says where the running step is, for people, and its `places` where each rank is, if it has
               several; its `failure` says why they have ended
    """

    INTERVAL_S = 0.25

    def __init__(self, lifeline: Lifeline, on_end: Callable[[], None]) -> None:
        self._lifeline = lifeline
        self._on_end = on_end
        self._times = StepTimes()
        self._phase = "starting"
        self.executor: Executor | None = None
        self._planned: list[int] = []  # positions of the steps whose results are outstanding
        self._since: float | None = None  # time of the last progress; None: there is no work
        threading.Thread(target=self._run, name="octavo-heartbeat", daemon=True).start()

    def enter(self, phase: str) -> None:
        """Set the phase of the start; the client reports it if the process dies in it."""
        self._phase = phase
        self._send()

    def __call__(self, event: ev.Event) -> None:
        """Listener of the scheduler's events: records each planned step."""
        if isinstance(event, ev.Step):
            self._planned.append(event.num_tokens)

    def begin_work(self) -> None:
        """Start the clock of the current step, unless it runs."""
        if self._since is None:
            self._since = time.monotonic()

    def advance(self, num_in_flight: int) -> None:
        """Record progress of the engine; `num_in_flight` steps are outstanding."""
        now = time.monotonic()
        while len(self._planned) > num_in_flight:
            size = self._planned.pop(0)
            if self._since is not None:
                self._times.record(size, now - self._since)
            self._since = now

    def rest(self) -> None:
        """Record that there is no work."""
        self._since = None
        self._planned.clear()

    def heartbeat(self) -> Heartbeat:
        since, planned = self._since, sum(self._planned)
        waited = None if since is None else time.monotonic() - since
        executor, allowed_s = self.executor, self._times.allowed_s(planned)
        place = "" if waited is None else getattr(executor, "describe", str)()
        ranks = tuple(getattr(executor, "places", tuple)())
        failure = getattr(executor, "failure", "")
        return Heartbeat(self._times.num_steps, waited, allowed_s, self._phase, place, ranks, failure)

    def _send(self) -> None:
        self._lifeline.send(self.heartbeat())

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._lifeline.fileno(), select.POLLIN)
        while True:
            try:
                if poll.poll(self.INTERVAL_S * 1000) and not self._lifeline.receive():
                    break
                self._send()
            except OSError:
                break
        self._on_end()
