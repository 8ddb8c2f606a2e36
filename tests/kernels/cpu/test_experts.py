"""Native mixtures of experts: the reference's numbers, and for a token the same bits whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu import native
from octavo.kernels.cpu import ops as cpu
from octavo.kernels.groups import GroupForm, Groups, PackedExperts
from octavo.kernels.reference import ExpertGate, Routing
from tests.kernels.cpu.backends import EMULATED, MARCHES, use_backend
from tests.kernels.cpu.groups import make_groups
from tests.kernels.cpu.test_grouped_linear import FORMS, rounded
from tests.kernels.pool import relative_error

GATES = [ExpertGate("silu"), ExpertGate("gelu"), ExpertGate("swiglu", alpha=1.5, limit=0.8)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3}  # one rounding of bfloat16 is up to 4e-3
EXPERTS, TOP_K = 12, 3


@pytest.fixture(autouse=True, params=["native", *MARCHES, EMULATED])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled for this processor, and for older ones with other registers."""
    torch.manual_seed(0)
    use_backend(request.param, monkeypatch)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def make_routing(num_tokens: int) -> Routing:
    """Some experts have many tokens, the last has none."""
    logits = torch.randn(num_tokens, EXPERTS)
    logits[:, 1], logits[:, -1] = 3, -100
    return cpu.route(logits, TOP_K, softmax_first=True, renormalise=True)


def part(routing: Routing, tokens: slice) -> Routing:
    return Routing(routing.experts[tokens].contiguous(), routing.weights[tokens].contiguous())


