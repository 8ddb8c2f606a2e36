"""In bfloat16, a sequence gets the same logits alone and in a batch, to the last bit, up to 16 decoding sequences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.kernels.cpu import ops as cpu
from octavo.runner.passes.recorded_graphs import RecordedGraphs
from tests.kernels.cpu.backends import use_backend
from tests.models.tiny import make_tiny_checkpoint, random_prompts

NUM_STEPS = 4
PROMPTS = random_prompts(*(3 + 11 * i % 37 for i in range(16)))  # prompts of 3 to 38 tokens
GREEDY = SamplingParams(max_tokens=NUM_STEPS, temperature=0.0, ignore_eos=True)
Directory = Callable[[str], Path]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Directory:
    """kind -> directory of its checkpoint, made once."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_tiny_checkpoint(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get


def steps(llm: LLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The logits of each step, as passed to sampling."""
    seen: list[Tensor] = []
    sample = cpu.sample_checked
    with monkeypatch.context() as patch:
        patch.setattr(RecordedGraphs, "takes", lambda self, shape: shape.part == "model")  # whole passes call nothing
        patch.setattr(cpu, "sample_checked", lambda logits, *rest: seen.append(logits.clone()) or sample(logits, *rest))
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
    assert [logits.dtype for logits in seen] == [torch.float32] * NUM_STEPS
    return seen


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("way", ["native", "x86-64-v3", "oneDNN", "blocks"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt2", "qwen3_5"])
def test_logits_are_the_same_alone_and_in_a_batch(
    directory: Directory, kind: str, way: str, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_backend(way, monkeypatch)
    options = {"skip_tokenizer_init": True, "device": "cpu", "dtype": "bfloat16", "enable_prefix_caching": False}
    with LLM(
        str(directory(kind)),
        quantization=quantization,
        num_gpu_blocks_override=80 if kind != "qwen3_5" else 400,
        **options,
    ) as llm:
        alone = [torch.cat(steps(llm, [prompt], monkeypatch)) for prompt in PROMPTS]  # [NUM_STEPS, vocab_size] each
        for num_seqs in (4, 5, 8, 16):
            together = torch.stack(steps(llm, PROMPTS[:num_seqs], monkeypatch), 1)  # [num_seqs, NUM_STEPS, vocab_size]
            for i, logits in enumerate(together):
                assert torch.equal(logits, alone[i]), (num_seqs, i, float((logits - alone[i]).abs().max()))
