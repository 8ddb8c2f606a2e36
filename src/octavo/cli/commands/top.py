"""`octavo top`: a summary of a running server in the terminal, also over ssh."""

from __future__ import annotations

import contextlib
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.bench.args import is_address
from octavo.errors import EngineError, ParameterError

if TYPE_CHECKING:
    from octavo.view.live.state import PoolState
    from octavo.view.live.summary import Summary

RETRY_S = 1.0
CONNECT_S = 5.0
TIMEOUT_S = 60.0
"""Timeout of the stream. A server sends at least a comment every 15 seconds."""
ONCE_S = 2.0
"""How long `--once` reads: throughput is measured over several steps."""


def top(
    url: Annotated[str, typer.Argument(help="The server.")] = "http://127.0.0.1:8000",
    *,
    api_key: Annotated[
        str | None, typer.Option(help="One of its keys. Default: OCTAVO_ADMIN_KEY or OCTAVO_API_KEY.")
    ] = None,
    once: Annotated[bool, typer.Option(help="Print once and exit. The default without a terminal.")] = False,
) -> None:
    """Watch a server: throughput, queues, memory, the largest requests, and why the first waiting request waits."""
    from rich.console import Console
    from rich.live import Live

    url = url if "://" in url else f"http://{url}"
    if not is_address(url):
        raise ParameterError(f"{url!r} is not a server's address; use one such as http://127.0.0.1:8000", param="url")
    key = api_key or os.environ.get("OCTAVO_ADMIN_KEY") or os.environ.get("OCTAVO_API_KEY")
    console = Console()
    if once or not console.is_terminal:
        deadline, state = time.monotonic() + ONCE_S, None
        for latest in states(url, key, timeout_s=ONCE_S):
            state = latest
            if time.monotonic() > deadline or not state.requests:  # an idle server sends nothing more
                break
        if state is None:
            raise EngineError(f"{url} sent no snapshot; its engine may be starting")
        console.print(render(summary_of(state)))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            for state in states(url, key):
                live.update(render(summary_of(state)), refresh=True)
            time.sleep(RETRY_S)  # the server disconnected, or its engine restarts


def states(url: str, key: str | None, *, timeout_s: float = TIMEOUT_S) -> Iterator[PoolState]:
    """The state after each frame of the server's stream, until it ends or times out. Raises `EngineError` if the server
    cannot be reached."""
    import http.client

    from octavo.view.live.state import PoolState
    from octavo.view.recording.frames import parse_frames

    request = urllib.request.Request(url.rstrip("/") + "/view/events")
    if key:
        request.add_header("authorization", f"Bearer {key}")
    try:
        response = urllib.request.urlopen(request, timeout=max(timeout_s, CONNECT_S))
    except urllib.error.HTTPError as error:
        error.close()
        problem = "requires a key: --api-key" if error.code == 401 else f"returned status {error.code}"
        raise EngineError(f"{url} {problem}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise EngineError(f"{url} does not respond: {getattr(reason, 'strerror', None) or reason}") from None
    except http.client.HTTPException as error:
        raise EngineError(f"{url} does not speak HTTP: {str(error)[:80]!r}; is it an Octavo server's port?") from None
    with response, contextlib.suppress(OSError, http.client.HTTPException):
        state = None
        for frame in parse_frames(response, url):
            if state is None:
                state = PoolState(frame)  # type: ignore[arg-type]  # a snapshot comes first
            else:
                state.apply(frame)
            yield state


def summary_of(state: PoolState) -> Summary:
    from octavo.view.live.summary import Summary

    return Summary.of(state)


def render(summary: Summary) -> Any:
    """A renderable for rich."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    num_blocks = summary.used + summary.cached + summary.free
    numbers = Table.grid(padding=(0, 3))
    numbers.add_row(
        f"{summary.output_rate:,.0f} tokens/s",
        f"{summary.prompt_rate:,.0f} prompt tokens/s",
        f"{summary.running} running",
        f"{summary.waiting} waiting",
        f"{summary.swapped} swapped",
    )
    pool = Table.grid(padding=(0, 2))
    pool.add_row(
        ProgressBar(total=num_blocks, completed=summary.used, width=40),
        f"{summary.used:,} of {num_blocks:,} blocks used, {summary.cached:,} cached",
    )
    cache = f"{100 * summary.hit_rate:.0f} % prefix cache hits, {summary.num_saved:,} saved by sharing, "
    requests = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("request", "status", "tokens", "blocks", "preempted"):
        requests.add_column(name, justify="left" if name in ("request", "status") else "right", no_wrap=True)
    for row in summary.requests:
        requests.add_row(
            Text(row.id[:48]), row.status, f"{row.num_tokens:,}", f"{row.num_blocks:,}", str(row.num_preempted)
        )
    waiting = Text(summary.first_waiting or "no request waits", style="bold" if summary.first_waiting else "dim")
    return Group(numbers, pool, Text(f"{cache}{summary.num_evicted:,} evicted"), waiting, Text(""), requests)
