"""Descriptions of models, complete apart from the weights: sizes, options and names of tensors. Imports no torch.

`config.spec_from_config` reads a `DecoderSpec` from a config.json of the Llama family, a `GPTSpec` for GPT-2 and OPT.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names of a checkpoint's tensors, without ".weight" and ".bias". Those after `layer` follow a layer's prefix.

    layer         format string for a layer's number
    qkv, mlp_in   a name for each projection, or one name for a tensor that merges them
    post_norms    after attention and after the MLP, before the addition to the residual stream; empty: no such norms
    is_conv1d     matrices are stored as [in, out], as in GPT-2's first implementation
    """

    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    positions: str = ""
    final_norm: str = "model.norm"
    layer: str = "model.layers.{}."
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qk_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    out: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    post_norms: tuple[str, ...] = ()
    is_conv1d: bool = False


LLAMA_NAMES = TensorNames()
"""Transformers' names in the Llama family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The fields that all models have.

    num_heads, num_kv_heads, head_dim
                             query heads, K/V heads, and the size of both; num_heads * head_dim may differ from
                             hidden_size
    intermediate_size        width of the MLP
    max_position_embeddings  number of positions that were trained
    windows                  sliding window of each layer: the keys that a query sees, its own included. 0: all keys.
                             Empty: no layer has a window
    unit_offset_norms        norms multiply by 1 + weight, in float32 for any model dtype
    dtype                    the checkpoint's, a name such as "bfloat16"; for quantised GGUF files, "bfloat16"
    names                    names of the checkpoint's tensors
    """

    model: ClassVar[str]
    """The model that a spec of this class configures, as "module:class"."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    windows: tuple[int, ...] = ()
    tie_word_embeddings: bool = False
    unit_offset_norms: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"
    names: TensorNames = field(default=LLAMA_NAMES, repr=False)

    def window_of(self, layer: int) -> int:
        """Sliding window of a layer, in keys; 0: none."""
        return self.windows[layer] if self.windows else 0

    @property
    def kv_window(self) -> int | None:
        """Number of last keys that the KV cache must keep; None: all, because some layer has no window."""
        return max(self.windows) if self.windows and all(self.windows) else None

    def max_model_len(self, requested: int | None = None) -> int:
        """The longest sequence that the model supports; some models extend it if more positions are requested."""
        return self.max_position_embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec(ModelSpec):
    """A decoder of the Llama family: RMS norms, rotary positions, gated MLPs.

    activation          of the gate, "silu" or "gelu_tanh"
    qkv_bias, o_bias, mlp_bias
                        the projections have a bias
    qk_norm             each head of Q and K is normalised before rotary embedding
    embedding_scale     factor on embeddings
    attention_scale     factor on attention scores; None: 1 / sqrt(head_dim)
    rope_scaling        validated dict with config.json's keys, the argument of `rope_table`; None: no scaling
    local_rope_theta    theta of the layers with a sliding window, which are then not scaled; None: rope_theta
    """

    model: ClassVar[str] = "octavo.models.decoder:Decoder"
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    local_rope_theta: float | None = None
    activation: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None

    def max_model_len(self, requested: int | None = None) -> int:
        """See `ModelSpec`. Dynamic scaling and YaRN extend the trained length by `factor`, if more is requested.

        Dynamic scaling is not the default because its one table for all lengths changes short sequences, too. For YaRN,
        max_position_embeddings includes the factor in some files, and not in those edited as Qwen's authors advise.
        """
        known = self.max_position_embeddings
        scaling = self.rope_scaling or {}
        if requested is None or requested <= known or scaling.get("rope_type") not in ("dynamic", "yarn"):
            return known
        return max(known, int(scaling["original_max_position_embeddings"] * scaling["factor"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTSpec(ModelSpec):
    """GPT-2 and OPT: layer norms, learned positions, an MLP of two projections.

    embedding_size      width of the embeddings; if it is not hidden_size, projections convert between them (OPT-350m)
    position_offset     row of the position table for position 0
    activation          of the MLP, a key of `gpt.ACTIVATIONS`
    norm_first          norms precede attention and MLP; else they follow the addition to the residual stream
    final_norm          a norm precedes the head
    norm_weights        norms have a weight and a bias
    bias                projections have a bias
    attention_scale     factor on attention scores
    scale_by_layer      attention scores are also divided by the layer's number, from 1
    """

    model: ClassVar[str] = "octavo.models.gpt:GPT"
    layer_norm_eps: float
    embedding_size: int
    position_offset: int = 0
    activation: str = "gelu_tanh"
    norm_first: bool = True
    final_norm: bool = True
    norm_weights: bool = True
    bias: bool = True
    attention_scale: float = 1.0
    scale_by_layer: bool = False
