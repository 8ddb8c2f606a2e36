"""What `octavo bench serve` tells: the tables of `vllm bench serve`, by its labels, and a JSON object with its keys."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from octavo.bench.args import METRICS, BenchArgs
from octavo.bench.serve import Record, Run

WIDTH = 50
MOST_REASONS = 10
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")
"""Of each request: in the file only if it was asked for."""


def summary(run: Run, args: BenchArgs) -> dict[str, Any]:
    """Everything, under vLLM's names: throughputs a second, times in ms but for the details', which are in seconds."""
    good = [record for record in run.records if record.error is None]
    duration = max(run.end_s - run.begin_s, 1e-9)
    num_in, num_out = sum(r.num_prompt for r in good), sum(r.num_output for r in good)
    told: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": run.model,
        "tokenizer_id": args.tokenizer or run.model,
        "dataset_name": args.dataset_name,
        "num_prompts": run.num_samples,
        "request_rate": args.request_rate if args.request_rate < math.inf else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "duration": duration,
        "completed": len(good),
        "failed": len(run.records) - len(good),
        "unfinished": run.num_samples - len(run.records),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(good) / duration,
        "request_goodput": len(_keeping(good, args)) / duration if args.goodput else None,
        "output_throughput": num_out / duration,
        "total_token_throughput": (num_in + num_out) / duration,
        "max_concurrent_requests": most_at_once(run.records),
        "failures": dict(Counter(r.error for r in run.records if r.error is not None).most_common(MOST_REASONS)),
        "input_lens": [r.num_prompt for r in run.records],
        "output_lens": [r.num_output for r in run.records],
        "ttfts": [r.ttft_s if r.error is None else 0.0 for r in run.records],
        "itls": [r.gaps for r in run.records],
        "start_times": [r.start_s - run.begin_s for r in run.records],
        "generated_texts": ["".join(r.texts) for r in run.records],
        "errors": [r.error or "" for r in run.records],
    }
    for name in METRICS:
        told |= _statistics(name, [1e3 * t for t in times_of(name, good)], args.percentiles())
    told |= dict(part.split("=", 1) for part in args.metadata)
    return told


def times_of(name: str, records: Iterable[Record]) -> list[float]:
    """Of a metric, in seconds."""
    if name == "itl":
        return [gap for record in records for gap in record.gaps]
    return [t for record in records if (t := getattr(record, f"{name}_s")) is not None]


def _statistics(name: str, times: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    told = {
        f"mean_{name}_ms": statistics.fmean(times) if times else 0.0,
        f"median_{name}_ms": percentile(times, 50),
        f"std_{name}_ms": statistics.pstdev(times) if times else 0.0,
    }
    return told | {f"p{_number(p)}_{name}_ms": percentile(times, p) for p in percentiles}


def percentile(values: Sequence[float], share: float) -> float:
    """Between two values by a straight line; of none, 0."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def most_at_once(records: Iterable[Record]) -> int:
    """Requests under way together at most; one that ends when another begins makes room for it."""
    changes = [(r.start_s, 1) for r in records if r.last_s] + [(r.last_s, -1) for r in records if r.last_s]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def _keeping(records: Iterable[Record], args: BenchArgs) -> list[Record]:
    """Those that keep every objective; one without a time, for want of a second token, keeps it."""
    objectives = args.objectives()

    def keeps(record: Record) -> bool:
        times = [(getattr(record, f"{name}_s"), most_ms) for name, most_ms in objectives.items()]
        return all(t is None or 1e3 * t <= most_ms for t, most_ms in times)

    return [record for record in records if keeps(record)]


def lines(told: dict[str, Any], run: Run, args: BenchArgs) -> list[str]:
    """For a terminal, and for scripts that look for vLLM's labels."""

    def row(label: str, value: Any) -> str:
        return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"

    out = [f"{' Serving Benchmark Result ':=^{WIDTH}}", row("Successful requests:", told["completed"])]
    out.append(row("Failed requests:", told["failed"]))
    if run.interrupted:
        out.append(row("Unfinished requests:", told["unfinished"]))
    if args.max_concurrency is not None:
        out.append(row("Maximum request concurrency:", args.max_concurrency))
    if args.request_rate < math.inf:
        out.append(row("Request rate configured (RPS):", float(args.request_rate)))
    out += [
        row("Benchmark duration (s):", told["duration"]),
        row("Total input tokens:", told["total_input_tokens"]),
        row("Total generated tokens:", told["total_output_tokens"]),
        row("Request throughput (req/s):", told["request_throughput"]),
    ]
    if args.goodput:
        out.append(row("Request goodput (req/s):", told["request_goodput"]))
    out += [
        row("Output token throughput (tok/s):", told["output_throughput"]),
        row("Peak concurrent requests:", told["max_concurrent_requests"]),
        row("Total token throughput (tok/s):", told["total_token_throughput"]),
    ]
    for name in args.metrics():
        short = name.upper()
        out += [
            f"{METRICS[name]:-^{WIDTH}}",
            row(f"Mean {short} (ms):", told[f"mean_{name}_ms"]),
            row(f"Median {short} (ms):", told[f"median_{name}_ms"]),
        ]
        out += [row(f"P{_number(p)} {short} (ms):", told[f"p{_number(p)}_{name}_ms"]) for p in args.percentiles()]
    out.append("=" * WIDTH)
    return out + [f"{count} failed: {reason}" for reason, count in told["failures"].items()]


def save(told: dict[str, Any], args: BenchArgs) -> Path:
    """To `result_filename`, or one named after the load."""
    if not args.save_detailed:
        told = {name: value for name, value in told.items() if name not in DETAILS}
    model = told["model_id"].split("/")[-1]
    at_once = f"-concurrency{args.max_concurrency}" if args.max_concurrency is not None else ""
    name = f"{args.label or args.backend}-{args.request_rate:g}qps{at_once}-{model}-{told['date']}.json"
    path = Path(args.result_dir or ".") / (args.result_filename or name)
    path.parent.mkdir(parents=True, exist_ok=True)
    more = args.append_result and path.exists() and path.stat().st_size > 0
    with path.open("a" if args.append_result else "w", encoding="utf-8") as file:
        file.write(("\n" if more else "") + json.dumps(told))
    return path


def _number(p: float) -> str:
    return f"{p:g}"
