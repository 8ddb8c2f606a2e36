"""Logits processors of rows against the reference."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.row_state import (
    ALLOWED_TOKENS,
    FIRST_STOP_ID,
    LOGIT_BIAS,
    MIN_TOKENS,
    PENALTIES,
    LogitsProcessorState,
    RowState,
)
from octavo.kernels.triton import ops as cuda
from tests.kernels.triton.device import DEVICE


def test_one_row_may_be_part_of_a_wider_tensor() -> None:
    """Ranks gather logits with padding, and torch calls one row without it contiguous."""
    state, processors = RowState.empty(1, 1, DEVICE), LogitsProcessorState.empty(1, 50, torch.zeros(2, 8).int())
    on_device = LogitsProcessorState(
        **{f.name: getattr(processors, f.name).clone().to(DEVICE) for f in fields(LogitsProcessorState)}
    )
    on_device.enabled[0] = LOGIT_BIAS
    on_device.bias_ids[0].fill_(-1)
    on_device.bias_ids[0, 0], on_device.bias_values[0, 0] = 7, 1.5
    logits = torch.zeros(1, 64, device=DEVICE)[:, :50].contiguous()
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    cuda.apply_row_logits_processors(logits, zero, zero, state, on_device)
    assert logits.stride(0) == 64 and logits[0].nonzero().tolist() == [[7]] and float(logits[0, 7]) == 1.5


@pytest.mark.parametrize("vocab", [50, 3003])
def test_row_logits_processors_match_the_reference(vocab: int) -> None:
    """Tokens from the host and sampled ones in turns, some of them twice; one sample is padding, one row has no
    processors."""
    num_rows, max_len = 5, 4000
    state, device_state = RowState.empty(num_rows, 1, "cpu"), RowState.empty(num_rows, 1, DEVICE)
    processors = LogitsProcessorState.empty(num_rows, vocab, torch.zeros(num_rows + 1, max_len, dtype=torch.int32))
    processors.enabled[:num_rows] = torch.tensor(
        [PENALTIES, PENALTIES | LOGIT_BIAS, ALLOWED_TOKENS | MIN_TOKENS, 15, 0]
    )
    processors.num_prompt[:num_rows] = torch.tensor([5, 1500, 3, 20, 7])
    processors.min_length[:num_rows] = torch.tensor([0, 0, 9, 30, 0])
    processors.penalties[:num_rows] = torch.tensor([1.3, 0.4, -0.2]) + 0.1 * torch.rand(num_rows, 3)
    processors.bias_ids.fill_(-1)
    for row in (1, 3):
        processors.bias_ids[row, :40] = torch.randperm(vocab)[:40].int()
        processors.bias_values[row, :40] = 5 * torch.randn(40)
    processors.allowed_bitmask.random_(-(1 << 31), 1 << 31)
    for tensors in (state, device_state):
        tensors.sampling_params[2, FIRST_STOP_ID : FIRST_STOP_ID + 3] = torch.tensor([7, 0, vocab - 1])
        tensors.sampling_params[3, FIRST_STOP_ID] = 11
    on_device = LogitsProcessorState(
        **{f.name: getattr(processors, f.name).clone().to(DEVICE) for f in fields(LogitsProcessorState)}
    )

    def count_host_tokens(rows: list[int], starts: list[int], lengths: list[int]) -> None:
        begins = torch.tensor([0, *lengths]).cumsum(0)
        args = [torch.tensor(rows), torch.tensor(starts), begins, torch.randint(0, vocab, (int(begins[-1]),))]
        reference.init_token_counts(processors, *args)
        cuda.init_token_counts(on_device, *(x.to(DEVICE) for x in args))

    count_host_tokens([0, 3, 1], [0, 0, 0], [9, 20, 1503])
    count_host_tokens([3, 1], [18, 1400], [6, 104])  # most of them a second time
    rows, positions = torch.tensor([3, 0, num_rows, 4, 1, 2]), torch.tensor([24, 9, 0, 7, 1504, 8])
    for _ in range(3):
        tokens = torch.randint(0, vocab, (6,))
        tokens[1] = -1
        reference.update_token_counts(processors, rows, positions, tokens)
        cuda.update_token_counts(on_device, *(x.to(DEVICE) for x in (rows, positions, tokens)))
        positions = positions + 1
        logits = 3 * torch.randn(6, vocab)
        changed = logits.clone().to(DEVICE)
        cuda.apply_row_logits_processors(changed, rows.to(DEVICE), positions.to(DEVICE), device_state, on_device)
        reference.apply_row_logits_processors(logits, rows, positions, state, processors)
        assert torch.allclose(changed.cpu(), logits, rtol=1e-5, atol=1e-5)
    for f in fields(LogitsProcessorState):
        assert torch.equal(getattr(on_device, f.name).cpu(), getattr(processors, f.name)), f.name
    assert (
        int(processors.num_counted[0]) == 9
        and int(processors.num_counted[1]) == 1507
        and int(processors.history[3, 26]) == int(tokens[0])
    )
