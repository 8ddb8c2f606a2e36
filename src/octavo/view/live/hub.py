"""Viewers of a running engine: one watch on it, however many look, and none while nobody does.

    engine's publisher  <-- what is new? -- Hub --> a queue a viewer --> its stream
                  ----- a frame ---->  |
                                    PoolState: the snapshot for whoever comes next

The engine is asked, a few times a second, and answers between two steps; it never waits for a viewer. A viewer that
does not read is sent away when its queue is full, and takes a snapshot when it comes back.

A viewer that does not see all gets its `TenantView` of each frame, made once for all viewers of the same reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec

from octavo.errors import EngineQueryError, OctavoError
from octavo.view.live.messages import Frame, Snapshot
from octavo.view.live.publisher import STOP
from octavo.view.live.state import FrameLostError, PoolState
from octavo.view.live.tenant_view import TenantAccess, TenantView

logger = logging.getLogger("octavo.view")

INTERVAL_S = 0.2
IDLE_RATIO = 400
"""The engine is left alone for so many times as long as its last frame took: so watching costs it 1/4 percent."""
MAX_IDLE_S = 2.0
"""But no longer than this."""
MAX_LINGER_S = 60.0
"""After its last viewer left, the hub watches on for `IDLE_RATIO` times as long as the snapshot took, up to this limit:
a viewer that comes and goes does not cost a snapshot each time."""
MAX_BYTES = 16 << 20
MAX_QUEUED = 100
"""Of what a viewer has not read. One message larger than that is let through, when it is the only one."""

Ask = Callable[[str, str], Awaitable[Any]]
"""Asks the engine one of `publisher.questions`, with an argument."""
Message = tuple[str, msgspec.Raw]
"""An event's name, and JSON."""


class Viewer:
    """A queue of messages. `reader`: whose share it gets; None: all. `reason`: why there will be no more."""

    def __init__(self, reader: TenantAccess | None = None) -> None:
        self.reader = reader
        self.reason = ""
        self._messages: deque[Message] = deque()
        self._num_bytes = 0
        self._news = asyncio.Event()

    def put(self, message: Message) -> None:
        size = len(message[1])
        if self._messages and (len(self._messages) >= MAX_QUEUED or self._num_bytes + size > MAX_BYTES):
            self.end("slow")
            return
        self._messages.append(message)
        self._num_bytes += size
        self._news.set()

    def end(self, reason: str) -> None:
        self._messages.clear()
        self._num_bytes = 0
        self.reason = self.reason or reason
        self._news.set()

    async def messages(self) -> AsyncGenerator[Message, None]:
        while not self.reason:
            await self._news.wait()
            self._news.clear()
            while self._messages:
                message = self._messages.popleft()
                self._num_bytes -= len(message[1])
                yield message
        yield "bye", msgspec.Raw(msgspec.json.encode({"reason": self.reason}))


