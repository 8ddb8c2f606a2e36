"""Copies blocks within the KV pool, in Triton: all copies of a step in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import reference

MAX_COPIES = 256
"""Limit of one launch: a program holds its share of every copied block in registers."""


def block_copy(kv: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """`reference.block_copy`; kv is contiguous.

    A target may be the source of another copy. So each program owns one range of words in every block: it reads this
    range of all sources before it writes any target, and no other program touches the range.

                block 3     block 9     block 4
        program 0 |##|......|##|......|##|......
        program 1 ....|##|......|##|......|##|..
    """
    num_copies = src_ids.shape[0]
    if num_copies > MAX_COPIES or not kv.is_contiguous():
        reference.block_copy(kv, src_ids, dst_ids)
        return
    if num_copies == 0:
        return
    words = kv.view(kv.shape[0], -1)
    if words.shape[1] * kv.element_size() % 4 == 0 and kv.element_size() < 4:
        words = words.view(torch.int32)
    copies = triton.next_power_of_2(num_copies)
    words_per_program = min(max(8192 // copies, 32), 1024)
    _block_copy[(triton.cdiv(words.shape[1], words_per_program),)](
        words, src_ids, dst_ids, num_copies, words.shape[1], COPIES=copies, WORDS=words_per_program, num_warps=8
    )


@triton.jit(do_not_specialize=["num_copies"])
def _block_copy(kv, src_ids, dst_ids, num_copies, block_words, COPIES: tl.constexpr, WORDS: tl.constexpr):
    copy = tl.arange(0, COPIES)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    mask = (copy < num_copies)[:, None] & (word < block_words)[None, :]
    src = tl.load(src_ids + copy, mask=copy < num_copies, other=0)
    dst = tl.load(dst_ids + copy, mask=copy < num_copies, other=0)
    values = tl.load(kv + src[:, None] * block_words + word[None, :], mask=mask)
    tl.debug_barrier()  # all threads of this program have read
    tl.store(kv + dst[:, None] * block_words + word[None, :], values, mask=mask)
