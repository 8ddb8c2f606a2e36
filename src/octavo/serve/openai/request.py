"""Parses a request's JSON body into a `ParsedRequest`, and refuses bodies that are invalid by themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.engine.engine_request import MAX_PRIORITY
from octavo.errors import UsageError
from octavo.frontend.cooperative import YIELD_POINT
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import RequestOutputKind, SamplingParams
from octavo.params.structured_outputs import MAX_CHARS, StructuredOutputsParams
from octavo.params.validation import INT32
from octavo.serve.http import json_parser
from octavo.serve.openai.errors import ApiError, bad_request, to_api_error
from octavo.serve.openai.schema import CHAT, COMPLETION, SAMPLING, brief, parse_fields
from octavo.serve.openai.strict_schema import close_objects

MAX_PROMPTS = 256
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_BIASES = 1024
MAX_STOP_IDS = 1024
MAX_BAD_CHARS = 1 << 16
"""Characters of all bad words together."""
MAX_CALLS = 4096
"""Tool calls in all messages."""
MAX_ARGUMENT_CHARS = MAX_CHARS
"""Characters of the arguments of one tool call."""
MAX_TEMPLATE_KWARGS = 64
MAX_TOP_LOGPROBS = 20
ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"})
IGNORED_MESSAGE_KEYS = frozenset({"refusal", "annotations", "audio", "function_call", "id", "index"})
"""Fields of response messages that clients send back; the model does not get them."""
TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
BEAM_SAMPLING = {"n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"}
BEAM_SEARCH_UNSUPPORTED = (SAMPLING.keys() - BEAM_SAMPLING) | {"echo", "response_format", "structured_outputs"}
"""Parameters that a beam search refuses unless they have their neutral value (`NEUTRAL_VALUES`, else false)."""
NEUTRAL_VALUES = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "response_format": {"type": "text"},
}
CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar")


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
    echo: bool = False
    priority: int = 0
    cache_salt: bytes = b""
    add_special_tokens: bool = True
    truncate: int | None = None
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
    has_tools            the chat template supports tools
    """

    model_names: tuple[str, ...]
    defaults: SamplingParams
    max_logprobs: int = 20
    max_num_seqs: int | None = None
    num_ids: int | None = None
    priority_scheduling: bool = False
    has_tools: bool = False
    strict_openai: bool = False
    warn_unknown: bool = False
    allow_request_templates: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_json_whitespace: int = 12

    # -- routes --------------------------------------------------------------------------------------------------------

    def parse_completion(self, body: Mapping[str, Any]) -> ParsedRequest:
        given = parse_fields(body, COMPLETION, warn=self.warn_unknown)
        model = self.resolve_model(body)
        prompts = parse_prompts(given.get("prompt"))
        logprobs = self._check_count("logprobs", given.get("logprobs"), 5 if self.strict_openai else self.max_logprobs)
        request = self._parse_common(given, model, logprobs, max_tokens=given.get("max_tokens"), default_max_tokens=16)
        request.prompts = prompts
        return request

    def parse_chat(self, body: Mapping[str, Any]) -> ParsedRequest:
        given = parse_fields(body, CHAT, warn=self.warn_unknown)
        model = self.resolve_model(body)
        messages = parse_messages(given.get("messages"))
        template = self.chat_template_options(given)
        tools, required = self._parse_tools(given)
        top = self._check_count("top_logprobs", given.get("top_logprobs"), min(MAX_TOP_LOGPROBS, self.max_logprobs))
        wants_logprobs = given.get("logprobs", False)
        if top is not None and not wants_logprobs:
            raise bad_request("invalid_value", "top_logprobs needs logprobs to be true", "top_logprobs")
        name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
        if given.get("echo"):
            raise bad_request("unsupported_parameter", "echo is not supported here; use continue_final_message", "echo")
        param_aliases = {} if name == "max_tokens" else {"max_tokens": name}
        try:
            request = self._parse_common(
                given,
                model,
                (top or 0) if wants_logprobs else None,
                max_tokens=given.get(name),
                default_max_tokens=None,
            )
        except ApiError as api_error:
            raise rename_params(api_error, param_aliases) from None
        request.param_aliases |= param_aliases
        request.messages, request.template, request.tools, request.required_tool = messages, template, tools, required
        if required is not None:
            request.params = self._require_tool_call(
                request.params, [t for t in tools if required in ("*", t["function"]["name"])]
            )
        if tools:
            request.template["tools"] = tools
        request.parallel_tool_calls = given.get("parallel_tool_calls", True)
        request.include_reasoning = given.get("include_reasoning", True)
        request.add_special_tokens = given.get("add_special_tokens", False)
        return request

    def resolve_model(self, body: Mapping[str, Any]) -> str:
        """The model name of the response. Raises `ApiError` 404 for an unknown model."""
        first = self.model_names[0]
        if "model" not in body and not self.strict_openai:
            return first
        name = body.get("model")
        if name is None or name == "":
            raise bad_request("missing_required_parameter", f"model is missing; this server has {first}", "model")
        if not isinstance(name, str):
            raise bad_request("invalid_type", f"model must be a string, not {brief(name)}", "model")
        if name not in self.model_names:
            text = f"The model `{name}` does not exist. This server has {', '.join(self.model_names)}."
            raise ApiError(404, "model_not_found", text, "model")
        return name

    def chat_template_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the chat template."""
        kwargs, overrides = dict(self.template_kwargs), given.get("chat_template_kwargs", {})
        if len(overrides) > MAX_TEMPLATE_KWARGS:
            text = f"chat_template_kwargs has {len(overrides)} variables; the limit is {MAX_TEMPLATE_KWARGS}"
            raise bad_request("invalid_value", text, "chat_template_kwargs")
        for name, value in overrides.items():
            if isinstance(value, list | dict):
                text = f"chat_template_kwargs takes scalar values, not {brief(value)} for {name!r}"
                raise bad_request("invalid_value", text, "chat_template_kwargs")
            kwargs[name] = value
        if "reasoning_effort" in given:
            kwargs.setdefault("reasoning_effort", given["reasoning_effort"])
        template: dict[str, Any] = {"chat_template_kwargs": kwargs}
        if "chat_template" in given:
            if not self.allow_request_templates:
                text = "this server does not accept chat templates in requests (--trust-request-chat-template)"
                raise bad_request("template_not_allowed", text, "chat_template")
            template["chat_template"] = given["chat_template"]
        continues = template["continue_final_message"] = given.get("continue_final_message", False)
        template["add_generation_prompt"] = given.get("add_generation_prompt", not continues)
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
    ) -> ParsedRequest:
        stream = given.get("stream", False)
        options = given.get("stream_options")
        if options is not None:
            _check_stream_options(options, stream)
        beams = given.get("use_beam_search", False) or "beam_width" in given
        if self.strict_openai and isinstance(given.get("stop"), list) and len(given["stop"]) > 4:
            raise bad_request("array_above_max_length", f"stop has {len(given['stop'])} items; the limit is 4", "stop")
        param_aliases = {"structured_outputs": "response_format"} if given.get("structured_outputs") is None else {}
        try:
            if beams:
                params: SamplingParams | BeamSearchParams = self._beam_params(given, logprobs, max_tokens)
            else:
                params = self._sampling_params(given, logprobs, max_tokens, default_max_tokens)
        except UsageError as error:
            raise rename_params(to_api_error(error, ""), param_aliases) from None
        n = given.get("n", 1) if isinstance(params, SamplingParams) else params.n or params.beam_width
        width = params.width if isinstance(params, SamplingParams) else params.beam_width
        if self.max_num_seqs is not None and width > self.max_num_seqs:
            text = f"the request needs {width} concurrent sequences; the limit is {self.max_num_seqs}; lower n"
            raise bad_request("integer_out_of_range", text, "beam_width" if "beam_width" in given else "n")
        return ParsedRequest(
            model=model,
            params=params,
            stream=stream,
            include_usage=bool(options and options.get("include_usage")),
            continuous_usage=bool(options and options.get("continuous_usage_stats")),
            top_logprobs=logprobs,
            echo=given.get("echo", False),
            priority=self._priority(given.get("priority", 0)),
            cache_salt=_parse_cache_salt(given.get("cache_salt")),
            add_special_tokens=given.get("add_special_tokens", True),
            truncate=_parse_truncation(given.get("truncate_prompt_tokens")),
            return_token_ids=given.get("return_token_ids", False),
            return_tokens_as_ids=given.get("return_tokens_as_token_ids", False),
            n=n,
            param_aliases=param_aliases if "response_format" in given else {},
        )

    def _sampling_params(
        self, given: dict[str, Any], logprobs: int | None, max_tokens: int | None, default: int | None
    ) -> SamplingParams:
        self._check_sizes(given)
        values: dict[str, Any] = {name: given[name] for name in SAMPLING if name in given}
        if "logit_bias" in values:
            values["logit_bias"] = _parse_logit_bias(values["logit_bias"])
        if (num := self._check_count("prompt_logprobs", values.get("prompt_logprobs"), self.max_logprobs)) is not None:
            if given.get("stream"):
                raise bad_request("invalid_value", "prompt_logprobs are not streamed; remove stream", "prompt_logprobs")
            values["prompt_logprobs"] = num
        if "best_of" in given:
            if given.get("stream"):
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
        """Checks the lengths of lists before their items are processed."""
        for name, limit in (("stop_token_ids", MAX_STOP_IDS), ("allowed_token_ids", self.num_ids)):
            if limit is not None and (count := len(given.get(name, ()))) > limit:
                text = f"{name} has {count} token ids; the limit is {limit}"
                raise bad_request("array_above_max_length", text, name)
        size = sum(len(word) for word in given.get("bad_words", ()) if isinstance(word, str))
        if size > MAX_BAD_CHARS:
            text = f"bad_words has {size} characters; the limit is {MAX_BAD_CHARS}; send fewer or shorter words"
            raise bad_request("array_above_max_length", text, "bad_words")

    def _beam_params(self, given: dict[str, Any], logprobs: int | None, max_tokens: int | None) -> BeamSearchParams:
        self._check_sizes(given)
        if given.get("stream"):
            raise bad_request("invalid_value", "a beam search cannot be streamed; remove stream", "stream")
        if given.get("use_beam_search") is False:
            raise bad_request("invalid_value", "beam_width needs use_beam_search to be true", "beam_width")
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
        _check_schema_size([tool["function"].get("parameters") for tool in tools], "tools' parameters have", "tools")
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
        schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
        structured_output = StructuredOutputsParams(**self._with_whitespace_limit({"json": schema}))
        return dataclasses.replace(params, structured_outputs=structured_output)

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
        if value is not None and (value < 0 or (value > limit and limit >= 0)):
            raise bad_request("invalid_value", f"{name} is {value}; it must be from 0 to {limit}", name)
        return value

    def _priority(self, value: int) -> int:
        if value and not self.priority_scheduling:
            raise bad_request("invalid_value", "priority needs --scheduling-policy priority", "priority")
        if abs(value) > MAX_PRIORITY:
            text = f"priority is {value}; it must be from {-MAX_PRIORITY} to {MAX_PRIORITY}"
            raise bad_request("invalid_value", text, "priority")
        return value

    def _parse_tools(self, given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
        """The tools that the model may call, and the one that it must call ("*": any)."""
        tools = given.get("tools") or []
        names = validate_tools(tools)
        choice = given.get("tool_choice", "auto" if tools else "none")
        if tools and not self.has_tools:
            raise bad_request("unsupported_parameter", "this model's chat template does not support tools", "tools")
        if choice in ("none", "auto"):
            return ([] if choice == "none" else tools), None
        required = "*" if choice == "required" else _chosen_tool(choice)
        if required is None or (required != "*" and required not in names) or not tools:
            text = f"tool_choice is {brief(choice)}; it must be none, auto, required, or the name of a tool"
            raise bad_request("invalid_value", text, "tool_choice")
        return tools, required


def rename_params(api_error: ApiError, param_aliases: Mapping[str, str]) -> ApiError:
    """The error with the parameter names of the request, by `ParsedRequest.param_aliases`."""
    for name, alias in param_aliases.items():
        api_error.param = alias if api_error.param == name else api_error.param
        api_error.message = re.sub(rf"\b{name}\b", alias, api_error.message)
    return api_error


# -- the parts of a body -----------------------------------------------------------------------------------------------


def parse_prompts(value: Any) -> list[str | list[int]]:
    """The prompts of a completion, from a text, a list of texts, token ids, or a list of lists of token ids."""
    if value is None:
        raise bad_request("missing_required_parameter", "prompt is missing", "prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise bad_request("invalid_type", f"prompt must be a string or an array, not {brief(value)}", "prompt")
    if not value:
        raise bad_request("empty_array", "prompt is an empty array; send at least one", "prompt")
    first = value[0]
    if isinstance(first, int | float):  # one list of token ids
        return [parse_token_ids(value, "prompt")]
    if len(value) > MAX_PROMPTS:
        text = f"prompt has {len(value)} items; the limit is {MAX_PROMPTS}; send several requests"
        raise bad_request("array_above_max_length", text, "prompt")
    if isinstance(first, str):
        for i, item in enumerate(value):
            if not isinstance(item, str):
                raise bad_request("invalid_type", f"prompt[{i}] must be a string like prompt[0]", "prompt")
        return value
    prompts: list[str | list[int]] = []
    for i, item in enumerate(value):
        if not isinstance(item, list):
            raise bad_request("invalid_type", f"prompt[{i}] must be an array of token ids like prompt[0]", "prompt")
        if not item:
            raise bad_request("empty_array", f"prompt[{i}] is an empty array; send at least one token id", "prompt")
        prompts.append(parse_token_ids(item, f"prompt[{i}]"))
    return prompts


def parse_token_ids(values: list[Any], path: str) -> list[int]:
    if set(map(type, values)) <= {int} and (not values or (min(values) >= 0 and max(values) < 1 << 31)):
        return values  # the fast path
    for i, value in enumerate(values):
        if type(value) is int and 0 <= value < 1 << 31:
            continue
        if not isinstance(value, int | float):
            raise bad_request("invalid_type", f"{path}[{i}] must be a token id, not {brief(value)}", path.split("[")[0])
        raise bad_request("invalid_token_id", f"{path}[{i}] is {brief(value)}, not a token id", f"{path}[{i}]")
    return values


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """Messages as chat templates take them: each content one text, arguments of tool calls as objects."""
    if value is None:
        raise bad_request("missing_required_parameter", "messages is missing", "messages")
    if not value:
        raise bad_request("empty_array", "messages is an empty array; send at least one", "messages")
    if len(value) > MAX_MESSAGES:
        text = f"messages has {len(value)} items; the limit is {MAX_MESSAGES}"
        raise bad_request("array_above_max_length", text, "messages")
    return [parse_message(item, f"messages[{i}]") for i, item in enumerate(value)]


def decode_tool_arguments(body: Mapping[str, Any]) -> Iterator[Any]:
    """Replaces the argument strings of a body's tool calls by objects, in slices (see `cooperative`). Invalid ones are
    left for `parse_messages` to report. Raises `ApiError` for too many calls."""
    num_calls = 0
    for holder, kind in (("messages", "tool_calls"), ("input", "")):
        items = body.get(holder)
        for item in items if isinstance(items, list) else ():
            calls = (item.get(kind) if kind else [{"function": item}]) if isinstance(item, dict) else None
            for call in calls if isinstance(calls, list) else ():
                function = call.get("function") if isinstance(call, dict) else None
                if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
                    continue
                num_calls += 1
                if num_calls > MAX_CALLS:
                    text = f"{holder} has more than {MAX_CALLS} tool calls, the limit"
                    raise bad_request("array_above_max_length", text, holder)
                with contextlib.suppress(ApiError):
                    function["arguments"] = parse_arguments(function, "")
                yield YIELD_POINT


def parse_message(item: Any, path: str) -> dict[str, Any]:
    """One message. A parsed message is returned unchanged. `path`: its place in the request."""
    if not isinstance(item, dict):
        raise bad_request("invalid_type", f"{path} must be an object, not {brief(item)}", "messages")
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        text = f"{path}.role is {brief(role)}; it must be one of {', '.join(ROLES)}"
        raise bad_request("invalid_value", text, f"{path}.role")
    for name, value in item.items():
        if name not in MESSAGE_KEYS and name not in IGNORED_MESSAGE_KEYS and value is not None:
            raise bad_request("unknown_parameter", f"unknown message field {name[:64]!r}", f"{path}.{name}")
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    message["content"] = parse_content(item.get("content"), f"{path}.content", optional=role == "assistant")
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if (value := item.get(name)) is not None:
            if not isinstance(value, str):
                raise bad_request("invalid_type", f"{path}.{name} must be a string", f"{path}.{name}")
            message["reasoning_content" if name == "reasoning" else name] = value
    if (calls := item.get("tool_calls")) is not None:
        if not isinstance(calls, list):
            text = f"{path}.tool_calls must be an array, not {brief(calls)}"
            raise bad_request("invalid_type", text, f"{path}.tool_calls")
        if role == "assistant" and calls:
            message["tool_calls"] = _parse_tool_calls(calls, f"{path}.tool_calls")
    return message


def parse_content(value: Any, path: str, *, optional: bool = False) -> str:
    """The text of a message's content: a string, or text parts."""
    if isinstance(value, str):
        return value
    if value is None and optional:
        return ""
    if not isinstance(value, list):
        code = "invalid_value" if value is None else "invalid_type"
        raise bad_request(code, f"{path} must be a string or an array of parts, not {brief(value)}", path)
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text"):
            text = f"{path}[{i}] is of type {brief(kind)}; only text is supported"
            raise bad_request("unsupported_content", text, f"{path}[{i}].type")
        if not isinstance(part.get("text"), str):
            raise bad_request("invalid_type", f"{path}[{i}].text must be a string", f"{path}[{i}].text")
        texts.append(part["text"])
    return "\n".join(texts)


