"""Families of models, by the names in their files. A family's module is imported when a model of it is read.

To add a family: a module in `families` with a `Family`, and a line here.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, cast

from octavo.models.family import Family


class Entry(NamedTuple):
    """A family as "module:attribute", and the names in its files.

    architectures, model_types  in config.json
    gguf                        `general.architecture` in GGUF files, whose models have the first of `architectures`;
                                "": GGUF files of this family are not supported
    has_experts                 of models with experts: llama.cpp calls Mixtral "llama", too. None: with and without
    """

    family: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    gguf: str = ""
    has_experts: bool | None = False


_IN = "octavo.models.families"
FAMILIES = [
    Entry(f"{_IN}.llama:FAMILY", ("LlamaForCausalLM",), ("llama",), gguf="llama"),
    Entry(f"{_IN}.mistral:FAMILY", ("MistralForCausalLM",), ("mistral",)),
    Entry(f"{_IN}.qwen2:FAMILY", ("Qwen2ForCausalLM",), ("qwen2",), gguf="qwen2"),
    Entry(f"{_IN}.qwen3:FAMILY", ("Qwen3ForCausalLM",), ("qwen3",), gguf="qwen3"),
    Entry(
        f"{_IN}.gemma3:FAMILY",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        ("gemma3", "gemma3_text"),
        gguf="gemma3",
    ),
    Entry(
        f"{_IN}.gemma4:FAMILY",
        ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
        ("gemma4", "gemma4_text"),
        gguf="gemma4",
        has_experts=None,
    ),
    Entry(f"{_IN}.gpt2:FAMILY", ("GPT2LMHeadModel",), ("gpt2",)),
    Entry(f"{_IN}.opt:FAMILY", ("OPTForCausalLM",), ("opt",)),
    Entry(f"{_IN}.phi3:FAMILY", ("Phi3ForCausalLM",), ("phi3",)),
    Entry(f"{_IN}.olmo2:FAMILY", ("Olmo2ForCausalLM",), ("olmo2",)),
    Entry(f"{_IN}.smollm3:FAMILY", ("SmolLM3ForCausalLM",), ("smollm3",)),
    Entry(f"{_IN}.granite:FAMILY", ("GraniteForCausalLM",), ("granite",)),
    Entry(f"{_IN}.starcoder2:FAMILY", ("Starcoder2ForCausalLM",), ("starcoder2",)),
    Entry(
        f"{_IN}.qwen3_5:FAMILY",
        ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
        ("qwen3_5", "qwen3_5_text"),
        gguf="qwen35",
    ),
    Entry(
        f"{_IN}.qwen3_5:MOE_FAMILY",
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        gguf="qwen35moe",
        has_experts=True,
    ),
    Entry(f"{_IN}.qwen3_next:FAMILY", ("Qwen3NextForCausalLM",), ("qwen3_next",), gguf="qwen3next", has_experts=True),
    Entry(f"{_IN}.qwen3_moe:FAMILY", ("Qwen3MoeForCausalLM",), ("qwen3_moe",), gguf="qwen3moe", has_experts=True),
    Entry(f"{_IN}.mixtral:FAMILY", ("MixtralForCausalLM",), ("mixtral",), gguf="llama", has_experts=True),
    Entry(f"{_IN}.gpt_oss:FAMILY", ("GptOssForCausalLM",), ("gpt_oss",), gguf="gpt-oss", has_experts=True),
    Entry(f"{_IN}.internlm2:FAMILY", ("InternLM2ForCausalLM",), ("internlm2",)),
    Entry(f"{_IN}.internlm3:FAMILY", ("InternLM3ForCausalLM",), ("internlm3",)),
]


def architectures(model_type: str | None = None) -> list[str]:
    """Supported names in config.json's `architectures`; of one `model_type`, or all."""
    entries = (entry for entry in FAMILIES if model_type is None or model_type in entry.model_types)
    return [name for entry in entries for name in entry.architectures]


def model_types() -> list[str]:
    """Supported names of config.json's `model_type`."""
    return [name for entry in FAMILIES for name in entry.model_types]


def gguf_entries(*, has_experts: bool) -> dict[str, Entry]:
    """Families of GGUF files with or without experts, by `general.architecture`."""
    return {entry.gguf: entry for entry in FAMILIES if entry.gguf and entry.has_experts in (has_experts, None)}


def find_family(architecture: str) -> Family:
    """The family of a supported architecture."""
    return cast("Family", load(next(entry.family for entry in FAMILIES if architecture in entry.architectures)))


def load(name: str) -> Any:
    """Import "module:attribute"."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
