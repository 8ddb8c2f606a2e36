"""Sums and gathers over the ranks of a group, in one kernel on each GPU: messages pushed through peer memory.

Every rank has a buffer that the others write to. A message is cut into units, each a part of a row; each unit has a
slot in the buffer, with an epoch: how often the slot was used. A rank sends unit u into slot [epoch % 2, rank, u] of
the buffers, then waits for its own slots [epoch % 2, every rank, u], and adds them up. There are two ways to send:

pairs   (short messages) A word of 32 bits is sent in 64 bits, together with the epoch. 64 bits are written at once, so
        a word whose epoch is the awaited one has arrived: in any order of the words, without a fence or a flag. This
        has the shortest latency, and doubles the bytes.
blocks  (long messages) Data is sent as it is. Then all threads of the program meet, and its flags are set to the epoch
        with release semantics for the whole system: who acquires the flag's epoch reads the data.

* All ranks add the same numbers in the same order, in float32: their results are the same bits.
* A program sends all of its units before it waits, and waits only for slots, never for programs of its own GPU.
* For a whole norm, a program has a row, and not all of them are resident. GPUs start programs in their order, although
  CUDA does not promise it. So of the rows that are not finished, the first has its program on every rank.
* A rank can be one use of a slot ahead of another, which still reads; hence two buffers. It cannot be two ahead: it has
  received the slot's use in between, which the other sends in a later launch than the one that reads.
* The two ways share no memory and no epochs, so no word of one is taken for the other's. Operation and shape choose
  the way, on all ranks alike, and the above holds for the slots of each way, whatever is launched in between.
* Epochs are on the device, and the kernels count them: a CUDA graph's replay is one more use. They may overflow.
* A word of a rank that is gone never comes. The host then sets `PeerBuffers.stop`, and the kernels give up.

Ranks must launch the same sequence of these kernels, of the same shapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from octavo.kernels.triton.norms import weigh

SLOT_WORDS = 512
WORD_BYTES = 4
BLOCK_BYTES = 8192
FLAG_BYTES = 128
"""At the beginning of a block, a line of memory of its own."""
PAIRED_BYTES = 1 << 20
"""Longer messages are sent in blocks: measured on two H200s (benchmarks/kernels/bench_reduce.py)."""
EPILOGUE_BYTES = 1 << 20
"""Products with longer results sum them in a kernel of their own."""
SEND_SLOTS = 4
PROGRAMS_PER_MULTIPROCESSOR = 4
"""At most so many, of four warps: all programs of a launch are resident, except those that have whole rows."""
WARPS_PER_BLOCK = 8
"""Of a program that has a row of blocks; at most 16."""
NO_LIMIT = (1 << 31) - 1
LATE, STOPPED = 1, 2
"""Values of `PeerBuffers.status`: a unit has not come within the limit; the host has stopped the kernels."""
BLOCK, FLAG = tl.constexpr(BLOCK_BYTES), tl.constexpr(FLAG_BYTES)
READS_PER_LOOK = 1 << 15
"""A power of two: reads of a slot, about 30 ms, for one look at `PeerBuffers.stop`.

All programs look at one word of the host's memory. That may take over a millisecond, for which the other ranks wait at
the next message. If they waited long enough to look, too, all ranks would go on at that pace.
"""


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of one way on all ranks, as one rank sees them.

    mine        [2, size, num_slots, ...] int64, this rank's: pairs [..., SLOT_WORDS]; blocks a flag, then data
    peers       [size] int64, addresses of all ranks' slots, its own included
    epochs      [num_slots] int32, uses of each slot
    unit_bytes  of data that a slot takes
    """

    mine: Tensor
    peers: Tensor
    epochs: Tensor
    unit_bytes: int

    def fits(self, num_rows: int, row_bytes: int) -> bool:
        """True if a message of so many rows has slots: rows begin in slots of their own."""
        return row_bytes % WORD_BYTES == 0 and 0 < num_rows * cdiv(row_bytes, self.unit_bytes) <= len(self.epochs)


@dataclass(frozen=True, slots=True)
class Words:
    """Words that products send from their epilogues, see `linear.ranks_hopper`.

    mine      [2, size, capacity] int64, this rank's: of even and odd epochs, from each rank
    peers     as of `Slots`
    counters  [2] int32: programs of the current launch, launches
    """

    mine: Tensor
    peers: Tensor
    counters: Tensor

    @property
    def capacity(self) -> int:
        return self.mine.shape[2]


