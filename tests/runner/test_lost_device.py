"""A device that does not answer any more is the end of the engine: nobody goes on with it, and all hear CUDA's words.

On a CPU that plays one; `tests/gpu/test_lost_device.py` does it to a GPU.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.cli.main import FAILED, explain
from octavo.core.plan import StepPlan
from octavo.errors import DeviceLostError, StepError
from octavo.kernels import reference
from octavo.runner.cuda_executor import CudaExecutor
from octavo.runner.cuda_model_runner import CudaModelRunner, Finish
from octavo.runner.output_buffers import StepOutput
from tests.engine.models import make_talking_checkpoint
from tests.runner.lose_device import PARAMS, PROMPTS, WORDS, check_engine_process, check_process
from tests.runner.test_cuda_model_runner import SIZE, Counting, Plan, on_rows

CAUSE = f"{WORDS['told']}\nSearch for it.\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
OPTIONS: dict[str, Any] = {
    "block_size": 4,
    "num_gpu_blocks_override": 120,
    "max_num_seqs": 8,
    "device": "cpu",
    "max_logprobs": 21,
}
PLACES = ["launch", "finish", "query", "synchronize", "afterwards"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_talking_checkpoint(tmp_path_factory.mktemp("talking")))


def cuda_says(*_: Any) -> Any:
    raise RuntimeError(CAUSE)


class Broken:
    """A point in the work of a device that is lost meanwhile."""

    def __init__(self, where: str) -> None:
        self.where = where

    def query(self) -> bool:
        return cuda_says() if self.where == "query" else True

    def synchronize(self) -> None:
        cuda_says()


def lose(runner: CudaModelRunner, where: str, after: int = 0) -> None:
    """The device is lost after so many steps, and that is noticed there; `afterwards`: another error was first."""
    launch, num_launched = runner.launch, 0

    def broken(plan: StepPlan) -> Finish:
        nonlocal num_launched
        num_launched += 1
        if num_launched <= after:
            return launch(plan)
        runner.check_device = cuda_says  # type: ignore[method-assign]
        if where == "launch":
            cuda_says()
        if where == "afterwards":
            raise ValueError("a bug")
        finish = launch(plan)

        def goes_on(masks: Any) -> StepOutput:
            if where == "finish":
                cuda_says()
            output = finish(masks)
            output.events = [Broken(where) for _ in output.events]
            return output

        return goes_on

    runner.launch = broken  # type: ignore[method-assign]


# -- the executor ------------------------------------------------------------------------------------------------------


def make_executor() -> CudaExecutor:
    kv = torch.zeros(9, 1, 2, 1, SIZE, 1)
    sizes = {"num_rows": 4, "max_model_len": 8, "max_num_tokens": 16, "max_decode_steps": 4, "vocab_size": 11}
    return CudaExecutor(CudaModelRunner(Counting(), kv, torch.zeros_like(kv), ops=reference, graphs=False, **sizes))


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("patience", ["result", "poll"])
def test_wherever_it_is_noticed(where: str, patience: str) -> None:
    executor = make_executor()
    before = executor.submit(Plan().give(0, (1, 2)).slice(0, 0, 1, 1, [3]))
    assert before.result().tokens == [[4]]
    lose(executor.runner, where)
    running = executor.submit(Plan().slice(0, 1, 2, 2))
    if patience == "poll":
        while not running.done:  # as the engine does for who streams
            assert running.poll(0.01) is None
    for _ in range(2):  # whoever asks, hears it
        with pytest.raises(DeviceLostError) as told:
            running.result()
        assert not isinstance(told.value, StepError)
        assert str(told.value).endswith(f": {WORDS['told']}") and "\n" not in str(told.value)
    assert (type(told.value.__cause__) is ValueError) == (where == "afterwards")
    executor.close()


def test_a_device_that_answers_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA tells an error that passes once, and one that stays again and again."""
    runner, heard = make_executor().runner, list[str]()

    def synchronize() -> None:
        heard.append("asked")
        if len(heard) <= num_told:
            cuda_says()

    monkeypatch.setattr(runner, "kv", SimpleNamespace(is_cuda=True))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    num_told = 1
    runner.release_memory()
    runner.check_device()
    num_told = 100
    runner.release_memory()
    with pytest.raises(RuntimeError, match="illegal"):
        runner.check_device()


@pytest.mark.parametrize("lost", [False, True])
def test_what_cannot_be_freed_any_more_is_kept(lost: bool) -> None:
    """torch asks the device for it, and ends the process if that does not answer."""
    executor = make_executor()
    if lost:
        executor.runner.check_device = cuda_says  # type: ignore[method-assign]
    runner = weakref.ref(executor.runner)
    executor.close()
    executor.close()
    gc.collect()
    assert (runner() is not None) == lost


# -- its users ---------------------------------------------------------------------------------------------------------

WAYS: dict[str, tuple[dict[str, Any], SamplingParams]] = {
    "plain": ({}, PARAMS),
    "windows": ({"decode_window": 4}, PARAMS),
    "no overlap": ({"async_scheduling": False}, PARAMS),
    "masks": ({"decode_window": 4}, replace(PARAMS, structured_outputs={"regex": "[a-f]{20}"})),  # type: ignore[arg-type]
    "host": ({}, replace(PARAMS, logprobs=21)),
}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("way", list(WAYS))
def test_an_llm_ends_with_one_line(model: str, way: str, where: str) -> None:
    options, params = WAYS[way]
    with on_rows(LLM(model, **(OPTIONS | options))) as llm:
        lose(llm.engine.executor.runner, where, after=2)  # type: ignore[attr-defined]
        uses: list[Callable[[], object]] = [
            lambda: llm.generate(PROMPTS, params, use_tqdm=False),
            lambda: list(llm.stream(PROMPTS, params)),  # also later
        ]
        for use in uses:
            with pytest.raises(DeviceLostError) as told:
                use()
            line, code = explain(told.value)
            assert code == FAILED and line.endswith(WORDS["told"]) and "bug" not in line
            seen: BaseException | None = told.value
            while seen := seen.__context__:  # on the way out, nobody has asked for more
                assert not isinstance(seen, DeviceLostError)
            assert not llm.engine.has_work and llm.kv_stats().num_used == 0


@pytest.mark.parametrize("front", ["llm", "async"])
def test_a_process_ends_with_cudas_words_and_leaves_nothing(model: str, front: str) -> None:
    check_process(model, front, "told")


def test_an_engines_process_is_replaced_and_its_requests_go_on(model: str, tmp_path: Path) -> None:
    check_engine_process(model, "told", tmp_path)
