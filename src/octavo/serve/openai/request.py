"""Converts request bodies to `ParsedRequest`, and refuses combinations that are invalid by themselves."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from octavo.engine.engine_request import MAX_PRIORITY
from octavo.errors import UsageError, cut
from octavo.frontend.input_processor import TEXT_PARTS
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import RequestOutputKind, SamplingParams
from octavo.params.structured_outputs import StructuredOutputsParams
from octavo.serve.openai import schema
from octavo.serve.openai.decoding import MAX_DEPTH, decode, decode_part, fields, is_set, is_too_deep
from octavo.serve.openai.decoding import to_api_error as to_type_error
from octavo.serve.openai.errors import ApiError, bad_request, to_api_error
from octavo.serve.openai.schema import (
    ChatRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    TokenizeRequest,
)
from octavo.serve.openai.strict_schema import close_objects

B = TypeVar("B", bound=schema.Body)

MAX_PROMPTS = 256
MAX_TOOLS = 128
MAX_BAD_CHARS = 1 << 16
"""Characters of all bad words together."""
MAX_CALLS = 4096
"""Tool calls in all messages."""
MAX_ARGUMENT_BYTES = 1 << 20
"""JSON text of all their arguments together."""
MAX_TOP_LOGPROBS = 20
TOKEN_ID = re.compile(r"(0|[1-9][0-9]{0,9})\Z")
SAMPLING = tuple(schema.Sampling.__annotations__)
BEAM_SAMPLING = {"n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"}
BEAM_SEARCH_UNSUPPORTED = {*SAMPLING, "echo", "response_format", "structured_outputs"} - BEAM_SAMPLING
"""Parameters that a beam search refuses unless they have their neutral value (`NEUTRAL_VALUES`, else false)."""
NEUTRAL_VALUES = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "response_format": schema.TextFormat(),
}


@dataclass(slots=True, kw_only=True)
class ParsedRequest:
    """A parsed and checked request body.

    params         sampling parameters of every prompt
    prompts        of a completion: each a text or a list of token ids
    messages       of a chat, as chat templates take them
    template       further arguments of the chat template
    tools          tools that the model may call; none with tool_choice "none"
    required_tool  the tool that the model must call; "*": any of `tools`
    top_logprobs   number of top tokens returned per position; None: no log-probabilities
    role           of a chat's response; `echoed`: text that begins its content
    skip_special_tokens  what a chat asks for; `params` has False if a parser reads the special tokens
    truncate       prompt tokens to keep, from `truncation_side`'s other end; -1: as many as leave room for max_tokens
    param_aliases  names of parameters in this request, by the names that errors use
    """

    model: str
    params: SamplingParams | BeamSearchParams
    prompts: list[str | list[int]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    template: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    required_tool: str | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    echo: bool = False
    role: str = "assistant"
    echoed: str = ""
    priority: int = 0
    cache_salt: bytes = b""
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    truncate: int | None = None
    truncation_side: str = "left"
    return_token_ids: bool = False
    return_tokens_as_ids: bool = False
    n: int = 1
    param_aliases: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestParser:
    """Parses request bodies under the server's options.

    model_names          names that requests may use; responses without a name get the first
    num_ids              size of the vocabulary; None: not known here
    priority_scheduling  the scheduler orders requests by priority
    has_tools            the model's tool calls are parsed; otherwise `no_tools_reason` tells why not
    reads_specials       the markers in outputs of chats are special tokens
    tokens_as_ids        default of return_tokens_as_token_ids
    force_usage          streams have the usage on every chunk
    """

    model_names: tuple[str, ...]
    defaults: SamplingParams
    max_logprobs: int = 20
    max_num_seqs: int | None = None
    num_ids: int | None = None
    priority_scheduling: bool = False
    has_tools: bool = False
    reads_specials: bool = False
    no_tools_reason: str = "the model's chat template has none"
    strict_openai: bool = False
    warn_unknown: bool = False
    allow_request_templates: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_json_whitespace: int = 12
    tokens_as_ids: bool = False
    force_usage: bool = False

    # -- routes --------------------------------------------------------------------------------------------------------

    def decode(self, body: bytes, kind: type[B]) -> B:
        """A route's body. Raises `ApiError` 400."""
        return decode(body, kind, warn=self.warn_unknown)

    def parse_completion(self, body: CompletionRequest) -> ParsedRequest:
        model = self.resolve_model(body)
        prompts = parse_prompts(body.prompt)
        logprobs = self._check_count("logprobs", body.logprobs, 5 if self.strict_openai else self.max_logprobs)
        request = self._parse_common(
            _given(body, CompletionRequest), model, logprobs, max_tokens=body.max_tokens, default_max_tokens=16
        )
        request.prompts = prompts
        return request

    def parse_chat(
        self,
        body: ChatRequest,
        messages: list[dict[str, Any]] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> ParsedRequest:
        """`messages`, `tools`: already parsed, in place of the body's."""
        model = self.resolve_model(body)
        messages = parse_messages(body.messages) if messages is None else messages
        template = self.chat_template_options(body)
        tools, required = self._choose_tools(parse_tools(body.tools) if tools is None else tools, body.tool_choice)
        limit = MAX_TOP_LOGPROBS if self.strict_openai else self.max_logprobs
        top, has_logprobs = self._check_count("top_logprobs", body.top_logprobs, limit), body.logprobs in (True, "true")
        if top and not has_logprobs:
            raise bad_request("invalid_value", "top_logprobs needs logprobs to be true", "top_logprobs")
        given, echo = _given(body, ChatRequest), body.echo is True
        given.pop("echo", None)  # not the rendered prompt, as for completions, but the last message
        if required is not None:
            given.pop("response_format", None)  # the format of content, which a call has not
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        request = self._parse_common(
            given,
            model,
            (top or 0) if has_logprobs else None,
            max_tokens=getattr(body, name),
            default_max_tokens=None,
            param_aliases={"max_tokens": name, "logprobs": "logprobs" if top is None else "top_logprobs"},
        )
        request.messages, request.template, request.tools, request.required_tool = messages, template, tools, required
        request.role = "assistant" if template["add_generation_prompt"] else messages[-1]["role"]
        if echo and messages[-1]["role"] == request.role:
            request.echoed = messages[-1]["content"]
        if required is not None:
            request.param_aliases["structured_outputs"] = "tools"  # the grammar is built from them
            request.params = self._require_tool_call(
                request.params, [t for t in tools if required in ("*", t["function"]["name"])]
            )
        if self.reads_specials:
            if isinstance(request.params, BeamSearchParams):
                text = "the format of this model's chats is not parsed in beams; remove use_beam_search"
                raise bad_request("unsupported_parameter", text, "use_beam_search")
            request.skip_special_tokens = request.params.skip_special_tokens
            request.params = dataclasses.replace(request.params, skip_special_tokens=False)
        if tools:
            request.template["tools"] = tools
        request.parallel_tool_calls = body.parallel_tool_calls is not False
        request.include_reasoning = body.include_reasoning is not False
        request.add_special_tokens = body.add_special_tokens is True
        return request

    def resolve_model(self, body: schema.Body) -> str:
        """The model name of the response. Raises `ApiError` 404 for an unknown model."""
        first, name = self.model_names[0], body.model
        if not name and not self.strict_openai:
            return first
        if not name:
            raise bad_request("missing_required_parameter", f"model is missing; this server has {first}", "model")
        if name not in self.model_names:
            text = f"The model `{cut(name, 60)}` does not exist. This server has {', '.join(self.model_names)}."
            raise ApiError(404, "model_not_found", text, "model")
        return name

    def chat_template_options(self, body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
        """The arguments of the chat template."""
        name, kwargs = "chat_template_kwargs", dict(self.template_kwargs)
        if is_set(body.chat_template_kwargs):
            kwargs |= decode_part(body.chat_template_kwargs, schema.TemplateKwargs, name, "invalid_value")
        template: dict[str, Any] = {"chat_template_kwargs": kwargs}
        if isinstance(body, ChatRequest):
            if body.reasoning_effort is not None:
                kwargs.setdefault("reasoning_effort", body.reasoning_effort)
            if body.chat_template is not None:
                if not self.allow_request_templates:
                    text = "this server does not accept chat templates in requests (--trust-request-chat-template)"
                    raise bad_request("template_not_allowed", text, "chat_template")
                template["chat_template"] = body.chat_template
        continues, generates = body.continue_final_message is True, body.add_generation_prompt
        template["continue_final_message"] = continues
        template["add_generation_prompt"] = not continues if generates is None else generates
        if continues and template["add_generation_prompt"]:
            text = "continue_final_message and add_generation_prompt exclude each other; set one to false"
            raise bad_request("invalid_value", text, "continue_final_message")
        return template

    # -- common to completions and chats -------------------------------------------------------------------------------
    def _parse_common(
        self,
        given: dict[str, Any],
        model: str,
        logprobs: int | None,
        *,
        max_tokens: int | None,
        default_max_tokens: int | None,
        param_aliases: Mapping[str, str] | None = None,
    ) -> ParsedRequest:
        stream = given.get("stream", False)
        forced = stream and self.force_usage
        options = given.get("stream_options")
        if options is not None and not stream:
            raise bad_request("invalid_value", "stream_options needs stream to be true", "stream_options")
        beams = given.get("use_beam_search", "beam_width" in given)
        if self.strict_openai and isinstance(given.get("stop"), list) and len(given["stop"]) > 4:
            raise bad_request("array_above_max_length", f"stop has {len(given['stop'])} items; the limit is 4", "stop")
        if self.strict_openai and given.get("temperature", 0) > 2:
            text = f"temperature is {given['temperature']}, it must be from 0 to 2"
            raise bad_request("decimal_out_of_range", text, "temperature")
        if given.get("truncate_prompt_tokens") == 0:
            text = "truncate_prompt_tokens is 0; it must be at least 1, or -1 for as many as fit"
            raise bad_request("integer_out_of_range", text, "truncate_prompt_tokens")
        aliases = {"structured_outputs": "response_format", "beam_width": "n"}
        aliases = {name: alias for name, alias in aliases.items() if name not in given} | dict(param_aliases or {})
        try:
            self._check_sizes(given)
            if beams:
                params: SamplingParams | BeamSearchParams = self._beam_params(given, logprobs, max_tokens)
            else:
                for name, neutral in (("beam_width", None), ("length_penalty", 1), ("early_stopping", False)):
                    if given.get(name, neutral) != neutral:
                        raise bad_request("invalid_value", f"{name} needs use_beam_search to be true", name)
                params = self._sampling_params(given, logprobs, max_tokens, default_max_tokens)
        except (UsageError, ApiError) as error:
            raise rename_params(to_api_error(error, ""), aliases) from None
        n = given.get("n", 1) if isinstance(params, SamplingParams) else params.n or params.beam_width
        width = params.width if isinstance(params, SamplingParams) else params.beam_width
        if self.max_num_seqs is not None and width > self.max_num_seqs:
            name = next((name for name in ("beam_width", "best_of") if name in given), "n")
            text = f"the request needs {width} concurrent sequences; the limit is {self.max_num_seqs}; lower {name}"
            raise bad_request("integer_out_of_range", text, name)
        return ParsedRequest(
            model=model,
            params=params,
            stream=stream,
            include_usage=forced or bool(options and options.include_usage),
            continuous_usage=forced or bool(options and options.include_usage and options.continuous_usage_stats),
            top_logprobs=logprobs,
            prompt_logprobs="prompt_logprobs" in given,
            echo=given.get("echo", False),
            priority=self._priority(given.get("priority", 0)),
            cache_salt=_parse_cache_salt(given.get("cache_salt")),
            add_special_tokens=given.get("add_special_tokens", True),
            truncate=given.get("truncate_prompt_tokens"),
            truncation_side=given.get("truncation_side", "left"),
            return_token_ids=given.get("return_token_ids", False),
            return_tokens_as_ids=given.get("return_tokens_as_token_ids", self.tokens_as_ids),
            n=n,
            param_aliases=aliases,
        )

    def _sampling_params(
        self, given: dict[str, Any], logprobs: int | None, max_tokens: int | None, default: int | None
    ) -> SamplingParams:
        values: dict[str, Any] = {name: given[name] for name in SAMPLING if name in given}
        if (num := self._check_count("prompt_logprobs", values.get("prompt_logprobs"), self.max_logprobs)) is not None:
            if given.get("stream"):
                raise bad_request("invalid_value", "prompt_logprobs are not streamed; remove stream", "prompt_logprobs")
            values["prompt_logprobs"] = num
        if "logit_bias" in given:
            values["logit_bias"] = parse_logit_bias(given["logit_bias"])
        if "best_of" in given:
            if given.get("stream") and given["best_of"] > 1:
                raise bad_request("invalid_value", "best_of cannot be streamed; remove stream", "best_of")
            values["best_of"] = given["best_of"]
        if (structured_output := parse_structured_output(given)) is not None:
            values["structured_outputs"] = self._with_whitespace_limit(structured_output)
        values["echo"] = given.get("echo", False)
        values["logprobs"] = logprobs
        if max_tokens is not None:
            values["max_tokens"] = max_tokens
        elif default is None:
            values["max_tokens"] = None
        values["output_kind"] = RequestOutputKind.DELTA
        return dataclasses.replace(self.defaults, **values)

    def _check_sizes(self, given: Mapping[str, Any]) -> None:
        if self.num_ids is not None and (count := len(given.get("allowed_token_ids", ()))) > self.num_ids:
            text = f"allowed_token_ids has {count} token ids; the limit is {self.num_ids}"
            raise bad_request("array_above_max_length", text, "allowed_token_ids")
        size = sum(map(len, given.get("bad_words", ())))
        if size > MAX_BAD_CHARS:
            text = f"bad_words has {size} characters; the limit is {MAX_BAD_CHARS}; send fewer or shorter words"
            raise bad_request("array_above_max_length", text, "bad_words")

    def _beam_params(self, given: dict[str, Any], logprobs: int | None, max_tokens: int | None) -> BeamSearchParams:
        if given.get("stream"):
            raise bad_request("invalid_value", "a beam search cannot be streamed; remove stream", "stream")
        no_sampling = {"temperature": 0, "top_p": 1, "min_p": 0, "top_k": 0, "seed": None, "best_of": None}
        for name, neutral in no_sampling.items():
            if name in given and given[name] != neutral and not (name == "top_k" and given[name] == -1):
                text = f"{name} has no effect on a beam search; remove it"
                raise bad_request("invalid_value", text, "best_of" if name == "best_of" else "use_beam_search")
        for name in BEAM_SEARCH_UNSUPPORTED & given.keys():
            if given[name] != NEUTRAL_VALUES.get(name, False):
                raise bad_request("invalid_value", f"{name} is not supported with a beam search; remove it", name)
        n = given.get("n", 1)
        width = given.get("beam_width", n)
        if not isinstance(n, int) or not 1 <= n <= 128:
            raise bad_request("integer_out_of_range", f"n is {n}; it must be from 1 to 128", "n")
        if n > width >= 1:
            raise bad_request("invalid_value", f"n is {n}; the limit is beam_width ({width})", "beam_width")
        return BeamSearchParams(
            beam_width=width,
            n=n if width >= 1 else None,
            max_tokens=16 if max_tokens is None else max_tokens,
            length_penalty=given.get("length_penalty", 1.0),
            early_stopping=given.get("early_stopping", False),
            ignore_eos=given.get("ignore_eos", False),
            logprobs=logprobs,
            stop=given.get("stop"),
            stop_token_ids=given.get("stop_token_ids"),
        )

    def _require_tool_call(
        self, params: SamplingParams | BeamSearchParams, tools: Sequence[Mapping[str, Any]]
    ) -> SamplingParams:
        """Constrains the output to a call of one of these tools. Each schema gets an $id, so that its "#/$defs/..."
        references resolve inside it."""
        if not isinstance(params, SamplingParams) or params.structured_outputs is not None:
            raise bad_request(
                "invalid_value", "tool_choice already constrains the output; remove the other constraint", "tool_choice"
            )
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "arguments": {"$id": f"urn:tool:{i}", "type": "object"}
                    | close_objects(tool["function"].get("parameters") or {}),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for i, tool in enumerate(tools)
        ]
        form = self._with_whitespace_limit({"json": calls[0] if len(calls) == 1 else {"anyOf": calls}})
        try:
            return dataclasses.replace(params, structured_outputs=StructuredOutputsParams(**form))
        except UsageError as error:
            raise rename_params(to_api_error(error, ""), {"structured_outputs": "tools"}) from None

    def _with_whitespace_limit(self, structured_output: dict[str, Any]) -> dict[str, Any]:
        """Adds the server's limit of white space in JSON, unless the request or the schema sets one."""
        overrides = {"disable_any_whitespace", "whitespace_pattern"} & structured_output.keys()
        schema = structured_output.get("json")
        if overrides or (schema is None and not structured_output.get("json_object")) or self.max_json_whitespace == 12:
            return structured_output  # the grammar's default
        if isinstance(schema, Mapping) and "x-guidance" in schema:
            return structured_output
        if self.max_json_whitespace == 0:
            return {**structured_output, "disable_any_whitespace": True}
        limit = "" if self.max_json_whitespace < 0 else str(self.max_json_whitespace)
        return {**structured_output, "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{limit}}}"}

    def _check_count(self, name: str, value: int | None, limit: int) -> int | None:
        """A number of log-probabilities; -1 asks for the whole vocabulary's."""
        count = self.num_ids if value == -1 and self.num_ids is not None else value
        if count is not None and (count < 0 or (count > limit and limit >= 0)):
            raise bad_request("invalid_value", f"{name} is {value}; it must be from 0 to {limit}", name)
        return count

    def _priority(self, value: int) -> int:
        if value and not self.priority_scheduling:
            raise bad_request("invalid_value", "priority needs --scheduling-policy priority", "priority")
        if abs(value) > MAX_PRIORITY:
            text = f"priority is {value}; it must be from {-MAX_PRIORITY} to {MAX_PRIORITY}"
            raise bad_request("invalid_value", text, "priority")
        return value

    def _choose_tools(
        self, tools: list[dict[str, Any]], given: str | schema.ToolChoice | None
    ) -> tuple[list[dict[str, Any]], str | None]:
        """The tools that the model may call, and the one that it must call ("*": any)."""
        names = check_tools(tools)
        if tools and not self.has_tools and given != "none":
            raise bad_request("unsupported_parameter", f"tools are not supported here: {self.no_tools_reason}", "tools")
        choice = given.function.name if isinstance(given, schema.ToolChoice) else given
        if isinstance(given, str | None) and choice in ("none", "auto", None):
            return ([] if choice == "none" else tools), None
        required = "*" if given == "required" else None if isinstance(given, str) else choice
        if required is None or (required != "*" and required not in names) or not tools:
            text = f"tool_choice is {choice!r:.60}; it must be none, auto, required, or the name of a tool"
            raise bad_request("invalid_value", text, "tool_choice")
        return tools, required


def rename_params(api_error: ApiError, param_aliases: Mapping[str, str]) -> ApiError:
    """The error with the parameter names of the request, by `ParsedRequest.param_aliases`."""
    for name, alias in param_aliases.items():
        api_error.param = alias if api_error.param == name else api_error.param
        api_error.message = re.sub(rf"(?<![\w-]){name}\b", alias, api_error.message)
    return api_error


# -- the parts of a body -----------------------------------------------------------------------------------------------


def _given(body: Struct, kind: type[Struct]) -> dict[str, Any]:
    """The parameters of this type that a body sets, without those that stay JSON text."""
    return {name: value for name, value in fields(body, kind.__struct_fields__) if not isinstance(value, Raw)}


def parse_prompts(value: str | list[Any]) -> list[str | list[int]]:
    """The prompts of a completion, from a text, a list of texts, token ids, or a list of lists of token ids."""
    if isinstance(value, str):
        return [value]
    if len(kinds := set(map(type, value[: MAX_PROMPTS + 1]))) > 1:
        raise bad_request("invalid_type", "prompt must have items of one type", "prompt")
    if kinds == {int}:
        return [value]  # `Service.check_ids` checks the rest
    if len(value) > MAX_PROMPTS:
        text = f"prompt has {len(value)} items; the limit is {MAX_PROMPTS}; send several requests"
        raise bad_request("array_above_max_length", text, "prompt")
    if kinds == {list} and not all(value):
        raise bad_request("empty_array", "prompt has an empty array; send at least one token id", "prompt")
    return value


def parse_logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    if wrong := [key for key in biases if TOKEN_ID.match(key) is None]:
        names = ", ".join(repr(cut(key, 60)) for key in wrong[:8])
        raise bad_request("invalid_logit_bias", f"logit_bias has keys that are not token ids: {names}", "logit_bias")
    return {int(key): bias for key, bias in biases.items()}


def parse_messages(messages: Sequence[schema.Message]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: each content one text, arguments of tool calls as objects."""
    calls = [call.function for message in messages for call in message.tool_calls or ()]
    check_arguments([call.arguments for call in calls], "messages")
    return [_parse_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def check_arguments(arguments: Sequence[schema.Unread], param: str) -> None:
    """Bounds all tool calls of a conversation before any is read."""
    num_bytes = sum(len(bytes(value)) for value in arguments if is_set(value))
    if len(arguments) > MAX_CALLS or num_bytes > MAX_ARGUMENT_BYTES:
        text = f"{param} has {len(arguments)} tool calls with {num_bytes} bytes of arguments"
        raise bad_request(
            "array_above_max_length", f"{text}; the limits are {MAX_CALLS} and {MAX_ARGUMENT_BYTES}", param
        )


def _parse_message(given: schema.Message, path: str) -> dict[str, Any]:
    content = parse_content(given.content, f"{path}.content", given.role)
    message: dict[str, Any] = {"role": "system" if given.role == "developer" else given.role, "content": content}
    thoughts = (given.reasoning_content, given.reasoning, given.thinking)
    reasoning = next((text for text in thoughts if text is not None), None)
    named = {"name": given.name, "tool_call_id": given.tool_call_id, "reasoning_content": reasoning}
    message |= {name: value for name, value in named.items() if value is not None}
    if given.tool_calls and given.role == "assistant":
        message["tool_calls"] = [
            tool_call(
                call.id, call.function.name, call.function.arguments, f"{path}.tool_calls[{i}].function.arguments"
            )
            for i, call in enumerate(given.tool_calls)
        ]
    return message


def parse_content(value: schema.Content, path: str, role: str | None = None) -> str:
    """The text of a message's content: a string, or text parts. An assistant's may be null."""
    if isinstance(value, str):
        return value
    if value is None:
        if role != "assistant":
            raise bad_request("invalid_value", f"{path} must be a string or an array of parts, not null", path)
        return ""
    texts = []
    for i, part in enumerate(value):
        if (name := TEXT_PARTS.get(part.type)) is None:
            text = f"{path}[{i}] is of type {part.type!r:.60}; only text is supported"
            raise bad_request("unsupported_content", text, f"{path}[{i}].type")
        if (content := getattr(part, name)) is None:
            raise bad_request("invalid_type", f"{path}[{i}].{name} must be a string", f"{path}[{i}].{name}")
        texts.append(content)
    return "\n".join(texts)


def tool_call(name: str | None, function: str, arguments: schema.Unread, path: str) -> dict[str, Any]:
    """A tool call as chat templates take it: arguments as an object, or as their text if that is not one.

    A model may write anything as arguments, and clients send it back.
    """
    value: Any = {}
    if is_set(arguments):
        text = bytes(arguments)
        try:
            value = msgspec.json.decode(text)
            if isinstance(value, str):
                value, text = _object_of(value), value.encode()
            is_valid = isinstance(value, dict | str) and not is_too_deep(value, text)
        except (msgspec.DecodeError, RecursionError):
            is_valid = False
        if not is_valid:
            message = f"{path} must be an object or a string with JSON of at most {MAX_DEPTH} levels"
            raise bad_request("invalid_value", message, path)
    return {"id": name or "", "type": "function", "function": {"name": function, "arguments": value}}


_JSON_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # also an open one, or the search would be quadratic
_ESCAPES = {code: f"\\u{code:04x}" for code in range(32)}


def _object_of(text: str) -> str | dict[str, Any]:
    """The JSON object of a text; the text itself if it is something else.

    Models write line breaks into strings as they are, which JSON forbids.
    """
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        try:
            value = msgspec.json.decode(_JSON_STRING.sub(lambda found: found[0].translate(_ESCAPES), text))
        except msgspec.DecodeError:
            return text
    return value if isinstance(value, dict) else text


def parse_tools(raw: schema.Unread) -> list[dict[str, Any]]:
    """The tools as the client wrote them."""
    return decode_part(raw, list[dict[str, Any]], "tools", "invalid_value") if is_set(raw) else []


def check_tools(tools: Sequence[Any]) -> set[str]:
    """Checks tools and returns their names. Raises `ApiError` 400 for an invalid tool."""
    try:
        names = [tool.function.name for tool in msgspec.convert(tools, list[schema.Tool])]
    except msgspec.ValidationError as error:
        raise bad_request("invalid_value", f"tools: {to_type_error(error, list).message}", "tools") from None
    if len(names) > MAX_TOOLS or len(set(names)) < len(names):
        text = f"tools has {len(names)} items; the limit is {MAX_TOOLS}, and names must be unique"
        raise bad_request("invalid_value", text, "tools")
    return set(names)


def parse_structured_output(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The output constraint as `SamplingParams.structured_outputs`, from structured_outputs or response_format."""
    structured, form = given.get("structured_outputs"), given.get("response_format")
    if structured is not None:
        if isinstance(form, JsonObjectFormat | JsonSchemaFormat):
            raise bad_request("invalid_value", "set response_format or structured_outputs, not both", "response_format")
        values = _given(structured, schema.StructuredOutputs)
        if is_set(structured.json):
            values["json"] = decode_part(structured.json, Any, "structured_outputs.json", "invalid_json_schema")
        return values
    if isinstance(form, JsonObjectFormat):
        if not is_set(form.schema):
            return {"json_object": True}
        return {"json": decode_part(form.schema, dict[str, Any], "response_format.schema", "invalid_json_schema")}
    if not isinstance(form, JsonSchemaFormat):
        return None
    holder, path = form.json_schema, "response_format.json_schema.schema"
    value = decode_part(holder.schema, dict[str, Any], path, "invalid_json_schema")
    return {"json": close_objects(value) if holder.strict else value}


def _parse_cache_salt(value: str | None) -> bytes:
    if value is not None and not value.isprintable():
        raise bad_request("invalid_value", "cache_salt must be 1 to 256 printable characters", "cache_salt")
    return (value or "").encode()
