"""A running server at a glance, for terminals: what of a state fits into twenty lines."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.view.live.messages import RequestView
from octavo.view.live.state import PoolState

MAX_REQUESTS = 10


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """A request. `num_blocks` are those in its tables, shared ones once."""

    id: str
    status: str
    num_tokens: int
    num_blocks: int
    num_preempted: int


@dataclass(frozen=True, slots=True)
class Summary:
    """`prompt_rate`, `output_rate`: tokens a second, over the steps that the state remembers. `first_waiting`: why the
    first in line waits, or ""."""

    used: int
    cached: int
    free: int
    running: int
    waiting: int
    swapped: int
    prompt_rate: float
    output_rate: float
    hit_rate: float
    num_saved: int
    num_evicted: int
    first_waiting: str
    requests: tuple[RequestSummary, ...]

    @classmethod
    def of(cls, state: PoolState) -> Summary:
        counts, stats = state.counts, state.stats
        prompt_rate, output_rate = token_rates(state)
        rows = sorted((_row(state, r) for r in state.requests.values()), key=lambda r: (-r.num_blocks, r.id))
        return cls(
            state.num_used,
            state.num_cached,
            state.num_free,
            counts.running,
            counts.waiting,
            counts.swapped,
            prompt_rate,
            output_rate,
            stats.get("hit_rate", 0.0),
            stats.get("num_saved_by_sharing", 0),
            stats.get("num_evicted", 0),
            describe_first_waiting(state),
            tuple(rows[:MAX_REQUESTS]),
        )


def token_rates(state: PoolState) -> tuple[float, float]:
    """Tokens of prompts and of outputs a second. A step's tokens count for the time up to the next one."""
    steps = list(state.steps)
    if len(steps) < 2 or steps[-1][1] <= steps[0][1]:
        return 0.0, 0.0
    seconds = steps[-1][1] - steps[0][1]
    sampled = sum(step[3] for step in steps[:-1])
    return (sum(step[2] for step in steps[:-1]) - sampled) / seconds, sampled / seconds


def describe_first_waiting(state: PoolState) -> str:
    """The first in line, and what it waits for."""
    name = next(iter(state.lines["swapped"] or state.lines["waiting"]), None)
    if name is None and (num_others := state.counts.swapped + state.counts.waiting):
        return f"waiting requests that this key does not see: {num_others}"
    request = None if name is None else state.requests.get(name)
    if request is None or request.waits is None:
        return ""
    waits = request.waits
    if waits.reason == "blocks" and waits.needs is not None:
        return f"{request.id} needs {waits.needs} blocks: {waits.free} are free, {waits.evictable} cached"
    if waits.reason in ("rows", "budget") and waits.needs is not None:
        return (
            f"{request.id} needs {waits.needs} {waits.reason.replace('budget', 'tokens of a step')}: {waits.free} left"
        )
    return f"{request.id} waits: {waits.reason}"


def _row(state: PoolState, request: RequestView) -> RequestSummary:
    tables = [state.tables[uid] for uid in request.sequences]
    blocks = {block for table in tables for block in table.block_ids.tolist() if block}
    num_tokens = sum(table.num_tokens for table in tables)
    return RequestSummary(request.id, request.status, num_tokens, len(blocks), request.num_preempted)
