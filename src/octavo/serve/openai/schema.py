"""The parameters of requests, as JSON schemas: one table that parses bodies and generates the OpenAPI document.

Parsing checks only the types. `SamplingParams` checks ranges and combinations; the ranges here document them.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Any

from octavo.params.beam_search_params import MAX_LENGTH_PENALTY
from octavo.params.validation import INT32
from octavo.serve.openai.errors import bad_request

logger = logging.getLogger("octavo.serve")

Schema = dict[str, Any]
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
STRING: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
ARRAY: Schema = {"type": "array"}
ANY_VALUE: Schema = {}


def _ranged(kind: Schema, low: float, high: float) -> Schema:
    return {**kind, "minimum": low, "maximum": high}


def _list(items: Schema, min_items: int = 0, max_items: int | None = None) -> Schema:
    limit = {} if max_items is None else {"maxItems": max_items}
    return {"type": "array", "items": items, "minItems": min_items, **limit}


TOKEN_IDS = _list(_ranged(INTEGER, 0, INT32))
SAMPLING: dict[str, Schema] = {
    "n": _ranged(INTEGER, 1, 128),
    "temperature": _ranged(NUMBER, 0, 2),
    "top_p": _ranged(NUMBER, 0, 1),
    "top_k": _ranged(INTEGER, -1, INT32),
    "min_p": _ranged(NUMBER, 0, 1),
    "repetition_penalty": _ranged(NUMBER, 0.01, 100),
    "presence_penalty": _ranged(NUMBER, -2, 2),
    "frequency_penalty": _ranged(NUMBER, -2, 2),
    "logit_bias": {"type": "object", "additionalProperties": _ranged(NUMBER, -100, 100)},
    "allowed_token_ids": TOKEN_IDS,
    "bad_words": _list(STRING),
    "min_tokens": _ranged(INTEGER, 0, INT32),
    "seed": _ranged(INTEGER, -(1 << 63), (1 << 63) - 1),
    "stop": {"anyOf": [{"type": "string", "minLength": 1}, _list({"type": "string", "minLength": 1}, 0, 64)]},
    "stop_token_ids": {**TOKEN_IDS, "maxItems": 1024},
    "ignore_eos": BOOLEAN,
    "prompt_logprobs": _ranged(INTEGER, 0, 20),
    "skip_special_tokens": BOOLEAN,
    "spaces_between_special_tokens": BOOLEAN,
    "include_stop_str_in_output": BOOLEAN,
}
"""Parameters that `SamplingParams` has under the same name."""

SHARED: dict[str, Schema] = SAMPLING | {
    "model": STRING,
    "stream": BOOLEAN,
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": BOOLEAN, "continuous_usage_stats": BOOLEAN},
        "additionalProperties": False,
    },
    "max_tokens": _ranged(INTEGER, 0, INT32),
    "echo": BOOLEAN,
    "use_beam_search": BOOLEAN,
    "beam_width": _ranged(INTEGER, 1, 128),
    "length_penalty": _ranged(NUMBER, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
    "early_stopping": ANY_VALUE,
    "priority": INTEGER,
    "cache_salt": {"type": "string", "minLength": 1, "maxLength": 256},
    "add_special_tokens": BOOLEAN,
    "truncate_prompt_tokens": _ranged(INTEGER, 1, INT32),
    "return_token_ids": BOOLEAN,
    "return_tokens_as_token_ids": BOOLEAN,
    "response_format": OBJECT,
    "structured_outputs": OBJECT,
}
COMPLETION: dict[str, Schema] = SHARED | {
    "prompt": {
        "anyOf": [
            {"type": "string"},
            _list(STRING, 1, 256),
            {**TOKEN_IDS, "minItems": 1},
            _list({**TOKEN_IDS, "minItems": 1}, 1, 256),
        ]
    },
    "logprobs": _ranged(INTEGER, 0, 20),
    "best_of": _ranged(INTEGER, 1, 20),
}
CHAT: dict[str, Schema] = SHARED | {
    "messages": {"type": "array", "items": {"$ref": "#/components/schemas/Message"}, "minItems": 1, "maxItems": 4096},
    "max_completion_tokens": _ranged(INTEGER, 1, INT32),
    "logprobs": BOOLEAN,
    "top_logprobs": _ranged(INTEGER, 0, 20),
    "tools": {"type": "array", "items": {"$ref": "#/components/schemas/Tool"}, "maxItems": 128},
    "tool_choice": ANY_VALUE,
    "parallel_tool_calls": BOOLEAN,
    "add_generation_prompt": BOOLEAN,
    "continue_final_message": BOOLEAN,
    "chat_template": STRING,
    "chat_template_kwargs": {"type": "object"},
    "reasoning_effort": STRING,
    "include_reasoning": BOOLEAN,
}
TOKENIZE: dict[str, Schema] = {
    "model": STRING,
    "prompt": STRING,
    "messages": CHAT["messages"],
    "tools": CHAT["tools"],
    "add_special_tokens": BOOLEAN,
    "add_generation_prompt": BOOLEAN,
    "continue_final_message": BOOLEAN,
    "chat_template_kwargs": {"type": "object"},
    "return_token_strs": BOOLEAN,
}
DETOKENIZE: dict[str, Schema] = {"model": STRING, "tokens": TOKEN_IDS}

MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {
            "anyOf": [
                {"type": "string"},
                _list({"type": "object", "properties": {"type": {"const": "text"}, "text": STRING}}),
                {"type": "null"},
            ]
        },
        "name": STRING,
        "tool_calls": ARRAY,
        "tool_call_id": STRING,
    },
    "required": ["role"],
    "anyOf": [
        {"properties": {"role": {"const": "assistant"}}},  # whose content may be null
        {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
    ],
}
TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": STRING, "description": STRING, "parameters": OBJECT, "strict": BOOLEAN},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}

IGNORED_PARAMS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "session_id",
        "verbosity",
    }
)
"""Parameters of OpenAI and vLLM that are ignored: they concern accounts and logs and do not affect the response."""

UNSUPPORTED_PARAMS = {
    "suffix": "text insertion is not available; remove it",
    "audio": "the model has no audio; remove it",
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
    "logprob_token_ids": "use logprobs",
    "moderation": "remove it",
}
"""Parameters of other servers that are not supported, with a remedy."""

TYPE_NAMES = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "string": "a string",
    "object": "an object",
    "array": "an array",
}


def parse_fields(body: Mapping[str, Any], fields: Mapping[str, Schema], *, warn: bool = False) -> dict[str, Any]:
    """The parameters that a body sets, with checked types. null means "not set".

    `warn`: unknown parameters are logged and ignored. Raises `ApiError` 400: unknown_parameter, unsupported_parameter,
    invalid_type.
    """
    given: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in body.items():
        if name not in fields:
            if _is_unknown(name, value, fields, warn=warn):
                unknown.append(name)
        elif value is not None:
            check_type(name, value, fields[name])
            given[name] = value
    if unknown:  # one line, as a body may have a hundred thousand
        logger.warning("%d unknown parameters are ignored, %.100r among them", len(unknown), unknown[0])
    return given


def _is_unknown(name: str, value: Any, fields: Mapping[str, Schema], *, warn: bool) -> bool:
    """Whether a parameter that the route lacks is unknown altogether. Raises `ApiError` unless it can be ignored."""
    if name in IGNORED_PARAMS or (name == "modalities" and value in (None, ["text"])):
        return False
    if name in UNSUPPORTED_PARAMS or name == "modalities" or name in SHARED or name in COMPLETION or name in CHAT:
        if value is not None and value != []:
            remedy = UNSUPPORTED_PARAMS.get(name, "remove it")
            raise bad_request("unsupported_parameter", f"{name} is not supported: {remedy}", name)
        return False
    if warn:
        return True
    similar = difflib.get_close_matches(name[:64], fields, n=1, cutoff=0.6)
    hint = f"did you mean {similar[0]}?" if similar else "see /openapi.json for the parameters"
    raise bad_request("unknown_parameter", f"unknown parameter {name[:64]!r}; {hint}", name)


def check_type(name: str, value: Any, schema: Schema) -> None:
    kind = schema.get("type")
    if kind is None:
        return
    is_valid = {
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "boolean": isinstance(value, bool),
        "string": isinstance(value, str),
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
    }[kind]
    if not is_valid:
        code = INVALID_TYPE_CODES.get(name, "invalid_type")
        if name == "seed" and isinstance(value, float):
            code = "integer_out_of_range"
        raise bad_request(code, f"{name} must be {TYPE_NAMES[kind]}, not {brief(value)}", name)


INVALID_TYPE_CODES = {
    "logprobs": "invalid_value",
    "top_logprobs": "invalid_value",
    "cache_salt": "invalid_value",
    "logit_bias": "invalid_logit_bias",
}
"""Error codes of parameters whose wrong types do not get "invalid_type"."""


def brief(value: Any) -> str:
    """A value for an error message: shortened, containers by type."""
    text = repr(value) if not isinstance(value, list | dict) else type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def body_schema(fields: Mapping[str, Schema], *required: str) -> Schema:
    """The schema of a body with these fields. Optional fields except the model may be null."""
    not_null = {*required, "model"}
    properties = {n: f if not f or n in not_null else {"anyOf": [f, {"type": "null"}]} for n, f in fields.items()}
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def component_schemas() -> dict[str, Schema]:
    """The schemas of request bodies for the OpenAPI document."""
    return {
        "CompletionRequest": body_schema(COMPLETION, "prompt"),
        "ChatRequest": body_schema(CHAT, "messages"),
        "TokenizeRequest": body_schema(TOKENIZE),
        "DetokenizeRequest": body_schema(DETOKENIZE, "tokens"),
        "Message": MESSAGE,
        "Tool": TOOL,
        "Error": {
            "type": "object",
            "properties": {
                "error": {
                    "type": "object",
                    "properties": {
                        "message": STRING,
                        "type": STRING,
                        "param": {"type": ["string", "null"]},
                        "code": {"type": ["string", "null"]},
                    },
                    "required": ["message", "type", "param", "code"],
                }
            },
            "required": ["error"],
        },
    }
