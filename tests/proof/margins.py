"""Checks that an engine's greedy tokens in bfloat16 equal those of the same weights in float32, except for near-ties.

A prompt and its output go through the reference in one pass (teacher forcing). Each token's logit may be at most 0.05
below the best one at its position.

Such a margin has a meaning only relative to the spread of logits, which random weights leave open. Rounding to bfloat16
in every layer moves a logit by a fraction of the spread, and a bug by a larger fraction. The spread is therefore set to
0.5, and the margin is a tenth of it. In 120,000 positions of these models, rounding picked a token up to 0.039 below
the best. A random token is 1 below. At two of three positions or more, the second best token is beyond the margin too
(tests/runner/test_bfloat16.py counts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo import RequestOutput, SamplingParams
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.row_state import DecodeInputs, RowState
from tests.models.tiny import PagedRun, load_tiny, make_tiny_checkpoint, random_prompts
from tests.proof.ways import OPTIONS, WAYS

MARGIN = 0.05
SPREAD = 0.5
"""The standard deviation of a position's logits."""
EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
TIED = ("gemma3", "gemma4", "gpt2", "opt")
LAST_NORMS = ("model.norm.", "transformer.ln_f.", "model.decoder.final_layer_norm.")
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)

# A small token budget, so that few graphs are captured.
SMALL = {**OPTIONS, "dtype": "bfloat16", "max_num_batched_tokens": 64}
SMALL_PROMPTS = [[3 + (7 * i + j * j) % 90 for j in range(3 + 5 * i % 23)] for i in range(12)]

LARGE_KIND = "qwen3"
LARGE_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}
"""Sizes that Hopper's small-batch kernels support; small otherwise."""
LARGE = {**OPTIONS, "dtype": "bfloat16", "max_model_len": 384, "num_gpu_blocks_override": 400}
LARGE["max_num_batched_tokens"] = 512
LARGE_WAYS = WAYS | {
    "chunks": {"max_num_batched_tokens": 160},
    "recompute": {"num_gpu_blocks_override": 64, "preemption_mode": "recompute"},
    "swap": {"num_gpu_blocks_override": 64, "preemption_mode": "swap"},
}
LARGE_PROMPTS = random_prompts(300, 40, 7, 131, 1, 64, 200, 18, vocab_size=512)


ALL_EXPERTS = {
    "qwen3_moe": {"num_experts_per_tok": 6},
    "mixtral": {"num_experts_per_tok": 5},
    "gpt_oss": {"num_experts_per_tok": 6},
    "gemma4": {"top_k_experts": 6},
}
"""Of fewer, rounding may choose others, and change all logits."""


def make_rounded_checkpoint(kind: str, directory: Path, **sizes: Any) -> Path:
    """Make a tiny model with weights exact in bfloat16 and a logit spread of SPREAD.

    Its matrices neither amplify nor damp: those of the other tests are 1.5 times as large and would amplify rounding.
    Tied embeddings are small, otherwise most tokens would be followed by themselves regardless of the layers.
    """
    file = make_tiny_checkpoint(kind, directory, **(ALL_EXPERTS.get(kind, {}) | sizes)) / "model.safetensors"
    tensors = {name: tensor / 1.5 if tensor.ndim > 1 else tensor for name, tensor in load_file(file).items()}
    for name in tensors:
        if name.endswith(EMBEDDINGS) and kind in TIED:
            tensors[name] = tensors[name] / 4
        if kind == "gemma4" and name.endswith(
            "q_norm.weight"
        ):  # which scales its scores in place of 1 / sqrt(head_dim)
            tensors[name] = tensors[name] / len(tensors[name]) ** 0.5

    def save() -> None:
        for name in tensors:
            tensors[name] = tensors[name].bfloat16().float()
        save_file(tensors, file, metadata={"format": "pt"})

    save()
    judge = Judge(directory)
    logits = torch.cat(judge.logits(random_prompts(40, 40, vocab_size=judge.decoder.spec.vocab_size)))
    factor = SPREAD / logits.std(1).mean()
    norms = [name for name in tensors if name.startswith(LAST_NORMS)]
    assert norms, sorted(tensors)
    for name in norms:
        tensors[name] = (1 + tensors[name]) * factor - 1 if kind == "gemma3" else tensors[name] * factor
    save()
    return directory


