"""Compares simulations with calibrated step times to the real engine: `python benchmarks/calibrated.py`.

Each round runs a Poisson trace at three loads, through the engine in real time and through the simulator. The engine is
calibrated before and after each trace. The simulation uses both calibrations, because the load of other programs on the
machine varies. The report compares throughput and median latencies as simulated / real, with the median over the
rounds. A load is a share of the offline request rate, all requests arriving at once, as simulated with the latest
calibration.

`--mixed` is for a GPU: the workload mixed256 with all requests at once, then the same requests as Poisson arrivals at
50 and 90 % of the rate that the engine reached.

On a busy machine, `--processor-time` counts this process's CPU time instead of wall time and skips idle time. The
result is the time that an otherwise idle machine would take on one thread.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from octavo.bench.throughput import WORKLOADS
from octavo.config import EngineArgs
from octavo.frontend.build import BuiltEngine, build
from octavo.params.sampling_params import SamplingParams
from octavo.simulate.calibrate import MAX_BATCH, MeasuredStep, fit, measure, median_error
from octavo.simulate.cost import LinearCost
from octavo.simulate.devices import DEVICES
from octavo.simulate.live import RecordingClock, ScheduledCall, run_calls
from octavo.simulate.models import ModelShape
from octavo.simulate.report import latency, tpot, ttft
from octavo.simulate.simulation import Records, SimConfig, simulate
from octavo.simulate.traces import FIRST_TOKEN, Arrival

LOADS = (0.3, 0.6, 0.9)
MIXED, MIXED_LOADS = "mixed256", (0.5, 0.9)
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
"""A step takes a millisecond, most of it in Python."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A workload. `requests`: (arrival time, prompt tokens, tokens to generate) of each, sorted by time."""

    requests: list[tuple[float, int, int]]
    temperature: float = 0.0

    def arrivals(self) -> list[Arrival]:
        return [Arrival(t, ((FIRST_TOKEN + i, p),), o) for i, (t, p, o) in enumerate(self.requests)]

    def at_once(self) -> Trace:
        return replace(self, requests=[(0.0, p, o) for _, p, o in self.requests])

    def poisson(self, rate: float, seed: int, times: int = 1) -> Trace:
        """The same requests, repeated `times` times, with `rate` Poisson arrivals a second."""
        rnd, now, requests = random.Random(seed), 0.0, []
        for _, prompt, output in self.requests * times:
            now += rnd.expovariate(rate)
            requests.append((now, prompt, output))
        return replace(self, requests=requests)


