"""Draws docs/blocks.svg, the picture in the README, from a run of the real core.

Three requests use a pool of 24 blocks of 4 tokens. The first two share a prefix of 12 tokens. The third has n=2, and
its first sample has just written into the block that both shared. A fourth request has finished, and its blocks are
still in the prefix cache.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Request, Sequence
from octavo.core.scheduler import Scheduler
from octavo.params.sampling_params import SamplingParams

OUT = Path(__file__).parent.parent / "docs" / "blocks.svg"
COLOURS = {"A": "#4c78a8", "B": "#f58518", "C1": "#54a24b", "C2": "#b279a2"}
CELL, GAP = 46, 8
PROMPTS = {
    "A": "You are a helpful guide to the people of this town . Where is the harbour ?",
    "B": "You are a helpful guide to the people of this town . Can I swim ?",
    "C": "Write one verse about the rain",
    "gone": "This one has ended some time ago already",
}


def run() -> tuple[KVCacheManager, dict[str, Sequence], list[tuple[int, int]]]:
    """Run the core to the moment of the picture. Also returns the (source, destination) blocks of its last copies."""
    vocabulary: dict[str, int] = {}
    cache = KVCacheManager(24, 4, num_rows=8)
    scheduler = Scheduler(cache)

    def add(name: str, n: int = 1, max_tokens: int = 12) -> Request:
        ids = [vocabulary.setdefault(word, len(vocabulary)) for word in PROMPTS[name].split()]
        request = Request(name, ids, SamplingParams(n=n, max_tokens=max_tokens), stop_ids=())
        scheduler.add(request)
        return request

    def step() -> StepPlan:
        planned = scheduler.schedule()
        plan = planned.plan
        tokens = [[90 + j for j in range(plan.num_samples.get(i, n))] for i, n in enumerate(plan.num_sampled)]
        scheduler.update(planned, StepResult(tokens))
        return plan

    add("gone", max_tokens=1)
    step()
    a, b, c = add("A"), add("B"), add("C", n=2)
    copies = []
    for _ in range(3):
        copies = [(copy.src, copy.dst) for copy in step().copies] or copies
    named = {"A": a.sequences[0], "B": b.sequences[0], "C1": c.sequences[0], "C2": c.sequences[1]}
    return cache, named, copies


def draw(cache: KVCacheManager, sequences: dict[str, Sequence], copies: list[tuple[int, int]]) -> str:
    owners: dict[int, list[str]] = {}
    filled: dict[int, int] = {}
    for name, seq in sequences.items():
        for i, block in enumerate(seq.block_ids):
            owners.setdefault(block, []).append(name)
            filled[block] = max(filled.get(block, 0), min(4, seq.num_computed - 4 * i))
    cached = set(cache.pool.cached())
    parts = [_text(20, 34, "block tables", 15, weight="600"), _text(430, 34, "the pool, in memory", 15, weight="600")]
    for row, (name, seq) in enumerate(sequences.items()):
        y = 58 + row * 84
        parts.append(_text(20, y + 28, name[0] + ("" if len(name) == 1 else f", sample {name[1]}"), 14))
        for i, block in enumerate(seq.block_ids):
            x = 110 + i * (CELL + GAP)
            parts.append(_cell(x, y, [name], min(4, seq.num_computed - 4 * i)))
            parts.append(_text(x + CELL / 2, y + 28, str(block), 14, anchor="middle", fill="#111"))
            parts.append(_text(x + CELL / 2, y + CELL + 15, f"{4 * i}-{4 * i + 3}", 10, anchor="middle", fill="#888"))
    position = {}
    for block in range(1, cache.pool.num_blocks + 1):
        column, line = (block - 1) % 6, (block - 1) // 6
        x, y = 430 + column * (CELL + GAP), 58 + line * 84
        position[block] = (x, y)
        if block in owners:
            parts.append(_cell(x, y, owners[block], filled[block]))
        else:
            fill = "#e4e4e4" if block in cached else "none"
            parts.append(
                f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="5" fill="{fill}" stroke="#bbb" '
                f'stroke-dasharray="{"none" if block in cached else "3 3"}"/>'
            )
        known = block in owners or block in cached
        parts.append(_text(x + CELL / 2, y + 28, str(block), 14, anchor="middle", fill="#111" if known else "#aaa"))
        refs = cache.pool.refs[block]
        note = f"{refs} owners" if refs > 1 else "cached" if block in cached else ""
        parts.append(_text(x + CELL / 2, y + CELL + 15, note, 10, anchor="middle", fill="#555"))
    for src, dst in copies:
        (x0, y0), (x1, y1) = position[src], position[dst]
        middle, below = (x0 + x1 + CELL) / 2, max(y0, y1) + CELL + 34
        parts.append(
            f'<path d="M{x0 + CELL / 2} {y0 + CELL + 3} Q{middle} {below} {x1 + CELL / 2} {y1 + CELL + 4}" '
            'stroke="#d62728" stroke-width="2" marker-end="url(#arrow)" fill="none"/>'
        )
        parts.append(_text(middle, below - 2, "copy", 10, anchor="middle", fill="#d62728"))
    parts.append(
        _text(
            20,
            412,
            "A and B begin with the same 12 tokens and share the blocks that hold them. C is sampled twice: when its "
            "first sample",
            12,
            fill="#555",
        )
    )
    parts.append(
        _text(
            20,
            430,
            "wrote into the half-filled block that both had, it got a copy (red). Dark: filled slots. Grey: a request "
            "that ended; still findable.",
            12,
            fill="#555",
        )
    )
    defs = (
        '<defs><marker id="arrow" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="6" markerHeight="6" '
        'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="#d62728"/></marker></defs>'
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 770 446" width="770" height="446" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif">'
        f'<rect width="770" height="446" rx="10" fill="#ffffff"/>{defs}{"".join(parts)}</svg>\n'
    )


def _cell(x: float, y: float, names: list[str], num_filled: int) -> str:
    """A block: a light band per owner, darker over the filled slots, which start at the left."""
    height = CELL / len(names)
    out = []
    for i, name in enumerate(names):
        top = y + i * height
        out.append(
            f'<rect x="{x}" y="{top}" width="{CELL}" height="{height}" fill="{COLOURS[name]}" fill-opacity="0.25"/>'
            f'<rect x="{x}" y="{top}" width="{CELL * num_filled / 4}" height="{height}" fill="{COLOURS[name]}" '
            'fill-opacity="0.55"/>'
        )
    return "".join(out) + (
        f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="2" fill="none" stroke="{COLOURS[names[0]]}"/>'
    )


def _text(
    x: float, y: float, text: str, size: int, *, anchor: str = "start", fill: str = "#222", weight: str = "400"
) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )


if __name__ == "__main__":
    OUT.write_text(draw(*run()))
    print(OUT)
