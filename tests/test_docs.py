"""What the documents point to exists."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "examples/README")),
    *sorted(DOCS.rglob("*.md")),
]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@cache
def tokens_of(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


def inline(page: Path) -> Iterator[Token]:
    """Text, links, images and code of paragraphs, headings and tables."""
    return (child for token in tokens_of(page) for child in token.children or [])


def text_of(token: Token) -> str:
    return "".join(child.content for child in token.children or [] if child.type in ("text", "code_inline"))


@cache
def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them: letters, digits, - and _ in lower case, spaces as -, a number after a repeated one."""
    found: dict[str, int] = {}
    anchors = set()
    for heading, token in zip(tokens_of(page), tokens_of(page)[1:], strict=False):
        if heading.type == "heading_open":
            slug = re.sub(r"[^\w\- ]", "", text_of(token).lower()).replace(" ", "-")
            found[slug] = found.get(slug, -1) + 1
            anchors.add(f"{slug}-{found[slug]}" if found[slug] else slug)
    return anchors


def broken_links(page: Path) -> list[str]:
    broken = []
    for token in inline(page):
        target = str(token.attrs.get("href") or token.attrs.get("src") or "")
        if not target or re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            broken.append(target)
    return broken


@every_page
def test_links_resolve(page: Path) -> None:
    assert not broken_links(page)


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# A `b`: C\n\n## D\n\n## D\n\n[x](b.md) [x](#a-b-c) [x](a.md#d-1) [x](#d-2) ![x](c.png)\n")
    assert broken_links(page) == ["b.md", "#d-2", "c.png"]


