"""The flight recorder: a recording can be replayed exactly, and simulated with other settings."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo import LLM
from octavo.cli.main import run as octavo
from octavo.config import EngineArgs
from octavo.core import events as ev
from octavo.core.cache.prefix_index import PrefixIndex
from octavo.core.request import Request, Sequence
from octavo.engine.engine_request import EngineRequest, pin_id
from octavo.engine.process.thread import Delivery, EngineThread
from octavo.engine.query import DumpRecording
from octavo.errors import EngineError, ParameterError, TraceError
from octavo.params.sampling_params import SamplingParams
from octavo.simulate import replay
from octavo.simulate.cost import LinearCost
from octavo.simulate.devices import DEVICES
from octavo.simulate.models import MODELS
from octavo.simulate.simulation import Records, Replica, SimConfig, paged
from octavo.simulate.traces import Arrival, Lengths, chat, poisson
from octavo.view.live.messages import Delta, Frame
from octavo.view.live.publisher import Publisher
from octavo.view.live.state import PoolState
from octavo.view.live.summary import NUM_ACCEPTED, Summary
from octavo.view.recording import format as file_format
from octavo.view.recording import recorder as recorder_module
from octavo.view.recording.frames import Replay as Seen
from octavo.view.recording.frames import frames_of_recording
from octavo.view.recording.player import Recording
from octavo.view.recording.recorder import FlightRecorder
from tests.engine.models import make_talking_checkpoint
from tests.proof.oracle import reference
from tests.proof.workloads import RandomPolicy, World

COST = LinearCost(0.05, 1e-5, 1e-5, move_s=1e-3)
COMMON: dict[str, Any] = {"block_size": 4, "num_gpu_blocks_override": 120, "decode_window": 1, "max_num_seqs": 64}


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MIN_SEGMENT_RATIO", 0)


def plain(events: list[Any], names: dict[str, str] | None = None) -> list[Any]:
    """Events without tokens, and with the recorder's numbers in place of request ids."""
    found = []
    for event in events:
        if isinstance(event, ev.Sealed):
            event = event._replace(token_ids=b"")
        elif names is not None:
            known = {k: names[v] for k, v in event._asdict().items() if k in ("request_id", "for_request")}
            event = event._replace(**known)
        found.append(event)
    return found


class RecordedEngine:
    """A recorded engine: its events, the number of events before each segment, and the request numbers by id."""

    def __init__(self, engine: Any, **options: Any) -> None:
        self.events: list[ev.Event] = []
        self.starts: list[int] = []
        self.names: dict[str, str] = {}
        engine.scheduler.events.subscribe(self._listen, blocks=True)
        self.recorder = FlightRecorder(engine, **options)
        self.starts.append(0)
        begin_segment = self.recorder._begin_segment
        self.recorder._begin_segment = lambda now: (self.starts.append(len(self.events)), begin_segment(now))[1]  # type: ignore

    def _listen(self, event: ev.Event) -> None:
        self.events.append(event)
        if isinstance(event, ev.Arrived):
            self.names[event.request_id] = str(self.recorder._requests.num_requests - 1)

    def replayed(self, path: Path) -> int:
        """Replay the dump from each segment and compare the events; returns the number of segments."""
        recording = Recording.load(self.recorder.dump(path=path))
        want = plain(self.events, self.names)
        first = len(self.starts) - len(recording.file.segments)
        for segment in range(len(recording.file.segments)):
            again, got = recording.replay(segment), list[Any]()
            again.scheduler.events.subscribe(got.append, blocks=True)
            for _ in again.calls():
                pass
            rest = want[self.starts[first + segment] :]
            for i, (a, b) in enumerate(zip(rest, plain(got), strict=False)):
                assert a == b, (segment, i, rest[max(0, i - 3) : i + 1], got[max(0, i - 3) : i + 1])
            assert len(got) == len(rest), segment
        return len(recording.file.segments)


