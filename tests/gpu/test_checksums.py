"""Bits of swapped blocks flip in host memory on a GPU machine: no request gets a wrong token."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import LLM
from tests.engine.models import make_talking_checkpoint
from tests.runner.flipped_bits import check_no_wrong_token, check_nothing_recomputed, generate

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
        return generate(llm)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "alone"])
@pytest.mark.parametrize("window", [1, 4])
def test_a_flipped_bit_gives_no_wrong_token(model: str, expected: list[Any], window: int, overlap: bool) -> None:
    with LLM(model, **TIGHT, decode_window=window, async_scheduling=overlap) as llm:
        check_no_wrong_token(llm, expected)


def test_without_a_flipped_bit_nothing_is_recomputed(model: str, expected: list[Any]) -> None:
    with LLM(model, **TIGHT) as llm:
        check_nothing_recomputed(llm, expected)
