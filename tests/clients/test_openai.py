"""The official `openai` package, unchanged, against the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest

openai = pytest.importorskip("openai", reason="the openai package is not installed; `make clients` runs this")
pydantic = pytest.importorskip("pydantic")

pytestmark = pytest.mark.slow
MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
EXTRA: dict[str, Any] = {"ignore_eos": True}


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="key", max_retries=0) as client:
        yield client


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 512


def test_completions(client: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "Hello", "max_tokens": 8, "temperature": 0, "extra_body": EXTRA}
    whole = client.completions.create(**asked, logprobs=2, n=2)
    assert len(whole.choices) == 2 and whole.usage.completion_tokens == 16
    assert len(whole.choices[0].logprobs.tokens) == 8 and len(whole.choices[0].logprobs.top_logprobs[0]) == 2
    stream = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in stream if c.choices) == whole.choices[0].text
    assert stream[-1].usage.completion_tokens == 8 and stream[-1].choices == []


def test_chats(client: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "extra_body": EXTRA}
    whole = client.chat.completions.create(**asked, max_completion_tokens=8, logprobs=True, top_logprobs=3)
    assert whole.choices[0].finish_reason == "length" and len(whole.choices[0].logprobs.content) == 8
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 3
    with client.chat.completions.stream(**asked, max_completion_tokens=8) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
    assert text == whole.choices[0].message.content
    many = client.chat.completions.create(**asked, max_completion_tokens=4, n=3)
    assert [c.index for c in many.choices] == [0, 1, 2]


def test_parse(client: Any) -> None:
    class Answer(pydantic.BaseModel):  # type: ignore[name-defined,misc]
        colour: Literal["red", "green"]
        count: Literal[1, 2]

    parsed = client.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Answer, max_tokens=200)
    answer = parsed.choices[0].message.parsed
    assert answer.colour in ("red", "green") and answer.count in (1, 2)


def test_tools(client: Any) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
    tools = [
        {"type": "function", "function": {"name": "weather", "parameters": schema | {"additionalProperties": False}}}
    ]
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": tools, "max_tokens": 200}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = client.chat.completions.create(**asked, tool_choice=choice).choices[0]
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Oslo"}
        goes_on = [*MESSAGES, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
        again = client.chat.completions.create(model="tiny", messages=goes_on, tools=tools, max_tokens=3)
        assert again.usage.completion_tokens <= 3
    with client.chat.completions.stream(**asked, tool_choice="required") as stream:
        for _ in stream:
            pass
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Oslo"}


def test_errors_become_the_packages_exceptions(server: str, client: Any) -> None:
    for error, asked in (
        (openai.NotFoundError, {"model": "other", "prompt": "a"}),
        (openai.BadRequestError, {"model": "tiny", "prompt": "a" * 600}),
        (openai.BadRequestError, {"model": "tiny", "prompt": "a", "temperature": -1}),
    ):
        with pytest.raises(error) as caught:
            client.completions.create(**asked)
        assert caught.value.code and caught.value.type == "invalid_request_error" and caught.value.request_id
    assert caught.value.param == "temperature"
    stranger = openai.OpenAI(base_url=f"{server}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
