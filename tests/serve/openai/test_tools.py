"""Tool calls and reasoning, with scripted outputs: a random model calls no tools."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from octavo.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.text.tokenizer import Tokenizer
from tests.serve.chats import TOOL, H, both_ways
from tests.serve.in_process_server import Server, good, serving

HERMES = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}</think>"
)
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


def answers(server: Server, text: str, piece: int = 3) -> None:
    """Makes every request generate `text`, in pieces."""

    async def generate(prompt: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        pieces = [text[i : i + piece] for i in range(0, len(text), piece)]
        for i, part in enumerate(pieces):
            done = i == len(pieces) - 1
            completion = CompletionOutput(0, part, [5], finish_reason="stop" if done else None)
            metrics = RequestMetrics(0.0, num_generation_tokens=i + 1)
            yield RequestOutput("x", None, prompt["prompt_token_ids"], [completion], done, metrics, is_delta=True)

    server.engine.generate = generate  # type: ignore[assignment,method-assign]


async def test_tool_calls_and_reasoning(model: str) -> None:
    async with serving(model, engine_options={"chat_template": HERMES, "max_model_len": None}) as server:
        answers(server, f"<think>hm</think>Let me see. {CALL}{CALL}")
        choice = await both_ways(server)
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert (message["reasoning"], message["content"]) == ("hm", "Let me see. ")
        assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"city": "Oslo"}] * 2
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        alone = await both_ways(server, parallel_tool_calls=False)
        assert len(alone["message"]["tool_calls"]) == 1
        quiet = await both_ways(server, include_reasoning=False)
        assert quiet["message"]["reasoning"] is None
        answers(
            server, CALL.replace("</tool_call>", ', {"arguments": {"city": "Rome"}, "name": "weather"}</tool_call>')
        )
        calls = (await both_ways(server))["message"]["tool_calls"]
        assert [json.loads(call["function"]["arguments"])["city"] for call in calls] == ["Oslo", "Rome"]
        answers(server, CALL)
        assert (await both_ways(server))["message"]["content"] is None
        uncalled = await both_ways(server, tool_choice="none")
        assert uncalled["message"]["content"] == CALL and uncalled["finish_reason"] == "stop"
        answers(server, "<think>hm")
        body = good(await server.post(H, messages=[{"role": "user", "content": "Hi"}]))
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}


async def test_reasoning_opened_by_the_prompt(model: str) -> None:
    """Also with a truncated prompt."""
    template = HERMES + "{% if add_generation_prompt %}<think>\n{% endif %}"
    async with serving(model, engine_options={"chat_template": template, "max_model_len": None}) as server:
        answers(server, "hm</think>Yes.")
        for options in ({}, {"truncate_prompt_tokens": 16}):
            message = (await both_ways(server, **options))["message"]
            assert (message["reasoning"], message["content"]) == ("hm", "Yes.")
        # The grammar applies from the first token: no reasoning, even if the prompt opens it.
        answers(server, '{"a": 1}')
        for form in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": ".*"}}):
            message = (await both_ways(server, **form))["message"]
            assert message["content"] == '{"a": 1}' and message["reasoning"] is None
        answers(server, "hm</think>Yes.")
        both = (await both_ways(server, structured_outputs={"regex": "[a-z]+</think>(Yes|No)[.]"}))["message"]
        assert (both["reasoning"], both["content"]) == ("hm", "Yes.")


@pytest.mark.parametrize("cuts", [(10,), (4, 6), (3, 7), (1,) * 10, (5, 5), (2, 2, 6)])
async def test_reasoning_tokens_are_counted_up_to_the_end_tag(
    model: str, cuts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Independent of the number of tokens per delta."""
    texts = ["<think>", "h", "m", "</think>", *"answer"]
    encode = Tokenizer.encode

    def encoded(self: Tokenizer, text: str, *args: Any, **words: Any) -> list[int]:
        return [99] if text == "</think>" else encode(self, text, *args, **words)

    async def generate(prompt: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        at = 0
        for cut in cuts:
            ids = [99 if text == "</think>" else 5 for text in texts[at : at + cut]]
            done = at + cut == len(texts)
            completion = CompletionOutput(0, "".join(texts[at : at + cut]), ids, finish_reason="stop" if done else None)
            at += cut
            metrics = RequestMetrics(0.0, num_generation_tokens=at)
            yield RequestOutput("x", None, prompt["prompt_token_ids"], [completion], done, metrics, is_delta=True)

    async with serving(model, engine_options={"chat_template": HERMES, "max_model_len": None}) as server:
        server.engine.generate = generate  # type: ignore[assignment,method-assign]
        monkeypatch.setattr(Tokenizer, "encode", encoded)
        body = good(await server.post(H, messages=[{"role": "user", "content": "Hi"}]))
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


async def test_required_tool_constrains_the_output(model: str) -> None:
    template = "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    async with serving(model, engine_options={"chat_template": template}) as server:
        other = {"type": "function", "function": {"name": "f"}}
        named = {"type": "function", "function": {"name": "weather"}}
        payload = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 90, "temperature": 0}
        for tools, choice in (([TOOL, other], named), ([TOOL], "required")):
            answer = good(await server.post(H, **payload, tools=tools, tool_choice=choice))["choices"][0]
            assert answer["finish_reason"] == "tool_calls", answer
            (call,) = answer["message"]["tool_calls"]
            assert call["function"]["name"] == "weather"
            assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
        # References resolve inside each schema, and "type": "object" is optional.
        schemas = [
            {"properties": {"city": {"$ref": "#/$defs/C"}}, "required": ["city"], "$defs": {"C": {"const": city}}}
            for city in ("Oslo", "Rome")
        ]
        tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schemas[i]}} for i in range(2)]
        for i, city in enumerate(("Oslo", "Rome")):
            choice = {"type": "function", "function": {"name": f"f{i}"}}
            answer = good(await server.post(H, **payload, tools=tools, tool_choice=choice))["choices"][0]
            (call,) = answer["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"])["city"] == city
        answer = good(await server.post(H, **payload, tools=tools, tool_choice="required"))["choices"][0]
        (call,) = answer["message"]["tool_calls"]
        city = "Rome" if call["function"]["name"] == "f1" else "Oslo"
        assert json.loads(call["function"]["arguments"])["city"] == city
        form = {"json": {}}
        response = await server.post(H, **payload, tools=[TOOL], tool_choice=named, structured_outputs=form)
        assert response.status_code == 400 and response.json()["error"]["param"] == "tool_choice"
        wrong = {"type": "function", "function": {"name": "x", "parameters": {"type": "object", "required": 3}}}
        response = await server.post(H, **payload, tools=[wrong], tool_choice="required")
        assert response.status_code == 400 and response.json()["error"]["param"] == "tools"
        response = await server.post(H, **payload, tools=[other], tool_choice=named)
        assert response.status_code == 400 and response.json()["error"]["param"] == "tool_choice"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[0].content }}", "chat template has none"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}{{ messages[0].content }}[TOOL_CALLS]", "Mistral's [TOOL_CALLS]"),
    ],
)
async def test_tools_that_are_not_parsed_are_refused_unless_none_is_chosen(
    model: str, template: str, reason: str
) -> None:
    payload = {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL], "max_tokens": 1}
    async with serving(model, engine_options={"chat_template": template}) as server:
        error = (await server.post(H, **payload)).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", "tools") and reason in error["message"]
        good(await server.post(H, **payload, tool_choice="none"))


