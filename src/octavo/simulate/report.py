"""Results of a simulation: a dict, a text table, and charts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.errors import ParameterError, cut
from octavo.simulate.devices import Device
from octavo.simulate.plot import Area, Chart, Line
from octavo.simulate.simulation import PoolSample, Records

PERCENTILES = (50, 90, 95, 99)
UNITS = {"ms": 1e-3, "s": 1.0}
TIME = re.compile(r"(?P<name>ttft|tpot)=(?P<time>[0-9]{1,20}(\.[0-9]{1,20})?)(?P<unit>ms|s)")

NO_UNIT = re.compile(r"(ttft|tpot)=([0-9]{1,20}(?:\.[0-9]{1,20})?)")


@dataclass(frozen=True, slots=True)
class SLO:
    """Latency targets of a request: seconds to the first token (TTFT) and per further token (TPOT). None: no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> SLO:
        """Parse `ttft=500ms,tpot=50ms`; either may be absent, units are required. Raises `ParameterError`."""
        times: dict[str, float] = {}
        for part in text.split(","):
            found = TIME.fullmatch(part.strip())
            if unclear := NO_UNIT.fullmatch(part.strip()):
                name, number = unclear.groups()
                text = f"slo is {cut(repr(text))}; {name} needs a unit: {name}={number}ms or {name}={number}s"
                raise ParameterError(text, param="slo")
            if found is None or found["name"] in times or not 0 < (time := float(found["time"])) < float("inf"):
                raise ParameterError(
                    f"slo is {cut(repr(text))}; pass times with units, s or ms, such as ttft=500ms,tpot=50ms",
                    param="slo",
                )
            times[found["name"]] = time * UNITS[found["unit"]]
        return cls(times.get("ttft"), times.get("tpot"))

    def kept(self, records: Records) -> np.ndarray:
        """Requests that meet the targets: bool [num_requests]."""
        good = np.ones(len(records), dtype=bool)
        if self.ttft_s is not None:
            good &= ttft(records) <= self.ttft_s
        if self.tpot_s is not None:
            good &= tpot(records) <= self.tpot_s
        return good


def assumption(device: Device, cost_file: str = "") -> str:
    """Where the step times of a device come from."""
    if cost_file:
        return f"{device.name}: step times of {cost_file}"
    reached = f"{device.bandwidth_share:.0%} of {device.bandwidth / 1e9:,.0f} GB/s, "
    reached += f"{device.flops_share:.0%} of {device.flops / 1e12:,.0f} TFLOP/s"
    if device.source == "measured":
        return f"{device.name}: {reached}, fitted to measurements"
    origin = "published peaks" if device.source == "published" else device.source
    text = f"{device.name}: {reached}; {origin}, not measured"
    return text if device.is_supported else f"{text}; hypothetical: this engine does not run on it"


def ttft(records: Records) -> np.ndarray:
    """Seconds from arrival to the first token, [num_requests]."""
    seconds: np.ndarray = records.column("first_s") - records.column("arrived_s")
    return seconds


def tpot(records: Records) -> np.ndarray:
    """Seconds per token after the first, of the longest sample, [num_requests]; 0 for an output of one token."""
    tokens = np.maximum(1, records.column("longest") - 1)
    per_token: np.ndarray = (records.column("finished_s") - records.column("first_s")) / tokens
    return per_token


def latency(records: Records) -> np.ndarray:
    """Seconds from arrival to the end, [num_requests]."""
    total: np.ndarray = records.column("finished_s") - records.column("arrived_s")
    return total


def normalized_latency(records: Records) -> float:
    """Mean of latency / output length in seconds per token, the paper's metric (section 6.1). Skips requests of unknown
    length, such as beam searches of a recording; NaN if none is left."""
    num_output = records.column("num_output")
    known = num_output > 0
    return float((latency(records)[known] / num_output[known]).mean()) if known.any() else math.nan