def make_weights(hidden: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gate_up, down = torch.randn(EXPERTS * 2 * inner, hidden), torch.randn(EXPERTS * hidden, inner)
    biases = torch.randn(len(gate_up)).to(dtype), torch.randn(len(down)).to(dtype)
    return (gate_up / hidden**0.5).to(dtype), biases[0], (down / inner**0.5).to(dtype), biases[1]


@DTYPES
@pytest.mark.parametrize("kind", GATES, ids=[kind.name for kind in GATES])
@pytest.mark.parametrize(("hidden", "inner"), [(40, 24), (65, 33), (33, 96), (128, 160)])
def test_the_references_numbers(dtype: torch.dtype, kind: ExpertGate, hidden: int, inner: int) -> None:
    gate_up, gate_up_bias, down, down_bias = make_weights(hidden, inner, dtype)
    for num_tokens in (1, 2, 9, 70):
        routing, x = make_routing(num_tokens), torch.randn(num_tokens, hidden).to(dtype)
        h = cpu.experts_in(x, gate_up, gate_up_bias, routing, EXPERTS, kind)
        expected = reference.experts_in(x.double(), gate_up.double(), gate_up_bias.double(), routing, EXPERTS, kind)
        assert relative_error(h, expected) < TOLERANCE[dtype]
        out = cpu.experts_out(h, down, down_bias, routing, EXPERTS)
        expected = reference.experts_out(h.double(), down.double(), down_bias.double(), routing, EXPERTS)
        assert relative_error(out, expected) < TOLERANCE[dtype]


Block = Callable[[Tensor, Routing], tuple[Tensor, Tensor]]


def check_bits(block: Block, x: Tensor, sizes: list[int]) -> None:
    """Each token alone, in batches of these sizes and with 2 threads has the bits that it has among all."""
    routing = make_routing(len(x))
    torch.set_num_threads(1)
    together = block(x, routing)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for size in sizes:
            for begin in range(0, len(x), size) if size < len(x) else [0]:
                tokens = slice(begin, begin + size)
                for actual, expected in zip(block(x[tokens], part(routing, tokens)), together, strict=True):
                    assert torch.equal(actual, expected[tokens]), (threads, size, begin)


@DTYPES
def test_a_token_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    """600 tokens are two chunks. Sums are unrounded in float32, so a changed order of addition shows."""
    gate_up, gate_up_bias, down, down_bias = make_weights(136, 72, dtype)

    def block(x: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        h = cpu.experts_in(x, gate_up, gate_up_bias, routing, EXPERTS, GATES[0])
        return h, cpu.experts_out(h, down, down_bias, routing, EXPERTS)

    check_bits(block, torch.randn(600, 136).to(dtype), [1, 2, 3, 5, 16, 77, 300, 600])


def test_routes_have_the_same_bits_in_any_batch() -> None:
    logits = torch.randn(300, 128)
    together = cpu.route(logits, 8, softmax_first=True, renormalise=True)
    for token in range(300):
        alone = cpu.route(logits[token : token + 1], 8, softmax_first=True, renormalise=True)
        assert torch.equal(alone.experts[0], together.experts[token])
        assert torch.equal(alone.weights[0], together.weights[token])


@DTYPES
def test_a_token_that_is_not_finite_harms_no_other(dtype: torch.dtype) -> None:
    gate_up, gate_up_bias, down, down_bias = make_weights(40, 33, dtype)
    x, routing = torch.randn(20, 40).to(dtype), make_routing(20)
    x[7, 39] = torch.nan
    h = cpu.experts_in(x, gate_up, gate_up_bias, routing, EXPERTS, GATES[2])
    out = cpu.experts_out(h, down, down_bias, routing, EXPERTS)
    assert bool(h[7].isnan().all()) and bool(out[7].isnan().all())
    others = torch.arange(20) != 7
    assert bool(h[others].isfinite().all()) and bool(out[others].isfinite().all())


# -- weights in groups ------------------------------------------------------------------------------------------------


def packed(name: str, num_out: int, num_in: int) -> tuple[Groups, PackedExperts]:
    form = FORMS[name]
    form = form if form.group_size else replace(form, group_size=num_in)
    groups = make_groups(form, EXPERTS * num_out, num_in)
    weight = cpu.pack_experts(groups, EXPERTS)
    assert weight is not None
    return groups, weight


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("inner", [128, 37])
def test_products_of_weights_in_groups(name: str, inner: int) -> None:
    """With the rounded x; 37 outputs are no whole tiles."""
    unit = 256 if FORMS[name].is_nested else 128
    gate_up, packed_gate_up = packed(name, 2 * inner, 2 * unit)
    down, packed_down = packed(name, inner, unit)
    bias = torch.randn(EXPERTS * 2 * inner).bfloat16()
    for num_tokens in (1, 4, 23):
        routing, x = make_routing(num_tokens), torch.randn(num_tokens, 2 * unit).bfloat16()
        h = packed_gate_up.experts_in(x, bias, routing, GATES[0])
        weight = gate_up.dequantised().double()
        expected = reference.experts_in(rounded(x), weight, bias.double(), routing, EXPERTS, GATES[0])
        assert h.dtype == torch.bfloat16 and relative_error(h, expected) < TOLERANCE[torch.bfloat16]
        h = torch.randn(num_tokens, TOP_K, unit).bfloat16()
        out = packed_down.experts_out(h, None, routing)
        inputs = rounded(h.flatten(0, 1)).view(h.shape)
        expected = reference.experts_out(inputs, down.dequantised().double(), None, routing, EXPERTS)
        assert out.dtype == torch.bfloat16 and relative_error(out, expected) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K", "Q8_0", "AWQ 128"])
def test_a_token_has_the_same_bits_in_any_batch_with_weights_in_groups(name: str) -> None:
    """Up to 600 pairs of an expert: several parts of them, in another number for other batches."""
    _, gate_up = packed(name, 48, 1280)
    _, down = packed(name, 40, 256)

    def block(x: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        h = gate_up.experts_in(x, None, routing, GATES[0])
        return h, down.experts_out(h.repeat(1, 1, 11)[..., :256].contiguous(), None, routing)

    check_bits(block, torch.randn(600, 1280).bfloat16(), [1, 4, 5, 16, 77, 300, 600])


def test_what_is_not_packed() -> None:
    form = GroupForm(8, 128, is_float=True)
    floats = Groups(form, torch.zeros(EXPERTS * 16, 128).to(torch.float8_e4m3fn), torch.ones(EXPERTS * 16, 1))
    assert cpu.pack_experts(floats, EXPERTS) is None
    assert reference.pack_experts(make_groups(FORMS["Q4_0"], EXPERTS * 16, 64), EXPERTS) is None


# -- recorded passes --------------------------------------------------------------------------------------------------


def test_recorded_experts_follow_their_inputs() -> None:
    """A replay routes again: other inputs, other experts."""
    library = native.library()
    assert library is not None
    gate_up, gate_up_bias, down, down_bias = make_weights(64, 32, torch.bfloat16)
    x, logits = torch.randn(5, 64).bfloat16(), torch.randn(5, EXPERTS)

    def block() -> Tensor:
        routing = cpu.route(logits, TOP_K, softmax_first=False, renormalise=False)
        h = cpu.experts_in(x, gate_up, gate_up_bias, routing, EXPERTS, GATES[1])
        return cpu.experts_out(h, down, down_bias, routing, EXPERTS)

    with library.record() as calls:
        out = block()
    before = out.clone()
    x.copy_(torch.randn(5, 64)), logits.copy_(torch.randn(5, EXPERTS))
    calls.replay()
    assert torch.equal(out, block()) and not torch.equal(out, before)
