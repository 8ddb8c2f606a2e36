"""`octavo top`, with a stream as a server sends it."""

from __future__ import annotations

import contextlib
import io
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import StreamRequestHandler, TCPServer

import msgspec
import pytest
from rich.console import Console

from octavo.cli.commands import top as top_command
from octavo.cli.commands.top import Engine, render, render_all
from octavo.engine.executor import RankPlace
from octavo.view.live.messages import Delta, Snapshot
from octavo.view.live.publisher import Publisher
from octavo.view.live.state import PoolState
from octavo.view.live.summary import RequestSummary, Summary
from tests.cli.conftest import Call
from tests.core.lab import SWAP, Lab

KEY = "sk-1"


def frames_of_a_busy_server() -> list[Snapshot | Delta]:
    """Two requests, of which one waits for blocks; four steps, a second apart."""
    lab = Lab(5, 2, rows=4, listen=False, policy=SWAP)
    now = 0.0
    publisher = Publisher(lab.scheduler, clock=lambda: now)
    frames = [publisher.frame()]
    lab.add("first", [1, 2, 3, 4, 5], 4)
    lab.add("second", [6, 7, 8, 9, 10], 3)
    for _ in range(4):
        now += 1.0
        lab.step()
        frames.append(publisher.frame(publisher.last))
    return [frame for frame in frames if frame is not None]


def state_of(frames: list[Snapshot | Delta]) -> PoolState:
    first, *rest = frames
    assert isinstance(first, Snapshot)
    state = PoolState(first)
    for frame in rest:
        state.apply(frame)
    return state


def test_summary() -> None:
    summary = Summary.of(state_of(frames_of_a_busy_server()[:-1]))
    assert (summary.used, summary.cached, summary.free) == (4, 0, 1)
    assert (summary.running, summary.waiting, summary.swapped) == (1, 1, 0)
    assert (summary.prompt_rate, summary.output_rate) == (2.0, 1.0)  # two steps: 5 and 1 positions, 2 of them sampled
    assert summary.first_waiting == "second needs 3 blocks: 2 are free, 0 cached"
    assert summary.requests == (
        RequestSummary("first", "running", 8, 4, 0),
        RequestSummary("second", "waiting", 5, 0, 0),
    )


def test_the_gain_of_speculation_is_shown_where_it_is_on() -> None:
    frames = frames_of_a_busy_server()[:-1]
    off = Summary.of(state_of(frames))
    for frame in frames:
        frame.steps = [[*row, 0.5 * row[3]] for row in frame.steps]
    on = Summary.of(state_of(frames))
    assert (off.tokens_per_pass, on.tokens_per_pass) == (None, 2.0)
    for summary, text in ((off, "0 evicted\n"), (on, "0 evicted, 2.0 tokens a pass\n")):
        console = Console(file=io.StringIO(), width=80)
        console.print(render(summary))
        assert text in console.file.getvalue().replace(" \n", "\n")  # type: ignore[attr-defined]


def test_request_ids_are_not_markup() -> None:
    """An untrusted server may send anything."""
    console = Console(file=io.StringIO(), width=100)
    names = ["[/x]", "[red]a"]
    rows = tuple(RequestSummary(name, "running", 8, 4, 0) for name in names)
    console.print(render(Summary(4, 0, 1, 2, 0, 0, 0.0, 0.0, 0.0, 0, 0, "", rows)))
    assert [line.split()[0] for line in console.file.getvalue().splitlines()[-2:]] == names  # type: ignore[attr-defined]


class Stream(BaseHTTPRequestHandler):
    """A server of one engine."""

    num_replicas = 1

    def do_GET(self) -> None:
        if self.headers["authorization"] != f"Bearer {KEY}":
            self.send_response(401)
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        if self.path == "/view/config":
            self.wfile.write(json.dumps({"num_replicas": self.num_replicas}).encode())
        else:
            self.send_frames(self.path)

    def send_frames(self, path: str) -> None:
        assert path == "/view/events?replica=0"
        self.send_busy()
        self.bye("slow")

    def bye(self, reason: str) -> None:
        self.wfile.write(f"event: bye\ndata: {json.dumps({'reason': reason}, separators=(',', ':'))}\n\n".encode())

    def send_busy(self, num_frames: int = 2) -> None:
        """`num_frames` of the busy server's are in the first one."""
        self.wfile.write(b": keep-alive\n\n")
        frames = frames_of_a_busy_server()
        begin = state_of(frames[:num_frames]).snapshot()  # an idle one would end --once
        for frame in (begin, *frames[num_frames:-1]):
            self.wfile.write(b"event: x\ndata: " + msgspec.json.encode(frame) + b"\n\n")

    def log_message(self, *args: object) -> None:
        pass


