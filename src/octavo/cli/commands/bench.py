"""`octavo bench`: runs the benchmarks of `octavo.bench` and prints tables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from octavo.bench.args import BenchArgs
from octavo.cli.options import DEFAULT_MODEL, Model, options_of
from octavo.cli.single_options import Command, Group
from octavo.config import EngineArgs

bench = typer.Typer(cls=Group, invoke_without_command=True)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]


@bench.callback()
def workloads(context: typer.Context) -> None:
    """Measure a server, an engine, or the scheduler on the host."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@bench.command(cls=Command)
def core(as_json: Json = False) -> None:
    """Measure the scheduler's time per step on the host.

    Schedule and update at several numbers of requests, context lengths and decode windows, without a model.
    """
    from rich.console import Console

    from octavo.bench.core import main

    with Console(stderr=True).status("measuring the scheduler"):
        main(as_json=as_json)


@bench.command(cls=Command)
@options_of(EngineArgs, into="engine")
def throughput(
    *,
    model: Model = DEFAULT_MODEL,
    workload: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A named workload, or all; may be repeated.")
    ] = None,
    as_json: Json = False,
    engine: dict[str, Any],
) -> None:
    """Measure tokens per second on named workloads.

    Prompts are token ids and output lengths are fixed, so that every engine has the same work. The default workload is
    mixed256, nano-vllm's. With --load-format dummy, a directory with a config.json is enough.
    """
    from octavo.bench.throughput import main

    main(model, workload or ("mixed256",), as_json=as_json, **engine)


@bench.command(cls=Command)
@options_of(EngineArgs, into="engine")
def latency(*, model: Model = DEFAULT_MODEL, as_json: Json = False, engine: dict[str, Any]) -> None:
    """Measure the time to the first token, and per token after it.

    Batches of 1, 32 and 256 prompts of 1,024 tokens, and the time to the first token of one prompt of 128.
    """
    from octavo.bench.throughput import main

    main(model, latency=True, as_json=as_json, **engine)


@bench.command(cls=Command)
@options_of(BenchArgs, into="given")
def serve(
    *,
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    given: dict[str, Any],
) -> None:
    """Send a load to a server with OpenAI's API, and report throughput and latencies.

    Options, labels and JSON are those of vllm bench serve. Ctrl-C ends the load and reports the results so far.
    """
    for value in more or ():  # vLLM accepts several values after one --goodput or --metadata
        name = next((n for n, mark in (("metadata", "="), ("goodput", ":")) if n in given and mark in value), None)
        if name is None:
            raise typer.BadParameter(f"got unexpected extra argument {value!r}")
        given[name] = [*given[name], value]
    args = BenchArgs(**given)
    from octavo.bench.serve import main

    with progress_bar(args.num_prompts, shown=not args.disable_tqdm) as progress:
        main(args, progress)


@contextlib.contextmanager
def progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal, removed at the end. Yields the function that reports progress."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task("requests", total=total)

        def show(num_done: int, num_total: int) -> None:
            progress.update(task, completed=num_done, total=num_total, description=f"requests, {num_done:,} done")

        yield show
