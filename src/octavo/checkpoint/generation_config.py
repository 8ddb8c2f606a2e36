"""What a model's makers recommend for sampling: generation_config.json, for requests whose caller says nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.checkpoint.resolve import Checkpoint, read_json
from octavo.errors import CheckpointError, ModelNotFoundError, ParameterError, cut
from octavo.params.sampling_params import SamplingParams

FILE = "generation_config.json"
NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Word of the file -> parameter: those that vLLM takes over. End-of-sequence ids are read with the model itself."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The parameters of a request that brings none, and which of them come from a file, and from which."""

    params: SamplingParams = field(default_factory=SamplingParams)
    values: dict[str, Any] = field(default_factory=dict)
    source: str = ""

    def __str__(self) -> str:
        """One line for people; empty where nothing comes from a file."""
        if not self.values:
            return ""
        return f"sampling defaults from {self.source}: " + ", ".join(f"{k} {v:g}" for k, v in self.values.items())


def sampling_defaults(choice: str, checkpoint: Checkpoint) -> SamplingDefaults:
    """`choice` is `EngineArgs.generation_config`: auto (the model's file), vllm (no file), or a file, or its directory.

    Raises `ModelNotFoundError` for a file that is not there, `CheckpointError` for one that is broken or says what
    cannot be.
    """
    if choice == "vllm":
        return SamplingDefaults()
    config, source = checkpoint.generation_config, FILE
    if choice != "auto":
        path = Path(choice).expanduser()
        path = path / FILE if path.is_dir() else path
        if not path.is_file():
            raise ModelNotFoundError(
                f"generation_config is {cut(repr(choice))}, where no file is; give a file, its directory, auto or vllm",
                param="generation_config",
            )
        config, source = read_json(path), str(path)
    values = {name: config[word] for word, name in NAMES.items() if config.get(word) is not None}
    try:
        return SamplingDefaults(SamplingParams(**values), values, source)
    except ParameterError as error:
        raise CheckpointError(f"{source}: {error}; generation_config='vllm' does without it") from None
