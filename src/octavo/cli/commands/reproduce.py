"""`octavo reproduce`: simulates the paper's experiments and compares each number with the paper's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.commands.simulate import Seed
from octavo.errors import ParameterError

if TYPE_CHECKING:
    from octavo.simulate.experiments.paper import Paper

FOLDER = Path("octavo-paper")


def reproduce(
    figures: Annotated[
        list[str] | None, typer.Argument(metavar="[FIGURE...]", help="fig2, fig12 to fig19, or all.")
    ] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="All figures, like the name all.")] = False,
    lengths: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="ShareGPT's lengths, .npz. Default: generated with its statistics."),
    ] = None,
    time: Annotated[float, typer.Option(help="Factor on the traces' durations; below 1 for a quick run.")] = 1.0,
    seed: Seed = 0,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, max=256, help="Processes. Default: one a core.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "--out", "-o", metavar="DIR", help="Directory for JSON and SVG.")
    ] = FOLDER,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per figure.")] = False,
) -> None:
    """Simulate figures of the paper and print its numbers, ours, and the differences. Two runs write the same bytes."""
    import os

    from octavo.simulate.experiments import ALL
    from octavo.simulate.experiments.paper import Paper

    names = list(ALL) if every or "all" in (figures or []) else figures
    if not names:
        raise ParameterError(f"no figures; pass some of {', '.join(ALL)}, or --all", param="figures")
    for name in names:
        if name not in ALL:
            raise ParameterError(f"no experiment {name!r}; known: {', '.join(ALL)}, all", param="figures")
    if not 0 < time <= 10:
        raise ParameterError(f"time is {time}, it must be above 0 and at most 10", param="time")
    if lengths is not None and not lengths.exists():
        raise ParameterError(f"no file {str(lengths)!r} of lengths", param="lengths")
    check_folder(output)
    with worker_pool(jobs or os.cpu_count() or 1) as pool:
        for name in names:
            write_figure(name, Paper(lengths, time, seed, pool=pool), output, as_json)


def write_figure(name: str, paper: Paper, output: Path, as_json: bool) -> None:
    """Make one figure, print its table, and write its files."""
    import json
    import sys
    from dataclasses import replace
    from time import perf_counter

    from rich.console import Console

    from octavo.simulate.experiments import experiment

    begin_s = perf_counter()
    with Console(stderr=True).status(name) as status:
        figure = experiment(name)(replace(paper, progress=lambda text: status.update(f"{name}: {text}")))
    text = json.dumps(figure.as_dict(), ensure_ascii=False) if as_json else "\n".join([*figure.lines(), ""])
    print(text, flush=True)
    written = figure.write(output)
    print(f"written: {' '.join(map(str, written))} ({perf_counter() - begin_s:.0f} s)", file=sys.stderr)


@contextmanager
def worker_pool(num_processes: int) -> Iterator[Executor | None]:
    """Processes for the simulations; None for one, which is this process. An interrupt drops what has not begun."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    if num_processes == 1:
        yield None
        return
    pool = ProcessPoolExecutor(num_processes, get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def check_folder(folder: Path) -> None:
    """Create the directory before the simulation, which takes minutes. Raises `ParameterError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"output is {str(folder)!r}, which cannot be a directory: {error.strerror}; choose another"
        raise ParameterError(text, param="output") from None
