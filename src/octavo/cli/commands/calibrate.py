"""`octavo calibrate`: measures step times on this machine for `octavo simulate --cost`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.commands.models import load
from octavo.cli.options import DEFAULT_MODEL, Model, options_of
from octavo.config import EngineArgs
from octavo.errors import check_output


@options_of(EngineArgs, into="engine")
def calibrate(
    *,
    model: Model = DEFAULT_MODEL,
    output: Annotated[Path, typer.Option(metavar="FILE", help="JSON file to write.")] = Path("cost.json"),
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds, after one warm-up round.")] = 2,
    engine: dict[str, Any],
) -> None:
    """Measure the engine's step times on this machine, which takes a minute or two, and write a cost model.

    `octavo simulate --gpu cpu --cost FILE` then simulates this machine, for the same model and options.
    """
    check_output("output", output)
    from rich.console import Console

    from octavo.doctor import detect_machine
    from octavo.simulate.calibrate import fit, measure, median_error
    from octavo.simulate.devices import name_of

    with (
        load(model, engine | {"enable_prefix_caching": False}) as llm,
        Console(stderr=True).status("measuring") as status,
    ):
        device, dtype = llm.config.device, llm.config.dtype
        steps = measure(llm.engine, device=device, repeats=repeats, progress=status.update)
        move_s = llm.engine.scheduler.policy.costs.move_s
    cost = fit(steps, move_s=move_s)
    error = median_error(cost, steps)
    machine = detect_machine(device)
    on = "cpu" if machine.device_bytes is None else name_of(machine.name, machine.device_bytes)
    cost.save(output, model=model, device=on, dtype=dtype, num_steps=len(steps), median_error=round(error, 4))
    print(f"a step takes {cost.pass_s * 1e3:.3f} ms, {cost.new_s * 1e6:.1f} us per prompt token,")
    print(f"{cost.decode_s * 1e6:.1f} us per decoding sequence, {cost.kv_s * 1e9:.1f} ns per token of its context")
    print(f"{len(steps):,} steps, median error {error:.1%}; written to {output}")
    if error > 0.15:
        print("warning: the steps vary a lot; are other programs running here?", file=sys.stderr)
