"""Quantised weights of experts: the bits of the products with the dequantised weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.groups import GroupForm, Groups, PackedExperts
from octavo.kernels.reference import ExpertGate, Routing
from octavo.kernels.triton import ops as cuda
from tests.kernels.cpu.groups import make_groups
from tests.kernels.triton.device import DEVICE, DTYPES, INTERPRETED
from tests.kernels.triton.experts.test_expert_products import GATES

HALF = DTYPES[-1]  # float16 in the interpreter, else bfloat16
EXPERTS, TOP_K = 5, 2
MXFP4 = GroupForm(4, 32, is_float=True)
FORMS = [
    MXFP4,
    GroupForm(4, 32, zero=8),
    GroupForm(4, 32, has_zeros=True),
    GroupForm(4, 64, zero=7),
    GroupForm(4, 128, has_zeros=True),
    GroupForm(4, 288, has_zeros=True),
    GroupForm(8, 32, zero=128),
    GroupForm(8, 32, has_zeros=True),
    GroupForm(8, 64, has_zeros=True),
    GroupForm(8, 128, zero=128),
    GroupForm(8, 192, zero=128),
]


def random_groups(form: GroupForm, num_out: int, num_in: int) -> Groups:
    return make_groups(form, EXPERTS * num_out, num_in).map(lambda plane: plane.to(DEVICE))


def pack(groups: Groups) -> PackedExperts:
    assert cuda.keeps_groups(groups.form, groups.shape[1], HALF)
    weight = cuda.pack_experts(groups, EXPERTS)
    assert weight is not None
    return weight


def route(num_tokens: int) -> Routing:
    """The last expert has no token."""
    logits = torch.randn(num_tokens, EXPERTS, device=DEVICE)
    logits[:, -1] = -100.0
    return reference.route(logits, TOP_K, softmax_first=True, renormalise=True)


def check_in(groups: Groups, num_tokens: int, gate: ExpertGate = GATES[0], dtype: torch.dtype = HALF) -> None:
    """The rows of `groups` are those of gates and ups."""
    x, routing = torch.randn(num_tokens, groups.shape[1], device=DEVICE).to(dtype), route(num_tokens)
    bias = torch.randn(groups.shape[0], device=DEVICE).to(dtype)
    expected = cuda.experts_in(x, groups.dequantised().to(dtype), bias, routing, EXPERTS, gate)
    assert torch.equal(pack(groups).experts_in(x, bias, routing, gate), expected)


def check_out(groups: Groups, num_tokens: int, dtype: torch.dtype = HALF) -> None:
    h, routing = torch.randn(num_tokens, TOP_K, groups.shape[1], device=DEVICE).to(dtype), route(num_tokens)
    bias = torch.randn(groups.shape[0], device=DEVICE).to(dtype)
    expected = cuda.experts_out(h, groups.dequantised().to(dtype), bias, routing, EXPERTS)
    assert torch.equal(pack(groups).experts_out(h, bias, routing), expected)


@pytest.mark.parametrize("gate", GATES, ids=[gate.name for gate in GATES])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 70])
def test_products_of_mxfp4_have_the_bits_of_the_dequantised_weight(num_tokens: int, gate: ExpertGate) -> None:
    check_in(random_groups(MXFP4, 2 * 37, 160), num_tokens, gate)
    check_out(random_groups(MXFP4, 45, 96), num_tokens)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("num_tokens", [3, 70])
def test_products_of_each_form(form: GroupForm, num_tokens: int) -> None:
    """Rows that end in a group's first half, in a word of scales, or with a step."""
    size = form.group_size
    for num_in in (size, 3 * size) if size <= 128 else (size,):
        check_in(random_groups(form, 2 * 24, num_in), num_tokens)
        check_out(random_groups(form, 72, num_in), num_tokens)


