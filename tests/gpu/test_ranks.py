"""Two tensor parallel ranks on two GPUs: the tokens of one in float32, with graphs and without, and one fate."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("fewer than two GPUs", allow_module_level=True)

from octavo import LLM, SamplingParams
from octavo.errors import DeviceLostError, ParameterError
from tests.engine.models import make_talking_checkpoint
from tests.frontend.test_ranks import GREEDY, LONG, PROMPTS, SEEDED, child_pids, generate, results

OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "num_gpu_blocks_override": 200,
    "max_num_seqs": 16,
    "max_model_len": 128,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_talking_checkpoint(tmp_path_factory.mktemp("talking"), intermediate_size=48))


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_two_gpus_give_the_tokens_of_one(model: str, enforce_eager: bool) -> None:
    regex = SamplingParams(temperature=0, max_tokens=20, structured_outputs={"regex": "[a-f]{3}-[0-9]{5}"})  # type: ignore[arg-type]
    found = []
    for size in (1, 2):
        with LLM(model, **OPTIONS, enforce_eager=enforce_eager, tensor_parallel_size=size) as llm:
            found.append([results(generate(llm, PROMPTS, params)) for params in (GREEDY, SEEDED, regex)])
    assert found[0] == found[1]


def test_the_death_of_a_rank_is_named(model: str) -> None:
    """Rank 0's GPU waits for it in a collective."""
    with LLM(model, **OPTIONS, tensor_parallel_size=2) as llm:
        generate(llm)
        stream = llm.stream(PROMPTS, LONG)
        next(stream)
        os.kill(child_pids(os.getpid())[0], signal.SIGKILL)
        with pytest.raises(DeviceLostError, match="rank 1 was killed by SIGKILL"):
            list(stream)


def test_too_many_ranks_are_refused(model: str) -> None:
    num = torch.cuda.device_count() + 1
    with pytest.raises(ParameterError, match=f"tensor_parallel_size {num} needs {num} GPUs; there are {num - 1}"):
        LLM(model, **OPTIONS, tensor_parallel_size=num)