@dataclass(frozen=True, slots=True)
class Sends:
    """Slots of messages that copy engines send, see `sent_sums`.

    mine      [SEND_SLOTS, FLAG_BYTES + capacity] int8, this rank's: of each a flag of 4 bytes, then data
    peer      address of the other rank's
    counters  [SEND_SLOTS, 2] int32: the next use of the slot, from 1 on, and programs that have done it
    """

    mine: Tensor
    peer: int
    counters: Tensor

    @property
    def capacity(self) -> int:
        """Bytes of a message; 0: there are no slots."""
        return max(0, self.mine.shape[1] - FLAG_BYTES)


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """The buffers of all ranks, as one rank sees them, and the state of its own.

    status        [1] int32, not 0 once a program has given up, with a wrong result: LATE or STOPPED. Then none waits
    stop          [1] int32 in the host's memory, pinned: STOPPED ends all waits
    spin_limit    reads of a slot until a program gives up; a read takes about a microsecond
    paired_bytes  longer messages are sent in blocks
    look_reads    see READS_PER_LOOK
    """

    rank: int
    size: int
    pairs: Slots
    blocks: Slots
    words: Words
    sends: Sends
    status: Tensor
    stop: Tensor
    spin_limit: int = NO_LIMIT
    paired_bytes: int = PAIRED_BYTES
    look_reads: int = READS_PER_LOOK

    def stop_waiting(self) -> None:
        """End this rank's kernels that wait for others, and those that will: all later results are wrong.

        Any thread may call it. It writes to memory that the GPU reads: a call of CUDA may wait for a lock of the
        driver, which a thread holds that launches kernels behind those that wait.
        """
        self.stop.numpy()[0] = STOPPED

    def slots_for(self, num_rows: int, row_bytes: int) -> Slots | None:
        """The way of a message; None: it is too long, or its rows are no whole words."""
        ways = (self.pairs,) * (num_rows * row_bytes <= self.paired_bytes) + (self.blocks,)
        return next((way for way in ways if way.fits(num_rows, row_bytes)), None)


