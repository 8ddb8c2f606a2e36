"""Simulates a flight recorder's dump: exactly as recorded, or with other settings.

`ExactReplay` makes the recorded calls to the same scheduler and observes the result: the outcome of each request, and
the time of each step on the recorded machine. A cost model is fitted to those steps. `what_if` is then an ordinary
simulation of the same arrivals on a machine of that speed, where settings may differ.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import groupby
from typing import Any

from octavo.config import GIB, EngineArgs
from octavo.core import events as ev
from octavo.core.plan import RowSetup, StepPlan
from octavo.errors import OctavoError, TraceError
from octavo.simulate.allocators import split_of
from octavo.simulate.calibrate import MeasuredStep, fit
from octavo.simulate.cost import DEVICES, CostModel, LinearCost, StepWork, step_work
from octavo.simulate.executor import OUTPUT_TOKEN
from octavo.simulate.models import ModelShape
from octavo.simulate.simulation import MAX_POOL_SAMPLES, PoolSample, Records, SimConfig, simulate
from octavo.simulate.traces import Arrival
from octavo.view.recording.player import Player, Recording, ReplayedCall
from octavo.view.recording.recorder import CallKind, RecordedRequest

MODEL = ModelShape("recorded", 1, 1, 1, 1, 1, 1, 1)
"""Nothing depends on it: the recording says how many blocks there are, and a fitted cost what steps take."""


class ExactReplay:
    """A recording once more. Nothing is decided here.

    records       of the requests that arrived while it was recorded and came to their end
    steps         what each step was asked for, and what it took
    num_present   requests that were there before; they are in no record
    num_aborted   by their callers, or because something was wrong
    death         what the engine died of, where that was a bug; "" if it lived
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
        self._submitted: list[tuple[StepWork, float, float]] = []  # of the plans in flight: work, when, the host's time
        self._ended_s: float | None = None
        self._ends_s: list[float] = []
        self._next_sample_s, self._sample_s = 0.0, recording.duration_s / MAX_POOL_SAMPLES
        player = recording.replay()
        self.num_present = len(player.scheduler.requests)
        self._move_s = player.scheduler.policy.costs.move_s
        player.scheduler.events.subscribe(self._listen)
        self._run(player)
        self.records.end_s = recording.duration_s
        first_s = min(self.records.arrived_s, default=0.0)
        self.records.busy_s = sum(
            step.step_s for step, at_s in zip(self.steps, self._ends_s, strict=True) if at_s > first_s
        )
        self.records.num_unfinished = len(player.scheduler.requests)

    def _run(self, player: Player) -> None:
        calls = player.calls()
        while True:
            try:
                call = next(calls, None)
            except OctavoError:
                raise
            except Exception as error:  # the bug that ended it is still there, or the file is damaged
                self.death = f"{type(error).__name__}: {error}"
                if self.recording.file.reason != "crash":
                    raise TraceError(f"the recording cannot be replayed: {self.death}") from error
                return
            if call is None:
                return
            self._note(call, player)

    def _note(self, call: ReplayedCall, player: Player) -> None:
        scheduler = player.scheduler
        self._now_s = call.time_s
        if call.kind is CallKind.ADD and call.request is not None:
            self._arrived_s[call.request.request_id] = call.time_s
        elif call.kind is CallKind.PLAN and call.plan:
            idle = self._ended_s is None or bool(self._submitted)
            host_s = 0.0 if idle or self._ended_s is None else call.time_s - self._ended_s
            self._submitted.append((step_work(call.plan), call.time_s, host_s))
            self.records.num_steps += 1
        elif call.kind in (CallKind.RESULT, CallKind.UNEVEN_RESULT, CallKind.PARTIAL_RESULT) and call.plan is not None:
            self._note_tokens(call.plan)
            if call.kind is not CallKind.PARTIAL_RESULT and self._submitted:
                self._note_step(*self._submitted.pop(0))
            if not scheduler.has_work:
                self._ended_s = None  # what passes until the next arrival is nobody's time
        elif call.kind is CallKind.FAIL:
            self._submitted.clear()
        if call.time_s >= self._next_sample_s and call.kind is CallKind.PLAN:
            pool, cache = scheduler.cache.pool, scheduler.cache
            queues = len(scheduler.running), len(scheduler.waiting), len(scheduler.swapped)
            split = split_of(cache, scheduler.running)
            blocks = pool.num_used, pool.num_refs - pool.num_used
            self.records.samples.append(PoolSample(call.time_s, split, *blocks, *queues))
            self._next_sample_s = call.time_s + self._sample_s

    def _note_tokens(self, plan: StepPlan) -> None:
        for i in plan.host_tokens:
            request = plan.sequences[i].request
            if plan.num_sampled[i] and request.request_id not in self._first_s:
                self._first_s[request.request_id] = self._now_s

    def _note_step(self, work: StepWork, submitted_s: float, host_s: float) -> None:
        begin_s = submitted_s if self._ended_s is None else max(submitted_s, self._ended_s)
        step_s = self._now_s - begin_s - self._move_s * work.num_swapped
        if step_s > 0:
            self.steps.append(MeasuredStep(work, step_s, host_s))
            self._ends_s.append(self._now_s)
        self._ended_s = self._now_s

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
                lengths = [said.num_tokens for said in request.samples.values()]
                records.longest.append(max(lengths, default=event.num_tokens))
                records.num_cached.append(admitted.num_cached_tokens)

    def cost(self) -> LinearCost:
        """What a step took on that machine. Raises `TraceError` where there were too few to tell."""
        if len(self.steps) < 10:
            raise TraceError(
                f"the recording has {len(self.steps)} steps, too few to learn times from; give --cost FILE"
            )
        return fit(self.steps, move_s=self._move_s)


