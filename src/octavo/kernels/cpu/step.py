"""From the row state to a pass, and from its sampled tokens back, on the CPU.

Rows are few and numbers small, so the time is that of the calls. What most decode steps need is native and can be
recorded. For the rest, numpy's calls take a third of the time of torch's. All arrays share the tensors' memory.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu import native
from octavo.kernels.cpu.sampling import apply_token_bitmask, finite_rows, sample, token_logprobs
from octavo.kernels.metadata import RaggedBatch, SamplingTensors
from octavo.kernels.row_state import (
    ALLOWED_TOKENS,
    FIRST_STOP_ID,
    IN_PROMPT,
    LOGIT_BIAS,
    MAX_LOGPROBS,
    MIN_TOKENS,
    NUM_LOGPROBS,
    PENALTIES,
    DecodeInputs,
    DraftLines,
    LogitsProcessorState,
    RowState,
)


def prepare_decode_inputs(state: RowState, inputs: DecodeInputs, block_size: int) -> None:
    """See `reference.prepare_decode_inputs`."""
    library = native.library() if inputs.batch.common_prefix_lens is None else None
    prepare = reference.prepare_decode_inputs if library is None else library.prepare_decode
    prepare(state, inputs, block_size)


def _fill_states(state: RowState, rows: np.ndarray, live: np.ndarray, batch: RaggedBatch) -> None:
    """See `reference.step._fill_states`."""
    if batch.state_tables is not None and batch.state_reads is not None:
        reads, writes = state.state_reads.numpy(), state.state_tables.numpy()
        batch.state_reads.numpy()[:] = reads[rows] * live[:, None]
        batch.state_tables.numpy()[:] = writes[rows] * live[:, None]
        reads[rows[live]] = writes[rows[live]]


def prepare_prefill_inputs(
    state: RowState, rows: Tensor, starts: Tensor, known: Tensor, batch: RaggedBatch, token_ids: Tensor, block_size: int
) -> None:
    """See `reference.prepare_prefill_inputs`."""
    row, tokens, query_start = rows.numpy(), known.numpy(), batch.query_start.numpy().astype(np.int64)
    begin, counts = query_start[:-1], np.diff(query_start)
    done = state.done.numpy()
    from_host = (counts > 0) & (tokens[begin.clip(max=len(tokens) - 1)] >= 0)
    done[row[from_host]] = False
    is_done = done[row]
    start = np.where(is_done, 0, np.where(from_host, starts.numpy(), state.num_computed.numpy()[row]))
    sequence = np.repeat(np.arange(len(row)), counts)  # [num_tokens]
    position = np.arange(len(sequence)) - begin[sequence] + start[sequence]
    block, offset = np.divmod(position, block_size)
    for group in range(batch.num_groups):
        tables = state.tables_of(group).numpy()[row, : batch.block_tables.shape[1]] * ~is_done[:, None]
        slots = tables[sequence, block].astype(np.int64) * block_size + offset
        batch.group(group).slot_mapping.numpy()[:] = slots * ~is_done[sequence]
        batch.group(group).block_tables.numpy()[:] = tables
    _fill_states(state, row, ~is_done, batch)
    token_ids.numpy()[:] = np.where(tokens < 0, state.last_token.numpy()[row][sequence], tokens)
    batch.positions.numpy()[:] = position
    batch.seq_lens.numpy()[:] = start + counts
    state.num_computed.numpy()[row[~is_done]] = (start + counts - 1)[~is_done]


def sample_checked(logits: Tensor, params: SamplingTensors, masks: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """See `reference.sample_checked`. Logits are copied only if some are not finite."""
    has_filter = params.any_filter and bool(params.is_filtered().any())
    if masks is None and not has_filter and (library := native.library_for(logits)) is not None:
        return library.sample(logits, params, is_checked=True)
    finite = finite_rows(logits)
    all_finite = bool(finite.all())
    if masks is not None:
        apply_token_bitmask(logits, *masks)
    if not all_finite:
        logits = torch.where(finite.unsqueeze(1), logits, 0.0)  # sampling must not fail
    tokens = sample(logits, params)
    return tokens if all_finite and masks is None else reference.check_tokens(tokens, logits, finite)


def init_token_counts(
    processors: LogitsProcessorState, rows: Tensor, starts: Tensor, begins: Tensor, token_ids: Tensor
) -> None:
    """See `reference.init_token_counts`. numpy counts a slice without a loop over its tokens."""
    counts, num_counted, num_prompt = (
        x.numpy() for x in (processors.counts, processors.num_counted, processors.num_prompt)
    )
    for i, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
        tokens = token_ids.numpy()[int(begins[i]) : int(begins[i + 1])]
        first_new = max(0, num_counted[row] - start)
        first_output = max(first_new, num_prompt[row] - start)
        counts[row][tokens[first_new:first_output]] |= IN_PROMPT
        np.add.at(counts[row], tokens[first_output:], 1)
        num_counted[row] = max(num_counted[row], start + len(tokens))


def apply_row_logits_processors(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: RowState,
    processors: LogitsProcessorState,
    drafts: DraftLines | None = None,
) -> None:
    """See `reference.apply_row_logits_processors`. Penalties are computed only for tokens that occurred before."""
    table, row_ids = logits.numpy(), rows.numpy()  # the same memory
    enabled = processors.enabled.numpy()[row_ids]
    for i in np.flatnonzero(enabled):
        line, row = table[i], row_ids[i]
        if enabled[i] & LOGIT_BIAS:
            ids = processors.bias_ids.numpy()[row]
            used = ids >= 0
            line[ids[used]] += processors.bias_values.numpy()[row][used]
        if enabled[i] & MIN_TOKENS and positions[i] < processors.min_length[row]:
            stops = state.sampling_params.numpy()[row, FIRST_STOP_ID:]
            line[stops[stops >= 0]] = -np.inf
        if enabled[i] & PENALTIES:
            repetition, presence, frequency = processors.penalties.numpy()[row]
            counts = processors.counts.numpy()[row]
            if drafts is not None and (depth := int(drafts.depths[i])):
                counts = counts + np.bincount(drafts.token_ids[i + 1 - depth : i + 1], minlength=len(counts))
            ids = np.flatnonzero(counts != 0)  # a boolean array: over three times as fast as integers
            num_output = (counts[ids] & (IN_PROMPT - 1)).astype(line.dtype)
            penalized = np.where(line[ids] > 0, line[ids] / repetition, line[ids] * repetition)
            line[ids] = penalized - (frequency * num_output + presence * (num_output > 0))
        if enabled[i] & ALLOWED_TOKENS:
            first = torch.zeros(1, dtype=torch.int32)
            apply_token_bitmask(logits[i : i + 1], first, processors.allowed_bitmask[row : row + 1])


def write_logprobs(
    state: RowState, rows: Tensor, logits: Tensor, tokens: Tensor, ring: Tensor, step_counter: Tensor
) -> None:
    """See `reference.write_logprobs`. Rows with the same number of top tokens are computed together."""
    nums = state.sampling_params.numpy()[rows.numpy(), NUM_LOGPROBS]
    nums = np.where(tokens.numpy() < 0, -1, nums)
    column = ring.numpy()[step_counter.numpy()[0]]
    for num in set(nums[nums >= 0].tolist()):
        lines = np.flatnonzero(nums == num)
        ids = torch.from_numpy(lines)
        chosen, ranks, top_ids, best = token_logprobs(logits[ids].float(), tokens[ids], min(num, logits.shape[1]))
        column[lines, 0], column[lines, 1] = chosen.numpy().view(np.int32), ranks.numpy()
        column[lines, 2 : 2 + num] = top_ids.numpy()
        column[lines, 2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + num] = best.numpy().view(np.int32)


def packed_top_logprobs(logits: Tensor, num: int) -> Tensor:
    """See `reference.packed_top_logprobs`. Sorts only top tokens, not the vocabulary."""
    finite = finite_rows(logits)
    if not bool(finite.all()):
        return reference.packed_top_logprobs(logits, num)
    first = torch.zeros(len(logits), dtype=torch.int64)
    _, _, ids, best = token_logprobs(logits.float(), first, min(num, logits.shape[1]))
    best = best.contiguous().view(torch.int32)
    return torch.cat([best[:, :1], finite.int().unsqueeze(1), ids.int(), best], 1)


def reject_drafts(state: RowState, rows: Tensor, tokens: Tensor, drafts: DraftLines) -> Tensor:
    """See `reference.reject_drafts`."""
    token, depths = tokens.numpy(), drafts.depths.numpy()
    if not depths.any():
        return tokens
    stop_ids = state.sampling_params.numpy()[rows.numpy(), FIRST_STOP_ID:]
    ends = (token < 0) | (stop_ids == token[:, None]).any(1)
    accepted = depths == 0
    follows = np.zeros_like(accepted)
    follows[1:] = (token[:-1] == drafts.token_ids.numpy()[1:]) & ~ends[:-1]
    for depth in range(1, int(depths.max()) + 1):
        lines = np.flatnonzero(depths == depth)
        accepted[lines] = follows[lines] & accepted[lines - 1]
    return torch.from_numpy(np.where(accepted, token, -3))


def commit_sampled_tokens(
    state: RowState, rows: Tensor, tokens: Tensor, positions: Tensor, ring: Tensor, step_counter: Tensor
) -> None:
    """See `reference.commit_sampled_tokens`."""
    library = native.library()
    commit = reference.commit_sampled_tokens if library is None else library.commit_tokens
    commit(state, rows, tokens, positions, ring, step_counter)
