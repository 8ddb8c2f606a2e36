"""`octavo bench serve`: streams read piece by piece, loads against canned servers and against our own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import serve
from octavo.bench.args import BenchArgs
from octavo.bench.records import Record, Run
from octavo.bench.samples import Sample
from octavo.bench.serve import Bench, StreamReader
from octavo.errors import OctavoError, ParameterError
from tests.bench.servers import Canned, chunked, completion, event, scripted, whole
from tests.engine.models import make_talking_checkpoint
from tests.serve.http.test_server import listening
from tests.serve.in_process_server import NAME, run

ASKED = Sample("x", 5, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_talking_checkpoint(tmp_path_factory.mktemp("talking")))


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in serve.KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)


# -- one stream --------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is; a test sets it."""
    now = [0.0]
    monkeypatch.setattr(serve.time, "perf_counter", lambda: now[0])
    return now


def read(clock: list[float], *pieces: bytes) -> Record:
    """A second passes before each piece."""
    clock[0] = 0.0
    record = Record(ASKED, 0.0)
    reader = StreamReader(record)
    for piece in pieces:
        clock[0] += 1.0
        reader(piece)
    reader.finish()
    return record


def choice(**fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "finish_reason": None, **fields}], "usage": None})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4}})
DONE = event(b"[DONE]")


def test_each_chunk_has_the_time_at_which_it_was_whole(clock: list[float]) -> None:
    first, second = choice(text="a"), choice(text="b")
    record = read(clock, first[:9], first[9:], second, second + second, USAGE, DONE)
    assert record.error is None
    assert (record.ttft_s, record.gaps, record.e2el_s) == (2.0, [1.0, 1.0, 0.0], 4.0)
    assert (record.num_prompt, record.num_output) == (7, 4) and "".join(record.texts) == "abbb"
    assert record.tpot_s == pytest.approx(2 / 3)


def test_the_role_and_comments_are_no_tokens(clock: list[float]) -> None:
    role, word = choice(delta={"role": "assistant", "content": ""}), choice(delta={"content": "a"})
    thought, call = choice(delta={"reasoning": "hm"}), choice(delta={"tool_calls": [{"index": 0}]})
    end = choice(delta={}, finish_reason="stop")
    record = read(clock, b": alive\n\n", role, word, thought, call, end, USAGE + DONE)
    assert record.error is None and (record.ttft_s, record.gaps, record.e2el_s) == (3.0, [1.0, 1.0], 6.0)
    assert read(clock, role, end, USAGE + DONE).ttft_s == 2.0  # no word at all


def test_without_usage_a_chunk_is_a_token(clock: list[float]) -> None:
    record = read(clock, choice(text="a"), choice(text="b"), DONE)
    assert (record.num_prompt, record.num_output) == (5, 2)


def test_usage_without_choices(clock: list[float]) -> None:
    usage = event({"choices": None, "usage": {"prompt_tokens": 7, "completion_tokens": 4}})
    record = read(clock, choice(text="a"), usage, DONE)
    assert record.error is None and (record.num_prompt, record.num_output) == (7, 4)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ((choice(text="a"), USAGE), "the stream ended without [DONE]"),
        ((USAGE, DONE), "the stream held no token"),
        ((choice(text="a"), event({"error": {"code": "cut", "message": "off"}}), DONE), "cut: off"),
        ((event(b"{not json}"), DONE), "an event of the stream is not a valid chunk"),
        ((event({"choices": 3}), DONE), "an event of the stream is not a valid chunk"),
        ((event(b'{"error": "\xff"}'), DONE), "an event of the stream is not a valid chunk"),
        (
            (event(b'{"error": ' + b"[" * 99_999 + b"]" * 99_999 + b"}"), DONE),
            "an event of the stream is not a valid chunk",
        ),
    ],
)
def test_streams_that_failed(clock: list[float], pieces: tuple[bytes, ...], error: str) -> None:
    assert read(clock, *pieces).error == error


def test_a_stream_whose_last_line_has_no_end(clock: list[float]) -> None:
    assert read(clock, choice(text="a"), USAGE, DONE.rstrip()).error is None


def test_content_in_parts_is_kept(clock: list[float]) -> None:
    """Some models' answers are lists of parts; a report joins texts."""
    record = read(
        clock, choice(delta={"content": [{"type": "text", "text": "a"}]}), choice(delta={"content": "b"}), DONE
    )
    assert record.error is None and "".join(record.texts) == '[{"type":"text","text":"a"}]b'


# -- loads against canned servers --------------------------------------------------------------------------------------


async def load(url: str, **options: Any) -> Run:
    given = {"num_prompts": 6, "random_input_len": 5, "random_output_len": 3}
    return await Bench(BenchArgs(base_url=url, **(given | options))).run()


