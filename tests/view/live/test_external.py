"""ExternalPool to another server's KV events: what it says it has is what is shown, in both encodings."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from octavo.config import KVEventsConfig
from octavo.core import events as ev
from octavo.engine import kv_events
from octavo.engine.kv_events import BlockStored, KVEventBatch, KVEventPublisher, KVEventTranslator
from octavo.errors import ParameterError
from octavo.view.live import external as attach
from octavo.view.live.external import FIRST_BLOCKS, ExternalPool
from octavo.view.live.messages import Snapshot
from octavo.view.live.publisher import STOP
from octavo.view.live.state import PoolState
from tests.core.lab import Lab

SIZE = 2


@pytest.fixture
def attached() -> Iterator[ExternalPool]:
    attached = ExternalPool("tcp://127.0.0.1:9")
    yield attached
    attached.close()


def message(sequence: int, events: list[Any], rank: int | None = 0) -> list[bytes]:
    return [b"", struct.pack(">q", sequence), msgspec.msgpack.encode([1.5, events, rank])]


def stored(hashes: list[Any], parent: Any = None, medium: str | None = "GPU") -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": [0] * SIZE * len(hashes),
        "block_size": SIZE,
        "lora_id": None,
        "medium": medium,
    }


def as_array(event: dict[str, Any]) -> list[Any]:
    return list(event.values())


class Watcher:
    def __init__(self, attached: ExternalPool) -> None:
        self.attached = attached
        self.state: PoolState | None = None
        self.kinds: list[str] = []

    def look(self) -> PoolState:
        after = "" if self.state is None else f"{self.state.epoch}:{self.state.frame}"
        frame = asyncio.run(self.attached.view_rpc("view", after))
        if frame is not None:
            self.kinds.append(type(frame).__name__)
            if self.state is None:
                assert isinstance(frame, Snapshot)
                self.state = PoolState(frame)
            else:
                self.state.apply(frame)
        assert self.state is not None
        return self.state

    def chains(self) -> list[list[int]]:
        """For each block that is shown, the seals from its prompt's first block to it."""
        state = self.look()
        sealed = {int(state.seal_ids[b]): int(state.parent_ids[b]) for b in np.nonzero(state.words)[0]}
        found = []
        for seal in sealed:
            chain = [seal]
            while chain[0] in sealed and sealed[chain[0]] > 0:
                chain.insert(0, sealed[chain[0]])
            found.append(chain)
        return sorted(found)


@pytest.mark.parametrize("encode", [dict, as_array], ids=["maps", "arrays"])
@pytest.mark.parametrize("name", [int, lambda n: bytes([n])], ids=["numbers", "bytes"])
def test_what_is_stored_is_shown_until_it_is_removed(attached: ExternalPool, encode: Any, name: Any) -> None:
    watcher = Watcher(attached)
    assert watcher.look().num_blocks == FIRST_BLOCKS
    attached._process(message(0, [encode(stored([name(1), name(2)])), encode(stored([name(3)], name(2)))]))
    attached._process(message(1, [encode(stored([name(4)], name(1))), encode(stored([name(9)], None, "CPU"))]))
    state = watcher.look()
    assert (state.num_cached, state.block_size, state.stats["num_cached"]) == (4, SIZE, 4)
    assert watcher.chains() == [[1], [1, 2], [1, 2, 3], [1, 4]]
    removed = {"type": "BlockRemoved", "block_hashes": [name(2), name(7)], "medium": "GPU"}
    attached._process(message(2, [encode(removed)]))
    assert watcher.look().num_cached == 3
    assert [event["event"] for event in watcher.look().events] == ["evicted"]
    attached._process(message(3, [{"type": "AllBlocksCleared"} if encode is dict else ["AllBlocksCleared"]]))
    assert watcher.look().num_cached == 0 and attached.num_lost == attached.num_malformed == 0


def test_a_batch_may_be_a_map_as_well(attached: ExternalPool) -> None:
    """So newer vLLM encodes it; what has its default value is left out."""
    watcher = Watcher(attached)
    for number, more in enumerate(({}, {"data_parallel_rank": 3})):
        batch = {"ts": 1.5, "events": [stored([1, 2])], **more}
        attached._process([b"kv-events", struct.pack(">q", number), msgspec.msgpack.encode(batch)])
    assert watcher.look().num_cached == 4 and attached.num_malformed == 0
    assert sorted(attached._stored) == [(0, 1), (0, 2), (3, 1), (3, 2)]


