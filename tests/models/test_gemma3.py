"""Gemma 3 beyond its sliding window: layers with and without a window share one KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.kernels.cpu import ops as cpu
from tests.models.tiny import PagedRun, assert_close, load_tiny, make_tiny_checkpoint, random_prompts

# The config.json of Gemma 3 270M, with a smaller vocabulary: 262,144 rows would be two thirds of the work.
LIKE_270M: dict[str, Any] = {
    "vocab_size": 1517,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 32_768,
}
SMALL = LIKE_270M | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 48,
}
MARGIN = 1e-4
"""Minimum distance of the top two logits, as a share of the largest logit: more than rounding errors."""


def check(directory: Path, window: int, num_prompt: int, num_new: int, seed: int) -> None:
    """Compare logits at all positions and greedy tokens with Transformers, for a prompt longer than the window."""
    import transformers

    (prompt,) = random_prompts(num_prompt, vocab_size=LIKE_270M["vocab_size"], seed=seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.tensor([prompt])
    tokens = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_new, eos_token_id=None,
        pad_token_id=0,
    )[0].tolist()  # fmt: skip
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]  # [num_prompt + num_new, vocab_size], without a KV cache
    del model
    best = expected[num_prompt - 1 : -1].topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > MARGIN * expected.abs().max(), "choose another seed"

    decoder = load_tiny(directory, cpu)
    assert set(decoder.spec.windows) == {window, 0} and len(tokens) > window + num_new
    run = PagedRun(decoder, [tokens], block_size=16, seed=seed)
    prefill = run.step([num_prompt])[0]
    assert_close(torch.cat([prefill, *run.run(1)]), expected)
    del decoder, run

    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    with LLM(
        str(directory),
        skip_tokenizer_init=True,
        max_model_len=len(tokens) + 1,
        max_num_seqs=2,
        max_num_batched_tokens=100,
        num_gpu_blocks_override=80,
        dtype="float32",
    ) as llm:
        for _ in range(2):  # the second time with a warm prefix cache
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert output.outputs[0].token_ids == tokens[num_prompt:]


def test_small_gemma3_beyond_its_window(tmp_path: Path) -> None:
    check(make_tiny_checkpoint("gemma3", tmp_path, **SMALL), window=48, num_prompt=61, num_new=12, seed=1)


@pytest.mark.slow
def test_gemma3_270m_shape_beyond_its_window(tmp_path: Path) -> None:
    check(make_tiny_checkpoint("gemma3", tmp_path, **LIKE_270M), window=512, num_prompt=545, num_new=24, seed=1)
