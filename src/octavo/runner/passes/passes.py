"""Forward passes on the device: eager, or from a graph of their shape."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from octavo.kernels.row_state import DecodeInputs, DraftLines
from octavo.runner.device_state import DeviceState
from octavo.runner.drafts.draft_model import DraftModel
from octavo.runner.passes.cuda_graphs import cascade_sizes, decode_sizes
from octavo.runner.passes.graph_cache import GraphCache
from octavo.runner.passes.graphs import Model
from octavo.runner.passes.pass_shape import PLAIN, Part, Pass, PassShape
from octavo.runner.passes.prefill_batch import PrefillBatch, PrefillInputs, PrefillSize, PrefillSizes, unpack
from octavo.runner.platform import Platform
from octavo.runner.sampling.pipeline import Lines, Pipeline

NUM_TIMED = 8
"""Passes that are timed together."""


class Passes:
    """Computes passes. A pass has parts, and each part of each shape may be a graph; see `pass_shape.Part`.

    model      computes logits
    inputs     of decode passes
    num_rows   most slices of a decode pass
    max_lines  most lines of logits of a pass, with the padding of graphs

    draft_model  computes along with each pass; None: there is none
    plain        what the shapes have in common that most plans need
    """

    def __init__(
        self,
        model: Model,
        state: DeviceState,
        inputs: DecodeInputs,
        prefill_sizes: PrefillSizes,
        pipeline: Pipeline,
        platform: Platform,
        *,
        num_rows: int,
        max_lines: int,
        graphs: bool,
    ) -> None:
        self.model, self.inputs, self.pipeline = model, inputs, pipeline
        self.graphs = GraphCache(platform.make_graphs(inputs) if graphs else None, prefill_sizes.sizes)
        self._state, self._platform, self.max_lines = state, platform, max_lines
        self._block_size = state.kv.shape[4]
        is_slice = pipeline.vocab_slice is not None
        self.plain = PassShape(0, filters=not is_slice, sliced=is_slice)
        self._prefill_sizes = prefill_sizes
        self._decode_sizes = decode_sizes(num_rows)
        self._cascade_sizes = cascade_sizes(num_rows) if platform.has_cascade else []
        self._prefill_buffers: dict[int | PrefillSize, Tensor] = {}  # inputs of prefill graphs
        draft = state.draft
        self.draft_model = None if draft is None else DraftModel(draft, platform, inputs, num_rows, graphs=graphs)
        self._kept = torch.empty(0, 0)  # [max_lines, vocab_size] float32: logits that graphs keep for others

    def replace_model(self, model: Model) -> None:
        """Compute with another model, without graphs: they do not call a model."""
        self.model, self.graphs.captured = model, None

    def release_graphs(self) -> None:
        """Free all captured work."""
        self.graphs.release()
        if self.draft_model is not None:
            self.draft_model.graphs.release()

    # -- shapes --------------------------------------------------------------------------------------------------------

    def shape(self, p: Pass, part: Part, variant: PassShape = PLAIN) -> PassShape:
        """The shape of a part of a pass. variant: what it has in common with the other passes of its plan"""
        if p.size is not None:
            return variant._replace(size=p.size, part=part, cascade=False, num_drafts=0)
        num_lines, cascade = len(p.slices), variant.cascade
        if self.graphs.whole_passes:
            each = 1 + variant.num_drafts
            num_lines = each * self.padded_slices(num_lines // each, cascade=cascade)
        return variant._replace(size=num_lines, part=part)

    def padded_slices(self, num_slices: int, *, cascade: bool = False) -> int:
        """Slices of the graph for a decode pass, or its own number."""
        sizes = self._cascade_sizes if cascade else self._decode_sizes
        return sizes[bisect_left(sizes, num_slices)] if self.graphs.whole_passes else num_slices

    def padded(self, size: PrefillSize) -> PrefillSize:
        """The size of the graph for a prefill pass, or its own size."""
        return (self._prefill_sizes.bucket_for(size) if self.graphs.whole_passes else None) or size

    # -- passes and their parts ----------------------------------------------------------------------------------------

    def run(self, shape: PassShape, packed: Tensor | None = None, lines: Lines | None = None) -> Tensor | None:
        """Queue work of this shape: a whole pass, or a part that needs no other. packed: see `Pass`."""
        if shape not in self.graphs and self.graphs.takes(shape):
            self._capture(shape)
        if shape not in self.graphs:
            return self._compute(shape, packed, lines)
        if packed is not None:
            self._prefill_buffers[shape.size].copy_(packed)
        return self.graphs.replay(shape)

    def logits(self, p: Pass, num_drafts: int = 0) -> Lines:
        """Compute a pass without its sampling. `Pipeline.commit` must follow."""
        shape = self.shape(p, "logits", PLAIN._replace(num_drafts=num_drafts))
        if not self.graphs.takes(shape):
            lines = self._forward(shape, p.packed)
            return lines._replace(logits=lines.logits.float())
        self.run(shape, p.packed)
        return self._kept_lines(shape, p.packed)

    def sample(self, p: Pass, variant: PassShape, lines: Lines) -> None:
        """Sample a pass that `logits` has computed, with the bitmask."""
        self.run(self.shape(p, "sample", variant), lines=lines)

    def sample_and_logits(self, p: Pass, variant: PassShape) -> None:
        """Both in one graph, of a decode pass and of the next one of the same slices."""
        self.run(self.shape(p, "sample and logits", variant))

    def candidates(self, p: Pass, num: int) -> Tensor:
        """`packed_top_logprobs` of a decode pass. The next pass overwrites it."""
        found = self.run(self.shape(p, "candidates")._replace(num_candidates=num))
        assert found is not None
        return found

    # -- captures ------------------------------------------------------------------------------------------------------

    def prepare(self, p: Pass, variant: PassShape, parts: Seq[Part]) -> None:
        """Capture parts of a pass. Call it before `logits`: a capture computes passes and clears the bitmask."""
        for part in parts:
            shape = self.shape(p, part, variant)
            if self.graphs.takes(shape):
                self._capture(shape)

    def capture_all(self) -> None:
        """Capture plain passes of all sizes, the largest first. Others are captured on first use."""
        for size in sorted(self._prefill_sizes.sizes, reverse=True):
            self._capture(self.plain._replace(size=size))
        for cascade, sizes in ((False, self._decode_sizes), (True, self._cascade_sizes)):
            for num_slices in reversed(sizes):
                self._capture(self.plain._replace(size=num_slices, cascade=cascade))

    def measure(self) -> float:
        """Seconds of the smallest captured decode pass: of inactive rows, which read all weights."""
        shape, counter = self.plain._replace(size=self._decode_sizes[0]), self.inputs.step_counter
        begin = 0.0
        with self._harmless(shape):
            for i in range(1 + NUM_TIMED):
                if i == 1:
                    self._platform.synchronize()
                    begin = time.perf_counter()
                counter.zero_()  # a pass fills the next column of the ring
                self.run(shape)
            self._platform.synchronize()
        return (time.perf_counter() - begin) / NUM_TIMED

    def run_all_variants(self) -> None:
        """Run a pass of each variant that `capture_all` captures, and of those with a draft, with inactive rows.

        Decode kernels differ only by powers of two of the number of rows, so one size runs for each.
        """
        shapes = [self.plain._replace(size=size) for size in self._prefill_sizes.sizes]
        drafted = self._decode_sizes if self.draft_model or self._state.rows.history.numel() else []
        for each, cascade, sizes in (1, False, self._decode_sizes), (1, True, self._cascade_sizes), (2, False, drafted):
            by_power = {(num - 1).bit_length(): each * num for num in reversed(sizes) if each * num <= self.max_lines}
            variant = self.plain._replace(cascade=cascade) if each == 1 else PassShape(0, num_drafts=1)
            shapes += [variant._replace(size=size) for size in by_power.values()]
        others = PLAIN, PassShape(0, logprobs=True), self.plain._replace(filters=True)
        for variant in dict.fromkeys(others):  # compiled here, captured on first use
            shapes.append(variant._replace(size=self._decode_sizes[-1]))
        for shape in shapes:
            with self._harmless(shape):
                self._compute(shape, self._prefill_buffers.get(shape.size))

    def _capture(self, shape: PassShape) -> None:
        def work() -> Tensor | None:
            return self._compute(shape, self._prefill_buffers.get(shape.size))

        self.graphs.capture(shape, work, partial(self._harmless, shape))

    @contextmanager
    def _harmless(self, shape: PassShape) -> Iterator[None]:
        """Inside `with`, passes of this size have only inactive rows. Work that samples finds logits of such a pass."""
        ends = self.inputs.ends.clone()
        if isinstance(shape.size, PrefillSize):
            self._pad_buffer(shape.size)
        else:
            self.inputs.ends.zero_()
        if shape.part in ("sample", "sample and logits"):
            self.pipeline.bitmask.clear()
            self.run(PassShape(shape.size, "logits"))
        try:
            yield
        finally:
            self.inputs.ends.copy_(ends)

    def _pad_buffer(self, size: PrefillSize) -> None:
        """Fill the packed inputs of graphs of this size with a batch of padding."""
        padding = torch.from_numpy(PrefillBatch.empty().pack(size, self._state.rows.null_row))
        if size not in self._prefill_buffers:
            self._prefill_buffers[size] = torch.empty_like(padding, device=self._platform.device)
        self._prefill_buffers[size].copy_(padding)

    # -- work. Reads no tensor values, so that it can be captured ------------------------------------------------------

    def _compute(self, shape: PassShape, packed: Tensor | None, lines: Lines | None = None) -> Tensor | None:
        """The work of a shape. lines: those to sample; None: of the kept logits"""
        if shape.part in ("sample", "sample and logits"):
            self.pipeline.sample(self._kept_lines(shape, packed) if lines is None else lines, shape)
            if shape.part == "sample":
                return None
        lines = self._forward(shape, packed)
        if shape.part == "candidates":
            return self._platform.ops.packed_top_logprobs(lines.logits, shape.num_candidates)
        if shape.part != "pass":
            self._keep(lines.logits)
        elif len(lines.rows):
            self.pipeline.sample(lines, shape)
        return None

    def _keep(self, logits: Tensor) -> None:
        """Copy logits to memory that no other graph writes to. Graphs share all other memory."""
        if self._kept.shape[1] != logits.shape[1]:
            self._kept = logits.new_empty(self.max_lines, logits.shape[1], dtype=torch.float32)
        self._kept[: len(logits)].copy_(logits)

    def _kept_lines(self, shape: PassShape, packed: Tensor | None) -> Lines:
        size = shape.size
        if isinstance(size, PrefillSize):
            return self._prefill_lines(self._kept, _unpacked(packed, size))
        inputs = self.inputs.first(size)
        return self._decode_lines(self._kept, inputs, shape)

    def _decode_lines(self, logits: Tensor, inputs: DecodeInputs, shape: PassShape) -> Lines:
        drafts = DraftLines(inputs.depths, inputs.token_ids) if shape.num_drafts else None
        sampling = inputs.sampling if shape.filters else replace(inputs.sampling, any_filter=False)
        return Lines(logits, inputs.live_rows, sampling, drafts=drafts)

    def _prefill_lines(self, logits: Tensor, inputs: PrefillInputs) -> Lines:
        rows = self._state.rows
        positions = rows.num_computed[inputs.sample_rows] + 1
        sampling = rows.sampling(inputs.sample_rows, inputs.sample_indices, positions)
        return Lines(logits, inputs.sample_rows, sampling, inputs.sample_indices)

    def _forward(self, shape: PassShape, packed: Tensor | None) -> Lines:
        """Each call makes a new batch: values that kernels derive from it belong to its graph."""
        state, ops, size = self._state, self._platform.ops, shape.size
        if isinstance(size, int):
            each = 1 + shape.num_drafts
            lines_per_row = 1 if self._platform.is_host else each  # the host chooses each row's own number
            inputs = self.inputs.first(size, cascade=shape.cascade, lines_per_row=lines_per_row)
            if self.draft_model is not None:
                self.draft_model.propose(state.rows, inputs.rows[::each], inputs.ends[::each], shape.num_drafts)
            elif shape.num_drafts and not self._platform.is_host:
                ops.propose_drafts(state.rows, inputs.rows[::each], inputs.ends[::each], shape.num_drafts)
            ops.prepare_decode_inputs(state.rows, inputs, self._block_size)
            logits = self.graphs.decode_logits(self.model, inputs, state.kv, sliced=shape.sliced)
            return self._decode_lines(logits, inputs, shape)
        prefill = _unpacked(packed, size)
        rows, starts, host_tokens = prefill.rows, prefill.starts, prefill.host_tokens
        batch = prefill.batch(size, self._block_size, state.rows.num_groups - 1, state.rows.state_blocks)
        token_ids = torch.zeros_like(host_tokens)
        ops.prepare_prefill_inputs(state.rows, rows, starts, host_tokens, batch, token_ids, self._block_size)
        if self.draft_model is not None:
            self.draft_model.prefill(token_ids, batch)
        if size.num_samples <= size.num_slices or not self._platform.is_host:
            logits = self.model.forward(token_ids, batch, state.kv, prefill.logits_indices, shape.sliced)
        else:  # samples of one slice share its logits. A device cannot know how many differ before it runs
            indices, lines = torch.unique_consecutive(prefill.logits_indices, return_inverse=True)
            logits = self.model.forward(token_ids, batch, state.kv, indices, shape.sliced)[lines]
        return self._prefill_lines(logits, prefill)


def _unpacked(packed: Tensor | None, size: PrefillSize) -> PrefillInputs:
    assert packed is not None
    return PrefillInputs(*unpack(packed, size))
