"""Runs plans on a GPU, which keeps the rows itself: the host queues work and reads tokens, and neither waits.

A plan costs one copy to the device (what has changed), and a launch or a few a pass; the tokens of each pass come back
on another stream. A step that only decodes is one CUDA graph, a window of n positions the same graph n times.

It runs on a CPU, too, without streams and graphs: that is how its logic is tested where there is no GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from itertools import chain
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import RowSetup, StepPlan, TableWrite
from octavo.engine.executor import Masks
from octavo.kernels.rows import (
    FIRST_STOP_ID,
    MAX_STOP_IDS,
    MIN_P,
    NUM_COLUMNS,
    SAMPLE_INDEX,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    DecodeStep,
    RowState,
)
from octavo.runner.careful import CarefulRunner
from octavo.runner.chunks import Chunks, ChunkSize, ChunkSizes, ChunkStep, split
from octavo.runner.graphs import Graphs, decode_sizes
from octavo.runner.inbox import Inbox
from octavo.runner.landing import Landing, Ring
from octavo.runner.memory import time_moves
from octavo.runner.replay import Model
from octavo.runner.swap import Swapper

NO_WORDS = np.empty(0, dtype=np.int64)


class CudaRunner:
    """A model, its pool of K and V, and the rows, all on one device.

    kv          [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim]
    host_kv     the swap space, likewise, in pinned memory
    max_num_tokens  positions that one plan computes at most
    max_window  positions that one plan decodes at most of a row
    graphs      capture passes and replay them; only on a GPU, and with operations that can be captured
    """

    def __init__(
        self,
        model: Model,
        kv: Tensor,
        host_kv: Tensor,
        *,
        num_rows: int,
        max_model_len: int,
        max_num_tokens: int,
        max_window: int,
        ops: ModuleType,
        graphs: bool,
    ) -> None:
        self.model = model
        self.kv = kv
        self.block_size = kv.shape[4]
        self.ops = ops
        self.device = kv.device
        max_blocks = -(-max_model_len // self.block_size)
        self.state = RowState.empty(num_rows, max_blocks, self.device)
        self.inbox = Inbox(num_rows, self.device)
        # Beams draw two candidates a row; graphs draw for padding, too.
        self.ring = Ring(max_window, max(2 * num_rows, num_rows + 2, ChunkSizes.FEW), self.device)
        self.swapper = Swapper(kv, host_kv)
        self.careful = CarefulRunner(model, self.state, kv, max_model_len=max_model_len, ops=ops)
        self._step = DecodeStep.over(
            self.inbox.clock,
            self.inbox.rows,
            self.inbox.starts,
            self.inbox.ends,
            max_blocks=max_blocks,
            block_size=self.block_size,
        )
        self.graphs = Graphs(self.inbox.clock) if graphs else None
        self._decode_sizes = decode_sizes(num_rows)
        self._chunk_sizes = ChunkSizes(num_rows, max_num_tokens, max_model_len)
        self._chunk_words: dict[ChunkSize, Tensor] = {}  # where a graph reads them

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all graphs, and compile what they launch, before the first request needs them."""
        if self.graphs is not None:
            for size in sorted(self._chunk_sizes.sizes, reverse=True):
                self._capture_chunks(self.graphs, size)
            for num_slices in reversed(self._decode_sizes):
                self._capture_decode(self.graphs, num_slices)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, masks: Masks | None = None) -> Landing:
        """Queue all that the plan says, in stream order; what it gives lands later."""
        num_columns = max(plan.samples, default=0)
        assert num_columns <= self.ring.num_columns, (num_columns, self.ring.num_columns)
        rows, starts, counts, samples = (_words(x) for x in (plan.rows, plan.starts, plan.counts, plan.samples))
        # What the passes after the first compute; where nothing comes from the host, the first as well.
        chunks = Chunks(plan, rows, starts, counts, samples) if plan.host_tokens else None
        again: Seq[int] = range(len(rows)) if chunks is None else np.flatnonzero(samples > 1).tolist()
        ends = starts + counts
        first = ends - samples  # pass p computes first + p
        if chunks is not None:
            rows, first, ends = rows[again], first[again], ends[again]
        parts = [
            *_setups(plan.row_setups),
            *table_writes(plan.table_writes, self.state.block_tables.shape[1]),
            *_columns(plan.copies),
        ]
        size = None
        if chunks is not None:
            size = (self._chunk_sizes.holding(chunks.size) if self.graphs is not None else None) or chunks.size
            parts.append(chunks.words(size, self.state.null_row))
        received = self.inbox.send(self.ring.begin(), rows, first, ends, self.state.null_row, parts)
        self._apply(plan, received[:6])
        if self.careful.wants(plan):
            return Landing.of(len(plan.rows), self.careful.columns(plan, masks or {}))
        landing = self.ring.landing(len(plan.rows), num_columns)
        if chunks is not None and size is not None:
            self._run_chunks(size, received[6])
            if chunks.draw_slices:
                self.ring.land(landing, chunks.draw_slices)
        for _ in range(0 if chunks is None else 1, num_columns):
            self._run_decode(len(again))
            self.ring.land(landing, again)
        self.ring.end(landing)
        return landing

    def measure_move(self) -> float:
        """See `memory.time_moves`; before anything is computed."""

        def move(pairs: list[tuple[int, int]]) -> None:
            self.swapper.move(pairs, [])
            if self.kv.is_cuda:
                torch.cuda.synchronize()

        return time_moves(move, len(self.swapper.host_kv) - 1)

    def _apply(self, plan: StepPlan, words: Seq[Tensor]) -> None:
        """What the plan does to rows and blocks."""
        setup_rows, setups, places, block_ids, copy_src, copy_dst = words
        self.careful.apply(plan)
        if len(setup_rows):
            self.state.setup.index_copy_(0, setup_rows, setups.view(-1, NUM_COLUMNS))
        if len(places):
            self.state.block_tables.view(-1).index_copy_(0, places, block_ids.int())
        if plan.swap_outs or plan.swap_ins:
            self.swapper.move(plan.swap_outs, plan.swap_ins)
        if plan.copies:
            self.ops.block_copy(self.kv, copy_src, copy_dst)

    # -- one position of some rows ------------------------------------------------------------------------------------

    def _run_decode(self, num_slices: int) -> None:
        if self.graphs is None:
            self._decode(num_slices)
            return
        size = self._decode_sizes[bisect_left(self._decode_sizes, num_slices)]
        if size not in self.graphs:
            self._capture_decode(self.graphs, size)
        self.graphs.replay(size)

    def _capture_decode(self, graphs: Graphs, num_slices: int) -> None:
        ends = self._step.ends.clone()
        self._step.ends.zero_()  # nothing to do
        graphs.capture(num_slices, lambda: self._decode(num_slices))
        self._step.ends.copy_(ends)

    def _decode(self, num_slices: int) -> None:
        """Nothing here looks at anything on the device."""
        step = self._step.first(num_slices)
        self.ops.begin_decode(self.state, step, self.block_size)
        logits = self.model.forward(step.token_ids, step.batch, self.kv, None)
        tokens = self.ops.draw(logits, step.sampling)
        self.ops.settle(self.state, step.live_rows, tokens, self.ring.columns, self.inbox.clock)

    # -- slices of any length -----------------------------------------------------------------------------------------

    def _run_chunks(self, size: ChunkSize, words: Tensor) -> None:
        if self.graphs is None or size not in self._chunk_sizes.sizes:
            self._compute_chunks(size, words)
            return
        if size not in self.graphs:
            self._capture_chunks(self.graphs, size)
        self._chunk_words[size].copy_(words)
        self.graphs.replay(size)

    def _capture_chunks(self, graphs: Graphs, size: ChunkSize) -> None:
        nothing = torch.from_numpy(Chunks.nothing().words(size, self.state.null_row))
        words = self._chunk_words[size] = nothing.to(self.device)
        graphs.capture(size, lambda: self._compute_chunks(size, words))

    def _compute_chunks(self, size: ChunkSize, words: Tensor) -> None:
        """Nor here. A batch of its own each time: what kernels derive from it belongs to the graph."""
        step = ChunkStep(*split(words, size))
        batch, token_ids = step.batch(size, self.block_size), torch.empty_like(step.known)
        self.ops.begin_chunks(self.state, step.rows, step.starts, step.known, batch, token_ids, self.block_size)
        logits = self.model.forward(token_ids, batch, self.kv, step.draw_tokens)
        if size.num_draws:
            sampling = self.state.sampling(step.draw_rows, step.draw_indices, step.draw_positions, any_filter=True)
            tokens = self.ops.draw(logits, sampling)
            self.ops.settle(self.state, step.draw_rows, tokens, self.ring.columns, self.inbox.clock)


