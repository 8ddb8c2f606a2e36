"""Print a server's answer word by word, as it is generated.

It needs httpx (`pip install httpx`) and a running server:

    octavo serve smollm2-135m-instruct
    python examples/streaming_client.py "Why is the sky blue?"
"""

import argparse
import json

import httpx

parser = argparse.ArgumentParser(description="Print a server's answer as it is generated.")
parser.add_argument("question", nargs="?", default="Why is the sky blue?")
parser.add_argument("--model", default="smollm2-135m-instruct", help="a name that the server serves")
parser.add_argument("--url", default="http://localhost:8000/v1", help="address of the server")
args = parser.parse_args()

body = {
    "model": args.model,
    "messages": [{"role": "user", "content": args.question}],
    "max_tokens": 100,
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}
with httpx.stream("POST", f"{args.url}/chat/completions", json=body, timeout=60) as response:
    if response.is_error:
        raise SystemExit(response.read().decode())
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if not data or data == "[DONE]":
            continue
        chunk = json.loads(data)
        for choice in chunk["choices"]:
            print(choice["delta"].get("content") or "", end="", flush=True)
        if usage := chunk.get("usage"):
            print(f"\n\n[{usage['prompt_tokens']} prompt tokens, {usage['completion_tokens']} new]")
