"""A draft model: a smaller model guesses the next tokens of all rows, before the target checks them in one pass.

Its K and V are further layers of the same blocks: a pool of its own, addressed by the same block ids and tables. So
whatever happens to a block (prefix cache, fork, copy, swap) happens to both. It computes every position that the target
computes, also where it drafts nothing: a hole in its K and V would spoil all later drafts of the sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.row_state import DecodeInputs, RowState
from octavo.runner.passes.graph_cache import GraphCache
from octavo.runner.passes.graphs import Model
from octavo.runner.platform import Platform


class Draft(NamedTuple):
    """A draft model with its KV pool and its part of the swap space, as those of `ModelRunner`."""

    model: Model
    kv: Tensor
    host_kv: Tensor


class DraftModel:
    """Runs a draft model over the rows. Nothing here reads tensor values, so that passes can be captured."""

    def __init__(self, draft: Draft, platform: Platform, target: DecodeInputs, num_rows: int, *, graphs: bool) -> None:
        """target: the inputs of its passes; num_rows: most rows of a pass; graphs: capture and replay"""
        self.draft = draft
        self._ops, self._block_size = platform.ops, draft.kv.shape[4]
        lines = torch.zeros(3, num_rows, dtype=torch.int64, device=draft.kv.device)
        max_blocks = target.batch.block_tables.shape[1]
        self.inputs = DecodeInputs.allocate(
            target.step_counter, *lines, max_blocks=max_blocks, block_size=self._block_size
        )
        self.graphs = GraphCache(platform.make_graphs(self.inputs) if graphs else None, [])

    def prefill(self, token_ids: Tensor, batch: RaggedBatch) -> None:
        """Write K and V of a prefill pass, without logits."""
        self.draft.model.forward(token_ids, batch, self.draft.kv, token_ids[:0])

    def propose(self, state: RowState, rows: Tensor, ends: Tensor, num_drafts: int) -> None:
        """Write `num_drafts` drafts of each row, and K and V up to the last one.

        rows, ends  [num_slices] int64, each row once, but for the null row. Drafts at `ends` or later, which no line
                    reads, are of any value; so are those of rows that are done

        A draft has the noise of the token that the target will sample in its place: where both models agree, it is
        right at any temperature.
        """
        for depth in range(num_drafts + 1):
            inputs = self.inputs.first(len(rows))
            inputs.rows.copy_(rows)
            inputs.ends.copy_(ends)
            inputs.depths.fill_(depth)
            self._ops.prepare_decode_inputs(state, inputs, self._block_size)  # a line without a draft is inactive
            logits = self.graphs.decode_logits(self.draft.model, inputs, self.draft.kv)
            if depth < num_drafts:
                state.drafts[:, depth].index_copy_(0, rows, self._ops.sample_checked(logits, inputs.sampling))
