"""`octavo plan`: finds the machines that serve a trace within an SLO."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    from octavo.simulate.planner import Deployment


def plan(
    trace: Annotated[str, typer.Option("--trace", help="A file or a workload, as for `octavo simulate`.")],
    slo: Annotated[str, typer.Option(metavar="TIMES", help="Such as ttft=500ms,tpot=50ms.")],
    *,
    model: SimulatedModel = "llama-3.1-8b",
    share: Annotated[float, typer.Option(help="Share of the requests that must meet the SLO.")] = 0.95,
    gpu: Annotated[list[str] | None, typer.Option(help="Consider this GPU only; may be repeated.")] = None,
    prices: Annotated[Path | None, typer.Option(metavar="FILE", help='JSON: {"h200": price per hour, ...}.')] = None,
    max_gpus: Annotated[int, typer.Option("--max-gpus", help="Maximum number of GPUs.")] = 64,
    max_tensor_parallel_size: Annotated[
        int, typer.Option(help="Maximum number of GPUs of a replica. This engine runs on one; more is hypothetical.")
    ] = 1,
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
    from rich.console import Console

    from octavo.simulate.devices import DEVICES, find_device
    from octavo.simulate.models import find_model
    from octavo.simulate.planner import Planner
    from octavo.simulate.report import SLO, assumption

    if not 0 < share <= 1:
        raise ParameterError(f"share is {share}, it must be above 0 and at most 1", param="share")
    for name, number in (("max_gpus", max_gpus), ("max_tensor_parallel_size", max_tensor_parallel_size)):
        if number < 1:
            raise ParameterError(f"{name} is {number}, it must be from 1", param=name)
    wanted, shape = SLO.parse(slo), find_model(model)
    devices = [find_device(name) for name in gpu] if gpu else [d for d in DEVICES.values() if d.is_supported]
    priced = prices_of(devices, prices, all_needed=bool(gpu))
    arrivals = list(
        arrivals_of(
            trace,
            rate,
            requests,
            scale=scale,
            seed=seed,
            burstiness=burstiness,
            time_unit=time_unit,
            tokenizer=tokenizer,
        )
    )
    with Console(stderr=True).status("simulating") as status:
        planner = Planner(
            shape,
            arrivals,
            wanted,
            share=share,
            devices=devices,
            prices=priced,
            max_gpus=max_gpus,
            max_devices=max_tensor_parallel_size,
            progress=status.update,
        )
        answer = planner.search()
    best = answer.best
    if as_json:
        result = {
            "best": None if best is None else best.as_dict(),
            "margin": answer.margin,
            "tried": [c.as_dict() for c in answer.tried],
        }
        load = {"model": shape.name, "trace": trace, "rate": rate_of(trace, rate), "slo": slo, "share": share}
        assumptions = [assumption(device) for device in devices]
        print(json.dumps(load | {"assumptions": assumptions} | result))
        raise typer.Exit(best is None)
    times = "its own times" if (load_rate := rate_of(trace, rate)) is None else f"{load_rate:g} requests/s"
    print(f"model     {shape.name}")
    print(f"load      {len(arrivals):,} requests of {trace}, {times}; {slo} for {share:.0%} of them")
    if not answer.tried:
        print(f"{shape.name} fits on none of these GPUs; --max-tensor-parallel-size 8 gives a hypothetical answer")
        raise typer.Exit(1)
    if best is None:
        hint = "" if max_tensor_parallel_size > 1 else "; --max-tensor-parallel-size 8 tries hypothetical replicas"
        print(f"nothing of up to {max_gpus} GPUs meets it{hint}; the nearest:")
    else:
        print_best(best, answer.margin, shape.name)
    print_table(answer.tried[:12])
    print("\nassumed")
    for device in {c.device.name: c.device for c in answer.tried}.values():
        print(f"  {assumption(device)}")
    raise typer.Exit(best is None)


def print_best(best: Deployment, load_factor: float, model: str) -> None:
    options = "".join(f" --{name.replace('_', '-')} {value}" for name, value in best.settings.items())
    margin = f"{load_factor:.2f} times this load" if load_factor > 1 else "only this load"
    copies = f"{best.num_replicas} replica{'s' * (best.num_replicas > 1)} of {model}"
    print(f"{best.num_gpus} x {best.device.name}: {copies} on {best.num_devices} each")
    if best.num_devices > 1 or not best.device.is_supported:
        print("note      this is hypothetical: today a replica of this engine has one NVIDIA GPU")
    print(f"settings  {options.strip() or 'the defaults'}\ncapacity  {margin}\n")


def print_table(tried: list) -> None:  # type: ignore[type-arg]
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
