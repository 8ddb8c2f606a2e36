"""The kernel that receives sent sums, compiled for Hopper without a GPU."""

from __future__ import annotations

from octavo.kernels.triton.precompile import compile_kernel
from tests.kernels.triton.compiled import list_launches, register_usage
from tests.kernels.triton.launches import sent_sums


def test_data_is_read_after_all_threads_have_met_behind_the_flag() -> None:
    """And nothing before the preceding kernel has ended."""
    lines = list_launches(9, 0, sent_sums)
    assert len(lines) == 4
    for line in lines:
        kernel = compile_kernel(line)
        ptx = kernel.asm["ptx"]
        acquire, data = ptx.index("ld.global.sys.acquire"), ptx.index("ld.global.cg")
        assert "bar.sync" in ptx[acquire:data]
        assert ptx.index("griddepcontrol.wait") < ptx.index("ld.global")
        assert not register_usage(kernel)[1]
