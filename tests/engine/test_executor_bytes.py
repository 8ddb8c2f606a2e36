"""Bitmasks and errors as bytes, for an executor in another process. Plans and results: `tests/core/test_plan.py`."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.engine.executor import ERRORS, Capacity, GrammarBitmask, decode_error, encode_error
from octavo.errors import PlanError


def test_a_bitmask_survives_its_bytes() -> None:
    words = np.arange(6, dtype=np.int32).reshape(2, 3) - 4
    for masks in (GrammarBitmask([4, 7], words), GrammarBitmask([], words[:0])):
        slices, bitmask = GrammarBitmask.decode(masks.encode())
        assert slices == masks.slices and bitmask.dtype == np.int32 and bitmask.flags.writeable
        assert bitmask.shape == masks.bitmask.shape and (bitmask == masks.bitmask).all()


def test_a_capacity_survives_its_bytes() -> None:
    capacity = Capacity(3_000_000, 7, 1.25e-4)
    assert Capacity.decode(capacity.encode()) == capacity


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
