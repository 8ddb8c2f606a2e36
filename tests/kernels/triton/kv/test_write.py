"""Writing K and V, alone and with QK-norm and RoPE, against the reference."""

from __future__ import annotations

import torch

from octavo.kernels import reference
from octavo.kernels.triton import ops as cuda
from tests.kernels.triton.device import DEVICE, close


def test_kv_write_alone_and_fused_with_rope() -> None:
    q, k, v = torch.randn(6, 5 + 3 + 3, 40, device=DEVICE).split([5, 3, 3], dim=1)
    positions = torch.randint(99, (6,), device=DEVICE)
    table = reference.rope_table(40, 99, 10000.0, device=DEVICE)
    rotated_q, rotated_k = reference.apply_rope(q, k, positions, table)

    before = torch.randn(5, 2, 2, 3, 8, 40, device=DEVICE)
    slots = torch.randperm(32, device=DEVICE)[:6] + 8
    expected, kv = before.clone(), before.clone()
    reference.kv_write(rotated_k, v, expected[:, 1], slots)
    cuda.kv_write(rotated_k, v, kv[:, 1], slots)
    assert torch.equal(kv, expected)

    kv = before.clone()
    assert close(cuda.rope_kv_write(q, k, v, positions, table, kv[:, 1], slots), rotated_q)
    assert close(kv, expected) and torch.equal(kv[:, 0], expected[:, 0])

    kv, q_norm, k_norm = before.clone(), torch.randn(40, device=DEVICE), torch.randn(40, device=DEVICE)
    out = cuda.rope_kv_write(q, k, v, positions, table, kv[:, 1], slots, q_norm=q_norm, k_norm=k_norm, eps=1e-5)
    normed_q, normed_k = reference.rms_norm(q, q_norm, 1e-5), reference.rms_norm(k, k_norm, 1e-5)
    wide_q, wide_k = reference.apply_rope(normed_q, normed_k, positions, table)
    reference.kv_write(wide_k, v, expected[:, 1], slots)
    assert close(out, wide_q) and close(kv, expected)
