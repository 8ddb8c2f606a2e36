"""Fills the tables of docs/paper/README.md from the figures' JSON. `--check` only compares, and fails if one differs.

A table stands between `<!-- table: fig12 REGEX -->` and `<!-- end -->`; it has the rows whose metric matches.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "paper"
TABLE = re.compile(r"(<!-- table: (?P<figure>\w+)(?: (?P<metric>[^\n]*?))? -->\n).*?(<!-- end -->)", re.DOTALL)


def table(match: re.Match[str]) -> str:
    """The markers, with the table's lines between them."""
    rows = json.loads((FOLDER / f"{match['figure']}.json").read_text())["rows"]
    lines = ["", "| | system | paper | ours |", "|---|---|--:|--:|"]
    for row in rows:
        if re.search(match["metric"] or "", row["metric"]):
            lines.append(f"| {row['metric']} | {row['system']} | {_number(row['paper'])} | {_number(row['ours'])} |")
    if len(lines) == 3:
        raise SystemExit(f"error: no row of {match['figure']} matches {match['metric']!r}")
    return match[1] + "\n".join([*lines, "", ""]) + match[4]


def _number(value: Any) -> str:
    if isinstance(value, list):
        return f"{value[0]:.3g} to {value[1]:.3g}"
    return "" if value is None else f"{value:.3g}"


def main() -> int:
    page = FOLDER / "README.md"
    text = page.read_text()
    filled = TABLE.sub(table, text)
    if "--check" in sys.argv[1:]:
        return int(filled != text)
    page.write_text(filled)
    return 0


if __name__ == "__main__":
    sys.exit(main())
