"""`octavo plan`: finds the machines that serve a trace within an SLO."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from octavo.cli.commands.simulate import (
    Burstiness,
    Rate,
    Scale,
    Seed,
    SimulatedModel,
    TimeUnit,
    Tokenizer,
    arrivals_of,
    rate_of,
)
from octavo.errors import ParameterError

if TYPE_CHECKING:
    from octavo.simulate.devices import Device
    from octavo.simulate.models import ModelShape
    from octavo.simulate.planner import Deployment, PlannerResult
    from octavo.simulate.report import SLO
    from octavo.simulate.traces import Arrival

MaxTensorParallel = Annotated[int, typer.Option(help="Maximum number of GPUs that share a replica's model.")]


class Question(NamedTuple):
    """Which machines serve this load within these times?"""

    shape: ModelShape
    trace: str
    rate: float | None
    slo: str
    limits: SLO
    share: float
    devices: list[Device]
    max_gpus: int
    max_devices: int


def plan(
    trace: Annotated[str, typer.Option("--trace", help="A file or a workload, as for `octavo simulate`.")],
    slo: Annotated[str, typer.Option(metavar="TIMES", help="Such as ttft=500ms,tpot=50ms.")],
    *,
    model: SimulatedModel = "llama-3.1-8b",
    share: Annotated[float, typer.Option(help="Share of the requests that must meet the SLO.")] = 0.95,
    gpu: Annotated[list[str] | None, typer.Option(help="Consider this GPU only; may be repeated.")] = None,
    prices: Annotated[Path | None, typer.Option(metavar="FILE", help='JSON: {"h200": price per hour, ...}.')] = None,
    max_gpus: Annotated[int, typer.Option("--max-gpus", help="Maximum number of GPUs.")] = 64,
    max_tensor_parallel_size: MaxTensorParallel = 8,
    rate: Rate = None,
    requests: Annotated[int, typer.Option(help="Number of requests, the first of the trace.")] = 2000,
    burstiness: Burstiness = 1.0,
    time_unit: TimeUnit = None,
    tokenizer: Tokenizer = None,
    scale: Scale = 1.0,
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Find the cheapest machines and settings that serve a trace within an SLO, by simulation.

    The exit status is 1 if none does.
    """
    from octavo.simulate.models import find_model
    from octavo.simulate.report import SLO

    check_ranges(share, max_gpus=max_gpus, max_tensor_parallel_size=max_tensor_parallel_size)
    limits, shape, devices = SLO.parse(slo), find_model(model), devices_of(gpu)
    load = rate_of(trace, rate)
    question = Question(shape, trace, load, slo, limits, share, devices, max_gpus, max_tensor_parallel_size)
    priced = prices_of(devices, prices, all_needed=bool(gpu))
    draw: dict[str, Any] = {"scale": scale, "seed": seed, "burstiness": burstiness}
    arrivals = list(arrivals_of(trace, rate, requests, time_unit=time_unit, tokenizer=tokenizer, **draw))
    answer = search(question, arrivals, priced)
    if as_json:
        print(json.dumps(as_dict(question, answer)))
    else:
        print_answer(question, len(arrivals), answer)
    raise typer.Exit(answer.best is None)


def check_ranges(share: float, **numbers: int) -> None:
    if not 0 < share <= 1:
        raise ParameterError(f"share is {share}, it must be above 0 and at most 1", param="share")
    for name, number in numbers.items():
        if number < 1:
            raise ParameterError(f"{name} is {number}, it must be from 1", param=name)


def devices_of(names: list[str] | None) -> list[Device]:
    """The devices of these names; without names all that run this engine."""
    from octavo.simulate.devices import DEVICES, find_device

    return [find_device(n) for n in names] if names else [d for d in DEVICES.values() if d.is_supported]


def search(question: Question, arrivals: list[Arrival], prices: dict[str, float] | None) -> PlannerResult:
    from rich.console import Console

    from octavo.simulate.planner import Planner

    with Console(stderr=True).status("simulating") as status:
        planner = Planner(
            question.shape,
            arrivals,
            question.limits,
            share=question.share,
            devices=question.devices,
            prices=prices,
            max_gpus=question.max_gpus,
            max_devices=question.max_devices,
            progress=status.update,
        )
        return planner.search()


