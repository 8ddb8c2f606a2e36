"""Sums and gathers over the ranks of a group, in one kernel on each GPU: small messages, pushed through peer memory.

Every rank has a buffer that the others write to. A message is cut into slots of SLOT_WORDS words of 32 bits. A word is
sent in 64 bits, together with the epoch of its slot: how often the slot was used. 64 bits are written at once, so a
word whose epoch is the awaited one has arrived, in any order of the words and without a fence or a flag:

    rank 0: x -> words -> (epoch, word) into slot [epoch % 2, rank 0] of every rank's buffer
            then waits until its own slots [epoch % 2, every rank] have the epoch, and adds them up

* All ranks add the same numbers in the same order, in float32: their results are the same bits.
* A program sends all of its slots before it waits, and waits only for slots, never for programs of its own GPU.
* A rank can be one use of a slot ahead of another, which still reads; hence two buffers. It cannot be two ahead: it has
  received the slot's use in between, which the other sends in a later launch than the one that reads.
* Epochs are on the device, and the kernel counts them: a CUDA graph's replay is one more use. They may overflow.

Ranks must launch the same sequence of these kernels, of the same shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.reference.norms import NormedResidual
from octavo.kernels.triton.capability import num_multiprocessors
from octavo.kernels.triton.launch import or_placeholder, pdl_options, wait_for_predecessor
from octavo.kernels.triton.linear.tuning import padded_tokens

SLOT_WORDS = 512
WORD_BYTES = 4
PROGRAMS_PER_MULTIPROCESSOR = 4
"""At most so many: all programs of a launch are resident."""
NO_LIMIT = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """The buffers of all ranks, as one rank sees them, and the state of its own.

    mine        [2, size, num_slots, SLOT_WORDS] int64, this rank's buffer
    peers       [size] int64, addresses of all ranks' buffers, its own included
    epochs      [num_slots] int32, uses of each slot
    status      [1] int32, not 0 once a word has not come within spin_limit reads; then no kernel waits any longer
    spin_limit  reads of a slot until a program gives up, with a wrong result; a read takes about a microsecond
    """

    rank: int
    size: int
    mine: Tensor
    peers: Tensor
    epochs: Tensor
    status: Tensor
    spin_limit: int = NO_LIMIT

    def fits(self, num_rows: int, row_bytes: int) -> bool:
        """True if a message of so many rows has slots: rows begin in slots of their own."""
        return row_bytes % WORD_BYTES == 0 and num_rows * cdiv(row_bytes, SLOT_WORDS * WORD_BYTES) <= len(self.epochs)


def buffer_shape(size: int, max_bytes: int) -> tuple[int, int, int, int]:
    """Of a rank's buffer, for messages of at most max_bytes."""
    return 2, size, cdiv(max_bytes, SLOT_WORDS * WORD_BYTES), SLOT_WORDS


def push_reduce(buffers: PeerBuffers, x: Tensor) -> Tensor:
    """The sum of all ranks' x, in x's memory; x contiguous."""
    words = x.view(-1).view(torch.int32)
    _launch(buffers, words[None], x)
    return x


def push_add(buffers: PeerBuffers, residual: NormedResidual, partial: Tensor, norm: Tensor) -> NormedResidual:
    """residual + the sum of all ranks' partial, with the next norm; partial [num_tokens, size], contiguous.

    Rounded once, at the end.
    """
    words = partial.view(torch.int32)
    total, weighted = torch.empty_like(partial), torch.empty_like(partial)
    parts = cdiv(words.shape[1], SLOT_WORDS)
    squares = torch.empty(parts, padded_tokens(len(partial)), dtype=torch.float32, device=partial.device)
    _launch(buffers, words, total, (residual.x, norm, weighted, squares))
    return NormedResidual(total, weighted, squares)


def push_gather(buffers: PeerBuffers, x: Tensor) -> Tensor:
    """[n, m] of each rank -> [n, size * m], rank r's columns from r * m on; x contiguous."""
    out = torch.empty(x.shape[0], buffers.size * x.shape[1], dtype=x.dtype, device=x.device)
    _launch(buffers, x.view(torch.int32), out.view(torch.int32), gather=True)
    return out


def _launch(
    buffers: PeerBuffers,
    words: Tensor,
    out: Tensor,
    norm: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    *,
    gather: bool = False,
) -> None:
    """words: of x, [num_rows, row_words]    norm: residual, the norm's weight, weighted, squares"""
    num_rows, row_words = words.shape
    num_units = num_rows * cdiv(row_words, SLOT_WORDS)
    num_slots = len(buffers.epochs)
    assert 0 < num_units <= num_slots and words.is_contiguous(), (words.shape, words.stride(), num_slots)
    residual, weight, weighted, squares = or_placeholder(out, *(norm or (None,) * 4))
    _exchange[(min(num_units, PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(words.device)),)](
        words,
        residual,
        weight,
        out,
        weighted,
        squares,
        buffers.mine,
        buffers.peers,
        buffers.epochs,
        buffers.status,
        buffers.rank,
        num_rows,
        num_units,
        num_slots,
        row_words,
        0 if norm is None else squares.shape[1],
        buffers.spin_limit,
        SIZE=buffers.size,
        RANKS=triton.next_power_of_2(buffers.size),
        SLOT=SLOT_WORDS,
        GATHER=gather,
        WITH_NORM=norm is not None,
        num_warps=4,
        **pdl_options(words.device),
    )