def summary(records: Records, slo: SLO | None = None) -> dict[str, Any]:
    """The results as a dict. Times are in seconds; memory is the mean share of the pool's slots while requests were
    running."""
    refused = {kind: {"count": count, "first": message} for kind, (count, message) in records.refused.items()}
    if not len(records):
        return {"num_requests": 0, "num_unfinished": records.num_unfinished, "refused": refused}
    span = max(records.end_s - float(records.column("arrived_s").min()), 1e-9)
    num_hit, num_prompt = int(records.column("num_cached").sum()), int(records.column("num_prompt").sum())
    stats: dict[str, Any] = {
        "num_requests": len(records),
        "num_unfinished": records.num_unfinished,
        "num_steps": records.num_steps,
        "duration_s": span,
        "device_busy": records.busy_s / span,
        "requests_per_s": len(records) / span,
        "prompt_tokens_per_s": num_prompt / span,
        "output_tokens_per_s": int(records.column("num_output").sum()) / span,
        "ttft_s": distribution(ttft(records)),
        "tpot_s": distribution(tpot(records)[records.column("longest") > 1]),
        "latency_s": distribution(latency(records)),
        "hit_rate": num_hit / num_prompt,
        "num_preempted": dict(records.num_preempted),
        "num_waits": dict(records.num_waits),
        "refused": refused,
        "memory": memory_shares([s for s in records.samples if s.num_running]),
    }
    if records.num_replicas > 1:
        stats["replicas"] = replica_shares(records)
    if not math.isnan(normalized := normalized_latency(records)):
        stats["normalized_latency_s"] = normalized
    if slo is not None:
        good = slo.kept(records)
        stats["goodput_requests_per_s"] = float(good.sum()) / span
        stats["slo_kept"] = float(good.mean())
    return stats


def replica_shares(records: Records) -> list[dict[str, float]]:
    """Finished requests of each replica, and the share of their prompts' tokens that it had cached."""
    numbers, num_cached, num_prompt = (records.column(name) for name in ("replica", "num_cached", "num_prompt"))
    num_requests, num_hit, num_tokens = (
        np.bincount(numbers, weights, records.num_replicas) for weights in (None, num_cached, num_prompt)
    )
    rates = num_hit / np.maximum(1, num_tokens)
    return [{"num_requests": int(n), "hit_rate": float(rate)} for n, rate in zip(num_requests, rates, strict=True)]


def distribution(values: np.ndarray) -> dict[str, float]:
    """Mean and percentiles."""
    if not len(values):
        return {}
    return {"mean": float(values.mean())} | {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}


def memory_shares(samples: Seq[PoolSample]) -> dict[str, float]:
    """Mean share of the slots in each state of `MemorySplit`."""
    if not samples:
        return {}
    splits = np.array([s.split for s in samples], dtype=float)
    return dict(zip(samples[0].split._fields, (splits / splits.sum(axis=1, keepdims=True)).mean(axis=0), strict=True))


