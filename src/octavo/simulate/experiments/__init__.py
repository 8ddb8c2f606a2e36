"""The paper's experiments, one file per figure. `ALL` lists them; each module's `run(paper)` returns a `Figure`."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from octavo.simulate.experiments.paper import Figure, Paper

ALL = ("fig2", "fig12", "fig13", "fig14", "fig15", "fig16", "fig17", "fig18", "fig19")


def experiment(name: str) -> Callable[[Paper], Figure]:
    """The `run` function of a figure, imported on demand."""
    run: Callable[[Paper], Figure] = importlib.import_module(f"octavo.simulate.experiments.{name}").run
    return run
