"""Qwen3-Next: as Qwen3.5 with experts, its recurrent layers' projections merged head by head."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.models.config_values import Config, read_flag, read_size
from octavo.models.families.qwen3_5 import (
    DT_BIAS,
    GGUF_EXPERT_KEYS,
    GGUF_HYBRID_KEYS,
    GGUF_HYBRID_PARTS,
    HYBRID_DEFAULTS,
    HYBRID_KEYS,
    REFUSED,
    SHARED_KEY,
    gguf_moe,
)
from octavo.models.families.qwen3_5 import read as read_hybrid
from octavo.models.families.qwen3_moe import DENSE_KEYS, EXPERT_KEYS, read_dense_layers, read_experts
from octavo.models.family import Family, GGUFFormat
from octavo.models.spec import DecoderSpec, HybridSpec

PREFIX = "linear_attn.in_proj_"


def read(config: Config, common: Config) -> DecoderSpec:
    experts = read_experts(
        config,
        shared_inner=read_size(config, SHARED_KEY),
        renormalise=read_flag(config, "norm_topk_prob", default=True),
        dense_layers=read_dense_layers(config),
    )
    return read_hybrid(config, common, experts=experts, merged_by_key_head=True)


def split_rows(spec: HybridSpec) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
    """llama.cpp's files have Q, K and V in one tensor and the gates in another; older ones have all in one."""
    (qkvz, ba), channels, heads = spec.key_head_rows, spec.conv_channels, spec.num_value_heads
    return {
        f"{PREFIX}qkvz": {f"{PREFIX}qkv": qkvz[:channels], f"{PREFIX}z": qkvz[channels:]},
        f"{PREFIX}ba": {f"{PREFIX}b": ba[:heads], f"{PREFIX}a": ba[heads:]},
    }


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
    renamed=(DT_BIAS,),
    gguf=GGUFFormat(
        parts=GGUF_HYBRID_PARTS | {"ssm_ba": f"{PREFIX}ba", "ssm_in": f"{PREFIX}qkvz"},
        keys=(*GGUF_HYBRID_KEYS, *GGUF_EXPERT_KEYS),
        config=gguf_moe,
        traits={"merged_by_key_head": False},
        split=split_rows,
    ),
)
