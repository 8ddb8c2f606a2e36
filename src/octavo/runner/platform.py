"""Platforms: everything that differs between a CPU and a GPU, for the model runner and for the start of an engine.

`find_platform` chooses one, once per engine. Another kind of device needs a subclass of `Platform`, and operations with
the signatures of `kernels.ops.Ops`.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from octavo.config import EngineArgs
from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.errors import ParameterError
from octavo.kernels.cpu import invariant_ops, native, packed_linear
from octavo.kernels.cpu import ops as cpu_ops
from octavo.kernels.ops import Ops
from octavo.kernels.row_state import DecodeInputs
from octavo.models.spec import GPTSpec, ModelSpec
from octavo.runner.memory import diagnostics, profile
from octavo.runner.passes.cuda_graphs import CudaGraphs
from octavo.runner.passes.graphs import Graphs, Model
from octavo.runner.passes.recorded_graphs import RecordedGraphs
from octavo.runner.streams import CompletedEvent, CudaStream, CudaTimer, HostTimer, RecordableEvent, SideStream, Timer

if TYPE_CHECKING:
    from octavo.runner.memory.profile import GPUMemoryProfile, Precompile
    from octavo.runner.ranks.communicator import Communicator

logger = logging.getLogger("octavo")


class Platform:
    """A kind of device, and the one device that an engine uses. The defaults are for a device that needs nothing else.

    name           the `device` of `EngineArgs`
    device         torch's
    ops            its operations
    is_host        operations compute in the host's memory, and have done so when their call returns. Then the host may
                   read the state of the rows at any time
    has_float8     pools can be in float8 (e4m3)
    has_cascade    attention reads a prefix once for neighbours that share it (`RaggedBatch.common_prefix_lens`)
    """

    name: str
    device: torch.device
    ops: Ops
    is_host = False
    has_float8 = False
    has_cascade = False

    # -- start of an engine --------------------------------------------------------------------------------------------

    def prefers_bfloat16(self, spec: ModelSpec) -> bool:
        """True if a model in bfloat16 is faster than in float32, and not only smaller."""
        return True

    def check_ranks(self, size: int) -> None:
        """Raises `ParameterError` if there are fewer devices than tensor parallel ranks."""

    def startup_errors(self, doing: str, remedy: Callable[[int], str]) -> AbstractContextManager[None]:
        """Turns device errors into one line while an engine starts; see `memory.diagnostics.startup_errors`."""
        return nullcontext()

    def precompiler(self, key: str, ranks: Communicator | None) -> AbstractContextManager[Precompile | None]:
        """Compiles kernels in parallel while files are read; the function lists the kernels of passes.

        key   everything that selects kernels, besides the code, the libraries and the device
        """
        return nullcontext()

    def compile_kernels(self) -> None:
        """Compile what a model needs for its first pass. Called on a thread while weights are loaded."""

    def make_batch_invariant(self, spec: ModelSpec, dtype: str, args: EngineArgs) -> None:
        """Operations of this instance give a row the same bits in every batch; see `EngineArgs.batch_invariant`.

        Raises `ParameterError` if they cannot, for this model in this dtype.
        """
        raise NotImplementedError

    def check_weights(self, weight_bytes: int, args: EngineArgs) -> None:
        """Raises `MemoryBudgetError` if the device has too little memory for the weights, before they are loaded."""

    def measure(
        self,
        model: Model,
        args: EngineArgs,
        *,
        kv_cache: KVCacheSpec,
        precompile: Precompile | None = None,
        draft: Model | None = None,
    ) -> GPUMemoryProfile:
        """The memory that passes of the loaded model take; see `memory.profile.measure`. Not called if `is_host`."""
        raise NotImplementedError

    # -- memory --------------------------------------------------------------------------------------------------------

    def make_pool(self, kv: KVCacheSpec, num_blocks: int) -> Tensor:
        """A KV pool of zeros. Raises `MemoryError`, or torch's error for a lack of memory."""
        return self.zeros(kv.pool_shape(num_blocks), getattr(torch, kv.dtype))

    def make_host_pool(self, kv: KVCacheSpec, num_blocks: int) -> Tensor:
        """A swap space, in memory as that of `empty_host`."""
        return self.empty_host(kv.pool_shape(num_blocks), getattr(torch, kv.dtype))

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory that the device copies from and to, without the host waiting."""
        return torch.empty(shape, dtype=dtype)

    def to_device(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to the device, without waiting for earlier work. On a CPU: the tensor itself."""
        return tensor.to(self.device)

    def index_tensor(self, values: Seq[int]) -> Tensor:
        """[len(values)] int64 on the device."""
        return self.to_device(torch.tensor(values, dtype=torch.int64))

    def to_lists(self, tensors: Seq[Tensor]) -> list[list[Any]]:
        """All tensors as lists. Waits for the device only once."""
        return [tensor.tolist() for tensor in tensors]

    # -- queued work ---------------------------------------------------------------------------------------------------

    def record_event(self, *, blocking: bool = False) -> RecordableEvent:
        """An event after all work queued on the current stream. blocking: threads that wait for it sleep, not spin."""
        return CompletedEvent()

    def make_timer(self) -> Timer | None:
        """None: nothing is measured."""
        return None

    def side_stream(self) -> SideStream:
        return SideStream()

    def make_graphs(self, inputs: DecodeInputs) -> Graphs | None:
        """Graphs of passes over these inputs; None: the device has none."""
        return None

    def synchronize(self) -> None:
        """Wait for all queued work. Raises `RuntimeError` if the device no longer answers.

        After a failed step call `release_memory` first: a device may report a transient error once.
        """

    def release_memory(self) -> None:
        """Wait for queued work after a failure, and return the allocator's cached memory to the device.

        The inputs of the queued work may be freed already, so its errors are ignored. The cache may be too fragmented
        for another pass.
        """


