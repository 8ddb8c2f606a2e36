"""Recordings of frames: seeking, ranges, event streams, damaged files."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.scheduler import Scheduler
from octavo.engine.engine import Engine
from octavo.engine.engine_request import EngineRequest
from octavo.errors import TraceError
from octavo.params.sampling_params import SamplingParams
from octavo.view.live.messages import Counts, Delta, Frame, RequestView, Seals, Snapshot
from octavo.view.live.publisher import Publisher
from octavo.view.live.state import PoolState
from octavo.view.recording.frames import MAX_FRAMES_PER_REPLY, Replay, encode_frames, frames_of_recording, read_frames
from octavo.view.recording.recorder import FlightRecorder
from tests.core.lab import SWAP, Lab
from tests.proof.oracle import Oracle
from tests.proof.workloads import World


class RecordedWorld(World):
    """A workload that makes a frame after each plan, on its own clock, and keeps the state of that moment."""

    def __init__(self, seed: int, *, groups: bool = False) -> None:
        super().__init__(seed, Counter(), listen=True, groups=groups)
        self.now = 100.0
        self.publisher = Publisher(self.scheduler, clock=lambda: self.now)
        self.frames: list[Frame] = []
        self.state: PoolState | None = None
        self.moments: list[tuple[float, bytes]] = []

    def _land(self) -> None:
        super()._land()
        self.now += 0.25
        frame = self.publisher.frame(self.publisher.last)
        if frame is None:
            return
        self.frames.append(frame)
        if isinstance(frame, Snapshot):
            self.state = PoolState(frame)
        else:
            assert self.state is not None
            self.state.apply(frame)
        self.moments.append((frame.time_s, msgspec.json.encode(self.state.snapshot())))


def recorded(seed: int, *, groups: bool = False) -> tuple[list[Frame], list[tuple[float, bytes]]]:
    """The frames of a workload, and the time and state after each."""
    world = RecordedWorld(seed, groups=groups)
    world.run()
    return world.frames, world.moments


def copy_of(frames: list[Frame]) -> list[Frame]:
    return [msgspec.json.decode(line, type=Frame) for line in encode_frames(frames).splitlines()]  # type: ignore[arg-type]


@pytest.mark.parametrize(("seed", "groups"), [(0, False), (2, False), (3, False), (4, False), (5, False), (6, True)])
def test_seek_restores_every_moment(seed: int, groups: bool) -> None:
    frames, moments = recorded(seed, groups=groups)
    replay = Replay(copy_of(frames))
    assert replay.duration_s == moments[-1][0] and len(moments) > 5, seed
    for time_s, wanted in moments:
        assert msgspec.json.encode(replay.at(time_s)) == wanted
        assert msgspec.json.encode(replay.at(time_s + 0.1)) == wanted
    assert msgspec.json.encode(replay.at(0)) == moments[0][1]
    for (begin_s, _), (end_s, wanted) in zip(moments[::3], moments[2::3], strict=False):
        state = PoolState(replay.at(begin_s))
        part, until_s = replay.frames(begin_s, end_s)
        assert until_s == end_s
        for frame in part:
            state.apply(frame)
        assert msgspec.json.encode(state.snapshot()) == wanted


def test_exported_range_is_a_recording(tmp_path: Path) -> None:
    frames, moments = recorded(1)
    replay = Replay(copy_of(frames))
    begin_s, end_s = moments[len(moments) // 4][0], moments[len(moments) // 2][0]
    path = tmp_path / "range.frames"
    path.write_bytes(replay.export(begin_s, end_s))
    part = Replay(read_frames(path))
    assert part.duration_s == pytest.approx(end_s - begin_s, abs=1e-6)
    ours, theirs = PoolState(part.at(part.duration_s)), PoolState(replay.at(end_s))
    assert (ours.words == theirs.words).all() and ours.requests == theirs.requests and ours.stats == theirs.stats


def test_saved_event_stream_is_a_recording(tmp_path: Path) -> None:
    """As curl writes it, also gzipped, and across a restart of the engine, whose clock begins again."""
    one, moments = recorded(2)
    two, _ = recorded(4)
    text = b": hello\n\n"
    for frame in (*one, *two):
        kind = b"snapshot" if isinstance(frame, Snapshot) else b"delta"
        text += b"event: " + kind + b"\ndata: " + msgspec.json.encode(frame) + b"\n\n: keep-alive\n\n"
    text += b'event: engines\ndata: {"num_replicas":2}\n\n'
    text += b'event: bye\ndata: {"reason":"slow"}\n\n'
    plain, packed = tmp_path / "busy.frames", tmp_path / "busy.frames.gz"
    plain.write_bytes(text)
    packed.write_bytes(gzip.compress(text))
    for path in (plain, packed):
        replay = Replay(read_frames(path))
        assert replay.summary()["num_frames"] == len(one) + len(two)
        first_s = moments[-1][0]
        assert replay.duration_s == pytest.approx(first_s + two[-1].time_s - two[0].time_s)
        part, _ = replay.frames(first_s - 0.3, replay.duration_s)
        assert isinstance(part[-len(two)], Snapshot) or isinstance(part[0], Snapshot)
        assert PoolState(replay.at(replay.duration_s)).stats == PoolState(Replay(copy_of(two)).at(1e9)).stats


def test_summary_marks_preemptions() -> None:
    lab = Lab(6, 2, rows=4, host=6, policy=SWAP, listen=False)
    now = 0.0
    publisher = Publisher(lab.scheduler, clock=lambda: now)
    frames = [publisher.frame()]
    lab.add("a", [1, 2, 3, 4, 5], 6)
    lab.add("b", [6, 7, 8, 9, 10], 6)
    while lab.scheduler.has_work:
        now += 1.0
        lab.step()
        if (frame := publisher.frame(publisher.last)) is not None:
            frames.append(frame)
    replay = Replay(f for f in frames if f is not None)
    summary = replay.summary()
    marks = [(mark["event"], mark["request_id"]) for mark in summary["marks"]]
    assert ("preempted", "b") in marks
    assert summary["num_steps"] == lab.scheduler.num_steps and summary["num_blocks"] == 6
    assert len(summary["used"]) == summary["num_frames"] and max(point[1] for point in summary["used"]) == 6
    spans = [e for e in replay.trace("b")["traceEvents"] if e["ph"] == "X"]
    states = [span["name"] for span in spans]
    assert states[0] == "waiting" and "swapped" in states and states[-1] == "running"
    ends = [span["ts"] + span["dur"] for span in spans]
    assert [span["ts"] for span in spans[1:]] == ends[:-1]  # without gaps
    rows = [e["args"]["name"] for e in replay.trace()["traceEvents"] if e["ph"] == "M"]
    assert rows == ["a", "b"]
    assert [e for e in replay.trace()["traceEvents"] if e["ph"] == "C"]


def test_long_range_is_split_over_replies() -> None:
    lab = Lab(4, 2, listen=False)
    now = 0.0
    publisher = Publisher(lab.scheduler, clock=lambda: now)
    frames = [publisher.frame()]
    for i in range(MAX_FRAMES_PER_REPLY + 40):
        now += 0.5
        lab.add(f"r{i}", [1], 1)
        frames.append(publisher.frame(publisher.last))
    replay = Replay(f for f in frames if f is not None)
    part, end_s = replay.frames(0.0, replay.duration_s)
    assert (len(part), end_s) == (MAX_FRAMES_PER_REPLY, 250.0)
    more, end_s = replay.frames(end_s, replay.duration_s)
    assert (len(more), end_s) == (40, replay.duration_s)


def test_dump_of_the_flight_recorder_is_replayed(tmp_path: Path) -> None:
    """The dump holds no block events; the same calls cause them again."""
    cache = KVCacheManager(24, 2, 8, num_rows=4)
    scheduler = Scheduler(cache, policy=SWAP)
    engine = Engine(scheduler, Oracle(scheduler), vocab_size=9, max_model_len=64)
    recorder = FlightRecorder(engine)
    for i in range(6):
        engine.add_request(
            EngineRequest(f"r{i}", [1, 2, 3, 4, i], SamplingParams(max_tokens=12, seed=i, n=1 + i % 2, ignore_eos=True))
        )
    while engine.has_work:
        engine.step()
    path = recorder.dump(path=tmp_path / "busy.flight")
    recorder.detach()
    replay = Replay(frames_of_recording(path, every_s=0.0))
    state = replay.state_at(replay.duration_s)
    assert state.stats == cache.stats().as_dict() and state.stats["num_swapped_out"] > 0
    assert (state.words & 0x7FFF).tolist() == list(cache.pool.refs)
    finished = [e for f in replay.frames(-1, 1e9)[0] for e in f.events if e["event"] == "finished"]
    assert len(finished) == 6
    engine.close()


def test_invalid_recording_is_refused_with_its_line(tmp_path: Path) -> None:
    frames, _ = recorded(0)
    lines = encode_frames(frames).splitlines()
    first = json.loads(lines[0])
    delta = json.loads(lines[1])
    cases = {
        "is empty": [],
        "does not begin with a snapshot": lines[1:],
        "frame 3 of the recording is not the next one": [lines[0], lines[1], lines[1]],
        "line 2 of .* is not a frame": [lines[0], b'{"kind": "delta"}'],
        "line 1 of .* is not a frame: .*kind": [b'{"kind": "film"}'],
        "line 1 of .* is not a frame; expected one JSON object": [b"PK\x03\x04"],
        "frame 1 of the recording contradicts itself": [json.dumps(first | {"num_blocks": 3}).encode()],
        "frame 2 of the recording contradicts itself": [lines[0], json.dumps(delta | {"gone": ["x"]}).encode()],
        "^line 2 of .* is not a frame": [lines[0], b'{"kind": "delta"}', lines[1]],
        "^line 1 of .* is not a frame: .*num_blocks": [json.dumps(first | {"num_blocks": 1 << 60}).encode()],
        "^line 1 of .* is not a frame: .*>= 1": [json.dumps(first | {"num_blocks": 0, "words": ""}).encode()],
        "^frame 1 of the recording contradicts itself: TypeError": [
            json.dumps(first | {"time_s": 1, "events": [{"event": "evicted", "time_s": "soon"}]}).encode()
        ],
    }
    for match, wrong in cases.items():
        path = tmp_path / "wrong.frames"
        path.write_bytes(b"\n".join(wrong))
        with pytest.raises(TraceError, match=match):
            Replay(read_frames(path))


@pytest.mark.parametrize("packed", [False, True])
def test_truncated_recording_is_read_up_to_the_end(
    packed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For example by a full disk, or by an interrupted curl."""
    recording, _ = recorded(0)
    whole = encode_frames(recording)
    path = tmp_path / "cut.frames"
    path.write_bytes(gzip.compress(whole)[:-40] if packed else whole[:-20])
    frames = list(read_frames(path))
    assert 0 < len(frames) < len(recording) and encode_frames(frames) == encode_frames(recording[: len(frames)])
    assert "is truncated" in caplog.text


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    """One byte of the compressed data, or of the checksum."""
    whole = gzip.compress(encode_frames(recorded(0)[0]))
    path = tmp_path / "wrong.frames.gz"
    for data in (whole[:10] + b"\x07" + whole[11:], whole[:-8] + bytes([whole[-8] ^ 1]) + whole[-7:]):
        path.write_bytes(data)
        with pytest.raises(TraceError, match="is damaged"):
            list(read_frames(path))


