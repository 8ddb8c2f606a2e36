"""Limits of request bodies, and `--max-json-whitespace`: the white space between two tokens of constrained JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.errors import ParameterError
from octavo.frontend.input_processor import InputProcessor
from octavo.params.sampling_params import SamplingParams
from octavo.serve.args import ServeArgs
from octavo.serve.openai.errors import ApiError
from octavo.serve.openai.request import RequestParser
from octavo.serve.openai.schema import ChatRequest, CompletionRequest
from octavo.text.tokenizer import Tokenizer
from tests.text.samples import train_byte_level

SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
BODIES: dict[str, dict[str, Any]] = {
    "structured_outputs": {"prompt": "x", "structured_outputs": {"json": SCHEMA}},
    "response_format": {
        "prompt": "x",
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}},
    },
    "a forced tool": {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        "tool_choice": "required",
    },
}


@pytest.fixture(scope="module")
def prompts() -> Iterator[InputProcessor]:
    prompts = InputProcessor(Tokenizer(train_byte_level()))
    yield prompts
    prompts.close()


def takes(prompts: InputProcessor, max_whitespace: int, body: dict[str, Any], text: str) -> bool:
    """Whether a server with that option allows the model to generate the text."""
    parser = RequestParser(("tiny",), SamplingParams(), has_tools=True, max_json_whitespace=max_whitespace)
    raw = json.dumps(body).encode()
    if "prompt" in body:
        request = parser.parse_completion(parser.decode(raw, CompletionRequest))
    else:
        request = parser.parse_chat(parser.decode(raw, ChatRequest))
    grammar = prompts.compile_grammar(request.params)
    assert grammar is not None
    matcher = grammar.start()
    matcher.accept_tokens(prompts.tokenizer.encode(text, add_special_tokens=False, parse_special=False))
    return matcher.is_accepting and not matcher.error


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize(
    ("max_whitespace", "allowed", "refused"),
    [(0, [0], [1, 12]), (12, [0, 12], [13]), (40, [0, 40], [41]), (-1, [0, 300], [])],
)
def test_json_whitespace_is_limited_by_the_option(
    prompts: InputProcessor, body: dict[str, Any], max_whitespace: int, allowed: list[int], refused: list[int]
) -> None:
    value = {"a": 1} if "prompt" in body else {"name": "f", "arguments": {"a": 1}}
    text = json.dumps(value, separators=(",", ":"))
    for num_spaces in allowed + refused:
        spaced = text.replace('"a":', '"a":' + " " * num_spaces)
        assert takes(prompts, max_whitespace, body, spaced) == (num_spaces in allowed), num_spaces


def test_a_requests_own_whitespace_setting_wins(prompts: InputProcessor) -> None:
    for max_whitespace in (0, 40, -1):
        body = {"prompt": "x", "structured_outputs": {"json": SCHEMA, "whitespace_pattern": " {2}"}}
        assert takes(prompts, max_whitespace, body, '{  "a":  1  }') and not takes(
            prompts, max_whitespace, body, '{"a":   1}'
        )
        body = {"prompt": "x", "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
        assert takes(prompts, max_whitespace, body, '{"a":1}') and not takes(prompts, max_whitespace, body, '{"a": 1}')


def test_option_range_is_checked() -> None:
    for max_whitespace in (-1, 0, 40, 1000):
        assert ServeArgs(max_json_whitespace=max_whitespace).max_json_whitespace == max_whitespace
    for invalid in (-2, 1001):
        with pytest.raises(ParameterError, match="max_json_whitespace"):
            ServeArgs(max_json_whitespace=invalid)


def test_arguments_of_all_tool_calls_are_bounded_together() -> None:
    parser = RequestParser(("tiny",), SamplingParams())

    def parse(num_calls: int, size: int) -> None:
        call = {"function": {"name": "f", "arguments": json.dumps({"a": "x" * size})}}
        raw = json.dumps({"messages": [{"role": "assistant", "tool_calls": [call] * num_calls}]}).encode()
        parser.parse_chat(parser.decode(raw, ChatRequest))

    parse(4, 250_000)
    for num_calls, size in ((4, 270_000), (4097, 1)):
        with pytest.raises(ApiError) as caught:
            parse(num_calls, size)
        assert (caught.value.code, caught.value.param) == ("array_above_max_length", "messages")


def test_parts_of_any_shape_are_bounded() -> None:
    parser = RequestParser(("tiny",), SamplingParams())
    for field, code in (("tools", "invalid_value"), ("chat_template_kwargs", "invalid_value")):
        raw = json.dumps({"messages": [{"role": "user", "content": "a"}], field: {"a": "x" * (1 << 20)}}).encode()
        with pytest.raises(ApiError, match="the limit is 1048576") as caught:
            parser.parse_chat(parser.decode(raw, ChatRequest))
        assert (caught.value.code, caught.value.param) == (code, field)
