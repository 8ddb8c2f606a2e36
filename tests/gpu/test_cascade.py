"""Sequences with shared prefixes on a GPU: cascade attention gives the same tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.runner.passes.pass_shape import PassShape
from octavo.runner.passes.passes import Passes
from tests.models.tiny import make_tiny_checkpoint

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "device": "cuda",
    "max_num_seqs": 64,
    "num_gpu_blocks_override": 3000,
    "max_model_len": 400,
}
PREFIXES = [[3 + (i * i + k) % 90 for i in range(290)] for k in (0, 41)]
PROMPTS = [[*PREFIXES[i % 2], *(3 + (7 * i + j * j) % 90 for j in range(1 + i % 23))] for i in range(48)]
PARAMS = [
    SamplingParams(
        temperature=0.9 * (i % 3 > 0),
        seed=i,
        n=1 + 3 * (i == 7),
        max_tokens=5 + i % 31,
        ignore_eos=True,
        detokenize=False,
        repetition_penalty=1.0 + 0.3 * (i == 20),
    )
    for i in range(48)
]


def tokens_of(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.mark.parametrize(
    "options",
    [{"decode_window": 1}, {"decode_window": 6}, {"enforce_eager": True}, {"max_num_batched_tokens": 700}],
    ids=str,
)
def test_cascade_attention_gives_the_same_tokens(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without graphs, in decode windows, after prefill chunks, and with forks."""
    model = str(make_tiny_checkpoint("llama", tmp_path / "llama", max_position_embeddings=400))
    monkeypatch.setattr("octavo.runner.shared_prefixes.MIN_SAVED_BYTES", 10**12)  # never
    with LLM(model, **(OPTIONS | options)) as llm:
        expected = tokens_of(llm)
    monkeypatch.setattr("octavo.runner.shared_prefixes.MIN_SAVED_BYTES", -(10**12))  # for every shared prefix
    num_passes: Counter[bool] = Counter()
    run = Passes.run

    def counted(self: Passes, shape: PassShape, *inputs: Any) -> Any:
        num_passes[shape.cascade] += 1
        return run(self, shape, *inputs)

    monkeypatch.setattr(Passes, "run", counted)
    with LLM(model, **(OPTIONS | options)) as llm:
        found = tokens_of(llm)
        runner = llm.engine.executor.runner  # type: ignore[attr-defined]
        common = runner.passes.inputs.batch.common_prefix_lens.cpu().numpy()
    assert found == expected
    assert num_passes[True] > 20 and np.isin(common, (0, *range(256, 305, 16))).all() and (common > 0).any()
