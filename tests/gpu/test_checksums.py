"""Swapped blocks whose bits flip in host memory give no request a wrong token."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import LLM
from tests.engine.models import make_talking_checkpoint
from tests.runner.test_checksums import PARAMS, PROMPTS, Flipper, completions

TIGHT: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "block_size": 8,
    "num_gpu_blocks_override": 14,
    "max_num_seqs": 8,
    "preemption_mode": "swap",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_talking_checkpoint(tmp_path_factory.mktemp("talking")))


@pytest.fixture(scope="module")
def expected(model: str) -> list[Any]:
    with LLM(model, **TIGHT | {"num_gpu_blocks_override": 200}) as llm:
        return completions(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "alone"])
@pytest.mark.parametrize("window", [1, 4])
def test_flipped_bits_give_no_wrong_token(model: str, expected: list[Any], window: int, overlap: bool) -> None:
    with LLM(model, **TIGHT, decode_window=window, async_scheduling=overlap) as llm:
        flipper = Flipper(llm)
        assert completions(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
        stats = llm.kv_stats()
        assert flipper.blocks and 0 < stats.num_corrupt <= len(flipper.blocks)
        assert stats.num_used == stats.num_host_used == 0


def test_blocks_that_are_whole_come_back(model: str, expected: list[Any]) -> None:
    with LLM(model, **TIGHT) as llm:
        assert completions(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
        assert llm.kv_stats().num_swapped_in > 0 and llm.kv_stats().num_corrupt == 0
