"""What crosses the seam between the scheduler and an executor: a `StepPlan` one way, a `StepResult` the other.

A plan is data: what one step does to memory, and which tokens it computes. The core decides, the executor obeys.

Stream order is the one promise asked of an executor. Plan k+1 happens after plan k on the device, and inside a plan:

    row setups and table writes -> swaps out -> swaps in -> copies -> slices (in any order among themselves)

A plan owns its lists and nothing in them aliases live state, so the device may read them late.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from octavo.core.request import Request, Sequence
    from octavo.core.types import BlockId, HostBlockId, Row, SealId
    from octavo.params.sampling_params import SamplingParams


class BlockCopy(NamedTuple):
    """Copy-on-write: a whole block, over all layers, device to device."""

    src: BlockId
    dst: BlockId


class SwapOut(NamedTuple):
    """Device to host."""

    src: BlockId
    dst: HostBlockId


class SwapIn(NamedTuple):
    """Host to device."""

    src: HostBlockId
    dst: BlockId


class TableWrite(NamedTuple):
    """block_tables[row, start : start + len(block_ids)] = block_ids. A newly given row begins with its whole table."""

    row: Row
    start: int
    block_ids: tuple[BlockId, ...]


class RowSetup(NamedTuple):
    """A row changes hands: everything sampled on it from now on is this sequence's.

    The noise that picks a token is a function of (seed, sample_index, position) only. `stop_ids` end the sequence on
    the device too, early: the host has the last word.

    num_prompt  tokens of the prompt: what comes after them is output
    token_ids   all that the host knows of the sequence, and that is all there is: nothing sampled is in flight when a
                row is given. Only for a request that asks for it (`SamplingParams.needs_history`), None for the others.
                From then on the device keeps it up: by what it samples, and by the host tokens of slices
    decides     the host chooses: what comes back from a slice with draws are the likeliest tokens, best first, each as
                (log-probability, token)
    """

    row: Row
    sampling_params: SamplingParams
    seed: int
    sample_index: int
    stop_ids: frozenset[int]
    num_prompt: int = 0
    token_ids: array[int] | None = None
    returns_candidates: bool = False


class Slice(NamedTuple):
    """One sequence's share of a step, as `StepPlan.slices` shows it to readers that are not in a hurry.

    Positions [start, start + num_positions) are computed. The last `num_sampled` of them each give a token; all but the
    first of those are a window: the device feeds itself what it has just sampled. From the last row of logits come
    `num_draws` tokens instead of one: the samples of a request about to fork, or the candidates of one that decides on
    the host. `token_ids` are the tokens that the host knows, None where the row itself holds the one to go on from.

        position   start                  start + num_positions
           |  chunk of known tokens  |  window    |
           +-------------------------+------------+
                                  ^ first sampled from this position
    """

    row: Row
    start: int
    num_positions: int
    num_sampled: int
    num_samples: int
    token_ids: array[int] | None


NO_SLICES: frozenset[int] = frozenset()


class StepPlan:
    """One step, as parallel flat lists with one entry a slice: no object a slice, because the host's cost is counted.

    rows, starts, counts   the slice's row, first position and number of positions
    samples                tokens that come back: 0 for a chunk, 1, or a window's length
    draws                  slice -> tokens drawn from its last row of logits, where that is not 1
    masked                 slices whose tokens are drawn from what a mask allows, each from one of its own; it is put
                           while the step runs, once all tokens before are in
    host_tokens            slice -> its first tokens; absent: the row's own last token. They clear the row's done flag
    sequences              the owner at plan time: results go to it, never to the row's present owner. For the
                           scheduler alone; an executor does not look at it
    swapped                requests that this plan moves between the tiers; for the scheduler alone, too
    returning              host block that this plan brings back -> its request; likewise
    void                   slices whose results are dropped: they were computed from corrupt blocks; likewise
    seal_mark              every seal id above it was given out by this plan or later: what a failed step takes back
    outstanding            what is left of `samples` once a part of a window has landed
    """

    __slots__ = (
        "bitmask_slices",
        "copies",
        "counts",
        "host_tokens",
        "num_outstanding",
        "num_sampled",
        "num_samples",
        "row_setups",
        "rows",
        "seal_mark",
        "sequences",
        "starts",
        "step",
        "swap_in_requests",
        "swap_ins",
        "swap_outs",
        "swapped_requests",
        "table_writes",
        "void_slices",
    )

    def __init__(self, step: int = 0, seal_mark: SealId = 0) -> None:
        self.step = step
        self.rows: list[Row] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.num_sampled: list[int] = []
        self.num_samples: dict[int, int] = {}
        self.bitmask_slices: list[int] = []
        self.host_tokens: dict[int, array[int]] = {}
        self.row_setups: list[RowSetup] = []
        self.table_writes: list[TableWrite] = []
        self.swap_outs: list[SwapOut] = []
        self.swap_ins: list[SwapIn] = []
        self.copies: list[BlockCopy] = []
        self.sequences: list[Sequence] = []
        self.swapped_requests: list[Request] = []
        self.swap_in_requests: dict[HostBlockId, Request] = {}
        self.void_slices: Set[int] = NO_SLICES
        self.seal_mark = seal_mark
        self.num_outstanding: list[int] | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to do. A plan may consist of swaps alone; dropping it would lose their copies."""
        return bool(self.rows or self.swap_outs or self.swap_ins)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def num_bitmask_columns(self) -> int:
        """Columns of tokens that wait for masks: the first ones."""
        return max((self.num_sampled[i] for i in self.bitmask_slices), default=0)

    def drop(self, requests: Container[Request]) -> None:
        """Expect nothing more for these requests: what still comes of their slices is void."""
        left = self.num_outstanding or self.num_sampled
        for i, seq in enumerate(self.sequences):
            if seq.request in requests and i not in self.void_slices:
                self.void_slices |= {i}
                seq.num_pending -= left[i]

    def slices(self) -> Iterator[Slice]:
        for i, row in enumerate(self.rows):
            yield Slice(
                row,
                self.starts[i],
                self.counts[i],
                self.num_sampled[i],
                self.num_samples.get(i, 1),
                self.host_tokens.get(i),
            )


