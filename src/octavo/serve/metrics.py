"""Prometheus metrics, with vLLM's names and buckets, and Octavo's own under `octavo:`.

Requests are measured in the server process. The engine's counters are read at each scrape.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from octavo.core.cache.kv_stats import KVStats
from octavo.engine.outputs import RequestOutput
from octavo.engine.stats import Health, StatsSnapshot
from octavo.frontend.metrics import ACCEPTED_PER_POSITION, SPECULATION_COUNTERS
from octavo.integers import cdiv
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import SamplingParams
from octavo.router.router import Router
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
    """The metrics of one server. Metrics of requests have the engine "0"; others have a series for each engine."""

    def __init__(self, model: str, max_model_len: int) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the number of series
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self._engine = _EngineCollector(model)
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

    def set_cache_config(self, caches: Sequence[KVStats]) -> None:
        """Exports the configuration of each engine's KV cache as labels of a gauge with value 1."""
        names = ("engine", "block_size", "num_gpu_blocks")
        info = Gauge("vllm:cache_config_info", "KV cache configuration.", names, registry=self.registry)
        for i, kv in enumerate(caches):
            info.labels(str(i), str(kv.block_size), str(kv.num_blocks)).set(1)

    def add_router(self, router: Router) -> None:
        self.registry.register(_RouterCollector(router))

    def render(self, engines: Sequence[EngineState]) -> bytes:
        self._engine.engines = engines
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


@dataclass(frozen=True, slots=True)
class EngineState:
    """An engine at a scrape. `number` is its label."""

    number: int
    stats: StatsSnapshot
    health: Health


class _EngineCollector:
    """Exports the counters of each engine, as of the last scrape."""

    def __init__(self, model: str) -> None:
        self.engines: Sequence[EngineState] = ()
        self._model = model

    def collect(self) -> Iterator[Metric]:
        if not self.engines:
            return
        yield self._gauge("octavo:up", "1 if the engine runs, else 0.", lambda e: float(e.health.state == "running"))
        yield self._counter("octavo:engine_restarts", "Restarts of the engine.", lambda e: e.health.num_restarts)
        yield from self._queues()
        for name, text, value in COUNTERS:
            yield self._counter(name, text, functools.partial(_of_engine, value))
        waits = CounterMetricFamily("octavo:waits", "Waits of requests, by reason.", labels=[*LABELS, "reason"])
        for engine in self.engines:
            for reason, count in sorted((dict.fromkeys(WAIT_REASONS, 0) | engine.stats.wait_counts).items()):
                waits.add_metric([*self._labels(engine), reason.replace(" ", "_")], count)
        yield waits
        yield from self._speculation()
        yield from self._ranks()
        yield from self._caches()

    def _queues(self) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", "Running requests.", lambda e: e.stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Waiting requests.", _num_waiting)
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Waiting requests by reason.", labels=[*LABELS, "reason"]
        )
        for engine in self.engines:
            num_deferred = engine.stats.num_deferred
            reasons.add_metric([*self._labels(engine), "capacity"], _num_waiting(engine) - num_deferred)
            reasons.add_metric([*self._labels(engine), "deferred"], num_deferred)
        yield reasons
        text = "Requests swapped out to host memory."
        yield self._gauge("vllm:num_requests_swapped", text, lambda e: e.stats.num_swapped)

    def _speculation(self) -> Iterator[Metric]:
        """Nothing if no engine speculates."""
        if not any(engine.stats.engine.num_accepted_per_position for engine in self.engines):
            return
        for name, text, value in SPECULATION_COUNTERS:
            yield self._counter(name, text, functools.partial(_of_engine, value))
        family = CounterMetricFamily(
            ACCEPTED_PER_POSITION, "Accepted drafts by position, from 0.", labels=[*LABELS, "position"]
        )
        for engine in self.engines:
            for position, count in enumerate(engine.stats.engine.num_accepted_per_position):
                family.add_metric([*self._labels(engine), str(position)], count)
        yield family

    def _ranks(self) -> Iterator[Metric]:
        """Nothing if no engine has several ranks."""
        for name, text, value in RANK_GAUGES if any(engine.health.ranks for engine in self.engines) else ():
            family = GaugeMetricFamily(name, text, labels=[*LABELS, "rank"])
            for engine in self.engines:
                for rank, place in enumerate(engine.health.ranks):
                    family.add_metric([*self._labels(engine), str(rank)], float(getattr(place, value)))
            yield family

    def _caches(self) -> Iterator[Metric]:
        if not any(engine.stats.kv for engine in self.engines):
            return
        text = "Fraction of blocks in use."
        yield self._gauge("vllm:kv_cache_usage_perc", text, lambda e: _of_cache("num_used", e) / _num_blocks(e))
        blocks = GaugeMetricFamily("octavo:blocks", "Blocks by state.", labels=[*LABELS, "state"])
        for engine in self.engines:
            for state in ("used", "cached", "free"):
                blocks.add_metric([*self._labels(engine), state], _of_cache(f"num_{state}", engine))
        yield blocks
        for name, text, value in CACHE_GAUGES:
            yield self._gauge(name, text, functools.partial(_of_cache, value))
        for name, text, value in CACHE_COUNTERS:
            yield self._counter(name, text, functools.partial(_of_cache, value))

    def _labels(self, engine: EngineState) -> list[str]:
        return [self._model, str(engine.number)]

    def _gauge(self, name: str, text: str, value: Callable[[EngineState], float]) -> Metric:
        return self._filled(GaugeMetricFamily(name, text, labels=LABELS), value)

    def _counter(self, name: str, text: str, value: Callable[[EngineState], float]) -> Metric:
        return self._filled(CounterMetricFamily(name, text, labels=LABELS), value)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, value: Callable[[EngineState], float]) -> Metric:
        for engine in self.engines:
            family.add_metric(self._labels(engine), value(engine))
        return family


