"""Report of `octavo bench serve`: tables with the labels of `vllm bench serve`, and a JSON object with its keys."""

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
from octavo.bench.records import Record, Run
from octavo.errors import naming_file

WIDTH = 50
MAX_REASONS = 10
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")
"""Per-request lists; in the file only with `save_detailed`."""


def summary(run: Run, args: BenchArgs) -> dict[str, Any]:
    """All results under vLLM's keys. Throughputs are per second; times are in ms, in `DETAILS` in seconds."""
    good = [record for record in run.records if record.error is None]
    duration = max(run.end_s - run.begin_s, 1e-9)
    num_in, num_out = sum(r.num_prompt for r in good), sum(r.num_output for r in good)
    result: dict[str, Any] = {
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
        "request_goodput": len(_meeting_slo(good, args)) / duration if args.goodput else None,
        "output_throughput": num_out / duration,
        "total_token_throughput": (num_in + num_out) / duration,
        "max_concurrent_requests": max_concurrency(run.records),
        "failures": dict(Counter(r.error for r in run.records if r.error is not None).most_common(MAX_REASONS)),
        "input_lens": [r.num_prompt for r in run.records],
        "output_lens": [r.num_output for r in run.records],
        "ttfts": [r.ttft_s if r.error is None else 0.0 for r in run.records],
        "itls": [r.gaps for r in run.records],
        "start_times": [r.start_s - run.begin_s for r in run.records],
        "generated_texts": ["".join(r.texts) for r in run.records],
        "errors": [r.error or "" for r in run.records],
    }
    for name in METRICS:
        result |= _statistics(name, [1e3 * t for t in times_of(name, good)], args.percentiles())
    result |= dict(part.split("=", 1) for part in args.metadata)
    return result


def times_of(name: str, records: Iterable[Record]) -> list[float]:
    """A metric's times in seconds."""
    if name == "itl":
        return [gap for record in records for gap in record.gaps]
    return [t for record in records if (t := getattr(record, f"{name}_s")) is not None]


def _statistics(name: str, times: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    result = {
        f"mean_{name}_ms": statistics.fmean(times) if times else 0.0,
        f"median_{name}_ms": percentile(times, 50),
        f"std_{name}_ms": statistics.pstdev(times) if times else 0.0,
    }
    return result | {f"p{_number(p)}_{name}_ms": percentile(times, p) for p in percentiles}


def percentile(values: Sequence[float], share: float) -> float:
    """A percentile with linear interpolation; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def max_concurrency(records: Iterable[Record]) -> int:
    """Maximum number of concurrent requests. At equal times, an end precedes a start."""
    changes = [(r.start_s, 1) for r in records if r.last_s] + [(r.last_s, -1) for r in records if r.last_s]
    now = maximum = 0
    for _, change in sorted(changes):
        now += change
        maximum = max(maximum, now)
    return maximum


def _meeting_slo(records: Iterable[Record], args: BenchArgs) -> list[Record]:
    """Records that meet every objective. A record with a single token has no TPOT and meets that objective."""
    objectives = args.objectives()

    def meets(record: Record) -> bool:
        times = [(getattr(record, f"{name}_s"), max_ms) for name, max_ms in objectives.items()]
        return all(t is None or 1e3 * t <= max_ms for t, max_ms in times)

    return [record for record in records if meets(record)]


def lines(result: dict[str, Any], run: Run, args: BenchArgs) -> list[str]:
    """Lines for a terminal, with the labels that scripts for vLLM parse."""

    def row(label: str, value: Any) -> str:
        return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"

    out = [f"{' Serving Benchmark Result ':=^{WIDTH}}", row("Successful requests:", result["completed"])]
    out.append(row("Failed requests:", result["failed"]))
    if run.interrupted:
        out.append(row("Unfinished requests:", result["unfinished"]))
    if args.max_concurrency is not None:
        out.append(row("Maximum request concurrency:", args.max_concurrency))
    if args.request_rate < math.inf:
        out.append(row("Request rate configured (RPS):", float(args.request_rate)))
    out += [
        row("Benchmark duration (s):", result["duration"]),
        row("Total input tokens:", result["total_input_tokens"]),
        row("Total generated tokens:", result["total_output_tokens"]),
        row("Request throughput (req/s):", result["request_throughput"]),
    ]
    if args.goodput:
        out.append(row("Request goodput (req/s):", result["request_goodput"]))
    out += [
        row("Output token throughput (tok/s):", result["output_throughput"]),
        row("Peak concurrent requests:", result["max_concurrent_requests"]),
        row("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    for name in args.metrics():
        short = name.upper()
        out += [
            f"{METRICS[name]:-^{WIDTH}}",
            row(f"Mean {short} (ms):", result[f"mean_{name}_ms"]),
            row(f"Median {short} (ms):", result[f"median_{name}_ms"]),
        ]
        out += [row(f"P{_number(p)} {short} (ms):", result[f"p{_number(p)}_{name}_ms"]) for p in args.percentiles()]
    out.append("=" * WIDTH)
    return out + [f"{count} failed: {reason}" for reason, count in result["failures"].items()]


def save(result: dict[str, Any], args: BenchArgs) -> Path:
    """Write the JSON file: to `result_filename`, or to a name made from the load."""
    if not args.save_detailed:
        result = {name: value for name, value in result.items() if name not in DETAILS}
    model = result["model_id"].split("/")[-1]
    concurrency = f"-concurrency{args.max_concurrency}" if args.max_concurrency is not None else ""
    name = f"{args.label or args.backend}-{args.request_rate:g}qps{concurrency}-{model}-{result['date']}.json"
    path = Path(args.result_dir or ".") / (args.result_filename or name)
    path.parent.mkdir(parents=True, exist_ok=True)
    is_appending = args.append_result and path.exists() and path.stat().st_size > 0
    with naming_file(path), path.open("a" if args.append_result else "w", encoding="utf-8") as file:
        file.write(("\n" if is_appending else "") + json.dumps(result))
    return path


def _number(p: float) -> str:
    return f"{p:g}"