class Hub:
    """The viewers of one engine; all of it on one event loop. `interval_s`: between two looks at the engine, at least;
    `share`: see `IDLE_RATIO`."""

    def __init__(self, ask: Ask, *, interval_s: float = INTERVAL_S, share: float = IDLE_RATIO) -> None:
        self._ask = ask
        self._share = share
        self._interval_s = interval_s
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._shares: dict[TenantAccess, TenantView] = {}
        self._latest: dict[TenantAccess | None, Message] = {}  # snapshots as of the last frame
        self._linger_until = 0.0
        self.state: PoolState | None = None
        """As far as it is known; None while nobody looks."""

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    async def watch(self, reader: TenantAccess | None = None) -> AsyncGenerator[Message, None]:
        """One viewer's stream: a snapshot, then what changes, until it is closed or sent away. `reader`: sees its own
        share alone, unless it sees all; None sees all."""
        viewer = Viewer(None if reader is None or reader.sees_all else reader)
        if self.state is not None:
            viewer.put(self._snapshot(viewer.reader, self.state))
        self._viewers.add(viewer)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        try:
            async with contextlib.aclosing(viewer.messages()) as messages:
                async for message in messages:
                    yield message
        finally:
            self._viewers.discard(viewer)

    async def _work(self) -> None:
        try:
            while self._viewers or asyncio.get_running_loop().time() < self._linger_until:
                begin = asyncio.get_running_loop().time()
                cost_s = await self._look()
                spent_s = asyncio.get_running_loop().time() - begin
                await asyncio.sleep(max(self._interval_s - spent_s, min(self._share * cost_s, MAX_IDLE_S)))
        except OctavoError as error:
            # Whoever looks need not know of the operator's files, which an error may name.
            self._end("the view failed; see the log" if isinstance(error, EngineQueryError) else "the engine is gone")
        except Exception:
            logger.exception("the view of the engine failed")
            self._end("the view failed; see the log")
        finally:
            self._forget()
            self._task = None
        with contextlib.suppress(OctavoError):
            await self._ask("view", STOP)
        if self._viewers and self._task is None:  # somebody came in this very moment
            self._task = asyncio.create_task(self._work())

    async def _look(self) -> float:
        """Take in what is new; the seconds that this cost the engine."""
        state = self.state
        after = "" if state is None else f"{state.epoch}:{state.frame}"
        answer = await self._ask("view", after)
        if answer is None:
            return 0.0
        frame: Frame = msgspec.convert(answer, Frame) if isinstance(answer, dict) else answer
        self._latest.clear()
        if isinstance(frame, Snapshot):
            state = self.state = PoolState(frame)
            lasting_s = min(self._share * frame.cost_s, MAX_LINGER_S)
            self._linger_until = asyncio.get_running_loop().time() + lasting_s
        else:
            assert state is not None
            try:
                state.apply(frame)
            except FrameLostError:
                self._forget()
                return 0.0
        self._send(frame, state)
        return 0.0 if isinstance(frame, Snapshot) else frame.cost_s

    def _send(self, frame: Frame, state: PoolState) -> None:
        readers = {viewer.reader for viewer in self._viewers}
        self._shares = {reader: share for reader, share in self._shares.items() if reader in readers}
        messages: dict[TenantAccess | None, Message] = {}
        for reader in readers:
            if reader is None:
                messages[reader] = message_of(frame)
            elif isinstance(frame, Snapshot):
                messages[reader] = self._snapshot(reader, state)
            else:
                messages[reader] = message_of(self._shares[reader].delta(frame, state))
        for viewer in tuple(self._viewers):
            viewer.put(messages[viewer.reader])
            if viewer.reason:
                self._viewers.discard(viewer)

    def _snapshot(self, reader: TenantAccess | None, state: PoolState) -> Message:
        """For a viewer that comes now."""
        if reader not in self._latest:
            snapshot = state.snapshot() if reader is None else self._share_of(reader, state).snapshot(state)
            self._latest[reader] = message_of(snapshot)
        return self._latest[reader]

    def _share_of(self, reader: TenantAccess, state: PoolState) -> TenantView:
        return self._shares.setdefault(reader, TenantView(state, reader))

    def _forget(self) -> None:
        self.state = None
        self._shares.clear()
        self._latest.clear()

    def _end(self, reason: str) -> None:
        for viewer in self._viewers:
            viewer.end(reason)
        self._viewers.clear()

    async def block(self, block: int, reader: TenantAccess | None = None) -> dict[str, Any] | None:
        """One block in detail, or only its state where it is not the reader's own; None if there is none of that id,
        or nobody looks."""
        state = self.state
        if state is None or not 1 <= block <= state.num_blocks:
            return None
        content = await self._ask("view_block", str(block))
        if state is not self.state:
            return None
        found, shown = state.block(block), {"name": content["name"], "token_ids": content["token_ids"]}
        if reader is None or reader.sees_all:
            return found | shown
        share = self._shares.get(reader)
        if share is None or not share.has(block, state):
            num_filled = state.block_size if found["references"] or found["sealed"] else 0
            return found | {"seal_id": 0, "parent_id": 0, "owners": [], "num_filled": num_filled}
        found["owners"] = [owner for owner in found["owners"] if reader.sees(owner["request_id"])]
        # The engine is ahead of the state: by now the block may be another's.
        now = content.get("epoch"), content.get("seal_id")
        return found | shown if found["seal_id"] and now == (state.epoch, found["seal_id"]) else found


def message_of(frame: Frame) -> Message:
    kind = "snapshot" if isinstance(frame, Snapshot) else "delta"
    return kind, msgspec.Raw(msgspec.json.encode(frame))