def spans(replay: Replay) -> list[tuple[int, str, int, int]]:
    return [(e["tid"], e["name"], e["ts"], e["dur"]) for e in replay.trace()["traceEvents"] if e["ph"] == "X"]


@pytest.mark.parametrize("seed", [0, 3, 5])
def test_trace_has_no_events_before_the_recording(seed: int, tmp_path: Path) -> None:
    """The snapshot of a recording that begins in the middle has the last events before it."""
    whole = Replay(recorded(seed)[0])
    path = tmp_path / "range.frames"
    path.write_bytes(whole.export(whole.duration_s / 2, whole.duration_s))
    replay = Replay(read_frames(path))
    assert replay.at(0).events, "there are no events before"
    events = replay.trace()["traceEvents"]
    assert len(spans(replay)) > 3
    assert not [e for e in events if e.get("ts", 0) < 0 or e.get("dur", 0) < 0]
    assert not [mark for mark in replay.summary()["marks"] if mark["time_s"] < 0]


def test_restart_ends_the_spans_of_the_old_engine() -> None:
    """Requests that are missing in the new engine's snapshot, or have another state in it, end there."""
    blocks = {"num_used": 0, "num_cached": 0}

    def snapshot(epoch: str, **states: str) -> Snapshot:
        requests = [RequestView(name, state, 1, 1, 1, 0, 0, 0, None, ()) for name, state in states.items()]
        return Snapshot(epoch, 0, 0.0, 0, 4, 4, 0, bytes(8), Seals(), requests, [], blocks, Counts())

    first = snapshot("a", gone="running", back="waiting", same="running")
    frames: list[Frame] = [first, Delta("a", 1, 5.0, 1, Counts()), snapshot("b", back="running", same="running")]
    assert spans(Replay([*frames, Delta("b", 1, 3.0, 1, Counts())])) == [
        (1, "running", 0, 5_000_000),
        (2, "waiting", 0, 5_000_000),
        (3, "running", 0, 8_000_000),
        (2, "running", 5_000_000, 3_000_000),
    ]


def test_frames_round_trip_through_json() -> None:
    frames, _ = recorded(0)
    assert encode_frames(copy_of(frames)) == encode_frames(frames)
    assert isinstance(frames[0], Snapshot) and all(isinstance(frame, Delta) for frame in frames[1:])
