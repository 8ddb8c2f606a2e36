"""`octavo simulate`: runs a trace through the engine's scheduler on a simulated device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from octavo.cli.options import options_of, refuse_unused_options
from octavo.config import EngineArgs
from octavo.errors import ParameterError, check_output, naming_file
from octavo.router.router import RouterPolicy

if TYPE_CHECKING:
    from octavo.simulate.simulation import Records, SimConfig
    from octavo.simulate.traces import Arrival

SIMULATION_OPTIONS = (
    "block_size",
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "enable_prefix_caching",
    "mamba_block_size",
    "preemption_mode",
    "swap_space",
    "scheduling_policy",
    "long_prefill_token_threshold",
    "max_long_partial_prefills",
    "watermark",
    "decode_window",
    "async_scheduling",
)
"""Engine options that affect a simulation."""
TRACE_PARAMS = (
    "trace",
    "model",
    "gpu",
    "rate",
    "requests",
    "burstiness",
    "time_unit",
    "tokenizer",
    "scale",
    "seed",
    "tensor_parallel_size",
    "replicas",
    "dp_router",
    "samples",
)
"""Parameters of `simulate` that a replay takes from its dump."""

GPU_HELP = (
    "h200, h100, a100-80, a100-40, l4, l40s, a10g, rtx4090, rtx5090, b200, mi300x, cpu (this one), or a .json file."
)
Workload = Literal["sharegpt", "alpaca", "prefix", "chat"]
WORKLOADS = ("sharegpt", "alpaca", "prefix", "chat")

Trace = Annotated[
    str,
    typer.Argument(
        help=f"A .jsonl (Mooncake), .csv (Azure, Vidur), .json (ShareGPT) or .npz file, or {', '.join(WORKLOADS)}."
    ),
]
SimulatedModel = Annotated[str, typer.Option("--model", "-m", help="A name, or a directory with a config.json.")]
Device = Annotated[str, typer.Option("--gpu", metavar="NAME", help=GPU_HELP)]
Rate = Annotated[float | None, typer.Option(help="Requests per second. Default: 1, for a file its own times.")]
NumRequests = Annotated[int | None, typer.Option("--requests", help="Maximum requests; 1,000 for a workload.")]
Scale = Annotated[float, typer.Option(help="Multiply a file's lengths by this, to fit a short context.")]
TimeUnit = Annotated[
    Literal["s", "ms", "us", "ns"] | None,
    typer.Option(help="Of a file's times, which are then exact. Default: ms in .jsonl, s in .csv."),
]
Tokenizer = Annotated[
    str | None, typer.Option(metavar="NAME", help="Of a ShareGPT .json: a local model that counts its tokens.")
]
Burstiness = Annotated[float, typer.Option(help="Of a workload; 1: a Poisson process; less is burstier.")]
Seed = Annotated[int, typer.Option(min=0, help="Random seed.")]
TensorParallel = Annotated[int, typer.Option("--tensor-parallel-size", "-tp", help="Devices that share one model.")]
Cost = Annotated[Path | None, typer.Option(metavar="FILE", help="`octavo calibrate`'s file, replaces the roofline.")]


@options_of(EngineArgs, into="engine", only=SIMULATION_OPTIONS)
def simulate(
    context: typer.Context,
    trace: Trace = "sharegpt",
    *,
    model: SimulatedModel = "llama-3.1-8b",
    gpu: Device = "h200",
    rate: Rate = None,
    requests: NumRequests = None,
    burstiness: Burstiness = 1.0,
    time_unit: TimeUnit = None,
    tokenizer: Tokenizer = None,
    scale: Scale = 1.0,
    seed: Seed = 0,
    tensor_parallel_size: TensorParallel = 1,
    replicas: Annotated[int, typer.Option(help="Copies of the model, with a router.")] = 1,
    dp_router: Annotated[RouterPolicy, typer.Option(help="How requests are sent to the replicas.")] = "affinity",
    samples: Annotated[int, typer.Option("--n", help="Samples per prompt.")] = 1,
    slo: Annotated[str | None, typer.Option(metavar="TIMES", help="Such as ttft=500ms,tpot=50ms.")] = None,
    cost: Cost = None,
    allow_mismatched_cost: Annotated[
        bool, typer.Option("--allow-mismatched-cost", help="Use a --cost of another model or device.")
    ] = False,
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Replay a flight recorder's dump, also with other options.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Plot memory, queues and times as SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    engine: dict[str, Any],
) -> None:
    """Simulate a trace with this engine's scheduler, on any device.

    Times come from a cost model of the device, decisions from the engine's own scheduler. No model is loaded.
    """
    import json

    from octavo.simulate import report
    from octavo.simulate.plot import svg
    from octavo.simulate.simulation import simulate as run

    check_output("output", output)
    check_output("plot", plot)
    slo_limits = None if slo is None else report.SLO.parse(slo)
    if replay is not None:
        refuse_unused_options(context, TRACE_PARAMS, "a replay, which has the requests and the model of its dump")
        result, records = run_replay(replay, engine, cost)
    else:
        setup = setup_of(model, gpu, engine, tensor_parallel_size, replicas, cost, allow_mismatched_cost, dp_router)
        limit = requests if requests is not None or trace not in WORKLOADS else 1000
        arrivals = arrivals_of(
            trace, rate, limit, scale=scale, seed=seed, burstiness=burstiness, time_unit=time_unit, tokenizer=tokenizer
        )
        if samples != 1:
            arrivals = (arrival._replace(n=samples) for arrival in arrivals)
        with progress_bar(limit) as progress:
            records = run(setup, arrivals, progress=progress)
        result = {"trace": trace, "model": setup.model.name, "gpu": setup.device.name, "num_blocks": setup.num_blocks()}
        result |= {"num_gpus": tensor_parallel_size * replicas, "rate": rate_of(trace, rate)}
        if replicas > 1:
            result["router"] = dp_router
        result["assumption"] = report.assumption(setup.device, str(cost or ""))
    result |= report.summary(records, slo_limits) | ({} if slo is None else {"slo": slo})
    # Print before writing files, which may fail.
    print(json.dumps(result) if as_json else "\n".join(report.format_summary(result)), flush=True)
    if output is not None:
        with naming_file(output):
            output.write_text(json.dumps(result, indent=2) + "\n")
    if plot is not None:
        with naming_file(plot):
            plot.write_text(svg(report.summary_charts(records)))


def run_replay(path: Path, settings: dict[str, Any], cost: Path | None) -> tuple[dict[str, Any], Records]:
    """Replay a dump as recorded, or simulate it with other settings. Returns the report's header and the records."""
    from octavo.simulate import replay
    from octavo.simulate.cost import LinearCost
    from octavo.view.recording.player import Recording

    if not path.exists():
        raise ParameterError(f"no file {str(path)!r} to replay", param="replay")
    recording = Recording.load(path)
    exact = replay.ExactReplay(recording)
    recorded = recording.file.settings
    result: dict[str, Any] = {"replay": str(path), "why": recording.file.reason, "num_blocks": recorded["num_blocks"]}
    if not settings and cost is None:
        result |= {"exact": True, "num_aborted": exact.num_aborted, "num_present": exact.num_present}
        if exact.death:
            result["death"] = exact.death
        return result, exact.records
    times = exact.cost() if cost is None else LinearCost.load(cost)
    same_blocks = settings.get("block_size", recorded["block_size"]) == recorded["block_size"]
    setup = replay.config_from(recording, settings, times)
    result |= {"exact": False, "settings": settings, "num_blocks": setup.num_blocks()}
    recording = recording if same_blocks else Recording.load(path, whole_blocks=True)
    with progress_bar(len(recording.file.requests)) as progress:
        return result, replay.what_if(recording, settings, times, progress=progress)


