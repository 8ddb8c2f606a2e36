"""Paged attention on the CPU.

`native.cpp` computes decode queries, and chunks in bfloat16, where their blocks are. Other chunks, or all queries
without a compiler, gather K and V once, contiguously, for as many sequences as fit the second-level cache, and use
torch's flash attention. The plan of a batch is computed once for all layers (`RaggedBatch.derived`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, overload

import torch
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels import reference
from octavo.kernels.cpu import native
from octavo.kernels.metadata import RaggedBatch

GROUP_BYTES = 8 << 20
"""Maximum bytes of K and V gathered for one call: more would leave the caches before they are read."""

CALL_BYTES = 256 << 10
"""Bytes gathered in the time of one more call: this much padding is cheaper than another call."""

PADDING = 0.25
"""Maximum share of padding in a group's K and V, in addition to CALL_BYTES."""

QUERY_TILE = 128
"""Queries of one call: with fewer, calls cost more than the masked keys that causal tiles skip."""


@dataclass(slots=True)
class _Span:
    """One sequence of a batch: query rows [begin, end).

    start, stop    range of the keys that its queries see, from the first slot of its first gathered block
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
    """Decode queries of sequences of similar length, computed in one call.

    q_rows       [num_seqs] int64, their rows of q
    kv_rows      see `_kv_rows`
    num_blocks   of the longest sequence; the others are padded
    start, stop  range of gathered keys that any of them sees
    unused       gathered rows of a token that no sequence sees; they are set to 0 because they may contain NaN
    mask         [num_seqs, 1, group, stop - start], -inf for keys that a sequence does not see; None: no mask
    """

    q_rows: Tensor
    kv_rows: Tensor
    num_blocks: int
    start: int
    stop: int
    unused: Tensor | None
    mask: Tensor | None


@dataclass(slots=True)
class _Plan:
    """The calls that compute attention of a batch, the same for every layer.

    native       for `native.cpp`: decode queries, and in bfloat16 sequences with several
    groups       decode queries in groups, without it
    chunks       other sequences with several queries, each with its `_kv_rows`
    causal_mask  see `_causal_mask`
    covers_all   no row of q is padding
    """

    native: list[native.Queries]
    groups: list[_Group]
    chunks: list[tuple[_Span, Tensor]]
    causal_mask: Tensor
    covers_all: bool


@overload
def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int = 0,
    return_lse: Literal[False] = False,
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor: ...
@overload
def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int = 0,
    return_lse: Literal[True],
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int = 0,
    return_lse: bool,
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int = 0,
    return_lse: bool = False,
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `reference.paged_attention`.

    Decode queries, and chunks in bfloat16, run in `native.cpp`. Without it, decode queries run in groups with gathered
    K and V. There, the query heads that share a K/V head are rows of one matrix, so K and V are read once instead of
    once a query head. Other chunks run one by one, in tiles of queries that skip later keys.
    """
    q = q.contiguous()
    layout = q.shape, q.dtype, kv_layer.shape, kv_layer.stride(), kv_layer.dtype
    key = ("cpu.paged_attention", batch.block_tables.data_ptr(), *layout, window)
    plan: _Plan | None = batch.derived.get(key)
    if plan is None:
        is_native = native.supports_heads(q, kv_layer) and _is_decode(q, batch) and native.library() is not None
        if not is_native and (kv_layer.dtype not in (q.dtype, torch.int8) or not _has_uniform_rows(kv_layer)):
            return reference.paged_attention(
                q,
                kv_layer,
                batch,
                scale=scale,
                window=window,
                return_lse=return_lse,
                kv_scales=kv_scales,
                sinks=sinks,
            )
        plan = batch.derived[key] = _make_plan(batch, q, kv_layer, window)
    out = torch.empty_like(q) if plan.covers_all else torch.zeros_like(q)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=reference.accumulation_dtype(q.dtype)) if return_lse else None
    if plan.native and (library := native.library()) is not None:
        for part in plan.native:
            library.attention(q, kv_layer, part, out, lse, scale=scale, window=window, sinks=sinks)
    if plan.groups or plan.chunks:
        _attend_gathered(plan, q, kv_layer, out, lse, scale, window, sinks)
    return out if lse is None else (out, lse)


