"""The kernels that sum over ranks, compiled for Hopper without a GPU."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from octavo.kernels.triton import reduce
from octavo.kernels.triton.precompile import compile_kernel
from tests.kernels.triton.compiled import MULTIPROCESSOR_REGISTERS, list_launches, register_usage
from tests.kernels.triton.launches import sums_over_ranks, winners_of_slices


@pytest.fixture(scope="module")
def kernels() -> dict[str, list[Any]]:
    """By name: of three sizes of groups, with and without a norm, whole norms, and a gather."""
    compiled: dict[str, list[Any]] = {"_exchange_pairs": [], "_exchange_blocks": [], "_exchange_rows": []}
    for line in list_launches(9, 0, sums_over_ranks):
        if (name := json.loads(line)[1]) in compiled:
            compiled[name].append(compile_kernel(line))
    assert [len(variants) for variants in compiled.values()] == [9, 9, 3]
    return compiled


@pytest.fixture(scope="module")
def texts(kernels: dict[str, list[Any]]) -> list[str]:
    return [kernel.asm["ptx"] for variants in kernels.values() for kernel in variants]


def test_words_are_sent_and_read_whole_with_their_epoch(kernels: dict[str, list[Any]]) -> None:
    """Two at a time, 64 bits each. Every read is volatile: it goes to memory each time."""
    for kernel in kernels["_exchange_pairs"]:
        ptx = kernel.asm["ptx"]
        assert "st.global.v2.b64" in ptx and "st.global.b64" not in ptx
        assert "ld.volatile.global.v2.b64" in ptx and "ld.global.v2.b64" not in ptx


def test_winners_are_sent_and_read_in_whole_words() -> None:
    """Rows of three: one word at a time, in 64 bits with its epoch. Threads meet after they have read."""
    (line,) = list_launches(9, 0, winners_of_slices)
    ptx = compile_kernel(line).asm["ptx"]
    assert "st.global.b64" in ptx and "bar.sync" in ptx[ptx.rindex("ld.volatile.global.b64") :]


def test_blocks_are_sent_16_bytes_at_a_time_before_their_flag_is_released(kernels: dict[str, list[Any]]) -> None:
    """Threads meet between the last data and the flag; and between the flag that is acquired and the first data."""
    for kernel in kernels["_exchange_blocks"] + kernels["_exchange_rows"]:
        ptx = kernel.asm["ptx"]
        release, acquire = ptx.index("atom.global.sys.release.exch"), ptx.index("atom.global.sys.acquire.add")
        sent = ptx.rindex("st.global.v4.b32", 0, release)
        assert set(re.findall(r"st\.global[.\w]*", ptx[:release])) == {"st.global.v4.b32"}
        assert set(re.findall(r"ld\.global\.cg[.\w]*", ptx)) == {"ld.global.cg.v4.b32"}
        assert "bar.sync" in ptx[sent:release]
        assert "atom" not in ptx[:release] and ptx.count("bar.sync", acquire) >= 2


def test_all_programs_of_a_launch_but_of_whole_rows_are_resident(kernels: dict[str, list[Any]]) -> None:
    for kernel in (kernel for variants in kernels.values() for kernel in variants):
        registers, spilled = register_usage(kernel)
        assert not spilled
        programs = 1 if kernel in kernels["_exchange_rows"] else reduce.PROGRAMS_PER_MULTIPROCESSOR
        assert programs * 32 * kernel.metadata.num_warps * registers <= MULTIPROCESSOR_REGISTERS


def test_nothing_is_read_before_the_preceding_kernel_has_ended(texts: list[str]) -> None:
    for ptx in texts:
        assert ptx.index("griddepcontrol.wait") < min(
            found.start() for found in re.finditer(r"\b(ld|st|atom)\..*global", ptx)
        )


def test_the_epoch_is_counted_after_all_threads_have_read_it(kernels: dict[str, list[Any]]) -> None:
    """Between the last read of words and the next store, threads meet."""
    read = "ld.volatile.global.v2"
    for kernel in kernels["_exchange_pairs"]:
        parts = [part for part in kernel.asm["ptx"].split("st.global") if read in part]
        assert parts and all("bar.sync" in part[part.rindex(read) :] for part in parts)


def test_all_threads_of_a_program_give_up_together(texts: list[str]) -> None:
    """The host's word is read in memory. One thread takes it over; the others get its answer after they met."""
    for ptx in texts:
        look = ptx.index("ld.volatile.global.b32")
        taken = ptx.index("atom.global.gpu.relaxed.max.s32", look)
        assert ptx.index("st.shared", taken) < ptx.index("bar.sync", taken) < ptx.index("ld.shared", taken)
