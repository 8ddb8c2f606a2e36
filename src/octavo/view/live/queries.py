"""Queries of the live view to an engine; see `octavo.engine.query`."""

from __future__ import annotations

import secrets
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from octavo.core.block_pool import group_of
from octavo.engine.query import EngineQuery, Query
from octavo.view.live.messages import Frame
from octavo.view.live.publisher import Publisher

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

_publishers: WeakKeyDictionary[Engine, Publisher] = WeakKeyDictionary()
_KEY = secrets.token_bytes(16)


class GetFrame(Query[Frame | None]):
    """What has changed since a frame; `after` is that frame, "EPOCH:NUMBER", or "" for a snapshot."""

    after: str

    def answer(self, engine: Engine) -> Frame | None:
        publisher = _publishers.get(engine)
        if publisher is None:
            publisher = _publishers[engine] = Publisher(engine.scheduler)
        return publisher.frame(self.after)


class StopFrames(Query[None]):
    """There is no viewer any more: stop listening to the scheduler's events."""

    def answer(self, engine: Engine) -> None:
        if (publisher := _publishers.get(engine)) is not None:
            publisher.stop()


class BlockContent(msgspec.Struct):
    """The content of a sealed block; None for any other block.

    name             digest of the block's tokens under a key of the process
    seal_id, epoch   the current seal id, and the epoch of the frames
    """

    name: str | None = None
    token_ids: list[int] | None = None
    seal_id: int | None = None
    epoch: str | None = None


class GetBlock(Query[BlockContent]):
    block_id: int

    def answer(self, engine: Engine) -> BlockContent:
        # The id may come from a frame of the engine before a restart, which may have had more blocks.
        pool, publisher = engine.scheduler.cache.pool, _publishers.get(engine)
        found = pool.key_of(self.block_id) if self.block_id <= pool.num_blocks else None
        while found is not None and group_of(found[1]) and not isinstance(found[0], bytes):
            found = pool.key_of(pool.seal_id.index(found[0]))  # its tokens are those of the full block above
        if found is None:
            return BlockContent()
        return BlockContent(
            blake2b(found[1], digest_size=16, key=_KEY).hexdigest(),
            np.frombuffer(found[1], np.int32).tolist(),
            pool.seal_id[self.block_id],
            "" if publisher is None else publisher.epoch,
        )


ViewQuery: TypeAlias = GetFrame | StopFrames | GetBlock
ServedQuery: TypeAlias = EngineQuery | ViewQuery
"""The queries of an engine process of `octavo serve`."""
