"""Default sampling parameters from a model's generation_config.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.checkpoint.keys import KeyTable
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
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
"""Key of the file -> sampling parameter. End-of-sequence ids are read with the model. As in vLLM, an absent key has the
default of `SamplingParams`, not Transformers' (greedy decoding, top_k 50)."""

# fmt: off
KEYS = KeyTable(
    read=(*PARAM_NAMES, "do_sample", "eos_token_id"),
    inert=(
        "transformers_version", "_from_model_config", "trust_remote_code", "chat_format", "generation_mode",
        # ids that a decoder's outputs do not depend on; special tokens are the tokenizer's
        "bos_token_id", "pad_token_id", "decoder_start_token_id",
        # what Transformers returns, and how it computes the same tokens
        "output_*", "return_dict*", "use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory",
        "prefill_chunk_size", "compile_config", "disable_compile", "continuous_batching_config", "renormalize_logits",
        "remove_invalid_values", "assistant_*", "num_assistant_tokens*", "is_assistant", "prompt_lookup_num_tokens",
        "max_matching_ngram_size", "target_lookbehind", "speculation_type", "use_mtp",
        # of beam search, which a request asks for
        "early_stopping", "length_penalty",
        # the context is bounded by max_model_len
        "max_length",
    ),
    refused={
        "num_beams": (1,), "num_beam_groups": (1,), "diversity_penalty": (0,), "num_return_sequences": (1,),
        "typical_p": (1,), "top_h": (), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "penalty_alpha": (0,),
        "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,),
        "bad_words_ids": ([],), "force_words_ids": ([],), "constraints": ([],), "suppress_tokens": ([],),
        "begin_suppress_tokens": ([],), "sequence_bias": ([], {}), "forced_bos_token_id": (),
        "forced_eos_token_id": (), "min_length": (0,), "max_time": (), "exponential_decay_length_penalty": (),
        "guidance_scale": (1,), "watermarking_config": (), "dola_layers": (), "token_healing": (False,),
        # llama.cpp's, whose repetition penalty covers the last 64 tokens
        "xtc_probability": (0,), "mirostat": (0,), "sequence": (), "penalty_repeat": (1,),
    },
)
# fmt: on


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
        return f"sampling defaults from {self.source}: " + ", ".join(f"{k} {v}" for k, v in self.values.items())


def sampling_defaults(choice: str, checkpoint: Checkpoint) -> SamplingDefaults:
    """Load the defaults. `choice` is `EngineArgs.generation_config`: auto (the model's file), vllm (no file), a file or
    its directory.

    Raises `ModelNotFoundError` for a missing file, `CheckpointError` for a file that is broken or holds an illegal
    value, `UnsupportedModelError` for a key that changes tokens in another way.
    """
    if choice == "vllm":
        return SamplingDefaults()
    config, source = checkpoint.generation_config, FILE if checkpoint.format == "safetensors" else checkpoint.path.name
    if choice != "auto":
        path = Path(choice).expanduser()
        path = path / FILE if path.is_dir() else path
        if not path.is_file():
            raise ModelNotFoundError(
                f"no file {cut(repr(choice))} for generation_config; pass a file, its directory, auto or vllm",
                param="generation_config",
            )
        config, source = read_json(path), str(path)
    KEYS.check(config, source, "generation_config='vllm' ignores the file")
    values = {name: config[key] for key, name in PARAM_NAMES.items() if config.get(key) is not None}
    if config.get("do_sample") is False:
        values["temperature"] = 0.0
    try:
        return SamplingDefaults(SamplingParams(**values), values, source)
    except ParameterError as error:
        raise CheckpointError(f"{source}: {error}; generation_config='vllm' ignores the file") from None
