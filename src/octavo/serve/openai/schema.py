"""The parameters that requests may have: one table, from which bodies are read and the OpenAPI document is drawn.

A field's value here is its JSON schema. What is read off it is the type alone: ranges and how parameters go together
are the business of `SamplingParams`, and the ranges below only describe them.
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
FLAG: Schema = {"type": "boolean"}
TEXT: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
ARRAY: Schema = {"type": "array"}
ANYTHING: Schema = {}


def _of(kind: Schema, low: float, high: float) -> Schema:
    return {**kind, "minimum": low, "maximum": high}


def _list(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    return {"type": "array", "items": items, "minItems": least, **({} if most is None else {"maxItems": most})}


TOKEN_IDS = _list(_of(INTEGER, 0, INT32))
SAMPLING: dict[str, Schema] = {
    "n": _of(INTEGER, 1, 128),
    "temperature": _of(NUMBER, 0, 2),
    "top_p": _of(NUMBER, 0, 1),
    "top_k": _of(INTEGER, -1, INT32),
    "min_p": _of(NUMBER, 0, 1),
    "repetition_penalty": _of(NUMBER, 0.01, 100),
    "presence_penalty": _of(NUMBER, -2, 2),
    "frequency_penalty": _of(NUMBER, -2, 2),
    "logit_bias": {"type": "object", "additionalProperties": _of(NUMBER, -100, 100)},
    "allowed_token_ids": TOKEN_IDS,
    "bad_words": _list(TEXT),
    "min_tokens": _of(INTEGER, 0, INT32),
    "seed": _of(INTEGER, -(1 << 63), (1 << 63) - 1),
    "stop": {"anyOf": [{"type": "string", "minLength": 1}, _list({"type": "string", "minLength": 1}, 0, 64)]},
    "stop_token_ids": {**TOKEN_IDS, "maxItems": 1024},
    "ignore_eos": FLAG,
    "prompt_logprobs": _of(INTEGER, 0, 20),
    "skip_special_tokens": FLAG,
    "spaces_between_special_tokens": FLAG,
    "include_stop_str_in_output": FLAG,
}
"""Those that `SamplingParams` has by the same name."""

SHARED: dict[str, Schema] = SAMPLING | {
    "model": TEXT,
    "stream": FLAG,
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": FLAG, "continuous_usage_stats": FLAG},
        "additionalProperties": False,
    },
    "max_tokens": _of(INTEGER, 0, INT32),
    "echo": FLAG,
    "use_beam_search": FLAG,
    "beam_width": _of(INTEGER, 1, 128),
    "length_penalty": _of(NUMBER, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
    "early_stopping": ANYTHING,
    "priority": INTEGER,
    "cache_salt": {"type": "string", "minLength": 1, "maxLength": 256},
    "add_special_tokens": FLAG,
    "truncate_prompt_tokens": _of(INTEGER, 1, INT32),
    "return_token_ids": FLAG,
    "return_tokens_as_token_ids": FLAG,
    "response_format": OBJECT,
    "structured_outputs": OBJECT,
}
COMPLETION: dict[str, Schema] = SHARED | {
    "prompt": {
        "anyOf": [
            {"type": "string"},
            _list(TEXT, 1, 256),
            {**TOKEN_IDS, "minItems": 1},
            _list({**TOKEN_IDS, "minItems": 1}, 1, 256),
        ]
    },
    "logprobs": _of(INTEGER, 0, 20),
    "best_of": _of(INTEGER, 1, 20),
}
CHAT: dict[str, Schema] = SHARED | {
    "messages": {"type": "array", "items": {"$ref": "#/components/schemas/Message"}, "minItems": 1, "maxItems": 4096},
    "max_completion_tokens": _of(INTEGER, 1, INT32),
    "logprobs": FLAG,
    "top_logprobs": _of(INTEGER, 0, 20),
    "tools": {"type": "array", "items": {"$ref": "#/components/schemas/Tool"}, "maxItems": 128},
    "tool_choice": ANYTHING,
    "parallel_tool_calls": FLAG,
    "add_generation_prompt": FLAG,
    "continue_final_message": FLAG,
    "chat_template": TEXT,
    "chat_template_kwargs": {"type": "object"},
    "reasoning_effort": TEXT,
    "include_reasoning": FLAG,
}
TOKENIZE: dict[str, Schema] = {
    "model": TEXT,
    "prompt": TEXT,
    "messages": CHAT["messages"],
    "tools": CHAT["tools"],
    "add_special_tokens": FLAG,
    "add_generation_prompt": FLAG,
    "continue_final_message": FLAG,
    "chat_template_kwargs": {"type": "object"},
    "return_token_strs": FLAG,
}
DETOKENIZE: dict[str, Schema] = {"model": TEXT, "tokens": TOKEN_IDS}

MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {
            "anyOf": [
                {"type": "string"},
                _list({"type": "object", "properties": {"type": {"const": "text"}, "text": TEXT}}),
                {"type": "null"},
            ]
        },
        "name": TEXT,
        "tool_calls": ARRAY,
        "tool_call_id": TEXT,
    },
    "required": ["role"],
    "anyOf": [
        {"properties": {"role": {"const": "assistant"}}},  # which may have said nothing
        {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
    ],
}
TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": TEXT, "description": TEXT, "parameters": OBJECT, "strict": FLAG},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}

IGNORED = frozenset(
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
"""Of OpenAI's and vLLM's: they concern accounts and logs, and change nothing about an answer."""

UNSUPPORTED = {
    "suffix": "text cannot be inserted; leave it out",
    "audio": "the model has no audio; leave it out",
    "prediction": "leave it out: the answer is the same without it",
    "functions": "give tools",
    "function_call": "give tool_choice",
    "web_search_options": "the server fetches nothing; leave it out",
    "documents": "put them into the messages",
    "guided_json": "give structured_outputs",
    "guided_regex": "give structured_outputs",
    "guided_choice": "give structured_outputs",
    "guided_grammar": "give structured_outputs",
    "guided_decoding_backend": "leave it out: there is one",
    "prompt_embeds": "give the prompt as text or token ids",
    "kv_transfer_params": "leave it out",
    "vllm_xargs": "leave it out",
    "repetition_detection": "leave it out",
    "thinking_token_budget": "give max_tokens",
    "stream_interval": "leave it out",
    "logprob_token_ids": "give logprobs",
    "moderation": "leave it out",
}
"""Parameters that exist elsewhere, and the remedy."""

TYPE_NAMES = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "string": "a string",
    "object": "an object",
    "array": "an array",
}


def read(body: Mapping[str, Any], fields: Mapping[str, Schema], *, warn: bool = False) -> dict[str, Any]:
    """The parameters that a body sets, each of its type; null stands for "not set".

    `warn`: parameters that do not exist are logged and left out. Raises `ApiError` 400: unknown_parameter,
    unsupported_parameter, invalid_type.
    """
    given: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in body.items():
        if name not in fields:
            if _outside(name, value, fields, warn=warn):
                unknown.append(name)
        elif value is not None:
            check_type(name, value, fields[name])
            given[name] = value
    if unknown:  # in one line: a body may have a hundred thousand
        logger.warning("%d unknown parameters are left out, %.100r among them", len(unknown), unknown[0])
    return given


def _outside(name: str, value: Any, fields: Mapping[str, Schema], *, warn: bool) -> bool:
    """Whether there is no such parameter anywhere. Raises `ApiError` unless it can be left out."""
    if name in IGNORED or (name == "modalities" and value in (None, ["text"])):
        return False
    if name in UNSUPPORTED or name == "modalities" or name in SHARED or name in COMPLETION or name in CHAT:
        if value is not None and value != []:
            remedy = UNSUPPORTED.get(name, "leave it out here")
            raise bad_request("unsupported_parameter", f"{name} is not supported: {remedy}", name)
        return False
    if warn:
        return True
    near = difflib.get_close_matches(name[:64], fields, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "see /openapi.json for those that exist"
    raise bad_request("unknown_parameter", f"there is no parameter {name[:64]!r}; {hint}", name)


def check_type(name: str, value: Any, schema: Schema) -> None:
    kind = schema.get("type")
    if kind is None:
        return
    fits = {
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "boolean": isinstance(value, bool),
        "string": isinstance(value, str),
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
    }[kind]
    if not fits:
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
"""Parameters for which a wrong type is one of many wrong values."""


def brief(value: Any) -> str:
    text = repr(value) if not isinstance(value, list | dict) else type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def body(fields: Mapping[str, Schema], *required: str) -> Schema:
    """The schema of a body with these fields; each that is not required may be null, but for the model."""
    never = {*required, "model"}
    nullable = {n: f if not f or n in never else {"anyOf": [f, {"type": "null"}]} for n, f in fields.items()}
    return {"type": "object", "properties": nullable, "required": list(required), "additionalProperties": False}


def schemas() -> dict[str, Schema]:
    """What bodies are, for OpenAPI."""
    return {
        "CompletionRequest": body(COMPLETION, "prompt"),
        "ChatRequest": body(CHAT, "messages"),
        "TokenizeRequest": body(TOKENIZE),
        "DetokenizeRequest": body(DETOKENIZE, "tokens"),
        "Message": MESSAGE,
        "Tool": TOOL,
        "Error": {
            "type": "object",
            "properties": {
                "error": {
                    "type": "object",
                    "properties": {
                        "message": TEXT,
                        "type": TEXT,
                        "param": {"type": ["string", "null"]},
                        "code": {"type": ["string", "null"]},
                    },
                    "required": ["message", "type", "param", "code"],
                }
            },
            "required": ["error"],
        },
    }
