"""Reads request bodies: JSON to the types of `schema`, and msgspec's faults to OpenAI's errors.

msgspec creates no object that a type does not name. It takes linear time, and at most 150 ms for 8 MiB because brackets
are counted first (tests/serve/test_linear.py).
"""

from __future__ import annotations

import difflib
import functools
import json
import logging
import operator
import re
from typing import Any, TypeGuard, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, defstruct

from octavo.errors import cut
from octavo.serve.openai import schema
from octavo.serve.openai.errors import ApiError, bad_request
from octavo.serve.openai.schema import Body, Unread

logger = logging.getLogger("octavo.serve")
T = TypeVar("T")
B = TypeVar("B", bound=Body)

MAX_PARTS, BYTES_PER_PART = 1 << 18, 16
"""Brackets and braces of a body, also in its texts: at most so many, or one for so many bytes."""
MAX_PART_BYTES = 1 << 20
MAX_DEPTH = 64
"""Nesting of parts of any shape: what uses them recurses."""

UNSUPPORTED = {
    "suffix": "text insertion is not available; remove it",
    "audio": "the model has no audio; remove it",
    "modalities": "the model generates text; remove it",
    "prediction": "the response is the same without it; remove it",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "web_search_options": "the server has no web access; remove it",
    "documents": "put them into the messages",
    "guided_json": "use structured_outputs",
    "guided_regex": "use structured_outputs",
    "guided_choice": "use structured_outputs",
    "guided_grammar": "use structured_outputs",
    "guided_decoding_backend": "there is only one; remove it",
    "prompt_embeds": "send the prompt as text or token ids",
    "kv_transfer_params": "remove it",
    "vllm_xargs": "remove it",
    "repetition_detection": "remove it",
    "thinking_token_budget": "use max_tokens",
    "stream_interval": "remove it",
    "logprob_token_ids": "only the most likely tokens' log-probabilities are computed; use logprobs",
    "moderation": "remove it",
    "max_tool_calls": "the server calls no tools; remove it",
    "previous_response_id": "send the whole input",
    "conversation": "send the whole input",
    "background": "remove it",
}
"""Parameters of other servers that are not supported, with a remedy."""
RESPONSE_NAMES = {
    "prompt": "send the whole input",
    "max_completion_tokens": "use max_output_tokens",
    "max_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "structured_outputs": "use text.format",
}
"""Remedies for parameters of chats in a response's body."""
NEUTRAL: tuple[Any, ...] = (None, False, "", [], ["text"])
"""Values of unsupported parameters that ask for nothing, or for what the server does."""


def decode(body: bytes, kind: type[B], *, warn: bool = False) -> B:
    """A route's body. `warn`: unknown parameters are logged and ignored. Raises `ApiError` 400."""
    value: B
    try:
        value = decode_json(body, _with_other_names(kind, strict=True))
    except ApiError as error:
        if not warn or error.code != "unknown_parameter":
            raise
        logger.warning("unknown parameters are ignored, %.100r among them", error.param)
        value = decode_json(body, _with_other_names(kind, strict=False))
    for name, part in fields(value, _other_names(kind)):
        if not (len(bytes(part)) < 16 and _decoder(Any).decode(part) in NEUTRAL):
            remedy = RESPONSE_NAMES.get(name) if kind is schema.ResponseRequest else None
            remedy = remedy or UNSUPPORTED.get(name, "remove it")
            raise bad_request("unsupported_parameter", f"{name} is not supported here: {remedy}", name)
    return value