def test_what_an_engine_publishes_is_what_it_has(attached: ExternalPool) -> None:
    """Event by event, through the publisher's own words, with evictions."""
    rnd = random.Random(5)
    lab = Lab(24, SIZE, rows=4, listen=False)
    translator, happened = KVEventTranslator(SIZE), []

    def listen(event: ev.Event) -> None:
        if isinstance(event, ev.Sealed | ev.Evicted):
            happened.append((event, b""))

    lab.cache.events.subscribe(listen, blocks=True)
    watcher, sequence = Watcher(attached), 0
    for i in range(60):
        lab.add(f"r{i}", [rnd.randrange(2) for _ in range(rnd.randint(1, 12))], rnd.randint(1, 6))
        lab.run()
        told = translator.translate(happened[:])
        happened.clear()
        if told:
            payload = msgspec.msgpack.encode(KVEventBatch(0.0, told))
            attached._process([b"kv", struct.pack(">q", sequence), payload])
            sequence += 1
        assert watcher.look().num_cached == len(translator._num_blocks)
    assert attached._num_evicted > 10 and set(watcher.kinds) == {"Snapshot", "Delta"}


def test_a_pool_that_is_larger_than_was_thought(attached: ExternalPool) -> None:
    watcher = Watcher(attached)
    watcher.look()
    attached._process(message(0, [stored(list(range(FIRST_BLOCKS + 1)))]))
    state = watcher.look()
    assert (state.num_blocks, state.num_cached) == (2 * FIRST_BLOCKS, FIRST_BLOCKS + 1)
    assert watcher.kinds == ["Snapshot", "Snapshot"]