class CpuPlatform(Platform):
    """The CPU of this process."""

    name = "cpu"
    device = torch.device("cpu")
    ops: Ops = cpu_ops
    is_host = True

    def prefers_bfloat16(self, spec: ModelSpec) -> bool:
        keeps_bits = spec.keeps_bits_on("cpu") and native.library() is not None
        return keeps_bits or packed_linear.has_fast_bfloat16()

    def compile_kernels(self) -> None:
        native.library()

    def make_batch_invariant(self, spec: ModelSpec, dtype: str, args: EngineArgs) -> None:
        if dtype != "bfloat16":
            text, remedy = f"dtype {dtype}", "use bfloat16"
        elif native.library() is None:
            text, remedy = "a CPU without a C++ compiler", "install g++"
        elif not all(native.supports_sizes(size, spec.num_heads // heads) for heads, size in spec.kv_heads):
            text, remedy = f"the attention heads of {spec.architecture}", "remove it"
        elif _projects_embeddings(spec):
            text, remedy = f"{spec.architecture} with projected embeddings", "remove it"
        else:
            self.ops = invariant_ops
            return
        raise _not_invariant(text, remedy)

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory is taken at the first write: torch.zeros writes all of it, which takes seconds."""
        return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)

    def make_host_pool(self, kv: KVCacheSpec, num_blocks: int) -> Tensor:
        return self.make_pool(kv, num_blocks)

    def make_timer(self) -> Timer:
        return HostTimer()

    def make_graphs(self, inputs: DecodeInputs) -> Graphs:
        return RecordedGraphs(inputs)


class CudaPlatform(Platform):
    """An NVIDIA GPU. Raises `ParameterError`, in one line, if none can be used."""

    name = "cuda"
    has_cascade = True

    def __init__(self) -> None:
        self.device = diagnostics.find_gpu()
        self.has_float8 = torch.cuda.get_device_capability(self.device) >= (8, 9)
        from octavo.kernels.triton import ops  # needs Triton, which a CPU does without

        self.ops = ops

    def make_batch_invariant(self, spec: ModelSpec, dtype: str, args: EngineArgs) -> None:
        if args.tensor_parallel_size > 1:  # NCCL's order of addition depends on the size of the sum
            text, remedy = f"tensor_parallel_size {args.tensor_parallel_size} on a GPU", "use one GPU"
        elif args.quantization or any(form.is_kept_on(self.name) for form, _ in spec.forms + spec.vocabulary_forms):
            text, remedy = "quantised weights on a GPU", "use a checkpoint in 16 bits, or set device to cpu"
        elif spec.recurrent_layers:
            text, remedy = "recurrent layers on a GPU", "set device to cpu"
        elif _projects_embeddings(spec):
            text, remedy = f"{spec.architecture} with projected embeddings", "remove it"
        else:
            from octavo.kernels.triton import invariant_ops as ops

            self.ops, self.has_cascade = ops, False
            return
        raise _not_invariant(text, remedy)

    def check_ranks(self, size: int) -> None:
        if 1 < size > (num_gpus := torch.cuda.device_count()):
            text = f"tensor_parallel_size {size} needs {size} GPUs; there are {num_gpus}"
            raise ParameterError(text, param="tensor_parallel_size")

    def startup_errors(self, doing: str, remedy: Callable[[int], str]) -> AbstractContextManager[None]:
        return diagnostics.startup_errors(self.device, doing, remedy)

    @contextmanager
    def precompiler(self, key: str, ranks: Communicator | None) -> Iterator[Precompile | None]:
        from octavo.kernels.triton.precompile import Precompiler

        with Precompiler(key, self.device, ranks) as precompiler:
            yield precompiler.precompile

    def check_weights(self, weight_bytes: int, args: EngineArgs) -> None:
        diagnostics.check_weights(weight_bytes, args)

    def measure(
        self,
        model: Model,
        args: EngineArgs,
        *,
        kv_cache: KVCacheSpec,
        precompile: Precompile | None = None,
        draft: Model | None = None,
    ) -> GPUMemoryProfile:
        return profile.measure(model, args, ops=self.ops, kv_cache=kv_cache, precompile=precompile, draft=draft)

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self.device, non_blocking=True) if tensor.numel() else tensor.to(self.device)

    def to_lists(self, tensors: Seq[Tensor]) -> list[list[Any]]:
        flat = torch.cat(
            [(t.double().view(torch.int64) if t.is_floating_point() else t.long()).flatten() for t in tensors]
        )
        parts = torch.split(flat.cpu(), [t.numel() for t in tensors])
        return [
            (part.view(torch.float64) if t.is_floating_point() else part).view(t.shape).tolist()
            for t, part in zip(tensors, parts, strict=True)
        ]

    def record_event(self, *, blocking: bool = False) -> RecordableEvent:
        event: RecordableEvent = cast("Any", torch.cuda.Event)(blocking=blocking)
        event.record()
        return event

    def make_timer(self) -> Timer:
        return CudaTimer()

    def side_stream(self) -> SideStream:
        return CudaStream(self.device)

    def make_graphs(self, inputs: DecodeInputs) -> Graphs:
        return CudaGraphs(inputs.step_counter, len(inputs.rows))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def release_memory(self) -> None:
        with suppress(RuntimeError):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def _projects_embeddings(spec: ModelSpec) -> bool:
    """By torch's products."""
    return isinstance(spec, GPTSpec) and spec.names.project_in in spec.others


def _not_invariant(text: str, remedy: str) -> ParameterError:
    return ParameterError(f"batch_invariant is not supported with {text}; {remedy}", param="batch_invariant")


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