class Ranked(Stream):
    """An engine of two ranks. After the last frame they are told again, and then something else."""

    def send_frames(self, path: str) -> None:
        for age_s, behind in ((0.0, "false"), (2.5, "true")):
            if behind == "true":
                self.send_busy()
            place = f'{{"plan":1812,"collective":9000,"is_inside":true,"age_s":{age_s},"is_behind":%s}}'
            places = f"[{place % 'false'},{place % behind}]"
            for ranks in (places, '[{"plan":1}]', "7", '{"plan":1}'):
                self.wfile.write(f'event: ranks\ndata: {{"ranks":{ranks}}}\n\n'.encode())
        self.bye("slow")


class Streams(Stream):
    """Of five engines, two run; one has failed, one is silent, and one sends nonsense."""

    num_replicas = 5

    def send_frames(self, path: str) -> None:
        replica = int(path.removeprefix("/view/events?replica="))
        if replica in (0, 3):
            self.send_busy(num_frames=4)
            finished.wait(10)  # the stream stays open
        elif replica == 1:
            self.bye("the engine [red]is gone")
        elif replica == 2:
            self.wfile.write(b": keep-alive\n\n")
            finished.wait(10)
        else:
            self.wfile.write(b"no stream\n")


class Growing(Streams):
    """Streams of a server with one engine. After the first frame, they tell that there are more."""

    num_replicas = 1

    def send_frames(self, path: str) -> None:
        if path == "/view/events?replica=1":
            self.bye("no replica 1 is ready")
            return
        self.send_busy(num_frames=4)
        for number in ("3", '"x"', "1e999", "null"):
            self.wfile.write(f'event: engines\ndata: {{"num_replicas":{number}}}\n\n'.encode())
        finished.wait(10)


finished = threading.Event()


@contextlib.contextmanager
def listening(handler: type[Stream]) -> Iterator[str]:
    finished.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    finished.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def url() -> Iterator[str]:
    with listening(Stream) as address:
        yield address


def test_a_request_that_the_scheduler_has_not_seen_waits() -> None:
    state = state_of(frames_of_a_busy_server()[:1])
    state.queues["waiting"].append("third")
    assert Summary.of(state).first_waiting == "third waits for the next step"


def test_once_prints_the_summary(call: Call, url: str) -> None:
    done = call("top", url.removeprefix("http://"), "--once", "--api-key", KEY)
    assert done.code == 0, done.err
    text = " ".join(done.out.split())
    assert "1 tokens/s 2 prompt tokens/s 1 running 1 waiting 0 swapped" in text
    assert "4 of 5 blocks used, 0 cached" in text
    assert "second needs 3 blocks: 2 are free, 0 cached" in text
    assert "first running 8 4 0" in text and "engine" not in text


def test_ranks_have_a_line_each(call: Call, url: str) -> None:
    assert "rank" not in call("top", url, "--once", "--api-key", KEY).out
    with listening(Ranked) as ranked:
        done = call("top", ranked, "--once", "--api-key", KEY)
    assert done.code == 0, done.err
    assert "rank 0   plan 1,812, in collective 9,000   2.5 s ago\n" in done.out.replace(" \n", "\n")
    assert "rank 1   plan 1,812, in collective 9,000   2.5 s ago   behind\n" in done.out.replace(" \n", "\n")


def test_once_prints_every_engine(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_command, "CONNECT_S", 0.5)
    monkeypatch.setattr(top_command, "ONCE_S", 0.0)
    with listening(Streams) as url:
        done = call("top", url, "--once", "--api-key", KEY)
    assert done.code == 0, done.err
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    one = "1 tokens/s 2 prompt tokens/s 1 running 1 waiting 0 swapped"
    both = "2 tokens/s 4 prompt tokens/s 2 running 2 waiting 0 swapped"
    assert lines[:3] == ["5 engines, 3 without data", both, ""] and lines.count(one) == 2
    for i in (0, 3):
        begin = next(n for n, line in enumerate(lines) if line.startswith(f"engine {i} "))
        assert lines[begin + 1] == one and lines[begin + 2].endswith("4 of 5 blocks used, 0 cached")
        assert lines[begin + 3] == "second needs 3 blocks: 2 are free, 0 cached"
    assert "engine 1 no data: the engine [red]is gone" in lines
    assert "engine 2 no data: it sends nothing" in lines
    assert any(line.startswith("engine 4 no data: line 1 of") for line in lines)
    requests = lines[lines.index("request engine status tokens blocks preempted") + 1 :]
    # The largest first; equals stay in the order of the engines.
    assert requests[:3] == ["first 0 running 8 4 0", "first 3 running 8 4 0", "second 0 waiting 5 0 0"]


