"""Chunks in bfloat16 by native.cpp, for every processor. `reference/test_attention.py` has what all platforms share."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from octavo.kernels.cpu import attention, native
from octavo.kernels.metadata import RaggedBatch
from tests.kernels.cpu.backends import MARCHES, use_backend
from tests.kernels.pool import Case, make_case, naive_attention, relative_error


@pytest.fixture(autouse=True, params=["native", *MARCHES])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(request.param, monkeypatch)
    assert native.library() is not None


def attend(case: Case, window: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"window": window, "return_lse": True, "sinks": case.sinks}
    out, lse = attention.paged_attention(case.q, case.kv_layer, case.batch, scale=case.scale, **options)
    plans = [value for key, value in case.batch.derived.items() if key[0] == "cpu.paged_attention"]
    assert not any(plan.chunks or plan.groups for plan in plans)  # all is native
    return out, lse


@pytest.mark.parametrize("head_dim", [2, 40, 64, 128, 512])
@pytest.mark.parametrize("window", [0, 1, 70])
@pytest.mark.parametrize("int8_kv", [False, True])
def test_chunks_of_every_size(head_dim: int, window: int, int8_kv: bool) -> None:
    """Several tasks and tiles of keys, after cached keys and without, beside a single query."""
    sizes = {"head_dim": head_dim, "block_size": 16, "group_size": 7}
    case = make_case([66, 1, 2, 40], [66, 30, 130, 105], dtype=torch.bfloat16, int8_kv=int8_kv, **sizes)
    out, lse = attend(case, window)
    expected, expected_lse = naive_attention(case if int8_kv else case.double, window)
    assert relative_error(out, expected) < 8e-3
    assert relative_error(lse, expected_lse) < (4e-3 if int8_kv else 1e-6)


@pytest.mark.parametrize(("num_kv_heads", "group_size"), [(1, 1), (3, 2), (1, 16)])
@pytest.mark.parametrize("window", [0, 9])
def test_sinks_of_chunks(num_kv_heads: int, group_size: int, window: int) -> None:
    sizes = {"num_kv_heads": num_kv_heads, "group_size": group_size}
    case = make_case([66, 5], [80, 5], dtype=torch.bfloat16, sinks=True, **sizes)
    out, lse = attend(case, window)
    expected, expected_lse = naive_attention(case.double, window)
    assert relative_error(out, expected) < 8e-3
    assert relative_error(lse, expected_lse) < 1e-6


@pytest.mark.parametrize("rise", [0.0, 3.0, 20.0])
def test_scores_rise_from_tile_to_tile(rise: float) -> None:
    """Earlier sums shrink only for scores that are much larger, and count in full for others."""
    case = make_case([200], [200], group_size=2, head_dim=64, dtype=torch.bfloat16)
    case.q[..., 0] = rise
    case.keys[0][..., 0] = torch.arange(200) / 64 / case.scale
    for block, keys in zip(case.tables[0], case.keys[0].split(4, dim=1), strict=True):
        case.kv_layer[block, 0] = keys
    out, lse = attend(case)
    expected, expected_lse = naive_attention(case.double)
    assert relative_error(out, expected) < 8e-3
    assert relative_error(lse, expected_lse) < 1e-6


@pytest.mark.parametrize("window", [0, 70])
def test_the_bits_of_a_query_do_not_depend_on_its_chunk(window: int) -> None:
    whole = make_case([150], [150], group_size=7, head_dim=64, dtype=torch.bfloat16)
    expected, expected_lse = attend(whole, window)
    for begin, end in ((0, 2), (2, 67), (67, 150)):
        batch = RaggedBatch.from_lists([end - begin], [end], whole.tables, 4)
        out, lse = attend(dataclasses.replace(whole, q=whole.q[begin:end], batch=batch), window)
        assert torch.equal(out, expected[begin:end]) and torch.equal(lse, expected_lse[begin:end])


def test_a_query_with_nan_gives_nan_and_no_other_does() -> None:
    case = make_case([9, 9], [9, 9], dtype=torch.bfloat16)
    case.q[4] = torch.nan
    is_nan = attend(case)[0].isnan().flatten(1)
    assert is_nan[4].all() and is_nan.any(1).sum() == 1
