"""Queries: the same answers on the engine's thread and through messages."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.scheduler import Scheduler
from octavo.engine.engine import Engine
from octavo.engine.engine_request import EngineRequest
from octavo.engine.query import EngineQuery, Query
from octavo.errors import EngineQueryError
from octavo.params.sampling_params import SamplingParams
from octavo.view.live.queries import ServedQuery, ViewQuery
from tests.engine.process.engines import oracle_client, own_directory, serving
from tests.proof.oracle import Oracle

assert own_directory  # a fixture

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "Unpin": ("pin:p",),
    "DescribeRequest": ("b",),
    "DumpRecording": ("asked",),
    "GetFrame": ("",),
    "GetBlock": (1,),
}
KINDS: tuple[type[Query[Any]], ...] = (*get_args(EngineQuery), *get_args(ViewQuery))


def busy_engine() -> Engine:
    """Has a pin, a running request and one that waits."""
    cache = KVCacheManager(16, 2, num_rows=1)
    scheduler = Scheduler(cache)
    engine = Engine(scheduler, Oracle(scheduler), vocab_size=97, max_model_len=64)
    engine.add_request(EngineRequest.pinning("p", [1, 2, 3, 4]))
    while engine.has_work:
        engine.step()
    for name in "ab":
        engine.add_request(EngineRequest(name, [5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True)))
    for _ in range(4):
        engine.step()
    return engine


@pytest.mark.parametrize("kind", KINDS)
def test_answer_is_the_same_after_two_messages(kind: type[Query[Any]]) -> None:
    query = kind(*ARGUMENTS.get(kind.__name__, ()))
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(query))
    received: Any = msgspec.convert(message, ServedQuery)
    assert type(received) is kind and received == query
    answer = received.answer(busy_engine())
    copy = msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(answer)), kind.answer_type())
    assert type(copy) is type(answer) and msgspec.json.encode(copy) == msgspec.json.encode(answer)


class Unheard(Query[int]):
    """A query that no engine process knows."""


async def test_unknown_query_is_refused_and_the_engine_continues(model: str) -> None:
    async with serving(oracle_client(model)) as client:
        with pytest.raises(EngineQueryError, match="no query of this engine: Invalid value 'Unheard'"):
            await client.query(Unheard())
        assert (await client.kv_stats()).num_used == 0 and client.health().num_restarts == 0
