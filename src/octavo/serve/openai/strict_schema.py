"""JSON schemas of tools and strict answers: the objects in them are closed, as OpenAI's strict mode has it.

By JSON schema's own rules an object may have any further properties. A model that is kept to such a schema may invent
one after the other until its tokens end, and what is cut off is no JSON. Clients do not say it of tools themselves:
LangChain takes "additionalProperties" out of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords that hold schemas by name; the next one or a list of them."""
NESTED = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf")


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, where objects that name their properties have no others unless it says something of those.

    One that puts objects together from parts stays as it is: closed parts exclude each other.
    """
    if any(map(_composes, _walk(schema))):
        return dict(schema)
    return _closed(schema)


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(schema)
    for name in NAMED:
        if isinstance(parts := schema.get(name), Mapping):
            made[name] = {key: _closed(part) if isinstance(part, Mapping) else part for key, part in parts.items()}
    for name in NESTED:
        if isinstance(part := schema.get(name), Mapping):
            made[name] = _closed(part)
        elif isinstance(part, list):
            made[name] = [_closed(p) if isinstance(p, Mapping) else p for p in part]
    if isinstance(schema.get("properties"), Mapping) and "patternProperties" not in schema:
        made.setdefault("additionalProperties", False)
    return made


def _composes(schema: Mapping[str, Any]) -> bool:
    parts = schema.get("allOf")
    if "unevaluatedProperties" in schema or (isinstance(parts, list) and len(parts) > 1):
        return True
    return "properties" in schema and not schema.keys().isdisjoint(("allOf", "anyOf", "oneOf", "$ref", "if", "not"))


def _walk(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every schema in it. A body's depth is bounded."""
    yield schema
    for name in NAMED:
        if isinstance(parts := schema.get(name), Mapping):
            for part in parts.values():
                if isinstance(part, Mapping):
                    yield from _walk(part)
    for name in NESTED:
        part = schema.get(name)
        for p in part if isinstance(part, list) else (part,):
            if isinstance(p, Mapping):
                yield from _walk(p)