async def test_messages_with_tool_calls(model: str) -> None:
    template = (
        "{% if tools %}<tool_call>{% endif %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }}({{ c.function.arguments.city }})]{% endfor %}"
        "{% endfor %}"
    )
    async with serving(model, engine_options={"chat_template": template}) as server:
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
            {"role": "tool", "tool_call_id": "1", "content": "b"},
        ]
        body = good(await server.post("/tokenize", messages=messages, return_token_strs=True))
        assert "".join(body["token_strs"]) == "user:aassistant:[weather(Oslo)]tool:b"


async def test_the_template_gets_arguments_and_tools_as_the_client_wrote_them(model: str) -> None:
    """Arguments that are no object go as their text; a tool's keys keep their order, unknown ones included."""
    template = (
        "<tool_call>{{ tools | tojson }}"
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    arguments = [
        '{"b": 1, "a": [2.5, null]}',
        "{}",
        "",
        None,
        {"b": 1},
        "null",
        '{"a": ',
        "[1]",
        "\n",
        '{"b":\n"\n\\n"}',
    ]
    shown = [
        '{"b": 1, "a": [2.5, null]}',
        "{}",
        "{}",
        "{}",
        '{"b": 1}',
        '"null"',
        r'"{\"a\": "',
        '"[1]"',
        r'"\n"',
        r'{"b": "\n\n"}',
    ]
    tool = {"function": {"x": 1, "parameters": {"properties": {}, "type": "object"}, "name": "f"}, "type": "function"}
    found = []
    async with serving(model, engine_options={"chat_template": template}) as server:
        for given in arguments:
            calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": given}}]
            messages = [{"role": "assistant", "tool_calls": calls}]
            answer = await server.post("/tokenize", messages=messages, tools=[tool], return_token_strs=True)
            found.append("".join(answer.json().get("token_strs", [answer.text])))
    expected = [f"<tool_call>{json.dumps([tool])}{text}".replace(" ", "") for text in shown]  # it knows no spaces
    assert found == expected
