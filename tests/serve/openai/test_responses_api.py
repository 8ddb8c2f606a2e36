"""/v1/responses and its events, compared with chat completions."""

from __future__ import annotations

import json
from typing import Any

from octavo.serve.openai.errors import bad_request
from octavo.serve.openai.responses_api import to_responses_error
from tests.serve.in_process_server import Server, good, serving
from tests.serve.openai.test_tools import CALL, HERMES, answers

R = "/v1/responses"
NO_EFFECT: dict[str, Any] = {
    "store": False,
    "background": False,
    "max_tool_calls": None,
    "client_metadata": {"a": "b"},
    "include": [],
    "truncation": "disabled",
}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


async def events(server: Server, **body: Any) -> list[dict[str, Any]]:
    response = await server.client.post(R, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    received = []
    for frame in response.text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        received.append(event)
    assert [event["sequence_number"] for event in received] == list(range(len(received)))
    return received


async def test_response_equals_the_chat_completion(model: str) -> None:
    async with serving(model) as server:
        chat = await server.chat("Hello")
        body = good(await server.post(R, input="Hello", max_output_tokens=8, **GREEDY))
        assert body["id"].startswith("resp_") and body["object"] == "response"
        (item,) = body["output"]
        assert item["type"] == "message" and item["role"] == "assistant"
        text = chat["choices"][0]["message"]["content"]
        assert item["content"][0] == {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        assert body["status"] == item["status"] == "incomplete"  # stopped by max_output_tokens
        assert body["incomplete_details"] == {"reason": "max_output_tokens"}
        assert body["usage"]["output_tokens"] == 8 and body["usage"]["input_tokens"] == len("user:Hello;a:")
        parts = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
        same = good(await server.post(R, input=parts, max_output_tokens=8, **NO_EFFECT, **GREEDY))
        assert same["output"][0]["content"] == item["content"]
        received = await events(server, input="Hello", max_output_tokens=8, **GREEDY)
        names = [event["type"].removeprefix("response.") for event in received]
        assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
        assert set(names[4:-4]) == {"output_text.delta"}
        assert "".join(event.get("delta", "") for event in received) == text
        assert received[-1]["response"]["output"][0]["content"] == item["content"]
        await server.at_rest()


async def test_reasoning_and_tool_calls_are_items(model: str) -> None:
    async with serving(model, engine_options={"chat_template": HERMES}) as server:
        answers(server, f"<think>hm</think>I see.{CALL}")
        tools = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
        body = good(await server.post(R, input="Hi", tools=tools))
        assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call"]
        assert body["output"][0]["content"][0] == {"type": "reasoning_text", "text": "hm"}
        call = body["output"][2]
        assert call["name"] == "weather" and json.loads(call["arguments"]) == {"city": "Oslo"}
        assert body["status"] == "completed"
        assert (body["instructions"], body["tool_choice"]) == (None, "auto")
        named = {"type": "function", "name": "weather"}
        body = good(await server.post(R, input="Hi", tools=tools, tool_choice=named, instructions="Be brief."))
        assert (body["instructions"], body["tool_choice"]) == ("Be brief.", named)
        received = await events(server, input="Hi", tools=tools)
        arguments = [e["delta"] for e in received if e["type"] == "response.function_call_arguments.delta"]
        assert json.loads("".join(arguments)) == {"city": "Oslo"} and len(arguments) > 1
        continued = [
            {"role": "user", "content": "Hi"},
            {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "weather"},
            {"type": "function_call", "call_id": "3", "name": "weather", "arguments": "["},
            {"type": "function_call_output", "call_id": "1", "output": "sun"},
            {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "rain"}]},
        ]
        good(await server.post(R, input=continued, tools=tools))


async def test_errors_use_the_responses_parameter_names(model: str) -> None:
    async with serving(model) as server:
        for payload, code, param in (
            ({}, "missing_required_parameter", "input"),
            ({"input": []}, "empty_array", "input"),
            ({"input": 7}, "invalid_type", "input"),
            ({"input": [{"role": "king", "content": "a"}]}, "invalid_value", "input[0].role"),
            ({"input": [{"type": "image_generation_call"}]}, "unsupported_content", "input[0].type"),
            ({"input": "a" * 200}, "context_length_exceeded", "input"),
            ({"input": "a", "max_output_tokens": 500}, "context_length_exceeded", "max_output_tokens"),
            ({"input": "a", "previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
            ({"input": "a", "tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools"),
            ({"input": "a", "temprature": 1}, "unknown_parameter", "temprature"),
            ({"input": "a", "temperature": 10**400}, "decimal_out_of_range", "temperature"),
        ):
            response = await server.post(R, **payload)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, code, param), payload


async def test_errors_name_the_input_item(model: str) -> None:
    """Input items and chat messages are numbered differently: items may be dropped or merged."""
    message, skipped = {"role": "user", "content": "a"}, {"type": "reasoning", "summary": []}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": "b"}
    deep = '{"a":' * 900 + "1" + "}" * 900
    async with serving(model) as server:
        for payload, param, begin in (
            ({"input": [{"role": "king"}], "instructions": "b"}, "input[0].role", "input[0].role: invalid enum value"),
            ({"input": [skipped, skipped, {"role": "king"}]}, "input[2].role", "input[2].role: invalid enum value"),
            ({"input": [{"content": "x"}, call]}, "input[0].role", "input[0].role is missing"),
            ({"input": [message, call, call, {"role": "user"}]}, "input[3].content", "input[3].content must be"),
            ({"input": [message, call | {"name": None}]}, "input[1].name", "input[1].name must be"),
            ({"input": [message, call | {"arguments": deep}]}, "input[1].arguments", "input[1].arguments must be"),
            ({"input": [message, call, output | {"output": 7}]}, "input[2].output", "input[2].output: expected"),
            ({"input": [skipped]}, "input", "input has only reasoning items"),
            ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
            ({"input": "a", "max_tokens": 3}, "max_tokens", "max_tokens is not supported here: use max_output"),
            (
                {"input": "a", "structured_outputs": {"regex": "a"}},
                "structured_outputs",
                "structured_outputs is not supported here: use text.format",
            ),
            ({"input": "a", "messages": [message]}, "messages", "messages is not supported"),
            ({"input": "a", "text": {"format": {"type": "yaml"}}}, "text.format", "text.format.type: invalid value"),
            (
                {"input": "a", "text": {"format": {"type": "json_schema"}}},
                "text.format",
                "text.format.schema: object missing",
            ),
            (
                {"input": "a", "text": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}},
                "text.format",
                "text.format: ",
            ),
        ):
            response = await server.post(R, **payload)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), payload
            assert error["message"].startswith(begin), error["message"]
        await server.at_rest()


def test_remedies_use_the_responses_parameter_names() -> None:
    text = "the request needs 9 blocks; max_tokens of at most 5 fits"
    received = to_responses_error(bad_request("exceeds_kv_capacity", text, "prompt"))
    assert (received.param, received.message) == ("input", text.replace("max_tokens", "max_output_tokens"))
