"""What the documents point to exists."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    missing = [t for t in targets if not t.startswith("http") and not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_tests_that_are_named_exist(page: Path) -> None:
    defined = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        defined |= set(re.findall(r"def (test_\w+)\(", file.read_text()))
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    assert named <= defined, named - defined


DEPLOY = sorted(path for path in (ROOT / "deploy").iterdir() if path.is_file())


@pytest.mark.parametrize("file", [*PAGES, *DEPLOY], ids=lambda p: p.name)
def test_options_of_the_server_exist(file: Path) -> None:
    """In command lines, wherever one is written down."""
    from octavo.cli.serve import serve

    known = {name.replace("_", "-") for name in inspect.signature(serve).parameters} | {"help"}
    lines = [line for line in file.read_text().splitlines() if re.search(r'octavo serve|"--api-key-file"', line)]
    said = {name for line in lines for name in re.findall(r"(?<![\w-])--(?:no-)?([a-z][a-z-]+)", line)}
    assert said <= known, said - known
    if file.name in ("Dockerfile", "octavo.service"):
        assert {"host", "api-key-file"} <= said


def test_every_rule_names_a_test() -> None:
    rules = re.split(r"\n(?=\d+\. )", (ROOT / "docs" / "memory.md").read_text())[1:]
    assert len(rules) == 21
    assert all("`test_" in rule for rule in rules)
