"""Sampling defaults of generation_config.json and GGUF files: each key is obeyed, inert, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from octavo.checkpoint.generation_config import KEYS, sampling_defaults
from octavo.checkpoint.resolve import Checkpoint, open_checkpoint
from octavo.errors import CheckpointError, UnsupportedModelError


def defaults(**config: Any) -> dict[str, Any]:
    checkpoint = Checkpoint(Path("model"), "safetensors", {}, config)
    return sampling_defaults("auto", checkpoint).values


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ({"temperature": 0.6, "top_p": 0.9, "do_sample": True}, {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 0.6, "do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": None, "top_k": None}, {}),
        ({"min_new_tokens": 2, "max_new_tokens": 5}, {"min_tokens": 2, "max_tokens": 5}),
        ({"stop_strings": ["END"]}, {"stop": ["END"]}),
        ({"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "guidance_scale": 1, "min_length": 0}, {}),
    ],
)
def test_keys_become_sampling_parameters(config: dict[str, Any], values: dict[str, Any]) -> None:
    assert defaults(**config) == values


@pytest.mark.parametrize("key", sorted(KEYS.refused))
def test_keys_that_change_tokens_in_another_way_are_refused(key: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{key} 7 is not supported; generation_config='vllm' ignores"):
        defaults(**{key: 7})
    assert defaults(**{key: None}) == {}
    assert sampling_defaults("vllm", Checkpoint(Path("model"), "safetensors", {}, {key: 7})).values == {}


@pytest.mark.parametrize("key", ["temperature", "top_p", "min_new_tokens"])
def test_illegal_values_name_the_file(key: str) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: "):
        defaults(**{key: -3})


def test_all_keys_of_transformers_are_known() -> None:
    assert KEYS.sort(GenerationConfig().to_dict() | vars(GenerationConfig()), "").unknown == ()


def test_a_file_saved_by_transformers_loads(tmp_path: Path) -> None:
    GenerationConfig(temperature=0.5, do_sample=True, pad_token_id=0).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    values = sampling_defaults("auto", open_checkpoint(tmp_path, weights=False)).values
    assert values == {"temperature": 0.5}  # Transformers omits its own default of top_k


def test_sampling_defaults_of_gguf_files(write_gguf: Any) -> None:
    metadata = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.min_p": 0.05}
    path = write_gguf(metadata=metadata)
    assert sampling_defaults("auto", open_checkpoint(path)).values == {"temperature": 0.6, "top_k": 20, "min_p": 0.05}
    path = write_gguf(metadata={"general.sampling.penalty_repeat": 1.1})
    with pytest.raises(UnsupportedModelError, match=f"{path.name}: penalty_repeat 1.1 is not supported"):
        sampling_defaults("auto", open_checkpoint(path))
