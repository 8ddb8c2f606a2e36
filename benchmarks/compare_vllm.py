"""Compares Octavo and vLLM on the same workloads, one after the other on the same GPUs.

    python benchmarks/compare_vllm.py CONFIG_DIR [--workload NAME ...] [--no-latency] [--rounds N] [--logprobs N]
        [--tensor-parallel-size N]

CONFIG_DIR holds a config.json. Both engines use random weights, which are as fast as trained ones, and each runs in a
separate process. vLLM runs with its defaults (CUDA graphs, torch.compile, asynchronous scheduling) under the
interpreter of `--vllm-python`, Octavo under the current one. The workloads are those of `octavo bench`, token for
token, with fixed output lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from octavo.bench.throughput import Octavo, check_names, measure_latency, measure_throughput

ROOT = Path(__file__).parents[1]
OPTIONS: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096}


class VLLM:
    """vLLM's offline engine."""

    engine = "vllm"

    def __init__(self, llm: Any, model: str, vocab_size: int, logprobs: int | None) -> None:
        self.llm = llm
        self.model = model
        self.vocab_size = vocab_size
        self.params = {"ignore_eos": True, "detokenize": False, "logprobs": logprobs}

    def generate(self, prompts: list[list[int]], lengths: list[int], temperature: float, n: int) -> int:
        from vllm import SamplingParams

        params = [SamplingParams(temperature=temperature, n=n, max_tokens=length, **self.params) for length in lengths]
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return sum(len(c.token_ids) for output in outputs for c in output.outputs)


def measure(args: argparse.Namespace) -> None:
    """Benchmark one engine in this process. Prints a JSON object per line."""
    start = time.perf_counter()
    model, name = args.model, Path(args.model).name
    options = OPTIONS | ({"tensor_parallel_size": args.tensor_parallel_size} if args.tensor_parallel_size > 1 else {})
    subject: Octavo | VLLM
    if args.engine == "vllm":
        import vllm

        vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        llm = vllm.LLM(model=model, gpu_memory_utilization=0.85, disable_log_stats=True, **options)
        subject, version = VLLM(llm, name, vocab_size, args.logprobs), vllm.__version__
    else:
        import octavo

        subject, version = Octavo(octavo.LLM(model, **options), name, args.logprobs), octavo.__version__
    about = {"engine": args.engine, "version": version, "model": subject.model, "case": "startup"}
    print(json.dumps(about | {"s": round(time.perf_counter() - start, 3)}), flush=True)
    for row in measure_throughput(subject, check_names(args.workload or ["mixed256"]), args.rounds):
        print(json.dumps(row), flush=True)
    for row in () if args.no_latency else measure_latency(subject, rounds=args.rounds):
        print(json.dumps(row), flush=True)


def spawn(engine: str, python: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    command = [python, __file__, args.model, "--engine", engine]
    command += [part for name in args.workload for part in ("--workload", name)]
    command += ["--no-latency"] if args.no_latency else []
    command += ["--rounds", str(args.rounds), "--tensor-parallel-size", str(args.tensor_parallel_size)]
    command += [] if args.logprobs is None else ["--logprobs", str(args.logprobs)]
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def table(rows: list[dict[str, Any]]) -> str:
    """One line per case. A ratio above 1 means that Octavo is faster."""
    found = {engine: {row["case"]: row for row in rows if row["engine"] == engine} for engine in ("octavo", "vllm")}
    lines = [f"{'case':<30}{'octavo':>13}{'vllm':>12}{'ratio':>8}"]
    for case, octavo_row in found["octavo"].items():
        if (vllm_row := found["vllm"].get(case)) is not None:
            key = "ms" if "ms" in octavo_row else "s"
            scale, unit = (1e3, "ms") if key == "s" and octavo_row["s"] <= 1 else (1, key)
            ours, other = (scale * row[key] for row in (octavo_row, vllm_row))
            lines.append(f"{case:<30}{ours:>10.3f} {unit:<2}{other:>9.3f} {unit:<2}{other / ours:>8.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="CONFIG_DIR")
    parser.add_argument("--workload", action="append", default=[], metavar="NAME")
    parser.add_argument("--no-latency", action="store_true")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="repetitions of each case, for the median")
    parser.add_argument("--logprobs", type=int, metavar="N", help="request the top N log-probabilities in every case")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, metavar="N")
    parser.add_argument("--vllm-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all rows to FILE as JSON lines")
    parser.add_argument("--engine", choices=["octavo", "vllm"], help="run only this engine and print its rows")
    args = parser.parse_args()
    if args.engine is not None:
        measure(args)
        return
    rows = spawn("octavo", sys.executable, args) + spawn("vllm", args.vllm_python, args)
    if args.json is not None:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table(rows))


if __name__ == "__main__":
    main()
