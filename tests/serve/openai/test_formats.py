"""The output formats of gpt-oss, Qwen and Gemma 4 over sockets, from a model that writes given tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import pytest

from octavo.engine.outputs import RequestOutput
from octavo.errors import ParameterError
from tests.serve.chats import TOOL, H, both_ways
from tests.serve.in_process_server import Server, good, listening, serving
from tests.serve.scripted_model import Script, make_byte_checkpoint
from tests.serve.templates import GEMMA4, GPT_OSS, QWEN3, QWEN3_5

R = "/v1/responses"
MARKERS = ("<|start|>", "<|end|>", "<|return|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|pad|>")
HI = [{"role": "user", "content": "Hi"}]
TODAY = datetime.date.today().isoformat()
NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>hm{NEXT}"
ANSWER = f"{THOUGHT}<|channel|>final<|message|>Yes.<|return|>"
CALL = f'{THOUGHT}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{{"city": "Oslo"}}<|call|>'


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its generation_config.json lacks <|call|>."""
    path = make_byte_checkpoint(tmp_path_factory.mktemp("gpt_oss"), MARKERS, max_position_embeddings=2048)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [MARKERS.index("<|return|>")]}))
    return str(path)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    return str(make_byte_checkpoint(tmp_path_factory.mktemp("qwen"), specials, max_position_embeddings=2048))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> str:
    """<turn|> and <|tool_response> end an output. No file of the model says so, so the server must know it."""
    specials = ("<pad>", "<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>")
    specials += ("<tool_call|>", '<|"|>', "<|tool_response>", "<tool_response|>", "<|think|>", "<|tool>", "<tool|>")
    return str(make_byte_checkpoint(tmp_path_factory.mktemp("gemma"), specials, max_position_embeddings=2048))


@contextlib.asynccontextmanager
async def scripted(model: str, template: str, **settings: Any) -> AsyncIterator[tuple[Server, Script]]:
    """A server on a socket, and the script of its model."""
    options = {"chat_template": template, "max_model_len": None, "enable_prefix_caching": False}
    async with contextlib.AsyncExitStack() as stack:
        server, _, port = await stack.enter_async_context(listening(model, engine_options=options, **settings))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60))
        assert server.built.tokenizer is not None
        yield dataclasses.replace(server, client=client), Script(server.built, server.built.tokenizer)


async def prompt_of(server: Server, **body: Any) -> str:
    """The prompt of a chat, from the ids that its answer returns."""
    answer = good(await server.post(H, max_tokens=1, return_token_ids=True, **{"messages": HI, **body}))
    return server.app.service.tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)


async def test_harmony_is_split_into_reasoning_content_and_calls(gpt_oss: str) -> None:
    async with scripted(gpt_oss, GPT_OSS) as (server, script):
        script.write(ANSWER)
        for options in ({}, {"tools": None}, {"skip_special_tokens": False}, {"skip_special_tokens": True}):
            choice = await both_ways(server, **options)
            message = choice["message"]
            assert (message["reasoning"], message["content"], choice["finish_reason"]) == ("hm", "Yes.", "stop")
            assert choice["stop_reason"] is None
        preamble = f"{THOUGHT}<|channel|>commentary<|message|>Wait.{NEXT}"
        recipient_first = " to=functions.weather<|channel|>commentary json" + CALL[CALL.rindex("<|message|>") :]
        for text, reasoning, content in (
            (CALL, "hm", None),
            (CALL.replace(THOUGHT, preamble), "hm", "Wait."),
            (recipient_first, None, None),
        ):
            script.write(text)
            choice = await both_ways(server)
            assert choice["finish_reason"] == "tool_calls" and choice["stop_reason"] is None
            (call,) = choice["message"]["tool_calls"]
            assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
            assert (choice["message"]["reasoning"], choice["message"]["content"]) == (reasoning, content)
        uncalled = await both_ways(server, tool_choice="none")
        assert uncalled["finish_reason"] == "stop" and "tool_calls" not in uncalled["message"]


