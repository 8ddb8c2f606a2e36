"""Steps that run out of memory: they are repeated in smaller steps, and their tensors are freed."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.core import events as ev
from octavo.core.plan import StepPlan
from octavo.engine.engine_request import EngineRequest
from octavo.engine.outputs import request_failed_error
from octavo.errors import StepError, StepMemoryError
from octavo.runner.executor import Executor, ThreadedExecutor
from octavo.runner.failures import step_error
from octavo.runner.platform import CpuPlatform
from tests.engine.client import StepClient
from tests.runner.handwritten_plans import NextTokenModel, Plan, make_runner
from tests.runner.stub_platform import StubPlatform, use_stub_platform
from tests.runner.test_stub_platform import completions, mixed_params

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": 4,
    "num_gpu_blocks_override": 120,
    "max_num_seqs": 8,
    "max_logprobs": 21,
}


class LimitedModel:
    """A model with memory for `room` tokens a pass, and for no pass with the token `never`."""

    def __init__(self, inner: Any, room: int, never: int = -1) -> None:
        self.inner, self.room, self.never = inner, room, never
        self.made: list[weakref.ref[Tensor]] = []

    def forward(self, token_ids: Tensor, *rest: Any) -> Tensor:
        hidden = torch.zeros(len(token_ids), 7)
        self.made.append(weakref.ref(hidden))
        if len(token_ids) > self.room or self.never in token_ids.tolist():
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(token_ids)} GiB.\nAdvice follows")
        logits: Tensor = self.inner.forward(token_ids, *rest)
        return logits


def limit_memory(llm: LLM, room: int, never: int = -1) -> LimitedModel:
    runner: Any = llm.engine.executor.runner  # type: ignore[attr-defined]
    found = LimitedModel(runner.passes.model, room, never)
    runner.passes.replace_model(found)
    return found


def prompts(num: int) -> list[list[int]]:
    return [[3 + (7 * i + j * j) % 90 for j in range(3 + 5 * i % 23)] for i in range(num)]


@pytest.mark.parametrize("stub_platform", [False, True], ids=["cpu", "stub_platform"])
@pytest.mark.parametrize("options", [{}, {"decode_window": 4}, {"async_scheduling": False}], ids=str)
def test_smaller_steps_give_the_same_tokens(model: str, options: dict[str, Any], stub_platform: bool) -> None:
    logprobs_params = [SamplingParams(temperature=0, logprobs=num, max_tokens=9, ignore_eos=True) for num in (1, 21)]
    params = [replace(p, detokenize=False) for p in (*mixed_params(), *logprobs_params)]
    with LLM(model, **OPTIONS, **options) as llm:
        expected = completions(llm.generate(prompts(len(params)), params, use_tqdm=False))
    with LLM(model, **OPTIONS, **options) as llm:
        if stub_platform:
            use_stub_platform(llm)
        limit_memory(llm, room=5)
        events: list[ev.Event] = []
        llm.engine.scheduler.events.subscribe(events.append)
        outputs = completions(llm.generate(prompts(len(params)), params, use_tqdm=False))
        recomputed = [event for event in events if isinstance(event, ev.Recomputed)]
        assert llm.engine.stats.num_failed_steps > 1
    assert [tokens for tokens, *_ in outputs] == [tokens for tokens, *_ in expected]
    assert recomputed and all(e.why == "out of memory" and 0 < e.limit < e.num_tokens for e in recomputed)


@pytest.mark.parametrize("stub_platform", [False, True], ids=["cpu", "stub_platform"])
def test_a_request_that_does_not_fit_alone_fails_with_a_remedy(model: str, stub_platform: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    few = prompts(4)
    with LLM(model, **OPTIONS) as llm:
        expected = completions(llm.generate(few, params, use_tqdm=False))
        others = {t for tokens, *_ in expected for t in tokens}.union(*few[:2], few[3])
        never = min(set(few[2]) - others)
    with LLM(model, **OPTIONS) as llm:
        if stub_platform:
            use_stub_platform(llm)
        limit_memory(llm, room=1000, never=never)
        client = StepClient(llm.engine)
        for i, prompt in enumerate(few):
            client.add_request(EngineRequest(str(i), prompt, params))
        outputs = {output.request_id: output for output in client.run_to_end()}
        assert completions([outputs[name] for name in "013"]) == [expected[i] for i in (0, 1, 3)]
        assert outputs["2"].outputs[0].finish_reason == "error"
        error = request_failed_error(outputs["2"])
        assert error.code == "out_of_memory" and "\n" not in str(error)
        assert "lower --gpu-memory-utilization or --max-num-batched-tokens" in str(error)
        assert "Tried to allocate 1 GiB" in str(error)


def test_tensors_of_a_failed_step_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = LimitedModel(NextTokenModel(), room=2)
    runner = make_runner(found, StubPlatform())
    is_freed: list[bool] = []
    monkeypatch.setattr(
        runner.platform, "release_memory", lambda: is_freed.append(all(made() is None for made in found.made))
    )
    executor = Executor(runner)
    assert executor.submit(Plan().give(0, (1, 2)).slice(0, 0, 2, 1, [3, 4])).result().tokens == [[5]]
    failed = executor.submit(Plan().give(1, (3, 4)).slice(1, 0, 3, 1, [3, 4, 5]))
    later = executor.submit(Plan().slice(0, 2, 1, 1))
    with pytest.raises(
        StepMemoryError, match=r"^OutOfMemoryError: CUDA out of memory.*GiB\. Advice follows$"
    ) as raised:
        failed.result()
    assert raised.value.code == "out_of_memory" and is_freed == [True]
    with pytest.raises(StepError, match="a step before it failed") as other:
        later.result()
    assert not isinstance(other.value, StepMemoryError) and len(is_freed) == 2
    assert executor.submit(Plan().give(0, (1, 2)).slice(0, 0, 2, 1, [3, 4])).result().tokens == [[5]]


class Raising:
    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.platform, self.output_buffers = CpuPlatform(), SimpleNamespace()

    def execute(self, *_: Any) -> None:
        raise self.error

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("so much"),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=lambda e: str(e)[:20],
)
def test_errors_that_are_a_lack_of_memory(error: Exception) -> None:
    executor = ThreadedExecutor(Raising(error))  # type: ignore[arg-type]
    plan = StepPlan()
    plan.rows = [0]
    with pytest.raises(StepMemoryError):
        executor.submit(plan).result()
    executor.close()
    second = RuntimeError("capture was not ended")
    second.__context__ = error  # raised while handling the first error
    assert isinstance(step_error(second), StepMemoryError)


def test_errors_that_are_not_a_lack_of_memory() -> None:
    for error in (RuntimeError("CUDA error: an illegal memory access was encountered"), ValueError("out of memory")):
        assert type(step_error(error)) is StepError
