"""`octavo simulate`: a trace through the engine's own scheduler, on a device that need not be here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from octavo.cli.options import ENGINE, options_of, refuse_idle
from octavo.config import EngineArgs
from octavo.errors import ParameterError

if TYPE_CHECKING:
    from octavo.simulate.simulation import Records, SimConfig
    from octavo.simulate.traces import Arrival

SIMULATED = (
    "block_size",
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "enable_prefix_caching",
    "preemption_mode",
    "swap_space",
    "scheduling_policy",
    "long_prefill_token_threshold",
    "max_long_partial_prefills",
    "watermark",
    "decode_window",
    "async_scheduling",
)
"""The engine's options that mean something without a model."""
OPTIONS = {name: ENGINE[name] for name in SIMULATED}
OF_A_TRACE = (
    "trace",
    "model",
    "gpu",
    "rate",
    "requests",
    "burstiness",
    "scale",
    "seed",
    "tensor_parallel_size",
    "replicas",
    "samples",
)
"""What `simulate` is told and a replay has from its dump."""

Workload = Literal["sharegpt", "alpaca", "prefix", "chat"]
WORKLOADS = ("sharegpt", "alpaca", "prefix", "chat")

Trace = Annotated[
    str, typer.Argument(help=f"A .jsonl (Mooncake), .csv (Azure, Vidur) or .npz file, or {', '.join(WORKLOADS)}.")
]
SimulatedModel = Annotated[str, typer.Option("--model", "-m", help="A name, or a directory with a config.json.")]
Device = Annotated[str, typer.Option("--gpu", help="h200, h100, a100-80, a100-40, l4, or cpu for this machine.")]
Rate = Annotated[float | None, typer.Option(help="Requests a second; a file has its own.")]
NumRequests = Annotated[int | None, typer.Option("--requests", help="End after so many; 1,000 if they are made up.")]
Scale = Annotated[float, typer.Option(help="Multiply a file's lengths by this, to fit them into a short context.")]
Burstiness = Annotated[float, typer.Option(help="Of requests made up; 1: a Poisson process; less is burstier.")]
Seed = Annotated[int, typer.Option(min=0, help="What is drawn depends on it.")]
TensorParallel = Annotated[int, typer.Option("--tensor-parallel-size", "-tp", help="Devices that share one model.")]
Cost = Annotated[Path | None, typer.Option(metavar="FILE", help="What `octavo calibrate` wrote, for --gpu's roofline.")]


@options_of(EngineArgs, OPTIONS, into="engine")
def simulate(
    context: typer.Context,
    trace: Trace = "sharegpt",
    *,
    model: SimulatedModel = "llama-3.1-8b",
    gpu: Device = "h200",
    rate: Rate = None,
    requests: NumRequests = None,
    burstiness: Burstiness = 1.0,
    scale: Scale = 1.0,
    seed: Seed = 0,
    tensor_parallel_size: TensorParallel = 1,
    replicas: Annotated[int, typer.Option(help="Copies of the model behind a router.")] = 1,
    samples: Annotated[int, typer.Option("--n", help="Samples of each prompt.")] = 1,
    slo: Annotated[str | None, typer.Option(metavar="TIMES", help="Such as ttft=500ms,tpot=50ms.")] = None,
    cost: Cost = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A dump of the flight recorder: as it was, or with options.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw memory, queues and times as SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    engine: dict[str, Any],
) -> None:
    """What would happen: a trace through this engine's scheduler, on any device.

    Times come from a model of the device, decisions from the engine itself. No model is loaded.
    """
    import json

    from octavo.simulate import report
    from octavo.simulate.plot import svg
    from octavo.simulate.simulation import simulate as run

    wanted = None if slo is None else report.SLO.parse(slo)
    if replay is not None:
        refuse_idle(context, OF_A_TRACE, "a replay, whose requests and model are those of the dump")
        told, records = replayed(replay, engine, cost)
    else:
        setup = setup_of(model, gpu, engine, tensor_parallel_size, replicas, cost)
        most = requests if requests is not None or trace not in WORKLOADS else 1000
        arrivals = arrivals_of(trace, rate, most, scale=scale, seed=seed, burstiness=burstiness)
        if samples != 1:
            arrivals = (arrival._replace(n=samples) for arrival in arrivals)
        with progress_bar(most) as progress:
            records = run(setup, arrivals, progress=progress)
        told = {"trace": trace, "model": setup.model.name, "gpu": setup.device.name, "num_blocks": setup.num_blocks()}
    told |= report.summary(records, wanted)
    print(json.dumps(told) if as_json else "\n".join(report.format_summary(told)), flush=True)  # first: a file may fail
    if output is not None:
        output.write_text(json.dumps(told, indent=2) + "\n")
    if plot is not None:
        plot.write_text(svg(report.summary_charts(records)))


