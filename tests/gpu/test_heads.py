"""Logits of a quantised head: in the activations' dtype, as near as those of the dequantised one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from octavo.kernels.group_form import GGUF_FORMS
from octavo.kernels.groups import Groups
from octavo.kernels.triton import ops
from octavo.models.linear_methods import PackedMethod
from octavo.models.loading.random_weights import fill_randomly


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_those_of_the_dequantised_head(name: str, dtype: torch.dtype) -> None:
    form, vocab_size, width = GGUF_FORMS[name], 1003, 576
    head = PackedMethod(vocab_size, width, ops=ops, dtype=dtype, device="cuda", role="head")
    assert head.keeps(form)
    head.allocate([(vocab_size, form)])
    groups = head.rows(0, vocab_size)
    assert isinstance(groups, Groups)
    fill_randomly(groups, torch.Generator("cuda").manual_seed(1))
    weight = groups.dequantised()
    head.finish()
    for num_rows in (1, 16, 65, 256, 1100):
        x = torch.randn(num_rows, width, device="cuda").to(dtype)
        exact, logits, plain = x.double() @ weight.double().T, head.logits(x), F.linear(x, weight.to(dtype))
        assert logits.dtype == dtype and logits.shape == (num_rows, vocab_size)
        errors = [float((one.double() - exact).norm() / exact.norm()) for one in (logits, plain)]
        assert errors[0] < 1.05 * errors[1] + 1e-6, num_rows
