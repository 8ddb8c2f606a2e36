"""Start-up errors on a GPU: no GPU, an old driver, too little memory, a lost device."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.config import GIB, EngineArgs
from octavo.errors import DeviceLostError, MemoryBudgetError, ParameterError
from octavo.frontend import build
from octavo.kernels.cpu import ops as cpu
from octavo.runner.memory import diagnostics, profile
from octavo.runner.memory.diagnostics import check_weights, find_gpu, startup_errors
from octavo.runner.memory.profile import GPUMemoryProfile
from octavo.runner.platform import CpuPlatform, CudaPlatform, find_platform

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040).\nPlease update your GPU driver by downloading\n"
)
CUDA = torch.device("cuda")
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 8, "block_size": 4}


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


# -- finding a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_device_cuda_without_a_gpu_is_one_line(model: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    with pytest.raises(ParameterError, match=r"device is cuda, but no GPU can be used: .*; use device=cpu$") as error:
        LLM(model, device="cuda", skip_tokenizer_init=True)
    assert "\n" not in str(error.value) and error.value.param == "device"


def test_an_old_driver_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", raising(RuntimeError(TOO_OLD)))
    with pytest.raises(
        ParameterError, match=r"used: The NVIDIA driver on .* \(found version 11040\)\. .*; use device=cpu$"
    ):
        find_gpu()
    monkeypatch.setattr(torch.cuda, "init", raising(AssertionError("Torch not compiled with CUDA enabled")))
    with pytest.raises(ParameterError, match="used: Torch not compiled with CUDA enabled; use device=cpu"):
        find_gpu()


@pytest.fixture
def old_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A torch built for CUDA, a GPU with an old driver, and torch's warning about it."""

    def is_available() -> bool:
        warnings.warn(TOO_OLD, stacklevel=1)
        return False

    driver = tmp_path / "version"
    driver.write_text("NVRM version: 470\n")
    monkeypatch.setattr(diagnostics, "DRIVER", driver)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "init", raising(RuntimeError(TOO_OLD)))
    monkeypatch.setattr(diagnostics.shutil, "which", lambda name: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return driver


def device_and_warnings(caplog: pytest.LogCaptureFixture, device: str = "auto") -> tuple[str, list[str]]:
    caplog.clear()
    return find_platform(device).name, [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]


def test_an_unusable_gpu_is_a_warning_with_device_auto(
    old_driver: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line; none without a GPU, with a hidden GPU, or for a torch without CUDA."""
    device, messages = device_and_warnings(caplog)
    assert device == "cpu" and len(messages) == 1 and "\n" not in messages[0]
    assert messages[0].startswith(
        "device auto uses the CPU, although there seems to be an NVIDIA GPU: The NVIDIA driver"
    )
    assert device_and_warnings(caplog, "cpu") == ("cpu", [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the user hides the GPU
    assert device_and_warnings(caplog) == ("cpu", [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    old_driver.unlink()
    assert device_and_warnings(caplog) == ("cpu", [])
    monkeypatch.setattr(diagnostics.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert device_and_warnings(caplog)[1] == messages
    monkeypatch.setattr(torch.version, "cuda", None)  # a torch without CUDA
    assert device_and_warnings(caplog) == ("cpu", [])


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the free memory of a GPU of 80 GiB."""
    return lambda free: monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 * GIB))


def test_weights_that_do_not_fit_raise_before_loading(memory: Callable[[int], None]) -> None:
    memory(70 * GIB)
    check_weights(70 * GIB, EngineArgs(model="m"))
    with pytest.raises(MemoryBudgetError, match=r"take 71\.00 GiB and the GPU has room for 70\.00 GiB"):
        check_weights(71 * GIB, EngineArgs(model="m"))
    with pytest.raises(MemoryBudgetError, match=r"room for 40\.00 GiB"):
        check_weights(41 * GIB, EngineArgs(model="m", gpu_memory_utilization=0.5))


@pytest.mark.parametrize(
    ("gib", "options", "remedy"),
    [
        (41, {"gpu_memory_utilization": 0.5}, "raise gpu_memory_utilization to 0.53 or more"),
        (72, {}, "free 3.25 GiB more on the GPU, and set gpu_memory_utilization to 0.92 or more"),
        (100, {"dtype": "float32"}, "set dtype to bfloat16, which halves the weights"),
        (100, {}, "choose a smaller model or dtype"),
    ],
)
def test_remedies_for_weights_that_do_not_fit(
    memory: Callable[[int], None], gib: int, options: dict[str, Any], remedy: str
) -> None:
    memory(70 * GIB)
    with pytest.raises(MemoryBudgetError) as raised:
        check_weights(gib * GIB, EngineArgs(model="m", **options))
    assert str(raised.value).endswith(f" free of 80.00 GiB); {remedy}; run `octavo doctor m` for flags that fit")


def test_a_gpu_without_memory_for_the_cuda_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", raising(RuntimeError("CUDA error: out of memory\nAdvice")))
    with pytest.raises(MemoryBudgetError, match=r"CUDA cannot start; free some \(nvidia-smi lists them\)"):
        check_weights(GIB, EngineArgs(model="m"))


