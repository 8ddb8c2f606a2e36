"""`Router`: sends each request to the replica with the least predicted time to its first token.

    time = (tokens that the replica has yet to prefill + tokens of the prompt that it does not cache) * seconds a token

The seconds are measured, replica by replica: from the times to first token of earlier requests, which include the
decode steps in between. Replicas within `NEAR` of the best count as equal, and the least loaded of them is chosen.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from octavo.core.types import block_hashes, block_key
from octavo.router.prefix_index import PrefixIndex, members

RouterPolicy: TypeAlias = Literal["affinity", "least-loaded", "round-robin"]
ROUTER_POLICIES: tuple[RouterPolicy, ...] = get_args(RouterPolicy)

NEAR = 1.05
"""Predicted times up to this many times the best one are equal."""
MIN_TOKENS = 64
"""A first token takes a step, however short its prompt: no prefill counts as fewer tokens than this."""
DECAY = 0.9
"""Weight of the earlier measurements of a replica's speed at each new one."""
NUM_DECISIONS = 256
"""Decisions that are kept to be looked at."""


@dataclass(frozen=True, slots=True)
class Option:
    """What a request would meet on a replica.

    num_hit_tokens      tokens of the prompt in its cache
    num_queued_tokens   tokens of earlier requests that it has yet to prefill
    predicted_s         seconds to the first token
    num_requests        unfinished requests
    """

    replica: int
    num_hit_tokens: int
    num_queued_tokens: int
    predicted_s: float
    num_requests: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request went. why: "fastest", "least loaded", "next in turn" or "only one"."""

    request_id: str
    replica: int
    why: str
    num_prompt_tokens: int
    options: tuple[Option, ...]

    @property
    def chosen(self) -> Option:
        return next(option for option in self.options if option.replica == self.replica)


@dataclass(slots=True)
class _Load:
    """A replica's requests, and its speed as a quotient of two decaying sums."""

    num_requests: int = 0
    num_queued_tokens: int = 0
    num_routed: int = 0
    seconds: float = 0.0
    tokens: float = 0.0

    def measure(self, seconds: float, num_tokens: int) -> None:
        self.seconds = DECAY * self.seconds + seconds
        self.tokens = DECAY * self.tokens + num_tokens


@dataclass(slots=True)
class _Routed:
    """A request on its way. num_ahead: tokens that its first token waits for, its own included."""

    replica: int
    hashes: list[int]
    num_uncached: int
    num_ahead: int
    since: float
    has_started: bool = False


@dataclass(slots=True)
class RouterStats:
    """Counters since the start. A hit is a prompt token that the chosen replica was known to cache."""

    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    num_moved: int = 0
    num_by_why: dict[str, int] = field(default_factory=dict)


