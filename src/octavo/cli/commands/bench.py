"""`octavo bench`: the named workloads of `octavo.bench`, and their tables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from octavo.bench.args import BenchArgs
from octavo.cli.options import DEFAULT_MODEL, ENGINE, Model, options_of
from octavo.cli.single_options import Command, Group
from octavo.config import EngineArgs
from octavo.errors import ParameterError

bench = typer.Typer(cls=Group, invoke_without_command=True)
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]

SERVE = {
    "backend": "completions (openai, vllm) or chats (openai-chat).",
    "base_url": "The server, such as http://localhost:8000.",
    "host": "Or where it is,",
    "port": "and its port.",
    "endpoint": "Path of the requests; else the backend's.",
    "model": "What requests name; else the first that the server lists.",
    "tokenizer": "A model on this machine, to count tokens with; else the server counts them.",
    "header": "A further header; may be repeated.",
    "dataset_name": "What is sent.",
    "dataset_path": "The file of sharegpt or timed_trace.",
    "num_prompts": "Requests; of a trace, the first so many.",
    "request_rate": "Requests a second; inf: all at once, or when the trace says.",
    "burstiness": "1: a Poisson process; less is burstier.",
    "max_concurrency": "Requests under way together at most.",
    "seed": "What is drawn depends on it.",
    "random_input_len": "random: tokens of a prompt.",
    "random_output_len": "random: tokens of an answer.",
    "random_range_ratio": "random: how far lengths spread around these; 0: not at all.",
    "random_prefix_len": "random: tokens before them that all prompts share.",
    "sharegpt_output_len": "sharegpt: tokens of every answer; else the file's.",
    "disable_shuffle": "sharegpt, prefix_repetition: keep the order.",
    "prefix_repetition_prefix_len": "prefix_repetition: tokens of a shared prefix.",
    "prefix_repetition_suffix_len": "prefix_repetition: tokens behind it.",
    "prefix_repetition_num_prefixes": "prefix_repetition: how many prefixes there are.",
    "prefix_repetition_output_len": "prefix_repetition: tokens of an answer.",
    "timed_trace_scale": "timed_trace: multiply lengths by this, to fit a short context.",
    "ignore_eos": "Every answer has its length.",
    "temperature": "0 is greedy.",
    "top_p": "As the server has it, unless told.",
    "top_k": "Likewise.",
    "min_p": "Likewise.",
    "extra_body": "Further fields of each request.",
    "percentile_metrics": "Tables to print.",
    "metric_percentiles": "Percentiles in them.",
    "goodput": "Objectives that good requests keep, such as ttft:500 tpot:50.",
    "num_warmups": "Requests before the first that counts.",
    "ready_check_timeout_sec": "Seconds that the server gets to become ready.",
    "save_result": "Write a JSON file.",
    "save_detailed": "With every request in it.",
    "append_result": "Behind what the file has.",
    "result_dir": "Where it goes.",
    "result_filename": "Its name; else after the load.",
    "metadata": "A further field of the file; may be repeated.",
    "label": "What its name begins with; else the backend.",
    "disable_tqdm": "No progress bar.",
}


@bench.callback()
def workloads(context: typer.Context) -> None:
    """Measure a server, an engine, the core on the host, or attention."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@bench.command(cls=Command)
def core(as_json: Json = False) -> None:
    """What scheduling costs on the host.

    Schedule and update at several numbers of requests, contexts and windows, with no model behind them.
    """
    from octavo.bench.core import main

    main(as_json=as_json)


@bench.command(cls=Command)
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


@bench.command(cls=Command)
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


@bench.command(cls=Command)
@options_of(EngineArgs, ENGINE, into="engine")
def latency(*, model: Model = DEFAULT_MODEL, as_json: Json = False, engine: dict[str, Any]) -> None:
    """Time to the first token, and per token after it.

    At batches of 1, 32 and 256 prompts of 1,024 tokens; and to the first token of one prompt of 128.
    """
    from octavo.bench.throughput import main

    main(model, latency=True, as_json=as_json, **engine)


@bench.command(cls=Command)
@options_of(BenchArgs, SERVE, into="given")
def serve(
    *,
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    given: dict[str, Any],
) -> None:
    """Load for a server with OpenAI's API, and what it made of it.

    With vllm bench serve's options, labels and JSON. Ctrl-C ends the load and tells what came so far.
    """
    for part in more or ():  # vLLM takes several values behind one --goodput or --metadata
        name = next((n for n, mark in (("metadata", "="), ("goodput", ":")) if n in given and mark in part), None)
        if name is None:
            raise typer.BadParameter(f"got unexpected extra argument {part!r}")
        given[name] = [*given[name], part]
    args = BenchArgs(**given)
    from octavo.bench.serve import main

    with progress_bar(args.num_prompts, shown=not args.disable_tqdm) as progress:
        main(args, progress)


@contextlib.contextmanager
def progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """On a terminal, nothing elsewhere. Gives the function that a load calls; at the last call the bar goes."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task("requests", total=total)

        def show(num_done: int, num_all: int) -> None:
            progress.update(task, completed=num_done, total=num_all, description=f"requests, {num_done:,} done")

        yield show


def parse_lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ParameterError(f"lengths are {text!r}; give numbers such as 128,64,32,8", param="lengths") from None
