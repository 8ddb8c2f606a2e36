"""What an engine can be told, its defaults, and how they are resolved: once, here.

`EngineArgs` is what a caller says; None stands for "work it out". `EngineConfig` is what an engine runs with, when the
model and the machine are known: every number resolved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from octavo.core.policy import Policy, PreemptionMode, VictimChoice
from octavo.errors import ParameterError
from octavo.params.validation import Checked, wrong

GIB = 1 << 30
DEFAULT_CPU_KV_BYTES = 4 * GIB
"""The largest KV pool that a CPU engine takes unasked; also at most a quarter of the free memory."""
DEFAULT_SWAP_BYTES = 4 * GIB
"""The largest swap space taken unasked; never larger than the pool."""

DEFAULT_GPU_MEMORY_UTILIZATION = 0.92
"""The share of a GPU's memory that an engine takes unasked."""

STEP_SIZES = {
    "cpu": {"max_num_batched_tokens": 2048, "max_num_seqs": 128, "decode_window": 1},
    "cuda": {"max_num_batched_tokens": 8192, "max_num_seqs": 256, "decode_window": 4},
}
"""What a step holds unasked, by device."""
LONG_PREFILL_TOKENS = {"cpu": 512, "cuda": 4096}
"""What a long prompt computes in a step unasked, by device; at most half of a step."""

Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["int8"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
PreemptionChoice = Literal["auto", "recompute", "swap"]
SchedulingPolicy = Literal["fcfs", "priority"]
Victims = Literal["latest", "least_lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig(Checked):
    """What is told of cached blocks, and where (`octavo.engine.kv_events`); names and meanings are vLLM's.

    enable_kv_cache_events  tell at all
    publisher               zmq, the only one there is; or null, nobody
    endpoint                taken by us if it is on this machine's loopback, a wildcard (tcp://*:5557) or a Unix socket;
                            of another machine, it is that of a subscriber who collects
    replay_endpoint         where subscribers ask for what they missed; None: nowhere
    buffer_steps            batches kept for that
    hwm                     batches kept for a subscriber that does not read; then it misses some
    max_queue_size          events that may wait to be told; beyond, subscribers are told that nothing is cached
    topic                   of the messages
    """

    TITLE: ClassVar[str] = "kv_events_config"

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        self._flag("enable_kv_cache_events")
        self._choice("publisher", ("zmq", "null"))
        for name in ("endpoint", "replay_endpoint", "topic"):
            value = getattr(self, name)
            if not isinstance(value, str) and (name != "replay_endpoint" or value is not None):
                raise wrong(name, f"must be text, not {value!r}", "invalid_type")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            self._integer(name, 1, 1 << 30)

    @property
    def is_enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @property
    def binds(self) -> bool:
        """Whether the endpoint is ours, not a subscriber's."""
        here = (
            "ipc://",
            "inproc://",
            "tcp://127.",
            "tcp://localhost:",
            "tcp://[::1]:",
            "tcp://0.0.0.0:",
            "tcp://[::]:",
        )
        return "*" in self.endpoint or self.endpoint.startswith(here)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs(Checked):
    """The engine's options; names and meanings are vLLM's where it has the option.

    model                     a directory, a .gguf file, a name of `octavo models`, or a hub repository
    revision                  branch, tag or commit of a hub repository
    skip_tokenizer_init       take and give token ids only
    chat_template             a file, or the template itself, in the place of the model's
    device                    auto: an NVIDIA GPU if there is one, else the CPU
    dtype                     auto: on a GPU the checkpoint's, bfloat16 for one in float32; on a CPU bfloat16 for one in
                              16 bits or quantised, if the processor multiplies that, else float32
    load_format               auto: the checkpoint's weights; dummy: random ones, for measuring speed without a download
    quantization              int8: weights and activations of the matrix products, on a CPU; a scale for each output
                              and each token
    seed                      where the seeds of requests that bring none are drawn from
    block_size                tokens a block, a power of two from 1 to 256
    num_gpu_blocks_override   usable blocks on whatever device; None: what `kv_cache_memory_bytes` gives
    kv_cache_memory_bytes     bytes for the KV pool; None: on a CPU the smallest of 4 GiB, a quarter of the free memory
                              and what max_num_seqs sequences of max_model_len need
    gpu_memory_utilization    share of the memory that this engine may have, whatever the device, for weights and KV
                              pool together; None: 0.92 on a GPU, and on a CPU as said for kv_cache_memory_bytes, which
                              goes before it
    max_model_len             longest sequence, prompt and output; None: the model's, or what fits if that is less;
                              -1: what fits
    max_num_batched_tokens    positions a step computes at most; None: 2,048 on a CPU, 8,192 on a GPU
    max_num_seqs              sequences that run at most; None: 128 on a CPU, 256 on a GPU
    enable_prefix_caching     find the beginnings of prompts among the blocks computed before
    preemption_mode           how a request makes room: recompute, swap, or auto for what takes less time to undo, as
                              this engine measures it
    preemption_victim         who makes room: latest, the last in line; or least_lost, whose return takes the least time
    swap_space                GiB of host memory for what is swapped out; None: as much as the pool, at most 4
    generation_config         where requests without sampling_params get theirs: auto, the model's file; vllm, none; or
                              the path of one
    max_logprobs              likeliest tokens that a request may ask for at a position; -1: the whole vocabulary
    scheduling_policy         fcfs, or priority (lower first)
    priority_ageing           by priority: how many later arrivals may overtake a request for each step of priority
                              between them; 0: any number
    long_prefill_token_threshold  a prompt of which more tokens are due is long, and computes so many a step at most;
                              0: as many as fit. None: 512 on a CPU, 4,096 on a GPU, and at most half of a step
    max_long_partial_prefills long prompts of one tenant (one API key) that are computed at a time; the next waits, and
                              short ones pass it
    watermark                 share of the blocks that an admission leaves free while anything runs
    decode_window             positions that the device decodes by itself in one step; None: 1 on a CPU, 4 on a GPU
    enforce_eager             launch kernels one by one, without CUDA graphs; on a CPU, replay no decode steps
    async_scheduling          plan the next step while the device computes this one
    flight_recorder           a directory for dumps of the engine's last minutes, when it dies or on demand; None: none
    kv_events_config          what is told of cached blocks, and where: fields of `KVEventsConfig`; None: nothing
    """

    TITLE: ClassVar[str] = "the engine"

    model: str
    revision: str | None = None
    skip_tokenizer_init: bool = False
    chat_template: str | None = None
    device: Device = "auto"
    dtype: DType = "auto"
    load_format: LoadFormat = "auto"
    quantization: Quantization | None = None
    seed: int = 0
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    enable_prefix_caching: bool = True
    preemption_mode: PreemptionChoice = "auto"
    preemption_victim: Victims = "latest"
    swap_space: float | None = None
    generation_config: str = "auto"
    max_logprobs: int = 20
    scheduling_policy: SchedulingPolicy = "fcfs"
    priority_ageing: int = 256
    long_prefill_token_threshold: int | None = None
    max_long_partial_prefills: int = 1
    watermark: float = 0.0
    decode_window: int | None = None
    enforce_eager: bool = False
    async_scheduling: bool = True
    kv_events_config: Mapping[str, Any] | None = None
    flight_recorder: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ParameterError(f"model must be a path or a name, not {self.model!r}", param="model")
        if self.chat_template is not None and (not isinstance(self.chat_template, str) or not self.chat_template):
            raise ParameterError(
                f"chat_template must be a file or a template, not {self.chat_template!r}", param="chat_template"
            )
        self._choice("device", ("auto", "cpu", "cuda"))
        self._choice("load_format", ("auto", "dummy"))
        if self.quantization is not None:
            self._choice("quantization", ("int8",))
        self._choice("dtype", ("auto", "float32", "bfloat16", "float16"))
        self._choice("preemption_mode", ("auto", "recompute", "swap"))
        self._choice("preemption_victim", ("latest", "least_lost"))
        self._choice("scheduling_policy", ("fcfs", "priority"))
        self._integer("priority_ageing", 0, 1 << 30)
        self._integer("block_size", 1, 256)
        if self.block_size & (self.block_size - 1):
            raise ParameterError(
                f"block_size is {self.block_size}, it must be a power of two from 1 to 256", param="block_size"
            )
        self._integer("num_gpu_blocks_override", 1, 1 << 30, optional=True)
        self._integer("kv_cache_memory_bytes", 1, 1 << 50, optional=True)
        self._number("gpu_memory_utilization", 0.01, 1.0, optional=True)
        self._integer("max_num_batched_tokens", 1, 1 << 24, optional=True)
        self._integer("max_num_seqs", 1, 1 << 20, optional=True)
        self._integer("decode_window", 1, 1024, optional=True)
        self._integer("long_prefill_token_threshold", 0, 1 << 30, optional=True)
        self._integer("max_long_partial_prefills", 1, 1 << 20)
        self._integer("max_logprobs", -1, 1 << 20)
        if not isinstance(self.generation_config, str) or not self.generation_config:
            raise ParameterError(
                f"generation_config must be auto, vllm or a path, not {self.generation_config!r}",
                param="generation_config",
            )
        self._integer("seed", -(1 << 63), (1 << 63) - 1)
        if self.max_model_len != -1:
            self._integer("max_model_len", 1, 1 << 30, optional=True)
        self._number("watermark", 0.0, 0.5)
        self._number("swap_space", 0.0, 1 << 20, optional=True)
        self._flag("skip_tokenizer_init", "enable_prefix_caching", "enforce_eager", "async_scheduling")
        if self.flight_recorder is not None and (not isinstance(self.flight_recorder, str) or not self.flight_recorder):
            raise wrong("flight_recorder", f"must be a directory, not {self.flight_recorder!r}", "invalid_type")
        if not isinstance(self.kv_events_config, Mapping | None):
            raise wrong("kv_events_config", f"must be a mapping, not {self.kv_events_config!r}", "invalid_type")
        self.kv_events()

    def resolved(self, device: str) -> EngineArgs:
        """The same, with a number in the place of every None that the device alone decides."""
        sizes = STEP_SIZES[device].items()
        unsaid: dict[str, Any] = {name: value for name, value in sizes if getattr(self, name) is None}
        args = replace(self, **unsaid) if unsaid else self
        if args.long_prefill_token_threshold is not None:
            return args
        assert args.max_num_batched_tokens is not None
        longest = min(LONG_PREFILL_TOKENS[device], max(1, args.max_num_batched_tokens // 2))
        return replace(args, long_prefill_token_threshold=longest)

    def kv_events(self) -> KVEventsConfig:
        return KVEventsConfig(**(self.kv_events_config or {}))

    def policy(self) -> Policy:
        """The core's choices, in its words."""
        return Policy(
            by_priority=self.scheduling_policy == "priority",
            mode=None if self.preemption_mode == "auto" else PreemptionMode(self.preemption_mode),
            ageing=self.priority_ageing,
            victims=VictimChoice(self.preemption_victim),
            long_prefill_token_threshold=self.long_prefill_token_threshold or 0,
            max_long_partial_prefills=self.max_long_partial_prefills,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine runs with. Blocks are usable ones; the null block is one more."""

    args: EngineArgs
    device: str
    dtype: str
    max_model_len: int
    num_blocks: int
    num_host_blocks: int
    bytes_per_block: int
    weight_bytes: int
    attention_window: int = 0
    """How many of the last keys some layer looks at, if none looks at all; 0: one does."""

    @property
    def kv_bytes(self) -> int:
        return (self.num_blocks + 1) * self.bytes_per_block
