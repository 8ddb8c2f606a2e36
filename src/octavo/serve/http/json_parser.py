"""A strict JSON parser for request bodies.

It refuses encodings other than UTF-8, duplicate keys, NaN and infinities (also 1e999), integers of more than
`MAX_INT_DIGITS` digits, lone surrogates, and more than `MAX_DEPTH` levels. A valid body takes one pass of the C parser.
The value is walked in Python only after a suspicious token, to report its path. Every pass is linear in the body's
length for every input (tests/serve/test_linear.py).
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
"""Keys of one object. No field needs nearly as many, and each takes a hundred bytes of memory."""
MAX_PARTS = 1 << 18
"""Objects and arrays of a body. Two bytes of JSON make one, which takes sixty bytes of memory."""
_SURROGATE = re.compile(rb"\\u[dD][89abAB]|\\u[dD][c-fC-F]")
_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(c for c in range(256) if c not in b"[]{}")
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""A string, also an unterminated one: else the search would start again at each of its quotes, in quadratic time."""
MAX_INT_DIGITS = 4300
"""Python parses longer integers in quadratic time. No field needs nearly as many digits."""
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")


class _NonFinite:
    """Marks NaN, an infinity, or a float that overflows."""


class _LongInteger:
    """Marks an integer of more than `MAX_INT_DIGITS` digits."""


def parse(body: bytes) -> dict[str, Any]:
    """The body's JSON object. Raises `ApiError` 400."""
    value = parse_value(body)
    if not isinstance(value, dict):
        raise bad_request("invalid_type", f"the body must be a JSON object, not {_type_name(value)}")
    return value


def parse_value(body: bytes) -> Any:
    if not body.strip():
        raise bad_request("invalid_json", "the body is empty; send a JSON object")
    if json.detect_encoding(body) != "utf-8":  # a BOM counts as another encoding
        raise bad_request("invalid_encoding", "the body is not UTF-8, or has a byte order mark; send plain UTF-8")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise bad_request("invalid_encoding", f"the body is not UTF-8: byte {error.start} is invalid") from None
    suspicious = _SURROGATE.search(body) is not None

    def mark_non_finite(_: str) -> Any:
        nonlocal suspicious
        suspicious = True
        return _NonFinite

    def parse_float(digits: str) -> Any:
        value = float(digits)
        return value if math.isfinite(value) else mark_non_finite(digits)

    def parse_integer(digits: str) -> Any:
        return int(digits) if len(digits) <= MAX_INT_DIGITS else _LongInteger

    may_be_long = b"0" * (MAX_INT_DIGITS + 1) in body.translate(_DIGITS_TO_ZERO)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=mark_non_finite,
            parse_float=parse_float,
            parse_int=parse_integer if may_be_long else None,
        )
        brackets = _brackets(body)
        is_too_deep = _is_too_deep(brackets)
    except RecursionError:
        is_too_deep = True
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise bad_request("invalid_json", f"the body is not JSON: {error.msg} at {where}") from None
    if is_too_deep:
        raise bad_request("too_deep", f"the body is nested deeper than {MAX_DEPTH} levels")
    if (num_parts := len(brackets) // 2) > MAX_PARTS:
        raise bad_request("too_many_parts", f"the body has {num_parts} objects and arrays; the limit is {MAX_PARTS}")
    if suspicious or may_be_long:
        keys: list[str | int] = []
        if (invalid := _find_invalid(value, keys)) is not None:
            raise _invalid_part_error(invalid, _path(keys))
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise bad_request("too_many_keys", f"an object has {len(pairs)} keys; the limit is {MAX_KEYS}")
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise bad_request("duplicate_key", f"the key {key!r} appears twice in one object", key)
            seen.add(key)
    return value


def too_deep(body: bytes) -> bool:
    """Whether JSON text is nested deeper than `MAX_DEPTH` levels. Does not recurse."""
    return _is_too_deep(_brackets(body))


def _brackets(body: bytes) -> bytes:
    """The brackets outside of strings, braces mapped to square ones; empty if there are too few to be too deep."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return b""
    return _STRING.sub(b"", body).translate(_TO_BRACKETS, _NO_BRACKETS)


def _is_too_deep(brackets: bytes) -> bool:
    for _ in range(MAX_DEPTH):  # each round removes the innermost level
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _find_invalid(value: Any, keys: list[str | int]) -> Any:
    """The first invalid part of a value, with its path in `keys`; None if all are valid. The depth is bounded."""
    if value is _NonFinite or value is _LongInteger or (isinstance(value, str) and not is_unicode(value)):
        return value
    parts: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        keys.append(key)
        invalid = key if isinstance(key, str) and not is_unicode(key) else _find_invalid(part, keys)
        if invalid is not None:
            return invalid
        keys.pop()
    return None


def _invalid_part_error(invalid: Any, path: str) -> ApiError:
    if invalid is _LongInteger:
        text = f"{path} has more than {MAX_INT_DIGITS} digits; send a smaller integer"
        return bad_request("integer_out_of_range", text, path or None)
    if invalid is _NonFinite:
        return bad_request("invalid_json", f"{path} is not a finite number", path or None)
    return bad_request("invalid_unicode", f"{path} contains a lone surrogate", path or None)


def _path(keys: Sequence[str | int]) -> str:
    """A path such as `messages[0].content`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def _type_name(value: Any) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