def _parse_tool_calls(value: list[Any], path: str) -> list[dict[str, Any]]:
    calls = []
    for i, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request("invalid_value", f"{path}[{i}] must have a function with a name", f"{path}[{i}]")
        arguments = parse_arguments(function, f"{path}[{i}].function.arguments")
        function = {"name": function["name"], "arguments": arguments}
        calls.append({"id": str(call.get("id", "")), "type": "function", "function": function})
    return calls


def parse_arguments(call: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A tool call's arguments as an object. A string is parsed as JSON, with the same depth limit as a body."""
    arguments = call.get("arguments", "{}")
    if isinstance(arguments, str) and len(arguments) > MAX_ARGUMENT_CHARS:
        text = f"{path} has {len(arguments)} characters; the limit is {MAX_ARGUMENT_CHARS}"
        raise bad_request("invalid_value", text, path)
    if isinstance(arguments, str) and not json_parser.too_deep(arguments.encode()):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments or "{}")
    if not isinstance(arguments, dict):
        text = f"{path} must be a JSON object in a string, of at most {json_parser.MAX_DEPTH} levels"
        raise bad_request("invalid_value", text, path)
    return arguments


def validate_tools(tools: Sequence[Any]) -> set[str]:
    """Checks tools and returns their names. Raises `ApiError` 400 for an invalid tool."""
    if len(tools) > MAX_TOOLS:
        raise bad_request("invalid_value", f"tools has {len(tools)} items; the limit is {MAX_TOOLS}", "tools")
    names: set[str] = set()
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            text = f"tools[{i}] must be a function with a name of 1 to 64 letters, digits, _, - and ."
            raise bad_request("invalid_value", text, "tools")
        if name in names:
            raise bad_request("invalid_value", f"tools has {name!r} twice; names must be unique", "tools")
        schema = function.get("parameters") if isinstance(function, dict) else None
        if schema is not None and (not isinstance(schema, dict) or schema.get("type", "object") != "object"):
            raise bad_request("invalid_value", f"parameters of tools[{i}] must be an object schema", "tools")
        names.add(name)
    return names