class PinnedWorld(World):
    """A workload with pins that end anywhere in the output of others, mostly within a block."""

    def _add_pins(self, todo: list[Request], prefixes: list[list[int]]) -> None:
        rnd = random.Random(self.seed + 0.25)
        for i in range(rnd.randint(1, 4)):
            before = rnd.choice(todo)
            output = reference(before)[0][1]
            prompt = output[: rnd.randint(1, min(50, len(output)))]
            params = SamplingParams(max_tokens=None)
            pin = Request(f"pin{i}", prompt, params, max_tokens=1, salt=before.salt, pin=True)
            todo.insert(rnd.randrange(len(todo) + 1), pin)


def record_world(seed: int, path: Path, make: Callable[..., World] = World) -> tuple[int, Counter[str]]:
    """Record and replay one of the oracle's workloads; returns the number of segments, and what happened. A random
    policy cannot be replayed."""
    world = make(seed, Counter(), listen=True)
    beams, pins = any(r.select_beams for r in world.requests), any(r.pin for r in world.requests)
    if isinstance(world.scheduler.policy, RandomPolicy):
        return 0, Counter()
    ticks = itertools.count()
    engine = SimpleNamespace(scheduler=world.scheduler, limits=SimpleNamespace(max_model_len=100), overlap=True)
    recorded = RecordedEngine(engine, clock=lambda: next(ticks) / 100, segment_s=0.3, keep_s=1e9)
    world.run()
    seen = world.seen + Counter(beams=beams, pins=pins, failed=world.totals["failed steps"])
    return recorded.replayed(path), seen


def worlds(seeds: Iterable[int], path: Path, make: Callable[..., World] = World) -> tuple[int, Counter[str]]:
    num_segments, seen = 0, Counter[str]()
    for seed in seeds:
        more, happened = record_world(seed, path, make)
        num_segments += more
        seen += happened
    return num_segments, seen


def test_replay_from_every_segment_repeats_all_events(tmp_path: Path) -> None:
    """Samples, beams, pins, tenants, priorities, decode windows, swaps, aborts, stop strings and failed steps."""
    num_segments, seen = worlds([*range(20), 31, 45, 56, 60, 63, 72], tmp_path / "f")
    assert num_segments > 30
    for what in ("Preempted swap", "Preempted recompute", "SwapLost", "Recomputed", "beams", "pins", "failed"):
        assert seen[what], what


def test_replay_with_window_groups_repeats_all_events(tmp_path: Path) -> None:
    num_segments, seen = worlds(range(12), tmp_path / "f", partial(World, groups=True))
    assert num_segments > 15
    for what in ("Preempted swap", "Preempted recompute", "beams", "pins", "failed"):
        assert seen[what], what


@pytest.mark.parametrize("groups", [False, True])
def test_replay_with_states_repeats_all_events(tmp_path: Path, groups: bool) -> None:
    """Marks of requests, checkpoints, forks, swaps, pins and failed steps; from every segment."""
    num_segments, seen = worlds(range(16), tmp_path / "f", partial(World, states=True, groups=groups))
    assert num_segments > 15
    for what in ("Preempted swap", "Preempted recompute", "beams", "pins", "failed"):
        assert seen[what], what


def test_tails_of_pins_are_found_again(tmp_path: Path) -> None:
    """Prompts that end like a pin, and outputs or beams that continue like its tail, before or after the pin came. In
    these seeds each case affects the plans."""
    num_segments, seen = worlds([54, 127], tmp_path / "f", PinnedWorld)
    more, also = worlds([264, 817, 908, 958], tmp_path / "f")
    assert num_segments + more > 10
    assert seen["pins"] and also["pins"] and seen["beams"] + also["beams"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [World, PinnedWorld, partial(World, states=True), partial(PinnedWorld, states=True, groups=True)]
)
def test_replay_of_a_thousand_workloads(tmp_path: Path, make: Callable[..., World]) -> None:
    num_segments, _ = worlds(range(1000), tmp_path / "f", make)
    assert num_segments > 1500


# -- an engine ---------------------------------------------------------------------------------------------------------


def replica_of(token_source: Any = None, **options: Any) -> Replica:
    options = {"model": "x", "shape": MODELS["opt-13b"], "preemption_mode": "recompute"} | COMMON | options
    config = SimConfig(options.pop("shape"), DEVICES["h100"], EngineArgs(**options), cost=COST)
    return Replica(config, Records(), token_source=token_source, interval_s=1e9)


