"""How near a simulation with calibrated times comes to the real engine here: `python benchmarks/calibrated.py`.

In each round a Poisson trace runs through the engine in real time and through the simulator, at three loads. Before
and after each of these the engine is calibrated, and the simulation goes by both together, because other programs take
their share of a machine now more, now less. What is compared is throughput and the medians of latencies, simulated over
real; of several rounds the median counts. Loads are shares of the rate of an engine that has everything at once, as the
latest calibration has it.

Where others keep the machine busy, `--processor-time` counts the time that this process has a core, in place of the
wall's, and skips idle time: what a quiet machine would take, on one thread.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from octavo.build import Built, build
from octavo.config import EngineArgs
from octavo.core.sampling_params import SamplingParams
from octavo.simulate.calibrate import Measured, error, fit, measure
from octavo.simulate.cost import DEVICES, LinearCost
from octavo.simulate.live import Call, Stopwatch, run_calls
from octavo.simulate.models import ModelShape
from octavo.simulate.report import latency, tpot, ttft
from octavo.simulate.simulation import Records, Setup, simulate
from octavo.simulate.traces import FIRST_TOKEN, Arrival

LOADS = (0.3, 0.6, 0.9)
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
"""Steps of a millisecond, most of it Python."""


@contextmanager
def engine(model: str, **options: Any) -> Iterator[Built]:
    options |= {"enable_prefix_caching": False, "max_num_seqs": 64, "skip_tokenizer_init": True}
    with tempfile.TemporaryDirectory() as folder:
        if model == "tiny":
            (Path(folder) / "config.json").write_text(json.dumps(TINY))
            options["load_format"], model = "dummy", folder
        built = build(EngineArgs(model=model, **options))
    try:
        yield built
    finally:
        built.engine.close()


def requests(num: int, longest: int, rate: float, seed: int) -> list[tuple[float, int, int]]:
    """(time, prompt, output) of each."""
    rnd, now, made = random.Random(seed), 0.0, []
    for _ in range(num):
        now += rnd.expovariate(rate)
        made.append((now, rnd.randint(4, longest // 4), rnd.randint(4, longest // 4)))
    return made


def arrivals(trace: list[tuple[float, int, int]]) -> list[Arrival]:
    return [Arrival(t, ((FIRST_TOKEN + i, p),), o) for i, (t, p, o) in enumerate(trace)]


class ProcessorTime(Stopwatch):
    """Seconds of a core that this process had since it was made, and those that it would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self._skipped_s = -time.process_time()

    def __call__(self) -> float:
        return time.process_time() + self._skipped_s

    def wait_until(self, time_s: float) -> None:
        self._skipped_s += max(0.0, time_s - self())


def fitted(steps: list[Measured]) -> LinearCost:
    cost = fit(steps)
    print(
        f"{cost.pass_s * 1e3:.3f} ms + {cost.new_s * 1e6:.1f} us a token of a prompt + {cost.decode_s * 1e6:.1f} us a "
        f"sequence, host {cost.host_s * 1e6:.0f} us; {len(steps)} steps met within {error(cost, steps):.1%}",
        flush=True,
    )
    return cost


def real(built: Built, trace: list[tuple[float, int, int]], watch: Stopwatch) -> dict[str, float]:
    rnd = random.Random(2)
    calls = []
    for i, (time_s, prompt, output) in enumerate(trace):
        tokens = [rnd.randrange(built.spec.vocab_size) for _ in range(prompt)]
        params = SamplingParams(max_tokens=output, ignore_eos=True, detokenize=False, temperature=0.0, seed=i)
        calls.append(Call(time_s, str(i), tokens, params))
    built.engine._clock = watch
    with built.engine.garbage:
        outputs = run_calls(built.engine, calls, watch)
    records = Records()
    for call in calls:
        metrics, output = outputs[call.request_id].metrics, outputs[call.request_id].outputs[0]
        assert metrics.first_token_time is not None and metrics.finished_time is not None
        records.index.append(int(call.request_id))
        records.arrived_s.append(call.time_s)
        records.first_s.append(metrics.first_token_time)
        records.finished_s.append(metrics.finished_time)
        records.num_output.append(len(output.token_ids))
    return told(records)


def told(records: Records) -> dict[str, float]:
    return {
        "tokens/s": float(records.column("num_output").sum() / records.column("finished_s").max()),
        "first token, ms": 1e3 * statistics.median(ttft(records)),
        "each token, ms": 1e3 * statistics.median(tpot(records)),
        "whole request, ms": 1e3 * statistics.median(latency(records)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a model, or tiny")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=256, help="of prompt and output, four times the most of each")
    parser.add_argument("--overlap", action="store_true", help="plan a step while the one before is computed")
    parser.add_argument("--processor-time", action="store_true", help="count this process's own time")
    options = parser.parse_args()
    if options.processor_time:
        torch.set_num_threads(1)
    watch, clock = (ProcessorTime, time.process_time) if options.processor_time else (Stopwatch, time.perf_counter)
    ratios: dict[tuple[float, str], list[tuple[float, float]]] = {}
    with (
        engine(options.model, async_scheduling=False) as quiet,
        engine(options.model, async_scheduling=options.overlap) as built,
    ):
        spec = built.spec
        shape = ModelShape("this", 1, spec.num_layers, 1, 1, spec.num_kv_heads, spec.head_dim, 2048)
        args = EngineArgs(
            model="this",
            num_gpu_blocks_override=built.config.num_blocks,
            enable_prefix_caching=False,
            max_num_seqs=64,
            async_scheduling=options.overlap,
        ).settled("cpu")
        whole = [a._replace(time_s=0.0) for a in arrivals(requests(options.requests, options.longest, 1.0, 0))]
        before = measure(quiet.engine, repeats=1, clock=clock)
        for number in range(options.rounds + 1):
            for load in LOADS:
                setup = Setup(shape, DEVICES["h100"], args, cost=fit(before))
                rate = load * options.requests / simulate(setup, whole).end_s
                trace = requests(options.requests, options.longest, rate, 1 + number)
                here = real(built, trace, watch())
                after = measure(quiet.engine, repeats=1, clock=clock)
                setup = replace(setup, cost=fitted(before + after))
                there = told(simulate(setup, arrivals(trace), sample_s=1e9))
                before = after
                if number:  # the first meets batches that the engine has not prepared for yet
                    for name in here:
                        ratios.setdefault((load, name), []).append((here[name], there[name]))
    print(f"{'load':>5} {'':20}{'engine':>10}{'simulated':>10}   over the engine's: median (each round)")
    for (load, name), pairs in ratios.items():
        middle = [statistics.median(column) for column in zip(*pairs, strict=True)]
        each = [b / a - 1 for a, b in pairs]
        rounds = ", ".join(f"{x:+.0%}" for x in each)
        print(
            f"{load:>5.0%} {name:20}{middle[0]:>10.1f}{middle[1]:>10.1f}{statistics.median(each):>+8.0%}   ({rounds})"
        )


if __name__ == "__main__":
    main()
