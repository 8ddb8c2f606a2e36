"""OpenAI's strict mode for JSON schemas: objects get "additionalProperties": false.

JSON Schema allows additional properties by default. A model under such a schema may generate properties until
max_tokens cuts the JSON off. Clients do not forbid them in tool schemas: LangChain removes "additionalProperties".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SCHEMA_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value maps names to schemas."""
SCHEMA_KEYWORDS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf")
"""Keywords whose value is a schema or a list of schemas."""


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with objects closed that list their properties and do not set additionalProperties.

    A schema that composes objects (allOf, $ref beside properties, ...) is returned unchanged: closed parts would
    contradict each other.
    """
    if any(map(_has_composition, _subschemas(schema))):
        return dict(schema)
    return _close(schema)


def _close(schema: Mapping[str, Any]) -> dict[str, Any]:
    closed = dict(schema)
    for name in SCHEMA_MAP_KEYWORDS:
        if isinstance(parts := schema.get(name), Mapping):
            closed[name] = {key: _close(part) if isinstance(part, Mapping) else part for key, part in parts.items()}
    for name in SCHEMA_KEYWORDS:
        if isinstance(part := schema.get(name), Mapping):
            closed[name] = _close(part)
        elif isinstance(part, list):
            closed[name] = [_close(p) if isinstance(p, Mapping) else p for p in part]
    if isinstance(schema.get("properties"), Mapping) and "patternProperties" not in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def _has_composition(schema: Mapping[str, Any]) -> bool:
    parts = schema.get("allOf")
    if "unevaluatedProperties" in schema or (isinstance(parts, list) and len(parts) > 1):
        return True
    return "properties" in schema and not schema.keys().isdisjoint(("allOf", "anyOf", "oneOf", "$ref", "if", "not"))


def _subschemas(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields every subschema. The recursion is bounded by the body's maximal depth."""
    yield schema
    for name in SCHEMA_MAP_KEYWORDS:
        if isinstance(parts := schema.get(name), Mapping):
            for part in parts.values():
                if isinstance(part, Mapping):
                    yield from _subschemas(part)
    for name in SCHEMA_KEYWORDS:
        part = schema.get(name)
        for p in part if isinstance(part, list) else (part,):
            if isinstance(p, Mapping):
                yield from _subschemas(p)
