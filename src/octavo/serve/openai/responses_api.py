"""OpenAI's Responses API, /v1/responses, on top of chat completions. Responses are not stored.

A request body is converted to a chat body, and the chat's deltas to output items and their events:

    response.created, .in_progress
      response.output_item.added                       a message, reasoning, or a tool call
        response.content_part.added                    not for calls
          response.output_text.delta ...               or reasoning_text, or function_call_arguments
          response.output_text.done
        response.content_part.done
      response.output_item.done
    response.completed                                 or .incomplete
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from octavo.serve.openai import schema
from octavo.serve.openai.errors import ApiError, bad_request
from octavo.serve.openai.request import MAX_MESSAGES, parse_arguments, parse_content, parse_message, rename_params
from octavo.serve.openai.response import Json
from octavo.serve.openai.schema import BOOLEAN, INTEGER, NUMBER, OBJECT, STRING, Schema

FIELDS: dict[str, Schema] = {
    "model": STRING,
    "input": {"anyOf": [STRING, {"type": "array", "items": OBJECT}]},
    "instructions": STRING,
    "max_output_tokens": INTEGER,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "stream": BOOLEAN,
    "tools": {"type": "array", "items": OBJECT},
    "tool_choice": {},
    "parallel_tool_calls": BOOLEAN,
    "text": OBJECT,
    "reasoning": OBJECT,
    "priority": INTEGER,
    "cache_salt": STRING,
    "seed": INTEGER,
    "top_k": INTEGER,
    "min_p": NUMBER,
    "ignore_eos": BOOLEAN,
    "stop": {},
    "chat_template_kwargs": OBJECT,
    "truncation": STRING,
    "include": {"type": "array"},
}
CHAT_FIELDS = frozenset(FIELDS) & (frozenset(schema.CHAT) - {"tools", "tool_choice"})
PARAM_ALIASES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "structured_outputs": "text.format",
}
"""Chat parameters and their names in this API. A request that uses the chat's name is refused."""
STATEFUL = ("previous_response_id", "conversation", "background", "prompt")


