"""Host time per decode step of a full batch, relative to the whole step, for Octavo and vLLM.

    python benchmarks/host_cost.py CONFIG_DIR [--batch 256] [--vllm-python PYTHON]

CONFIG_DIR holds a config.json; weights are random. Requests of equal length decode together, once for few tokens and
once for many. The difference is the cost of decoding alone, without prefill, admission and ends. `host` is the time
inside the engine's `step` without its waits for GPU events: scheduling, launching kernels, reading sampled tokens,
output processing. vLLM's engine core runs in this process, so that it is measured too (by default it is a process of
its own); `core` is its part of `host`. vLLM's other settings are its defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
OPTIONS: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 2048}
NUM_PROMPT, SHORT, LONG, ROUNDS = 64, 64, 448, 3


class Stopwatch:
    """Seconds spent in calls, without the time spent waiting for the GPU, which is counted separately."""

    def __init__(self) -> None:
        self.total: dict[str, float] = {}
        self.waited = 0.0
        event_type: Any = torch.cuda.Event
        inner = event_type.synchronize

        def synchronize(event: Any) -> None:
            begin = time.perf_counter()
            inner(event)
            self.waited += time.perf_counter() - begin

        event_type.synchronize = synchronize

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin, waited = time.perf_counter(), self.waited
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - begin - (self.waited - waited)
                self.total[name] = self.total.get(name, 0.0) + spent

        return timed


def measure(engine: str, model: str, batch: int) -> dict[str, Any]:
    """Measure one engine in this process. Times in microseconds per decode step."""
    stopwatch = Stopwatch()
    rng = random.Random(0)
    vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    llm: Any
    inputs: Any
    prompts = [[rng.randrange(vocab_size // 2) for _ in range(NUM_PROMPT)] for _ in range(batch)]
    if engine == "vllm":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm

        llm = vllm.LLM(model=model, gpu_memory_utilization=0.85, disable_log_stats=True, **OPTIONS)
        engine_front, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
        engine_front.step, core.step_fn = (
            stopwatch.wrap("host", engine_front.step),
            stopwatch.wrap("core", core.step_fn),
        )
        make_params, inputs = vllm.SamplingParams, [{"prompt_token_ids": p} for p in prompts]
    else:
        import octavo

        llm = octavo.LLM(model, **OPTIONS)
        llm.engine.step = stopwatch.wrap("host", llm.engine.step)
        make_params, inputs = octavo.SamplingParams, prompts

    def run(length: int) -> dict[str, float]:
        stopwatch.total.clear()
        params = make_params(temperature=0.6, max_tokens=length, ignore_eos=True, detokenize=False)
        begin, waited = time.perf_counter(), stopwatch.waited
        llm.generate(inputs, params, use_tqdm=False)
        return {"wall": time.perf_counter() - begin, "waited": stopwatch.waited - waited, **stopwatch.total}

    run(LONG)
    per_step: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        short, long = run(SHORT), run(LONG)
        for name, seconds in long.items():
            per_step.setdefault(name, []).append(1e6 * (seconds - short[name]) / (LONG - SHORT))
    return {"engine": engine, "batch": batch, **{name: round(statistics.median(v), 1) for name, v in per_step.items()}}


def spawn(engine: str, python: str, args: argparse.Namespace) -> dict[str, Any]:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    command = [python, __file__, args.model, "--engine", engine, "--batch", str(args.batch)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True
    )
    row: dict[str, Any] = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="CONFIG_DIR")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--vllm-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--engine", choices=["octavo", "vllm"], help="run only this engine and print a JSON object")
    args = parser.parse_args()
    if args.engine is not None:
        print(json.dumps(measure(args.engine, args.model, args.batch)), flush=True)
        return
    rows = [spawn("octavo", sys.executable, args), spawn("vllm", args.vllm_python, args)]
    columns = ("wall", "waited", "host", "core")
    print(f"{Path(args.model).name}, batch {args.batch}, us per decode step")
    print(" " * 10 + "".join(f"{name:>9}" for name in columns))
    for row in rows:
        print(f"{row['engine']:<10}" + "".join(f"{row[c]:>9.0f}" if c in row else "" for c in columns))
    print(f"vLLM's host takes {rows[1]['host'] / rows[0]['host']:.1f} x as long per decode step")


if __name__ == "__main__":
    main()
