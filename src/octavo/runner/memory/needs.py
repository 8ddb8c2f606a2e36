"""Memory of a model before its KV pool, estimated without loading it or importing torch: for `octavo doctor` and the
simulator. An engine on a GPU measures activations by running its largest passes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.config import DEFAULT_GPU_MEMORY_UTILIZATION, EngineArgs
from octavo.core.kv_cache_spec import ITEMSIZE, KVCacheSpec
from octavo.errors import MemoryBudgetError
from octavo.models.spec import ModelSpec
from octavo.runner.memory.budget import GRAPH_BYTES, SPARE_BYTES, FreeMemory, doctor_hint, gib

CONTEXT_BYTES = 512 << 20
"""Estimated memory of the CUDA context on an otherwise empty GPU."""
NUM_PREFILL_GRAPHS = 17
"""Equal to the number in `runner.prefill_batch`, which imports torch; a test compares them."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine the model is to run on.

    device_bytes   memory of the GPU; None on a CPU      held_bytes   part of it in use by CUDA and other processes
    free_bytes     free memory of the host               num_devices  GPUs like it, which may share the model
    """

    name: str
    free_bytes: int
    device_bytes: int | None = None
    held_bytes: int = 0
    num_devices: int = 1

    @property
    def device(self) -> str:
        return "cpu" if self.device_bytes is None else "cuda"


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Memory of a model in bytes, without its K and V, and the layout of these. dtype: of the activations"""

    kv: KVCacheSpec
    weights: int
    activations: int
    graphs: int
    dtype: str

    @property
    def all(self) -> int:
        return self.weights + self.activations + self.graphs


def memory_needs(args: EngineArgs, spec: ModelSpec, machine: Machine) -> MemoryNeeds:
    """The memory needs of a model on a machine, or of each of its ranks, before its KV pool."""
    if spec.recurrent_layers:
        args.check_recurrent(spec.architecture)
    has_bfloat16 = has_bfloat16_products() or spec.keeps_bits_on("cpu")
    dtype = args.resolved_dtype(machine.device, spec.dtype, has_bfloat16=has_bfloat16)
    size = ITEMSIZE[dtype]
    activations = activation_bytes(args, spec, size)
    graphs = 0
    if machine.device == "cuda" and not args.enforce_eager:
        graphs = activations + (num_decode_graphs(args.max_num_seqs or 1) + NUM_PREFILL_GRAPHS) * GRAPH_BYTES
    own = spec.of_rank(args.tensor_parallel_size)
    weights = own.weight_bytes(size, args.quantization, machine.device)
    max_len = args.grouped_len(spec.max_model_len(args.max_model_len))
    prefers_float8 = bool(spec.kv_scheme) and machine.device == "cuda"  # whose capability is not known
    kv_dtype = args.resolved_kv_dtype(machine.device, dtype, prefers_float8=prefers_float8)
    kv = KVCacheSpec.of(own, args.block_size, kv_dtype, max_len=max_len)
    return MemoryNeeds(kv, weights, activations, graphs, dtype)


def has_bfloat16_products() -> bool:
    """True if this processor has bfloat16 matrix products."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    return "avx512_bf16" in flags or "amx_tile" in flags


def activation_bytes(args: EngineArgs, spec: ModelSpec, itemsize: int) -> int:
    """Peak activation memory of a step: its widest layer, or the hidden states plus each row's logits in the model's
    dtype and in float32."""
    num_tokens = args.max_num_batched_tokens or 1
    num_rows = min(args.max_num_seqs or 1, num_tokens)
    layer = num_tokens * (2 * spec.hidden_size + spec.activation_size) * itemsize
    logits = num_tokens * 2 * spec.hidden_size * itemsize + num_rows * spec.vocab_size * (itemsize + 4)
    return max(layer, logits)


def num_decode_graphs(max_rows: int) -> int:
    """Number of CUDA graphs for decode batches of up to `max_rows` rows, graphs with cascade attention included."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, max_rows + 32, 32)]
    sizes = [*(size for size in sizes if size < max_rows), max_rows]
    return len(sizes) + len([size for size in sizes if size in (8, 16) or size % 32 == 0 or size == max_rows >= 8])


def free_for_kv(args: EngineArgs, need: MemoryNeeds, machine: Machine) -> FreeMemory:
    """The memory that each rank has for K and V. Raises `MemoryBudgetError` if the other needs do not fit."""
    host = machine.free_bytes // args.tensor_parallel_size
    if machine.device_bytes is None:
        return FreeMemory(weights=need.weights, host=host - need.weights)
    share = int(machine.device_bytes * (args.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION))
    device_bytes = share - need.all - machine.held_bytes - SPARE_BYTES
    if device_bytes <= 0:
        raise MemoryBudgetError(
            f"No available memory for the cache blocks: {gib(share)} of {machine.name}'s "
            f"{gib(machine.device_bytes)} may be used; weights take {gib(need.weights)}, activations "
            f"{gib(need.activations)}, CUDA graphs {gib(need.graphs)}, CUDA and others {gib(machine.held_bytes)}; "
            f"{doctor_hint(args)}"
        )
    return FreeMemory(weights=need.weights, host=host, device=device_bytes)
