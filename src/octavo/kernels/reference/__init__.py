"""Every operation in plain torch, in any float dtype: the oracle that the fast paths are tested against.

The KV cache is one tensor `[num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim]`. Block 0 is the null
block: padding reads and writes it, and no sequence owns it. Index 2 is 0 for K, 1 for V. `kv_layer` is the view of one
layer, `kv[:, layer]`: `[num_blocks + 1, 2, num_kv_heads, block_size, head_dim]`, strided. In int8, a row of head_dim
numbers ends with its scale: `quantize_rows`.

Sums are taken in float32, in float64 for float64 inputs, whatever the dtype of the data.
"""

# ruff: noqa: F401
from octavo.kernels.reference.attention import gather_kv, merge_attention, paged_attention, visible_keys
from octavo.kernels.reference.embedding import gather_own_rows
from octavo.kernels.reference.experts import ExpertGate, Routing, experts_in, experts_out, pack_experts, route
from octavo.kernels.reference.groups import keeps_groups, pack_groups
from octavo.kernels.reference.kv import (
    SCALE_BYTES,
    block_copy,
    dequantize_rows,
    head_dim_of,
    kv_write,
    project_qkv,
    quantize_rows,
    rope_kv_write,
    split_heads,
    swap_in,
    swap_out,
    to_float8,
)
from octavo.kernels.reference.norms import (
    accumulation_dtype,
    add_linear,
    add_rms_norm,
    few_rows_linear,
    gelu,
    gelu_mul,
    layer_norm,
    linear,
    make_normed_residual,
    max_small_batch_tokens,
    norm_linear,
    rms_norm,
    silu_mul,
)
from octavo.kernels.reference.recurrent import causal_conv, delta_gates, gated_delta_rule, gated_rms_norm, sigmoid_mul
from octavo.kernels.reference.rope import apply_rope, rope_table
from octavo.kernels.reference.sampling import (
    MAX_SLICED_TOP_K,
    apply_token_bitmask,
    decide,
    exponential_noise,
    filtered_logits,
    finite_rows,
    keep_mask,
    keep_slice,
    mask_bad_words,
    noise_keys,
    packed_top_logprobs,
    race,
    race_scores,
    sample,
    scaled_logits,
    slice_borders,
    slice_tops,
    token_logprobs,
)
from octavo.kernels.reference.step import (
    apply_row_logits_processors,
    check_tokens,
    commit_sampled_tokens,
    init_token_counts,
    prepare_decode_inputs,
    prepare_prefill_inputs,
    propose_drafts,
    reject_drafts,
    sample_checked,
    update_token_counts,
    write_logprobs,
)