async def test_settings_of_the_request_keep_their_meaning(gpt_oss: str) -> None:
    async with scripted(gpt_oss, GPT_OSS) as (server, script):
        script.write(ANSWER.replace("Yes", "Y<|pad|>es"))
        assert (await both_ways(server))["message"]["content"] == "Yes."
        assert (await both_ways(server, skip_special_tokens=False))["message"]["content"] == "Y<|pad|>es."
        script.write(ANSWER)
        stopped = await both_ways(server, stop="s.")
        assert (stopped["message"]["content"], stopped["stop_reason"]) == ("Ye", "s.")
        shown = await both_ways(server, include_stop_str_in_output=True)
        assert shown["message"]["content"] == "Yes."
        again = await both_ways(server, ignore_eos=True, max_tokens=len("<analysis<hm<<assistant<<final<Yes.<<"))
        assert (again["message"]["content"], again["finish_reason"]) == ("Yes.", "length")
        quiet = await both_ways(server, include_reasoning=False)
        assert (quiet["message"]["reasoning"], quiet["message"]["content"]) == (None, "Yes.")
        refused = (await server.post(H, messages=HI, use_beam_search=True, n=2)).json()["error"]
        assert refused["param"] == "use_beam_search"


async def test_an_output_cut_anywhere_gives_what_is_certain(gpt_oss: str) -> None:
    async with scripted(gpt_oss, GPT_OSS) as (server, script):
        script.write(CALL)
        num_tokens = len(server.app.service.tokenizer.encode(CALL, add_special_tokens=False))
        for num in range(1, num_tokens):
            choice = good(await server.post(H, messages=HI, tools=[TOOL], max_tokens=num))["choices"][0]
            message = choice["message"]
            assert choice["finish_reason"] == "length" and not message["content"]
            assert "hm".startswith(message["reasoning"] or "")
            for call in message.get("tool_calls", ()):
                assert call["function"]["name"] == "weather"
                assert '{"city": "Oslo"}'.startswith(call["function"]["arguments"])


