"""Decode steps without the host: from the row state to a pass, and from its logits back to the row state."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.kernels.metadata import PER_ROW_FIELDS, RaggedBatch, SamplingTensors
from octavo.kernels.reference.sampling import apply_token_bitmask, finite_rows, sample, token_logprobs
from octavo.kernels.row_state import (
    ALLOWED_TOKENS,
    FIRST_STOP_ID,
    IN_PROMPT,
    LOGIT_BIAS,
    MAX_DRAFTS,
    MAX_LOGPROBS,
    MAX_MATCH,
    MIN_TOKENS,
    NOT_FINITE,
    NOTHING_SAMPLED,
    NUM_LOGPROBS,
    PENALTIES,
    DecodeInputs,
    DraftLines,
    LogitsProcessorState,
    RowState,
)


def prepare_decode_inputs(state: RowState, inputs: DecodeInputs, block_size: int) -> None:
    """Fill the inputs of a decode pass from the row state: one position of each line."""
    batch, sampling, depths = inputs.batch, inputs.sampling, inputs.depths
    is_draft = depths > 0
    draft = state.drafts[inputs.rows, (depths - 1).clamp(min=0)]
    position = state.num_computed[inputs.rows] + depths
    live = (position < inputs.ends) & ~state.done[inputs.rows] & (~is_draft | (draft >= 0))
    position = torch.where(live, position, 0)
    inputs.live_rows.copy_(torch.where(live, inputs.rows, state.null_row))
    inputs.token_ids.copy_(torch.where(is_draft, draft.clamp(min=0), state.last_token[inputs.rows]))
    batch.positions.copy_(position)
    batch.seq_lens.copy_(torch.where(live, position + 1, 0))
    for group in range(batch.num_groups):
        tables = state.tables_of(group)[inputs.rows, : batch.block_tables.shape[1]]  # [num_lines, max_blocks]
        block = tables.gather(1, (position // block_size).unsqueeze(1)).squeeze(1).long()
        batch.group(group).slot_mapping.copy_(torch.where(live, block * block_size + position % block_size, 0))
        batch.group(group).block_tables.copy_(tables)
    _fill_states(state, inputs.rows, live, batch)
    if batch.common_prefix_lens is not None:
        tables = batch.block_tables
        both = torch.where(live[1:] & live[:-1], torch.minimum(position[1:], position[:-1]), 0)
        column = torch.arange(tables.shape[1], device=tables.device)
        same = (tables[1:] == tables[:-1]) & (column < (both // block_size).unsqueeze(1))
        batch.common_prefix_lens[:1] = 0
        batch.common_prefix_lens[1:] = same.int().cumprod(1).sum(1) * block_size
    params = state.sampling(inputs.rows, torch.full_like(inputs.rows, -1), position + 1)
    for name in PER_ROW_FIELDS:
        getattr(sampling, name).copy_(getattr(params, name))


def _fill_states(state: RowState, rows: Tensor, live: Tensor, batch: RaggedBatch) -> None:
    """Fill the tables of states that a pass reads and writes, null where it computes nothing. What it writes, the next
    pass of the row reads."""
    if batch.state_tables is not None and batch.state_reads is not None:
        batch.state_reads.copy_(state.state_reads[rows] * live.unsqueeze(1))
        batch.state_tables.copy_(state.state_tables[rows] * live.unsqueeze(1))
        state.state_reads[rows[live]] = state.state_tables[rows[live]]


def propose_drafts(state: RowState, rows: Tensor, ends: Tensor, num_drafts: int) -> None:
    """Guess the next tokens of rows: those that followed the longest earlier match of the last tokens, the latest of
    equally long ones. A guess that reaches the end of the sequence goes on from its own beginning.

    rows, ends  [num_slices] int64, each row once. No draft is at `ends` or later
    """
    for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
        state.drafts[row] = -1
        last = int(state.num_computed[row])
        num = 0 if state.done[row] else min(num_drafts, end - 1 - last)
        tokens = state.history[row, : last + 1].tolist()
        best_length, best = 0, 0
        for position in range(last):
            length = 0
            while length < min(MAX_MATCH, position + 1) and tokens[position - length] == tokens[last - length]:
                length += 1
            if length and length >= best_length:
                best_length, best = length, position
        if best_length:
            for depth in range(num):
                tokens.append(tokens[best + 1 + depth])
                state.drafts[row, depth] = tokens[-1]


def prepare_prefill_inputs(
    state: RowState, rows: Tensor, starts: Tensor, known: Tensor, batch: RaggedBatch, token_ids: Tensor, block_size: int
) -> None:
    """Fill the inputs of a pass over slices of any length from the row state. `num_computed` becomes the position of
    each slice's last token.

    rows, starts  [num_slices] int64
    known         [num_tokens] int64, tokens from the host; -1, in a slice of length 1: the row's last token, at the
                  position `num_computed`. The host's tokens clear the row's done flag. A row that stays done computes
                  from position 0 in the null block; so does the null row, which pads with slices of any length
    batch         query_start is an input; positions, slot_mapping, seq_lens and block_tables are filled
    token_ids     [num_tokens] int64, filled
    """
    begin = batch.query_start[:-1].long()  # [num_slices]
    counts = batch.query_start.diff().long()
    from_host = (counts > 0) & (known[begin.clamp(max=len(known) - 1)] >= 0)
    state.done[rows[from_host]] = False
    is_done = state.done[rows]
    start = torch.where(is_done, 0, torch.where(from_host, starts, state.num_computed[rows]))
    sequence = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), counts)  # [num_tokens]
    position = torch.arange(len(sequence), device=rows.device) - begin[sequence] + start[sequence]
    token_ids.copy_(torch.where(known < 0, state.last_token[rows][sequence], known))
    batch.positions.copy_(position)
    batch.seq_lens.copy_(start + counts)
    for group in range(batch.num_groups):
        tables = state.tables_of(group)[rows, : batch.block_tables.shape[1]] * ~is_done.unsqueeze(1)
        block = tables[sequence, position // block_size].long()
        slots = torch.where(is_done[sequence], 0, block * block_size + position % block_size)
        batch.group(group).slot_mapping.copy_(slots)
        batch.group(group).block_tables.copy_(tables)
    _fill_states(state, rows, ~is_done, batch)
    state.num_computed[rows[~is_done]] = (start + counts - 1)[~is_done]


def sample_checked(logits: Tensor, params: SamplingTensors, masks: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """`sample` with a token bitmask and a check of the logits -> [num_rows] int64.

    masks   (mask_index, bitmask) of `apply_token_bitmask`, applied to the logits first. None: no mask

    A row with non-finite logits gets -1, a row whose tokens are all masked -2.
    """
    finite = finite_rows(logits)
    if masks is not None:
        apply_token_bitmask(logits, *masks)
    tokens = sample(torch.where(finite.unsqueeze(1), logits, 0.0), params)
    return check_tokens(tokens, logits, finite)


def check_tokens(tokens: Tensor, logits: Tensor, finite: Tensor) -> Tensor:
    """The tokens that were sampled from these logits, with the errors of `sample_checked` in place of some."""
    is_left = logits.gather(1, tokens.unsqueeze(1)).squeeze(1) > -math.inf
    return torch.where(finite, torch.where(is_left, tokens, -2), -1)


def init_token_counts(
    processors: LogitsProcessorState, rows: Tensor, starts: Tensor, begins: Tensor, token_ids: Tensor
) -> None:
    """Count tokens from the host, for rows with penalties. Positions that are counted already are skipped.

    rows, starts  [num_slices] int64, each row once: slice i has the row's tokens from position starts[i] on
    begins        [num_slices + 1] int64: the tokens of slice i are token_ids[begins[i] : begins[i + 1]]
    token_ids     [num_tokens] int64
    """
    ends = zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True)
    for row, start, (begin, end) in zip(rows.tolist(), starts.tolist(), ends, strict=True):
        known, prompt = int(processors.num_counted[row]), int(processors.num_prompt[row])
        for position, token in enumerate(token_ids[begin:end].tolist(), start):
            if position >= known:
                if position < prompt:
                    processors.counts[row, token] |= IN_PROMPT
                else:
                    processors.counts[row, token] += 1
        processors.num_counted[row] = max(known, start + end - begin)


def update_token_counts(processors: LogitsProcessorState, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
    """Add sampled tokens to history and counts of rows with logits processors; tokens below 0 are skipped.

    All [num_samples] int64 and contiguous. The positions of a row differ.
    """
    assert rows.is_contiguous() and positions.is_contiguous() and tokens.is_contiguous()
    enabled = processors.enabled[rows]
    good = (tokens >= 0) & (enabled != 0)
    processors.history[rows[good], positions[good]] = tokens[good].int()
    good &= (enabled & PENALTIES) != 0
    rows = rows[good]
    ones = torch.ones(len(rows), dtype=processors.counts.dtype, device=rows.device)
    processors.counts.index_put_((rows, tokens[good]), ones, accumulate=True)
    processors.num_counted.scatter_reduce_(0, rows, positions[good].int() + 1, "amax")


def apply_row_logits_processors(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: RowState,
    processors: LogitsProcessorState,
    drafts: DraftLines | None = None,
) -> None:
    """Apply each row's logits processors to logits [num_samples, vocab_size] float32, in place.

    The order is: biases, min_tokens (-inf for stop tokens), penalties, allowed tokens (-inf for all others).

    rows, positions [num_samples] int64, the row and the position of each sampled token
    drafts          penalties count them up to each line
    """
    for i, (line, row, position) in enumerate(zip(logits, rows.tolist(), positions.tolist(), strict=True)):
        enabled = int(processors.enabled[row])
        if enabled & LOGIT_BIAS:
            ids = processors.bias_ids[row]
            line[ids[ids >= 0].long()] += processors.bias_values[row][ids >= 0]
        if enabled & MIN_TOKENS and position < int(processors.min_length[row]):
            stops = state.sampling_params[row, FIRST_STOP_ID:]
            line[stops[stops >= 0]] = -math.inf
        if enabled & PENALTIES:
            repetition, presence, frequency = processors.penalties[row]
            counts = processors.counts[row]
            if drafts is not None and drafts.depths[i]:
                own = drafts.token_ids[i + 1 - int(drafts.depths[i]) : i + 1]
                counts = counts + torch.bincount(own, minlength=len(counts)).int()
            num_output = counts & (IN_PROMPT - 1)
            penalized = torch.where(line > 0, line / repetition, line * repetition)
            line.copy_(torch.where(counts != 0, penalized, line))
            line -= frequency * num_output + presence * (num_output > 0)
        if enabled & ALLOWED_TOKENS:
            apply_token_bitmask(
                line.unsqueeze(0), torch.zeros(1, dtype=torch.int32), processors.allowed_bitmask[row].unsqueeze(0)
            )


def write_logprobs(
    state: RowState, rows: Tensor, logits: Tensor, tokens: Tensor, ring: Tensor, step_counter: Tensor
) -> None:
    """Write log-probabilities of sampled tokens to the host's ring, for rows that return them.

    Runs before `commit_sampled_tokens`.

    rows    [num_samples] int64
    logits  [num_samples, vocab_size], unprocessed
    tokens  [num_samples] int64; a negative one is skipped
    ring    [num_columns, at least num_samples, 2 + 2 * MAX_LOGPROBS] int32. Column step_counter[0] gets a line for each
            sample, as `packed_top_logprobs` packs it, with as many top tokens as the row returns; the bits of their
            log-probabilities begin at 2 + MAX_LOGPROBS
    """
    for i, num in enumerate(state.sampling_params[rows, NUM_LOGPROBS].tolist()):
        if num < 0 or tokens[i] < 0:
            continue
        chosen, rank, ids, best = token_logprobs(logits[i : i + 1].float(), tokens[i : i + 1], num)
        line = ring[step_counter[0], i]
        line[0], line[1] = chosen.view(torch.int32), rank
        line[2 : 2 + num] = ids
        line[2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + num] = best.contiguous().view(torch.int32)


def reject_drafts(state: RowState, rows: Tensor, tokens: Tensor, drafts: DraftLines) -> Tensor:
    """The sampled tokens of a decode pass, with -3 in place of those that follow a wrong draft or a stop token.

    A line's token counts if the lines of its row before it sampled exactly the drafts. Their stop tokens and errors end
    the row, though a draft may equal them.

    rows    [num_samples] int64
    tokens  [num_samples] int64 from `sample_checked`
    """
    ends = (tokens < 0) | (state.sampling_params[rows, FIRST_STOP_ID:] == tokens.unsqueeze(1)).any(1)
    follows = (tokens.roll(1) == drafts.token_ids) & ~ends.roll(1)
    is_first = drafts.depths == 0
    accepted = is_first | follows
    for _ in range(MAX_DRAFTS - 1):
        accepted &= is_first | accepted.roll(1)
    return torch.where(accepted, tokens, -3)


def commit_sampled_tokens(
    state: RowState, rows: Tensor, tokens: Tensor, positions: Tensor, ring: Tensor, step_counter: Tensor
) -> None:
    """Store the sampled tokens of a pass in the row state and in the host's ring, and advance the step counter.

    Of a row with drafts, the last token that counts becomes its last token. Several samples of one row are resolved by
    the host.

    rows       [num_samples] int64, the row of each sample
    tokens     [num_samples] int64 from `sample_checked`: -1 for non-finite logits, -2 where every token was masked; -3
               from `reject_drafts`
    positions  [num_samples] int64, those of the tokens
    ring       [num_columns, at least num_samples] int32. Column step_counter[0] gets each token, or NOTHING_SAMPLED,
               NOT_FINITE, NO_TOKEN_LEFT or REJECTED of `row_state`
    """
    alive = ~state.done[rows]
    results = torch.where(tokens < 0, tokens + (NOT_FINITE + 1), tokens)
    ring[step_counter[0], : len(rows)] = torch.where(alive, results, NOTHING_SAMPLED).to(ring.dtype)
    is_error = (tokens == -1) | (tokens == -2)
    stops = is_error | (state.sampling_params[rows, FIRST_STOP_ID:] == tokens.unsqueeze(1)).any(1)
    good = alive & (tokens >= 0)
    if state.history.shape[1]:
        state.history[rows[good], positions[good]] = tokens[good].int()
    last = good.clone()
    last[:-1] &= ~((rows[1:] == rows[:-1]) & good[1:])
    state.last_token[rows[last]] = tokens[last]
    state.num_computed[rows[last]] = positions[last]
    state.done[rows[alive & stops]] = True
    step_counter += 1
