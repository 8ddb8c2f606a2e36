"""Recordings of frames, in which a viewer can seek to any moment.

A file has one frame per line, as JSON. A saved event stream of a server is a recording too, `data:` prefixes included:

    curl -sN http://127.0.0.1:8000/view/events > busy.frames

A dump of the flight recorder is replayed (`view.recording.player`), and frames are made as it runs.
"""

from __future__ import annotations

import bisect
import gzip
import logging
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from octavo.errors import OctavoError, TraceError
from octavo.integers import cdiv
from octavo.view.live.messages import Delta, Frame, Snapshot
from octavo.view.live.publisher import Publisher
from octavo.view.live.state import FrameLostError, PoolState
from octavo.view.recording.player import Recording

logger = logging.getLogger("octavo.view")

FRAME_INTERVAL_S = 0.1
"""Seconds between two frames of a replayed dump."""
MAX_MARKS = 10_000
MAX_CURVE_POINTS = 1000
"""Points of the curve above the scrubber."""
MAX_KEYFRAMES = 64
"""Snapshots for seeking: from one of them, at most a 64th of the recording is applied."""
MAX_KEYFRAME_BYTES = 256 << 20
MAX_FRAMES_PER_REPLY = 500
MARKED = ("preempted", "swaplost", "recomputed")


# -- reading -----------------------------------------------------------------------------------------------------------


