"""`octavo reproduce`: simulates the paper's experiments and compares each number with the paper's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.commands.simulate import Seed
from octavo.errors import ParameterError

FOLDER = Path("octavo-paper")


def reproduce(
    figures: Annotated[list[str], typer.Argument(metavar="FIGURE...", help="fig2, fig12 to fig19, or all.")],
    *,
    lengths: Annotated[
        Path | None, typer.Option(metavar="FILE", help="ShareGPT's lengths, .npz. Default: drawn from 18 percentiles.")
    ] = None,
    time: Annotated[float, typer.Option(help="Factor on the traces' durations; below 1 for a quick run.")] = 1.0,
    seed: Seed = 0,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Directory for JSON and SVG.")] = FOLDER,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per figure.")] = False,
) -> None:
    """Simulate figures of the paper and print its numbers, ours, and the differences."""
    import json
    import sys

    from rich.console import Console

    from octavo.simulate.experiments import ALL, experiment
    from octavo.simulate.experiments.paper import Paper

    names = list(ALL) if "all" in figures else figures
    for name in names:
        if name not in ALL:
            raise ParameterError(f"no experiment {name!r}; known: {', '.join(ALL)}, all", param="figures")
    if not 0 < time <= 10:
        raise ParameterError(f"time is {time}, it must be above 0 and at most 10", param="time")
    if lengths is not None and not lengths.exists():
        raise ParameterError(f"no file {str(lengths)!r} of lengths", param="lengths")
    check_folder(output)
    for name in names:
        with Console(stderr=True).status(name) as status:

            def show(text: str, name: str = name) -> None:
                status.update(f"{name}: {text}")

            figure = experiment(name)(Paper(lengths, time, seed, show))
        print(
            json.dumps(figure.as_dict(), ensure_ascii=False) if as_json else "\n".join([*figure.lines(), ""]),
            flush=True,
        )
        written = figure.write(output)
        print(f"written: {' '.join(map(str, written))}", file=sys.stderr)


def check_folder(folder: Path) -> None:
    """Create the directory before the simulation, which takes minutes. Raises `ParameterError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"output is {str(folder)!r}, which cannot be a directory: {error.strerror}; choose another"
        raise ParameterError(text, param="output") from None
