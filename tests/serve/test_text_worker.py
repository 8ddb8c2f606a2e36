"""Text workers: the same results as the tokenizer, bounded, and off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.checkpoint.resolve import open_checkpoint
from octavo.errors import TemplateError
from octavo.frontend.input_processor import InputProcessor
from octavo.serve import text_worker
from octavo.serve.openai.errors import ApiError
from octavo.serve.text_worker import TextWorkerPool
from octavo.text.tokenizer import Tokenizer
from tests.engine.process.engines import nothing_left, own_directory  # noqa: F401
from tests.serve.http.test_server import Process, call
from tests.serve.in_process_server import TEMPLATE, serving

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HELLO = [{"role": "user", "content": "Hello</s>"}]


@pytest.fixture(scope="module")
def tokenizer(model: str) -> Tokenizer:
    return Tokenizer.from_checkpoint(open_checkpoint(model), chat_template=TEMPLATE)


async def test_worker_results_equal_the_tokenizers(tokenizer: Tokenizer) -> None:
    with nothing_left():
        workers = TextWorkerPool(tokenizer)
        await workers.start()
        text = "Hello</s>" * 9
        ids = tokenizer.encode(text, parse_special=False)
        assert await workers.encode([text, "x"], True) == [ids, tokenizer.encode("x")]
        assert await workers.decode([2, *ids], False) == "</s>" + text
        assert await workers.token_strings(ids[:3]) == ["H", "e", "l"]
        assert await workers.word_ids([" a", "bc"]) == InputProcessor(tokenizer).encode_bad_words([" a", "bc"])
        prompt = InputProcessor(tokenizer).chat(HELLO)
        assert await workers.chat(HELLO, {}) == (prompt["prompt"], prompt["prompt_token_ids"])
        with pytest.raises(TemplateError, match="no king") as caught:
            await workers.chat(HELLO, {"chat_template": "{{ raise_exception('no king') }}"})
        assert (caught.value.code, caught.value.param) == ("template_error", "messages")
        with pytest.raises(ApiError) as api_error:
            await workers.chat([{"role": "user", "content": "", "n": 1 << 99}], {})
        assert api_error.value.code == "integer_out_of_range"
        await workers.aclose()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_job_of_a_dead_or_stopped_worker_is_done_by_another(tokenizer: Tokenizer, number: int) -> None:
    with nothing_left():
        workers = TextWorkerPool(tokenizer)
        await workers.start()
        (worker,) = workers.workers.idle
        job = asyncio.ensure_future(workers.encode(["a" * 1_000_000], False))
        await asyncio.sleep(0.02)
        os.kill(worker.process.pid, number)
        assert await job == [tokenizer.encode("a" * 1_000_000, False)]
        assert worker.process.poll() is not None and worker not in workers.workers.idle
        await workers.aclose()


async def test_a_job_whose_workers_all_die_gets_503(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_left():
        workers = TextWorkerPool(tokenizer)
        monkeypatch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(ApiError, match="exit code 1") as caught:
            await workers.encode(["a"], False)
        assert (caught.value.status, caught.value.code) == (503, "text_unavailable")
        assert caught.value.headers()["retry-after"]
        await workers.aclose()


GROWING = "{{% set n = namespace(x={}) %}}{{% for a in range(60) %}}{{% set n.x = {} %}}{{% endfor %}}{{{{ n.x }}}}"
BOMBS = [
    "{{ 'x' * 10 ** 9 }}",
    "{{ [1] * 10 ** 9 }}",
    "{{ 'x'.ljust(10 ** 9) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ ('%s' * 9999) % (['x' * 99999] * 9999) }}",
    "{{ ('x' * 99999) | replace('', 'y' * 99999) }}",
    "{{ range(99999) | join('y' * 99999) }}",
    "{{ ([1] * 999999) | tojson(indent=9999) }}",
    "{{ 'x'.encode().ljust(999999999) }}",
    "{{ (5).to_bytes(999999999, 'big') }}",
    "{{ lipsum(999999999) }}",
    GROWING.format("'xx'", "n.x ~ n.x"),
    GROWING.format("['x']", "[n.x, n.x]"),
    GROWING.format("['x']", "dict(a=n.x, b=n.x)"),
]


async def test_a_template_of_any_size_fails_its_request_only(tokenizer: Tokenizer) -> None:
    with nothing_left():
        workers = TextWorkerPool(tokenizer, num_workers=2)
        async with contextlib.aclosing(workers):
            await workers.start()
            (worker,) = workers.workers.idle
            for template in BOMBS:
                with pytest.raises(TemplateError, match=r"memory|longer than|fails") as caught:
                    await workers.chat(HELLO, {"chat_template": template})
                assert caught.value.code in ("template_error", "template_timeout")
                prompt = InputProcessor(tokenizer).chat(HELLO)
                assert await workers.chat(HELLO, {}) == (prompt["prompt"], prompt["prompt_token_ids"])
                assert workers.workers.idle == [worker], template
            assert peak_bytes(worker.process.pid) < 1 << 30


def peak_bytes(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


async def test_slow_templates_leave_a_worker_free(tokenizer: Tokenizer) -> None:
    with nothing_left():
        workers = TextWorkerPool(tokenizer, num_workers=2)
        slow = [asyncio.ensure_future(workers.chat(HELLO, {"chat_template": ENDLESS})) for _ in range(3)]
        await asyncio.sleep(0)
        slow[0].cancel()  # its worker finishes and is reused
        await workers.chat(HELLO, {})
        assert not any(task.done() for task in slow[1:])
        for task in slow[1:]:
            with pytest.raises(TemplateError) as caught:
                await task
            assert caught.value.code == "template_timeout"
        assert len(workers.workers.idle) == 2
        await workers.aclose()


async def test_long_texts_leave_a_worker_free(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_worker, "CHARS_PER_S", 10)
    workers = TextWorkerPool(tokenizer, num_workers=2)
    done: list[str] = []

    async def encode(text: str) -> None:
        await workers.encode([text], False)
        done.append(text[:1])

    await asyncio.gather(*(encode(text) for text in ["x" * 300_000] * 8 + ["a"]))
    assert sorted(done) == ["a", *"xxxxxxxx"] and done.index("a") < 7
    await workers.aclose()


async def test_waiting_jobs_are_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_worker, "MAX_JOB_BYTES", 2500)
    monkeypatch.setattr(text_worker, "MIN_JOB_BYTES", 100)
    with nothing_left():
        workers = TextWorkerPool(tokenizer, num_workers=2)
        waiting = [asyncio.ensure_future(workers.encode([text], False)) for text in ["a" * 1000] * 2]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await workers.encode(["a" * 1000], False)
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        assert caught.value.headers()["retry-after"]
        assert await asyncio.gather(*waiting) == [[tokenizer.encode("a" * 1000, False)]] * 2
        assert len((await workers.encode(["a" * 5000], False))[0]) == 5000  # a single job is always accepted
        await workers.aclose()


async def test_another_tenant_does_not_wait_for_long_jobs(tokenizer: Tokenizer) -> None:
    with nothing_left():
        workers = TextWorkerPool(tokenizer, num_workers=2)
        slow = [asyncio.ensure_future(workers.chat(HELLO, {"chat_template": ENDLESS}, 1)) for _ in range(40)]
        await asyncio.sleep(0.1)
        begin = asyncio.get_running_loop().time()
        template = {"chat_template": "{{ messages[0].content }}"}  # slow too, as far as anybody knows
        assert (await workers.chat(HELLO, template, 2))[0] == "Hello</s>"
        assert asyncio.get_running_loop().time() - begin < 20 and sum(task.done() for task in slow) < 20
        for task in slow:
            task.cancel()  # they leave the queue
        await workers.chat(HELLO, {}, 1)
        await workers.aclose()


async def test_failing_template_is_400_and_server_template_timeout_is_500(model: str) -> None:
    refuses = "{% if messages[0].content == 'x' %}{{ raise_exception('no') }}{% endif %}"
    options = {"chat_template": f"{refuses}{{% if messages[0].content == 'y' %}}{ENDLESS}{{% endif %}}"}
    async with serving(model, engine_options=options, trust_request_chat_template=True) as server:
        for content, template, want in (
            ("x", None, (400, "template_error", "messages")),
            ("y", None, (500, "template_timeout", None)),
            ("y", ENDLESS, (400, "template_error", "chat_template")),
            ("y", "{% if %}", (400, "template_error", "chat_template")),
        ):
            body = {"messages": [{"role": "user", "content": content}]}
            if template is not None:
                body["chat_template"] = template  # type: ignore[assignment]
            for path in ("/v1/chat/completions", "/tokenize")[: 1 + (content == "x")]:
                answer = await server.client.post(path, json=body)
                error = answer.json()["error"]
                assert (answer.status_code, error["code"], error["param"]) == want, answer.text


# -- the whole server --------------------------------------------------------------------------------------------------


def cpu_s(pid: int) -> float:
    """CPU time of a process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[tuple[str, int]]:
    """The address and the process of `octavo serve`, as users start it."""
    options = ["--chat-template", TEMPLATE, "--trust-request-chat-template", "--max-num-seqs", "128"]
    options += ["--num-gpu-blocks-override", "4000", "--max-body-bytes", "1000000"]
    with Process.serving(model, *options) as (process, url):
        yield url, process.process.pid


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_templates_take_little_time_of_the_server_process(server: tuple[str, int]) -> None:
    """Four templates of one second each; they once blocked the event loop for four seconds."""
    url, pid = server
    before, body = cpu_s(pid), {"messages": HELLO, "chat_template": ENDLESS}
    with ThreadPoolExecutor(4) as threads:
        answers = threads.map(lambda _: call(f"{url}/v1/chat/completions", body)[0], range(4))
        assert set(answers) == {400}
    assert cpu_s(pid) - before < 1


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_stop_strings_of_many_samples_cost_little(server: tuple[str, int]) -> None:
    """This once took 16 s, with a matcher for each string and sample."""
    url, pid = server
    stop = ["".join(chr(33 + (i * i + j * (i + 7)) % 90) for j in range(3900)) for i in range(64)]
    before = cpu_s(pid)
    body = {"prompt": "a", "n": 128, "stop": stop, "max_tokens": 20, "ignore_eos": True}
    assert call(f"{url}/v1/completions", body)[0] == 200
    assert cpu_s(pid) - before < 3
