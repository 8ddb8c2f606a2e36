"""The kernel that sums over ranks, compiled for Hopper without a GPU."""

from __future__ import annotations

import re

import pytest

from octavo.kernels.triton.precompile import compile_kernel
from tests.kernels.triton.compiled import list_launches
from tests.kernels.triton.launches import sums_over_ranks


@pytest.fixture(scope="module")
def kernels() -> list[str]:
    lines = [line for line in list_launches(9, 0, sums_over_ranks) if "_exchange" in line]
    return [compile_kernel(line).asm["ptx"] for line in lines]


def test_words_are_sent_and_read_whole_with_their_epoch(kernels: list[str]) -> None:
    """Two at a time, 64 bits each. Every read is volatile: it goes to memory each time."""
    assert len(kernels) == 9
    for ptx in kernels:
        assert "st.global.v2.b64" in ptx and "st.global.b64" not in ptx
        assert "ld.volatile.global.v2.b64" in ptx and "ld.global.v2.b64" not in ptx


def test_nothing_is_read_before_the_preceding_kernel_has_ended(kernels: list[str]) -> None:
    for ptx in kernels:
        assert ptx.index("griddepcontrol.wait") < min(
            found.start() for found in re.finditer(r"\b(ld|st)\..*global", ptx)
        )


def test_the_epoch_is_counted_after_all_threads_have_read_it(kernels: list[str]) -> None:
    """Between the last read of words and the next store, threads meet."""
    for ptx in kernels:
        last_read = ptx.rindex("ld.volatile.global")
        assert "bar.sync" in ptx[last_read : ptx.index("st.global", last_read)]
