"""Bits of swapped blocks flip in host memory: no request gets a wrong token."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from xxhash import xxh3_64_intdigest

from octavo import LLM, BeamSearchParams
from octavo.core.plan import StepPlan, StepResult, SwapIn, SwapOut
from octavo.runner.checksums import Checksums, SwapInCheck
from octavo.runner.executor import Executor
from octavo.runner.platform import CpuPlatform
from octavo.runner.streams import CompletedEvent
from tests.runner.flipped_bits import (
    PARAMS,
    PROMPTS,
    BitFlipper,
    check_no_wrong_token,
    check_nothing_recomputed,
    completions,
    generate,
)
from tests.runner.handwritten_plans import NextTokenModel, make_runner
from tests.runner.stub_platform import use_stub_platform

TIGHT: dict[str, Any] = {
    "device": "cpu",
    "block_size": 4,
    "num_gpu_blocks_override": 22,
    "max_num_seqs": 8,
    "preemption_mode": "swap",
}


@pytest.fixture(scope="module")
def expected(model: str) -> list[Any]:
    with LLM(model, **TIGHT | {"num_gpu_blocks_override": 200}) as llm:
        return generate(llm)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "alone"])
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("stub_platform", [False, True], ids=["cpu", "stub_platform"])
def test_a_flipped_bit_gives_no_wrong_token(
    model: str, expected: list[Any], stub_platform: bool, window: int, overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(model, **TIGHT, decode_window=window, async_scheduling=overlap)
    with use_stub_platform(llm) if stub_platform else llm:
        check_no_wrong_token(llm, expected)
    assert "swapped blocks came back corrupted" in caplog.text


def test_without_a_flipped_bit_nothing_is_recomputed(model: str, expected: list[Any]) -> None:
    with LLM(model, **TIGHT) as llm:
        check_nothing_recomputed(llm, expected)


def test_a_stream_never_shows_a_wrong_token(model: str, expected: list[Any]) -> None:
    """A decode window is streamed column by column while it runs."""
    with LLM(model, **TIGHT, decode_window=4) as llm:
        BitFlipper(llm)
        wanted = dict(zip("01", expected, strict=False))
        for output in llm.stream(PROMPTS, PARAMS):
            if output.request_id in wanted:
                shown = output.outputs[0].token_ids
                assert shown == wanted[output.request_id][0][: len(shown)]
        assert llm.stats().num_corrupt_blocks > 0


def test_beam_search_with_flipped_bits(model: str) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True)
    with LLM(model, **TIGHT | {"num_gpu_blocks_override": 200}) as llm:
        want = completions(llm.beam_search(PROMPTS, params, use_tqdm=False))
    with LLM(model, **TIGHT | {"num_gpu_blocks_override": 19}) as llm:
        BitFlipper(llm)
        assert completions(llm.beam_search(PROMPTS, params, use_tqdm=False)) == want
        assert llm.stats().num_corrupt_blocks > 0


# -- Checksums ---------------------------------------------------------------------------------------------------------


class Gate(threading.Event):
    """A device event that the test completes."""

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


def test_checksums_wait_for_the_copies() -> None:
    host_kv, gate = torch.zeros(3, 4), Gate()
    sums = Checksums(host_kv)
    check = sums.submit([1], [1], gate)
    assert not check.done
    host_kv[1] = 7
    gate.set()
    assert check.take() == [] and check.done
    assert sums.submit([], [1], CompletedEvent()).take() == []


def test_wait_for_blocks_until_the_comparison_ends() -> None:
    sums, gate = Checksums(torch.zeros(3, 4)), Gate()
    sums.submit([1, 2], [], CompletedEvent()).take()
    sums.submit([], [1], gate)
    sums.wait_for([2])  # no comparison reads it
    waited = threading.Thread(target=sums.wait_for, args=([1],))
    waited.start()
    waited.join(0.05)
    assert waited.is_alive()
    gate.set()
    waited.join(20)
    assert not waited.is_alive()


def test_corrupt_blocks_are_reported_once() -> None:
    check = Checksums(torch.zeros(3, 4)).submit([], [1], CompletedEvent())
    assert [check.take(), check.take()] == [[1], []]
    assert SwapInCheck().take() == [] and SwapInCheck().done


def test_a_plan_of_swaps_only_reports_corrupt_blocks() -> None:
    out, back = StepPlan(), StepPlan()
    out.swap_outs = [SwapOut(1, 3), SwapOut(2, 4)]
    back.swap_ins = [SwapIn(3, 5), SwapIn(4, 6)]
    runner = make_runner(NextTokenModel(), CpuPlatform())
    executor = Executor(runner)
    assert executor.submit(out).result() == StepResult([])
    runner.state.swapper.host_kv[4] += 1
    assert executor.submit(back).result() == StepResult([], corrupt=[4])


def test_the_checksum_thread_ends_with_the_engine(model: str) -> None:
    before = set(threading.enumerate())
    with LLM(model, **TIGHT) as llm:
        generate(llm)
        assert llm.kv_stats().num_swapped_out > 0
    del llm
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("octavo-checksums"):
            thread.join(20)
            assert not thread.is_alive()