def fields(value: Struct, names: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Those of the named fields that are set, with their values."""
    pairs = zip(names, _getter(names)(value), strict=True)
    return [(name, field) for name, field in pairs if field is not None and field is not UNSET]


_getter = functools.cache(lambda names: operator.attrgetter(*names))


def decode_json(body: bytes, kind: type[T]) -> T:
    """The body as this type. Raises `ApiError` 400."""
    if not body.strip():
        raise bad_request("invalid_json", "the body is empty; send a JSON object")
    if json.detect_encoding(body) != "utf-8":  # a BOM counts as another encoding
        raise bad_request("invalid_encoding", "the body is not UTF-8, or has a byte order mark; send plain UTF-8")
    try:
        body.decode()  # msgspec checks only the texts that it reads
    except UnicodeDecodeError as error:
        raise bad_request("invalid_encoding", f"the body is not UTF-8: byte {error.start} is invalid") from None
    if (num_parts := body.count(b"[") + body.count(b"{")) > (limit := max(MAX_PARTS, len(body) // BYTES_PER_PART)):
        raise bad_request("too_many_parts", f"the body has {num_parts} brackets and braces; the limit is {limit}")
    return _decode(body, kind)


def decode_part(part: Raw, kind: type[T], path: str, code: str) -> T:
    """A part of any shape, of bounded size and depth. Raises `ApiError` 400 with this code."""
    name = path.partition(".")[0]
    if (num_bytes := len(bytes(part))) > MAX_PART_BYTES:
        raise bad_request(code, f"{path} has {num_bytes} bytes; the limit is {MAX_PART_BYTES}; send less", name)
    try:
        value = _decode(bytes(part), kind)
    except ApiError as error:
        raise bad_request(code, f"{path}: {error.message}", name) from None
    if is_too_deep(value, bytes(part)):
        raise bad_request(code, f"{path} is nested deeper than {MAX_DEPTH} levels", name)
    return value


def is_set(part: Unread) -> TypeGuard[Raw]:
    return not isinstance(part, UnsetType) and bytes(part) != b"null"


def is_too_deep(value: Any, text: bytes) -> bool:
    """Whether the value of a JSON text is nested deeper than `MAX_DEPTH` levels."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return False
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [x for v in level if isinstance(v, dict | list) for x in (v.values() if isinstance(v, dict) else v)]
        if not level:
            return False
    return True


@functools.cache
def _other_names(kind: type[Body]) -> tuple[str, ...]:
    """Parameters that are known, but not on this route."""
    known = {name for route in schema.ROUTES for name in route.__struct_fields__} | UNSUPPORTED.keys()
    return tuple(sorted(known.difference(kind.__struct_fields__)))


@functools.cache
def _with_other_names(kind: type[B], *, strict: bool) -> type[B]:
    others: list[Any] = [(name, Unread, UNSET) for name in _other_names(kind)]
    if not strict and "messages" in kind.__struct_fields__:
        messages = schema.LenientMessages
        others.append(("messages", messages | None, None) if kind is schema.TokenizeRequest else ("messages", messages))
    return defstruct(kind.__name__, others, bases=(kind,), kw_only=True, forbid_unknown_fields=strict)  # type: ignore[return-value]


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        value: T = _decoder(kind).decode(body)  # type: ignore[arg-type]  # types are hashable
    except msgspec.ValidationError as error:
        raise to_api_error(error, kind) from None
    except msgspec.DecodeError as error:
        if ("truncated" in str(error) or "surrogate" in str(error)) and _SURROGATE.search(body) is not None:
            raise bad_request("invalid_unicode", "the body has a lone surrogate") from None
        raise bad_request("invalid_json", f"the body is not JSON: {error}") from None
    except RecursionError:
        raise bad_request("too_deep", "the body is nested too deep") from None
    return value


# -- errors ------------------------------------------------------------------------------------------------------------

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_UNKNOWN, _MISSING = "Object contains unknown field `", "Object missing required field `"
_OUT_OF_RANGE = ("Integer value out of range", "Expected `int` >=", "Expected `int` <=")
FIELD_CODES = {
    "logprobs": "invalid_value",
    "top_logprobs": "invalid_value",
    "cache_salt": "invalid_value",
    "early_stopping": "invalid_value",
    "chat_template_kwargs": "invalid_value",
    "tool_choice": "invalid_value",
    "logit_bias": "invalid_logit_bias",
}
"""Codes of any fault of a field, or below it."""
PART_CODES = {
    "stop": "invalid_value",
    "bad_words": "invalid_value",
    "stop_token_ids": "invalid_token_id",
    "allowed_token_ids": "invalid_token_id",
    "stream_options": "invalid_value",
    "response_format": "invalid_json_schema",
    "text": "invalid_json_schema",
    "structured_outputs": "invalid_grammar",
}
"""Codes of faults below a field."""


def to_api_error(error: msgspec.ValidationError, kind: Any) -> ApiError:
    """The error of a message such as "Expected `int`, got `str` - at `$.prompt[1]`"."""
    fault, at, path = str(error).rpartition(" - at `")  # no pattern: a name may have millions of characters
    if not at:
        fault, path = path, ""
    path = path.rpartition("$")[2].rstrip("`").removeprefix(".").replace("[...]", "")
    is_unknown, is_missing = fault.startswith(_UNKNOWN), fault.startswith(_MISSING)
    if is_unknown or is_missing:
        field = fault[len(_UNKNOWN if is_unknown else _MISSING) : -1]
        if is_unknown and (not path or path.startswith("messages")):
            return _unknown_parameter(field, f"{path}.{field}" if path else field, kind)
        path = f"{path}.{field}" if path else field
    shown = cut(f"{fault[:1].lower()}{fault[1:]}".replace("`", ""))
    code, param = _code(path, fault, is_missing=is_missing)
    return bad_request(code, f"{path[:128] or 'the body'}: {shown}", param or None)


def _code(path: str, fault: str, *, is_missing: bool) -> tuple[str, str]:
    """The code and the parameter of a fault at a path."""
    name = re.split(r"[.\[]", path, maxsplit=1)[0]
    is_number = "got `bool`" in fault or "got `float`" in fault or fault.startswith(_OUT_OF_RANGE)
    if name in FIELD_CODES:
        return FIELD_CODES[name], name
    if path == name and (is_missing or "got `null`" in fault):
        return ("missing_required_parameter", name) if name else ("invalid_type", "")
    if name in PART_CODES and path != name:
        return PART_CODES[name], "text.format" if name == "text" else name
    if name in ("messages", "input") and path != name:
        return _item_code(path, name)
    if name in ("prompt", "tokens") and path != name:
        return ("invalid_token_id", path) if is_number else ("invalid_type", name)
    if " of length " in fault:
        return ("empty_array" if ">=" in fault else "array_above_max_length"), name
    if fault.startswith("Number out of range"):
        return "decimal_out_of_range", name
    is_integer = fault.startswith(_OUT_OF_RANGE) or (name == "seed" and "got `float`" in fault)
    return ("integer_out_of_range" if is_integer else "invalid_type"), path


def _item_code(path: str, name: str) -> tuple[str, str]:
    """The code and the parameter of a fault in a message or in an item of a response's input."""
    if re.search(r"\.(content|output)\[\d+\](\.type)?\Z", path):
        return "unsupported_content", f"{path.removesuffix('.type')}.type"
    if path.endswith("]") and "." not in path:
        return "invalid_type", name
    if (call := re.match(r"messages\[\d+\]\.tool_calls\[\d+\](\.function\.arguments)?", path)) is not None:
        return "invalid_value", call[0]
    return ("invalid_value" if path.endswith(".role") else "invalid_type"), path


def _unknown_parameter(name: str, path: str, kind: Any) -> ApiError:
    holder = kind.__base__ if path == name else schema.Message
    similar = difflib.get_close_matches(name[:64], holder.__struct_fields__, n=1, cutoff=0.6)
    hint = f"did you mean {similar[0]}?" if similar else "see /openapi.json for the parameters"
    return bad_request("unknown_parameter", f"unknown parameter {name[:64]!r}; {hint}", path)
