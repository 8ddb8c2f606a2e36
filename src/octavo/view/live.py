"""Viewers of a running engine: one watch on it, however many look, and none while nobody does.

    engine's tap  <-- what is new? -- Hub --> a queue a viewer --> its stream
                  ----- a frame ---->  |
                                    Picture: the snapshot for whoever comes next

The engine is asked, a few times a second, and answers between two steps; it never waits for a viewer. A viewer that
does not read is sent away when its queue is full, and takes a snapshot when it comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec

from octavo.errors import OctavoError
from octavo.view.frames import Frame, Snapshot
from octavo.view.picture import FrameLostError, Picture
from octavo.view.tap import STOP

logger = logging.getLogger("octavo.view")

INTERVAL_S = 0.2
SHARE = 400
"""The engine is left alone for so many times as long as its last frame took: so watching costs it 1/4 percent."""
LONGEST_S = 2.0
"""But no longer than this."""
MOST_BYTES = 16 << 20
MOST_QUEUED = 100
"""Of what a viewer has not read. One message larger than that is let through, when it is the only one."""

Ask = Callable[[str, str], Awaitable[Any]]
"""Asks the engine one of `tap.questions`, with an argument."""
Message = tuple[str, msgspec.Raw]
"""An event's name, and JSON."""


class Viewer:
    """A queue of messages. `reason`: why there will be no more."""

    def __init__(self) -> None:
        self.reason = ""
        self._messages: deque[Message] = deque()
        self._num_bytes = 0
        self._news = asyncio.Event()

    def put(self, message: Message) -> None:
        size = len(message[1])
        if self._messages and (len(self._messages) >= MOST_QUEUED or self._num_bytes + size > MOST_BYTES):
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
    `share`: see `SHARE`."""

    def __init__(self, ask: Ask, *, interval_s: float = INTERVAL_S, share: float = SHARE) -> None:
        self._ask = ask
        self._share = share
        self._interval_s = interval_s
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self.picture: Picture | None = None
        """As far as it is known; None while nobody looks."""

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    async def watch(self) -> AsyncGenerator[Message, None]:
        """One viewer's stream: a snapshot, then what changes, until it is closed or sent away."""
        viewer = Viewer()
        if self.picture is not None:
            viewer.put(message_of(self.picture.snapshot()))
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
            while self._viewers:
                begin = asyncio.get_running_loop().time()
                cost_s = await self._look()
                spent_s = asyncio.get_running_loop().time() - begin
                await asyncio.sleep(max(self._interval_s - spent_s, min(self._share * cost_s, LONGEST_S)))
        except OctavoError as error:
            self._end(str(error))
        except Exception:
            logger.exception("the view of the engine failed")
            self._end("the view failed; see the log")
        finally:
            self.picture = None
            self._task = None
        with contextlib.suppress(OctavoError):
            await self._ask("view", STOP)
        if self._viewers and self._task is None:  # somebody came in this very moment
            self._task = asyncio.create_task(self._work())

    async def _look(self) -> float:
        """Take in what is new; the seconds that this cost the engine."""
        picture = self.picture
        after = "" if picture is None else f"{picture.epoch}:{picture.frame}"
        answer = await self._ask("view", after)
        if answer is None:
            return 0.0
        frame: Frame = msgspec.convert(answer, Frame) if isinstance(answer, dict) else answer
        if isinstance(frame, Snapshot):
            self.picture = Picture(frame)
        else:
            assert picture is not None
            try:
                picture.apply(frame)
            except FrameLostError:
                self.picture = None
                return 0.0
        message = message_of(frame)
        for viewer in tuple(self._viewers):
            viewer.put(message)
            if viewer.reason:
                self._viewers.discard(viewer)
        return 0.0 if isinstance(frame, Snapshot) else frame.cost_s

    def _end(self, reason: str) -> None:
        for viewer in self._viewers:
            viewer.end(reason)
        self._viewers.clear()

    async def block(self, block: int) -> dict[str, Any] | None:
        """One block in detail; None if there is none of that id, or nobody looks."""
        picture = self.picture
        if picture is None or not 1 <= block <= picture.num_blocks:
            return None
        content = await self._ask("view_block", str(block))
        return picture.block(block) | {"name": content["name"], "token_ids": content["token_ids"]}


def message_of(frame: Frame) -> Message:
    kind = "snapshot" if isinstance(frame, Snapshot) else "delta"
    return kind, msgspec.Raw(msgspec.json.encode(frame))
