"""Sums over ranks in the epilogue of a product, in Gluon: programs push what they have computed through peer memory.

The kernel of `skinny_hopper` multiplies a rank's columns of the weight. Before it adds the residual, each program sends
its sums to the other ranks and waits for theirs. A separate kernel (`reduce.push_add`) would start, read the sums and
end in the time of the exchange itself. Results are the same bits.

Two adjacent numbers in bfloat16 are a word, which is sent in 64 bits with its epoch, as in `reduce`. A word's place is
that of its numbers in y. Launches of all shapes use the same places:

* The epoch is the number of the launch, which all ranks count alike. It is on the device: a CUDA graph's replay counts.
  It overflows after 2^32 launches, days later: only a place that was not used since could then hold an awaited epoch.
* There are two buffers, for even and odd epochs. A rank that sends the words of a launch has received those of the one
  before. The others sent them after they had read all words of the launch before that one.
* A program waits for the programs of its own number on the other ranks. All are resident if the result has up to 132
  tiles of 128 rows; else see `reduce` on whole rows.
* A word of a rank that is gone never comes. Then the kernel gives up, see `reduce.PeerBuffers`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.kernels.triton.reduce import READS_PER_LOOK, count_read

LOOK_READS = gl.constexpr(READS_PER_LOOK)


@gluon.constexpr_function
def _pairs_layout(rows, warps):
    """A thread has both numbers of a word, and adjacent words if there are enough."""
    adjacent = max(min(rows // 8, 4), 2)
    across = min(rows // adjacent, 8)
    return gl.BlockedLayout([adjacent, 1], [across, 32 // across], [1, warps], [0, 1])


@gluon.jit
def begin_launch(counters):
    """The launch's epoch; called once by every program. counters [2]: programs of this launch, launches before it."""
    epoch = gl.load(counters + 1, volatile=True) + 1
    gl.thread_barrier()  # all threads have read it
    if gl.atomic_add(counters, 1, sem="acq_rel") == gl.num_programs(0) - 1:  # and so have all programs
        gl.store(counters, 0)
        gl.store(counters + 1, epoch)
    return epoch


@gluon.jit
def _is_late(stamped, epoch, valid):
    """Not 0 if a word has not arrived yet."""
    return gl.max(gl.max((valid & ((stamped >> 32) != epoch)).to(gl.int32), 1), 0)


@gluon.jit
def _receive(slots, epoch, valid, status, stop, spin_limit):
    """The words of another rank, [pairs, tokens] int32."""
    reads_left = gl.where(gl.load(status) == 0, spin_limit, 0)
    stamped = gl.load(slots, mask=valid, other=0, volatile=True)
    late = _is_late(stamped, epoch, valid)
    while (late != 0) & (reads_left > 0):
        stamped = gl.load(slots, mask=valid, other=0, volatile=True)
        late = _is_late(stamped, epoch, valid)
        reads_left = count_read(reads_left, status, stop, LOOK_READS)
    if late != 0:
        gl.atomic_max(status, 1, sem="relaxed")  # LATE
    return stamped.to(gl.int32)


@gluon.jit
def sum_over_ranks(acc, ranks, first_row, first_token, num_tokens, num_out, NUM_RANKS: gl.constexpr):
    """acc [rows, tokens] float32 -> the sum of all ranks' acc, each rounded to bfloat16: the same bits on all ranks.

    num_out is even.
    """
    mine, peers, epoch, status, stop, rank, capacity, spin_limit = ranks
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    pairs = gl.convert_layout(acc.to(gl.bfloat16), _pairs_layout(ROWS, gl.num_warps()))
    bits = gl.reshape(pairs.to(gl.int16, bitcast=True), [ROWS // 2, 2, TOKENS])
    low, high = gl.split(gl.permute(bits, (0, 2, 1)))
    own = (high.to(gl.int32) << 16) | (low.to(gl.int32) & 0xFFFF)
    LAYOUT: gl.constexpr = own.type.layout
    pair = first_row // 2 + gl.arange(0, ROWS // 2, gl.SliceLayout(1, LAYOUT))
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))
    valid = (pair < num_out // 2)[:, None] & (token < num_tokens)[None, :]
    buffer = (epoch & 1) * NUM_RANKS * capacity
    word = token[None, :] * (num_out // 2) + pair[:, None]
    stamped = (epoch.to(gl.int64) << 32) | (own.to(gl.int64) & 0xFFFFFFFF)
    for peer in gl.static_range(NUM_RANKS):
        if rank != peer:
            target = gl.multiple_of(gl.load(peers + peer).to(gl.pointer_type(gl.int64)), 16)
            gl.store(target + (buffer + rank * capacity) + word, stamped, mask=valid)
    total_low = gl.zeros([ROWS // 2, TOKENS], gl.float32, LAYOUT)
    total_high = gl.zeros([ROWS // 2, TOKENS], gl.float32, LAYOUT)
    for peer in gl.static_range(NUM_RANKS):
        words = own
        if rank != peer:
            slots = mine + (buffer + peer * capacity) + word
            words = _receive(slots, epoch, valid, status, stop, spin_limit)
        total_low += (words << 16).to(gl.float32, bitcast=True)
        total_high += (words & -65536).to(gl.float32, bitcast=True)
    totals = gl.permute(gl.join(total_low, total_high), (0, 2, 1))
    return gl.convert_layout(gl.reshape(totals, [ROWS, TOKENS]), acc.type.layout)
