"""Gemma 4's outputs: reasoning, content and calls, whose arguments become JSON, in any pieces."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.text.formats.gemma_calls import MARKERS, MAX_DEPTH, QUOTE, GemmaParser
from octavo.text.output_parser import OutputPart
from tests.text.test_output_parser import merge_parts

HM = "<|channel>thought\nhm<channel|>"
Q = QUOTE


def call(arguments: str, name: str = "f", end: str = "<tool_call|>") -> str:
    return f"<|tool_call>call:{name}{arguments}{end}"


def written(value: Any, quoted_keys: bool = False) -> str:
    """A value as the template writes it."""
    if isinstance(value, str):
        return f"{Q}{value}{Q}"
    if isinstance(value, list):
        return "[" + ",".join(written(item, quoted_keys) for item in value) + "]"
    if isinstance(value, dict):
        keys = {key: f"{Q}{key}{Q}" if quoted_keys else key for key in value}
        return "{" + ",".join(f"{keys[key]}:{written(item, quoted_keys)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def parse(text: str, cuts: list[int], **options: Any) -> tuple[str, str, list[tuple[str, str]]]:
    parser = GemmaParser(**options)
    parts: list[OutputPart] = []
    for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += parser.push(text[a:b])
    return merge_parts(parts + parser.finish())


WEATHER = f"{{city:{Q}Oslo{Q},days:3,units:{{deep:true,list:[1,{Q}a{Q},null]}}}}"
JSON = {"city": "Oslo", "days": 3, "units": {"deep": True, "list": [1, "a", None]}}
N: dict[str, Any] = {}
CASES: list[tuple[str, dict[str, Any], tuple[str, str, list[tuple[str, Any]]]]] = [
    (f"{HM}Wait. {call(WEATHER)}{call('{}', 'g')}", N, ("hm", "Wait. ", [("f", JSON), ("g", {})])),
    (f"{HM}Yes.", N, ("hm", "Yes.", [])),
    ("<|channel>thought\n<channel|>Yes.", N, ("", "Yes.", [])),
    (f"<|channel>thought\nhm{call('{}')}a", N, ("hm", "a", [("f", {})])),
    ("<|channel>thought\nhm <b>", N, ("hm <b>", "", [])),
    ("hm<channel|>Yes.", {"starts_in_reasoning": True}, ("hm", "Yes.", [])),
    (f"{HM}Yes.{call('{}')}", {"tools": False}, ("hm", "Yes.call:f{}", [])),
    (f"{HM}Yes.", {"reasoning": False}, ("", "hmYes.", [])),
    (f"{HM}<|channel>final\nYes.<channel|>", N, ("hm", "final\nYes.", [])),
    (f"{HM}<|channel>thoughts<channel|>", N, ("hm", "thoughts", [])),
    (f"{HM}<|channel>thought", N, ("hm", "", [])),  # cut in the channel's name
    ("<|turn>a<turn|><b>", {"skipped": ["<|turn>", "<turn|>", "<|channel>"]}, ("", "a<b>", [])),
    (f"a{call('{}')}b{call('{}', 'g')}c", N, ("", "abc", [("f", {}), ("g", {})])),
    # no calls
    ("<|tool_call>hello<tool_call|>", N, ("", "hello", [])),
    ("<|tool_call>call:f<tool_call|> a", N, ("", "call:f a", [])),
    ("<|tool_call>call:{}<tool_call|>", N, ("", "call:{}", [])),
    ("<|tool_call>call:f", N, ("", "call:f", [])),
    (f"<|tool_call>call:{'a' * 300}{{}}", N, ("", f"call:{'a' * 300}{{}}", [])),
    ("a <tool_call|> <channel|>b {", N, ("", "a  b {", [])),
    (call(" { }", " ns:a.b "), N, ("", "", [("ns:a.b", {})])),
    # ends that the model forgot, or wrote twice
    (call(WEATHER, end=""), N, ("", "", [("f", JSON)])),
    (call("{a:[1,{b:2"), N, ("", "", [("f", {"a": [1, {"b": 2}]})])),
    (call("{a:[1", end="") + call("{}", "g"), N, ("", "", [("f", {"a": [1]}), ("g", {})])),
    (call("{a:1]") + "b", N, ("", "b", [("f", {"a": 1})])),
    (call("{a:1}}"), N, ("", "}", [("f", {"a": 1})])),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_parts_do_not_depend_on_the_cuts(number: int) -> None:
    text, options, (reasoning, content, calls) = CASES[number]
    rng = random.Random(number)
    ways = [[], list(range(1, len(text))), *([cut] for cut in range(1, len(text)))]
    ways += [sorted(rng.sample(range(1, len(text)), min(4, len(text) - 1))) for _ in range(20)]
    for cuts in ways:
        got = parse(text, cuts, **options)
        assert got[:2] == (reasoning, content)
        assert [(name, json.loads(found)) for name, found in got[2]] == calls


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("-2.5e-3", -2.5e-3),
        (" true ", True),
        ("null", None),
        ("None", None),
        ("True", "True"),
        ("Oslo now", "Oslo now"),
        ("01", "01"),
        ("1.", "1."),
        ("\u0663", "\u0663"),
        ("NaN", "NaN"),
        ("9" * 5000 + "a", "9" * 5000 + "a"),
        ("", None),
        (f'{Q}a "b"\n\\n{{,}}]: \x00é{Q}', 'a "b"\n\\n{,}]: \x00é'),
        (f"{Q}<tool_call|><|tool_call>{Q}", "<tool_call|><|tool_call>"),
        ('"a,}]\\n\\u00e9\\"b\\\\"', 'a,}]\né"b\\'),
        ('"a\nb\\q"', "a\nb\\q"),
        ('"\\ud800"', "\ud800"),
        (f'"Oslo{Q}', "Oslo"),
        (f"Oslo{Q}", "Oslo"),
        ("[]", []),
        (f"[[],{{}},{Q}{Q},]", [[], {}, ""]),
        (f"[{Q}a{Q}{Q}b{Q} 1]", ["a", "b", 1]),
        (f'{{{Q}b:,{Q} : 1, "c":2 , d e :3}}', {"b:,": 1, "c": 2, "d e": 3}),
        (f"{{b:,{Q}c{Q}}}", {"b": None, "c": None}),
    ],
)
def test_values_have_the_types_of_the_syntax(value: str, expected: Any) -> None:
    text = call(f"{{a:{value},z:0}}")
    for cuts in ([], list(range(1, len(text)))):
        ((_, found),) = parse(text, cuts)[2]
        found.encode()
        assert json.loads(found) == {"a": expected, "z": 0}


texts = st.text().filter(lambda text: not any(marker in text for marker in MARKERS)).filter(lambda t: "<" not in t)
names = st.from_regex(r"[A-Za-z_][\w .,\[\]-]{0,8}\w", fullmatch=True)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(names, inner), max_leaves=20)


@given(value=st.dictionaries(names, values), quoted_keys=st.booleans(), data=st.data())
def test_any_json_is_read(value: dict[str, Any], quoted_keys: bool, data: st.DataObject) -> None:
    text = f"a{call(written(value, quoted_keys))}b"
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=20)))
    reasoning, content, ((name, found),) = parse(text, cuts)
    assert (reasoning, content, name) == ("", "ab", "f")
    assert json.loads(found) == value and found == json.dumps(value, ensure_ascii=False)


PIECES = [*sorted(MARKERS), "thought\n", "thought", "call:f{", "call:", "x", "y:", ":", ",", "{", "}", "[", "]"]
PIECES += ['"', "\\", " ", "\n", "1", "<", "<|", "|>", "true"]


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=40), data=st.data())
def test_no_output_fails_or_loses_text(pieces: list[str], data: st.DataObject) -> None:
    """Finished calls are JSON. Every word of the text is in reasoning, content or a call."""
    text = "".join(pieces)
    whole = GemmaParser()
    parts = whole.push(text) + whole.finish()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=20)))
    merged = merge_parts(parts)
    assert merged == parse(text, cuts) == parse(text, list(range(len(text))))
    for _, found in merged[2][: whole.num_calls]:
        assert isinstance(json.loads(found), dict)
    assert len(merged[2]) - whole.num_calls in (0, 1)
    if len(merged[2]) == whole.num_calls:  # else the output's end cuts a word
        plain = re.sub("|".join(map(re.escape, sorted(MARKERS))), " ", text)
        shown = "".join(part.text for part in parts)
        for word in "xy1":
            assert shown.count(word) == plain.count(word), (text, parts)


def test_a_call_that_is_cut_stays_open() -> None:
    whole = call(WEATHER)
    complete = parse(whole, [])[2][0][1]
    for end in range(len("<|tool_call>call:f{"), whole.index("<tool_call|>")):
        if re.search(r'<\|?"?\|?$', whole[:end]) is not None:
            continue  # a marker is one token
        for cuts in ([], list(range(1, end))):
            _, content, ((name, found),) = parse(whole[:end], cuts)
            assert (content, name) == ("", "f") and complete.startswith(found) and found != complete


def test_parts_stream_without_delay() -> None:
    parser = GemmaParser()
    assert parser.push("<|channel>") == [] and parser.in_reasoning
    assert parser.push("thought\nhm") == [OutputPart("reasoning", "hm")]
    assert parser.push("<channel|>") == [] and not parser.in_reasoning
    assert [part.name for part in parser.push("<|tool_call>call:f{")] == ["f", None]
    assert "".join(part.text for part in parser.push(f"a:{Q}b\n")) == '"a": "b\\n'
    assert parser.push('"c" <|') == [OutputPart("call", '\\"c\\" ')]
    assert "".join(part.text for part in parser.push('"|>,n:12')) == '", "n": ' and parser.num_calls == 0
    assert "".join(part.text for part in parser.push("3}")) == "123}" and parser.num_calls == 1


def test_deep_brackets_are_words() -> None:
    """Brackets beyond the limit; the closing ones then close the others, and the rest is content."""
    depth = MAX_DEPTH - 1
    ((_, found),) = parse(call("{a:" + "[" * depth + "]" * depth + "}"), [])[2]
    assert found == '{"a": ' + "[" * depth + "]" * depth + "}"
    _, content, ((_, found),) = parse(call("{a:" + "[" * 100_000 + "]" * 100_000 + "}"), [])
    value = json.loads(found)["a"]
    for _ in range(depth):
        (value,) = value
    assert value == "[" * (100_000 - depth) and set(content) == {"]", "}"}
