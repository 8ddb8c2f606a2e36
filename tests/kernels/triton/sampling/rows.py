"""Row states with random contents, on the CPU and on the kernels' device."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from octavo.kernels.row_state import FIRST_STOP_ID, FLOATS, NUM_COLUMNS, RowState
from tests.kernels.triton.device import DEVICE

NUM_ROWS, MAX_BLOCKS, BLOCK_SIZE = 6, 300, 4


def make_state(num_groups: int = 1, state_blocks: int = 0) -> RowState:
    state = RowState.empty(NUM_ROWS, MAX_BLOCKS, "cpu", num_groups=num_groups, state_blocks=state_blocks)
    num_entries = NUM_ROWS * state.num_lines * MAX_BLOCKS
    state.block_tables[:-1] = torch.arange(1, num_entries + 1, dtype=torch.int32).view(NUM_ROWS, -1)
    state.last_token[:] = torch.randint(0, 50, (NUM_ROWS + 1,))
    state.done[2] = True
    state.sampling_params.random_(-(1 << 62), 1 << 62)
    state.sampling_params[:, 3] = torch.arange(NUM_ROWS + 1)  # top_k
    state.sampling_params.view(torch.float64)[:, FLOATS] = torch.rand(NUM_ROWS + 1, len(FLOATS)).double()
    state.sampling_params[:, FIRST_STOP_ID:] = torch.randint(0, 50, (NUM_ROWS + 1, NUM_COLUMNS - FIRST_STOP_ID))
    return state


def to_device(state: RowState, device: str = DEVICE) -> RowState:
    copies = {name: tensor.to(device, copy=True) for name, tensor in tensors_of(state).items()}
    return replace(state, **copies)


def tensors_of(state: RowState) -> dict[str, Tensor]:
    values = {field.name: getattr(state, field.name) for field in fields(RowState)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}