def replayed(path: Path, settings: dict[str, Any], cost: Path | None) -> tuple[dict[str, Any], Records]:
    """A dump as it was, or with other settings; what is to be told of it, and what came of it."""
    from octavo.simulate import replay
    from octavo.simulate.cost import LinearCost
    from octavo.view.recording.player import Recording

    if not path.exists():
        raise ParameterError(f"no file {str(path)!r} to replay", param="replay")
    recording = Recording.load(path)
    exact = replay.ExactReplay(recording)
    was = recording.file.settings
    told: dict[str, Any] = {"replay": str(path), "why": recording.file.reason, "num_blocks": was["num_blocks"]}
    if not settings and cost is None:
        told |= {"exact": True, "num_aborted": exact.num_aborted, "num_present": exact.num_present}
        if exact.death:
            told["death"] = exact.death
        return told, exact.records
    times = exact.cost() if cost is None else LinearCost.load(cost)
    same_blocks = settings.get("block_size", was["block_size"]) == was["block_size"]
    setup = replay.config_from(recording, settings, times)
    told |= {"exact": False, "settings": settings, "num_blocks": setup.num_blocks()}
    recording = recording if same_blocks else Recording.load(path, whole_blocks=True)
    with progress_bar(len(recording.file.requests)) as progress:
        return told, replay.what_if(recording, settings, times, progress=progress)


def setup_of(
    model: str, gpu: str, engine: dict[str, Any], num_devices: int = 1, num_replicas: int = 1, cost: Path | None = None
) -> SimConfig:
    """What the command line describes. Raises `UsageError` or `ModelError` for what does not exist."""
    from octavo.simulate.cost import LinearCost, find_device
    from octavo.simulate.models import find_model
    from octavo.simulate.simulation import SimConfig

    shape = find_model(model)
    if num_devices < 1 or shape.num_heads % num_devices:
        raise ParameterError(
            f"tensor_parallel_size is {num_devices}; {shape.name} has {shape.num_heads} heads, which it must divide",
            param="tensor_parallel_size",
        )
    if num_replicas < 1:
        raise ParameterError(f"replicas are {num_replicas}, there must be one at least", param="replicas")
    args = EngineArgs(model=shape.name, **engine)
    measured = None if cost is None else LinearCost.load(cost)
    setup = SimConfig(shape, find_device(gpu), args, num_devices, num_replicas, measured)
    setup.num_blocks()  # no room is said before anything runs
    return setup


def arrivals_of(
    trace: str, rate: float | None, most: int | None, *, scale: float = 1.0, seed: int = 0, burstiness: float = 1.0
) -> Iterator[Arrival]:
    """A file's, or one of `WORKLOADS`: `prefix` puts the same 512 tokens before each prompt, `chat` is conversations.

    Both have ShareGPT's lengths.
    """
    from itertools import islice

    from octavo.simulate import traces

    if most is not None and most < 1:
        raise ParameterError(f"requests are {most}, there must be one at least", param="requests")
    if trace not in WORKLOADS:
        path = Path(trace)
        if not path.exists():
            raise ParameterError(f"no file {trace!r}, and no workload; known: {', '.join(WORKLOADS)}", param="trace")
        if burstiness != 1:
            told = f"burstiness is {burstiness}; it is for requests made up, and {trace} is a file: leave it out"
            raise ParameterError(told, param="burstiness")
        return islice(traces.read_trace(path, scale=scale, rate=rate, seed=seed), most)
    if scale != 1:
        told = f"scale is {scale}; it is for a file's lengths, and those of {trace} are made up: leave it out"
        raise ParameterError(told, param="scale")
    assert most is not None
    times = traces.bursty(1.0 if rate is None else rate, burstiness, seed)
    lengths = traces.alpaca_like(most, seed) if trace == "alpaca" else traces.sharegpt_like(most, seed)
    if trace == "chat":
        return traces.chat(lengths, times, seed=seed)
    return traces.from_lengths(lengths, times, prefix=512 if trace == "prefix" else 0)


@contextlib.contextmanager
def progress_bar(total: int | None) -> Iterator[Callable[[int, float], None]]:
    """On a terminal, nothing elsewhere. Gives the function that a simulation calls."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=total)

        def show(index: int, time_s: float) -> None:
            progress.update(task, completed=index, description=f"simulating, {time_s:,.0f} s")

        yield show
