"""Recorded decode steps for the CPU: what CUDA graphs are for a GPU.

A step of a few tokens is some hundred operations of microseconds each. Streaming the weights flushes Python's caches,
so calling an operation takes nearly as long as running it. The first step of each size is therefore recorded. Later
steps copy their inputs into the recorded buffers and replay it without Python. A step can be replayed if
`kernels.cpu.native` computes all of it. A trial replay checks this; if it fails, the step runs unrecorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo.kernels.cpu import native
from octavo.kernels.cpu.packed_linear import SMALL_BATCH_ROWS
from octavo.kernels.metadata import RaggedBatch

MIN_TABLE_WIDTH = 64
"""Recorded block tables have room for this many blocks, doubled until the step fits: sequences grow after it."""


class Model(Protocol):
    def forward(self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None) -> Tensor: ...


@dataclass(slots=True)
class RecordedGraph:
    """A recorded step: the buffers of its inputs and of its logits."""

    token_ids: Tensor
    batch: RaggedBatch
    recording: native.RecordedCalls
    logits: Tensor

    def replay(self, token_ids: Tensor, batch: RaggedBatch) -> Tensor:
        buffers = self.batch
        self.token_ids.copy_(token_ids)
        buffers.positions.copy_(batch.positions)
        buffers.slot_mapping.copy_(batch.slot_mapping)
        buffers.seq_lens.copy_(batch.seq_lens)
        buffers.block_tables[:, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        self.recording.replay()
        return self.logits


class RecordedModel:
    """A model that records and replays small decode steps. The next such step overwrites the logits of the last one."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._graphs: dict[tuple[int, int], RecordedGraph] = {}  # by number of tokens and width of the block tables
        self._max_tokens = SMALL_BATCH_ROWS  # of a step that may be replayed; lowered when a recording fails the check

    def forward(self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None) -> Tensor:
        """See `models.decoder.Decoder.forward`; kv is the same at every call."""
        num_tokens = len(token_ids)
        is_small = batch.max_query_len == 1 and num_tokens == batch.num_seqs <= self._max_tokens
        library = native.library() if is_small else None
        if library is None or not (logits_rows is None or logits_rows.tolist() == list(range(num_tokens))):
            return self.model.forward(token_ids, batch, kv, logits_rows)
        width = MIN_TABLE_WIDTH
        while width < batch.block_tables.shape[1]:
            width *= 2
        key = num_tokens, width
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._record(library, token_ids, batch, kv, width)
            if not self._replays_exactly(graph, token_ids, batch, kv):
                self._max_tokens = num_tokens - 1
                return self.model.forward(token_ids, batch, kv, logits_rows)
            self._graphs[key] = graph
        return graph.replay(token_ids, batch)

    def _record(
        self, library: native.Library, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, width: int
    ) -> RecordedGraph:
        """Compute the step twice and record the second run. The first one does the work that happens only once."""
        tables = batch.block_tables.new_zeros(batch.num_seqs, width)
        tables[:, : batch.block_tables.shape[1]] = batch.block_tables
        buffers = RaggedBatch(
            positions=batch.positions.clone(),
            slot_mapping=batch.slot_mapping.clone(),
            query_start=batch.query_start.clone(),
            seq_lens=batch.seq_lens.clone(),
            block_tables=tables,
            max_query_len=1,
            max_seq_len=batch.max_seq_len,
        )
        token_buffer = token_ids.clone()
        self.model.forward(token_buffer, buffers, kv, None)
        with library.record() as recording:
            logits = self.model.forward(token_buffer, buffers, kv, None)
        return RecordedGraph(token_buffer, buffers, recording, logits)

    def _replays_exactly(self, graph: RecordedGraph, token_ids: Tensor, batch: RaggedBatch, kv: Tensor) -> bool:
        """True if a replay with other inputs gives the bits that the model gives.

        The inputs are other tokens at position 0 of the null block. Values that depend on the inputs but were not
        recorded would still be those of the recorded step.
        """
        other = RaggedBatch(
            positions=torch.zeros_like(batch.positions),
            slot_mapping=torch.zeros_like(batch.slot_mapping),
            query_start=batch.query_start,
            seq_lens=torch.ones_like(batch.seq_lens),
            block_tables=torch.zeros_like(batch.block_tables),
            max_query_len=1,
            max_seq_len=1,
        )
        other_ids = (token_ids + 1) % graph.logits.shape[1]
        expected = self.model.forward(other_ids, other, kv, None)
        return torch.equal(graph.replay(other_ids, other), expected)
