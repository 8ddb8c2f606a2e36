"""`octavo calibrate`: what a step takes on this machine, for `octavo simulate --cost`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.commands.models import load
from octavo.cli.options import DEFAULT_MODEL, ENGINE, Model, options_of
from octavo.config import EngineArgs
from octavo.errors import ParameterError


@options_of(EngineArgs, ENGINE, into="engine")
def calibrate(
    *,
    model: Model = DEFAULT_MODEL,
    output: Annotated[Path, typer.Option(metavar="FILE", help="The JSON to write.")] = Path("cost.json"),
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that count, after one that does not.")] = 2,
    engine: dict[str, Any],
) -> None:
    """Measure this machine's engine for a minute or two, and write down what a step of it takes.

    Then `octavo simulate --gpu cpu --cost FILE` answers for this machine, from the same model and options.
    """
    if not output.absolute().parent.is_dir():  # found out now, not after minutes
        raise ParameterError(f"output is {str(output)!r}, whose directory does not exist; name another", param="output")
    from rich.console import Console

    from octavo.simulate.calibrate import fit, measure, median_error

    with (
        load(model, engine | {"enable_prefix_caching": False}) as llm,
        Console(stderr=True).status("measuring") as status,
    ):
        device, dtype = llm.config.device, llm.config.dtype
        steps = measure(llm.engine, device=device, repeats=repeats, progress=status.update)
        move_s = llm.engine.scheduler.policy.costs.move_s
    cost = fit(steps, move_s=move_s)
    off = median_error(cost, steps)
    cost.save(output, model=model, device=device, dtype=dtype, num_steps=len(steps), median_error=round(off, 4))
    print(f"a step takes {cost.pass_s * 1e3:.3f} ms, {cost.new_s * 1e6:.1f} us a token of a prompt and")
    print(f"{cost.decode_s * 1e6:.1f} us a sequence that decodes, {cost.kv_s * 1e9:.1f} ns a token of its context")
    print(f"{len(steps):,} steps are met within {off:.1%} (median); written to {output}")
    if off > 0.15:
        print("warning: the steps vary a lot; is something else running here?", file=sys.stderr)
