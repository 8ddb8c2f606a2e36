"""A running server at a glance, for terminals: what of a picture fits into twenty lines."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.view.live.messages import RequestView
from octavo.view.live.state import Picture

MOST_REQUESTS = 10


@dataclass(frozen=True, slots=True)
class Row:
    """A request. `num_blocks` are those in its tables, shared ones once."""

    id: str
    status: str
    num_tokens: int
    num_blocks: int
    num_preempted: int


@dataclass(frozen=True, slots=True)
class Glance:
    """`prompt_rate`, `output_rate`: tokens a second, over the steps that the picture remembers. `head`: why the first
    in line waits, or ""."""

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
    head: str
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, picture: Picture) -> Glance:
        counts, stats = picture.counts, picture.stats
        prompt_rate, output_rate = rates(picture)
        rows = sorted((_row(picture, r) for r in picture.requests.values()), key=lambda r: (-r.num_blocks, r.id))
        return cls(
            picture.num_used,
            picture.num_cached,
            picture.num_free,
            counts.running,
            counts.waiting,
            counts.swapped,
            prompt_rate,
            output_rate,
            stats.get("hit_rate", 0.0),
            stats.get("num_saved_by_sharing", 0),
            stats.get("num_evicted", 0),
            head_of(picture),
            tuple(rows[:MOST_REQUESTS]),
        )


def rates(picture: Picture) -> tuple[float, float]:
    """Tokens of prompts and of outputs a second. A step's tokens count for the time up to the next one."""
    steps = list(picture.steps)
    if len(steps) < 2 or steps[-1][1] <= steps[0][1]:
        return 0.0, 0.0
    seconds = steps[-1][1] - steps[0][1]
    sampled = sum(step[3] for step in steps[:-1])
    return (sum(step[2] for step in steps[:-1]) - sampled) / seconds, sampled / seconds


def head_of(picture: Picture) -> str:
    """The first in line, and what it waits for."""
    name = next(iter(picture.lines["swapped"] or picture.lines["waiting"]), None)
    if name is None and (num_others := picture.counts.swapped + picture.counts.waiting):
        return f"waiting requests that this key does not see: {num_others}"
    request = None if name is None else picture.requests.get(name)
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


def _row(picture: Picture, request: RequestView) -> Row:
    tables = [picture.tables[uid] for uid in request.sequences]
    blocks = {block for table in tables for block in table.block_ids.tolist() if block}
    num_tokens = sum(table.num_tokens for table in tables)
    return Row(request.id, request.status, num_tokens, len(blocks), request.num_preempted)
