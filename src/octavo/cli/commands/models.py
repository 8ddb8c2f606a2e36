"""`octavo models`: the models that have a name here, and getting them. `load` is how every command gets its LLM."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.single_options import Command, Group

if TYPE_CHECKING:
    from octavo.config import EngineArgs
    from octavo.frontend.llm import LLM

models = typer.Typer(cls=Group, help="List the models that have a name, or fetch one.", invoke_without_command=True)


@models.callback()
def list_models(context: typer.Context) -> None:
    """List the models that have a name, and say which are on this machine."""
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console
    from rich.table import Table

    from octavo.checkpoint import catalog

    table = Table("name", "size", "here", "licence", "what it is", box=None, pad_edge=False)
    for row in catalog.list_models():
        here = "yes" if row.is_cached else "no"
        table.add_row(row.name, f"{row.num_bytes / 1e6:.0f} MB", here, row.licence, row.description)
    Console().print(table)
    print(f"\nkept in {catalog.models_dir()} (OCTAVO_CACHE moves it)")


@models.command(cls=Command)
def fetch(name: Annotated[str, typer.Argument(help="A name that `octavo models` lists.")]) -> None:
    """Download a model, unless it is here and whole; prints where it is."""
    print(fetch_model(name))


def fetch_model(name: str) -> Path:
    """The file of a model of the catalogue, downloaded if need be, with progress on stderr."""
    from rich.console import Console

    from octavo.checkpoint import catalog

    entry = catalog.find(name)
    label = f"fetching {entry.name}, {entry.num_bytes / 1e6:.0f} MB" if entry else "fetching"
    # A spinner on a terminal, nothing at all elsewhere. The catalogue knows what it has; asking it costs nothing then.
    with Console(stderr=True).status(label) as status:

        def show(doing: str, num_done: int, num_bytes: int) -> None:
            share = f" {num_done / num_bytes:.0%}" if num_bytes else ""
            status.update(f"{label}: {doing}{share}")

        return catalog.fetch(name, show)


def is_named(model: str) -> bool:
    """Whether the catalogue's model of that name is meant. A model's directory of the same name goes before it."""
    from octavo.checkpoint import catalog

    return catalog.find(model) is not None and not (Path(model) / "config.json").exists()


def check(args: EngineArgs) -> None:
    """Raises `ModelError` for a model that is not here or cannot be loaded, before torch is imported."""
    if not is_named(args.model):
        from octavo.frontend.preflight import check_model

        check_model(args)


def load(model: str, engine: dict[str, Any]) -> LLM:
    """An LLM for a command line: with progress on a terminal while the model is fetched and loaded."""
    from rich.console import Console

    from octavo.config import EngineArgs

    check(EngineArgs(model=model, **engine))  # a mistake in an option is found before anything is fetched
    if is_named(model):
        fetch_model(model)
    logging.addLevelName(logging.WARNING, "warning")  # "warning: ..." beside "error: ..."
    logging.basicConfig(format="%(levelname)s: %(message)s")
    with Console(stderr=True).status(f"loading {model}"):
        from octavo import LLM

        return LLM(model, **engine)
