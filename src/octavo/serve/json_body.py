"""JSON as a request may have it, and nothing else: what other readers let through here ends with an answer.

Refused: another encoding than UTF-8, a key that stands twice, NaN and infinities (1e999 too), half a surrogate pair,
and more than `MAX_DEPTH` levels. The common case costs one pass of the C parser; only when that has met something
suspicious is the value walked, to name the place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from octavo.serve.problems import bad
from octavo.text.tools import is_unicode

MAX_DEPTH = 64
_SURROGATE = re.compile(rb"\\u[dD][89abAB]|\\u[dD][c-fC-F]")
_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(c for c in range(256) if c not in b"[]{}")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


class _NotFinite:
    """In the place of a number that JSON does not have."""


def parse(body: bytes) -> dict[str, Any]:
    """The object that a body holds. Raises `Problem` 400."""
    value = parse_value(body)
    if not isinstance(value, dict):
        raise bad("invalid_type", f"the body must be a JSON object, not {_kind(value)}")
    return value


def parse_value(body: bytes) -> Any:
    if not body.strip():
        raise bad("invalid_json", "the body is empty; send a JSON object")
    if json.detect_encoding(body) != "utf-8":  # a BOM counts as another encoding
        raise bad("invalid_encoding", "the body is not plain UTF-8; send it without a byte order mark")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise bad("invalid_encoding", f"the body is not UTF-8: byte {error.start} cannot stand there") from None
    suspicious = False

    def not_finite(_: str) -> Any:
        nonlocal suspicious
        suspicious = True
        return _NotFinite

    def number(digits: str) -> Any:
        value = float(digits)
        return value if math.isfinite(value) else not_finite(digits)

    is_too_deep = too_deep(body)
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=not_finite, parse_float=number)
    except RecursionError:
        is_too_deep = True
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise bad("invalid_json", f"the body is not JSON: {error.msg} at {where}") from None
    except ValueError:  # an integer of thousands of digits
        raise bad("invalid_json", "the body has a number with too many digits") from None
    if is_too_deep:
        raise bad("too_deep", f"the body nests deeper than {MAX_DEPTH} levels")
    if suspicious or _SURROGATE.search(body):
        for path, part in _walk(value):
            if part is _NotFinite:
                raise bad("invalid_json", f"{path} is not a finite number, which JSON does not have", path or None)
            if isinstance(part, str) and not is_unicode(part):
                raise bad("invalid_unicode", f"{path} holds half a surrogate pair, which is no character", path or None)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise bad("duplicate_key", f"the key {key!r} stands twice in one object", key)
            seen.add(key)
    return value


def too_deep(body: bytes) -> bool:
    """Whether it nests deeper than `MAX_DEPTH` levels, read without any recursion."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return False
    brackets = _STRING.sub(b"", body).translate(_TO_BRACKETS, _NO_BRACKETS)
    for _ in range(MAX_DEPTH):  # each round takes off the innermost level
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every key and every value in it, with its path: `messages[0].content`. The depth is known to be bounded."""
    yield path, value
    if isinstance(value, dict):
        for key, part in value.items():
            here = f"{path}.{key}" if path else key
            yield here, key
            yield from _walk(part, here)
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _walk(part, f"{path}[{i}]")


def _kind(value: Any) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
