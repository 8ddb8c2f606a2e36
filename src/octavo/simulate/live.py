"""The same trace on a real engine in real time, and what it takes for a simulation to follow that run."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.plan import RowSetup
from octavo.engine.engine import Engine
from octavo.engine.outputs import RequestOutput
from octavo.params.sampling_params import SamplingParams
from octavo.simulate.executor import OUTPUT_TOKEN


@dataclass(frozen=True, slots=True)
class ScheduledCall:
    """A request as it was made, or its abort: `time_s` after the beginning. Its parameters' seed is its name."""

    time_s: float
    request_id: str
    prompt_token_ids: Sequence[int] = ()
    params: SamplingParams | None = None  # None: an abort


class Stopwatch:
    """Seconds since it was made, and what it told at each look: all of a run's times that decisions depend on."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self.looks_s: array[float] = array("d")

    def __call__(self) -> float:
        now = time.monotonic() - self._begin
        self.looks_s.append(now)
        return now

    def wait_until(self, time_s: float) -> None:
        if (wait_s := time_s + self._begin - time.monotonic()) > 0:
            time.sleep(wait_s)


class RecordedClock:
    """Tells what another run's stopwatch told, a look at a time."""

    def __init__(self, looks_s: Iterable[float]) -> None:
        self._looks = iter(looks_s)

    def __call__(self) -> float:
        return next(self._looks)

    def wait_until(self, time_s: float) -> None:
        """The other run has waited."""


def run_calls(
    engine: Engine, calls: Sequence[ScheduledCall], clock: Stopwatch | RecordedClock
) -> dict[str, RequestOutput]:
    """Make the calls when they are due, between two steps as a server does; what each request had at its end.

    The engine must look at the same clock: with a stopwatch this is a run in real time; with the `RecordedClock` of
    such a run, a simulated engine sees at every turn of the loop what that run saw.
    """
    outputs: dict[str, RequestOutput] = {}
    due = 0
    while due < len(calls) or engine.has_work:
        if not engine.has_work:
            clock.wait_until(calls[due].time_s)
        now = clock()
        while due < len(calls) and calls[due].time_s <= now:
            if (output := _make(engine, calls[due])) is not None:
                outputs[output.request_id] = output
            due += 1
        for output in engine.step() if engine.has_work else ():
            outputs[output.request_id] = output
    return outputs


def _make(engine: Engine, call: ScheduledCall) -> RequestOutput | None:
    if call.params is None:
        return engine.abort(call.request_id)
    engine.add_request(call.request_id, call.prompt_token_ids, call.params)
    return None


class ScriptedTokens:
    """`TokenSource` that say what another run's model said.

    outputs   seed of a request -> its samples' tokens. Past their end, where that run sampled too much, it does not
              matter what is said.
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
