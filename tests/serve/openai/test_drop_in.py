"""What clients of vLLM, llama.cpp and SGLang send and read, against `octavo serve` over its socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.tiny_server import TEMPLATE, serving
from tests.serve.openai.test_error_table import JSON, MESSAGES, VOCAB, C, H, Peer, R, functions

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 4}
BOS, A = 1, 67
"""Token ids of a special token and of "a"."""


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    with serving(tmp_path_factory.mktemp("server"), "--root-path", "/api", "--unknown-params", "warn") as url:
        yield Peer(url)


@pytest.fixture(scope="module")
def flagged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    flags = ["--return-tokens-as-token-ids", "--enable-force-include-usage", "--enable-tokenizer-info-endpoint"]
    flags += ["--enable-server-load-tracking", "--max-logprobs", "-1"]
    with serving(tmp_path_factory.mktemp("flagged"), *flags) as url:
        yield Peer(url)


def good(peer: Peer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = peer.post(path, body)
    assert response.status == 200, response.body
    answer: dict[str, Any] = json.loads(response.body)
    return answer


def completed(peer: Peer, prompt: Any, **body: Any) -> dict[str, Any]:
    (choice,) = good(peer, C, {"prompt": prompt, **GREEDY, **body})["choices"]
    return dict(choice)


def chat(peer: Peer, **body: Any) -> dict[str, Any]:
    return good(peer, H, {"messages": MESSAGES, **GREEDY, **body})


def streamed(peer: Peer, path: str, **body: Any) -> list[dict[str, Any]]:
    payload = {"messages": MESSAGES} if path == H else {"prompt": "Hi"}
    response = peer.post(path, {**payload, **GREEDY, "stream": True, **body})
    lines = [line.removeprefix(b"data: ") for line in response.body.splitlines() if line.startswith(b"data: {")]
    assert response.status == 200 and b"[DONE]" in response.body, response.body
    return [json.loads(line) for line in lines]


def nulls(holder: dict[str, Any]) -> set[str]:
    return {name for name, value in holder.items() if value is None}


def test_unknown_fields_of_messages_are_ignored_by_the_option(peer: Peer) -> None:
    want = chat(peer)["choices"]
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}, "colour": 1}
    for message in (
        {"role": "user", "content": "Hi", "colour": 1, "cache_control": {"type": "ephemeral"}},
        {"role": "user", "content": [part]},
    ):
        assert chat(peer, messages=[message])["choices"] == want
        assert good(peer, "/tokenize", {"messages": [message]})["count"] == len("user:Hi;a:")


def test_both_paths_behind_a_proxy_are_answered(peer: Peer) -> None:
    for path in ("/v1/models", "/api/v1/models"):
        assert peer.send("GET", path).status == 200
        assert peer.send("GET", path, auth=False).error == (401, "invalid_api_key", None)
    for path in ("/health", "/api/health"):
        assert peer.send("GET", path, auth=False).status == 200
    assert peer.send("GET", "/api/api/v1/models").error == (404, "not_found", None)
    assert peer.send("POST", "/api" + C, b'{"prompt": "a", "max_tokens": 1}', JSON).status == 200


def test_responses_have_vllms_null_fields(peer: Peer) -> None:
    body = chat(peer)
    unset = {"service_tier", "kv_transfer_params", "ec_transfer_params", "metrics"}
    assert nulls(body) == unset | {"prompt_logprobs", "prompt_token_ids", "prompt_text"}
    (choice,) = body["choices"]
    assert nulls(choice) == {"logprobs", "stop_reason", "token_ids", "routed_experts"}
    assert nulls(choice["message"]) == {"refusal", "annotations", "audio", "function_call", "reasoning"}
    body = good(peer, C, {"prompt": "Hi", **GREEDY})
    assert nulls(body) == unset
    assert nulls(body["choices"][0]) == nulls(choice) | {"prompt_logprobs", "prompt_token_ids"}


def test_chat_echo_begins_with_the_last_message_of_the_role(peer: Peer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "so"}]
    text = chat(peer, messages=messages)["choices"][0]["message"]["content"]
    for turns, options, role, before in (
        (messages, {}, "assistant", "so"),
        (messages, {"continue_final_message": True}, "assistant", "so"),
        (messages[:1], {}, "assistant", ""),
        (messages[:1], {"add_generation_prompt": False}, "user", "Hi"),
    ):
        want = chat(peer, messages=turns, **options)["choices"][0]["message"]["content"]
        whole = chat(peer, messages=turns, echo=True, **options)["choices"][0]["message"]
        assert (whole["role"], whole["content"]) == (role, before + want)
        chunks = [c["choices"][0]["delta"] for c in streamed(peer, H, messages=turns, echo=True, **options)]
        assert chunks[0]["role"] == role and "".join(c.get("content", "") for c in chunks) == before + want
    assert text


def test_prompts_are_truncated_from_either_side(peer: Peer) -> None:
    ids = list(range(3, 13))
    ask = {"return_token_ids": True, "truncate_prompt_tokens": 4}
    assert completed(peer, ids, **ask)["prompt_token_ids"] == ids[-4:]
    assert completed(peer, ids, **ask, truncation_side="left")["prompt_token_ids"] == ids[-4:]
    assert completed(peer, ids, **ask, truncation_side="right")["prompt_token_ids"] == ids[:4]
    ask["truncate_prompt_tokens"] = -1
    for prompt in ([5] * 600, "a" * 3000):
        choice = completed(peer, prompt, **ask)
        assert len(choice["prompt_token_ids"]) == 512 - 4 and len(choice["token_ids"]) == 4
    long = [{"role": "user", "content": "a" * 3000}]
    assert chat(peer, messages=long, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 512 - 4
    assert chat(peer, messages=long, truncate_prompt_tokens=-1, max_tokens=None)["usage"]["prompt_tokens"] == 512 - 1
    assert chat(peer, messages=long, truncate_prompt_tokens=6, echo=True)["usage"]["prompt_tokens"] == 6
    answer = good(peer, R, {"input": "a" * 3000, "max_output_tokens": 4, "truncation": "auto"})
    assert answer["usage"]["input_tokens"] == 512 - 4 and answer["truncation"] == "auto"
    error = peer.post(R, {"input": "a" * 3000, "max_output_tokens": 4, "truncation": "disabled"}).error
    assert error == (400, "context_length_exceeded", "input")


def test_token_ids_are_where_vllm_has_them(peer: Peer) -> None:
    body = chat(peer, return_token_ids=True)
    prompt_ids, (choice,) = body["prompt_token_ids"], body["choices"]
    assert len(prompt_ids) == len("user:Hi;a:") and len(choice["token_ids"]) == 4
    assert "prompt_token_ids" not in choice
    first, *rest = streamed(peer, H, return_token_ids=True, n=2)
    assert first["prompt_token_ids"] == prompt_ids and not any("prompt_token_ids" in chunk for chunk in rest)
    plain = completed(peer, "Hi", return_token_ids=True, prompt_logprobs=1)
    for more in ({}, {"logprobs": 0}, {"logprobs": 2, "prompt_logprobs": 5}):
        echoed = completed(peer, "Hi", return_token_ids=True, echo=True, **{"prompt_logprobs": 1, **more})
        assert echoed["text"] == "Hi" + plain["text"]
        assert (echoed["token_ids"], echoed["prompt_token_ids"]) == (plain["token_ids"], plain["prompt_token_ids"])
        assert echoed["prompt_logprobs"][0] is None and len(echoed["prompt_logprobs"]) == 2
        if more:
            tops = [len(top) for top in echoed["logprobs"]["top_logprobs"][1:]]
            assert len(tops) == 1 + 4 and max(tops) <= more["logprobs"] + 1
    chunks = streamed(peer, C, echo=True, return_token_ids=True)
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == plain["token_ids"]
    assert completed(peer, "Hi", echo=True, return_token_ids=True, max_tokens=0)["token_ids"] == []


def test_usage_of_streams(peer: Peer) -> None:
    for options in ({"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}):
        assert not any("usage" in chunk for chunk in streamed(peer, H, stream_options=options))
    often = {"include_usage": True, "continuous_usage_stats": True}
    chunks = streamed(peer, H, stream_options=often, n=2, echo=True, messages=[{"role": "assistant", "content": "a"}])
    for chunk in chunks[:4]:  # the roles and what is echoed
        assert (chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]) == (len("assistant:a;a:"), 0)
    assert chunks[-1]["usage"]["completion_tokens"] == 8


def test_special_tokens_are_shown_as_vllm_shows_them(peer: Peer) -> None:
    for skip in (True, False):
        choice = completed(peer, [BOS, A], echo=True, logprobs=0, skip_special_tokens=skip)
        assert choice["text"].startswith("<s>a") and choice["logprobs"]["text_offset"][:3] == [0, 3, 4]


def test_a_json_objects_schema_holds(peer: Peer) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_object", "schema": schema}
    ask = {"response_format": form, "max_tokens": 60, "ignore_eos": False}
    assert json.loads(completed(peer, "Hi", **ask)["text"]) == {"a": 7}
    assert json.loads(chat(peer, **ask)["choices"][0]["message"]["content"]) == {"a": 7}
    answer = good(peer, R, {"input": "Hi", "temperature": 0, "text": {"format": form}})
    assert json.loads(answer["output"][0]["content"][0]["text"]) == {"a": 7}
    schema["properties"] = {"a": {"type": "nope"}}
    error = peer.post(H, {"messages": MESSAGES, "response_format": form}).error
    assert error == (400, "invalid_json_schema", "response_format")


def test_a_forced_tool_call_drops_the_format_of_content(peer: Peer) -> None:
    ask = {"tools": functions({"name": "f"}), "tool_choice": "required", "max_tokens": 60, "ignore_eos": False}
    for form in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}):
        message = chat(peer, **ask, response_format=form)["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["name"] == "f" and message["content"] == ""


def test_responses_have_log_probabilities(peer: Peer) -> None:
    body = {"input": "Hi", "max_output_tokens": 4, "temperature": 0, "ignore_eos": True}
    want = chat(peer, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    for ask in ({"top_logprobs": 2}, {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}):
        answer = good(peer, R, body | ask)
        assert answer["output"][0]["content"][0]["logprobs"] == want and answer["top_logprobs"] == 2
    response = peer.post(R, body | ask | {"stream": True})
    events = [json.loads(line[6:]) for line in response.body.splitlines() if line.startswith(b"data: {")]
    deltas = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    assert [entry for entries in deltas for entry in entries] == want
    assert [e["logprobs"] for e in events if e["type"] == "response.output_text.done"] == [want]
    (entry, *_) = good(peer, R, body | {"include": ["message.output_text.logprobs"]})["output"][0]["content"][0][
        "logprobs"
    ]
    assert entry["top_logprobs"] == []
    assert (
        good(peer, R, body | {"include": ["reasoning.encrypted_content"]})["output"][0]["content"][0]["logprobs"] == []
    )
    form = {"type": "json_object", "schema": {"const": 7}}
    answer = good(peer, R, {"input": "Hi", "top_logprobs": 1, "text": {"format": form}})
    entries = answer["output"][0]["content"][0]["logprobs"]
    assert len(entries) == answer["usage"]["output_tokens"] > len("7")  # the last token has no text
    assert peer.post(R, body | {"top_logprobs": 21}).error == (400, "invalid_value", "top_logprobs")


def test_flags_of_vllm_change_the_defaults_of_requests(flagged: Peer) -> None:
    for ask, is_id in (({}, True), ({"return_tokens_as_token_ids": False}, False)):
        (entry, *_) = chat(flagged, logprobs=True, top_logprobs=1, **ask)["choices"][0]["logprobs"]["content"]
        tokens = [entry["token"], entry["top_logprobs"][0]["token"]]
        tokens += completed(flagged, "Hi", logprobs=0, **ask)["logprobs"]["tokens"]
        assert {token.startswith("token_id:") for token in tokens} == {is_id}
    for path in (C, H):
        for ask in ({}, {"stream_options": {"include_usage": False}}):
            *chunks, last = [chunk["usage"] for chunk in streamed(flagged, path, **ask)]
            assert last["completion_tokens"] == 4 and {usage["prompt_tokens"] for usage in chunks} == {
                last["prompt_tokens"]
            }
    assert json.loads(flagged.send("GET", "/load").body) == {"server_load": 0}


def test_tokenizer_info(flagged: Peer, peer: Peer) -> None:
    info = json.loads(flagged.send("GET", "/tokenizer_info").body)
    assert info == {
        "tokenizer_class": "Tokenizer",
        "model_max_length": 512,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
    }
    assert flagged.send("GET", "/tokenizer_info", auth=False).error == (401, "invalid_api_key", None)
    assert peer.send("GET", "/tokenizer_info").error == (404, "not_found", None)


def test_minus_one_asks_for_the_whole_vocabularys_log_probabilities(flagged: Peer, peer: Peer) -> None:
    body = chat(flagged, prompt_logprobs=-1, logprobs="true", top_logprobs=-1)
    assert {len(entries) for entries in body["prompt_logprobs"][1:]} == {VOCAB}
    assert {len(entry["top_logprobs"]) for entry in body["choices"][0]["logprobs"]["content"]} == {VOCAB}
    assert {len(top) for top in completed(flagged, "Hi", logprobs=-1)["logprobs"]["top_logprobs"]} == {VOCAB}
    assert chat(peer, logprobs="false")["choices"][0]["logprobs"] is None
    for change in ({"prompt_logprobs": -1}, {"logprobs": "true", "top_logprobs": -1}, {"logprobs": "yes"}):
        name = "top_logprobs" if "top_logprobs" in change else next(iter(change))
        assert peer.post(H, {"messages": MESSAGES, **change}).error == (400, "invalid_value", name)
    error = flagged.post(C, {"prompt": [5] * 400, "max_tokens": 100, "logprobs": -1, "echo": True, "n": 16}).error
    assert error[:2] == (400, "request_too_large")


def test_the_template_gets_other_roles_as_they_are(peer: Peer) -> None:
    message = {"role": "critic", "content": "Hi"}
    assert good(peer, "/tokenize", {"messages": [message]})["count"] == len("critic:Hi;a:")
    assert chat(peer, messages=[message])["usage"]["prompt_tokens"] == len("critic:Hi;a:")
    assert peer.post(H, {"messages": [{"role": "critic", "content": None}]}).error[0] == 400


def test_errors_of_logit_bias_name_the_keys(peer: Peer) -> None:
    for path, prompt in ((C, {"prompt": "Hi"}), (H, {"messages": MESSAGES})):
        for biases, texts in (
            ({"bad1": 1, "5": 1, "bad2": 2}, ["'bad1', 'bad2'"]),
            ({str(VOCAB + 1): 1}, ["98", "97"]),
        ):
            response = peer.post(path, {**prompt, "logit_bias": biases})
            assert response.error == (400, "invalid_logit_bias", "logit_bias")
            assert all(text in json.loads(response.body)["error"]["message"] for text in texts)


def test_responses_take_penalties(peer: Peer) -> None:
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 2, "frequency_penalty": 2}
    want, plain = chat(peer, **penalties), chat(peer)
    ask = {"input": "Hi", "max_output_tokens": 4, "temperature": 0, "ignore_eos": True}
    texts = [good(peer, R, ask | more)["output"][0]["content"][0]["text"] for more in (penalties, {})]
    assert texts == [body["choices"][0]["message"]["content"] for body in (want, plain)] and texts[0] != texts[1]
    assert peer.post(R, ask | {"presence_penalty": 3}).error == (400, "decimal_out_of_range", "presence_penalty")


def test_null_means_not_set_in_chats_as_the_document_says(peer: Peer) -> None:
    """Each property takes null in the OpenAPI document, and the server accepts them all at once."""
    properties = json.loads(peer.send("GET", "/openapi.json").body)["components"]["schemas"]["ChatRequest"][
        "properties"
    ]
    del properties["messages"]
    assert not [name for name, schema in properties.items() if schema and "null" not in json.dumps(schema)]
    good(peer, H, {"messages": MESSAGES, **dict.fromkeys(properties), "max_tokens": 2})


def test_null_means_not_set_in_responses(peer: Peer) -> None:
    document = json.loads(peer.send("GET", "/openapi.json").body)
    names = document["components"]["schemas"]["ResponseRequest"]["properties"].keys() - {"input"}
    want = good(peer, R, {"input": "Hi", "max_output_tokens": 2})
    for change in (dict.fromkeys(names), {"previous_response_id": None, "background": None, "prompt": None}):
        answer = good(
            peer, R, {"input": "Hi", "max_output_tokens": 2, "temperature": 0} | change | {"max_output_tokens": 2}
        )
        assert answer.keys() == want.keys()
