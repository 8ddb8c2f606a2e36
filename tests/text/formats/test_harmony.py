"""Harmony, the format of gpt-oss: outputs in any pieces, malformed ones, and the messages of earlier turns."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.text.formats.harmony import MARKERS, HarmonyParser, harmony_messages
from octavo.text.output_parser import OutputPart
from tests.text.test_output_parser import merge_parts

PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
NEXT = "<|end|><|start|>assistant"
HM = f"<|channel|>analysis<|message|>hm{NEXT}"
ARGUMENTS = '{"city": "a < b <|x|> |>"}'
F: dict[str, Any] = {"tool_names": ["f"]}
Expected = tuple[str, str, list[tuple[str, str]]]
CALLED: Expected = ("hm", "", [("f", ARGUMENTS)])
CASES: list[tuple[str, dict[str, Any], Expected]] = [
    (f"{HM}<|channel|>final<|message|>Yes.<|return|>", F, ("hm", "Yes.", [])),
    (f"{HM}<|channel|>final<|message|>a\n<|b| <", {}, ("hm", "a\n<|b| <", [])),
    *(
        (f"{HM}{header}<|message|>{ARGUMENTS}{end}", F, CALLED)
        for header in (
            "<|channel|>commentary to=functions.f <|constrain|>json",
            "<|channel|>commentary to=functions.f<|constrain|>json",
            "<|channel|>commentary to=functions.f json",
            "<|channel|>analysis to=functions.f code",
            "<|channel|>commentary to=f",  # without "functions."
            " to=functions.f<|channel|>commentary json",
            " to=functions.f<|channel|>commentary <|constrain|>json",
            " to=functions.f <|constrain|>json",
            " to=functions.f json",
            "<|channel|>commentary to=functions.f<|channel|>commentary json",
        )
        for end in ("<|call|>", "<|end|>", "")
    ),
    (  # several messages
        f"{HM}<|channel|>commentary<|message|>Let me see. {NEXT} to=functions.f<|channel|>commentary json"
        f"<|message|>1{NEXT}<|channel|>commentary to=functions.g<|message|>2<|call|>",
        F,
        ("hm", "Let me see. ", [("f", "1"), ("g", "2")]),
    ),
    ("<|channel|>analysis <|constrain|>json<|message|>hm", F, ("hm", "", [])),
    (f"{HM}<|channel|>analysis<|message|>, so{NEXT}<|channel|>final<|message|>a", F, ("hm, so", "a", [])),
    # no calls
    ("<|channel|>commentary to=functions.f<|message|>{}<|call|>", {}, ("", "{}", [])),
    ("<|channel|>commentary to=python<|message|>1<|call|>", F, ("", "1", [])),
    ("<|channel|>analysis to=python code<|message|>1<|call|>", F, ("1", "", [])),
    ("<|channel|>commentary to=functions.<|message|>{}<|call|>", F, ("", "{}", [])),
    (f"{HM}<|channel|>final<|message|>a", {"reasoning": False}, ("", "hma", [])),
    # malformed
    ("Hello <|there|>", F, ("", "Hello <|there|>", [])),
    ("Hello<|end|> again<|return|>", F, ("", "Hello again", [])),
    ("to the moon", F, ("", "to the moon", [])),
    ("<|channel|>comment<|message|>a<|end|>", F, ("", "a", [])),
    ("<|channel|><|message|>a", F, ("", "a", [])),
    ("<|message|>a<|message|>b<|constrain|>c", F, ("", "abc", [])),
    ("<|channel|>final Hello there, how are you?<|end|>", F, ("", "final Hello there, how are you?", [])),
    ("<|channel|>final, or<|end|>a", F, ("", "final, ora", [])),
    (f"<|channel|>{'a' * 500}<|message|>b", F, ("", "a" * 500 + "b", [])),
    ("<|channel|>analysis<|message|>hm<|channel|>final<|message|>a", F, ("hm", "a", [])),
    ("<|channel|>analysis<|message|>hm<|start|>assistant<|channel|>final<|message|>a", F, ("hm", "a", [])),
    (f"{HM} a b<|end|><|constrain|>", F, ("hm", " a b", [])),
    (f"{HM}<|start|>functions.f to=assistant<|channel|>commentary<|message|>7", F, ("hm", "7", [])),
    (f"{HM}<|start|>user<|message|>7", F, ("hm", "7", [])),
    ("<|end|><|call|><|return|><|start|><|start|>", F, ("", "", [])),
    # cut by max_tokens in a header
    *((f"{HM}{header}", F, ("hm", "", [])) for header in (" t", " to=functions.f", " to=functions.f ", "<|channel|>")),
    *(
        (f"{HM}<|channel|>{header}", F, ("hm", "", []))
        for header in ("fin", "commentary to=", "commentary to=functions.f ", "commentary to=f <|constrain|>js")
    ),
    (HM.removesuffix("assistant") + "assis", F, ("hm", "", [])),
    # other special tokens
    ("a<|endoftext|>b<|other|>", {"skipped": ["<|endoftext|>", "<|end|>"]}, ("", "ab<|other|>", [])),
    ("<|channel|>fi<|pad|>nal<|message|>a", {"skipped": ["<|pad|>"]}, ("", "a", [])),
]


def parse(text: str, cuts: list[int], prompt: str = PROMPT, **options: Any) -> Expected:
    parser = HarmonyParser(prompt, **options)
    parts = [part for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) for part in parser.push(text[a:b])]
    parts += parser.finish()
    merged = merge_parts(parts)
    assert parser.num_calls == len(merged[2])
    return merged


@pytest.mark.parametrize("number", range(len(CASES)))
def test_parts_do_not_depend_on_the_cuts(number: int) -> None:
    text, options, expected = CASES[number]
    rng = random.Random(number)
    ways = [[], list(range(1, len(text))), *([cut] for cut in range(1, len(text)))]
    ways += [sorted(rng.sample(range(1, len(text)), min(4, len(text) - 1))) for _ in range(20)]
    for cuts in ways:
        assert parse(text, cuts, **options) == expected


@pytest.mark.parametrize("seed", range(200))
def test_no_output_fails_or_shows_a_marker(seed: int) -> None:
    """The pieces of outputs in any order, cut anywhere."""
    rng = random.Random(seed)
    pieces = [*sorted(MARKERS), "assistant", "analysis", "final", "commentary", " to=functions.f", " to=", " ", "{}"]
    pieces += ["json", "Hello", "<|", "|>", "<", "\n"]
    text = "".join(rng.choices(pieces, k=40))
    results = [parse(text, [], **F)]
    results += [parse(text, sorted(rng.sample(range(1, len(text)), 9)), **F) for _ in range(10)]
    results.append(parse(text, list(range(1, len(text))), **F))
    assert all(result == results[0] for result in results)
    shown = "".join([*results[0][:2], *(a for _, a in results[0][2])])
    assert not any(marker in shown for marker in MARKERS)


def test_the_prompt_may_open_a_message() -> None:
    for channel, expected in (("final", ("", "b", [])), ("analysis", ("b", "", []))):
        prompt = f"{PROMPT}<|channel|>{channel}<|message|>a"
        assert parse("b<|end|>", [], prompt) == expected
        assert HarmonyParser(prompt).in_reasoning == (channel == "analysis")
    assert parse("commentary json<|message|>1", [], f"{PROMPT} to=functions.f<|channel|>", **F)[2] == [("f", "1")]
    assert parse("Yes", [], "no markers") == ("", "Yes", [])


def test_parts_stream_without_delay() -> None:
    parser = HarmonyParser(PROMPT, tool_names=["f"])
    assert parser.push("<|channel|>analysis") == [] and not parser.in_reasoning
    assert parser.push("<|message|>") == [] and parser.in_reasoning
    assert parser.push("a <") == [OutputPart("reasoning", "a ")]
    assert parser.push("b") == [OutputPart("reasoning", "<b")]
    assert parser.push(f"{NEXT} to=functions.f<|channel|>commentary json<|message|>") == [
        OutputPart("call", "", 0, "f")
    ]
    assert not parser.in_reasoning
    assert parser.push('{"a"') == [OutputPart("call", '{"a"')] and parser.num_calls == 0
    assert parser.push("<|call|>") == [] and parser.num_calls == 1
    assert HarmonyParser(PROMPT).push("Yes") == [OutputPart("content", "Yes")]


def call(name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": {}}}


def test_messages_for_the_template() -> None:
    user = {"role": "user", "content": "Hi"}
    first = {"role": "assistant", "content": "Wait.", "reasoning_content": "hm", "tool_calls": [call("f"), call("g")]}
    f, g, h = ({"role": "tool", "content": name, "tool_call_id": name} for name in "fgh")
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": "ok"}
    messages = [user, first, g, f, h, answer, user]
    before = repr(messages)
    thinking = {**first, "content": "", "thinking": "hm\n\nWait.", "tool_calls": [call("f")]}
    second = {"role": "assistant", "content": "", "tool_calls": [call("g")]}
    assert harmony_messages(messages) == [user, thinking, f, second, g, h, {**answer, "thinking": "ok"}, user]
    assert repr(messages) == before
    alone = {"role": "assistant", "content": "Wait.", "tool_calls": [call("f")]}
    assert harmony_messages([user, alone, h]) == [user, alone, h]
