"""Runs a trace on a real engine in real time, and replays such a run in a simulation."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.plan import RowSetup
from octavo.engine.engine import Engine
from octavo.engine.engine_request import EngineRequest
from octavo.engine.request_update import RequestUpdate
from octavo.params.sampling_params import SamplingParams
from octavo.simulate.executor import OUTPUT_TOKEN


@dataclass(frozen=True, slots=True)
class ScheduledCall:
    """A request, or an abort, made `time_s` after the start. The seed of its parameters identifies it."""

    time_s: float
    request_id: str
    prompt_token_ids: Sequence[int] = ()
    params: SamplingParams | None = None  # None: an abort


class RecordingClock:
    """Seconds since its creation; records each reading. These are all times that a run's decisions depend on."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self.readings_s: array[float] = array("d")

    def __call__(self) -> float:
        now = time.monotonic() - self._begin
        self.readings_s.append(now)
        return now

    def wait_until(self, time_s: float) -> None:
        if (wait_s := time_s + self._begin - time.monotonic()) > 0:
            time.sleep(wait_s)


class ReplayClock:
    """Returns the readings of a `RecordingClock`, one per call."""

    def __init__(self, readings_s: Iterable[float]) -> None:
        self._readings = iter(readings_s)

    def __call__(self) -> float:
        return next(self._readings)

    def wait_until(self, time_s: float) -> None:
        """Returns at once: the recorded run has waited."""


def run_calls(
    engine: Engine, calls: Sequence[ScheduledCall], clock: RecordingClock | ReplayClock
) -> dict[str, RequestUpdate]:
    """Make the calls when they are due, between two steps as a server does. Returns the last update of each request.

    The engine must use the same clock. With a `RecordingClock` this is a run in real time; with the `ReplayClock` of
    such a run, a simulated engine sees the recorded time at every iteration.
    """
    updates: dict[str, RequestUpdate] = {}
    due = 0
    while due < len(calls) or engine.has_work:
        if not engine.has_work:
            clock.wait_until(calls[due].time_s)
        now = clock()
        while due < len(calls) and calls[due].time_s <= now:
            if (update := _submit(engine, calls[due])) is not None:
                updates[update.request_id] = update
            due += 1
        for update in engine.step() if engine.has_work else ():
            updates[update.request_id] = update
    return updates


def _submit(engine: Engine, call: ScheduledCall) -> RequestUpdate | None:
    if call.params is None:
        return engine.abort(call.request_id)
    engine.add_request(EngineRequest(call.request_id, call.prompt_token_ids, call.params))
    return None


class ScriptedTokens:
    """A `TokenSource` that returns the tokens of another run.

    outputs   seed of a request -> tokens of each of its samples. Past their end any token will do: that run
              discarded the tokens it sampled there
    """

    def __init__(self, outputs: Mapping[int, Sequence[Sequence[int]]]) -> None:
        self._outputs = outputs

    def samples(self, setup: RowSetup, position: int, count: int) -> list[Any]:
        samples = self._outputs[setup.seed]
        index = position + 1 - setup.num_prompt
        return [_token(samples, i, index) for i in range(count)]

    def tokens(self, setup: RowSetup, position: int, count: int) -> list[int]:
        first = position + 1 - setup.num_prompt
        samples = self._outputs[setup.seed]
        return [_token(samples, setup.sample_index, first + i) for i in range(count)]


def _token(samples: Sequence[Sequence[int]], sample: int, index: int) -> int:
    tokens = samples[sample] if sample < len(samples) else ()
    return tokens[index] if index < len(tokens) else OUTPUT_TOKEN
