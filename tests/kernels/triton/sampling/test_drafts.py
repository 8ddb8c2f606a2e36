"""Drafts: proposed, rejected, and counted by penalties, against the reference."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.row_state import FIRST_STOP_ID, PENALTIES, DraftLines, LogitsProcessorState, RowState
from octavo.kernels.triton import ops as cuda
from tests.kernels.triton.device import DEVICE
from tests.kernels.triton.sampling.rows import to_device

NUM_ROWS, MAX_LEN = 6, 2600


def state_with_history(seed: int) -> RowState:
    """Histories of few different tokens, so that they repeat themselves; row 2 is done."""
    generator = torch.Generator().manual_seed(seed)
    state = RowState.empty(NUM_ROWS, 4, "cpu", max_len=MAX_LEN)
    for row, variety in enumerate((2, 3, 5, 40, 400, 1)):
        state.history[row] = torch.randint(variety, (MAX_LEN,), generator=generator).int()
    state.num_computed[:NUM_ROWS] = torch.tensor([0, 7, 30, 2000, 2500, 1100])
    state.done[2] = True
    state.sampling_params[:, FIRST_STOP_ID] = 1
    return state


@pytest.mark.parametrize("num_drafts", [1, 7, 15])
def test_propose_drafts_matches_the_reference(num_drafts: int) -> None:
    state = state_with_history(num_drafts)
    rows, ends = torch.tensor([3, 0, 2, 1, NUM_ROWS, 4, 5]), torch.tensor([2500, 30, 60, 12, 0, 2600, 1103])
    actual = to_device(state)
    lines, line_ends = (x.repeat_interleave(4).to(DEVICE)[::4] for x in (rows, ends))  # strided, as in a pass
    cuda.propose_drafts(actual, lines, line_ends, num_drafts)
    reference.propose_drafts(state, rows, ends, num_drafts)
    assert torch.equal(actual.drafts.cpu(), state.drafts)
    assert (state.drafts >= 0).sum(1).tolist() == [
        0,
        min(num_drafts, 4),
        0,
        num_drafts,
        num_drafts,
        min(num_drafts, 2),
        0,
    ]


def test_reject_drafts_matches_the_reference() -> None:
    state, generator = state_with_history(0), torch.Generator().manual_seed(1)
    rows, depths = torch.arange(NUM_ROWS).repeat_interleave(30)[:170] % NUM_ROWS, torch.arange(170) % 10
    token_ids = torch.randint(2, 6, (170,), generator=generator)
    tokens = token_ids.roll(-1)
    tokens[torch.rand(170, generator=generator) < 0.15] = 7  # wrong drafts
    tokens[torch.rand(170, generator=generator) < 0.05] = 1  # stop tokens
    tokens[torch.rand(170, generator=generator) < 0.05] = -1  # non-finite logits
    token_ids = torch.where(tokens.roll(1) >= 0, token_ids, 3)
    kept = reference.reject_drafts(state, rows, tokens, DraftLines(depths, token_ids))
    on_device = [x.to(DEVICE) for x in (rows, tokens, depths, token_ids)]
    actual = cuda.reject_drafts(to_device(state), *on_device[:2], DraftLines(*on_device[2:]))
    assert torch.equal(actual.cpu(), kept)
    assert 0 < int((kept == -3).sum()) < 150


def test_penalties_count_the_drafts_before_a_line() -> None:
    vocab, generator = 1500, torch.Generator().manual_seed(2)
    processors = LogitsProcessorState.empty(NUM_ROWS, vocab, torch.zeros(NUM_ROWS + 1, 8, dtype=torch.int32))
    processors.enabled[[1, 3]] = PENALTIES
    processors.penalties[:] = torch.tensor([1.3, 0.5, 0.25])
    rows, depths = torch.tensor([1, 1, 1, 2, 3]), torch.tensor([0, 1, 2, 0, 0])
    drafts, positions = DraftLines(depths, torch.tensor([4, 9, 9, 4, 9])), rows + 3
    logits = torch.randn(5, vocab, generator=generator)
    raw, actual, state = logits.clone(), logits.clone().to(DEVICE), state_with_history(0)
    reference.apply_row_logits_processors(logits, rows, positions, state, processors, drafts)
    on_device = LogitsProcessorState(
        *(getattr(processors, name).to(DEVICE) for name in LogitsProcessorState.__dataclass_fields__)
    )
    cuda.apply_row_logits_processors(
        actual,
        rows.to(DEVICE),
        positions.to(DEVICE),
        to_device(state),
        on_device,
        DraftLines(*(x.to(DEVICE) for x in drafts)),
    )
    assert torch.allclose(actual.cpu(), logits, atol=1e-5)
    changed = (logits != raw).nonzero().tolist()
    assert changed == [[1, 9], [2, 9]]  # the line's own draft once, then twice
