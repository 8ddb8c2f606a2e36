from __future__ import annotations

from typing import Any

import pytest

from octavo.serve.openai.strict_schema import close_objects

INNER = {"properties": {"x": {"type": "integer"}}}


def test_objects_that_name_their_properties_have_no_others() -> None:
    schema = {
        "$defs": {"inner": INNER},
        "properties": {
            "a": {"$ref": "#/$defs/inner"},
            "b": {"items": INNER},
            "c": {"anyOf": [INNER, {"type": "null"}]},
        },
    }
    shut = INNER | {"additionalProperties": False}
    assert close_objects(schema) == {
        "$defs": {"inner": shut},
        "properties": {"a": {"$ref": "#/$defs/inner"}, "b": {"items": shut}, "c": {"anyOf": [shut, {"type": "null"}]}},
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
def test_a_schema_that_says_it_itself_or_is_put_together_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert close_objects(schema) == schema


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    assert close_objects({"properties": {"allOf": INNER}})["properties"]["allOf"]["additionalProperties"] is False
