"""What notebooks show of an `LLM` and of a `RequestOutput`: HTML with inline styles, for light and dark themes.

A square stands for a block of the pool. A large pool has squares for several blocks each, striped by what they hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from octavo.core.cache.kv_stats import KVStats
    from octavo.engine.engine import Engine
    from octavo.engine.outputs import RequestOutput

MAX_SQUARES = 480
MAX_PROMPT = 400
"""Characters of a prompt that are shown."""
OWNERS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Okabe and Ito's palette, which most colour-blind people can distinguish. Further owners share one colour."""
SHARED, OTHERS, HELD, CACHED, FREE = "shared", "others", "held by no request", "cached", "free"
COLOURS = {SHARED: "currentColor", OTHERS: "#7a5195", HELD: "#8c7a00", CACHED: "#9aa0a8", FREE: "#80808038"}
SMALL = "font-size:12px;opacity:.8"


class PoolPicture(NamedTuple):
    """The owners that have a colour of their own (running requests and pins), and what each block holds: one of these
    owners, or a key of `COLOURS`."""

    owners: list[str]
    labels: list[str]
    stats: KVStats


def picture_pool(engine: Engine) -> PoolPicture:
    """To be called on the engine's thread."""
    cache = engine.scheduler.cache
    tables = {f"request {request.request_id}": request.sequences for request in engine.scheduler.running}
    tables |= {name: [sequence] for name, sequence in cache.pins.items()}
    states = zip(cache.pool.refs, cache.pool.seal_id, strict=True)
    labels = [HELD if refs else CACHED if seal_id else FREE for refs, seal_id in states]
    for i, (name, sequences) in enumerate(tables.items()):
        for block in {b for sequence in sequences for ids, _ in sequence.holdings for b in ids if b > 0}:
            labels[block] = SHARED if labels[block] != HELD else name if i < len(OWNERS) else OTHERS
    return PoolPicture(list(tables)[: len(OWNERS)], labels[1:], engine.scheduler.stats())  # block 0 is the null block


def pool_html(model: str, pool: PoolPicture) -> str:
    owners, labels, stats = pool
    colours = dict(zip(owners, OWNERS, strict=False)) | COLOURS
    size = -(-len(labels) // MAX_SQUARES)
    squares = []
    for start in range(0, len(labels), size):
        counts = Counter(labels[start : start + size])
        parts = [(name, counts[name]) for name in colours if counts[name]]
        blocks = f"block {start + 1}" if size == 1 else f"blocks {start + 1} to {start + counts.total()}"
        title = f"{blocks}: " + ", ".join(name if size == 1 else f"{count} {name}" for name, count in parts)
        fill = _stripes("180deg", [(colours[name], count) for name, count in parts])
        squares.append(f'<i title="{escape(title)}" style="width:11px;height:11px;background:{fill}"></i>')
    total = Counter(labels)
    figures = (
        f"{stats.num_blocks:,} blocks of {stats.block_size} tokens, {stats.num_used:,} used, {stats.num_cached:,} "
        f"cached, prefix-cache hit rate {stats.hit_rate:.1%}"
    )
    return message_html(
        model,
        figures + (f"; a square is {size:,} blocks" if size > 1 else ""),
        f'<div style="display:flex;flex-wrap:wrap;gap:2px;margin:6px 0;max-width:624px">{"".join(squares)}</div>',
        _legend((colours[name], f"{name}: {total[name]:,}") for name in colours if total[name]),
    )


def output_html(output: RequestOutput) -> str:
    """The texts, why they ended, and a bar of the tokens: in shared blocks, computed, generated."""
    num_prompt, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
    prompt = f"{num_prompt:,} token ids" if output.prompt is None else output.prompt
    html = [_text(prompt if len(prompt) <= MAX_PROMPT else f"{prompt[:MAX_PROMPT]} ...", SMALL)]
    for sample in output.outputs:
        why = "" if sample.stop_reason is None else f" ({sample.stop_reason})"
        count = len(sample.token_ids)
        end = f"{sample.finish_reason or 'running'}{why}, {count:,} token{'s' * (count != 1)}"
        html += [_text(sample.text, "margin-top:6px"), _text(end, SMALL)]
    parts = [
        (COLOURS[SHARED], num_cached, "prompt tokens in shared blocks"),
        (OWNERS[0], num_prompt - num_cached, "computed prompt tokens"),
        (OWNERS[1], sum(len(sample.token_ids) for sample in output.outputs), "generated tokens"),
    ]
    fill = _stripes("90deg", [(colour, count) for colour, count, _ in parts if count])
    html.append(f'<div style="height:8px;margin:6px 0;background:{fill}"></div>')
    html.append(_legend((colour, f"{what}: {count:,}") for colour, count, what in parts if count))
    return _box(html)


def message_html(model: str, message: str, *more: str) -> str:
    return _box([f'<b>{escape(model)}</b> <span style="{SMALL}">{escape(message)}</span>', *more])


def _box(parts: Iterable[str]) -> str:
    return f'<div style="font:13px/1.5 system-ui,sans-serif;max-width:62em">{"".join(parts)}</div>'


def _text(text: str, style: str) -> str:
    return f'<div style="white-space:pre-wrap;{style}">{escape(text)}</div>'


def _stripes(direction: str, parts: Sequence[tuple[str, int]]) -> str:
    """A CSS background of colours with these counts."""
    total, at, stops = sum(count for _, count in parts), 0, []
    for colour, count in parts:
        stops.append(f"{colour} {100 * at / total:.4g}% {100 * (at + count) / total:.4g}%")
        at += count
    return parts[0][0] if len(parts) == 1 else f"linear-gradient({direction},{','.join(stops)})"


def _legend(rows: Iterable[tuple[str, str]]) -> str:
    square = "display:inline-block;width:9px;height:9px;margin-right:5px"
    entries = [
        f'<span style="white-space:nowrap;margin-right:1.2em"><i style="{square};background:{colour}"></i>'
        f'<span style="{SMALL}">{escape(text)}</span></span> '
        for colour, text in rows
    ]
    return f"<div>{''.join(entries)}</div>"
