"""Small decode steps without Python between their operations: recorded once, replayed from then on.

A step of a few tokens is some hundred operations of microseconds each, and Python, its caches flushed by the weights
that stream past, takes nearly as long to call one as it takes to run. So the first step of each size is recorded, and
those after it only put their inputs where the first one's were: what a CUDA graph is to a GPU. A step can be replayed
if all that it computes is computed by `kernels.native`; whether it is, is tried out, and else nothing changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo.kernels.cpu import native
from octavo.kernels.cpu.packed_linear import SMALL_BATCH_ROWS
from octavo.kernels.metadata import RaggedBatch

BLOCKS_AHEAD = 64
"""Block tables are recorded with room for so many blocks, or twice as many and so on: the next step's are longer."""


class Model(Protocol):
    def forward(self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None) -> Tensor: ...


@dataclass(slots=True)
class Recorded:
    """A step's inputs, and its logits, where the recording reads and writes them."""

    token_ids: Tensor
    batch: RaggedBatch
    recording: native.RecordedCalls
    logits: Tensor

    def replay(self, token_ids: Tensor, batch: RaggedBatch) -> Tensor:
        own = self.batch
        self.token_ids.copy_(token_ids)
        own.positions.copy_(batch.positions)
        own.slot_mapping.copy_(batch.slot_mapping)
        own.seq_lens.copy_(batch.seq_lens)
        own.block_tables[:, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        self.recording.replay()
        return self.logits


class RecordedModel:
    """A model whose small decode steps are replayed.

    The logits of such a step are overwritten by the next one.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._recorded: dict[tuple[int, int], Recorded] = {}  # by tokens, and room for blocks
        self._most = SMALL_BATCH_ROWS  # tokens of a step that may be replayed; fewer when one could not be

    def forward(self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None) -> Tensor:
        """See `models.decoder.Decoder.forward`; kv is the same at every call."""
        num_tokens = len(token_ids)
        is_small = batch.max_query_len == 1 and num_tokens == batch.num_seqs <= self._most
        library = native.library() if is_small else None
        if library is None or not (logits_rows is None or logits_rows.tolist() == list(range(num_tokens))):
            return self.model.forward(token_ids, batch, kv, logits_rows)
        room = BLOCKS_AHEAD
        while room < batch.block_tables.shape[1]:
            room *= 2
        key = num_tokens, room
        recorded = self._recorded.get(key)
        if recorded is None:
            recorded = self._record(library, token_ids, batch, kv, room)
            if not self._is_faithful(recorded, token_ids, batch, kv):
                self._most = num_tokens - 1
                return self.model.forward(token_ids, batch, kv, logits_rows)
            self._recorded[key] = recorded
        return recorded.replay(token_ids, batch)

    def _record(
        self, library: native.Library, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, room: int
    ) -> Recorded:
        """Compute the step twice, which leaves what once leaves: the first time for all that is worked out but once."""
        tables = batch.block_tables.new_zeros(batch.num_seqs, room)
        tables[:, : batch.block_tables.shape[1]] = batch.block_tables
        own = RaggedBatch(
            positions=batch.positions.clone(),
            slot_mapping=batch.slot_mapping.clone(),
            query_start=batch.query_start.clone(),
            seq_lens=batch.seq_lens.clone(),
            block_tables=tables,
            max_query_len=1,
            max_seq_len=batch.max_seq_len,
        )
        own_ids = token_ids.clone()
        self.model.forward(own_ids, own, kv, None)
        with library.record() as recording:
            logits = self.model.forward(own_ids, own, kv, None)
        return Recorded(own_ids, own, recording, logits)

    def _is_faithful(self, recorded: Recorded, token_ids: Tensor, batch: RaggedBatch, kv: Tensor) -> bool:
        """Whether a replay gives what the model gives for other inputs, to the last bit: other tokens, at position 0 of
        the null block. Whatever depended on the inputs and was not recorded would be that of the first ones."""
        other = RaggedBatch(
            positions=torch.zeros_like(batch.positions),
            slot_mapping=torch.zeros_like(batch.slot_mapping),
            query_start=batch.query_start,
            seq_lens=torch.ones_like(batch.seq_lens),
            block_tables=torch.zeros_like(batch.block_tables),
            max_query_len=1,
            max_seq_len=1,
        )
        other_ids = (token_ids + 1) % recorded.logits.shape[1]
        expected = self.model.forward(other_ids, other, kv, None)
        return torch.equal(recorded.replay(other_ids, other), expected)
