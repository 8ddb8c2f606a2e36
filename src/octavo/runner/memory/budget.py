"""Sizes of the KV pool and the swap space, from the free memory. Errors state the numbers and a remedy."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.config import DEFAULT_CPU_KV_BYTES, DEFAULT_SWAP_BYTES, GIB, EngineArgs
from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.errors import MemoryBudgetError

GRAPH_BYTES = 8 << 20
"""Device memory of each captured graph: its nodes and arguments. All graphs share the memory of their tensors."""
SPARE_BYTES = 256 << 20
"""Reserve for what a profile cannot measure: cuBLAS workspaces, kernels loaded later, fragmentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """Memory for K and V, in bytes.

    weights   size of the weights, which the other two do not include
    host      of the host: for the swap space, and on a CPU for the KV pool
    device    of a GPU, for the KV pool; None on a CPU
    """

    weights: int
    host: int
    device: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Numbers of blocks and the longest sequence that fit in memory. The null block is not counted: it is one more."""

    kv: KVCacheSpec
    free: FreeMemory
    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    warnings: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Of the longest sequence that the pool can hold."""
        return self.kv.longest(self.num_blocks)

    def num_requests(self, length: int) -> float:
        """Requests of this many tokens that the pool holds at once."""
        is_even = not self.kv.windows and not self.kv.state_bytes
        return self.num_tokens / length if is_even else self.num_blocks / self.kv.blocks_of(length)

    @property
    def longest(self) -> int:
        """Tokens of a sequence that takes the whole pool. Its last token takes no slot."""
        return self.num_tokens + 1

    @property
    def pool_bytes(self) -> int:
        return self.kv.pool_bytes(self.num_blocks)

    @property
    def swap_bytes(self) -> int:
        return self.num_host_blocks * self.kv.bytes_per_block

    @property
    def free_for_swap(self) -> int:
        """Bytes of the host that the KV pool leaves; negative if it does not fit."""
        return self.free.host - (self.pool_bytes if self.free.device is None else 0)

    def __str__(self) -> str:
        free = gib(self.free.host)
        if self.free.device is not None:
            free = f"{gib(self.free.device)} on the device and {free} on the host"
        block = f"of {self.kv.block_size} tokens, {gib(self.kv.bytes_per_block)} each"
        pool = f"KV pool {gib(self.pool_bytes)} ({self.num_blocks} blocks {block})"
        if self.num_blocks < 0:
            short = f"{gib(-self.pool_bytes)} too little" if self.pool_bytes < 0 else "no room"
            pool = f"{short} for a KV pool (blocks {block})"
        return (
            f"weights {gib(self.free.weights)}, {pool}, swap space {gib(self.swap_bytes)}, "
            f"free memory after the weights {free}"
        )


def plan_memory(args: EngineArgs, kv: KVCacheSpec, free: FreeMemory, *, model_len: int) -> MemoryBudget:
    """Choose the sizes of the KV pool and the swap space, and the longest sequence.

    model_len   positions of the model

    Raises `MemoryBudgetError` if no request fits, or none of the given `max_model_len`.
    """
    if free.host <= 0:
        raise MemoryBudgetError(
            f"the weights take {gib(free.weights)}, {gib(-free.host)} more than the free memory; free more than "
            f"that, or choose a smaller model or dtype; {doctor_hint(args)}"
        )
    given = args.max_model_len
    wanted_len = model_len if given is None or given < 0 else min(given, model_len)
    num_blocks = _pool_blocks(args, kv, free, wanted_len)
    budget = MemoryBudget(kv, free, num_blocks, 0, wanted_len)
    if given in (None, -1):
        budget = replace(budget, max_model_len=min(wanted_len, budget.longest))
    wanted_host_blocks = _swap_bytes(args, budget) // kv.bytes_per_block
    budget = replace(budget, num_host_blocks=min(wanted_host_blocks, max(0, num_blocks)))
    is_cut = budget.num_host_blocks < wanted_host_blocks
    _check_fits(args, budget, wanted_len)
    return replace(budget, warnings=tuple(_warnings(args, budget, model_len, is_cut)))


