"""Chats that are sent twice: answered whole, and streamed."""

from __future__ import annotations

from typing import Any

from tests.serve.in_process_server import Server, good

H = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


async def both_ways(server: Server, **body: Any) -> dict[str, Any]:
    """The choice of a complete response; checks that the stream adds up to it."""
    payload = {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL], **body}
    whole = good(await server.client.post(H, json=payload))["choices"][0]
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    reason = None
    for chunk in await server.events(H, **payload):
        for choice in chunk["choices"]:
            delta, reason = choice["delta"], choice["finish_reason"] or reason
            message["content"] += delta.get("content", "")
            message["reasoning"] += delta.get("reasoning", "")
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    assert call["id"].startswith("call_") and call["type"] == "function" and call["function"]["name"]
                    message["tool_calls"].append(call)
                else:
                    assert set(call) == {"index", "function"}  # name and id only in the first
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    assert message["content"] == (whole["message"]["content"] or "")
    assert message["reasoning"] == (whole["message"]["reasoning"] or "")
    streamed = [call["function"] for call in message["tool_calls"]]
    assert streamed == [call["function"] for call in whole["message"].get("tool_calls", ())]
    assert reason == whole["finish_reason"]
    return dict(whole)
