"""Measures how much of a GPU's memory is left for the KV pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from octavo.config import DEFAULT_GPU_MEMORY_UTILIZATION, GIB, EngineArgs
from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.errors import MemoryBudgetError
from octavo.integers import cdiv
from octavo.kernels.metadata import PER_ROW_FIELDS, RaggedBatch, SamplingTensors
from octavo.kernels.ops import Ops
from octavo.runner.memory.budget import (
    GRAPH_BYTES,
    SPARE_BYTES,
    MemoryBudget,
    ceil_2,
    doctor_hint,
    floor_2,
    smaller_pool_hint,
)
from octavo.runner.passes.cuda_graphs import cascade_sizes, decode_sizes
from octavo.runner.passes.graphs import Model
from octavo.runner.passes.prefill_batch import PrefillSizes

Precompile = Callable[..., None]
"""`kernels.triton.precompile.Precompiler.precompile`."""
MIN_KV_BYTES = GIB
"""Smallest KV pool that the values in remedies leave room for: enough to serve requests."""
MAX_UTILIZATION = 0.99
MIN_PASS_TOKENS = 64
"""Smallest step, in tokens, that a remedy suggests."""


@dataclass(frozen=True, slots=True)
class GPUMemoryProfile:
    """Use of a GPU's memory, in bytes.

    total            the GPU's memory
    utilization      share of `total` that this engine may use; other processes' memory does not count
    other_processes  memory of other processes and of the CUDA context
    weights          the model's weights and tables
    activations      the peak of one pass, in addition to the weights
    graphs           what captured decode and prefill passes take in addition
    libraries        what CUDA's libraries and kernels take on first use
    """

    total: int
    utilization: float
    other_processes: int
    weights: int
    activations: int
    graphs: int
    libraries: int

    @property
    def available_kv_bytes(self) -> int:
        """Bytes for the KV pool."""
        return min(int(self.total * self.utilization), self.total - self.other_processes) - self._taken

    @property
    def _taken(self) -> int:
        return self.weights + self.activations + self.graphs + self.libraries + SPARE_BYTES

    def check(self, args: EngineArgs, kv: KVCacheSpec) -> None:
        """Raises `MemoryBudgetError`, with values that fit, if less is left than the smallest KV pool takes."""
        if self.available_kv_bytes < kv.pool_bytes(1):
            remedy = self._remedy(args, max(MIN_KV_BYTES, kv.pool_bytes(1))) or doctor_hint(args)
            raise MemoryBudgetError(
                f"No available memory for the cache blocks: gpu_memory_utilization {self.utilization:g} of "
                f"{gib(self.total)} is {gib(self.total * self.utilization)}, and the engine takes {self}; {remedy}"
            )

    def _remedy(self, args: EngineArgs, kv_bytes: int) -> str:
        """The remedy that leaves `kv_bytes` for the KV pool, the smallest change first. "" if there is none."""
        needed, available = self._taken + kv_bytes, self.total - self.other_processes
        share = ceil_2(needed / self.total)
        if share <= MAX_UTILIZATION and needed <= available:
            return f"raise gpu_memory_utilization to {share:g}"
        passes = self.activations + self.graphs
        fewer = smaller_passes(args, (passes + self.available_kv_bytes - kv_bytes) / passes) if passes else ""
        if share > MAX_UTILIZATION:
            return fewer
        more = f"free {gib(needed - available)} more on the GPU"
        if self.utilization < share:
            more += f" and raise gpu_memory_utilization to {share:g}"
        return f"{fewer}, or {more}" if fewer else more

    def smaller_pool(self, args: EngineArgs, budget: MemoryBudget, num_missing: int) -> str:
        """The remedy that shrinks the KV pool by `num_missing` bytes, and some to spare."""
        kv_bytes = budget.pool_bytes - num_missing - MIN_KV_BYTES
        if args.num_gpu_blocks_override is not None or args.kv_cache_memory_bytes is not None:
            return smaller_pool_hint(args, budget, kv_bytes) or doctor_hint(args)
        share = floor_2((self._taken + kv_bytes) / self.total)
        if replace(self, utilization=share).available_kv_bytes < budget.kv.pool_bytes(1):
            return smaller_passes(args) or doctor_hint(args)
        return f"lower gpu_memory_utilization to {share:g}"

    def __str__(self) -> str:
        return (
            f"weights {gib(self.weights)}, activations {gib(self.activations)}, CUDA graphs {gib(self.graphs)} (an "
            f"estimate), libraries {gib(self.libraries)}; CUDA context and other processes {gib(self.other_processes)}"
        )

    def table(self, budget: MemoryBudget) -> str:
        """Log line: the use of memory, and how many requests of some lengths fit at once."""
        lengths = [n for n in (1024, 4096, 16384, 65536) if n < budget.max_model_len] + [budget.max_model_len]
        capacity = ", ".join(f"{budget.num_requests(n):,.1f} of {n:,} tokens" for n in lengths)
        return (
            f"GPU memory: {self}; KV pool {gib(budget.pool_bytes)}: {budget.num_blocks:,} blocks of "
            f"{budget.kv.block_size}, {budget.num_tokens:,} tokens; requests at once: {capacity}"
        )


def smaller_passes(args: EngineArgs, share: float = 0.5) -> str:
    """The remedy that cuts the largest pass to this share of its memory. "" if that is too small."""
    num_tokens, num_rows = (
        1 << max(0, int((size or 1) * share)).bit_length() >> 1
        for size in (args.max_num_batched_tokens, args.max_num_seqs)
    )
    if num_tokens < MIN_PASS_TOKENS or not num_rows:
        return ""
    return f"lower max_num_batched_tokens to {num_tokens} and max_num_seqs to {num_rows}"


def measure(
    model: Model,
    args: EngineArgs,
    *,
    ops: Ops,
    kv_cache: KVCacheSpec,
    precompile: Precompile | None = None,
    draft: Model | None = None,
) -> GPUMemoryProfile:
    """Run the largest passes of the engine over a KV pool of one block, and measure their memory. draft: a draft model

    This also compiles the kernels of all kinds of passes, or loads them from their cache.
    """
    num_tokens, num_rows = args.max_num_batched_tokens or 1, args.max_num_seqs or 1
    torch.cuda.reset_peak_memory_stats()
    before, other_processes = torch.cuda.memory_allocated(), _outside_torch()
    models = [(model, kv_cache), *([(draft, kv_cache.draft)] if draft and kv_cache.draft else [])]
    pools = [torch.zeros(kv.pool_shape(1), dtype=getattr(torch, kv.dtype), device="cuda") for _, kv in models]
    passes = [(each, pool, kv.state_blocks) for (each, kv), pool in zip(models, pools, strict=True)]
    if precompile is not None:
        kernels = [partial(_pass, *each, [64], ops) for each in passes]
        precompile(*kernels, *(partial(_largest_passes, *each, num_tokens, num_rows, ops) for each in passes))
    for each in passes:
        _largest_passes(*each, num_tokens, num_rows, ops)
    torch.cuda.synchronize()
    activations = torch.cuda.max_memory_reserved() - before
    # All graphs together use as much memory as the largest pass, in addition to passes without a graph.
    num_graphs = len(decode_sizes(num_rows)) + len(cascade_sizes(num_rows))
    num_graphs += len(PrefillSizes.TOKENS_OF_FEW) + len(PrefillSizes.TOKENS_OF_MANY)
    graphs = 0 if args.enforce_eager else activations + num_graphs * GRAPH_BYTES
    pools.clear()
    passes.clear()
    torch.cuda.empty_cache()
    return GPUMemoryProfile(
        total=torch.cuda.mem_get_info()[1],
        utilization=args.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION,
        other_processes=other_processes,
        weights=before,
        activations=activations,
        graphs=graphs,
        libraries=max(0, _outside_torch() - other_processes),
    )


def _outside_torch() -> int:
    """Bytes in use outside of torch's allocator."""
    free, total = torch.cuda.mem_get_info()
    return max(0, total - free - torch.cuda.memory_reserved())