def _pool_blocks(args: EngineArgs, kv: KVCacheSpec, free: FreeMemory, wanted_len: int) -> int:
    """Usable blocks of the KV pool: as given, else what fits in its memory."""
    if args.num_gpu_blocks_override is not None:
        return args.num_gpu_blocks_override
    if args.kv_cache_memory_bytes is not None:
        return kv.num_blocks(args.kv_cache_memory_bytes)
    if free.device is not None:
        return kv.num_blocks(free.device)
    pool_bytes = min(DEFAULT_CPU_KV_BYTES, free.host // 4)
    if args.gpu_memory_utilization is not None:
        pool_bytes = int(args.gpu_memory_utilization * (free.host + free.weights)) - free.weights
    max_blocks = (args.resolved("cpu").max_num_seqs or 0) * kv.blocks_of(wanted_len, kv.max_chunk)
    return min(kv.num_blocks(pool_bytes), max_blocks)


def _swap_bytes(args: EngineArgs, budget: MemoryBudget) -> int:
    """Bytes of the host for the swap space. The default takes at most what the KV pool leaves."""
    if args.preemption_mode == "recompute":
        return 0
    if args.swap_space is not None:
        return int(args.swap_space * GIB)
    return min(DEFAULT_SWAP_BYTES, max(0, budget.free_for_swap))


def _warnings(args: EngineArgs, budget: MemoryBudget, model_len: int, swap_is_cut: bool) -> Iterator[str]:
    given = args.max_model_len
    if given is not None and given > model_len:
        yield f"max_model_len {given} exceeds the model's {model_len} positions; using {model_len}"
    if given is None and budget.longest < model_len:
        yield f"the KV pool holds {budget.longest} tokens; max_model_len is {budget.longest} instead of {model_len}"
    if swap_is_cut and args.swap_space is not None:
        yield f"swap_space {args.swap_space:g} GiB is larger than the KV pool; cut to its size"


def _check_fits(args: EngineArgs, budget: MemoryBudget, wanted_len: int) -> None:
    """Raises `MemoryBudgetError`, with a remedy, if no sequence fits in the budget or the budget not in memory."""
    if budget.num_blocks < 1 or budget.max_model_len < 2:
        remedy = _larger_pool(args, budget, wanted_len)
    elif budget.max_model_len > budget.longest:
        raise MemoryBudgetError(
            f"To serve at least one request with the model's max seq len ({budget.max_model_len}), "
            f"{budget.kv.blocks_of(budget.max_model_len - 1, budget.kv.max_chunk)} blocks are needed and the pool has "
            f"{budget.num_blocks}; the largest max_model_len that fits is {budget.longest} (-1 or auto picks it). "
            f"{budget}"
        )
    elif budget.swap_bytes > budget.free_for_swap or _pool_is_too_large(budget):
        remedy = _smaller_parts(args, budget)
    else:
        return
    raise MemoryBudgetError(f"No available memory for the cache blocks: {budget}; {remedy}")


def _pool_is_too_large(budget: MemoryBudget) -> bool:
    room = budget.free.host if budget.free.device is None else budget.free.device
    return budget.pool_bytes > room


def doctor_hint(args: EngineArgs) -> str:
    """The remedy of errors without a known value that fits."""
    return f"run `octavo doctor {args.model}` for flags that fit"


def smaller_pool_hint(args: EngineArgs, budget: MemoryBudget, num_bytes: int) -> str:
    """The remedy that cuts a KV pool of a given size to `num_bytes`: its flag and a value.

    "" if no flag gave the size, or if no block fits.
    """
    smaller = replace(budget, num_blocks=budget.kv.num_blocks(num_bytes))
    if args.num_gpu_blocks_override is not None:
        remedy = f"lower num_gpu_blocks_override to {smaller.num_blocks}"
    elif args.kv_cache_memory_bytes is not None:
        remedy = f"lower kv_cache_memory_bytes to {smaller.pool_bytes}"
    else:
        return ""
    if smaller.num_blocks < 1:
        return ""
    shorter = args.max_model_len not in (None, -1) and smaller.max_model_len > smaller.longest
    return f"{remedy} and max_model_len to {smaller.longest}" if shorter else remedy


def _larger_pool(args: EngineArgs, budget: MemoryBudget, wanted_len: int) -> str:
    """The remedy that makes room for a sequence of `wanted_len` tokens, or for the longest one that memory allows."""
    if wanted_len < 2:
        return "raise max_model_len to 2 or more: one prompt token and one output token"
    kv, free, room = budget.kv, budget.free, _room(args, budget)
    if kv.num_blocks(room) < (least := kv.blocks_of(1)):
        return f"free {gib(kv.pool_bytes(least) - room)} more; {doctor_hint(args)}"
    larger = replace(budget, num_blocks=min(kv.blocks_of(wanted_len - 1, kv.max_chunk), kv.num_blocks(room)))
    remedy = f"{'set' if args.kv_cache_memory_bytes is None else 'raise'} kv_cache_memory_bytes to {larger.pool_bytes}"
    if args.num_gpu_blocks_override is not None:
        remedy = f"raise num_gpu_blocks_override to {larger.num_blocks}"
    elif args.kv_cache_memory_bytes is None and args.gpu_memory_utilization is not None:
        share = ceil_2((free.weights + larger.pool_bytes) / (free.weights + free.host))
        remedy = f"raise gpu_memory_utilization to {share:g}"
    shorter = args.max_model_len not in (None, -1) and larger.longest < wanted_len
    return f"{remedy} and lower max_model_len to {larger.longest}" if shorter else remedy


def _smaller_parts(args: EngineArgs, budget: MemoryBudget) -> str:
    """The remedy that makes the KV pool and the swap space fit."""
    remedies = []
    if _pool_is_too_large(budget):
        remedies.append(smaller_pool_hint(args, budget, _room(args, budget)))
    if 0 <= budget.free_for_swap < budget.swap_bytes:
        remedies.append(f"lower swap_space to {floor_2(budget.free_for_swap / GIB):g}")
    return ", ".join(remedies) if all(remedies) else doctor_hint(args)


def _room(args: EngineArgs, budget: MemoryBudget) -> int:
    """Bytes that the KV pool may take. Half of the free memory if it holds a swap space, too: that is no larger."""
    if budget.free.device is not None:
        return budget.free.device
    return budget.free.host // 2 if args.swap_space and args.preemption_mode != "recompute" else budget.free.host


def ceil_2(number: float) -> float:
    """Round up to two decimals."""
    return math.ceil(number * 100) / 100


def floor_2(number: float) -> float:
    """Round down to two decimals."""
    return math.floor(number * 100) / 100


LESS_SWAP = "lower swap_space, or set it to 0"
"""The remedy if pinned memory or its copies fail."""


def time_swaps(move: Callable[[list[tuple[int, int]]], None], num_blocks: int) -> float:
    """Seconds that a block takes to swap out, measured. Overwrites host blocks.

    move   copies (device block, host block) pairs, and returns after the last copy
    """
    num = min(num_blocks, 16)
    pairs = [(i, num + 1 - i) for i in range(1, num + 1)]  # not runs: most swaps move blocks one by one
    times = []
    for _ in range(4):  # the first one also makes the system allocate host memory
        begin = time.perf_counter()
        move(pairs)
        times.append(time.perf_counter() - begin)
    return min(times) / len(pairs)


_limit = sys.maxsize


def limit_free_memory(num_bytes: int) -> None:
    """Count on so many bytes at most from now on: other engines start on this machine, too."""
    global _limit
    _limit = num_bytes


def free_memory() -> int:
    """Bytes that this process may still allocate: the machine's available memory, or less if its cgroup limits it."""
    available = 0
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        available = min(available or int(limit), max(0, int(limit) - int(used)))
    return min(_limit, available or 4 * GIB)  # without /proc: a small guess


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 100 else f"{num_bytes / 1024:.0f} KiB"
