"""Draws docs/speed.svg from the measured rows of docs/performance.md.

    python scripts/speed_chart.py [--check]

--check writes nothing and fails if the picture is not what the tables say.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[1] / "docs"
CHART = DOCS / "speed.svg"
GPU, XEON, EPYC = "## On a GPU", "## On a CPU", "### Without AMX"
LABEL_X, BAR_X, BAR_WIDTH, BAR_HEIGHT, ROW_GAP = 24, 262, 430, 13, 12
MIN, MAX = 0.75, 8.0
TICKS = (1, 2, 4, 8)
COLOURS = "#4051b5", "#26a69a"


class Panel(NamedTuple):
    """Rows of bars: a label and a ratio for each of the series."""

    title: str
    series: tuple[str, str]
    rows: list[tuple[str, tuple[float, float]]]


def tables(heading: str) -> list[list[list[str]]]:
    """The cells of the tables below a heading of performance.md, up to the next heading."""
    text = (DOCS / "performance.md").read_text()
    section = re.split(r"^#+ ", text.split(f"\n{heading}\n")[1], flags=re.MULTILINE)[0]
    blocks = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    return [[[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in b.splitlines()] for b in blocks]


def find(table: list[list[str]], row: str, column: int) -> float:
    """The ratio in a cell: its first number."""
    [cells] = [line for line in table if line[0] == row]
    match = re.match(r"[\d.]+", cells[column])
    assert match, f"{row}: no ratio in {cells[column]!r}"
    return float(match[0])


def panels() -> list[Panel]:
    [gpu] = tables(GPU)
    _, xeon = tables(XEON)
    epyc = tables(EPYC)[1]
    gpu_rows = {
        "256 requests of mixed lengths": "mixed256, output tokens/s",
        "decoding, one request": "per token, batch 1",
        "decoding, 32 requests": "per token, batch 32",
        "decoding, 256 requests": "per token, batch 256",
        "first token of a prompt of 1,024": "first token after a prompt of 1,024",
    }
    assert gpu[0][2:] == ["Qwen3-0.6B", "Llama-3.1-8B"] and "llama.cpp" in xeon[0][2]
    cpu_rows = {"one sequence": 1, "16 together": 2, "a prompt of 512 tokens": 3}
    xeon_rows = dict(zip(cpu_rows, ("one sequence", "16 sequences together", "a prompt of 512 tokens"), strict=True))
    return [
        Panel(
            "One NVIDIA H200: speed relative to vLLM 0.26",
            ("Llama-3.1-8B", "Qwen3-0.6B"),
            [(label, (find(gpu, row, 3), find(gpu, row, 2))) for label, row in gpu_rows.items()],
        ),
        Panel(
            "Two CPU cores, Qwen2.5-0.5B's shape: speed relative to llama.cpp",
            ("AMD EPYC, without AMX", "Intel Xeon with AMX"),
            [
                (label, (find(epyc, "Qwen2.5-0.5B's shape, to llama.cpp", column), find(xeon, xeon_rows[label], 3)))
                for label, column in cpu_rows.items()
            ],
        ),
    ]


def x_of(ratio: float) -> float:
    """Horizontal position of a ratio, on a logarithmic axis."""
    return BAR_X + BAR_WIDTH * math.log(ratio / MIN) / math.log(MAX / MIN)


def draw() -> str:
    parts: list[str] = []
    y = 30
    for panel in panels():
        parts.append(f'<text class="title" x="{LABEL_X}" y="{y}">{panel.title}</text>')
        y += 20
        for i, name in enumerate(panel.series):
            x = BAR_X + 190 * i
            parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" rx="2" fill="{COLOURS[i]}"/>')
            parts.append(f'<text x="{x + 16}" y="{y}">{name}</text>')
        top = y = y + 12
        for label, ratios in panel.rows:
            parts.append(f'<text x="{BAR_X - 12}" y="{y + BAR_HEIGHT + 4}" text-anchor="end">{label}</text>')
            for ratio, colour in zip(ratios, COLOURS, strict=True):
                begin, end = sorted((x_of(1), x_of(ratio)))
                size = f'width="{end - begin:.1f}" height="{BAR_HEIGHT - 2}"'
                parts.append(f'<rect x="{begin:.1f}" y="{y}" {size} fill="{colour}"/>')
                right = max(begin, end) + 6
                parts.append(f'<text x="{right:.1f}" y="{y + BAR_HEIGHT - 3}">{ratio:.2f}</text>')
                y += BAR_HEIGHT
            y += ROW_GAP
        for tick in TICKS:
            kind = "one" if tick == 1 else "tick"
            x = x_of(tick)
            parts.insert(0, f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" y2="{y - ROW_GAP + 4}"/>')
            parts.append(f'<text class="axis" x="{x:.1f}" y="{y + 4}" text-anchor="middle">{tick} x</text>')
        y += 42
    style = (
        "text { font: 12px system-ui, sans-serif; fill: #263238 } .title { font-weight: 600; font-size: 14px } "
        ".axis { fill: #607d8b } .tick { stroke: #dde3e6 } .one { stroke: #607d8b }"
    )
    width, height = 760, y - 18
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<style>{style}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        )
    )


def main() -> int:
    svg = draw()
    if sys.argv[1:] == ["--check"]:
        if CHART.read_text() != svg:
            print(f"{CHART} is not what the tables say: run python scripts/speed_chart.py", file=sys.stderr)
            return 1
    else:
        CHART.write_text(svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
