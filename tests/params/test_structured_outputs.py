"""Validation of `StructuredOutputsParams`, before a grammar is compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo import BeamSearchParams, SamplingParams, StructuredOutputsParams
from octavo.errors import ParameterError, UnknownOptionError
from octavo.params.structured_outputs import MAX_CHARS, MAX_CHOICES


def deep(depth: int) -> Any:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing": ({}, "invalid_value", "it has none"),
    "two": ({"regex": "a", "json_object": True}, "invalid_value", "it has regex and json_object"),
    "json_object false": ({"json_object": False}, "invalid_value", "it has none"),
    "a schema that is a list": ({"json": "[1]"}, "invalid_json_schema", "not a JSON object"),
    "a schema that is no JSON": ({"json": "{'a'"}, "invalid_json_schema", "Expecting"),
    "a schema with a set": ({"json": {"enum": {1}}}, "invalid_json_schema", "serializable"),
    "a schema with NaN": ({"json": {"minimum": float("nan")}}, "invalid_json_schema", "not JSON compliant"),
    "a deep schema": ({"json": deep(10_000)}, "invalid_json_schema", "nested too deeply"),
    "a deep schema as text": ({"json": '{"a":' * 100_000 + "1" + "}" * 100_000}, "invalid_json_schema", ""),
    "a long schema": (
        {"json": {"enum": ["x" * MAX_CHARS]}},
        "invalid_json_schema",
        f"at most {MAX_CHARS}",
    ),
    "a schema that is a number": ({"json": 7}, "invalid_json_schema", "not a JSON object"),
    "an empty regex": ({"regex": ""}, "invalid_grammar", "1 to"),
    "a long regex": (
        {"regex": "a" * (MAX_CHARS + 1)},
        "invalid_grammar",
        f"it is {MAX_CHARS + 1} long",
    ),
    "a regex of bytes": ({"regex": b"a"}, "invalid_grammar", "b'a'"),
    "half a character": ({"regex": "\ud800"}, "invalid_grammar", "Unicode"),
    "an empty grammar": ({"grammar": ""}, "invalid_grammar", "1 to"),
    "no choice": ({"choice": []}, "invalid_grammar", "non-empty"),
    "an empty choice": ({"choice": ["a", ""]}, "invalid_grammar", "non-empty"),
    "a choice that is a string": ({"choice": "abc"}, "invalid_grammar", "a list"),
    "many choices": ({"choice": ["a"] * (MAX_CHOICES + 1)}, "invalid_grammar", f"at most {MAX_CHOICES}"),
    "white space in a regex": ({"regex": "a", "whitespace_pattern": " "}, "invalid_value", "no effect on regex"),
    "a flag that is a number": ({"json_object": 1}, "invalid_type", "True or False"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_constraint_is_refused_with_the_reason(name: str) -> None:
    given, code, text = WRONG[name]
    for make in (StructuredOutputsParams, lambda **fields: SamplingParams(structured_outputs=fields)):
        with pytest.raises(ParameterError) as caught:
            make(**given)
        assert caught.value.code == code and text in str(caught.value)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
        assert caught.value.param in ("structured_outputs", "json_object")


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(UnknownOptionError, match="'jsn'; did you mean 'json'"):
        SamplingParams(structured_outputs={"jsn": {}})
    with pytest.raises(ParameterError, match="a dict of its fields"):
        SamplingParams(structured_outputs="json")  # type: ignore[arg-type]


def test_a_pydantic_class_is_its_schema() -> None:
    class Answer:  # as pydantic.BaseModel
        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            return {"type": "object", "title": "Answer"}

    assert StructuredOutputsParams(json=Answer).json == '{"type": "object", "title": "Answer"}'


def test_a_dict_of_fields_is_converted() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"é": {"const": 1}}}
    for params in (
        SamplingParams(structured_outputs={"json": schema}),
        BeamSearchParams(beam_width=2, max_tokens=3, structured_outputs={"json": schema}).sampling_params,
    ):
        made = params.structured_outputs
        assert made == StructuredOutputsParams(json=json.dumps(schema)) and made is not None
        assert made.kind == "json" and json.loads(made.schema) == schema
    schema["type"] = "array"  # has no effect any more
    assert json.loads(made.schema)["type"] == "object"
    assert SamplingParams().structured_outputs is None
    assert json.loads(StructuredOutputsParams(json_object=True).schema) == {"type": "object"}
    assert StructuredOutputsParams(json={}).kind == "json"
    # null is the same as absent.
    assert StructuredOutputsParams(json={}, json_object=None) == StructuredOutputsParams(json={})  # type: ignore[arg-type]
    assert StructuredOutputsParams(choice=["b", "a", "b"]).choice == ("b", "a")
