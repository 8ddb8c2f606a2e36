"""`octavo doctor`: checks whether a model fits, without loading it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from octavo.cli.options import DEFAULT_MODEL, options_of
from octavo.config import EngineArgs

MEMORY_OPTIONS = (
    "revision",
    "device",
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
    engine: dict[str, Any],
) -> int:
    """Check whether a model fits, and how many requests it can serve at once.

    Reads config.json only: needs no weights and downloads nothing. The exit code is 1 if the model does not fit; the
    report then names the flag that makes it fit.
    """
    from octavo.doctor import examine, format_report

    report = examine(EngineArgs(model=model, **engine), gpu)
    print(json.dumps(report.as_dict()) if as_json else "\n".join(format_report(report)))
    return 0 if report.fits else 1
