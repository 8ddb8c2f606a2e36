"""`LLM.get_metrics`: the engine's counters and gauges as a list, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.stats import StatsSnapshot

SPECULATION_COUNTERS = (
    ("vllm:spec_decode_num_drafts", "Forward passes of a sequence with drafts.", "num_drafted_passes"),
    ("vllm:spec_decode_num_draft_tokens", "Drafts of these passes.", "num_draft_tokens"),
    ("vllm:spec_decode_num_accepted_tokens", "Of these, drafts that were right.", "num_accepted_tokens"),
)
"""Name, text, and field of `EngineStats`. Only an engine that speculates has them."""
ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclass
class Metric:
    """A value of the engine."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclass
class Vector(Metric):
    """Several counters in order."""

    values: list[int]


@dataclass
class Histogram(Metric):
    """Observations in buckets. The metrics of an `LLM` have none; the server's are at /metrics."""

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of(model: str, stats: StatsSnapshot) -> list[Metric]:
    """The metrics of an engine in this process."""
    engine, kv = stats.engine, stats.kv
    assert kv is not None
    counters = {
        "vllm:prompt_tokens": engine.num_prompt_tokens,
        "vllm:generation_tokens": engine.num_generation_tokens,
        "vllm:num_preemptions": engine.num_preemptions,
        "vllm:prefix_cache_queries": kv.num_queried_tokens,
        "vllm:prefix_cache_hits": kv.num_hit_tokens,
        "octavo:steps": engine.num_steps,
        "octavo:computed_tokens": engine.num_tokens_computed,
    }
    if engine.num_accepted_per_position:
        counters |= {name: getattr(engine, field) for name, _, field in SPECULATION_COUNTERS}
    gauges = {
        "vllm:num_requests_running": stats.num_running,
        "vllm:num_requests_waiting": stats.num_waiting,
        "vllm:kv_cache_usage_perc": kv.num_used / max(1, kv.num_blocks),
    }
    labels = {"model_name": model, "engine": "0"}
    found: list[Metric] = [Counter(name, dict(labels), value) for name, value in counters.items()]
    if accepted := engine.num_accepted_per_position:
        found.append(Vector(ACCEPTED_PER_POSITION, dict(labels), list(accepted)))
    return found + [Gauge(name, dict(labels), value) for name, value in gauges.items()]
