"""Output parsing: the parts do not depend on how the text is cut, and returned parts are never taken back."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from octavo.text.output_parser import OutputParser, OutputPart, detect_reasoning_format, detect_tool_format

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo \\"}{", "days": [1, {"a": 2}]}}\n</tool_call>'
ARGUMENTS = {"city": 'Oslo "}{', "days": [1, {"a": 2}]}
LLAMA = '{"name": "weather", "parameters": {"city": "Oslo"}}'


def parse_all(text: str, cuts: list[int], **options: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """Returns (reasoning, content, [(name, arguments)])."""
    parser = OutputParser(**options)
    parts = [part for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) for part in parser.push(text[a:b])]
    parts += parser.finish()
    merged = merge_parts(parts)
    assert parser.num_calls == len(merged[2])
    return merged


def merge_parts(parts: list[OutputPart]) -> tuple[str, str, list[tuple[str, str]]]:
    """Returns (reasoning, content, [(name, arguments)])."""
    calls: list[tuple[str, str]] = []
    for part in parts:
        if part.kind == "call" and part.name is not None:
            assert part.index == len(calls) and part.text == ""
            calls.append((part.name, ""))
        elif part.kind == "call":
            assert part.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    reasoning = "".join(p.text for p in parts if p.kind == "reasoning")
    return reasoning, "".join(p.text for p in parts if p.kind == "content"), calls


H: dict[str, Any] = {"tools": "hermes"}
L: dict[str, Any] = {"tools": "llama3_json", "tool_names": ["weather", "f"]}
T: dict[str, Any] = {"reasoning": True}
WEATHER = ("weather", ARGUMENTS)
F, G = '{"name": "f", "arguments": {"a": {}}}', '{"arguments": {}, "name": "g"}'
CASES: list[tuple[str, dict[str, Any], tuple[str, str, list[tuple[str, Any]]]]] = [
    ("Hello there", {}, ("", "Hello there", [])),
    ("  Hello", {}, ("", "  Hello", [])),
    ("<think>a</think>b", {}, ("", "<think>a</think>b", [])),
    ("<think>I wonder</think>\n\nYes.", T, ("I wonder", "\n\nYes.", [])),
    ("I wonder</think>Yes.", T | {"starts_in_reasoning": True}, ("I wonder", "Yes.", [])),
    ("<think>never ends <b>", T, ("never ends <b>", "", [])),
    ("<thin air", T, ("", "<thin air", [])),
    ("I think </think> so", T, ("", "I think </think> so", [])),
    (CALL, H, ("", "", [("weather", ARGUMENTS)])),
    (f"Let me see. {CALL}", H, ("", "Let me see. ", [("weather", ARGUMENTS)])),
    (f"{CALL}\n{CALL}", H, ("", "", [("weather", ARGUMENTS)] * 2)),
    (f"<think>hm</think>\n{CALL}", T | H, ("hm", "", [("weather", ARGUMENTS)])),
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', H, ("", "", [("f", {"a": 1})])),
    ('<tool_call>{"name": "f"}</tool_call>', H, ("", "", [("f", {})])),
    ('<tool_call>{"name": "f"}', H, ("", "", [("f", {})])),
    *(
        (f"<tool_call>{F}{between}{G}{after}", H, ("", "", [("f", {"a": {}}), ("g", {})]))
        for between in ("", "\n", ",\n", "}\n")
        for after in ("</tool_call>", "", "\n")
    ),
    (f"<tool_call>{F[:-1]}\n{G}</tool_call>", H, ("", "", [("f", {"a": {}}), ("g", {})])),
    (f"<tool_call>{F}{G}{F}</tool_call>{CALL}", H, ("", "", [("f", {"a": {}}), ("g", {}), ("f", {"a": {}}), WEATHER])),
    (f'<tool_call>{F[:-1]}, "id": {{"b": "}}{{"}}}}</tool_call>', H, ("", "", [("f", {"a": {}})])),
    (f'<tool_call>{F} {{"x": 1}} y</tool_call>', H, ("", '{"x": 1} y', [("f", {"a": {}})])),
    (f"<tool_call>{F} {{ y</tool_call>", H, ("", "{ y", [("f", {"a": {}})])),
    ("<tool_call>no json</tool_call> ok", H, ("", "<tool_call>no json</tool_call> ok", [])),
    ("a < b <tool_ cal", H, ("", "a < b <tool_ cal", [])),
    ("<tool_call>{", H, ("", "<tool_call>{", [])),
    (LLAMA, L, ("", "", [("weather", {"city": "Oslo"})])),
    (f"<|python_tag|>{LLAMA}; {LLAMA}", L, ("", "", [("weather", {"city": "Oslo"})] * 2)),
    ('{"name": "other", "parameters": {"a": 1}}', L, ("", '{"name": "other", "parameters": {"a": 1}}', [])),
    ('{"answer": 42}', L, ("", '{"answer": 42}', [])),
    ('\n {"answer": 42}', L, ("", '\n {"answer": 42}', [])),
    (' <|python_tag|>{"answer": 42}', L, ("", ' <|python_tag|>{"answer": 42}', [])),
    ('\n{"text": "' + "x" * 500 + '"}', L, ("", '\n{"text": "' + "x" * 500 + '"}', [])),
    (f'\n{LLAMA}; {{"answer": 42}}', L, ("", ' {"answer": 42}', [("weather", {"city": "Oslo"})])),
    (
        '{"type": "function", "name": "f", "parameters": {"a": "' + "x" * 500 + '"}}',
        L,
        ("", "", [("f", {"a": "x" * 500})]),
    ),
    ('{"parameters": {"a": 1}, "name": "f"}', L, ("", "", [("f", {"a": 1})])),
    (" <tool_call>hi", H, ("", " <tool_call>hi", [])),
    ("\n<tool_call>hi</tool_call> ", H, ("", "\n<tool_call>hi</tool_call> ", [])),
    (f"{LLAMA}<tool;{LLAMA} ", L, ("", "", [("weather", {"city": "Oslo"})])),
    (LLAMA + "<think>;}</tool_call>}", L, ("", "", [("weather", {"city": "Oslo"})])),
    (f"It is {LLAMA}", L, ("", f"It is {LLAMA}", [])),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_parts_do_not_depend_on_the_cuts(number: int) -> None:
    text, options, (reasoning, content, calls) = CASES[number]
    rng = random.Random(number)
    ways = [[], list(range(1, len(text)))]
    ways += [sorted(rng.sample(range(1, len(text)), min(4, len(text) - 1))) for _ in range(40)]
    for cuts in ways:
        got = parse_all(text, cuts, **options)
        # White space before or around calls is dropped; how much is returned before depends on the cuts.
        assert got[0] == reasoning and (got[1] == content or (calls and got[1].strip() == content.strip()))
        assert [(name, json.loads(arguments)) for name, arguments in got[2]] == calls


def test_arguments_and_content_stream_without_delay() -> None:
    parser = OutputParser(tools="hermes")
    assert [p.text for p in parser.push("a <")] == ["a "]
    assert [p.text for p in parser.push("b")] == ["<b"]
    assert parser.push("<tool_call>") == [] and parser.push('{"name": "f", "arguments": ') == []
    (begin, piece) = parser.push('{"a"')
    assert (begin.name, piece.text, piece.name) == ("f", '{"a"', None)
    assert [p.text for p in parser.push(": 1}} ")] == [": 1}"]
    assert not parser.in_reasoning
    assert OutputParser(reasoning=True, starts_in_reasoning=True).in_reasoning


def test_formats_are_detected_from_the_template() -> None:
    assert detect_tool_format(None) is None and detect_tool_format("{{ messages }}") is None
    assert detect_tool_format("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert detect_tool_format("{% if tools %}<|python_tag|>{% endif %}") == "llama3_json"
    assert detect_tool_format("{% if tools %}Tools: {{ tools }}{% endif %}") is None
    assert detect_tool_format("{% if tools %}<tool_call>\n<function=f>{% endif %}") == "qwen3_coder"
    assert detect_tool_format("{% if tools %}namespace functions{% endif %}<|channel|>") == "openai"
    assert detect_tool_format("{% if tools %}<|tool_call>call:{% endif %}") == "gemma4"
    assert detect_reasoning_format("{% if '</think>' in m %}") == "think"
    assert detect_reasoning_format("<|channel>thought") == "gemma4"
    assert detect_reasoning_format("<|channel|>") == "openai_gptoss"
    assert detect_reasoning_format("a") is None and detect_reasoning_format(None) is None


def test_lone_surrogate_stays_an_escape() -> None:
    """JSON can spell it, but an output that contains it could not be sent."""
    call = '{"arguments": {"a": "\\ud83d"}, "name": "f"}'
    assert parse_all(f"<tool_call>{call}</tool_call>", [], **H)[2] == [("f", '{"a": "\\ud83d"}')]
    for call in ('{"name": "f", "arguments": "\\ud83d"}', '{"name": "\\ud83d", "arguments": {}}'):
        text = f"<tool_call>{call}</tool_call>"
        assert parse_all(text, [], **H) == ("", text, [])
