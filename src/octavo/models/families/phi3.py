"""Phi-3 and Phi-4-mini (arXiv 2404.14219, 2503.01743): merged projections, LongRoPE, partial rotation."""

from __future__ import annotations

from octavo.errors import UnsupportedModelError, cut
from octavo.models.config_values import DECODER_KEYS, Config, read_decoder_spec, read_windows, rope_parameters
from octavo.models.family import Family
from octavo.models.spec import DecoderSpec, TensorNames

NAMES = TensorNames(qkv=("self_attn.qkv_proj",), mlp_in=("mlp.gate_up_proj",))
OLD_NAMES = {"su": "longrope", "yarn": "longrope"}
"""Names of LongRoPE in the first config.json files."""


def read(config: Config, common: Config) -> DecoderSpec:
    scaling = rope_parameters(config)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = OLD_NAMES.get(str(kind), kind)
    if kind not in ("default", "longrope"):
        raise UnsupportedModelError(
            f"rope scaling {cut(repr(kind))} is not supported; supported in Phi-3: default, longrope",
            param="rope_scaling",
        )
    config = config | {"rope_scaling": None, "rope_parameters": scaling | {"rope_type": kind}}
    windows = read_windows(config | {"layer_types": None}, lambda layer: True)
    return read_decoder_spec(config, common, partial_rotary=True, windows=windows, names=NAMES)


FAMILY = Family(
    read=read,
    keys=(*DECODER_KEYS, "sliding_window"),
    defaults={
        "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 32000,
    },
)
