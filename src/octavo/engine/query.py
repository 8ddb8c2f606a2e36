"""Queries: typed questions to a running engine. A class for each question; its type argument is the answer's type.

stats = await client.query(GetKVStats())    # a KVStats, whether the engine is on a thread or in another process
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypedDict, TypeVar, get_args

import msgspec

from octavo.core.cache.kv_stats import KVStats
from octavo.engine.stats import StatsSnapshot
from octavo.engine.timeline import KVDescription, RequestDescription, describe_kv, describe_request

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

R = TypeVar("R")


class Query(msgspec.Struct, Generic[R], array_like=True, tag=True):
    """A question to an engine. Its class name is its tag in a message; field and answer types validate both ways."""

    def answer(self, engine: Engine) -> R:
        """Called on the engine's thread between two steps."""
        raise NotImplementedError

    @classmethod
    def answer_type(cls) -> Any:
        """R of a subclass of `Query[R]`."""
        return get_args(cls.__orig_bases__[0])[0]  # type: ignore[attr-defined]


class GetKVStats(Query[KVStats]):
    def answer(self, engine: Engine) -> KVStats:
        return engine.scheduler.stats()


class GetStats(Query[StatsSnapshot]):
    def answer(self, engine: Engine) -> StatsSnapshot:
        return engine.stats_snapshot()


class ResetPrefixCache(Query[int]):
    """Empty the prefix cache. The answer is the number of cached blocks."""

    def answer(self, engine: Engine) -> int:
        return engine.scheduler.cache.reset_prefix_cache()


class Unpin(Query[int | None]):
    """Unpin the prefix that a request computed. The answer is its number of blocks; None if it is not pinned."""

    request_id: str

    def answer(self, engine: Engine) -> int | None:
        return engine.scheduler.unpin(self.request_id)


class DescribeRequest(Query[RequestDescription | None]):
    """Describe a running or recent request; None if unknown."""

    request_id: str

    def answer(self, engine: Engine) -> RequestDescription | None:
        state = engine.get_state(self.request_id)
        request = None if state is None else state.request
        return describe_request(engine.scheduler, engine.timelines, self.request_id, request)


class DescribeKV(Query[KVDescription]):
    """Describe the pool and the blocks that each request holds."""

    def answer(self, engine: Engine) -> KVDescription:
        return describe_kv(engine.scheduler)


class RecordingDump(TypedDict, total=False):
    """The file to which a recording was written, or why it could not be."""

    path: str
    error: str


class DumpRecording(Query[RecordingDump]):
    """Write the flight recorder's last minutes to a file. `reason` becomes a part of its name."""

    reason: str

    def answer(self, engine: Engine) -> RecordingDump:
        if engine.recorder is None:
            return {"error": "there is no flight recorder; start with --flight-recorder DIR"}
        try:
            return {"path": str(engine.recorder.dump(self.reason))}
        except OSError as error:
            return {"error": f"the flight recorder cannot be written: {error}"}


EngineQuery: TypeAlias = GetKVStats | GetStats | ResetPrefixCache | Unpin | DescribeRequest | DescribeKV | DumpRecording
"""The queries that every engine process decodes."""
