"""What is said of a GPU's memory, and of a GPU that is not there."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.config import GIB, EngineArgs
from octavo.errors import MemoryBudgetError, ParameterError
from octavo.runner import gpu
from octavo.runner.gpu import GPUMemory, check_weights
from octavo.runner.memory import plan_memory

MEMORY = GPUMemory(
    total=80 * GIB,
    utilization=0.9,
    foreign=1 * GIB,
    weights=15 * GIB,
    activations=2 * GIB,
    graphs=3 * GIB,
    libraries=1 * GIB,
)


def test_what_is_left_for_blocks() -> None:
    assert MEMORY.left == 72 * GIB - 21 * GIB - gpu.SPARE_BYTES
    MEMORY.check()


def test_a_share_is_of_the_engine_alone_and_no_more_than_others_leave() -> None:
    assert replace(MEMORY, utilization=0.4, foreign=40 * GIB).left == 32 * GIB - 21 * GIB - gpu.SPARE_BYTES
    assert replace(MEMORY, foreign=20 * GIB).left == 60 * GIB - 21 * GIB - gpu.SPARE_BYTES


def test_too_little_names_a_utilization_that_would_do() -> None:
    tight = replace(MEMORY, utilization=0.2)
    with pytest.raises(MemoryBudgetError, match=r"raise gpu_memory_utilization to 0\.28$") as error:
        tight.check()
    replace(MEMORY, utilization=0.28).check()
    assert "0.2 of 80.00 GiB is 16.00 GiB" in str(error.value) and "\n" not in str(error.value)


def test_where_no_utilization_would_do() -> None:
    with pytest.raises(MemoryBudgetError, match="lower max_num_batched_tokens and max_num_seqs"):
        replace(MEMORY, foreign=61 * GIB).check()


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 * GIB, 80 * GIB))
    check_weights(70 * GIB, EngineArgs(model="m"))
    with pytest.raises(MemoryBudgetError, match=r"take 71\.00 GiB and the GPU has room for 70\.00 GiB"):
        check_weights(71 * GIB, EngineArgs(model="m"))
    with pytest.raises(MemoryBudgetError, match=r"room for 40\.00 GiB"):
        check_weights(41 * GIB, EngineArgs(model="m", gpu_memory_utilization=0.5))


def plan(**options: Any) -> Any:
    args = EngineArgs(model="m", **options).settled("cuda")
    return plan_memory(
        args,
        bytes_per_token=1 << 16,
        weight_bytes=GIB,
        model_len=4096,
        free_bytes=10 * GIB,
        device_bytes=20 * GIB,
    )


def test_the_pool_takes_what_the_device_has_and_swap_space_what_the_host_has() -> None:
    budget = plan()
    assert (budget.num_blocks + 1) * budget.bytes_per_block == 20 * GIB
    assert budget.num_host_blocks * budget.bytes_per_block == 4 * GIB
    assert plan(swap_space=9).num_host_blocks == 9 * 1024
    with pytest.raises(MemoryBudgetError, match="lower num_gpu_blocks_override"):
        plan(swap_space=11)
    assert plan().table().endswith("free memory beside the weights 20.00 GiB, of the host 10.00 GiB")
    with pytest.raises(MemoryBudgetError, match="lower num_gpu_blocks_override"):
        plan(kv_cache_memory_bytes=21 * GIB)


def test_the_table_says_how_many_requests_fit() -> None:
    table = MEMORY.table(plan())
    assert "KV pool 20.00 GiB" in table and "80.0 of 4,096 tokens" in table and "320.0 of 1,024 tokens" in table


def test_step_sizes_depend_on_the_device() -> None:
    args = EngineArgs(model="m", max_num_seqs=7)
    assert args.settled("cpu").max_num_batched_tokens == 2048
    assert args.settled("cuda").max_num_batched_tokens == 8192
    assert args.settled("cuda").max_num_seqs == 7
    assert args.settled("cpu").settled("cuda") == args.settled("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    from tests.models.tiny import make_tiny_checkpoint

    caplog.set_level(logging.ERROR)
    directory = make_tiny_checkpoint("llama", tmp_path / "model")
    with pytest.raises(ParameterError, match=r"device is cuda, and there is none: .*; use device=cpu$") as error:
        LLM(str(directory), device="cuda", skip_tokenizer_init=True)
    assert "\n" not in str(error.value) and error.value.param == "device"
