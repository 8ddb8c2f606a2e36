"""Every operation in plain torch, in any float dtype: the oracle that the fast paths are tested against.

The pool of K and V is one tensor `[num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim]`. Block 0 is the
null block, which padding reads and writes and nobody owns; index 2 is 0 for K, 1 for V. A layer's view of it,
`kv[:, layer]`, is what `kv_layer` means here: `[num_blocks + 1, 2, num_kv_heads, block_size, head_dim]`, strided.

Sums are taken in float32, or in float64 for float64 inputs, whatever the dtype of the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.errors import UnsupportedModelError
from octavo.integers import cdiv
from octavo.kernels.metadata import PER_ROW_FIELDS, LogitsProcessorParams, RaggedBatch, SamplingTensors
from octavo.kernels.row_state import (
    ALLOWED_TOKENS,
    FIRST_STOP_ID,
    IN_PROMPT,
    LOGIT_BIAS,
    MAX_LOGPROBS,
    MIN_TOKENS,
    NOT_FINITE,
    NOTHING_SAMPLED,
    NUM_LOGPROBS,
    PENALTIES,
    DecodeInputs,
    LogitsProcessorState,
    RowState,
)

Gate = Literal["", "silu", "gelu"]


def max_small_batch_tokens(weight: Tensor) -> int:
    """Tokens of a pass up to which `norm_linear` and `add_linear` are faster than norms, products and sums apart, in
    layers with this weight."""
    return 0


# -- norms and activation ---------------------------------------------------------------------------------------------


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to accumulate in: float32, float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; x [..., size], weight [size].

    Rounded to x's dtype before the weight is applied, as the checkpoints of the Llama family were trained; a weight of
    another dtype, float32 beside x of 16 bits, is applied before (Gemma).
    """
    wide = x.to(accumulation_dtype(x.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype != x.dtype:
        return (weight * (wide * scale)).to(x.dtype)
    return weight * (wide * scale).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual): a layer's exit and the next one's entry in one operation."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


@dataclass(frozen=True, slots=True)
class NormedResidual:
    """A residual stream between two products, and what of the next norm is known where it is written.

    x         [num_tokens, size]
    weighted  [num_tokens, size], x times the next norm's weight, in x's dtype
    squares   [num_parts, num_tokens or more] of the wide dtype; summed over the parts, sum(x^2) of each token
    """

    x: Tensor
    weighted: Tensor
    squares: Tensor


def make_normed_residual(x: Tensor, norm: Tensor) -> NormedResidual:
    """x [num_tokens, size], norm [size], the weight of the norm that comes first."""
    wide = x.to(accumulation_dtype(x.dtype))
    return NormedResidual(x, (wide * norm).to(x.dtype), wide.square().sum(1)[None])


def norm_linear(
    residual: NormedResidual, eps: float, weight: Tensor, bias: Tensor | None = None, gate: Gate = ""
) -> Tensor:
    """rms_norm(residual) @ weight.T + bias, and where a gate is named, `silu_mul` or `gelu_mul` of that.

    weight [num_out, size], with a gate [2 * num_out, size], bias likewise -> [num_tokens, num_out]
    """
    num_tokens, size = residual.x.shape
    scale = torch.rsqrt(residual.squares.sum(0)[:num_tokens, None] / size + eps)
    wide = scale.dtype
    y = F.linear(residual.weighted.to(wide), weight.to(wide)) * scale
    y = (y if bias is None else y + bias).to(residual.x.dtype)
    return y if not gate else silu_mul(y) if gate == "silu" else gelu_mul(y)


def add_linear(
    residual: NormedResidual, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor
) -> NormedResidual:
    """The stream + x @ weight.T + bias; x [num_tokens, num_in], weight [size, num_in], norm [size] the weight of the
    norm that comes next."""
    return make_normed_residual(residual.x + F.linear(x, weight, bias), norm)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension (arXiv 1607.06450).

    x [..., size], weight and bias [size], or None for norms without; rounded once, at the end.
    """
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up; gate_up [num_tokens, 2 * size] holds gate, then up -> [num_tokens, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, gelu by its tanh approximation (arXiv 1606.08415, 2); shapes as for `silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


# -- rotary position embedding ----------------------------------------------------------------------------------------


def rope_table(
    head_dim: int,
    max_len: int,
    theta: float,
    *,
    scaling: dict[str, Any] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """cos and sin of every position's angles -> [max_len, head_dim]: head_dim / 2 cosines, then as many sines.

    `scaling` is the checkpoint's `rope_scaling` (or `rope_parameters`) as config.json has it: "default", "linear",
    "dynamic", "llama3" or "yarn" (arXiv 2309.00071). Raises `UnsupportedModelError` for another.

    "dynamic" recomputes all angles as a sequence grows past the trained length, which K that was turned and cached
    cannot follow: here max_len decides, once. Up to the trained length it is plain rope; for more, what a sequence of
    max_len would have.
    """
    wide = accumulation_dtype(dtype)
    scaling = scaling or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "dynamic":
        stretch = max(1.0, max_len / scaling["original_max_position_embeddings"])
        theta *= (scaling["factor"] * (stretch - 1) + 1) ** (head_dim / (head_dim - 2))
    exponents = torch.arange(0, head_dim, 2, device=device).to(wide) / head_dim
    frequencies: Tensor = 1.0 / torch.pow(theta, exponents)  # [head_dim / 2]
    amplitude = 1.0
    if kind == "linear":
        frequencies = frequencies / scaling["factor"]
    elif kind == "llama3":
        frequencies = _llama3_frequencies(frequencies, scaling)
    elif kind == "yarn":
        frequencies, amplitude = _yarn_frequencies(frequencies, theta, scaling)
    elif kind not in ("default", "dynamic"):
        raise UnsupportedModelError(
            f"rope scaling {kind!r} is not supported; supported: default, linear, dynamic, llama3, yarn",
            param="rope_scaling",
        )
    angles = torch.outer(torch.arange(max_len, device=device).to(wide), frequencies)  # [max_len, head_dim / 2]
    table: Tensor = torch.cat((angles.cos(), angles.sin()), dim=-1) * amplitude
    return table.to(dtype)


def _llama3_frequencies(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended: Llama 3.1's recipe.

    turns = how often a frequency goes round within the original context:

        turns    0 ..... low_freq_factor ..... high_freq_factor ..... inf
        scaled   f / factor      |   linear blend     |        f
    """
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi / frequencies)
    return _blend(frequencies, scaling["factor"], keep=((turns - low) / (high - low)).clamp(0, 1))


