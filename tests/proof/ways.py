"""Engine configurations that must all give the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo import LLM, RequestOutput, SamplingParams

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 200,
    "block_size": 8,
    "swap_space": 0.001,
    "max_model_len": 64,
}
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {"decode_window": 1},  # first: CUDA graphs compile all kernels in parallel
    "eager": {"enforce_eager": True, "decode_window": 1},
    "windows": {"decode_window": 4},
    "chunks": {"max_num_batched_tokens": 12},
    "recompute": {"num_gpu_blocks_override": 12, "preemption_mode": "recompute"},
    "swap": {"num_gpu_blocks_override": 12, "preemption_mode": "swap"},
    "cached": {},
    "no overlap": {"async_scheduling": False},
    "drafts": {"spec_method": "suffix", "decode_window": 4},
}


def runs(
    llm: LLM, way: str, prompts: Sequence[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[list[RequestOutput]]:
    """Return the prompts' outputs under a configuration, and assert that it took effect.

    "cached" returns two lists: the second run reuses the blocks of the first.
    """
    found = [llm.generate(prompts, params, use_tqdm=False)]
    if way == "cached":
        found.append(llm.generate(prompts, params, use_tqdm=False))
        size = llm.config.args.block_size
        # Full blocks, without the last token, which is always computed.
        cached = [(len(prompt) - 1) // size * size for prompt in prompts]
        assert [output.num_cached_tokens for output in found[1]] == cached and any(cached)
    assert llm.stats().num_preemptions > 0 or way not in ("recompute", "swap")
    return found
