"""The CPU's fast path: `reference`'s functions and signatures, the same numbers to float32's rounding.

Each operation has a way in plain torch. Those that a decode step is made of have another in `native.cpp`, taken where
there is a compiler: torch needs ten calls for what is one loop, and has no kernel that reads K and V through a block
table. So in torch blocks are gathered, and all the care goes into gathering once, contiguously, for as many sequences
as fill the second-level cache. What can be worked out from the batch alone is, once for all layers
(`RaggedBatch.derived`).

Where plain torch is as fast as anything (moving blocks, the rope table), this module is the reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, overload

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels import reference
from octavo.kernels.cpu import native
from octavo.kernels.metadata import LogitsProcessorParams, RaggedBatch, SamplingTensors
from octavo.kernels.reference import (
    GOLDEN,
    MIX_1,
    MIX_2,
    block_copy,
    kv_write,
    layer_norm,
    max_small_batch_tokens,
    noise_keys,
    rope_table,
    swap_in,
    swap_out,
)

__all__ = [
    "add_rms_norm",
    "apply_logits_processors",
    "apply_token_bitmask",
    "block_copy",
    "finite_rows",
    "gelu_mul",
    "kv_write",
    "layer_norm",
    "max_small_batch_tokens",
    "paged_attention",
    "rms_norm",
    "rope_kv_write",
    "rope_table",
    "sample",
    "silu_mul",
    "swap_in",
    "swap_out",
    "token_logprobs",
]

# -- norms, activation, rope ------------------------------------------------------------------------------------------


def _native_for(x: Tensor, *others: Tensor) -> native.Library | None:
    """The compiled operations, if they take these tensors."""
    if not native.supports(x) or not x.is_contiguous():
        return None
    for other in others:
        if other.dtype != x.dtype or not other.is_contiguous():
            return None
    return native.library()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`. Two passes over x instead of four where nothing needs casting."""
    if native.supports_norm_weight(weight, x) and (library := _native_for(x)) is not None:
        return library.add_rms_norm(x, None, weight, eps)[0]
    if x.dtype != torch.float32:
        return reference.rms_norm(x, weight, eps)
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale: Tensor = norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `reference.add_rms_norm`."""
    if native.supports_norm_weight(weight, x) and (library := _native_for(x, residual)) is not None:
        return library.add_rms_norm(x, residual, weight, eps)
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_mul`."""
    if (library := _native_for(gate_up)) is not None:
        return library.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.gelu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def apply_rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.apply_rope`. Writes each half where it belongs instead of joining two."""
    if q.dtype != cos_sin.dtype:
        return reference.apply_rope(q, k, positions, cos_sin)
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, head_dim / 2] each
    return _turn(q, cos, sin), _turn(k, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = x.new_empty(x.shape)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


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
    """See `reference.rope_kv_write`."""
    if cos_sin.dtype == torch.float32 and native.supports_heads(q, kv_layer) and native.supports_norm_weight(q_norm, q):
        library = native.library()
        if library is not None:
            return library.rope_kv_write(q, k, v, positions, cos_sin, kv_layer, slot_mapping, q_norm, k_norm, eps)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    q, k = apply_rope(q, k, positions, cos_sin)
    kv_write(k, v, kv_layer, slot_mapping)
    return q


# -- attention --------------------------------------------------------------------------------------------------------

GROUP_BYTES = 8 << 20
"""K and V gathered for one call at most: past the caches, a gathered row is gone again before it is read."""

CALL_BYTES = 256 << 10
"""What is gathered in the time of one more call: padding is worth that much."""

PADDING = 0.25
"""Share of a group's K and V that may be padding beyond that."""

QUERY_TILE = 128
"""Queries of a chunk attended to at once: with fewer, calls cost more than the keys that a causal tile leaves out."""


@dataclass(slots=True)
class _Span:
    """One sequence's share of a batch: query rows [begin, end).

    start, stop    the keys that any of them sees, counted from the first slot of the first block gathered
    """

    seq: int
    begin: int
    end: int
    first_block: int
    num_blocks: int
    start: int
    stop: int


@dataclass(slots=True)
class _Group:
    """Sequences with one query each, about as long as each other.

    q_rows       [num_seqs] int64, their rows of q
    kv_rows      see `_kv_rows`
    num_blocks   of the longest, to which the others are padded
    start, stop  the gathered keys that any of them sees
    dead         gathered rows of head_dim that hold nobody's token: they may hold NaN, so they are zeroed
    mask         [num_seqs, 1, group, stop - start], -inf for keys that a sequence does not see; None: all see all
    """

    q_rows: Tensor
    kv_rows: Tensor
    num_blocks: int
    start: int
    stop: int
    dead: Tensor | None
    mask: Tensor | None


@dataclass(slots=True)
class _Plan:
    """How a batch is attended to: worked out once, the same for every layer. Single queries are for `queries`, or else
    in `groups`."""

    queries: native.DecodeQueries | None
    groups: list[_Group]
    chunks: list[tuple[_Span, Tensor]]  # with its kv_rows
    staircase: Tensor
    covers_all: bool  # no row of q is padding


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
    """See `reference.paged_attention`.

    Sequences with one query are attended to where their blocks are, or else in groups, gathered, the query heads that
    share a K/V head packed as rows of one matrix, so that K and V are read once and not once a query head. Chunks go
    one by one, in tiles of queries, none of which looks at a key past its last.
    """
    q = q.contiguous()
    key = ("cpu.paged_attention", q.shape, q.dtype, kv_layer.shape, kv_layer.stride(), kv_layer.dtype, window)
    plan: _Plan | None = batch.derived.get(key)
    if plan is None:
        if kv_layer.dtype != q.dtype or not _rows_are_even(kv_layer):
            return reference.paged_attention(q, kv_layer, batch, scale=scale, window=window, return_lse=return_lse)
        plan = batch.derived[key] = _make_plan(batch, q, kv_layer, window)
    out = torch.empty_like(q) if plan.covers_all else torch.zeros_like(q)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=reference.accumulation_dtype(q.dtype)) if return_lse else None
    if plan.queries is not None and (library := native.library()) is not None:
        library.decode_attention(q, kv_layer, plan.queries, out, lse, scale=scale, window=window)
    if plan.groups or plan.chunks:
        _attend_gathered(plan, q, kv_layer, out, lse, scale, window)
    return out if lse is None else (out, lse)


def _attend_gathered(
    plan: _Plan, q: Tensor, kv_layer: Tensor, out: Tensor, lse: Tensor | None, scale: float, window: int
) -> None:
    """The plan's groups and chunks, into their rows of `out` and `lse`."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_layer.shape[2:4]
    group_size = num_heads // num_kv_heads
    # The layer as rows of one block, K or V, one head: [rows, block_size * head_dim]. Between a block's last row and
    # the next one's first lie the other layers' rows; no index points there.
    row_size = block_size * head_dim
    num_rows = (kv_layer.shape[0] - 1) * (kv_layer.stride(0) // row_size) + 2 * num_kv_heads
    rows = kv_layer.as_strided((num_rows, row_size), (row_size, 1))
    q_heads = q.view(num_tokens, num_kv_heads, group_size, head_dim)

    for group in plan.groups:
        gathered = rows.index_select(0, group.kv_rows)
        if group.dead is not None:
            gathered.view(-1, head_dim).index_fill_(0, group.dead, 0.0)
        kv = gathered.view(-1, 2, num_kv_heads, group.num_blocks * block_size, head_dim)
        kv = kv[:, :, :, group.start : group.stop]
        result, result_lse = _flash(q_heads.index_select(0, group.q_rows), kv[:, 0], kv[:, 1], scale, group.mask)
        out.index_copy_(0, group.q_rows, result.flatten(1, 2))
        if lse is not None:
            lse.index_copy_(0, group.q_rows, result_lse.flatten(1, 2))

    for span, kv_rows in plan.chunks:
        # Each K/V head serves its whole group by a stride of 0: nothing is repeated in memory.
        kv = rows.index_select(0, kv_rows).view(2, num_kv_heads, 1, -1, head_dim)[:, :, :, span.start : span.stop]
        keys, values = kv.expand(-1, -1, group_size, -1, -1)
        queries = q_heads[span.begin : span.end].permute(1, 2, 0, 3)  # [num_kv_heads, group, query_len, head_dim]
        results = out[span.begin : span.end].view(-1, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
        for tile, seen, mask in _tiles(span, plan.staircase, window):
            result, result_lse = _flash(queries[:, :, tile], keys[:, :, seen], values[:, :, seen], scale, mask)
            results[:, :, tile] = result
            if lse is not None:
                lse[span.begin : span.end][tile] = result_lse.flatten(0, 1).T


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """What `scaled_dot_product_attention` runs on a CPU, with the log-sum-exp that it keeps to itself.

    q, k, v [batch, heads, queries or keys, head_dim], mask [.., queries, keys] added to the scores.
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attend(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    return out, lse


def _rows_are_even(kv_layer: Tensor) -> bool:
    """Whether K and V of one head and one block are a contiguous row, and all blocks a multiple of it apart."""
    num_kv_heads, block_size, head_dim = kv_layer.shape[2:]
    row_size = block_size * head_dim
    return kv_layer.stride()[1:] == (num_kv_heads * row_size, row_size, head_dim, 1) and (
        kv_layer.stride(0) % row_size == 0
    )


def _make_plan(batch: RaggedBatch, q: Tensor, kv_layer: Tensor, window: int) -> _Plan:
    library = native.library() if native.supports_heads(q, kv_layer) else None
    if library is not None and batch.max_query_len == 1 and batch.num_seqs == len(q):  # as in most steps
        queries = native.DecodeQueries(torch.arange(len(q)), batch.seq_lens, batch.block_tables)
        return _Plan(queries, [], [], torch.empty(0, 0), covers_all=bool((batch.seq_lens > 0).all()))
    num_kv_heads, block_size, head_dim = kv_layer.shape[2:]
    group_size = q.shape[1] // num_kv_heads
    block_bytes = 2 * num_kv_heads * block_size * head_dim * kv_layer.element_size()
    spans = list(_spans(batch, block_size, window))
    decodes = [span for span in spans if span.end - span.begin == 1]
    chunks = [span for span in spans if span.end - span.begin > 1]
    plan = _Plan(
        queries=None,
        groups=[],
        chunks=[(span, _kv_rows([span], span.num_blocks, batch, kv_layer)) for span in chunks],
        staircase=_staircase(
            rows=min(QUERY_TILE, batch.max_query_len),
            width=max((span.stop - span.start for span in chunks), default=0),
            window=window,
            dtype=q.dtype,
        ),
        covers_all=sum(span.end - span.begin for span in spans) == len(q),
    )
    if decodes and library is not None:
        seqs, rows = torch.tensor([(span.seq, span.begin) for span in decodes]).T.contiguous()
        plan.queries = native.DecodeQueries(rows, batch.seq_lens[seqs], batch.block_tables[seqs])
    elif decodes:
        # Padding changes the order of sums, which bfloat16 may round to other tokens than a sequence gets alone.
        groups = _of_similar_length(decodes, block_bytes) if q.dtype == torch.float32 else ([span] for span in decodes)
        for spans in groups:
            plan.groups.append(_make_group(spans, batch, kv_layer, group_size, q.dtype))
    return plan


def _spans(batch: RaggedBatch, block_size: int, window: int) -> Iterator[_Span]:
    seq_lens = batch.seq_lens.tolist()
    for s, (begin, end) in enumerate(pairwise(batch.query_start.tolist())):
        if begin == end or seq_lens[s] == 0:
            continue
        first_key = max(0, seq_lens[s] - (end - begin) - window + 1) if window else 0
        first_block = first_key // block_size
        yield _Span(
            seq=s,
            begin=begin,
            end=end,
            first_block=first_block,
            num_blocks=cdiv(seq_lens[s], block_size) - first_block,
            start=first_key - first_block * block_size,
            stop=seq_lens[s] - first_block * block_size,
        )


def _of_similar_length(spans: list[_Span], block_bytes: int) -> Iterator[list[_Span]]:
    """Groups to attend to in one call each: little padding to the longest, and not more than the caches hold."""
    group: list[_Span] = []
    padding = 0  # blocks
    for span in sorted(spans, key=lambda span: -span.num_blocks):
        if group:
            longest = group[0].num_blocks
            padding += longest - span.num_blocks
            size_bytes = longest * (len(group) + 1) * block_bytes
            if size_bytes > GROUP_BYTES or padding * block_bytes > CALL_BYTES + PADDING * size_bytes:
                yield group
                group, padding = [], 0
        group.append(span)
    if group:
        yield group


def _make_group(
    spans: list[_Span], batch: RaggedBatch, kv_layer: Tensor, group_size: int, dtype: torch.dtype
) -> _Group:
    num_kv_heads, block_size = kv_layer.shape[2:4]
    num_blocks = spans[0].num_blocks
    starts = torch.tensor([span.start for span in spans])
    stops = torch.tensor([span.stop for span in spans])
    start, stop = int(starts.min()), int(stops.max())
    keys = torch.arange(num_blocks * block_size)
    seen = (keys >= starts.unsqueeze(1)) & (keys < stops.unsqueeze(1))  # [num_seqs, keys]
    dead = mask = None
    if not bool(seen[:, start:stop].all()):
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)[:, None, None, start:stop]
        mask = mask.expand(-1, 1, group_size, -1)
        # Rows of head_dim are in the order of `_kv_rows`: [num_seqs, 2 * num_kv_heads, keys]
        dead = (~seen).unsqueeze(1).expand(-1, 2 * num_kv_heads, -1).flatten().nonzero().squeeze(1)
    return _Group(
        q_rows=torch.tensor([span.begin for span in spans]),
        kv_rows=_kv_rows(spans, num_blocks, batch, kv_layer),
        num_blocks=num_blocks,
        start=start,
        stop=stop,
        dead=dead,
        mask=mask,
    )


def _kv_rows(spans: list[_Span], num_blocks: int, batch: RaggedBatch, kv_layer: Tensor) -> Tensor:
    """Which rows of block_size * head_dim to gather for [num_seqs, 2, num_kv_heads, num_blocks], flat int64.

    A row's number counts from the layer's first element. In this order the gathered rows of one head are neighbours:
    contiguous K or V of num_blocks * block_size tokens. A sequence with fewer blocks gets what follows them in its
    table, as a rule the null block; `_Group.dead` makes it harmless.
    """
    num_kv_heads, block_size, head_dim = kv_layer.shape[2:]
    seqs = torch.tensor([span.seq for span in spans]).unsqueeze(1)
    firsts = torch.tensor([span.first_block for span in spans]).unsqueeze(1)
    columns = (firsts + torch.arange(num_blocks)).clamp_(max=batch.block_tables.shape[1] - 1)
    block_ids = batch.block_tables[seqs, columns].long()  # [num_seqs, num_blocks]
    block_rows = block_ids.unsqueeze(1) * (kv_layer.stride(0) // (block_size * head_dim))
    return (block_rows + torch.arange(2 * num_kv_heads).unsqueeze(1)).flatten()


def _staircase(rows: int, width: int, window: int, dtype: torch.dtype) -> Tensor:
    """The causal mask of every tile, as one: [rows, width], 0 where seen and -inf where not.

    The lower right corner is a tile's last query looking at its own key. A tile of `r` queries over `k` keys has the
    last r rows and the last k columns of

        0 0 0 0 0 . . .        . = -inf; with a window, the far left is -inf too
        0 0 0 0 0 0 . .
        0 0 0 0 0 0 0 .
        0 0 0 0 0 0 0 0
    """
    queries = torch.arange(width - rows, width)
    seen = reference.visible_keys(queries, torch.arange(width), window)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)


def _tiles(span: _Span, staircase: Tensor, window: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """(queries, keys, mask) of each tile; keys count from the first that the span sees."""
    num_queries, num_keys = span.end - span.begin, span.stop - span.start
    rows, width = staircase.shape
    for begin in range(0, num_queries, QUERY_TILE):
        end = min(begin + QUERY_TILE, num_queries)
        last = num_keys - num_queries + end
        first = max(0, num_keys - num_queries + begin - window + 1) if window else 0
        mask = staircase[rows - (end - begin) :, width - (last - first) :]
        yield slice(begin, end), slice(first, last), mask[None, None]


# -- before sampling: rules for some tokens, and what the model thought -----------------------------------------------


def apply_token_bitmask(logits: Tensor, mask_index: Tensor, bitmask: Tensor) -> None:
    """See `reference.apply_token_bitmask`; in numpy, which has an instruction's worth of code for bits."""
    octets = bitmask.numpy().view(np.uint8)
    forbidden = np.unpackbits(~octets, axis=1, count=logits.shape[1], bitorder="little").view(np.bool_)
    for row, mask in zip(logits, mask_index.tolist(), strict=True):
        if mask >= 0:
            row.masked_fill_(torch.from_numpy(forbidden[mask]), -torch.inf)


def apply_logits_processors(logits: Tensor, params: LogitsProcessorParams) -> None:
    """See `reference.apply_logits_processors`. Penalties are computed only for tokens that occurred before."""
    reference.apply_logits_processors(logits, replace(params, repetition=None))
    if params.repetition is not None:
        _apply_penalties(logits, params)


def _apply_penalties(logits: Tensor, params: LogitsProcessorParams) -> None:
    """By sorting (row, token) of all that came before; in numpy, which sorts and looks up ten times as fast."""
    history, repetition, presence, frequency = params.history, params.repetition, params.presence, params.frequency
    assert history is not None and repetition is not None and presence is not None and frequency is not None
    vocab_size, table = logits.shape[1], logits.numpy()  # the same memory
    token_ids = history.token_ids.numpy()  # [num, max_len]
    positions = np.arange(token_ids.shape[1])
    known = positions < history.num_tokens.numpy()[:, None]
    output = positions >= history.num_prompt.numpy()[:, None]
    first_cell = np.arange(len(token_ids), dtype=np.int64)[:, None] * vocab_size
    keys = ((token_ids + first_cell) * 2 + output)[known]  # [num_known]: which logit, and 1 where it is of the output
    keys.sort()
    cells = keys >> 1
    starts = np.flatnonzero(np.diff(cells, prepend=-1))
    num_output = np.add.reduceat(keys & 1, starts).astype(table.dtype)  # [num_cells]
    of, token = np.divmod(cells[starts], vocab_size)
    row = history.rows.numpy()[of]
    chosen, penalty = table[row, token], repetition.numpy().astype(table.dtype)[of]
    chosen = np.where(chosen > 0, chosen / penalty, chosen * penalty)
    chosen -= frequency.numpy().astype(table.dtype)[of] * num_output
    chosen -= presence.numpy().astype(table.dtype)[of] * (num_output > 0)
    table[row, token] = chosen


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.token_logprobs`. Nothing is sorted but what is at least as likely as the last of the top."""
    if num_top > CANDIDATES or num_top > logits.shape[1]:
        return reference.token_logprobs(logits, token_ids, num_top)
    wide = logits.to(reference.accumulation_dtype(logits.dtype))
    chosen = wide.gather(1, token_ids.unsqueeze(1))
    last = wide.topk(num_top, sorted=False).values.amin(1) if num_top else chosen
    ranks, top_ids = [], []
    for row, own, bound in zip(wide.numpy(), chosen.numpy(), last.numpy(), strict=True):  # numpy counts faster
        ranks.append(np.count_nonzero(row > own) + 1)
        if num_top:
            ids = np.flatnonzero(row >= bound)
            top_ids.append(ids[np.argsort(-row[ids], kind="stable")[:num_top]])
    best = torch.from_numpy(np.array(top_ids, dtype=np.int64).reshape(len(wide), num_top))
    log_total = wide.logsumexp(1, keepdim=True)
    return (chosen - log_total).squeeze(1), torch.tensor(ranks), best, wide.gather(1, best) - log_total


# -- sampling ---------------------------------------------------------------------------------------------------------

CANDIDATES = 256
"""Tokens looked at first where filters apply. They suffice nearly always, and sorting a vocabulary costs 20 times."""


def sample(logits: Tensor, params: SamplingTensors) -> Tensor:
    """See `reference.sample`. A row's path depends on that row alone: greedy rows are only searched, filtered rows are
    drawn among their likeliest tokens, and the vocabulary is sorted only for a row that keeps more than these.
    """
    if params.all_greedy:
        return argmax(logits)
    warm = params.temperature > 0
    filtered = warm & ((params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0))
    tokens = torch.empty(len(logits), dtype=torch.int64)
    for choose, choice in ((_sample_greedy, ~warm), (_sample_all, warm & ~filtered), (_sample_filtered, filtered)):
        rows = choice.nonzero().squeeze(1)
        if len(rows) == len(logits):
            return choose(logits, params)
        if len(rows):
            tokens[rows] = choose(logits[rows], params.rows(rows))
    return tokens


def _sample_greedy(logits: Tensor, params: SamplingTensors) -> Tensor:
    return argmax(logits)


def _sample_all(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Rows with a temperature and no filter. In torch one after the other: a row's integers stay in the caches."""
    keys = noise_keys(params.seed, params.sample_index, params.position)
    if (library := _native_for(logits)) is not None:
        return library.sample(logits, params.temperature.float().contiguous(), keys.contiguous())
    wide = reference.accumulation_dtype(logits.dtype)
    counters = torch.arange(1, logits.shape[1] + 1).mul_(GOLDEN)
    bits, scratch = torch.empty_like(counters), torch.empty_like(counters)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    for row, key in enumerate(keys):
        noise = _exponential_noise(key, counters, bits, scratch)
        scores = logits[row].to(wide) / params.temperature[row]
        tokens[row] = argmax(scores.sub_(noise.log_()))
    return tokens


