"""What an engine's host does for one position of a full batch, beside what the GPU takes for it; octavo and vLLM.

    python benchmarks/host_cost.py CONFIG_DIR [--batch 256] [--vllm-python PYTHON]

CONFIG_DIR holds a config.json; weights are random. Equal requests decode together, once for few positions and once for
many: the difference is what decoding takes, without prompts, beginnings and ends. Counted is the time inside the
engine's own `step`, less what it waits there for events of the GPU: planning, queueing work, taking in tokens, making
outputs. vLLM's engine core, which by default is a process of its own beside the one that makes outputs, runs in this
one, so that both are seen; `core` is its part alone. It runs with its defaults otherwise.
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
    """Seconds spent in calls; what is spent waiting for the GPU is counted apart, and taken off."""

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

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **words: Any) -> Any:
            begin, waited = time.perf_counter(), self.waited
            try:
                return function(*args, **words)
            finally:
                spent = time.perf_counter() - begin - (self.waited - waited)
                self.total[name] = self.total.get(name, 0.0) + spent

        return timed


def measure(engine: str, model: str, batch: int) -> dict[str, Any]:
    """One engine, in this process. Microseconds a position."""
    watch = Stopwatch()
    rng = random.Random(0)
    vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    llm: Any
    inputs: Any
    prompts = [[rng.randrange(vocab_size // 2) for _ in range(NUM_PROMPT)] for _ in range(batch)]
    if engine == "vllm":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm

        llm = vllm.LLM(model=model, gpu_memory_utilization=0.85, disable_log_stats=True, **OPTIONS)
        front, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
        front.step, core.step_fn = watch.around("host", front.step), watch.around("core", core.step_fn)
        params_of, inputs = vllm.SamplingParams, [{"prompt_token_ids": p} for p in prompts]
    else:
        import octavo

        llm = octavo.LLM(model, **OPTIONS)
        llm.engine.step = watch.around("host", llm.engine.step)
        params_of, inputs = octavo.SamplingParams, prompts

    def run(length: int) -> dict[str, float]:
        watch.total.clear()
        params = params_of(temperature=0.6, max_tokens=length, ignore_eos=True, detokenize=False)
        begin, waited = time.perf_counter(), watch.waited
        llm.generate(inputs, params, use_tqdm=False)
        return {"wall": time.perf_counter() - begin, "waited": watch.waited - waited, **watch.total}

    run(LONG)
    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        few, many = run(SHORT), run(LONG)
        for name, seconds in many.items():
            found.setdefault(name, []).append(1e6 * (seconds - few[name]) / (LONG - SHORT))
    return {"engine": engine, "batch": batch, **{name: round(statistics.median(v), 1) for name, v in found.items()}}


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
    parser.add_argument("--engine", choices=["octavo", "vllm"], help="this one alone; prints a JSON object")
    args = parser.parse_args()
    if args.engine is not None:
        print(json.dumps(measure(args.engine, args.model, args.batch)), flush=True)
        return
    rows = [spawn("octavo", sys.executable, args), spawn("vllm", args.vllm_python, args)]
    columns = ("wall", "waited", "host", "core")
    print(f"{Path(args.model).name}, batch {args.batch}, us a position")
    print(" " * 10 + "".join(f"{name:>9}" for name in columns))
    for row in rows:
        print(f"{row['engine']:<10}" + "".join(f"{row[c]:>9.0f}" if c in row else "" for c in columns))
    print(f"vLLM's host takes {rows[1]['host'] / rows[0]['host']:.1f} x as long for a position")


if __name__ == "__main__":
    main()
