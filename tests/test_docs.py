"""What the documents point to exists."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_resolve(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    missing = [t for t in targets if not t.startswith("http") and not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_tests_exist(page: Path) -> None:
    defined = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        defined |= set(re.findall(r"def (test_\w+)\(", file.read_text()))
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    assert named <= defined, named - defined


DEPLOY = sorted(path for path in (ROOT / "deploy").iterdir() if path.is_file())


@pytest.mark.parametrize("file", [*PAGES, *DEPLOY], ids=lambda p: p.name)
def test_options_of_the_server_exist(file: Path) -> None:
    """In command lines, wherever one is written down."""
    from octavo.cli.commands.serve import serve

    known = {name.replace("_", "-") for name in inspect.signature(serve).parameters} | {"help"}
    lines = [line for line in file.read_text().splitlines() if re.search(r'octavo serve|"--api-key-file"', line)]
    found = {name for line in lines for name in re.findall(r"(?<![\w-])--(?:no-)?([a-z][a-z-]+)", line)}
    assert found <= known, found - known
    if file.name in ("Dockerfile", "octavo.service"):
        assert {"host", "api-key-file"} <= found


COMMAND = re.compile(r"(?:^|`|&& |\$ )octavo ((?:bench |models )?[a-z][a-z-]*)((?: [^`\n#&|]*)?)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    import typer

    from octavo.cli.app import app

    root: Any = typer.main.get_command(app)
    for name, rest in COMMAND.findall(page.read_text()):
        command = root
        for word in name.split():
            assert word in command.commands, f"octavo {name}"
            command = command.commands[word]
            if not hasattr(command, "commands"):
                break
        known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
        found = set(re.findall(r"(?<!\S)--[a-z][a-z-]+", rest))
        assert found <= known, f"octavo {name}: {found - known}"


def rows(page: str) -> list[list[str]]:
    """The cells of all tables of a page."""
    lines = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def number(text: str) -> float:
    return float(re.findall(r"[0-9][0-9,]*(?:\.[0-9]+)?", text)[-1].replace(",", ""))


def test_readme_cpu_figures_match_the_performance_page() -> None:
    """Tokens a second, and ratios, rounded: each stands in a row of docs/performance.md."""
    measured = rows("docs/performance.md")
    found = [
        row for row in rows("README.md") if len(row) == 4 and row[3].endswith((" x", "' one")) and ", to " not in row[0]
    ]
    assert len(found) == 5
    for what, ours, theirs, ratio in found:
        fits = [
            row
            for row in measured
            if any(_is_figure(cell) and number(cell) == pytest.approx(number(ours), rel=0.01) for cell in row)
            and (not theirs or any(_is_figure(cell) and number(cell) == number(theirs) for cell in row))
            and any(
                float(x) == pytest.approx(float(ratio.split()[0]), rel=0.03)
                for x in re.findall(r"([0-9.]+) x", row[-1])
            )
        ]
        assert fits, what
    for row in rows("README.md"):
        if len(row) == 4 and ", to " in row[0]:
            assert row in measured, row


def _is_figure(cell: str) -> bool:
    return re.fullmatch(r"[0-9][0-9,.]*", cell) is not None


def test_readme_names_the_processors() -> None:
    for page in ("README.md", "docs/performance.md"):
        text = (ROOT / page).read_text()
        assert "Intel Xeon" in text and "AMD EPYC" in text and "no AMX" in text


def test_readme_gpu_kernel_claims_match_the_tables() -> None:
    text = (ROOT / "README.md").read_text()
    tables = (ROOT / "docs" / "gpu-kernels.md").read_text()
    decode = _ratios(tables.split("## Decoding")[1].split("## Shared")[0], columns=(3, 6, 9, 12))
    level = [ratio for shape, ratio in decode if shape == "64 x 4096" and ratio < 1.05]
    ahead = sorted(ratio for _, ratio in decode)[len(level) :]
    assert f"ahead at {len(ahead)} of {len(decode)} shapes, by {ahead[0]:.2f} to {ahead[-1]:.2f} times" in text
    assert len(level) == 3 and max(level) <= 1.02 and "level within 2 %" in text
    prefill = _ratios(tables.split("## Long queries")[1], columns=(3,))
    better = [ratio for _, ratio in prefill if ratio > 1]
    both = [ratio for _, ratio in _ratios(tables.split("## Long queries")[1], columns=(3, 6)) if ratio > 1]
    claim = f"ahead at {len(better)} of {len(prefill)} shapes, by {min(both):.2f} to {max(both):.2f} times"
    assert claim in text
    for _, ratio in prefill:
        assert ratio > 1 or f"({ratio:.2f})" in text


def _ratios(text: str, columns: tuple[int, ...]) -> list[tuple[str, float]]:
    """The shape and ratio of each measurement of the first table."""
    table = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)[0]
    cells = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return [(row[0], float(row[i])) for row in cells for i in columns if i < len(row) and row[i]]


def test_readme_gpu_engine_figures_match_the_table() -> None:
    measured = {ratio for row in rows("docs/gpu-engine.md") for ratio in row if re.fullmatch(r"[0-9]+\.[0-9]+", ratio)}
    found = [ratio for row in rows("README.md") for cell in row for ratio in re.findall(r"\(([0-9.]+) x\)", cell)]
    assert len(found) == 24
    for ratio in found:
        digits = len(ratio.partition(".")[2])
        assert any(abs(float(m) - float(ratio)) <= 0.51 * 10**-digits for m in measured), ratio


def test_parameters_documented_as_missing_are_missing() -> None:
    """And vLLM's others are there."""
    from dataclasses import fields

    from octavo import SamplingParams

    page = (ROOT / "docs" / "sampling.md").read_text()
    section = page.split("## Which of vLLM's parameters there are")[1].split("##")[0]
    names = re.findall(r"`(\w+)`", section.split(" fields are missing: ")[1].split(". ")[0])
    assert len(names) == 6 and "six are missing" in (ROOT / "README.md").read_text()
    assert not {f.name for f in fields(SamplingParams)} & set(names)


def test_every_rule_names_a_test() -> None:
    rules = re.split(r"\n(?=\d+\. )", (ROOT / "docs" / "memory.md").read_text())[1:]
    assert len(rules) == 24
    assert all("`test_" in rule for rule in rules)
