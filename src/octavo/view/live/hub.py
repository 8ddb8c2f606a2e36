"""The viewers of a running engine share one connection to it, which exists only while there are viewers.

    engine's publisher  <-- next frame? -- Hub --> a queue per viewer --> its stream
                        ---- a frame --->   |
                                        PoolState: the snapshot for the next viewer

The hub polls the engine a few times a second, and the engine answers between two steps; it never waits for a viewer. A
viewer that does not read is disconnected when its queue is full, and gets a snapshot when it reconnects.

A viewer with limited access gets its tenant's `TenantView` of each frame, made once for all viewers of that tenant.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from octavo.engine.executor import RankPlace
from octavo.engine.query import Query
from octavo.errors import EngineQueryError, OctavoError
from octavo.view.live.messages import Frame, Snapshot
from octavo.view.live.queries import GetBlock, GetFrame, StopFrames
from octavo.view.live.state import FrameLostError, PoolState
from octavo.view.live.tenant_view import TenantAccess, TenantView

logger = logging.getLogger("octavo.view")

INTERVAL_S = 0.2
IDLE_RATIO = 400
"""After a frame the hub waits this many times as long as the frame took: watching costs the engine 1/4 percent."""
MAX_IDLE_S = 2.0
"""But at most this long."""
MAX_LINGER_S = 60.0
"""After its last viewer left, the hub watches on for `IDLE_RATIO` times as long as the snapshot took, up to this limit:
a viewer that comes and goes does not cost a snapshot each time."""
RANKS_S = 1.0
"""How often viewers are told where ranks are."""
MAX_BYTES = 16 << 20
MAX_QUEUED = 100
"""Limits of a viewer's queue. A larger message is accepted if it is the only one."""

R = TypeVar("R")


class AskQuery(Protocol):
    """Asks an engine a query of `octavo.view.live.queries`; `EngineClient.query` is one."""

    def __call__(self, query: Query[R], /) -> Awaitable[R]: ...


Message = tuple[str, msgspec.Raw]
"""The name of a server-sent event, and its JSON."""


class Viewer:
    """A queue of messages. `access` limits what they show; None: everything. `reason`: why the stream ended, or ""."""

    def __init__(self, access: TenantAccess | None = None) -> None:
        self.access = access
        self.reason = ""
        self._messages: deque[Message] = deque()
        self._num_bytes = 0
        self._has_messages = asyncio.Event()

    def put(self, message: Message) -> None:
        size = len(message[1])
        if self._messages and (len(self._messages) >= MAX_QUEUED or self._num_bytes + size > MAX_BYTES):
            self.end("slow")
            return
        self._messages.append(message)
        self._num_bytes += size
        self._has_messages.set()

    def end(self, reason: str) -> None:
        self._messages.clear()
        self._num_bytes = 0
        self.reason = self.reason or reason
        self._has_messages.set()

    async def messages(self) -> AsyncGenerator[Message, None]:
        while not self.reason:
            await self._has_messages.wait()
            self._has_messages.clear()
            while self._messages:
                message = self._messages.popleft()
                self._num_bytes -= len(message[1])
                yield message
        yield "bye", msgspec.Raw(msgspec.json.encode({"reason": self.reason}))


