"""A lost device ends the engine, and every caller gets CUDA's message.

The device is simulated on a CPU; `tests/gpu/test_lost_device.py` loses a real GPU.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.cli.main import FAILED, explain
from octavo.core.plan import StepPlan
from octavo.errors import DeviceLostError, StepError
from octavo.runner.executor import Executor
from octavo.runner.model_runner import ModelRunner
from octavo.runner.platform import CudaPlatform
from octavo.runner.step import Step
from tests.runner.handwritten_plans import NextTokenModel, Plan, make_runner
from tests.runner.lose_device import MESSAGES, PARAMS, PROMPTS, check_engine_process, check_process
from tests.runner.stub_platform import FakeGraphs, StubPlatform, use_stub_platform

CAUSE = f"{MESSAGES['fake']}\nSearch for it.\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
OPTIONS: dict[str, Any] = {
    "block_size": 4,
    "num_gpu_blocks_override": 120,
    "max_num_seqs": 8,
    "device": "cpu",
    "max_logprobs": 21,
}
PLACES = ["launch", "finish", "query", "synchronize", "afterwards"]


def raise_cuda_error(*_: Any) -> Any:
    raise RuntimeError(CAUSE)


class Broken:
    """An event of a device that was lost before it."""

    def __init__(self, where: str) -> None:
        self.where = where

    def query(self) -> bool:
        return raise_cuda_error() if self.where == "query" else True

    def synchronize(self) -> None:
        raise_cuda_error()


def lose(runner: ModelRunner, where: str, after: int = 0) -> None:
    """Lose the device after some steps. The error appears at `where`; "afterwards": after another error."""
    execute, num_launched = runner.execute, 0

    def broken(plan: StepPlan) -> Step:
        nonlocal num_launched
        num_launched += 1
        if num_launched <= after:
            return execute(plan)
        runner.platform.synchronize = raise_cuda_error  # type: ignore[method-assign]
        if where == "launch":
            raise_cuda_error()
        if where == "afterwards":
            raise ValueError("a bug")
        step = execute(plan)
        advance = step.advance

        def advance_broken(bitmask: Any) -> None:
            if where == "finish":
                raise_cuda_error()
            advance(bitmask)
            step.output.events = [Broken(where) for _ in step.output.events]

        step.advance = advance_broken  # type: ignore[method-assign]
        return step

    runner.execute = broken  # type: ignore[method-assign]


# -- the executor ------------------------------------------------------------------------------------------------------


def make_executor() -> Executor:
    return Executor(make_runner(NextTokenModel(), StubPlatform()))


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("call", ["result", "poll"])
def test_device_lost_error_is_raised_wherever_it_appears(where: str, call: str) -> None:
    executor = make_executor()
    before = executor.submit(Plan().give(0, (1, 2)).slice(0, 0, 1, 1, [3]))
    assert before.result().tokens == [[4]]
    lose(executor.runner, where)
    running = executor.submit(Plan().slice(0, 1, 2, 2))
    if call == "poll":
        while not running.done:  # as the engine does for streams
            assert running.poll(0.01) is None
    for _ in range(2):  # each call raises it
        with pytest.raises(DeviceLostError) as raised:
            running.result()
        assert not isinstance(raised.value, StepError)
        assert str(raised.value).endswith(f": {MESSAGES['fake']}") and "\n" not in str(raised.value)
    assert (type(raised.value.__cause__) is ValueError) == (where == "afterwards")
    executor.close()


def test_a_transient_cuda_error_does_not_lose_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reports a transient error once, and a permanent one at each call."""
    platform, num_calls = object.__new__(CudaPlatform), 0

    def synchronize() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls <= num_errors:
            raise_cuda_error()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    num_errors = 1
    platform.release_memory()
    platform.synchronize()
    num_errors = 100
    platform.release_memory()
    with pytest.raises(RuntimeError, match="illegal"):
        platform.synchronize()


@pytest.mark.parametrize("lost", [False, True])
def test_the_runner_of_a_lost_device_is_never_freed(lost: bool) -> None:
    """To free pinned memory torch queries the device, and a lost one would abort the process."""
    executor = make_executor()
    if lost:
        executor.runner.platform.synchronize = raise_cuda_error  # type: ignore[method-assign]
    runner = weakref.ref(executor.runner)
    executor.close()
    executor.close()
    gc.collect()
    assert (runner() is not None) == lost


def test_graphs_are_freed_with_the_executor() -> None:
    """NCCL waits for graphs with its kernels, and others may still refer to the runner: the frames of an exception."""
    executor = make_executor()
    runner = executor.runner
    runner.passes.graphs.captured = graphs = FakeGraphs(runner.input_buffers.step_counter)
    graphs.work["a pass"] = lambda: None
    executor.close()
    assert not graphs.work


# -- fronts ------------------------------------------------------------------------------------------------------------

WAYS: dict[str, tuple[dict[str, Any], SamplingParams]] = {
    "plain": ({}, PARAMS),
    "windows": ({"decode_window": 4}, PARAMS),
    "no overlap": ({"async_scheduling": False}, PARAMS),
    "masks": ({"decode_window": 4}, replace(PARAMS, structured_outputs={"regex": "[a-f]{20}"})),  # type: ignore[arg-type]
    "host": ({}, replace(PARAMS, logprobs=21)),
}


@pytest.mark.parametrize(
    ("way", "where"), [*((way, "synchronize") for way in WAYS), *(("windows", where) for where in PLACES)]
)
def test_an_llm_raises_one_line_and_frees_its_blocks(model: str, way: str, where: str) -> None:
    options, params = WAYS[way]
    with use_stub_platform(LLM(model, **(OPTIONS | options))) as llm:
        lose(llm.engine.executor.runner, where, after=2)  # type: ignore[attr-defined]
        uses: list[Callable[[], object]] = [
            lambda: llm.generate(PROMPTS, params, use_tqdm=False),
            lambda: list(llm.stream(PROMPTS, params)),  # the next call fails too
        ]
        for use in uses:
            with pytest.raises(DeviceLostError) as raised:
                use()
            line, code = explain(raised.value)
            assert code == FAILED and line.endswith(MESSAGES["fake"]) and "bug" not in line
            error: BaseException | None = raised.value
            while error := error.__context__:  # the error was raised only once
                assert not isinstance(error, DeviceLostError)
            assert not llm.engine.has_work and llm.engine.scheduler.stats().num_used == 0


@pytest.mark.parametrize("front", ["llm", "async"])
def test_a_process_exits_with_cudas_message_and_leaves_no_child(model: str, front: str) -> None:
    check_process(model, front, "fake")


def test_an_engine_process_is_replaced_and_its_requests_continue(model: str, tmp_path: Path) -> None:
    check_engine_process(model, "fake", tmp_path)
