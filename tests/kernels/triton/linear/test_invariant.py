"""Products whose rows have the same bits for any number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.kernels.triton.linear.invariant import linear
from tests.kernels.pool import relative_error
from tests.kernels.triton.device import DEVICE, DTYPES, TOLERANCE

NUM_ROWS = (1, 2, 5, 17, 64, 130)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_out", "num_in"), [(70, 64), (33, 100), (128, 24)])
@pytest.mark.parametrize("biased", [False, True])
def test_rows_have_the_bits_of_any_batch_and_match_torch(
    num_out: int, num_in: int, dtype: torch.dtype, biased: bool
) -> None:
    """Also rows of a wider tensor, in another order."""
    x = torch.randn(130, num_in + 8, device=DEVICE).to(dtype)[:, :num_in]
    weight = (torch.randn(num_out, num_in, device=DEVICE) / 8).to(dtype)
    bias = torch.randn(num_out, device=DEVICE).to(dtype) if biased else None
    together = linear(x, weight, bias)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert together.dtype == dtype and relative_error(together, expected) < TOLERANCE[dtype]
    for num in NUM_ROWS:
        assert torch.equal(linear(x[:num], weight, bias), together[:num]), num
    for row in (0, 63, 64, 129):
        assert torch.equal(linear(x[row : row + 1], weight, bias), together[row : row + 1]), row
    assert torch.equal(linear(x.flip(0), weight, bias), together.flip(0))


def test_a_row_that_is_not_finite_changes_no_other() -> None:
    x, weight = torch.randn(70, 40, device=DEVICE), torch.randn(50, 40, device=DEVICE)
    expected = linear(x, weight, None)
    x[69] = torch.nan
    found = linear(x, weight, None)
    assert torch.equal(found[:69], expected[:69]) and bool(found[69].isnan().all())


def test_groups_of_tiles_cover_all_rows_and_outputs() -> None:
    """More than one group of tiles, of which the last is not full."""
    x, weight = torch.randn(40 * 32 + 3, 8, device=DEVICE), torch.randn(70, 8, device=DEVICE)
    assert relative_error(linear(x, weight, None), F.linear(x.double(), weight.double())) < TOLERANCE[x.dtype]


def test_no_rows_and_no_outputs() -> None:
    assert linear(torch.zeros(0, 8, device=DEVICE), torch.zeros(4, 8, device=DEVICE), None).shape == (0, 4)
