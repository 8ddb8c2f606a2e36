"""Default sampling parameters from a model's generation_config.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.checkpoint.resolve import Checkpoint, read_json
from octavo.errors import CheckpointError, ModelNotFoundError, ParameterError, cut
from octavo.params.sampling_params import SamplingParams

FILE = "generation_config.json"
PARAM_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Key of the file -> sampling parameter, the ones that vLLM reads. End-of-sequence ids are read with the model."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The sampling parameters of requests without their own.

    params   the parameters       values   those that come from a file       source   the file
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    values: dict[str, Any] = field(default_factory=dict)
    source: str = ""

    def __str__(self) -> str:
        """One line for a log; empty if no value comes from a file."""
        if not self.values:
            return ""
        return f"sampling defaults from {self.source}: " + ", ".join(f"{k} {v:g}" for k, v in self.values.items())


def sampling_defaults(choice: str, checkpoint: Checkpoint) -> SamplingDefaults:
    """Load the defaults. `choice` is `EngineArgs.generation_config`: auto (the model's file), vllm (no file), a file or
    its directory.

    Raises `ModelNotFoundError` for a missing file, `CheckpointError` for a file that is broken or holds an illegal
    value.
    """
    if choice == "vllm":
        return SamplingDefaults()
    config, source = checkpoint.generation_config, FILE
    if choice != "auto":
        path = Path(choice).expanduser()
        path = path / FILE if path.is_dir() else path
        if not path.is_file():
            raise ModelNotFoundError(
                f"no file {cut(repr(choice))} for generation_config; pass a file, its directory, auto or vllm",
                param="generation_config",
            )
        config, source = read_json(path), str(path)
    values = {name: config[key] for key, name in PARAM_NAMES.items() if config.get(key) is not None}
    try:
        return SamplingDefaults(SamplingParams(**values), values, source)
    except ParameterError as error:
        raise CheckpointError(f"{source}: {error}; generation_config='vllm' ignores the file") from None
