"""The paper's experiments, one file a figure. `ALL` names them; each `run(paper)` gives a `Figure`."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from octavo.simulate.experiments.paper import Figure, Paper

ALL = ("fig2", "fig12", "fig13", "fig14", "fig15", "fig16", "fig17", "fig18", "fig19")


def experiment(name: str) -> Callable[[Paper], Figure]:
    """Imported when it is run."""
    run: Callable[[Paper], Figure] = importlib.import_module(f"octavo.simulate.experiments.{name}").run
    return run
