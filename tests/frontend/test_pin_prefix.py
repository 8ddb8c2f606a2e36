"""`LLM.pin_prefix`: prompts that begin with a pinned prefix give the same outputs and compute fewer tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import CapacityError, ParameterError
from tests.models.tiny import make_tiny_checkpoint

GREEDY = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
PREFIX = list(range(20, 57))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint("llama", tmp_path_factory.mktemp("pins"))


@pytest.fixture(params=[True, False], ids=["caching", "no caching"])
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 12, "max_model_len": 128}
    with LLM(str(folder), dtype="float32", enable_prefix_caching=request.param, **options) as made:
        yield made


def ids(tokens: list[int]) -> dict[str, Any]:
    return {"prompt_token_ids": tokens}


def test_pinned_prefix_is_not_recomputed(llm: LLM) -> None:
    prompts = [ids([*PREFIX, 5, 6, 7]), ids([*PREFIX[:35], 8]), ids(PREFIX), ids([3, *PREFIX])]
    before = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    llm.reset_prefix_cache()
    name = llm.pin_prefix(ids(PREFIX))
    assert llm.kv_stats().num_pinned == 3 == llm.kv_stats().num_used
    llm.reset_prefix_cache()
    for prompt, tokens, num_cached in zip(prompts, before, [37, 35, 36, 0], strict=True):
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == tokens and output.num_cached_tokens == num_cached
        llm.reset_prefix_cache()
    assert llm.unpin_prefix(name) == 3 and llm.kv_stats().num_used == 0
    llm.reset_prefix_cache()
    (output,) = llm.generate(prompts[0], GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 0 and output.outputs[0].token_ids == before[0]


def test_invalid_pin_is_rejected_with_a_remedy(llm: LLM) -> None:
    llm.pin_prefix(ids(PREFIX), "system")
    with pytest.raises(ParameterError, match="'pin:system' is pinned already; unpin it"):
        llm.pin_prefix(ids(PREFIX), "system")
    with pytest.raises(CapacityError, match="at most half of the pool's 12"):
        llm.pin_prefix(ids([9] * 127))
    with pytest.raises(ParameterError, match="no prefix is pinned under the name 'other'"):
        llm.unpin_prefix("other")
    assert llm.kv_stats().num_pinned == 3
    llm.unpin_prefix("system")


def test_generated_names_are_no_request_ids(llm: LLM) -> None:
    names = {llm.pin_prefix(ids([i, *PREFIX])) for i in range(2)}
    assert len(names) == 2
    assert len(llm.generate([ids([7, 8])] * 4, GREEDY, use_tqdm=False)) == 4
    for name in names:
        llm.unpin_prefix(name)
