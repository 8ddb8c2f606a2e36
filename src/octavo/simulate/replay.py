"""Simulates a flight recorder's dump: exactly as recorded, or with other settings.

`ExactReplay` makes the recorded calls to the same scheduler and observes the result: the outcome of each request, and
the time of each step on the recorded machine. A cost model is fitted to those steps. `what_if` is then an ordinary
simulation of the same arrivals on a machine of that speed, where settings may differ.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import groupby
from typing import Any

from octavo.config import GIB, EngineArgs
from octavo.core import events as ev
from octavo.core.in_flight import InFlightStep
from octavo.core.plan import RowSetup
from octavo.errors import OctavoError, ParameterError, TraceError
from octavo.integers import cdiv
from octavo.simulate.allocators import split_of
from octavo.simulate.calibrate import MeasuredStep, fit
from octavo.simulate.cost import CostModel, LinearCost, StepWork, step_work
from octavo.simulate.devices import DEVICES
from octavo.simulate.executor import OUTPUT_TOKEN
from octavo.simulate.models import ModelShape
from octavo.simulate.simulation import MAX_POOL_SAMPLES, PoolSample, Records, SimConfig, simulate
from octavo.simulate.traces import Arrival
from octavo.view.recording.format import CallKind, RecordedRequest
from octavo.view.recording.player import Player, Recording, ReplayedCall

MODEL = ModelShape("recorded", 1, 1, 1, 1, 1, 1, max_len=1 << 30)
"""A placeholder: the recording holds the number of blocks, and the fitted cost the step times."""


class ExactReplay:
    """Replays a recording exactly. All decisions are the recorded ones.

    records       requests that arrived during the recording and finished
    steps         work and duration of each step
    num_present   requests present when the recording began; they are in no record
    num_aborted   requests aborted by their callers or by an error
    death         the exception of the bug that ended the engine; "" if it lived
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.records = Records()
        self.steps: list[MeasuredStep] = []
        self.num_aborted = 0
        self.death = ""
        self._now_s = 0.0
        self._arrived_s: dict[str, float] = {}
        self._first_s: dict[str, float] = {}
        self._admitted: dict[str, ev.Admitted] = {}
        self._submitted: list[tuple[StepWork, float, float]] = []  # plans in flight: work, submission time, host time
        self._last_end_s: float | None = None
        self._step_ends_s: list[float] = []
        self._next_sample_s, self._sample_s = 0.0, recording.duration_s / MAX_POOL_SAMPLES
        player = recording.replay()
        self.num_present = len(player.scheduler.requests)
        self._move_s = player.scheduler.policy.costs.move_s
        player.scheduler.events.subscribe(self._listen)
        self._run(player)
        self.records.end_s = recording.duration_s
        first_s = min(self.records.arrived_s, default=0.0)
        ends = zip(self.steps, self._step_ends_s, strict=True)
        self.records.busy_s = sum(step.step_s for step, end_s in ends if end_s > first_s)
        self.records.num_unfinished = len(player.scheduler.requests)

    def _run(self, player: Player) -> None:
        calls = player.calls()
        while True:
            try:
                call = next(calls, None)
            except OctavoError:
                raise
            except Exception as error:  # the bug that ended the engine is still there, or the file is damaged
                self.death = f"{type(error).__name__}: {error}"
                if self.recording.file.reason != "crash":
                    raise TraceError(f"the recording cannot be replayed: {self.death}") from error
                return
            if call is None:
                return
            self._observe(call, player)

    def _observe(self, call: ReplayedCall, player: Player) -> None:
        scheduler = player.scheduler
        self._now_s = call.time_s
        if call.kind is CallKind.ADD and call.request is not None:
            self._arrived_s[call.request.request_id] = call.time_s
        elif call.kind is CallKind.PLAN and call.step:
            idle = self._last_end_s is None or bool(self._submitted)
            host_s = 0.0 if idle or self._last_end_s is None else call.time_s - self._last_end_s
            self._submitted.append((step_work(call.step.plan), call.time_s, host_s))
            self.records.num_steps += 1
        elif call.kind in (CallKind.RESULT, CallKind.UNEVEN_RESULT, CallKind.PARTIAL_RESULT) and call.step is not None:
            self._observe_tokens(call.step)
            if call.kind is not CallKind.PARTIAL_RESULT and self._submitted:
                self._observe_step(*self._submitted.pop(0))
            if not scheduler.has_work:
                self._last_end_s = None  # do not count the time until the next arrival
        elif call.kind is CallKind.FAIL:
            self._submitted.clear()
        if call.time_s >= self._next_sample_s and call.kind is CallKind.PLAN:
            pool, cache = scheduler.cache.pool, scheduler.cache
            queues = len(scheduler.running), len(scheduler.waiting), len(scheduler.swapped)
            split = split_of(cache, scheduler.running)
            blocks = pool.num_used, pool.num_refs - pool.num_used
            self.records.samples.append(PoolSample(call.time_s, split, *blocks, *queues))
            self._next_sample_s = call.time_s + self._sample_s

    def _observe_tokens(self, step: InFlightStep) -> None:
        for i in step.plan.host_tokens:
            request = step.sequences[i].request
            if step.plan.num_sampled[i] and request.request_id not in self._first_s:
                self._first_s[request.request_id] = self._now_s

    def _observe_step(self, work: StepWork, submitted_s: float, host_s: float) -> None:
        begin_s = submitted_s if self._last_end_s is None else max(submitted_s, self._last_end_s)
        step_s = self._now_s - begin_s - self._move_s * work.num_swapped
        if step_s > 0:
            self.steps.append(MeasuredStep(work, step_s, host_s))
            self._step_ends_s.append(self._now_s)
        self._last_end_s = self._now_s

    def _listen(self, event: ev.Event) -> None:
        records = self.records
        if isinstance(event, ev.Preempted):
            records.num_preempted[event.how] += 1
        elif isinstance(event, ev.Waiting):
            records.num_waits[event.reason] += 1
        elif isinstance(event, ev.Admitted):
            self._admitted.setdefault(event.request_id, event)
        elif isinstance(event, ev.Finished):
            name = event.request_id
            arrived_s, admitted = self._arrived_s.pop(name, None), self._admitted.pop(name, None)
            if event.reason in ("abort", "error"):
                self.num_aborted += 1
            elif arrived_s is not None and admitted is not None:
                records.index.append(int(name))
                records.arrived_s.append(arrived_s)
                records.first_s.append(self._first_s.pop(name, self._now_s))
                records.finished_s.append(self._now_s)
                request = self.recording.requests[int(name)]
                records.num_prompt.append(request.num_prompt)
                records.num_output.append(event.num_tokens)
                lengths = [sample.num_tokens for sample in request.samples.values()]
                records.longest.append(max(lengths, default=event.num_tokens))
                records.num_cached.append(admitted.num_cached_tokens)

    def cost(self) -> LinearCost:
        """A cost model fitted to the recorded steps. Raises `TraceError` if there are too few."""
        if len(self.steps) < 10:
            raise TraceError(f"the recording has {len(self.steps)} steps, too few to fit step times; pass --cost FILE")
        return fit(self.steps, move_s=self._move_s)