def as_dict(question: Question, answer: PlannerResult) -> dict[str, Any]:
    from octavo.simulate.report import assumption

    return {
        "model": question.shape.name,
        "trace": question.trace,
        "rate": question.rate,
        "slo": question.slo,
        "share": question.share,
        "assumptions": [assumption(device) for device in question.devices],
        "best": None if answer.best is None else answer.best.as_dict(),
        "margin": answer.margin,
        "tried": [deployment.as_dict() for deployment in answer.tried],
    }


def print_answer(question: Question, num_requests: int, answer: PlannerResult) -> None:
    from octavo.simulate.report import assumption

    name, rate = question.shape.name, question.rate
    times = "its own times" if rate is None else f"{rate:g} requests/s"
    print(f"model     {name}")
    wanted = f"{question.slo} for {question.share:.0%} of them"
    print(f"load      {num_requests:,} requests of {question.trace}, {times}; {wanted}")
    if not answer.tried:
        print(f"{name} fits on none of these GPUs, up to {question.max_devices} for each copy")
        return
    if answer.best is None:
        print(f"nothing of up to {question.max_gpus} GPUs meets it; the nearest:")
    else:
        print_best(answer.best, answer.margin, name)
    print_table(answer.tried[:12])
    print("\nassumed")
    for device in {c.device.name: c.device for c in answer.tried}.values():
        print(f"  {assumption(device)}")


def print_best(best: Deployment, load_factor: float, model: str) -> None:
    ranks = {"tensor_parallel_size": best.num_devices} if best.num_devices > 1 else {}
    options = "".join(f" --{name.replace('_', '-')} {value}" for name, value in (ranks | best.settings).items())
    margin = f"{load_factor:.2f} times this load" if load_factor > 1 else "only this load"
    copies = f"{best.num_replicas} replica{'s' * (best.num_replicas > 1)} of {model}"
    print(f"{best.num_gpus} x {best.device.name}: {copies} on {best.num_devices} each")
    if not best.device.is_supported:
        print("note      this is hypothetical: this engine runs on NVIDIA GPUs")
    print(f"settings  {options.strip() or 'the defaults'}\ncapacity  {margin}\n")


def print_table(tried: list[Deployment]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("gpus", "replicas", "settings", "meet the SLO", "first token p95", "each token p95", "price"):
        table.add_column(name, justify="left" if name == "settings" else "right")
    for c in tried:
        first, each = (c.report.get(name, {}).get("p95", math.nan) * 1e3 for name in ("ttft_s", "tpot_s"))
        table.add_row(
            f"{c.num_gpus} x {c.device.name}",
            str(c.num_replicas),
            ", ".join(f"{name} {value}" for name, value in c.settings.items()) or "defaults",
            f"{c.kept:.1%}",
            f"{first:,.0f} ms",
            f"{each:,.1f} ms",
            f"{c.price:.2f}" if c.price else "-",
        )
    Console().print(table)


def prices_of(devices: list[Device], path: Path | None, *, all_needed: bool) -> dict[str, float] | None:
    """Prices per hour from the devices' own files and from `path`, which wins; None if there are none.

    Raises `ParameterError` if `all_needed` and some devices have no price: they cannot be compared with the others.
    """
    prices = {device.name: device.price for device in devices if device.price}
    if path is not None:
        prices |= read_prices(path, {device.name for device in devices})
    missing = [device.name for device in devices if device.name not in prices]
    if prices and missing and all_needed:
        raise ParameterError(f"no price of {missing[0]}, but one of {next(iter(prices))}; add it", param="prices")
    return prices or None


def read_prices(path: Path, names: set[str]) -> dict[str, float]:
    """Read prices by device. Raises `ParameterError` unless the file maps known devices, or some of `names`, to
    positive numbers."""
    from octavo.simulate.devices import find_device

    try:
        prices = json.loads(path.read_text(encoding="utf-8"))
        values = prices.values() if isinstance(prices, dict) else [None]
        good = all(isinstance(p, int | float) and not isinstance(p, bool) and 0 < p < math.inf for p in values)
    except OSError as error:
        raise ParameterError(f"cannot read {path}: {error.strerror}", param="prices") from None
    except ValueError:
        good = False
    if not good or not prices:
        raise ParameterError(f'{path} has no prices; give JSON such as {{"h200": 3.5}}, per hour', param="prices")
    return {name if name in names else find_device(name).name: float(price) for name, price in prices.items()}
