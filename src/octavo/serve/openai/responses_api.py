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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from octavo.serve.openai import schema
from octavo.serve.openai.errors import ApiError, bad_request
from octavo.serve.openai.request import check_arguments, parse_content, parse_tools, rename_params, tool_call
from octavo.serve.openai.response import Json
from octavo.serve.openai.schema import ChatRequest, ResponseRequest

CHAT_FIELDS = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "parallel_tool_calls",
    "priority",
    "cache_salt",
    "seed",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "spec",
    "stop",
    "chat_template_kwargs",
)
"""Parameters that a chat has under the same name."""
LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that asks for log-probabilities; `top_logprobs` does as well."""
PARAM_ALIASES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "structured_outputs": "text.format",
}
"""Chat parameters and their names in this API."""


def to_chat(body: ResponseRequest) -> tuple[ChatRequest, list[dict[str, Any]], list[dict[str, Any]]]:
    """The equivalent chat, its messages and its tools. Raises `ApiError` 400."""
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    tools = parse_tools(body.tools)
    if any(tool.get("type") != "function" for tool in tools):
        raise bad_request("unsupported_parameter", "only tools of type function are supported", "tools")
    nested = [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in tools]
    choice, form = body.tool_choice, None if body.text is None else body.text.format
    has_logprobs = bool(body.top_logprobs) or LOGPROBS in (body.include or ())
    chat = ChatRequest(
        messages=[],
        max_completion_tokens=body.max_output_tokens,
        tool_choice=schema.ToolChoice(choice) if isinstance(choice, schema.ChosenFunction) else choice,
        response_format=schema.JsonSchemaFormat(form) if isinstance(form, schema.FlatJsonSchemaFormat) else form,
        logprobs=has_logprobs,
        truncate_prompt_tokens=-1 if body.truncation == "auto" else None,
        top_logprobs=body.top_logprobs if has_logprobs else None,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        **{name: getattr(body, name) for name in CHAT_FIELDS},
    )
    return chat, messages + _messages(body.input), nested


def to_responses_error(api_error: ApiError) -> ApiError:
    """An error of the chat with this API's parameter names. Errors of input items have them already."""
    if api_error.param in ("messages", "prompt"):
        api_error.message = re.sub(rf"^{api_error.param}\b", "input", api_error.message)
        api_error.param = "input"
    return rename_params(api_error, PARAM_ALIASES)


def _messages(items: str | list[schema.InputItem]) -> list[dict[str, Any]]:
    """Converts input items to chat messages, as `parse_messages` returns them. Errors name the input item."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    check_arguments([item.arguments for item in items if item.type == "function_call"], "input")
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        path = f"input[{i}]"
        if item.type == "message":
            if item.role is None:
                raise bad_request("invalid_value", f"{path}.role is missing", f"{path}.role")
            content = parse_content(item.content, f"{path}.content", item.role)
            messages.append({"role": "system" if item.role == "developer" else item.role, "content": content})
        elif item.type == "function_call":
            if item.name is None:
                raise bad_request("invalid_value", f"{path}.name must be the name of a function", f"{path}.name")
            call = tool_call(item.call_id, item.name, item.arguments, f"{path}.arguments")
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif item.type == "function_call_output":
            output = parse_content(item.output, f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": item.call_id or "", "content": output})
        elif item.type != "reasoning":  # earlier reasoning is not sent to the model
            text = f"{path} is of type {item.type!r:.60}; use messages, function calls and their outputs"
            raise bad_request("unsupported_content", text, f"{path}.type")
    if not messages:
        raise bad_request("invalid_value", "input has only reasoning items; add a message", "input")
    return messages


class ResponseEventBuilder:
    """Builds a response and its numbered events from a chat's deltas.

    Every event is (name, payload). The attribute `response` is the response built so far.
    """

    def __init__(self, name: str, model: str, body: ResponseRequest, tools: Sequence[Mapping[str, Any]]) -> None:
        choice = "auto" if body.tool_choice is None else body.tool_choice
        self.response: Json = {
            "id": name,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "metadata": {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tool_choice": choice if isinstance(choice, str) else {"type": "function", "name": choice.name},
            "tools": [{"type": "function", **tool["function"]} for tool in tools],
            "max_output_tokens": body.max_output_tokens,
            "top_logprobs": body.top_logprobs or 0,
            "truncation": body.truncation or "disabled",
            "usage": None,
        }
        self._number = 0
        self._kind = ""
        self._logprobs: list[Any] = []  # of tokens whose text is held back

    def begin(self) -> Iterator[tuple[str, Json]]:
        yield self._event("created", response=dict(self.response))
        yield self._event("in_progress", response=dict(self.response))

    def add(self, delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None = None) -> Iterator[tuple[str, Json]]:
        """`logprobs`: those of a chat's choice. Only messages keep them."""
        if delta.get("reasoning") or delta.get("tool_calls"):
            self._logprobs = []
        elif logprobs is not None:
            self._logprobs += logprobs["content"]
        for name, kind in (("reasoning", "reasoning"), ("content", "message")):
            if delta.get(name):
                if self._kind != kind:
                    yield from self._end_item()
                    yield from self._begin_text(kind)
                part = self._item["content"][0]
                part["text"] += delta[name]
                more: Json = {"logprobs": self._take_logprobs(part)} if kind == "message" else {}
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

    def _take_logprobs(self, part: Json) -> list[Any]:
        """Moves the pending log-probabilities to a message's part; returns them."""
        taken, self._logprobs = self._logprobs, []
        part["logprobs"] += taken
        return taken

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
            part, more = item["content"][0], Json()
            if part["type"] == "output_text":
                self._take_logprobs(part)
                more = {"logprobs": part["logprobs"]}
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