@every_page
def test_python_compiles(page: Path) -> None:
    for token in tokens_of(page):
        if token.type == "fence" and token.info.strip() in ("python", "py"):
            compile(token.content, name_of(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def sentences(page: Path) -> list[str]:
    texts = [text_of(token) for token in tokens_of(page) if token.type == "inline"]
    return [sentence for text in texts for sentence in re.split(r"(?<=[.!?])\s", text)]


@every_page
def test_sentences_are_short(page: Path) -> None:
    """Lists of names are no sentences."""
    long = [sentence for sentence in sentences(page) if len(sentence.split()) > 35]
    assert not [sentence for sentence in long if not sentence.startswith(("Server options: ", "Engine options: "))]


@every_page
def test_named_tests_exist(page: Path) -> None:
    defined = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        defined |= set(re.findall(r"def (test_\w+)\(", file.read_text()))
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    assert named <= defined, named - defined


DEPLOY = sorted(path for path in (ROOT / "deploy").iterdir() if path.is_file())


@pytest.mark.parametrize("file", [*PAGES, *DEPLOY], ids=name_of)
def test_options_of_the_server_exist(file: Path) -> None:
    """In command lines, wherever one is written down."""
    from octavo.cli.commands.serve import serve

    known = {name.replace("_", "-") for name in inspect.signature(serve).parameters} | {"help"}
    lines = [line for line in file.read_text().splitlines() if re.search(r'octavo serve|"--api-key-file"', line)]
    found = {name for line in lines for name in re.findall(r"(?<![\w-])--(?:no-)?([a-z][a-z-]+)", line)}
    assert found <= known, found - known
    if file.name in ("Dockerfile", "octavo.service"):
        assert {"host", "api-key-file"} <= found


SHELL = ("", "sh", "bash", "console", "shell")


def command_lines(page: Path) -> Iterator[list[str]]:
    """The words after `octavo` of every command in a shell block, or in code within text."""
    lines = [token.content for token in inline(page) if token.type == "code_inline"]
    for token in tokens_of(page):
        if token.type in ("fence", "code_block") and token.info.strip() in SHELL:
            lines += token.content.replace("\\\n", " ").splitlines()
    for line in lines:
        for part in re.split(r"&&|\|\||[|;](?=\s)|(?<=\s)#", line):
            if command := re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S* )*(?:\S*/)?octavo(?: (.*))?$", part):
                try:
                    yield shlex.split(command[1] or "")
                except ValueError:  # a quotation mark in prose
                    yield (command[1] or "").split()


@cache
def program() -> Any:
    import typer

    from octavo.cli.app import app

    return typer.main.get_command(app)


def problem_of(words: list[str]) -> str | None:
    """What the command line would reject: a command, or an option. Flags of vLLM that Octavo refuses count."""
    from octavo.params.vllm_arguments import arguments, flag_name

    command = program()
    given = [word for word in words if not word.startswith("-")]
    while hasattr(command, "commands") and given:
        name = given.pop(0)
        if name not in command.commands:
            return None if not name.islower() else f"no command {name}"  # a placeholder, such as COMMAND
        command = command.commands[name]
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help", "-h"}
    table = arguments(*getattr(command.callback, "vllm_owners", ("none",)))
    for word in words:
        option = word.partition("=")[0].rstrip(",.;:)")
        if re.match(r"--?[a-z]", option) and option.replace("_", "-") not in known:
            argument = table.get(flag_name(option) or "")
            if argument is None or argument.is_taken:
                return f"no option {option}"
    return None


@every_page
def test_commands_and_their_options_exist(page: Path) -> None:
    problems = {" ".join(words): problem for words in command_lines(page) if (problem := problem_of(words))}
    assert not problems


def test_wrong_command_lines_are_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text(
        "`octavo serv` and `octavo serve M --prot 1`\n\n```\n$ A=1 octavo chat \\\n  --nope | octavo top --once\n```\n"
    )
    found = [problem_of(words) for words in command_lines(page)]
    assert found == ["no command serv", "no option --prot", "no option --nope", None]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reference_is_up_to_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`python scripts/make_reference.py` writes it."""
    reference = load("make_reference")
    assert reference.main(args=["--check"]) == 0, capsys.readouterr().err
    assert reference.main(tmp_path, []) == 0
    (tmp_path / "cli.md").write_text("old")
    assert reference.main(tmp_path, ["--check"]) == 1
    assert capsys.readouterr().err.startswith("docs/reference: cli.md out of date")
    assert (tmp_path / "cli.md").read_text() == "old"


def test_the_site_names_files_of_the_repository() -> None:
    config = SimpleNamespace(config_file_path=str(ROOT / "mkdocs.yml"), docs_dir=str(DOCS))
    page = SimpleNamespace(file=SimpleNamespace(src_uri="paper/README.md"))
    text = "[a](../../src/octavo/errors.py#L1) [b](../../tests) [c](../usage.md) [d](../../none.md)"
    found = load("mkdocs_hooks").on_page_markdown(text, page=page, config=config)
    assert found == "a (`src/octavo/errors.py`) b (`tests`) [c](../usage.md) [d](../../none.md)"


def test_troubleshooting_has_every_error_with_its_code() -> None:
    from octavo import errors

    known = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.OctavoError)]
    page = (DOCS / "troubleshooting.md").read_text()
    assert dict(re.findall(r"`(\w+)`, `(\w+)`", page)) == {kind.__name__: kind.code for kind in known}


@pytest.mark.parametrize("options", [{"temperature": -1}, {"temprature": 1}])
def test_troubleshooting_quotes_messages_as_they_are(options: dict[str, Any]) -> None:
    from octavo import SamplingParams
    from octavo.errors import UsageError

    with pytest.raises(UsageError) as raised:
        SamplingParams(**options)
    assert f"\n{raised.value}\n" in (DOCS / "troubleshooting.md").read_text()


def rows(page: str) -> list[list[str]]:
    """The cells of all tables of a page."""
    lines = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_attention_chart_shows_the_tables() -> None:
    chart = load("attention_chart")
    assert chart.CHART.read_text() == chart.picture(), "run python scripts/attention_chart.py"


def test_the_scale_chart_shows_the_table() -> None:
    chart = load("scale_chart")
    assert chart.CHART.read_text() == chart.picture(), "run python scripts/scale_chart.py"


def test_the_speed_chart_shows_the_tables() -> None:
    chart = load("speed_chart")
    assert chart.CHART.read_text() == chart.draw(), "run python scripts/speed_chart.py"
    assert min(ratio for panel in chart.panels() for _, ratios in panel.rows for ratio in ratios) > chart.MIN


def test_the_performance_page_names_the_processors() -> None:
    text = (DOCS / "performance.md").read_text()
    assert "Intel Xeon" in text and "AMD EPYC" in text and "no AMX" in text


def test_the_readme_names_every_architecture() -> None:
    from octavo.models.registry import FAMILIES

    row = next(cells for cells in rows("README.md") if cells[0] == "Architectures")
    named = set(re.sub(r"[ -]", "", row[1].partition(";")[0]).lower().replace(".", "_").split(","))
    classes = [name for family in FAMILIES for name in family.architectures]
    assert named == {re.sub("For(Causal|Conditional).*|LMHead.*", "", name).lower() for name in classes}


def test_claims_about_gpu_kernels_match_their_tables() -> None:
    text = tables = (DOCS / "gpu-kernels.md").read_text()
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


def test_ratios_of_the_gpu_engine_match_its_table() -> None:
    measured = {ratio for row in rows("docs/gpu-engine.md") for ratio in row if re.fullmatch(r"[0-9]+\.[0-9]+", ratio)}
    section = (DOCS / "performance.md").read_text().split("## On a GPU")[1]
    found = re.findall(r"(?<=\| )[0-9]+\.[0-9]+", section)
    assert len(found) == 27
    assert set(found) <= measured


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
    assert len(rules) == 44
    assert all("`test_" in rule for rule in rules)
