"""Tiny models with prompts, and Transformers' greedy tokens for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.models.tiny import VOCAB_SIZE, make_tiny_checkpoint, transformers_directory

NUM_NEW = 11
MARGIN = 1e-4
"""Minimum distance of the top two logits, as a share of the largest logit: more than rounding errors."""


@dataclass(frozen=True)
class TinyModel:
    """A tiny model, prompts of mixed lengths, some with a common prefix, and Transformers' greedy outputs."""

    path: Path
    prompts: list[list[int]]
    greedy: list[list[int]]


def make_prompts(seed: int, num: int = 20, longest: int = 27) -> list[list[int]]:
    rng = random.Random(seed)
    common = [rng.randrange(VOCAB_SIZE) for _ in range(17)]
    prompts = []
    for i in range(num):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(1 + (i * 7) % longest)]
        prompts.append(common + prompt[:8] if i % 4 == 3 else prompt)
    prompts[1] = prompts[0][:] + prompts[1]  # one turn longer, as in a chat
    return prompts


def greedy_tokens(path: Path, prompts: list[list[int]], num_new: int) -> tuple[list[list[int]], float]:
    """Greedy tokens of Transformers' `generate` in float32, one prompt at a time, and the smallest top-two distance."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(transformers_directory(path), dtype=torch.float32)
    outputs, narrowest = [], 1.0
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_new, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        with torch.inference_mode():
            logits = model(out).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == out[0, len(prompt) :].tolist()  # every position, without a KV cache
        best = logits.topk(2).values
        narrowest = min(narrowest, float((best[:, 0] - best[:, 1]).min() / logits.abs().max()))
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs, narrowest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """`tiny_model(kind)`, created once. Skips seeds whose models have near-ties in their greedy tokens."""
    models: dict[str, TinyModel] = {}

    def get(kind: str) -> TinyModel:
        if kind not in models:
            prompts = make_prompts(seed=len(kind))
            for seed in range(20):
                path = make_tiny_checkpoint(kind, tmp_path_factory.mktemp(kind), seed=seed)
                outputs, narrowest = greedy_tokens(path, prompts, NUM_NEW)
                if narrowest > MARGIN:
                    break
            else:
                raise AssertionError(f"no {kind} model without near-ties")
            models[kind] = TinyModel(path, prompts, outputs)
        return models[kind]

    return get
