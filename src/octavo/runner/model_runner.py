"""Runs plans on any platform, whose device keeps the state of the rows: the host queues work and reads tokens.

    plan -> one copy to the device -> changes of rows and blocks -> passes, column by column -> the ring of tokens

A plan costs one copy to the device, of all that has changed, and one launch or a few for each forward pass. The device
writes the sampled tokens of each pass to pinned host memory. With graphs of whole passes, a decode step is one graph; a
decode window of n positions replays the same graph n times.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import StepPlan
from octavo.kernels.row_state import DecodeInputs
from octavo.models.linear import VocabSlice
from octavo.runner.checksums import SwapInCheck
from octavo.runner.decode_lines import DecodeLines, decode_slices
from octavo.runner.device_state import NUM_PARTS, DeviceState
from octavo.runner.drafter import MAX_DEVICE_LINES, MAX_LINES, Drafter, DraftLimit
from octavo.runner.drafts.draft_model import Draft
from octavo.runner.drafts.shared_suffixes import SharedSuffixes
from octavo.runner.input_buffers import NO_TOKENS, InputBuffers, is_decode_only, next_tokens
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


class Upload(NamedTuple):
    """A plan whose inputs and changes are queued.

    prefills    its prefill passes
    slices      of the lines of its decode passes
    lines       chooses them anew for each pass; None: the host cannot
    cascade     they use cascade attention
    num_drafts  see `PassShape`
    check       of the blocks that are swapped in
    """

    prefills: Column
    slices: Seq[int]
    lines: DecodeLines | None
    cascade: bool
    num_drafts: int
    check: SwapInCheck


class ModelRunner:
    """A model, its KV pool, and the state of the rows, all on one device.

    kv                [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim]
    host_kv           the swap space, likewise; see `Platform.make_host_pool`
    max_num_tokens    most positions of a plan
    max_decode_steps  most tokens that a plan decodes per row
    vocab_size        width of the model's logits
    graphs            capture and replay the platform's graphs
    num_speculative_tokens
                      most drafts per sequence and pass; 0: no speculation
    shares_suffixes   drafts of the CPU may come from other requests with the same salt
    draft             drafts come from this model; None: from earlier text
    num_groups        groups of layers with block tables of their own
    state_blocks      blocks of a sequence's recurrent state; 0: there is none
    vocab_slice       tokens whose logits the model computes, where it is one rank's part; None: all
    measures_drafts   the time of passes decides how many drafts they have; not with ranks, whose clocks differ
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
        num_speculative_tokens: int = 0,
        shares_suffixes: bool = False,
        draft: Draft | None = None,
        num_groups: int = 1,
        state_blocks: int = 0,
        vocab_slice: VocabSlice | None = None,
        measures_drafts: bool = True,
    ) -> None:
        self.platform = platform
        self.num_speculative_tokens = num_speculative_tokens
        state = self.state = DeviceState(
            kv,
            host_kv,
            platform,
            num_rows=num_rows,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            keeps_history=num_speculative_tokens > 0 and draft is None,
            draft=draft,
            num_groups=num_groups,
            state_blocks=state_blocks,
        )
        drafts_on_host = num_speculative_tokens > 0 and platform.is_host and draft is None
        shared = SharedSuffixes() if shares_suffixes and drafts_on_host else None
        self.drafter = Drafter(state.rows, shared, measures=measures_drafts) if drafts_on_host else None
        self._measures_drafts = measures_drafts
        measures = num_speculative_tokens and not drafts_on_host
        self.draft_limit = DraftLimit(
            platform.make_timer if measures and measures_drafts else None, drafts_cost=draft is not None
        )
        self.host_sampler = HostSampler(state.rows, state.processors, platform)
        # Of logits of a pass, with the padding of graphs.
        most = min(MAX_DEVICE_LINES, num_rows * (1 + num_speculative_tokens)) if measures else MAX_LINES
        max_lines = max(num_rows + 2, PrefillSizes.FEW, most if num_speculative_tokens else 0)
        inputs = self.input_buffers = InputBuffers(max_lines, platform)
        self.output_buffers = OutputBuffers(max_decode_steps, max_lines, platform)
        bitmask = BitmaskBuffer(max_lines, vocab_size, platform)
        pipeline = Pipeline(state, bitmask, self.output_buffers, inputs.step_counter, vocab_slice)
        decode_inputs = DecodeInputs.allocate(
            inputs.step_counter,
            inputs.rows,
            inputs.depths,
            inputs.ends,
            max_blocks=state.rows.max_blocks,
            block_size=kv.shape[4],
            num_windows=num_groups - 1,
            state_blocks=state_blocks,
        )
        sizes = PrefillSizes(num_rows, max_num_tokens, max_model_len)
        self.passes = Passes(
            model,
            state,
            decode_inputs,
            sizes,
            pipeline,
            platform,
            num_rows=num_rows,
            max_lines=max_lines,
            graphs=graphs,
        )

    @torch.inference_mode()
    def capture(self, precompile: Precompile | None = None) -> None:
        """Compile kernels and capture graphs before the first request."""
        if self.passes.graphs.whole_passes:
            if precompile is not None:
                precompile(self.passes.run_all_variants)
            self.passes.capture_all()

    def close(self) -> None:
        """Free captured work, also if others still refer to it: NCCL waits for graphs that have its kernels."""
        self.passes.release_graphs()

    @torch.inference_mode()
    def measure_pass(self) -> float:
        """Seconds of the shortest decode pass; 0 without graphs of whole passes."""
        return self.passes.measure() if self.passes.graphs.whole_passes else 0.0

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Step:
        """Queue a plan's changes, and its first pass if that waits for a bitmask. `Step.advance` queues the rest.

        The caller must call it, once or for each column with bitmasks, before the next plan.
        """
        assert plan.most_passes <= self.output_buffers.num_columns, plan.num_sampled
        host, processors, ring = self.host_sampler, self.state.processors, self.output_buffers
        processors.apply(plan)
        host.apply(plan)
        if self.drafter is not None:
            self.drafter.forget({setup.row: setup.salt for setup in plan.row_setups})
        num_logprobs = processors.slice_logprobs(plan)
        on_host = host.is_needed(plan) or bool(num_logprobs and plan.bitmask_slices)
        output = ring.new_output(len(plan.rows), num_logprobs)
        upload = self._upload(plan, self._batches(plan, on_host), on_host)
        output.swap_in_check, prefills = upload.check, upload.prefills
        if upload.num_drafts:
            learn = partial(self.draft_limit.learn, upload.num_drafts)
            output.on_drafts = learn if self._measures_drafts else lambda num_right: None
        sampler: ColumnSampler
        if on_host:
            num_candidates = 0 if prefills else host.num_beam_candidates(plan)
            sampler = HostColumns(host, self.passes, ring, output, plan, num_candidates=num_candidates)
        else:
            host.is_stale = True
            uses_processors = processors.applies_to(plan)
            needs_all = uses_processors or num_logprobs or upload.num_drafts or plan.bitmask_slices
            filters = processors.filters(plan)
            sliced = self.passes.plain.sliced and not (needs_all or processors.filters_all(plan))
            variant = PassShape(
                0,
                logits_processors=uses_processors,
                logprobs=bool(num_logprobs),
                cascade=upload.cascade,
                num_drafts=upload.num_drafts,
                filters=filters or not (self.platform.is_host or sliced),
                sliced=sliced,
            )
            fuses = plan.num_bitmask_columns > 1
            sampler = DeviceColumns(self.passes, ring, output, variant, fuses=fuses, timers=self.draft_limit.timers)
        return Step(plan, ring, output, sampler, prefills, upload.slices, upload.lines)

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

    def _upload(self, plan: StepPlan, batches: list[PrefillBatch], on_host: bool) -> Upload:
        """Copy a plan to the device, and queue its changes."""
        state, buffers, is_host = self.state, self.input_buffers, self.platform.is_host
        slices = decode_slices(plan, only_windows=bool(batches))
        changes = state.pack(plan)
        num_drafts, order = 0, None
        if plan.drafts and not on_host:
            num_drafts = 1 if self.drafter is not None else self._num_drafts(plan, len(slices.rows))
        can_share = not on_host and not plan.bitmask_slices and not num_drafts
        if (prefixes := state.shared_prefixes) is not None and can_share:
            order = prefixes.order(slices.rows, slices.firsts)
        if order is not None:
            slices = slices.select(order)
        planned = 0 if self.drafter is not None else num_drafts
        each = np.full(len(slices.rows), planned)
        of_lines, lines = slices.lines(each, state.rows.null_row)
        sizes = [self.passes.padded(batch.size) for batch in batches]
        packed = [batch.pack(size, state.rows.null_row) for batch, size in zip(batches, sizes, strict=True)]
        tokens = NO_TOKENS if batches or not plan.host_tokens else next_tokens(plan)
        most = [slices.most.repeat(each + 1)] if self.num_speculative_tokens else []
        parts = [*changes, *tokens, *packed, *most]
        uploaded = buffers.upload(self.output_buffers.first_column, lines, state.rows.null_row, parts)
        check = state.apply(plan, uploaded[:NUM_PARTS], uploaded[NUM_PARTS : NUM_PARTS + 3])
        if most:  # a row whose drafts were wrong is not where the host thought
            rows, ends = buffers.rows[: lines.shape[1]], buffers.ends[: lines.shape[1]]
            torch.minimum(ends, state.rows.num_computed[rows] + uploaded[-1], out=ends)
        found = zip(batches, sizes, uploaded[NUM_PARTS + 3 :], strict=False)
        prefills = [Pass(batch.sample_slices, size, inputs, batch) for batch, size, inputs in found]
        host_lines = None
        if is_host:
            slices = slices._replace(ends=buffers.ends[: lines.shape[1] : planned + 1].numpy().copy())
            drafter = self.drafter if num_drafts else None
            host_lines = DecodeLines(slices, buffers.head, state.rows, drafter, planned)
        return Upload(prefills, of_lines, host_lines, order is not None, num_drafts, check)

    def _num_drafts(self, plan: StepPlan, num_slices: int) -> int:
        """Drafts of each slice, where they are chosen with the plan."""
        if not num_slices or plan.bitmask_slices:
            return 0
        num_lines = self.passes.padded_slices(num_slices)
        most = max(drafts.num_draft_tokens for drafts in plan.drafts.values())
        return self.draft_limit.choose(num_lines, min(most, self.passes.max_lines // num_lines - 1))
