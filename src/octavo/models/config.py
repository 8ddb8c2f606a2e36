"""Reads a checkpoint's config.json, or the metadata of its GGUF file, into a `ModelSpec`. Imports no torch.

A family in `families` reads what is special in its models.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from octavo.checkpoint.resolve import Checkpoint
from octavo.errors import UnsupportedModelError, cut
from octavo.models import registry
from octavo.models.config_values import (
    Config,
    read_dtype,
    read_eos_token_ids,
    read_flag,
    read_size,
    read_token_id,
    value_error,
)
from octavo.models.spec import ModelSpec


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The spec of a checkpoint. Raises the errors of `spec_from_config`."""
    config = checkpoint.config
    if checkpoint.format == "gguf":
        from octavo.models.gguf_config import read_gguf_config  # imports numpy

        config = read_gguf_config(checkpoint.gguf, checkpoint.path.name)
    return spec_from_config(config, checkpoint.generation_config)


def spec_from_config(config: Config, generation_config: Config | None = None) -> ModelSpec:
    """Convert a parsed config.json to a spec; `generation_config` only adds end-of-sequence ids.

    Raises `UnsupportedModelError` for an unsupported architecture or feature, `CheckpointError` for a missing or
    invalid value.
    """
    _reject_custom_code(config)
    architecture = _architecture(config)
    _check_model_type(config)
    if isinstance(text := config.get("text_config"), dict):  # a multimodal model: only text is served
        config = config | {key: value for key, value in text.items() if value is not None}
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(
            f"quantization_config: weights quantised by {cut(repr(method))} are not supported; "
            "use the unquantised checkpoint or a GGUF file",
            param="quantization_config",
        )
    family = registry.find_family(architecture)
    config = {**family.defaults, **config}
    common: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": read_size(config, "vocab_size"),
        "tie_word_embeddings": read_flag(config, "tie_word_embeddings"),
        "eos_token_ids": read_eos_token_ids(config, generation_config or {}),
        "bos_token_id": read_token_id(config, "bos_token_id"),
        "dtype": read_dtype(config),
    }
    return family.read(config, common)


def _reject_custom_code(config: Config) -> None:
    for key in ("auto_map", "custom_code", "trust_remote_code"):
        if config.get(key):
            raise UnsupportedModelError(
                f"custom code is not supported: config.json has {key!r}; Octavo runs no code of a model directory",
                param=key,
            )


def _architecture(config: Config) -> str:
    names, known = config.get("architectures") or [], registry.architectures()
    if not isinstance(names, list):
        raise value_error("architectures", names, "a list of names")
    for name in names:
        if isinstance(name, str) and name in known:
            return name
    found = cut(", ".join(map(str, names))) or "missing in config.json"
    raise UnsupportedModelError(
        f"architecture {found} is not supported; {_supported(found, known)}", param="architectures"
    )


def _check_model_type(config: Config) -> None:
    """Transformers selects the model by model_type, so an unknown one is another model."""
    name, known = config.get("model_type"), registry.model_types()
    if name is not None and name not in known:
        raise UnsupportedModelError(
            f"model_type {cut(repr(name))} is not supported; {_supported(str(name), known)}", param="model_type"
        )


def _supported(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.8)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{hint}supported: {', '.join(known)}"
