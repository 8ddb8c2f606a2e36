"""Qwen3-Next: as Qwen3.5 with experts, its recurrent layers' projections merged head by head."""

from __future__ import annotations

from octavo.models.config_values import Config, read_flag, read_size
from octavo.models.families.qwen3_5 import HYBRID_DEFAULTS, HYBRID_KEYS, REFUSED, SHARED_KEY
from octavo.models.families.qwen3_5 import read as read_hybrid
from octavo.models.families.qwen3_moe import DENSE_KEYS, EXPERT_KEYS, read_dense_layers, read_experts
from octavo.models.family import Family
from octavo.models.spec import DecoderSpec


def read(config: Config, common: Config) -> DecoderSpec:
    experts = read_experts(
        config,
        shared_inner=read_size(config, SHARED_KEY),
        renormalise=read_flag(config, "norm_topk_prob", default=True),
        dense_layers=read_dense_layers(config),
    )
    return read_hybrid(config, common, experts=experts, merged_by_key_head=True)


FAMILY = Family(
    read=read,
    keys=(*HYBRID_KEYS, *EXPERT_KEYS, *DENSE_KEYS, SHARED_KEY),
    refused=REFUSED,
    defaults={
        **HYBRID_DEFAULTS,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        SHARED_KEY: 512,
        "intermediate_size": 5632,
    },
)
