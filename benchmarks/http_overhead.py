"""What HTTP costs: a server of ours beside the same engine without one, on this machine, in one run.

    python benchmarks/http_overhead.py [--model NAME] [--rounds 7] [--streams 64] [--json]

On a GPU both engines stand on one device, each with its share of the memory, and one waits while the other works:

    python benchmarks/http_overhead.py --model Qwen/Qwen3-0.6B --streams 256 --prompt 128 --output 256 --share 0.4

Both are given the same prompts, as text, greedy, every answer of one length; neither caches prefixes. The server is
`octavo serve` with its two processes, its client is `octavo bench serve`'s and runs on the same cores; offline is
`LLM.generate` in this process. They take turns, and whoever waits is idle.

    throughput   output tokens a second of all streams together; medians, and the median of each round's ratio
    processor    seconds that the processes took for it, which others on the machine disturb less
    between      of the seconds between two pieces of an answer, at the client: the median, and the 99th percentile over
                 it; a piece may hold several tokens
    first token  of one prompt on an idle server, by turns one by one; medians, and the median of what HTTP adds

What other processes use of the machine meanwhile is told; a round in which it was more than a tenth is repeated, while
there is patience left (--patience).
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

QUIET = 0.1
"""Share of the machine that others may use in a round that counts."""
FIRST_PROMPT = 128
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, which are as fast")
    parser.add_argument("--share", type=float, help="of a GPU's memory, for each of the two engines")
    parser.add_argument("--firsts", type=int, default=40, help="first tokens that are timed")
    parser.add_argument("--patience", type=int, default=14, metavar="N", help="rounds that may be repeated")
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
        if args.share:  # both look at how much memory is free: one after the other
            ask(port, num_prompts=1, random_input_len=8, random_output_len=1)
        with LLM(args.model, enable_prefix_caching=False, **options) as llm:
            told = {"streams": args.streams} | measure(llm, port, server.pid, args)
    finally:
        server.terminate()
        server.wait()
    print(json.dumps(told) if args.json else "\n".join(f"{name:<36}{value}" for name, value in told.items()))


def measure(llm: LLM, port: int, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    many = {"num_prompts": args.streams, "random_input_len": args.prompt, "random_output_len": args.output}
    rounds: list[Figures] = []
    for attempt in range(1 + args.rounds + args.patience):
        others = Others(pid)
        before = used_s(pid)
        run = ask(port, **many, seed=attempt)
        between = used_s(pid)
        prompts = [record.sample.prompt for record in run.records]
        offline_s = generate(llm, prompts, args.output)
        after = used_s(pid)
        assert all(record.error is None for record in run.records) and run.records[0].num_output == args.output
        if not attempt:  # the first warms up
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
        if sum(figures["others"] <= QUIET for figures in rounds) == args.rounds:
            break
    kept = sorted(rounds, key=lambda figures: figures["others"])[: args.rounds]
    added, over_http, without = first_tokens(llm, port, args.firsts)

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
        "first token offline, ms": round(1e3 * statistics.median(without), 2),
        "HTTP adds, ms (median of pairs)": round(1e3 * statistics.median(added), 2),
        "HTTP adds, ms (fastest of each)": round(1e3 * (min(over_http) - min(without)), 2),
    }


def ask(port: int, **options: Any) -> Run:
    asked = BenchArgs(port=port, ignore_eos=True, ready_check_timeout_sec=180, **options)
    return run_until_done(lambda: Bench(asked).run())


def first_tokens(llm: LLM, port: int, num: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds: what HTTP adds in each pair, and to the first token either way."""
    added, over_http, without = [], [], []
    for i in range(num):
        options = {"num_prompts": 1, "random_input_len": FIRST_PROMPT, "random_output_len": 1}
        (record,) = ask(port, **options, seed=1000 + i, num_warmups=1).records
        generate(llm, [record.sample.prompt], 1)
        without.append(generate(llm, [record.sample.prompt], 1))
        over_http.append(record.ttft_s)
        added.append(over_http[-1] - without[-1])
    return added, over_http, without


def generate(llm: LLM, prompts: list[str], num_output: int) -> float:
    """Seconds."""
    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - begin
    assert all(len(output.outputs[0].token_ids) == num_output for output in outputs)
    return took


class Others:
    """What processes beside this one and the server's use of the machine, from here on."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._begin, self._used = time.perf_counter(), self._now()

    def share(self) -> float:
        return (self._now() - self._used) / (time.perf_counter() - self._begin) / (os.cpu_count() or 1)

    def _now(self) -> float:
        user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
        ticks = user + nice + system + irq + softirq
        return ticks / os.sysconf("SC_CLK_TCK") - sum(used_s(self._pid).values())


def used_s(pid: int) -> dict[str, float]:
    """Processor seconds of this process, the server's own, and its engine's with whatever else it has started."""
    return {"client": _used_s(os.getpid()), "api": _used_s(pid), "engine": sum(map(_used_s, _children(pid)))}


def _children(pid: int) -> list[int]:
    text = [Path(task, "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [int(child) for part in text for child in part.split()]


def _used_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
