"""Numbers of blocks that fit in memory, and the errors when they do not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from octavo.config import GIB, EngineArgs
from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.errors import MemoryBudgetError, ParameterError
from octavo.integers import cdiv
from octavo.runner.memory import budget as memory
from octavo.runner.memory.budget import FreeMemory, MemoryBudget, plan_memory

KIB = 1 << 10
KV = KVCacheSpec(num_layers=16, num_kv_heads=2, head_dim=32, block_size=16, dtype="bfloat16")  # 64 KiB a block


def plan(*, free: int = 64 * GIB, model_len: int = 2048, **options: Any) -> MemoryBudget:
    args = EngineArgs(model="m", **options)
    return plan_memory(args, KV, FreeMemory(weights=GIB, host=free), model_len=model_len)


def test_a_given_number_of_blocks_is_used_unchanged() -> None:
    budget = plan(num_gpu_blocks_override=333, swap_space=0)
    assert (budget.num_blocks, budget.num_host_blocks, budget.max_model_len) == (333, 0, 2048)
    assert budget.kv.bytes_per_block == 64 * KIB and not budget.warnings


def test_kv_cache_memory_bytes_includes_the_null_block() -> None:
    budget = plan(kv_cache_memory_bytes=200 * 64 * KIB + 5, swap_space=0)
    assert budget.num_blocks == 199
    assert budget.pool_bytes == 200 * 64 * KIB


def test_the_default_pool_is_the_smallest_of_three_sizes() -> None:
    needed = plan(max_num_seqs=4, model_len=1000)  # all blocks that requests can use
    assert needed.num_blocks == 4 * cdiv(1000, 16)
    four_gib = plan(max_num_seqs=1000)
    assert four_gib.pool_bytes == 4 * GIB
    quarter = plan(max_num_seqs=1000, free=GIB)
    assert quarter.pool_bytes == GIB // 4


def test_a_pool_smaller_than_the_models_positions_limits_max_model_len() -> None:
    budget = plan(num_gpu_blocks_override=10)
    assert budget.max_model_len == 161  # the last token takes no slot
    assert any("161" in w and "2048" in w for w in budget.warnings)
    assert plan(num_gpu_blocks_override=10, max_model_len=-1).max_model_len == 161
    assert plan(num_gpu_blocks_override=1000, max_model_len=-1).max_model_len == 2048
    assert plan(num_gpu_blocks_override=10, max_model_len=161).max_model_len == 161
    with pytest.raises(MemoryBudgetError, match=r"\(162\), 11 blocks .* pool has 10; the largest .* fits is 161 "):
        plan(num_gpu_blocks_override=10, max_model_len=162)


def test_max_model_len_above_the_models_positions_is_cut_with_a_warning() -> None:
    budget = plan(num_gpu_blocks_override=200, max_model_len=5000)
    assert budget.max_model_len == 2048
    assert any("5000" in w and "2048" in w for w in budget.warnings)


@pytest.mark.parametrize("options", [{"kv_cache_memory_bytes": 64 * KIB}, {"kv_cache_memory_bytes": 5}, {}])
def test_memory_for_no_block_raises(options: dict[str, Any]) -> None:
    with pytest.raises(
        MemoryBudgetError, match=r"No available memory for the cache blocks: weights 1.00 GiB"
    ) as caught:
        plan(free=4 * 64 * KIB if not options else 64 * GIB, **options)
    assert "\n" not in str(caught.value) and "(-" not in str(caught.value) and "0 KiB too" not in str(caught.value)


FLAG = re.compile(
    r"(max_model_len|swap_space|kv_cache_memory_bytes|num_gpu_blocks_override|\w+_utilization) to ([\d.]+)"
)
BLOCKS = {"free": 100 * 64 * KIB}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"kv_cache_memory_bytes": 5}, "kv_cache_memory_bytes"),
        ({"free": 4 * 64 * KIB}, "kv_cache_memory_bytes"),
        ({"gpu_memory_utilization": 0.01}, "gpu_memory_utilization"),
        ({"kv_cache_memory_bytes": 5, "max_model_len": 2000, **BLOCKS}, "kv_cache_memory_bytes max_model_len"),
        (
            {"gpu_memory_utilization": 0.9, "max_model_len": 2000, "free": 6 * 64 * KIB},
            "gpu_memory_utilization max_model_len",
        ),
        ({"kv_cache_memory_bytes": 9 * 64 * KIB, "max_model_len": 2000}, "max_model_len"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"num_gpu_blocks_override": 100, **BLOCKS}, "num_gpu_blocks_override"),
        ({"num_gpu_blocks_override": 100, "swap_space": 1.0, **BLOCKS}, "num_gpu_blocks_override"),
        ({"num_gpu_blocks_override": 900, "max_model_len": 2000, **BLOCKS}, "num_gpu_blocks_override max_model_len"),
        ({"kv_cache_memory_bytes": GIB, "max_model_len": -1, **BLOCKS}, "kv_cache_memory_bytes"),
        ({"num_gpu_blocks_override": 80, "swap_space": 1.0, **BLOCKS}, "swap_space"),
        ({"num_gpu_blocks_override": 1000, "swap_space": 1.0, "free": 1100 * 64 * KIB}, "swap_space"),
    ],
    ids=str,
)
def test_errors_name_flags_with_values_that_fit(options: dict[str, Any], names: str) -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        plan(**options)
    flags = dict(FLAG.findall(str(caught.value).rpartition("; ")[2]))
    if not flags:  # the length comes before the table
        flags = {"max_model_len": re.search(r"max_model_len that fits is (\d+)", str(caught.value))[1]}  # type: ignore[index]
    assert " ".join(flags) == names and "\n" not in str(caught.value)
    plan(**options | {name: float(v) if "." in v else int(v) for name, v in flags.items()})


def test_a_pool_larger_than_the_free_memory_raises() -> None:
    with pytest.raises(MemoryBudgetError, match="lower num_gpu_blocks_override"):
        plan(free=100 * 64 * KIB, num_gpu_blocks_override=100)
    assert plan(free=101 * 64 * KIB, num_gpu_blocks_override=100).num_host_blocks == 0  # the default shrinks
    with pytest.raises(MemoryBudgetError, match=r"; lower swap_space to 0$"):
        plan(free=150 * 64 * KIB, num_gpu_blocks_override=100, swap_space=1.0)


def test_errors_without_a_value_point_to_the_doctor() -> None:
    for options in ({"free": 64 * KIB}, {"free": 64 * KIB, "num_gpu_blocks_override": 5}):
        with pytest.raises(MemoryBudgetError, match=r"; run `octavo doctor m` for flags that fit$"):
            plan(**options)


def test_swap_space_is_at_most_the_pool() -> None:
    assert plan(num_gpu_blocks_override=300).num_host_blocks == 300  # the default: no warning
    assert plan(num_gpu_blocks_override=300, preemption_mode="recompute").num_host_blocks == 0
    budget = plan(num_gpu_blocks_override=300, swap_space=100 * 64 * KIB / GIB)
    assert budget.num_host_blocks == 100 and not budget.warnings
    cut = plan(num_gpu_blocks_override=300, swap_space=2.5)
    assert cut.num_host_blocks == 300
    assert any("swap_space 2.5" in w for w in cut.warnings)


def test_free_memory_is_the_machines_or_its_cgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    files: dict[str, str] = {}
    monkeypatch.setattr(memory, "_read", lambda path: files.get(path, ""))
    assert memory.free_memory() == 4 * GIB  # a machine without /proc
    files["/proc/meminfo"] = "MemTotal: 99 kB\nMemAvailable:    2048 kB\n"
    assert memory.free_memory() == 2048 * KIB
    files |= {"/sys/fs/cgroup/memory.max": "max\n", "/sys/fs/cgroup/memory.current": "7\n"}
    assert memory.free_memory() == 2048 * KIB
    files |= {"/sys/fs/cgroup/memory.max": str(1024 * KIB), "/sys/fs/cgroup/memory.current": str(1000 * KIB)}
    assert memory.free_memory() == 24 * KIB
    monkeypatch.undo()
    assert memory._read(str(Path("/no/such/file"))) == ""
    assert memory.free_memory() > 1 << 20


def test_weights_larger_than_the_free_memory_raise() -> None:
    with pytest.raises(
        MemoryBudgetError,
        match=r"take 3.00 GiB, 1.00 GiB more than the free memory;.*; run `octavo doctor m` for flags that fit$",
    ):
        plan_memory(EngineArgs(model="m"), KV, FreeMemory(weights=3 * GIB, host=-GIB), model_len=64)


@pytest.mark.parametrize(
    ("device", "options", "stored", "has_bfloat16", "dtype"),
    [
        ("cpu", {}, "float32", True, "float32"),
        ("cpu", {}, "bfloat16", True, "bfloat16"),
        ("cpu", {}, "bfloat16", False, "float32"),
        ("cpu", {}, "float16", True, "bfloat16"),
        ("cpu", {"dtype": "float16"}, "float32", False, "float16"),
        ("cpu", {"quantization": "int8"}, "float32", False, "bfloat16"),
        ("cpu", {"quantization": "int8", "dtype": "bfloat16"}, "float32", False, "bfloat16"),
        ("cuda", {}, "float32", False, "bfloat16"),
        ("cuda", {}, "float16", False, "float16"),
        ("cuda", {"dtype": "float32"}, "bfloat16", True, "float32"),
    ],
)
def test_dtype_depends_on_the_device_and_the_checkpoint(
    device: str, options: dict[str, Any], stored: str, has_bfloat16: bool, dtype: str
) -> None:
    args = EngineArgs(model="m", **options)
    assert args.resolved_dtype(device, stored, has_bfloat16=has_bfloat16) == dtype


def test_quantization_needs_a_device_and_bfloat16() -> None:
    with pytest.raises(ParameterError, match="'fp8' needs a GPU; use int8"):
        EngineArgs(model="m", quantization="fp8").resolved_dtype("cpu", "bfloat16", has_bfloat16=True)
    with pytest.raises(ParameterError, match="needs bfloat16 for the other layers, not float32; use dtype auto"):
        EngineArgs(model="m", quantization="int8", dtype="float32").resolved_dtype("cpu", "bfloat16", has_bfloat16=True)
