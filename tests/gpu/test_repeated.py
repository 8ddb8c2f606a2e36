"""QKV projections of few tokens have the same bits every time, also right after each other.

Tensors that a launch writes hold other numbers before, so that a row that is not written is found, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from octavo.kernels import reference
from octavo.kernels.groups import GroupForm
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton import ops as cuda
from tests.kernels.triton.linear.test_grouped import make_groups

HEADS, KV_HEADS, HEAD_DIM, SIZE = 32, 8, 128, 4096
NUM_OUT = (HEADS + 2 * KV_HEADS) * HEAD_DIM
FORMS = {
    "bfloat16": None,
    "4 bits": GroupForm(4, 128, zero=8),
    "8 bits": GroupForm(8, 32, zero=128),
    "float8": GroupForm(8, 128, is_float=True),
}
TIMES = 300
NORMS: dict[str, Any] = {"q_norm": None, "k_norm": None, "norm_eps": 1e-6}


def projection(form: GroupForm | None) -> Callable[..., Tensor]:
    if form is None:
        dense = torch.randn(NUM_OUT, SIZE, device="cuda").bfloat16()
        return lambda residual, *args: cuda.project_qkv(residual, 1e-5, dense, None, *args, **NORMS)
    weight = cuda.pack_groups(make_groups(form, NUM_OUT, SIZE))
    assert weight is not None
    return lambda residual, *args: weight.project_qkv(residual, 1e-5, None, *args, **NORMS)


@pytest.mark.parametrize("num_tokens", [1, 8, 16, 32])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_projections_have_the_same_bits_every_time(form: GroupForm | None, num_tokens: int) -> None:
    project, ones = projection(form), [1] * num_tokens
    batch = RaggedBatch.from_lists(ones, ones, [[0]] * num_tokens, 16, device="cuda")
    batch.positions.copy_(torch.randint(900, (num_tokens,)))
    batch.slot_mapping.copy_(torch.randperm(1024)[:num_tokens])
    x, norm = torch.randn(num_tokens, SIZE, device="cuda").bfloat16(), torch.ones(SIZE, device="cuda").bfloat16()
    residual, table = cuda.make_normed_residual(x, norm), reference.rope_table(HEAD_DIM, 1000, 1e4, device="cuda")
    pools = torch.full((3, 64, 2, KV_HEADS, 16, HEAD_DIM), 7.0, device="cuda", dtype=torch.bfloat16).unbind()
    expected = project(residual, pools[2], batch, table)
    wrong = torch.zeros(4, dtype=torch.int32, device="cuda")
    for _ in range(TIMES):
        for pool in pools[:2]:
            pool.fill_(7.0)
        old = [torch.full_like(expected, 9.0) for _ in range(2)]
        del old  # the results take their memory
        results = [project(residual, pool, batch, table) for pool in pools[:2]]
        pairs = [*((result, expected) for result in results), *((pool, pools[2]) for pool in pools[:2])]
        wrong += torch.stack([(one != other).any() for one, other in pairs])
    assert wrong.tolist() == [0, 0, 0, 0]
