"""`Router`: sends each request to the replica with the least cost, nearly the least predicted time to its first token.

    time = factor * (a + b * (tokens that the replica has yet to prefill + tokens to compute))
    cost = the same, with the tokens to compute `UNCACHED_WEIGHT` times, and `DECODE_TOKENS` for each unfinished request

Tokens to compute are those of the prompt that the replica does not cache. Their weight is there for others: a prefix
that is computed twice delays the requests behind it, and its blocks take the place of other prefixes. Without it, a
replica where the prefix is queued is no better than an empty one.

The line a + b * tokens is fitted to the times to first token of all replicas, which include the decode steps in
between. Without a, an idle replica would look slow: it takes a step for few tokens. The factor is a replica's own, and
1 while it is within `UNLIKE`: equal replicas differ by as much, and a request that follows such a difference leaves its
prefix. Costs within `NEAR` of the least count as equal, and the least loaded replica of those is chosen.

docs/scale.md has what other rules reached.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from octavo.core.types import block_hashes, block_key
from octavo.router.prefix_index import PrefixIndex, members

RouterPolicy: TypeAlias = Literal["affinity", "least-loaded", "round-robin"]
ROUTER_POLICIES: tuple[RouterPolicy, ...] = get_args(RouterPolicy)

NEAR = 1.05
"""Costs up to this many times the least one are equal."""
UNCACHED_WEIGHT = 6
"""Of the tokens to compute. With less, a loaded fleet hits less; with more, the slowest first tokens are slower."""
DECODE_TOKENS = 128
"""Of an unfinished request: it takes a share of every step. Without it, all short prompts may go to one replica."""
STEP_TOKENS = 256
"""A first token takes a step, however short its prompt: as long as this many tokens until it is measured."""
UNLIKE = 2.0
"""A replica whose times are less than this many times above or below the line counts as on it."""
DECAY = 0.98
"""Weight of the earlier measurements at each new one."""
PRIOR = 10
"""Measurements on the line that a replica is taken to have had before its own: a burst's first ones prove nothing."""
NUM_DECISIONS = 256
"""Decisions that are kept to be looked at."""


REASONS = ("least cost", "least loaded", "next in turn", "only one")
"""Why a request went to its replica."""


@dataclass(frozen=True, slots=True)
class Option:
    """What a request would meet on a replica.

    num_hit_tokens      tokens of the prompt in its cache
    num_queued_tokens   tokens of earlier requests that it has yet to prefill
    predicted_s         seconds to the first token
    num_requests        unfinished requests
    cost_s              the same, with weights
    """

    replica: int
    num_hit_tokens: int
    num_queued_tokens: int
    predicted_s: float
    num_requests: int
    cost_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request went. why: one of `REASONS`."""

    request_id: str
    replica: int
    why: str
    num_prompt_tokens: int
    options: tuple[Option, ...]

    @property
    def chosen(self) -> Option:
        return next(option for option in self.options if option.replica == self.replica)


@dataclass(slots=True)
class _Times:
    """Decaying sums over measured times to first token."""

    num: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0  # of the tokens
    products: float = 0.0  # of tokens and seconds

    def add(self, num_tokens: int, seconds: float) -> None:
        self.num = DECAY * self.num + 1
        self.tokens = DECAY * self.tokens + num_tokens
        self.seconds = DECAY * self.seconds + seconds
        self.squares = DECAY * self.squares + num_tokens**2
        self.products = DECAY * self.products + num_tokens * seconds

    def line(self) -> tuple[float, float]:
        """Seconds of no token, and of each: by least squares if those are positive."""
        spread = self.num * self.squares - self.tokens**2
        if spread > 0.01 * self.tokens**2:
            slope = (self.num * self.products - self.tokens * self.seconds) / spread
            start = (self.seconds - slope * self.tokens) / self.num
            if start > 0 and slope > 0:
                return start, slope
        slope = self.seconds / (self.tokens + self.num * STEP_TOKENS) if self.seconds else 1.0
        return slope * STEP_TOKENS, slope


@dataclass(slots=True)
class _Load:
    """A replica's requests and times."""

    num_requests: int = 0
    num_queued_tokens: int = 0
    num_routed: int = 0
    times: _Times = field(default_factory=_Times)

    def factor(self, start: float, slope: float) -> float:
        """How much slower the replica is than the line."""
        if not self.times.seconds:
            return 1.0
        times = self.times
        measured = times.seconds / (start * times.num + slope * times.tokens)
        factor = (measured * times.num + PRIOR) / (times.num + PRIOR)
        return 1.0 if 1 / UNLIKE <= factor <= UNLIKE else factor


@dataclass(slots=True)
class _Routed:
    """A request on its way.

    num_known   blocks of the prompt that the replica was known to cache
    num_ahead   tokens that its first token waits for, its own included
    """

    replica: int
    hashes: list[int]
    num_known: int
    num_uncached: int
    num_ahead: int
    since: float
    has_started: bool = False


