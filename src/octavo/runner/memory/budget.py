"""Sizes of the KV pool and the swap space, from the free memory. Errors state the numbers and a remedy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.config import DEFAULT_CPU_KV_BYTES, DEFAULT_SWAP_BYTES, GIB, EngineArgs
from octavo.errors import MemoryBudgetError
from octavo.integers import cdiv


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Numbers of blocks and the longest sequence that fit in memory. The null block is not counted: it is one more."""

    weight_bytes: int
    bytes_per_block: int
    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    block_size: int
    free_bytes: int
    device_bytes: int | None = None
    warnings: tuple[str, ...] = ()

    def table(self) -> str:
        """One line, for messages."""
        kv, swap = (self.num_blocks + 1) * self.bytes_per_block, self.num_host_blocks * self.bytes_per_block
        free = _gib(self.free_bytes)
        if self.device_bytes is not None:
            free = f"{_gib(self.device_bytes)} on the device and {free} on the host"
        return (
            f"weights {_gib(self.weight_bytes)}, KV pool {_gib(kv)} ({self.num_blocks} blocks of {self.block_size} "
            f"tokens, {_gib(self.bytes_per_block)} each), swap space {_gib(swap)}, free memory after the weights "
            f"{free}"
        )


def plan_memory(
    args: EngineArgs,
    *,
    bytes_per_token: int,
    weight_bytes: int,
    model_len: int,
    free_bytes: int | None = None,
    device_bytes: int | None = None,
) -> MemoryBudget:
    """Choose the sizes of the KV pool and the swap space, and the longest sequence.

    bytes_per_token   K and V of one token over all layers
    weight_bytes      size of the weights; not part of `free_bytes`
    model_len         positions of the model
    free_bytes        memory left by the weights; None: measure it, with the weights already loaded
    device_bytes      memory for the KV pool on a GPU. `free_bytes` is then the host's, for the swap space only

    Raises `MemoryBudgetError` if no request fits, or none of the given `max_model_len`.
    """
    free = free_memory() if free_bytes is None else free_bytes
    if free_bytes is not None and free_bytes <= 0:
        raise MemoryBudgetError(
            f"the weights take {_gib(weight_bytes)}, {_gib(-free_bytes)} more than the free memory; free more than "
            f"that, or choose a smaller model or dtype; {doctor_hint(args)}"
        )
    size = args.block_size
    per_block = bytes_per_token * size
    given = args.max_model_len
    wanted_len = model_len if given in (None, -1) else min(given or 0, model_len)
    warnings = []
    if given is not None and given > model_len:
        warnings.append(f"max_model_len {given} exceeds the model's {model_len} positions; using {model_len}")
    if args.num_gpu_blocks_override is not None:
        num_blocks = args.num_gpu_blocks_override
    elif args.kv_cache_memory_bytes is not None:
        num_blocks = args.kv_cache_memory_bytes // per_block - 1
    elif device_bytes is not None:
        num_blocks = device_bytes // per_block - 1
    else:
        max_blocks = (args.resolved("cpu").max_num_seqs or 0) * cdiv(wanted_len, size)
        pool = min(DEFAULT_CPU_KV_BYTES, free // 4)
        if args.gpu_memory_utilization is not None:
            pool = int(args.gpu_memory_utilization * (free + weight_bytes)) - weight_bytes
        num_blocks = min(pool // per_block - 1, max_blocks)
    longest = num_blocks * size + 1  # of one sequence alone; its last token takes no slot
    max_model_len = wanted_len if given is not None and given > 0 else min(wanted_len, longest)
    if given is None and longest < wanted_len:
        warnings.append(f"the KV pool holds {longest} tokens; max_model_len is {longest} instead of {model_len}")
    if args.swap_space is None:  # the default takes at most what is left
        pool_bytes = 0 if device_bytes is not None else (num_blocks + 1) * per_block
        host = min(DEFAULT_SWAP_BYTES, max(0, free - pool_bytes))
    else:
        host = int(args.swap_space * GIB)
    if args.preemption_mode == "recompute":
        host = 0
    num_host = host // per_block
    if num_host > num_blocks:
        if args.swap_space is not None:
            warnings.append(f"swap_space {args.swap_space:g} GiB is larger than the KV pool; cut to its size")
        num_host = max(0, num_blocks)
    budget = MemoryBudget(
        weight_bytes, per_block, num_blocks, num_host, max_model_len, size, free, device_bytes, tuple(warnings)
    )
    if num_blocks < 1 or max_model_len < 2:
        remedy = _larger_pool(args, budget, wanted_len)
        raise MemoryBudgetError(f"No available memory for the cache blocks: {budget.table()}; {remedy}")
    if max_model_len > longest:
        raise MemoryBudgetError(
            f"To serve at least one request with the model's max seq len ({max_model_len}), "
            f"{cdiv(max_model_len - 1, size)} blocks are needed and the pool has {num_blocks}; the largest "
            f"max_model_len that fits is {longest} (-1 or auto picks it). {budget.table()}"
        )
    kv_bytes = (num_blocks + 1) * per_block
    host_bytes = num_host * per_block + (kv_bytes if device_bytes is None else 0)
    if (free and host_bytes > free) or (device_bytes is not None and kv_bytes > device_bytes):
        remedy = _smaller_parts(args, budget)
        raise MemoryBudgetError(f"No available memory for the cache blocks: {budget.table()}; {remedy}")
    return budget


def doctor_hint(args: EngineArgs) -> str:
    """The remedy of errors without a known value that fits."""
    return f"run `octavo doctor {args.model}` for flags that fit"


def smaller_pool_hint(args: EngineArgs, budget: MemoryBudget, num_bytes: int) -> str:
    """The remedy that cuts a KV pool of a given size to `num_bytes`: its flag and a value.

    "" if no flag gave the size, or if no block fits.
    """
    num_blocks = num_bytes // budget.bytes_per_block - 1
    if args.num_gpu_blocks_override is not None:
        remedy = f"lower num_gpu_blocks_override to {num_blocks}"
    else:
        remedy = f"lower kv_cache_memory_bytes to {(num_blocks + 1) * budget.bytes_per_block}"
    if num_blocks < 1 or (args.num_gpu_blocks_override is None and args.kv_cache_memory_bytes is None):
        return ""
    longest = num_blocks * budget.block_size + 1
    shorter = args.max_model_len not in (None, -1) and budget.max_model_len > longest
    return f"{remedy} and max_model_len to {longest}" if shorter else remedy


def _larger_pool(args: EngineArgs, budget: MemoryBudget, wanted_len: int) -> str:
    """The remedy that makes room for a sequence of `wanted_len` tokens, or for the longest one that memory allows."""
    if wanted_len < 2:
        return "raise max_model_len to 2 or more: one prompt token and one output token"
    size, per_block, room = budget.block_size, budget.bytes_per_block, _room(args, budget)
    if room < 2 * per_block:
        return f"free {_gib(2 * per_block - room)} more; {doctor_hint(args)}"
    num_bytes = min(1 + cdiv(wanted_len - 1, size), room // per_block) * per_block
    remedy = f"{'set' if args.kv_cache_memory_bytes is None else 'raise'} kv_cache_memory_bytes to {num_bytes}"
    if args.kv_cache_memory_bytes is None and args.gpu_memory_utilization is not None:
        share = ceil_2((budget.weight_bytes + num_bytes) / (budget.weight_bytes + budget.free_bytes))
        remedy = f"raise gpu_memory_utilization to {share:g}"
    longest = (num_bytes // per_block - 1) * size + 1
    shorter = args.max_model_len not in (None, -1) and longest < wanted_len
    return f"{remedy} and lower max_model_len to {longest}" if shorter else remedy


def _smaller_parts(args: EngineArgs, budget: MemoryBudget) -> str:
    """The remedy that makes the KV pool and the swap space fit."""
    kv_bytes, remedies, left = (budget.num_blocks + 1) * budget.bytes_per_block, [], budget.free_bytes
    if budget.device_bytes is None:
        left -= kv_bytes
    if left < 0 or (budget.device_bytes is not None and kv_bytes > budget.device_bytes):
        remedies.append(smaller_pool_hint(args, budget, _room(args, budget)))
    if 0 <= left < budget.num_host_blocks * budget.bytes_per_block:
        remedies.append(f"lower swap_space to {floor_2(left / GIB):g}")
    return ", ".join(remedies) if all(remedies) else doctor_hint(args)


def _room(args: EngineArgs, budget: MemoryBudget) -> int:
    """Bytes that the KV pool may take. Half of the free memory if it holds a swap space, too: that is no larger."""
    if budget.device_bytes is not None:
        return budget.device_bytes
    return budget.free_bytes // 2 if args.swap_space and args.preemption_mode != "recompute" else budget.free_bytes


def ceil_2(number: float) -> float:
    """Round up to two decimals."""
    return math.ceil(number * 100) / 100


def floor_2(number: float) -> float:
    """Round down to two decimals."""
    return math.floor(number * 100) / 100


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


def free_memory() -> int:
    """Bytes that this process may still allocate: the machine's available memory, or less if its cgroup limits it."""
    available = 0
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        available = min(available or int(limit), max(0, int(limit) - int(used)))
    return available or 4 * GIB  # without /proc: a small guess


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 100 else f"{num_bytes / 1024:.0f} KiB"