def _attend_gathered(
    plan: _Plan,
    q: Tensor,
    kv_layer: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    window: int,
    sinks: Tensor | None,
) -> None:
    """Compute the plan's groups and chunks, writing their rows of `out` and `lse`."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_layer.shape[2:4]
    group_size = num_heads // num_kv_heads
    # The layer as rows of one block and one head, K or V: [rows, block_size * width]. The rows of other layers lie
    # between the blocks; no index points to them.
    width = kv_layer.shape[4]  # head_dim, and the scale of an int8 row
    row_size = block_size * width
    num_rows = (kv_layer.shape[0] - 1) * (kv_layer.stride(0) // row_size) + 2 * num_kv_heads
    rows = kv_layer.as_strided((num_rows, row_size), (row_size, 1))
    q_heads = q.view(num_tokens, num_kv_heads, group_size, head_dim)
    sinks = None if sinks is None else sinks.view(num_kv_heads, group_size)

    for group in plan.groups:
        gathered = rows.index_select(0, group.kv_rows)
        if group.unused is not None:
            gathered.view(-1, width).index_fill_(0, group.unused, 0)
        kv = gathered.view(-1, 2, num_kv_heads, group.num_blocks * block_size, width)
        kv = _dequantised(kv[:, :, :, group.start : group.stop], q.dtype)
        queries = q_heads.index_select(0, group.q_rows)  # [num_seqs, num_kv_heads, group, head_dim]
        result, result_lse = _flash(queries, kv[:, 0], kv[:, 1], scale, group.mask, sinks)
        out.index_copy_(0, group.q_rows, result.flatten(1, 2))
        if lse is not None:
            lse.index_copy_(0, group.q_rows, result_lse.flatten(1, 2))

    for span, kv_rows in plan.chunks:
        # Each K/V head is expanded to its group of query heads by a stride of 0, without a copy.
        kv = rows.index_select(0, kv_rows).view(2, num_kv_heads, 1, -1, width)[:, :, :, span.start : span.stop]
        keys, values = _dequantised(kv, q.dtype).expand(-1, -1, group_size, -1, -1)
        queries = q_heads[span.begin : span.end].permute(1, 2, 0, 3)  # [num_kv_heads, group, query_len, head_dim]
        results = out[span.begin : span.end].view(-1, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
        of_queries = None if sinks is None else sinks.unsqueeze(-1)
        for tile, seen, mask in _tiles(span, plan.causal_mask, window):
            inputs = queries[:, :, tile], keys[:, :, seen], values[:, :, seen]
            result, result_lse = _flash(*inputs, scale, mask, of_queries)
            results[:, :, tile] = result
            if lse is not None:
                lse[span.begin : span.end][tile] = result_lse.flatten(0, 1).T


def _dequantised(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return reference.dequantize_rows(rows, dtype) if rows.dtype == torch.int8 else rows


def _flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The CPU kernel of `scaled_dot_product_attention`, which also returns the log-sum-exp.

    q, k, v  [batch, heads, queries or keys, head_dim]
    mask     [..., queries, keys], added to the scores
    sinks    in a shape that expands to [batch, heads, queries]
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attend(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    if sinks is None:
        return out, lse
    all_lse = lse.logaddexp(sinks)
    return out.mul_((lse - all_lse).exp_().unsqueeze(-1)), all_lse


def _has_uniform_rows(kv_layer: Tensor) -> bool:
    """True if K or V of one head and one block is a contiguous row, and block strides are multiples of a row."""
    num_kv_heads, block_size, width = kv_layer.shape[2:]
    row_size = block_size * width
    return kv_layer.stride()[1:] == (num_kv_heads * row_size, row_size, width, 1) and (
        kv_layer.stride(0) % row_size == 0
    )


def _is_decode(q: Tensor, batch: RaggedBatch) -> bool:
    """True if each sequence has one query, as in most steps."""
    return batch.max_query_len == 1 and batch.num_seqs == len(q)


def _make_plan(batch: RaggedBatch, q: Tensor, kv_layer: Tensor, window: int) -> _Plan:
    library = native.library() if native.supports_heads(q, kv_layer) else None
    if library is not None and _is_decode(q, batch):
        decodes = native.Queries(torch.arange(len(q)), batch.seq_lens, batch.block_tables)
        return _Plan([decodes], [], [], torch.empty(0, 0), covers_all=bool((batch.seq_lens > 0).all()))
    num_kv_heads, block_size = kv_layer.shape[2:4]
    group_size = q.shape[1] // num_kv_heads
    block_bytes = 2 * num_kv_heads * block_size * q.shape[2] * q.element_size()  # once gathered
    spans = list(_spans(batch, block_size, window))
    single = [span for span in spans if span.end - span.begin == 1]
    chunks = [span for span in spans if span.end - span.begin > 1]
    plan = _Plan([], [], [], torch.empty(0, 0), covers_all=sum(span.end - span.begin for span in spans) == len(q))
    if library is not None:
        plan.native += [_native_queries(single, batch, None)] if single else []
        single = []
        if chunks and q.dtype == torch.bfloat16 and q.shape[2] % 2 == 0:
            counts = torch.tensor([span.end - span.begin for span in chunks])
            plan.native.append(_native_queries(chunks, batch, counts))
            chunks = []
    if single:
        # Padding changes the order of sums; in bfloat16, the rounding could change a sequence's tokens.
        groups = _group_by_length(single, block_bytes) if q.dtype == torch.float32 else ([span] for span in single)
        for spans in groups:
            plan.groups.append(_make_group(spans, batch, kv_layer, group_size, q.dtype))
    if chunks:
        plan.chunks += [(span, _kv_rows([span], span.num_blocks, batch, kv_layer)) for span in chunks]
        rows, width = min(QUERY_TILE, batch.max_query_len), max(span.stop - span.start for span in chunks)
        plan.causal_mask = _causal_mask(rows, width, window, q.dtype)
    return plan


def _native_queries(spans: list[_Span], batch: RaggedBatch, counts: Tensor | None) -> native.Queries:
    seqs, rows = torch.tensor([(span.seq, span.begin) for span in spans]).T.contiguous()
    return native.Queries(rows, batch.seq_lens[seqs], batch.block_tables[seqs], counts)


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


def _group_by_length(spans: list[_Span], block_bytes: int) -> Iterator[list[_Span]]:
    """Group sequences for one call each, with little padding and within GROUP_BYTES."""
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
    unused = mask = None
    if not bool(seen[:, start:stop].all()):
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)[:, None, None, start:stop]
        mask = mask.expand(-1, 1, group_size, -1)
        # Rows of tokens are in the order of `_kv_rows`: [num_seqs, 2 * num_kv_heads, keys]
        unused = (~seen).unsqueeze(1).expand(-1, 2 * num_kv_heads, -1).flatten().nonzero().squeeze(1)
    return _Group(
        q_rows=torch.tensor([span.begin for span in spans]),
        kv_rows=_kv_rows(spans, num_blocks, batch, kv_layer),
        num_blocks=num_blocks,
        start=start,
        stop=stop,
        unused=unused,
        mask=mask,
    )


def _kv_rows(spans: list[_Span], num_blocks: int, batch: RaggedBatch, kv_layer: Tensor) -> Tensor:
    """Rows of block_size * width to gather for [num_seqs, 2, num_kv_heads, num_blocks] -> flat int64.

    Rows are numbered from the layer's first element. The order makes the rows of one head contiguous K or V of
    num_blocks * block_size tokens. A sequence with fewer blocks gets the next entries of its block table, usually the
    null block; `_Group.unused` sets these to 0.
    """
    num_kv_heads, block_size, width = kv_layer.shape[2:]
    seqs = torch.tensor([span.seq for span in spans]).unsqueeze(1)
    firsts = torch.tensor([span.first_block for span in spans]).unsqueeze(1)
    columns = (firsts + torch.arange(num_blocks)).clamp_(max=batch.block_tables.shape[1] - 1)
    block_ids = batch.block_tables[seqs, columns].long()  # [num_seqs, num_blocks]
    block_rows = block_ids.unsqueeze(1) * (kv_layer.stride(0) // (block_size * width))
    return (block_rows + torch.arange(2 * num_kv_heads).unsqueeze(1)).flatten()


def _causal_mask(rows: int, width: int, window: int, dtype: torch.dtype) -> Tensor:
    """The causal masks of all tiles as one: [rows, width], 0 for visible keys and -inf for others.

    The lower right corner is the last query of a tile and its own key. A tile of r queries over k keys uses the last r
    rows and the last k columns of

        0 0 0 0 0 . . .        . = -inf; with a sliding window, the far left is -inf, too
        0 0 0 0 0 0 . .
        0 0 0 0 0 0 0 .
        0 0 0 0 0 0 0 0
    """
    queries = torch.arange(width - rows, width)
    seen = reference.visible_keys(queries, torch.arange(width), window)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)


def _tiles(span: _Span, causal_mask: Tensor, window: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """(queries, keys, mask) of each tile of a chunk; keys are relative to the span's first visible key."""
    num_queries, num_keys = span.end - span.begin, span.stop - span.start
    rows, width = causal_mask.shape
    for begin in range(0, num_queries, QUERY_TILE):
        end = min(begin + QUERY_TILE, num_queries)
        last = num_keys - num_queries + end
        first = max(0, num_keys - num_queries + begin - window + 1) if window else 0
        mask = causal_mask[rows - (end - begin) :, width - (last - first) :]
        yield slice(begin, end), slice(first, last), mask[None, None]