def read_frames(path: Path) -> Iterator[Frame]:
    """The frames in a file, which may be gzipped. Raises `TraceError` with the number of an invalid line. A truncated
    file ends before its last line, with a warning."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    with gzip.open(path) if packed else path.open("rb") as lines:
        try:
            yield from parse_frames(lines, str(path))
        except EOFError:
            logger.warning("%s is truncated: the rest is missing", path)
        except (gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(f"{path} is damaged: {error}") from None


def parse_frames(lines: Iterable[bytes], name: str) -> Iterator[Frame]:
    """The frames in a file's lines, or in a server's event stream. Raises `TraceError` as `read_frames` does."""
    decoder = msgspec.json.Decoder(Frame)
    for number, line in enumerate(lines, 1):
        text = line.strip().removeprefix(b"data:").strip()
        is_other = text.startswith((b'{"reason"', b'{"num_replicas"', b'{"ranks"'))
        if not text.startswith(b"{") or is_other:  # other lines of an event stream
            if text and not text.startswith((b"event:", b":", b"{")):
                raise TraceError(f"line {number} of {name} is not a frame; expected one JSON object per line")
            continue
        try:
            yield decoder.decode(text)
        except msgspec.MsgspecError as error:
            if number > 1 and not line.endswith(b"\n") and not isinstance(error, msgspec.ValidationError):
                logger.warning("%s is truncated: line %d, its last, is dropped", name, number)
                return
            raise TraceError(f"line {number} of {name} is not a frame: {error}") from None


def frames_of_recording(path: Path, every_s: float = FRAME_INTERVAL_S) -> Iterator[Frame]:
    """The frames of a dump of the flight recorder, which is replayed. Raises `TraceError` if the file is not a dump, is
    damaged, or has another version. If the engine crashed of a bug that still exists, the frames end at the crash, with
    a warning."""
    recording = Recording.load(path)
    player = recording.replay()
    now = next_s = 0.0
    publisher = Publisher(player.scheduler, clock=lambda: now, begin_s=0.0)
    calls = player.calls()
    try:
        for at_s in (at_s for segment in player.segments for at_s in array("d", segment.times_s)):
            now = at_s - recording.begin_s
            if now >= next_s:
                next_s = now + every_s
                if (frame := publisher.frame(publisher.last)) is not None:
                    yield frame
            next(calls)
    except Exception as error:  # the bug still exists, or the file is damaged
        if recording.file.reason != "crash" or isinstance(error, OctavoError):
            raise TraceError(f"{path} cannot be replayed: {error}") from error
        logger.warning("%s ends where its engine crashed: %r", path, error)
    if (frame := publisher.frame(publisher.last)) is not None:
        yield frame


def encode_frames(frames: Iterable[Frame]) -> bytes:
    """Frames as the contents of a file."""
    return b"".join(msgspec.json.encode(frame) + b"\n" for frame in frames)


# -- seeking -----------------------------------------------------------------------------------------------------------


class Replay:
    """A recording in memory. Times are seconds from its beginning, whatever the clock of its frames.

    Raises `TraceError` for frames that do not follow each other.
    """

    def __init__(self, frames: Iterable[Frame]) -> None:
        self._frames: list[Frame] = []
        self._times: list[float] = []
        self._curve: list[list[float]] = []
        self._marks: list[dict[str, Any]] = []
        self._keyframes: list[tuple[int, Snapshot]] = []  # (index of the last frame applied, state)
        state: PoolState | None = None
        offset = 0.0
        for number, frame in enumerate(frames, 1):
            try:
                if isinstance(frame, Snapshot):
                    offset = (self._times[-1] if self._times else 0.0) - frame.time_s
                    state = PoolState(frame)
                elif state is None:
                    raise FrameLostError("the recording does not begin with a snapshot; record it again")
                else:
                    state.apply(frame)
                self._append(frame, round(frame.time_s + offset, 6), offset, state)
            except FrameLostError as error:
                raise TraceError(f"frame {number} of the recording is not the next one: {error}") from None
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise TraceError(f"frame {number} of the recording contradicts itself: {error!r}") from None
        if state is None:
            raise TraceError("the recording is empty; it needs at least a snapshot")
        self._make_keyframes(len(state.words) * 2)

    def _append(self, frame: Frame, time_s: float, offset: float, state: PoolState) -> None:
        shift = round(offset, 6)
        if shift:
            frame.time_s = time_s
            frame.events = [event | {"time_s": round(event["time_s"] + shift, 6)} for event in frame.events]
            frame.steps = [[s[0], round(s[1] + shift, 6), *s[2:]] for s in frame.steps]
        self._frames.append(frame)
        self._times.append(max(time_s, self._times[-1]) if self._times else time_s)
        counts, stats = state.counts, state.stats
        self._curve.append([time_s, stats["num_used"], stats["num_cached"], counts.running, counts.waiting])
        if len(self._marks) < MAX_MARKS and isinstance(frame, Delta):  # the events of a snapshot happened before it
            evicted = False
            for event in frame.events:
                if event["event"] in MARKED or (event["event"] == "evicted" and not evicted):
                    evicted = evicted or event["event"] == "evicted"
                    mark = {"time_s": event["time_s"], "event": event["event"], "request_id": event.get("request_id")}
                    self._marks.append(mark)

    def _make_keyframes(self, snapshot_bytes: int) -> None:
        """Take snapshots at even distances, as many as memory allows."""
        num = max(1, min(MAX_KEYFRAMES, MAX_KEYFRAME_BYTES // max(1, snapshot_bytes), len(self._frames)))
        distance = cdiv(len(self._frames), num)
        first = self._frames[0]
        assert isinstance(first, Snapshot)
        state = PoolState(first)
        for i, frame in enumerate(self._frames):
            if i:
                state.apply(frame)
            if i % distance == 0:
                self._keyframes.append((i, state.snapshot()))

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def duration_s(self) -> float:
        return self._times[-1]

    def summary(self) -> dict[str, Any]:
        first, last = self._frames[0], self._frames[-1]
        assert isinstance(first, Snapshot)
        every = cdiv(len(self._curve), MAX_CURVE_POINTS)
        return {
            "duration_s": self.duration_s,
            "num_frames": len(self._frames),
            "num_blocks": first.num_blocks,
            "block_size": first.block_size,
            "num_steps": last.step - first.step,
            "marks": self._marks,
            "used": self._curve[::every],
        }

    def state_at(self, time_s: float) -> PoolState:
        """The state after the last frame up to this time; before the first frame, the first state."""
        end = max(0, bisect.bisect_right(self._times, time_s) - 1)
        at = bisect.bisect_right(self._keyframes, end, key=lambda keyframe: keyframe[0]) - 1
        index, snapshot = self._keyframes[at]
        state = PoolState(snapshot)
        for frame in self._frames[index + 1 : end + 1]:
            state.apply(frame)
        return state

    def at(self, time_s: float) -> Snapshot:
        return self.state_at(time_s).snapshot()

    def frames(self, from_s: float, to_s: float) -> tuple[Sequence[Frame], float]:
        """The frames with from_s < time <= end_s, and end_s: below `to_s` if there are too many for one reply."""
        begin, end = bisect.bisect_right(self._times, from_s), bisect.bisect_right(self._times, to_s)
        if end - begin <= MAX_FRAMES_PER_REPLY:
            return self._frames[begin:end], to_s
        end = begin + MAX_FRAMES_PER_REPLY
        while end < len(self._times) and self._times[end] == self._times[end - 1]:  # all frames of one moment
            end += 1
        return self._frames[begin:end], self._times[end - 1]

    def block(self, block: int, time_s: float) -> dict[str, Any] | None:
        state = self.state_at(time_s)
        return state.block(block) if 1 <= block <= state.num_blocks else None

    def export(self, from_s: float, to_s: float) -> bytes:
        """A range, as a separate recording."""
        begin, end = bisect.bisect_right(self._times, from_s), bisect.bisect_right(self._times, to_s)
        return encode_frames([self.at(from_s), *self._frames[begin:end]])

    # -- Chrome trace --------------------------------------------------------------------------------------------------

    def trace(self, request_id: str | None = None) -> dict[str, Any]:
        """The states of all requests, or of one, in Chrome's trace format, which Perfetto opens."""
        return {"traceEvents": list(_trace_events(self._frames, self.duration_s, request_id)), "displayTimeUnit": "ms"}


