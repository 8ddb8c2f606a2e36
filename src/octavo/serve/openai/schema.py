"""The request bodies as types, which `decoding` reads from JSON and the OpenAPI document shows.

A type says what a field may hold; `SamplingParams` checks ranges and combinations. null means "not set". A field of any
shape stays JSON text (`Unread`). If anything reads it, `decoding.decode_part` bounds it first.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from octavo.params.beam_search_params import MAX_LENGTH_PENALTY
from octavo.params.sampling_params import MAX_TEMPERATURE
from octavo.params.validation import INT32

MAX_MESSAGES = 4096

Unread = Raw | UnsetType
"""A field's JSON text. Not `Raw | None`, of which msgspec accepts only null."""
TokenId = Annotated[int, Meta(ge=0, le=INT32)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=256)]
TemplateKwargs = Annotated[dict[str, str | int | float | bool | None], Meta(max_length=64)]

# -- messages and tools ------------------------------------------------------------------------------------------------


class ContentPart(Struct, gc=False):
    """A part of a message's content. Unknown fields have no effect: responses' parts have some."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct, gc=False):
    name: str
    arguments: Unread = UNSET


class ToolCall(Struct, gc=False):
    function: FunctionCall
    id: str | None = None


Role = Literal["system", "developer", "user", "assistant", "tool"]
CustomRole = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}\Z")]
"""OpenAI's roles, and others that the chat template knows."""
Content = str | list[ContentPart] | None


class Message(Struct, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A chat message. The model does not get the fields after `thinking`, which responses and marks of other servers'
    caches have."""

    role: CustomRole
    content: Content = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    thinking: str | None = None
    refusal: Unread = UNSET
    annotations: Unread = UNSET
    audio: Unread = UNSET
    function_call: Unread = UNSET
    id: Unread = UNSET
    index: Unread = UNSET
    parsed: Unread = UNSET
    cache_control: Unread = UNSET


class LenientMessage(Message, kw_only=True, forbid_unknown_fields=False, gc=False):
    """A message under `--unknown-params warn`."""


class InputItem(Struct, kw_only=True, gc=False):
    """An item of a response's input: a message, a function call, its output, or earlier reasoning."""

    type: str = "message"
    role: Role | None = None
    content: Content = None
    name: str | None = None
    arguments: Unread = UNSET
    call_id: str | None = None
    output: Content = None


class ObjectSchema(Struct):
    type: Literal["object"] = "object"


class ToolFunction(Struct):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}\Z")]
    description: str | None = None
    parameters: ObjectSchema | None = None
    strict: bool | None = None


class Tool(Struct):
    """Checks a tool. The template gets the client's own object, with its keys in their order."""

    type: Literal["function"]
    function: ToolFunction


class ChosenFunction(Struct):
    name: str


class ToolChoice(Struct):
    function: ChosenFunction


# -- formats of the output ---------------------------------------------------------------------------------------------


class TextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True): ...


class JsonObjectFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """`schema`: of llama.cpp and SGLang."""

    schema: Unread = UNSET


class JsonSchema(Struct, forbid_unknown_fields=True):
    schema: Raw
    strict: bool | None = None
    name: Unread = UNSET
    description: Unread = UNSET


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    json_schema: JsonSchema


class FlatJsonSchemaFormat(JsonSchema, tag_field="type", tag="json_schema"): ...


class TextOptions(Struct):
    format: TextFormat | JsonObjectFormat | FlatJsonSchemaFormat | None = None


class Reasoning(Struct):
    effort: str | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    json: Unread = UNSET
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    """`include_obfuscation` has no effect: events have no padding."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


# -- bodies ------------------------------------------------------------------------------------------------------------


class Body(Struct, kw_only=True):
    """What every route takes. Parameters other than the model concern accounts and logs and have no effect."""

    model: str | None = None
    user: Unread = UNSET
    metadata: Unread = UNSET
    store: Unread = UNSET
    service_tier: Unread = UNSET
    safety_identifier: Unread = UNSET
    prompt_cache_key: Unread = UNSET
    prompt_cache_retention: Unread = UNSET
    request_id: Unread = UNSET
    session_id: Unread = UNSET
    verbosity: Unread = UNSET


class Sampling(Body, kw_only=True):
    """Parameters that `SamplingParams` has under the same name."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=1024)] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    spec: bool | None = None


class Generation(Sampling, kw_only=True):
    """What completions and chats share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    echo: bool | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    priority: int | None = None
    cache_salt: CacheSalt | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT32, extra_json_schema={"not": {"const": 0}})] | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    structured_outputs: StructuredOutputs | None = None


class CompletionRequest(Generation, kw_only=True):
    """`prompt`: a text, texts, token ids, or lists of token ids."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    logprobs: int | None = None
    best_of: int | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
LenientMessages = Annotated[list[LenientMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(Generation, kw_only=True):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | Literal["true", "false"] | None = None
    top_logprobs: int | None = None
    tools: Unread = UNSET
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Unread = UNSET
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None


class ResponseRequest(Body, kw_only=True):
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Unread = UNSET
    tool_choice: str | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    priority: int | None = None
    cache_salt: CacheSalt | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    spec: bool | None = None
    stop: str | list[str] | None = None
    chat_template_kwargs: Unread = UNSET
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    client_metadata: Unread = UNSET


class TokenizeRequest(Body, kw_only=True):
    """`prompt` or `messages`."""

    prompt: str | None = None
    messages: Messages | None = None
    tools: Unread = UNSET
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Unread = UNSET
    return_token_strs: bool | None = None


class DetokenizeRequest(Body, kw_only=True):
    tokens: list[TokenId]


class ErrorObject(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    error: ErrorObject


ROUTES: tuple[type[Body], ...] = (CompletionRequest, ChatRequest, ResponseRequest, TokenizeRequest, DetokenizeRequest)


RANGES: dict[str, tuple[float, float]] = {
    "n": (1, 128),
    "temperature": (0, MAX_TEMPERATURE),
    "top_p": (0, 1),
    "top_k": (-1, INT32),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "min_tokens": (0, INT32),
    "max_tokens": (0, INT32),
    "max_completion_tokens": (1, INT32),
    "max_output_tokens": (1, INT32),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "top_logprobs": (0, 20),
    "best_of": (1, 20),
    "beam_width": (1, 128),
    "length_penalty": (-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
}
"""Ranges of numbers, for the document: `SamplingParams` and the server's options check them."""


def component_schemas() -> dict[str, Any]:
    """The schemas of bodies for the OpenAPI document."""
    types = (*ROUTES, Tool, Error)
    _, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    components["Message"]["anyOf"] = [
        {"properties": {"role": {"const": "assistant"}}},  # whose content may be null
        {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
    ]
    for route in ROUTES:
        properties = components[route.__name__]["properties"]
        for name in RANGES.keys() & properties.keys():
            if (number := properties[name]["anyOf"][0])["type"] != "boolean":
                number["minimum"], number["maximum"] = RANGES[name]
    for name in ("ChatRequest", "TokenizeRequest"):  # fields that `decoding.decode_part` reads
        tools = {"type": ["array", "null"], "items": {"$ref": "#/components/schemas/Tool"}}
        components[name]["properties"] |= {"tools": tools, "chat_template_kwargs": {"type": ["object", "null"]}}
    return components
