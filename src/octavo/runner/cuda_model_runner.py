"""Runs plans on a GPU, which keeps the rows itself: the host queues work and reads tokens, and neither waits.

A plan costs one copy to the device (what has changed), and a launch or a few a pass; the device writes the tokens of
each pass where the host reads them. A step that only decodes is one CUDA graph, a window of n positions the same graph
n times.

It runs on a CPU, too, without streams and graphs: that is how its logic is tested where there is no GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import RowSetup, StepPlan, StepResult, TableWrite
from octavo.engine.executor import GrammarBitmask
from octavo.integers import cdiv
from octavo.kernels.metadata import SamplingTensors
from octavo.kernels.row_state import (
    FIRST_STOP_ID,
    MAX_STOP_IDS,
    MIN_P,
    NUM_COLUMNS,
    NUM_LOGPROBS,
    SAMPLE_INDEX,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    DecodeInputs,
    RowState,
)
from octavo.runner.checksums import NO_SWAP_IN_CHECK
from octavo.runner.cuda_graphs import CudaGraphs, cascade_sizes, decode_sizes
from octavo.runner.input_buffers import InputBuffers
from octavo.runner.kv_swap import KVSwapper
from octavo.runner.memory.budget import time_swaps
from octavo.runner.memory.profile import Rehearse
from octavo.runner.output_buffers import OutputBuffers, StepOutput
from octavo.runner.prefill_batch import PrefillBatch, PrefillInputs, PrefillSize, PrefillSizes, split
from octavo.runner.recorded_graphs import Model
from octavo.runner.sampling.grammar_bitmask import BitmaskBuffer
from octavo.runner.sampling.host_sampling import HostSamplingRunner, Logits
from octavo.runner.sampling.logits_state import DeviceLogitsProcessors
from octavo.runner.shared_prefixes import SharedPrefixes

Finish = Callable[[GrammarBitmask | None], StepOutput]
MOST_CANDIDATES = 64
"""Of a beam, that a graph finds."""
NO_WORDS = np.empty(0, dtype=np.int64)
NO_TOKENS = NO_WORDS, NO_WORDS


class GraphKey(NamedTuple):
    """Graph variant: uses logits processors, returns logprobs, uses cascade attention."""

    logits_processors: bool = False
    logprobs: bool = False
    cascade: bool = False


PLAIN = GraphKey()


class CudaModelRunner:
    """A model, its pool of K and V, and the rows, all on one device.

    kv          [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim]
    host_kv     the swap space, likewise, in pinned memory
    max_num_tokens  positions that one plan computes at most
    max_window  positions that one plan decodes at most of a row
    vocab_size  of the model's logits
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
        max_decode_steps: int,
        vocab_size: int,
        ops: ModuleType,
        graphs: bool,
    ) -> None:
        self.model = model
        self.kv = kv
        self.block_size = kv.shape[4]
        self.ops = ops
        self.device = kv.device
        max_blocks = cdiv(max_model_len, self.block_size)
        self.state = RowState.empty(num_rows, max_blocks, self.device)
        self.shared_prefixes = SharedPrefixes(num_rows, max_blocks, self.block_size, kv[0, 0].nbytes // self.block_size)
        self.input_buffers = InputBuffers(num_rows, self.device)
        self._num_lines = max(num_rows + 2, PrefillSizes.FEW)  # of logits, that a pass makes: graphs pad
        self.ring = OutputBuffers(max_decode_steps, self._num_lines, self.device)
        self.swapper = KVSwapper(kv, host_kv, ops)
        self.check = NO_SWAP_IN_CHECK  # of the plan that was launched last
        self.host_sampling = HostSamplingRunner(model, self.state, kv, max_model_len=max_model_len, ops=ops)
        self.rules = DeviceLogitsProcessors(self.state, self.host_sampling.sampler, vocab_size, ops)
        self._step = DecodeInputs.allocate(
            self.input_buffers.step_counter,
            self.input_buffers.rows,
            self.input_buffers.starts,
            self.input_buffers.ends,
            max_blocks=max_blocks,
            block_size=self.block_size,
        )
        self.graphs = CudaGraphs(self.input_buffers.step_counter) if graphs else None
        self._decode_sizes, self._cascade_sizes = decode_sizes(num_rows), cascade_sizes(num_rows)
        self._chunk_sizes = PrefillSizes(num_rows, max_num_tokens, max_model_len)
        self._chunk_words: dict[PrefillSize, Tensor] = {}  # where graphs read them
        self.masks = BitmaskBuffer(self._num_lines, vocab_size, self.device)
        self._best: dict[tuple[str, int, int], Tensor] = {}  # where graphs write them
        self._kept = torch.empty(0, 0)  # [num_draws at most, vocab_size] float32: see `_keep`

    @torch.inference_mode()
    def capture(self, rehearse: Rehearse | None = None) -> None:
        """Capture all graphs, and compile what they launch, before the first request needs them."""
        if self.graphs is not None:
            if rehearse is not None:
                rehearse(self._every_kind)
            for size in sorted(self._chunk_sizes.sizes, reverse=True):
                self._capture_chunks(self.graphs, size)
            for num_slices in reversed(self._decode_sizes):
                self._capture_decode(self.graphs, num_slices)
            for num_slices in reversed(self._cascade_sizes):
                self._capture_decode(self.graphs, num_slices, GraphKey(cascade=True))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Finish:
        """Queue what the plan says, in stream order. What is left to do is called with the masks of each column that
        waits for some, once with None where none does, before the next plan; what it all gives lands later."""
        num_columns = max(plan.num_sampled, default=0)
        assert num_columns <= self.ring.num_columns, (num_columns, self.ring.num_columns)
        rows, starts, counts, samples = (_words(x) for x in (plan.rows, plan.starts, plan.counts, plan.num_sampled))
        # What the passes after the first compute; where nothing comes from the host, the first as well.
        self.host_sampling.apply(plan)
        self.rules.apply(plan)
        asked = self.rules.asked_logprobs(plan)
        carefully = self.host_sampling.wants(plan) or bool(asked and plan.bitmask_slices)
        kind = GraphKey(self.rules.concern(plan), bool(asked))
        # The host looks at one line of logits for all that it wants of a beam.
        draws = {
            i: n for i, n in plan.num_samples.items() if not (carefully and self.host_sampling.decides(plan.rows[i]))
        }
        chunks, told = None, NO_TOKENS
        if plan.host_tokens:
            if draws or not _is_single(counts, samples):
                chunks = PrefillBatch(plan, rows, starts, counts, samples, draws)
            else:  # the next token of rows that decode
                told = _tokens_told(plan)
        again: Seq[int] = range(len(rows)) if chunks is None else np.flatnonzero(samples > 1).tolist()
        ends = starts + counts
        first = ends - samples  # pass p computes first + p
        if chunks is not None:
            rows, first, ends = rows[again], first[again], ends[again]
        writes = table_writes(plan.table_writes, self.state.block_tables.shape[1])
        self.shared_prefixes.note(*writes)
        order = None if carefully or plan.bitmask_slices else self.shared_prefixes.order(rows, first)
        if order is not None:
            rows, first, ends = rows[order], first[order], ends[order]
            again = [again[i] for i in order.tolist()]
        parts = [
            *_setups(plan.row_setups, self.rules.telling),
            *writes,
            *_columns(plan.copies),
            *told,
        ]
        size = None
        if chunks is not None:
            size = (self._chunk_sizes.holding(chunks.size) if self.graphs is not None else None) or chunks.size
            parts.append(chunks.words(size, self.state.null_row))
        received = self.input_buffers.send(self.ring.begin(), rows, first, ends, self.state.null_row, parts)
        self._apply(plan, received[:8])
        if carefully:
            return self._launch_carefully(plan, chunks, size, received[8:], again)
        self.host_sampling.is_behind = True
        if plan.bitmask_slices:
            return self._launch_masked(plan, chunks, size, received[8:], again, kind)
        landing = self.ring.landing(len(plan.rows), asked)
        if chunks is not None and size is not None:
            self._run_chunks(size, received[8], kind)
            if chunks.draw_slices:
                self.ring.land(landing, chunks.draw_slices)
        kind = kind._replace(cascade=order is not None)
        self._run_window(landing, again, num_columns - (chunks is not None), kind)
        return lambda masks: landing

    def _run_window(self, landing: StepOutput, slices: Seq[int], num_columns: int, kind: GraphKey) -> None:
        """The columns that come of one position of some rows each, and the end of the plan."""
        for _ in range(num_columns):
            self._run_decode(len(slices), kind)
            self.ring.land(landing, slices)
        self.ring.end(landing)

    def _launch_masked(
        self,
        plan: StepPlan,
        chunks: PrefillBatch | None,
        size: PrefillSize | None,
        words: Seq[Tensor],
        again: Seq[int],
        kind: GraphKey,
    ) -> Finish:
        """A pass; the draw behind it, and the next pass, are queued once its masks are there: in one graph, or the
        device would wait for the second. Nobody waits for the device."""
        num_columns, num_bitmask_columns = max(plan.num_sampled), plan.num_bitmask_columns
        landing = self.ring.landing(len(plan.rows))
        slices: Seq[int] = again if chunks is None else chunks.draw_slices
        draw_and_go_on = None
        if self.graphs is not None and num_bitmask_columns > 1:
            draw_and_go_on = partial(self.graphs.replay, self._masked_pass(self.graphs, len(again), kind))
        draw = self._launch_logits(size, words, len(again), kind)

        @torch.inference_mode()
        def finish(masks: GrammarBitmask | None) -> StepOutput:
            nonlocal draw, slices
            self.masks.fill(masks, slices)
            goes_on = len(landing.events) + 1 < num_bitmask_columns
            if goes_on and draw_and_go_on is not None and slices is again:
                self.ring.land_within(landing, slices, draw_and_go_on)
                return landing
            draw()
            self.ring.land(landing, slices)
            if goes_on:
                draw, slices = self._launch_logits(None, (), len(again), kind), again
            else:
                self._run_window(landing, again, num_columns - len(landing.events), kind)
            return landing

        return finish

    def _launch_logits(
        self, size: PrefillSize | None, words: Seq[Tensor], num_slices: int, kind: GraphKey
    ) -> Callable[[], None]:
        """A pass, but for the draw behind it, which is what this gives."""
        graphs = self.graphs
        if graphs is None or not (size is None or size in self._chunk_sizes.sizes):
            made = self._decode_logits(num_slices) if size is None else self._chunk_logits(size, words[0])
            return lambda: self._sample(made, kind, self.masks)
        key = size or self._decode_size(num_slices)
        name = ("masked", key, kind)
        if name not in graphs:
            self._capture_masked(graphs, name, size, num_slices, kind)
        if size is not None:
            self._chunk_words[size].copy_(words[0])
        graphs.replay(("logits", key))
        return lambda: graphs.replay(name)

    def _masked_pass(self, graphs: CudaGraphs, num_slices: int, kind: GraphKey) -> Hashable:
        """The graph of a draw of rows that decode, and the next pass of them; not to be asked for between these two."""
        size = self._decode_size(num_slices)
        name = ("masked pass", size, kind)
        if name not in graphs:
            self.masks.clear()
            with self._idle():
                made = self._decode_logits(num_slices)

                def work() -> None:
                    self._sample(made, kind, self.masks)
                    self._keep(self._forward_decode(self._step.first(size)))

                graphs.capture(name, work)
        return name

    def _capture_masked(
        self, graphs: CudaGraphs, name: Hashable, size: PrefillSize | None, num_slices: int, kind: GraphKey
    ) -> None:
        """The draw behind such a pass, by itself: when it is captured, a pass has been that had nothing to do."""
        self.masks.clear()
        if size is not None:
            self._chunk_logits(size, self._words_of(size))
            step = PrefillInputs(*split(self._chunk_words[size], size))
            rows, indices = step.draw_rows, step.draw_indices
            graphs.capture(
                name, lambda: self._sample(Logits(self._kept, rows, self._sampling(step), indices), kind, self.masks)
            )
        else:
            with self._idle():
                made = self._decode_logits(num_slices)
                graphs.capture(name, lambda: self._sample(made, kind, self.masks))

    def _launch_carefully(
        self, plan: StepPlan, chunks: PrefillBatch | None, size: PrefillSize | None, words: Seq[Tensor], again: Seq[int]
    ) -> Finish:
        """The first pass, and what the host does after each."""
        host_sampling, columns, num_columns = self.host_sampling, list[StepResult](), max(plan.num_sampled, default=0)
        if host_sampling.tells_prompts(plan):

            def work(masks: GrammarBitmask | None) -> None:
                columns.append(host_sampling.column(plan, len(columns), masks))
                self.rules.note(*host_sampling.went_on(plan, columns))

        elif chunks is None and 0 < (num := host_sampling.candidates_wanted(plan)) <= MOST_CANDIDATES:
            best = self._best_tokens(len(again), num)
            return lambda masks: StepOutput.of(len(plan.rows), [host_sampling.candidates(plan, best)])
        else:
            host_sampling.read_done()
            if chunks is not None and size is not None:
                made, slices = self._chunk_logits(size, words[0]), list(dict.fromkeys(chunks.draw_slices))
            else:
                made, slices = self._decode_logits(len(again)), list(again)

            def work(masks: GrammarBitmask | None) -> None:
                nonlocal made, slices
                drawn = host_sampling.sample(plan, made, host_sampling.draws(plan, slices, len(columns)), masks)
                self.rules.note(drawn.rows, drawn.positions, drawn.tokens)
                self.ops.commit_sampled_tokens(
                    self.state, drawn.rows, drawn.tokens, self.ring.columns, self.input_buffers.step_counter
                )
                columns.append(drawn.column)
                if len(columns) < num_columns:
                    made, slices = self._decode_logits(len(again)), list(again)

        @torch.inference_mode()
        def finish(masks: GrammarBitmask | None) -> StepOutput:
            work(masks)
            while plan.num_bitmask_columns <= len(columns) < num_columns:
                work(None)
            return StepOutput.of(len(plan.rows), columns)

        return finish

    def measure_swap(self) -> float:
        """See `memory.time_swaps`; before anything is computed."""

        def move(pairs: list[tuple[int, int]]) -> None:
            self.swapper.queue(pairs, [])
            if self.kv.is_cuda:
                torch.cuda.synchronize()

        return time_swaps(move, len(self.swapper.host_kv) - 1)

    def release_memory(self) -> None:
        """Wait for what is queued, whose inputs nobody keeps any more, and give the device back what passes have taken:
        in pieces, it may not do for another pass. Errors of what was queued are none of this call's."""
        if self.kv.is_cuda:
            with suppress(RuntimeError):
                torch.cuda.synchronize()
                torch.cuda.empty_cache()

    def probe(self) -> None:
        """Raises `RuntimeError`, CUDA's, where the device does not answer any more. An error that passes is told once:
        `release_memory` goes before, and hears it."""
        if self.kv.is_cuda:
            torch.cuda.synchronize()

    def _apply(self, plan: StepPlan, words: Seq[Tensor]) -> None:
        """What the plan does to rows and blocks."""
        setup_rows, setups, places, block_ids, copy_src, copy_dst, told_rows, told = words
        if len(setup_rows):
            self.state.sampling_params.index_copy_(0, setup_rows, setups.view(-1, NUM_COLUMNS))
        if len(places):
            self.state.block_tables.view(-1).index_copy_(0, places, block_ids.int())
        if len(told_rows):
            self.state.last_token.index_copy_(0, told_rows, told)
            self.state.done.index_fill_(0, told_rows, False)
        if plan.swap_outs or plan.swap_ins:
            self.check = self.swapper.move(plan.swap_outs, plan.swap_ins)
        else:
            self.check = NO_SWAP_IN_CHECK
        if plan.copies:
            self.ops.block_copy(self.kv, copy_src, copy_dst)

    # -- one position of some rows ------------------------------------------------------------------------------------

    def _run_decode(self, num_slices: int, kind: GraphKey) -> None:
        if self.graphs is None:
            self._decode(num_slices, kind)
            return
        size = self._decode_size(num_slices, kind.cascade)
        if (size, kind) not in self.graphs:
            self._capture_decode(self.graphs, size, kind)
        self.graphs.replay((size, kind))

    def _decode_logits(self, num_slices: int) -> Logits:
        """Those of a pass that nothing is drawn after, until `commit_sampled_tokens` says what was."""
        if self.graphs is None:
            step = self._step.first(num_slices)
            return Logits(self._forward_decode(step).float(), step.live_rows, step.sampling)
        size = self._decode_size(num_slices)
        step = self._step.first(size)
        name = ("logits", size)
        if name not in self.graphs:
            with self._idle():
                self.graphs.capture(name, lambda: self._keep(self._forward_decode(self._step.first(size))))
        self.graphs.replay(name)
        return Logits(self._kept, step.live_rows, step.sampling)

    def _best_tokens(self, num_slices: int, num: int) -> Tensor:
        """`packed_top_logprobs` of such a pass, to be read before the next one."""
        size = num_slices if self.graphs is None else self._decode_size(num_slices)
        name = ("best", size, num)

        def work() -> None:
            self._best[name] = self.ops.packed_top_logprobs(self._forward_decode(self._step.first(size)), num)

        if self.graphs is None:
            work()
        else:
            if name not in self.graphs:
                with self._idle():
                    self.graphs.capture(name, work)
            self.graphs.replay(name)
        return self._best[name]

    def _decode_size(self, num_slices: int, cascade: bool = False) -> int:
        sizes = self._cascade_sizes if cascade else self._decode_sizes
        return sizes[bisect_left(sizes, num_slices)]

    def _capture_decode(self, graphs: CudaGraphs, num_slices: int, kind: GraphKey = PLAIN) -> None:
        with self._idle():
            graphs.capture((num_slices, kind), lambda: self._decode(num_slices, kind))

    def _every_kind(self) -> None:
        """A pass of each kind that `capture` captures, with nothing to do: of those that decode, one up to each power
        of two, which is what kernels differ in."""
        for size in self._chunk_sizes.sizes:
            self._compute_chunks(size, self._words_of(size), PLAIN)
        with self._idle():
            for kind, sizes in ((PLAIN, self._decode_sizes), (GraphKey(cascade=True), self._cascade_sizes)):
                kinds = {(num_slices - 1).bit_length(): num_slices for num_slices in reversed(sizes)}
                for num_slices in kinds.values():
                    self._decode(num_slices, kind)
            self._decode(self._decode_sizes[-1], GraphKey(logprobs=True))  # compiled here, captured on first use

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """A decode pass has nothing to do."""
        ends = self._step.ends.clone()
        self._step.ends.zero_()
        try:
            yield
        finally:
            self._step.ends.copy_(ends)

    def _decode(self, num_slices: int, kind: GraphKey) -> None:
        """Nothing here looks at anything on the device."""
        step = self._step.first(num_slices, cascade=kind.cascade)
        self._sample(Logits(self._forward_decode(step), step.live_rows, step.sampling), kind)

    def _forward_decode(self, step: DecodeInputs) -> Tensor:
        self.ops.prepare_decode_inputs(self.state, step, self.block_size)
        return self.model.forward(step.token_ids, step.batch, self.kv, None)

    def _sample(self, made: Logits, kind: GraphKey, masks: BitmaskBuffer | None = None) -> None:
        """A token from each line, for its row and the host."""
        assert masks is None or not kind.logprobs, "they change the logits"
        rows, sampling = made.rows, made.sampling
        logits = made.logits[: len(rows)]
        masked = None if masks is None else (masks.which[: len(rows)], masks.words)
        if kind.logits_processors:
            tokens = self.rules.sample(logits, rows, sampling, masked, keep=kind.logprobs)
        else:
            tokens = self.ops.sample_checked(logits, sampling, masked)
        if kind.logprobs:
            self.ops.write_logprobs(
                self.state, rows, logits, tokens, self.ring.logprobs, self.input_buffers.step_counter
            )
        if kind.logits_processors:
            noted = tokens
            if made.indices is not None:
                noted = torch.where((made.indices < 0) & ~self.state.done[rows], tokens, -1)
            self.rules.note(rows, sampling.position, noted)
        self.ops.commit_sampled_tokens(self.state, rows, tokens, self.ring.columns, self.input_buffers.step_counter)

    def _keep(self, logits: Tensor) -> None:
        """In memory that no other graph writes to, as all do to each other's. Made when it is first needed."""
        if self._kept.shape[1] != logits.shape[1]:
            self._kept = torch.empty(self._num_lines, logits.shape[1], dtype=torch.float32, device=self.device)
        self._kept[: len(logits)].copy_(logits)

    # -- slices of any length -----------------------------------------------------------------------------------------

    def _run_chunks(self, size: PrefillSize, words: Tensor, kind: GraphKey) -> None:
        if self.graphs is None or size not in self._chunk_sizes.sizes:
            self._compute_chunks(size, words, kind)
            return
        if (size, kind) not in self.graphs:
            self._capture_chunks(self.graphs, size, kind)
        self._chunk_words[size].copy_(words)
        self.graphs.replay((size, kind))

    def _chunk_logits(self, size: PrefillSize, words: Tensor) -> Logits:
        step = PrefillInputs(*split(words, size))
        if self.graphs is None or size not in self._chunk_sizes.sizes:
            logits = self._forward_chunks(size, words).float()
            return Logits(logits, step.draw_rows, self._sampling(step), step.draw_indices)
        name = ("logits", size)
        if name not in self.graphs:
            own = self._words_of(size)
            self.graphs.capture(name, lambda: self._keep(self._forward_chunks(size, own)))
        self._chunk_words[size].copy_(words)
        self.graphs.replay(name)
        return Logits(self._kept, step.draw_rows, self._sampling(step), step.draw_indices)

    def _capture_chunks(self, graphs: CudaGraphs, size: PrefillSize, kind: GraphKey = PLAIN) -> None:
        words = self._words_of(size)
        graphs.capture((size, kind), lambda: self._compute_chunks(size, words, kind))

    def _words_of(self, size: PrefillSize) -> Tensor:
        """Where graphs of that size read them, which say that there is nothing to do."""
        nothing = torch.from_numpy(PrefillBatch.nothing().words(size, self.state.null_row))
        if size not in self._chunk_words:
            self._chunk_words[size] = torch.empty_like(nothing, device=self.device)
        return self._chunk_words[size].copy_(nothing)

    def _compute_chunks(self, size: PrefillSize, words: Tensor, kind: GraphKey) -> None:
        """Nor here."""
        logits = self._forward_chunks(size, words)
        if size.num_draws:
            step = PrefillInputs(*split(words, size))
            self._sample(Logits(logits, step.draw_rows, self._sampling(step), step.draw_indices), kind)

    def _forward_chunks(self, size: PrefillSize, words: Tensor) -> Tensor:
        """A batch of its own each time: what kernels derive from it belongs to the graph."""
        step = PrefillInputs(*split(words, size))
        batch, token_ids = step.batch(size, self.block_size), torch.zeros_like(step.known)
        self.ops.prepare_prefill_inputs(
            self.state, step.rows, step.starts, step.known, batch, token_ids, self.block_size
        )
        return self.model.forward(token_ids, batch, self.kv, step.draw_tokens)

    def _sampling(self, step: PrefillInputs) -> SamplingTensors:
        return self.state.sampling(step.draw_rows, step.draw_indices, step.draw_positions)


def _words(numbers: Seq[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def _is_single(counts: np.ndarray, samples: np.ndarray) -> bool:
    """Whether the first pass computes one position of each slice, and draws after it."""
    return bool(((counts - samples == 0) & (samples > 0)).all())


def _tokens_told(plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
    """(rows, what each goes on from)."""
    return _words([plan.rows[i] for i in plan.host_tokens]), _words([tokens[0] for tokens in plan.host_tokens.values()])


def _setups(setups: Seq[RowSetup], telling: Mapping[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """(rows [num], lines [num * NUM_COLUMNS]): see `RowState.sampling_params`, and `DeviceLogitsProcessors.telling`."""
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
        line[NUM_LOGPROBS] = telling.get(setup.row, -1)
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