def _words(numbers: Seq[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def _setups(setups: Seq[RowSetup]) -> tuple[np.ndarray, np.ndarray]:
    """(rows [num], lines [num * NUM_COLUMNS]): see `RowState.setup`."""
    if not setups:
        return NO_WORDS, NO_WORDS
    last = {setup.row: setup for setup in setups}  # the device writes in any order: one line a row
    lines = np.full((len(last), NUM_COLUMNS), -1, dtype=np.int64)
    floats = lines.view(np.float64)
    for line, numbers, setup in zip(lines, floats, last.values(), strict=True):
        params = setup.sampling_params
        numbers[TEMPERATURE] = 0.0 if params.greedy else params.temperature
        numbers[TOP_P], numbers[MIN_P] = params.top_p, params.min_p
        line[TOP_K], line[SEED], line[SAMPLE_INDEX] = params.top_k, setup.seed, setup.sample_index
        stop_ids = list(setup.stop_ids)[:MAX_STOP_IDS]
        line[FIRST_STOP_ID : FIRST_STOP_ID + len(stop_ids)] = stop_ids
    return _words(list(last)), lines.reshape(-1)


def table_writes(writes: Seq[TableWrite], max_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """(places in the flat block tables, block ids). Of two writes to one place, the later one alone."""
    if not writes:
        return NO_WORDS, NO_WORDS
    firsts = [row * max_blocks + start for row, start, _ in writes]
    if all(len(ids) == 1 for _, _, ids in writes):
        places = _words(firsts)
    else:
        places = np.concatenate(
            [np.arange(first, first + len(ids)) for first, (_, _, ids) in zip(firsts, writes, strict=True)]
        )
    ids = np.fromiter(chain.from_iterable(ids for _, _, ids in writes), dtype=np.int64, count=len(places))
    if len({row for row, _, _ in writes}) < len(writes):
        _, last = np.unique(places[::-1], return_index=True)
        places, ids = places[::-1][last], ids[::-1][last]
    return places, ids


def _columns(pairs: Seq[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    if not pairs:
        return NO_WORDS, NO_WORDS
    table = np.array(pairs, dtype=np.int64)  # [num_pairs, 2]
    return table[:, 0], table[:, 1]