@triton.jit
def _is_late(stamped, epoch, valid):
    """Not 0 if a word has not arrived yet."""
    return tl.max(tl.max((valid & ((stamped >> 32) != epoch)).to(tl.int32), 1), 0)


@triton.jit
def _sum_ranks(words, dtype: tl.constexpr):
    """Words [ranks, SLOT] of one number of 32 bits or two of 16 -> their sums over the ranks, in float32."""
    if dtype == tl.float32:
        return tl.sum(words.to(tl.float32, bitcast=True), 0)
    elif dtype == tl.bfloat16:  # the upper half of a float32
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
        return tl.interleave(tl.sum(low, 0), tl.sum(high, 0))
    else:
        low = (words & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        return tl.interleave(tl.sum(low, 0), tl.sum(high, 0))


@triton.jit(do_not_specialize=["rank", "num_rows", "num_units", "num_slots", "padded", "spin_limit"])
def _exchange(
    words,
    residual,
    norm,
    out,
    weighted,
    squares,
    mine,
    peers,
    epochs,
    status,
    rank,
    num_rows,
    num_units,
    num_slots,
    row_words,
    padded,
    spin_limit,
    SIZE: tl.constexpr,
    RANKS: tl.constexpr,
    SLOT: tl.constexpr,
    GATHER: tl.constexpr,
    WITH_NORM: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Send and receive some units: a part of a row that fills a slot.

    padded  tokens of `squares`
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    PER_WORD: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    wait_for_predecessor(USE_PDL)
    word = tl.arange(0, SLOT)
    rank_index = tl.arange(0, RANKS)[:, None]
    units_per_row = (row_words + SLOT - 1) // SLOT
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        epoch = tl.load(epochs + unit) + 1
        column = unit % units_per_row * SLOT + word
        valid = column < row_words
        value = tl.load(words + unit // units_per_row * row_words + column, mask=valid, other=0)
        stamped = (epoch.to(tl.int64) << 32) | (value.to(tl.int64) & 0xFFFFFFFF)
        offset = (((epoch & 1) * SIZE + rank) * num_slots + unit) * SLOT
        for peer in tl.static_range(SIZE):
            buffer = tl.multiple_of(tl.load(peers + peer).to(tl.pointer_type(tl.int64)), 16)
            tl.store(buffer + offset + word, stamped, mask=valid)
    limit = tl.where(tl.load(status) == 0, spin_limit, 0)
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        epoch = tl.load(epochs + unit) + 1
        row, part = unit // units_per_row, unit % units_per_row
        column = part * SLOT + word
        valid = (rank_index < SIZE) & (column < row_words)[None, :]
        slots = mine + (((epoch & 1) * SIZE + rank_index) * num_slots + unit) * SLOT + word[None, :]
        stamped = tl.load(slots, mask=valid, other=0, volatile=True)
        late, num_reads = _is_late(stamped, epoch, valid), 0
        while (late != 0) & (num_reads < limit):
            stamped = tl.load(slots, mask=valid, other=0, volatile=True)
            late = _is_late(stamped, epoch, valid)
            num_reads += 1
        if late != 0:
            tl.store(status, 1)
        tl.store(epochs + unit, epoch)  # all threads have read it: they met in `_is_late`
        received = stamped.to(tl.int32)
        if GATHER:
            tl.store(out + (row * SIZE + rank_index) * row_words + column[None, :], received, mask=valid)
        else:
            total = _sum_ranks(received, DTYPE)
            element = part * SLOT * PER_WORD + tl.arange(0, SLOT * PER_WORD)
            is_element = element < row_words * PER_WORD
            offsets = row * row_words * PER_WORD + element
            if WITH_NORM:
                total += tl.load(residual + offsets, mask=is_element, other=0.0).to(tl.float32)
            rounded = total.to(DTYPE)
            tl.store(out + offsets, rounded, mask=is_element)
            if WITH_NORM:
                wide = rounded.to(tl.float32)
                tl.store(squares + part * padded + row, tl.sum(wide * wide, 0))
                weight = tl.load(norm + element, mask=is_element, other=0.0).to(tl.float32)
                tl.store(weighted + offsets, (wide * weight).to(DTYPE), mask=is_element)
