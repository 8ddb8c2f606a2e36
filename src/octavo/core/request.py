"""What a caller asked for (`Request`) and the streams of tokens that it owns (`Sequence`).

There is no phase. A sequence has `num_computed` chasing its length, and prefill, chunked prefill, decode, prefix hits,
preemption and recomputation are all that one subtraction:

    token_ids   known to the host                      num_pending
    +------------------------------------------------+--------------+
    |                                                |  sampled, not yet here
    +---------------------------------------+--------+--------------+
    0                                       num_computed            length
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

from octavo.core.types import BlockId, Row, SealId
from octavo.params.sampling_params import SamplingParams


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class Sequence:
    """One stream of tokens, and where its keys and values are.

    token_ids     prompt and output, as far as the host knows them
    num_pending   sampled on the device, not yet known here
    num_computed  positions planned, those in flight included
    limit         length at which it ends; the last token is never computed
    block_ids     its block table: device ids; while swapped, host ids, and -b for a block b left on the device
    num_dropped   leading entries of it that are the null block: behind the attention window, given up
    room          len(block_ids) * block_size
    row           its line in the device's tables, -1 without one
    row_has_last  that row holds this sequence's last token: the device can go on by itself
    seal_ids      the seal id under which each leading sealed block is known (its own, or that of an equal block)
    seal_at       the number of positions known and computed at which the next block can be sealed
    finish_reason "" while it lives; "stop", "length", "abort", "error" or, for a beam not chosen, "pruned"
    stop_token    the stop token that ended it, None if another thing did
    """

    __slots__ = (
        "block_ids",
        "finish_reason",
        "index",
        "max_length",
        "num_computed",
        "num_dropped",
        "num_pending",
        "request",
        "room",
        "row",
        "row_has_last",
        "seal_at",
        "seal_ids",
        "stop_token",
        "token_ids",
    )

    def __init__(self, request: Request, index: int, token_ids: array[int], max_length: int) -> None:
        self.request = request
        self.index = index
        self.token_ids = token_ids
        self.max_length = max_length
        self.num_pending = 0
        self.num_computed = 0
        self.block_ids: list[BlockId] = []
        self.num_dropped = 0
        self.room = 0
        self.row: Row = -1
        self.row_has_last = False
        self.seal_ids: list[SealId] = []
        self.seal_at = 0
        self.finish_reason = ""
        self.stop_token: int | None = None

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_token_ids) :].tolist()

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id!r}/{self.index}, {len(self.token_ids)}+{self.num_pending} tokens, "
            f"{self.num_computed} computed, blocks {self.block_ids})"
        )


SelectBeams = Callable[[list[tuple[Sequence, Any]]], list[tuple[Sequence, int]]]
"""From each live sequence's candidates to the continuations kept: (parent, token), at most `width`, best first.

It must not raise: it is called in the middle of `Scheduler.update`, and an exception there ends the engine."""


class Request:
    """What a caller asked for: one or more sequences, scheduled, preempted and freed together (a sequence group).

    width        rows that it takes from admission to finish: its n, or its beam width
    decide       chooses among candidates on the host after every token (beam search); then `num_draws` candidates come
                 back from each sequence instead of one token
    constrained  its tokens are drawn from those that a mask allows, which the host works out for each position once it
                 knows all tokens before: no windows, but a step is planned while the last token is on its way
    needs_result    nothing is planned while anything of it is pending: the host chooses, or it is yet to fork
    salt         requests of different salts share no blocks
    tenant       whose it is: tenants share steps evenly
    rank         how many of the same call stand before it: the prompts of one call let others pass
    pin          its prompt is computed to stay: when it ends, after its one token, its blocks are kept for others that
                 begin with it, under its name
    resume       outputs that are known already, of each sample that still lives, by its index: another engine had come
                 that far. It goes on as after a preemption. None of them empty, and not with `decide`

    An empty prompt is the caller's error and refused where prompts come in; the core asserts.
    """

    __slots__ = (
        "arrival",
        "error",
        "finished_sequences",
        "forked",
        "index_in_call",
        "max_tokens",
        "needs_result",
        "newest_prefix_seal",
        "num_cached_tokens",
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
        "use_structured_output",
        "wait_reason",
        "width",
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
        pin: bool = False,
        resume: Mapping[int, Iterable[int]] | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = array("i", prompt_token_ids)
        assert self.prompt_token_ids, "an empty prompt is refused at the boundary"
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
        self.pin = pin
        self.resume = resume
        self.forked = self.width == 1 or select_beams is not None or bool(resume)
        self.needs_result = select_beams is not None or not self.forked
        # Filled in by the scheduler:
        self.arrival = -1
        self.order: tuple[int, int] = (0, -1)
        self.status = Status.WAITING
        self.sequences: list[Sequence] = []  # the live ones
        self.finished_sequences: list[Sequence] = []  # the ended ones, in the order in which they ended
        self.only_sequence: Sequence | None = None  # the only sequence that there will ever be: the hot path
        self.num_cached_tokens = -1  # found in the prefix cache at the first admission
        self.num_preemptions = 0
        self.newest_prefix_seal: SealId = 0  # the youngest seal of the blocks that it ever began with
        self.wait_reason = ""  # the reason said last
        self.error = ""  # what went wrong with it on the device
        self.shared_on_device: dict[BlockId, SealId] = {}  # while swapped: see `swap_out`

    def begin(self, arrival: int, order: tuple[int, int], max_tokens: int) -> None:
        """The scheduler takes it on: its place in line and its length are known."""
        self.arrival, self.order, self.max_tokens = arrival, order, max_tokens
        prompt = self.prompt_token_ids
        limit, known = len(prompt) + max_tokens, self.resume or {0: ()}
        self.sequences = [Sequence(self, i, prompt + array("i", output), limit) for i, output in known.items()]
        self.only_sequence = self.sequences[0] if self.width == 1 and self.select_beams is None else None

    @property
    def num_pending(self) -> int:
        return sum(s.num_pending for s in self.sequences)

    @property
    def num_due(self) -> int:
        """Positions that may be planned before anything is sampled, of the sequence that has most of them."""
        return max(len(s.token_ids) + s.num_pending - s.num_computed for s in self.sequences)

    def is_long_prefill(self, longest: int) -> bool:
        """More is due than a long prompt computes in a step; 0: there are no long prompts."""
        return 0 < longest < self.num_due

    def __lt__(self, other: Request) -> bool:
        return self.order < other.order

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.value}, {self.sequences})"
