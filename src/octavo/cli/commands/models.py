"""`octavo models`: lists and downloads the models of the catalogue. `load` creates the LLM of every command."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.single_options import Command, Group

if TYPE_CHECKING:
    from octavo.config import EngineArgs
    from octavo.frontend.llm import LLM

models = typer.Typer(cls=Group, help="List the named models, or fetch one.", invoke_without_command=True)


@models.callback()
def list_models(context: typer.Context) -> None:
    """List the named models, and whether each is on this machine."""
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console
    from rich.table import Table

    from octavo.checkpoint import catalog
    from octavo.simulate.models import MODELS

    table = Table("name", "size", "here", "licence", "description", box=None, pad_edge=False)
    for row in catalog.list_models():
        cached = "yes" if row.is_cached else "no"
        table.add_row(row.name, f"{row.num_bytes / 1e6:.0f} MB", cached, row.licence, row.description)
    Console().print(table)
    for row in catalog.list_models():
        print(f"\nother names of {row.name}: {', '.join(row.aliases)}")
    print(f"sizes without weights, for doctor, simulate, plan and view: {', '.join(MODELS)}")
    print(f"stored in {catalog.models_dir()}; set OCTAVO_CACHE to change it")


@models.command(cls=Command)
def fetch(name: Annotated[str, typer.Argument(help="A name that `octavo models` lists.")]) -> None:
    """Download a model, unless it is complete on this machine, and print its path."""
    print(fetch_model(name))


def fetch_model(name: str) -> Path:
    """Return the file of a model of the catalogue. Downloads it if needed, with progress on stderr."""
    from rich.console import Console

    from octavo.checkpoint import catalog

    entry = catalog.find(name)
    label = f"fetching {entry.name}, {entry.num_bytes / 1e6:.0f} MB" if entry else "fetching"
    # A spinner on a terminal, no output elsewhere. The call is cheap if the model is cached.
    with Console(stderr=True).status(label) as status:

        def show(activity: str, num_done: int, num_bytes: int) -> None:
            share = f" {num_done / num_bytes:.0%}" if num_bytes else ""
            status.update(f"{label}: {activity}{share}")

        return catalog.fetch(name, show)


def is_named(model: str) -> bool:
    """True if `model` names a model of the catalogue. A model directory of the same name takes precedence."""
    from octavo.checkpoint import catalog

    return catalog.find(model) is not None and not (Path(model) / "config.json").exists()


def check(args: EngineArgs) -> None:
    """Raises `ModelError` for a model that is missing or cannot be loaded, before torch is imported."""
    if not is_named(args.model):
        from octavo.frontend.preflight import check_model

        check_model(args)


def load(model: str, engine: dict[str, Any]) -> LLM:
    """Create the LLM of a command. Fetches and loads the model, with progress on a terminal."""
    from rich.console import Console

    from octavo.config import EngineArgs

    check(EngineArgs(model=model, **engine))  # refuse invalid options before a download
    if is_named(model):
        fetch_model(model)
    logging.addLevelName(logging.WARNING, "warning")  # lower case, like "error: ..."
    logging.basicConfig(format="%(levelname)s: %(message)s")
    with Console(stderr=True).status(f"loading {model}"):
        from octavo import LLM

        return LLM(model, **engine)