TRIED = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 80 GiB.\nAdvice follows"
MEMORY = GPUMemoryProfile(
    total=80 * GIB, utilization=0.9, other_processes=GIB, weights=GIB, activations=GIB, graphs=GIB, libraries=GIB
)


def fail_at(name: str, error: RuntimeError, patch: pytest.MonkeyPatch) -> None:
    """Let a start on a fake GPU raise the error at this stage."""

    class FakeGPU(CudaPlatform):
        def __init__(self, _: str) -> None:
            self.device, self.ops = CUDA, cpu

        def precompiler(self, key: str, ranks: None) -> AbstractContextManager[None]:
            return nullcontext()

    def fake_runner(model: Any, kv: Any, host_kv: Any, platform: Any, **_: Any) -> Any:
        capture = raising(error) if name == "graphs" else lambda _: None
        swapper = SimpleNamespace(host_kv=range(2))
        state = SimpleNamespace(kv=range(2), swapper=swapper, measure_swap=raising(error))
        return SimpleNamespace(platform=platform, capture=capture, state=state)

    zeros, empty, load = torch.zeros, torch.empty, build._load
    patch.setattr(build, "find_platform", FakeGPU)
    patch.setattr(build, "ModelRunner", fake_runner)
    patch.setattr(profile, "measure", raising(error) if name == "measure" else lambda *_, **__: MEMORY)

    def loaded(resolved: Any, max_len: int) -> Any:
        if name == "weights":
            raise error
        model = load(replace(resolved, platform=CpuPlatform(), dtype="float32"), max_len)
        patch.setattr(torch, "zeros", raising(error) if name == "pool" else lambda *shape, **__: zeros(1))
        patch.setattr(torch, "empty", raising(error) if name == "swap space" else lambda *shape, **__: empty(1))
        return model

    patch.setattr(build, "_load", loaded)


@pytest.mark.parametrize(
    ("name", "options", "doing", "remedy"),
    [
        (
            "weights",
            {},
            "loading the weights",
            r"free as much as the weights take, 0\.00 GiB; run `octavo doctor .*llama` for",
        ),
        ("measure", {}, "computing its largest steps", "lower max_num_batched_tokens to 4096 and max_num_seqs to 4"),
        ("swap space", {}, "pinning memory of the host for swap space", "lower swap_space, or set it to 0"),
        ("pool", {}, "making the KV pool and CUDA graphs", r"lower gpu_memory_utilization to 0\.\d+"),
        ("graphs", {}, "making the KV pool and CUDA graphs", r"lower gpu_memory_utilization to 0\.\d+"),
        ("graphs", {"kv_cache_memory_bytes": 9 * GIB}, "making the KV pool", r"lower kv_cache_memory_bytes to \d+"),
        ("moves", {"kv_cache_memory_bytes": 9 * GIB}, "moving blocks to the host", "lower swap_space, or set it to 0"),
    ],
)
def test_out_of_memory_at_start_is_one_line_with_a_remedy(
    model: str,
    memory: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: dict[str, Any],
    doing: str,
    remedy: str,
) -> None:
    memory(GIB)
    with monkeypatch.context() as patch:
        fail_at(name, torch.OutOfMemoryError(TRIED), patch)
        patch.setattr(build, "free_memory", lambda: 64 * GIB)
        with pytest.raises(MemoryBudgetError) as raised:
            LLM(model, device="cuda", **OPTIONS, **options)
    message = str(raised.value)
    figures = r"an allocation of 2\.50 GiB failed, with 1\.00 GiB of the GPU's 80\.00 GiB free"
    assert re.search(rf"^memory ran out while {doing}.*: {figures}; {remedy}", message)
    assert "\n" not in message and raised.value.__suppress_context__


def test_out_of_memory_outside_torch_has_no_size(memory: Callable[[int], None]) -> None:
    memory(GIB)
    with (
        pytest.raises(MemoryBudgetError, match=r"while x: an allocation failed, with 1\.00 GiB .* free; 0$"),
        startup_errors(CUDA, "x", str),
    ):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


# -- other errors ------------------------------------------------------------------------------------------------------


def test_a_device_lost_at_start_raises_device_lost_error(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cause = RuntimeError("CUDA error: an illegal memory access was encountered\nAdvice follows")
    with monkeypatch.context() as patch:
        fail_at("measure", RuntimeError("Triton Error [CUDA]: an illegal memory access"), patch)
        patch.setattr(torch.cuda, "mem_get_info", lambda: (70 * GIB, 80 * GIB))
        patch.setattr(torch.cuda, "synchronize", raising(cause))
        with pytest.raises(DeviceLostError, match=r": CUDA error: an illegal memory access was encountered$"):
            LLM(model, device="cuda", **OPTIONS)
        patch.setattr(torch.cuda, "synchronize", lambda: None)  # the device works: the error is a bug
        with pytest.raises(RuntimeError, match=r"^a bug$"), startup_errors(CUDA, "x", str):
            raise RuntimeError("a bug")


def test_errors_on_a_cpu_pass_unchanged() -> None:
    with pytest.raises(torch.OutOfMemoryError), startup_errors(torch.device("cpu"), "x", str):
        raise torch.OutOfMemoryError(TRIED)
