"""A summary of a running server for terminals: twenty lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.engine.executor import RankPlace
from octavo.view.live.messages import RequestView
from octavo.view.live.state import PoolState

MAX_REQUESTS = 10
NUM_ACCEPTED = 10
"""Index in a step of a frame, where an engine speculates."""


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """A request. `num_blocks` counts the blocks in its tables, shared ones once."""

    id: str
    status: str
    num_tokens: int
    num_blocks: int
    num_preempted: int


@dataclass(frozen=True, slots=True)
class Summary:
    """A running server. `prompt_rate` and `output_rate` are tokens per second over the steps that the state holds.
    `tokens_per_pass` of one sequence; None without speculation. `first_waiting` says why the first request in the queue
    waits, or is "". `ranks` are tensor parallel ones, by number; empty for one."""

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
    tokens_per_pass: float | None = None
    ranks: tuple[RankPlace, ...] = ()

    @classmethod
    def of(cls, state: PoolState, ranks: tuple[RankPlace, ...] = ()) -> Summary:
        counts, stats = state.counts, state.stats
        prompt_rate, output_rate = token_rates(state)
        requests = sorted((_summarize(state, r) for r in state.requests.values()), key=lambda r: (-r.num_blocks, r.id))
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
            tuple(requests[:MAX_REQUESTS]),
            tokens_per_pass(state),
            ranks,
        )


def read_ranks(told: Sequence[Mapping[str, Any]]) -> tuple[RankPlace, ...]:
    """The ranks of a stream's message. Raises `LookupError`, `TypeError` or `ValueError` for anything else."""
    kinds: dict[str, type] = {"plan": int, "collective": int, "is_inside": bool, "age_s": float, "is_behind": bool}
    return tuple(RankPlace(**{name: kind(rank[name]) for name, kind in kinds.items()}) for rank in told)


def describe_ranks(ranks: Sequence[RankPlace]) -> list[str]:
    """A line for each tensor parallel rank."""
    lines = []
    for rank, place in enumerate(ranks):
        where = f"plan {place.plan:,}, {'in' if place.is_inside else 'after'} collective {place.collective:,}"
        behind = "   behind" if place.is_behind else ""
        lines.append(f"rank {rank}   {where}   {place.age_s:,.1f} s ago{behind}")
    return lines


def token_rates(state: PoolState) -> tuple[float, float]:
    """Prompt and output tokens per second. A step's tokens count for the time until the next step."""
    steps = list(state.steps)
    if len(steps) < 2 or steps[-1][1] <= steps[0][1]:
        return 0.0, 0.0
    seconds = steps[-1][1] - steps[0][1]
    sampled = sum(step[3] for step in steps[:-1])
    return (sum(step[2] for step in steps[:-1]) - sampled) / seconds, sampled / seconds


def tokens_per_pass(state: PoolState) -> float | None:
    """Tokens of a sequence that a forward pass returns: one, and the drafts that were right."""
    rows = [row for row in state.steps if len(row) > NUM_ACCEPTED]
    num_tokens, num_accepted = sum(row[3] for row in rows), sum(row[NUM_ACCEPTED] for row in rows)
    return num_tokens / (num_tokens - num_accepted) if num_tokens > num_accepted else None


def describe_first_waiting(state: PoolState) -> str:
    """The first request in the queue, and what it waits for."""
    name = next(iter(state.queues["swapped"] or state.queues["waiting"]), None)
    if name is None and (num_others := state.counts.swapped + state.counts.waiting):
        return f"waiting requests that are not visible to this key: {num_others}"
    request = None if name is None else state.requests.get(name)
    if request is None or request.wait is None:
        return "" if name is None else f"{name} waits for the next step"
    wait = request.wait
    if wait.reason == "blocks" and wait.needs is not None:
        parts = ((wait.in_windows, "in windows"), (wait.in_states, "in its state"))
        of_them = ", ".join(f"{number} {where}" for number, where in parts if number)
        blocks = f"{wait.needs} blocks" + (f" ({of_them})" if of_them else "")
        return f"{request.id} needs {blocks}: {wait.free} are free, {wait.evictable} cached"
    if wait.reason in ("rows", "budget") and wait.needs is not None:
        return f"{request.id} needs {wait.needs} {wait.reason.replace('budget', 'tokens of a step')}: {wait.free} left"
    return f"{request.id} waits: {wait.reason}"


def _summarize(state: PoolState, request: RequestView) -> RequestSummary:
    tables = [state.tables[uid] for uid in request.sequences]
    blocks = {block for table in tables for block in table.block_ids.tolist() if block}
    num_tokens = sum(table.num_tokens for table in tables if not table.group)
    return RequestSummary(request.id, request.status, num_tokens, len(blocks), request.num_preempted)
