"""A process loses its GPU by a write to an invalid address or an index out of bounds.

It exits with CUDA's message and frees its memory; an engine process is replaced.
"""

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
"""Bytes that other processes may allocate meanwhile."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_checkpoint("llama", tmp_path_factory.mktemp("lost") / "llama"))


def wait_for(free: int) -> None:
    """Wait until the driver has freed the memory."""
    deadline = time.monotonic() + 20
    while torch.cuda.mem_get_info()[0] < free - SLACK:
        assert time.monotonic() < deadline, f"{free - torch.cuda.mem_get_info()[0]} bytes are not freed"
        time.sleep(0.1)


@pytest.mark.parametrize("harm", ["write", "index"])
@pytest.mark.parametrize("front", ["llm", "async"])
def test_a_process_exits_with_cudas_message_and_frees_its_memory(model: str, front: str, harm: str) -> None:
    free = torch.cuda.mem_get_info()[0]
    check_process(model, front, harm)
    wait_for(free)


@pytest.mark.parametrize("harm", ["write", "index"])
def test_an_engine_process_is_replaced_and_frees_its_memory(model: str, harm: str, tmp_path: Path) -> None:
    pytest.importorskip("zmq")
    free = torch.cuda.mem_get_info()[0]
    check_engine_process(model, harm, tmp_path)
    wait_for(free)