class RecordedTokens:
    """`TokenSource` that returns a recording's tokens, so that a later prompt which continues an output hits the prefix
    cache. The seed of a simulated request is its index in the recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._whole: dict[tuple[int, int], array[int]] = {}

    def samples(self, setup: RowSetup, position: int, count: int) -> Seq[Any]:
        if setup.returns_candidates:  # beam candidates are not recorded: as many as there were
            return [(-1.0 - i, OUTPUT_TOKEN + i) for i in range(count)]
        return [self._at(setup.seed, i, position + 1, 1)[0] for i in range(count)]

    def tokens(self, setup: RowSetup, position: int, count: int) -> Seq[int]:
        return self._at(setup.seed, setup.sample_index, position + 1, count)

    def _at(self, place: int, index: int, begin: int, count: int) -> list[int]:
        key = place, index
        if key not in self._whole:
            self._whole[key] = self._recording.sample(self._recording.file.requests[place], index)
        whole = self._whole[key]
        known = whole[begin : begin + count].tolist()
        if begin + count >= len(whole):
            del self._whole[key]
        return known + [OUTPUT_TOKEN] * (count - len(known))


def what_if(recording: Recording, settings: dict[str, Any], cost: CostModel, **options: Any) -> Records:
    """The same arrivals, with some of the engine's options set otherwise. `options` are those of `simulate`.

    Who was there when the recording began arrives at its beginning, to an empty cache.
    """
    return simulate(
        setup_of(recording, settings, cost), arrivals_of(recording), token_source=RecordedTokens(recording), **options
    )


def arrivals_of(recording: Recording) -> Iterator[Arrival]:
    """In order; aborted requests are as long as they became."""
    times = _times(recording)
    for request in recording.file.requests:
        num_output = max((said.num_tokens for said in request.samples.values()), default=_num_choices(request))
        prompt = recording.sample(request, 0)[: request.num_prompt] if request.samples else recording.prompt(request)
        runs = tuple((token, len(list(same))) for token, same in groupby(prompt))
        yield Arrival(times.get(request.number, 0.0), runs, max(1, num_output), request.width, request.beam_search)


def _times(recording: Recording) -> dict[int, float]:
    """When each request arrived, of those that arrived while it was recorded. They are the last ones in the file."""
    times: list[float] = []
    for segment in recording.file.segments:
        at_s = array("d", segment.times_s)
        times += [at_s[i] - recording.begin_s for i, op in enumerate(segment.kinds) if op == CallKind.ADD]
    numbers = [arrival.number for arrival in recording.file.requests]
    return dict(zip(numbers[len(numbers) - len(times) :], times, strict=True))


def _num_choices(request: RecordedRequest) -> int:
    """Steps of a beam search."""
    count = place = 0
    while place < len(request.beam_choices):
        place += 1 + 2 * int(request.beam_choices[place])
        count += 1
    return count


def setup_of(recording: Recording, settings: dict[str, Any], cost: CostModel) -> SimConfig:
    """The engine that was recorded, but for these options."""
    was, engine = recording.file.settings, recording.file.engine
    block_size = settings.get("block_size", was["block_size"])
    num_tokens = was["num_blocks"] * was["block_size"]
    block_bytes = MODEL.kv_bytes_per_token * was["block_size"]
    known: dict[str, Any] = {
        "block_size": block_size,
        "num_gpu_blocks_override": max(1, num_tokens // block_size),
        "max_model_len": engine["max_model_len"],
        "max_num_seqs": was["num_rows"],
        "max_num_batched_tokens": was["max_num_batched_tokens"],
        "decode_window": was["decode_window"],
        "enable_prefix_caching": was["enable_prefix_caching"],
        "preemption_mode": was["mode"] or "auto",
        "preemption_victim": was["victims"],
        "scheduling_policy": "priority" if was["by_priority"] else "fcfs",
        "priority_ageing": was["ageing"],
        "long_prefill_token_threshold": was["long_prefill_token_threshold"],
        "max_long_partial_prefills": was["max_long_partial_prefills"],
        "swap_space": (was["num_host_blocks"] + 0.5) * block_bytes / GIB,
        "watermark": min(0.5, (was["num_watermark_blocks"] + 0.5) / was["num_blocks"]),
        "async_scheduling": engine["overlap"],
    }
    return SimConfig(MODEL, DEVICES["h100"], EngineArgs(model=MODEL.name, **(known | settings)), cost=cost)
