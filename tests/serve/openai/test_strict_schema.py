"""Strict mode closes objects, and leaves schemas alone that closing would change in meaning."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.serve.openai.strict_schema import close_objects

INNER = {"properties": {"x": {"type": "integer"}}}


def test_objects_with_listed_properties_are_closed() -> None:
    schema = {
        "$defs": {"inner": INNER},
        "properties": {
            "a": {"$ref": "#/$defs/inner"},
            "b": {"items": INNER},
            "c": {"anyOf": [INNER, {"type": "null"}]},
        },
    }
    closed = INNER | {"additionalProperties": False}
    assert close_objects(schema) == {
        "$defs": {"inner": closed},
        "properties": {
            "a": {"$ref": "#/$defs/inner"},
            "b": {"items": closed},
            "c": {"anyOf": [closed, {"type": "null"}]},
        },
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"properties": {}, "additionalProperties": True},
        {"properties": {}, "additionalProperties": {"type": "integer"}},
        {"properties": {}, "patternProperties": {"^x": {}}},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]},
        {"properties": {"a": {}}, "unevaluatedProperties": False},
        {"allOf": 7, "properties": 3, "items": [1]},
    ],
)
def test_explicit_and_composed_schemas_are_unchanged(schema: dict[str, Any]) -> None:
    assert close_objects(schema) == schema


def test_a_property_may_be_named_like_a_keyword() -> None:
    assert close_objects({"properties": {"allOf": INNER}})["properties"]["allOf"]["additionalProperties"] is False
