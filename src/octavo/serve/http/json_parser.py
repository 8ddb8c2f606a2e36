"""JSON as a request may have it, and nothing else: what other readers let through here ends with an answer.

Refused: another encoding than UTF-8, a key that stands twice, NaN and infinities (1e999 too), integers of more than
`MAX_INT_DIGITS` digits, half a surrogate pair, and more than `MAX_DEPTH` levels. The common case costs one pass of the
C parser; only when that has met something suspicious is the value walked, to name the place. Every pass is linear in
the body's length, whatever the body holds (tests/serve/test_linear.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from octavo.serve.openai.errors import ApiError, bad_request
from octavo.text.output_parser import is_unicode

MAX_DEPTH = 64
MAX_KEYS = 1 << 17
"""Of one object. No field takes nearly as many, and each takes a hundred bytes."""
MAX_PARTS = 1 << 18
"""Objects and arrays of a body: two bytes of it make one, which takes sixty."""
_SURROGATE = re.compile(rb"\\u[dD][89abAB]|\\u[dD][c-fC-F]")
_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(c for c in range(256) if c not in b"[]{}")
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""Also one without an end: it is matched once, and not searched for an end from each of its quotes."""
MAX_INT_DIGITS = 4300
"""Python reads an integer of more digits only in quadratic time; no field takes nearly as many."""
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")


class _NotFinite:
    """In the place of a number that JSON does not have."""


class _TooLong:
    """In the place of an integer of too many digits."""


def parse(body: bytes) -> dict[str, Any]:
    """The object that a body holds. Raises `ApiError` 400."""
    value = parse_value(body)
    if not isinstance(value, dict):
        raise bad_request("invalid_type", f"the body must be a JSON object, not {_kind(value)}")
    return value


def parse_value(body: bytes) -> Any:
    if not body.strip():
        raise bad_request("invalid_json", "the body is empty; send a JSON object")
    if json.detect_encoding(body) != "utf-8":  # a BOM counts as another encoding
        raise bad_request("invalid_encoding", "the body is not plain UTF-8; send it without a byte order mark")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise bad_request("invalid_encoding", f"the body is not UTF-8: byte {error.start} cannot stand there") from None
    suspicious = _SURROGATE.search(body) is not None

    def not_finite(_: str) -> Any:
        nonlocal suspicious
        suspicious = True
        return _NotFinite

    def number(digits: str) -> Any:
        value = float(digits)
        return value if math.isfinite(value) else not_finite(digits)

    def integer(digits: str) -> Any:
        return int(digits) if len(digits) <= MAX_INT_DIGITS else _TooLong

    may_be_long = b"0" * (MAX_INT_DIGITS + 1) in body.translate(_DIGITS_TO_ZERO)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=not_finite,
            parse_float=number,
            parse_int=integer if may_be_long else None,
        )
        brackets = _brackets(body)
        is_too_deep = _nests(brackets)
    except RecursionError:
        is_too_deep = True
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise bad_request("invalid_json", f"the body is not JSON: {error.msg} at {where}") from None
    if is_too_deep:
        raise bad_request("too_deep", f"the body is nested deeper than {MAX_DEPTH} levels")
    if (num_parts := len(brackets) // 2) > MAX_PARTS:
        raise bad_request(
            "too_many_parts", f"the body has {num_parts} objects and arrays, at most {MAX_PARTS} are allowed"
        )
    if suspicious or may_be_long:
        keys: list[str | int] = []
        if (wrong := _wrong_part(value, keys)) is not None:
            raise _refusal(wrong, _path(keys))
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise bad_request(
            "too_many_keys", f"an object has {len(pairs)} keys, at most {MAX_KEYS} are allowed; send fewer"
        )
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise bad_request("duplicate_key", f"the key {key!r} stands twice in one object", key)
            seen.add(key)
    return value


def too_deep(body: bytes) -> bool:
    """Whether it nests deeper than `MAX_DEPTH` levels, read without any recursion."""
    return _nests(_brackets(body))


def _brackets(body: bytes) -> bytes:
    """Those outside of strings, all of one kind; none where they are too few to matter."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return b""
    return _STRING.sub(b"", body).translate(_TO_BRACKETS, _NO_BRACKETS)


def _nests(brackets: bytes) -> bool:
    for _ in range(MAX_DEPTH):  # each round takes off the innermost level
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _wrong_part(value: Any, keys: list[str | int]) -> Any:
    """The first part of a value that no body may hold, and in `keys` the way there; None: there is none. The depth is
    known to be bounded."""
    if value is _NotFinite or value is _TooLong or (isinstance(value, str) and not is_unicode(value)):
        return value
    parts: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        keys.append(key)
        wrong = key if isinstance(key, str) and not is_unicode(key) else _wrong_part(part, keys)
        if wrong is not None:
            return wrong
        keys.pop()
    return None


def _refusal(wrong: Any, path: str) -> ApiError:
    if wrong is _TooLong:
        text = f"{path} has more than {MAX_INT_DIGITS} digits; send a smaller integer"
        return bad_request("integer_out_of_range", text, path or None)
    if wrong is _NotFinite:
        return bad_request("invalid_json", f"{path} is not a finite number, which JSON does not have", path or None)
    return bad_request("invalid_unicode", f"{path} holds half a surrogate pair, which is no character", path or None)


def _path(keys: Sequence[str | int]) -> str:
    """Such as `messages[0].content`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def _kind(value: Any) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
