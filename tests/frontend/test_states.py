"""A model with recurrent layers in an engine: the tokens of Transformers, however its states are moved about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import ParameterError
from tests.models.tiny import make_tiny_checkpoint, random_prompts

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "device": "cpu",
    "dtype": "float32",
    "block_size": 4,
    "mamba_block_size": 8,
    "max_model_len": 120,
}
NUM_NEW = 20
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
PROMPTS = random_prompts(61, 5, 33, 1, 40, 17)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_checkpoint("qwen3_5", tmp_path_factory.mktemp("model") / "qwen3_5"))


@pytest.fixture(scope="module")
def reference(model: str) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def continued(reference: Any, prompts: Sequence[Sequence[int]], num_new: int = NUM_NEW) -> list[list[int]]:
    """Transformers' greedy tokens."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        tokens = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_new, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        found.append(tokens[0, len(prompt) :].tolist())
    return found


@pytest.fixture(scope="module")
def expected(reference: Any) -> list[list[int]]:
    return continued(reference, PROMPTS)


def tokens_of(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams = PARAMS) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate([list(p) for p in prompts], params, use_tqdm=False)]


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_prompts_in_chunks_of_any_size(model: str, expected: list[list[int]], chunk: int, window: int) -> None:
    with LLM(
        model, **OPTIONS, max_num_batched_tokens=max(chunk, 8), long_prefill_token_threshold=chunk, decode_window=window
    ) as llm:
        assert llm.config.kv.state_blocks > 1
        assert tokens_of(llm, PROMPTS) == expected
        assert tokens_of(llm, PROMPTS) == expected  # from checkpoints


def test_a_later_turn_goes_on_from_a_checkpoint(model: str, reference: Any) -> None:
    with LLM(model, **OPTIONS) as llm:
        prompt = PROMPTS[2]
        for _ in range(3):
            (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
            tokens = list(output.outputs[0].token_ids)
            assert tokens == continued(reference, [prompt])[0]
            prompt = [*prompt, *tokens[:9], 3, 5]
        assert output.num_cached_tokens >= 32


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests_continue(model: str, expected: list[list[int]], mode: str) -> None:
    with LLM(model, **OPTIONS, preemption_mode=mode, num_gpu_blocks_override=70, swap_space=0.1) as llm:
        assert tokens_of(llm, PROMPTS * 2) == expected * 2
        stats = llm.stats()
        assert stats.num_preemptions > 0, stats


def test_several_samples_of_a_prompt(model: str) -> None:
    params = SamplingParams(n=3, temperature=0.8, seed=7, max_tokens=NUM_NEW, ignore_eos=True)
    found = []
    for options in ({}, {"num_gpu_blocks_override": 70, "preemption_mode": "recompute"}, {"decode_window": 4}):
        with LLM(model, **OPTIONS, **options) as llm:
            outputs = llm.generate([list(p) for p in PROMPTS[:3]], params, use_tqdm=False)
            found.append([[list(sample.token_ids) for sample in output.outputs] for output in outputs])
    assert found[1] == found[0] and found[2] == found[0]
    with LLM(model, **OPTIONS) as llm:  # each sample is the one that an engine gives for its first half
        for prompt, samples in zip(PROMPTS, found[0], strict=False):
            assert len({tuple(sample) for sample in samples}) == 3
            (first,) = llm.generate([[*prompt, *samples[0][:10]]], PARAMS, use_tqdm=False)
            assert len(first.outputs[0].token_ids) == NUM_NEW
