"""Memory profiles of a GPU, and the remedies of their errors."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from octavo.config import GIB, EngineArgs
from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.errors import MemoryBudgetError
from octavo.runner.memory.budget import SPARE_BYTES, FreeMemory, plan_memory
from octavo.runner.memory.profile import GPUMemoryProfile

ARGS = EngineArgs(model="m").resolved("cuda")
KV = KVCacheSpec(num_layers=32, num_kv_heads=8, head_dim=64, block_size=16, dtype="bfloat16")
BLOCK = KV.bytes_per_block  # 1 MiB
MEMORY = GPUMemoryProfile(
    total=80 * GIB,
    utilization=0.9,
    other_processes=1 * GIB,
    weights=15 * GIB,
    activations=2 * GIB,
    graphs=3 * GIB,
    libraries=1 * GIB,
)


def test_available_kv_bytes_are_what_the_engine_leaves() -> None:
    assert MEMORY.available_kv_bytes == 72 * GIB - 21 * GIB - SPARE_BYTES
    MEMORY.check(ARGS, KV)


def test_utilization_is_the_engines_share_and_at_most_the_free_memory() -> None:
    assert (
        replace(MEMORY, utilization=0.4, other_processes=40 * GIB).available_kv_bytes
        == 32 * GIB - 21 * GIB - SPARE_BYTES
    )
    assert replace(MEMORY, other_processes=20 * GIB).available_kv_bytes == 60 * GIB - 21 * GIB - SPARE_BYTES


def test_too_little_memory_names_a_utilization_that_fits() -> None:
    tight = replace(MEMORY, utilization=0.2)
    with pytest.raises(MemoryBudgetError, match=r"raise gpu_memory_utilization to 0\.28$") as error:
        tight.check(ARGS, KV)
    replace(MEMORY, utilization=0.28).check(ARGS, KV)
    assert "0.2 of 80.00 GiB is 16.00 GiB" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("other_processes", [59 * GIB, 61 * GIB])
def test_without_such_a_utilization_smaller_steps_or_free_memory_are_named(other_processes: int) -> None:
    """Each named value leaves memory for blocks: a step's memory is proportional to its size."""
    memory = replace(MEMORY, other_processes=other_processes)
    with pytest.raises(
        MemoryBudgetError,
        match=r"; lower max_num_batched_tokens to (\d+) and max_num_seqs to (\d+), or free ([\d.]+) GiB more on",
    ) as raised:
        memory.check(ARGS, KV)
    tokens, rows, more = re.findall(r" (?:to|free) ([\d.]+)", str(raised.value))
    share = max(int(tokens) / (ARGS.max_num_batched_tokens or 1), int(rows) / (ARGS.max_num_seqs or 1))
    assert 0.1 < share < 1
    replace(memory, activations=int(2 * GIB * share), graphs=int(3 * GIB * share)).check(ARGS, KV)
    replace(memory, other_processes=other_processes - int(float(more) * GIB)).check(ARGS, KV)


def test_without_any_fitting_value_the_doctor_is_named() -> None:
    with pytest.raises(MemoryBudgetError, match=r"; free 5.25 GiB more .* and raise gpu_memory_utilization to 0.28$"):
        replace(MEMORY, utilization=0.1, other_processes=63 * GIB).check(ARGS, KV)
    with pytest.raises(MemoryBudgetError, match=r"; run `octavo doctor m` for flags that fit$"):
        replace(MEMORY, weights=79 * GIB).check(ARGS, KV)


def kv_of(bytes_per_block: int) -> KVCacheSpec:
    return KVCacheSpec(bytes_per_block // 4, 1, 1, 1, "bfloat16")


def test_a_pool_needs_the_null_block_and_one_more() -> None:
    MEMORY.check(ARGS, kv_of(MEMORY.available_kv_bytes // 2))
    with pytest.raises(MemoryBudgetError, match=r"raise gpu_memory_utilization to 0\.91$"):
        replace(MEMORY, other_processes=0).check(ARGS, kv_of(MEMORY.available_kv_bytes // 2 + GIB // 4))


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({}, r"lower gpu_memory_utilization to (0\.\d+)"),
        ({"kv_cache_memory_bytes": 20 * GIB}, r"lower kv_cache_memory_bytes to (\d+)"),
        ({"num_gpu_blocks_override": 20 * 1024 - 1}, r"lower num_gpu_blocks_override to (\d+)"),
    ],
)
def test_a_smaller_pool_leaves_the_missing_bytes(options: dict[str, Any], remedy: str) -> None:
    """A pool of 20 GiB left too little for the rest of the start."""
    memory = replace(MEMORY, utilization=(20 * GIB + MEMORY._taken) / (80 * GIB))
    args = replace(ARGS, **options)
    hint = memory.smaller_pool(args, plan(**options), 3 * GIB)
    value = float(re.fullmatch(remedy, hint)[1])  # type: ignore[index]
    if not options:
        left = replace(memory, utilization=value).available_kv_bytes
    else:
        left = plan(**{name: int(value) for name in options}).num_blocks * BLOCK
    assert 15 * GIB <= left <= 17 * GIB
    other_hint = memory.smaller_pool(args, plan(**options), 20 * GIB)
    assert other_hint == (
        "run `octavo doctor m` for flags that fit"
        if options
        else "lower max_num_batched_tokens to 4096 and max_num_seqs to 128"
    )


def plan(**options: Any) -> Any:
    args = EngineArgs(model="m", **options).resolved("cuda")
    return plan_memory(args, KV, FreeMemory(weights=GIB, host=10 * GIB, device=20 * GIB), model_len=4096)


def test_the_pool_uses_device_memory_and_swap_space_host_memory() -> None:
    budget = plan()
    assert budget.pool_bytes == 20 * GIB
    assert budget.swap_bytes == 4 * GIB
    assert plan(swap_space=9).num_host_blocks == 9 * 1024
    with pytest.raises(MemoryBudgetError, match=r"; lower swap_space to 10$"):
        plan(swap_space=11)
    plan(swap_space=10)
    assert str(plan()).endswith("free memory after the weights 20.00 GiB on the device and 10.00 GiB on the host")
    with pytest.raises(
        MemoryBudgetError, match=f"; lower kv_cache_memory_bytes to {20 * GIB}, lower swap_space to 10$"
    ):
        plan(kv_cache_memory_bytes=21 * GIB, swap_space=11)
    plan(kv_cache_memory_bytes=20 * GIB, swap_space=10)


def test_the_table_shows_how_many_requests_fit() -> None:
    table = MEMORY.table(plan())
    assert "activations 2.00 GiB, CUDA graphs 3.00 GiB (an estimate), libraries 1.00 GiB" in table
    assert "KV pool 20.00 GiB" in table and "80.0 of 4,096 tokens" in table and "320.0 of 1,024 tokens" in table


def test_step_sizes_depend_on_the_device() -> None:
    args = EngineArgs(model="m", max_num_seqs=7)
    assert args.resolved("cpu").max_num_batched_tokens == 2048
    assert args.resolved("cuda").max_num_batched_tokens == 8192
    assert args.resolved("cuda").max_num_seqs == 7
    assert args.resolved("cpu").resolved("cuda") == args.resolved("cpu")
