"""`octavo bench`: the named workloads of `octavo.bench`, and their tables."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from octavo.cli.options import DEFAULT_MODEL, ENGINE, Model, options_of
from octavo.config import EngineArgs
from octavo.errors import ParameterError

bench = typer.Typer(invoke_without_command=True)
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


@bench.callback()
def workloads(context: typer.Context) -> None:
    """Measure an engine, the core on the host, or attention."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@bench.command()
def core(as_json: Json = False) -> None:
    """What scheduling costs on the host.

    Schedule and update at several numbers of requests, contexts and windows, with no model behind them.
    """
    from octavo.bench.core import main

    main(as_json=as_json)


@bench.command()
def attention(
    variant: Annotated[str, typer.Option(help="baseline, a rung of the ladder, cpu, or all.")] = "all",
    lengths: Annotated[str | None, typer.Option(metavar="N,N,...", help="Tokens of each prompt.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens a block.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens to generate for each prompt.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Times are the best of so many runs.")] = None,
    as_json: Json = False,
) -> None:
    """The same prompts through every kind of attention.

    From padded contiguous keys and values to one ragged call over blocks: equal tokens, then time, memory, and work
    spent on padding.
    """
    from octavo.bench.attention import main

    given = {"block_size": block_size, "max_tokens": max_tokens, "repeats": repeats}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if lengths is not None:
        options["lengths"] = parse_lengths(lengths)
    main(variant, json=as_json, **options)


@bench.command()
@options_of(EngineArgs, ENGINE, into="engine")
def throughput(
    *,
    model: Model = DEFAULT_MODEL,
    workload: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A named workload, or all; may be repeated.")
    ] = None,
    as_json: Json = False,
    engine: dict[str, Any],
) -> None:
    """Tokens a second on named workloads.

    Token ids in, lengths forced, so that every engine has the same work; the default is mixed256, which is nano-vllm's.
    With --load-format dummy a directory with a config.json alone will do.
    """
    from octavo.bench.throughput import main

    main(model, workload or ("mixed256",), as_json=as_json, **engine)


@bench.command()
@options_of(EngineArgs, ENGINE, into="engine")
def latency(*, model: Model = DEFAULT_MODEL, as_json: Json = False, engine: dict[str, Any]) -> None:
    """Time to the first token, and per token after it.

    At batches of 1, 32 and 256 prompts of 1,024 tokens; and to the first token of one prompt of 128.
    """
    from octavo.bench.throughput import main

    main(model, latency=True, as_json=as_json, **engine)


def parse_lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ParameterError(f"lengths are {text!r}; give numbers such as 128,64,32,8", param="lengths") from None
