"""`octavo bench`: runs the benchmarks of `octavo.bench` and prints tables."""

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
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]

SERVE = {
    "backend": "API: completions (openai, vllm) or chat completions (openai-chat).",
    "base_url": "Address of the server, such as http://localhost:8000.",
    "host": "Host of the server, without --base-url.",
    "port": "Port of the server, without --base-url.",
    "endpoint": "Path of the requests. Default: the backend's.",
    "model": "Model name in requests. Default: the first that the server lists.",
    "tokenizer": "Local model whose tokenizer counts tokens. Default: the server counts them.",
    "header": "A further header; may be repeated.",
    "dataset_name": "Workload to send.",
    "dataset_path": "File of sharegpt or timed_trace.",
    "num_prompts": "Number of requests; of a trace, the first ones.",
    "request_rate": "Requests per second; inf: all at once, or at the trace's times.",
    "burstiness": "1: a Poisson process; less is burstier.",
    "max_concurrency": "Maximum number of concurrent requests.",
    "seed": "Seed of lengths, words and gaps.",
    "random_input_len": "random: tokens per prompt.",
    "random_output_len": "random: tokens per output.",
    "random_range_ratio": "random: relative spread of lengths around these; 0: none.",
    "random_prefix_len": "random: tokens of a prefix that all prompts share.",
    "sharegpt_output_len": "sharegpt: tokens per output. Default: the file's.",
    "disable_shuffle": "sharegpt, prefix_repetition: keep the order.",
    "prefix_repetition_prefix_len": "prefix_repetition: tokens per shared prefix.",
    "prefix_repetition_suffix_len": "prefix_repetition: tokens after the prefix.",
    "prefix_repetition_num_prefixes": "prefix_repetition: number of prefixes.",
    "prefix_repetition_output_len": "prefix_repetition: tokens per output.",
    "timed_trace_scale": "timed_trace: multiply lengths by this, to fit a short context.",
    "ignore_eos": "Generate the full output length.",
    "temperature": "0 is greedy.",
    "top_p": "Default: the server's.",
    "top_k": "Default: the server's.",
    "min_p": "Default: the server's.",
    "extra_body": "Further fields of each request.",
    "percentile_metrics": "Tables to print.",
    "metric_percentiles": "Percentiles in the tables.",
    "goodput": "Objectives that a request must meet to count for goodput, such as ttft:500 tpot:50.",
    "num_warmups": "Requests before the measurement.",
    "ready_check_timeout_sec": "Seconds to wait until the server is ready.",
    "save_result": "Write a JSON file.",
    "save_detailed": "Write a JSON file with every request.",
    "append_result": "Append to the JSON file.",
    "result_dir": "Directory of the file.",
    "result_filename": "Name of the file. Default: derived from the load.",
    "metadata": "A further field of the file; may be repeated.",
    "label": "Beginning of the file's name. Default: the backend.",
    "disable_tqdm": "Show no progress bar.",
}


@bench.callback()
def workloads(context: typer.Context) -> None:
    """Measure a server, an engine, the scheduler on the host, or attention."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@bench.command(cls=Command)
def core(as_json: Json = False) -> None:
    """Measure the scheduler's time per step on the host.

    Schedule and update at several numbers of requests, context lengths and decode windows, without a model.
    """
    from octavo.bench.core import main

    main(as_json=as_json)


@bench.command(cls=Command)
def attention(
    variant: Annotated[str, typer.Option(help="baseline, another variant's name, cpu, or all.")] = "all",
    lengths: Annotated[str | None, typer.Option(metavar="N,N,...", help="Tokens of each prompt.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per block.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens to generate per prompt.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Number of runs; the best time counts.")] = None,
    as_json: Json = False,
) -> None:
    """Compare attention variants on the same prompts.

    From padded contiguous keys and values to one ragged call over blocks: checks that tokens are equal, then reports
    time, memory, and work spent on padding.
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
    """Measure tokens per second on named workloads.

    Prompts are token ids and output lengths are fixed, so that every engine has the same work. The default workload is
    mixed256, nano-vllm's. With --load-format dummy, a directory with a config.json is enough.
    """
    from octavo.bench.throughput import main

    main(model, workload or ("mixed256",), as_json=as_json, **engine)


@bench.command(cls=Command)
@options_of(EngineArgs, ENGINE, into="engine")
def latency(*, model: Model = DEFAULT_MODEL, as_json: Json = False, engine: dict[str, Any]) -> None:
    """Measure the time to the first token, and per token after it.

    Batches of 1, 32 and 256 prompts of 1,024 tokens, and the time to the first token of one prompt of 128.
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


def parse_lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ParameterError(f"lengths are {text!r}; give numbers such as 128,64,32,8", param="lengths") from None