class RecordedTokens:
    """`TokenSource` that returns a recording's tokens, so that a later prompt which continues an output hits the prefix
    cache. The seed of a simulated request is its index in the recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._sample_tokens: dict[tuple[int, int], array[int]] = {}

    def samples(self, setup: RowSetup, position: int, count: int) -> Seq[Any]:
        if setup.returns_candidates:  # beam candidates are not recorded: as many as there were
            return [(-1.0 - i, OUTPUT_TOKEN + i) for i in range(count)]
        return [self._at(setup.seed, i, position + 1, 1)[0] for i in range(count)]

    def tokens(self, setup: RowSetup, position: int, count: int) -> Seq[int]:
        return self._at(setup.seed, setup.sample_index, position + 1, count)

    def _at(self, request_index: int, sample_index: int, begin: int, count: int) -> list[int]:
        """`count` tokens of a sample from position `begin`; constants past its end."""
        key = request_index, sample_index
        if key not in self._sample_tokens:
            request = self._recording.file.requests[request_index]
            self._sample_tokens[key] = self._recording.tokens.sample(request, sample_index)
        all_tokens = self._sample_tokens[key]
        known = all_tokens[begin : begin + count].tolist()
        if begin + count >= len(all_tokens):
            del self._sample_tokens[key]
        return known + [OUTPUT_TOKEN] * (count - len(known))


def what_if(recording: Recording, settings: dict[str, Any], cost: CostModel, **options: Any) -> Records:
    """Simulate the recorded arrivals with some engine options changed. `options` are those of `simulate`.

    Requests that were present when the recording began arrive at its start, with an empty prefix cache.
    """
    config, tokens = config_from(recording, settings, cost), RecordedTokens(recording)
    return simulate(config, arrivals_from(recording), token_source=tokens, **options)


def arrivals_from(recording: Recording) -> Iterator[Arrival]:
    """The recorded requests in order; an aborted request has the length it reached."""
    times = _times(recording)
    for request in recording.file.requests:
        num_output = max((sample.num_tokens for sample in request.samples.values()), default=_num_choices(request))
        tokens = recording.tokens
        prompt = tokens.sample(request, 0)[: request.num_prompt] if request.samples else tokens.prompt(request)
        runs = tuple((token, len(list(same))) for token, same in groupby(prompt))
        sizes = max(1, num_output), request.width, request.beam_search
        yield Arrival(times.get(request.number, 0.0), runs, *sizes, tuple(request.marks))


def _times(recording: Recording) -> dict[int, float]:
    """Arrival times by number of the requests that arrived during the recording, the last ones in the file."""
    times: list[float] = []
    for segment in recording.file.segments:
        at_s = array("d", segment.times_s)
        times += [at_s[i] - recording.begin_s for i, op in enumerate(segment.kinds) if op == CallKind.ADD]
    numbers = [arrival.number for arrival in recording.file.requests]
    return dict(zip(numbers[len(numbers) - len(times) :], times, strict=True))


def _num_choices(request: RecordedRequest) -> int:
    """Number of steps of a beam search."""
    count = at = 0
    while at < len(request.beam_choices):
        at += 1 + 2 * int(request.beam_choices[at])
        count += 1
    return count


def config_from(recording: Recording, settings: dict[str, Any], cost: CostModel) -> SimConfig:
    """The recorded engine with the options in `settings` changed."""
    recorded, engine = recording.file.settings, recording.file.engine
    if recorded.get("num_speculative_tokens"):
        text = "the recorded engine speculates, and a simulated one does not; replay it as recorded, without options"
        raise ParameterError(text, param="replay")
    block_size: int = settings.get("block_size") or recorded["block_size"]
    num_tokens = recorded["num_blocks"] * recorded["block_size"]
    windows = recorded.get("windows") or ()  # older recordings have none
    state_blocks, interval = recorded.get("state_blocks", 0), recorded.get("checkpoint_interval", 0)
    model = replace(MODEL, num_layers=1 + len(windows), windows=(recorded["attention_window"], *windows))
    block_bytes = MODEL.kv_cache(recorded["block_size"]).bytes_per_block  # a layer each, of any group
    model = replace(model, state_size=state_blocks * block_bytes // 4)
    known: dict[str, Any] = {
        "block_size": block_size,
        "mamba_block_size": cdiv(interval, block_size) * block_size or None,
        "num_gpu_blocks_override": max(1, num_tokens // block_size),
        "max_model_len": engine["max_model_len"],
        "max_num_seqs": recorded["num_rows"],
        "max_num_batched_tokens": recorded["max_num_batched_tokens"],
        "decode_window": recorded["decode_window"],
        "enable_prefix_caching": recorded["enable_prefix_caching"],
        "preemption_mode": recorded["mode"] or "auto",
        "preemption_victim": recorded["victims"],
        "scheduling_policy": "priority" if recorded["by_priority"] else "fcfs",
        "priority_ageing": recorded["ageing"],
        "long_prefill_token_threshold": recorded["long_prefill_token_threshold"],
        "max_long_partial_prefills": recorded["max_long_partial_prefills"],
        "swap_space": (recorded["num_host_blocks"] + 0.5) * block_bytes / GIB,
        "watermark": min(0.5, (recorded["num_watermark_blocks"] + 0.5) / recorded["num_blocks"]),
        "async_scheduling": engine["overlap"],
    }
    return SimConfig(model, DEVICES["h100"], EngineArgs(model=model.name, **(known | settings)), cost=cost)
