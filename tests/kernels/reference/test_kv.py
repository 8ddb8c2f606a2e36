"""KV writes: each token's K and V go to its slot, and no other slot changes."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.metadata import RaggedBatch
from tests.kernels.pool import BOTH, relative_error


@BOTH
@pytest.mark.parametrize("block_size", [1, 2, 8, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_each_token_is_written_to_its_slot_only(ops: ModuleType, block_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(block_size)
    num_blocks, num_tokens = 7, 6
    kv = torch.randn(num_blocks + 1, 3, 2, 2, block_size, 8).to(dtype)
    before = kv.clone()
    slots = torch.randperm(num_blocks * block_size)[:num_tokens] + block_size
    k, v = torch.randn(2, num_tokens, 2, 8).to(dtype)
    ops.kv_write(k, v, kv[:, 1], slots)
    for token, slot in enumerate(slots.tolist()):
        place = kv[slot // block_size, 1, :, :, slot % block_size]  # [2, num_kv_heads, head_dim]
        assert torch.equal(place[0], k[token])
        assert torch.equal(place[1], v[token])
        before[slot // block_size, 1, :, :, slot % block_size] = place
    assert torch.equal(kv, before)


@BOTH
@pytest.mark.parametrize("normed", [False, True])
def test_fused_norm_rope_and_write(ops: ModuleType, normed: bool) -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(6, 5 + 3 + 3, 16).split([5, 3, 3], dim=1)  # views of a fused projection
    positions, slots = torch.randint(40, (6,)), torch.randperm(32)[:6] + 8
    table = reference.rope_table(16, 40, 10000.0)
    q_norm, k_norm = torch.randn(2, 16) if normed else (None, None)
    kv = torch.randn(5, 2, 2, 3, 8, 16)
    expected = kv.clone()
    out = ops.rope_kv_write(q, k, v, positions, table, kv[:, 1], slots, q_norm=q_norm, k_norm=k_norm, eps=1e-5)
    if q_norm is not None and k_norm is not None:
        q, k = reference.rms_norm(q, q_norm, 1e-5), reference.rms_norm(k, k_norm, 1e-5)
    turned_q, turned_k = reference.apply_rope(q, k, positions, table)
    reference.kv_write(turned_k, v, expected[:, 1], slots)
    assert relative_error(out, turned_q.double()) < 1e-6
    assert relative_error(kv, expected.double()) < 1e-6


@pytest.mark.parametrize("magnitude", [0.0, 1e-9, 1e-6, 3e-4, 1.0, 300.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_int8_rows_are_right_to_half_a_scale(magnitude: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(5, 3, 16) * magnitude).to(dtype)
    rows = reference.quantize_rows(x)
    assert (rows.dtype, rows.shape) == (torch.int8, (5, 3, 18))
    scale = rows[..., 16:].contiguous().view(torch.float16).float()
    wanted = x.float().abs().amax(-1, keepdim=True) / 127
    assert ((scale - wanted).abs() <= wanted / 2048 + 2**-25).all()
    error = (reference.dequantize_rows(rows, torch.float32) - x.float()).abs()
    assert (error <= scale * 0.5001 + 127 * 2**-24).all()  # the second: a scale below float16's normal numbers
    assert magnitude < 1e-3 or (rows[..., :16].abs().amax(-1) >= 126).all()


@BOTH
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e9])
def test_an_int8_row_that_cannot_be_held_is_not_finite(ops: ModuleType, bad: float) -> None:
    """So a fault in a forward pass is found (`finite_rows`), and not hidden by rounding."""
    kv = torch.zeros(2, 1, 2, 1, 4, 10, dtype=torch.int8)
    k, v = torch.ones(2, 2, 1, 8)
    k[1, 0, 3] = v[0, 0, 3] = bad
    table = reference.rope_table(8, 4, 10000.0)
    positions, slots = torch.zeros(2, dtype=torch.int64), torch.tensor([4, 5])
    ops.rope_kv_write(k, k, v, positions, table, kv[:, 0], slots)
    finite = reference.dequantize_rows(kv[1, 0, :, 0, :2], torch.float32).isfinite().all(-1)
    assert finite.tolist() == [[True, False], [False, True]]


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_an_int8_pool_holds_quantised_rows(ops: ModuleType, dtype: torch.dtype, head_dim: int) -> None:
    torch.manual_seed(2)
    q, k, v = torch.randn(6, 5 + 3 + 3, head_dim).to(dtype).split([5, 3, 3], dim=1)
    positions, slots = torch.zeros(6, dtype=torch.int64), torch.randperm(32)[:6] + 8  # position 0: nothing is rotated
    kv = torch.full((5, 2, 2, 3, 8, head_dim + 2), 77, dtype=torch.int8)
    expected = kv.clone()
    ops.rope_kv_write(q, k, v, positions, reference.rope_table(head_dim, 4, 10000.0), kv[:, 1], slots)
    for token, slot in enumerate(slots.tolist()):
        expected[slot // 8, 1, 0, :, slot % 8] = reference.quantize_rows(k[token])
        expected[slot // 8, 1, 1, :, slot % 8] = reference.quantize_rows(v[token])
    assert torch.equal(kv, expected)
    kv.fill_(77)
    ops.kv_write(k, v, kv[:, 1], slots)
    assert torch.equal(kv, expected)


@BOTH
def test_slots_beyond_int32(ops: ModuleType, tmp_path: Path) -> None:
    """A KV cache of more than 2^31 slots in a sparse file, in which only written pages use disk space."""
    num_blocks, block_size = (1 << 21) + 2, 1 << 10
    file = tmp_path / "pool"
    kv = torch.from_file(str(file), shared=True, size=num_blocks * 2 * block_size, dtype=torch.uint8)
    kv = kv.view(num_blocks, 1, 2, 1, block_size, 1)
    slot = (num_blocks - 1) * block_size + 5
    assert slot > 1 << 31
    ops.kv_write(torch.ones(1, 1, 1), torch.full((1, 1, 1), 2.0), kv[:, 0], torch.tensor([slot]))
    assert kv[-1, 0, :, 0, 5].flatten().tolist() == [1, 2]
    assert int(kv[-1].sum()) == 3
    assert int(kv[0].sum()) == 0
    file.unlink()


@BOTH
def test_padding_writes_to_the_null_block(ops: ModuleType) -> None:
    kv = torch.zeros(3, 1, 2, 1, 4, 2)
    ops.kv_write(torch.ones(3, 1, 2), torch.ones(3, 1, 2), kv[:, 0], torch.tensor([0, 9, 0]))
    assert float(kv[1].abs().sum()) == 0
    assert float(kv[2].sum()) == 4  # one token, K and V, head_dim 2


def test_slot_mapping_follows_the_block_table() -> None:
    """block_id = table[position // block_size], offset = position % block_size."""
    batch = RaggedBatch.from_lists([3, 1], [6, 5], [[7, 1], [3, 9]], 4)
    assert batch.positions.tolist() == [3, 4, 5, 4]
    assert batch.slot_mapping.tolist() == [7 * 4 + 3, 1 * 4 + 0, 1 * 4 + 1, 9 * 4 + 0]
    assert batch.slot_mapping.dtype == batch.positions.dtype == torch.int64
    assert batch.query_start.tolist() == [0, 3, 4]
    assert (batch.max_query_len, batch.max_seq_len, batch.num_seqs) == (3, 6, 2)


def test_block_tables_are_padded_with_the_null_block() -> None:
    assert RaggedBatch.from_lists([1, 1], [1, 9], [[5], [2, 3, 4]], 4).block_tables.tolist() == [[5, 0, 0], [2, 3, 4]]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_is_cut_off_and_keeps_faults(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, -1e9, math.nan, math.inf], [0.5, 3.0, -2.0, 0.0]])
    held = reference.to_float8(x, torch.tensor([0.5, 0.25]), dtype).float()
    limit = torch.finfo(dtype).max
    assert held.nan_to_num(-1.0).tolist() == [[2.0, -limit, -1.0, -1.0], [2.0, 12.0, -8.0, 0.0]]