# fmt: off
COUNTERS = (
    ("vllm:num_preemptions", "Preemptions.", "num_preemptions"),
    ("octavo:steps", "Engine steps.", "num_steps"),
    ("octavo:failed_steps", "Failed engine steps.", "num_failed_steps"),
    ("octavo:swap_preemptions", "Preemptions by swapping.", "num_swap_preemptions"),
    ("octavo:corrupt_blocks", "Swapped blocks that were recomputed after a wrong checksum.", "num_corrupt_blocks"),
    ("octavo:computed_tokens", "Computed tokens.", "num_tokens_computed"),
)
"""Name, text, and field of `EngineStats`."""
RANK_GAUGES = (
    ("octavo:rank_plan", "Plans that a tensor parallel rank has begun.", "plan"),
    ("octavo:rank_collective", "Collectives that a tensor parallel rank has entered.", "collective"),
    ("octavo:rank_age_seconds", "Seconds since a tensor parallel rank last moved on.", "age_s"),
    ("octavo:rank_behind", "1 if other ranks are further and it has not moved for a second, else 0.", "is_behind"),
)
"""Name, text, and field of `RankPlace`."""
CACHE_GAUGES = (
    ("octavo:blocks_saved_by_sharing", "Blocks saved by sharing.", "num_saved_by_sharing"),
    ("octavo:unfilled_slots", "Empty slots of used blocks.", "num_unfilled_slots"),
    ("octavo:host_blocks_used", "Blocks held in host memory.", "num_host_used"),
)
CACHE_COUNTERS = (
    ("vllm:prefix_cache_queries", "Prefix cache lookups, in tokens.", "num_queried_tokens"),
    ("vllm:prefix_cache_hits", "Prefix cache hits, in tokens.", "num_hit_tokens"),
    ("octavo:blocks_copied", "Blocks copied on write.", "num_copied"),
    ("octavo:blocks_evicted", "Cached blocks evicted for new content.", "num_evicted"),
    ("octavo:blocks_swapped_out", "Blocks copied to host memory.", "num_swapped_out"),
    ("octavo:blocks_swapped_in", "Blocks copied back to the device.", "num_swapped_in"),
)
"""Name, text, and field of `KVStats`."""
# fmt: on


def _num_waiting(engine: EngineState) -> int:
    return engine.stats.num_waiting + engine.stats.num_swapped


def _num_blocks(engine: EngineState) -> int:
    return max(1, _of_cache("num_blocks", engine))


def _of_engine(field: str, engine: EngineState) -> int:
    value: int = getattr(engine.stats.engine, field)
    return value


def _of_cache(field: str, engine: EngineState) -> int:
    """0 of an engine that has not reported yet."""
    value: int = 0 if engine.stats.kv is None else getattr(engine.stats.kv, field)
    return value


class _RouterCollector:
    """Exports what the router did, and what it knows of each engine."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        router, stats = self._router, self._router.stats
        requests = CounterMetricFamily("octavo:router_requests", "Requests by reason.", labels=["engine", "reason"])
        for (replica, why), count in sorted(stats.num_requests.items()):
            requests.add_metric([str(replica), why.replace(" ", "_")], count)
        yield requests
        for name, text, value in (
            ("octavo:router_prompt_tokens", "Prompt tokens of routed requests.", stats.num_prompt_tokens),
            ("octavo:router_hit_tokens", "Of these, cached by the chosen engine.", stats.num_hit_tokens),
            ("octavo:router_moved_requests", "Requests that left a dead engine.", stats.num_moved),
        ):
            yield CounterMetricFamily(name, text, value)
        queued = GaugeMetricFamily("octavo:router_queued_tokens", "Tokens yet to be prefilled.", labels=["engine"])
        cached = GaugeMetricFamily("octavo:router_cached_blocks", "Blocks known to be cached.", labels=["engine"])
        text = "Predicted time to first token of 1,000 tokens that are not cached."
        seconds = GaugeMetricFamily("octavo:router_predicted_seconds", text, labels=["engine"])
        for known in router.describe():
            engine = [str(known["replica"])]
            queued.add_metric(engine, known["num_queued_tokens"])
            cached.add_metric(engine, known["num_cached_blocks"])
            if known["predicted_s_of_1k_tokens"] is not None:
                seconds.add_metric(engine, known["predicted_s_of_1k_tokens"])
        yield from (queued, cached, seconds)


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