def _yarn_frequencies(frequencies: Tensor, theta: float, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """YaRN's blend of kept and stretched frequencies, and the factor on cos and sin (arXiv 2309.00071, 3.2 to 3.4)."""
    factor = scaling["factor"]
    context = scaling["original_max_position_embeddings"]
    num_pairs = frequencies.shape[0]

    def pair_that_turns(times: float) -> float:  # the (fractional) index of the frequency with that many turns
        return num_pairs * math.log(context / (times * 2 * math.pi)) / math.log(theta)

    low = pair_that_turns(scaling.get("beta_fast") or 32)
    high = pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    pairs = torch.arange(num_pairs, device=frequencies.device).to(frequencies.dtype)
    blended = _blend(frequencies, factor, keep=1 - ((pairs - low) / max(high - low, 0.001)).clamp(0, 1))

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    amplitude = scaling.get("attention_factor")
    if amplitude is None:
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        amplitude = temperature(mscale) / temperature(mscale_all) if mscale and mscale_all else temperature(1.0)
    return blended, float(amplitude)


def _blend(frequencies: Tensor, factor: float, keep: Tensor) -> Tensor:
    """In Transformers' order of operations: at position 100,000 a last digit of a frequency is a visible angle."""
    blended: Tensor = (1 - keep) * frequencies / factor + keep * frequencies
    return blended


def apply_rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn each pair (i, i + head_dim / 2) of a head by its position's angle (arXiv 2104.09864, in Llama's layout).

    q [num_tokens, num_heads, head_dim], k [num_tokens, num_kv_heads, head_dim], positions [num_tokens],
    cos_sin from `rope_table` -> (q, k), turned.
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, head_dim / 2] each
    return _turn(q, cos, sin), _turn(k, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(accumulation_dtype(x.dtype)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


# -- moving K and V ---------------------------------------------------------------------------------------------------


def kv_write(k: Tensor, v: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
    """Put each token's K and V into its slot; k, v [num_tokens, num_kv_heads, head_dim], slot_mapping [num_tokens].

    Padding tokens aim at the null block. Runs before the attention that reads them, so that a token sees itself.
    """
    block_size = kv_layer.shape[3]
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    kv_layer[block_ids, 0, :, offsets] = k.to(kv_layer.dtype)
    kv_layer[block_ids, 1, :, offsets] = v.to(kv_layer.dtype)


def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    kv_layer: Tensor,
    slot_mapping: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """What lies between projection and attention: `rms_norm` of q's and k's heads where weights [head_dim] are given,
    `apply_rope`, then `kv_write` -> q, turned. Shapes as there."""
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    q, k = apply_rope(q, k, positions, cos_sin)
    kv_write(k, v, kv_layer, slot_mapping)
    return q


def split_heads(projected: Tensor, kv_layer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] -> q, k, v as `rope_kv_write` takes them."""
    num_kv_heads, _, head_dim = kv_layer.shape[2:]
    heads = projected.view(len(projected), -1, head_dim)
    q, k, v = torch.split(heads, [heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    return q, k, v


def project_qkv(
    residual: NormedResidual,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    kv_layer: Tensor,
    batch: RaggedBatch,
    cos_sin: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 0.0,
) -> Tensor:
    """All that comes before a layer's attention: `norm_linear`, whose heads are those of q, of k and of v, and
    `rope_kv_write` of these -> q, turned.

    weight [(num_heads + 2 * num_kv_heads) * head_dim, size]
    """
    q, k, v = split_heads(norm_linear(residual, eps, weight, bias), kv_layer)
    return rope_kv_write(
        q, k, v, batch.positions, cos_sin, kv_layer, batch.slot_mapping, q_norm=q_norm, k_norm=k_norm, eps=norm_eps
    )


def block_copy(kv: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """Copy-on-write: whole blocks, over all layers. Every source is read before any target is written."""
    kv.index_copy_(0, dst_ids, kv.index_select(0, src_ids))


def swap_out(kv: Tensor, host_kv: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """Device blocks `src_ids` to host blocks `dst_ids`; both pools have the same shape but for the number of blocks."""
    host_kv.index_copy_(0, dst_ids.to(host_kv.device), kv.index_select(0, src_ids).to(host_kv.device))


def swap_in(host_kv: Tensor, kv: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """Host blocks `src_ids` to device blocks `dst_ids`."""
    kv.index_copy_(0, dst_ids, host_kv.index_select(0, src_ids.to(host_kv.device)).to(kv.device))


# -- attention --------------------------------------------------------------------------------------------------------


@overload
def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int = 0,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def paged_attention(
    q: Tensor, kv_layer: Tensor, batch: RaggedBatch, *, scale: float, window: int = 0, return_lse: Literal[True]
) -> tuple[Tensor, Tensor]: ...
@overload
def paged_attention(
    q: Tensor, kv_layer: Tensor, batch: RaggedBatch, *, scale: float, window: int = 0, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]: ...
def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int = 0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of a ragged batch's queries over K and V that lie in blocks (vLLM paper, equation 4).

    q           [num_tokens, num_heads, head_dim]; num_heads is a multiple of num_kv_heads, and neighbouring query
                heads share a K/V head
    window      0: a query sees every key up to its own position; w: the last w of them, its own included
    return_lse  also give log(sum(exp(scores))), [num_tokens, num_heads] float32 (float64 for float64 inputs), by which
                attention over disjoint sets of keys is merged

    -> [num_tokens, num_heads, head_dim]. A row without keys (padding) is 0, its lse -inf.
    """
    head_dim, num_kv_heads = q.shape[2], kv_layer.shape[2]
    wide = accumulation_dtype(q.dtype)
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=wide)
    for s, (begin, end) in enumerate(pairwise(batch.query_start.tolist())):
        seq_len = int(batch.seq_lens[s])
        if begin == end or seq_len == 0:
            continue
        positions = torch.arange(seq_len - (end - begin), seq_len, device=q.device)
        first_key = max(0, int(positions[0]) - window + 1) if window else 0
        keys, values = gather_kv(kv_layer, batch.block_tables[s], first_key, seq_len)
        # Neighbouring query heads share a K/V head: [num_kv_heads, group, query_len, head_dim]
        grouped = q[begin:end].to(wide).view(end - begin, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        scores = (
            grouped @ keys.to(wide).transpose(-1, -2).unsqueeze(1) * scale
        )  # [num_kv_heads, group, query_len, keys]
        hidden = visible_keys(positions, torch.arange(first_key, seq_len, device=q.device), window).logical_not()
        scores = scores.masked_fill(hidden, -math.inf)
        row_lse = scores.logsumexp(-1)  # [num_kv_heads, group, query_len]
        weights = (scores - row_lse.unsqueeze(-1)).exp()
        result = weights @ values.to(wide).unsqueeze(1)  # [num_kv_heads, group, query_len, head_dim]
        out[begin:end] = result.flatten(0, 1).transpose(0, 1).to(q.dtype)
        lse[begin:end] = row_lse.flatten(0, 1).T
    return (out, lse) if return_lse else out


def gather_kv(kv_layer: Tensor, block_ids: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """K and V of positions [start, end) of a sequence, each [num_kv_heads, end - start, head_dim].

    block_ids is the sequence's row of the block tables. Slots outside the range are not touched: unused ones may hold
    anything, NaN included.
    """
    block_size = kv_layer.shape[3]
    first, last = start // block_size, cdiv(end, block_size)
    blocks = kv_layer[block_ids[first:last].long()]  # [blocks, 2, num_kv_heads, block_size, head_dim]
    rows = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [2, num_kv_heads, blocks * block_size, head_dim]
    keys, values = rows[:, :, start - first * block_size : end - first * block_size]
    return keys, values


def visible_keys(query_positions: Tensor, key_positions: Tensor, window: int) -> Tensor:
    """[queries, keys] bool: which keys each query sees, its own position being the last."""
    distance = query_positions.unsqueeze(-1) - key_positions
    return (distance >= 0) & (distance < window) if window else distance >= 0


def merge_attention(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """One attention over the union of disjoint sets of keys, from the attention over each.

    outs [parts, ..., head_dim], lses [parts, ...] -> (out [..., head_dim], lse [...]). A part without keys has
    lse -inf and counts for nothing, also where no part has any.
    """
    lse = lses.logsumexp(0)
    weights = torch.where(lses == -math.inf, 0.0, (lses - lse).exp())  # exp(-inf - -inf) would be NaN
    out = (weights.unsqueeze(-1) * outs.to(weights.dtype)).sum(0)
    return out.to(outs.dtype), lse


# -- sampling ---------------------------------------------------------------------------------------------------------


def sample(logits: Tensor, params: SamplingTensors) -> Tensor:
    """One token a row -> [num_rows] int64; logits [num_rows, vocab_size].

    Greedy rows take the argmax, the lowest id of equals. Others draw from softmax(filtered_logits) by the exponential
    race: of independent Exp(1) waiting times divided by their tokens' probabilities, token t's is the shortest with
    probability p(t). The noise belongs to (seed, sample_index, position, token) alone, so that a draw depends neither
    on the row, nor on the batch, nor on how often a sequence was preempted.
    """
    greedy = logits.to(accumulation_dtype(logits.dtype)).argmax(-1)
    if params.all_greedy:
        return greedy
    scores = filtered_logits(logits, params)
    token_ids = torch.arange(logits.shape[-1], device=logits.device)
    noise = exponential_noise(noise_keys(params.seed, params.sample_index, params.position).unsqueeze(-1), token_ids)
    drawn = (scores.log_softmax(-1) - noise.log()).argmax(-1)
    return torch.where(params.temperature > 0, drawn, greedy)


def filtered_logits(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Logits / temperature, -inf where top_k, top_p and min_p, in that order, leave a token out.

    top_k   the k likeliest, and all as likely as the last of these
    top_p   of what top_k left, the smallest set of likeliest tokens with at least that mass; equals by id
    min_p   of what top_p left, those at least min_p times as likely as the likeliest

    Each keeps the likeliest token whatever its number. A greedy row (temperature 0) is divided by 1.
    """
    temperature = torch.where(params.temperature > 0, params.temperature, 1.0)
    scaled = logits.to(accumulation_dtype(logits.dtype)) / temperature.unsqueeze(-1)
    if not params.any_filter:
        return scaled
    ordered, token_ids = scaled.sort(dim=-1, descending=True, stable=True)
    keep = keep_mask(ordered, params.top_k, params.top_p, params.min_p)
    return scaled.masked_fill(torch.empty_like(keep).scatter_(-1, token_ids, ~keep), -math.inf)


def keep_mask(ordered: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, log_total: Tensor | None = None) -> Tensor:
    """What the filters keep of logits in descending order, [num_rows, num_logits] bool; see `filtered_logits`.

    log_total [num_rows, 1] is the log-sum-exp of all logits where `ordered` holds only the likeliest of them.
    """
    num_logits = ordered.shape[-1]
    k = torch.where(top_k > 0, top_k, num_logits).clamp(max=num_logits).long().unsqueeze(-1)
    keep = ordered >= ordered.gather(-1, k - 1)
    left = ordered.masked_fill(~keep, -math.inf)
    log_mass = left.logsumexp(-1, keepdim=True)
    if log_total is not None:
        log_mass = torch.where(top_k.unsqueeze(-1) > 0, log_mass, log_total)
    probs = (left - log_mass).exp()
    mass_before = probs.cumsum(-1) - probs
    # A rounded sum may reach 1 before the last token does: top_p = 1 keeps everything by decree, not by arithmetic.
    keep &= (mass_before < top_p.unsqueeze(-1)) | (top_p >= 1).unsqueeze(-1)
    keep &= probs >= min_p.unsqueeze(-1) * probs[:, :1]
    keep[:, 0] = True
    return keep


def finite_rows(logits: Tensor) -> Tensor:
    """[num_rows] bool: rows without NaN and infinity. Look before masks put -inf into them."""
    low, high = logits.aminmax(dim=-1)  # both are NaN where any element is
    return (low > -math.inf) & (high < math.inf)


# The noise is a counter-based generator: SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
# generators", OOPSLA 2014), whose n-th output is a mix of key + n * GOLDEN. Integers are int64 and wrap around.


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


GOLDEN = _signed(0x9E3779B97F4A7C15)
MIX_1 = _signed(0xBF58476D1CE4E5B9)
MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """A logical shift: torch's keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = _mix_high(x)
    return x ^ _shift_right(x, 31)


def _mix_high(x: Tensor) -> Tensor:
    """`_mix` without its last step, which is there for the low bits: it changes one of the upper 32."""
    x = (x ^ _shift_right(x, 30)) * MIX_1
    return (x ^ _shift_right(x, 27)) * MIX_2


def noise_keys(seed: Tensor, sample_index: Tensor, position: Tensor) -> Tensor:
    """One int64 key a row from what its noise may depend on; all [num_rows] int64."""
    key = _mix(seed + GOLDEN)
    key = _mix(key + sample_index + GOLDEN)
    return _mix(key + position + GOLDEN)


def exponential_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Exp(1) noise, float32, of a key and a token id each: the inverse of the distribution at 32 random bits."""
    bits = _shift_right(_mix_high(keys + (token_ids + 1) * GOLDEN), 32)
    # float32 rounds the highest of these to 1, whose logarithm would make the noise infinite and the token
    # impossible, the only one left included.
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log1p(-uniform)


# -- before sampling: rules for some tokens, and what the model thought -----------------------------------------------


def apply_token_bitmask(logits: Tensor, mask_index: Tensor, bitmask: Tensor) -> None:
    """Set logits of forbidden tokens to -inf, in place.

    Token t of row i is forbidden where bit t % 32 of bitmask[mask_index[i], t // 32] is 0. A mask_index of -1 forbids
    nothing.

    logits [num_rows, vocab_size], mask_index [num_rows] int32, bitmask [num_masks, ceil(vocab_size / 32)] int32
    """
    bits = (bitmask.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=bitmask.device)) & 1
    forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    rows = torch.nonzero(mask_index >= 0).squeeze(1)
    logits[rows] = logits[rows].masked_fill(forbidden[mask_index[rows].long()], -math.inf)


def packed_top_logprobs(logits: Tensor, num: int) -> Tensor:
    """What `token_logprobs` says of the likeliest token of each row of logits [num_rows, vocab_size], as words:
    [num_rows, 2 + 2 * num] int32. First the bits of its log-probability as float32, its rank, 0 where a number is not
    finite, then the likeliest tokens, and the bits of their log-probabilities. Of a vocabulary of fewer tokens, all."""
    best, ids = logits.float().log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    best, ids = best[:, :num].contiguous().view(torch.int32), ids[:, :num].int()
    return torch.cat([best[:, :1], finite_rows(logits).int().unsqueeze(1), ids, best], 1)


def apply_logits_processors(logits: Tensor, params: LogitsProcessorParams) -> None:
    """Change logits [num_rows, vocab_size] in place: tokens ruled out become -inf, then biases, then penalties."""
    if params.allowed_rows is not None and params.allowed_tokens is not None:
        kept = logits[params.allowed_tokens]
        logits[params.allowed_rows] = -math.inf
        logits[params.allowed_tokens] = kept
    if params.banned_tokens is not None:
        logits[params.banned_tokens] = -math.inf
    if params.bad_words is not None:
        logits[find_banned_words(params)] = -math.inf
    if params.bias_tokens is not None and params.bias_values is not None:
        logits[params.bias_tokens] += params.bias_values.to(logits.dtype)
    if params.repetition is not None:
        apply_penalties(logits, params)


def find_banned_words(params: LogitsProcessorParams) -> tuple[Tensor, Tensor]:
    """(row of logits, token) of every word of which all but the last token has just come."""
    history, words, of = params.history, params.bad_words, params.bad_word_rows
    assert history is not None and words is not None and of is not None
    num_before = words.shape[1] - 1
    back = torch.arange(-num_before, 0, device=words.device)  # how far each token of a word lies before its last
    positions = history.num_tokens[of].unsqueeze(1) + back  # [num_words, num_before]
    before = history.token_ids[of.unsqueeze(1), positions.clamp(min=0)]
    same = (before == words[:, :-1]) & (positions >= 0)
    hits = (same | (words[:, :-1] < 0)).all(1)
    return history.rows[of[hits]], words[hits, -1]


def apply_penalties(logits: Tensor, params: LogitsProcessorParams) -> None:
    """In place; for the rows of `params.history`, each token by how often it came before:

    repetition   in prompt or output: a positive logit is divided by it, another multiplied (arXiv 1909.05858, 4.1)
    frequency    subtracted for each time in the output
    presence     subtracted once where it is in the output
    """
    history, repetition, presence, frequency = params.history, params.repetition, params.presence, params.frequency
    assert history is not None and repetition is not None and presence is not None and frequency is not None
    token_ids, dtype = history.token_ids.long(), logits.dtype
    positions = torch.arange(token_ids.shape[1], device=logits.device)
    known = positions < history.num_tokens.unsqueeze(1)  # [num, max_len]
    output = known & (positions >= history.num_prompt.unsqueeze(1))
    token_ids = token_ids.where(known, 0)
    chosen = logits[history.rows]  # [num, vocab_size]
    num_seen = torch.zeros_like(chosen).scatter_add_(1, token_ids, known.to(dtype))
    num_output = torch.zeros_like(chosen).scatter_add_(1, token_ids, output.to(dtype))
    penalty = repetition.to(dtype).unsqueeze(1)
    repeated = torch.where(chosen > 0, chosen / penalty, chosen * penalty)
    chosen = torch.where(num_seen > 0, repeated, chosen)
    chosen -= frequency.to(dtype).unsqueeze(1) * num_output
    chosen -= presence.to(dtype).unsqueeze(1) * (num_output > 0)
    logits[history.rows] = chosen


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the model thinks of one token a row, and which it likes best.

    logits [num_rows, vocab_size], token_ids [num_rows] int64 -> (log-probabilities [num_rows], ranks [num_rows] int64
    from 1, the likeliest tokens [num_rows, num_top] int64, best first and the lowest id first of equals, and their
    log-probabilities [num_rows, num_top]). Equally likely tokens have the same rank.
    """
    logprobs = logits.to(accumulation_dtype(logits.dtype)).log_softmax(-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(1) + 1
    top, top_ids = logprobs.sort(dim=1, descending=True, stable=True)
    return chosen.squeeze(1), ranks, top_ids[:, :num_top], top[:, :num_top]


# -- decoding without the host ----------------------------------------------------------------------------------------


def prepare_decode_inputs(state: RowState, inputs: DecodeInputs, block_size: int) -> None:
    """From the rows to the inputs of one pass that computes one position of each: fill the step's second part."""
    batch, sampling = inputs.batch, inputs.sampling
    position = inputs.starts + inputs.step_counter[1]
    live = (position < inputs.ends) & ~state.done[inputs.rows]
    position = torch.where(live, position, 0)
    tables = state.block_tables[inputs.rows, : batch.block_tables.shape[1]]  # [num_slices, max_blocks]
    block = tables.gather(1, (position // block_size).unsqueeze(1)).squeeze(1).long()
    inputs.live_rows.copy_(torch.where(live, inputs.rows, state.null_row))
    inputs.token_ids.copy_(state.last_token[inputs.rows])
    batch.positions.copy_(position)
    batch.slot_mapping.copy_(torch.where(live, block * block_size + position % block_size, 0))
    batch.seq_lens.copy_(torch.where(live, position + 1, 0))
    batch.block_tables.copy_(tables)
    if batch.common_prefix_lens is not None:
        both = torch.where(live[1:] & live[:-1], torch.minimum(position[1:], position[:-1]), 0)
        column = torch.arange(tables.shape[1], device=tables.device)
        same = (tables[1:] == tables[:-1]) & (column < (both // block_size).unsqueeze(1))
        batch.common_prefix_lens[:1] = 0
        batch.common_prefix_lens[1:] = same.int().cumprod(1).sum(1) * block_size
    own = state.sampling(inputs.rows, torch.full_like(inputs.rows, -1), position + 1)
    for name in PER_ROW_FIELDS:
        getattr(sampling, name).copy_(getattr(own, name))


def prepare_prefill_inputs(
    state: RowState, rows: Tensor, starts: Tensor, known: Tensor, batch: RaggedBatch, token_ids: Tensor, block_size: int
) -> None:
    """From the rows to the inputs of one pass over slices of any length.

    rows, starts  [num_slices] int64
    known         [num_tokens] int64, the host's tokens; -1, in a slice of length 1: the row's last token. Tokens of the
                  host clear the row's done flag. A row that stays done computes from position 0, in the null block: the
                  null row does, of any length, which makes it the padding
    batch         whose query_start is said; positions, slot_mapping, seq_lens and block_tables are filled in
    token_ids     [num_tokens] int64, filled in
    """
    begin = batch.query_start[:-1].long()  # [num_slices]
    counts = batch.query_start.diff().long()
    from_host = (counts > 0) & (known[begin.clamp(max=len(known) - 1)] >= 0)
    state.done[rows[from_host]] = False
    is_done = state.done[rows]
    start = torch.where(is_done, 0, starts)
    sequence = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), counts)  # [num_tokens]
    position = torch.arange(len(sequence), device=rows.device) - begin[sequence] + start[sequence]
    tables = state.block_tables[rows, : batch.block_tables.shape[1]] * ~is_done.unsqueeze(1)
    block = tables[sequence, position // block_size].long()
    token_ids.copy_(torch.where(known < 0, state.last_token[rows][sequence], known))
    batch.positions.copy_(position)
    batch.slot_mapping.copy_(torch.where(is_done[sequence], 0, block * block_size + position % block_size))
    batch.seq_lens.copy_(start + counts)
    batch.block_tables.copy_(tables)


def sample_checked(logits: Tensor, params: SamplingTensors, masks: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """`sample` with a token bitmask and a check of the logits -> [num_rows] int64.

    masks   (mask_index, bitmask) of `apply_token_bitmask`, applied to the logits first. None: no mask

    A row with non-finite logits gets -1, a row whose tokens are all masked -2.
    """
    finite = finite_rows(logits)
    if masks is not None:
        apply_token_bitmask(logits, *masks)
    tokens = sample(torch.where(finite.unsqueeze(1), logits, 0.0), params)
    is_left = logits.gather(1, tokens.unsqueeze(1)).squeeze(1) > -math.inf
    return torch.where(finite, torch.where(is_left, tokens, -2), -1)


def init_token_counts(
    processors: LogitsProcessorState, rows: Tensor, starts: Tensor, begins: Tensor, token_ids: Tensor
) -> None:
    """The host says tokens of penalized rows; those at positions that are counted already change nothing.

    rows, starts [num_slices] int64, no row twice: the row's tokens from position `starts` on are
    token_ids[begins[i] : begins[i + 1]]; begins [num_slices + 1], token_ids int64
    """
    ends = zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True)
    for row, start, (begin, end) in zip(rows.tolist(), starts.tolist(), ends, strict=True):
        known, prompt = int(processors.num_counted[row]), int(processors.num_prompt[row])
        for position, token in enumerate(token_ids[begin:end].tolist(), start):
            if position >= known:
                if position < prompt:
                    processors.counts[row, token] |= IN_PROMPT
                else:
                    processors.counts[row, token] += 1
        processors.num_counted[row] = max(known, start + end - begin)


def update_token_counts(processors: LogitsProcessorState, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
    """Of what was sampled, each token at its position, what rows that ask for anything will have to know; not of
    tokens below 0. All [num_samples] int64, contiguous, and no row with processors twice."""
    assert rows.is_contiguous() and positions.is_contiguous() and tokens.is_contiguous()
    enabled = processors.enabled[rows]
    good = (tokens >= 0) & (enabled != 0)
    processors.history[rows[good], positions[good]] = tokens[good].int()
    good &= (enabled & PENALTIES) != 0
    rows = rows[good]
    processors.counts[rows, tokens[good]] += 1
    processors.num_counted[rows] = positions[good].int() + 1


def apply_row_logits_processors(
    logits: Tensor, rows: Tensor, positions: Tensor, state: RowState, processors: LogitsProcessorState
) -> None:
    """Change logits [num_samples, vocab_size] float32 in place as each one's row asks: biases, then penalties, and -inf
    for tokens that are ruled out. rows, positions [num_samples] int64, the latter those that the draws' tokens will
    have."""
    for line, row, position in zip(logits, rows.tolist(), positions.tolist(), strict=True):
        enabled = int(processors.enabled[row])
        if enabled & LOGIT_BIAS:
            ids = processors.bias_ids[row]
            line[ids[ids >= 0].long()] += processors.bias_values[row][ids >= 0]
        if enabled & MIN_TOKENS and position < int(processors.min_length[row]):
            stops = state.sampling_params[row, FIRST_STOP_ID:]
            line[stops[stops >= 0]] = -math.inf
        if enabled & PENALTIES:
            repetition, presence, frequency = processors.penalties[row]
            num_output = processors.counts[row] & (IN_PROMPT - 1)
            penalized = torch.where(line > 0, line / repetition, line * repetition)
            line.copy_(torch.where(processors.counts[row] != 0, penalized, line))
            line -= frequency * num_output + presence * (num_output > 0)
        if enabled & ALLOWED_TOKENS:
            apply_token_bitmask(
                line.unsqueeze(0), torch.zeros(1, dtype=torch.int32), processors.allowed_bitmask[row].unsqueeze(0)
            )


def write_logprobs(
    state: RowState, rows: Tensor, logits: Tensor, tokens: Tensor, ring: Tensor, step_counter: Tensor
) -> None:
    """Write log-probabilities of sampled tokens to the host's ring, for rows that return them.

    Runs before `commit_sampled_tokens`.

    rows    [num_samples] int64
    logits  [num_samples, vocab_size], unprocessed
    tokens  [num_samples] int64; a negative one is skipped
    ring    [num_columns, at least num_samples, 2 + 2 * MAX_LOGPROBS] int32. Column step_counter[0] gets a line for each
            sample, as `packed_top_logprobs` packs it, with as many top tokens as the row returns; the bits of their
            log-probabilities begin at 2 + MAX_LOGPROBS
    """
    for i, num in enumerate(state.sampling_params[rows, NUM_LOGPROBS].tolist()):
        if num < 0 or tokens[i] < 0:
            continue
        chosen, rank, ids, best = token_logprobs(logits[i : i + 1].float(), tokens[i : i + 1], num)
        line = ring[step_counter[0], i]
        line[0], line[1] = chosen.view(torch.int32), rank
        line[2 : 2 + num] = ids
        line[2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + num] = best.contiguous().view(torch.int32)


def commit_sampled_tokens(state: RowState, rows: Tensor, tokens: Tensor, ring: Tensor, step_counter: Tensor) -> None:
    """Store the sampled tokens of a pass in the row state and in the host's ring, and advance the step counter.

    rows    [num_samples] int64, the row of each sample. Several samples of one row are resolved by the host
    tokens  [num_samples] int64 from `sample_checked`: -1 for non-finite logits, -2 where every token was masked
    ring    [num_columns, at least num_samples] int32. Column step_counter[0] gets each token, or NOTHING_SAMPLED,
            NOT_FINITE or NO_TOKEN_LEFT of `row_state`
    """
    alive = ~state.done[rows]
    told = torch.where(tokens < 0, tokens + (NOT_FINITE + 1), tokens)
    ring[step_counter[0], : len(rows)] = torch.where(alive, told, NOTHING_SAMPLED).to(ring.dtype)
    stops = (tokens < 0) | (state.sampling_params[rows, FIRST_STOP_ID:] == tokens.unsqueeze(1)).any(1)
    good = alive & (tokens >= 0)
    state.last_token[rows[good]] = tokens[good]
    state.done[rows[alive & stops]] = True
    step_counter += 1
