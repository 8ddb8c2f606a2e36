"""Mistral 7B (arXiv 2310.06825): Llama with a sliding window in all layers."""

from __future__ import annotations

from octavo.models.config_values import DECODER_KEYS, Config, read_decoder_spec, read_windows
from octavo.models.family import Family
from octavo.models.spec import DecoderSpec


def read(config: Config, common: Config) -> DecoderSpec:
    return read_decoder_spec(config, common, windows=read_windows(config, lambda layer: True))


PARTS = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""Names in Mistral's own files, consolidated.safetensors -> Transformers'."""

FAMILY = Family(
    read=read,
    renamed=(
        *((rf"layers\.(\d+)\.{old}\.", rf"model.layers.\1.{new}.") for old, new in PARTS.items()),
        *((r"tok_embeddings\.", "model.embed_tokens."), (r"norm\.", "model.norm."), (r"output\.", "lm_head.")),
    ),
    interleaved=r"layers\.\d+\.attention\.w[qk]\.",
    keys=(*DECODER_KEYS, "sliding_window"),
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)
