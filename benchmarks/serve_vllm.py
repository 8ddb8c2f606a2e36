"""Compares the servers of Octavo and vLLM under the same load, on one GPU: the time to first tokens, and per token.

    python benchmarks/serve_vllm.py MODEL [--rates 24] [--seconds 25] [--rounds 2] [--share 0.4] [--options ...]

MODEL is a directory with a config.json and a tokenizer; weights are random. Both servers run at the same time, each
with its share of the memory, and take turns: one is idle while the other has its load. Lengths are ShareGPT's
(`octavo.simulate.traces.sharegpt_like`), arrivals are random at a fixed mean rate, and each load has other prompts. The
client is that of `octavo bench serve`. vLLM runs with its defaults under the interpreter of `--vllm-python`. Figures
are medians of the rounds, in ms. Above 1, Octavo is faster; for tokens/s, below 1.

--options are Octavo's, such as --decode-window 4. --only NAME runs one server alone.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from octavo.bench.args import BenchArgs
from octavo.bench.serve import Bench, run_until_done
from octavo.simulate.traces import sharegpt_like

ROOT = Path(__file__).parents[1]
MAX_LEN = 4096
FIGURES = ("first token, median", "first token, p99", "per token, median", "tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rates", nargs="+", type=float, default=[24.0], metavar="N", help="requests a second")
    parser.add_argument("--seconds", type=float, default=25.0, help="of arrivals in each load")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.4, help="share of the GPU's memory for each server")
    parser.add_argument("--only", choices=("octavo", "vllm"))
    parser.add_argument("--vllm-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[])
    args = parser.parse_args()
    names = [args.only] if args.only else ["octavo", "vllm"]
    ports = {name: free_port() for name in names}
    servers = {name: start(name, ports[name], args) for name in names}
    found: dict[tuple[str, float], list[dict[str, float]]] = {}
    try:
        for name in names:
            load(ports[name], 8.0, 3.0, seed=999)
            print(f"{name} is warm after {time.perf_counter() - START:.0f} s", flush=True)
        for turn in range(args.rounds):
            for rate in args.rates:
                for name in names:
                    figures = load(ports[name], rate, args.seconds, seed=turn)
                    found.setdefault((name, rate), []).append(figures)
                    print(name, rate, {key: round(value, 2) for key, value in figures.items()}, flush=True)
    finally:
        for server in servers.values():
            server.terminate()
        for server in servers.values():
            server.wait()
    print(f"{'requests/s':>10}  {'':<22}" + "".join(f"{name:>12}" for name in names))
    for rate in args.rates:
        for figure in FIGURES:
            values = [statistics.median(row[figure] for row in found[name, rate]) for name in names]
            ratio = f"{values[-1] / values[0]:>8.2f} x" if len(values) == 2 else ""
            print(f"{rate:>10g}  {figure:<22}" + "".join(f"{value:>12.2f}" for value in values) + ratio)


def start(name: str, port: int, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    common = ["--port", str(port), "--load-format", "dummy", "--max-model-len", str(MAX_LEN)]
    common += ["--gpu-memory-utilization", str(args.share)]
    if name == "octavo":
        command = [sys.executable, "-m", "octavo.cli.main", "serve", args.model, *common, *args.options]
    else:
        command = [args.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model, *common]
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(command, stdout=sys.stderr, env={**os.environ, "PYTHONPATH": path})


def load(port: int, rate: float, seconds: float, seed: int) -> dict[str, float]:
    """Send a load, once the server is ready."""
    num = max(4, int(rate * seconds))
    lengths = sharegpt_like(num, seed)
    times = np.random.default_rng(seed).exponential(1 / rate, num).cumsum()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.csv")
        rows = [f"{t:.6f},{p},{o}" for t, p, o in zip(times, lengths.prompts, lengths.outputs, strict=True)]
        path.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]) + "\n")
        options = {"dataset_name": "timed_trace", "dataset_path": str(path), "num_prompts": num, "seed": seed}
        bench = BenchArgs(port=port, ignore_eos=True, ready_check_timeout_sec=400, **options)  # type: ignore[arg-type]
        run = run_until_done(lambda: Bench(bench).run())
    assert all(record.error is None for record in run.records), [record.error for record in run.records][:3]
    firsts = sorted(1e3 * record.ttft_s for record in run.records)
    each = [1e3 * record.tpot_s for record in run.records if record.tpot_s is not None]
    total = sum(record.num_output for record in run.records)
    values = statistics.median(firsts), firsts[int(0.99 * len(firsts))], statistics.median(each)
    return dict(zip(FIGURES, (*values, total / (run.end_s - run.begin_s)), strict=True))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


START = time.perf_counter()

if __name__ == "__main__":
    main()