def small(num: int, longest: int, seed: int) -> Trace:
    rnd = random.Random(seed)
    return Trace([(0.0, rnd.randint(4, longest // 4), rnd.randint(4, longest // 4)) for _ in range(num)])


def mixed(vocab_size: int) -> Trace:
    workload = WORKLOADS[MIXED]
    prompts, outputs = workload.make(vocab_size)
    return Trace([(0.0, len(p), o) for p, o in zip(prompts, outputs, strict=True)], workload.temperature)


@contextmanager
def engine(model: str, **options: Any) -> Iterator[BuiltEngine]:
    options |= {"enable_prefix_caching": False, "skip_tokenizer_init": True}
    with tempfile.TemporaryDirectory() as folder:
        if model == "tiny":
            (Path(folder) / "config.json").write_text(json.dumps(TINY))
            options["load_format"], model = "dummy", folder
        built = build(EngineArgs(model=model, **options))
    try:
        yield built
    finally:
        built.engine.close()


class ProcessorTime(RecordingClock):
    """A clock of this process's CPU time plus skipped waits, in seconds since its creation."""

    def __init__(self) -> None:
        super().__init__()
        self._skipped_s = -time.process_time()

    def __call__(self) -> float:
        return time.process_time() + self._skipped_s

    def wait_until(self, time_s: float) -> None:
        self._skipped_s += max(0.0, time_s - self())


def fitted(steps: list[MeasuredStep]) -> LinearCost:
    cost = fit(steps)
    prefill, decode = ([s for s in steps if (s.work.num_new > 0) is new and s.step_s] for new in (True, False))
    print(
        f"{cost.pass_s * 1e3:.3f} ms + {cost.new_s * 1e6:.1f} us a prompt token + {cost.decode_s * 1e6:.1f} us a "
        f"sequence + {cost.kv_s * 1e9:.2f} ns a token of context, host {cost.host_s * 1e6:.0f} us; "
        f"median error {median_error(cost, prefill):.1%} over {len(prefill)} steps with prefill, "
        f"{median_error(cost, decode):.1%} over {len(decode)} without",
        flush=True,
    )
    return cost


def run_engine(built: BuiltEngine, trace: Trace, make_clock: Callable[[], RecordingClock]) -> dict[str, float]:
    rnd = random.Random(2)
    calls = []
    for i, (time_s, prompt, output) in enumerate(trace.requests):
        tokens = [rnd.randrange(built.spec.vocab_size) for _ in range(prompt)]
        params = SamplingParams(
            max_tokens=output, ignore_eos=True, detokenize=False, temperature=trace.temperature, seed=i
        )
        calls.append(ScheduledCall(time_s, str(i), tokens, params))
    built.engine._clock = clock = make_clock()
    with built.engine.gc_pause:
        updates = run_calls(built.engine, calls, clock)
    records = Records()
    for call in calls:
        update = updates[call.request_id]
        assert update.stats is not None
        metrics = update.stats.metrics
        assert metrics.first_token_time is not None and metrics.finished_time is not None
        records.index.append(int(call.request_id))
        records.arrived_s.append(call.time_s)
        records.first_s.append(metrics.first_token_time)
        records.finished_s.append(metrics.finished_time)
        records.num_output.append(len(update.samples[0].token_ids))
    return summarize(records)


def summarize(records: Records) -> dict[str, float]:
    return {
        "tokens/s": float(records.column("num_output").sum() / records.column("finished_s").max()),
        "first token, ms": 1e3 * statistics.median(ttft(records)),
        "each token, ms": 1e3 * statistics.median(tpot(records)),
        "whole request, ms": 1e3 * statistics.median(latency(records)),
    }


class Bench:
    """Calibrates one engine, runs traces through it, and compares them with their simulation."""

    def __init__(self, built: BuiltEngine, options: argparse.Namespace) -> None:
        self.built, self.options = built, options
        self._make_clock, self._now = (
            (ProcessorTime, time.process_time) if options.processor_time else (RecordingClock, time.perf_counter)
        )
        spec, config = built.spec, built.config
        shape = ModelShape(
            "this", 1, spec.num_layers, 1, spec.num_heads, spec.num_kv_heads, spec.head_dim, config.max_model_len
        )
        args = replace(config.args, num_gpu_blocks_override=config.num_blocks)
        self._setup = SimConfig(shape, DEVICES["h100"], args)  # ignored: the cost is given
        self._steps = self._measure(warm_up=True)
        self.pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
        """(load, metric) -> (measured, simulated) of each round."""

    def run(self) -> None:
        # The first round only warms up: the engine meets new batch shapes.
        for number in range(self.options.rounds + 1):
            if self.options.mixed:
                self._mixed(number)
            else:
                self._small(number)

    def _small(self, number: int) -> None:
        num, longest = self.options.requests, self.options.longest
        offline = small(num, longest, 0).arrivals()
        for load in LOADS:
            rate = load * num / simulate(replace(self._setup, cost=fit(self._steps)), offline).end_s
            self._compare(f"{load:.0%}", small(num, longest, 1 + number).poisson(rate, 1 + number), keep=number > 0)

    def _mixed(self, number: int) -> None:
        offline = mixed(self.built.spec.vocab_size)
        if not number:
            run_engine(self.built, offline, self._make_clock)
            return
        tokens_per_s = self._compare(MIXED, offline)["tokens/s"]
        rate = tokens_per_s / statistics.mean(output for _, _, output in offline.requests)
        for load in MIXED_LOADS:  # twice as many at the higher load, to reach a steady state
            self._compare(f"{load:.0%}", offline.poisson(load * rate, number, times=round(2 * load)))

    def _compare(self, load: str, trace: Trace, *, keep: bool = True) -> dict[str, float]:
        measured = run_engine(self.built, trace, self._make_clock)
        before, self._steps = self._steps, self._measure(warm_up=self.built.config.device == "cpu")
        cost = fitted(before + self._steps)
        simulated = summarize(simulate(replace(self._setup, cost=cost), trace.arrivals(), interval_s=1e9))
        for name in measured if keep else ():
            self.pairs.setdefault((load, name), []).append((measured[name], simulated[name]))
        return measured

    def _measure(self, *, warm_up: bool) -> list[MeasuredStep]:
        device = self.built.config.device
        return measure(self.built.engine, device=device, repeats=1, warm_up=warm_up, clock=self._now)


def show(pairs: dict[tuple[str, str], list[tuple[float, float]]]) -> None:
    print(f"{'load':>8} {'':20}{'engine':>10}{'simulated':>10}   simulated / engine: median (each round)")
    for (load, name), rounds in pairs.items():
        measured, simulated, ratio = medians(rounds)
        errors = ", ".join(f"{b / a - 1:+.0%}" for a, b in rounds)
        print(f"{load:>8} {name:20}{measured:>10.1f}{simulated:>10.1f}{ratio - 1:>+8.1%}   ({errors})")


def medians(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Medians of the measured values, of the simulated values, and of simulated / measured."""
    measured, simulated = zip(*pairs, strict=True)
    return statistics.median(measured), statistics.median(simulated), statistics.median(b / a for a, b in pairs)


def rows(pairs: dict[tuple[str, str], list[tuple[float, float]]]) -> list[dict[str, Any]]:
    return [
        {"load": load, "what": name, **dict(zip(("engine", "simulated", "ratio"), medians(each), strict=True)),
         "rounds": each}
        for (load, name), each in pairs.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="model name or path, or tiny: a small random Llama")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=256, help="prompts and outputs have at most a quarter of it")
    parser.add_argument("--mixed", action="store_true", help="run mixed256 instead, at once and as Poisson arrivals")
    parser.add_argument("--max-num-seqs", type=int, help=f"default: {MAX_BATCH}, with --mixed the engine's default")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--overlap", action="store_true", help="schedule a step while the previous one runs")
    parser.add_argument(
        "--processor-time", action="store_true", help="count this process's CPU time instead of wall time"
    )
    parser.add_argument("--json", action="store_true", help="also print a line of JSON at the end")
    options = parser.parse_args()
    if options.processor_time:
        torch.set_num_threads(1)
    settings = {
        "load_format": options.load_format,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs or (None if options.mixed else MAX_BATCH),
        "async_scheduling": options.overlap,
    }
    with engine(options.model, **settings) as built:
        bench = Bench(built, options)
        bench.run()
        about = {"model": options.model, "device": built.config.device, **settings, "rounds": options.rounds}
    show(bench.pairs)
    if options.json:
        print(json.dumps(about | {"rows": rows(bench.pairs)}))


if __name__ == "__main__":
    main()