def _chosen_tool(choice: Any) -> str | None:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def parse_structured_output(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The output constraint as `SamplingParams.structured_outputs`, from structured_outputs or response_format."""
    structured, form = given.get("structured_outputs"), given.get("response_format")
    if structured is not None:
        kinds = [name for name in CONSTRAINTS if structured.get(name) not in (None, False)]
        if len(kinds) != 1:
            text = f"structured_outputs must have exactly one of {', '.join(CONSTRAINTS)}; it has {len(kinds)}"
            raise bad_request("invalid_value", text, "structured_outputs")
        if form is not None and form.get("type") != "text":
            raise bad_request("invalid_value", "set response_format or structured_outputs, not both", "response_format")
        _check_schema_size(structured.get("json"), "structured_outputs.json has", "structured_outputs")
        return {name: value for name, value in structured.items() if value is not None}
    kind = None if form is None else form.get("type")
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        text = f"response_format.type is {brief(kind)}; it must be text, json_object or json_schema"
        raise bad_request("invalid_json_schema", text, "response_format")
    holder = form.get("json_schema")
    holder = holder if isinstance(holder, dict) else {}
    schema = holder.get("schema")
    if not isinstance(schema, dict):
        text = "response_format.json_schema.schema must be an object"
        raise bad_request("invalid_json_schema", text, "response_format")
    _check_schema_size(schema, "response_format.json_schema.schema has", "response_format")
    return {"json": close_objects(schema) if holder.get("strict") is True else schema}


def _check_schema_size(schema: Any, subject: str, param: str) -> None:
    """Checked first, because compiling the schema takes a hundred times as long."""
    with contextlib.suppress(OverflowError):  # integers of more than 64 bits are reported by a later check
        if (size := len(msgspec.json.encode(schema))) > MAX_CHARS:
            text = f"{subject} {size} characters; the limit is {MAX_CHARS}; send a smaller schema"
            raise bad_request("invalid_json_schema", text, param)


def _check_stream_options(options: Mapping[str, Any], stream: bool) -> None:
    names = ("include_usage", "continuous_usage_stats")
    if not stream:
        raise bad_request("invalid_value", "stream_options needs stream to be true", "stream_options")
    for name, value in options.items():
        if name not in names or not isinstance(value, bool | None):
            text = f"stream_options has {name[:64]!r}; it takes {' and '.join(names)}, true or false"
            raise bad_request("invalid_value", text, "stream_options")


def _parse_logit_bias(value: Mapping[str, Any]) -> dict[int, Any]:
    if len(value) > MAX_BIASES:
        text = f"logit_bias has {len(value)} tokens; the limit is {MAX_BIASES}"
        raise bad_request("invalid_logit_bias", text, "logit_bias")
    for key in value:
        if not re.fullmatch(r"0|[1-9][0-9]{0,9}", key):
            raise bad_request("invalid_logit_bias", f"logit_bias has {key[:32]!r}, not a token id", "logit_bias")
    return {int(key): bias for key, bias in value.items()}


def _parse_cache_salt(value: str | None) -> bytes:
    if value is None:
        return b""
    if not 1 <= len(value) <= 256 or not value.isprintable():
        text = "cache_salt must be 1 to 256 printable characters"
        raise bad_request("invalid_value", text, "cache_salt")
    return value.encode()


def _parse_truncation(value: int | None) -> int | None:
    if value is not None and not 1 <= value <= INT32:
        text = f"truncate_prompt_tokens is {brief(value)}; it must be from 1 to {INT32}; remove it to keep all"
        raise bad_request("integer_out_of_range", text, "truncate_prompt_tokens")
    return value
