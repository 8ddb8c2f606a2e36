"""Blocks of the host tier whose bits flip while they lie there: no request gets a wrong token from them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from xxhash import xxh3_64_intdigest

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.core.plan import StepPlan, StepResult, SwapIn, SwapOut
from octavo.kernels import reference
from octavo.runner.checksums import Checksums, SwapInCheck
from octavo.runner.model_runner import ModelRunner
from octavo.runner.streams import CompletedEvent
from tests.engine.models import make_talking_checkpoint
from tests.runner.test_cuda_model_runner import on_rows
from tests.runner.test_model_runner import Counting

PROMPTS = [[3 + (7 * i + j * j) % 90 for j in range(6 + 5 * i % 23)] for i in range(6)]
TIGHT: dict[str, Any] = {
    "device": "cpu",
    "block_size": 4,
    "num_gpu_blocks_override": 22,
    "max_num_seqs": 8,
    "preemption_mode": "swap",
}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=1, max_tokens=20, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.1, seed=5, n=2, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=2, max_tokens=17, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=3, max_tokens=20, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=18, structured_outputs={"regex": "[a-z ]{30,90}"}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_talking_checkpoint(tmp_path_factory.mktemp("talking")))


@pytest.fixture(scope="module")
def expected(model: str) -> list[Any]:
    with LLM(model, **TIGHT | {"num_gpu_blocks_override": 200}) as llm:
        return told(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def told(outputs: list[Any]) -> list[Any]:
    return [(c.token_ids, c.finish_reason) for output in outputs for c in output.outputs]


class Flipper:
    """Flips a bit of each request that is swapped out, once a time, before the next step is planned."""

    def __init__(self, llm: LLM, most: int = 3) -> None:
        self.engine = engine = llm.engine
        runner = engine.executor.runner  # type: ignore[attr-defined]
        self.host_kv = (runner if hasattr(runner, "host_kv") else runner.swapper).host_kv
        self.blocks: list[int] = []
        self.most = most
        schedule = engine.scheduler.schedule

        def flip_and_schedule() -> StepPlan:
            self.flip()
            return schedule()

        engine.scheduler.schedule = flip_and_schedule  # type: ignore[method-assign]

    def flip(self) -> None:
        moving = [request for plan in self.engine.scheduler.in_flight for request in plan.swapped_requests]
        for request in self.engine.scheduler.swapped:
            blocks = [b for b in request.sequences[0].block_ids if b > 0]
            if request not in moving and blocks and len(self.blocks) < self.most:
                bits = self.host_kv[blocks[0]].view(torch.uint8).view(-1)
                bits[len(bits) // 3] ^= 16
                self.blocks.append(blocks[0])


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "alone"])
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("rows", [False, True], ids=["cpu", "rows"])
def test_a_flipped_bit_gives_no_wrong_token(
    model: str, expected: list[Any], rows: bool, window: int, overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(model, **TIGHT, decode_window=window, async_scheduling=overlap)
    with on_rows(llm) if rows else llm:
        flipper = Flipper(llm)
        assert told(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
        stats = llm.kv_stats()
        assert stats.num_swapped_in > 0 and stats.num_corrupt > 0
        assert stats.num_corrupt == llm.stats().num_corrupt_blocks <= len(flipper.blocks)
        assert stats.num_used == stats.num_host_used == 0
    assert "swapped blocks came back corrupted" in caplog.text


def test_without_a_flipped_bit_nothing_is_recomputed(model: str, expected: list[Any]) -> None:
    with LLM(model, **TIGHT) as llm:
        assert told(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
        assert llm.kv_stats().num_swapped_in > 0 and llm.kv_stats().num_corrupt == 0


def test_a_stream_never_shows_a_wrong_token(model: str, expected: list[Any]) -> None:
    """Windows land column by column while they run."""
    with LLM(model, **TIGHT, decode_window=4) as llm:
        Flipper(llm)
        want = dict(zip("01", expected, strict=False))
        for output in llm.stream(PROMPTS, PARAMS):
            if output.request_id in want:
                shown = output.outputs[0].token_ids
                assert shown == want[output.request_id][0][: len(shown)]
        assert llm.stats().num_corrupt_blocks > 0


def test_beams_beside_flipped_bits(model: str) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True)
    with LLM(model, **TIGHT | {"num_gpu_blocks_override": 200}) as llm:
        want = told(llm.beam_search(PROMPTS, params, use_tqdm=False))
    with LLM(model, **TIGHT | {"num_gpu_blocks_override": 19}) as llm:
        Flipper(llm)
        assert told(llm.beam_search(PROMPTS, params, use_tqdm=False)) == want
        assert llm.stats().num_corrupt_blocks > 0


# -- checksums by themselves -------------------------------------------------------------------------------------------


class Gate(threading.Event):
    """A point that is reached when it is set."""

    def query(self) -> bool:
        return self.is_set()

    def synchronize(self) -> None:
        assert self.wait(20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_every_bit_of_a_block_counts(dtype: torch.dtype) -> None:
    host_kv = torch.zeros(3, 2, 2, 3, dtype=dtype)
    sums = Checksums(host_kv)
    assert sums.submit([1, 2], [], CompletedEvent()).take() == []
    bits = host_kv[2].view(torch.uint8).view(-1)
    for i in range(len(bits)):
        bits[i] ^= 1
        assert sums.submit([], [1, 2], CompletedEvent()).take() == [2]
        bits[i] ^= 1
    assert sums.submit([], [1, 2], CompletedEvent()).take() == []
    assert sums._sums[1] == xxh3_64_intdigest(bytes(len(bits)))


def test_a_block_that_was_never_swapped_out_is_corrupt() -> None:
    assert Checksums(torch.zeros(3, 4)).submit([], [1], CompletedEvent()).take() == [1]


def test_checksums_wait_until_blocks_have_moved() -> None:
    host_kv, gate = torch.zeros(3, 4), Gate()
    sums = Checksums(host_kv)
    check = sums.submit([1], [1], gate)
    assert not check.done
    host_kv[1] = 7
    gate.set()
    assert check.take() == [] and check.done
    assert sums.submit([], [1], CompletedEvent()).take() == []


def test_a_block_that_is_compared_is_not_overwritten() -> None:
    sums, gate = Checksums(torch.zeros(3, 4)), Gate()
    sums.submit([1, 2], [], CompletedEvent()).take()
    sums.submit([], [1], gate)
    sums.wait_for([2])  # nobody compares it
    waited = threading.Thread(target=sums.wait_for, args=([1],))
    waited.start()
    waited.join(0.05)
    assert waited.is_alive()
    gate.set()
    waited.join(20)
    assert not waited.is_alive()


def test_corrupt_blocks_are_reported_once() -> None:
    check = Checksums(torch.zeros(3, 4)).submit([], [1], CompletedEvent())
    landed: list[StepResult] = []
    land = check.attach_to(landed.append)
    land(StepResult([[1]]))
    land(StepResult([[2]]))
    assert [result.corrupt for result in landed] == [[1], []]
    assert SwapInCheck().take() == [] and SwapInCheck().done


@pytest.fixture
def runner() -> ModelRunner:
    kv = torch.zeros(9, 1, 2, 1, 2, 1)
    return ModelRunner(Counting(), kv, torch.zeros_like(kv), num_rows=4, max_model_len=8, ops=reference)


def test_a_plan_of_swaps_alone_reports_corrupt_blocks(runner: ModelRunner) -> None:
    out, back = StepPlan(), StepPlan()
    out.swap_outs = [SwapOut(1, 3), SwapOut(2, 4)]
    back.swap_ins = [SwapIn(3, 5), SwapIn(4, 6)]
    landed: list[StepResult] = []
    runner.run(out, landed.append)
    runner.host_kv[4] += 1
    runner.run(back, landed.append)
    assert landed == [StepResult([], corrupt=[4])]


def test_no_thread_is_left_behind(model: str) -> None:
    before = set(threading.enumerate())
    with LLM(model, **TIGHT) as llm:
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert llm.kv_stats().num_swapped_out > 0
    del llm
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("octavo-checksums"):
            thread.join(20)
            assert not thread.is_alive()