@dataclass(slots=True)
class RouterStats:
    """Counters since the start. A hit is a prompt token that the chosen replica was known to cache.

    num_requests   by replica and reason
    num_moved      requests that left a dead engine
    """

    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    num_moved: int = 0
    num_requests: Counter[tuple[int, str]] = field(default_factory=Counter)


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
        self._times = _Times()  # of all replicas
        self._routed: dict[str, _Routed] = {}
        self._last = -1  # the replica of the last request

    def predicted_s(self, replica: int, num_tokens: int) -> float:
        """Seconds until the first token of a prompt with so many tokens to compute."""
        start, slope = self._times.line()
        load = self.load(replica)
        return load.factor(start, slope) * (start + slope * (load.num_queued_tokens + num_tokens))

    def describe(self) -> list[dict[str, Any]]:
        """What it knows of each replica that it has seen, for people."""
        return [
            {
                "replica": replica,
                "num_requests": load.num_requests,
                "num_queued_tokens": load.num_queued_tokens,
                "num_cached_blocks": self.index.num_cached(replica),
                "predicted_s_of_1k_tokens": self.predicted_s(replica, 1000) if self._times.num else None,
            }
            for replica, load in sorted(self._loads.items())
        ]

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
        num_known = chosen.num_hit_tokens // self.block_size if hashes else 0
        self.index.expect(chosen.replica, hashes[num_known:])
        num_ahead = load.num_queued_tokens + num_uncached
        self._routed[request_id] = _Routed(chosen.replica, hashes, num_known, num_uncached, num_ahead, self._clock())
        self._last = chosen.replica
        load.num_requests += 1
        load.num_routed += 1
        load.num_queued_tokens += num_uncached
        self.stats.num_prompt_tokens += num_tokens
        self.stats.num_hit_tokens += chosen.num_hit_tokens
        self.stats.num_requests[chosen.replica, why] += 1
        self.decisions.append(decision)
        return decision

    def move(self, request_id: str, num_tokens: int, among: int) -> Decision:
        """Choose another replica for a routed request, of so many tokens by now."""
        hashes = self._routed[request_id].hashes
        self.finish(request_id)
        self.stats.num_moved += 1
        return self.route(request_id, num_tokens, hashes, among)

    def start(self, request_id: str) -> None:
        """A request got its first token. Later calls, and those of unknown requests, do nothing."""
        if (routed := self._routed.get(request_id)) is not None and not routed.has_started:
            seconds = self._clock() - routed.since
            for times in (self._times, self.load(routed.replica).times):
                times.add(routed.num_ahead, seconds)
            self._end_prefill(routed)

    def finish(self, request_id: str) -> None:
        """A request has ended, or leaves its replica. A second call does nothing."""
        if (routed := self._routed.pop(request_id, None)) is not None:
            if not routed.has_started:
                self._end_prefill(routed)
            self.load(routed.replica).num_requests -= 1

    def _end_prefill(self, routed: _Routed) -> None:
        routed.has_started = True
        self.load(routed.replica).num_queued_tokens -= routed.num_uncached
        self.index.settle(routed.replica, routed.hashes[routed.num_known :])

    # -- the choice ----------------------------------------------------------------------------------------------------

    def _options(self, num_tokens: int, hashes: list[int], among: int) -> list[Option]:
        hits = self.index.hits(hashes, among)
        start, slope = self._times.line()
        options = []
        for replica in members(among):
            load = self.load(replica)
            num_hit_tokens = hits[replica] * self.block_size
            num_queued, num_uncached = load.num_queued_tokens, num_tokens - num_hit_tokens
            factor, weighted = load.factor(start, slope), UNCACHED_WEIGHT * num_uncached
            predicted_s = factor * (start + slope * (num_queued + num_uncached))
            cost_s = factor * (start + slope * (num_queued + weighted + DECODE_TOKENS * load.num_requests))
            options.append(Option(replica, num_hit_tokens, num_queued, predicted_s, load.num_requests, cost_s))
        return options

    def _choose(self, options: list[Option]) -> tuple[Option, str]:
        if len(options) == 1:
            return options[0], "only one"
        if self.policy == "round-robin":
            later = [option for option in options if option.replica > self._last]
            return (later or options)[0], "next in turn"
        if self.policy == "affinity":
            limit = NEAR * min(option.cost_s for option in options)
            options = [option for option in options if option.cost_s <= limit]
            if len(options) == 1:
                return options[0], "least cost"
        return min(options, key=self._busyness), "least loaded"

    def _busyness(self, option: Option) -> tuple[int, int, int]:
        return option.num_requests, option.num_queued_tokens, self.load(option.replica).num_routed
