"""Tool calls in XML: JSON arguments by the tool's schema, in any pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from octavo.text.formats.xml_calls import XmlCallParser, types_of
from octavo.text.output_parser import OutputPart
from tests.text.test_output_parser import merge_parts

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "size": {"type": "number"},
    "on": {"type": "boolean"},
    "map": {"type": "object"},
    "list": {"type": "array", "items": {"type": "string"}},
    "nothing": {"type": "null"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "either": {"type": ["string", "integer"]},
    "price": {"type": ["string", "number"]},
    "unit": {"$ref": "#/$defs/Unit"},
    "level": {"enum": [1, 2]},
    "any": {},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "$defs": {"Unit": {"enum": ["C", "F"]}}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "g"}},
]


def written(name: str, **values: str) -> str:
    """A call as the template teaches it."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def parse(text: str, cuts: list[int], **options: Any) -> tuple[str, str, list[tuple[str, str]]]:
    parser = XmlCallParser(tools=TOOLS, **options)
    parts: list[OutputPart] = []
    for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += parser.push(text[a:b])
    return merge_parts(parts + parser.finish())


def arguments(**values: str) -> dict[str, Any]:
    ((_, found),) = parse(written("f", **values), [])[2]
    return dict(json.loads(found))


CODE = "def f(a):\n\treturn \"<b>\\n\" + 'é' # </parameter\n\n<parameter\n</function>\n"
CASES: list[tuple[str, str, list[tuple[str, Any]]]] = [
    (written("f", text="Oslo", count="3"), "", [("f", {"text": "Oslo", "count": 3})]),
    (f"Let me see.\n{written('g')}", "Let me see.\n", [("g", {})]),
    (f"{written('g')}\n{written('f', on='True')}", "", [("g", {}), ("f", {"on": True})]),
    (written("f", text=CODE, other="1"), "", [("f", {"text": CODE, "other": "1"})]),
    (written("f", text="", list="[]"), "", [("f", {"text": "", "list": []})]),
    (written("f", text="\n a \n"), "", [("f", {"text": "\n a \n"})]),
    ("<tool_call><function=f><parameter=text>a</parameter></function></tool_call>", "", [("f", {"text": "a"})]),
    # end tags that the model forgot
    ("<tool_call>\n<function=g>\n</tool_call>a", "a", [("g", {})]),
    ("<tool_call>\n<function=g>\n</function>", "", [("g", {})]),
    ("<tool_call>\n<function=g>\n</function>\na", "\na", [("g", {})]),
    (written("f", text="a", count="3").replace("\n</parameter>", ""), "", [("f", {"text": "a", "count": 3})]),
    ("<tool_call>\n<function=g>\n</function>\n<function=g></function></tool_call>", "", [("g", {}), ("g", {})]),
    (written("g").replace("</function>", "junk < </functio>\n</function>"), "", [("g", {})]),
    # no calls
    ("<tool_call>\nno call</tool_call>", "<tool_call>\nno call</tool_call>", []),
    ("<tool_call>\n<function=", "<tool_call>\n<function=", []),
    (f"<tool_call><function={'a' * 300}>", f"<tool_call><function={'a' * 300}>", []),
    ("a <tool <function=f>", "a <tool <function=f>", []),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_parts_do_not_depend_on_the_cuts(number: int) -> None:
    text, content, calls = CASES[number]
    rng = random.Random(number)
    ways = [[], list(range(1, len(text))), *([cut] for cut in range(1, len(text)))]
    ways += [sorted(rng.sample(range(1, len(text)), min(4, len(text) - 1))) for _ in range(20)]
    for cuts in ways:
        got = parse(text, cuts)
        # White space before calls is dropped; how much is returned before depends on the cuts.
        assert got[1] == content or (calls and got[1].strip() == content.strip())
        assert [(name, json.loads(found)) for name, found in got[2]] == calls


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("text", "3", "3"),
        ("text", "null", "null"),
        ("count", "-3", -3),
        ("count", "three", "three"),
        ("count", "9" * 5000, "9" * 5000),
        ("size", "2.5e3", 2500.0),
        ("size", "NaN", "NaN"),
        ("on", "false", False),
        ("on", "True", True),
        ("on", "yes", "yes"),
        ("map", '{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ("map", "{'a': 1}", "{'a': 1}"),
        ("map", "[" * 100_000, "[" * 100_000),
        ("list", '\n["a",\n "b"]', ["a", "b"]),
        ("nothing", "None", None),
        ("maybe", "null", None),
        ("maybe", "3", "3"),
        ("maybe", '"a"', '"a"'),
        ("either", "3", 3),
        ("either", "3.5", "3.5"),
        ("price", "3", 3),
        ("unit", "C", "C"),
        ("level", "2", 2),
        ("any", "3", "3"),
        ("unknown", "3", "3"),
    ],
)
def test_values_have_the_types_of_the_schema(name: str, value: str, expected: Any) -> None:
    assert arguments(**{name: value}) == {name: expected}


def test_a_call_that_is_cut_stays_open() -> None:
    whole = written("f", text='a "b"\n<c>', map='{"a": 1}')
    complete = parse(whole, [])[2][0][1]
    for end in range(whole.index("</function>") + len("</function>")):
        for cuts in ([], list(range(1, end))):
            _, content, calls = parse(whole[:end], cuts if end else [])
            assert not calls or (complete.startswith(calls[0][1]) and calls[0][1] != complete)
            assert bool(calls) != bool(content) or end == 0


def test_text_streams_and_reasoning_comes_first() -> None:
    parser = XmlCallParser(tools=TOOLS, reasoning=True, starts_in_reasoning=True)
    assert [p.kind for p in parser.push("hm</think>\n\n")] == ["reasoning"]
    (begin, name) = parser.push("<tool_call>\n<function=f>\n<parameter=text>\n")
    assert (begin.name, name.text) == ("f", '{"text": "')
    assert [p.text for p in parser.push('a\n"b" <')] == ['a\\n\\"b\\" ']
    assert [p.text for p in parser.push("c")] == ["<c"]
    assert parser.push("\n</param") == [] and parser.num_calls == 0
    assert "".join(p.text for p in parser.push("eter>\n</function>")) == '"}' and parser.num_calls == 1


def test_any_schema_has_types() -> None:
    loop: dict[str, Any] = {"anyOf": [{"$ref": "#/a"}] * 50 + [{"type": "integer"}]}
    assert types_of({"$ref": "#/a"}, {"a": loop}) == {"integer"}
    for odd in (None, 3, [], {"type": {"a": 1}}, {"type": [{}]}, {"anyOf": 3}, {"enum": {}}, {"$ref": "#/a/b/c"}):
        assert types_of(odd, {"a": 3}) == set()
    assert types_of({"const": None}, {}) == {"null"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": [1]}}}]
    parser = XmlCallParser(tools=tools)
    assert "".join(p.text for p in parser.push(written("f", a="1"))) == '{"a": "1"}'