class TokenLogprobs(NamedTuple):
    """What the model thought of one token, before penalties, temperature and filters.

    rank                1 for the likeliest token of the vocabulary
    top_ids, top        the likeliest tokens, best first, and their log-probabilities; as many as were asked for
    """

    logprob: float
    rank: int
    top_ids: list[int]
    top: list[float]


@dataclass(slots=True)
class StepResult:
    """What a step gave.

    tokens    one entry a slice: the tokens sampled, in order. Nothing for a chunk. A window that met a stop id on the
              device may be shorter than planned, or padded: the host cuts at the first stop token itself. For a slice
              with draws, the draws: tokens, or what the request's `decide` understands, such as (logprob, token)
    errors    slice -> what is wrong with it (numbers that are not finite). Only that request fails
    logprobs  slice -> one entry for each of its tokens, where the request asks for them
    prompt_logprobs  slice -> (position, entries): of the prompt's tokens from that position on, in the same case
    corrupt   host blocks of `swap_ins` whose content is not what was swapped out. Reported once, with the first part of
              a result; everything that the plan computed from them is wrong
    """

    tokens: Seq[Seq[Any]]
    errors: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
    corrupt: list[HostBlockId] = field(default_factory=list)

    def drop(self, slices: Container[int]) -> None:
        """Forget all that came of these slices."""
        self.tokens = [() if i in slices else tokens for i, tokens in enumerate(self.tokens)]
        by_slice: tuple[dict[int, Any], ...] = self.errors, self.logprobs, self.prompt_logprobs
        for found in by_slice:
            for i in [i for i in found if i in slices]:
                del found[i]
