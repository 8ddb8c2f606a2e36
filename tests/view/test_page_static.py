"""The page's files: content security policy, ids and imports, labels, contrast. No browser is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

import octavo.view
from octavo.view.playground.history import Playgrounds

STATIC = Path(octavo.view.__file__).parent / "static"
MODULES = sorted(STATIC.glob("*.mjs"))
FILES = sorted(path for path in STATIC.rglob("*") if path.is_file())
MODULE_NAMES = [path.name for path in MODULES]
CONTROLS = {"button", "input", "select", "textarea", "canvas"}
NO_END = {"meta", "link", "input", "path", "br"}


class Element:
    def __init__(self, tag: str, attributes: dict[str, str], parent: Element | None) -> None:
        self.tag, self.attributes, self.parent = tag, attributes, parent
        self.text = ""

    def up(self, tag: str) -> Element | None:
        return self if self.tag == tag else self.parent.up(tag) if self.parent else None


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed((STATIC / "index.html").read_text(encoding="utf-8"))
        assert not self._open, [element.tag for element in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        element = Element(tag, attributes, self._open[-1] if self._open else None)
        self.elements.append(element)
        if tag not in NO_END:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.elements.append(Element(tag, attributes, self._open[-1] if self._open else None))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop().tag == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def ids(self) -> list[str]:
        return [element.attributes["id"] for element in self.elements if "id" in element.attributes]


PAGE = Page()


def code_of(path: Path) -> str:
    return re.sub(r"^\s*//.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_page_obeys_its_content_security_policy() -> None:
    for element in PAGE.elements:
        assert element.tag != "style" and "style" not in element.attributes, element.attributes
        assert not any(name.startswith("on") for name in element.attributes), element.attributes
        if element.tag == "script":
            assert element.attributes.get("src", "").startswith("static/") and not element.text.strip()
    for path in MODULES:
        code = code_of(path)
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "new Function", "document.write"):
            assert forbidden not in code, (path.name, forbidden)
        assert not re.search(r"""setAttribute\(["']style""", code), path.name


@pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])
def test_page_loads_nothing_from_other_hosts(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(https?:)?//[a-z0-9-]+\.[a-z]", re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))
    assert not re.search(r"@import|url\(", text), "the style sheet loads a file"


def test_paths_are_relative_and_exist() -> None:
    for element in PAGE.elements:
        for name in ("src", "href"):
            value = element.attributes.get(name, "")
            assert not value.startswith("/"), "a proxy may put a prefix before the page"
            if value.startswith("static/"):
                assert (STATIC / value.removeprefix("static/")).is_file(), value
    for path in MODULES:
        code = code_of(path)
        for name in re.findall(r"""from "([^"]+)";""", code):
            assert (path.parent / name).is_file(), (path.name, name)
        assert not re.search(r"""(fetchJson|EventSource)\([`"]/""", code), path.name


@pytest.mark.parametrize("path", MODULES, ids=MODULE_NAMES)
def test_imports_are_exported_and_used(path: Path) -> None:
    for names, source in re.findall(r"""import \{([^}]+)\} from "([^"]+)";""", code_of(path)):
        exported = (path.parent / source).read_text(encoding="utf-8")
        for name in (each.strip() for each in names.split(",") if each.strip()):
            word = rf"(?<![\w$]){re.escape(name)}(?![\w$])"
            assert re.search(rf"export (async )?(function|class|const) {word}", exported), (source, name)
            assert len(re.findall(word, code_of(path))) > 1, (path.name, name, "is not used")


@pytest.mark.parametrize("path", MODULES, ids=MODULE_NAMES)
def test_every_module_parses(path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    done = subprocess.run([node, "--check", str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_ids_are_unique_and_references_exist() -> None:
    ids = PAGE.ids()
    assert len(ids) == len(set(ids))
    for element in PAGE.elements:
        for name in ("for", "aria-labelledby", "aria-describedby", "aria-controls"):
            for each in element.attributes.get(name, "").split():
                assert each in ids, (name, each)
        if element.attributes.get("href", "").startswith("#") and element.attributes.get("id") == "skip":
            assert element.attributes["href"][1:] in ids
    for path in MODULES:
        for selector in re.findall(r"""[$r]\("(#[^"]+)\"""", code_of(path)):
            for each in re.findall(r"#([a-z-]+)", selector):
                assert each in ids, (path.name, selector)


def test_every_control_has_a_label() -> None:
    labelled = {e.attributes["for"] for e in PAGE.elements if e.tag == "label" and e.text.strip()}
    controls = [element for element in PAGE.elements if element.tag in CONTROLS]
    assert len(controls) > 40
    for element in controls:
        attributes = element.attributes
        named = "aria-label" in attributes or "aria-labelledby" in attributes or attributes.get("aria-hidden") == "true"
        if element.tag == "button":
            assert named or element.text.strip() or "id" in attributes, attributes
            assert attributes.get("type") in ("button", "submit") or element.up("form"), (attributes, "sends a form")
        else:
            assert named or attributes.get("id") in labelled, attributes


def actions() -> dict[str, str]:
    code = code_of(STATIC / "playground.mjs")
    table = code[code.index("const ACTIONS = {") : code.index("const KEYS")]
    return dict(re.findall(r"""(\w+): \(\w*\) => [`"]([a-z]+)""", table))


def test_every_action_of_the_playground_has_a_button() -> None:
    protocol = (STATIC.parent / "PROTOCOL.md").read_text(encoding="utf-8")
    table = protocol[protocol.index("    action\n") : protocol.index("Sequences are named")]
    known = set(re.findall(r"^    ([a-z]+)[, ].*  ", table, flags=re.MULTILINE))
    assert set(actions().values()) == known and len(known) == 13
    buttons = {e.attributes.get("id") for e in PAGE.elements if e.tag == "button"}
    assert set(actions()) | {"undo", "reset", "link"} <= buttons


def test_first_pool_is_valid() -> None:
    found = re.search(r"""FIRST_POOL = "([^"]+)\"""", code_of(STATIC / "playground.mjs"))
    assert found
    answer = Playgrounds().answer(found[1])
    assert answer["done"] and answer["picture"].num_blocks == 64


def colours(theme: str) -> dict[str, tuple[float, float, float]]:
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    block = style[style.index(theme) :]
    found = re.findall(r"--([a-z-]+): #([0-9a-f]{6});", block[: block.index("}")])
    return {name: tuple(int(value[i : i + 2], 16) / 255 for i in (0, 2, 4)) for name, value in found}  # type: ignore[misc]


def luminance(colour: tuple[float, float, float]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [":root {", ':root[data-theme="dark"] {'], ids=["light", "dark"])
def test_text_contrast_in_both_themes(theme: str) -> None:
    """WCAG AA: 4.5 to 1."""
    palette = colours(theme)
    pairs = [("ink", "surface"), ("muted", "surface"), ("muted", "sunken"), ("muted", "ground"), ("warn", "surface")]
    for front, back in [*pairs, ("accent-ink", "accent"), ("ink", "accent-soft"), ("ink", "sunken")]:
        a, b = sorted((luminance(palette[front]), luminance(palette[back])))
        assert (b + 0.05) / (a + 0.05) >= 4.5, (front, back)
