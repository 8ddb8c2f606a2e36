"""Recorded operations of torch are repeated with torch's bits, and those that are not are noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.kernels.cpu import native
from octavo.kernels.cpu.torch_calls import TorchCalls

pytestmark = pytest.mark.skipif(native.library() is None, reason="there is no C++ compiler")
Work = Callable[[Tensor, Tensor], Tensor]


def record(work: Work, x: Tensor, y: Tensor) -> tuple[native.RecordedCalls, Tensor, bool]:
    library = native.library()
    assert library is not None
    with torch.inference_mode(), library.record() as recording, TorchCalls(library) as calls:
        out = work(x, y)
    return recording, out, calls.is_complete


REPEATED: dict[str, Work] = {
    "add": lambda x, y: x + y,
    "add_row": lambda x, y: x + y[0],
    "add_in_place": lambda x, y: torch.empty_like(x).copy_(x).add_(y),
    "mul": lambda x, y: x * 1.7,
    "div_in_place": lambda x, y: (x * 3).div_(7),
    "columns": lambda x, y: x[:, 3:9] + y[:, :6],
    "copy_of_columns": lambda x, y: x[:, 3:9].contiguous() * 2,
    "flat_copy": lambda x, y: x.view(-1, 3, 4).transpose(0, 1).transpose(0, 1)[:, :2].flatten(1),
    "into_columns": lambda x, y: (z := torch.zeros_like(x), z[:, 2:8].copy_(y[:, :6]))[0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", REPEATED)
def test_a_replay_has_torchs_bits(name: str, dtype: torch.dtype) -> None:
    x, y = torch.randn(2, 5, 12).to(dtype)
    recording, out, is_complete = record(REPEATED[name], x, y)
    assert is_complete and torch.equal(out, REPEATED[name](x, y))
    x.copy_(torch.randn(5, 12)), y.copy_(torch.randn(5, 12))
    recording.replay()
    assert torch.equal(out, REPEATED[name](x, y))


def test_a_bfloat16_bias_of_float32_logits() -> None:
    x, bias = torch.randn(3, 7), torch.randn(7).bfloat16()
    recording, out, is_complete = record(lambda x, y: x + y, x, bias)
    x.neg_(), bias.neg_()
    recording.replay()
    assert is_complete and torch.equal(out, x + bias)


@pytest.mark.parametrize(
    "work",
    [
        lambda x, y: x.tanh(),
        lambda x, y: x.add(y, alpha=2),
        lambda x, y: x * y,
        lambda x, y: x[torch.tensor([1, 0])],
        lambda x, y: x.double() + 1.0,
        lambda x, y: x + y[:, :1],
        lambda x, y: x.t().contiguous(),
    ],
    ids=["tanh", "alpha", "product", "index", "double", "column", "transpose"],
)
def test_other_operations_are_noticed(work: Work) -> None:
    x, y = torch.randn(2, 5, 12)
    assert not record(work, x, y)[2]


def test_views_and_new_memory_need_no_record() -> None:
    recording, _, is_complete = record(lambda x, y: x.view(-1)[3:].unsqueeze(0).t(), *torch.randn(2, 5, 12))
    assert is_complete and not recording._pairs