def to_chat(body: Mapping[str, Any], *, warn: bool) -> dict[str, Any]:
    """The equivalent chat body. Raises `ApiError` 400."""
    for name in STATEFUL:
        if body.get(name):
            raise bad_request("unsupported_parameter", f"{name} is not supported; send the whole input", name)
    for name in PARAM_ALIASES.keys() & body.keys():
        raise bad_request("unsupported_parameter", f"{name} is not supported here; use {PARAM_ALIASES[name]}", name)
    given = schema.parse_fields({k: v for k, v in body.items() if k not in STATEFUL}, FIELDS, warn=warn)
    if "input" not in given:
        raise bad_request("missing_required_parameter", "input is missing", "input")
    chat: dict[str, Any] = {name: given[name] for name in CHAT_FIELDS if name in given}
    if "model" in body:
        chat["model"] = body["model"]
    messages = [{"role": "system", "content": given["instructions"]}] if "instructions" in given else []
    chat["messages"] = messages + _messages(given["input"])
    if "max_output_tokens" in given:
        chat["max_completion_tokens"] = given["max_output_tokens"]
    if given.get("tools"):
        chat["tools"] = [_tool(tool) for tool in given["tools"]]
    if isinstance(choice := given.get("tool_choice"), dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    if choice is not None:
        chat["tool_choice"] = choice
    form = given.get("text", {}).get("format")
    if isinstance(form, dict):
        holder = {"type": form.get("type")}
        chat["response_format"] = holder | ({"json_schema": form} if form.get("type") == "json_schema" else {})
    if isinstance(effort := given.get("reasoning", {}).get("effort"), str):
        chat["reasoning_effort"] = effort
    return chat


def to_responses_error(api_error: ApiError) -> ApiError:
    """An error of the chat with this API's parameter names. Errors of input items have them already."""
    if api_error.param in ("messages", "prompt"):
        api_error.message = re.sub(rf"^{api_error.param}\b", "input", api_error.message)
        api_error.param = "input"
    return rename_params(api_error, PARAM_ALIASES)


def _messages(value: Any) -> list[dict[str, Any]]:
    """Converts input items to chat messages. They are parsed here, so that errors name the input item."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        code = "empty_array" if value == [] else "invalid_type"
        raise bad_request(code, f"input must be a string or an array of items, not {schema.brief(value)}", "input")
    if len(value) > MAX_MESSAGES:
        text = f"input has {len(value)} items; the limit is {MAX_MESSAGES}"
        raise bad_request("array_above_max_length", text, "input")
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(value):
        path = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            messages.append(parse_message({k: v for k, v in item.items() if k in ("role", "content")}, path))
        elif kind == "function_call":
            if not isinstance(item.get("name"), str):
                raise bad_request("invalid_value", f"{path}.name must be the name of a function", f"{path}.name")
            function = {"name": item["name"], "arguments": parse_arguments(item, f"{path}.arguments")}
            call = {"id": item.get("call_id", ""), "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            output = parse_content(item.get("output"), f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": output})
        elif kind != "reasoning":  # earlier reasoning is not sent to the model
            text = f"{path} is of type {schema.brief(kind)}; use messages, function calls and their outputs"
            raise bad_request("unsupported_content", text, f"{path}.type")
    if not messages:
        raise bad_request("invalid_value", "input has only reasoning items; add a message", "input")
    return messages


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise bad_request("unsupported_parameter", "only tools of type function are supported", "tools")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


class ResponseEventBuilder:
    """Builds a response and its numbered events from a chat's deltas.

    Every event is (name, payload). The attribute `response` is the response built so far.
    """

    def __init__(self, name: str, model: str, chat: Mapping[str, Any], instructions: str | None = None) -> None:
        choice = chat.get("tool_choice", "auto")  # a chat nests the tool's name one level deeper
        self.response: Json = {
            "id": name,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": instructions,
            "metadata": {},
            "parallel_tool_calls": chat.get("parallel_tool_calls", True),
            "temperature": chat.get("temperature"),
            "top_p": chat.get("top_p"),
            "tool_choice": choice if isinstance(choice, str) else {"type": "function", **choice["function"]},
            "tools": [{"type": "function", **tool["function"]} for tool in chat.get("tools", ())],
            "max_output_tokens": chat.get("max_completion_tokens"),
            "usage": None,
        }
        self._number = 0
        self._kind = ""

    def begin(self) -> Iterator[tuple[str, Json]]:
        yield self._event("created", response=dict(self.response))
        yield self._event("in_progress", response=dict(self.response))

    def add(self, delta: Mapping[str, Any]) -> Iterator[tuple[str, Json]]:
        for name, kind in (("reasoning", "reasoning"), ("content", "message")):
            if delta.get(name):
                if self._kind != kind:
                    yield from self._end_item()
                    yield from self._begin_text(kind)
                part = self._item["content"][0]
                part["text"] += delta[name]
                more: Json = {"logprobs": []} if kind == "message" else {}
                yield self._item_event(f"{part['type']}.delta", content_index=0, delta=delta[name], **more)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield from self._end_item()
                yield from self._begin_call(call)
            if text := call["function"]["arguments"]:
                self._item["arguments"] += text
                yield self._item_event("function_call_arguments.delta", delta=text)

    def finish(self, reason: str | None, usage: Mapping[str, Any]) -> Iterator[tuple[str, Json]]:
        yield from self._end_item("incomplete" if reason == "length" else "completed")
        self.response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"] or {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        self.response["status"] = "incomplete" if reason == "length" else "completed"
        if reason == "length":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        yield self._event(self.response["status"], response=self.response)

    # -- items ---------------------------------------------------------------------------------------------------------

    @property
    def _item(self) -> Json:
        item: Json = self.response["output"][-1]
        return item

    def _begin_text(self, kind: str) -> Iterator[tuple[str, Json]]:
        self._kind = kind
        extra: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
        name = f"{'msg' if kind == 'message' else 'rs'}_{secrets.token_hex(12)}"
        item: Json = {"id": name, "type": kind, "status": "in_progress", "content": [], **extra}
        self.response["output"].append(item)
        yield self._event("output_item.added", output_index=self._index, item={**item, "content": []})
        part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        if kind == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
        item["content"].append(part)
        yield self._item_event("content_part.added", content_index=0, part=dict(part))

    def _begin_call(self, call: Mapping[str, Any]) -> Iterator[tuple[str, Json]]:
        self._kind = "call"
        item = {
            "id": f"fc_{secrets.token_hex(12)}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": "",
        }
        self.response["output"].append(item)
        yield self._event("output_item.added", output_index=self._index, item=dict(item))

    def _end_item(self, status: str = "completed") -> Iterator[tuple[str, Json]]:
        if not self._kind:
            return
        item, self._kind = self._item, ""
        item["status"] = status
        if item["type"] == "function_call":
            yield self._item_event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            part = item["content"][0]
            more: Json = {"logprobs": []} if part["type"] == "output_text" else {}
            yield self._item_event(f"{part['type']}.done", content_index=0, text=part["text"], **more)
            yield self._item_event("content_part.done", content_index=0, part=part)
        yield self._event("output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1

    def _item_event(self, name: str, /, **fields: Any) -> tuple[str, Json]:
        return self._event(name, item_id=self._item["id"], output_index=self._index, **fields)

    def _event(self, name: str, /, **fields: Any) -> tuple[str, Json]:
        event = {"type": f"response.{name}", "sequence_number": self._number, **fields}
        self._number += 1
        return event["type"], event

    def error_event(self, api_error: ApiError) -> tuple[str, Json]:
        """The last event of a stream whose request fails."""
        error = api_error.as_dict()["error"]
        fields = {name: error[name] for name in ("code", "message", "param")}
        return "error", {"type": "error", "sequence_number": self._number, **fields}
