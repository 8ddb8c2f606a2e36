"""A kernel that writes to an address; apart, since it needs Triton, and a file of its own."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_to(address):
    tl.store(address.to(tl.int64).to(tl.pointer_type(tl.float32)), 1.0)
