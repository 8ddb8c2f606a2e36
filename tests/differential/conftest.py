"""Tiny models, and what Transformers makes of the prompts of this folder."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.models.tiny import VOCAB_SIZE, make_tiny_checkpoint

NUM_NEW = 11
MARGIN = 1e-4
"""Of the largest logit: the two likeliest tokens are further apart than rounding can move them."""


@dataclass(frozen=True)
class World:
    """A tiny model, prompts of mixed lengths, some with a common beginning, and Transformers' greedy answers."""

    path: Path
    prompts: list[list[int]]
    answers: list[list[int]]


def make_prompts(seed: int, num: int = 20, longest: int = 27) -> list[list[int]]:
    rng = random.Random(seed)
    common = [rng.randrange(VOCAB_SIZE) for _ in range(17)]
    prompts = []
    for i in range(num):
        own = [rng.randrange(VOCAB_SIZE) for _ in range(1 + (i * 7) % longest)]
        prompts.append(common + own[:8] if i % 4 == 3 else own)
    prompts[1] = prompts[0][:] + prompts[1]  # longer by a turn, as a chat is
    return prompts


def greedy_answers(path: Path, prompts: list[list[int]], num_new: int) -> tuple[list[list[int]], float]:
    """Transformers' own `generate`, in float32, one prompt at a time; and how close a decision came to a tie."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    answers, narrowest = [], 1.0
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_new, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        with torch.inference_mode():
            logits = model(out).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == out[0, len(prompt) :].tolist()  # every position, without its cache
        best = logits.topk(2).values
        narrowest = min(narrowest, float((best[:, 0] - best[:, 1]).min() / logits.abs().max()))
        answers.append(out[0, len(prompt) :].tolist())
    return answers, narrowest


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], World]:
    """`world(kind)`, made once. A model whose answers hang on a near-tie is not used: its seed is passed over."""
    made: dict[str, World] = {}

    def get(kind: str) -> World:
        if kind not in made:
            prompts = make_prompts(seed=len(kind))
            for seed in range(20):
                path = make_tiny_checkpoint(kind, tmp_path_factory.mktemp(kind), seed=seed)
                answers, narrowest = greedy_answers(path, prompts, NUM_NEW)
                if narrowest > MARGIN:
                    break
            else:
                raise AssertionError(f"no {kind} with clear answers")
            made[kind] = World(path, prompts, answers)
        return made[kind]

    return get
