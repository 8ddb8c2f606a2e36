"""Let a model call a Python function: one round trip through a server.

It needs httpx (`pip install httpx`) and a running server. The small default model's own template has no tools; the
one here adds them. Larger models, such as Qwen's, need no `--chat-template`.

    octavo serve smollm2-135m-instruct --chat-template examples/tools.jinja
    python examples/tools.py
"""

import argparse
import json

import httpx

parser = argparse.ArgumentParser(description="Let a model call a Python function.")
parser.add_argument("--model", default="smollm2-135m-instruct", help="a name that the server serves")
parser.add_argument("--url", default="http://localhost:8000/v1", help="address of the server")
args = parser.parse_args()


def temperature(city: str) -> str:
    return {"Oslo": "4 degrees", "Rome": "21 degrees"}[city]


parameters = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
function = {"name": "temperature", "description": "The temperature in a city now", "parameters": parameters}


def ask(messages: list, **more) -> dict:
    body = {"model": args.model, "messages": messages, "temperature": 0, "max_tokens": 60, **more}
    response = httpx.post(f"{args.url}/chat/completions", json=body, timeout=60)
    if response.is_error:
        raise SystemExit(response.text)
    return response.json()["choices"][0]["message"]


messages = [{"role": "user", "content": "How warm is it in Oslo?"}]
# "required": the model must call a function; "auto" leaves it the choice.
answer = ask(messages, tools=[{"type": "function", "function": function}], tool_choice="required")
messages.append(answer)
for call in answer["tool_calls"]:
    arguments = json.loads(call["function"]["arguments"])
    result = temperature(**arguments)
    print(f"the model calls {call['function']['name']}({arguments}), which returns {result!r}")
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
print(f"it answers: {ask(messages)['content']}")
