"""A front over replicas in the same process: engine processes and bytes as in a cluster, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import msgspec
import pytest

from octavo import SamplingParams
from octavo.checkpoint.resolve import open_checkpoint
from octavo.cluster import transport
from octavo.cluster.block_log import BlockLog
from octavo.cluster.messages import fingerprint
from octavo.cluster.options import ClusterArgs
from octavo.cluster.pool import CallError
from octavo.cluster.replica import EngineReplica
from octavo.cluster.transport import ClusterTransport
from octavo.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from octavo.engine.process import ipc
from octavo.errors import ParameterError, RequestFailedError
from octavo.frontend.engine_client import EngineClient
from octavo.frontend.input_processor import InputProcessor
from octavo.text.tokenizer import Tokenizer
from tests.engine.models import make_talking_checkpoint

ENGINE = {"device": "cpu", "num_gpu_blocks_override": 256}
GREEDY = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


class LocalCalls:
    """Calls to replicas of this process. `lost`: replicas whose node is gone."""

    def __init__(self, replicas: dict[str, EngineReplica]) -> None:
        self.replicas = replicas
        self.lost: set[str] = set()
        self.sent: list[tuple[str, ipc.AddRequest]] = []

    def names(self) -> list[str]:
        return [name for name in self.replicas if name not in self.lost]

    def _at(self, name: str) -> EngineReplica:
        if name in self.lost:
            raise CallError("the node is gone")
        return self.replicas[name]

    async def generate(self, replica: str, command: bytes) -> AsyncGenerator[bytes, None]:
        self.sent.append((replica, msgspec.msgpack.decode(command, type=ipc.AddRequest)))
        async with contextlib.aclosing(self._at(replica).generate("front", command)) as messages:
            async for data in messages:
                self._at(replica)
                yield data

    async def stop(self, replica: str, request_id: str, index: int) -> None:
        self._at(replica).stop(request_id, index)

    async def query(self, replica: str, query: bytes) -> bytes:
        return await self._at(replica).query(query)

    async def report(self, replica: str, since: int) -> bytes:
        return self._at(replica).report("front", since)


@contextlib.asynccontextmanager
async def front(model: str, num_replicas: int) -> AsyncIterator[tuple[EngineClient[ClusterTransport], LocalCalls]]:
    args = ClusterArgs(model=model, engine=ENGINE).engine_args()
    replicas = {f"r{i}": EngineReplica(args) for i in range(num_replicas)}
    await asyncio.gather(*(replica.start() for replica in replicas.values()))
    calls = LocalCalls(replicas)
    processor = InputProcessor(Tokenizer.from_checkpoint(open_checkpoint(model)))
    client = EngineClient(ClusterTransport(calls, fingerprint(args)), processor, SamplingParams())
    try:
        await client.start()
        client.transport.pool.router.block_size = (await client.kv_stats()).block_size
        while len(client.transport.pool.up) < num_replicas:
            await asyncio.sleep(0.05)
        yield client, calls
    finally:
        client.shutdown()
        for replica in replicas.values():
            replica.close()


async def text_of(client: EngineClient[ClusterTransport], prompt: str, params: SamplingParams = GREEDY) -> str:
    outputs = [output async for output in client.generate(prompt, params)]
    return outputs[-1].outputs[0].text


async def text_with(client: EngineClient[ClusterTransport], prompt: str, after: int, event: object) -> str:
    """The text of a request during which `event` is called, after so many tokens."""
    called = False
    async for output in client.generate(prompt, GREEDY):
        if not called and len(output.outputs[0].token_ids) >= after:
            called = True
            event()  # type: ignore[operator]
    assert called
    return output.outputs[0].text


async def test_lost_node_and_dead_engine_change_no_text(model: str) -> None:
    async with front(model, 2) as (client, calls):
        expected = await text_of(client, "hello")
        assert len(expected) > 100

        def kill_engine() -> None:
            os.kill(calls.replicas[calls.sent[-1][0]].supervisor.pid or 0, signal.SIGKILL)

        assert await text_with(client, "hello", 20, kill_engine) == expected
        (first, _), (second, resumed) = calls.sent[-2:]
        assert first != second
        assert resumed.resume is not None and len(resumed.resume[0]) >= 20 * 4
        assert await text_with(client, "hello", 20, lambda: calls.lost.add(calls.sent[-1][0])) == expected
        assert client.transport.router.stats.num_moved == 2


async def test_stop_strings_and_errors_reach_the_caller(model: str) -> None:
    async with front(model, 1) as (client, _):
        text = await text_of(client, "hello")
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, stop=text[50:53])
        assert await text_of(client, "hello", params) == text[: text.index(text[50:53])]
        with pytest.raises(ParameterError, match="pins no prefixes"):
            await client.pin_prefix("hello")
        assert client.transport.handles == {}


async def test_request_that_kills_engines_fails(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "PAUSE_S", 0.01)
    async with front(model, 1) as (client, calls):

        async def dies(replica: str, command: bytes) -> AsyncGenerator[bytes, None]:
            calls.sent.append((replica, msgspec.msgpack.decode(command, type=ipc.AddRequest)))
            yield b""
            raise CallError("it died")

        monkeypatch.setattr(calls, "generate", dies)
        with pytest.raises(RequestFailedError, match="3 replicas failed while they ran the request"):
            await text_of(client, "hello")
        assert [add.request_id for _, add in calls.sent] == ["octavo-0", "octavo-0~2", "octavo-0~3"]


async def test_silent_node_is_lost(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with front(model, 2) as (client, calls):
        expected, generate = await text_of(client, "hello"), calls.generate
        monkeypatch.setattr(transport, "LOST_S", 0.5)

        async def silent_once(replica: str, command: bytes) -> AsyncGenerator[bytes, None]:
            monkeypatch.setattr(calls, "generate", generate)
            yield b""
            await asyncio.sleep(60)

        monkeypatch.setattr(calls, "generate", silent_once)
        assert await text_of(client, "hello") == expected
        assert client.transport.router.stats.num_moved == 1


async def test_other_model_gets_no_request(model: str, tmp_path: Path) -> None:
    other = make_talking_checkpoint(tmp_path, seed=1, max_position_embeddings=1024)
    async with front(model, 1) as (client, calls):
        stranger = EngineReplica(ClusterArgs(model=str(other), engine=ENGINE).engine_args())
        await stranger.start()
        calls.replicas["other"] = stranger
        while "other" not in client.transport.pool.replicas or not client.transport.pool.mismatch():
            await asyncio.sleep(0.05)
        assert "replica other has model" in client.transport.pool.mismatch()
        assert [replica.name for replica in client.transport.pool.up] == ["r0"]
        stranger.close()


async def test_prefix_goes_where_it_is_cached(model: str) -> None:
    async with front(model, 2) as (client, calls):
        prompts = [letter * 200 for letter in "ab"]
        few = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        for prompt in prompts:
            await text_of(client, prompt, few)
        homes = [name for name, _ in calls.sent]
        assert sorted(homes) == ["r0", "r1"]
        while not all(client.transport.pool.router.index.num_cached(i) >= 12 for i in (0, 1)):
            await asyncio.sleep(0.05)
        for _ in range(3):
            for prompt in prompts:
                await text_of(client, prompt, few)
        assert [name for name, _ in calls.sent[2:]] == homes * 3


def test_block_log_tells_what_changed() -> None:
    log = BlockLog()
    log.apply([BlockStored([1, 2], None, [], 16, None, None, None), BlockRemoved([1], None)])
    assert log.since(-1) == (True, [2], [])
    assert log.since(0) == (False, [2], [1])
    assert log.since(1) == (False, [], [1])
    assert log.since(2) == (False, [], [])
    log.apply([AllBlocksCleared()])
    assert log.since(2) == (True, [], [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "m", "api": {"port": 1}}, "api has no port in a cluster"),
        ({"model": "m", "routing": "best"}, "routing"),
        ({"model": "m", "engine": 3}, "engine must map options to values"),
        ({"model": "m", "modle": "n"}, "has no option 'modle'"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises((ParameterError, TypeError), match=message):
        ClusterArgs(**options)  # type: ignore[arg-type]
