"""Runs plans on any platform, whose device keeps the state of the rows: the host queues work and reads tokens.

    plan -> one copy to the device -> changes of rows and blocks -> passes, column by column -> the ring of tokens

A plan costs one copy to the device, of all that has changed, and one launch or a few for each forward pass. The device
writes the sampled tokens of each pass to pinned host memory. With graphs of whole passes, a decode step is one graph; a
decode window of n positions replays the same graph n times.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import StepPlan
from octavo.kernels.row_state import DecodeInputs
from octavo.runner.checksums import SwapInCheck
from octavo.runner.device_state import NUM_PARTS, DeviceState
from octavo.runner.input_buffers import EMPTY_PAIR, InputBuffers, int64, is_decode_only, next_tokens
from octavo.runner.memory.profile import Precompile
from octavo.runner.output_buffers import OutputBuffers
from octavo.runner.passes.graphs import Model
from octavo.runner.passes.pass_shape import Column, Pass, PassShape
from octavo.runner.passes.passes import Passes
from octavo.runner.passes.prefill_batch import PrefillBatch, PrefillSizes, make_batches
from octavo.runner.platform import Platform
from octavo.runner.sampling.device_columns import DeviceColumns
from octavo.runner.sampling.grammar_bitmask import BitmaskBuffer
from octavo.runner.sampling.host_columns import HostColumns
from octavo.runner.sampling.host_sampling import HostSampler
from octavo.runner.sampling.pipeline import Pipeline
from octavo.runner.step import ColumnSampler, Step


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
        self.host_sampler = HostSampler(state.rows, state.processors, platform)
        max_lines = max(num_rows + 2, PrefillSizes.FEW)  # of logits of a pass, with the padding of graphs
        inputs = self.input_buffers = InputBuffers(num_rows, platform)
        self.output_buffers = OutputBuffers(max_decode_steps, max_lines, platform)
        bitmask = BitmaskBuffer(max_lines, vocab_size, platform)
        pipeline = Pipeline(state, bitmask, self.output_buffers, inputs.step_counter)
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

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Step:
        """Queue a plan's changes, and its first pass if that waits for a bitmask. `Step.advance` queues the rest.

        The caller must call it, once or for each column with bitmasks, before the next plan.
        """
        assert max(plan.num_sampled, default=0) <= self.output_buffers.num_columns, plan.num_sampled
        host, processors, ring = self.host_sampler, self.state.processors, self.output_buffers
        processors.apply(plan)
        host.apply(plan)
        num_logprobs = processors.slice_logprobs(plan)
        on_host = host.is_needed(plan) or bool(num_logprobs and plan.bitmask_slices)
        output = ring.new_output(len(plan.rows), num_logprobs)
        prefills, slices, cascade, output.swap_in_check = self._upload(plan, self._batches(plan, on_host), on_host)
        sampler: ColumnSampler
        if on_host:
            num_candidates = 0 if prefills else host.num_beam_candidates(plan)
            sampler = HostColumns(host, self.passes, ring, output, plan, num_candidates=num_candidates)
        else:
            host.is_stale = True
            variant = PassShape(0, "pass", processors.applies_to(plan), bool(num_logprobs), cascade)
            sampler = DeviceColumns(self.passes, ring, output, variant, fuses=plan.num_bitmask_columns > 1)
        live_slices = partial(self.input_buffers.live_slices, self.state.rows.done) if self.platform.is_host else None
        return Step(plan, ring, output, sampler, prefills, slices, live_slices)

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

    def _upload(
        self, plan: StepPlan, batches: list[PrefillBatch], on_host: bool
    ) -> tuple[Column, Seq[int], bool, SwapInCheck]:
        """Copy a plan to the device, and queue its changes.

        Returns the prefill passes, the slices of the decode passes, whether these use cascade attention, and the check
        of the blocks that are swapped in.
        """
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
        null_row = self.state.rows.null_row
        sizes = [self.passes.padded(batch.size) for batch in batches]
        packed = [batch.pack(size, null_row) for batch, size in zip(batches, sizes, strict=True)]
        tokens = EMPTY_PAIR if batches or not plan.host_tokens else next_tokens(plan)
        parts = [*changes, *tokens, *packed]
        uploaded = self.input_buffers.upload(self.output_buffers.first_column, rows, first, ends, null_row, parts)
        check = self.state.apply(plan, uploaded[:NUM_PARTS], *uploaded[NUM_PARTS : NUM_PARTS + 2])
        found = zip(batches, sizes, uploaded[NUM_PARTS + 2 :], strict=True)
        prefills = [Pass(batch.sample_slices, size, inputs, batch) for batch, size, inputs in found]
        return prefills, slices, order is not None, check