def submitted(replica: Replica, arrivals: list[Arrival]) -> Iterator[int]:
    """Submit each request at its time, then run to the end; yields after each."""
    for i, arrival in enumerate(arrivals):
        replica.run_until(arrival.time_s)
        replica.submit(i, arrival)
        yield i
    replica.run_until(float("inf"))


def record(
    arrivals: list[Arrival], *, keep_s: float = 1e9, segment_s: float = 5.0, **options: Any
) -> tuple[Replica, RecordedEngine]:
    replica = replica_of(**options)
    recorded = RecordedEngine(replica.engine, keep_s=keep_s, segment_s=segment_s, clock=replica.clock)
    assert len(list(submitted(replica, arrivals))) == len(arrivals)
    return replica, recorded


def drain(engine: Any) -> None:
    while engine.has_work:
        engine.step()


def rounds(num: int) -> list[Arrival]:
    lengths = Lengths("short", np.full(num, 9), np.arange(num) % 13 + 1)
    return list(chat(lengths, poisson(3.0), new_chance=0.2, max_prompt=90, max_output=40))


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of 80 rounds of chat in a pool that is too small for them."""
    path = tmp_path_factory.mktemp("busy") / "busy.flight"
    return record(rounds(80), num_gpu_blocks_override=48)[1].recorder.dump(path=path)


def test_exact_replay_has_the_same_request_records(tmp_path: Path) -> None:
    replica, recorded = record(rounds(80), num_gpu_blocks_override=48)
    assert recorded.replayed(tmp_path / "f") > 3
    exact = replay.ExactReplay(Recording.load(tmp_path / "f"))
    was, again = replica.records, exact.records
    assert list(again.index) == list(was.index) and len(was) == 80
    begin_s = was.arrived_s[0]
    for name in ("arrived_s", "first_s", "finished_s"):
        times = again.column(name) + begin_s
        assert times == pytest.approx(was.column(name), abs=0.06), name  # a step takes 50 ms
    for name in ("num_prompt", "num_output", "num_cached"):
        assert (again.column(name) == was.column(name)).all(), name
    assert again.num_preempted == was.num_preempted and again.num_preempted["recompute"] > 0
    assert again.num_waits == was.num_waits and again.num_steps == replica.scheduler.num_steps
    assert exact.cost().pass_s == pytest.approx(COST.pass_s, rel=0.02)


def test_what_if_with_other_settings(busy: Path) -> None:
    """With the recorded number of blocks, requests are preempted; with more blocks, none is."""
    recording = Recording.load(busy)
    exact = replay.ExactReplay(recording)
    same = replay.what_if(recording, {}, exact.cost())
    assert len(same) == 80 and same.num_preempted["recompute"] > 0
    assert sum(same.num_cached) == pytest.approx(sum(exact.records.num_cached), rel=0.1)
    assert same.end_s == pytest.approx(exact.records.end_s, rel=0.1)
    assert not replay.what_if(recording, {"num_gpu_blocks_override": 400}, exact.cost()).num_preempted


@pytest.mark.parametrize("block_size", [2, 8])
def test_what_if_with_another_block_size_keeps_prefix_hits(busy: Path, block_size: int) -> None:
    exact = replay.ExactReplay(Recording.load(busy))
    settings = {"block_size": block_size, "num_gpu_blocks_override": 400 * 4 // block_size}
    found = sum(replay.what_if(Recording.load(busy, whole_blocks=True), settings, exact.cost()).num_cached)
    base = sum(replay.what_if(Recording.load(busy), {"num_gpu_blocks_override": 400}, exact.cost()).num_cached)
    assert 0.6 * base < found < 1.15 * base


def test_what_if_has_the_recorded_window_groups(busy: Path) -> None:
    recording = Recording.load(busy)
    assert paged(replay.config_from(recording, {}, COST), 9, 0).windows == ()
    recording.file.settings.update(windows=[6, 6, 20], max_chunk=32)
    config = replay.config_from(recording, {}, COST)
    cache = paged(config, 9, 0)
    assert cache.windows == (6, 6, 20) and cache.attention_window == 0
    assert config.num_host_blocks() == min(config.num_blocks(), recording.file.settings["num_host_blocks"])
    recording.file.settings.update(windows=[], attention_window=7)
    assert paged(replay.config_from(recording, {}, COST), 9, 0).attention_window == 7


def test_what_if_has_the_recorded_states(busy: Path) -> None:
    """Of the same bytes with another block size; the interval is then rounded up to whole blocks."""
    recording, size = Recording.load(busy), COMMON["block_size"]
    for name in ("state_blocks", "checkpoint_interval"):  # an older recording
        del recording.file.settings[name]
    assert paged(replay.config_from(recording, {}, COST), 9, 0).state_blocks == 0
    for windows in ([], [6, 6, 20]):
        recording.file.settings.update(state_blocks=5, checkpoint_interval=3 * size, windows=windows, max_chunk=32)
        for factor, blocks, interval in ((1, 5, 3), (2, 3, 4), (8, 1, 8)):
            cache = paged(replay.config_from(recording, {"block_size": factor * size}, COST), 99, 0)
            assert (cache.state_blocks, cache.checkpoint_interval) == (blocks, interval * size)
            assert cache.windows == tuple(windows)
        changed = replay.config_from(recording, {"mamba_block_size": 10 * size}, COST)
        assert paged(changed, 99, 0).checkpoint_interval == 10 * size


def test_what_if_finds_checkpoints_at_recorded_marks(tmp_path: Path) -> None:
    """Prompts with a common beginning, whose end is a mark of each."""
    runs = [((7, 40), (50 + i, 20)) for i in range(20)]
    arrivals = [Arrival(2.0 * i, prompt, 4, marks=(40,)) for i, prompt in enumerate(runs)]
    model = replace(MODELS["opt-13b"], recurrent_layers=tuple(range(30)), state_size=3 * 10 * 4 * 40 * 128)
    replica, recorded = record(arrivals, shape=model, mamba_block_size=8)
    assert replica.scheduler.cache.state_blocks == 3
    assert recorded.replayed(tmp_path / "f") > 3
    recording = Recording.load(tmp_path / "f")
    assert list(replica.records.num_cached) == [0] + 19 * [40]
    again = replay.what_if(recording, {"max_num_seqs": 8}, replay.ExactReplay(recording).cost())
    assert sorted(again.num_cached) == sorted(replica.records.num_cached)


def test_what_if_with_samples_and_beams(tmp_path: Path) -> None:
    arrivals = [Arrival(i / 5, ((5 + i % 3, 9), (50 + i, 3)), 6, n=1 + i % 3, beams=i % 6 == 5) for i in range(24)]
    replica, recorded = record(arrivals, segment_s=1.0, token_source=Wide())
    assert recorded.replayed(tmp_path / "f") > 2
    again = replay.what_if(Recording.load(tmp_path / "f"), {"max_num_seqs": 8}, COST)
    assert sorted(again.index) == list(range(24))
    assert sorted(again.num_output) == sorted(replica.records.num_output)


class Wide:
    """A model that returns as many candidates as requested."""

    def samples(self, setup: Any, position: int, count: int) -> Any:
        return [(-1.0 - i, 1 + i) if setup.returns_candidates else 1 + i for i in range(count)]

    def tokens(self, setup: Any, position: int, count: int) -> Any:
        return [1 + setup.sample_index] * count


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_old_segments_are_dropped(tmp_path: Path) -> None:
    _, recorded = record(rounds(120), keep_s=10.0, segment_s=2.0)
    recording = Recording.load(recorded.recorder.dump(path=tmp_path / "f"))
    assert 10.0 < recording.duration_s < 16.0 and 5 <= len(recording.file.segments) <= 8
    assert len(recording.file.requests) < 90
    assert recorded.replayed(tmp_path / "f") == len(recording.file.segments)


def test_memory_is_bounded() -> None:
    limit = 100_000
    replica = replica_of()
    recorder = FlightRecorder(replica.engine, clock=replica.clock, max_bytes=limit)
    peak = 0
    for _ in submitted(replica, rounds(600)):
        peak = max(peak, recorder.num_bytes)
    assert limit / 4 < peak < 1.3 * limit
    assert len(recorder._requests) < 100 and len(recorder._requests._unfinished) < 100


def test_repeated_pin_takes_no_more_memory() -> None:
    engine = replica_of().engine
    recorder = FlightRecorder(engine)
    for _ in range(5):
        engine.add_request(EngineRequest.pinning("manual", [1, 2, 3, 4, 5, 6]))
        drain(engine)
        engine.scheduler.unpin(pin_id("manual"))
    log = recorder._requests
    assert [len(tails) for tails in log._tails.values()] == [1]
    assert not log._live and not log._unfinished and not log._ended


def test_dump_has_no_tokens_and_a_key_of_its_own(tmp_path: Path) -> None:
    secret, digests = [70_000 + 13 * i for i in range(40)], []
    for number in range(2):
        replica = replica_of()
        recorder = FlightRecorder(replica.engine, clock=replica.clock, segment_s=0.1)
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        replica.engine.add_request(EngineRequest("a secret name", secret, params, salt=b"a secret salt"))
        drain(replica.engine)
        data = gzip.decompress(recorder.dump(path=tmp_path / str(number)).read_bytes())
        assert b"secret" not in data
        assert not any(token.to_bytes(4, "little") in data or token.to_bytes(4, "big") in data for token in secret)
        recording = Recording.load(tmp_path / str(number))
        assert len(recording.file.segments) > 2 and recording.file.segments[-1].sealed_blocks
        request = recording.file.requests[0]
        digests.append({request.block_digests[i : i + 8] for i in range(0, len(request.block_digests), 8)})
        assert len(digests[-1]) == 10
    assert not digests[0] & digests[1], "prompts cannot be guessed from a dump"


def test_recorder_attaches_and_detaches_at_any_time(tmp_path: Path) -> None:
    """It attaches while requests run and a plan is in flight."""
    replica = replica_of(num_gpu_blocks_override=48)
    recorded, num_present = None, 0
    for i in submitted(replica, rounds(80)):
        num_present = len(replica.scheduler.requests)
        if recorded is None and num_present > 3 and replica.scheduler.in_flight and i > 10:
            recorded = RecordedEngine(replica.engine, clock=replica.clock, keep_s=1e9, segment_s=5.0)
            recorded.names |= {r.request_id: str(a.number) for r, a in recorded.recorder._requests._live.items()}
            num_before, num_there = i + 1, num_present
    assert recorded is not None
    assert recorded.replayed(tmp_path / "f") > 2
    exact = replay.ExactReplay(Recording.load(tmp_path / "f"))
    assert exact.num_present == num_there and len(exact.records) == 80 - num_before
    assert exact.records.num_preempted["recompute"] > 0
    recorded.recorder.detach()
    num_bytes = recorded.recorder.num_bytes
    replica.engine.add_request(EngineRequest("late", [1, 2], SamplingParams(max_tokens=2)))
    drain(replica.engine)
    assert recorded.recorder.num_bytes == num_bytes and not replica.scheduler.tee.active


def test_running_and_aborted_requests_are_recorded_as_far_as_they_are(tmp_path: Path) -> None:
    replica = replica_of()
    recorder = FlightRecorder(replica.engine, clock=replica.clock)
    for i in range(2):
        replica.submit(i, Arrival(0.0, ((5 + i, 6),), 60))
    replica.run_until(0.5)
    replica.engine.abort("0")
    replica.run_until(1.0)
    recording = Recording.load(recorder.dump(path=tmp_path / "f"))
    lengths = [request.samples[0].num_tokens for request in recording.file.requests]
    assert 5 <= lengths[0] <= 10 and 15 <= lengths[1] <= 20
    exact = replay.ExactReplay(recording)
    assert (exact.num_aborted, exact.records.num_unfinished, len(exact.records)) == (1, 1, 0)


# -- when it is written ------------------------------------------------------------------------------------------------


def test_old_dumps_are_deleted(tmp_path: Path) -> None:
    replica = replica_of()
    recorder = FlightRecorder(replica.engine, tmp_path / "new" / "folder", clock=replica.clock)
    paths = [recorder.dump(f"n{i:02}") for i in range(recorder_module.MAX_FILES + 3)]
    left = sorted(recorder.directory.iterdir()) if recorder.directory else []
    assert len(left) == recorder_module.MAX_FILES and paths[-1] in left and paths[0] not in left
    assert paths[-1].stat().st_mode & 0o077 == 0


def test_failed_dump_does_not_raise_in_a_crash(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    engine = replica_of().engine
    assert "no flight recorder" in DumpRecording("asked").answer(engine)["error"]
    engine.recorder = FlightRecorder(engine, tmp_path / "file" / "folder")
    assert "cannot be written" in DumpRecording("asked").answer(engine)["error"]
    engine.recorder.dump_last("crash")
    assert "could not be written" in caplog.text
    engine.recorder = FlightRecorder(engine, tmp_path)
    assert Path(DumpRecording("asked").answer(engine)["path"]).exists()


def test_incomplete_dump_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        FlightRecorder(replica_of().engine, tmp_path).dump()
    assert not list(tmp_path.iterdir())


def test_new_dump_is_never_deleted(tmp_path: Path) -> None:
    """Even if the others were named by a clock that was ahead, for example before the end of daylight saving time."""
    for i in range(recorder_module.MAX_FILES):
        (tmp_path / f"29991231-2359{i:02}-1-1-crash.flight").write_bytes(b"")
    path = FlightRecorder(replica_of().engine, tmp_path).dump()
    assert path.exists() and len(list(tmp_path.iterdir())) == recorder_module.MAX_FILES


class PlantedError(AssertionError):
    pass


def test_crash_is_reproduced_by_the_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replica = replica_of()
    seal = PrefixIndex.seal

    def buggy(self: PrefixIndex, sequence: Sequence) -> None:
        if len(sequence.token_ids) >= 12:
            raise PlantedError("12 tokens")
        seal(self, sequence)

    monkeypatch.setattr(PrefixIndex, "seal", buggy)
    replica.engine.recorder = FlightRecorder(replica.engine, tmp_path)

    def until_it_dies() -> None:
        thread, inbox = EngineThread(replica.engine), SimpleQueue[list[Delivery]]()
        params = SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False)
        thread.add([EngineRequest("a", [1, 2, 3], params)], inbox.put)
        [(_, error)] = inbox.get()
        assert isinstance(error, EngineError) and "PlantedError: 12 tokens" in str(error)
        thread.close()

    until_it_dies()
    [path] = tmp_path.glob("*-crash.flight")
    exact = replay.ExactReplay(Recording.load(path))
    assert exact.death == "PlantedError: 12 tokens" and exact.num_aborted == 0
    seen = Seen(frames_of_recording(path))
    assert seen.at(seen.duration_s).step > 7 and "ends where its engine crashed: PlantedError" in caplog.text
    monkeypatch.undo()
    assert replay.ExactReplay(Recording.load(path)).death == ""


# -- files and the command ---------------------------------------------------------------------------------------------


def damaged(path: Path) -> Iterator[tuple[str, bytes, str]]:
    def packed(**changes: Any) -> bytes:
        return gzip.compress(msgspec.msgpack.encode(raw | changes))

    data = path.read_bytes()
    raw = msgspec.msgpack.decode(gzip.decompress(data))
    yield "no gzip", b"{}", "is not a dump"
    yield "cut", data[: len(data) // 2], "is not a dump"
    yield "packed", data[:10] + b"\x07" + data[11:], "is not a dump"
    yield "other", gzip.compress(b"\x81\x01\x02"), "is not a dump"
    yield "version", packed(version=99), "has version 99 of another Octavo"
    older = [[*arrival[:7], False, *arrival[7:]] for arrival in raw["requests"]]
    yield "fields", packed(version=3, requests=older), "has version 3 of another Octavo"
    flipped = [[*segment[:6], bytes(len(segment[6]))] for segment in raw["segments"]]
    yield "plans", packed(segments=flipped), "was planned differently"
    fewer = [[*segment[:4], b"", *segment[5:]] for segment in raw["segments"]]
    yield "numbers", packed(segments=fewer, requests=[]), "cannot be replayed"


def test_steps_of_a_speculating_engine_are_exact_live_and_replayed(tmp_path: Path) -> None:
    """Plans have upper bounds. What frames show is what the results have."""
    model = make_talking_checkpoint(tmp_path / "model")
    with LLM(model=str(model), num_gpu_blocks_override=64, spec_method="ngram") as llm:
        recorder, publisher = FlightRecorder(llm.engine), Publisher(llm.engine.scheduler)
        state, step = PoolState(publisher.frame()), llm.engine.step  # type: ignore[arg-type]
        frames: list[Frame | None] = []

        def step_and_look() -> Any:
            updates = step()
            frames.append(publisher.frame(publisher.last))
            return updates

        llm.engine.step = step_and_look  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
        llm.generate(["hihihihihihi", "abcabcabcabcabc"], params, use_tqdm=False)
        llm.engine.drain()
        frames.append(publisher.frame(publisher.last))
        stats, path = llm.stats(), recorder.dump(path=tmp_path / "f")
    live = [row for frame in frames if isinstance(frame, Delta) for row in frame.steps]
    seen = [row for frame in frames_of_recording(path) if isinstance(frame, Delta) for row in frame.steps]
    for rows in (live, seen):
        num_tokens, num_sampled, num_accepted = (sum(row[i] for row in rows) for i in (2, 3, NUM_ACCEPTED))
        assert (num_sampled, num_tokens) == (120, 12 + 15 + 118) and num_accepted == stats.num_accepted_tokens > 0
    assert [row[2:] for row in live] == [row[2:] for row in seen]
    for frame in frames:
        if frame is not None:
            state.apply(frame)  # type: ignore[arg-type]
    assert state.counts.tokens == 145
    assert Summary.of(state).tokens_per_pass == 120 / (120 - stats.num_accepted_tokens)
    recording = Recording.load(path)
    exact = replay.ExactReplay(recording)
    assert len(exact.records) == 2 and {measured.work.num_passes for measured in exact.steps} == {1}
    with pytest.raises(ParameterError, match="the recorded engine speculates, and a simulated one does not"):
        replay.what_if(recording, {}, exact.cost())
    with pytest.raises(ParameterError, match="a simulated engine does not speculate"):
        replica_of(spec_tokens=2)


def test_invalid_dump_is_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = record(rounds(10))[1].recorder.dump(path=tmp_path / "good")
    for name, data, message in damaged(good):
        (tmp_path / "bad").write_bytes(data)
        with pytest.raises(TraceError, match=message):
            replay.ExactReplay(Recording.load(tmp_path / "bad"))
        assert octavo(["simulate", "--replay", str(tmp_path / "bad")]) in (1, 2), name
        output = capsys.readouterr()
        assert output.out == "" and output.err.startswith("error: ") and output.err.count("\n") == 1, name
        with pytest.raises(TraceError, match=message):
            list(frames_of_recording(tmp_path / "bad"))  # as `octavo view` does


def test_stored_recording_replays_from_every_segment() -> None:
    """A recording that an earlier commit made: beams, pins, swaps, tenants, failed steps and confined ones.

    A replay compares the checksum of every plan. If the scheduler is meant to decide otherwise, record these again.
    """
    recording = Recording.load(Path(__file__).parent / "data" / f"version{file_format.VERSION}.flight")
    assert len(recording.file.segments) > 5
    assert any(segment.snapshot["pins"] for segment in recording.file.segments)
    for segment in range(len(recording.file.segments)):
        replayed = recording.replay(segment)
        assert len(list(replayed.calls())) == sum(len(later.kinds) for later in recording.file.segments[segment:])
        assert not replayed.scheduler.has_work


def test_simulate_replay_command(busy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert octavo(["simulate", "--replay", str(busy)]) == 0
    output = capsys.readouterr().out
    assert "(asked), as recorded\n80 requests in " in output and "by recompute" in output
    assert octavo(["simulate", "--replay", str(busy), "--num-gpu-blocks-override", "400", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_requests"] == 80 and not result["num_preempted"] and result["num_blocks"] == 400
    assert octavo(["simulate", "--replay", str(busy), "--watermark", "0.3", "--block-size", "8"]) == 0
    assert "with block_size 8, watermark 0.3" in capsys.readouterr().out
    assert octavo(["simulate", "--replay", "nowhere"]) == 2
    assert "no file 'nowhere' to replay" in capsys.readouterr().err
    for options in (["chat"], ["--n", "2"], ["--model", "opt-13b"], ["--rate", "3"]):
        assert octavo(["simulate", "--replay", str(busy), *options]) == 2
        assert "has no effect with a replay" in capsys.readouterr().err
