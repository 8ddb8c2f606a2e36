"""`octavo top`: a summary of a running server in the terminal, also over ssh."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.bench.args import is_address
from octavo.errors import EngineError, OctavoError, ParameterError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from octavo.engine.executor import RankPlace
    from octavo.view.live.summary import RequestSummary, Summary

RETRY_S = 1.0
CONNECT_S = 5.0
TIMEOUT_S = 60.0
"""Timeout of the stream. A server sends at least a comment every 15 seconds."""
ONCE_S = 2.0
"""How long `--once` reads: throughput is measured over several steps."""
REFRESH_S = 0.2
SILENT_S = 10.0
"""An engine with running requests sends frames. One that is silent for longer has no data."""
MAX_ENGINES = 256
MIN_REQUESTS = 3
"""Requests for which the blocks of several engines must leave room."""


def top(
    url: Annotated[str, typer.Argument(help="The server.")] = "http://127.0.0.1:8000",
    *,
    api_key: Annotated[
        str | None, typer.Option(help="One of its keys. Default: OCTAVO_ADMIN_KEY or OCTAVO_API_KEY.")
    ] = None,
    once: Annotated[bool, typer.Option(help="Print once and exit. The default without a terminal.")] = False,
) -> None:
    """Watch a server: throughput, queues, memory, the largest requests, and why the first waiting request waits.

    A server with several engines has a block for each, or a line where the terminal has too few.
    """
    from rich.console import Console
    from rich.live import Live

    url = url if "://" in url else f"http://{url}"
    if not is_address(url):
        raise ParameterError(f"{url!r} is not a server's address; use one such as http://127.0.0.1:8000", param="url")
    key = api_key or os.environ.get("OCTAVO_ADMIN_KEY") or os.environ.get("OCTAVO_API_KEY")
    console = Console()
    num = num_engines(url, key)
    if once or not console.is_terminal:
        engines = [Engine(url, key, i) for i in range(num)]
        with ThreadPoolExecutor(num) as pool:
            list(pool.map(Engine.read_once, engines))
        check(engines)
        if all(engine.summary is None for engine in engines):
            raise EngineError(f"{url} sent no snapshot; its engine may be starting")
        console.print(render_all(engines))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        watch_all(url, key, num, live)


def watch_all(url: str, key: str | None, num: int, live: Live) -> None:
    """Show `num` engines, and those that streams tell of later."""
    engines: list[Engine] = []
    while True:
        for i in range(len(engines), max([num, *(engine.num_engines for engine in engines)])):
            engines.append(Engine(url, key, i))
            threading.Thread(target=engines[i].watch, daemon=True).start()
        check(engines)
        live.update(render_all(engines, live.console), refresh=True)
        time.sleep(REFRESH_S)


def check(engines: Sequence[Engine]) -> None:
    """Raises the error of the first engine, if no engine can be reached."""
    errors = [engine.error for engine in engines if engine.error is not None]
    if len(errors) == len(engines):
        raise errors[0]


def num_engines(url: str, key: str | None) -> int:
    """Raises `EngineError` if the server cannot be reached."""
    with connect(url, "/view/config", key, CONNECT_S) as response:
        try:
            num = json.load(response).get("num_replicas", 1)
        except (OSError, ValueError, AttributeError):
            num = 0
    if not (isinstance(num, int) and 0 < num <= MAX_ENGINES):
        raise EngineError(f"{url} has no readable /view/config; is it an Octavo server's port?")
    return num


class Engine:
    """One engine of a server, as its stream shows it.

    summary       after the last frame; None: none came yet
    problem       why the summary is not that of now, or ""
    error         why the server cannot be reached
    num_engines   engines of the server that its stream has named so far
    """

    def __init__(self, url: str, key: str | None, replica: int) -> None:
        self._url, self._key = url, key
        self._path = f"/view/events?replica={replica}"
        self._heard_s = 0.0
        self.num_engines = 1
        self.summary: Summary | None = None
        self.problem = "it has sent nothing yet"
        self.error: OctavoError | None = None
        self._ranks: tuple[RankPlace, ...] = ()

    def summaries(self, *, timeout_s: float = TIMEOUT_S) -> Iterator[Summary]:
        """The summary after each frame of the stream, until it ends or times out. Raises `EngineError` if the server
        cannot be reached."""
        import http.client

        from octavo.view.live.state import PoolState
        from octavo.view.live.summary import Summary
        from octavo.view.recording.frames import parse_frames

        response = connect(self._url, self._path, self._key, timeout_s)
        self.error = None
        try:
            with response:
                state = None
                for frame in parse_frames(self._lines(response), self._url):
                    if state is None:
                        state = PoolState(frame)  # type: ignore[arg-type]  # a snapshot comes first
                    else:
                        state.apply(frame)
                    self.summary, self.problem, self._heard_s = Summary.of(state, self._ranks), "", time.monotonic()
                    yield self.summary
            self.problem = self.problem or "its stream ended"
        except TimeoutError:
            self.problem = "it sends nothing"
        except (OSError, http.client.HTTPException):
            self.problem = "its stream broke"

    def _lines(self, response: Iterable[bytes]) -> Iterator[bytes]:
        """The lines of the stream. Those that are no frames say the problem, the number of engines, or where its tensor
        parallel ranks are: also while a step takes long, and no frame comes."""
        from octavo.view.live.summary import read_ranks

        for line in response:
            if line.startswith(b"data:") and b'"kind"' not in line[:16]:
                with contextlib.suppress(ValueError, TypeError, AttributeError, OverflowError, LookupError):
                    told = json.loads(line.removeprefix(b"data:"))
                    self.problem = str(told.get("reason", self.problem))
                    self.num_engines = min(int(told.get("num_replicas", self.num_engines)), MAX_ENGINES)
                    if "ranks" in told:
                        self._ranks = read_ranks(told["ranks"])
                        self.summary = self.summary and replace(self.summary, ranks=self._ranks)
            yield line

    def read_once(self) -> None:
        deadline = time.monotonic() + ONCE_S
        try:
            for summary in self.summaries(timeout_s=ONCE_S):
                if time.monotonic() > deadline or not summary.requests:  # an idle engine sends nothing more
                    return
        except OctavoError as error:
            self.problem, self.error = str(error), error

    def watch(self) -> None:
        while True:
            try:
                for _ in self.summaries():
                    pass
            except OctavoError as error:
                self.problem, self.error = str(error), error
            time.sleep(RETRY_S)

    def current(self) -> Summary | str:
        """The summary, or why there is none of now."""
        silent_s = time.monotonic() - self._heard_s
        if self.summary is None or self.problem:
            return self.problem
        if self.summary.running and silent_s > SILENT_S:
            behind = [f"; rank {rank} is behind" for rank, place in enumerate(self._ranks) if place.is_behind]
            return f"silent for {silent_s:.0f} s{''.join(behind)}"
        return self.summary


def connect(url: str, path: str, key: str | None, timeout_s: float) -> Any:
    """The response to a GET. Raises `EngineError` if there is none."""
    import http.client

    request = urllib.request.Request(url.rstrip("/") + path)
    if key:
        request.add_header("authorization", f"Bearer {key}")
    try:
        return urllib.request.urlopen(request, timeout=max(timeout_s, CONNECT_S))
    except urllib.error.HTTPError as error:
        error.close()
        problem = "requires a key: --api-key" if error.code == 401 else f"returned status {error.code}"
        raise EngineError(f"{url} {problem}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise EngineError(f"{url} does not respond: {getattr(reason, 'strerror', None) or reason}") from None
    except http.client.HTTPException as error:
        raise EngineError(f"{url} does not speak HTTP: {str(error)[:80]!r}; is it an Octavo server's port?") from None


def render(summary: Summary) -> Any:
    """A renderable for rich."""
    from rich.console import Group
    from rich.text import Text

    waiting = Text(summary.first_waiting or "no request waits", style="bold" if summary.first_waiting else "dim")
    rows = [(0, row) for row in summary.requests]
    head = _numbers([summary]), _pool(summary), Text(_cache(summary)), *_ranks(summary), waiting
    return Group(*head, Text(""), _requests(rows))


def render_all(engines: Sequence[Engine], console: Console | None = None) -> Any:
    """The server, its engines and their largest requests; of one engine, as `render`.

    console   whose height must do: where blocks of engines leave too few lines to requests, an engine has one line
    """
    from rich.console import Group
    from rich.text import Text

    from octavo.view.live.summary import MAX_REQUESTS, Summary

    if len(engines) == 1 and (only := engines[0].summary) is not None:
        return render(only)
    now = [engine.current() for engine in engines]
    known = [(i, summary) for i, summary in enumerate(now) if isinstance(summary, Summary)]
    missing = len(now) - len(known)
    title = f"{len(now)} engine{'s' * (len(now) > 1)}" + (f", {missing} without data" if missing else "")
    head = [Text(title, style="bold"), _numbers([summary for _, summary in known]), Text("")]
    rows = [(i, row) for i, summary in known for row in summary.requests]
    rows.sort(key=lambda each: (-each[1].num_blocks, each[1].id))
    blocks, num_rows = [line for i, summary in enumerate(now) for line in _block(i, summary)], MAX_REQUESTS
    if console is not None:
        num_rows = console.height - len(console.render_lines(Group(*head, *blocks))) - 2
        if num_rows < min(len(rows), MIN_REQUESTS):
            blocks = _lines(now, console.height - len(head))
            num_rows = console.height - len(head) - len(blocks) - 2
    table = [Text(""), _requests(rows[: min(num_rows, MAX_REQUESTS)], show_engine=True)] if num_rows > 0 else []
    return Group(*head, *blocks, *table)


def _block(i: int, summary: Summary | str) -> list[Any]:
    """All of an engine."""
    from rich.text import Text

    name = (f"engine {i}   ", "bold")
    if isinstance(summary, str):
        return [Text.assemble(name, f"no data: {summary}")]
    lines: list[Any] = [Text.assemble(name, _cache(summary)), _numbers([summary]), _pool(summary), *_ranks(summary)]
    return [*lines, Text(summary.first_waiting, style="bold")] if summary.first_waiting else lines


def _lines(now: Sequence[Summary | str], height: int) -> list[Any]:
    """A line of each engine, as far as the height allows."""
    from rich.text import Text

    num = len(now) if len(now) <= height else max(height - 1, 0)
    lines: list[Any] = []
    for i, summary in enumerate(now[:num]):
        text = f"no data: {summary}" if isinstance(summary, str) else _short(summary)
        lines.append(Text.assemble((f"engine {i:<3} ", "bold"), text, no_wrap=True, overflow="ellipsis"))
    return lines if num == len(now) else [*lines, Text(f"and {len(now) - num} more", style="dim")]


def _short(summary: Summary) -> str:
    num_blocks = summary.used + summary.cached + summary.free
    requests = f"{summary.running:>4} running {summary.waiting:>4} waiting"
    return f"{summary.output_rate:>7,.0f} tokens/s {requests}   {summary.used:,} of {num_blocks:,} blocks"


def _numbers(summaries: Sequence[Summary]) -> Any:
    """The sums over engines."""
    from rich.table import Table

    numbers = Table.grid(padding=(0, 3))
    numbers.add_row(
        f"{sum(s.output_rate for s in summaries):,.0f} tokens/s",
        f"{sum(s.prompt_rate for s in summaries):,.0f} prompt tokens/s",
        f"{sum(s.running for s in summaries)} running",
        f"{sum(s.waiting for s in summaries)} waiting",
        f"{sum(s.swapped for s in summaries)} swapped",
    )
    return numbers


def _pool(summary: Summary) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    num_blocks = summary.used + summary.cached + summary.free
    pool = Table.grid(padding=(0, 2))
    pool.add_row(
        ProgressBar(total=num_blocks, completed=summary.used, width=40),
        f"{summary.used:,} of {num_blocks:,} blocks used, {summary.cached:,} cached",
    )
    return pool


def _cache(summary: Summary) -> str:
    hits = f"{100 * summary.hit_rate:.0f} % prefix cache hits"
    gain = "" if summary.tokens_per_pass is None else f", {summary.tokens_per_pass:.1f} tokens a pass"
    return f"{hits}, {summary.num_saved:,} saved by sharing, {summary.num_evicted:,} evicted{gain}"


def _ranks(summary: Summary) -> list[Any]:
    """A line of each tensor parallel rank; none for one."""
    from rich.text import Text

    from octavo.view.live.summary import describe_ranks

    styles = ["bold red" if place.is_behind else "" for place in summary.ranks]
    return [Text(line, style=style) for line, style in zip(describe_ranks(summary.ranks), styles, strict=True)]


def _requests(rows: Sequence[tuple[int, RequestSummary]], *, show_engine: bool = False) -> Any:
    """A table of requests with their engines."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("request", "engine", "status", "tokens", "blocks", "preempted"):
        if show_engine or name != "engine":
            table.add_column(name, justify="left" if name in ("request", "status") else "right", no_wrap=True)
    for engine, row in rows:
        numbers = (f"{row.num_tokens:,}", f"{row.num_blocks:,}", str(row.num_preempted))
        table.add_row(Text(row.id[:48]), *([str(engine)] if show_engine else []), row.status, *numbers)
    return table
