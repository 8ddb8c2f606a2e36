"""A GPU that a process loses for good, by a write to nobody's memory or an index out of all bounds: it ends with CUDA's
words, and gives the memory back; and behind a client it is replaced."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from tests.models.tiny import make_tiny_checkpoint
from tests.runner.lose_device import check_engine_process, check_process

SLACK = 64 << 20
"""Bytes: other processes come and go, too."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_checkpoint("llama", tmp_path_factory.mktemp("lost") / "llama"))


def wait_for(free: int) -> None:
    """The driver may take a moment to tidy up."""
    until = time.monotonic() + 20
    while torch.cuda.mem_get_info()[0] < free - SLACK:
        assert time.monotonic() < until, f"{free - torch.cuda.mem_get_info()[0]} bytes are not back"
        time.sleep(0.1)


@pytest.mark.parametrize("harm", ["write", "index"])
@pytest.mark.parametrize("front", ["llm", "async"])
def test_a_process_ends_with_cudas_words_and_gives_the_memory_back(model: str, front: str, harm: str) -> None:
    free = torch.cuda.mem_get_info()[0]
    check_process(model, front, harm)
    wait_for(free)


@pytest.mark.parametrize("harm", ["write", "index"])
def test_an_engines_process_is_replaced_and_gives_the_memory_back(model: str, harm: str, tmp_path: Path) -> None:
    pytest.importorskip("zmq")
    free = torch.cuda.mem_get_info()[0]
    check_engine_process(model, harm, tmp_path)
    wait_for(free)
