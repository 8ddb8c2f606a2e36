"""Runs plans on a GPU, which keeps the state of the rows: the host queues work and reads tokens, neither waits.

A plan costs one copy to the device, of all that has changed, and one launch or a few for each forward pass. The device
writes the sampled tokens of each pass to pinned host memory. A decode step is one CUDA graph; a decode window of n
positions replays the same graph n times.

The runner also works on a CPU, without streams and graphs: tests run it where there is no GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import RowSetup, StepPlan, StepResult, TableWrite
from octavo.engine.executor import GrammarBitmask
from octavo.integers import cdiv
from octavo.kernels.ops import Ops
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
from octavo.runner.memory.profile import Precompile
from octavo.runner.output_buffers import OutputBuffers, StepOutput
from octavo.runner.prefill_batch import PrefillBatch, PrefillInputs, PrefillSize, PrefillSizes, unpack
from octavo.runner.recorded_graphs import Model
from octavo.runner.sampling.grammar_bitmask import BitmaskBuffer
from octavo.runner.sampling.host_sampling import HostSamplingRunner, PassLogits
from octavo.runner.sampling.logits_state import DeviceLogitsProcessors
from octavo.runner.shared_prefixes import SharedPrefixes

Finish = Callable[[GrammarBitmask | None], StepOutput]
"""Queues the rest of a plan. Called once for each column with grammar bitmasks, or once with None."""
MAX_GRAPH_CANDIDATES = 64
"""Most beam candidates per row that a graph finds."""
EMPTY = np.empty(0, dtype=np.int64)
EMPTY_PAIR = EMPTY, EMPTY


class GraphKey(NamedTuple):
    """Graph variant: uses logits processors, returns logprobs, uses cascade attention."""

    logits_processors: bool = False
    logprobs: bool = False
    cascade: bool = False


PLAIN = GraphKey()


class CudaModelRunner:
    """A model, its KV pool, and the state of the rows, all on one device.

    kv                [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim]
    host_kv           the swap space, likewise, in pinned memory
    max_num_tokens    most positions of a plan
    max_decode_steps  most tokens that a plan decodes per row
    vocab_size        width of the model's logits
    graphs            capture and replay CUDA graphs; needs a GPU and operations that can be captured
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
        ops: Ops,
        graphs: bool,
    ) -> None:
        self.model = model
        self.kv = kv
        block_size = self.block_size = kv.shape[4]
        self.ops = ops
        self.device = kv.device
        max_blocks = cdiv(max_model_len, block_size)
        self.state = RowState.empty(num_rows, max_blocks, self.device)
        self.shared_prefixes = SharedPrefixes(num_rows, max_blocks, block_size, kv[0, 0].nbytes // block_size)
        inputs = self.input_buffers = InputBuffers(num_rows, self.device)
        self._max_lines = max(num_rows + 2, PrefillSizes.FEW)  # of logits of a pass, with the padding of graphs
        self.output_buffers = OutputBuffers(max_decode_steps, self._max_lines, self.device)
        self.swapper = KVSwapper(kv, host_kv, ops)
        self.swap_in_check = NO_SWAP_IN_CHECK  # of the last plan
        self.host_sampling = HostSamplingRunner(model, self.state, kv, max_model_len=max_model_len, ops=ops)
        self.logits_processors = DeviceLogitsProcessors(self.state, self.host_sampling.sampler, vocab_size, ops)
        self._decode_inputs = DecodeInputs.allocate(
            inputs.step_counter, inputs.rows, inputs.starts, inputs.ends, max_blocks=max_blocks, block_size=block_size
        )
        self.graphs = CudaGraphs(inputs.step_counter) if graphs else None
        self._decode_sizes, self._cascade_sizes = decode_sizes(num_rows), cascade_sizes(num_rows)
        self._prefill_sizes = PrefillSizes(num_rows, max_num_tokens, max_model_len)
        self._prefill_buffers: dict[PrefillSize, Tensor] = {}  # inputs of prefill graphs
        self.bitmask = BitmaskBuffer(self._max_lines, vocab_size, self.device)
        self._candidates: dict[tuple[str, int, int], Tensor] = {}  # outputs of graphs
        self._logits = torch.empty(0, 0)  # [max_lines, vocab_size] float32: see `_store_logits`

    @torch.inference_mode()
    def capture(self, precompile: Precompile | None = None) -> None:
        """Compile kernels and capture graphs before the first request."""
        if self.graphs is not None:
            if precompile is not None:
                precompile(self._run_all_variants)
            for size in sorted(self._prefill_sizes.sizes, reverse=True):
                self._capture_prefill(self.graphs, size)
            for num_slices in reversed(self._decode_sizes):
                self._capture_decode(self.graphs, num_slices)
            for num_slices in reversed(self._cascade_sizes):
                self._capture_decode(self.graphs, num_slices, GraphKey(cascade=True))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Finish:
        """Queue a plan in stream order. The caller must call the result before it launches the next plan."""
        num_columns = max(plan.num_sampled, default=0)
        assert num_columns <= self.output_buffers.num_columns, (num_columns, self.output_buffers.num_columns)
        rows, starts, counts, num_sampled = (_int64(x) for x in (plan.rows, plan.starts, plan.counts, plan.num_sampled))
        host, processors = self.host_sampling, self.logits_processors
        host.apply(plan)
        processors.apply(plan)
        num_logprobs = processors.slice_logprobs(plan)
        on_host = host.is_needed(plan) or bool(num_logprobs and plan.bitmask_slices)
        key = GraphKey(processors.applies_to(plan), bool(num_logprobs))
        # On the host, one line of logits serves all candidates of a beam.
        num_samples = {i: n for i, n in plan.num_samples.items() if not (on_host and host.is_beam(plan.rows[i]))}
        prefill, host_tokens = None, EMPTY_PAIR
        if plan.host_tokens:
            if num_samples or not _is_decode_only(counts, num_sampled):
                prefill = PrefillBatch(plan, rows, starts, counts, num_sampled, num_samples)
            else:  # the next token of rows that decode
                host_tokens = _host_tokens(plan)
        # Slices of the decode passes: all slices, or after a prefill pass those that sample more tokens.
        slices: Seq[int] = range(len(rows)) if prefill is None else np.flatnonzero(num_sampled > 1).tolist()
        ends = starts + counts
        first = ends - num_sampled  # decode pass p computes position first + p
        if prefill is not None:
            rows, first, ends = rows[slices], first[slices], ends[slices]
        writes = table_writes(plan.table_writes, self.state.block_tables.shape[1])
        self.shared_prefixes.update(*writes)
        order = None if on_host or plan.bitmask_slices else self.shared_prefixes.order(rows, first)
        if order is not None:
            rows, first, ends = rows[order], first[order], ends[order]
            slices = [slices[i] for i in order.tolist()]
        setups, copies = _pack_setups(plan.row_setups, processors.num_logprobs), _pack_pairs(plan.copies)
        parts = [*setups, *writes, *copies, *host_tokens]
        size = None
        if prefill is not None:
            size = (self._prefill_sizes.bucket_for(prefill.size) if self.graphs is not None else None) or prefill.size
            parts.append(prefill.pack(size, self.state.null_row))
        column = self.output_buffers.next_half()
        uploaded = self.input_buffers.upload(column, rows, first, ends, self.state.null_row, parts)
        self._apply(plan, uploaded[:8])
        if on_host:
            return self._launch_host_sampling(plan, prefill, size, uploaded[8:], slices)
        host.is_stale = True
        if plan.bitmask_slices:
            return self._launch_with_bitmask(plan, prefill, size, uploaded[8:], slices, key)
        output = self.output_buffers.new_output(len(plan.rows), num_logprobs)
        if prefill is not None and size is not None:
            self._run_prefill(size, uploaded[8], key)
            if prefill.sample_slices:
                self.output_buffers.record_column(output, prefill.sample_slices)
        key = key._replace(cascade=order is not None)
        self._run_decode_passes(output, slices, num_columns - (prefill is not None), key)
        return lambda bitmask: output

    def _run_decode_passes(self, output: StepOutput, slices: Seq[int], num_columns: int, key: GraphKey) -> None:
        """The decode passes at the end of a plan, one for each column."""
        for _ in range(num_columns):
            self._run_decode(len(slices), key)
            self.output_buffers.record_column(output, slices)
        self.output_buffers.finish(output)

    def _launch_with_bitmask(
        self,
        plan: StepPlan,
        prefill: PrefillBatch | None,
        size: PrefillSize | None,
        packed: Seq[Tensor],
        slices: Seq[int],
        key: GraphKey,
    ) -> Finish:
        """Queue the first pass of a plan with grammar bitmasks.

        Each bitmask queues the sampling of its column and the next pass, in one graph: launched apart, the device would
        wait for the second. The host does not wait for the device.
        """
        num_columns, num_bitmask_columns = max(plan.num_sampled), plan.num_bitmask_columns
        output = self.output_buffers.new_output(len(plan.rows))
        column_slices: Seq[int] = slices if prefill is None else prefill.sample_slices
        sample_and_decode = None
        if self.graphs is not None and num_bitmask_columns > 1:
            name = self._sample_and_decode_graph(self.graphs, len(slices), key)
            sample_and_decode = partial(self.graphs.replay, name)
        sample = self._launch_logits(size, packed, len(slices), key)

        @torch.inference_mode()
        def finish(bitmask: GrammarBitmask | None) -> StepOutput:
            nonlocal sample, column_slices
            self.bitmask.fill(bitmask, column_slices)
            continues = len(output.events) + 1 < num_bitmask_columns
            if continues and sample_and_decode is not None and column_slices is slices:
                self.output_buffers.record_column_of(output, column_slices, sample_and_decode)
                return output
            sample()
            self.output_buffers.record_column(output, column_slices)
            if continues:
                sample, column_slices = self._launch_logits(None, (), len(slices), key), slices
            else:
                self._run_decode_passes(output, slices, num_columns - len(output.events), key)
            return output

        return finish

    def _launch_logits(
        self, size: PrefillSize | None, packed: Seq[Tensor], num_slices: int, key: GraphKey
    ) -> Callable[[], None]:
        """Queue a pass without its sampling. Returns the function that queues the sampling, with `self.bitmask`."""
        graphs = self.graphs
        if graphs is None or not (size is None or size in self._prefill_sizes.sizes):
            logits = self._decode_logits(num_slices) if size is None else self._prefill_logits(size, packed[0])
            return lambda: self._sample(logits, key, self.bitmask)
        bucket = size or self._decode_size(num_slices)
        name = ("masked", bucket, key)
        if name not in graphs:
            self._capture_masked_sampling(graphs, name, size, num_slices, key)
        if size is not None:
            self._prefill_buffers[size].copy_(packed[0])
        graphs.replay(("logits", bucket))
        return lambda: graphs.replay(name)

    def _sample_and_decode_graph(self, graphs: CudaGraphs, num_slices: int, key: GraphKey) -> Hashable:
        """The graph that samples decoding rows and computes their next pass. Call this before the first pass: capturing
        it computes a pass."""
        size = self._decode_size(num_slices)
        name = ("masked pass", size, key)
        if name not in graphs:
            self.bitmask.clear()
            with self._no_decode_work():
                logits = self._decode_logits(num_slices)

                def work() -> None:
                    self._sample(logits, key, self.bitmask)
                    self._store_decode_logits(size)

                graphs.capture(name, work)
        return name

    def _capture_masked_sampling(
        self, graphs: CudaGraphs, name: Hashable, size: PrefillSize | None, num_slices: int, key: GraphKey
    ) -> None:
        """Capture the sampling of a pass by itself, after a pass with only inactive rows."""
        self.bitmask.clear()
        if size is not None:
            self._prefill_logits(size, self._prefill_buffer(size))
            inputs = PrefillInputs(*unpack(self._prefill_buffers[size], size))
            graphs.capture(name, lambda: self._sample(self._pass_logits(self._logits, inputs), key, self.bitmask))
        else:
            with self._no_decode_work():
                logits = self._decode_logits(num_slices)
                graphs.capture(name, lambda: self._sample(logits, key, self.bitmask))

    def _launch_host_sampling(
        self,
        plan: StepPlan,
        prefill: PrefillBatch | None,
        size: PrefillSize | None,
        packed: Seq[Tensor],
        slices: Seq[int],
    ) -> Finish:
        """Queue the first pass of a plan that the host samples. The result does the rest, column by column."""
        host, columns, num_columns = self.host_sampling, list[StepResult](), max(plan.num_sampled, default=0)
        if host.has_prompt_logprobs(plan):

            def run_column(bitmask: GrammarBitmask | None) -> None:
                columns.append(host.run_column(plan, len(columns), bitmask))
                self.logits_processors.update_token_counts(*host.continued_tokens(plan, columns))

        elif prefill is None and 0 < (num := host.num_beam_candidates(plan)) <= MAX_GRAPH_CANDIDATES:
            candidates = self._top_candidates(len(slices), num)
            return lambda bitmask: StepOutput.from_results(len(plan.rows), [host.read_candidates(plan, candidates)])
        else:
            host.refresh_done()
            if prefill is not None and size is not None:
                logits = self._prefill_logits(size, packed[0])
                column_slices = list(dict.fromkeys(prefill.sample_slices))
            else:
                logits, column_slices = self._decode_logits(len(slices)), list(slices)

            def run_column(bitmask: GrammarBitmask | None) -> None:
                nonlocal logits, column_slices
                specs = host.samples_of(plan, column_slices, len(columns))
                column, rows, tokens, positions = host.sample(plan, logits, specs, bitmask)
                self.logits_processors.update_token_counts(rows, positions, tokens)
                self._commit(rows, tokens)
                columns.append(column)
                if len(columns) < num_columns:
                    logits, column_slices = self._decode_logits(len(slices)), list(slices)

        @torch.inference_mode()
        def finish(bitmask: GrammarBitmask | None) -> StepOutput:
            run_column(bitmask)
            while plan.num_bitmask_columns <= len(columns) < num_columns:
                run_column(None)
            return StepOutput.from_results(len(plan.rows), columns)

        return finish

    def measure_swap(self) -> float:
        """Seconds that a block takes to swap; see `memory.budget.time_swaps`. Overwrites blocks: call it at start."""

        def move(pairs: list[tuple[int, int]]) -> None:
            self.swapper.queue(pairs, [])
            if self.kv.is_cuda:
                torch.cuda.synchronize()

        return time_swaps(move, len(self.swapper.host_kv) - 1)

    def release_memory(self) -> None:
        """Wait for queued work after a failure, and return torch's cached memory to the device.

        The inputs of the queued work may be freed already, so its errors are ignored. The cache may be too fragmented
        for another pass.
        """
        if self.kv.is_cuda:
            with suppress(RuntimeError):
                torch.cuda.synchronize()
                torch.cuda.empty_cache()

    def check_device(self) -> None:
        """Raises CUDA's `RuntimeError` if the device no longer answers.

        Call `release_memory` first: CUDA reports a transient error once, and a permanent one at each call.
        """
        if self.kv.is_cuda:
            torch.cuda.synchronize()

    def _apply(self, plan: StepPlan, parts: Seq[Tensor]) -> None:
        """Apply the plan's changes to rows and blocks."""
        setup_rows, setups, indices, block_ids, copy_src, copy_dst, token_rows, tokens = parts
        if len(setup_rows):
            self.state.sampling_params.index_copy_(0, setup_rows, setups.view(-1, NUM_COLUMNS))
        if len(indices):
            self.state.block_tables.view(-1).index_copy_(0, indices, block_ids.int())
        if len(token_rows):
            self.state.last_token.index_copy_(0, token_rows, tokens)
            self.state.done.index_fill_(0, token_rows, False)
        if plan.swap_outs or plan.swap_ins:
            self.swap_in_check = self.swapper.move(plan.swap_outs, plan.swap_ins)
        else:
            self.swap_in_check = NO_SWAP_IN_CHECK
        if plan.copies:
            self.ops.block_copy(self.kv, copy_src, copy_dst)

    # -- decode passes -------------------------------------------------------------------------------------------------

    def _run_decode(self, num_slices: int, key: GraphKey) -> None:
        if self.graphs is None:
            self._decode(num_slices, key)
            return
        size = self._decode_size(num_slices, key.cascade)
        if (size, key) not in self.graphs:
            self._capture_decode(self.graphs, size, key)
        self.graphs.replay((size, key))

    def _decode_logits(self, num_slices: int) -> PassLogits:
        """Logits of a decode pass without its sampling. `commit_sampled_tokens` must follow."""
        if self.graphs is None:
            inputs = self._decode_inputs.first(num_slices)
            return PassLogits(self._forward_decode(inputs).float(), inputs.live_rows, inputs.sampling)
        size = self._decode_size(num_slices)
        inputs = self._decode_inputs.first(size)
        name = ("logits", size)
        if name not in self.graphs:
            with self._no_decode_work():
                self.graphs.capture(name, lambda: self._store_decode_logits(size))
        self.graphs.replay(name)
        return PassLogits(self._logits, inputs.live_rows, inputs.sampling)

    def _top_candidates(self, num_slices: int, num: int) -> Tensor:
        """`packed_top_logprobs` of a decode pass. The next pass overwrites it."""
        size = num_slices if self.graphs is None else self._decode_size(num_slices)
        name = ("candidates", size, num)

        def work() -> None:
            logits = self._forward_decode(self._decode_inputs.first(size))
            self._candidates[name] = self.ops.packed_top_logprobs(logits, num)

        if self.graphs is None:
            work()
        else:
            if name not in self.graphs:
                with self._no_decode_work():
                    self.graphs.capture(name, work)
            self.graphs.replay(name)
        return self._candidates[name]

    def _decode_size(self, num_slices: int, cascade: bool = False) -> int:
        sizes = self._cascade_sizes if cascade else self._decode_sizes
        return sizes[bisect_left(sizes, num_slices)]

    def _capture_decode(self, graphs: CudaGraphs, num_slices: int, key: GraphKey = PLAIN) -> None:
        with self._no_decode_work():
            graphs.capture((num_slices, key), lambda: self._decode(num_slices, key))

    def _run_all_variants(self) -> None:
        """Run a pass of each variant that `capture` captures, with inactive rows.

        Decode kernels differ only by powers of two of the number of rows, so one size runs for each.
        """
        for size in self._prefill_sizes.sizes:
            self._prefill(size, self._prefill_buffer(size), PLAIN)
        with self._no_decode_work():
            for key, sizes in ((PLAIN, self._decode_sizes), (GraphKey(cascade=True), self._cascade_sizes)):
                by_power = {(num_slices - 1).bit_length(): num_slices for num_slices in reversed(sizes)}
                for num_slices in by_power.values():
                    self._decode(num_slices, key)
            self._decode(self._decode_sizes[-1], GraphKey(logprobs=True))  # compiled here, captured on first use

    @contextmanager
    def _no_decode_work(self) -> Iterator[None]:
        """All rows are inactive in decode passes inside `with`."""
        ends = self._decode_inputs.ends.clone()
        self._decode_inputs.ends.zero_()
        try:
            yield
        finally:
            self._decode_inputs.ends.copy_(ends)

    def _decode(self, num_slices: int, key: GraphKey) -> None:
        """Compute and sample one position of each slice. Reads no tensor values, so it can be captured."""
        inputs = self._decode_inputs.first(num_slices, cascade=key.cascade)
        self._sample(PassLogits(self._forward_decode(inputs), inputs.live_rows, inputs.sampling), key)

    def _forward_decode(self, inputs: DecodeInputs) -> Tensor:
        self.ops.prepare_decode_inputs(self.state, inputs, self.block_size)
        return self.model.forward(inputs.token_ids, inputs.batch, self.kv, None)

    def _sample(self, pass_logits: PassLogits, key: GraphKey, bitmask: BitmaskBuffer | None = None) -> None:
        """Sample a token from each line of logits, for its row and for the host."""
        assert bitmask is None or not key.logprobs, "a bitmask changes the logits in place"
        rows, sampling = pass_logits.rows, pass_logits.sampling
        logits = pass_logits.logits[: len(rows)]
        tensors = None if bitmask is None else (bitmask.mask_index[: len(rows)], bitmask.bitmask)
        if key.logits_processors:
            tokens = self.logits_processors.sample(logits, rows, sampling, tensors, keep_logits=key.logprobs)
        else:
            tokens = self.ops.sample_checked(logits, sampling, tensors)
        if key.logprobs:
            ring, step_counter = self.output_buffers.logprobs, self.input_buffers.step_counter
            self.ops.write_logprobs(self.state, rows, logits, tokens, ring, step_counter)
        if key.logits_processors:
            counted = tokens
            if (indices := pass_logits.indices) is not None:
                counted = torch.where((indices < 0) & ~self.state.done[rows], tokens, -1)
            self.logits_processors.update_token_counts(rows, sampling.position, counted)
        self._commit(rows, tokens)

    def _commit(self, rows: Tensor, tokens: Tensor) -> None:
        ring, step_counter = self.output_buffers.tokens, self.input_buffers.step_counter
        self.ops.commit_sampled_tokens(self.state, rows, tokens, ring, step_counter)

    def _store_decode_logits(self, num_slices: int) -> None:
        self._store_logits(self._forward_decode(self._decode_inputs.first(num_slices)))

    def _store_logits(self, logits: Tensor) -> None:
        """Copy logits to memory that no other graph writes to. Graphs share all other memory."""
        if self._logits.shape[1] != logits.shape[1]:
            self._logits = torch.empty(self._max_lines, logits.shape[1], dtype=torch.float32, device=self.device)
        self._logits[: len(logits)].copy_(logits)

    # -- prefill passes ------------------------------------------------------------------------------------------------

    def _run_prefill(self, size: PrefillSize, packed: Tensor, key: GraphKey) -> None:
        if self.graphs is None or size not in self._prefill_sizes.sizes:
            self._prefill(size, packed, key)
            return
        if (size, key) not in self.graphs:
            self._capture_prefill(self.graphs, size, key)
        self._prefill_buffers[size].copy_(packed)
        self.graphs.replay((size, key))

    def _prefill_logits(self, size: PrefillSize, packed: Tensor) -> PassLogits:
        """Logits of a prefill pass without its sampling. `commit_sampled_tokens` must follow."""
        inputs = PrefillInputs(*unpack(packed, size))
        if self.graphs is None or size not in self._prefill_sizes.sizes:
            logits = self._forward_prefill(size, packed).float()
            return self._pass_logits(logits, inputs)
        name = ("logits", size)
        if name not in self.graphs:
            buffer = self._prefill_buffer(size)
            self.graphs.capture(name, lambda: self._store_logits(self._forward_prefill(size, buffer)))
        self._prefill_buffers[size].copy_(packed)
        self.graphs.replay(name)
        return self._pass_logits(self._logits, inputs)

    def _capture_prefill(self, graphs: CudaGraphs, size: PrefillSize, key: GraphKey = PLAIN) -> None:
        buffer = self._prefill_buffer(size)
        graphs.capture((size, key), lambda: self._prefill(size, buffer, key))

    def _prefill_buffer(self, size: PrefillSize) -> Tensor:
        """The packed inputs of graphs of that size, filled with a batch of padding."""
        padding = torch.from_numpy(PrefillBatch.empty().pack(size, self.state.null_row))
        if size not in self._prefill_buffers:
            self._prefill_buffers[size] = torch.empty_like(padding, device=self.device)
        return self._prefill_buffers[size].copy_(padding)

    def _prefill(self, size: PrefillSize, packed: Tensor, key: GraphKey) -> None:
        """Compute and sample a prefill pass. Reads no tensor values, so it can be captured."""
        logits = self._forward_prefill(size, packed)
        if size.num_samples:
            self._sample(self._pass_logits(logits, PrefillInputs(*unpack(packed, size))), key)

    def _forward_prefill(self, size: PrefillSize, packed: Tensor) -> Tensor:
        """Each call makes a new batch: values that kernels derive from it belong to its graph."""
        inputs = PrefillInputs(*unpack(packed, size))
        rows, starts, host_tokens = inputs.rows, inputs.starts, inputs.host_tokens
        batch, token_ids = inputs.batch(size, self.block_size), torch.zeros_like(host_tokens)
        self.ops.prepare_prefill_inputs(self.state, rows, starts, host_tokens, batch, token_ids, self.block_size)
        return self.model.forward(token_ids, batch, self.kv, inputs.logits_indices)

    def _pass_logits(self, logits: Tensor, inputs: PrefillInputs) -> PassLogits:
        sampling = self.state.sampling(inputs.sample_rows, inputs.sample_indices, inputs.sample_positions)
        return PassLogits(logits, inputs.sample_rows, sampling, inputs.sample_indices)


def _int64(numbers: Seq[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def _is_decode_only(counts: np.ndarray, num_sampled: np.ndarray) -> bool:
    """True if the first pass computes and samples one position of each slice."""
    return bool(((counts - num_sampled == 0) & (num_sampled > 0)).all())


def _host_tokens(plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
    """(rows, their next input tokens)."""
    return _int64([plan.rows[i] for i in plan.host_tokens]), _int64([tokens[0] for tokens in plan.host_tokens.values()])


def _pack_setups(setups: Seq[RowSetup], num_logprobs: Mapping[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """(rows [num], lines [num * NUM_COLUMNS] of `RowState.sampling_params`).

    num_logprobs   see `DeviceLogitsProcessors`
    """
    if not setups:
        return EMPTY_PAIR
    last = {setup.row: setup for setup in setups}  # the device writes in any order: one line a row
    lines = np.full((len(last), NUM_COLUMNS), -1, dtype=np.int64)
    for line, floats, setup in zip(lines, lines.view(np.float64), last.values(), strict=True):
        params = setup.sampling_params
        floats[TEMPERATURE] = 0.0 if params.greedy else params.temperature
        floats[TOP_P], floats[MIN_P] = params.top_p, params.min_p
        line[TOP_K], line[SEED], line[SAMPLE_INDEX] = params.top_k, setup.seed, setup.sample_index
        line[NUM_LOGPROBS] = num_logprobs.get(setup.row, -1)
        stop_ids = list(setup.stop_ids)[:MAX_STOP_IDS]
        line[FIRST_STOP_ID : FIRST_STOP_ID + len(stop_ids)] = stop_ids
    return _int64(list(last)), lines.reshape(-1)


def table_writes(writes: Seq[TableWrite], max_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """(indices into the flat block tables, block ids). A later write to the same index replaces an earlier one."""
    if not writes:
        return EMPTY_PAIR
    firsts = [row * max_blocks + start for row, start, _ in writes]
    if all(len(ids) == 1 for _, _, ids in writes):
        indices = _int64(firsts)
    else:
        indices = np.concatenate(
            [np.arange(first, first + len(ids)) for first, (_, _, ids) in zip(firsts, writes, strict=True)]
        )
    ids = np.fromiter(chain.from_iterable(ids for _, _, ids in writes), dtype=np.int64, count=len(indices))
    if len({row for row, _, _ in writes}) < len(writes):
        _, last = np.unique(indices[::-1], return_index=True)
        indices, ids = indices[::-1][last], ids[::-1][last]
    return indices, ids


def _pack_pairs(pairs: Seq[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """(first elements, second elements)."""
    if not pairs:
        return EMPTY_PAIR
    table = np.array(pairs, dtype=np.int64)  # [num_pairs, 2]
    return table[:, 0], table[:, 1]
