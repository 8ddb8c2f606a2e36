"""`octavo view`: all kinds of recordings, and refused arguments."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import urllib.request
from pathlib import Path

import pytest

from octavo.serve import view_server
from octavo.view.recording.frames import Replay, read_frames
from tests.cli.conftest import Call, started

TRACE = [
    {"timestamp": 0, "input_length": 40, "output_length": 30, "hash_ids": [1]},
    {"timestamp": 5, "input_length": 40, "output_length": 30, "hash_ids": [1]},
    {"timestamp": 900, "input_length": 20, "output_length": 9, "hash_ids": [2]},
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TRACE))
    return path


def test_trace_is_simulated_and_saved(call: Call, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.frames"
    assert call("view", str(trace), "--num-gpu-blocks-override", "20", "--save", str(out)).code == 0
    replay = Replay(read_frames(out))
    summary = replay.summary()
    assert summary["num_blocks"] == 20 and replay.duration_s > 0.9
    assert max(point[1] for point in summary["used"]) > 3
    finished = {
        event["request_id"]
        for frame in replay.frames(-1, replay.duration_s)[0]
        for event in frame.events
        if event["event"] == "finished"
    }
    assert finished == {"0", "1", "2"}


def test_failed_save_keeps_the_old_file(call: Call, trace: Path, tmp_path: Path) -> None:
    """Also through a link. A recording is not overwritten while it is read."""
    out, link, other = (tmp_path / name for name in ("out.frames", "link.frames", "other.frames"))
    link.symlink_to(out)
    assert call("view", str(trace), "--num-gpu-blocks-override", "20", "--save", str(link)).code == 0
    was = out.read_bytes()
    assert link.is_symlink() and was.count(b"\n") > 3
    for name in (out, link):
        done = call("view", str(out), "--save", str(name))
        assert done.code == 2 and "the file that is read; choose another name" in done.err
    other.write_bytes(was[:-9] + b"\n")
    assert "is not a frame" in call("view", str(other), "--save", str(out)).err
    assert out.read_bytes() == was
    assert sorted(tmp_path.iterdir()) == sorted((trace, out, link, other))


def test_gzipped_trace(call: Call, trace: Path, tmp_path: Path) -> None:
    out, packed, again = tmp_path / "out.frames", tmp_path / "trace.jsonl.gz", tmp_path / "again.frames"
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    for source, target in ((trace, out), (packed, again)):
        assert call("view", str(source), "--num-gpu-blocks-override", "20", "--save", str(target)).code == 0
    assert len(out.read_bytes().splitlines()) == len(again.read_bytes().splitlines()) > 2


def test_save_to_a_pipe(call: Call, trace: Path, tmp_path: Path) -> None:
    out, pipe = tmp_path / "out.frames", tmp_path / "pipe"
    assert call("view", str(trace), "--num-gpu-blocks-override", "20", "--save", str(out)).code == 0
    out.write_bytes(first := out.read_bytes().splitlines(keepends=True)[0])
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert call("view", str(out), "--save", str(pipe)).code == 0
        assert os.read(reader, 1 << 16) == first and pipe.is_fifo()
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.frames"], "no file 'none.frames'"),
        (["--host", "0.0.0.0"], "is not a loopback address"),
        (["{trace}", "--attach", "tcp://127.0.0.1:1"], "give one of them"),
        (["--metrics", "http://127.0.0.1/metrics"], "requires --attach"),
        (["--attach", "tcp://127.0.0.1:1", "--metrics", "file:///etc/passwd"], "requires --attach"),
        (["--attach", "nowhere"], "use one such as tcp://"),
        (["--replay-endpoint", "tcp://127.0.0.1:1"], "requires --attach"),
        (["--attach", "tcp://127.0.0.1:1", "--replay-endpoint", "nowhere"], "use one such as tcp://"),
        (["{trace}.frames"], "is not a frame"),
        (["--attach", "tcp://127.0.0.1:1", "--metrics", "http://127.0.0.1:abc/metrics"], "requires --attach"),
        (["--attach", "tcp://127.0.0.1:1", "--metrics", "http://127.0.0.1:99999/metrics"], "requires --attach"),
        (["--save", "out.frames"], "save requires a FILE"),
        (["--attach", "tcp://127.0.0.1:1", "--save", "out.frames"], "save requires a FILE"),
        (["{trace}", "--save", "nowhere/out.frames"], "nowhere: No such file or directory"),
        (["{trace}.frames", "--block-size", "8"], "--block-size has no effect with a recording"),
        (["--requests", "4"], "--requests has no effect with the playground"),
        (["--attach", "tcp://127.0.0.1:1", "--gpu", "l4"], "--gpu has no effect with --attach"),
    ],
)
def test_invalid_arguments_are_refused(
    call: Call, trace: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(view_server, "run", lambda *args: None)  # arguments that are not refused must not block
    trace.with_name("trace.jsonl.frames").write_text("frames\n")
    done = call("view", *(a.replace("{trace}", str(trace)) for a in arguments))
    assert done.code == 2 and message in done.err and done.err.count("\n") == 1


def test_serves_until_sigint(trace: Path) -> None:
    with started("view", str(trace), "--num-gpu-blocks-override", "20", text=True, stderr=None) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/view/", url)
        with urllib.request.urlopen(url + "replay", timeout=60) as answer:
            summary = json.load(answer)
        assert summary["title"] == "trace.jsonl" and summary["num_blocks"] == 20
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
