"""Draws docs/paged-attention.svg from the measured rows of docs/paged-attention.md.

    python scripts/attention_chart.py [--check]

--check writes nothing and fails if the picture is not what the tables say.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from octavo.simulate.plot import Chart, Line, svg

DOCS = Path(__file__).parents[1] / "docs"
CHART = DOCS / "paged-attention.svg"


def tables() -> list[list[list[str]]]:
    """The cells of the page's tables, without their headings."""
    blocks = re.findall(r"(?:^\|.*\n)+", (DOCS / "paged-attention.md").read_text(), re.MULTILINE)
    return [[[c.strip() for c in line.strip()[1:-1].split("|")] for line in b.splitlines()] for b in blocks]


def picture() -> str:
    [cpu] = [t for t in tables() if t[0][0] == "layout"]
    [gpu] = [t for t in tables() if t[0][0] == "sequences"]
    blocks = [line for line in cpu if line[0].startswith("blocks of ")]
    sizes = [int(line[0].split()[-1]) for line in blocks]
    processors = [Line(name, sizes, [float(line[i]) for line in blocks]) for i, name in ((4, "AVX-512"), (5, "AVX2"))]
    gpu_sizes = [int(re.findall(r"\d+", cell)[0]) for cell in gpu[0][2:7]]
    sequences = [Line(line[0], gpu_sizes, [float(cell) for cell in line[2:7]]) for line in gpu[2:]]
    label = "time over blocks / contiguous"
    return svg(
        [
            Chart("CPU, against torch", "tokens a block", label, lines=processors, log_x=True),
            Chart("H200, against the same kernel", "tokens a block", label, lines=sequences, log_x=True, top=2.0),
        ]
    )


def main() -> int:
    new = picture()
    if "--check" in sys.argv[1:]:
        return int(not CHART.exists() or CHART.read_text() != new)
    CHART.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