STATES = {
    "arrived": "waiting",
    "admitted": "running",
    "swappedin": "running",
    "swaplost": "waiting",
    "recomputed": "waiting",
    "pinned": "pinned",
    "finished": "",
    "unpinned": "",
}
"""A request's state after an event; after a preemption it is swapped or waiting."""


def _trace_events(frames: Sequence[Frame], end_s: float, request_id: str | None) -> Iterator[dict[str, Any]]:
    rows: dict[str, int] = {}  # request -> its row in the trace
    since: dict[str, tuple[str, float, dict[str, Any]]] = {}  # request -> state, its begin, and the event's fields

    def close(name: str, at: float) -> Iterator[dict[str, Any]]:
        if name in since:
            state, begin, args = since.pop(name)
            span = {"name": state, "ph": "X", "ts": _us(begin), "dur": _us(at) - _us(begin)}
            yield span | {"pid": 1, "tid": rows[name], "args": args}

    def open_row(name: str) -> Iterator[dict[str, Any]]:
        if name not in rows:
            rows[name] = len(rows) + 1
            yield {"name": "thread_name", "ph": "M", "pid": 1, "tid": rows[name], "args": {"name": name}}

    for frame in frames:
        if isinstance(frame, Snapshot):
            now = {request.id: request.status for request in frame.requests if request_id in (None, request.id)}
            for other in [name for name, (state, *_) in since.items() if now.get(name) != state]:
                yield from close(other, frame.time_s)
            for new in [name for name in now if name not in since]:
                yield from open_row(new)
                since[new] = now[new], frame.time_s, {}
        for event in frame.events if isinstance(frame, Delta) else ():  # a snapshot's events happened before it
            name, kind, at = event.get("request_id"), event["event"], event["time_s"]
            if name is None or request_id not in (None, name):
                continue
            yield from open_row(name)
            args = {key: value for key, value in event.items() if key not in ("event", "time_s", "request_id")}
            if kind == "waiting":
                span = {"name": f"waits for {event['reason']}", "ph": "i", "s": "t", "ts": _us(at)}
                yield span | {"pid": 1, "tid": rows[name], "args": args}
                continue
            state = STATES.get(kind, "swapped" if event.get("how") == "swap" else "waiting")
            yield from close(name, at)
            if state:
                since[name] = state, at, args
        if request_id is None and isinstance(frame, Delta):
            for _, at, *numbers in frame.steps:
                used, cached = numbers[5], numbers[6]
                yield {"name": "blocks", "ph": "C", "ts": _us(at), "pid": 1, "args": {"used": used, "cached": cached}}
    for name in list(since):
        yield from close(name, end_s)


def _us(seconds: float) -> int:
    return round(1e6 * seconds)