class Gaps(NamedTuple):
    """Distance of an output's tokens, and of the second best ones, from the best logit: [num_tokens] each."""

    below: Tensor
    second: Tensor


class Judge:
    """Measures tokens against the same weights in float32 with the reference operations, on the CPU."""

    def __init__(self, directory: Path) -> None:
        self.decoder: Any = load_tiny(directory)
        if getattr(self.decoder.spec, "rounded_scale", False):  # like the weights, see `Decoder`
            scale = torch.tensor(self.decoder.embedding_scale, dtype=torch.bfloat16)
            self.decoder.embedding_scale = scale.item()
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], Gaps] = {}

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits of each sequence, [num_tokens, vocab_size]."""
        return PagedRun(self.decoder, sequences, block_size=16).step([len(s) for s in sequences])

    def gaps(self, outputs: Iterable[RequestOutput]) -> list[Gaps]:
        keys = [(tuple(o.prompt_token_ids), tuple(o.outputs[0].token_ids)) for o in outputs]
        new = [key for key in dict.fromkeys(keys) if key not in self._known]  # most configurations give the same tokens
        all_logits = self.logits([prompt + output for prompt, output in new]) if new else []
        for (prompt, output), logits in zip(new, all_logits, strict=True):
            rows = logits[len(prompt) - 1 : -1]
            best, second = rows.topk(2).values.T
            chosen = rows.gather(1, torch.tensor(output)[:, None])[:, 0]
            self._known[prompt, output] = Gaps(best - chosen, best - second)
        return [self._known[key] for key in keys]

    def check(self, outputs: Sequence[RequestOutput], where: str = "") -> None:
        """Check that all outputs are complete, no token is MARGIN below the best one, and 90 % are the best one."""
        for output in outputs:
            assert output.outputs[0].finish_reason == "length", (where, output)
            assert len(output.outputs[0].token_ids) == GREEDY.max_tokens
        all_gaps = self.gaps(outputs)
        for i, gaps in enumerate(all_gaps):
            worst = int(gaps.below.argmax())
            below, num = float(gaps.below[worst]), int((gaps.below > 0).sum())
            assert below < MARGIN, f"{where}: token {worst} of request {i} is {below:.3f} below the best, {num} differ"
        assert torch.cat([gaps.below for gaps in all_gaps]).gt(0).float().mean() < 0.1, where


# -- planted bugs that the check must find ----------------------------------------------------------------------------

Plant: TypeAlias = Callable[[pytest.MonkeyPatch, ModuleType, ModuleType], None]
"""Plants a bug, given the operations of the model and of the runner."""


def shift_row(monkeypatch: pytest.MonkeyPatch, ops: ModuleType, row_ops: ModuleType) -> None:
    """Rotate, or embed, the first decoding row as if it were one position later."""
    prepare = row_ops.prepare_decode_inputs

    def wrong(state: RowState, step: DecodeInputs, block_size: int) -> None:
        prepare(state, step, block_size)
        step.batch.positions[:1] += 1

    monkeypatch.setattr(row_ops, "prepare_decode_inputs", wrong)


def lose_value_block(monkeypatch: pytest.MonkeyPatch, ops: ModuleType, row_ops: ModuleType) -> None:
    """Attention reads zeros for V of the first sequence's first block."""
    attention = ops.paged_attention

    def wrong(q: Tensor, kv_layer: Tensor, batch: RaggedBatch, **kwargs: Any) -> Any:
        kv_layer = kv_layer.clone()
        kv_layer[batch.block_tables[:1, 0].long(), 1] = 0.0
        return attention(q, kv_layer, batch, **kwargs)

    monkeypatch.setattr(ops, "paged_attention", wrong)


PLANTS: list[Plant] = [shift_row, lose_value_block]
