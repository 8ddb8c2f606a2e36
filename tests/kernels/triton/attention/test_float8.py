"""K and V in float8 with a scale for each head: attention is exact in what the pool holds, writes round once."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.triton import ops as cuda
from tests.kernels.pool import make_case, naive_attention, norm_error, relative_error
from tests.kernels.triton.attention.checks import DECODE, MIXED, quantised
from tests.kernels.triton.device import DEVICE, NORM_TOLERANCE, TOLERANCE, on_device

DTYPES = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])


@DTYPES
@pytest.mark.parametrize(("lens", "window"), [(DECODE, 0), (DECODE, 20), (MIXED, 0), (MIXED, 20)])
@pytest.mark.parametrize(("q_dtype", "sinks"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
def test_attention(
    dtype: torch.dtype, lens: tuple[list[int], list[int]], window: int, q_dtype: torch.dtype, sinks: bool
) -> None:
    case, scales = quantised(make_case(*lens, block_size=16, head_dim=40, dtype=q_dtype, sinks=sinks), dtype)
    arguments = case.q.to(DEVICE), case.kv.to(DEVICE)[:, 1], on_device(case.batch)
    of_heads = {"kv_scales": scales.to(DEVICE), "sinks": None if case.sinks is None else case.sinks.to(DEVICE)}
    out, lse = cuda.paged_attention(*arguments, scale=case.scale, window=window, return_lse=True, **of_heads)
    expected, expected_lse = naive_attention(case, window)
    assert relative_error(out.cpu(), expected) < TOLERANCE[q_dtype]
    assert norm_error(out.cpu(), expected) < NORM_TOLERANCE[q_dtype]
    assert relative_error(lse.cpu(), expected_lse) < 3e-6
    known = reference.paged_attention(
        case.q, case.kv_layer, case.batch, scale=case.scale, window=window, kv_scales=scales, sinks=case.sinks
    )
    assert relative_error(known, expected) < TOLERANCE[q_dtype]


@DTYPES
@pytest.mark.parametrize("head_dim", [16, 32, 128])
def test_decode_of_other_heads(dtype: torch.dtype, head_dim: int) -> None:
    """Narrow heads are read number by number, others in pairs."""
    case, scales = quantised(make_case(*DECODE, block_size=16, head_dim=head_dim), dtype)
    arguments = case.q.to(DEVICE), case.kv.to(DEVICE)[:, 1], on_device(case.batch)
    out = cuda.paged_attention(*arguments, scale=case.scale, kv_scales=scales.to(DEVICE))
    assert relative_error(out.cpu(), naive_attention(case)[0]) < TOLERANCE[torch.float32]


def test_a_shared_prefix() -> None:
    case = make_case([1] * 3, [330, 300, 290], block_size=16)
    case.batch.block_tables[1:, :16] = case.batch.block_tables[0, :16]
    for s in (1, 2):
        case.keys[s][:, :256], case.values[s][:, :256] = case.keys[0][:, :256], case.values[0][:, :256]
    case, scales = quantised(case, torch.float8_e4m3fn)
    common = torch.tensor([0, 256, 256], dtype=torch.int32, device=DEVICE)
    batch = dataclasses.replace(on_device(case.batch), common_prefix_lens=common)
    out = cuda.paged_attention(
        case.q.to(DEVICE), case.kv.to(DEVICE)[:, 1], batch, scale=case.scale, kv_scales=scales.to(DEVICE)
    )
    assert relative_error(out.cpu(), naive_attention(case)[0]) < TOLERANCE[torch.float32]


@DTYPES
def test_writes(dtype: torch.dtype) -> None:
    """Numbers that float8 holds: the interpreter loses a carry where it rounds, and NaN in e4m3."""
    scales = torch.tensor([[0.5, 0.25, 1.0], [2.0, 0.125, 4.0]], device=DEVICE)
    q = torch.randn(6, 5, 40, device=DEVICE)
    k, v = torch.randint(-8, 9, (2, 6, 3, 40), device=DEVICE) * scales[:, None, :, None]
    k[0, 0, 3] = 1e6
    if dtype == torch.float8_e5m2:
        v[1, 2, 5], v[2, 0, 0] = float("nan"), float("inf")
    positions, slots = torch.zeros(6, dtype=torch.int64, device=DEVICE), torch.randperm(32, device=DEVICE)[:6] + 8
    table = reference.rope_table(40, 99, 10000.0, device=DEVICE)
    expected = torch.zeros(5, 2, 2, 3, 8, 40, device=DEVICE).to(dtype)
    alone, fused = (expected.view(torch.uint8).clone().view(dtype) for _ in range(2))
    reference.kv_write(k, v, expected[:, 1], slots, kv_scales=scales)
    cuda.kv_write(k, v, alone[:, 1], slots, kv_scales=scales)
    cuda.rope_kv_write(q, k, v, positions, table, fused[:, 1], slots, kv_scales=scales)
    for kv in (alone, fused):
        assert torch.equal(kv.float().nan_to_num(-1.0), expected.float().nan_to_num(-1.0))
    assert expected.float().nan_to_num().abs().max() == torch.finfo(dtype).max
    assert int(expected.float().isnan().sum()) == (2 if dtype == torch.float8_e5m2 else 0)
