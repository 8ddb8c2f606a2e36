"""OpenAI's newer API, /v1/responses: the same chat in other words. Nothing is stored, so each request tells all.

A body is translated into that of a chat, and the chat's deltas into items and their events:

    response.created, .in_progress
      response.output_item.added                       a message, a piece of reasoning, or a call
        response.content_part.added                    not of calls
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

from octavo.serve.openai import schema as parameters
from octavo.serve.openai.errors import ApiError, bad_request
from octavo.serve.openai.request import MAX_MESSAGES, parse_arguments, parse_content, parse_message, rename_params
from octavo.serve.openai.response import Json
from octavo.serve.openai.schema import FLAG, INTEGER, NUMBER, OBJECT, TEXT, Schema

FIELDS: dict[str, Schema] = {
    "model": TEXT,
    "input": {"anyOf": [TEXT, {"type": "array", "items": OBJECT}]},
    "instructions": TEXT,
    "max_output_tokens": INTEGER,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "stream": FLAG,
    "tools": {"type": "array", "items": OBJECT},
    "tool_choice": {},
    "parallel_tool_calls": FLAG,
    "text": OBJECT,
    "reasoning": OBJECT,
    "priority": INTEGER,
    "cache_salt": TEXT,
    "seed": INTEGER,
    "top_k": INTEGER,
    "min_p": NUMBER,
    "ignore_eos": FLAG,
    "stop": {},
    "chat_template_kwargs": OBJECT,
    "truncation": TEXT,
    "include": {"type": "array"},
}
SAME = frozenset(FIELDS) & (frozenset(parameters.CHAT) - {"tools", "tool_choice"})
PARAM_ALIASES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "structured_outputs": "text.format",
}
"""What a parameter of the chat is called here. A request that has one of these names itself is refused under it."""
STATEFUL = ("previous_response_id", "conversation", "background", "prompt")


def to_chat(body: Mapping[str, Any], *, warn: bool) -> dict[str, Any]:
    """The chat that says the same. Raises `ApiError` 400."""
    for name in STATEFUL:
        if body.get(name):
            raise bad_request(
                "unsupported_parameter", f"{name} is not supported: nothing is stored; send the whole input", name
            )
    for name in PARAM_ALIASES.keys() & body.keys():
        raise bad_request("unsupported_parameter", f"{name} is not supported here: give {PARAM_ALIASES[name]}", name)
    given = parameters.read({k: v for k, v in body.items() if k not in STATEFUL}, FIELDS, warn=warn)
    if "input" not in given:
        raise bad_request("missing_required_parameter", "input is missing", "input")
    chat: dict[str, Any] = {name: given[name] for name in SAME if name in given}
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


def blamed(problem: ApiError) -> ApiError:
    """A problem of the chat, in the words of the request. Of an item it has them already."""
    if problem.param in ("messages", "prompt"):
        problem.message = re.sub(rf"^{problem.param}\b", "input", problem.message)
        problem.param = "input"
    return rename_params(problem, PARAM_ALIASES)


def _messages(value: Any) -> list[dict[str, Any]]:
    """Read here already: a problem has its item's number and the names that it has there."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        code = "empty_array" if value == [] else "invalid_type"
        raise bad_request(code, f"input must be a string or an array of items, not {parameters.brief(value)}", "input")
    if len(value) > MAX_MESSAGES:
        text = f"input has {len(value)} items, at most {MAX_MESSAGES} are allowed"
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
        elif kind != "reasoning":  # of which a model is not told again
            text = f"{path} is of type {parameters.brief(kind)}; there are messages, calls and their outputs"
            raise bad_request("unsupported_content", text, f"{path}.type")
    if not messages:
        raise bad_request(
            "invalid_value", "input is reasoning alone, of which a model is not told; add a message", "input"
        )
    return messages


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise bad_request(
            "unsupported_parameter", "of tools there are functions; the server runs none of its own", "tools"
        )
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


class ResponseEventBuilder:
    """A response in the making: takes a chat's deltas and gives events, each with its number.

    Every event is (name, payload), and the response so far is in `response`.
    """

    def __init__(self, name: str, model: str, chat: Mapping[str, Any], instructions: str | None = None) -> None:
        choice = chat.get("tool_choice", "auto")  # one tool is named in a chat a level deeper
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

    def take(self, delta: Mapping[str, Any]) -> Iterator[tuple[str, Json]]:
        for name, kind in (("reasoning", "reasoning"), ("content", "message")):
            if delta.get(name):
                if self._kind != kind:
                    yield from self._end_item()
                    yield from self._begin_text(kind)
                part = self._item["content"][0]
                part["text"] += delta[name]
                more: Json = {"logprobs": []} if kind == "message" else {}
                yield self._of_item(f"{part['type']}.delta", content_index=0, delta=delta[name], **more)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield from self._end_item()
                yield from self._begin_call(call)
            if text := call["function"]["arguments"]:
                self._item["arguments"] += text
                yield self._of_item("function_call_arguments.delta", delta=text)

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
        own: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
        name = f"{'msg' if kind == 'message' else 'rs'}_{secrets.token_hex(12)}"
        item: Json = {"id": name, "type": kind, "status": "in_progress", "content": [], **own}
        self.response["output"].append(item)
        yield self._event("output_item.added", output_index=self._index, item={**item, "content": []})
        part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        if kind == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
        item["content"].append(part)
        yield self._of_item("content_part.added", content_index=0, part=dict(part))

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
            yield self._of_item("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            part = item["content"][0]
            more: Json = {"logprobs": []} if part["type"] == "output_text" else {}
            yield self._of_item(f"{part['type']}.done", content_index=0, text=part["text"], **more)
            yield self._of_item("content_part.done", content_index=0, part=part)
        yield self._event("output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1

    def _of_item(self, name: str, /, **fields: Any) -> tuple[str, Json]:
        return self._event(name, item_id=self._item["id"], output_index=self._index, **fields)

    def _event(self, name: str, /, **fields: Any) -> tuple[str, Json]:
        event = {"type": f"response.{name}", "sequence_number": self._number, **fields}
        self._number += 1
        return event["type"], event

    def last_words(self, problem: ApiError) -> tuple[str, Json]:
        """What a stream ends with when the request fails."""
        error = problem.as_dict()["error"]
        fields = {name: error[name] for name in ("code", "message", "param")}
        return "error", {"type": "error", "sequence_number": self._number, **fields}
