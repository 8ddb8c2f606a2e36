"""Published KV cache events, assembled by a subscriber, equal the content of the pool."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from octavo import LLM, SamplingParams
from octavo.config import EngineArgs, KVEventsConfig
from octavo.core import events as ev
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.types import block_hashes
from octavo.engine.kv_events import END_SEQUENCE, KVCacheEvent, KVEventPublisher, KVEventTranslator
from octavo.errors import ParameterError, UnknownOptionError
from tests.engine.process.engines import last_of, nothing_left, oracle_client, own_directory, run, until  # noqa: F401
from tests.proof.oracle import Oracle
from tests.proof.workloads import KINDS, World

LONG_MS = 20_000


def hashes_of(tokens: Any, block_size: int, salt: bytes = b"") -> list[int]:
    return [int.from_bytes(digest[-8:], "big") for digest in block_hashes(tokens, block_size, salt=salt)]


class Router:
    """A router's view from decoded events: block hash -> its parent's hash, and its tokens."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        self.seen: Counter[str] = Counter()

    def take(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            kind = event.pop("type")
            self.seen[kind] += 1
            if kind == "AllBlocksCleared":
                assert not event
                self.blocks.clear()
            elif kind == "BlockRemoved":
                assert set(event) == {"block_hashes", "medium"}
                for block in event["block_hashes"]:
                    del self.blocks[block]
            else:
                assert set(event) == {
                    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"
                }  # fmt: skip
                size, parent = event["block_size"], event["parent_block_hash"]
                assert len(event["token_ids"]) == size * len(event["block_hashes"])
                for i, block in enumerate(event["block_hashes"]):
                    assert block not in self.blocks and (parent is None or parent in self.blocks)
                    self.blocks[block] = parent, event["token_ids"][i * size : (i + 1) * size]
                    parent = block


class Contents:
    """The pool's content, computed from whole prompts: seal id -> salt, and all tokens up to the block's end."""

    def __init__(self, cache: KVCacheManager) -> None:
        self.cache = cache
        self.of: dict[int, tuple[bytes, list[int]]] = {}

    def __call__(self, event: ev.Event) -> None:
        if isinstance(event, ev.Sealed):
            key = self.cache.pool.key_of(event.block_id)
            assert key is not None
            if len(event.token_ids) == 1:
                return  # of a window group
            tokens = array("i", event.token_ids).tolist()
            if isinstance(key[0], bytes):
                self.of[event.seal_id] = key[0], tokens
            elif key[0] in self.of:
                salt, before = self.of[key[0]]
                self.of[event.seal_id] = salt, before + tokens
        elif isinstance(event, ev.Evicted):
            self.of.pop(event.seal_id, None)

    def blocks(self) -> dict[int, tuple[int | None, list[int]]]:
        """The blocks in the form of `Router.blocks`."""
        size, found = self.cache.block_size, {}
        for salt, tokens in (self.of[seal] for seal in self.cache.pool.seal_id if seal in self.of):
            *_, parent, number = [None, *hashes_of(tokens, size, salt)]
            assert number is not None
            found[number] = parent, tokens[-size:]
        return found


@contextlib.contextmanager
def unthreaded(cache: KVCacheManager, **options: Any) -> Iterator[KVEventPublisher]:
    """A publisher without its thread: the test processes the events."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVEventPublisher, "_run", lambda self: None)
        endpoint = f"ipc://{directory}/events"
        events = KVEventPublisher(cache, KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, **options))
        try:
            yield events
        finally:
            events.close()
            events._context.destroy(linger=0)


def deliver(events: KVEventPublisher, router: Router) -> None:
    kv_events: list[KVCacheEvent] = events._translator.translate(events._queue.take())
    router.take(msgspec.msgpack.decode(msgspec.msgpack.encode(kv_events)))


@pytest.mark.parametrize("kind", KINDS)
def test_router_view_equals_the_pool_at_every_step(kind: str) -> None:
    totals: Counter[str] = Counter()
    for seed in range(14):
        world = World(seed, Counter(), kind=kind, listen=True, groups=seed >= 10)
        totals.update(_follow(world, world.cache))
    assert totals["blocks"] and totals["BlockStored"] and totals["BlockRemoved"] and totals["AllBlocksCleared"] >= 10


def _follow(world: World, cache: KVCacheManager) -> Counter[str]:
    router, contents = Router(), Contents(cache)
    cache.events.subscribe(contents, blocks=True)
    with unthreaded(cache) as events:

        def compare(event: ev.Event | None = None) -> None:
            if event is None or isinstance(event, ev.Step):
                assert event is None or events._wake.is_set()
                deliver(events, router)
                assert router.blocks == contents.blocks()
                router.seen["blocks"] += len(router.blocks)

        cache.events.subscribe(compare)
        world.run()
        compare()
        cache.reset_prefix_cache()
        compare()
        assert not router.blocks or cache.pins
    return router.seen


def test_equal_blocks_are_published_once() -> None:
    """A parent is evicted and sealed again, then its child; the old child stays, unreachable, until it is evicted."""
    translator, tokens = KVEventTranslator(2), array("i", [1, 2]).tobytes()
    again = array("i", [3, 4]).tobytes()
    a, b = hashes_of([1, 2, 3, 4], 2)

    def published(*events: ev.Sealed | ev.Evicted) -> list[Any]:
        raw: list[Any] = msgspec.msgpack.decode(
            msgspec.msgpack.encode(translator.translate([(e, b"") for e in events]))
        )
        return [(e["type"], e["block_hashes"]) for e in raw]

    assert published(ev.Sealed(1, 1, 0, tokens), ev.Sealed(2, 2, 1, again)) == [("BlockStored", [a, b])]
    assert published(ev.Evicted(1, 1, "room", 0)) == [("BlockRemoved", [a])]
    assert published(ev.Sealed(3, 3, 0, tokens), ev.Sealed(4, 4, 3, again)) == [("BlockStored", [a])]
    assert published(ev.Evicted(2, 2, "room", 0)) == []
    assert published(ev.Sealed(5, 5, 2, again)) == []  # its parent is evicted
    assert published(ev.Evicted(4, 4, "room", 0), ev.Evicted(5, 5, "room", 0)) == [("BlockRemoved", [b])]


class Subscriber:
    def __init__(self, endpoint: str, topic: str = "", replay: str = "") -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.topic = topic.encode()
        self.socket.setsockopt(zmq.SUBSCRIBE, self.topic)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.connect(endpoint)
        self.replay = self.context.socket(zmq.DEALER)
        if replay:
            self.replay.connect(replay)
        self.router = Router()
        self.last = -1

    def take(self, sequence: bytes, payload: bytes) -> None:
        assert int.from_bytes(sequence, "big") == self.last + 1, "a message is missing"
        self.last += 1
        at, events, rank = msgspec.msgpack.decode(payload)
        assert at > 1e9 and rank == 0
        self.router.take(events)

    def read(self, socket: Any) -> list[bytes]:
        assert socket.poll(LONG_MS), "no message arrived"
        frames: list[bytes] = socket.recv_multipart()
        return frames

    def until(self, numbers: set[int]) -> None:
        """Read messages until exactly these blocks are known; skips messages that a replay contained already."""
        while set(self.router.blocks) != numbers:
            topic, sequence, payload = self.read(self.socket)
            assert topic == b"kv@here"
            if int.from_bytes(sequence, "big") > self.last:
                self.take(sequence, payload)

    def catch_up(self) -> int:
        """Read missed messages from a replay; returns their number."""
        self.replay.send_multipart((b"", (self.last + 1).to_bytes(8, "big")))
        begin = self.last
        while (frames := self.read(self.replay))[2] != END_SEQUENCE:
            assert frames[0] == b"" and frames[1].startswith(self.topic)
            self.take(*frames[2:])
        assert frames == [b"", b"", END_SEQUENCE, b""]
        return self.last - begin


@contextlib.contextmanager
def subscribed(endpoint: str, **options: str) -> Iterator[Subscriber]:
    subscriber = Subscriber(endpoint, **options)
    try:
        yield subscriber
    finally:
        subscriber.context.destroy(linger=0)


def engine_of(cache: KVCacheManager) -> Callable[..., None]:
    """A function that completes prompts on the oracle."""
    scheduler, numbers = Scheduler(cache), itertools.count()
    oracle = Oracle(scheduler)

    def complete(*prompts: list[int]) -> None:
        for prompt in prompts:
            scheduler.add(Request(str(next(numbers)), prompt, SamplingParams(max_tokens=3)))
        while scheduler.requests:
            step = scheduler.schedule()
            scheduler.update(step, oracle.submit(step.plan).result())

    return complete


PROMPTS = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 9], [7, 7, 7]]


def test_subscriber_catches_up_by_replay(tmp_path: Path) -> None:
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    cache = KVCacheManager(40, 2, num_rows=8)
    complete, contents = engine_of(cache), Contents(cache)
    detach = cache.events.subscribe(contents, blocks=True)
    on: dict[str, Any] = {"enable_kv_cache_events": True, "topic": "kv@here", "endpoint": endpoint}
    events = KVEventPublisher(cache, KVEventsConfig(**on, replay_endpoint=replay))
    with subscribed(endpoint, topic="kv@", replay=replay) as one, subscribed(endpoint, topic="other") as other:
        complete(*PROMPTS)
        wanted = set(contents.blocks())
        assert {n for prompt in PROMPTS for n in hashes_of(prompt, 2)} <= wanted
        while set(one.router.blocks) != wanted:
            one.catch_up()
        assert one.router.seen["AllBlocksCleared"] == 1
        assert one.router.blocks[hashes_of([1, 2, 3, 4], 2)[1]] == (hashes_of([1, 2], 2)[0], [3, 4])
        one.replay.send_multipart((b"what?",))
        assert one.catch_up() == 0  # no message but the end
        number = 10
        while not one.socket.poll(100):  # a late subscriber has missed earlier messages
            complete([number] * 3)
            number += 1
        one.catch_up()
        complete([8] * 9)
        one.until(set(contents.blocks()))
        cache.reset_prefix_cache()
        one.until(set())
        assert one.router.seen["AllBlocksCleared"] == 2
        assert not other.socket.poll(0)
        events.close()
        events.close()
    detach()
    assert not cache.events.active
    KVEventPublisher(cache, KVEventsConfig(**on)).close()  # the address is free again


def test_queue_overflow_drops_blocks_but_publishes_nothing_false() -> None:
    cache, router = KVCacheManager(40, 2, num_rows=8), Router()
    complete, contents = engine_of(cache), Contents(cache)
    cache.events.subscribe(contents, blocks=True)
    with unthreaded(cache, max_queue_size=3) as events:
        deliver(events, router)
        for prompts in (PROMPTS[:1], PROMPTS, [[n] * 5 for n in range(10, 20)]):
            complete(*prompts)
            assert len(events._queue._events) <= 3
            deliver(events, router)
            assert set(router.blocks) <= set(contents.blocks())
    assert router.seen["AllBlocksCleared"] >= 2


async def test_restarted_engine_publishes_a_clear(model: str, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    config = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": f"ipc://{tmp_path}/replay"}

    def known() -> Router:
        with subscribed(endpoint, replay=str(config["replay_endpoint"])) as subscriber:
            subscriber.catch_up()
            return subscriber.router

    with nothing_left():
        async with oracle_client(model, options={"kv_events_config": config}) as client:
            for prompt in (list(range(1, 10)), list(range(20, 30))):
                await last_of(client, {"prompt_token_ids": prompt}, SamplingParams(max_tokens=2))
                while not set(hashes_of(prompt, 4)) <= set((router := await asyncio.to_thread(known)).blocks):
                    pass
                assert router.seen["AllBlocksCleared"] == 1
                first = client.transport.pid
                assert first is not None
                os.kill(first, signal.SIGKILL)
                await until(lambda t=client.transport, first=first: t.supervisor.is_up and t.pid != first)
            router = await asyncio.to_thread(known)
            assert not router.blocks and router.seen == {"AllBlocksCleared": 1}


def test_unusable_address_is_rejected(model: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        config = {"enable_kv_cache_events": True, "endpoint": endpoint}
        for wrong in (
            config,
            config | {"endpoint": "nowhere"},
            config | {"endpoint": "tcp://*:0", "replay_endpoint": endpoint},
        ):
            with pytest.raises(ParameterError, match="cannot be used") as caught:
                KVEventPublisher(KVCacheManager(4, 2), KVEventsConfig(**wrong))
            assert caught.value.param == "kv_events_config"


def test_llm_publishes_its_blocks(model: str, tmp_path: Path) -> None:
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/a",
        "replay_endpoint": f"ipc://{tmp_path}/b",
    }
    options: dict[str, Any] = {"block_size": 4, "num_gpu_blocks_override": 20, "dtype": "float32"}
    with LLM(model, **options, kv_events_config=config) as llm:
        llm.generate([{"prompt_token_ids": [3, 4, 5, 6, 7]}], SamplingParams(max_tokens=1), use_tqdm=False)
        with subscribed(config["endpoint"], replay=str(config["replay_endpoint"])) as subscriber:
            while set(subscriber.router.blocks) != set(hashes_of([3, 4, 5, 6], 4)):
                subscriber.catch_up()
    with LLM(model, **options, kv_events_config={"endpoint": config["endpoint"]}) as llm:
        assert not llm.engine.on_close and not llm.engine.scheduler.events.blocks


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"enabled": True}, UnknownOptionError, "enabled"),
        ({"publisher": "kafka"}, ParameterError, "zmq, null"),
        ({"buffer_steps": 0}, ParameterError, "from 1"),
        ({"endpoint": None}, ParameterError, "must be text"),
        ({"enable_kv_cache_events": "yes"}, ParameterError, "True or False"),
        ("zmq", ParameterError, "mapping"),
    ],
)
def test_invalid_config_is_rejected(config: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EngineArgs(model="m", kv_events_config=config)


def test_config_binds_local_addresses_only() -> None:
    ours = ["tcp://*:5557", "tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://0.0.0.0:1", "tcp://[::]:1", "ipc:///tmp/a"]
    assert all(KVEventsConfig(endpoint=endpoint).binds for endpoint in ours)
    assert not KVEventsConfig(endpoint="tcp://router:5557").binds
    assert (
        not KVEventsConfig(enable_kv_cache_events=True, publisher="null").is_enabled and not KVEventsConfig().is_enabled
    )
