"""Requests (`Request`) and their token sequences (`Sequence`).

There is no phase flag. A sequence has `num_computed`, which chases its length. Prefill, chunked prefill, decode, prefix
hits, preemption and recomputation are all the same subtraction:

    token_ids   known to the host                      num_pending
    +------------------------------------------------+--------------+
    |                                                |  sampled, in flight
    +---------------------------------------+--------+--------------+
    0                                       num_computed            length
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from enum import Enum
from typing import Any

from octavo.core.snapshot import Fields, Roster, State
from octavo.core.types import NULL_BLOCK, BlockId, Row, SealId
from octavo.params.sampling_params import SamplingParams


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class WindowTable:
    """A sequence's block table of a window group: as long as its full one.

    block_ids    as `Sequence.block_ids`
    num_dropped  leading entries that are the null block: they left the window, or were never needed
    num_found    leading entries that the sequence began with: others computed them
    """

    __slots__ = ("block_ids", "num_dropped", "num_found")

    def __init__(self, block_ids: list[BlockId], num_dropped: int = 0, num_found: int = 0) -> None:
        self.block_ids, self.num_dropped, self.num_found = block_ids, num_dropped, num_found

    def copy(self) -> WindowTable:
        return WindowTable(self.block_ids[:], self.num_dropped, self.num_found)


class Sequence:
    """One sequence of tokens and the blocks with its keys and values.

    token_ids     prompt and output tokens known to the host
    num_pending   tokens planned to be sampled on the device and not yet known to the host; an upper bound while drafts
                  are in flight
    num_computed  positions planned, those in flight included; an upper bound while drafts are in flight
    num_unverified  how many of both drafts in flight may lose: num_computed - num_unverified is the lower bound
    max_length    length at which it ends; the last token is never computed
    block_ids     block table: device block ids; while swapped, host block ids, and -b for block b shared on the device
    num_dropped   leading entries of `block_ids` that are the null block: they left the attention window
    room          len(block_ids) * block_size
    windows       its table of each window group
    state         blocks of its recurrent state after `num_computed` positions, the head of a checkpoint last; [] before
                  the first one, and for models without states
    marks         ascending positions where it leaves a checkpoint of its state
    checkpoint    position, head and seal id of the checkpoint that it began with or left last; zeros: none
    row           row in the device's tables, -1 without one
    row_has_last  the row holds the sequence's last token, so the device can continue without the host
    seal_ids      seal id of each leading sealed block: its own, or that of an equal block
    seal_at       number of known and computed positions at which the next block can be sealed
    finish_reason "" until it ends; "stop", "length", "abort", "error" or, for a beam that was not selected, "pruned"
    stop_token    stop token that ended it, None if something else did
    """

    __slots__ = (
        "block_ids",
        "checkpoint",
        "finish_reason",
        "index",
        "marks",
        "max_length",
        "num_computed",
        "num_dropped",
        "num_pending",
        "num_unverified",
        "request",
        "room",
        "row",
        "row_has_last",
        "seal_at",
        "seal_ids",
        "state",
        "stop_token",
        "token_ids",
        "windows",
    )

    SAVED = Fields(
        "block_ids finish_reason index num_computed num_dropped num_pending num_unverified room row row_has_last "
        "seal_at seal_ids limit=max_length state marks checkpoint"
    )

    def __init__(self, request: Request, index: int, token_ids: array[int], max_length: int) -> None:
        self.request = request
        self.index = index
        self.token_ids = token_ids
        self.max_length = max_length
        self.num_pending = 0
        self.num_computed = 0
        self.num_unverified = 0
        self.block_ids: list[BlockId] = []
        self.num_dropped = 0
        self.room = 0
        self.windows: list[WindowTable] = []
        self.state: list[BlockId] = []
        self.marks: list[int] = []
        self.checkpoint: tuple[int, BlockId, SealId] = (0, NULL_BLOCK, 0)
        self.row: Row = -1
        self.row_has_last = False
        self.seal_ids: list[SealId] = []
        self.seal_at = 0
        self.finish_reason = ""
        self.stop_token: int | None = None

    def snapshot(self, roster: Roster) -> State:
        return self.SAVED.save(self) | {
            "request": roster.index(self.request),
            "num_tokens": len(self.token_ids),
            "stopped": self.stop_token is not None,
            "windows": [(table.block_ids[:], table.num_dropped, table.num_found) for table in self.windows],
        }

    @classmethod
    def restored(cls, state: State, requests: Seq[Request], token_ids: array[int]) -> Sequence:
        """A sequence of a snapshot; `requests` are those of the roster."""
        sequence = cls(requests[state["request"]], state["index"], token_ids, state["limit"])
        cls.SAVED.load(sequence, state)
        sequence.windows = [WindowTable(list(ids), *nums) for ids, *nums in state.get("windows", ())]
        sequence.stop_token = token_ids[-1] if state["stopped"] else None
        return sequence

    @property
    def tables(self) -> Iterator[tuple[list[BlockId], int]]:
        """(block ids, leading ones that are null) of each group, the full one first."""
        yield self.block_ids, self.num_dropped
        for table in self.windows:
            yield table.block_ids, table.num_dropped

    @property
    def holdings(self) -> Iterator[tuple[list[BlockId], int]]:
        """`tables` and, if it has one, its state."""
        yield from self.tables
        if self.state:
            yield self.state, 0

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_token_ids) :].tolist()

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id!r}/{self.index}, {len(self.token_ids)}+{self.num_pending} tokens, "
            f"{self.num_computed} computed, blocks {self.block_ids})"
        )


SelectBeams = Callable[[list[tuple[Sequence, Any]]], list[tuple[Sequence, int]]]
"""Beam selection callback: maps each live sequence's candidates to the continuations to keep.