class Router:
    """Routes requests. All methods take constant time, or time in proportion to a prompt's blocks.

    block_size   of the engines, in tokens; 0: no prompt is looked up
    clock        seconds, from any start
    """

    def __init__(
        self, policy: RouterPolicy = "affinity", block_size: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.policy = policy
        self.block_size = block_size
        self.index = PrefixIndex()
        self.stats = RouterStats()
        self.decisions: deque[Decision] = deque(maxlen=NUM_DECISIONS)
        self._clock = clock
        self._loads: dict[int, _Load] = {}
        self._routed: dict[str, _Routed] = {}
        self._last = -1  # the replica of the last request

    def load(self, replica: int) -> _Load:
        return self._loads.setdefault(replica, _Load())

    def hashes(self, token_ids: Sequence[int], salt: bytes = b"") -> list[int]:
        """The keys of a prompt's full blocks; none unless the policy looks them up."""
        if self.policy != "affinity" or not self.block_size:
            return []
        return [block_key(digest) for digest in block_hashes(token_ids, self.block_size, salt=salt)]

    # -- a request's way -----------------------------------------------------------------------------------------------

    def route(self, request_id: str, num_tokens: int, hashes: list[int], among: int) -> Decision:
        """Choose one of the replicas `among` (a set, not empty) for a prompt, and count the request there.

        `hashes` are those of `Router.hashes`. Call `start` at the first token, and `finish` at the end.
        """
        options = self._options(num_tokens, hashes, among)
        chosen, why = self._choose(options)
        decision = Decision(request_id, chosen.replica, why, num_tokens, tuple(options))
        load, num_uncached = self.load(chosen.replica), num_tokens - chosen.num_hit_tokens
        new = hashes[chosen.num_hit_tokens // self.block_size :] if hashes else []
        self.index.expect(chosen.replica, new)
        num_ahead = max(MIN_TOKENS, load.num_queued_tokens + num_uncached)
        self._routed[request_id] = _Routed(chosen.replica, new, num_uncached, num_ahead, self._clock())
        self._last = chosen.replica
        load.num_requests += 1
        load.num_routed += 1
        load.num_queued_tokens += num_uncached
        self.stats.num_prompt_tokens += num_tokens
        self.stats.num_hit_tokens += chosen.num_hit_tokens
        self.stats.num_by_why[why] = self.stats.num_by_why.get(why, 0) + 1
        self.decisions.append(decision)
        return decision

    def start(self, request_id: str) -> None:
        """A request got its first token. Later calls, and those of unknown requests, do nothing."""
        if (routed := self._routed.get(request_id)) is not None and not routed.has_started:
            self.load(routed.replica).measure(self._clock() - routed.since, routed.num_ahead)
            self._end_prefill(routed)

    def finish(self, request_id: str) -> None:
        """A request has ended, or leaves its replica. A second call does nothing."""
        if (routed := self._routed.pop(request_id, None)) is not None:
            if not routed.has_started:
                self._end_prefill(routed)
            self.load(routed.replica).num_requests -= 1

    def replica_of(self, request_id: str) -> int | None:
        routed = self._routed.get(request_id)
        return None if routed is None else routed.replica

    def _end_prefill(self, routed: _Routed) -> None:
        routed.has_started = True
        self.load(routed.replica).num_queued_tokens -= routed.num_uncached
        self.index.settle(routed.replica, routed.hashes)
        routed.hashes = []

    # -- the choice ----------------------------------------------------------------------------------------------------

    def _options(self, num_tokens: int, hashes: list[int], among: int) -> list[Option]:
        hits = self.index.hits(hashes, among)
        options = []
        for replica in members(among):
            load = self.load(replica)
            num_hit_tokens = hits[replica] * self.block_size
            num_ahead = max(MIN_TOKENS, load.num_queued_tokens + num_tokens - num_hit_tokens)
            predicted_s = num_ahead * self._seconds_a_token(load)
            options.append(Option(replica, num_hit_tokens, load.num_queued_tokens, predicted_s, load.num_requests))
        return options

    def _seconds_a_token(self, load: _Load) -> float:
        """As measured; the mean of the other replicas before the first measurement, and 1 s before any."""
        if load.tokens:
            return load.seconds / load.tokens
        measured = [other for other in self._loads.values() if other.tokens]
        return sum(other.seconds / other.tokens for other in measured) / len(measured) if measured else 1.0

    def _choose(self, options: list[Option]) -> tuple[Option, str]:
        if len(options) == 1:
            return options[0], "only one"
        if self.policy == "round-robin":
            later = [option for option in options if option.replica > self._last]
            return (later or options)[0], "next in turn"
        if self.policy == "affinity":
            limit = NEAR * min(option.predicted_s for option in options)
            options = [option for option in options if option.predicted_s <= limit]
            if len(options) == 1:
                return options[0], "fastest"
        return min(options, key=self._busyness), "least loaded"

    def _busyness(self, option: Option) -> tuple[int, int, int]:
        return option.num_requests, option.num_queued_tokens, self.load(option.replica).num_routed