def _exponential_noise(key: Tensor, counters: Tensor, bits: Tensor, scratch: Tensor) -> Tensor:
    """`reference.exponential_noise` of one key, in place; counters are (token_id + 1) * GOLDEN."""
    torch.add(counters, key, out=bits)
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        torch.bitwise_right_shift(bits, shift, out=scratch)
        bits.bitwise_xor_(scratch.bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    upper = bits.bitwise_right_shift_(32).bitwise_and_((1 << 32) - 1)
    uniform = upper.float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def _sample_filtered(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Rows with a temperature and a filter."""
    if logits.shape[1] <= CANDIDATES:
        return reference.sample(logits, params)
    scaled = logits.to(reference.accumulation_dtype(logits.dtype)) / params.temperature.unsqueeze(1)
    token_ids = scaled.topk(CANDIDATES, sorted=False).indices.sort().values  # so that equals stay in the order of ids
    likely, order = scaled.gather(1, token_ids).sort(descending=True, stable=True)
    token_ids = token_ids.gather(1, order)
    keep = reference.keep_mask(
        likely, params.top_k, params.top_p, params.min_p, log_total=scaled.logsumexp(1, keepdim=True)
    )
    keys = noise_keys(params.seed, params.sample_index, params.position)
    noise = reference.exponential_noise(keys.unsqueeze(1), token_ids)
    scores = (likely - noise.log_()).masked_fill_(~keep, -math.inf)
    tokens = token_ids.gather(1, scores.argmax(1, keepdim=True)).squeeze(1)
    # No other token is likelier than the last candidate. Where that one is out, and not only as the loser among equals,
    # the others are out too; and where it is less likely than the last of top_k, top_k has left no token unseen.
    last = likely[:, -1]
    last_of_top_k = likely.gather(1, params.top_k.long().clamp(1, CANDIDATES).sub_(1).unsqueeze(1)).squeeze(1)
    sure = (last < likely.masked_fill(~keep, math.inf).amin(1)) & ((params.top_k <= 0) | (last < last_of_top_k))
    sure |= last == -math.inf  # rules left fewer tokens than were looked at
    if not bool(sure.all()):
        rows = (~sure).nonzero().squeeze(1)
        tokens[rows] = reference.sample(logits[rows], params.rows(rows))
    return tokens


def argmax(logits: Tensor) -> Tensor:
    """[...] int64, the first of equals. numpy's search runs at memory speed, torch's at a tenth of it."""
    wide = logits.to(reference.accumulation_dtype(logits.dtype))
    return torch.as_tensor(wide.numpy(force=True).argmax(-1))


def finite_rows(logits: Tensor) -> Tensor:
    """See `reference.finite_rows`. A sum says that all is well at once; only where it does not is each number looked at
    (a sum of finite numbers may overflow)."""
    fine = logits.sum(-1).isfinite()
    if not bool(fine.all()):
        doubtful = (~fine).nonzero().squeeze(1)
        fine[doubtful] = reference.finite_rows(logits[doubtful])
    return fine
