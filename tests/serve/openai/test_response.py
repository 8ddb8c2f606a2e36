"""Responses and streams: shapes, and traps of an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import tokenizers

from octavo import LLM, SamplingParams
from octavo.engine.outputs import RequestMetrics, RequestOutput
from octavo.serve.app import UNSUPPORTED_ROUTES
from octavo.serve.openai.response import _TextOffsets
from octavo.text.tokenizer import Tokenizer
from tests.models.tiny import VOCAB_SIZE
from tests.serve.in_process_server import NAME, OPTIONS, TEMPLATE, good, serving

C, H = "/v1/completions", "/v1/chat/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Hello"}]
RENDERED = "user:Hello;a:"


def offline(model: str, prompt: str, **params: Any) -> Any:
    with LLM(model, **OPTIONS, chat_template=TEMPLATE) as llm:
        return llm.generate(prompt, SamplingParams(temperature=0, ignore_eos=True, **params), use_tqdm=False)[0]


async def test_completion_equals_the_engines_output(model: str) -> None:
    want = offline(model, "Hello", max_tokens=8).outputs[0]
    async with serving(model) as server:
        body = await server.complete("Hello")
        assert body["id"].startswith("cmpl-") and body["object"] == "text_completion" and body["model"] == NAME
        (choice,) = body["choices"]
        assert choice["text"] == want.text and choice["finish_reason"] == "length"
        assert choice["index"] == 0 and choice["stop_reason"] is None and choice["logprobs"] is None
        assert body["usage"] | {"completion_tokens_details": None} == {
            "prompt_tokens": 5,
            "completion_tokens": 8,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": None,
        }
        again = await server.complete("Hello", model=NAME)
        assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}  # enabled by default
        assert again["id"] != body["id"] and again["choices"] == body["choices"]
        await server.at_rest()


async def test_stream_adds_up_to_the_complete_response(model: str) -> None:
    async with serving(model) as server:
        want = (await server.complete("Hello", max_tokens=12, logprobs=2, n=2))["choices"]
        chunks = await server.events(
            C, prompt="Hello", max_tokens=12, logprobs=2, n=2, stream_options={"include_usage": True}, **GREEDY
        )
        assert len({chunk["id"] for chunk in chunks}) == 1
        *parts, last = chunks
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 24
        assert last["usage"]["prompt_tokens"] == 5  # counted once for two samples
        assert all(part["usage"] is None for part in parts)
        for index in (0, 1):
            own = [c for part in parts for c in part["choices"] if c["index"] == index]
            assert "".join(c["text"] for c in own) == want[index]["text"]
            assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["length"]
            tokens = [t for c in own for t in c["logprobs"]["tokens"]]
            assert tokens == want[index]["logprobs"]["tokens"] and len(tokens) == 12
            offsets = [o for c in own for o in c["logprobs"]["text_offset"]]
            assert offsets == want[index]["logprobs"]["text_offset"] == list(range(12))
        plain = await server.events(C, prompt="Hello", max_tokens=3, **GREEDY)
        assert all("usage" not in chunk for chunk in plain) and plain[-1]["system_fingerprint"]
        usage = {"include_usage": True, "continuous_usage_stats": True}
        often = await server.events(C, prompt="Hello", max_tokens=3, stream_options=usage, **GREEDY)
        counts = [chunk["usage"]["completion_tokens"] for chunk in often]
        assert counts == sorted(counts) and counts[-1] == 3


async def test_chat_completion(model: str) -> None:
    want = offline(model, RENDERED, max_tokens=8).outputs[0]
    async with serving(model) as server:
        body = await server.chat("Hello")
        assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"
        (choice,) = body["choices"]
        assert {name: value for name, value in choice["message"].items() if value is not None} == {
            "role": "assistant",
            "content": want.text,
        }
        assert choice["finish_reason"] == "length"
        parts = [{"type": "text", "text": "Hel"}]
        message = {"role": "developer", "content": parts}
        answer = good(await server.post(H, messages=[message], max_completion_tokens=2, max_tokens=9, **GREEDY))
        assert answer["usage"]["completion_tokens"] == 2
        assert answer["usage"]["prompt_tokens"] == len("system:Hel;a:")
        continued = [*MESSAGES, {"role": "assistant", "content": "so"}]
        open_end = good(
            await server.post(H, messages=continued, max_tokens=1, continue_final_message=True, return_token_ids=True)
        )
        assert open_end["usage"]["prompt_tokens"] == len("user:Hello;assistant:so")
        assert len(open_end["choices"][0]["token_ids"]) == 1
        assert len(open_end["prompt_token_ids"]) == len("user:Hello;assistant:so")
        longest = good(await server.post(H, messages=MESSAGES, **GREEDY))
        assert longest["usage"]["total_tokens"] == 128  # the default is lowered to fit


async def test_streamed_chat_completion(model: str) -> None:
    async with serving(model) as server:
        want = await server.chat("Hello", n=2, logprobs=True, top_logprobs=2)
        chunks = await server.events(H, messages=MESSAGES, max_tokens=8, n=2, logprobs=True, top_logprobs=2, **GREEDY)
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        for index in (0, 1):
            own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert own[0]["delta"] == {"role": "assistant", "content": ""} and own[0]["finish_reason"] is None
            assert all("role" not in c["delta"] for c in own[1:])
            text = "".join(c["delta"].get("content", "") for c in own)
            assert text == want["choices"][index]["message"]["content"]
            assert own[-1]["finish_reason"] == "length"
            logprobs = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
            wanted = want["choices"][index]["logprobs"]["content"]
            assert [e["token"] for e in logprobs] == [e["token"] for e in wanted] and len(logprobs) == 8
            for entry in logprobs:
                assert bytes(entry["bytes"]).decode() == entry["token"] and len(entry["top_logprobs"]) == 2
                assert entry["logprob"] <= entry["top_logprobs"][0]["logprob"] <= 0


async def test_prompt_forms_and_choice_order(model: str) -> None:
    async with serving(model) as server:
        ids = server.engine.get_tokenizer().encode("Hello")
        one = (await server.complete("Hello"))["choices"][0]["text"]
        other = (await server.complete("abc"))["choices"][0]["text"]
        assert one != other
        other_ids = server.engine.get_tokenizer().encode("abc")
        for prompt, texts in ((ids, [one]), (["Hello", "abc"], [one, other]), ([ids, other_ids], [one, other])):
            for n in (1, 2):
                body = await server.complete(prompt, n=n)
                assert [c["text"] for c in body["choices"]] == [t for t in texts for _ in range(n)]
                assert [c["index"] for c in body["choices"]] == list(range(n * len(texts)))
                assert body["usage"]["completion_tokens"] == 8 * n * len(texts)
                assert body["usage"]["prompt_tokens"] == (5 if len(texts) == 1 else 8)
        chunks = await server.events(C, prompt=["Hello", "abc"], max_tokens=8, n=2, **GREEDY)
        streamed = dict.fromkeys(range(4), "")
        for chunk in chunks:
            for c in chunk["choices"]:
                streamed[c["index"]] += c["text"]
        assert list(streamed.values()) == [one, one, other, other]
        await server.at_rest()


async def test_logprobs_of_echoed_prompts(model: str) -> None:
    """The requests of evaluation harnesses: echo, zero or one new token, and a null first entry."""
    want = offline(model, "Hello", max_tokens=1, prompt_logprobs=1)
    async with serving(model) as server:
        for max_tokens in (0, 1):
            body = await server.complete("Hello", echo=True, max_tokens=max_tokens, logprobs=1)
            (choice,) = body["choices"]
            assert choice["text"].startswith("Hello") and len(choice["text"]) == 5 + max_tokens
            logprobs = choice["logprobs"]
            assert logprobs["tokens"][:5] == list("Hello") and logprobs["text_offset"][:5] == [0, 1, 2, 3, 4]
            assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
            ids = server.engine.get_tokenizer().encode("Hello")
            expected = [want.prompt_logprobs[i][ids[i]].logprob for i in range(1, 5)]
            assert all(abs(a - b) < 1e-5 for a, b in zip(logprobs["token_logprobs"][1:5], expected, strict=True))
            assert body["usage"]["completion_tokens"] == max_tokens
            assert choice["finish_reason"] == "length"
        chunks = await server.events(C, prompt="Hello", echo=True, max_tokens=2, logprobs=0, **GREEDY)
        assert "".join(c["choices"][0]["text"] for c in chunks).startswith("Hello")
        assert chunks[0]["choices"][0]["logprobs"]["token_logprobs"][0] is None


async def test_tokens_of_one_text_keep_an_entry_each(model: str, tmp_path: Path) -> None:
    """Bytes that are no characters all read U+FFFD: here half of the tokens."""
    directory = shutil.copytree(model, tmp_path / "bytes")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[-VOCAB_SIZE:]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(directory / "tokenizer.json"))
    prompt = [1, 2, 3]
    async with serving(str(directory)) as server:
        ask = {"logprobs": 20, "echo": True}
        (by_text,) = (await server.complete(prompt, **ask))["choices"]
        (by_id,) = (await server.complete(prompt, **ask, return_tokens_as_token_ids=True))["choices"]
        texts, ids = by_text["logprobs"]["top_logprobs"][1:], by_id["logprobs"]["top_logprobs"][1:]
        assert [sorted(top.values()) for top in texts] == [sorted(top.values()) for top in ids]
        assert any(name.startswith("token_id:") for top in texts for name in top)
        tokens = good(await server.post("/tokenize", prompt="ĠĊ", return_token_strs=True))
        assert tokens["token_strs"] == ["Ġ", "Ċ"]  # the vocabulary's: they read " " and a new line
        values = zip(by_text["logprobs"]["tokens"][1:], by_text["logprobs"]["token_logprobs"][1:], texts, strict=True)
        assert all(top[token] == logprob for token, logprob, top in values)


async def test_zero_logprobs_differ_from_none(model: str) -> None:
    async with serving(model) as server:
        (choice,) = (await server.complete("Hello", logprobs=0))["choices"]
        assert len(choice["logprobs"]["token_logprobs"]) == 8
        assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"])
        (choice,) = (await server.complete("Hello", logprobs=3, return_tokens_as_token_ids=True))["choices"]
        assert all(token.startswith("token_id:") for token in choice["logprobs"]["tokens"])
        assert all(3 <= len(top) <= 4 for top in choice["logprobs"]["top_logprobs"])
        (choice,) = (await server.complete("Hello", prompt_logprobs=1))["choices"]
        assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == 5
        entry = next(iter(choice["prompt_logprobs"][1].values()))
        assert set(entry) == {"logprob", "rank", "decoded_token"}


async def test_stop_strings_across_tokens_are_never_shown(model: str) -> None:
    text = offline(model, "Hello", max_tokens=20).outputs[0].text
    stop = text[6:9]
    before = text[: text.index(stop)]
    async with serving(model) as server:
        payload = {"prompt": "Hello", "max_tokens": 20, "stop": stop, "return_token_ids": True, **GREEDY}
        (choice,) = good(await server.post(C, **payload))["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (before, "stop", stop)
        assert len(choice["token_ids"]) >= len(before) + 3  # its tokens remain
        chunks = await server.events(C, **payload)
        shown = [c["choices"][0] for c in chunks]
        assert "".join(c["text"] for c in shown) == before
        assert shown[-1]["finish_reason"] == "stop" and shown[-1]["stop_reason"] == stop
        kept = good(await server.post(C, **payload, include_stop_str_in_output=True))["choices"][0]
        assert kept["text"] == before + stop


async def test_chat_token_ids_are_complete(model: str) -> None:
    """Token ids are complete even while their text is held back."""
    async with serving(model) as server:
        text = (await server.chat(max_tokens=20))["choices"][0]["message"]["content"]
        payload = {"max_tokens": 20, "stop": text[9:12], "return_token_ids": True}
        body = await server.chat(**payload)
        choice, usage = body["choices"][0], body["usage"]
        assert len(choice["token_ids"]) == usage["completion_tokens"] > 9
        assert len(body["prompt_token_ids"]) == usage["prompt_tokens"]
        payload |= {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "ignore_eos": True}
        chunks = await server.events(H, **payload)
        ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids") or []]
        assert ids == choice["token_ids"] and chunks[0]["prompt_token_ids"] == body["prompt_token_ids"]


async def test_beam_search(model: str) -> None:
    async with serving(model) as server:
        body = good(await server.post(C, prompt="Hello", use_beam_search=True, n=2, beam_width=4, max_tokens=6))
        assert [c["index"] for c in body["choices"]] == [0, 1]
        assert body["choices"][0]["text"] != body["choices"][1]["text"]
        await server.at_rest()


async def test_structured_output(model: str) -> None:
    async with serving(model) as server:
        body = await server.complete("Hello", structured_outputs={"choice": ["yes", "no"]}, ignore_eos=False)
        assert body["choices"][0]["text"] in ("yes", "no") and body["choices"][0]["finish_reason"] == "stop"
        schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}}}
        answer = await server.chat("Hello", response_format=form, ignore_eos=False, max_tokens=60)
        assert answer["choices"][0]["message"]["content"].startswith("{")


async def test_spelled_special_tokens_are_text(model: str) -> None:
    async with serving(model) as server:
        body = await server.complete("</s>", return_token_ids=True)
        assert body["usage"]["prompt_tokens"] == 4
        assert (await server.chat("</s>"))["usage"]["prompt_tokens"] == len("user:</s>;a:")
        tokens = good(await server.post("/tokenize", prompt="</s>", return_token_strs=True))
        assert tokens == {"count": 4, "max_model_len": 128, "tokens": tokens["tokens"], "token_strs": list("</s>")}
        assert good(await server.post("/detokenize", tokens=tokens["tokens"])) == {"prompt": "</s>"}
        chat = good(await server.post("/tokenize", messages=MESSAGES))
        assert chat["count"] == len(RENDERED)
        mismatches = await server.post("/detokenize", tokens=[5, 97])
        assert mismatches.json()["error"]["param"] == "tokens[1]"


async def test_models_version_and_tokenizer_routes(model: str) -> None:
    async with serving(model, served_model_name=["first", "second"]) as server:
        get = server.client.get
        cards = good(await get("/v1/models"))
        assert good(await get("/v1/models/")) == cards
        assert cards["object"] == "list" and [card["id"] for card in cards["data"]] == ["first", "second"]
        assert cards["data"][0]["max_model_len"] == 128 and cards["data"][0]["object"] == "model"
        assert good(await get("/v1/models/second"))["id"] == "second"
        assert (await server.complete(model="second"))["model"] == "second"
        assert (await server.complete())["model"] == "first"
        health = await get("/health")
        assert health.status_code == 200 and health.content == b""
        assert good(await get("/ready")) == {"status": "ready"}
        assert good(await get("/version"))["version"]
        assert good(await get("/load")) == {"server_load": 0}
        document = good(await get("/openapi.json"))
        others = ("/view", "/openapi.json", *UNSUPPORTED_ROUTES)
        routes = {
            (route.path.replace(":path", ""), method.lower())
            for route in server.app.starlette.routes
            if route.path != "/" and not route.path.startswith(others)
            for method in route.methods - {"HEAD"}
        }
        assert {(path, method) for path, ways in document["paths"].items() for method in ways} == routes
        assert "temperature" in document["components"]["schemas"]["ChatRequest"]["properties"]


async def test_debug_request_reports_the_wait_reason(model: str) -> None:
    async with serving(model, engine_options={"max_num_seqs": 1}) as server:
        payload = {"prompt": "Hello", "max_tokens": 110, **GREEDY}
        running = [asyncio.ensure_future(server.post(C, **payload)) for _ in range(2)]
        seen: dict[str, Any] = {}
        while not all(task.done() for task in running):
            kv = good(await server.client.get("/debug/kv"))
            for name in kv["requests"]:
                response = await server.client.get(f"/debug/requests/{name.removeprefix('cmpl-')}")
                if response.status_code == 200 and response.json()["status"] == "waiting":
                    seen = response.json()
            await asyncio.sleep(0)
        assert seen["waits_for"] == "rows" and seen["timeline"]
        done = good(await server.client.get(f"/debug/requests/{running[0].result().json()['id']}"))
        assert done["status"] == "finished"


async def test_errors_name_the_parameter_that_was_sent(model: str) -> None:
    async with serving(model) as server:
        messages = [{"role": "user", "content": "Hello"}]
        for name, value in (("max_tokens", 0), ("max_completion_tokens", 0), ("max_completion_tokens", 4000)):
            answer = await server.post("/v1/chat/completions", messages=messages, **{name: value})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, name), error
            assert ("max_tokens" in error["message"]) == (name == "max_tokens"), error


def test_text_offsets_index_the_returned_text() -> None:
    """Skipped tokens, and parts of one character, have the offset of the next token."""
    specials = ["<s>"]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"<s>": 0} | _bytes_vocab(), []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(specials)
    tokenizer = Tokenizer(backend)
    ids = [0, *(tokenizer.backend.token_to_id(c) for c in "aðŁĻĥb"), 0, tokenizer.backend.token_to_id("c")]

    def offsets(*, skip: bool, echo: int = 0, shown: bool = False) -> list[int]:
        prompt = ids[: echo or 1]
        text = tokenizer.decode(prompt, not shown)
        output = RequestOutput("r", text, prompt, [], False, RequestMetrics(0.0))
        places = _TextOffsets(tokenizer, output, echo=bool(echo), skip_special_tokens=skip, skip_in_prompt=not shown)
        return [places.next(token) for token in (ids if echo else ids[1:])]

    assert offsets(skip=True) == [0, 1, 1, 1, 1, 2, 3, 3]  # of "a🙃bc"
    assert offsets(skip=False) == [0, 1, 1, 1, 1, 2, 3, 6]  # of "a🙃b<s>c"
    assert offsets(skip=True, echo=2) == [0, 0, 1, 1, 1, 1, 2, 3, 3]
    assert offsets(skip=False, echo=2, shown=True) == [0, 3, 4, 4, 4, 4, 5, 6, 9]
    assert offsets(skip=True, echo=2, shown=True) == [0, 3, 4, 4, 4, 4, 5, 6, 6]


def _bytes_vocab() -> dict[str, int]:
    return {c: i + 1 for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