@pytest.mark.parametrize("form", [MXFP4, GroupForm(4, 64, zero=8), GroupForm(8, 32, zero=128)], ids=str)
def test_wide_scales_and_those_of_16_bits(form: GroupForm) -> None:
    """Files have scales in float32; loaders narrow those that stay the same."""
    groups = random_groups(form, 48, 192)
    wide, narrow = replace(groups, scales=groups.scales.float()), groups.with_narrow_scales()
    assert narrow.scales.itemsize == 2
    for scales in (wide, narrow, replace(groups, scales=groups.scales.bfloat16())):
        check_in(scales, 3)


def test_all_codes_and_exponents_of_mxfp4() -> None:
    """An identity as x, so that outputs are weights; exponents up to those at which 6 is finite in the dtype."""
    exponents = torch.arange(-127, 14 if INTERPRETED else 126, device=DEVICE)
    num_rows = len(exponents) // EXPERTS * EXPERTS
    scales = (2.0 ** exponents[-num_rows:].double()).float()[:, None]
    scales[0] = 2.0**-127
    values = torch.arange(32, device=DEVICE).remainder(16).to(torch.uint8).expand(num_rows, 32).contiguous()
    groups = Groups(MXFP4, values, scales)
    expected = groups.dequantised().to(HALF).view(EXPERTS, -1, 32)
    x, one = torch.eye(32, device=DEVICE).to(HALF)[:, None], torch.ones(32, 1, device=DEVICE)
    for expert in range(EXPERTS):
        routing = Routing(torch.full((32, 1), expert, dtype=torch.int32, device=DEVICE), one)
        assert torch.equal(pack(groups).experts_out(x, None, routing).T, expected[expert])


@pytest.mark.parametrize("form", [MXFP4, GroupForm(8, 64, has_zeros=True)], ids=str)
def test_bits_with_quantised_weights_do_not_depend_on_the_batch(form: GroupForm) -> None:
    up, down = pack(random_groups(form, 2 * 64, 192)), pack(random_groups(form, 192, 64))
    x, routing = torch.randn(70, 192, device=DEVICE).to(HALF), route(70)
    h = up.experts_in(x, None, routing, GATES[0])
    y = down.experts_out(h, None, routing)
    for tokens in (slice(0, 1), slice(0, 3), slice(69, 70), slice(10, 40), slice(10, 70)):
        some = Routing(routing.experts[tokens], routing.weights[tokens])
        part = up.experts_in(x[tokens], None, some, GATES[0])
        assert torch.equal(part, h[tokens]) and torch.equal(down.experts_out(part, None, some), y[tokens])


def test_the_memory_of_a_weight() -> None:
    assert pack(random_groups(MXFP4, 48, 256)).nbytes == MXFP4.num_bytes(EXPERTS * 48 * 256)
    form = GroupForm(8, 64, zero=128)
    assert pack(random_groups(form, 48, 256)).nbytes == form.num_bytes(EXPERTS * 48 * 256)


def test_what_is_not_packed() -> None:
    mxfp4 = random_groups(MXFP4, 16, 64)
    for factor in (1.5, -1.0):
        assert cuda.pack_experts(replace(mxfp4, scales=mxfp4.scales * factor), EXPERTS) is None
    assert not cuda.keeps_groups(MXFP4, 64, torch.float32) and not cuda.keeps_groups(MXFP4, 48, HALF)
    assert cuda.pack_groups(mxfp4) is None  # no product of other layers
    zeros = random_groups(GroupForm(4, 32, has_zeros=True), 16, 64)
    assert cuda.pack_experts(replace(zeros, scales=zeros.scales.float()), EXPERTS) is None
    float8 = torch.zeros(EXPERTS * 16, 128, device=DEVICE).to(torch.float8_e4m3fn)
    groups = Groups(GroupForm(8, 128, is_float=True), float8, torch.ones(EXPERTS * 16, 1, device=DEVICE))
    assert cuda.pack_experts(groups, EXPERTS) is None
    assert cuda.pack_experts(random_groups(GroupForm(4, 32, has_minima=True), 16, 64), EXPERTS) is None