def format_summary(stats: dict[str, Any]) -> list[str]:
    """The summary as lines of text."""
    text = _recording(stats) if "replay" in stats else []
    if "trace" in stats:
        text = [
            f"{stats['model']} on {stats['num_gpus']} x {stats['gpu']}, {stats['num_blocks']:,} blocks a replica, "
            f"trace {stats['trace']}{f' at {rate:g} requests/s' if (rate := stats['rate']) else ''}",
            f"assumed        {stats['assumption']}",
            *([f"router         {stats['router']}"] if "router" in stats else []),
        ]
    if not stats["num_requests"]:
        return [*text, "no request finished", *_refusals(stats["refused"])]
    unfinished = f"; {stats['num_unfinished']:,} unfinished" if stats["num_unfinished"] else ""
    text += [
        f"{stats['num_requests']:,} requests in {stats['duration_s']:,.1f} s, {stats['num_steps']:,} steps, "
        f"device busy {stats['device_busy']:.0%}{unfinished}",
        f"throughput     {stats['requests_per_s']:.2f} requests/s, {stats['output_tokens_per_s']:,.0f} output tokens/s",
        f"{'':15}" + "".join(f"{name:>10}" for name in ("mean", *(f"p{p}" for p in PERCENTILES))),
    ]
    for name, label in (("ttft_s", "first token"), ("tpot_s", "each token"), ("latency_s", "whole request")):
        text.append(f"{label:15}" + "".join(f"{_seconds(value):>10}" for value in stats[name].values()))
    if (normalized := stats.get("normalized_latency_s")) is not None:
        text.append(f"normalised     {_seconds(normalized)} a token of output, queue and prompt included")
    if "slo_kept" in stats:
        kept, goodput = stats["slo_kept"], stats["goodput_requests_per_s"]
        wanted = stats.get("slo", "the SLO")
        text.append(f"good           {kept:.1%}, {goodput:.2f} requests/s meet {wanted}")
    text.append(
        f"prefix hits    {stats['hit_rate']:.1%} of the prompts' tokens{_of_replicas(stats.get('replicas', ()))}"
    )
    preempted = ", ".join(f"{count:,} by {how}" for how, count in sorted(stats["num_preempted"].items()))
    waits = ", ".join(f"{reason} {count:,}" for reason, count in sorted(stats["num_waits"].items()))
    text += [f"preempted      {preempted or 'none'}", f"waited for     {waits or 'nothing'}"]
    if stats["memory"]:
        memory = ", ".join(f"{name} {share:.1%}" for name, share in stats["memory"].items() if share >= 0.0005)
        text.append(f"memory         {memory}")
    return text + _refusals(stats["refused"])


def _of_replicas(replicas: Seq[dict[str, Any]]) -> str:
    rates = [replica["hit_rate"] for replica in replicas]
    return f", {min(rates):.1%} to {max(rates):.1%} a replica" if rates else ""


def _recording(stats: dict[str, Any]) -> list[str]:
    """The first lines of a replayed recording: its file and how it was replayed."""
    if not stats["exact"]:
        return [f"{stats['replay']}, with {', '.join(f'{name} {value}' for name, value in stats['settings'].items())}"]
    not_counted = [f"{stats['num_present']:,} present at the start"] if stats["num_present"] else []
    not_counted += [f"{stats['num_aborted']:,} aborted"] if stats["num_aborted"] else []
    text = [f"{stats['replay']} ({stats['why']}), as recorded"]
    text[0] += f"; not counted: {', '.join(not_counted)}" if not_counted else ""
    return text + ([f"it crashed: {stats['death']}"] if "death" in stats else [])


def _refusals(refused: dict[str, Any]) -> list[str]:
    return [f"refused {r['count']:,}: {r['first']}" for r in refused.values()]


def _seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def summary_charts(records: Records) -> list[Chart]:
    """Charts of memory and queues over time, and of request durations."""
    charts: list[Chart] = []
    if records.samples:
        times = [s.time_s for s in records.samples]
        total = sum(records.samples[0].split)
        parts = [
            Area(name, [s.split[i] / total * 100 for s in records.samples])
            for i, name in enumerate(records.samples[0].split._fields)
            if any(s.split[i] for s in records.samples)
        ]
        charts.append(Chart("Memory", "seconds", "% of the pool's slots", xs=times, areas=parts))
        queues = [
            Line(name, times, [getattr(s, f"num_{name}") for s in records.samples])
            for name in ("running", "waiting", "swapped")
        ]
        charts.append(Chart("Requests", "seconds", "requests", lines=queues))
    if len(records):
        ranks = list(range(0, 101))
        timings = [Line("first token", np.percentile(ttft(records), ranks).tolist(), ranks),
                   Line("whole request", np.percentile(latency(records), ranks).tolist(), ranks)]  # fmt: skip
        charts.append(Chart("How long requests took", "seconds", "% of requests", lines=timings, log_x=True))
    return charts
