"""Two tensor parallel ranks on two GPUs: in float32 the tokens of one CPU, for every family, and one fate."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("fewer than two GPUs", allow_module_level=True)

from octavo import LLM, SamplingParams
from octavo.errors import DeviceLostError, ParameterError
from octavo.kernels.triton.sent_sums import CopiedSum
from octavo.runner.model_runner import ModelRunner
from octavo.runner.ranks import rank_group
from tests.engine.models import make_talking_checkpoint
from tests.frontend.test_ranks import DEATH, HANG, LONG, PROMPTS, child_pids, generate
from tests.gpu.test_engine import params
from tests.models.test_tensor_parallel import CASES as CASES_OF_FOUR
from tests.models.tiny import make_tiny_checkpoint
from tests.proof import reliability
from tests.proof.tally import Tally, World
from tests.proof.ways import OPTIONS, WAYS, runs
from tests.runner.test_stub_platform import completions

TALKING: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "num_gpu_blocks_override": 200,
    "max_num_seqs": 16,
    "max_model_len": 128,
}


NUM_FAULTS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_talking_checkpoint(tmp_path_factory.mktemp("talking"), intermediate_size=48))


SIZES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 38},
    "mistral": {"num_attention_heads": 4, "intermediate_size": 38},  # one K/V head, which both ranks have
    "qwen2": {"intermediate_size": 38},
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 38},
    "gemma3": {"num_key_value_heads": 2, "intermediate_size": 38},
    "gpt2": {"n_head": 4, "n_inner": 38},
    "opt": {"num_attention_heads": 4, "ffn_dim": 38},
    "phi3": {"intermediate_size": 38},
    "olmo2": {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 38},
    "smollm3": {"intermediate_size": 38},
    "granite": {"intermediate_size": 38},
    "starcoder2": {"intermediate_size": 38},
    "internlm2": {"intermediate_size": 38},
    "internlm3": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 38},
    "qwen3_moe": {"intermediate_size": 38},
    "mixtral": {"num_attention_heads": 4},
    "gpt_oss": {},
    "qwen3_5": {"linear_num_value_heads": 8, "intermediate_size": 38},
    "qwen3_next": {"linear_num_value_heads": 8, "intermediate_size": 38},
    "qwen3_5_moe": {},
    "gemma4": {"intermediate_size": 38},
}
"""Heads and columns that two ranks divide."""


FAMILIES = [(kind, "graphs") for kind in SIZES]
OTHER_WAYS = [("llama", way) for way in WAYS if way != "graphs"]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A kind -> its checkpoint, prompts, and the CPU's tokens."""

    @functools.cache
    def compute(kind: str) -> tuple[str, list[list[int]], Any]:
        directory = str(make_tiny_checkpoint(kind, tmp_path_factory.mktemp(kind) / kind, **SIZES[kind]))
        prompts = [[3 + (7 * i + j * j) % 90 for j in range(3 + 5 * i % 23)] for i in range(len(params()))]
        with LLM(directory, device="cpu", **OPTIONS) as llm:
            return directory, prompts, completions(llm.generate(prompts, params(), use_tqdm=False))

    return compute


@pytest.mark.parametrize(("kind", "way"), [*FAMILIES, *OTHER_WAYS])
def test_tokens_of_two_ranks_equal_the_cpu_engines(kind: str, way: str, on_cpu: Any) -> None:
    directory, prompts, expected = on_cpu(kind)
    with LLM(directory, device="cuda", tensor_parallel_size=2, **(OPTIONS | WAYS[way])) as llm:
        for outputs in runs(llm, way, prompts, params()):
            assert completions(outputs) == expected


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="fewer than four GPUs")
@pytest.mark.parametrize("case", ["llama", "gpt2", "qwen3_moe", "gpt_oss", "qwen3_next", "gemma4"])
def test_tokens_of_four_ranks_equal_the_cpu_engines(case: str, tmp_path: Path) -> None:
    """Some of them share K/V heads."""
    kind, sizes = CASES_OF_FOUR[case]
    sizes = ({} if kind == "gpt2" else {"intermediate_size": 40}) | sizes
    directory = str(make_tiny_checkpoint(kind, tmp_path / kind, **sizes))
    prompts = [[3 + (7 * i + j * j) % 90 for j in range(3 + 5 * i % 23)] for i in range(len(params()))]
    with LLM(directory, device="cpu", **OPTIONS) as llm:
        expected = completions(llm.generate(prompts, params(), use_tqdm=False))
    with LLM(directory, device="cuda", tensor_parallel_size=4, **OPTIONS) as llm:
        assert completions(llm.generate(prompts, params(), use_tqdm=False)) == expected


