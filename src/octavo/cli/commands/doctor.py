"""`octavo doctor`: checks whether a model fits, without loading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.options import DEFAULT_MODEL, options_of
from octavo.config import EngineArgs
from octavo.errors import ParameterError

MEMORY_OPTIONS = (
    "revision",
    "device",
    "tensor_parallel_size",
    "dtype",
    "quantization",
    "block_size",
    "kv_cache_dtype",
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "preemption_mode",
    "swap_space",
    "enforce_eager",
    "disable_hybrid_kv_cache_manager",
)
"""Engine options that affect memory."""


@options_of(EngineArgs, into="engine", only=MEMORY_OPTIONS)
def doctor(
    *,
    model: Annotated[
        str,
        typer.Argument(help="Directory with a config.json, .gguf file, name in `octavo models` or `simulate`, hub id."),
    ] = DEFAULT_MODEL,
    gpu: Annotated[
        str | None, typer.Option(help="As for `octavo simulate`, or GiB such as 48GiB. Default: this machine.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quality: Annotated[
        Path | None,
        typer.Option(help="Text file: run the model, and print the text's perplexity in each choice of bits."),
    ] = None,
    engine: dict[str, Any],
) -> int:
    """Check whether a model fits, and how many requests it can serve at once.

    Reads config.json only: needs no weights and downloads nothing. The exit code is 1 if the model does not fit; the
    report then names the flag that makes it fit. With --quality, runs the model instead.
    """
    from octavo.doctor import examine, format_report

    if quality is not None:
        return _print_quality(model, engine, quality, as_json=as_json)
    report = examine(EngineArgs(model=model, **engine), gpu)
    print(json.dumps(report.as_dict()) if as_json else "\n".join(format_report(report)))
    return 0 if report.fits else 1


def _print_quality(model: str, engine: dict[str, Any], path: Path, *, as_json: bool) -> int:
    from octavo.bench.quality import measure_quality

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"quality: {path} cannot be read as text ({error})", param="quality") from None
    first: float | None = None
    for row in measure_quality(model, engine, text):
        if as_json:
            print(json.dumps(row._asdict()))
            continue
        if first is None:
            print(f"{'perplexity':>10}  {'change':>8}  bits of a weight   {row.num_tokens:,} tokens of {path.name}")
        first = first or row.perplexity
        print(
            f"{row.perplexity:10.3f}  {row.perplexity / first - 1:+8.2%}  {row.bits:16.2f}   {row.options}", flush=True
        )
    return 0
