"""The view's routes, all under /view (view/PROTOCOL.md): on a server beside its own, or alone for `octavo view`.

Nothing that a browser loads here comes from elsewhere, and nothing elsewhere may load it or read it.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import octavo
import octavo.view
from octavo.errors import ParameterError
from octavo.serve.debug_rate_limit import TenantRateLimiter
from octavo.serve.http.endpoint import EventStream, Handler, HttpResponse, RequestContext, json_response
from octavo.serve.openai.errors import ApiError, bad_request, not_found
from octavo.serve.tenants import Tenant
from octavo.view.live.hub import Hub, Message
from octavo.view.playground.lessons import LESSONS
from octavo.view.playground.session import MAX_CHARS, Playgrounds
from octavo.view.recording.frames import Replay

STATIC = Path(octavo.view.__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
EVENTS = "/view/events"
"""The route that streams."""
KEEP_ALIVE_S = 15.0
PLAY_BODY_BYTES = 4 * MAX_CHARS
MAX_VIEWERS = 32
"""Streams of one tenant at a time: each may have `hub.MAX_BYTES` in its queue."""


class View:
    """`hub`: an engine to look at; `replay`: a recording; `text_of`: makes text of a block's tokens, where it may be
    shown; `playground`: whether there is one; `turns`: bounds the questions to the engine."""

    def __init__(
        self,
        title: str = "",
        *,
        hub: Hub | None = None,
        replay: Replay | None = None,
        text_of: Callable[[list[int]], str] | None = None,
        playground: bool = True,
        turns: TenantRateLimiter | None = None,
    ) -> None:
        self.title = title
        self.hub, self.replay = hub, replay
        self._text_of = text_of
        self._turns = turns or TenantRateLimiter()
        self._num_viewers: Counter[Tenant] = Counter()
        self._playgrounds = Playgrounds() if playground else None
        self._play_thread = ThreadPoolExecutor(1, "octavo-playground")  # the loop's own pool is for other work

    def routes(self) -> list[tuple[str, str, Handler]]:
        routes: list[tuple[str, str, Handler]] = [
            ("GET", "/view", self.redirect),
            ("GET", "/view/", self._index),
            ("GET", "/view/static/{name:path}", self._static),
            ("GET", "/view/config", self._config),
        ]
        if self._playgrounds is not None:
            routes += [("GET", "/view/play/lessons", self._lessons), ("POST", "/view/play", self._play)]
        if self.hub is not None:
            routes.append(("GET", EVENTS, self._events))
        if self.hub is not None or self.replay is not None:
            routes.append(("GET", "/view/blocks/{id}", self._block))
        if self.replay is not None:
            routes += [
                ("GET", "/view/replay", self._summary),
                ("GET", "/view/replay/at", self._at),
                ("GET", "/view/replay/frames", self._frames),
                ("GET", "/view/replay/export", self._export),
                ("GET", "/view/replay/trace", self._trace),
            ]
        return [(method, path, _same_site(handler)) for method, path, handler in routes]

    # -- files ---------------------------------------------------------------------------------------------------------

    async def redirect(self, context: RequestContext) -> HttpResponse:
        """Relative, for whatever stands before it on the way from the browser."""
        return HttpResponse(b"", 307, headers={"location": "view/"})

    async def _index(self, context: RequestContext) -> HttpResponse:
        return _file("index.html")

    async def _static(self, context: RequestContext) -> HttpResponse:
        return _file(context.path_params["name"])

    async def _config(self, context: RequestContext) -> HttpResponse:
        parts = {"playground": self._playgrounds, "live": self.hub, "replay": self.replay}
        config = {
            "uses": [name for name, part in parts.items() if part is not None],
            "title": self.title,
            "version": octavo.__version__,
            "text": self._text_of is not None,
            "only_own": not context.tenant.sees_all,
        }
        return _json(config)

    # -- playground ----------------------------------------------------------------------------------------------------

    async def _lessons(self, context: RequestContext) -> HttpResponse:
        return _json([lesson.as_dict() for lesson in LESSONS])

    async def _play(self, context: RequestContext) -> HttpResponse:
        history, action = context.body.get("history"), context.body.get("action")
        if not isinstance(history, str) or not (action is None or isinstance(action, str)):
            raise bad_request(
                "invalid_type", 'the body is {"history": "64x16", "action": "new,64"}; both are text', "history"
            )
        assert self._playgrounds is not None
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self._play_thread, self._playgrounds.answer, history, action or None)
        return _json(answer)

    # -- live ----------------------------------------------------------------------------------------------------------

    async def _events(self, context: RequestContext) -> EventStream:

        def last_words(problem: ApiError) -> tuple[str, dict[str, str]]:
            return "bye", {"reason": problem.message}

        events = self._watch(context.tenant)
        return EventStream(events, closing=b"", keep_alive_s=KEEP_ALIVE_S, last_words=last_words)

    async def _watch(self, tenant: Tenant) -> AsyncGenerator[Message, None]:
        assert self.hub is not None
        if self._num_viewers[tenant] >= MAX_VIEWERS:
            text = f"{MAX_VIEWERS} viewers of this key look already, the limit; close one"
            raise ApiError(429, "too_many_viewers", text, retry_after_s=5)
        self._num_viewers[tenant] += 1
        try:
            async with aclosing(self.hub.watch(tenant)) as messages:
                async for message in messages:
                    yield message
        finally:
            self._num_viewers[tenant] -= 1

    async def _block(self, context: RequestContext) -> HttpResponse:
        name = context.path_params["id"]
        block = int(name) if name.isascii() and name.isdigit() and len(name) < 10 else 0
        if self.hub is not None:
            async with self._turns.of(context.tenant):
                found = await self.hub.block(block, context.tenant)
        else:
            assert self.replay is not None
            found = await asyncio.to_thread(self.replay.block, block, _seconds(context, "time_s"))
        if found is None:
            raise not_found("such block, or nobody watches", "id")
        if self._text_of is None:
            found["token_ids"] = None
        elif found["token_ids"] is not None:
            found["text"] = self._text_of(found["token_ids"])
        return _json(found)

    # -- replay --------------------------------------------------------------------------------------------------------

    async def _summary(self, context: RequestContext) -> HttpResponse:
        assert self.replay is not None
        return _json({"title": self.title, **self.replay.summary()})

    async def _at(self, context: RequestContext) -> HttpResponse:
        assert self.replay is not None
        return _json(await asyncio.to_thread(self.replay.at, _seconds(context, "time_s")))

    async def _frames(self, context: RequestContext) -> HttpResponse:
        assert self.replay is not None
        frames, end_s = self.replay.frames(_seconds(context, "from_s"), _seconds(context, "to_s"))
        return _json({"frames": frames, "end_s": end_s})

    async def _export(self, context: RequestContext) -> HttpResponse:
        assert self.replay is not None
        begin_s, end_s = _seconds(context, "from_s"), _seconds(context, "to_s")
        data = await asyncio.to_thread(self.replay.export, begin_s, end_s)
        headers = {"content-disposition": 'attachment; filename="range.frames"'}
        return HttpResponse(data, content_type="application/jsonl", headers=HEADERS | headers)

    async def _trace(self, context: RequestContext) -> HttpResponse:
        assert self.replay is not None
        name = _query(context).get("request_id")
        reply = _json(await asyncio.to_thread(self.replay.trace, name))
        reply.headers["content-disposition"] = 'attachment; filename="trace.json"'
        return reply


def _file(name: str) -> HttpResponse:
    """A file by its name. No path is made of what a request says: the name has to be one of those that are there."""
    path = _files(STATIC).get(name)
    if path is None:
        raise not_found("such file", "name")
    return HttpResponse(path.read_bytes(), content_type=TYPES[path.suffix], headers=dict(HEADERS))


@functools.cache
def _files(folder: Path) -> dict[str, Path]:
    paths = (path for path in folder.rglob("*") if path.suffix in TYPES and path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths}


def _json(value: Any) -> HttpResponse:
    reply = json_response(value)
    reply.headers = dict(HEADERS)
    return reply


def _same_site(handler: Handler) -> Handler:
    """Browsers send keys that they remember along with other sites' requests, too, and say whose they are."""

    async def guarded(context: RequestContext) -> HttpResponse | EventStream:
        site = context.header(b"sec-fetch-site") or "none"
        mode = context.header(b"sec-fetch-mode")
        if site not in ("same-origin", "none") and mode != "navigate":
            raise ApiError(403, "cross_site", "this is not for other sites' scripts")
        return await handler(context)

    return guarded


def _query(context: RequestContext) -> Mapping[str, str]:
    try:
        given = parse_qs(context.scope["query_string"].decode("latin-1"), max_num_fields=16)
    except ValueError:
        raise bad_request("invalid_value", "a query has 16 fields at most; leave some out", None) from None
    return {name: values[-1] for name, values in given.items()}


def _seconds(context: RequestContext, name: str) -> float:
    text = _query(context).get(name, "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e12:
        raise ParameterError(f"{name} is {text[:40]!r}; it is seconds from the beginning, 0 or more", param=name)
    return seconds
