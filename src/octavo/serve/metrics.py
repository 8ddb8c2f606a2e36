"""What /metrics says, under vLLM's names and in its buckets; ours beside them, under `octavo:`.

Requests are measured here, where they come in and go out. What the engine counts is read from it at each scrape.
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
from octavo.frontend.interface import ClientStats
from octavo.integers import cdiv
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import SamplingParams
from octavo.serve.openai.response import api_finish_reason

logger = logging.getLogger("octavo.serve")

# fmt: off
LATENCY_S = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN_S = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
BETWEEN_TOKENS_S = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
# fmt: on
SAMPLES = (1, 2, 5, 10, 20)
STEP_TOKENS = tuple(2**power for power in range(15))
LABELS = ("model_name", "engine")
ENDS = ("stop", "length", "abort", "error")
REFUSALS = ("invalid", "queue_full", "shutting_down")
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
WAITS = ("blocks", "rows", "budget", "in flight", "prefix in flight", "long prefill", "behind a swapped request")
"""What these counters count is there from the start, at 0: of a series that begins later, the first is not seen."""
RECENT_REQUESTS = 1000
"""Over which the hit rate of the log line is taken."""


def token_buckets(most: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    buckets = [digit * 10**power for power in range(10) for digit in (1, 2, 5)]
    return [b for b in buckets if b <= most] or [1]


class Metrics:
    """One server's. `engine` is "0", as a single engine of vLLM's is."""

    def __init__(self, model: str, max_model_len: int) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, which nothing reads
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self._engine = _EngineCollector(self._labels)
        self.registry.register(self._engine)
        tokens = token_buckets(max_model_len)
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that began to run.")
        self.prompt_tokens_cached = self._counter("vllm:prompt_tokens_cached", "Of these, found in the prefix cache.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.success = Counter(
            "vllm:request_success", "Requests that ended.", (*LABELS, "finished_reason"), registry=self.registry
        )
        self.rejections = Counter(
            "vllm:admission_rejections", "Requests refused at the door.", (*LABELS, "reason"), registry=self.registry
        )
        self.prompt_sources = Counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens of requests that began to run, by where their keys and values come from.",
            (*LABELS, "source"),
            registry=self.registry,
        )
        for source in SOURCES:
            self.prompt_sources.labels(**self._labels, source=source)
        for reason in ENDS:
            self.success.labels(**self._labels, finished_reason=reason)
        for reason in REFUSALS:
            self.rejections.labels(**self._labels, reason=reason)
        self.http_requests = Counter(
            "http_requests", "Answers.", ("method", "status", "handler"), registry=self.registry
        )
        self.http_seconds = Histogram(
            "http_request_duration_seconds", "From request to end.", ("method", "handler"), registry=self.registry
        )
        self.first_token = self._histogram("vllm:time_to_first_token_seconds", FIRST_TOKEN_S)
        self.between_tokens = self._histogram("vllm:inter_token_latency_seconds", BETWEEN_TOKENS_S)
        self.per_output_token = self._histogram("vllm:request_time_per_output_token_seconds", BETWEEN_TOKENS_S)
        self.latency = self._histogram("vllm:e2e_request_latency_seconds", LATENCY_S)
        self.queue_time = self._histogram("vllm:request_queue_time_seconds", LATENCY_S)
        self.inference_time = self._histogram("vllm:request_inference_time_seconds", LATENCY_S)
        self.prefill_time = self._histogram("vllm:request_prefill_time_seconds", LATENCY_S)
        self.decode_time = self._histogram("vllm:request_decode_time_seconds", LATENCY_S)
        self.iteration_tokens = self._histogram("vllm:iteration_tokens_total", STEP_TOKENS)
        self.request_prompt_tokens = self._histogram("vllm:request_prompt_tokens", tokens)
        self.request_generation_tokens = self._histogram("vllm:request_generation_tokens", tokens)
        self.request_n = self._histogram("vllm:request_params_n", SAMPLES)
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

    def watch(self, params: SamplingParams | BeamSearchParams, num_prompt: int, arrival: float) -> PromptTracker:
        return PromptTracker(self, params, num_prompt, arrival)

    def rejected(self, reason: str) -> None:
        self.rejections.labels(**self._labels, reason=reason).inc()

    def ended(self, reason: str) -> None:
        self.success.labels(**self._labels, finished_reason=reason).inc()

    def config(self, values: Mapping[str, Any]) -> None:
        """What the cache is like, as labels of a gauge that is 1."""
        texts = {name: str(value) for name, value in values.items()}
        info = Gauge("vllm:cache_config_info", "The KV cache.", ("engine", *texts), registry=self.registry)
        info.labels(engine="0", **texts).set(1)

    def text(self, stats: StatsSnapshot, health: Health) -> bytes:
        self._engine.stats, self._engine.health = stats, health
        return generate_latest(self.registry)

    def note_prompt(self, num_tokens: int, num_cached: int) -> None:
        self.prompt_tokens.inc(num_tokens)
        self.prompt_tokens_cached.inc(num_cached)
        for source, num in zip(SOURCES, (num_tokens - num_cached, num_cached), strict=False):
            self.prompt_sources.labels(**self._labels, source=source).inc(num)
        self.num_prompt_tokens += num_tokens
        self._recent.append((num_tokens, num_cached))

    def note_tokens(self, count: int) -> None:
        self.generation_tokens.inc(count)
        self.num_generation_tokens += count

    def note_end(self, ended: FinishedPrompt, params: SamplingParams | BeamSearchParams) -> None:
        self.ended(ended.reason)
        self.request_n.observe(params.n or 1)
        self.request_prompt_tokens.observe(ended.num_prompt)
        self.request_generation_tokens.observe(ended.num_generated)
        if params.max_tokens is not None:
            self.request_max_tokens.observe(params.max_tokens)
        self.latency.observe(ended.latency_s)
        if ended.decode_s is None:
            return
        self.request_preemptions.observe(ended.num_preemptions)
        self.request_computed.observe(ended.num_prompt - ended.num_cached)
        self.decode_time.observe(ended.decode_s)
        if ended.num_generated > 1:
            self.per_output_token.observe(ended.decode_s / (ended.num_generated - 1))
        if ended.queue_s is not None and ended.inference_s is not None and ended.prefill_s is not None:
            self.queue_time.observe(ended.queue_s)
            self.inference_time.observe(ended.inference_s)
            self.prefill_time.observe(ended.prefill_s)

    @property
    def recent_hit_rate(self) -> float:
        queried = sum(num for num, _ in self._recent)
        return sum(hits for _, hits in self._recent) / queried if queried else 0.0


@dataclass(slots=True)
class FinishedPrompt:
    """A prompt's way through the server, looked back upon. None: it did not come to that."""

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
    """One prompt on its way through the server."""

    def __init__(
        self, metrics: Metrics, params: SamplingParams | BeamSearchParams, num_prompt: int, arrival: float
    ) -> None:
        self._metrics = metrics
        self._params = params
        self._num_prompt = num_prompt
        self._arrival = arrival
        self._first: float | None = None
        self._last = arrival
        self._num_generated = self._num_samples = 0
        self._over: set[int] = set()  # samples that have ended
        self._output: RequestOutput | None = None
        self._reason = ""

    def take(self, output: RequestOutput) -> None:
        now, metrics, told = time.monotonic(), self._metrics, output.metrics
        new = told.num_generation_tokens - self._num_generated
        self._num_generated = told.num_generation_tokens
        took, num_gaps = now - self._last, new
        if self._first is None:
            self._first, self._num_samples = now, len(output.outputs)
            metrics.first_token.observe(now - self._arrival)
            metrics.note_prompt(self._num_prompt, output.num_cached_tokens)
            took, num_gaps = told.decode_time_s or 0.0, new - self._num_samples  # told too late to be told alone
        steps = cdiv(num_gaps, max(1, self._num_samples - len(self._over)))
        for _ in range(num_gaps):  # of several that came at once, each took its share
            metrics.between_tokens.observe(took / steps)
        self._over.update(c.index for c in output.outputs if c.finish_reason)
        self._last = now
        if new > 0:
            metrics.note_tokens(new)
        self._output = output
        for c in output.outputs:
            self._reason = api_finish_reason(c.finish_reason) or self._reason

    def close(self, reason: str) -> FinishedPrompt | None:
        """The request is over; `reason` is why, if the output does not say. None for one that was refused."""
        if reason == "refused":
            self._metrics.rejected("invalid")
            return None
        ended = self._ended(reason)
        self._metrics.note_end(ended, self._params)
        return ended

    def _ended(self, reason: str) -> FinishedPrompt:
        now = time.monotonic()
        finished = self._output is not None and self._output.finished
        reason = self._reason if finished and self._reason else "abort" if reason == "stop" else reason
        ended = FinishedPrompt(reason, self._num_prompt, self._num_generated, now - self._arrival)
        if self._output is None or self._first is None:
            return ended
        told, first_token_s = self._output.metrics, self._first - self._arrival
        ended.num_cached, ended.num_preemptions = self._output.num_cached_tokens, told.num_preemptions
        ended.first_token_s, ended.decode_s = first_token_s, now - self._first
        if (queued := told.time_in_queue_s) is not None:
            ended.queue_s = queued
            ended.inference_s = max(0.0, ended.latency_s - queued)
            ended.prefill_s = max(0.0, first_token_s - queued)
        return ended


