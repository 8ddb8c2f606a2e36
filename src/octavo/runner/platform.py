"""Platforms: everything that differs between a CPU and a GPU, for the model runner and for the start of an engine.

`find_platform` chooses one, once per engine. Another kind of device needs a subclass of `Platform`, and operations with
the signatures of `kernels.ops.Ops`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from octavo.config import EngineArgs
from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.kernels.cpu import native, packed_linear
from octavo.kernels.cpu import ops as cpu_ops
from octavo.kernels.ops import Ops
from octavo.runner.cuda_executor import CudaExecutor
from octavo.runner.cuda_model_runner import CudaModelRunner
from octavo.runner.executor import LocalExecutor
from octavo.runner.memory import diagnostics, profile
from octavo.runner.model_runner import ModelRunner
from octavo.runner.recorded_graphs import Model
from octavo.runner.streams import RecordableEvent, SideStream, index_tensor, record_event, to_device, to_lists

if TYPE_CHECKING:
    from octavo.runner.memory.profile import GPUMemoryProfile, Precompile

logger = logging.getLogger("octavo")


class Platform:
    """A kind of device, and the one device that an engine uses. The defaults are for a device that needs nothing else.

    name      the `device` of `EngineArgs`
    device    torch's
    ops       its operations
    is_host   it computes in the host's memory: the budget is planned before the weights are loaded
    """

    name: str
    device: torch.device
    ops: Ops
    is_host = False

    # -- start of an engine --------------------------------------------------------------------------------------------

    def has_fast_bfloat16(self) -> bool:
        """True if bfloat16 is faster than float32, and not only smaller."""
        return True

    def startup_errors(self, doing: str, remedy: Callable[[int], str]) -> AbstractContextManager[None]:
        """Turns device errors into one line while an engine starts; see `memory.diagnostics.startup_errors`."""
        return nullcontext()

    def precompiler(self, key: str) -> AbstractContextManager[Precompile | None]:
        """Compiles kernels in parallel while files are read; the function lists the kernels of passes.

        key   everything that selects kernels, besides the code, the libraries and the device
        """
        return nullcontext()

    def compile_kernels(self) -> None:
        """Compile what a model needs for its first pass. Called on a thread while weights are loaded."""

    def check_weights(self, weight_bytes: int, args: EngineArgs) -> None:
        """Raises `MemoryBudgetError` if the device has too little memory for the weights, before they are loaded."""

    def measure(
        self, model: Model, args: EngineArgs, *, kv_cache: KVCacheSpec, precompile: Precompile | None = None
    ) -> GPUMemoryProfile:
        """The memory that passes of the loaded model take; see `memory.profile.measure`. Not called if `is_host`."""
        raise NotImplementedError

    # -- memory --------------------------------------------------------------------------------------------------------

    def make_pool(self, kv: KVCacheSpec, num_blocks: int) -> Tensor:
        """Zeros on the device. Raises `MemoryError`, or torch's error for a lack of memory."""
        return torch.zeros(kv.pool_shape(num_blocks), dtype=getattr(torch, kv.dtype), device=self.device)

    def make_host_pool(self, kv: KVCacheSpec, num_blocks: int) -> Tensor:
        """Uninitialised host memory that the device copies from and to, without the host waiting."""
        return self.make_pool(kv, num_blocks)

    def to_device(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to the device, without waiting for earlier work. On a CPU: the tensor itself."""
        return to_device(tensor, self.device)

    def index_tensor(self, values: Seq[int]) -> Tensor:
        """[len(values)] int64 on the device."""
        return index_tensor(values, self.device)

    def to_lists(self, tensors: Seq[Tensor]) -> list[list[Any]]:
        """All tensors as lists. Waits for the device only once."""
        return to_lists(tensors)

    # -- queued work ---------------------------------------------------------------------------------------------------

    def record_event(self, *, blocking: bool = False) -> RecordableEvent:
        """An event after all work queued on the current stream. blocking: threads that wait for it sleep, not spin."""
        return record_event(self.device, blocking=blocking)

    def side_stream(self) -> SideStream:
        return SideStream(self.device)

    def make_executor(
        self,
        model: Model,
        kv: Tensor,
        host_kv: Tensor,
        *,
        num_rows: int,
        max_model_len: int,
        max_num_tokens: int,
        max_decode_steps: int,
        vocab_size: int,
        graphs: bool,
        precompile: Precompile | None = None,
    ) -> LocalExecutor | CudaExecutor:
        """The executor of an engine, with its model runner; see there for the arguments. Captures graphs."""
        raise NotImplementedError


class CpuPlatform(Platform):
    """The CPU of this process."""

    name = "cpu"
    device = torch.device("cpu")
    ops = cpu_ops
    is_host = True

    def has_fast_bfloat16(self) -> bool:
        return packed_linear.has_fast_bfloat16()

    def compile_kernels(self) -> None:
        native.library()

    def make_pool(self, kv: KVCacheSpec, num_blocks: int) -> Tensor:
        """Memory is taken at the first write: torch.zeros writes all of it, which takes seconds."""
        flat = torch.from_numpy(np.zeros(kv.pool_bytes(num_blocks), dtype=np.uint8))
        return flat.view(getattr(torch, kv.dtype)).view(kv.pool_shape(num_blocks))

    def make_executor(
        self,
        model: Model,
        kv: Tensor,
        host_kv: Tensor,
        *,
        num_rows: int,
        max_model_len: int,
        max_num_tokens: int,
        max_decode_steps: int,
        vocab_size: int,
        graphs: bool,
        precompile: Precompile | None = None,
    ) -> LocalExecutor | CudaExecutor:
        runner = ModelRunner(
            model, kv, host_kv, num_rows=num_rows, max_model_len=max_model_len, ops=self.ops, record_graphs=graphs
        )
        return LocalExecutor(runner)


class CudaPlatform(Platform):
    """An NVIDIA GPU. Raises `ParameterError`, in one line, if none can be used."""

    name = "cuda"

    def __init__(self) -> None:
        self.device = diagnostics.find_gpu()
        from octavo.kernels.triton import ops  # needs Triton, which a CPU does without

        self.ops = ops

    def startup_errors(self, doing: str, remedy: Callable[[int], str]) -> AbstractContextManager[None]:
        return diagnostics.startup_errors(self.device, doing, remedy)

    @contextmanager
    def precompiler(self, key: str) -> Iterator[Precompile | None]:
        from octavo.kernels.triton.precompile import Precompiler

        with Precompiler(key, self.device) as precompiler:
            yield precompiler.precompile

    def check_weights(self, weight_bytes: int, args: EngineArgs) -> None:
        diagnostics.check_weights(weight_bytes, args)

    def measure(
        self, model: Model, args: EngineArgs, *, kv_cache: KVCacheSpec, precompile: Precompile | None = None
    ) -> GPUMemoryProfile:
        return profile.measure(model, args, ops=self.ops, kv_cache=kv_cache, precompile=precompile)

    def make_host_pool(self, kv: KVCacheSpec, num_blocks: int) -> Tensor:
        return torch.empty(kv.pool_shape(num_blocks), dtype=getattr(torch, kv.dtype), pin_memory=True)

    def make_executor(
        self,
        model: Model,
        kv: Tensor,
        host_kv: Tensor,
        *,
        num_rows: int,
        max_model_len: int,
        max_num_tokens: int,
        max_decode_steps: int,
        vocab_size: int,
        graphs: bool,
        precompile: Precompile | None = None,
    ) -> CudaExecutor:
        runner = CudaModelRunner(
            model,
            kv,
            host_kv,
            num_rows=num_rows,
            max_model_len=max_model_len,
            max_num_tokens=max_num_tokens,
            max_decode_steps=max_decode_steps,
            vocab_size=vocab_size,
            ops=self.ops,
            graphs=graphs,
        )
        runner.capture(precompile)
        return CudaExecutor(runner)


def find_platform(name: str) -> Platform:
    """The platform of `EngineArgs.device`: "cpu", "cuda", or "auto", a usable GPU or else the CPU."""
    if name == "cpu":
        return CpuPlatform()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warning takes several lines; the one below is enough
        available = torch.cuda.is_available()
    if name == "cuda" or available:
        return CudaPlatform()
    if reason := diagnostics.unusable_gpu_reason():
        logger.warning("device auto uses the CPU, although there seems to be an NVIDIA GPU: %s", reason)
    return CpuPlatform()
