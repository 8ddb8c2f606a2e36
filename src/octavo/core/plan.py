"""The interface between scheduler and executor: `StepPlan` one way, `StepResult` back.

A plan is plain data: the memory operations of one step and the positions that it computes. The scheduler takes all
decisions; the executor carries them out.

An executor must keep stream order. Plan k+1 runs after plan k on the device, and within a plan the order is:

    row setups and table writes -> swaps out -> swaps in -> copies -> slices (in any order among themselves)

A plan owns its lists, and nothing in them aliases live state, so the device may read them late.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.core.snapshot import Fields, Roster, State

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
    """block_tables[row, start : start + len(block_ids)] = block_ids. A new row starts with its whole table."""

    row: Row
    start: int
    block_ids: tuple[BlockId, ...]


class RowSetup(NamedTuple):
    """Assigns a row to a sequence: every token sampled on the row from now on belongs to it.

    Sampling noise is a function of (seed, sample_index, position) only. `stop_ids` stop the sequence early on the
    device; the host makes the final decision.

    num_prompt          tokens of the prompt; later ones are output
    token_ids           all tokens of the sequence, complete because no token is in flight when a row is assigned. Only
                        if `SamplingParams.needs_history`, else None. The device appends its sampled tokens and the host
                        tokens of slices
    returns_candidates  beam search: slices with `num_samples` return the top candidates, best first, as pairs of
                        (log-probability, token), and sample nothing
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
    """One sequence's part of a step. `StepPlan.slices` yields these for callers that are not performance-critical.

    start, num_positions  positions [start, start + num_positions) are computed
    num_sampled           the last `num_sampled` positions each sample a token. All but the first of these positions are
                          the decode window, whose inputs are the tokens just sampled on the device
    num_samples           tokens from the last row of logits: 1, the samples of a request about to fork, or the
                          candidates of a beam search
    token_ids             the input tokens known to the host; None if the row holds the last token

        position   start                  start + num_positions
           |  chunk of known tokens  |  window    |
           +-------------------------+------------+
                                  ^ the first token is sampled from this position
    """

    row: Row
    start: int
    num_positions: int
    num_sampled: int
    num_samples: int
    token_ids: array[int] | None


NO_SLICES: frozenset[int] = frozenset()


class StepPlan:
    """One step as parallel lists with one entry per slice, without an object per slice because host time counts.

    rows, starts, counts   the slice's row, first position and number of positions
    num_sampled            tokens that the slice returns: 0 for a prefill chunk, 1, or the length of a decode window
    num_samples            slice -> tokens taken from its last row of logits, where that is not 1
    bitmask_slices         slices of structured outputs. Each of their tokens is sampled through a bitmask, which is put
                           while the step runs, once all earlier tokens are known
    host_tokens            slice -> its first input tokens; absent: the row's last token. They clear the row's done flag

    Only the scheduler reads the following fields:

    sequences              the slice's sequence: results go to it, never to the row's present owner
    swapped_requests       requests that this plan swaps out or in
    swap_in_requests       host block of `swap_ins` -> its request
    void_slices            slices whose results are dropped, because they were computed from corrupt blocks
    seal_mark              seal ids above it were issued by this plan or later; a failed step removes them
    num_outstanding        the rest of `num_sampled` once a part of a decode window has arrived
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

    SAVED = Fields("step rows starts counts seal_mark draws=num_samples masked=bitmask_slices samples=num_sampled")
    """What a result needs while the plan is in flight. For the host, its work on memory is done."""

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
        """False if there is nothing to do. A plan with swaps alone is true: dropping it would lose their copies."""
        return bool(self.rows or self.swap_outs or self.swap_ins)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def num_bitmask_columns(self) -> int:
        """The number of leading token columns that wait for bitmasks."""
        return max((self.num_sampled[i] for i in self.bitmask_slices), default=0)

    def drop(self, requests: Container[Request]) -> None:
        """Make the slices of these requests void: no more results are expected of them."""
        left = self.num_outstanding or self.num_sampled
        for i, seq in enumerate(self.sequences):
            if seq.request in requests and i not in self.void_slices:
                self.void_slices |= {i}
                seq.num_pending -= left[i]

    def snapshot(self, roster: Roster) -> State:
        return self.SAVED.save(self) | {
            "outstanding": None if self.num_outstanding is None else self.num_outstanding[:],
            "host_tokens": list(self.host_tokens),
            "sequences": roster.indices(self.sequences),
            "swapped": roster.indices(self.swapped_requests),
            "returning": [(block, roster.index(request)) for block, request in self.swap_in_requests.items()],
            "void": sorted(self.void_slices),
        }

    @classmethod
    def restored(cls, state: State, roster: Roster) -> StepPlan:
        """A plan in flight of a snapshot, without its input tokens and its memory operations."""
        plan = cls()
        cls.SAVED.load(plan, state)
        plan.num_outstanding = None if state["outstanding"] is None else list(state["outstanding"])
        plan.host_tokens = {i: array("i") for i in state["host_tokens"]}
        plan.sequences = roster.sequences_at(state["sequences"])
        plan.swapped_requests = roster.requests_at(state["swapped"])
        plan.swap_in_requests = {block: roster.requests[i] for block, i in state["returning"]}
        plan.void_slices = frozenset(state["void"])
        return plan

    def slices(self) -> Iterator[Slice]:
        for i, row in enumerate(self.rows):
            num_sampled, num_samples = self.num_sampled[i], self.num_samples.get(i, 1)
            yield Slice(row, self.starts[i], self.counts[i], num_sampled, num_samples, self.host_tokens.get(i))


class TokenLogprobs(NamedTuple):
    """The model's log-probabilities at one position, before penalties, temperature and filters.

    rank                the token's rank in the vocabulary, from 1
    top_ids, top        the requested number of top tokens, best first, and their log-probabilities
    """

    logprob: float
    rank: int
    top_ids: list[int]
    top: list[float]


@dataclass(slots=True)
class StepResult:
    """The result of a step, or of a part of it.

    tokens    per slice: the sampled tokens in order; none for a prefill chunk. A decode window that met a stop id on
              the device may be shorter than planned, or padded: the host cuts it at the first stop token. A slice with
              `num_samples` has its samples, or its candidates for `Request.select_beams` as (logprob, token)
    errors    slice -> what is wrong with it, such as non-finite logits. Only that request fails
    logprobs  slice -> one entry per token, if the request wants them
    prompt_logprobs  slice -> (position, entries): entries for the prompt's tokens from that position on, if wanted
    corrupt   host blocks of `swap_ins` whose content changed while they were swapped out. Reported once, with the first
              part of a result; everything that the plan computed from them is wrong
    """

    tokens: Seq[Seq[Any]]
    errors: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
    corrupt: list[HostBlockId] = field(default_factory=list)

    def drop(self, slices: Container[int]) -> None:
        """Remove all results of these slices."""
        self.tokens = [() if i in slices else tokens for i, tokens in enumerate(self.tokens)]
        by_slice: tuple[dict[int, Any], ...] = self.errors, self.logprobs, self.prompt_logprobs
        for results in by_slice:
            for i in [i for i in results if i in slices]:
                del results[i]