class _EngineCollector:
    """The engine's own counts, as of the last look."""

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

        yield gauge("octavo:up", "Whether the engine runs.", float(self.health.state == "running"))
        yield counter("octavo:engine_restarts", "Engines that took a lost one's place.", self.health.num_restarts)
        if (stats := self.stats) is None:
            return
        engine, kv = stats.engine, stats.kv
        yield gauge("vllm:num_requests_running", "Requests that run.", stats.num_running)
        num_waiting = stats.num_waiting + stats.num_swapped
        yield gauge("vllm:num_requests_waiting", "Requests that wait.", num_waiting)
        num_deferred = stats.num_deferred if isinstance(stats, ClientStats) else 0
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "For room, or for an engine.", labels=[*names, "reason"]
        )
        reasons.add_metric([*values, "capacity"], num_waiting - num_deferred)
        reasons.add_metric([*values, "deferred"], num_deferred)
        yield reasons
        yield gauge("vllm:num_requests_swapped", "Of these, swapped out.", stats.num_swapped)
        yield counter("vllm:num_preemptions", "Preemptions.", engine.num_preemptions)
        yield counter("octavo:steps", "Steps of the engine.", engine.num_steps)
        yield counter("octavo:failed_steps", "Steps that failed.", engine.num_failed_steps)
        yield counter("octavo:bad_messages", "Messages from or to the engine dropped.", engine.num_bad_messages)
        yield counter("octavo:swap_preemptions", "Preemptions by swapping out.", engine.num_swap_preemptions)
        text = "Swapped blocks that came back with a wrong checksum, and were computed again."
        yield counter("octavo:corrupt_blocks", text, engine.num_corrupt_blocks)
        yield counter("octavo:computed_tokens", "Positions computed.", engine.num_tokens_computed)
        waits = CounterMetricFamily("octavo:waits", "How often a request came to wait.", labels=[*names, "reason"])
        for reason, count in sorted((dict.fromkeys(WAITS, 0) | stats.wait_counts).items()):
            waits.add_metric([*values, reason.replace(" ", "_")], count)
        yield waits
        if kv is None:
            return
        yield gauge("vllm:kv_cache_usage_perc", "Share of the blocks in use.", kv.num_used / max(1, kv.num_blocks))
        yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", kv.num_queried_tokens)
        yield counter("vllm:prefix_cache_hits", "Prompt tokens found.", kv.num_hit_tokens)
        blocks = GaugeMetricFamily("octavo:blocks", "Blocks by state.", labels=[*names, "state"])
        for state, count in (("used", kv.num_used), ("cached", kv.num_cached), ("free", kv.num_free)):
            blocks.add_metric([*values, state], count)
        yield blocks
        yield gauge("octavo:blocks_saved_by_sharing", "Blocks that copies would take.", kv.num_saved_by_sharing)
        yield gauge("octavo:unfilled_slots", "Slots of used blocks without a token.", kv.num_unfilled_slots)
        yield gauge("octavo:host_blocks_used", "Blocks swapped out.", kv.num_host_used)
        yield counter("octavo:blocks_copied", "Copies on write.", kv.num_copied)
        yield counter("octavo:blocks_evicted", "Cached blocks taken for new content.", kv.num_evicted)
        yield counter("octavo:blocks_swapped_out", "Blocks moved to the host.", kv.num_swapped_out)
        yield counter("octavo:blocks_swapped_in", "Blocks moved back.", kv.num_swapped_in)


class StatsLogger:
    """vLLM's line of numbers, every ten seconds in which something happened."""

    def __init__(self, metrics: Metrics, device: str) -> None:
        self._metrics = metrics
        self._device = device
        self._before = (0, 0, time.monotonic())
        self._num_preemptions = 0
        self._was_idle = True

    def tell(self, stats: StatsSnapshot) -> str | None:
        """The line; None while nothing happens."""
        metrics, (prompt, generated, then) = self._metrics, self._before
        now = time.monotonic()
        self._before = (metrics.num_prompt_tokens, metrics.num_generation_tokens, now)
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
