"""Prometheus metrics, with vLLM's names and buckets, and Octavo's own under `octavo:`.

Requests are measured in the server process. The engine's counters are read at each scrape.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from octavo.engine.outputs import RequestOutput
from octavo.engine.stats import Health, StatsSnapshot
from octavo.integers import cdiv
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import SamplingParams
from octavo.serve.openai.response import api_finish_reason

logger = logging.getLogger("octavo.serve")

# fmt: off
LATENCY_BUCKETS = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TTFT_BUCKETS = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
ITL_BUCKETS = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
# fmt: on
N_BUCKETS = (1, 2, 5, 10, 20)
STEP_TOKEN_BUCKETS = tuple(2**power for power in range(15))
LABELS = ("model_name", "engine")
FINISH_REASONS = ("stop", "length", "abort", "error")
REJECTION_REASONS = ("invalid", "queue_full", "shutting_down")
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
WAIT_REASONS = ("blocks", "rows", "budget", "in flight", "prefix in flight", "long prefill", "behind a swapped request")
"""Label values that exist from the start, at 0. Prometheus does not see the first increment of a new series."""
RECENT_REQUESTS = 1000
"""Requests over which the log line's hit rate is measured."""


def token_buckets(max_tokens: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to `max_tokens`."""
    buckets = [digit * 10**power for power in range(10) for digit in (1, 2, 5)]
    return [b for b in buckets if b <= max_tokens] or [1]


class Metrics:
    """The metrics of one server. The label `engine` is "0", as for a single engine of vLLM."""

    def __init__(self, model: str, max_model_len: int) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the number of series
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self._engine = _EngineCollector(self._labels)
        self.registry.register(self._engine)
        tokens = token_buckets(max_model_len)
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that started.")
        self.prompt_tokens_cached = self._counter("vllm:prompt_tokens_cached", "Of these, prefix cache hits.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Generated tokens.")
        self.success = Counter(
            "vllm:request_success", "Finished requests.", (*LABELS, "finished_reason"), registry=self.registry
        )
        self.rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused on arrival.",
            (*LABELS, "reason"),
            registry=self.registry,
        )
        self.prompt_sources = Counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens of requests that started, by the source of their KV cache.",
            (*LABELS, "source"),
            registry=self.registry,
        )
        for source in PROMPT_SOURCES:
            self.prompt_sources.labels(**self._labels, source=source)
        for reason in FINISH_REASONS:
            self.success.labels(**self._labels, finished_reason=reason)
        for reason in REJECTION_REASONS:
            self.rejections.labels(**self._labels, reason=reason)
        self.http_requests = Counter(
            "http_requests", "HTTP responses.", ("method", "status", "handler"), registry=self.registry
        )
        self.http_seconds = Histogram(
            "http_request_duration_seconds", "Duration of HTTP requests.", ("method", "handler"), registry=self.registry
        )
        self.time_to_first_token = self._histogram("vllm:time_to_first_token_seconds", TTFT_BUCKETS)
        self.inter_token_latency = self._histogram("vllm:inter_token_latency_seconds", ITL_BUCKETS)
        self.per_output_token = self._histogram("vllm:request_time_per_output_token_seconds", ITL_BUCKETS)
        self.latency = self._histogram("vllm:e2e_request_latency_seconds", LATENCY_BUCKETS)
        self.queue_time = self._histogram("vllm:request_queue_time_seconds", LATENCY_BUCKETS)
        self.inference_time = self._histogram("vllm:request_inference_time_seconds", LATENCY_BUCKETS)
        self.prefill_time = self._histogram("vllm:request_prefill_time_seconds", LATENCY_BUCKETS)
        self.decode_time = self._histogram("vllm:request_decode_time_seconds", LATENCY_BUCKETS)
        self.iteration_tokens = self._histogram("vllm:iteration_tokens_total", STEP_TOKEN_BUCKETS)
        self.request_prompt_tokens = self._histogram("vllm:request_prompt_tokens", tokens)
        self.request_generation_tokens = self._histogram("vllm:request_generation_tokens", tokens)
        self.request_n = self._histogram("vllm:request_params_n", N_BUCKETS)
        self.request_max_tokens = self._histogram("vllm:request_params_max_tokens", tokens)
        self.request_preemptions = self._histogram("vllm:request_num_preemptions", (0, 1, 2, 5, 10, 20, 50))
        self.request_computed = self._histogram("vllm:request_prefill_kv_computed_tokens", tokens)
        self.num_prompt_tokens = self.num_generation_tokens = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT_REQUESTS)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, buckets: Sequence[float]) -> Histogram:
        text = name.partition(":")[2].replace("_", " ").capitalize() + "."
        return Histogram(name, text, LABELS, buckets=buckets, registry=self.registry).labels(**self._labels)

    def track(self, params: SamplingParams | BeamSearchParams, num_prompt: int, arrival: float) -> PromptTracker:
        return PromptTracker(self, params, num_prompt, arrival)

    def count_rejection(self, reason: str) -> None:
        self.rejections.labels(**self._labels, reason=reason).inc()

    def count_finish(self, reason: str) -> None:
        self.success.labels(**self._labels, finished_reason=reason).inc()

    def set_cache_config(self, values: Mapping[str, Any]) -> None:
        """Exports the KV cache's configuration as labels of a gauge with value 1."""
        texts = {name: str(value) for name, value in values.items()}
        info = Gauge("vllm:cache_config_info", "KV cache configuration.", ("engine", *texts), registry=self.registry)
        info.labels(engine="0", **texts).set(1)

    def render(self, stats: StatsSnapshot, health: Health) -> bytes:
        self._engine.stats, self._engine.health = stats, health
        return generate_latest(self.registry)

    def record_prompt(self, num_tokens: int, num_cached: int) -> None:
        self.prompt_tokens.inc(num_tokens)
        self.prompt_tokens_cached.inc(num_cached)
        for source, num in zip(PROMPT_SOURCES, (num_tokens - num_cached, num_cached), strict=False):
            self.prompt_sources.labels(**self._labels, source=source).inc(num)
        self.num_prompt_tokens += num_tokens
        self._recent.append((num_tokens, num_cached))

    def record_tokens(self, count: int) -> None:
        self.generation_tokens.inc(count)
        self.num_generation_tokens += count

    def record_finish(self, finished: FinishedPrompt, params: SamplingParams | BeamSearchParams) -> None:
        self.count_finish(finished.reason)
        self.request_n.observe(params.n or 1)
        self.request_prompt_tokens.observe(finished.num_prompt)
        self.request_generation_tokens.observe(finished.num_generated)
        if params.max_tokens is not None:
            self.request_max_tokens.observe(params.max_tokens)
        self.latency.observe(finished.latency_s)
        if finished.decode_s is None:
            return
        self.request_preemptions.observe(finished.num_preemptions)
        self.request_computed.observe(finished.num_prompt - finished.num_cached)
        self.decode_time.observe(finished.decode_s)
        if finished.num_generated > 1:
            self.per_output_token.observe(finished.decode_s / (finished.num_generated - 1))
        if finished.queue_s is not None and finished.inference_s is not None and finished.prefill_s is not None:
            self.queue_time.observe(finished.queue_s)
            self.inference_time.observe(finished.inference_s)
            self.prefill_time.observe(finished.prefill_s)

    @property
    def recent_hit_rate(self) -> float:
        num_queried = sum(num for num, _ in self._recent)
        return sum(num_hits for _, num_hits in self._recent) / num_queried if num_queried else 0.0


@dataclass(slots=True)
class FinishedPrompt:
    """Statistics of a finished prompt. None: the phase was not reached."""

    reason: str
    num_prompt: int
    num_generated: int
    latency_s: float
    num_cached: int = 0
    num_preemptions: int = 0
    first_token_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    inference_s: float | None = None


class PromptTracker:
    """Measures one prompt from arrival to end."""

    def __init__(
        self, metrics: Metrics, params: SamplingParams | BeamSearchParams, num_prompt: int, arrival: float
    ) -> None:
        self._metrics = metrics
        self._params = params
        self._num_prompt = num_prompt
        self._arrival = arrival
        self._first_token_at: float | None = None
        self._last_token_at = arrival
        self._num_generated = self._num_samples = 0
        self._finished_samples: set[int] = set()
        self._output: RequestOutput | None = None
        self._reason = ""

    def record(self, output: RequestOutput) -> None:
        now, metrics, stats = time.monotonic(), self._metrics, output.metrics
        num_new = stats.num_generation_tokens - self._num_generated
        self._num_generated = stats.num_generation_tokens
        elapsed_s, num_gaps = now - self._last_token_at, num_new
        if self._first_token_at is None:
            self._first_token_at, self._num_samples = now, len(output.outputs)
            metrics.time_to_first_token.observe(now - self._arrival)
            metrics.record_prompt(self._num_prompt, output.num_cached_tokens)
            elapsed_s, num_gaps = stats.decode_time_s or 0.0, num_new - self._num_samples  # several tokens came at once
        steps = cdiv(num_gaps, max(1, self._num_samples - len(self._finished_samples)))
        for _ in range(num_gaps):  # tokens that arrive together share the time evenly
            metrics.inter_token_latency.observe(elapsed_s / steps)
        self._finished_samples.update(c.index for c in output.outputs if c.finish_reason)
        self._last_token_at = now
        if num_new > 0:
            metrics.record_tokens(num_new)
        self._output = output
        for c in output.outputs:
            self._reason = api_finish_reason(c.finish_reason) or self._reason

    def close(self, reason: str) -> FinishedPrompt | None:
        """Records the end of the request. `reason` is used if the output has none. Returns None if it was refused."""
        if reason == "refused":
            self._metrics.count_rejection("invalid")
            return None
        finished = self._statistics(reason)
        self._metrics.record_finish(finished, self._params)
        return finished

    def _statistics(self, reason: str) -> FinishedPrompt:
        now = time.monotonic()
        is_finished = self._output is not None and self._output.finished
        reason = self._reason if is_finished and self._reason else "abort" if reason == "stop" else reason
        finished = FinishedPrompt(reason, self._num_prompt, self._num_generated, now - self._arrival)
        if self._output is None or self._first_token_at is None:
            return finished
        stats, first_token_s = self._output.metrics, self._first_token_at - self._arrival
        finished.num_cached, finished.num_preemptions = self._output.num_cached_tokens, stats.num_preemptions
        finished.first_token_s, finished.decode_s = first_token_s, now - self._first_token_at
        if (queue_s := stats.time_in_queue_s) is not None:
            finished.queue_s = queue_s
            finished.inference_s = max(0.0, finished.latency_s - queue_s)
            finished.prefill_s = max(0.0, first_token_s - queue_s)
        return finished


class _EngineCollector:
    """Exports the engine's counters, as of the last scrape."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.stats: StatsSnapshot | None = None
        self.health = Health("starting", 0.0)
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        names, values = list(self._labels), list(self._labels.values())

        def gauge(name: str, text: str, value: float) -> Metric:
            family = GaugeMetricFamily(name, text, labels=names)
            family.add_metric(values, value)
            return family

        def counter(name: str, text: str, value: float) -> Metric:
            family = CounterMetricFamily(name, text, labels=names)
            family.add_metric(values, value)
            return family

        yield gauge("octavo:up", "1 if the engine runs, else 0.", float(self.health.state == "running"))
        yield counter("octavo:engine_restarts", "Restarts of the engine.", self.health.num_restarts)
        if (stats := self.stats) is None:
            return
        engine, kv = stats.engine, stats.kv
        yield gauge("vllm:num_requests_running", "Running requests.", stats.num_running)
        num_waiting = stats.num_waiting + stats.num_swapped
        yield gauge("vllm:num_requests_waiting", "Waiting requests.", num_waiting)
        num_deferred = stats.num_deferred
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Waiting requests by reason.", labels=[*names, "reason"]
        )
        reasons.add_metric([*values, "capacity"], num_waiting - num_deferred)
        reasons.add_metric([*values, "deferred"], num_deferred)
        yield reasons
        yield gauge("vllm:num_requests_swapped", "Requests swapped out to host memory.", stats.num_swapped)
        yield counter("vllm:num_preemptions", "Preemptions.", engine.num_preemptions)
        yield counter("octavo:steps", "Engine steps.", engine.num_steps)
        yield counter("octavo:failed_steps", "Failed engine steps.", engine.num_failed_steps)
        yield counter("octavo:swap_preemptions", "Preemptions by swapping.", engine.num_swap_preemptions)
        text = "Swapped blocks that were recomputed after a wrong checksum."
        yield counter("octavo:corrupt_blocks", text, engine.num_corrupt_blocks)
        yield counter("octavo:computed_tokens", "Computed tokens.", engine.num_tokens_computed)
        waits = CounterMetricFamily("octavo:waits", "Waits of requests, by reason.", labels=[*names, "reason"])
        for reason, count in sorted((dict.fromkeys(WAIT_REASONS, 0) | stats.wait_counts).items()):
            waits.add_metric([*values, reason.replace(" ", "_")], count)
        yield waits
        if kv is None:
            return
        yield gauge("vllm:kv_cache_usage_perc", "Fraction of blocks in use.", kv.num_used / max(1, kv.num_blocks))
        yield counter("vllm:prefix_cache_queries", "Prefix cache lookups, in tokens.", kv.num_queried_tokens)
        yield counter("vllm:prefix_cache_hits", "Prefix cache hits, in tokens.", kv.num_hit_tokens)
        blocks = GaugeMetricFamily("octavo:blocks", "Blocks by state.", labels=[*names, "state"])
        for state, count in (("used", kv.num_used), ("cached", kv.num_cached), ("free", kv.num_free)):
            blocks.add_metric([*values, state], count)
        yield blocks
        yield gauge("octavo:blocks_saved_by_sharing", "Blocks saved by sharing.", kv.num_saved_by_sharing)
        yield gauge("octavo:unfilled_slots", "Empty slots of used blocks.", kv.num_unfilled_slots)
        yield gauge("octavo:host_blocks_used", "Blocks held in host memory.", kv.num_host_used)
        yield counter("octavo:blocks_copied", "Blocks copied on write.", kv.num_copied)
        yield counter("octavo:blocks_evicted", "Cached blocks evicted for new content.", kv.num_evicted)
        yield counter("octavo:blocks_swapped_out", "Blocks copied to host memory.", kv.num_swapped_out)
        yield counter("octavo:blocks_swapped_in", "Blocks copied back to the device.", kv.num_swapped_in)


class StatsLogger:
    """Formats vLLM's periodic line of throughput and cache usage."""

    def __init__(self, metrics: Metrics, device: str) -> None:
        self._metrics = metrics
        self._device = device
        self._previous = (0, 0, time.monotonic())
        self._num_preemptions = 0
        self._was_idle = True

    def line(self, stats: StatsSnapshot) -> str | None:
        """The log line since the last call; None while the server stays idle."""
        metrics, (prompt, generated, then) = self._metrics, self._previous
        now = time.monotonic()
        self._previous = (metrics.num_prompt_tokens, metrics.num_generation_tokens, now)
        elapsed_s = max(now - then, 1e-9)
        prompt_rate = (metrics.num_prompt_tokens - prompt) / elapsed_s
        rate = (metrics.num_generation_tokens - generated) / elapsed_s
        preemptions = stats.engine.num_preemptions - self._num_preemptions
        self._num_preemptions = stats.engine.num_preemptions
        num_waiting = stats.num_waiting + stats.num_swapped
        idle = not (prompt_rate or rate or stats.num_running or num_waiting)
        self._was_idle, was_idle = idle, self._was_idle
        if idle and was_idle:
            return None
        usage = 0.0 if stats.kv is None else stats.kv.num_used / max(1, stats.kv.num_blocks)
        return (
            f"Engine 000: Avg prompt throughput: {prompt_rate:.1f} tokens/s, "
            f"Avg generation throughput: {rate:.1f} tokens/s, Running: {stats.num_running} reqs, "
            f"Waiting: {num_waiting} reqs, "
            + (f"Preemptions: {preemptions}, " if preemptions else "")
            + f"{self._device} KV cache usage: {100 * usage:.1f}%, "
            f"Prefix cache hit rate: {100 * metrics.recent_hit_rate:.1f}%"
        )
