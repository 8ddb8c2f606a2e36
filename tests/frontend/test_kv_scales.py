"""Engines with K and V in float8 take the checkpoint's scales. Only these tests give a CPU float8 pools."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.config import EngineArgs
from octavo.doctor import examine
from octavo.models.decoder import Decoder
from octavo.models.loading.loader import Model
from octavo.runner.memory import kv_scales
from octavo.runner.platform import CpuPlatform
from tests.models.quantization.test_kv_scales import STATIC, add_scales, expected_scales, set_scheme
from tests.models.tiny import make_tiny_checkpoint, random_prompts

PROMPTS = random_prompts(23, 9, 40)
PARAMS = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, logprobs=0)
SCALES = expected_scales(3, 2)


@pytest.fixture
def float8_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is a platform with float8, for which `kv_cache_dtype` may be fp8."""
    platform = CpuPlatform()
    platform.has_float8 = True
    monkeypatch.setattr("octavo.frontend.build.find_platform", lambda name: platform)
    resolved = EngineArgs.resolved_kv_dtype
    monkeypatch.setattr(
        EngineArgs, "resolved_kv_dtype", lambda args, device, *rest, **more: resolved(args, "cuda", *rest, **more)
    )


def run(directory: Path, **options: Any) -> tuple[list[Any], Model, str]:
    """Tokens and their log-probabilities, the model, and the dtype of K and V."""
    options = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 40, "enforce_eager": True} | options
    with LLM(str(directory), device="cpu", **options) as llm:
        found = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS, use_tqdm=False)
        model = llm.engine.executor.runner.passes.model  # type: ignore[attr-defined]
        ones = [output.outputs[0] for output in found]
        return [(one.token_ids, one.cumulative_logprob) for one in ones], model, llm.config.kv.dtype


def scales_of(model: Model) -> torch.Tensor:
    assert isinstance(model, Decoder)
    return torch.stack([layer.attention.head_norms["kv_scales"] for layer in model.layers])  # type: ignore[attr-defined]


@pytest.mark.usefixtures("float8_cpu")
@pytest.mark.parametrize(("name", "dtype"), [("fp8", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")])
def test_tokens_are_those_of_the_same_scales_set_by_hand(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="octavo")
    directory = make_tiny_checkpoint("llama", tmp_path / "model")
    plain, _, plain_dtype = run(directory)
    calibrated, *_ = run(directory, kv_cache_dtype=name)
    monkeypatch.setattr(kv_scales, "calibrate", lambda model, *_, **__: model.set_kv_scales(SCALES))
    expected, *_ = run(directory, kv_cache_dtype=name)
    assert "are the checkpoint's" not in caplog.text
    add_scales(directory, SCALES)
    monkeypatch.delattr(kv_scales, "calibrate")
    found, model, found_dtype = run(directory, kv_cache_dtype=name)
    assert found == expected
    assert expected not in (plain, calibrated)
    assert torch.equal(scales_of(model), SCALES)
    assert (plain_dtype, found_dtype) == ("float32", dtype)
    assert caplog.text.count("K and V in float8: scales of 3 layers are the checkpoint's") == 1
    assert "scales of the checkpoint are 1" not in caplog.text


def test_other_pools_do_not_use_them(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("llama", tmp_path / "model")
    for options in ({}, {"kv_cache_dtype": "int8"}):
        twin = make_tiny_checkpoint("llama", tmp_path / f"twin{len(options)}")
        add_scales(twin, SCALES)
        assert run(twin, **options)[0] == run(directory, **options)[0]


@pytest.mark.usefixtures("float8_cpu")
def test_auto_is_what_the_checkpoint_asks_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="octavo")
    directory = make_tiny_checkpoint("llama", tmp_path / "model")
    set_scheme(directory, STATIC)
    add_scales(directory, torch.ones(3, 2, 2))
    assert run(directory)[2] == "float8_e4m3fn"
    assert caplog.text.count("kv_cache_scheme of config.json: K and V are in float8_e4m3fn\n") == 1
    assert caplog.text.count("all scales of the checkpoint are 1") == 1
    assert run(directory, kv_cache_dtype="fp8_e5m2")[2] == "float8_e5m2"
    assert caplog.text.count("kv_cache_scheme of config.json") == 1


@pytest.mark.usefixtures("float8_cpu")
def test_without_scales_they_are_calibrated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A dynamic scheme has none in the files, and neither have weights of `load_format` dummy."""
    directory = make_tiny_checkpoint("llama", tmp_path / "dynamic")
    set_scheme(directory, STATIC | {"dynamic": True})
    assert run(directory)[2] == "float8_e4m3fn"
    static = make_tiny_checkpoint("llama", tmp_path / "static")
    set_scheme(static, STATIC)
    assert run(static, load_format="dummy")[2] == "float8_e4m3fn"
    assert caplog.text.count("without a tokenizer there is no text to calibrate them on") == 2


def test_a_cpu_keeps_the_dtype_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="octavo")
    directory = make_tiny_checkpoint("llama", tmp_path / "model")
    set_scheme(directory, STATIC)
    add_scales(directory, SCALES)
    assert run(directory, dtype="float32")[2] == "float32"
    assert caplog.text.count("K and V are in float32: this device has no float8 for it") == 1
    args = EngineArgs(model=str(directory), num_gpu_blocks_override=8)
    assert examine(args, "h100").need.kv.dtype == "float8_e4m3fn"
    assert not examine(EngineArgs(model=str(directory), device="cpu")).need.kv.dtype.startswith("float8")
