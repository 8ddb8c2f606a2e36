"""The view's routes under /view (view/PROTOCOL.md): part of `octavo serve`, or alone for `octavo view`.

The page loads nothing from other sites, and other sites may neither load nor read it.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from msgspec import Raw, Struct

import octavo
import octavo.view
from octavo.errors import ParameterError
from octavo.serve.debug_rate_limit import EngineQueries
from octavo.serve.http.context import EventStream, HttpResponse, RequestContext, json_response
from octavo.serve.http.endpoint import Handler
from octavo.serve.job_queue import JobQueue
from octavo.serve.openai.decoding import decode_json
from octavo.serve.openai.errors import ApiError, bad_request, not_found
from octavo.serve.tenants import Tenant
from octavo.view.live.hub import Hub, Message
from octavo.view.playground.history import MAX_CHARS, Playgrounds
from octavo.view.playground.lessons import LESSONS
from octavo.view.recording.frames import Replay

STATIC = Path(octavo.view.__file__).parent / "static"
MEDIA_TYPES = {
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
"""The route of the event stream."""
KEEP_ALIVE_S = 15.0
PLAY_BODY_BYTES = 4 * MAX_CHARS
MAX_COMPUTATIONS = 64
"""Requests of all tenants that may wait for a computation."""
MAX_VIEWERS = 32
"""Concurrent event streams of one tenant. Each may queue `hub.MAX_BYTES`."""


class _Play(Struct):
    history: str
    action: str | None = None


class View:
    """The view's handlers.

    hubs          live engines, by the number of the replica; there may be more later
    replay        a recording
    text_of       decodes a block's tokens; None: text is not shown
    playground    whether there is a playground
    queries       bounds queries to the engine
    """

    def __init__(
        self,
        title: str = "",
        *,
        hubs: Sequence[Hub] = (),
        replay: Replay | None = None,
        text_of: Callable[[list[int]], str] | None = None,
        playground: bool = True,
        queries: EngineQueries | None = None,
    ) -> None:
        self.title = title
        self.hubs, self.replay = hubs, replay
        self._text_of = text_of
        self._queries = queries or EngineQueries()
        self._num_viewers: Counter[Tenant] = Counter()
        self._playgrounds = Playgrounds() if playground else None
        self._computations: JobQueue[Any] = JobQueue(1, MAX_COMPUTATIONS, "too many requests wait", spare=False)

    def routes(self) -> list[tuple[str, str, Handler]]:
        routes: list[tuple[str, str, Handler]] = [
            ("GET", "/", self._redirect),
            ("GET", "/view", self._redirect),
            ("GET", "/view/", self._index),
            ("GET", "/view/static/{name:path}", self._static),
            ("GET", "/view/config", self._config),
        ]
        if self._playgrounds is not None:
            routes += [("GET", "/view/play/lessons", self._lessons), ("POST", "/view/play", self._play)]
        if self.hubs:
            routes.append(("GET", EVENTS, self._events))
        if self.hubs or self.replay is not None:
            routes.append(("GET", "/view/blocks/{id}", self._block))
        if self.replay is not None:
            routes += [
                ("GET", "/view/replay", self._summary),
                ("GET", "/view/replay/at", self._state_at),
                ("GET", "/view/replay/frames", self._frames),
                ("GET", "/view/replay/export", self._export),
                ("GET", "/view/replay/trace", self._trace),
            ]
        return [(method, path, _same_site_only(handler)) for method, path, handler in routes]

    async def _compute(self, context: RequestContext, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function in a thread, one at a time, in turns between tenants."""
        call = functools.partial(asyncio.to_thread, function, *args)
        return await self._computations.run(call, context.tenant.number, 1)

    # -- files ---------------------------------------------------------------------------------------------------------

    async def _redirect(self, context: RequestContext) -> HttpResponse:
        """Redirects to view/, with a relative location for proxies that add a path prefix."""
        return HttpResponse(b"", 307, headers={"location": "view/"})

    async def _index(self, context: RequestContext) -> HttpResponse:
        return _file("index.html")

    async def _static(self, context: RequestContext) -> HttpResponse:
        return _file(context.path_params["name"])

    async def _config(self, context: RequestContext) -> HttpResponse:
        parts = {"playground": self._playgrounds is not None, "live": self.hubs, "replay": self.replay is not None}
        config = {
            "uses": [name for name, part in parts.items() if part],
            "num_replicas": max(1, len(self.hubs)),
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
        body = decode_json(bytes(context.body), _Play)
        assert self._playgrounds is not None
        return _json(await self._compute(context, self._playgrounds.answer, body.history, body.action or None))

    # -- live ----------------------------------------------------------------------------------------------------------

    async def _events(self, context: RequestContext) -> EventStream:

        def error_event(api_error: ApiError) -> tuple[str, dict[str, str]]:
            return "bye", {"reason": api_error.message}

        events = self._watch(self._hub(context), context.tenant)
        return EventStream(events, end_marker=b"", keep_alive_s=KEEP_ALIVE_S, error_event=error_event)

    def _hub(self, context: RequestContext) -> Hub:
        return self.hubs[replica_number(context, len(self.hubs))]

    async def _watch(self, hub: Hub, tenant: Tenant) -> AsyncGenerator[Message, None]:
        if self._num_viewers[tenant] >= MAX_VIEWERS:
            text = f"{MAX_VIEWERS} viewers are open with this key, the limit; close one"
            raise ApiError(429, "too_many_viewers", text, retry_after_s=5)
        self._num_viewers[tenant] += 1
        num_known = 1
        try:
            async with aclosing(hub.watch(tenant)) as messages:
                async for message in messages:
                    yield message
                    if num_known != len(self.hubs):
                        num_known = len(self.hubs)
                        yield "engines", Raw(b'{"num_replicas":%d}' % num_known)
        finally:
            self._num_viewers[tenant] -= 1

    async def _block(self, context: RequestContext) -> HttpResponse:
        name = context.path_params["id"]
        block = int(name) if name.isascii() and name.isdigit() and len(name) < 10 else 0
        if self.hubs:
            query = functools.partial(self._hub(context).block, block, context.tenant)
            found = await self._queries.run(query, context.tenant.number)
        else:
            assert self.replay is not None
            found = await self._compute(context, self.replay.block, block, _seconds(context, "time_s"))
        if found is None:
            raise not_found("no such block, or no viewer is connected", "id")
        if self._text_of is None:
            found["token_ids"] = None
        elif found["token_ids"] is not None:
            found["text"] = self._text_of(found["token_ids"])
        return _json(found)

    # -- replay --------------------------------------------------------------------------------------------------------

    async def _summary(self, context: RequestContext) -> HttpResponse:
        assert self.replay is not None
        return _json({"title": self.title, **self.replay.summary()})

    async def _state_at(self, context: RequestContext) -> HttpResponse:
        assert self.replay is not None
        return _json(await self._compute(context, self.replay.at, _seconds(context, "time_s")))

    async def _frames(self, context: RequestContext) -> HttpResponse:
        assert self.replay is not None
        frames, end_s = self.replay.frames(_seconds(context, "from_s"), _seconds(context, "to_s"))
        return _json({"frames": frames, "end_s": end_s})

    async def _export(self, context: RequestContext) -> HttpResponse:
        assert self.replay is not None
        begin_s, end_s = _seconds(context, "from_s"), _seconds(context, "to_s")
        data = await self._compute(context, self.replay.export, begin_s, end_s)
        headers = {"content-disposition": 'attachment; filename="range.frames"'}
        return HttpResponse(data, content_type="application/jsonl", headers=HEADERS | headers)

    async def _trace(self, context: RequestContext) -> HttpResponse:
        assert self.replay is not None
        name = _query(context).get("request_id")
        response = _json(await self._compute(context, self.replay.trace, name))
        response.headers["content-disposition"] = 'attachment; filename="trace.json"'
        return response


def _file(name: str) -> HttpResponse:
    """A static file. The name is looked up among the existing files; no path is built from a request."""
    path = _files(STATIC).get(name)
    if path is None:
        raise not_found("no such file", "name")
    return HttpResponse(path.read_bytes(), content_type=MEDIA_TYPES[path.suffix], headers=dict(HEADERS))


@functools.cache
def _files(folder: Path) -> dict[str, Path]:
    paths = (path for path in folder.rglob("*") if path.suffix in MEDIA_TYPES and path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths}


def _json(value: Any) -> HttpResponse:
    response = json_response(value)
    response.headers = dict(HEADERS)
    return response


def _same_site_only(handler: Handler) -> Handler:
    """Refuses requests from other sites, by the Sec-Fetch headers: browsers attach remembered keys to these as well."""

    async def checked(context: RequestContext) -> HttpResponse | EventStream:
        site = context.header(b"sec-fetch-site") or "none"
        mode = context.header(b"sec-fetch-mode")
        if site not in ("same-origin", "none") and mode != "navigate":
            raise ApiError(403, "cross_site", "requests from other sites are not allowed")
        return await handler(context)

    return checked


def _query(context: RequestContext) -> Mapping[str, str]:
    try:
        given = parse_qs(context.scope["query_string"].decode("latin-1"), max_num_fields=16)
    except ValueError:
        raise bad_request("invalid_value", "the query string has more than 16 fields, the limit", None) from None
    return {name: values[-1] for name, values in given.items()}


def replica_number(context: RequestContext, num_replicas: int) -> int:
    """The field `replica` of the query string; 0 without it."""
    text = _query(context).get("replica", "0")
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) < num_replicas):
        known = "0 alone" if num_replicas == 1 else f"0 to {num_replicas - 1}"
        raise bad_request("invalid_value", f"replica is {text[:40]!r}; the server has {known}", "replica")
    return int(text)


def _seconds(context: RequestContext, name: str) -> float:
    text = _query(context).get(name, "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e12:
        raise ParameterError(f"{name} is {text[:40]!r}; it must be seconds from the start, 0 or more", param=name)
    return seconds