def test_an_engine_that_falls_silent_has_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy one; an idle one sends nothing because nothing changes."""
    state = state_of(frames_of_a_busy_server()[:-1])
    busy, idle = Summary.of(state), replace(Summary.of(state), running=0, requests=())
    engines = [Engine("http://127.0.0.1:9", None, i) for i in range(2)]
    for engine, summary in zip(engines, (busy, idle), strict=True):
        engine.summary, engine.problem, engine._heard_s = summary, "", 100.0
    monkeypatch.setattr(top_command.time, "monotonic", lambda: 100.0 + top_command.SILENT_S)
    assert [engine.current() for engine in engines] == [busy, idle]
    monkeypatch.setattr(top_command.time, "monotonic", lambda: 112.0)
    assert [engine.current() for engine in engines] == ["silent for 12 s", idle]
    engines[0]._ranks = RankPlace(5, 9, True, 11.0, False), RankPlace(5, 8, False, 11.0, True)
    assert engines[0].current() == "silent for 12 s; rank 1 is behind"
    engines[0]._ranks = ()
    console = Console(file=io.StringIO(), width=100)
    console.print(render_all(engines))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2 engines, 1 without data" in text and "engine 0   no data: silent for 12 s" in text and "first" not in text


@pytest.mark.parametrize("num", [2, 4, 5, 18, 21, 22, 40])
def test_several_engines_fit_a_terminal(num: int) -> None:
    """Blocks where they leave room to requests, else a line an engine; the last line counts what is not there."""
    summary = Summary.of(state_of(frames_of_a_busy_server()[:-1]))
    engines = [Engine("http://127.0.0.1:9", None, i) for i in range(num)]
    for engine in engines:
        engine.summary, engine.problem, engine._heard_s = summary, "", time.monotonic()
    console = Console(file=io.StringIO(), width=80, height=24)
    console.print(render_all(engines, console))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) <= 24
    assert sum(line.startswith("engine ") for line in lines) == (num if num <= 21 else 20)
    assert ("and" in lines[-1]) == (num > 21)
    assert any("saved by sharing" in line for line in lines) == (num <= 4)
    num_rows = sum(" running " in line and not line.startswith("engine ") for line in lines[3:])
    num_rows -= num if num <= 4 else 0  # the numbers of the blocks
    assert num_rows == {2: 2, 4: 3, 5: 5, 18: 1}.get(num, 0)


def test_an_engine_that_comes_later_is_shown() -> None:
    deadline = time.monotonic() + 20

    class EnoughError(Exception):
        pass

    class Screen:
        console = Console(file=io.StringIO(), width=80, height=40)

        def update(self, shown: object, refresh: bool) -> None:
            self.console.file = io.StringIO()
            self.console.print(shown)
            lines = self.console.file.getvalue().splitlines()
            assert time.monotonic() < deadline, lines
            if lines[0].startswith("3 engines, 1 without data") and "no replica 1 is ready" in "".join(lines):
                raise EnoughError

    with listening(Growing) as url, pytest.raises(EnoughError):
        top_command.watch_all(url, KEY, 1, Screen())  # type: ignore[arg-type]


class Silent(Streams):
    num_replicas = 2

    def send_frames(self, path: str) -> None:
        self.bye("the engine is gone")


def test_no_engine_with_data_is_an_error(call: Call) -> None:
    with listening(Silent) as url:
        done = call("top", url, "--once", "--api-key", KEY)
    assert done.code == 1 and "sent no snapshot" in done.err


@pytest.mark.parametrize("num", [0, -1, "2", None, 10**9])
def test_config_that_is_none_is_an_error(call: Call, num: object) -> None:
    handler = type("Odd", (Stream,), {"num_replicas": num})
    with listening(handler) as url:
        done = call("top", url, "--once", "--api-key", KEY)
    assert done.code == 1 and "has no readable /view/config" in done.err


def test_unreachable_server_is_an_error(call: Call, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    assert "requires a key" in call("top", url, "--once").err
    assert "does not respond" in call("top", "http://127.0.0.1:9", "--once").err
    assert "is not a server's address" in call("top", "ftp://x").err


@pytest.mark.parametrize(
    "url",
    ["http://localhost:abc", "http://localhost:99999", "http://[::1", "http://a b", f"http://{'a' * 70}", "http:///"],
)
def test_invalid_address_is_refused(call: Call, url: str) -> None:
    done = call("top", url, "--once")
    assert done.code == 2 and "use one such as http://127.0.0.1:8000" in done.err


def test_server_without_http_is_an_error(call: Call) -> None:
    class Greeting(StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            self.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")

    with TCPServer(("127.0.0.1", 0), Greeting) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        done = call("top", f"http://127.0.0.1:{server.server_address[1]}", "--once")
        thread.join()
    assert done.code == 1 and r"does not speak HTTP: 'SSH-2.0-OpenSSH_9.6\r\n'" in done.err
