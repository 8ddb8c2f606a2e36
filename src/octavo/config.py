"""What an engine can be told, its defaults, and how they are resolved: once, here.

`EngineArgs` is what a caller says; None stands for "work it out". `EngineConfig` is what an engine runs with, when the
model and the machine are known: every number settled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from octavo.core.checked import Checked
from octavo.errors import ParameterError

GIB = 1 << 30
CPU_KV_BYTES = 4 * GIB
"""The largest KV pool that a CPU engine takes unasked; also at most a quarter of the free memory."""
DEFAULT_SWAP_BYTES = 4 * GIB
"""The largest swap space taken unasked; never larger than the pool."""

Device = Literal["auto", "cpu"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
PreemptionChoice = Literal["auto", "recompute", "swap"]
SchedulingPolicy = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs(Checked):
    """The engine's options; names and meanings are vLLM's where it has the option.

    model                     a directory, a .gguf file, a name of `octavo models`, or a hub repository
    revision                  branch, tag or commit of a hub repository
    skip_tokenizer_init       take and give token ids only
    device, dtype             auto: the CPU, in float32
    seed                      where the seeds of requests that bring none are drawn from
    block_size                tokens a block, a power of two from 1 to 256
    num_gpu_blocks_override   usable blocks on whatever device; None: what `kv_cache_memory_bytes` gives
    kv_cache_memory_bytes     bytes for the KV pool; None: on a CPU the smallest of 4 GiB, a quarter of the free memory
                              and what max_num_seqs sequences of max_model_len need
    max_model_len             longest sequence, prompt and output; None: the model's, or what fits if that is less;
                              -1: what fits
    max_num_batched_tokens    positions a step computes at most
    max_num_seqs              sequences that run at most
    enable_prefix_caching     find the beginnings of prompts among the blocks computed before
    preemption_mode           how a request makes room: recompute, swap, or auto for the choice of the paper
    swap_space                GiB of host memory for what is swapped out; None: as much as the pool, at most 4
    scheduling_policy         fcfs, or priority (lower first)
    watermark                 share of the blocks that an admission leaves free while anything runs
    decode_window             positions that the device decodes by itself in one step
    async_scheduling          plan the next step while the device computes this one
    """

    TITLE: ClassVar[str] = "the engine"

    model: str
    revision: str | None = None
    skip_tokenizer_init: bool = False
    device: Device = "auto"
    dtype: DType = "auto"
    seed: int = 0
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    enable_prefix_caching: bool = True
    preemption_mode: PreemptionChoice = "auto"
    swap_space: float | None = None
    scheduling_policy: SchedulingPolicy = "fcfs"
    watermark: float = 0.0
    decode_window: int = 1
    async_scheduling: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ParameterError(f"model must be a path or a name, not {self.model!r}", param="model")
        self._choice("device", ("auto", "cpu"))
        self._choice("dtype", ("auto", "float32", "bfloat16", "float16"))
        self._choice("preemption_mode", ("auto", "recompute", "swap"))
        self._choice("scheduling_policy", ("fcfs", "priority"))
        self._integer("block_size", 1, 256)
        if self.block_size & (self.block_size - 1):
            raise ParameterError(
                f"block_size is {self.block_size}, it must be a power of two from 1 to 256", param="block_size"
            )
        self._integer("num_gpu_blocks_override", 1, 1 << 30, optional=True)
        self._integer("kv_cache_memory_bytes", 1, 1 << 50, optional=True)
        self._integer("max_num_batched_tokens", 1, 1 << 24)
        self._integer("max_num_seqs", 1, 1 << 20)
        self._integer("decode_window", 1, 1024)
        self._integer("seed", -(1 << 63), (1 << 63) - 1)
        if self.max_model_len != -1:
            self._integer("max_model_len", 1, 1 << 30, optional=True)
        self._number("watermark", 0.0, 0.5)
        self._number("swap_space", 0.0, 1 << 20, optional=True)
        self._flag("skip_tokenizer_init", "enable_prefix_caching", "async_scheduling")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine runs with. Blocks are usable ones; the null block is one more."""

    args: EngineArgs
    dtype: str
    max_model_len: int
    num_blocks: int
    num_host_blocks: int
    bytes_per_block: int
    weight_bytes: int

    @property
    def kv_bytes(self) -> int:
        return (self.num_blocks + 1) * self.bytes_per_block