def test_no_more_at_once_than_allowed() -> None:
    now = most = 0
    full = asyncio.Event()

    async def answer(body: dict[str, Any]) -> bytes:
        nonlocal now, most
        now += 1
        most = max(most, now)
        if now == 2:
            full.set()
        await full.wait()  # the first waits for a second
        await asyncio.sleep(0.01)
        now -= 1
        return completion("a", "b", "c")

    async def main() -> Run:
        async with scripted(Canned(answer)) as url:
            return await load(url, max_concurrency=2)

    done = run(main())
    assert most == 2 and len(done.records) == 6 and all(r.error is None for r in done.records)


def test_what_a_request_holds() -> None:
    canned = Canned()

    async def main() -> None:
        async with scripted(canned) as url:
            await load(url, num_prompts=1)
            await load(url, num_prompts=1, ignore_eos=True, top_p=0.5, top_k=3, extra_body={"seed": 4}, model="m")

    run(main())
    plain, full = canned.bodies
    assert len(plain.pop("prompt").split()) == 5
    options = {"stream": True, "stream_options": {"include_usage": True}}
    assert plain == {"model": "canned", "max_tokens": 3, "temperature": 0.0, **options}
    assert full.items() >= {"model": "m", "ignore_eos": True, "top_p": 0.5, "top_k": 3, "seed": 4}.items()


def test_failures_have_their_reasons() -> None:
    bad = whole({"error": {"code": "queue_full", "message": "too many"}}, "429 Too Many Requests")
    text = whole(b"<html>gateway", "502 Bad Gateway")
    answers = iter([bad, text, chunked(event(b"[DONE]")), b"nonsense\r\n\r\n", completion("a"), bad])

    async def answer(body: dict[str, Any]) -> bytes:
        return next(answers)

    async def main() -> Run:
        async with scripted(Canned(answer)) as url:
            return await load(url, max_concurrency=1)

    refused = "429 queue_full: too many"
    errors = [record.error for record in run(main()).records]
    assert errors[:3] == [refused, "502 <html>gateway", "the stream held no token"] and errors[4:] == [None, refused]
    assert "not HTTP" in str(errors[3])


def test_servers_that_cannot_be_measured() -> None:
    class Odd(Canned):
        async def reply(self, path: str, body: Any) -> bytes:
            return replies.get(path) or await super().reply(path, body)

    replies: dict[str, bytes] = {}

    async def why(**options: Any) -> str:
        async with scripted(Odd()) as url:
            with pytest.raises(OctavoError) as caught:
                await load(url, **options)
            return str(caught.value)

    replies = {"GET /v1/models": whole({"data": []})}
    assert "lists no model; set --model" in run(why())
    replies = {"GET /v1/models": whole({"error": {"message": "no key"}}, "401 Unauthorized")}
    assert "does not answer a first request: /v1/models answers 401 no key" in run(why())
    replies = {"POST /v1/completions": whole({"error": {"code": "model_not_found"}}, "404 Not Found")}
    assert "does not answer a first request: 404 model_not_found" in run(why(model="other"))
    replies = {"POST /tokenize": whole(b"", "404 Not Found")}
    assert "does not count tokens (/tokenize answers 404); name a tokenizer" in run(why())
    for body in ({"tokens": [1, 2]}, {"count": None}, [3], b'{"count": "\xff"}', b"<html>"):
        replies = {"POST /tokenize": whole(body)}
        assert re.search(r"does not count tokens \(/tokenize answers 200.*\); name a tokenizer", run(why()))


def test_a_server_gets_time_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "RETRY_S", 0.01)
    starting = [b""] * 3

    class Slow(Canned):
        async def reply(self, path: str, body: Any) -> bytes:
            if starting:
                starting.pop()
                return whole({"error": {"message": "starting"}}, "503 Service Unavailable")
            return await super().reply(path, body)

    async def main() -> Run:
        async with scripted(Slow()) as url:
            return await load(url, ready_check_timeout_sec=60)

    assert len(run(main()).records) == 6 and not starting


