"""docs/seeds.md: what it names exists, and no row is missing."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from tests.test_docs import ROOT, problem_of, rows

CODE = re.compile(r"`([^`]+)`")
SIZES = {
    "Simulation": (18, 12),
    "MinivLLM": (21, 10),
    "Simple": (32, 13),
    "Notes": (24, 5),
    "Lesson": (17, 7),
    "All": (0, 7),
}
"""Document -> its claims, and its mistakes or contradictions."""
ROWS = [row for row in rows("docs/seeds.md") if re.search(r" \d+$", row[0])]


@cache
def names_in(path: Path) -> set[str]:
    """Functions, classes and their methods, as `function`, `Class` and `Class.method`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def is_missing(folder: Path, place: str) -> bool:
    """A place is `path.py` or `path.py::name`."""
    path, _, name = place.partition("::")
    file = folder / path
    return not file.is_file() or bool(name and name not in names_in(file))


def script_problem(words: list[str]) -> str | None:
    """What is wrong with `python FILE options`."""
    file = ROOT / words[0]
    if not file.is_file():
        return f"no file {words[0]}"
    unknown = [word for word in words if word.startswith("--") and f'"{word}"' not in file.read_text()]
    return f"no option {unknown[0]}" if unknown else None


def problems_of(row: list[str]) -> list[str]:
    _, _, where, _, shown = row
    places = [place for place in CODE.findall(where) if place.partition("::")[0].endswith(".py")]
    problems = [place for place in places if is_missing(ROOT / "src" / "octavo", place)]
    evidence = CODE.findall(shown)
    if not evidence or not (places or "](" in where):
        problems.append("no evidence, or no place")
    for item in evidence:
        first, *words = shlex.split(item)
        if first == "octavo":
            problem = problem_of(words)
        elif first == "python":
            problem = script_problem(words)
        else:
            problem = item if "::test_" not in item or is_missing(ROOT, item) else None
        problems += [problem] if problem else []
    return problems


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_named_modules_tests_and_commands_exist(row: list[str]) -> None:
    assert not problems_of(row)


@pytest.mark.parametrize(
    ("where", "shown", "problem"),
    [
        ("`core/types.py::block_hash`", "`octavo view`", "core/types.py::block_hash"),
        ("`core/block_pool.py::BlockPool.fork`", "`octavo view`", "core/block_pool.py::BlockPool.fork"),
        ("`core/pool.py`", "`octavo view`", "core/pool.py"),
        ("[x](view.md)", "`tests/test_seeds.py::test_none`", "tests/test_seeds.py::test_none"),
        ("[x](view.md)", "`tests/test_seeds.py::names_in`", "tests/test_seeds.py::names_in"),
        ("[x](view.md)", "`octavo wiev`", "no command wiev"),
        ("[x](view.md)", "`octavo demo --modle x`", "no option --modle"),
        ("[x](view.md)", "`python examples/none.py`", "no file examples/none.py"),
        ("[x](view.md)", "`python examples/tools.py --nope`", "no option --nope"),
        ("[x](view.md)", "by reading", "no evidence, or no place"),
        ("the core", "`octavo view`", "no evidence, or no place"),
    ],
)
def test_wrong_names_are_found(where: str, shown: str, problem: str) -> None:
    assert problems_of(["Notes 1", "", where, "yes", shown]) == [problem]


def test_no_row_is_missing() -> None:
    wanted = []
    for document, (num_claims, num_mistakes) in SIZES.items():
        kind = "contradiction" if document == "All" else "mistake"
        wanted += [f"{document} {i}" for i in range(1, num_claims + 1)]
        wanted += [f"{document}, {kind} {i}" for i in range(1, num_mistakes + 1)]
    assert [row[0] for row in ROWS] == wanted


def test_the_page_says_what_does_not_hold() -> None:
    """A row holds, or says what is missing."""
    assert all(row[3] == "yes" or row[3].startswith("partly: ") for row in ROWS)
