"""Engine options, their defaults, and the resolved configuration.

`EngineArgs` holds a caller's options; None means "choose a default". `EngineConfig` holds what an engine runs with,
once the model and the machine are known.
"""

from __future__ import annotations

import argparse
import os
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.core.policy import Policy, PreemptionMode, VictimPolicy
from octavo.errors import ParameterError, UsageError
from octavo.params.validation import ValidatedParams, invalid
from octavo.params.vllm_arguments import Owner, arguments, parse_value

GIB = 1 << 30
DEFAULT_CPU_KV_BYTES = 4 * GIB
"""Upper limit of the default KV pool on a CPU; a quarter of the free memory is another."""
DEFAULT_SWAP_BYTES = 4 * GIB
"""Upper limit of the default swap space; it is never larger than the pool."""

DEFAULT_GPU_MEMORY_UTILIZATION = 0.92
"""Share of a GPU's memory that an engine uses by default."""

DEFAULT_CHECKPOINT_INTERVAL = 1024
"""Tokens between two checkpoints of a recurrent state."""

DEFAULT_STEP_LIMITS = {
    "cpu": {"max_num_batched_tokens": 2048, "max_num_seqs": 128, "decode_window": 1},
    "cuda": {"max_num_batched_tokens": 8192, "max_num_seqs": 256},
}
"""Default limits of a step, by device."""
DEFAULT_LONG_PREFILL_TOKENS = {"cpu": 512, "cuda": 4096}
"""Default of `long_prefill_token_threshold`, by device; at most half of `max_num_batched_tokens`."""

Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["int8", "int4", "fp8", "awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "gguf"]
ROUNDED = ("int8", "int4", "fp8")
"""Quantizations to which weights are rounded."""
KVCacheDType = Literal["auto", "int8", "fp8", "fp8_e4m3", "fp8_e5m2"]
KV_DTYPES = {"int8": "int8", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
DTYPE_NAMES = {"half": "float16", "float": "float32"}
"""Other names of dtypes."""
DType = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]
LoadFormat = Literal["auto", "dummy"]
PreemptionChoice = Literal["auto", "recompute", "swap"]
SchedulingPolicy = Literal["fcfs", "priority"]
Victims = Literal["latest", "least_lost"]
SpecMethod = Literal["suffix", "draft_model", "ngram"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig(ValidatedParams):
    """Publication of prefix cache events (`octavo.engine.kv_events`). Names and meanings are vLLM's.

    enable_kv_cache_events  publish events
    publisher               zmq, the only transport; null: publish nothing
    endpoint                bound here if it is on this machine's loopback, a wildcard (tcp://*:5557) or a Unix socket;
                            else the address of a subscriber on another machine, connected to
    replay_endpoint         where subscribers request missed batches; None: no replay
    buffer_steps            batches kept for replay
    hwm                     batches queued for a subscriber that does not read; further ones are dropped for it
    max_queue_size          events that may wait to be published; on overflow subscribers receive "all blocks cleared"
    topic                   topic of the messages
    data_parallel_rank      number of the engine, which its messages have
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
    data_parallel_rank: int = 0

    def __post_init__(self) -> None:
        self._check_bool("enable_kv_cache_events")
        self._check_integer("data_parallel_rank", 0, 1 << 20)
        self._check_choice("publisher", ("zmq", "null"))
        for name in ("endpoint", "replay_endpoint", "topic"):
            value = getattr(self, name)
            if not isinstance(value, str) and (name != "replay_endpoint" or value is not None):
                raise invalid(name, f"must be text, not {value!r}", "invalid_type")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            self._check_integer(name, 1, 1 << 30)

    @property
    def is_enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @property
    def binds(self) -> bool:
        """True if the endpoint is bound here, False if it is a subscriber's to connect to."""
        local_prefixes = (
            "ipc://",
            "inproc://",
            "tcp://127.",
            "tcp://localhost:",
            "tcp://[::1]:",
            "tcp://0.0.0.0:",
            "tcp://[::]:",
        )
        return "*" in self.endpoint or self.endpoint.startswith(local_prefixes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig(ValidatedParams):
    """Speculation: guessed tokens, checked together in one forward pass. Names and meanings are vLLM's.

    Tokens are the same with and without it, but for rounding.

    method                  ngram: the tokens that followed the longest earlier match of a sequence's last tokens, in
                            the sequence itself; suffix: on a CPU, also in other requests with the same salt;
                            draft_model: those that `model` samples. None: draft_model with a `model`, else suffix
    model                   of the method draft_model, as `EngineArgs.model`; with the vocabulary of the engine's model
    num_speculative_tokens  most guesses per sequence and pass, at most 15. The engine measures how many pay off
    """

    TITLE: ClassVar[str] = "speculative_config"
    ARGUMENT_OWNER: ClassVar[Owner | None] = "speculation"
    MAX_TOKENS: ClassVar[int] = 15

    method: SpecMethod | None = None
    model: str | None = None
    num_speculative_tokens: int = 8

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):
            self._set("model", str(self.model))
        if not isinstance(self.model, str | None) or self.model == "":
            raise invalid("model", f"must be a path or a name, not {self.model!r}", "invalid_type")
        if self.method is None:
            self._set("method", "suffix" if self.model is None else "draft_model")
        if self.method not in get_args(SpecMethod):
            text = "drafts come from earlier text or a draft model; set it to suffix, ngram or draft_model"
            raise invalid("method", f"is {self.method!r}: {text}", "invalid_value")
        if (self.method == "draft_model") != (self.model is not None):
            remedy = "leave it out, or set method to draft_model" if self.model else "name one with spec_model"
            text = f"is {self.model!r} with the method {self.method}; {remedy}"
            raise invalid("model", text, "invalid_value")
        self._check_integer("num_speculative_tokens", 1, self.MAX_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs(ValidatedParams):
    """The engine's options. Names and meanings are vLLM's where vLLM has the option.

    model                     a directory, a .gguf file, a name of `octavo models`, or a hub repository
    revision                  branch, tag or commit of a hub repository
    skip_tokenizer_init       accept and return token ids only
    chat_template             a file or the template itself; replaces the model's template
    device                    auto: an NVIDIA GPU if there is one, else the CPU
    dtype                     auto: on a GPU the checkpoint's dtype, bfloat16 for float32 checkpoints; on a CPU bfloat16
                              for quantised checkpoints, and for 16-bit ones if the processor has bfloat16 products,
                              else float32
    batch_invariant           the bits of tokens and log-probabilities do not depend on requests beside it, on chunks,
                              cached prefixes or preemptions; on a CPU, in bfloat16. Long prompts are slower, and on a
                              GPU all steps
    load_format               auto: the checkpoint's weights; dummy: random weights, to measure speed without a download
    quantization              int8, int4: round weights of 16 bits to so many while they are loaded, with a scale for
                              each group of inputs; a CPU also rounds activations to int8. There, int4 leaves 8 bits to
                              Q, K, V, down and the head. fp8: to float8, on a GPU. Weights that files hold in 8 bits or
                              fewer stay as they are. The other names say how the files are quantised, which is found
                              without them; another one is an error
    seed                      seed of the generator that draws seeds for requests without one
    block_size                tokens per block, a power of two from 1 to 256
    kv_cache_dtype            K and V; auto: in the dtype of the activations, or in fp8 on a GPU if the checkpoint has a
                              kv_cache_scheme. int8, on a CPU: a scale per head and token. fp8 (fp8_e4m3) or fp8_e5m2,
                              on a GPU: a scale per layer and head, the checkpoint's or calibrated at start
    num_gpu_blocks_override   usable blocks on any device; None: derived from `kv_cache_memory_bytes`
    kv_cache_memory_bytes     bytes for the KV pool; None: on a CPU the smallest of 4 GiB, a quarter of the free memory,
                              and what max_num_seqs sequences of max_model_len need
    tensor_parallel_size      processes that share the model: each has a part of the weights and of the K/V heads, on a
                              GPU of its own; on a CPU with its share of the cores
    gpu_memory_utilization    share of the device's memory for weights and KV pool together, on a GPU or a CPU;
                              None: 0.92 on a GPU; on a CPU see kv_cache_memory_bytes, which overrides it
    max_model_len             longest sequence, prompt and output; None: the model's limit, or what fits if that is
                              less; -1: what fits
    max_num_batched_tokens    maximum tokens per step; None: 2,048 on a CPU, 8,192 on a GPU
    max_num_seqs              maximum running sequences; None: 128 on a CPU, 256 on a GPU
    enable_prefix_caching     reuse cached blocks for prompt prefixes computed before
    mamba_block_size          with recurrent layers: tokens between two checkpoints of a sequence's state, from which
                              later requests go on; a multiple of block_size. None: 1024
    preemption_mode           how a preempted request frees its blocks: recompute, swap, or auto for the one that this
                              engine measures as cheaper to undo
    preemption_victim         the preempted request: latest, the last in line; or least_lost, the cheapest to resume
    swap_space                GiB of host memory for swapped blocks; None: as much as the pool, at most 4
    generation_config         source of the sampling defaults: auto, the model's file; vllm, none; or a path
    max_logprobs              maximum top log-probabilities per position that a request may ask for; -1: the vocabulary
    scheduling_policy         fcfs, or priority (lower first)
    priority_ageing           by priority: how many later arrivals may overtake a request per step of priority between
                              them; 0: any number
    long_prefill_token_threshold  a prompt with more tokens left to prefill is long and computes at most this many per
                              step; 0: no limit. None: 512 on a CPU, 4,096 on a GPU, and at most half of a step
    max_long_partial_prefills  long prompts of one tenant (one API key) that prefill concurrently; others wait, and
                              short prompts pass them
    disable_hybrid_kv_cache_manager  keep K and V of all positions for layers with a sliding window, too, beside layers
                              without one
    watermark                 share of the blocks that an admission must leave free while any request runs
    decode_window             tokens that the device decodes per sequence in one step; None: 1 on a CPU; on a GPU as
                              few as hide the host's time, measured at start
    enforce_eager             launch kernels one by one, without CUDA graphs; on a CPU, without recorded decode steps
    async_scheduling          plan the next step while the device computes the current one
    speculative_config        fields of `SpeculativeConfig`; None: no speculation
    spec_method, spec_model   the same fields, `method` and `model`, by themselves
    spec_tokens               likewise `num_speculative_tokens`
    flight_recorder           directory for dumps of the engine's last minutes, on a crash or on demand; None: off
    kv_events_config          fields of `KVEventsConfig`; None: no KV cache events
    """

    TITLE: ClassVar[str] = "the engine"
    ARGUMENT_OWNER: ClassVar[Owner | None] = "engine"

    model: str = field(kw_only=False)
    revision: str | None = None
    skip_tokenizer_init: bool = False
    chat_template: str | None = None
    device: Device = "auto"
    dtype: DType = "auto"
    batch_invariant: bool = False
    load_format: LoadFormat = "auto"
    quantization: Quantization | None = None
    seed: int = 0
    block_size: int = 16
    kv_cache_dtype: KVCacheDType = "auto"
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    enable_prefix_caching: bool = True
    mamba_block_size: int | None = None
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
    disable_hybrid_kv_cache_manager: bool = False
    async_scheduling: bool = True
    speculative_config: Mapping[str, Any] | None = None
    spec_method: SpecMethod | None = None
    spec_model: str | None = None
    spec_tokens: int | None = None
    kv_events_config: Mapping[str, Any] | None = None
    flight_recorder: str | None = None

    def __post_init__(self) -> None:
        for option in fields(self):
            if getattr(self, option.name) is None and option.default is not MISSING:  # None is "not set" in vLLM
                self._set(option.name, option.default)
        dtype = str(self.dtype).removeprefix("torch.")  # may be a torch.dtype
        self._set("dtype", DTYPE_NAMES.get(dtype, dtype))
        for name in ("model", "spec_model"):
            if isinstance(path := getattr(self, name), os.PathLike):
                self._set(name, str(path))
        if not isinstance(self.model, str) or not self.model:
            raise ParameterError(f"model must be a path or a name, not {self.model!r}", param="model")
        if self.chat_template is not None and (not isinstance(self.chat_template, str) or not self.chat_template):
            raise ParameterError(
                f"chat_template must be a file or a template, not {self.chat_template!r}", param="chat_template"
            )
        self._check_choice("device", ("auto", "cpu", "cuda"))
        self._check_choice("load_format", ("auto", "dummy"))
        if self.quantization is not None:
            self._check_choice("quantization", get_args(Quantization))
        self._check_choice("dtype", ("auto", "float32", "bfloat16", "float16"))
        self._check_choice("kv_cache_dtype", get_args(KVCacheDType))
        self._check_choice("preemption_mode", ("auto", "recompute", "swap"))
        self._check_choice("preemption_victim", ("latest", "least_lost"))
        self._check_choice("scheduling_policy", ("fcfs", "priority"))
        self._check_integer("priority_ageing", 0, 1 << 30)
        self._check_integer("block_size", 1, 256)
        if self.block_size & (self.block_size - 1):
            raise ParameterError(
                f"block_size is {self.block_size}, it must be a power of two from 1 to 256", param="block_size"
            )
        self._check_integer("mamba_block_size", 1, 1 << 30, optional=True)
        if self.checkpoint_interval % self.block_size:
            text = f"is {self.mamba_block_size}; use a multiple of block_size, {self.block_size}"
            raise invalid("mamba_block_size", text, "invalid_value")
        self._check_integer("num_gpu_blocks_override", 1, 1 << 30, optional=True)
        self._check_integer("kv_cache_memory_bytes", 1, 1 << 50, optional=True)
        self._check_number("gpu_memory_utilization", 0.01, 1.0, optional=True)
        self._check_integer("tensor_parallel_size", 1, 1024)
        self._check_integer("max_num_batched_tokens", 1, 1 << 24, optional=True)
        self._check_integer("max_num_seqs", 1, 1 << 20, optional=True)
        self._check_integer("decode_window", 1, 1024, optional=True)
        self._check_integer("long_prefill_token_threshold", 0, 1 << 30, optional=True)
        self._check_integer("max_long_partial_prefills", 1, 1 << 20)
        self._check_integer("max_logprobs", -1, 1 << 20)
        if not isinstance(self.generation_config, str) or not self.generation_config:
            raise ParameterError(
                f"generation_config must be auto, vllm or a path, not {self.generation_config!r}",
                param="generation_config",
            )
        self._check_integer("seed", -(1 << 63), (1 << 63) - 1)
        if self.max_model_len != -1:
            self._check_integer("max_model_len", 1, 1 << 30, optional=True)
        self._check_number("watermark", 0.0, 0.5)
        self._check_number("swap_space", 0.0, 1 << 20, optional=True)
        self._check_bool("skip_tokenizer_init", "enable_prefix_caching", "enforce_eager", "async_scheduling")
        self._check_bool("disable_hybrid_kv_cache_manager", "batch_invariant")
        if self.flight_recorder is not None and (not isinstance(self.flight_recorder, str) or not self.flight_recorder):
            raise invalid("flight_recorder", f"must be a directory, not {self.flight_recorder!r}", "invalid_type")
        for name in ("kv_events_config", "speculative_config"):
            if not isinstance(value := getattr(self, name), Mapping | None):
                raise invalid(name, f"must be a mapping, not {value!r}", "invalid_type")
        self.kv_events()
        if (speculation := self.speculation()) is not None and self.speculative_config:
            names = SpeculativeConfig.__dataclass_fields__.keys() & self.speculative_config.keys()  # others have warned
            self._set("speculative_config", {n: getattr(speculation, n) for n in sorted(names) or ["method"]})

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add the options to a script's parser, for `LLM(**vars(parser.parse_args()))`.

        vLLM's others are attributes of the result only if they are on the command line.
        """
        hints = get_type_hints(cls)
        for option in fields(cls):
            hint = hints[option.name]
            kinds = get_args(hint) if get_origin(hint) is types.UnionType else (hint,)
            default = None if option.default is MISSING else option.default
            _add_flag(
                parser,
                option.name,
                bool if kinds[0] is bool else _PARSERS.get(get_origin(kinds[0]) or kinds[0], str),
                default,
            )
        for argument in arguments("engine").values():
            if not argument.is_taken and not argument.name.startswith("_"):
                _add_flag(parser, argument.name, bool if argument.is_flag else parse_value, argparse.SUPPRESS)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """The options in what a parser of `add_cli_args` has parsed; other names are left out."""
        names = {f.name for f in fields(cls)} | arguments("engine").keys()
        return cls(**{name: value for name, value in vars(args).items() if name in names})

    def resolved(self, device: str) -> EngineArgs:
        """A copy with a number in place of every None that depends on the device alone."""
        limits = DEFAULT_STEP_LIMITS[device].items()
        defaults: dict[str, Any] = {name: value for name, value in limits if getattr(self, name) is None}
        args = replace(self, **defaults) if defaults else self
        if args.long_prefill_token_threshold is not None:
            return args
        assert args.max_num_batched_tokens is not None
        threshold = min(DEFAULT_LONG_PREFILL_TOKENS[device], max(1, args.max_num_batched_tokens // 2))
        return replace(args, long_prefill_token_threshold=threshold)

    @property
    def checkpoint_interval(self) -> int:
        """Tokens between two checkpoints of a recurrent state."""
        return self.mamba_block_size or DEFAULT_CHECKPOINT_INTERVAL

    def check_recurrent(self, architecture: str) -> None:
        """Raises `ParameterError` for an option that does not work yet for a model with recurrent layers."""
        if self.num_speculative_tokens:
            text = f"speculation is not supported for {architecture}: its recurrent layers cannot take back a draft"
            raise ParameterError(f"{text}; remove speculative_config", param="speculative_config")

    def grouped_len(self, supported: int) -> int:
        """The longest sequence, for the choice of groups of layers; 0: there are none. supported: by the model"""
        if self.disable_hybrid_kv_cache_manager:
            return 0
        return supported if self.max_model_len in (None, -1) else min(self.max_model_len, supported)

    def for_checkpoint(self, stored: str | None) -> EngineArgs:
        """Drop a `quantization` that names the format of the files, which is known without it.

        stored: the files' format; None: they are not quantised. Raises `ParameterError` if another format is named.
        """
        name = self.quantization and self.quantization.removesuffix("_marlin")
        if name is None or (name in ROUNDED and name != stored):
            return self
        if name != stored:
            text = f"quantization is {self.quantization!r}, and the files are {stored or 'not quantised'}; leave it out"
            raise ParameterError(text, param="quantization")
        return replace(self, quantization=None)

    def resolved_dtype(self, device: str, stored: str, *, has_bfloat16: bool) -> str:
        """The dtype in which the engine computes; see `dtype`.

        stored        dtype of the checkpoint
        has_bfloat16  a CPU has bfloat16 products; it never has fast float16 ones

        Raises `ParameterError` if `quantization` works neither on the device nor with the dtype.
        """
        if self.quantization == "fp8" and device == "cpu":
            raise ParameterError("quantization 'fp8' needs a GPU; use int8", param="quantization")
        dtype: str = self.dtype
        if dtype == "auto" and device != "cpu":
            dtype = "bfloat16" if stored == "float32" or self.quantization else stored
        elif dtype == "auto":
            is_narrow = self.quantization or self.batch_invariant or (stored != "float32" and has_bfloat16)
            dtype = "bfloat16" if is_narrow else "float32"
        if self.quantization is not None and dtype != "bfloat16":
            raise ParameterError(
                f"quantization {self.quantization!r} needs bfloat16 for the other layers, not {dtype}; use dtype auto",
                param="dtype",
            )
        return dtype

    def resolved_kv_dtype(self, device: str, dtype: str, *, prefers_float8: bool = False) -> str:
        """The dtype of K and V. Raises `ParameterError` if the device does not have it.

        dtype           of the activations
        prefers_float8  the checkpoint asks for float8, and the device has it
        """
        if self.kv_cache_dtype == "auto":
            return KV_DTYPES["fp8"] if prefers_float8 else dtype
        if (device == "cpu") == (self.kv_cache_dtype == "int8"):
            return KV_DTYPES[self.kv_cache_dtype]
        text = f"kv_cache_dtype {self.kv_cache_dtype!r} is not supported on {device}"
        raise ParameterError(f"{text}; use {'int8' if device == 'cpu' else 'fp8'}", param="kv_cache_dtype")

    def kv_events(self) -> KVEventsConfig:
        return KVEventsConfig(**(self.kv_events_config or {}))

    def speculation(self) -> SpeculativeConfig | None:
        options = dict(self.speculative_config or {})
        names = {"method": "spec_method", "model": "spec_model", "num_speculative_tokens": "spec_tokens"}
        given = {name: value for name, short in names.items() if (value := getattr(self, short)) is not None}
        for name, value in given.items():
            if options.setdefault(name, value) != value:
                text = f"is {value!r}, and speculative_config says {options[name]!r}; give one of them"
                raise invalid(names[name], text, "invalid_value")
        try:
            return SpeculativeConfig(**options) if options else None
        except UsageError as error:  # name the option, not its key
            error.param = names[error.param] if error.param in given else "speculative_config"
            raise

    @property
    def num_speculative_tokens(self) -> int:
        """Most drafts per sequence and pass; 0 without speculation."""
        return 0 if (config := self.speculation()) is None else config.num_speculative_tokens

    def policy(self) -> Policy:
        """The scheduler's policy."""
        return Policy(
            by_priority=self.scheduling_policy == "priority",
            mode=None if self.preemption_mode == "auto" else PreemptionMode(self.preemption_mode),
            ageing=self.priority_ageing,
            victims=VictimPolicy(self.preemption_victim),
            long_prefill_token_threshold=self.long_prefill_token_threshold or 0,
            max_long_partial_prefills=self.max_long_partial_prefills,
        )


_PARSERS: dict[Any, Callable[[str], Any]] = {int: int, float: float, Mapping: parse_value}


def _add_flag(parser: argparse.ArgumentParser, name: str, kind: Callable[[str], Any], default: Any) -> None:
    flag = f"--{name.replace('_', '-')}"
    if kind is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
    else:
        parser.add_argument(flag, type=kind, default=default)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The resolved configuration of a running engine. `num_blocks` counts usable blocks, without the null block."""

    args: EngineArgs
    device: str
    dtype: str
    max_model_len: int
    num_blocks: int
    num_host_blocks: int
    kv: KVCacheSpec
    weight_bytes: int
    attention_window: int = 0
    """Number of last keys that attention reads, if every layer has a sliding window; 0: a layer attends to all."""

    @property
    def kv_bytes(self) -> int:
        return self.kv.pool_bytes(self.num_blocks)
