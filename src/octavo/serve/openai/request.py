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

from octavo.engine.engine import MAX_PRIORITY
from octavo.errors import UsageError
from octavo.frontend.cooperative import YIELD_POINT
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import RequestOutputKind, SamplingParams
from octavo.params.structured_outputs import MAX_CHARS, StructuredOutputsParams
from octavo.params.validation import INT32
from octavo.serve.http import json_parser
from octavo.serve.openai import schema as fields
from octavo.serve.openai.errors import ApiError, bad_request, to_api_error
from octavo.serve.openai.strict_schema import close_objects

MAX_PROMPTS = 256
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_BIASES = 1024
MAX_STOP_IDS = 1024
MAX_BAD_CHARS = 1 << 16
"""Of all bad words together."""
MAX_CALLS = 4096
"""Of tools, in all messages."""
MAX_ARGUMENT_CHARS = MAX_CHARS
"""Of one call's arguments."""
MAX_TEMPLATE_KWARGS = 64
MAX_TOP_LOGPROBS = 20
ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"})
IGNORED_MESSAGE_KEYS = frozenset({"refusal", "annotations", "audio", "function_call", "id", "index"})
"""What clients leave in a message that they had from a server; it says nothing to a model."""
TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
BEAM_SEARCH_UNSUPPORTED = frozenset(fields.SAMPLING) | {"echo", "response_format", "structured_outputs"}
BEAM_SEARCH_UNSUPPORTED -= {
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
}
"""What a beam search cannot have; `NEUTRAL_VALUES` is what says nothing, where that is not false."""
NEUTRAL_VALUES = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "response_format": {"type": "text"},
}
STRUCTURES = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(slots=True, kw_only=True)
class ParsedRequest:
    """One request, understood.

    prompts      of a completion: each a text or a list of token ids
    messages     of a chat, as its template takes them; `template` is what else that takes
    top          how many likeliest tokens are told at each position; None: no log-probabilities
    params       what each prompt is sampled with
    tools        those that may be called: none with tool_choice "none"
    forced_tool  the one that must be; "*": any of them
    sent_as      what a parameter is called in the request, where errors know it by another name
    """

    model: str
    params: SamplingParams | BeamSearchParams
    prompts: list[str | list[int]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    template: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    required_tool: str | None = None
    parallel_tool_calls: bool = True
    reasoning: bool = True
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    top: int | None = None
    echo: bool = False
    priority: int = 0
    salt: bytes = b""
    add_special_tokens: bool = True
    truncate: int | None = None
    token_ids: bool = False
    tokens_as_ids: bool = False
    n: int = 1
    param_aliases: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestParser:
    """What a request is read against.

    model_names    names that it may use, the first of which answers
    num_ids        token ids that the model has; None: not known here
    by_priority    whether the scheduler goes by priorities
    has_tools      whether the model's chat template shows tools to it
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
        given = fields.read(body, fields.COMPLETION, warn=self.warn_unknown)
        model = self.resolve_model(body)
        prompts = parse_prompts(given.get("prompt"))
        logprobs = self._count("logprobs", given.get("logprobs"), 5 if self.strict_openai else self.max_logprobs)
        request = self._shared(given, model, logprobs, max_tokens=given.get("max_tokens"), default_max_tokens=16)
        request.prompts = prompts
        return request

    def parse_chat(self, body: Mapping[str, Any]) -> ParsedRequest:
        given = fields.read(body, fields.CHAT, warn=self.warn_unknown)
        model = self.resolve_model(body)
        messages = parse_messages(given.get("messages"))
        template = self.chat_template_options(given)
        tools, forced = self._tools(given)
        top = self._count("top_logprobs", given.get("top_logprobs"), min(MAX_TOP_LOGPROBS, self.max_logprobs))
        wants_logprobs = given.get("logprobs", False)
        if top is not None and not wants_logprobs:
            raise bad_request("invalid_value", "top_logprobs needs logprobs to be true", "top_logprobs")
        name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
        if given.get("echo"):
            raise bad_request(
                "unsupported_parameter", "echo is not supported for chats; continue_final_message is", "echo"
            )
        param_aliases = {} if name == "max_tokens" else {"max_tokens": name}
        try:
            request = self._shared(
                given,
                model,
                (top or 0) if wants_logprobs else None,
                max_tokens=given.get(name),
                default_max_tokens=None,
            )
        except ApiError as problem:
            raise rename_params(problem, param_aliases) from None
        request.param_aliases |= param_aliases
        request.messages, request.template, request.tools, request.required_tool = messages, template, tools, forced
        if forced is not None:
            request.params = self._forced(request.params, [t for t in tools if forced in ("*", t["function"]["name"])])
        if tools:
            request.template["tools"] = tools
        request.parallel_tool_calls = given.get("parallel_tool_calls", True)
        request.reasoning = given.get("include_reasoning", True)
        request.add_special_tokens = given.get("add_special_tokens", False)
        return request

    def resolve_model(self, body: Mapping[str, Any]) -> str:
        """The name that the response has. Raises 404 for a model that is not served."""
        first = self.model_names[0]
        if "model" not in body and not self.strict_openai:
            return first
        name = body.get("model")
        if name is None or name == "":
            raise bad_request("missing_required_parameter", f"model is missing; there is {first}", "model")
        if not isinstance(name, str):
            raise bad_request("invalid_type", f"model must be a string, not {fields.brief(name)}", "model")
        if name not in self.model_names:
            text = f"The model `{name}` does not exist. There is {', '.join(self.model_names)}."
            raise ApiError(404, "model_not_found", text, "model")
        return name

    def chat_template_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What the chat template is rendered with."""
        kwargs, own = dict(self.template_kwargs), given.get("chat_template_kwargs", {})
        if len(own) > MAX_TEMPLATE_KWARGS:
            text = f"chat_template_kwargs has {len(own)} variables, at most {MAX_TEMPLATE_KWARGS} are allowed"
            raise bad_request("invalid_value", text, "chat_template_kwargs")
        for name, value in own.items():
            if isinstance(value, list | dict):
                text = f"chat_template_kwargs takes single values, not {fields.brief(value)} for {name!r}"
                raise bad_request("invalid_value", text, "chat_template_kwargs")
            kwargs[name] = value
        if "reasoning_effort" in given:
            kwargs.setdefault("reasoning_effort", given["reasoning_effort"])
        template: dict[str, Any] = {"chat_template_kwargs": kwargs}
        if "chat_template" in given:
            if not self.allow_request_templates:
                text = "this server takes no chat templates from requests (--trust-request-chat-template)"
                raise bad_request("template_not_allowed", text, "chat_template")
            template["chat_template"] = given["chat_template"]
        goes_on = template["continue_final_message"] = given.get("continue_final_message", False)
        template["add_generation_prompt"] = given.get("add_generation_prompt", not goes_on)
        if goes_on and template["add_generation_prompt"]:
            text = "continue_final_message and add_generation_prompt exclude each other; set one to false"
            raise bad_request("invalid_value", text, "continue_final_message")
        return template

    # -- what both have ------------------------------------------------------------------------------------------------

    def _shared(
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
            raise bad_request(
                "array_above_max_length", f"stop has {len(given['stop'])} strings, at most 4 are allowed", "stop"
            )
        param_aliases = {"structured_outputs": "response_format"} if given.get("structured_outputs") is None else {}
        try:
            if beams:
                params: SamplingParams | BeamSearchParams = self._beams(given, logprobs, max_tokens)
            else:
                params = self._sampling(given, logprobs, max_tokens, default_max_tokens)
        except UsageError as error:
            raise rename_params(to_api_error(error, ""), param_aliases) from None
        n = given.get("n", 1) if isinstance(params, SamplingParams) else params.n or params.beam_width
        width = params.width if isinstance(params, SamplingParams) else params.beam_width
        if self.max_num_seqs is not None and width > self.max_num_seqs:
            text = f"{width} sequences do not run together; at most {self.max_num_seqs} do: lower n"
            raise bad_request("integer_out_of_range", text, "beam_width" if "beam_width" in given else "n")
        return ParsedRequest(
            model=model,
            params=params,
            stream=stream,
            include_usage=bool(options and options.get("include_usage")),
            continuous_usage=bool(options and options.get("continuous_usage_stats")),
            top=logprobs,
            echo=given.get("echo", False),
            priority=self._priority(given.get("priority", 0)),
            salt=_salt(given.get("cache_salt")),
            add_special_tokens=given.get("add_special_tokens", True),
            truncate=_truncation(given.get("truncate_prompt_tokens")),
            token_ids=given.get("return_token_ids", False),
            tokens_as_ids=given.get("return_tokens_as_token_ids", False),
            n=n,
            param_aliases=param_aliases if "response_format" in given else {},
        )

    def _sampling(
        self, given: dict[str, Any], logprobs: int | None, max_tokens: int | None, default: int | None
    ) -> SamplingParams:
        self._check_sizes(given)
        values: dict[str, Any] = {name: given[name] for name in fields.SAMPLING if name in given}
        if "logit_bias" in values:
            values["logit_bias"] = _biases(values["logit_bias"])
        if (limit := self._count("prompt_logprobs", values.get("prompt_logprobs"), self.max_logprobs)) is not None:
            if given.get("stream"):
                raise bad_request(
                    "invalid_value", "prompt_logprobs are not streamed; leave stream out", "prompt_logprobs"
                )
            values["prompt_logprobs"] = limit
        if "best_of" in given:
            if given.get("stream"):
                raise bad_request(
                    "invalid_value", "the best are known at the end; leave out best_of or stream", "best_of"
                )
            values["best_of"] = given["best_of"]
        if (structure := parse_structured_output(given)) is not None:
            values["structured_outputs"] = self._spaced(structure)
        values["echo"] = given.get("echo", False)
        values["logprobs"] = logprobs
        if max_tokens is not None:
            values["max_tokens"] = max_tokens
        elif default is None:
            values["max_tokens"] = None
        values["output_kind"] = RequestOutputKind.DELTA
        return dataclasses.replace(self.defaults, **values)

    def _check_sizes(self, given: Mapping[str, Any]) -> None:
        """Lists are counted before anything looks at each of their items."""
        for name, most in (("stop_token_ids", MAX_STOP_IDS), ("allowed_token_ids", self.num_ids)):
            if most is not None and (count := len(given.get(name, ()))) > most:
                text = f"{name} has {count} token ids, at most {most} are allowed; send fewer"
                raise bad_request("array_above_max_length", text, name)
        size = sum(len(word) for word in given.get("bad_words", ()) if isinstance(word, str))
        if size > MAX_BAD_CHARS:
            text = f"bad_words has {size} characters, at most {MAX_BAD_CHARS} are allowed; send fewer or shorter words"
            raise bad_request("array_above_max_length", text, "bad_words")

    def _beams(self, given: dict[str, Any], logprobs: int | None, max_tokens: int | None) -> BeamSearchParams:
        self._check_sizes(given)
        if given.get("stream"):
            raise bad_request("invalid_value", "a beam search has no answer before its end; leave stream out", "stream")
        if given.get("use_beam_search") is False:
            raise bad_request("invalid_value", "beam_width needs use_beam_search to be true", "beam_width")
        none_drawn = {"temperature": 0, "top_p": 1, "min_p": 0, "top_k": 0, "seed": None, "best_of": None}
        for name, neutral in none_drawn.items():
            if name in given and given[name] != neutral and not (name == "top_k" and given[name] == -1):
                text = f"a beam search draws nothing; leave {name} out"
                raise bad_request("invalid_value", text, "best_of" if name == "best_of" else "use_beam_search")
        for name in BEAM_SEARCH_UNSUPPORTED & given.keys():
            if given[name] != NEUTRAL_VALUES.get(name, False):
                raise bad_request("invalid_value", f"a beam search has no {name}; leave it out", name)
        n = given.get("n", 1)
        width = given.get("beam_width", n)
        if not isinstance(n, int) or not 1 <= n <= 128:
            raise bad_request("integer_out_of_range", f"n is {n}, it must be from 1 to 128", "n")
        if n > width >= 1:
            raise bad_request(
                "invalid_value", f"n is {n} and beam_width {width}; answers are at most the beams", "beam_width"
            )
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

    def _forced(self, params: SamplingParams | BeamSearchParams, tools: Sequence[Mapping[str, Any]]) -> SamplingParams:
        """The output must be a call of one of these tools. A schema's "#/$defs/..." is its own: each has a name, which
        is what such references are looked up from."""
        if not isinstance(params, SamplingParams) or params.structured_outputs is not None:
            raise bad_request(
                "invalid_value", "tool_choice says what the answer is; leave the other constraint out", "tool_choice"
            )
        _check_schema_size(
            [tool["function"].get("parameters") for tool in tools], "the parameters of tools have", "tools"
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
        schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
        structure = StructuredOutputsParams(**self._spaced({"json": schema}))
        return dataclasses.replace(params, structured_outputs=structure)

    def _spaced(self, structure: dict[str, Any]) -> dict[str, Any]:
        """With the server's bound of white space in JSON, unless the request or the schema has one."""
        own = {"disable_any_whitespace", "whitespace_pattern"} & structure.keys()
        schema = structure.get("json")
        if own or (schema is None and not structure.get("json_object")) or self.max_json_whitespace == 12:
            return structure  # the grammar's own bound
        if isinstance(schema, Mapping) and "x-guidance" in schema:
            return structure
        if self.max_json_whitespace == 0:
            return {**structure, "disable_any_whitespace": True}
        most = "" if self.max_json_whitespace < 0 else str(self.max_json_whitespace)
        return {**structure, "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{most}}}"}

    def _count(self, name: str, value: int | None, most: int) -> int | None:
        if value is not None and (value < 0 or (value > most and most >= 0)):
            raise bad_request("invalid_value", f"{name} is {value}, it must be from 0 to {most}", name)
        return value

    def _priority(self, value: int) -> int:
        if value and not self.priority_scheduling:
            raise bad_request("invalid_value", "priority needs a server with --scheduling-policy priority", "priority")
        if abs(value) > MAX_PRIORITY:
            text = f"priority is {value}, it must be from {-MAX_PRIORITY} to {MAX_PRIORITY}"
            raise bad_request("invalid_value", text, "priority")
        return value

    def _tools(self, given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
        """The tools that may be called, and the one that must be ("*": any)."""
        tools = given.get("tools") or []
        names = validate_tools(tools)
        choice = given.get("tool_choice", "auto" if tools else "none")
        if tools and not self.has_tools:
            raise bad_request("unsupported_parameter", "this model's chat template has no place for tools", "tools")
        if choice in ("none", "auto"):
            return ([] if choice == "none" else tools), None
        forced = "*" if choice == "required" else _chosen(choice)
        if forced is None or (forced != "*" and forced not in names) or not tools:
            text = f"tool_choice is {fields.brief(choice)}; it is none, auto, required, or names one of tools"
            raise bad_request("invalid_value", text, "tool_choice")
        return tools, forced


def rename_params(problem: ApiError, param_aliases: Mapping[str, str]) -> ApiError:
    """The problem, with the names that the request has for its parameters."""
    for ours, sent in param_aliases.items():
        problem.param = sent if problem.param == ours else problem.param
        problem.message = re.sub(rf"\b{ours}\b", sent, problem.message)
    return problem


# -- the parts of a body -----------------------------------------------------------------------------------------------


def parse_prompts(value: Any) -> list[str | list[int]]:
    """The prompts of a completion: a text, a list of texts, token ids, or a list of lists of them."""
    if value is None:
        raise bad_request("missing_required_parameter", "prompt is missing", "prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise bad_request("invalid_type", f"prompt must be a string or an array, not {fields.brief(value)}", "prompt")
    if not value:
        raise bad_request("empty_array", "prompt is an empty array; give at least one", "prompt")
    first = value[0]
    if isinstance(first, int | float):  # one list of token ids
        return [parse_token_ids(value, "prompt")]
    if len(value) > MAX_PROMPTS:
        text = f"prompt has {len(value)} items, at most {MAX_PROMPTS} are allowed; send several requests"
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
            raise bad_request("empty_array", f"prompt[{i}] is an empty array; give at least one token id", "prompt")
        prompts.append(parse_token_ids(item, f"prompt[{i}]"))
    return prompts


def parse_token_ids(values: list[Any], path: str) -> list[int]:
    if set(map(type, values)) <= {int} and (not values or (min(values) >= 0 and max(values) < 1 << 31)):
        return values  # the usual, many times as fast
    for i, value in enumerate(values):
        if type(value) is int and 0 <= value < 1 << 31:
            continue
        if not isinstance(value, int | float):
            raise bad_request(
                "invalid_type", f"{path}[{i}] must be a token id, not {fields.brief(value)}", path.split("[")[0]
            )
        raise bad_request(
            "invalid_token_id", f"{path}[{i}] is {fields.brief(value)}, which is no token id", f"{path}[{i}]"
        )
    return values


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """A conversation as chat templates take it: each content one text, the arguments of calls as objects."""
    if value is None:
        raise bad_request("missing_required_parameter", "messages is missing", "messages")
    if not value:
        raise bad_request("empty_array", "messages is an empty array; give at least one", "messages")
    if len(value) > MAX_MESSAGES:
        text = f"messages has {len(value)} items, at most {MAX_MESSAGES} are allowed"
        raise bad_request("array_above_max_length", text, "messages")
    return [parse_message(item, f"messages[{i}]") for i, item in enumerate(value)]


def decode_tool_arguments(body: Mapping[str, Any]) -> Iterator[Any]:
    """Put objects in the place of the strings that calls in a body have as arguments, in slices: what holds of them is
    found where the messages are read. Raises `ApiError` for too many calls."""
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
                    text = f"{holder} has more than {MAX_CALLS} calls of tools; send fewer"
                    raise bad_request("array_above_max_length", text, holder)
                with contextlib.suppress(ApiError):
                    function["arguments"] = parse_arguments(function, "")
                yield YIELD_POINT


def parse_message(item: Any, path: str) -> dict[str, Any]:
    """One message of it; what it makes it leaves as it is. `path`: where the request has it."""
    if not isinstance(item, dict):
        raise bad_request("invalid_type", f"{path} must be an object, not {fields.brief(item)}", "messages")
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        text = f"{path}.role is {fields.brief(role)}, it must be one of {', '.join(ROLES)}"
        raise bad_request("invalid_value", text, f"{path}.role")
    for name, value in item.items():
        if name not in MESSAGE_KEYS and name not in IGNORED_MESSAGE_KEYS and value is not None:
            raise bad_request("unknown_parameter", f"a message has no {name[:64]!r}", f"{path}.{name}")
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    message["content"] = parse_content(item.get("content"), f"{path}.content", may_lack=role == "assistant")
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if (value := item.get(name)) is not None:
            if not isinstance(value, str):
                raise bad_request("invalid_type", f"{path}.{name} must be a string", f"{path}.{name}")
            message["reasoning_content" if name == "reasoning" else name] = value
    if (calls := item.get("tool_calls")) is not None:
        if not isinstance(calls, list):
            text = f"{path}.tool_calls must be an array, not {fields.brief(calls)}"
            raise bad_request("invalid_type", text, f"{path}.tool_calls")
        if role == "assistant" and calls:
            message["tool_calls"] = _calls(calls, f"{path}.tool_calls")
    return message


def parse_content(value: Any, path: str, *, may_lack: bool = False) -> str:
    """The text of a content, which may be in parts."""
    if isinstance(value, str):
        return value
    if value is None and may_lack:
        return ""
    if not isinstance(value, list):
        code = "invalid_value" if value is None else "invalid_type"
        raise bad_request(code, f"{path} must be a string or an array of parts, not {fields.brief(value)}", path)
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text"):
            text = f"{path}[{i}] is of type {fields.brief(kind)}; this model reads text"
            raise bad_request("unsupported_content", text, f"{path}[{i}].type")
        if not isinstance(part.get("text"), str):
            raise bad_request("invalid_type", f"{path}[{i}].text must be a string", f"{path}[{i}].text")
        texts.append(part["text"])
    return "\n".join(texts)


def _calls(value: list[Any], path: str) -> list[dict[str, Any]]:
    calls = []
    for i, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(
                "invalid_value", f"{path}[{i}] must be a call with a function and its name", f"{path}[{i}]"
            )
        arguments = parse_arguments(function, f"{path}[{i}].function.arguments")
        function = {"name": function["name"], "arguments": arguments}
        calls.append({"id": str(call.get("id", "")), "type": "function", "function": function})
    return calls


def parse_arguments(call: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A call's arguments as an object. In a string they are JSON, which may be no deeper than a body."""
    arguments = call.get("arguments", "{}")
    if isinstance(arguments, str) and len(arguments) > MAX_ARGUMENT_CHARS:
        text = f"{path} has {len(arguments)} characters, at most {MAX_ARGUMENT_CHARS} are allowed; shorten it"
        raise bad_request("invalid_value", text, path)
    if isinstance(arguments, str) and not json_parser.too_deep(arguments.encode()):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments or "{}")
    if not isinstance(arguments, dict):
        text = f"{path} must be a JSON object in a string, of at most {json_parser.MAX_DEPTH} levels"
        raise bad_request("invalid_value", text, path)
    return arguments


def validate_tools(tools: Sequence[Any]) -> set[str]:
    """The names of tools. Raises `ApiError` 400 for one that is none."""
    if len(tools) > MAX_TOOLS:
        raise bad_request("invalid_value", f"tools has {len(tools)} items, at most {MAX_TOOLS} are allowed", "tools")
    names: set[str] = set()
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            text = f"tools[{i}] must be a function with a name of 1 to 64 letters, digits, _, - and ."
            raise bad_request("invalid_value", text, "tools")
        if name in names:
            raise bad_request("invalid_value", f"tools has {name!r} twice; names must differ", "tools")
        schema = function.get("parameters") if isinstance(function, dict) else None
        if schema is not None and (not isinstance(schema, dict) or schema.get("type", "object") != "object"):
            raise bad_request(
                "invalid_value", f"the parameters of tools[{i}] must be the JSON schema of an object", "tools"
            )
        names.add(name)
    return names


def _chosen(choice: Any) -> str | None:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def parse_structured_output(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the output must be, as `SamplingParams.structured_outputs`, from either of the two ways to say so."""
    structured, form = given.get("structured_outputs"), given.get("response_format")
    if structured is not None:
        kinds = [name for name in STRUCTURES if structured.get(name) not in (None, False)]
        if len(kinds) != 1:
            text = f"structured_outputs has exactly one of {', '.join(STRUCTURES)}, not {len(kinds)}"
            raise bad_request("invalid_value", text, "structured_outputs")
        if form is not None and form.get("type") != "text":
            raise bad_request(
                "invalid_value", "give response_format or structured_outputs, not both", "response_format"
            )
        _check_schema_size(structured.get("json"), "structured_outputs.json has", "structured_outputs")
        return {name: value for name, value in structured.items() if value is not None}
    kind = None if form is None else form.get("type")
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        text = f"response_format.type is {fields.brief(kind)}; it is text, json_object or json_schema"
        raise bad_request("invalid_json_schema", text, "response_format")
    holder = form.get("json_schema")
    holder = holder if isinstance(holder, dict) else {}
    schema = holder.get("schema")
    if not isinstance(schema, dict):
        raise bad_request(
            "invalid_json_schema", "response_format.json_schema.schema must be an object", "response_format"
        )
    _check_schema_size(schema, "response_format.json_schema.schema has", "response_format")
    return {"json": close_objects(schema) if holder.get("strict") is True else schema}


def _check_schema_size(schema: Any, what: str, param: str) -> None:
    """Before work that takes a hundred times as long."""
    with contextlib.suppress(OverflowError):  # an integer of more than 64 bits: the check behind it has them
        if (size := len(msgspec.json.encode(schema))) > MAX_CHARS:
            text = f"{what} {size} characters, at most {MAX_CHARS} can be kept to; send a smaller schema"
            raise bad_request("invalid_json_schema", text, param)


def _check_stream_options(options: Mapping[str, Any], stream: bool) -> None:
    known = ("include_usage", "continuous_usage_stats")
    if not stream:
        raise bad_request("invalid_value", "stream_options needs stream to be true", "stream_options")
    for name, value in options.items():
        if name not in known or not isinstance(value, bool | None):
            text = f"stream_options has {name[:64]!r}; it takes {' and '.join(known)}, true or false"
            raise bad_request("invalid_value", text, "stream_options")


def _biases(value: Mapping[str, Any]) -> dict[int, Any]:
    if len(value) > MAX_BIASES:
        text = f"logit_bias has {len(value)} tokens, at most {MAX_BIASES} are allowed"
        raise bad_request("invalid_logit_bias", text, "logit_bias")
    for key in value:
        if not re.fullmatch(r"0|[1-9][0-9]{0,9}", key):
            raise bad_request("invalid_logit_bias", f"logit_bias has {key[:32]!r}, which is no token id", "logit_bias")
    return {int(key): bias for key, bias in value.items()}


def _salt(value: str | None) -> bytes:
    if value is None:
        return b""
    if not 1 <= len(value) <= 256 or not value.isprintable():
        text = "cache_salt must be 1 to 256 printable characters"
        raise bad_request("invalid_value", text, "cache_salt")
    return value.encode()


def _truncation(value: int | None) -> int | None:
    if value is not None and not 1 <= value <= INT32:
        given = fields.brief(value)
        text = (
            f"truncate_prompt_tokens is {given}, it must be from 1 to {INT32}; leave it out to keep all of the prompt"
        )
        raise bad_request("integer_out_of_range", text, "truncate_prompt_tokens")
    return value
