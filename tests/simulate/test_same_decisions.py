"""A simulation with the clock readings of a real run makes the same decisions: the same events in the same order.

The run uses a tiny model on the CPU and the real clock. Its pool is so small that requests are preempted. It has shared
prefixes, samples that fork, stop tokens and aborts.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from octavo.config import EngineArgs
from octavo.core import events as ev
from octavo.engine.request_update import RequestUpdate, SampleUpdate
from octavo.frontend.build import build
from octavo.params.sampling_params import SamplingParams
from octavo.simulate.cost import LinearCost
from octavo.simulate.devices import DEVICES
from octavo.simulate.live import RecordingClock, ReplayClock, ScheduledCall, ScriptedTokens, run_calls
from octavo.simulate.models import ModelShape
from octavo.simulate.simulation import Records, Replica, SimConfig
from tests.models.tiny import VOCAB_SIZE, make_tiny_checkpoint

OPTIONS: dict[str, Any] = {
    "block_size": 4,
    "num_gpu_blocks_override": 96,
    "max_model_len": 96,
    "max_num_seqs": 24,
    "max_num_batched_tokens": 64,
    "swap_space": 1.0,
    "watermark": 0.02,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


class LiveRun(NamedTuple):
    """A real run: last updates, events, clock readings. `move_s` is its measured time of swapping a block."""

    updates: dict[str, RequestUpdate]
    events: list[ev.Event]
    readings_s: array[float] = array("d")
    move_s: float = 0.0

    @property
    def samples(self) -> dict[str, list[SampleUpdate]]:
        """By request, in order of their indices."""
        return {name: sorted(u.samples, key=lambda s: s.index) for name, u in self.updates.items()}


def calls_of(num_requests: int, rate: float, seed: int) -> list[ScheduledCall]:
    rnd = random.Random(seed)
    prefixes = [[rnd.randrange(3, VOCAB_SIZE) for _ in range(rnd.randint(4, 20))] for _ in range(4)]
    calls, now = [], 0.0
    for i in range(num_requests):
        now += rnd.expovariate(rate)
        prompt = rnd.choice(prefixes) if rnd.random() < 0.5 else []
        prompt = prompt + [rnd.randrange(3, VOCAB_SIZE) for _ in range(rnd.randint(1, 24))]
        params = SamplingParams(
            n=rnd.choice([1, 1, 1, 2, 4]),
            max_tokens=rnd.randint(1, 30),
            ignore_eos=True,
            seed=i,
            detokenize=False,
            stop_token_ids=[rnd.randrange(VOCAB_SIZE)],
        )
        calls.append(ScheduledCall(now, str(i), prompt, params))
        if rnd.random() < 0.1:
            calls.append(ScheduledCall(now + rnd.expovariate(20), str(i)))
    return sorted(calls, key=lambda call: call.time_s)


def live(directory: Path, calls: list[ScheduledCall], **options: Any) -> LiveRun:
    built = build(EngineArgs(model=str(directory), device="cpu", skip_tokenizer_init=True, **OPTIONS, **options))
    engine, events, watch = built.engine, list[ev.Event](), RecordingClock()
    engine._clock = watch
    try:
        engine.scheduler.events.subscribe(events.append, blocks=True)
        with engine.gc_pause:
            updates = run_calls(engine, calls, watch)
    finally:
        engine.close()
    return LiveRun(updates, events, watch.readings_s, engine.scheduler.policy.costs.move_s)


def replayed(calls: list[ScheduledCall], run: LiveRun, **options: Any) -> LiveRun:
    """The same calls in a simulation with the run's clock readings and output tokens."""
    shape = ModelShape("tiny", 10_000, 1, 64, 4, 2, 16, 96, "float32")
    args = EngineArgs(model="tiny", **OPTIONS, **options)
    config = SimConfig(shape, DEVICES["h100"], args.resolved("cpu"), cost=LinearCost(1e-3, 0, 0, move_s=run.move_s))
    script = ScriptedTokens({int(name): [s.token_ids for s in samples] for name, samples in run.samples.items()})
    replica = Replica(config, Records(), token_source=script, interval_s=1e9)
    clock, events = ReplayClock(run.readings_s), list[ev.Event]()
    replica.engine._clock = clock
    replica.scheduler.events.subscribe(events.append, blocks=True)
    try:
        return LiveRun(run_calls(replica.engine, calls, clock), events)
    except StopIteration:  # it read the clock more often
        return LiveRun({}, events)


def compare(directory: Path, num_requests: int, rate: float, seed: int, **options: Any) -> Counter[str]:
    calls = calls_of(num_requests, rate, seed)
    run = live(directory, calls, **options)
    again = replayed(calls, run, **options)
    decided, simulated = run.events, again.events
    for i, (a, b) in enumerate(zip(decided, simulated, strict=False)):
        assert a == b, (i, decided[i - 3 : i + 1], simulated[i - 3 : i + 1])
    assert len(decided) == len(simulated)
    assert again.samples == run.samples
    seen = Counter(type(event).__name__ for event in decided)
    seen.update(f"preempted by {e.how}" for e in decided if isinstance(e, ev.Preempted))
    seen.update(f"ended by {e.reason}" for e in decided if isinstance(e, ev.Finished))
    seen["cached"] = sum(e.num_cached_tokens for e in decided if isinstance(e, ev.Admitted))
    return seen


@pytest.mark.parametrize(
    ("window", "overlap", "mode"),
    [(1, True, "auto"), (4, True, "recompute"), (1, False, "swap"), (4, False, "auto")],
)
def test_simulation_makes_the_decisions_of_the_run(tiny: Path, window: int, overlap: bool, mode: str) -> None:
    """With `auto`, the preemption mode depends on times measured by the engine: with the same clock, the same mode."""
    seen = compare(tiny, 160, 400, window, decode_window=window, async_scheduling=overlap, preemption_mode=mode)
    for what in ("Preempted", "ended by abort", "ended by stop", "Copied", "cached"):
        assert seen[what] > 0, (what, seen)
    if mode != "auto":
        assert seen[f"preempted by {mode}"] == seen["Preempted"]


@pytest.mark.slow
def test_ten_thousand_requests_have_the_same_decisions(tiny: Path) -> None:
    seen = compare(tiny, 10_000, 1_000, 0)
    assert seen["Preempted"] > 100, seen
    for what in ("ended by abort", "ended by stop", "Copied", "cached"):
        assert seen[what] > 500, (what, seen)


def test_another_clock_leads_to_other_decisions(tiny: Path) -> None:
    """Shows that the comparison above can fail: other times bring other arrivals to an iteration."""
    calls = calls_of(120, 400, 7)
    run = live(tiny, calls)
    late = run._replace(readings_s=array("d", [look * 1.5 for look in run.readings_s]))
    assert replayed(calls, run).events == run.events
    assert replayed(calls, late).events != run.events
