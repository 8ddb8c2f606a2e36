"""Runs plans on any platform, whose device keeps the state of the rows: the host queues work and reads tokens.

A plan costs one copy to the device, of all that has changed, and one launch or a few for each forward pass. The device
writes the sampled tokens of each pass to pinned host memory. With graphs of whole passes, a decode step is one graph; a
decode window of n positions replays the same graph n times.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import StepPlan, StepResult
from octavo.engine.executor import GrammarBitmask
from octavo.kernels.row_state import DecodeInputs
from octavo.runner.device_state import NUM_PARTS, DeviceState
from octavo.runner.graphs import Model
from octavo.runner.input_buffers import EMPTY_PAIR, InputBuffers, int64, is_decode_only, next_tokens
from octavo.runner.memory.profile import Precompile
from octavo.runner.output_buffers import OutputBuffers, StepOutput
from octavo.runner.pass_shape import Pass, PassShape
from octavo.runner.passes import Passes
from octavo.runner.platform import Platform
from octavo.runner.prefill_batch import PrefillBatch, PrefillSizes, make_batches
from octavo.runner.sampling.grammar_bitmask import BitmaskBuffer
from octavo.runner.sampling.host_sampling import HostSampler
from octavo.runner.sampling.pipeline import Lines, Pipeline

MAX_GRAPH_CANDIDATES = 64
"""Most beam candidates per row that a graph finds."""
Work = Generator[None, GrammarBitmask | None, None]
"""Queues a plan. Yields for the bitmask of each column that waits for one, once if none does."""
Advance = Callable[[GrammarBitmask | None], None]
"""Queues the rest of a plan. Called once for each column with grammar bitmasks, or once with None."""


class PlannedPasses(NamedTuple):
    """The passes of a plan. Prefill passes give the first column together; decode passes one column each.

    prefills     usually none or one; several for many prompt logits
    slices       slices of the decode passes: all slices, or after prefill passes those that sample more tokens
    num_columns  most tokens that a slice samples
    variant      what the shapes of the passes have in common
    """

    prefills: list[Pass]
    slices: Seq[int]
    num_columns: int
    variant: PassShape


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
        self.platform = platform
        state = self.state = DeviceState(
            kv, host_kv, platform, num_rows=num_rows, max_model_len=max_model_len, vocab_size=vocab_size
        )
        self.kv, self.swapper = kv, state.swapper
        self.host_sampler = HostSampler(state.rows, state.processors, platform)
        max_lines = max(num_rows + 2, PrefillSizes.FEW)  # of logits of a pass, with the padding of graphs
        inputs = self.input_buffers = InputBuffers(num_rows, platform)
        self.output_buffers = OutputBuffers(max_decode_steps, max_lines, platform)
        self.bitmask = BitmaskBuffer(max_lines, vocab_size, platform)
        pipeline = Pipeline(state, self.bitmask, self.output_buffers, inputs.step_counter)
        max_blocks, block_size = state.rows.block_tables.shape[1], kv.shape[4]
        decode_inputs = DecodeInputs.allocate(
            inputs.step_counter, inputs.rows, inputs.starts, inputs.ends, max_blocks=max_blocks, block_size=block_size
        )
        sizes = PrefillSizes(num_rows, max_num_tokens, max_model_len)
        self.passes = Passes(model, state, decode_inputs, sizes, pipeline, platform, max_lines=max_lines, graphs=graphs)

    @torch.inference_mode()
    def capture(self, precompile: Precompile | None = None) -> None:
        """Compile kernels and capture graphs before the first request."""
        if self.passes.graphs.whole_passes:
            if precompile is not None:
                precompile(self.passes.run_all_variants)
            self.passes.capture_all()

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
        variant = PassShape(0, "pass", processors.applies_to(plan), bool(num_logprobs))
        output = self.output_buffers.new_output(len(plan.rows), num_logprobs)
        passes = self._prepare(plan, output, variant, on_host)
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

    def _prepare(self, plan: StepPlan, output: StepOutput, variant: PassShape, on_host: bool) -> PlannedPasses:
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
            variant = variant._replace(cascade=True)
        null_row = self.state.rows.null_row
        sizes = [self.passes.padded(batch.size) for batch in batches]
        packed = [batch.pack(size, null_row) for batch, size in zip(batches, sizes, strict=True)]
        tokens = EMPTY_PAIR if batches or not plan.host_tokens else next_tokens(plan)
        parts = [*changes, *tokens, *packed]
        uploaded = self.input_buffers.upload(self.output_buffers.first_column, rows, first, ends, null_row, parts)
        changed, inputs = uploaded[:NUM_PARTS], uploaded[NUM_PARTS + 2 :]
        output.swap_in_check = self.state.apply(plan, changed, *uploaded[NUM_PARTS : NUM_PARTS + 2])
        found = zip(batches, sizes, inputs, strict=True)
        prefills = [Pass(batch.sample_slices, size, packed, batch) for batch, size, packed in found]
        return PlannedPasses(prefills, slices, max(plan.num_sampled, default=0), variant)

    # -- columns of tokens ---------------------------------------------------------------------------------------------

    def _run_passes(self, planned: PlannedPasses, output: StepOutput) -> Work:
        """The passes of a plan that the device samples, without bitmasks."""
        yield
        for p in planned.prefills:
            self.passes.run(self.passes.shape(p, "pass", planned.variant), p.packed)
            if p.slices:
                self.output_buffers.record_column(output, p.slices)
        num_columns = planned.num_columns - len(planned.prefills)
        self._run_decode_passes(output, planned.slices, num_columns, planned.variant)

    def _run_decode_passes(self, output: StepOutput, slices: Seq[int], num_columns: int, variant: PassShape) -> None:
        """The decode passes at the end of a plan, one for each column."""
        for _ in range(num_columns):
            slices = self._live_slices(slices)
            if slices:
                self.passes.run(self.passes.shape(Pass(slices), "pass", variant))
            self.output_buffers.record_column(output, slices)
        self.output_buffers.finish(output)

    def _live_slices(self, slices: Seq[int]) -> Seq[int]:
        if not self.platform.is_host:
            return slices
        return self.input_buffers.live_slices(self.state.rows.done, slices)

    def _run_masked(self, plan: StepPlan, planned: PlannedPasses, output: StepOutput) -> Work:
        """The passes of a plan with grammar bitmasks.

        Each bitmask queues the sampling of its column and the next pass, in one graph: launched apart, the device would
        wait for the second. The host does not wait for the device.
        """
        passes, slices, variant, num_columns = self.passes, planned.slices, planned.variant, plan.num_bitmask_columns
        fuses = passes.graphs.whole_passes and num_columns > 1
        if fuses:
            passes.prepare(Pass(slices), variant, ("sample and logits",))
        if planned.prefills:
            p = planned.prefills[0]
        else:
            slices = self._live_slices(slices)
            p = Pass(slices)
        lines = self._queue(p, variant)
        for column in range(1, num_columns + 1):
            self.bitmask.fill((yield), p.slices)
            if fuses and column < num_columns and p.size is None:
                replay = partial(passes.sample_and_logits, p, variant)
                self.output_buffers.record_column_of(output, p.slices, replay)
                continue
            if lines is not None:
                passes.sample(p, variant, lines)
            self.output_buffers.record_column(output, p.slices)
            if column < num_columns:
                slices = self._live_slices(slices)
                p = Pass(slices)
                lines = self._queue(p, variant)
        self._run_decode_passes(output, slices, planned.num_columns - num_columns, variant)

    def _queue(self, p: Pass, variant: PassShape) -> Lines | None:
        """Queue a pass without its sampling."""
        if p.size is None and not p.slices:
            return None
        self.passes.prepare(p, variant, ("sample",))
        return self.passes.logits(p)

    def _sample_on_host(self, plan: StepPlan, planned: PlannedPasses, output: StepOutput) -> Work:
        """The passes of a plan that the host samples. The first one is queued before the first bitmask."""
        host, slices, record = self.host_sampler, planned.slices, partial(self.output_buffers.record_result, output)
        num_candidates = 0 if planned.prefills else host.num_beam_candidates(plan)
        if 0 < num_candidates <= MAX_GRAPH_CANDIDATES:
            candidates = self.passes.candidates(Pass(slices), num_candidates)
            yield
            record(host.read_candidates(plan, candidates))
            return
        host.refresh_done(plan)
        num_done = 0
        if planned.prefills:
            yield from self._sample_prefills_on_host(plan, planned.prefills, output)
            num_done = 1
        for column in range(num_done, planned.num_columns):
            slices = self._live_slices(slices)
            lines = self.passes.logits(Pass(slices)) if slices else None
            bitmask = (yield) if column < max(1, plan.num_bitmask_columns) else None
            result = StepResult([[] for _ in plan.rows])
            if lines is not None:
                specs = host.samples_of(plan, slices, column)
                result, (rows, tokens, positions) = host.sample(plan, lines, specs, bitmask)
                self.passes.pipeline.commit(rows, tokens, positions, tokens)
            record(result)

    def _sample_prefills_on_host(self, plan: StepPlan, prefills: list[Pass], output: StepOutput) -> Work:
        """The first column: one result for each pass. All tokens are committed once, at its end."""
        host, continued, bitmask = self.host_sampler, list[Tensor](), None
        for number, p in enumerate(prefills):
            lines = self.passes.logits(p)
            if not number:
                bitmask = yield
            specs = host.samples_of(plan, list(dict.fromkeys(p.slices)), 0)
            result, (rows, tokens, positions) = host.sample(plan, lines, specs, bitmask)
            if p.batch is not None:
                prompt_logits = lines.logits[len(p.slices) : p.batch.size.num_samples]
                host.read_prompt_logprobs(p.batch.parts, prompt_logits, result)
            continued.append(torch.stack((rows, positions, tokens)))
            self.output_buffers.record_result(output, result)
        rows, positions, tokens = torch.cat(continued, 1) if len(continued) > 1 else continued[0]
        self.passes.pipeline.commit(rows, tokens, positions, tokens)


@torch.inference_mode()
def _advance(work: Work, bitmask: GrammarBitmask | None) -> None:
    with suppress(StopIteration):
        work.send(bitmask)
