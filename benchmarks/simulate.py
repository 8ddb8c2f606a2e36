"""How near a simulation with calibrated times comes to the real engine here: `python benchmarks/simulate.py`.

The engine is calibrated, then a Poisson trace runs through it in real time and through the simulator, at three loads.
Throughput and medians stand beside each other; run it on an idle machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
from typing import Any

from octavo.build import build
from octavo.config import EngineArgs
from octavo.core.sampling_params import SamplingParams
from octavo.simulate.calibrate import error, fit, measure
from octavo.simulate.cost import DEVICES
from octavo.simulate.live import Call, Stopwatch, run_calls
from octavo.simulate.models import MODELS
from octavo.simulate.report import latency, tpot, ttft
from octavo.simulate.simulation import Setup, simulate
from octavo.simulate.traces import FIRST_TOKEN, Arrival

NUM_REQUESTS, LOADS = 150, (0.3, 0.6, 0.9)


def requests(longest: int, rate: float, seed: int) -> list[tuple[float, int, int]]:
    """(time, prompt, output) of each."""
    rnd, now, made = random.Random(seed), 0.0, []
    for _ in range(NUM_REQUESTS):
        now += rnd.expovariate(rate)
        made.append((now, rnd.randint(4, longest // 4), rnd.randint(4, longest // 4)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--longest", type=int, default=256, help="of prompt and output, four times the most of each")
    parser.add_argument("--overlap", action="store_true", help="plan a step while the one before is computed")
    options = parser.parse_args()
    args: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": 64, "skip_tokenizer_init": True}
    quiet = build(EngineArgs(model=options.model, async_scheduling=False, **args))
    steps = measure(quiet.engine)
    cost = fit(steps)
    quiet.engine.close()
    print(f"{cost}\n{len(steps)} steps, met within {error(cost, steps):.1%} (median)")
    args["async_scheduling"] = options.overlap
    built = build(EngineArgs(model=options.model, **args))
    num_blocks = built.config.num_blocks
    setup = Setup(
        MODELS["smollm2-135m"],
        DEVICES["h100"],
        EngineArgs(model="x", num_gpu_blocks_override=num_blocks, **args).settled("cpu"),
        cost=cost,
    )
    # What it can take: everything at once.
    whole = [Arrival(0.0, ((FIRST_TOKEN, p),), o) for _, p, o in requests(options.longest, 1.0, 0)]
    capacity = NUM_REQUESTS / simulate(setup, whole).end_s
    print(f"{'load':>5} {'':20}{'engine':>10}{'simulated':>10}")
    for load in LOADS:
        trace = requests(options.longest, load * capacity, 1)
        rnd = random.Random(2)
        calls = [
            Call(
                time_s,
                str(i),
                [rnd.randrange(built.spec.vocab_size) for _ in range(prompt)],
                SamplingParams(max_tokens=output, ignore_eos=True, detokenize=False, temperature=0.0, seed=i),
            )
            for i, (time_s, prompt, output) in enumerate(trace)
        ]
        for _ in range(2):  # the first meets batches that the engine has not prepared for yet
            watch = Stopwatch()
            built.engine._clock = watch
            with built.engine.garbage:
                outputs = run_calls(built.engine, calls, watch)
        records = simulate(
            setup, [Arrival(t, ((FIRST_TOKEN + i, p),), o) for i, (t, p, o) in enumerate(trace)], sample_s=1e9
        )
        real = [outputs[call.request_id].metrics for call in calls]
        arrived = [call.time_s for call in calls]
        rows = {
            "tokens/s": (
                sum(o for _, _, o in trace) / max(m.finished_time or 0 for m in real),
                sum(o for _, _, o in trace) / records.end_s,
            ),
            "first token, ms": (
                1e3 * statistics.median((m.first_token_time or 0) - t for m, t in zip(real, arrived, strict=True)),
                1e3 * float(statistics.median(ttft(records))),
            ),
            "each token, ms": (
                1e3 * statistics.median(m.time_per_output_token_s or 0 for m in real),
                1e3 * float(statistics.median(tpot(records))),
            ),
            "whole request, ms": (
                1e3 * statistics.median((m.finished_time or 0) - t for m, t in zip(real, arrived, strict=True)),
                1e3 * float(statistics.median(latency(records))),
            ),
        }
        for name, (engine, simulated) in rows.items():
            print(f"{load:>5.0%} {name:20}{engine:>10.1f}{simulated:>10.1f}{simulated / engine - 1:>+8.0%}", flush=True)
    built.engine.close()


if __name__ == "__main__":
    main()
