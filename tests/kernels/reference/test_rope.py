"""Rotary embedding: the table against Transformers', the rotation against complex multiplication."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from octavo.errors import UnsupportedModelError
from octavo.kernels import reference
from tests.kernels.pool import BOTH, relative_error

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096, "truncate": False, "beta_fast": 16},
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "attention_factor": 1.3},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: f"{s['rope_type']}-{len(s)}")
@pytest.mark.parametrize("theta", [10000.0, 1000000.0])
def test_the_table_equals_transformers(scaling: dict[str, Any], theta: float) -> None:
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    positions = torch.cat((torch.arange(300), torch.arange(20000, 20100)))
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions.unsqueeze(0))
    table = reference.rope_table(64, 20100, theta, scaling=scaling)
    assert table.shape == (20100, 64)
    assert table.dtype == torch.float32
    assert float((table[positions, :32] - cos[0, :, :32]).abs().max()) < 1e-6
    assert float((table[positions, 32:] - sin[0, :, :32]).abs().max()) < 1e-6


@pytest.mark.parametrize("max_len", [100, 512, 513, 2000])
def test_a_dynamic_table_has_the_angles_of_a_sequence_of_max_len(max_len: int) -> None:
    scaling = {"rope_type": "dynamic", "factor": 3.0}
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters={**scaling, "rope_theta": 10000.0},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(max_len).unsqueeze(0))
    trained = scaling | {"original_max_position_embeddings": 512}
    table = reference.rope_table(64, max_len, 10000.0, scaling=trained)
    assert float((table - torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=-1)).abs().max()) < 1e-5
    assert torch.equal(table, reference.rope_table(64, max_len, 10000.0)) == (max_len <= 512)


def test_scaling_type_under_the_older_key() -> None:
    assert torch.equal(
        reference.rope_table(16, 50, 10000.0, scaling={"type": "linear", "factor": 2.0}),
        reference.rope_table(16, 50, 10000.0, scaling={"rope_type": "linear", "factor": 2.0}),
    )


def test_unknown_scaling_is_rejected() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'mrope'.*supported: default, linear, dynamic, llama3, yarn"):
        reference.rope_table(16, 50, 10000.0, scaling={"rope_type": "mrope"})


@BOTH
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128])
def test_each_pair_is_rotated_by_its_angle(ops: ModuleType, head_dim: int) -> None:
    half = head_dim // 2
    q, k = torch.randn(6, 9, head_dim), torch.randn(6, 3, head_dim)
    positions = torch.tensor([0, 1, 7, 7, 300, 41])  # several sequences, unordered
    kept = q.clone(), k.clone()
    turned = ops.apply_rope(q, k, positions, ops.rope_table(head_dim, 301, 10000.0))
    angles = positions.double().unsqueeze(1) / 10000.0 ** (torch.arange(half).double() / half)
    for x, out in zip((q, k), turned, strict=True):
        pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
        expected = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
        # Angles are float32, as in Transformers: an error of up to 300 * 2^-24.
        assert relative_error(out, torch.cat((expected.real, expected.imag), dim=-1)) < 2e-5
    assert torch.equal(q, kept[0])
    assert torch.equal(k, kept[1])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rotation_equals_transformers(ops: ModuleType, dtype: torch.dtype) -> None:
    config = LlamaConfig(hidden_size=256, num_attention_heads=4)
    q, k = torch.randn(5, 4, 64).to(dtype), torch.randn(5, 2, 64).to(dtype)
    positions = torch.arange(10, 15)
    cos, sin = LlamaRotaryEmbedding(config)(q.float(), positions.unsqueeze(0))
    expected = apply_rotary_pos_emb(q.float(), k.float(), cos[0], sin[0], unsqueeze_dim=1)
    actual = ops.apply_rope(q, k, positions, ops.rope_table(64, 20, 10000.0))
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, e.double()) < (1e-6 if dtype == torch.float32 else 5e-3)


@BOTH
def test_views_of_a_merged_projection_give_the_same_result(ops: ModuleType) -> None:
    """The result does not depend on the strides of q and k, which are views of the QKV projection."""
    qkv = torch.randn(5, 4 + 2 + 2, 16)
    q, k, v = qkv.split([4, 2, 2], dim=1)
    before = v.clone()
    table = ops.rope_table(16, 30, 10000.0)
    views = ops.apply_rope(q, k, torch.arange(5), table)
    copies = ops.apply_rope(q.contiguous(), k.contiguous(), torch.arange(5), table)
    assert torch.equal(views[0], copies[0])
    assert torch.equal(views[1], copies[1])
    assert torch.equal(v, before)