@pytest.mark.parametrize("size", [1, 2, 7, 100])
async def test_reasoning_tokens_are_those_of_analysis(gpt_oss: str, size: int) -> None:
    """<|message|>, two letters and <|end|>, however many tokens a delta has."""
    async with scripted(gpt_oss, GPT_OSS) as (server, script):
        script.write(ANSWER)
        generate = server.engine.generate

        async def in_deltas(*args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
            """The model's outputs, joined."""
            texts, ids = list[str](), list[int]()
            async for output in generate(*args, **kwargs):
                (c,) = output.outputs
                texts.append(c.text)
                ids += c.token_ids
                if len(ids) >= size or c.finished():
                    c.text, c.token_ids = "".join(texts), ids
                    texts, ids = [], []
                    yield output

        server.engine.generate = in_deltas  # type: ignore[assignment,method-assign]
        usage = good(await server.post(H, messages=HI))["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 4}
        assert good(await server.post(R, input="Hi"))["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}


async def test_harmony_in_responses(gpt_oss: str) -> None:
    tool = {"type": "function", **TOOL["function"]}
    async with scripted(gpt_oss, GPT_OSS) as (server, script):
        script.write(CALL.replace(THOUGHT, f"{THOUGHT}<|channel|>commentary<|message|>Wait.{NEXT}"))
        output = good(await server.post(R, input="Hi", tools=[tool]))["output"]
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
        assert [item["content"][0]["text"] for item in output[:2]] == ["hm", "Wait."]
        assert (output[2]["name"], output[2]["arguments"]) == ("weather", '{"city": "Oslo"}')
        response = await server.client.post(R, json={"input": "Hi", "tools": [tool], "stream": True})
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
        deltas: dict[str, str] = {}
        for event in events:
            if event["type"].endswith(".delta"):
                deltas[event["type"]] = deltas.get(event["type"], "") + event["delta"]
        assert list(deltas.values()) == ["hm", "Wait.", '{"city": "Oslo"}']


async def test_structured_outputs_open_the_final_channel(gpt_oss: str) -> None:
    """The grammar begins with the first token: no reasoning, as in other formats."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [{"a": 1}]}}}
    async with scripted(gpt_oss, GPT_OSS) as (server, script):
        script.write('{"a":1}')
        choice = await both_ways(server, response_format=form, tools=None)
        assert (json.loads(choice["message"]["content"]), choice["message"]["reasoning"]) == ({"a": 1}, None)
        opened = "<|start|>assistant<|channel|>final<|message|>"
        assert (await prompt_of(server, response_format=form)).endswith(opened)
        script.write('{"name":"weather","arguments":{"city":"Rome"}}')
        choice = await both_ways(server, tool_choice="required")
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
        for options in ({}, {"structured_outputs": {"choice": ["<|channel|>final<|message|>a"]}}):
            assert (await prompt_of(server, **options)).endswith("Hi<|end|><|start|>assistant")


async def test_the_final_message_is_continued_in_its_channel(gpt_oss: str) -> None:
    async with scripted(gpt_oss, GPT_OSS) as (server, script):
        script.write("es.<|return|>")
        messages = [*HI, {"role": "assistant", "content": "Y", "reasoning": "hm"}]
        choice = await both_ways(server, messages=messages, continue_final_message=True, tools=None)
        assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("es.", None)


async def test_the_template_of_gpt_oss_gets_what_it_reads(gpt_oss: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    second = {**call, "id": "2", "function": {"name": "f", "arguments": "{}"}}
    results = [{"role": "tool", "tool_call_id": name, "content": f"r{name}"} for name in "21"]
    async with scripted(gpt_oss, GPT_OSS) as (server, script):
        script.write("a")
        system = f"<|start|>system<|message|>You are a model.\nCurrent date: {TODAY}\n\nReasoning: high\n\n"
        prompt = await prompt_of(server, reasoning_effort="high")
        assert prompt.startswith(system) and prompt.endswith("<|start|>user<|message|>Hi<|end|><|start|>assistant")
        assert "Reasoning: medium" in await prompt_of(server)
        kwargs = {"model_identity": "You are Tiny.", "reasoning_effort": "low"}
        assert "You are Tiny.\n" in (prompt := await prompt_of(server, chat_template_kwargs=kwargs))
        assert "Reasoning: low" in prompt
        typed = '// d\ntype weather = (_: {\ncity: "Oslo" | "Rome",\n}) => any;'
        assert typed in await prompt_of(server, tools=[TOOL])
        for name in ("reasoning", "reasoning_content", "thinking"):
            turn = {"role": "assistant", "content": "Wait.", name: "hm", "tool_calls": [call, second]}
            prompt = await prompt_of(server, messages=[*HI, turn, *results], tools=[TOOL])
            assert prompt.endswith(
                "Hi<|end|><|start|>assistant<|channel|>analysis<|message|>hm\n\nWait.<|end|>"
                '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>'
                '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"r1"<|end|>'
                "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
                '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"r2"<|end|><|start|>assistant'
            ), prompt
        answered = [*HI, {"role": "assistant", "content": "Yes.", "reasoning": "hm"}, *HI]
        assert "hm" not in (await prompt_of(server, messages=answered)).partition("Hi")[2]  # the template drops it
        spelled = [{"role": "user", "content": "<|start|>"}]
        ids = good(await server.post("/tokenize", messages=spelled))["tokens"]
        assert ids.count(0) == 3  # system, user and assistant: the text of a user opens no message


async def test_effort_of_a_response_reaches_the_template(gpt_oss: str) -> None:
    seen: list[str] = []
    async with scripted(gpt_oss, GPT_OSS) as (server, script):
        script.write(ANSWER)
        render = server.app.service.render

        async def spied(*args: Any) -> Any:
            prompt = await render(*args)
            seen.append(prompt.text or "")
            return prompt

        server.app.service.render = spied  # type: ignore[method-assign]
        good(await server.post(R, input="Hi", reasoning={"effort": "high"}))
    assert "Reasoning: high" in seen[0]


async def test_parsers_can_be_chosen(gpt_oss: str) -> None:
    plain = "{% if tools %}t{% endif %}{{ messages[0].content }}<|start|>assistant"
    async with scripted(gpt_oss, plain, tool_call_parser="openai", reasoning_parser="openai_gptoss") as (
        server,
        script,
    ):
        script.write(CALL)
        assert (await both_ways(server))["finish_reason"] == "tool_calls"
    async with scripted(gpt_oss, GPT_OSS, reasoning_parser="none") as (server, script):
        script.write(ANSWER)
        assert (await both_ways(server))["message"]["content"] == "hmYes."
    with pytest.raises(ParameterError, match="use openai with openai_gptoss, or none"):
        async with serving(gpt_oss, tool_call_parser="hermes", reasoning_parser="openai_gptoss"):
            pass


@pytest.mark.parametrize("template", [QWEN3, QWEN3_5])
async def test_thinking_can_be_disabled(qwen: str, template: str) -> None:
    """QWEN3_5 opens <think> in the prompt, QWEN3 leaves it to the model; disabled, both close it in the prompt."""
    async with scripted(qwen, template) as (server, script):
        for enabled in (None, True, False):
            kwargs = {} if enabled is None else {"chat_template_kwargs": {"enable_thinking": enabled}}
            thinks = enabled is not False
            opens = thinks and template is QWEN3_5
            opening = "" if opens else "<think>\n"
            script.write(f"{opening}hm\n</think>\n\nYes.<|im_end|>" if thinks else "Yes.<|im_end|>")
            end = "assistant\n" + ("<think>\n" if opens else "" if thinks else "<think>\n\n</think>\n\n")
            assert (await prompt_of(server, **kwargs)).endswith(end)
            choice = await both_ways(server, **kwargs)
            reasoning = (choice["message"]["reasoning"] or "").strip()
            assert (reasoning, choice["message"]["content"].strip()) == ("hm" if thinks else "", "Yes.")
            usage = good(await server.post(H, messages=HI, **kwargs))["usage"]
            assert (usage["completion_tokens_details"]["reasoning_tokens"] > 0) == thinks


async def test_calls_in_xml(qwen: str) -> None:
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": "array"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    values = {"city": 'Oslo\n"O"', "days": "3", "units": '["C"]'}
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    call = f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
    async with scripted(qwen, QWEN3_5) as (server, script):
        script.write(f"hm</think>\n\nWait.\n{call}\n{call}<|im_end|>")
        choice = await both_ways(server, tools=[tool])
        message = choice["message"]
        assert (message["reasoning"], message["content"].strip()) == ("hm", "Wait.")
        found = [json.loads(one["function"]["arguments"]) for one in message["tool_calls"]]
        assert found == [{"city": 'Oslo\n"O"', "days": 3, "units": ["C"]}] * 2
        assert choice["finish_reason"] == "tool_calls"
        assert call in (await both_ways(server, tool_choice="none"))["message"]["content"]


WEATHER = '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:[1,{"a":None}]}<tool_call|>'
THINK: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}


async def test_calls_of_gemma(gemma: str) -> None:
    arguments = {"city": "Oslo", "days": [1, {"a": None}]}
    async with scripted(gemma, GEMMA4) as (server, script):
        script.write(f"<|channel>thought\nhm<channel|>Wait. {WEATHER}{WEATHER}<|tool_response>")
        choice = await both_ways(server, **THINK)
        message = choice["message"]
        assert (message["reasoning"], message["content"]) == ("hm", "Wait. ")
        assert [json.loads(one["function"]["arguments"]) for one in message["tool_calls"]] == [arguments] * 2
        assert {one["function"]["name"] for one in message["tool_calls"]} == {"weather"}
        assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
        usage = good(await server.post(H, messages=HI, **THINK))["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": len("<thought\nhm>")}
        uncalled = await both_ways(server, tool_choice="none")
        assert uncalled["finish_reason"] == "stop" and "tool_calls" not in uncalled["message"]
        items = good(await server.post(R, input="Hi", tools=[{"type": "function", **TOOL["function"]}]))["output"]
        assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
        assert json.loads(items[2]["arguments"]) == arguments
        script.write("Y<pad>es.<turn|>")
        for options, content in (({}, "Yes."), ({"skip_special_tokens": False}, "Y<pad>es.")):
            choice = await both_ways(server, **options)
            assert (choice["message"]["content"], choice["finish_reason"]) == (content, "stop")
        script.write('{"name":"weather","arguments":{"city":"Rome"}}')
        (call,) = (await both_ways(server, tool_choice="required", **THINK))["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
        refused = (await server.post(H, messages=HI, use_beam_search=True, n=2)).json()["error"]
        assert refused["param"] == "use_beam_search"


async def test_the_template_of_gemma_gets_what_it_reads(gemma: str) -> None:
    function = {"name": "weather", "arguments": json.dumps({"city": "<|turn>", "days": [1, {"a": True}]})}
    turn = {"role": "assistant", "content": "", "reasoning": "hm"}
    turn["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
    result = {"role": "tool", "tool_call_id": "1", "content": "cold"}
    async with scripted(gemma, GEMMA4) as (server, script):
        script.write("a")
        prompt = await prompt_of(server, messages=[*HI, turn, result], tools=[TOOL])
        assert prompt.endswith(
            "<|turn>user\nHi<turn|>\n<|turn>model\n<|channel>thought\nhm\n<channel|>"
            '<|tool_call>call:weather{city:<|"|><|turn><|"|>,days:[1,{a:true}]}<tool_call|>'
            '<|tool_response>response:weather{value:<|"|>cold<|"|>}<tool_response|>'
        ), prompt
        ids = good(await server.post("/tokenize", messages=[*HI, turn, result]))["tokens"]
        assert ids.count(server.app.service.tokenizer.encode("<|turn>", add_special_tokens=False)[0]) == 2


async def test_a_prompt_may_open_the_channel_of_thoughts(gemma: str) -> None:
    opened = GEMMA4.replace("<|channel>thought\\n<channel|>", "<|channel>thought\\n")
    async with scripted(gemma, opened) as (server, script):
        script.write("hm<channel|>Yes.<turn|>")
        message = (await both_ways(server))["message"]
        assert (message["reasoning"], message["content"]) == ("hm", "Yes.")
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [{"a": 1}]}}}
        script.write('{"a":1}')
        message = (await both_ways(server, response_format=form, tools=None))["message"]
        assert (json.loads(message["content"]), message["reasoning"]) == ({"a": 1}, None)


async def test_parsers_of_gemma_go_together(gemma: str) -> None:
    settings = {"tool_call_parser": "gemma4", "reasoning_parser": "none"}
    async with scripted(gemma, "{% if tools %}t{% endif %}{{ messages[0].content }}", **settings) as (server, script):
        script.write(f"<|channel>thought\nhm<channel|>{WEATHER}<|tool_response>")
        choice = await both_ways(server)
        assert (choice["message"]["content"], choice["finish_reason"]) == ("hm", "tool_calls")
    for calls, thoughts in (("gemma4", "think"), ("hermes", "gemma4")):
        with pytest.raises(ParameterError, match="use gemma4 with gemma4, or none"):
            async with serving(gemma, tool_call_parser=calls, reasoning_parser=thoughts):
                pass
