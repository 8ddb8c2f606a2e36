"""`build` resolves options from the arguments, the checkpoint and the machine."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import ParameterError
from octavo.kernels.cpu import native
from octavo.kernels.cpu import packed_linear as packed
from tests.kernels.cpu.backends import use_backend
from tests.models.tiny import make_tiny_checkpoint, write_tiny_gguf


@pytest.fixture(scope="module")
def bfloat16_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bfloat16."""
    folder = make_tiny_checkpoint("llama", tmp_path_factory.mktemp("halves"), vocab_size=320)
    words = (folder / "config.json").read_text()
    (folder / "config.json").write_text(words.replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    return folder


def open_llm(model: Path, **options: object) -> LLM:
    defaults = {"skip_tokenizer_init": True, "device": "cpu", "num_gpu_blocks_override": 20}
    return LLM(str(model), **(defaults | options))


@pytest.mark.parametrize("fast", [True, False])
def test_dtype_auto_is_the_checkpoints_if_the_processor_supports_it(
    bfloat16_model: Path, tmp_path: Path, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "has_fast_bfloat16", lambda: fast)
    with open_llm(bfloat16_model) as llm:
        assert llm.config.dtype == ("bfloat16" if fast else "float32")
    with open_llm(make_tiny_checkpoint("qwen2", tmp_path / "wide")) as llm:
        assert llm.config.dtype == "float32"
    kept = native.library() is not None  # products of kept bits need no instructions for bfloat16
    for quantisation, dtype in (("Q8_0", "bfloat16" if fast or kept else "float32"), ("F32", "float32")):
        path = write_tiny_gguf(bfloat16_model, tmp_path / f"{quantisation}.gguf", quantisation=quantisation)
        with open_llm(path) as llm:
            assert llm.config.dtype == dtype, quantisation


def test_start_logs_the_time_of_each_phase(bfloat16_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="octavo")
    open_llm(bfloat16_model).close()
    line = caplog.messages[-1]
    whole, *parts = (float(number) for number in re.findall(r"[\d.]+(?= s:|,|$)", line))
    assert re.fullmatch(r"the model is ready in [\d.]+ s: files [\d.]+, weights [\d.]+, pool [\d.]+", line)
    assert whole == pytest.approx(sum(parts), abs=0.2)


def test_int8_halves_the_weights(bfloat16_model: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with open_llm(bfloat16_model, dtype="bfloat16") as llm:
        weight_bytes = llm.config.weight_bytes
    with open_llm(bfloat16_model, quantization="int8") as llm:
        assert llm.config.dtype == "bfloat16"
        assert 0.5 < llm.config.weight_bytes / weight_bytes < 0.7  # more than half: small matrices have large scales
        together = llm.generate([{"prompt_token_ids": [i, 7, 9]} for i in range(6)], params, use_tqdm=False)
        alone = llm.generate({"prompt_token_ids": [3, 7, 9]}, params, use_tqdm=False)[0]
    assert all(len(output.outputs[0].token_ids) == 8 for output in together)
    assert alone.outputs[0].token_ids == together[3].outputs[0].token_ids


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_int8_with_another_dtype_is_rejected(bfloat16_model: Path, dtype: str) -> None:
    with pytest.raises(ParameterError, match=f"'int8' needs bfloat16 for the other layers, not {dtype}"):
        open_llm(bfloat16_model, quantization="int8", dtype=dtype)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2", "int4", "bfloat16", "INT8", "", 8, True, ["int8"]])
def test_a_kv_cache_dtype_that_a_cpu_lacks_is_rejected(bfloat16_model: Path, dtype: Any) -> None:
    with pytest.raises(ParameterError, match=r"^kv_cache_dtype .*int8[^\n]*$") as caught:
        open_llm(bfloat16_model, kv_cache_dtype=dtype)
    assert caught.value.param == "kv_cache_dtype"


def test_unknown_quantization_is_rejected(bfloat16_model: Path) -> None:
    with pytest.raises(ParameterError, match="quantization"):
        open_llm(bfloat16_model, quantization="int3")


@pytest.mark.parametrize("way", ["native", "x86-64-v3", "oneDNN", "blocks"])
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"quantization": "int8"}], ids=str)
def test_every_dtype_runs_on_every_processor(
    bfloat16_model: Path, way: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_backend(way, monkeypatch)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
    prompt = {"prompt_token_ids": [5, 9, 12] * 7}
    with open_llm(bfloat16_model, dtype="float32") as llm:
        exact = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    with open_llm(bfloat16_model, **options) as llm:
        rounded = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert len(rounded.token_ids) == 8
    assert rounded.cumulative_logprob == pytest.approx(exact.cumulative_logprob, rel=0.1)


def test_loading_leaves_no_thread(bfloat16_model: Path) -> None:
    """A remaining thread would keep its OpenMP workers, which slow down the computing ones."""
    before = threading.active_count()
    with open_llm(bfloat16_model):
        names = [thread.name for thread in threading.enumerate()]
        assert threading.active_count() == before + 2, names  # the engine's and the runner's


def test_explicit_float16_is_used(bfloat16_model: Path) -> None:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with open_llm(bfloat16_model, dtype="float16") as llm:
        assert llm.engine.executor.runner.state.kv.dtype == torch.float16
        assert len(llm.generate({"prompt_token_ids": [5]}, params, use_tqdm=False)[0].outputs[0].token_ids) == 4


def test_flight_recorder_folder_is_checked_at_start(bfloat16_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for taken in ("file", "file/below"):
        with pytest.raises(ParameterError, match=r"flight_recorder is .* is not writable: .*; use another folder"):
            open_llm(bfloat16_model, flight_recorder=str(tmp_path / taken))
    with open_llm(bfloat16_model, flight_recorder=str(tmp_path / "new" / "folder")):
        assert list((tmp_path / "new" / "folder").iterdir()) == []