These are pairs (parent, token), at most `width`, best first. It must not raise: `Scheduler.update` calls it, and an
exception there ends the engine."""


class Request:
    """A request: one or more sequences that are scheduled, preempted and freed together (a sequence group).

    width                  rows that it takes from admission to finish: n, or the beam width
    select_beams           beam search: selects among candidates on the host after every token
    num_samples            tokens taken from the last row of logits: n at the fork; candidates per sequence of a beam
                           search
    use_structured_output  tokens are sampled through a bitmask, which the host computes for each position once it knows
                           all earlier tokens. The next step is still planned while the last token is in flight
    needs_result           nothing is planned while a token is pending: the host selects beams, or a fork is to come
    salt                   requests with different salts share no blocks
    tenant                 number of its tenant; tenants share steps evenly
    index_in_call          number of earlier prompts of the same call. Other requests may overtake later prompts
    num_draft_tokens       limit of drafts per forward pass of each sequence. No drafts while `needs_result`
    marks                  lengths of the prompt's beginnings that later requests are likely to share, for models with
                           states
    pin                    keeps the blocks of its prompt, under its request id, after it has finished with one token
    resume                 outputs so far of each unfinished sample, by index, from an engine that stopped. The request
                           continues as after a preemption. Outputs are not empty, and there is no `select_beams`

    Callers refuse empty prompts; the core only asserts.
    """

    __slots__ = (
        "arrival",
        "error",
        "finished_sequences",
        "forked",
        "index_in_call",
        "marks",
        "max_tokens",
        "needs_result",
        "newest_prefix_seal",
        "num_cached_tokens",
        "num_draft_tokens",
        "num_preemptions",
        "num_samples",
        "only_sequence",
        "order",
        "pin",
        "priority",
        "prompt_token_ids",
        "request_id",
        "resume",
        "salt",
        "sampling_params",
        "seed",
        "select_beams",
        "sequences",
        "shared_on_device",
        "status",
        "stop_ids",
        "tenant",
        "turn_ends",
        "use_structured_output",
        "wait_reason",
        "waits_since",
        "width",
    )

    INPUTS = Fields(
        "pin priority tenant width constrained=use_structured_output num_draws=num_samples rank=index_in_call "
        "num_draft_tokens marks"
    )
    """Arguments that are plain data and never change. A restored request is made with them."""
    SAVED = Fields(
        "arrival forked max_tokens num_cached_tokens num_preemptions order status left_behind=shared_on_device "
        "must_wait=needs_result newest_found=newest_prefix_seal waits_for=wait_reason waits_since turn_ends"
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Iterable[int],
        sampling_params: SamplingParams,
        *,
        max_tokens: int | None = None,
        seed: int = 0,
        stop_ids: Iterable[int] = (),
        priority: int = 0,
        salt: bytes = b"",
        tenant: int = 0,
        index_in_call: int = 0,
        width: int | None = None,
        num_samples: int | None = None,
        select_beams: SelectBeams | None = None,
        use_structured_output: bool = False,
        num_draft_tokens: int = 0,
        marks: Iterable[int] = (),
        pin: bool = False,
        resume: Mapping[int, Iterable[int]] | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = array("i", prompt_token_ids)
        assert self.prompt_token_ids, "an empty prompt: callers refuse it"
        self.sampling_params = sampling_params
        self.max_tokens = sampling_params.max_tokens if max_tokens is None else max_tokens
        self.seed = seed
        self.stop_ids = frozenset(stop_ids) | frozenset(sampling_params.stop_token_ids or ())
        self.priority = priority
        self.salt = salt
        self.tenant = tenant
        self.index_in_call = index_in_call
        self.width = sampling_params.width if width is None else width
        self.select_beams = select_beams
        self.num_samples = (
            (self.width if select_beams is None else 2 * self.width) if num_samples is None else num_samples
        )
        self.use_structured_output = use_structured_output
        self.num_draft_tokens = num_draft_tokens
        self.marks = tuple(marks)
        self.pin = pin
        self.resume = resume
        self.forked = self.width == 1 or select_beams is not None or bool(resume)
        self.needs_result = select_beams is not None or not self.forked
        # Set by the scheduler:
        self.arrival = -1
        self.order: tuple[int, int] = (0, -1)
        self.status = Status.WAITING
        self.sequences: list[Sequence] = []  # unfinished
        self.finished_sequences: list[Sequence] = []  # in order of finishing
        self.only_sequence: Sequence | None = None  # set if there will never be another: the hot path
        self.num_cached_tokens = -1  # prefix cache hits at the first admission
        self.num_preemptions = 0
        self.newest_prefix_seal: SealId = 0  # newest seal among all prefix blocks that it ever began with
        self.wait_reason = ""  # see `events.Waiting`
        self.waits_since = -1  # step since which it waits for rows or blocks, or in which it gave way
        self.turn_ends = 0  # length from which on it gives way
        self.error = ""  # error of its slice on the device
        self.shared_on_device: dict[BlockId, SealId] = {}  # while swapped: see `swap_out`

    def begin(self, arrival: int, order: tuple[int, int], max_tokens: int) -> None:
        """Make the sequences. The scheduler calls this when it adds the request."""
        self.arrival, self.order, self.max_tokens = arrival, order, max_tokens
        prompt = self.prompt_token_ids
        limit, known = len(prompt) + max_tokens, self.resume or {0: ()}
        self.sequences = [Sequence(self, i, prompt + array("i", output), limit) for i, output in known.items()]
        self.only_sequence = self.sequences[0] if self.is_single else None

    def snapshot(self, roster: Roster) -> State:
        return {
            **self.INPUTS.save(self),
            **self.SAVED.save(self),
            "beam_search": self.select_beams is not None,
            "num_prompt": len(self.prompt_token_ids),
            "skip_prefix_cache": self.sampling_params.skip_reading_prefix_cache,
            "sequences": roster.indices(self.sequences),
            "done": roster.indices(self.finished_sequences),
            "solo": -1 if self.only_sequence is None else roster.index(self.only_sequence),
        }

    def restore(self, state: State, roster: Roster) -> None:
        """Continue as this request of a snapshot."""
        self.SAVED.load(self, state)
        self.sequences = roster.sequences_at(state["sequences"])
        self.finished_sequences = roster.sequences_at(state["done"])
        self.only_sequence = None if state["solo"] < 0 else roster.sequences[state["solo"]]

    @property
    def is_single(self) -> bool:
        """True if it never has a second sequence."""
        return self.width == 1 and self.select_beams is None

    @property
    def drops(self) -> bool:
        """True if it releases what leaves its attention windows."""
        return self.is_single and not self.pin

    @property
    def num_pending(self) -> int:
        return sum(s.num_pending for s in self.sequences)

    @property
    def num_due(self) -> int:
        """Positions due up to the next sampled token, in the sequence that has most of them."""
        return max(len(s.token_ids) + s.num_pending - s.num_computed for s in self.sequences)

    @property
    def has_had_its_turn(self) -> bool:
        """True if it gives way to other tenants: it has computed enough since it last waited."""
        return max(len(s.token_ids) for s in self.sequences) >= self.turn_ends

    def is_long_prefill(self, threshold: int) -> bool:
        """True if more positions are due than `threshold`; 0: no prefill is long."""
        return 0 < threshold < self.num_due

    def __lt__(self, other: Request) -> bool:
        return self.order < other.order

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.value}, {self.sequences})"