@pytest.mark.parametrize("eager", [False, True])
def test_long_passes_send_their_sums_in_parts(eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of 2,048 tokens, whose sums take 64 MiB, by a graph or not, and shorter ones."""
    directory = str(
        make_tiny_checkpoint(
            "llama", tmp_path / "llama", hidden_size=8192, intermediate_size=38, max_position_embeddings=1024
        )
    )
    prompts = [[3 + (7 * i + j * j) % 90 for j in range(150 + 25 * i)] for i in range(16)]
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    options = OPTIONS | {"max_num_seqs": 16, "max_model_len": 600, "max_num_batched_tokens": 2048}
    options |= {"num_gpu_blocks_override": 1000}
    with LLM(directory, device="cpu", **options) as llm:
        expected = completions(llm.generate(prompts, greedy, use_tqdm=False))
    kept: list[ModelRunner] = []  # NCCL waits for graphs with its kernels: `close` must free them
    sent: list[int] = []
    send = CopiedSum.send

    def count(*args: Any) -> CopiedSum:
        sent.append(len(args[2]))
        return send(*args)

    monkeypatch.setattr(CopiedSum, "send", count)
    with LLM(directory, device="cuda", tensor_parallel_size=2, enforce_eager=eager, **options) as llm:
        kept.append(llm.engine.executor.runner)  # type: ignore[attr-defined]
        sent.clear()
        assert completions(llm.generate(prompts, greedy, use_tqdm=False)) == expected
    assert sent  # also beside graphs: the last pass is shorter


@pytest.mark.parametrize(("number", "text"), [(signal.SIGKILL, DEATH), (signal.SIGSTOP, HANG)], ids=["kill", "stop"])
def test_a_lost_rank_is_named(model: str, number: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's GPU waits for it in a sum. It ends soon after the loss is known, and so does `close`."""
    monkeypatch.setattr(rank_group, "HANG_S", 5.0)
    with LLM(model, **TALKING, tensor_parallel_size=2) as llm:
        generate(llm)
        stream = llm.stream(PROMPTS, LONG)
        next(stream)
        os.kill(child_pids(os.getpid())[0], number)
        with pytest.raises(DeviceLostError, match=text):
            list(stream)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_a_storm_of_faults(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial of `make reliability` on GPUs, where a group takes 10 to 15 s to serve again."""
    monkeypatch.setattr(reliability, "BACK_S", 20.0)
    on_gpus = {"device": "cuda", "num_gpu_blocks_override": 400}
    monkeypatch.setattr(reliability, "RANK_OPTIONS", reliability.RANK_OPTIONS | on_gpus)
    tally = Tally("")
    asyncio.run(reliability.ranks_under_fire(tally, World("", {}, 1.0, tmp_path), number, NUM_FAULTS))
    print(tally.line())
    assert tally.runs >= 16
    assert (tally.lost, tally.hung, tally.wrong, tally.leaked, tally.late) == (0, 0, 0, 0, False), tally.notes


def test_too_many_ranks_are_refused(model: str) -> None:
    num = torch.cuda.device_count() + 1
    with pytest.raises(ParameterError, match=f"tensor_parallel_size {num} needs {num} GPUs; there are {num - 1}"):
        LLM(model, **TALKING, tensor_parallel_size=num)
