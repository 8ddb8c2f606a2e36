"""`octavo reproduce`: the paper's experiments, by simulation on this machine; each number beside the paper's."""

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
        Path | None, typer.Option(metavar="FILE", help="ShareGPT's real lengths, .npz; else 18 percentiles of them.")
    ] = None,
    time: Annotated[float, typer.Option(help="Multiplies the seconds of traces; below 1 for a quick look.")] = 1.0,
    seed: Seed = 0,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where JSON and SVG are written.")
    ] = FOLDER,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a figure.")] = False,
) -> None:
    """Figures of the paper, simulated: its number, ours, and the difference."""
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
    """Make it now: a figure takes minutes. Raises `ParameterError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"output is {str(folder)!r}, which cannot be a directory: {error.strerror}; name another one"
        raise ParameterError(text, param="output") from None
