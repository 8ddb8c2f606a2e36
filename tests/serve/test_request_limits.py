"""Limits of one request, and the room that it leaves for others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.errors import ParameterError
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import SamplingParams
from octavo.serve.admission import Admission, Ticket
from octavo.serve.args import ServeArgs
from octavo.serve.openai.errors import ApiError
from octavo.serve.request_limits import RequestLimits
from tests.serve.http.test_server import Process, call
from tests.serve.in_process_server import serving

STAYING = contextlib.ExitStack()
C, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
ANY = RequestLimits(None, None, None, max_model_len=100)


def refusal(limits: RequestLimits, params: Any, *lengths: int) -> ApiError:
    with pytest.raises(ApiError) as caught:
        limits.fit(params, lengths)
    assert (caught.value.status, caught.value.code) == (400, "request_too_large")
    return caught.value


# -- what a request comes to -------------------------------------------------------------------------------------------


def test_sequences_count_prompts_times_samples() -> None:
    limits = RequestLimits(6, None, None, max_model_len=100)
    limits.fit(SamplingParams(n=3), [5, 5])
    assert "9 sequences (3 prompts x 3)" in str(refusal(limits, SamplingParams(n=3), 5, 5, 5))
    assert "the limit is 6 (--max-request-sequences); lower n" in str(refusal(limits, SamplingParams(n=7), 5))
    assert refusal(limits, SamplingParams(n=1, best_of=7), 5).param == "best_of"
    assert "lower beam_width" in str(refusal(limits, BeamSearchParams(beam_width=7, max_tokens=1), 5))


def test_tokens_count_prompts_and_outputs() -> None:
    limits = RequestLimits(None, 100, None, max_model_len=100)
    limits.fit(SamplingParams(n=3, max_tokens=30), [10])
    api_error = refusal(limits, SamplingParams(n=3, max_tokens=31), 10)
    assert "103 tokens; the limit is 100 (--max-request-tokens); lower max_tokens" in str(api_error)
    assert api_error.param == "max_tokens"
    refusal(limits, SamplingParams(max_tokens=1), 60, 60)
    refusal(limits, BeamSearchParams(beam_width=4, max_tokens=30), 10)


def test_logprobs_count_all_positions() -> None:
    limits = RequestLimits(None, None, 100, max_model_len=100)
    limits.fit(SamplingParams(logprobs=4, max_tokens=10, n=2), [90])
    assert "110 log-probabilities" in str(refusal(limits, SamplingParams(logprobs=4, max_tokens=11, n=2), 90))
    limits.fit(SamplingParams(prompt_logprobs=1, max_tokens=60), [50])
    refusal(limits, SamplingParams(prompt_logprobs=1, max_tokens=1), 51)
    refusal(limits, SamplingParams(logprobs=0, echo=True, max_tokens=11), 90)
    limits.fit(SamplingParams(max_tokens=5000), [90, 90, 90])
    limits.fit(BeamSearchParams(beam_width=2, max_tokens=25, logprobs=1), [50])
    refusal(limits, BeamSearchParams(beam_width=2, max_tokens=26, logprobs=1), 50)


def test_default_max_tokens_is_lowered_and_explicit_is_not() -> None:
    default = SamplingParams(max_tokens=None)
    assert ANY.fit(default, [40]) is default
    by_tokens = RequestLimits(None, 50, None, max_model_len=100)
    assert by_tokens.fit(default, [40]).max_tokens == 10
    assert by_tokens.fit(SamplingParams(max_tokens=None, n=2), [40]).max_tokens == 5
    by_logprobs = RequestLimits(None, None, 60, max_model_len=100)
    assert by_logprobs.fit(SamplingParams(max_tokens=None, logprobs=2), [40]).max_tokens == 20
    assert by_logprobs.fit(SamplingParams(max_tokens=None, logprobs=0), [40]).max_tokens is None
    refusal(by_tokens, default, 50)
    refusal(by_logprobs, SamplingParams(max_tokens=None, prompt_logprobs=5), 40)


def test_default_max_tokens_beyond_the_cache_is_left_to_the_engine() -> None:
    """The engine knows the exact limit in blocks; a lowered number that does not fit would be refused."""
    limits = RequestLimits(None, 40_000, None, max_model_len=9000, num_kv_tokens=10_000)
    wide = SamplingParams(max_tokens=None, n=8)
    assert limits.fit(wide, [100]) is wide


def test_prompts_larger_than_the_queue_are_refused() -> None:
    limits = ServeArgs(max_num_queued_tokens=50).request_limits(4, 100, 1000)
    api_error = refusal(limits, SamplingParams(max_tokens=1), 51)
    assert "the prompts have 51 tokens; the queue holds 50 (--max-num-queued-tokens)" in str(api_error)
    assert ServeArgs(max_num_queued_reqs=0, max_request_sequences=99).request_limits(4, 100, 1000).max_sequences == 4


def test_default_limits_follow_the_engine_size() -> None:
    limits = ServeArgs().request_limits(128, 8192, 100_000)
    assert (limits.max_sequences, limits.max_tokens, limits.max_logprobs) == (1024, 400_000, 131_072)
    assert ServeArgs(max_num_queued_reqs=8).request_limits(4, 100, 10).max_sequences == 6
    assert ServeArgs(max_num_queued_reqs=0).request_limits(4, 100, 10).max_sequences == 4
    assert ServeArgs().request_limits(4, 100, 10).max_tokens == 100
    assert ServeArgs().request_limits(None, 100, None).max_sequences is None
    settings = ServeArgs(max_request_sequences=7, max_request_tokens=8, max_request_logprobs=9)
    limits = settings.request_limits(128, 8192, 100_000)
    assert (limits.max_sequences, limits.max_tokens, limits.max_logprobs) == (7, 8, 9)
    with pytest.raises(ParameterError, match="max_request_tokens"):
        ServeArgs(max_request_tokens=0)


# -- the queue ---------------------------------------------------------------------------------------------------------


def door(**limits: int | None) -> Admission:
    return Admission(**{"max_num_seqs": 4, "max_num_queued_reqs": 8, "max_num_queued_tokens": None} | limits)  # type: ignore[arg-type]


def enter(admission: Admission, width: int, tokens: int, tenant: int) -> Ticket | None:
    """The ticket of an admitted request, which then stays; None if it is refused."""
    with contextlib.suppress(ApiError):
        return STAYING.enter_context(admission.admit(width, tokens, tenant))
    return None


def test_one_tenant_may_fill_the_queue_until_another_needs_it() -> None:
    admission = door()
    tickets = [enter(admission, 1, 1, 0) for _ in range(13)]
    assert tickets[12] is None and None not in tickets[:12] and admission.is_full
    assert tickets[11] is not None and tickets[10] is not None
    admission.start(tickets[11])
    dropped: list[str] = []
    tickets[10].on_drop = lambda: dropped.append("newest waiting")
    assert enter(admission, 1, 1, 1) is not None
    assert dropped == ["newest waiting"] and tickets[10].dropped and not tickets[11].dropped
    with pytest.raises(ApiError, match="other tenants hold less"):
        admission.check(tickets[10])
    others = [enter(admission, 1, 1, 1) for _ in range(6)]
    assert [ticket is not None for ticket in others] == [True] * 5 + [False], "each has half"
    assert admission.num_sequences == 12


def test_queued_tokens_are_shared_likewise() -> None:
    admission = door(max_num_queued_tokens=100)
    first, second = enter(admission, 1, 50, 0), enter(admission, 1, 50, 0)
    assert first and second and enter(admission, 1, 1, 0) is None
    assert enter(admission, 1, 30, 1) is not None
    assert second.dropped and not first.dropped and admission.num_queued_tokens == 80
    admission.start(first)
    assert admission.num_queued_tokens == 30


def test_tenant_counts_are_released() -> None:
    admission = door()
    for _ in range(3):
        with admission.admit(6, 5, 1) as ticket:
            assert (admission.num_sequences, admission.num_queued_tokens) == (6, 5)
            admission.start(ticket)
        assert (admission.num_sequences, admission.num_queued_tokens) == (0, 0)


# -- over HTTP ---------------------------------------------------------------------------------------------------------


BEYOND: dict[str, tuple[str, dict[str, Any], str]] = {
    "prompts": (C, {"prompt": ["a"] * 9, "max_tokens": 1}, "prompt"),
    "best_of": (C, {"prompt": "a", "best_of": 9, "max_tokens": 1}, "best_of"),
    "beams": (C, {"prompt": "a", "n": 9, "use_beam_search": True, "max_tokens": 1}, "n"),
    "prompts x n": (C, {"prompt": ["a"] * 3, "n": 3, "max_tokens": 1}, "n"),
    "tokens": (C, {"prompt": ["a"] * 8, "max_tokens": 90}, "max_tokens"),
    "logprobs": (C, {"prompt": ["a"] * 4, "logprobs": 19, "max_tokens": 20}, "logprobs"),
    "prompt_logprobs": (C, {"prompt": ["a" * 60] * 2, "prompt_logprobs": 19, "max_tokens": 1}, "prompt_logprobs"),
    "streamed": (C, {"prompt": ["a"] * 9, "max_tokens": 1, "stream": True}, "prompt"),
    "chat": (CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 4, "max_tokens": 110}, "max_tokens"),
    "chat's own name": (
        *(CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 4, "max_completion_tokens": 110}),
        "max_completion_tokens",
    ),
    "top_logprobs": (
        *(
            CHAT,
            {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 19, "max_tokens": 60},
        ),
        "top_logprobs",
    ),
}


@pytest.mark.parametrize("name", BEYOND)
async def test_request_beyond_a_limit_is_refused_by_an_idle_server(model: str, name: str) -> None:
    path, body, param = BEYOND[name]
    limits = {"max_request_sequences": 8, "max_request_tokens": 400, "max_request_logprobs": 1000}
    async with serving(model, **limits) as server:
        response = await server.client.post(path, json=body)
        error = response.json()["error"]
        assert response.status_code == 400, error
        assert (error["code"], error["param"]) == ("request_too_large", param)
        assert "the limit is" in error["message"]
        assert re.search(r"\(--max-request-(sequences|tokens|logprobs)\)", error["message"])
        await server.at_rest()
        await server.complete()


@pytest.mark.parametrize(("path", "param"), [(C, "prompt"), (CHAT, "messages"), (RESPONSES, "input")])
async def test_a_prompt_beyond_the_queue_is_named_as_it_was_sent(model: str, path: str, param: str) -> None:
    text: Any = [{"role": "user", "content": "a" * 40}] if path == CHAT else "a" * 40
    async with serving(model, max_num_queued_tokens=30) as server:
        error = (await server.post(path, **{param: text})).json()["error"]
        assert (error["code"], error["param"]) == ("request_too_large", param)


async def test_default_chat_length_is_lowered_to_the_limit(model: str) -> None:
    async with serving(model, max_request_tokens=60) as server:
        ask = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True}
        usage = (await server.client.post(CHAT, json=ask)).json()["usage"]
        assert usage["total_tokens"] == 60
        reply = await server.client.post(RESPONSES, json={"input": "a"})
        assert reply.json()["usage"]["total_tokens"] <= 60


async def test_many_prompts_leave_rows_for_other_requests(model: str) -> None:
    """Of eight rows, the prompts of one request use at most seven."""
    async with serving(model, engine_options={"max_num_seqs": 8}, max_request_tokens=1 << 20) as server:
        most = 0
        many = {"prompt": ["abc"] * 30, "max_tokens": 40, "ignore_eos": True}
        many_prompts = asyncio.ensure_future(server.client.post(C, json=many))
        while not many_prompts.done():
            most = max(most, (await server.engine.stats()).num_running)
            await asyncio.sleep(0)
        assert len((await many_prompts).json()["choices"]) == 30
        assert 1 < most <= 7
        assert [c["index"] for c in many_prompts.result().json()["choices"]] == list(range(30))


# -- the whole server, in processes of its own -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_keys(model: str) -> Iterator[str]:
    options = ("--api-key", "one", "--api-key", "two", "--max-num-seqs", "2", "--max-num-queued-reqs", "14")
    options += ("--served-model-name", "tiny", "--max-num-batched-tokens", "64")
    with Process.serving(model, *options) as (_, url):
        yield url


def test_default_limits_refuse_excessive_requests(two_keys: str) -> None:
    for body in ({"prompt": ["a"] * 256, "n": 4}, {"prompt": ["a"] * 20}, {"prompt": "a", "n": 3, "best_of": 20}):
        status, answer = call(f"{two_keys}/v1/completions", body)
        error = json.loads(answer)["error"]
        assert status == 400 and error["code"] in ("request_too_large", "integer_out_of_range"), error


@pytest.mark.parametrize("pause_s", [0.0, 0.2])
def test_many_requests_of_one_key_do_not_block_another_key(two_keys: str, pause_s: float) -> None:
    """Key one fills its share of the queue; key two is admitted and does not wait for all of key one."""
    url = f"{two_keys}/v1/completions"
    body = {"prompt": ["abcdefgh" * 8] * 4, "max_tokens": 60, "n": 2, "ignore_eos": True}
    ended: list[tuple[float, int]] = []

    def crowd() -> None:
        status = call(url, body, key="one")[0]
        ended.append((time.monotonic(), status))

    threads = [threading.Thread(target=crowd) for _ in range(5)]
    for thread in threads:
        thread.start()
    while not any(status == 429 for _, status in ended) and len(ended) < 5:
        time.sleep(0.01)
    time.sleep(pause_s)  # by then, the first prompt of each request runs
    status, _ = call(url, {"prompt": "b", "max_tokens": 1}, key="two")
    at = time.monotonic()
    for thread in threads:
        thread.join()
    assert status == 200
    statuses = [status for _, status in ended]
    assert statuses.count(429) >= 2 and statuses.count(200) >= 1, "the crowd of one key filled its part"
    assert at <= max(end for end, status in ended if status == 200)
