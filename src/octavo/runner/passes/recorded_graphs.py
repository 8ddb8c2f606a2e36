"""Recorded decode passes for the CPU: what CUDA graphs are for a GPU.

A pass of a few tokens is some hundred operations of microseconds each. Streaming the weights flushes Python's caches,
so calling an operation takes nearly as long as running it. The model's first pass of each size is therefore recorded,
and later ones replay it without Python. A pass can be replayed if `kernels.cpu.native` computes all of it. A trial
replay checks this; if it fails, passes run unrecorded. Most passes are recorded from the state of the rows to the
tokens: those without filters, logits processors, log-probabilities, drafts and bitmasks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from octavo.kernels.cpu import native
from octavo.kernels.cpu.packed_linear import SMALL_BATCH_ROWS
from octavo.kernels.cpu.torch_calls import TorchCalls
from octavo.kernels.row_state import DecodeInputs
from octavo.runner.passes.pass_shape import PassShape


class RecordedGraphs:
    """Recorded forward passes over the buffers of `DecodeInputs`. A replay overwrites the logits of the last one.

    inputs   the buffers that recorded work reads
    """

    whole_passes = False

    def __init__(self, inputs: DecodeInputs) -> None:
        batch = inputs.batch
        of_groups = (batch.slot_mapping, batch.block_tables, batch.window_slots, batch.window_tables)
        own = [buffer for buffer in of_groups if buffer is not None]
        self._of_states = [tables for tables in (batch.state_tables, batch.state_reads) if tables is not None]
        self._buffers = (inputs.token_ids, batch.seq_lens, batch.positions, *own)
        self._step_counter = inputs.step_counter
        self._graphs: dict[Hashable, tuple[native.RecordedCalls, Tensor | None]] = {}
        self.max_slices = 0 if native.library() is None else SMALL_BATCH_ROWS

    def __contains__(self, name: Hashable) -> bool:
        return name in self._graphs

    def takes(self, shape: PassShape) -> bool:
        return shape.part == "model" or shape == PassShape(shape.size, filters=False)

    def capture(self, name: Hashable, work: Callable[[], Tensor | None]) -> None:
        """Run `work` twice and record the second run: the first one does what happens only once.

        Without a new name afterwards if replays do not give the logits of `work`; then `max_slices` is 0. A whole pass
        returns none, and what it adds to the model is native.
        """
        library = native.library()
        assert library is not None
        with self._undone():
            work()
        if not self.max_slices:
            return  # the pass's model was not recorded
        with self._undone(), library.record() as recording, TorchCalls(library) as torch_calls:
            logits = work()
        with self._undone():
            if torch_calls.is_complete and (logits is None or self._replays_exactly(recording, logits, work)):
                self._graphs[name] = recording, logits
            else:
                self.max_slices = 0

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Inside, work advances states in the null block, not its rows': it may write the same keys again, but not
        advance twice. Its column of the ring is the next one's again."""
        kept = [self._step_counter, *self._of_states]
        before = [tensor.clone() for tensor in kept]
        for tables in self._of_states:
            tables.zero_()
        try:
            yield
        finally:
            for tensor, values in zip(kept, before, strict=True):
                tensor.copy_(values)

    def replay(self, name: Hashable) -> Tensor | None:
        recording, logits = self._graphs[name]
        recording.replay()
        return logits

    def release(self) -> None:
        self._graphs.clear()

    def _replays_exactly(
        self, recording: native.RecordedCalls, logits: Tensor, work: Callable[[], Tensor | None]
    ) -> bool:
        """True if a replay with other inputs gives the bits that `work` gives.

        The inputs are other tokens at position 0 of the null block. Values that depend on the inputs but were not
        recorded would still be those of the recorded pass.
        """
        before = [buffer.clone() for buffer in self._buffers]
        token_ids, seq_lens, *_ = self._buffers
        for buffer in self._buffers[1:]:
            buffer.zero_()
        seq_lens.fill_(1)
        token_ids.add_(1).remainder_(logits.shape[1])
        expected = work()
        recording.replay()
        for buffer, values in zip(self._buffers, before, strict=True):
            buffer.copy_(values)
        return expected is not None and torch.equal(logits, expected)