def rate_of(trace: str, rate: float | None) -> float | None:
    """Requests per second of a trace; None: a file's own times."""
    return 1.0 if rate is None and (trace in WORKLOADS or trace.endswith(".json")) else rate


def setup_of(
    model: str,
    gpu: str,
    engine: dict[str, Any],
    num_devices: int = 1,
    num_replicas: int = 1,
    cost: Path | None = None,
    allow_mismatch: bool = False,
    router: RouterPolicy = "affinity",
) -> SimConfig:
    """Build the simulation's configuration. Raises `UsageError` or `ModelError` for an unknown model or device."""
    from octavo.simulate.cost import LinearCost
    from octavo.simulate.devices import find_device
    from octavo.simulate.models import find_model
    from octavo.simulate.simulation import SimConfig

    shape, device = find_model(model), find_device(gpu)
    if num_devices < 1:
        text = f"tensor_parallel_size is {num_devices}, it must be from 1"
        raise ParameterError(text, param="tensor_parallel_size")
    shape.of_rank(num_devices)  # raises if so many cannot share the model
    if num_replicas < 1:
        raise ParameterError(f"replicas are {num_replicas}, it must be from 1", param="replicas")
    args = EngineArgs(model=shape.name, **engine)
    measured = None
    if cost is not None:
        measured = LinearCost.load_for(cost, shape.name, device.name, allow_mismatch=allow_mismatch)
    setup = SimConfig(shape, device, args, num_devices, num_replicas, measured, router=router)
    setup.num_blocks()  # raises now if there is no room for KV blocks
    return setup


