"""Native Gated DeltaNets: the reference's numbers, and the same bits for any slices, beside any sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu import ops as cpu
from tests.kernels.cpu.backends import MARCHES, use_backend
from tests.kernels.pool import relative_error
from tests.kernels.reference.test_recurrent import BATCHES, States

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
SHAPES = [(1, 1, 8, 8), (2, 6, 10, 7), (3, 3, 128, 128), (2, 4, 32, 96)]  # heads of K, of V, their sizes
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True, params=["native", *MARCHES])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled for this processor, and for older ones with other registers."""
    torch.manual_seed(0)
    use_backend(request.param, monkeypatch)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def make_inputs(num_tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Inputs:
    """q, k and v are parts of one matrix, as in a model. Decays from none at all to nearly everything at once."""
    num_keys, num_values, key_dim, value_dim = shape
    sizes = [num_keys * key_dim, num_keys * key_dim, num_values * value_dim]
    parts = torch.randn(num_tokens, sum(sizes)).to(dtype).split(sizes, dim=1)
    q, k = (part.view(num_tokens, num_keys, key_dim) for part in parts[:2])
    v = parts[2].view(num_tokens, num_values, value_dim)
    decay = -torch.tensor([0.0, 1e-3, 1.0, 900.0]).repeat(num_tokens, num_values)[:, :num_values].contiguous()
    return q, k, v, decay, torch.rand(num_tokens, num_values)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("slices", BATCHES.values(), ids=BATCHES)
def test_the_references_numbers(
    slices: list[tuple[int, int]], shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    inputs = make_inputs(sum(n for n, _ in slices), shape, dtype)
    x, size = inputs[2].flatten(1), shape[1] * shape[2] * shape[3]
    weight = torch.randn(x.shape[1], 4)
    for operation, arguments, num in (
        ("gated_delta_rule", inputs, size),
        ("causal_conv", (x, weight), 3 * x.shape[1]),
    ):
        found = []
        for ops in (reference, cpu):
            torch.manual_seed(4)
            states = States(slices, 3, num, torch.float32)
            out = getattr(ops, operation)(*arguments, states.pool, 3, states.batch)
            found.append(torch.cat([out.float().flatten(), *(states.after(s) for s, (n, _) in enumerate(slices) if n)]))
        assert relative_error(found[1], found[0]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_heads", [1, 3, 16])
def test_gates_are_the_references_and_rows_have_the_bits_of_those_alone(dtype: torch.dtype, num_heads: int) -> None:
    num_tokens, size = 9, 40
    gate, a, b = torch.randn(num_tokens, num_heads * (size + 2)).mul(4).to(dtype).split(
        [num_heads * size, num_heads, num_heads], dim=1
    )  # fmt: skip
    column = torch.randn(num_tokens, 1)
    x, parameters = torch.randn(num_tokens, num_heads, size).to(dtype), torch.randn(2, num_heads)
    operations: list[tuple[str, Callable[[slice], tuple[Tensor, ...]]]] = [
        ("delta_gates", lambda rows: (a[rows], b[rows], *parameters)),
        ("gated_rms_norm", lambda rows: (x[rows], torch.linspace(0, 2, size), gate[rows], 1e-6)),
        ("sigmoid_mul", lambda rows: (x[rows].flatten(1), gate[rows])),
        ("sigmoid_mul", lambda rows: (x[rows].flatten(1), column[rows])),
    ]
    for name, arguments in operations:
        found, wanted = (getattr(ops, name)(*arguments(slice(None))) for ops in (cpu, reference))
        alone = [getattr(cpu, name)(*arguments(slice(row, row + 1))) for row in range(num_tokens)]
        if isinstance(found, Tensor):
            found, wanted, alone = (found,), (wanted,), [(row,) for row in alone]
        for i, tensor in enumerate(found):
            assert (
                tensor.dtype == wanted[i].dtype and relative_error(tensor.float(), wanted[i].float()) < TOLERANCE[dtype]
            )
            assert torch.equal(tensor, torch.cat([row[i] for row in alone]))


def test_the_same_bits_for_any_slices_beside_any_sequences() -> None:
    """150 positions at once on one thread; then in slices beside other sequences, on two."""
    shape, num_tokens, size = (2, 4, 32, 96), 150, 4 * 32 * 96
    inputs = make_inputs(num_tokens, shape, torch.float32)
    weight = torch.randn(inputs[2][0].numel(), 4)
    torch.set_num_threads(1)
    whole = States([(num_tokens, num_tokens)], 5, size + 3 * len(weight), torch.float32)
    alone, line = run([(inputs, num_tokens)], weight, size, whole), whole.before[0]
    torch.set_num_threads(2)
    for begin, end in [(0, 1), (1, 64), (64, 70), (70, 71), (71, 150)]:
        others = make_inputs(7, shape, torch.float32)
        states = States([(7, 20), (end - begin, end)], 5, size + 3 * len(weight), torch.float32)
        states.store(1, line)
        part = tuple(tensor[begin:end] for tensor in inputs)
        out = run([(others, 7), (part, end - begin)], weight, size, states)
        line = states.after(1)
        for found, wanted in zip(out, alone, strict=True):
            assert torch.equal(found[7:], wanted[begin:end])
    assert torch.equal(line, whole.after(0))


def run(parts: list[tuple[Inputs, int]], weight: Tensor, size: int, states: States) -> tuple[Tensor, Tensor]:
    """The rule and a convolution of V, whose states follow each other."""
    inputs = [torch.cat(tensors) for tensors in zip(*(part for part, _ in parts), strict=True)]
    out = cpu.gated_delta_rule(*inputs, states.pool, states.first, states.batch)
    return out, cpu.causal_conv(inputs[2].flatten(1), weight, states.pool, states.first + size, states.batch)