def _largest_passes(
    model: Model, kv: torch.Tensor, state_blocks: int, num_tokens: int, num_rows: int, ops: Ops
) -> None:
    singles = [1] * min(num_rows, num_tokens)
    _pass(model, kv, state_blocks, singles, ops)
    _pass(model, kv, state_blocks, [num_tokens // len(singles)] * len(singles), ops)
    _pass(model, kv, state_blocks, [num_tokens - len(singles) + 1, *singles[1:]], ops)


@torch.inference_mode()
def _pass(model: Model, kv: torch.Tensor, state_blocks: int, counts: list[int], ops: Ops) -> None:
    """Run a pass of sequences with these token counts, all in the null block, and sample a token for each."""
    num_tokens, num_seqs, block_size = sum(counts), len(counts), kv.shape[4]
    ends = torch.tensor([0, *counts], device="cuda").cumsum(0)
    states = torch.zeros(num_seqs, state_blocks, dtype=torch.int32, device="cuda") if state_blocks else None
    batch = RaggedBatch(
        positions=torch.zeros(num_tokens, dtype=torch.int64, device="cuda"),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device="cuda"),
        query_start=ends.int(),
        seq_lens=ends.diff().int(),
        block_tables=torch.zeros(num_seqs, cdiv(max(counts), block_size), dtype=torch.int32, device="cuda"),
        max_query_len=max(counts),
        max_seq_len=max(counts),
        state_tables=states,
        state_reads=states,
    )
    logits = model.forward(torch.zeros(num_tokens, dtype=torch.int64, device="cuda"), batch, kv, ends[1:] - 1)
    zeros = [0] * num_seqs
    ops.sample_checked(logits, SamplingTensors.from_lists(*[zeros] * len(PER_ROW_FIELDS), device="cuda"))


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