def buffer_shapes(
    size: int, max_bytes: int, paired_bytes: int = PAIRED_BYTES, sent_bytes: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Of the pairs, blocks, words and sends of a rank's buffer, in int64.

    max_bytes, sent_bytes  of the longest messages that are pushed, and that copy engines send; 0: none is sent
    """
    pairs = 2, size, cdiv(min(max_bytes, paired_bytes), SLOT_WORDS * WORD_BYTES), SLOT_WORDS
    blocks = 2, size, cdiv(max_bytes, BLOCK_BYTES), (FLAG_BYTES + BLOCK_BYTES) // 8
    sends = SEND_SLOTS, (cdiv(sent_bytes, FLAG_BYTES) + 1) * FLAG_BYTES // 8 if sent_bytes else 0
    return pairs, blocks, (2, size, min(max_bytes, EPILOGUE_BYTES) // WORD_BYTES), sends


def split_buffer(
    rank: int,
    mine: Tensor,
    addresses: Sequence[int],
    shapes: tuple[tuple[int, ...], ...],
    *,
    spin_limit: int = NO_LIMIT,
    paired_bytes: int = PAIRED_BYTES,
) -> PeerBuffers:
    """mine  int64 of `buffer_shapes`, this rank's buffer, zeros    addresses  of all ranks' buffers"""
    parts, peers, begin = [], [], 0
    for shape in shapes:
        end = begin + math.prod(shape)
        parts.append(mine[begin:end].view(shape))
        peers.append(torch.tensor([address + 8 * begin for address in addresses], device=mine.device))
        begin = end

    def zeros(number: int) -> Tensor:
        return torch.zeros(number, dtype=torch.int32, device=mine.device)

    sizes = SLOT_WORDS * WORD_BYTES, BLOCK_BYTES
    pairs, blocks = (
        Slots(part, of_peers, zeros(part.shape[2]), size)
        for part, of_peers, size in zip(parts, peers, sizes, strict=False)
    )
    words = Words(parts[2], peers[2], zeros(2))
    counters = torch.tensor([[1, 0]] * SEND_SLOTS, dtype=torch.int32, device=mine.device)
    sends = Sends(parts[3].view(torch.int8), addresses[rank - 1] + 8 * (end - parts[3].numel()), counters)
    stop = torch.zeros(1, dtype=torch.int32, pin_memory=mine.is_cuda)
    return PeerBuffers(rank, len(addresses), pairs, blocks, words, sends, zeros(1), stop, spin_limit, paired_bytes)


def push_reduce(buffers: PeerBuffers, x: Tensor) -> Tensor:
    """The sum of all ranks' x, in x's memory; x contiguous."""
    _launch(buffers, x.view(1, -1), x)
    return x


def push_add(buffers: PeerBuffers, residual: NormedResidual, partial: Tensor, norm: Tensor) -> NormedResidual:
    """residual + the sum of all ranks' partial, with the next norm; partial [num_tokens, size], contiguous.

    Rounded once, at the end.
    """
    total, weighted = torch.empty_like(partial), torch.empty_like(partial)
    squares = _launch(buffers, partial, total, (residual.x, norm, weighted))
    return NormedResidual(total, weighted, squares)


def push_add_norm(buffers: PeerBuffers, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`reference.add_rms_norm` of the sum of all ranks' x, in blocks: (norm, residual + sum).

    x and residual [num_rows, size], contiguous; norm [size], its weight. The sum is rounded once, with the residual.
    """
    slots, (num_rows, row_size) = buffers.blocks, x.shape
    assert slots.fits(num_rows, row_size * x.itemsize) and x.is_contiguous() and residual.is_contiguous()
    total, normed = torch.empty_like(x), torch.empty_like(x)
    parts = cdiv(row_size * x.itemsize, slots.unit_bytes)
    padded_parts = triton.next_power_of_2(parts)
    _exchange_rows[(num_rows,)](
        *(x, residual, norm, total, normed),
        *(slots.mine, slots.peers, slots.epochs, buffers.status, buffers.stop),
        *(buffers.rank, len(slots.epochs), row_size, buffers.spin_limit, eps),
        SIZE=buffers.size,
        RANKS=triton.next_power_of_2(buffers.size),
        UNIT=slots.unit_bytes // x.itemsize,
        PARTS=parts,
        PADDED_PARTS=padded_parts,
        LOOK_READS=buffers.look_reads,
        num_warps=min(WARPS_PER_BLOCK * padded_parts, 16),
        **pdl_options(x.device),
    )
    return normed, total


def push_gather(buffers: PeerBuffers, x: Tensor) -> Tensor:
    """[n, m] of each rank -> [n, size * m], rank r's columns from r * m on; x contiguous."""
    out = torch.empty(x.shape[0], buffers.size * x.shape[1], dtype=x.dtype, device=x.device)
    _launch(buffers, x.view(torch.int32), out.view(torch.int32), gather=True)
    return out


def _launch(
    buffers: PeerBuffers,
    x: Tensor,
    out: Tensor,
    norm: tuple[Tensor, Tensor, Tensor] | None = None,
    *,
    gather: bool = False,
) -> Tensor:
    """x: [num_rows, row_size]    norm: residual, the norm's weight, weighted -> parts of the sums of squares"""
    num_rows, row_size = x.shape
    row_bytes = row_size * x.itemsize
    slots = buffers.slots_for(num_rows, row_bytes)
    assert slots is not None and x.is_contiguous(), (x.shape, x.stride())
    parts = cdiv(row_bytes, slots.unit_bytes)
    num_units, padded = num_rows * parts, padded_tokens(num_rows)
    squares = None if norm is None else torch.empty(parts, padded, dtype=torch.float32, device=x.device)
    residual, weight, weighted, squares = or_placeholder(out, *(norm or (None,) * 3), squares)
    in_pairs = slots is buffers.pairs
    x = x.view(torch.int32) if in_pairs else x
    args = (x, residual, weight, out, weighted, squares, slots.mine, slots.peers, slots.epochs)
    words = (buffers.status, buffers.stop)
    numbers = (buffers.rank, num_units, len(slots.epochs), x.shape[1], padded, buffers.spin_limit)
    options = {
        "SIZE": buffers.size,
        "RANKS": triton.next_power_of_2(buffers.size),
        "UNIT": slots.unit_bytes // x.itemsize,
        "LOOK_READS": buffers.look_reads,
        "GATHER": gather,
        "WITH_NORM": norm is not None,
        "num_warps": 4,
        **pdl_options(x.device),
    }
    grid = (min(num_units, PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(x.device)),)
    if in_pairs:
        _exchange_pairs[grid](*args, *words, *numbers, **options)
    else:
        _exchange_blocks[grid](*args, *words, *numbers, **options)
    return squares


@triton.jit
def _is_late(stamped, epoch, valid):
    """Not 0 if a word has not arrived yet."""
    return tl.max(tl.max((valid & ((stamped >> 32) != epoch)).to(tl.int32), 1), 0)


@triton.jit
def count_read(reads_left, status, stop, LOOK_READS: tl.constexpr):
    """The reads that are left, 0 once this rank has given up. Looks at `stop` now and then.

    All threads of the program get the same answer, because it comes from an atomic operation: they meet in the loop.
    """
    reads_left -= 1
    if ((LOOK_READS - 1) & reads_left) == 0:  # noqa: SIM102 - Triton computes both sides of an `and`
        if tl.atomic_max(status, tl.load(stop, volatile=True), sem="relaxed") != 0:
            reads_left = 0
    return reads_left


@triton.jit
def _sum_ranks(words, dtype: tl.constexpr):
    """Words [ranks, UNIT] of one number of 32 bits or two of 16 -> their sums over the ranks, in float32."""
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


@triton.jit
def _store_sum(
    total,
    residual,
    norm,
    out,
    weighted,
    squares,
    row,
    part,
    row_size,
    padded,
    UNIT: tl.constexpr,
    WITH_NORM: tl.constexpr,
):
    """A unit's sums [UNIT], with the residual and the next norm if there is one."""
    column = part * UNIT + tl.arange(0, UNIT)
    valid = column < row_size
    offsets = row * row_size + column
    if WITH_NORM:
        total += tl.load(residual + offsets, mask=valid, other=0.0).to(tl.float32)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + offsets, rounded, mask=valid)
    if WITH_NORM:
        wide = rounded.to(tl.float32)
        tl.store(squares + part * padded + row, tl.sum(wide * wide, 0))
        weight = tl.load(norm + column, mask=valid, other=0.0).to(tl.float32)
        tl.store(weighted + offsets, (wide * weight).to(out.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["rank", "num_units", "num_slots", "padded", "spin_limit"])
def _exchange_pairs(
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
    stop,
    rank,
    num_units,
    num_slots,
    row_words,
    padded,
    spin_limit,
    SIZE: tl.constexpr,
    RANKS: tl.constexpr,
    UNIT: tl.constexpr,
    LOOK_READS: tl.constexpr,
    GATHER: tl.constexpr,
    WITH_NORM: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Send and receive some units in pairs.

    words   [num_rows, row_words], x
    padded  tokens of `squares`
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    PER_WORD: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    wait_for_predecessor(USE_PDL)
    word = tl.arange(0, UNIT)
    rank_index = tl.arange(0, RANKS)[:, None]
    units_per_row = (row_words + UNIT - 1) // UNIT
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        epoch = tl.load(epochs + unit) + 1
        column = unit % units_per_row * UNIT + word
        valid = column < row_words
        value = tl.load(words + unit // units_per_row * row_words + column, mask=valid, other=0)
        stamped = (epoch.to(tl.int64) << 32) | (value.to(tl.int64) & 0xFFFFFFFF)
        offset = (((epoch & 1) * SIZE + rank) * num_slots + unit) * UNIT
        for peer in tl.static_range(SIZE):
            buffer = tl.multiple_of(tl.load(peers + peer).to(tl.pointer_type(tl.int64)), 16)
            tl.store(buffer + offset + word, stamped, mask=valid)
    limit = tl.where(tl.load(status) == 0, spin_limit, 0)
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        epoch = tl.load(epochs + unit) + 1
        row, part = unit // units_per_row, unit % units_per_row
        column = part * UNIT + word
        valid = (rank_index < SIZE) & (column < row_words)[None, :]
        slots = mine + (((epoch & 1) * SIZE + rank_index) * num_slots + unit) * UNIT + word[None, :]
        stamped = tl.load(slots, mask=valid, other=0, volatile=True)
        late, reads_left = _is_late(stamped, epoch, valid), limit
        while (late != 0) & (reads_left > 0):
            stamped = tl.load(slots, mask=valid, other=0, volatile=True)
            late = _is_late(stamped, epoch, valid)
            reads_left = count_read(reads_left, status, stop, LOOK_READS)
        if late != 0:
            tl.atomic_max(status, 1, sem="relaxed")  # LATE
        tl.store(epochs + unit, epoch)  # all threads have read it: they met in `_is_late`
        received = stamped.to(tl.int32)
        if GATHER:
            tl.store(out + (row * SIZE + rank_index) * row_words + column[None, :], received, mask=valid)
        else:
            total = _sum_ranks(received, DTYPE)
            _store_sum(
                total,
                residual,
                norm,
                out,
                weighted,
                squares,
                row,
                part,
                row_words * PER_WORD,
                padded,
                UNIT * PER_WORD,
                WITH_NORM,
            )


@triton.jit
def _block(peers, peer, index, DTYPE: tl.constexpr):
    """The data of a rank's block, in 16 bytes at a time."""
    address = tl.load(peers + peer) + index.to(tl.int64) * (FLAG + BLOCK) + FLAG
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit(do_not_specialize=["rank", "num_units", "num_slots", "padded", "spin_limit"])
def _exchange_blocks(
    x,
    residual,
    norm,
    out,
    weighted,
    squares,
    mine,
    peers,
    epochs,
    status,
    stop,
    rank,
    num_units,
    num_slots,
    row_size,
    padded,
    spin_limit,
    SIZE: tl.constexpr,
    RANKS: tl.constexpr,
    UNIT: tl.constexpr,
    LOOK_READS: tl.constexpr,
    GATHER: tl.constexpr,
    WITH_NORM: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Send and receive some units in blocks. A rank sends to itself, too: all blocks are read alike.

    x       [num_rows, row_size]
    padded  tokens of `squares`
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    wait_for_predecessor(USE_PDL)
    element = tl.arange(0, UNIT)
    rank_index = tl.arange(0, RANKS)
    is_rank = rank_index < SIZE
    units_per_row = (row_size + UNIT - 1) // UNIT
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        epoch = tl.load(epochs + unit) + 1
        column = unit % units_per_row * UNIT + element
        valid = column < row_size
        value = tl.load(x + unit // units_per_row * row_size + column, mask=valid)
        index = ((epoch & 1) * SIZE + rank) * num_slots + unit
        for i in tl.static_range(1, SIZE + 1):  # each rank begins with another one, and ends with itself
            tl.store(_block(peers, (rank + i) % SIZE, index, DTYPE) + element, value, mask=valid)
    tl.debug_barrier()  # the release below covers what the other threads have written before it
    addresses = tl.load(peers + rank_index, mask=is_rank, other=0)
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        epoch = tl.load(epochs + unit) + 1
        index = ((epoch & 1) * SIZE + rank) * num_slots + unit
        flags = (addresses + index.to(tl.int64) * (FLAG + BLOCK)).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags, epoch, mask=is_rank, sem="release", scope="sys")
    limit = tl.where(tl.load(status) == 0, spin_limit, 0)
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        epoch = tl.load(epochs + unit) + 1
        first = (epoch & 1) * SIZE * num_slots + unit
        indices = (first + rank_index * num_slots).to(tl.int64)
        flags = mine.to(tl.pointer_type(tl.int32)) + indices * ((FLAG + BLOCK) // 4)
        late, reads_left = 2, limit  # not read yet
        while (late == 2) | ((late == 1) & (reads_left > 0)):
            found = tl.atomic_add(flags, 0, mask=is_rank, sem="acquire", scope="sys")
            late = tl.max((is_rank & (found != epoch)).to(tl.int32), 0)
            reads_left = count_read(reads_left, status, stop, LOOK_READS)
        tl.debug_barrier()  # what one thread has acquired, all may read; and all have read the epoch
        if late != 0:
            tl.atomic_max(status, 1, sem="relaxed")  # LATE
        tl.store(epochs + unit, epoch)
        row, part = unit // units_per_row, unit % units_per_row
        column = part * UNIT + element
        valid = column < row_size
        if not GATHER:
            total = tl.zeros([UNIT], tl.float32)
        for peer in tl.static_range(SIZE):
            block = _block(peers, rank, first + peer * num_slots, DTYPE)
            received = tl.load(block + element, mask=valid, other=0, cache_modifier=".cg")  # L1 may have old data
            if GATHER:
                tl.store(out + (row * SIZE + peer) * row_size + column, received, mask=valid)
            else:
                total += received.to(tl.float32)
        if not GATHER:
            _store_sum(total, residual, norm, out, weighted, squares, row, part, row_size, padded, UNIT, WITH_NORM)


@triton.jit(do_not_specialize=["rank", "num_slots", "spin_limit"])
def _exchange_rows(
    x,
    residual,
    norm,
    out,
    normed,
    mine,
    peers,
    epochs,
    status,
    stop,
    rank,
    num_slots,
    row_size,
    spin_limit,
    eps,
    SIZE: tl.constexpr,
    RANKS: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    LOOK_READS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Send and receive a row of PARTS blocks, and normalise its sum. A rank keeps its own."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    wait_for_predecessor(USE_PDL)
    part, peer, element = tl.arange(0, PADDED_PARTS), tl.arange(0, RANKS), tl.arange(0, UNIT)[None, :]
    column = part[:, None] * UNIT + element
    valid = column < row_size
    others = ((peer < SIZE) & (peer != rank))[:, None] & (part < PARTS)[None, :]
    addresses = tl.load(peers + peer, mask=peer < SIZE, other=0)[:, None]
    weight = tl.load(norm + column, mask=valid, other=0.0)
    limit = tl.where(tl.load(status) == 0, spin_limit, 0)
    row = tl.program_id(0)
    unit = row * PARTS + part
    epoch = tl.load(epochs + unit, mask=part < PARTS, other=0) + 1
    first = (epoch & 1) * SIZE * num_slots + unit  # rank 0's
    offsets = row * row_size + column
    own = tl.load(x + offsets, mask=valid, other=0.0)
    sent = (first + rank * num_slots).to(tl.int64) * (FLAG + BLOCK)
    for shift in tl.static_range(1, SIZE):  # each rank begins with another one
        blocks = _blocks(peers, (rank + shift) % SIZE, sent[:, None], DTYPE)
        tl.store(blocks + element, own, mask=valid)
    before = tl.load(residual + offsets, mask=valid, other=0.0)
    tl.debug_barrier()  # the release below covers what the other threads have written before it
    flags = (addresses + sent[None, :]).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags, tl.where(others, epoch[None, :], 0), mask=others, sem="release", scope="sys")
    indices = (first[None, :] + peer[:, None] * num_slots).to(tl.int64)
    flags = mine.to(tl.pointer_type(tl.int32)) + indices * ((FLAG + BLOCK) // 4)
    late, reads_left = 2, limit  # not read yet
    while (late == 2) | ((late == 1) & (reads_left > 0)):
        found = tl.atomic_add(flags, 0, mask=others, sem="acquire", scope="sys")
        late = tl.max(tl.max((others & (found != epoch[None, :])).to(tl.int32), 1), 0)
        reads_left = count_read(reads_left, status, stop, LOOK_READS)
    tl.debug_barrier()  # what one thread has acquired, all may read; and all have read the epoch
    if late != 0:
        tl.atomic_max(status, 1, sem="relaxed")  # LATE
    tl.store(epochs + unit, epoch, mask=part < PARTS)
    total = tl.zeros([PADDED_PARTS, UNIT], tl.float32)
    for sender in tl.static_range(SIZE):
        place = (first + sender * num_slots).to(tl.int64) * (FLAG + BLOCK)
        blocks = _blocks(peers, rank, place[:, None], DTYPE) + element
        received = tl.load(blocks, mask=valid & (sender != rank), other=0.0, cache_modifier=".cg")
        total += tl.where(sender == rank, own, received).to(tl.float32)
    rounded = (total + before.to(tl.float32)).to(DTYPE)
    tl.store(out + offsets, rounded, mask=valid)
    wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(tl.sum(wide * wide, 1), 0) / row_size + eps)
    tl.store(normed + offsets, weigh(wide * scale, weight, DTYPE), mask=valid)


@triton.jit
def _blocks(peers, peer, offset, DTYPE: tl.constexpr):
    """The data of a rank's blocks [parts, 1], in 16 bytes at a time."""
    address = tl.load(peers + peer) + offset + FLAG
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), (16, 16))
