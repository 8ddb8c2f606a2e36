"""Mixtral (arXiv 2401.04088): Mistral with mixtures of experts."""

from __future__ import annotations

from octavo.models.config_values import DECODER_KEYS, Config, read_decoder_spec, read_size
from octavo.models.families.qwen3_moe import gguf_experts, num_key, read_experts, read_one_window
from octavo.models.family import Family, GGUFFormat
from octavo.models.spec import DecoderSpec


def read(config: Config, common: Config) -> DecoderSpec:
    experts = read_experts(config, num_key(config), inner=read_size(config, "intermediate_size"))
    return read_decoder_spec(config, common, windows=read_one_window(config), experts=experts)


PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Names of an expert's projections in Mixtral's files -> Transformers' of other families."""

FAMILY = Family(
    read=read,
    keys=(*DECODER_KEYS, "sliding_window", "num_experts", "num_local_experts", "num_experts_per_tok"),
    defaults={
        "num_key_value_heads": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
    },
    renamed=(
        (r"(.*)\.block_sparse_moe\.gate\.", r"\1.mlp.gate."),
        *(
            (rf"(.*)\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.{old}\.", rf"\1.mlp.experts.\2.{new}.")
            for old, new in PARTS.items()
        ),
        (r"(.*)\.block_sparse_moe\.experts\.", r"\1.mlp.experts."),
    ),
    gguf=GGUFFormat(interleaved_qk=True, config=gguf_experts),
)