def test_departures() -> None:
    samples = [ASKED] * 2000
    assert set(serve.departures(BenchArgs(), samples)) == {0.0}
    even, bursty = (serve.departures(BenchArgs(request_rate=10.0, burstiness=b), samples) for b in (1.0, 0.1))
    for times in (even, bursty):
        assert times == sorted(times) and times[-1] == pytest.approx(200, rel=0.3)

    def spread(times: list[float]) -> float:
        gaps = [b - a for a, b in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        return (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5 / mean

    assert spread(even) == pytest.approx(1.0, rel=0.1) and spread(bursty) == pytest.approx(10**0.5, rel=0.2)
    timed = [Sample("x", 1, 1, 2.5), Sample("x", 1, 1, 7.0)]
    assert serve.departures(BenchArgs(request_rate=10.0), timed) == [2.5, 7.0]


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


def test_ctrl_c_reports_the_finished_requests(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The server, in a thread of its own, answers two requests and then sends the signal."""
    address: list[str] = []
    listens, ends = threading.Event(), threading.Event()

    async def answer(body: dict[str, Any]) -> bytes:
        if len(canned.bodies) > 2:
            os.kill(os.getpid(), signal.SIGINT)
            while not ends.is_set():
                await asyncio.sleep(0.01)
        return completion("a", "b", "c")

    async def serving() -> None:
        async with scripted(canned) as url:
            address.append(url)
            listens.set()
            while not ends.is_set():
                await asyncio.sleep(0.01)

    canned = Canned(answer)
    thread = threading.Thread(target=lambda: asyncio.run(serving()))
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread.start()
    try:
        assert listens.wait(30)
        given: dict[str, Any] = {"num_prompts": 5, "random_input_len": 4, "random_output_len": 3, "max_concurrency": 1}
        given |= {"save_result": True, "result_dir": str(tmp_path), "result_filename": "r.json"}
        with pytest.raises(KeyboardInterrupt):
            serve.main(BenchArgs(base_url=address[0], **given))
    finally:
        ends.set()
        thread.join()
        signal.signal(signal.SIGINT, previous)
    out = capsys.readouterr().out
    assert f"{'Successful requests:':<40} {2:<10}" in out and f"{'Unfinished requests:':<40} {3:<10}" in out
    assert json.loads((tmp_path / "r.json").read_text())["completed"] == 2


def test_when_nothing_succeeds_it_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run_nothing(self: Bench, progress: Any) -> Run:
        return Run("m", 1, [Record(ASKED, 0.0, error="x")], 0.0, 1.0)

    monkeypatch.setattr(Bench, "run", run_nothing)
    with pytest.raises(OctavoError, match="none of 1 requests succeeded"):
        serve.main(BenchArgs())
    assert "1 failed: x" in capsys.readouterr().out


# -- our own server ----------------------------------------------------------------------------------------------------


def test_every_dataset_and_backend_against_octavo(model: str, tmp_path: Path) -> None:
    """Lengths are exact: the server's count of a prompt is what was asked for, a chat's template apart."""
    rows = [{"timestamp": 10 * i, "input_length": 600, "output_length": 50, "hash_ids": [1, i + 2]} for i in range(3)]
    trace = tmp_path / "t.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    talk = tmp_path / "s.json"
    talk.write_text(json.dumps([{"conversations": [{"value": "Hello!"}, {"value": "Who?!"}]}]))
    cases: list[dict[str, Any]] = [
        {"random_input_len": 20, "random_output_len": 5, "random_prefix_len": 4},
        {"dataset_name": "prefix_repetition", "prefix_repetition_prefix_len": 16, "prefix_repetition_suffix_len": 8}
        | {"prefix_repetition_output_len": 5, "request_rate": 200.0},
        {"dataset_name": "timed_trace", "dataset_path": str(trace), "timed_trace_scale": 0.1},
        {"dataset_name": "sharegpt", "dataset_path": str(talk)},
    ]

    async def main() -> None:
        async with listening(model) as (server, _, port):
            for case in cases:
                asked: dict[str, Any] = {"base_url": f"http://127.0.0.1:{port}", "num_prompts": 3, "ignore_eos": True}
                done = await Bench(BenchArgs(**asked, **case)).run()
                assert [r.error for r in done.records] == [None] * 3 and done.model == NAME
                for r in done.records:
                    assert (r.num_prompt, r.num_output) == (r.sample.num_prompt, r.sample.num_output)
                    assert r.start_s < r.first_s <= r.last_s and len(r.gaps) < r.num_output
                # Counting here, not there, makes the same prompts.
                chat = await Bench(BenchArgs(**asked, **case, backend="openai-chat", tokenizer=model)).run()
                assert sorted(r.sample.prompt for r in chat.records) == sorted(r.sample.prompt for r in done.records)
                for r in chat.records:
                    assert r.error is None and r.num_output == r.sample.num_output
                    assert r.num_prompt == r.sample.num_prompt + len("user:;a:")
            await server.at_rest()

    run(main())


def test_octavo_refuses_what_does_not_fit_and_knows_keys(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with listening(model, keys=("secret",)) as (_, _, port):
            asked: dict[str, Any] = {"base_url": f"http://127.0.0.1:{port}", "num_prompts": 2, "random_output_len": 4}
            with pytest.raises(OctavoError, match="401 invalid_api_key"):
                await Bench(BenchArgs(**asked)).run()
            monkeypatch.setenv("OPENAI_API_KEY", "secret")
            done = await Bench(BenchArgs(**asked, random_input_len=400)).run()
            assert len(done.records) == 2 and all("context_length" in str(r.error) for r in done.records)
            monkeypatch.delenv("OPENAI_API_KEY")
            given = {"random_input_len": 5, "tokenizer": model, "header": ["Authorization=Bearer secret"]}
            done = await Bench(BenchArgs(**asked, **given, num_warmups=2)).run()
            assert [(r.error, r.num_prompt) for r in done.records] == [(None, 5)] * 2

    run(main())


def test_a_tokenizer_that_is_not_here(model: str) -> None:
    async def main() -> None:
        async with scripted(Canned()) as url:
            with pytest.raises(OctavoError, match="no model 'missing"):
                await load(url, tokenizer="missing")
            with pytest.raises(ParameterError, match="no file"):
                await load(url, dataset_name="sharegpt", dataset_path="/nowhere.json")

    run(main())
