"""Overhead of HTTP: Octavo's server relative to the same engine offline, on one machine, in one run.

    python benchmarks/http_overhead.py [--model NAME] [--rounds 7] [--streams 64] [--json]

On a GPU both engines use one device, each with its share of the memory, and one idles while the other runs:

    python benchmarks/http_overhead.py --model Qwen/Qwen3-0.6B --streams 256 --prompt 128 --output 256 --share 0.4

Both get the same text prompts, decode greedily to a fixed output length, and use no prefix cache. The server is
`octavo serve` with its two processes. Its client is that of `octavo bench serve` and runs on the same cores. Offline is
`LLM.generate` in this process. The two alternate, and one idles while the other runs.

    throughput   output tokens a second over all streams: medians, and the median of each round's ratio
    processor    CPU seconds of the processes, which other programs on the machine disturb less
    between      time between two chunks of a stream at the client: the median, and the 99th percentile over the median;
                 a chunk may hold several tokens
    first token  of one prompt on an idle server, alternating: medians, and the median time that HTTP adds

The report includes the share of the machine that other processes used. A round with more than 10 % is repeated, at most
--patience times in total.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.bench.args import BenchArgs
from octavo.bench.records import Run
from octavo.bench.serve import Bench, run_until_done

MAX_OTHERS = 0.1
"""Share of the machine that other processes may use in a round that counts."""
FIRST_PROMPT = 128
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64, help="tokens per prompt")
    parser.add_argument("--output", type=int, default=64, help="output tokens per request")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, which give the same speed")
    parser.add_argument("--share", type=float, help="share of the GPU's memory for each of the two engines")
    parser.add_argument("--firsts", type=int, default=40, help="number of timed first tokens")
    parser.add_argument("--patience", type=int, default=14, metavar="N", help="maximum number of repeated rounds")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    port = _free_port()
    command = [sys.executable, "-m", "octavo.cli.main", "serve", args.model, "--port", str(port)]
    command += ["--no-enable-prefix-caching", "--uvicorn-log-level", "warning", "--disable-log-stats"]
    options: dict[str, Any] = {"load_format": args.load_format}
    if args.share:
        options["gpu_memory_utilization"] = args.share
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    server = subprocess.Popen(command)
    try:
        if args.share:  # both read the free memory at start-up, so the server starts first
            run_client(port, num_prompts=1, random_input_len=8, random_output_len=1)
        with LLM(args.model, enable_prefix_caching=False, **options) as llm:
            results = {"streams": args.streams} | measure(llm, port, server.pid, args)
    finally:
        server.terminate()
        server.wait()
    print(json.dumps(results) if args.json else "\n".join(f"{name:<36}{value}" for name, value in results.items()))


def measure(llm: LLM, port: int, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    workload = {"num_prompts": args.streams, "random_input_len": args.prompt, "random_output_len": args.output}
    rounds: list[Figures] = []
    for attempt in range(1 + args.rounds + args.patience):
        others = Others(pid)
        before = cpu_s(pid)
        run = run_client(port, **workload, seed=attempt)
        between = cpu_s(pid)
        prompts = [record.sample.prompt for record in run.records]
        offline_s = generate(llm, prompts, args.output)
        after = cpu_s(pid)
        assert all(record.error is None for record in run.records) and run.records[0].num_output == args.output
        if not attempt:  # the first round warms up
            continue
        num = args.streams * args.output
        http_s = run.end_s - run.begin_s
        figures = {"others": others.share(), "http": num / http_s, "offline": num / offline_s}
        figures["ratio"] = figures["http"] / figures["offline"]
        gaps = [gap for record in run.records for gap in record.gaps]
        figures["gap"] = 1e3 * statistics.median(gaps)
        figures["slow gap"] = 1e3 * statistics.quantiles(gaps, n=100)[98]
        figures["slower"] = figures["slow gap"] / figures["gap"]
        for name in before:
            figures[f"{name} cpu"] = 1e3 * (between[name] - before[name]) / num
        figures["offline cpu"] = 1e3 * (after["client"] - between["client"]) / num
        rounds.append(figures)
        if sum(figures["others"] <= MAX_OTHERS for figures in rounds) == args.rounds:
            break
    kept = sorted(rounds, key=lambda figures: figures["others"])[: args.rounds]
    added, over_http, offline = first_tokens(llm, port, args.firsts)

    def median(name: str, digits: int = 1) -> float:
        return round(statistics.median(figures[name] for figures in kept), digits)

    return {
        "HTTP, tokens/s": median("http"),
        "offline, tokens/s": median("offline"),
        "ratio": median("ratio", 3),
        "ratios": [round(figures["ratio"], 3) for figures in kept],
        "others used of the machine": [round(figures["others"], 2) for figures in kept],
        "between pieces, ms": median("gap", 2),
        "between pieces, p99, ms": median("slow gap", 2),
        "p99 over the median": median("slower", 2),
        "offline, ms of processor a token": median("offline cpu", 3),
        "HTTP: its engine": median("engine cpu", 3),
        "HTTP: the API's process": median("api cpu", 3),
        "HTTP: its client": median("client cpu", 3),
        "first token over HTTP, ms": round(1e3 * statistics.median(over_http), 2),
        "first token offline, ms": round(1e3 * statistics.median(offline), 2),
        "HTTP adds, ms (median of pairs)": round(1e3 * statistics.median(added), 2),
        "HTTP adds, ms (fastest of each)": round(1e3 * (min(over_http) - min(offline)), 2),
    }


def run_client(port: int, **options: Any) -> Run:
    bench_args = BenchArgs(port=port, ignore_eos=True, ready_check_timeout_sec=180, **options)
    return run_until_done(lambda: Bench(bench_args).run())


def first_tokens(llm: LLM, port: int, num: int) -> tuple[list[float], list[float], list[float]]:
    """Time that HTTP adds in each pair, and time to first token over HTTP and offline. In seconds."""
    added, over_http, offline = [], [], []
    for i in range(num):
        options = {"num_prompts": 1, "random_input_len": FIRST_PROMPT, "random_output_len": 1}
        (record,) = run_client(port, **options, seed=1000 + i, num_warmups=1).records
        generate(llm, [record.sample.prompt], 1)
        offline.append(generate(llm, [record.sample.prompt], 1))
        over_http.append(record.ttft_s)
        added.append(over_http[-1] - offline[-1])
    return added, over_http, offline


def generate(llm: LLM, prompts: list[str], num_output: int) -> float:
    """Run the prompts offline and return the seconds."""
    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - begin
    assert all(len(output.outputs[0].token_ids) == num_output for output in outputs)
    return took


class Others:
    """Measures the share of the machine that other processes use from its creation on."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._begin, self._used = time.perf_counter(), self._now()

    def share(self) -> float:
        return (self._now() - self._used) / (time.perf_counter() - self._begin) / (os.cpu_count() or 1)

    def _now(self) -> float:
        user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
        ticks = user + nice + system + irq + softirq
        return ticks / os.sysconf("SC_CLK_TCK") - sum(cpu_s(self._pid).values())


def cpu_s(pid: int) -> dict[str, float]:
    """CPU seconds of this process, of the server's API process, and of its child processes, mainly the engine."""
    return {"client": _cpu_s(os.getpid()), "api": _cpu_s(pid), "engine": sum(map(_cpu_s, _children(pid)))}


def _children(pid: int) -> list[int]:
    text = [Path(task, "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [int(child) for part in text for child in part.split()]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
