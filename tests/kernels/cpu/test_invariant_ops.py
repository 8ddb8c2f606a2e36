"""Rows have the same bits alone and among others; attention: tests/differential/test_batch_invariant.py."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels.cpu import invariant_ops, native
from tests.kernels.pool import make_case, naive_attention, relative_error

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C++ compiler")


def test_the_last_numbers_of_a_tensor_have_the_same_gelu() -> None:
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.isfinite()]
    for approximate in ("none", "tanh"):
        together = invariant_ops.gelu(numbers, approximate)
        assert torch.equal(together, torch.nn.functional.gelu(numbers, approximate=approximate))
        assert torch.equal(torch.cat([invariant_ops.gelu(each, approximate) for each in numbers.split(1)]), together)


@pytest.mark.parametrize("query_lens", [[1, 1], [70, 1]], ids=["decode", "mixed"])
@pytest.mark.parametrize("window", [0, 9])
def test_attention_has_sinks(query_lens: list[int], window: int) -> None:
    case = make_case(query_lens, [700, 9], sinks=True)
    options = {"scale": case.scale, "window": window, "sinks": case.sinks}
    out = invariant_ops.paged_attention(case.q, case.kv_layer, case.batch, **options)
    assert relative_error(out, naive_attention(case, window)[0]) < 2e-6


def test_a_row_of_a_wider_tensor_has_the_bits_of_one_alone() -> None:
    x = torch.randn(4000, 2048, generator=torch.Generator().manual_seed(0)).bfloat16()[:, :1024]
    weight = torch.ones(1024).bfloat16()
    together = invariant_ops.rms_norm(x, weight, 1e-6)
    assert torch.equal(torch.cat([invariant_ops.rms_norm(row, weight, 1e-6) for row in x.split(1)]), together)


def test_several_threads_sum_the_probabilities_of_one_row_as_those_of_many() -> None:
    logits = torch.randn(100, 50257, generator=torch.Generator().manual_seed(0)) * 4
    ids, num_threads = torch.zeros(1, dtype=torch.int64), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together = invariant_ops.token_logprobs(logits, ids.expand(100), 0)[0]
        alone = [invariant_ops.token_logprobs(row, ids, 0)[0] for row in logits.split(1)]
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(torch.cat(alone), together)
