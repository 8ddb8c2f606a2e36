"""Drafts of a decode pass, in Triton: guesses from a row's own tokens, and which of them the samples confirm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.row_state import (
    FIRST_STOP_ID,
    MAX_DRAFTS,
    MAX_MATCH,
    MAX_STOP_IDS,
    NUM_COLUMNS,
    DraftLines,
    RowState,
)


def propose_drafts(state: RowState, rows: Tensor, ends: Tensor, num_drafts: int) -> None:
    """`reference.propose_drafts`."""
    _propose_drafts[(len(rows),)](
        state.history,
        state.num_computed,
        state.done,
        state.drafts,
        rows,
        ends,
        state.history.stride(0),
        rows.stride(0),
        num_drafts,
        TILE=1024,
        num_warps=4,
    )


def reject_drafts(state: RowState, rows: Tensor, tokens: Tensor, drafts: DraftLines) -> Tensor:
    """`reference.reject_drafts`."""
    kept = torch.empty_like(tokens)
    tile = 128
    _reject_drafts[(triton.cdiv(len(rows), tile),)](
        state.sampling_params,
        rows,
        tokens,
        *drafts,
        kept,
        len(rows),
        COLUMNS=NUM_COLUMNS,
        TILE=tile,
        num_warps=4,
    )
    return kept


@triton.jit(do_not_specialize=["history_stride", "row_stride", "num_drafts"])
def _propose_drafts(
    history, num_computed, done, drafts, rows, ends, history_stride, row_stride, num_drafts, TILE: tl.constexpr
):
    """Drafts of one row: the best match, as its length and then its place, is the largest of these numbers."""
    i = tl.program_id(0)
    row = tl.load(rows + i * row_stride)
    last = tl.load(num_computed + row)
    num = tl.minimum(tl.load(ends + i * row_stride) - 1 - last, num_drafts)
    num = tl.where(tl.load(done + row).to(tl.int32) != 0, 0, num)
    tokens = history + row * history_stride
    best = tl.zeros((), dtype=tl.int64)
    if num > 0:
        for first in range(0, last, TILE):
            position = first + tl.arange(0, TILE).to(tl.int64)
            matches = position < last
            length = tl.zeros((TILE,), dtype=tl.int64)
            for k in range(LONGEST):
                matches &= position >= k
                token = tl.load(tokens + position - k, mask=matches, other=-1)
                matches &= token == tl.load(tokens + last - k, mask=last >= k, other=-2)
                length += matches.to(tl.int64)
            best = tl.maximum(best, tl.max(tl.where(length > 0, length * SHIFT + position + 1, 0), 0))
    begin = best % SHIFT  # the position after the match; none is 0
    depth = tl.arange(0, PADDED_DRAFTS)
    is_draft = (depth < num) & (begin > 0)
    source = begin + depth % tl.maximum(last + 1 - begin, 1)
    draft = tl.load(tokens + source, mask=is_draft, other=-1)
    tl.store(drafts + row * DRAFT_ENTRIES + depth, draft.to(tl.int64), mask=depth < DRAFT_ENTRIES)


@triton.jit(do_not_specialize=["num_lines"])
def _reject_drafts(
    sampling_params, rows, tokens, depths, token_ids, kept, num_lines, COLUMNS: tl.constexpr, TILE: tl.constexpr
):
    """A tile of lines; each looks at all lines of its row before it."""
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = i < num_lines
    row = tl.load(rows + i, mask=mask, other=0)
    depth = tl.load(depths + i, mask=mask, other=0)
    token = tl.load(tokens + i, mask=mask, other=0)
    accepted = mask
    for k in range(DRAFT_ENTRIES):
        used = mask & (k < depth)
        before = tl.load(tokens + i - 1 - k, mask=used, other=0)
        is_end = before < 0
        for column in tl.static_range(NUM_STOP_COLUMNS):
            stop = tl.load(sampling_params + row * COLUMNS + FIRST_STOP_COLUMN + column, mask=used, other=-1)
            is_end |= stop == before
        differs = before != tl.load(token_ids + i - k, mask=used, other=0)
        accepted &= ~(used & (differs | is_end))
    tl.store(kept + i, tl.where(accepted, token, -3), mask=mask)


LONGEST = tl.constexpr(MAX_MATCH)
SHIFT = tl.constexpr(1 << 32)
DRAFT_ENTRIES = tl.constexpr(MAX_DRAFTS)
PADDED_DRAFTS = tl.constexpr(MAX_DRAFTS + 1)
FIRST_STOP_COLUMN = tl.constexpr(FIRST_STOP_ID)
NUM_STOP_COLUMNS = tl.constexpr(MAX_STOP_IDS)
