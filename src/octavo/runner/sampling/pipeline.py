"""From lines of logits to tokens, on the device: mask, process, sample, log-probabilities, commit."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.metadata import SamplingTensors
from octavo.kernels.row_state import DraftLines
from octavo.models.linear import VocabSlice
from octavo.runner.device_state import DeviceState
from octavo.runner.output_buffers import OutputBuffers
from octavo.runner.passes.pass_shape import PassShape
from octavo.runner.sampling.grammar_bitmask import BitmaskBuffer


class Lines(NamedTuple):
    """Lines of logits of a pass, which may be computed already or only queued. One for each sample:

    logits    [num_samples or more, vocab_size] float32; of a sliced shape, this rank's columns
    rows      [num_samples or more] int64, on the device like all others
    sampling  likewise
    indices   [num_samples] int64, index among several samples of a row, -1 for a token that continues its row. None:
              all tokens continue their rows
    drafts    which of them compute drafts; None: none
    """

    logits: Tensor
    rows: Tensor
    sampling: SamplingTensors
    indices: Tensor | None = None
    drafts: DraftLines | None = None


class Pipeline:
    """Samples lines and commits their tokens to the rows and to the ring. Nothing here reads tensor values.

    vocab_slice  see `ModelRunner`
    """

    def __init__(
        self,
        state: DeviceState,
        bitmask: BitmaskBuffer,
        ring: OutputBuffers,
        step_counter: Tensor,
        vocab_slice: VocabSlice | None,
    ) -> None:
        self.bitmask, self.vocab_slice = bitmask, vocab_slice
        self._rows, self._processors = state.rows, state.processors
        self._ops, self._ring, self._step_counter = state.processors.ops, ring, step_counter

    def sample(self, lines: Lines, shape: PassShape) -> None:
        """Sample a token from each line of logits, for its row and for the host."""
        masked = shape.part != "pass"
        assert not (masked and shape.logprobs), "a bitmask changes the logits in place"
        rows, sampling = lines.rows, lines.sampling
        logits = lines.logits[: len(rows)]
        bitmask = (self.bitmask.mask_index[: len(rows)], self.bitmask.bitmask) if masked else None
        if shape.logits_processors:
            tokens = self._processors.sample(
                logits, rows, sampling, bitmask, keep_logits=shape.logprobs, drafts=lines.drafts
            )
        elif shape.sliced and (own := self.vocab_slice) is not None:
            if shape.filters:
                tops = own.all_gather(self._ops.slice_tops(logits, sampling))
                logits = self._ops.keep_slice(logits, sampling, tops, own.rank)
            tokens = self._ops.decide(own.all_gather(self._ops.race(logits, sampling, own.first)))
        else:
            tokens = self._ops.sample_checked(logits, sampling, bitmask)
        if lines.drafts is not None:
            tokens = self._ops.reject_drafts(self._rows, rows, tokens, lines.drafts)
        if shape.logprobs:
            self._ops.write_logprobs(self._rows, rows, logits, tokens, self._ring.logprobs, self._step_counter)
        counted = tokens if shape.logits_processors else None
        if counted is not None and lines.indices is not None:
            counted = torch.where((lines.indices < 0) & ~self._rows.done[rows], tokens, -1)
        self.commit(rows, tokens, sampling.position, counted)

    def commit(self, rows: Tensor, tokens: Tensor, positions: Tensor, counted: Tensor | None) -> None:
        """End a column: count its tokens, and write them to rows and ring. counted: None: no row counts its tokens"""
        if counted is not None:
            self._processors.update_token_counts(rows, positions, counted)
        self._ops.commit_sampled_tokens(self._rows, rows, tokens, positions, self._ring.tokens, self._step_counter)
