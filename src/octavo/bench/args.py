"""`BenchArgs`: arguments of `octavo bench serve`, with the names and meanings of `vllm bench serve`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from octavo.errors import ParameterError
from octavo.params.validation import ValidatedParams, invalid

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
PATHS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
Backend = Literal["openai", "vllm", "openai-chat"]
DatasetName = Literal["random", "sharegpt", "prefix_repetition", "timed_trace"]
MAX_COUNT = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchArgs(ValidatedParams):
    """The load, the server, and the report.

    backend                 API: completions (openai, vllm) or chat completions (openai-chat)
    base_url                address of the server, such as http://localhost:8000; takes precedence over host and port
    host, port              the server's address
    endpoint                path of the requests; None: the backend's
    model                   the requests' model; None: the server's first
    tokenizer               a local model whose tokenizer counts lengths; None: the server's /tokenize
    header                  further headers, NAME=VALUE; a key is also read from OPENAI_API_KEY or OCTAVO_API_KEY
    dataset_name            the workload: see `samples`
    dataset_path            the file of sharegpt (JSON) or timed_trace (Mooncake JSONL, Azure or Vidur CSV)
    num_prompts             requests; a file may have fewer
    request_rate            requests per second; inf: all at once, or at the trace's times
    burstiness              shape of the gaps' gamma distribution; 1 is a Poisson process, less is burstier
    max_concurrency         maximum number of concurrent requests; None: unlimited
    seed                    seed of lengths, words and gaps
    random_input_len        random: tokens per prompt
    random_output_len       random: tokens per output
    random_range_ratio      random: relative spread of lengths around these; 0: none
    random_prefix_len       random: tokens of a prefix that all prompts share
    sharegpt_output_len     sharegpt: tokens per output; None: the file's
    disable_shuffle         sharegpt, prefix_repetition: keep the order
    prefix_repetition_prefix_len  prefix_repetition: tokens per shared prefix
    prefix_repetition_suffix_len  prefix_repetition: tokens after the prefix
    prefix_repetition_num_prefixes  prefix_repetition: number of prefixes
    prefix_repetition_output_len  prefix_repetition: tokens per output
    timed_trace_scale       timed_trace: multiply lengths by this, to fit a short context
    ignore_eos              generate the full output length
    temperature, top_p, top_k, min_p   sampling parameters; None: the server's default
    extra_body              further fields of each request
    percentile_metrics      tables to print
    metric_percentiles      percentiles in the tables, in addition to mean and median
    goodput                 objectives in ms, such as ttft:500; goodput counts the requests that meet all of them
    num_warmups             uncounted requests before the load, one after another
    ready_check_timeout_sec  time limit in seconds for the server's first response
    save_result             write a JSON file
    save_detailed           write a JSON file with every request
    append_result           append to the JSON file
    result_dir              directory of the file
    result_filename         name of the file; None: derived from the load
    metadata                a further field of the file, NAME=VALUE
    label                   beginning of the file's name; None: the backend
    disable_tqdm            show no progress bar
    """

    TITLE: ClassVar[str] = "bench serve"

    backend: Backend = "openai"
    base_url: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    endpoint: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    header: Sequence[str] = ()
    dataset_name: DatasetName = "random"
    dataset_path: str | None = None
    num_prompts: int = 1000
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    sharegpt_output_len: int | None = None
    disable_shuffle: bool = False
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    timed_trace_scale: float = 1.0
    ignore_eos: bool = False
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    extra_body: Mapping[str, Any] | None = None
    percentile_metrics: str = "ttft,tpot,itl,e2el"
    metric_percentiles: str = "99"
    goodput: Sequence[str] = ()
    num_warmups: int = 0
    ready_check_timeout_sec: float = 0.0
    save_result: bool = False
    save_detailed: bool = False
    append_result: bool = False
    result_dir: str | None = None
    result_filename: str | None = None
    metadata: Sequence[str] = ()
    label: str | None = None
    disable_tqdm: bool = False

    def __post_init__(self) -> None:
        self._check_choice("backend", tuple(PATHS))
        self._check_choice("dataset_name", ("random", "sharegpt", "prefix_repetition", "timed_trace"))
        self._check_integer("port", 1, 65535)
        for name in ("num_prompts", "random_output_len", "prefix_repetition_num_prefixes"):
            self._check_integer(name, 1, MAX_COUNT)
        for name in ("random_input_len", "prefix_repetition_suffix_len", "prefix_repetition_output_len"):
            self._check_integer(name, 1, MAX_COUNT)
        for name in ("random_prefix_len", "prefix_repetition_prefix_len", "num_warmups"):
            self._check_integer(name, 0, MAX_COUNT)
        for name in ("max_concurrency", "sharegpt_output_len"):
            self._check_integer(name, 1, MAX_COUNT, optional=True)
        self._check_integer("seed", 0, (1 << 63) - 1)
        self._check_number("temperature", 0.0, 2.0)
        self._check_number("burstiness", 1e-3, 1e6)
        self._check_number("random_range_ratio", 0.0, 0.999)
        self._check_number("timed_trace_scale", 1e-6, 1.0)
        self._check_number("ready_check_timeout_sec", 0.0, 1e6)
        if not self.request_rate > 0:
            raise invalid("request_rate", f"is {self.request_rate}, it must be above 0, or inf")
        if (self.dataset_name in ("sharegpt", "timed_trace")) != (self.dataset_path is not None):
            needs = "needs a file; set --dataset-path" if self.dataset_path is None else "is generated; remove the file"
            raise ParameterError(f"dataset {self.dataset_name} {needs}", param="dataset_path")
        for name, parts in (("header", self.header), ("metadata", self.metadata)):
            for part in parts:
                if not part.partition("=")[1]:
                    raise invalid(name, f"is {part!r}; write NAME=VALUE")
        self.percentiles()
        self.metrics()
        self.objectives()
        if not is_address(self.url):
            name, such = ("base_url", "http://localhost:8000") if self.base_url else ("host", "127.0.0.1 or [::1]")
            raise invalid(name, f"is {getattr(self, name)!r}; write one such as {such}")

    @property
    def url(self) -> str:
        return (self.base_url or f"http://{self.host}:{self.port}").rstrip("/")

    @property
    def is_chat(self) -> bool:
        return self.backend == "openai-chat"

    def percentiles(self) -> list[float]:
        try:
            numbers = [float(part) for part in self.metric_percentiles.split(",")]
        except ValueError:
            numbers = [-1.0]
        if not all(0 <= p <= 100 for p in numbers):
            raise invalid("metric_percentiles", f"is {self.metric_percentiles!r}; write numbers such as 50,99")
        return numbers

    def metrics(self) -> list[str]:
        names = [part.strip() for part in self.percentile_metrics.split(",")]
        if not set(names) <= set(METRICS):
            raise invalid("percentile_metrics", f"is {self.percentile_metrics!r}; there are {', '.join(METRICS)}")
        return names

    def objectives(self) -> dict[str, float]:
        """Milliseconds by metric."""
        found: dict[str, float] = {}
        for part in (part for text in self.goodput for part in text.replace(",", " ").split()):
            name, _, number = part.partition(":")
            try:
                found[name] = float(number)
            except ValueError:
                found[name] = math.nan
            if name not in ("ttft", "tpot", "e2el") or not 0 < found[name] < math.inf:
                raise invalid("goodput", f"has {part!r}; write objectives in ms such as ttft:500 tpot:50 e2el:3000")
        return found


def is_address(url: str) -> bool:
    """Whether the URL has a valid scheme, host and port, and can be part of a request."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        is_plain = url.isascii() and url.isprintable() and " " not in url
        return parts.scheme in ("http", "https") and bool(host) and parts.port != 0 and is_plain
    except ValueError:  # an invalid port, an open bracket, a name that is too long
        return False
