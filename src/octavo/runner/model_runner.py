"""Runs plans on any platform, whose device keeps the state of the rows: the host queues work and reads tokens.

A plan costs one copy to the device, of all that has changed, and one launch or a few for each forward pass. The device
writes the sampled tokens of each pass to pinned host memory. With graphs of whole passes, a decode step is one graph; a
decode window of n positions replays the same graph n times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import StepPlan, StepResult
from octavo.engine.executor import GrammarBitmask
from octavo.kernels.row_state import DecodeInputs
from octavo.runner.cuda_graphs import cascade_sizes, decode_sizes
from octavo.runner.device_state import NUM_PARTS, DeviceState
from octavo.runner.graph_cache import GraphCache
from octavo.runner.graphs import Model
from octavo.runner.input_buffers import EMPTY_PAIR, InputBuffers, int64, is_decode_only, next_tokens
from octavo.runner.memory.profile import Precompile
from octavo.runner.output_buffers import OutputBuffers, StepOutput
from octavo.runner.pass_shape import PLAIN, PassShape
from octavo.runner.platform import Platform
from octavo.runner.prefill_batch import PrefillBatch, PrefillInputs, PrefillSize, PrefillSizes, make_batches, unpack
from octavo.runner.sampling.grammar_bitmask import BitmaskBuffer
from octavo.runner.sampling.host_sampling import HostSampler, PassLogits

CASCADE = PLAIN._replace(cascade=True)
MAX_GRAPH_CANDIDATES = 64
"""Most beam candidates per row that a graph finds."""
Work = Generator[None, GrammarBitmask | None, None]
"""Queues a plan. Yields for the bitmask of each column that waits for one, once if none does."""
Advance = Callable[[GrammarBitmask | None], None]
"""Queues the rest of a plan. Called once for each column with grammar bitmasks, or once with None."""


class Prefill(NamedTuple):
    """A prefill pass: its inputs on the host, its size with padding, and its packed inputs on the device."""

    batch: PrefillBatch
    size: PrefillSize
    packed: Tensor


class Passes(NamedTuple):
    """The passes of a plan. Prefill passes give the first column together; decode passes one column each.

    prefills     usually none or one; several for many prompt logits
    slices       slices of the decode passes: all slices, or after prefill passes those that sample more tokens
    num_columns  most tokens that a slice samples
    """

    prefills: list[Prefill]
    slices: Seq[int]
    num_columns: int
    key: PassShape


class ModelRunner:
    """A model, its KV pool, and the state of the rows, all on one device.

    kv                [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim]
    host_kv           the swap space, likewise; see `Platform.make_host_pool`
    max_num_tokens    most positions of a plan
    max_decode_steps  most tokens that a plan decodes per row
    vocab_size        width of the model's logits
    graphs            capture and replay the platform's graphs
    """

    def __init__(
        self,
        model: Model,
        kv: Tensor,
        host_kv: Tensor,
        platform: Platform,
        *,
        num_rows: int,
        max_model_len: int,
        max_num_tokens: int,
        max_decode_steps: int,
        vocab_size: int,
        graphs: bool,
    ) -> None:
        self.model = model
        self.platform = platform
        self.ops = platform.ops
        state = self.state = DeviceState(
            kv, host_kv, platform, num_rows=num_rows, max_model_len=max_model_len, vocab_size=vocab_size
        )
        self.kv, self.swapper = kv, state.swapper
        self.host_sampler = HostSampler(state.rows, state.processors, platform)
        max_blocks, block_size = state.rows.block_tables.shape[1], kv.shape[4]
        self.block_size = block_size
        inputs = self.input_buffers = InputBuffers(num_rows, platform)
        self._max_lines = max(num_rows + 2, PrefillSizes.FEW)  # of logits of a pass, with the padding of graphs
        self.output_buffers = OutputBuffers(max_decode_steps, self._max_lines, platform)
        self._decode_inputs = DecodeInputs.allocate(
            inputs.step_counter, inputs.rows, inputs.starts, inputs.ends, max_blocks=max_blocks, block_size=block_size
        )
        self._decode_sizes, self._cascade_sizes = decode_sizes(num_rows), cascade_sizes(num_rows)
        self._prefill_sizes = PrefillSizes(num_rows, max_num_tokens, max_model_len)
        captured = platform.make_graphs(self._decode_inputs) if graphs else None
        self.graphs = GraphCache(captured, self._prefill_sizes.sizes)
        self._prefill_buffers: dict[PrefillSize, Tensor] = {}  # inputs of prefill graphs
        self.bitmask = BitmaskBuffer(self._max_lines, vocab_size, platform)
        self._logits = torch.empty(0, 0)  # [max_lines, vocab_size] float32: see `_store_logits`

    @torch.inference_mode()
    def capture(self, precompile: Precompile | None = None) -> None:
        """Compile kernels and capture graphs before the first request."""
        if self.graphs.whole_passes:
            if precompile is not None:
                precompile(self._run_all_variants)
            for size in sorted(self._prefill_sizes.sizes, reverse=True):
                self._capture_prefill(size)
            for num_slices in reversed(self._decode_sizes):
                self._capture_decode(PassShape(num_slices))
            for num_slices in reversed(self._cascade_sizes):
                self._capture_decode(PassShape(num_slices, cascade=True))

    # -- plans ---------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> tuple[StepOutput, Advance]:
        """Queue a plan in stream order, up to its first sampling. The returned function queues the rest.

        The caller must call it, once or for each column with bitmasks, before the next plan.
        """
        assert max(plan.num_sampled, default=0) <= self.output_buffers.num_columns, plan.num_sampled
        host, processors = self.host_sampler, self.state.processors
        processors.apply(plan)
        host.apply(plan)
        num_logprobs = processors.slice_logprobs(plan)
        on_host = host.is_needed(plan) or bool(num_logprobs and plan.bitmask_slices)
        key = PassShape(0, logits_processors=processors.applies_to(plan), logprobs=bool(num_logprobs))
        output = self.output_buffers.new_output(len(plan.rows), num_logprobs)
        passes = self._prepare(plan, output, key, on_host)
        if on_host:
            work = self._sample_on_host(plan, passes, output)
        else:
            host.is_stale = True
            work = self._run_masked(plan, passes, output) if plan.bitmask_slices else self._run_passes(passes, output)
        next(work, None)
        return output, partial(_advance, work)

    def _batches(self, plan: StepPlan, on_host: bool) -> list[PrefillBatch]:
        """The prefill passes of a plan. None if only decode passes are needed."""
        if not plan.host_tokens:
            return []
        host = self.host_sampler
        prompt_logits = host.sampler.num_prompt_logits if on_host and host.has_prompt_logprobs(plan) else None
        if prompt_logits is None and not plan.num_samples and is_decode_only(plan.counts, plan.num_sampled):
            return []
        # On the host, one line of logits serves all candidates of a beam.
        num_samples = {i: n for i, n in plan.num_samples.items() if not (on_host and host.is_beam(plan.rows[i]))}
        done = self.state.rows.done.numpy() if self.platform.is_host else None
        return make_batches(plan, num_samples, prompt_logits, done)

    def _prepare(self, plan: StepPlan, output: StepOutput, key: PassShape, on_host: bool) -> Passes:
        """Copy a plan to the device, and apply its changes to rows and blocks."""
        batches = self._batches(plan, on_host)
        rows, starts, counts, num_sampled = (int64(x) for x in (plan.rows, plan.starts, plan.counts, plan.num_sampled))
        ends = starts + counts
        first = ends - num_sampled  # decode pass p computes position first + p
        slices: Seq[int] = range(len(rows))
        if batches:
            slices = np.flatnonzero(num_sampled > 1).tolist()
            rows, first, ends = rows[slices], first[slices], ends[slices]
        changes = self.state.pack(plan)
        order = None
        if (prefixes := self.state.shared_prefixes) is not None and not on_host and not plan.bitmask_slices:
            order = prefixes.order(rows, first)
        if order is not None:
            rows, first, ends = rows[order], first[order], ends[order]
            slices = [slices[i] for i in order.tolist()]
            key = key._replace(cascade=True)
        null_row = self.state.rows.null_row
        sizes = [self._padded_size(batch.size) for batch in batches]
        packed = [batch.pack(size, null_row) for batch, size in zip(batches, sizes, strict=True)]
        tokens = EMPTY_PAIR if batches or not plan.host_tokens else next_tokens(plan)
        parts = [*changes, *tokens, *packed]
        uploaded = self.input_buffers.upload(self.output_buffers.first_column, rows, first, ends, null_row, parts)
        changed, inputs = uploaded[:NUM_PARTS], uploaded[NUM_PARTS + 2 :]
        output.swap_in_check = self.state.apply(plan, changed, *uploaded[NUM_PARTS : NUM_PARTS + 2])
        prefills = [Prefill(*prefill) for prefill in zip(batches, sizes, inputs, strict=True)]
        return Passes(prefills, slices, max(plan.num_sampled, default=0), key)

    def _padded_size(self, size: PrefillSize) -> PrefillSize:
        return (self._prefill_sizes.bucket_for(size) if self.graphs.whole_passes else None) or size

    # -- columns of tokens ---------------------------------------------------------------------------------------------

    def _run_passes(self, passes: Passes, output: StepOutput) -> Work:
        """The passes of a plan that the device samples, without bitmasks."""
        yield
        for batch, size, packed in passes.prefills:
            self._run_prefill(size, packed, passes.key._replace(cascade=False))
            if batch.sample_slices:
                self.output_buffers.record_column(output, batch.sample_slices)
        self._run_decode_passes(output, passes.slices, passes.num_columns - len(passes.prefills), passes.key)

    def _run_decode_passes(self, output: StepOutput, slices: Seq[int], num_columns: int, key: PassShape) -> None:
        """The decode passes at the end of a plan, one for each column."""
        for _ in range(num_columns):
            slices = self._live_slices(slices)
            if slices:
                self._run_decode(len(slices), key)
            self.output_buffers.record_column(output, slices)
        self.output_buffers.finish(output)

    def _live_slices(self, slices: Seq[int]) -> Seq[int]:
        if not self.platform.is_host:
            return slices
        return self.input_buffers.live_slices(self.state.rows.done, slices)

    def _run_masked(self, plan: StepPlan, passes: Passes, output: StepOutput) -> Work:
        """The passes of a plan with grammar bitmasks.

        Each bitmask queues the sampling of its column and the next pass, in one graph: launched apart, the device would
        wait for the second. The host does not wait for the device.
        """
        slices, key, num_columns = passes.slices, passes.key, plan.num_bitmask_columns
        sample_and_decode = None
        if self.graphs.whole_passes and num_columns > 1:
            sample_and_decode = partial(self.graphs.replay, self._sample_and_decode_graph(len(slices), key))
        if passes.prefills:
            batch, size, packed = passes.prefills[0]
            column_slices: Seq[int] = batch.sample_slices
            sample = self._launch_prefill_logits(size, packed, key)
        else:
            column_slices = slices = self._live_slices(slices)
            sample = self._launch_decode_logits(len(slices), key)
        for column in range(1, num_columns + 1):
            self.bitmask.fill((yield), column_slices)
            if column < num_columns and sample_and_decode is not None and column_slices is slices:
                self.output_buffers.record_column_of(output, column_slices, sample_and_decode)
                continue
            sample()
            self.output_buffers.record_column(output, column_slices)
            if column < num_columns:
                column_slices = slices = self._live_slices(slices)
                sample = self._launch_decode_logits(len(slices), key)
        self._run_decode_passes(output, slices, passes.num_columns - num_columns, key)

    def _launch_prefill_logits(self, size: PrefillSize, packed: Tensor, key: PassShape) -> Callable[[], object]:
        """Queue a prefill pass without its sampling. Returns the function that queues it, with `self.bitmask`."""
        graphs, shape = self.graphs, key._replace(size=size, part="sample")
        if not graphs.takes(shape):
            return partial(self._sample, self._prefill_logits(size, packed), key, self.bitmask)
        if shape not in graphs:  # captured after a pass with only inactive rows
            self.bitmask.clear()
            self._prefill_logits(size, self._prefill_buffer(size))
            inputs = PrefillInputs(*unpack(self._prefill_buffers[size], size))
            graphs.capture(shape, lambda: self._sample(self._pass_logits(self._logits, inputs), key, self.bitmask))
        self._prefill_buffers[size].copy_(packed)
        graphs.replay(PassShape(size, "logits"))
        return partial(graphs.replay, shape)

    def _launch_decode_logits(self, num_slices: int, key: PassShape) -> Callable[[], object]:
        """As `_launch_prefill_logits`, of a decode pass."""
        graphs = self.graphs
        if not num_slices:
            return lambda: None
        if not graphs.whole_passes:
            return partial(self._sample, self._decode_logits(num_slices), key, self.bitmask)
        size = self._decode_size(num_slices)
        shape = key._replace(size=size, part="sample")
        if shape not in graphs:
            self.bitmask.clear()
            with self._no_decode_work():
                logits = self._decode_logits(num_slices)
                graphs.capture(shape, lambda: self._sample(logits, key, self.bitmask))
        graphs.replay(PassShape(size, "logits"))
        return partial(graphs.replay, shape)

    def _sample_and_decode_graph(self, num_slices: int, key: PassShape) -> PassShape:
        """The graph that samples decoding rows and computes their next pass. Call this before the first pass: capturing
        it computes a pass."""
        size = self._decode_size(num_slices)
        shape = key._replace(size=size, part="sample and logits")
        if shape not in self.graphs:
            self.bitmask.clear()
            with self._no_decode_work():
                logits = self._decode_logits(num_slices)

                def work() -> None:
                    self._sample(logits, key, self.bitmask)
                    self._store_decode_logits(size)

                self.graphs.capture(shape, work)
        return shape

    def _sample_on_host(self, plan: StepPlan, passes: Passes, output: StepOutput) -> Work:
        """The passes of a plan that the host samples. The first one is queued before the first bitmask."""
        host, slices, record = self.host_sampler, passes.slices, partial(self.output_buffers.record_result, output)
        num_candidates = 0 if passes.prefills else host.num_beam_candidates(plan)
        if 0 < num_candidates <= MAX_GRAPH_CANDIDATES:
            candidates = self._top_candidates(len(slices), num_candidates)
            yield
            record(host.read_candidates(plan, candidates))
            return
        host.refresh_done(plan)
        num_done = 0
        if passes.prefills:
            yield from self._sample_prefills_on_host(plan, passes.prefills, output)
            num_done = 1
        for column in range(num_done, passes.num_columns):
            slices = self._live_slices(slices)
            logits = self._decode_logits(len(slices)) if slices else None
            bitmask = (yield) if column < max(1, plan.num_bitmask_columns) else None
            result = StepResult([[] for _ in plan.rows])
            if logits is not None:
                specs = host.samples_of(plan, slices, column)
                result, (rows, tokens, positions) = host.sample(plan, logits, specs, bitmask)
                self.state.processors.update_token_counts(rows, positions, tokens)
                self._commit(rows, tokens)
            record(result)

    def _sample_prefills_on_host(self, plan: StepPlan, prefills: list[Prefill], output: StepOutput) -> Work:
        """The first column: one result for each pass. All tokens are committed once, at its end."""
        host, continued, bitmask = self.host_sampler, list[Tensor](), None
        for number, (batch, size, packed) in enumerate(prefills):
            logits = self._prefill_logits(size, packed)
            if not number:
                bitmask = yield
            specs = host.samples_of(plan, list(dict.fromkeys(batch.sample_slices)), 0)
            num_samples = len(batch.sample_slices)
            prompt_logits = logits.logits[num_samples : batch.size.num_samples]
            result, (rows, tokens, positions) = host.sample(plan, logits, specs, bitmask)
            host.read_prompt_logprobs(batch.parts, prompt_logits, result)
            continued.append(torch.stack((rows, positions, tokens)))
            self.output_buffers.record_result(output, result)
        rows, positions, tokens = torch.cat(continued, 1) if len(continued) > 1 else continued[0]
        self.state.processors.update_token_counts(rows, positions, tokens)
        self._commit(rows, tokens)

    # -- decode passes -------------------------------------------------------------------------------------------------

    def _run_decode(self, num_slices: int, key: PassShape) -> None:
        if not self.graphs.whole_passes:
            self._decode(num_slices, key)
            return
        shape = key._replace(size=self._decode_size(num_slices, key.cascade))
        if shape not in self.graphs:
            self._capture_decode(shape)
        self.graphs.replay(shape)

    def _decode_logits(self, num_slices: int) -> PassLogits:
        """Logits of a decode pass without its sampling. `commit_sampled_tokens` must follow."""
        if not self.graphs.whole_passes:
            inputs = self._decode_inputs.first(num_slices)
            return PassLogits(self._forward_decode(inputs).float(), inputs.live_rows, inputs.sampling)
        size = self._decode_size(num_slices)
        inputs = self._decode_inputs.first(size)
        self.graphs.capture(PassShape(size, "logits"), lambda: self._store_decode_logits(size), self._no_decode_work)
        self.graphs.replay(PassShape(size, "logits"))
        return PassLogits(self._logits, inputs.live_rows, inputs.sampling)

    def _top_candidates(self, num_slices: int, num: int) -> Tensor:
        """`packed_top_logprobs` of a decode pass. The next pass overwrites it."""
        size = self._decode_size(num_slices) if self.graphs.whole_passes else num_slices
        shape = PassShape(size, "candidates", num_candidates=num)

        def work() -> Tensor:
            logits = self._forward_decode(self._decode_inputs.first(size))
            return self.ops.packed_top_logprobs(logits, num)

        if not self.graphs.whole_passes:
            return work()
        self.graphs.capture(shape, work, self._no_decode_work)
        found = self.graphs.replay(shape)
        assert found is not None
        return found

    def _decode_size(self, num_slices: int, cascade: bool = False) -> int:
        sizes = self._cascade_sizes if cascade else self._decode_sizes
        return sizes[bisect_left(sizes, num_slices)]

    def _capture_decode(self, shape: PassShape) -> None:
        size = shape.size
        assert isinstance(size, int)
        self.graphs.capture(shape, lambda: self._decode(size, shape), self._no_decode_work)

    def _run_all_variants(self) -> None:
        """Run a pass of each variant that `capture` captures, with inactive rows.

        Decode kernels differ only by powers of two of the number of rows, so one size runs for each.
        """
        for size in self._prefill_sizes.sizes:
            self._prefill(size, self._prefill_buffer(size), PLAIN)
        with self._no_decode_work():
            for key, sizes in ((PLAIN, self._decode_sizes), (CASCADE, self._cascade_sizes)):
                by_power = {(num_slices - 1).bit_length(): num_slices for num_slices in reversed(sizes)}
                for num_slices in by_power.values():
                    self._decode(num_slices, key)
            self._decode(self._decode_sizes[-1], PLAIN._replace(logprobs=True))  # compiled here, captured on first use

    @contextmanager
    def _no_decode_work(self) -> Iterator[None]:
        """All rows are inactive in decode passes inside `with`."""
        ends = self._decode_inputs.ends.clone()
        self._decode_inputs.ends.zero_()
        try:
            yield
        finally:
            self._decode_inputs.ends.copy_(ends)

    def _decode(self, num_slices: int, key: PassShape) -> None:
        """Compute and sample one position of each slice. Reads no tensor values, so it can be captured."""
        inputs = self._decode_inputs.first(num_slices, cascade=key.cascade)
        self._sample(PassLogits(self._forward_decode(inputs), inputs.live_rows, inputs.sampling), key)

    def _forward_decode(self, inputs: DecodeInputs) -> Tensor:
        self.ops.prepare_decode_inputs(self.state.rows, inputs, self.block_size)
        forward = partial(self.model.forward, inputs.token_ids, inputs.batch, self.state.kv, None)
        shape = PassShape(len(inputs.rows), "model")
        if not self.graphs.takes(shape):
            return forward()
        self.graphs.capture(shape, forward)
        logits = self.graphs.replay(shape) if shape in self.graphs else None
        return forward() if logits is None else logits

    def _sample(self, pass_logits: PassLogits, key: PassShape, bitmask: BitmaskBuffer | None = None) -> None:
        """Sample a token from each line of logits, for its row and for the host."""
        assert bitmask is None or not key.logprobs, "a bitmask changes the logits in place"
        rows, sampling = pass_logits.rows, pass_logits.sampling
        logits = pass_logits.logits[: len(rows)]
        tensors = None if bitmask is None else (bitmask.mask_index[: len(rows)], bitmask.bitmask)
        if key.logits_processors:
            tokens = self.state.processors.sample(logits, rows, sampling, tensors, keep_logits=key.logprobs)
        else:
            tokens = self.ops.sample_checked(logits, sampling, tensors)
        if key.logprobs:
            ring, step_counter = self.output_buffers.logprobs, self.input_buffers.step_counter
            self.ops.write_logprobs(self.state.rows, rows, logits, tokens, ring, step_counter)
        if key.logits_processors:
            counted = tokens
            if (indices := pass_logits.indices) is not None:
                counted = torch.where((indices < 0) & ~self.state.rows.done[rows], tokens, -1)
            self.state.processors.update_token_counts(rows, sampling.position, counted)
        self._commit(rows, tokens)

    def _commit(self, rows: Tensor, tokens: Tensor) -> None:
        ring, step_counter = self.output_buffers.tokens, self.input_buffers.step_counter
        self.ops.commit_sampled_tokens(self.state.rows, rows, tokens, ring, step_counter)

    def _store_decode_logits(self, num_slices: int) -> None:
        self._store_logits(self._forward_decode(self._decode_inputs.first(num_slices)))

    def _store_logits(self, logits: Tensor) -> None:
        """Copy logits to memory that no other graph writes to. Graphs share all other memory."""
        if self._logits.shape[1] != logits.shape[1]:
            self._logits = logits.new_empty(self._max_lines, logits.shape[1], dtype=torch.float32)
        self._logits[: len(logits)].copy_(logits)

    # -- prefill passes ------------------------------------------------------------------------------------------------

    def _run_prefill(self, size: PrefillSize, packed: Tensor, key: PassShape) -> None:
        shape = key._replace(size=size)
        if not self.graphs.takes(shape):
            self._prefill(size, packed, key)
            return
        if shape not in self.graphs:
            self._capture_prefill(size, key)
        self._prefill_buffers[size].copy_(packed)
        self.graphs.replay(shape)

    def _prefill_logits(self, size: PrefillSize, packed: Tensor) -> PassLogits:
        """Logits of a prefill pass without its sampling. `commit_sampled_tokens` must follow."""
        inputs = PrefillInputs(*unpack(packed, size))
        shape = PassShape(size, "logits")
        if not self.graphs.takes(shape):
            logits = self._forward_prefill(size, packed).float()
            return self._pass_logits(logits, inputs)
        if shape not in self.graphs:
            buffer = self._prefill_buffer(size)
            self.graphs.capture(shape, lambda: self._store_logits(self._forward_prefill(size, buffer)))
        self._prefill_buffers[size].copy_(packed)
        self.graphs.replay(shape)
        return self._pass_logits(self._logits, inputs)

    def _capture_prefill(self, size: PrefillSize, key: PassShape = PLAIN) -> None:
        buffer = self._prefill_buffer(size)
        self.graphs.capture(key._replace(size=size), lambda: self._prefill(size, buffer, key))

    def _prefill_buffer(self, size: PrefillSize) -> Tensor:
        """The packed inputs of graphs of that size, filled with a batch of padding."""
        padding = torch.from_numpy(PrefillBatch.empty().pack(size, self.state.rows.null_row))
        if size not in self._prefill_buffers:
            self._prefill_buffers[size] = torch.empty_like(padding, device=self.platform.device)
        return self._prefill_buffers[size].copy_(padding)

    def _prefill(self, size: PrefillSize, packed: Tensor, key: PassShape) -> None:
        """Compute and sample a prefill pass. Reads no tensor values, so it can be captured."""
        logits = self._forward_prefill(size, packed)
        if size.num_samples:
            self._sample(self._pass_logits(logits, PrefillInputs(*unpack(packed, size))), key)

    def _forward_prefill(self, size: PrefillSize, packed: Tensor) -> Tensor:
        """Each call makes a new batch: values that kernels derive from it belong to its graph."""
        inputs = PrefillInputs(*unpack(packed, size))
        rows, starts, host_tokens = inputs.rows, inputs.starts, inputs.host_tokens
        batch, token_ids = inputs.batch(size, self.block_size), torch.zeros_like(host_tokens)
        self.ops.prepare_prefill_inputs(self.state.rows, rows, starts, host_tokens, batch, token_ids, self.block_size)
        if size.num_samples <= size.num_slices or not self.platform.is_host:
            return self.model.forward(token_ids, batch, self.state.kv, inputs.logits_indices)
        # Samples of one slice share its logits. A device cannot know how many differ before it runs.
        indices, lines = torch.unique_consecutive(inputs.logits_indices, return_inverse=True)
        return self.model.forward(token_ids, batch, self.state.kv, indices)[lines]

    def _pass_logits(self, logits: Tensor, inputs: PrefillInputs) -> PassLogits:
        sampling = self.state.rows.sampling(inputs.sample_rows, inputs.sample_indices, inputs.sample_positions)
        return PassLogits(logits, inputs.sample_rows, sampling, inputs.sample_indices)


@torch.inference_mode()
def _advance(work: Work, bitmask: GrammarBitmask | None) -> None:
    with suppress(StopIteration):
        work.send(bitmask)
