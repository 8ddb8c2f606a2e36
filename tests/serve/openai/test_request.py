"""`--max-json-whitespace`: the white space allowed between two tokens of constrained JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.errors import ParameterError
from octavo.frontend.input_processor import InputProcessor
from octavo.params.sampling_params import SamplingParams
from octavo.serve.args import ServeArgs
from octavo.serve.openai.request import RequestParser
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
    request = parser.parse_completion(body) if "prompt" in body else parser.parse_chat(body)
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
