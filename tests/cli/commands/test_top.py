"""`octavo top`, with a stream as a server sends it."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import StreamRequestHandler, TCPServer

import msgspec
import pytest
from rich.console import Console

from octavo.cli.commands.top import render
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


def test_request_ids_are_not_markup() -> None:
    """An untrusted server may send anything."""
    console = Console(file=io.StringIO(), width=100)
    names = ["[/x]", "[red]a"]
    rows = tuple(RequestSummary(name, "running", 8, 4, 0) for name in names)
    console.print(render(Summary(4, 0, 1, 2, 0, 0, 0.0, 0.0, 0.0, 0, 0, "", rows)))
    assert [line.split()[0] for line in console.file.getvalue().splitlines()[-2:]] == names  # type: ignore[attr-defined]


class Stream(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path != "/view/events" or self.headers["authorization"] != f"Bearer {KEY}":
            self.send_response(401)
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b": keep-alive\n\n")
        frames = frames_of_a_busy_server()
        for frame in (
            state_of(frames[:2]).snapshot(),
            *frames[2:-1],
        ):  # an idle snapshot would end --once
            self.wfile.write(b"event: x\ndata: " + msgspec.json.encode(frame) + b"\n\n")
        self.wfile.write(b'event: bye\ndata: {"reason":"slow"}\n\n')

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Stream)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


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
    assert "first running 8 4 0" in text


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
