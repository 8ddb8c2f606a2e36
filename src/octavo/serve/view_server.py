"""The server of `octavo view`: the view without an engine, for this machine only."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from octavo.serve.app import on_http_exception
from octavo.serve.http.allowed_hosts import AllowedHosts
from octavo.serve.http.context import Receive, RequestContext, Scope, Send, new_request_id
from octavo.serve.http.endpoint import Endpoint, send_error
from octavo.serve.http.server import LimitedHttpProtocol, socket_url
from octavo.serve.view_routes import EVENTS, PLAY_BODY_BYTES, View
from octavo.utils.event_loop import new_event_loop


class ViewApp:
    """The ASGI application. It accepts loopback host names only (DNS rebinding, see `allowed_hosts`)."""

    def __init__(self, view: View) -> None:
        self._hosts = AllowedHosts()
        self._app = Starlette(exception_handlers={HTTPException: on_http_exception})
        self._app.router.redirect_slashes = False
        for method, path, handler in view.routes():
            limit = (lambda: PLAY_BODY_BYTES) if method == "POST" else None
            endpoint = Endpoint(path, handler, body_limit=limit, streams=path == EVENTS)
            self._app.router.add_route(path, endpoint, methods=[method])  # type: ignore[arg-type]  # an application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        context = RequestContext(scope, new_request_id())
        scope.setdefault("state", {})["context"] = context
        if (api_error := self._hosts.check(scope)) is not None:
            await send_error(context, send, api_error)
            return
        await self._app(scope, receive, send)


class _Server(uvicorn.Server):
    def __init__(self, app: ViewApp, on_ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=LimitedHttpProtocol,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._on_ready = on_ready

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self._on_ready()


async def serve_view(view: View, sock: socket.socket, on_ready: Callable[[str], None]) -> None:
    """Serves on a bound socket until Ctrl-C. `on_ready` is called with the address once it can be opened."""
    await _Server(ViewApp(view), lambda: on_ready(f"{socket_url(sock)}/view/")).serve(sockets=[sock])


def run(view: View, sock: socket.socket, on_ready: Callable[[str], None]) -> None:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve_view(view, sock, on_ready))