def test_a_server_that_was_started_again_has_nothing_and_losses_are_counted(attached: ExternalPool) -> None:
    watcher = Watcher(attached)
    attached._process(message(7, [stored([1])]))
    attached._process(message(8, [stored([1, 2])], rank=1))
    attached._process(message(10, [stored([3])]))
    state = watcher.look()
    assert (state.num_cached, state.stats["num_lost"]) == (4, 2)
    attached._process(message(0, [stored([5])]))
    assert watcher.look().num_cached == 3  # rank 1 goes on


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b"", b"12345678"],
        [b"", b"1", b""],
        [b"", struct.pack(">q", 0), b"\xc1"],
        [b"", struct.pack(">q", 0), msgspec.msgpack.encode({"events": 3})],
        message(0, [3]),
        message(0, [{"type": "BlockStored"}]),
        message(0, [{"type": "BlockStored", "block_hashes": 7, "block_size": 2}]),
        message(0, [{"type": "BlockStored", "block_hashes": [[1]], "block_size": 2}]),
        message(0, [{"type": "BlockStored", "block_hashes": [1], "block_size": -2}]),
        message(0, [["BlockRemoved", {}]]),
        message(0, [{}]),
    ],
    ids=range(12),
)
def test_what_is_malformed_is_counted(attached: ExternalPool, parts: list[bytes]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        arrivals = [parts, message(1, [stored([1])])]

        class Socket:
            def recv_multipart(self, flags: int) -> list[bytes]:
                if not arrivals:
                    raise zmq.Again
                return arrivals.pop(0)

        patch.setattr(attached, "_socket", Socket())
        state = Watcher(attached).look()
    assert attached.num_malformed == 1 and state.num_cached == 1


def test_over_a_real_socket_with_the_numbers_of_its_metrics() -> None:
    text = b'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_waiting{engine="0"} 2.0\n'
    text += b'vllm:cache_config_info{block_size="2",num_gpu_blocks="50"} 1.0\n'

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Metrics)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    context = zmq.Context()
    publisher = context.socket(zmq.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    attached = ExternalPool(f"tcp://127.0.0.1:{port}", f"http://127.0.0.1:{server.server_port}/metrics")
    watcher, sequence = Watcher(attached), 0
    while watcher.look().num_cached < 2 or watcher.look().counts.running != 3:
        publisher.send_multipart(message(sequence, [stored([1, 2])]))  # until the subscription has arrived
        sequence += 1
    state = watcher.look()
    assert (state.num_blocks, state.num_cached) == (50, 2)
    assert (state.counts.running, state.counts.waiting) == (3, 2)
    found = asyncio.run(attached.view_rpc("view_block", str(np.nonzero(state.words)[0][0])))
    assert len(found["name"]) == 32 and found["token_ids"] is None
    assert asyncio.run(attached.view_rpc("view", STOP)) is None
    attached.close()
    publisher.close(linger=0)
    context.term()
    server.shutdown()
    server.server_close()


def test_metrics_that_are_none_are_left_alone() -> None:
    class Odd(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(answers[self.path])

        def log_message(self, *args: Any) -> None:
            pass

    answers = {"/ssh": b"SSH-2.0-OpenSSH_9.6\r\n"}
    answers["/inf"] = b"HTTP/1.0 200 OK\r\n\r\nvllm:num_requests_running 1e999\n"
    server = HTTPServer(("127.0.0.1", 0), Odd)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    try:
        for url in (f"{here}/ssh", f"{here}/inf", "http://127.0.0.1:abc/metrics", "http://127.0.0.1:9/a b"):
            with contextlib.closing(ExternalPool("tcp://127.0.0.1:9", url)) as attached:
                state = Watcher(attached).look()
                assert state.counts.running == 0 and attached._metrics_at > 0
    finally:
        server.shutdown()
        server.server_close()


class Lossy:
    """A socket on which every third message is lost, as long as it `loses`."""

    def __init__(self, socket: zmq.Socket[bytes], loses: bool) -> None:
        self.socket, self.loses, self.num_heard, self.num_dropped = socket, loses, 0, 0

    def recv_multipart(self, flags: int) -> list[bytes]:
        while True:
            parts = self.socket.recv_multipart(flags)
            self.num_heard += 1
            if self.num_heard % 3 or not self.loses:
                return parts
            self.num_dropped += 1


@pytest.fixture
def publishing() -> Iterator[tuple[Lab, KVEventPublisher, str, str]]:
    """A scheduler with what an engine publishes of it, in vLLM's format, and the two addresses."""
    lab = Lab(24, SIZE, rows=4, listen=False)
    config = KVEventsConfig(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
    publisher = KVEventPublisher(lab.cache, config)
    assert publisher._replay is not None
    yield (
        lab,
        publisher,
        publisher._publish.getsockopt_string(zmq.LAST_ENDPOINT),
        publisher._replay.getsockopt_string(zmq.LAST_ENDPOINT),
    )
    publisher.close()


def look_until(watcher: Watcher, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not (watcher.look() and done()):
        assert time.monotonic() < deadline, (watcher.attached._last, watcher.attached._held)
        time.sleep(0.001)


def work(lab: Lab, rnd: random.Random, first: int, num: int, publisher: KVEventPublisher) -> None:
    """Requests one after the other, each of them told in a message of its own or more."""
    for i in range(first, first + num):
        lab.add(f"r{i}", [rnd.randrange(2) for _ in range(rnd.randint(1, 12))], rnd.randint(1, 6))
        lab.run()
        deadline = time.monotonic() + 60
        while publisher._core_events:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.mark.parametrize("loses", [True, False])
def test_what_was_missed_is_told_again(publishing: tuple[Lab, KVEventPublisher, str, str], loses: bool) -> None:
    """What was stored before we came, and what was lost on the way."""
    lab, publisher, endpoint, replay = publishing
    rnd = random.Random(7)
    work(lab, rnd, 0, 10, publisher)
    attached = ExternalPool(endpoint, replay=replay)
    lossy = Lossy(attached._socket, loses)
    attached._socket = lossy  # type: ignore[assignment]
    watcher = Watcher(attached)

    def is_all_there() -> bool:
        told = {kv_events.block_hash(name) for name in list(publisher._translator._num_blocks)}
        return bool(told) and {name for _, name in attached._stored} == told

    try:
        look_until(watcher, is_all_there)  # from the replay: nothing has been published since
        number = 10
        while attached._num_evicted < 10 or lossy.num_dropped < 5 * loses:
            work(lab, rnd, number, 1, publisher)
            number += 1
            watcher.look()
            assert number < 5000
        lossy.loses = False
        num_heard = lossy.num_heard
        while lossy.num_heard == num_heard:  # whoever lost the last message hears of it with the next
            work(lab, rnd, number, 1, publisher)
            number += 1
            watcher.look()
        look_until(watcher, is_all_there)
        assert attached.num_lost == attached.num_malformed == 0
    finally:
        attached.close()


def test_a_replay_that_is_not_answered_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "REPLAY_S", 0.0)
    attached = ExternalPool("tcp://127.0.0.1:9", replay="tcp://127.0.0.1:9")
    arrivals = [message(3, [stored([1])]), message(6, [stored([2])]), message(7, [stored([3])])]

    class Socket:
        def recv_multipart(self, flags: int) -> list[bytes]:
            if not arrivals:
                raise zmq.Again
            return arrivals.pop(0)

    monkeypatch.setattr(attached, "_socket", Socket())
    state = Watcher(attached).look()
    assert state.num_cached == 3 and attached.num_lost == 2 and attached._replay_socket is None
    attached.close()


@pytest.mark.parametrize("topic", [[], [b"kv-events"], [b""]], ids=["no topic", "topic", "empty topic"])
def test_a_replay_that_reaches_less_far_back_loses_the_rest(topic: list[bytes]) -> None:
    """A publisher of vLLM's that keeps four messages; what is told twice counts once, and what is no message not."""
    context = zmq.Context()
    publisher, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (publisher, router)]
    attached = ExternalPool(f"tcp://127.0.0.1:{ports[0]}", replay=f"tcp://127.0.0.1:{ports[1]}")
    watcher = Watcher(attached)

    def answer(kept: list[int]) -> int:
        assert router.poll(60_000)
        asker, empty, start = router.recv_multipart()
        assert empty == b""
        router.send_multipart([asker, b"", b"short"])
        for number in kept:
            router.send_multipart([asker, b"", *topic, *message(number, [stored([number])])[1:]])
        router.send_multipart([asker, b"", *[b""] * len(topic), b"\xff" * 8, b""])
        return int.from_bytes(start, "big")

    try:
        watcher.look()
        assert answer([2, 3, 4]) == 0
        look_until(watcher, lambda: attached._replay_socket is None)
        assert (watcher.look().num_cached, attached.num_lost) == (3, 0)
        attached._process(message(3, [stored([33])]))  # published while we asked: it counted by the replay
        attached._process(message(4, [stored([44])]))
        assert (watcher.look().num_cached, attached._last[0]) == (3, 4)
        attached._process(message(9, [stored([9])]))
        assert attached._held is not None
        assert answer([7, 8, 9, 10]) == 5
        look_until(watcher, lambda: attached._replay_socket is None and attached._held is None)
        assert (watcher.look().num_cached, attached.num_lost, attached.num_malformed) == (7, 2, 2)
        attached._process(message(10, [stored([10])]))
        attached._process(message(11, [stored([11])]))
        assert (watcher.look().num_cached, attached.num_lost) == (8, 2)
        attached._process(message(1, [stored([1])]))  # it was started again: what it said first, we ask for
        assert answer([0, 1]) == 0
        look_until(watcher, lambda: attached._replay_socket is None and attached._held is None)
        assert (watcher.look().num_cached, attached.num_lost) == (2, 2)
    finally:
        attached.close()
        context.destroy(linger=0)


def test_an_address_that_is_none() -> None:
    with pytest.raises(ParameterError, match=r"attach .* use one such as tcp://"):
        ExternalPool("127.0.0.1")
    with pytest.raises(ParameterError, match=r"replay .* use one such as tcp://"):
        ExternalPool("tcp://127.0.0.1:9", replay="127.0.0.1")


def test_stored_is_the_publishers_own_word() -> None:
    """What the test above makes by hand has the fields that our publisher sends."""
    assert set(stored([])) - {"type"} <= {*BlockStored.__struct_fields__, "lora_name"}
