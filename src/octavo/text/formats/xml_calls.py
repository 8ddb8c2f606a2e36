"""Tool calls as Qwen3-Coder and Qwen3.5 write them, turned into JSON arguments as they arrive.

    <tool_call>
    <function=weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>

The line breaks around a value are dropped. The tool's JSON schema decides whether the value is text or JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.text.output_parser import CALL, END_CALL, OutputParser, OutputPart, quoted

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
MAX_NAME_CHARS = 256
_NAME = re.compile(rf"<(?:function|parameter)=([^<>\n]{{1,{MAX_NAME_CHARS}}})>")
_OPEN_NAME = re.compile(rf"[^<>\n]{{0,{MAX_NAME_CHARS}}}")
_VALUE_ENDS = (f"\n{END_PARAMETER}", END_PARAMETER, f"\n{PARAMETER}", f"\n{END_FUNCTION}\n{END_CALL}")
"""A model may forget the end tag; the last two are enough then. The longest that matches comes first."""
_VALUE_END = re.compile("|".join(_VALUE_ENDS))
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
_TYPE_NAMES = {*_TYPES.values(), "null"}
_WORDS = {
    "true": ("boolean", "true"),
    "false": ("boolean", "false"),
    "null": ("null", "null"),
    "none": ("null", "null"),
}
"""Qwen's template shows earlier calls with Python's spellings."""


class XmlCallParser(OutputParser):
    """`OutputParser` for these calls. `tools`: the tools of the request, as the client sent them."""

    def __init__(self, *, tools: Sequence[Mapping[str, Any]], **options: Any) -> None:
        super().__init__(tools="hermes", **options)  # the tags around a call are the same
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self._known_types: dict[tuple[str, str], set[str]] = {}
        self._name = ""  # of the current call
        self._num_parameters = 0
        self._types: set[str] = set()  # of the current value; empty: text

    def finish(self) -> list[OutputPart]:
        """End of the output. The arguments of an incomplete call stay incomplete JSON, so that no client runs it."""
        parts = self._parse()
        if self._step in (self._parameters, self._value, self._after_function):
            self._buffer = ""
        return parts + super().finish()

    # -- states --------------------------------------------------------------------------------------------------------

    def _call_head(self) -> bool:
        start = self._skip_blank()
        found = _NAME.match(self._buffer, start)
        if found is not None and self._buffer.startswith(FUNCTION, start):
            self._parts.append(OutputPart("call", "", self.num_calls, found[1]))
            self._name, self._num_parameters, self._prefix = found[1], 0, ""
            self._take(found.end())
            return self._enter(self._parameters)
        if self._may_be_name(FUNCTION, start):
            return False
        self._emit("content", self._prefix + CALL)
        return self._enter(self._content)

    def _parameters(self) -> bool:
        """Before a parameter or the end of the call. Other text is dropped."""
        start = self._skip_blank()
        found = _NAME.match(self._buffer, start)
        if found is not None and self._buffer.startswith(PARAMETER, start):
            if found.end() == len(self._buffer):  # a line break may follow
                return False
            self._take(found.end() + (self._buffer[found.end()] == "\n"))
            self._types = self._types_of(found[1])
            before = ", " if self._num_parameters else "{"
            self._argument(f"{before}{quoted(found[1])}: {'' if self._types else chr(34)}")
            self._num_parameters += 1
            return self._enter(self._value)
        for end in (END_FUNCTION, END_CALL):
            if self._buffer.startswith(end, start):
                self._take(start + len(end))
                self._argument("}" if self._num_parameters else "{}")
                self.num_calls += 1
                return self._enter(self._after_function)
        if self._may_be_name(PARAMETER, start) or any(self._may_be_prefix(e, start) for e in (END_FUNCTION, END_CALL)):
            return False
        following = self._buffer.find("<", start + 1)
        self._take(None if following < 0 else following)
        return following >= 0

    def _value(self) -> bool:
        found = _VALUE_END.search(self._buffer, max(self._at, self._searched - max(map(len, _VALUE_ENDS))))
        if found is None:
            certain = min(map(self._certain_end, _VALUE_ENDS))
            if self._types:
                self._searched = certain
            else:
                self._argument(quoted(self._take(certain))[1:-1])
            return False
        value = self._take(found.start())
        self._argument(_to_json(value, self._types) if self._types else quoted(value)[1:])
        if found[0].endswith(END_PARAMETER):
            self._take(found.end())
        return self._enter(self._parameters)

    def _after_function(self) -> bool:
        start = self._skip_blank()
        if self._buffer.startswith(END_CALL, start):
            self._take(start + len(END_CALL))
        elif self._buffer.startswith(FUNCTION, start) and _NAME.match(self._buffer, start) is not None:
            return self._enter(self._call_head)
        elif self._may_be_prefix(END_CALL, start) or self._may_be_name(FUNCTION, start):
            return False
        return self._enter(self._content)

    def _may_be_name(self, opening: str, at: int) -> bool:
        """True if the text from `at` may become a tag with a name."""
        head = self._buffer[at : at + len(opening) + MAX_NAME_CHARS + 1]
        is_open = head.startswith(opening) and _OPEN_NAME.fullmatch(head, len(opening)) is not None
        return is_open or opening.startswith(head)

    def _types_of(self, parameter: str) -> set[str]:
        if (key := (self._name, parameter)) not in self._known_types:
            schema = self._schemas.get(self._name, {})
            properties = schema.get("properties")
            types = types_of(properties.get(parameter) if isinstance(properties, Mapping) else None, schema)
            self._known_types[key] = types if types - {"string"} else set()
        return self._known_types[key]

    def _argument(self, text: str) -> None:
        if text:
            self._parts.append(OutputPart("call", text, self.num_calls))


def _to_json(text: str, types: set[str]) -> str:
    """The JSON of a value that may be of these types. What is not JSON, or text by its type, is a string."""
    word = text.strip()
    kind, literal = _WORDS.get(word.lower(), ("", ""))
    if kind in types:
        return literal
    try:
        value = json.loads(word, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return quoted(text)
    kind = _TYPES.get(type(value), "null")
    fits = kind in types or (kind == "integer" and "number" in types)
    return quoted(text) if "string" in types and (kind == "string" or not fits) else word


def _refuse_constant(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity, which JSON does not have


def types_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """The JSON types that a client's schema names, in any shape; empty if it names none. `root` has the definitions."""
    types: set[str] = set()
    todo, seen = [schema], set[int]()
    while todo:
        schema = todo.pop()
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        given = schema.get("type")
        types |= {t for t in (given if isinstance(given, list) else [given]) if isinstance(t, str)} & _TYPE_NAMES
        for key in ("anyOf", "oneOf", "allOf"):
            todo += _list(schema.get(key))
        values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else ())]
        types |= {_TYPES.get(type(value), "null") for value in values}
        if isinstance(reference := schema.get("$ref"), str):
            target: Any = root
            for key in reference.removeprefix("#/").split("/"):
                target = target.get(key) if isinstance(target, Mapping) else None
            todo.append(target)
    return types


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
