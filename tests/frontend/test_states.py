"""A model with recurrent layers in an engine: the tokens of Transformers, however its states are moved about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.config import EngineArgs
from octavo.doctor import examine, format_report
from octavo.errors import MemoryBudgetError, ParameterError
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
    assert all(len({tuple(sample) for sample in samples}) == 3 for samples in found[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_config": {"method": "ngram"}}, "its recurrent layers cannot take back a draft; remove"),
        ({"spec_model": "MODEL"}, "its recurrent layers cannot take back a draft; remove speculative_config"),
        ({"mamba_block_size": 6}, "mamba_block_size is 6; use a multiple of block_size, 4"),
        ({"mamba_ssm_cache_dtype": "bfloat16"}, "mamba_ssm_cache_dtype is 'bfloat16': states of recurrent layers are"),
        ({"mamba_cache_mode": "some"}, "mamba_cache_mode is 'some': checkpoints of states are left where they spare"),
        (
            {"num_gpu_blocks_override": 5, "max_model_len": -1},
            "No available memory for the cache blocks.*raise num_gpu_blocks_override to 41",
        ),
    ],
)
def test_what_does_not_work_is_refused_at_the_start(model: str, options: dict[str, Any], message: str) -> None:
    options = {name: model if value == "MODEL" else value for name, value in options.items()}
    with pytest.raises((ParameterError, MemoryBudgetError), match=message):
        LLM(model, **(OPTIONS | options))


def test_a_model_with_recurrent_layers_is_no_draft(model: str, tmp_path: Path) -> None:
    target = str(make_tiny_checkpoint("llama", tmp_path / "llama"))
    with pytest.raises(ParameterError, match="has recurrent layers, which cannot take back a draft; use one without"):
        LLM(target, skip_tokenizer_init=True, spec_model=model)


def test_memory_of_states_is_counted(model: str) -> None:
    """`octavo doctor` counts a state for each sequence that a pool holds."""
    report = examine(EngineArgs(model=model, device="cpu", dtype="float32", block_size=4))
    kv = report.need.kv
    assert kv.state_bytes == 4 * report.spec.state_size and kv.state_blocks == -(-kv.state_bytes // kv.bytes_per_block)
    assert any(
        f"in {kv.state_blocks} blocks: the state of 3 recurrent layers" in line for line in format_report(report)
    )
    need = kv.blocks_of(99)
    assert need == kv.state_blocks + 25 and kv.longest(need) == 100 and kv.longest(kv.state_blocks) == 0
    for num_blocks, fits in ((need, True), (need - 1, False)):
        options = OPTIONS | {"max_model_len": 100, "num_gpu_blocks_override": num_blocks}
        if not fits:
            with pytest.raises(MemoryBudgetError, match=f"{need} blocks are needed and the pool has {num_blocks}"):
                LLM(model, **options)
            continue
        with LLM(model, **options) as llm:
            assert len(tokens_of(llm, [[3] * 70], SamplingParams(max_tokens=30, ignore_eos=True))[0]) == 30


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"dtype": "auto", "quantization": "int8"}])
def test_other_dtypes_generate_from_checkpoints(model: str, options: dict[str, Any]) -> None:
    """States are float32 in blocks of a bfloat16 pool."""
    with LLM(model, **(OPTIONS | options)) as llm:
        assert llm.config.dtype == "bfloat16"
        found = tokens_of(llm, PROMPTS)
        assert all(len(tokens) == NUM_NEW for tokens in found)
        outputs = llm.generate([list(p) for p in PROMPTS], PARAMS, use_tqdm=False)
        assert any(output.num_cached_tokens for output in outputs)


def test_dumps_of_the_flight_recorder(model: str, tmp_path: Path) -> None:
    with LLM(model, **OPTIONS, flight_recorder=str(tmp_path)) as llm:
        tokens_of(llm, PROMPTS * 2)
        assert llm.engine.recorder is not None
        path = llm.engine.recorder.dump("test")
    assert path is not None