def arrivals_of(
    trace: str,
    rate: float | None,
    limit: int | None,
    *,
    scale: float = 1.0,
    seed: int = 0,
    burstiness: float = 1.0,
    time_unit: str | None = None,
    tokenizer: str | None = None,
) -> Iterator[Arrival]:
    """The requests of a file or of one of `WORKLOADS`, at most `limit` of them.

    `prefix` adds the same 512 tokens to the beginning of each prompt, `chat` simulates conversations; both have
    ShareGPT's lengths.
    """
    from itertools import islice

    from octavo.simulate import traces

    if limit is not None and limit < 1:
        raise ParameterError(f"requests are {limit}, it must be from 1", param="requests")
    if trace not in WORKLOADS:
        path = Path(trace)
        if not path.exists():
            raise ParameterError(f"no file or workload {trace!r}; known: {', '.join(WORKLOADS)}", param="trace")
        if path.suffix == ".json":
            times = traces.bursty(1.0 if rate is None else rate, burstiness, seed)
            return conversations_of(path, tokenizer, times, limit, seed)
        if burstiness != 1:
            text = f"burstiness is {burstiness}; it has no effect with a file such as {trace}; remove it"
            raise ParameterError(text, param="burstiness")
        arrivals = traces.read_trace(path, scale=scale, rate=rate, seed=seed, time_unit=time_unit)
        return islice(arrivals, limit)
    if time_unit is not None:
        raise ParameterError(f"time_unit has no effect with the workload {trace}; remove it", param="time_unit")
    if scale != 1:
        text = f"scale is {scale}; it has no effect with the workload {trace}, only with a file; remove it"
        raise ParameterError(text, param="scale")
    assert limit is not None
    times = traces.bursty(1.0 if rate is None else rate, burstiness, seed)
    lengths = traces.alpaca_like(limit, seed) if trace == "alpaca" else traces.sharegpt_like(limit, seed)
    if trace == "chat":
        return traces.chat(lengths, times, seed=seed)
    return traces.from_lengths(lengths, times, prefix=512 if trace == "prefix" else 0)


def conversations_of(
    path: Path, tokenizer: str | None, times: Iterator[float], limit: int | None, seed: int
) -> Iterator[Arrival]:
    """The requests that `octavo bench serve --dataset-name sharegpt` makes of ShareGPT's file. Equal prompts share
    their tokens."""
    import asyncio

    from octavo.bench.args import BenchArgs
    from octavo.bench.samples import local_counter, sharegpt
    from octavo.simulate.traces import FIRST_TOKEN, Arrival

    if tokenizer is None:
        text = f"{path} has text; pass --tokenizer, a local model that counts its tokens"
        raise ParameterError(text, param="tokenizer")
    args = BenchArgs(dataset_name="sharegpt", dataset_path=str(path), num_prompts=limit or 1000, seed=seed)
    samples = asyncio.run(sharegpt(args, local_counter(tokenizer)))
    ids: dict[str, int] = {}
    for time_s, sample in zip(times, samples, strict=False):
        token = FIRST_TOKEN + ids.setdefault(sample.prompt, len(ids))
        yield Arrival(time_s, ((token, sample.num_prompt),), sample.num_output)


@contextlib.contextmanager
def progress_bar(total: int | None) -> Iterator[Callable[[int, float], None]]:
    """A progress bar on a terminal. Yields the function that reports progress."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=total)

        def show(index: int, time_s: float) -> None:
            progress.update(task, completed=index, description=f"simulating, {time_s:,.0f} s")

        yield show
