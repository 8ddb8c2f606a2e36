"""Bitmasks and errors as bytes, for an executor in another process. Plans and results: `tests/core/test_plan.py`."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.engine.executor import ERRORS, Capacity, GrammarBitmask, GrammarDrafts, decode_error, encode_error
from octavo.errors import PlanError


def test_a_bitmask_survives_its_bytes() -> None:
    words = np.arange(12, dtype=np.int32).reshape(4, 3) - 4
    drafts = {4: GrammarDrafts([9, 0], [0, 7])}
    for masks in (
        GrammarBitmask([4, 7], words[:2]),
        GrammarBitmask([], words[:0]),
        GrammarBitmask([7, 4], words, drafts),
    ):
        slices, bitmask, found = GrammarBitmask.decode(masks.encode())
        assert slices == masks.slices and bitmask.dtype == np.int32 and bitmask.flags.writeable
        assert bitmask.shape == masks.bitmask.shape and (bitmask == masks.bitmask).all() and found == masks.drafts


def test_a_slice_has_a_mask_more_after_each_of_its_drafts() -> None:
    masks = GrammarBitmask([4, 7, 2], np.zeros((5, 3), np.int32), {4: GrammarDrafts([9, 0], [0, 7])})
    assert masks.first_masks() == {4: 0, 7: 3, 2: 4}


def test_a_capacity_survives_its_bytes() -> None:
    capacity = Capacity(3_000_000, 7, 1.25e-4, 2.5e-3)
    assert Capacity.decode(capacity.encode()) == capacity


@pytest.mark.parametrize(
    ("pass_s", "window"), [(0.0, 4), (1e-5, 4), (3e-4, 4), (4e-4, 3), (7e-4, 2), (1.1e-3, 1), (1.0, 1)]
)
def test_a_decode_window_is_no_longer_than_the_host_needs(pass_s: float, window: int) -> None:
    assert Capacity(1, 0, 0.0, pass_s).decode_window == window


def test_errors_survive_their_bytes() -> None:
    for kind in ERRORS:
        error = decode_error(encode_error(kind("no memory: 漢 \ud800")))
        assert type(error) is kind and str(error) == "no memory: 漢 \\ud800"


def test_damaged_bytes_are_refused() -> None:
    data = GrammarBitmask([4], np.zeros((1, 3), np.int32)).encode()
    for damaged in (b"", data[:7], data[:-1], data + b"\0"):
        with pytest.raises(PlanError, match="no bitmask"):
            GrammarBitmask.decode(damaged)
    for damaged in (b"", Capacity(1, 2, 0.5).encode() + b"\0"):
        with pytest.raises(PlanError, match="no capacity"):
            Capacity.decode(damaged)
    for damaged in (b"", b"\x07what", b"\x00\xff"):
        with pytest.raises(PlanError, match="no error of a step"):
            decode_error(damaged)
