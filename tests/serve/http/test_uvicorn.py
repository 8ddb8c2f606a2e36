"""The uvicorn internals that the server relies on: a release that changes one fails here, not silently.

`LimitedHttpProtocol` and `HTTPServer` override methods that uvicorn calls, and read attributes that it sets. If uvicorn
renames such a method, the override is never called and its limit is lost. `pyproject.toml` admits tested releases only.
"""

from __future__ import annotations

import inspect
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from octavo.serve.http.server import HTTPServer, LimitedHttpProtocol, StartupServer

OVERRIDDEN: dict[str, tuple[str, ...]] = {
    "connection_made": ("transport",),
    "connection_lost": ("exc",),
    "data_received": ("data",),
    "on_message_begin": (),
    "on_header": ("name", "value"),
    "on_headers_complete": (),
    "on_body": ("body",),
    "on_message_complete": (),
    "on_response_complete": (),
    "send_400_response": ("msg",),
    "timeout_keep_alive_handler": (),
    "_start_asgi_task": ("cycle", "app"),
}
CALLED = {"_unset_keepalive_if_required": (), "shutdown": ()}
KEPT = (
    "config",
    "loop",
    "transport",
    "flow",
    "parser",
    "connections",
    "tasks",
    "scope",
    "headers",
    "cycle",
    "pipeline",
)
OF_CYCLES = ("response_started", "response_complete", "disconnected", "message_event", "keep_alive")
CALLERS = {
    # Overridden method: the uvicorn methods that must call it.
    "_start_asgi_task": ("on_headers_complete", "on_response_complete"),
    "_unset_keepalive_if_required": ("data_received", "on_response_complete", "connection_lost"),
    "send_400_response": ("data_received",),
    "timeout_keep_alive_handler": ("on_response_complete",),
}


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[1:]


@pytest.mark.parametrize(("name", "parameters"), sorted((OVERRIDDEN | CALLED).items()))
def test_uvicorn_has_the_overridden_and_called_methods(name: str, parameters: tuple[str, ...]) -> None:
    assert _parameters(getattr(HttpToolsProtocol, name)) == parameters
    assert name in CALLED or _parameters(getattr(LimitedHttpProtocol, name)) == parameters


def test_every_override_is_listed() -> None:
    def shared(ours: type, theirs: type) -> set[str]:
        return {name for name, value in vars(ours).items() if callable(value) and hasattr(theirs, name)}

    assert shared(LimitedHttpProtocol, HttpToolsProtocol) == OVERRIDDEN.keys() | {"__init__"}
    assert shared(HTTPServer, uvicorn.Server) == {"__init__", "capture_signals"}
    assert shared(StartupServer, uvicorn.Server) == {"__init__", "capture_signals"}


@pytest.mark.parametrize(("name", "callers"), sorted(CALLERS.items()))
def test_uvicorn_calls_the_overridden_methods(name: str, callers: tuple[str, ...]) -> None:
    for caller in callers:
        assert name in getattr(HttpToolsProtocol, caller).__code__.co_names, caller
    assert "capture_signals" in uvicorn.Server.serve.__code__.co_names


def test_uvicorn_has_the_attributes_that_are_read() -> None:
    config = uvicorn.Config(mock.Mock(), log_config=None, lifespan="off")
    protocol = HttpToolsProtocol(config, uvicorn.server.ServerState(), {}, mock.Mock())
    assert [name for name in KEPT if not hasattr(protocol, name)] == []
    protocol.on_message_begin()
    assert protocol.url == b"" and protocol.headers == [] and protocol.scope["headers"] is protocol.headers
    source = inspect.getsource(RequestResponseCycle.__init__)
    assert [name for name in OF_CYCLES if f"self.{name}" not in source] == []
    assert callable(FlowControl.resume_reading) and STATUS_LINE[431].startswith(b"HTTP/1.1 431 ")
    server = uvicorn.Server(config)
    names = ("started", "should_exit", "force_exit", "server_state", "config")
    assert [name for name in names if not hasattr(server, name)] == []
    assert server.server_state.connections == set() and config.timeout_graceful_shutdown is None


def test_installed_uvicorn_release_is_a_tested_one() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (wanted,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "uvicorn")
    assert version("uvicorn") in wanted.specifier
    assert not wanted.specifier.contains("0.40")  # the release without _start_asgi_task
    assert not wanted.specifier.contains("0.99")
