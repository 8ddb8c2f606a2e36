"""`octavo top`: a running server at a glance, also over ssh."""

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
SILENCE_S = 60.0
"""A server says something every 15 seconds at least."""
LOOK_S = 2.0
"""How long a single look lasts: throughput is seen over some steps."""


def top(
    url: Annotated[str, typer.Argument(help="The server.")] = "http://127.0.0.1:8000",
    *,
    api_key: Annotated[
        str | None, typer.Option(help="One of its keys; else OCTAVO_ADMIN_KEY or OCTAVO_API_KEY.")
    ] = None,
    once: Annotated[bool, typer.Option(help="Look once, and leave; so it is without a terminal.")] = False,
) -> None:
    """Watch a server: throughput, queues, memory, the largest requests, and why the first in line waits."""
    from rich.console import Console
    from rich.live import Live

    if not is_address(url):
        raise ParameterError(f"{url!r} is no address of a server; it looks like http://127.0.0.1:8000", param="url")
    key = api_key or os.environ.get("OCTAVO_ADMIN_KEY") or os.environ.get("OCTAVO_API_KEY")
    console = Console()
    if once or not console.is_terminal:
        until, state = time.monotonic() + LOOK_S, None
        for seen in states(url, key, silence_s=LOOK_S):
            state = seen
            if time.monotonic() > until:
                break
        if state is None:
            raise EngineError(f"{url} sent no snapshot; its engine may be starting")
        console.print(shown(summary_of(state)))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            for state in states(url, key):
                live.update(shown(summary_of(state)), refresh=True)
            time.sleep(RETRY_S)  # it sent us away, or its engine is gone for the moment


def states(url: str, key: str | None, *, silence_s: float = SILENCE_S) -> Iterator[PoolState]:
    """What the server's stream comes to, frame by frame, until it ends or says nothing for so long. Raises
    `EngineError` if there is none."""
    import http.client

    from octavo.view.live.state import PoolState
    from octavo.view.recording.frames import parse_frames

    request = urllib.request.Request(url.rstrip("/") + "/view/events")
    if key:
        request.add_header("authorization", f"Bearer {key}")
    try:
        answer = urllib.request.urlopen(request, timeout=max(silence_s, CONNECT_S))
    except urllib.error.HTTPError as error:
        error.close()
        what = "wants a key: --api-key" if error.code == 401 else f"answers {error.code}"
        raise EngineError(f"{url} {what}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise EngineError(f"{url} does not answer: {getattr(reason, 'strerror', None) or reason}") from None
    except http.client.HTTPException as error:
        raise EngineError(f"{url} does not speak HTTP: {str(error)[:80]!r}; is it an Octavo server's port?") from None
    with answer, contextlib.suppress(OSError, http.client.HTTPException):
        state = None
        for frame in parse_frames(answer, url):
            if state is None:
                state = PoolState(frame)  # type: ignore[arg-type]  # a snapshot comes first
            else:
                state.apply(frame)
            yield state


def summary_of(state: PoolState) -> Summary:
    from octavo.view.live.summary import Summary

    return Summary.of(state)


def shown(summary: Summary) -> Any:
    """As rich draws it."""
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
    saved = f"{100 * summary.hit_rate:.0f} % of prompts' blocks found, {summary.num_saved:,} saved by sharing, "
    requests = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("request", "status", "tokens", "blocks", "preempted"):
        requests.add_column(name, justify="left" if name in ("request", "status") else "right", no_wrap=True)
    for row in summary.requests:
        requests.add_row(
            Text(row.id[:48]), row.status, f"{row.num_tokens:,}", f"{row.num_blocks:,}", str(row.num_preempted)
        )
    head = Text(summary.first_waiting or "nobody waits", style="bold" if summary.first_waiting else "dim")
    return Group(numbers, pool, Text(f"{saved}{summary.num_evicted:,} evicted"), head, Text(""), requests)
