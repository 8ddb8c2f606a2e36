"""`ExternalPool`: the state follows another server's KV events, in both encodings."""

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
from octavo.core.types import block_key
from octavo.engine.kv_events import BlockStored, KVEventBatch, KVEventPublisher, KVEventTranslator
from octavo.errors import ParameterError
from octavo.view.live import external as external_module
from octavo.view.live.external import FIRST_BLOCKS, ExternalPool
from octavo.view.live.messages import Snapshot
from octavo.view.live.queries import GetBlock, GetFrame, StopFrames
from octavo.view.live.state import PoolState
from tests.core.lab import Lab

SIZE = 2


@pytest.fixture
def external() -> Iterator[ExternalPool]:
    external = ExternalPool("tcp://127.0.0.1:9")
    yield external
    external.close()


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
    """Polls a pool as a hub does, and keeps the state."""

    def __init__(self, external: ExternalPool) -> None:
        self.external = external
        self.state: PoolState | None = None
        self.kinds: list[str] = []

    def poll(self) -> PoolState:
        after = "" if self.state is None else f"{self.state.epoch}:{self.state.frame}"
        frame = asyncio.run(self.external.query(GetFrame(after)))
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
        """For each cached block, the seals from the first block of its prompt to it."""
        state = self.poll()
        sealed = {int(state.seal_ids[b]): int(state.parent_ids[b]) for b in np.nonzero(state.words)[0]}
        found = []
        for seal in sealed:
            chain = [seal]
            while chain[0] in sealed and sealed[chain[0]] > 0:
                chain.insert(0, sealed[chain[0]])
            found.append(chain)
        return sorted(found)