class Hub:
    """The viewers of one engine, all on one event loop.

    ranks       where its tensor parallel ranks are; viewers are told even while the engine, in a step, answers nothing
    interval_s  seconds between two polls of the engine, at least
    idle_ratio  see `IDLE_RATIO`
    """

    def __init__(
        self,
        query: AskQuery,
        ranks: Callable[[], Sequence[RankPlace]] = tuple,
        *,
        interval_s: float = INTERVAL_S,
        idle_ratio: float = IDLE_RATIO,
    ) -> None:
        self._query = query
        self._ranks = ranks
        self._idle_ratio = idle_ratio
        self._interval_s = interval_s
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._tenant_views: dict[TenantAccess, TenantView] = {}
        self._latest: dict[TenantAccess | None, Message] = {}  # snapshots after the last frame
        self._linger_until = 0.0
        self._has_ranks = False
        self.state: PoolState | None = None
        """The state after the last frame; None without viewers."""

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    async def watch(self, access: TenantAccess | None = None) -> AsyncGenerator[Message, None]:
        """One viewer's stream: a snapshot, then deltas, until it is closed or disconnected. `access` limits what it
        shows; None: everything."""
        viewer = Viewer(None if access is None or access.sees_all else access)
        self._tell_ranks(viewer)
        if self.state is not None:
            viewer.put(self._snapshot(viewer.access, self.state))
        self._viewers.add(viewer)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll_engine())
        try:
            async with contextlib.aclosing(viewer.messages()) as messages:
                async for message in messages:
                    yield message
        finally:
            self._viewers.discard(viewer)

    async def _poll_engine(self) -> None:
        telling = asyncio.create_task(self._keep_telling_ranks())
        try:
            while self._viewers or asyncio.get_running_loop().time() < self._linger_until:
                begin = asyncio.get_running_loop().time()
                cost_s = await self._poll()
                spent_s = asyncio.get_running_loop().time() - begin
                await asyncio.sleep(max(self._interval_s - spent_s, min(self._idle_ratio * cost_s, MAX_IDLE_S)))
        except OctavoError as error:
            if error.code == "no_replica":
                self._end(str(error))
            else:  # it may name files of the operator, which viewers need not see
                failed = isinstance(error, EngineQueryError)
                self._end("the view failed; see the log" if failed else "the engine is gone")
        except Exception:
            logger.exception("the view of the engine failed")
            self._end("the view failed; see the log")
        finally:
            telling.cancel()
            self._reset()
            self._task = None
        with contextlib.suppress(OctavoError):
            await self._query(StopFrames())
        if self._viewers and self._task is None:  # a viewer came meanwhile
            self._task = asyncio.create_task(self._poll_engine())

    async def _keep_telling_ranks(self) -> None:
        while True:
            await asyncio.sleep(RANKS_S)
            self._tell_ranks(*self._viewers)

    def _tell_ranks(self, *viewers: Viewer) -> None:
        places, had_ranks = self._ranks(), self._has_ranks
        self._has_ranks = bool(places)
        if places or had_ranks:
            told = [place._replace(age_s=round(place.age_s, 1))._asdict() for place in places]
            for viewer in viewers:
                viewer.put(("ranks", msgspec.Raw(msgspec.json.encode({"ranks": told}))))

    async def _poll(self) -> float:
        """Apply and send the engine's next frame; returns the seconds that it cost the engine."""
        state = self.state
        after = "" if state is None else f"{state.epoch}:{state.frame}"
        frame = await self._query(GetFrame(after))
        if frame is None:
            return 0.0
        self._latest.clear()
        if isinstance(frame, Snapshot):
            state = self.state = PoolState(frame)
            linger_s = min(self._idle_ratio * frame.cost_s, MAX_LINGER_S)
            self._linger_until = asyncio.get_running_loop().time() + linger_s
        else:
            assert state is not None
            try:
                state.apply(frame)
            except FrameLostError:
                self._reset()
                return 0.0
        self._send(frame, state)
        return 0.0 if isinstance(frame, Snapshot) else frame.cost_s

    def _send(self, frame: Frame, state: PoolState) -> None:
        accesses = {viewer.access for viewer in self._viewers}
        self._tenant_views = {access: view for access, view in self._tenant_views.items() if access in accesses}
        messages: dict[TenantAccess | None, Message] = {}
        for access in accesses:
            if access is None:
                messages[access] = encode(frame)
            elif isinstance(frame, Snapshot):
                messages[access] = self._snapshot(access, state)
            else:
                messages[access] = encode(self._tenant_views[access].delta(frame, state))
        for viewer in tuple(self._viewers):
            viewer.put(messages[viewer.access])
            if viewer.reason:
                self._viewers.discard(viewer)

    def _snapshot(self, access: TenantAccess | None, state: PoolState) -> Message:
        """The snapshot for a new viewer."""
        if access not in self._latest:
            snapshot = state.snapshot() if access is None else self._tenant_view(access, state).snapshot(state)
            self._latest[access] = encode(snapshot)
        return self._latest[access]

    def _tenant_view(self, access: TenantAccess, state: PoolState) -> TenantView:
        return self._tenant_views.setdefault(access, TenantView(state, access))

    def _reset(self) -> None:
        self.state = None
        self._tenant_views.clear()
        self._latest.clear()

    def _end(self, reason: str) -> None:
        for viewer in self._viewers:
            viewer.end(reason)
        self._viewers.clear()

    async def block(self, block: int, access: TenantAccess | None = None) -> dict[str, Any] | None:
        """One block in detail, or only its state if `access` does not show the block; None if the id does not exist or
        there are no viewers."""
        state = self.state
        if state is None or not 1 <= block <= state.num_blocks:
            return None
        content = await self._query(GetBlock(block))
        if state is not self.state:
            return None
        found, details = state.block(block), {"name": content.name, "token_ids": content.token_ids}
        if access is None or access.sees_all:
            return found | details
        view = self._tenant_views.get(access)
        if view is None or not view.has(block, state):
            num_filled = state.block_size if found["references"] or found["sealed"] else 0
            return found | {"seal_id": 0, "parent_id": 0, "owners": [], "num_filled": num_filled}
        found["owners"] = [owner for owner in found["owners"] if access.sees(owner["request_id"])]
        # The engine is ahead of the state: the block may hold another request's content by now.
        current = content.epoch, content.seal_id
        return found | details if found["seal_id"] and current == (state.epoch, found["seal_id"]) else found


def encode(frame: Frame) -> Message:
    kind = "snapshot" if isinstance(frame, Snapshot) else "delta"
    return kind, msgspec.Raw(msgspec.json.encode(frame))
