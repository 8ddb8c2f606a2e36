"""Fills the tables of docs/paper/README.md from the figures' JSON. `--check` only compares, and fails if one differs.

A table stands between `<!-- table: fig12 REGEX -->` and `<!-- end -->`; it has the rows whose metric matches. In a
`<!-- grid: fig12 REGEX -->`, the regex's group `column` names a row's column, and `row` its line. Without `column` the
system does. A cell with both is "paper / ours".
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "paper"
TABLE = re.compile(
    r"(?P<begin><!-- (?P<kind>table|grid): (?P<figure>\w+)(?: (?P<metric>[^\n]*?))? -->\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)


def filled(match: re.Match[str]) -> str:
    """The markers, with the table's lines between them."""
    rows = json.loads((FOLDER / f"{match['figure']}.json").read_text())["rows"]
    found = [(hit, row) for row in rows if (hit := re.search(match["metric"] or "", row["metric"]))]
    if not found:
        raise SystemExit(f"error: no row of {match['figure']} matches {match['metric']!r}")
    lines = table([row for _, row in found]) if match["kind"] == "table" else grid(found)
    return match["begin"] + "\n".join(["", *lines, "", ""]) + match["end"]


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| | system | paper | ours |", "|---|---|--:|--:|"]
    for row in rows:
        lines.append(f"| {row['metric']} | {row['system']} | {_number(row['paper'])} | {_number(row['ours'])} |")
    return lines


def grid(found: list[tuple[re.Match[str], dict[str, Any]]]) -> list[str]:
    one_system = len({row["system"] for _, row in found}) == 1
    cells: dict[str, dict[str, str]] = {}
    for hit, row in found:
        groups = hit.groupdict()
        parts = [groups.get("row")] if one_system or "column" not in groups else [row["system"], groups.get("row")]
        line = ", ".join(part for part in parts if part)
        paper = f"{_number(row['paper'])} / " if row["paper"] is not None else ""
        cells.setdefault(line, {})[groups.get("column") or row["system"]] = paper + _number(row["ours"])
    columns = list({column: None for line in cells.values() for column in line})
    lines = [f"| | {' | '.join(columns)} |", "|---" + "|--:" * len(columns) + "|"]
    return [*lines, *(f"| {name} | {' | '.join(line.get(c, '') for c in columns)} |" for name, line in cells.items())]


def _number(value: Any) -> str:
    if isinstance(value, list):
        return f"{value[0]:.3g} to {value[1]:.3g}"
    return "" if value is None else f"{value:.3g}"


def main() -> int:
    page = FOLDER / "README.md"
    text = page.read_text()
    new = TABLE.sub(filled, text)
    if "--check" in sys.argv[1:]:
        return int(new != text)
    page.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