@contextlib.contextmanager
def arriving(external: ExternalPool, arrivals: list[list[bytes]]) -> Iterator[None]:
    """The pool's socket has these messages."""

    class Socket:
        def recv_multipart(self, flags: int) -> list[bytes]:
            if not arrivals:
                raise zmq.Again
            return arrivals.pop(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(external, "_socket", Socket())
        yield


@contextlib.contextmanager
def answering(answers: dict[str, bytes]) -> Iterator[str]:
    """The address of a server with these raw answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(answers[self.path])

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.mark.parametrize("encode", [dict, as_array], ids=["maps", "arrays"])
@pytest.mark.parametrize("name", [int, lambda n: bytes([n])], ids=["numbers", "bytes"])
def test_stored_blocks_are_cached_until_they_are_removed(external: ExternalPool, encode: Any, name: Any) -> None:
    watcher = Watcher(external)
    assert watcher.poll().num_blocks == FIRST_BLOCKS
    external._process(message(0, [encode(stored([name(1), name(2)])), encode(stored([name(3)], name(2)))]))
    external._process(message(1, [encode(stored([name(4)], name(1))), encode(stored([name(9)], None, "CPU"))]))
    state = watcher.poll()
    assert (state.num_cached, state.block_size, state.stats["num_cached"]) == (4, SIZE, 4)
    assert watcher.chains() == [[1], [1, 2], [1, 2, 3], [1, 4]]
    removed = {"type": "BlockRemoved", "block_hashes": [name(2), name(7)], "medium": "GPU"}
    external._process(message(2, [encode(removed)]))
    assert watcher.poll().num_cached == 3
    assert [event["event"] for event in watcher.poll().events] == ["evicted"]
    external._process(message(3, [{"type": "AllBlocksCleared"} if encode is dict else ["AllBlocksCleared"]]))
    assert watcher.poll().num_cached == 0 and external.num_lost == external.num_malformed == 0


def test_batch_encoded_as_a_map_is_decoded(external: ExternalPool) -> None:
    """Newer vLLM encodes it so, and omits default values."""
    watcher = Watcher(external)
    for number, more in enumerate(({}, {"data_parallel_rank": 3})):
        batch = {"ts": 1.5, "events": [stored([1, 2])], **more}
        external._process([b"kv-events", struct.pack(">q", number), msgspec.msgpack.encode(batch)])
    assert watcher.poll().num_cached == 4 and external.num_malformed == 0
    assert sorted(external._stored) == [(0, 1), (0, 2), (3, 1), (3, 2)]


def test_pool_follows_the_events_of_an_engine(external: ExternalPool) -> None:
    """With the publisher's own encoding, and with evictions."""
    rnd = random.Random(5)
    lab = Lab(24, SIZE, rows=4, listen=False)
    translator, happened = KVEventTranslator(SIZE), []

    def listen(event: ev.Event) -> None:
        if isinstance(event, ev.Sealed | ev.Evicted):
            happened.append((event, b""))

    lab.cache.events.subscribe(listen, blocks=True)
    watcher, sequence = Watcher(external), 0
    for i in range(60):
        lab.add(f"r{i}", [rnd.randrange(2) for _ in range(rnd.randint(1, 12))], rnd.randint(1, 6))
        lab.run()
        published = translator.translate(happened[:])
        happened.clear()
        if published:
            payload = msgspec.msgpack.encode(KVEventBatch(0.0, published))
            external._process([b"kv", struct.pack(">q", sequence), payload])
            sequence += 1
        assert watcher.poll().num_cached == len(translator._num_blocks)
    assert external._num_evicted > 10 and set(watcher.kinds) == {"Snapshot", "Delta"}


def test_pool_doubles_when_it_is_full(external: ExternalPool) -> None:
    watcher = Watcher(external)
    watcher.poll()
    external._process(message(0, [stored(list(range(FIRST_BLOCKS + 1)))]))
    state = watcher.poll()
    assert (state.num_blocks, state.num_cached) == (2 * FIRST_BLOCKS, FIRST_BLOCKS + 1)
    assert watcher.kinds == ["Snapshot", "Snapshot"]


def test_restart_clears_the_rank_and_lost_messages_are_counted(external: ExternalPool) -> None:
    watcher = Watcher(external)
    external._process(message(7, [stored([1])]))
    external._process(message(8, [stored([1, 2])], rank=1))
    external._process(message(10, [stored([3])]))
    state = watcher.poll()
    assert (state.num_cached, state.stats["num_lost"]) == (4, 2)
    external._process(message(0, [stored([5])]))
    assert watcher.poll().num_cached == 3  # rank 1 goes on


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
def test_malformed_messages_are_counted_and_dropped(external: ExternalPool, parts: list[bytes]) -> None:
    with arriving(external, [parts, message(1, [stored([1])])]):
        state = Watcher(external).poll()
    assert external.num_malformed == 1 and state.num_cached == 1


def test_real_socket_and_metrics() -> None:
    text = b'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_waiting{engine="0"} 2.0\n'
    text += b'vllm:cache_config_info{block_size="2",num_gpu_blocks="50"} 1.0\n'
    context = zmq.Context()
    publisher = context.socket(zmq.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    with answering({"/metrics": b"HTTP/1.0 200 OK\r\n\r\n" + text}) as here:
        external = ExternalPool(f"tcp://127.0.0.1:{port}", f"{here}/metrics")
        watcher, sequence = Watcher(external), 0
        while watcher.poll().num_cached < 2 or watcher.poll().counts.running != 3:
            publisher.send_multipart(message(sequence, [stored([1, 2])]))  # until the subscription has arrived
            sequence += 1
        state = watcher.poll()
    assert (state.num_blocks, state.num_cached) == (50, 2)
    assert (state.counts.running, state.counts.waiting) == (3, 2)
    found = asyncio.run(external.query(GetBlock(int(np.nonzero(state.words)[0][0]))))
    assert len(found.name or "") == 32 and found.token_ids is None
    assert asyncio.run(external.query(StopFrames())) is None
    external.close()
    publisher.close(linger=0)
    context.term()


def test_invalid_metrics_are_ignored() -> None:
    answers = {"/ssh": b"SSH-2.0-OpenSSH_9.6\r\n"}
    answers["/inf"] = b"HTTP/1.0 200 OK\r\n\r\nvllm:num_requests_running 1e999\n"
    with answering(answers) as here:
        for url in (f"{here}/ssh", f"{here}/inf", "http://127.0.0.1:abc/metrics", "http://127.0.0.1:9/a b"):
            with contextlib.closing(ExternalPool("tcp://127.0.0.1:9", url)) as external:
                state = Watcher(external).poll()
                assert state.counts.running == 0 and external._metrics_at > 0


class Lossy:
    """A socket that drops every third message while `loses` is set."""

    def __init__(self, socket: zmq.Socket[bytes], loses: bool) -> None:
        self.socket, self.loses, self.num_received, self.num_dropped = socket, loses, 0, 0

    def recv_multipart(self, flags: int) -> list[bytes]:
        while True:
            parts = self.socket.recv_multipart(flags)
            self.num_received += 1
            if self.num_received % 3 or not self.loses:
                return parts
            self.num_dropped += 1


@pytest.fixture
def publishing() -> Iterator[tuple[Lab, KVEventPublisher, str, str]]:
    """A scheduler, its publisher of KV events in vLLM's format, and the two addresses."""
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


def poll_until(watcher: Watcher, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not (watcher.poll() and done()):
        assert time.monotonic() < deadline, (watcher.external._last, watcher.external._held)
        time.sleep(0.001)


def work(lab: Lab, rnd: random.Random, first: int, num: int, publisher: KVEventPublisher) -> None:
    """Run requests one after the other, each published in one message or more."""
    for i in range(first, first + num):
        lab.add(f"r{i}", [rnd.randrange(2) for _ in range(rnd.randint(1, 12))], rnd.randint(1, 6))
        lab.run()
        deadline = time.monotonic() + 60
        while publisher._core_events:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.mark.parametrize("loses", [True, False])
def test_missed_messages_are_replayed(publishing: tuple[Lab, KVEventPublisher, str, str], loses: bool) -> None:
    """Blocks stored before the connection, and messages lost on the way."""
    lab, publisher, endpoint, replay = publishing
    rnd = random.Random(7)
    work(lab, rnd, 0, 10, publisher)
    external = ExternalPool(endpoint, replay=replay)
    lossy = Lossy(external._socket, loses)
    external._socket = lossy  # type: ignore[assignment]
    watcher = Watcher(external)

    def is_complete() -> bool:
        published = {block_key(name) for name in list(publisher._translator._num_blocks)}
        return bool(published) and {name for _, name in external._stored} == published

    try:
        poll_until(watcher, is_complete)  # from the replay: nothing was published since
        number = 10
        while external._num_evicted < 10 or lossy.num_dropped < 5 * loses:
            work(lab, rnd, number, 1, publisher)
            number += 1
            watcher.poll()
            assert number < 5000
        lossy.loses = False
        num_received = lossy.num_received
        while lossy.num_received == num_received:  # the next message shows that the last one was lost
            work(lab, rnd, number, 1, publisher)
            number += 1
            watcher.poll()
        poll_until(watcher, is_complete)
        assert external.num_lost == external.num_malformed == 0
    finally:
        external.close()


def test_replay_without_reply_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_module, "REPLAY_S", 0.0)
    with contextlib.closing(ExternalPool("tcp://127.0.0.1:9", replay="tcp://127.0.0.1:9")) as external:
        with arriving(external, [message(number, [stored([number])]) for number in (3, 6, 7)]):
            state = Watcher(external).poll()
        assert state.num_cached == 3 and external.num_lost == 2 and external._replay_socket is None


@pytest.mark.parametrize("topic", [[], [b"kv-events"], [b""]], ids=["no topic", "topic", "empty topic"])
def test_messages_older_than_the_replay_buffer_are_lost(topic: list[bytes]) -> None:
    """A publisher like vLLM's that buffers four messages. Duplicates count once, invalid messages are dropped."""
    context = zmq.Context()
    publisher, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (publisher, router)]
    external = ExternalPool(f"tcp://127.0.0.1:{ports[0]}", replay=f"tcp://127.0.0.1:{ports[1]}")
    watcher = Watcher(external)

    def reply(kept: list[int]) -> int:
        assert router.poll(60_000)
        client, empty, start = router.recv_multipart()
        assert empty == b""
        router.send_multipart([client, b"", b"short"])
        for number in kept:
            router.send_multipart([client, b"", *topic, *message(number, [stored([number])])[1:]])
        router.send_multipart([client, b"", *[b""] * len(topic), b"\xff" * 8, b""])
        return int.from_bytes(start, "big")

    try:
        watcher.poll()
        assert reply([2, 3, 4]) == 0
        poll_until(watcher, lambda: external._replay_socket is None)
        assert (watcher.poll().num_cached, external.num_lost) == (3, 0)
        external._process(message(3, [stored([33])]))  # published meanwhile: the replay had it
        external._process(message(4, [stored([44])]))
        assert (watcher.poll().num_cached, external._last[0]) == (3, 4)
        external._process(message(9, [stored([9])]))
        assert external._held is not None
        assert reply([7, 8, 9, 10]) == 5
        poll_until(watcher, lambda: external._replay_socket is None and external._held is None)
        assert (watcher.poll().num_cached, external.num_lost, external.num_malformed) == (7, 2, 2)
        external._process(message(10, [stored([10])]))
        external._process(message(11, [stored([11])]))
        assert (watcher.poll().num_cached, external.num_lost) == (8, 2)
        external._process(message(1, [stored([1])]))  # restarted: its first messages are replayed
        assert reply([0, 1]) == 0
        poll_until(watcher, lambda: external._replay_socket is None and external._held is None)
        assert (watcher.poll().num_cached, external.num_lost) == (2, 2)
    finally:
        external.close()
        context.destroy(linger=0)


def test_invalid_address_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"attach .* use one such as tcp://"):
        ExternalPool("127.0.0.1")
    with pytest.raises(ParameterError, match=r"replay .* use one such as tcp://"):
        ExternalPool("tcp://127.0.0.1:9", replay="127.0.0.1")


def test_stored_events_have_the_fields_of_the_publisher() -> None:
    """`stored` above makes events by hand."""
    assert set(stored([])) - {"type"} <= {*BlockStored.__struct_fields__, "lora_name"}
