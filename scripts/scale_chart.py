"""Draws docs/scale.svg from the rows of docs/scale.md, or simulates those rows.

    python scripts/scale_chart.py [--check]
    python scripts/scale_chart.py --simulate mooncake_conversation.jsonl.gz

--check writes nothing, and fails if the picture differs from the table. --simulate prints the table; it takes minutes.
"""

from __future__ import annotations

import re
import sys
from itertools import islice
from pathlib import Path

from octavo.config import EngineArgs
from octavo.router.router import ROUTER_POLICIES, RouterPolicy
from octavo.simulate.devices import DEVICES
from octavo.simulate.models import MODELS
from octavo.simulate.plot import Chart, Line, svg
from octavo.simulate.report import summary
from octavo.simulate.simulation import SimConfig, simulate
from octavo.simulate.traces import read_trace

DOCS = Path(__file__).parents[1] / "docs"
CHART = DOCS / "scale.svg"
MODEL, GPU = "llama-3.1-8b", "a100-40"
REPLICAS = 1, 2, 4, 8, 16
RATE, NUM_REQUESTS = 5.0, 4000
HEADING = "| replicas | " + " | ".join(f"{policy}: hits, p99" for policy in ROUTER_POLICIES) + " |"


def rows() -> list[list[str]]:
    """The cells of the simulated table."""
    lines = (DOCS / "scale.md").read_text().split(HEADING + "\n")[1].splitlines()[1:]
    end = next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in lines[:end]]


def picture() -> str:
    table = rows()
    numbers = [int(row[0]) for row in table]
    charts = []
    for title, label, place in (("Prefix hits", "% of the prompts' tokens", 0), ("p99 of the first token", "ms", 1)):
        lines = [
            Line(policy, numbers, [float(re.findall(r"[\d.]+", row[i + 1])[place]) for row in table])
            for i, policy in enumerate(ROUTER_POLICIES)
        ]
        charts.append(Chart(title, "replicas", label, lines=lines, log_x=True))
    return svg(charts)


def cell(path: Path, num_replicas: int, policy: RouterPolicy) -> str:
    args = EngineArgs(model=MODEL)
    config = SimConfig(MODELS[MODEL], DEVICES[GPU], args, num_replicas=num_replicas, router=policy)
    arrivals = islice(read_trace(path, scale=1 / 16, rate=RATE * num_replicas), NUM_REQUESTS)
    result = summary(simulate(config, arrivals, interval_s=1e9))
    return f"{100 * result['hit_rate']:.1f} %, {1e3 * result['ttft_s']['p99']:.0f} ms"


def main() -> int:
    if "--simulate" in sys.argv[1:]:
        print(HEADING + "\n" + "|--:" * (1 + len(ROUTER_POLICIES)) + "|")
        for n in REPLICAS:
            cells = [cell(Path(sys.argv[-1]), n, policy) for policy in ROUTER_POLICIES]
            print(f"| {n} | " + " | ".join(cells) + " |", flush=True)
        return 0
    new = picture()
    if "--check" in sys.argv[1:]:
        return int(not CHART.exists() or CHART.read_text() != new)
    CHART.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
