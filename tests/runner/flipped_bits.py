"""Flips bits of swapped blocks in host memory, for tests of their checksums on a CPU and on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from octavo import LLM, SamplingParams
from octavo.core.in_flight import InFlightStep

PROMPTS = [[3 + (7 * i + j * j) % 90 for j in range(6 + 5 * i % 23)] for i in range(6)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=1, max_tokens=20, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.1, seed=5, n=2, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=2, max_tokens=17, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=3, max_tokens=20, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=18, structured_outputs={"regex": "[a-z ]{30,90}"}),  # type: ignore[arg-type]
]


def completions(outputs: list[Any]) -> list[Any]:
    return [(c.token_ids, c.finish_reason) for output in outputs for c in output.outputs]


def generate(llm: LLM) -> list[Any]:
    return completions(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


class BitFlipper:
    """Flips one bit of each swapped-out request before the next step is planned, `max_flips` times at most."""

    def __init__(self, llm: LLM, max_flips: int = 3) -> None:
        self.engine = engine = llm.engine
        runner = engine.executor.runner  # type: ignore[attr-defined]
        self.host_kv = runner.state.swapper.host_kv
        self.blocks: list[int] = []
        self.max_flips = max_flips
        schedule = engine.scheduler.schedule

        def flip_and_schedule() -> InFlightStep:
            self.flip()
            return schedule()

        engine.scheduler.schedule = flip_and_schedule  # type: ignore[method-assign]

    def flip(self) -> None:
        moving = [request for step in self.engine.scheduler.in_flight for request in step.swapped_requests]
        for request in self.engine.scheduler.swapped:
            blocks = [b for b in request.sequences[0].block_ids if b > 0]
            if request not in moving and blocks and len(self.blocks) < self.max_flips:
                bits = self.host_kv[blocks[0]].view(torch.uint8).view(-1)
                bits[len(bits) // 3] ^= 16
                self.blocks.append(blocks[0])


def check_no_wrong_token(llm: LLM, expected: list[Any]) -> None:
    """The requests get the expected tokens although bits flip, and the engine reports the corrupt blocks."""
    flipper = BitFlipper(llm)
    assert generate(llm) == expected
    stats = llm.kv_stats()
    assert stats.num_swapped_in > 0 and 0 < stats.num_corrupt <= len(flipper.blocks)
    assert stats.num_corrupt == llm.stats().num_corrupt_blocks
    assert stats.num_used == stats.num_host_used == 0


def check_nothing_recomputed(llm: LLM, expected: list[Any]) -> None:
    """Without a flipped bit no block is corrupt."""
    assert generate(llm) == expected
    assert llm.kv_stats().num_swapped_in > 0 and llm.kv_stats().num_corrupt == 0
