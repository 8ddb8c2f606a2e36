"""`octavo bench serve`: a load test for a server with OpenAI's API, Octavo's or another.

Each request starts at its time, as soon as `max_concurrency` allows. Responses are streamed, and each chunk is timed on
arrival. `report` summarizes the records.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from octavo.bench import report
from octavo.bench.args import PATHS, BenchArgs
from octavo.bench.http_client import HTTPClient, LostConnectionError, Response
from octavo.bench.records import Record, Run
from octavo.bench.samples import Count, Sample, local_counter, make_samples
from octavo.errors import OctavoError, ParameterError, check_output

T = TypeVar("T")
KEY_VARIABLES = ("OCTAVO_API_KEY", "OPENAI_API_KEY", "VLLM_API_KEY")
REQUEST_S = 6 * 3600.0
RETRY_S = 1.0
READY_CHECK = Sample("Hello", 1, 1)
TEXTS = ("content", "reasoning", "reasoning_content", "tool_calls")
"""Fields of a chat delta that contain tokens. A delta with only the role precedes the first token."""
JSON_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""msgspec's errors for bytes that are not JSON, nest too deeply, or have another type than expected."""

Progress = Callable[[int, int], None]
"""Called with the number of finished requests and the total."""


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Counted(msgspec.Struct):
    count: int


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class StreamReader:
    """Reads the events of one response into its record. Called with each piece of data on arrival."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.is_complete = False
        self._rest = b""
        self._usage: _Usage | None = None

    def __call__(self, data: bytes) -> None:
        now = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)

    def _take(self, data: bytes, now: float) -> None:
        record = self.record
        if data == b"[DONE]":
            self.is_complete = True
            return
        try:
            chunk = msgspec.json.decode(data, type=_Chunk)
        except JSON_ERRORS:
            record.error = record.error or "an event of the stream is not a valid chunk"
            return
        if chunk.error is not None:
            record.error = record.error or _reason_of(chunk.error)
        self._usage = chunk.usage or self._usage
        if not chunk.choices:
            return
        if any(_has_token(choice, first=not record.first_s) for choice in chunk.choices):
            if not record.first_s:
                record.first_s = now
            else:
                record.gaps.append(now - record.last_s)
        record.last_s = now
        for choice in chunk.choices:
            text = choice.text or (choice.delta or {}).get("content") or ""
            record.texts.append(text if isinstance(text, str) else msgspec.json.encode(text).decode())  # content parts

    def finish(self) -> None:
        """Complete the record after the response. Without usage in the response, each chunk counts as a token."""
        self(b"\n")  # the last line may have no newline
        record, usage = self.record, self._usage
        record.num_prompt = usage.prompt_tokens if usage else record.sample.num_prompt
        record.num_output = usage.completion_tokens if usage else len(record.gaps) + 1
        if record.error is None and not self.is_complete:
            record.error = "the stream ended without [DONE]"
        if record.error is None and not record.first_s:
            record.error = "the stream held no token"


def _has_token(choice: _Choice, *, first: bool) -> bool:
    if choice.delta is None:
        return True
    return any(choice.delta.get(name) for name in TEXTS) or (first and choice.finish_reason is not None)


class Bench:
    """Load test of one server."""

    def __init__(self, args: BenchArgs) -> None:
        self.args = args
        self.model = args.model or ""
        headers = dict(part.split("=", 1) for part in args.header)
        key = next((found for name in KEY_VARIABLES if (found := os.environ.get(name))), None)
        if key and not any(name.lower() == "authorization" for name in headers):
            headers["Authorization"] = f"Bearer {key}"
        self._client = HTTPClient(args.url, headers)
        self._path = args.endpoint or PATHS[args.backend]

    async def run(self, progress: Progress = lambda done, of: None) -> Run:
        """Wait for the server, make the prompts, send the requests. Raises `OctavoError` before the first is sent."""
        args = self.args
        try:
            await self._until_ready()
            samples = await make_samples(args, self._counter())
            for _ in range(args.num_warmups):
                await self._ask(samples[0])
            return await self._load(samples, progress)
        except LostConnectionError as error:
            raise OctavoError(f"the server at {args.url} cannot be reached: {error}") from None
        finally:
            self._client.close()

    async def _until_ready(self) -> None:
        """Wait until one short request succeeds. Without `model`, select the server's first model."""
        deadline = time.monotonic() + self.args.ready_check_timeout_sec
        while (reason := await self._not_ready_reason()) is not None:
            if time.monotonic() >= deadline:
                text = f"the server at {self.args.url} does not answer a first request: {reason}; start it"
                raise OctavoError(text + ", or give it time with --ready-check-timeout-sec")
            await asyncio.sleep(RETRY_S)

    async def _not_ready_reason(self) -> str | None:
        try:
            if not self.model:
                response = await self._client.get("/v1/models")
                if response.status != 200:
                    return f"/v1/models answers {_failure_of(response)}"
                self.model = msgspec.json.decode(response.body)["data"][0]["id"]
            return (await self._ask(READY_CHECK)).error
        except LostConnectionError as error:
            return str(error)
        except (*JSON_ERRORS, LookupError, TypeError):
            return "/v1/models lists no model; set --model"

    def _counter(self) -> Count:
        if self.args.tokenizer is None:
            return self._count
        return local_counter(self.args.tokenizer)

    async def _count(self, text: str) -> int:
        response = await self._client.post("/tokenize", msgspec.json.encode({"model": self.model, "prompt": text}))
        if response.status == 200:
            with contextlib.suppress(*JSON_ERRORS):
                return msgspec.json.decode(response.body, type=_Counted).count
        raise ParameterError(
            f"the server does not count tokens (/tokenize answers {_failure_of(response)}); name a tokenizer",
            param="tokenizer",
        )

    async def _load(self, samples: Sequence[Sample], progress: Progress) -> Run:
        args, run = self.args, Run(self.model, len(samples))
        gate = asyncio.Semaphore(args.max_concurrency or len(samples))

        async def send(sample: Sample, due_s: float) -> None:
            await asyncio.sleep(max(0.0, run.begin_s + due_s - time.perf_counter()))
            async with gate:
                run.records.append(await self._ask(sample))
            progress(len(run.records), len(samples))

        run.begin_s = time.perf_counter()
        tasks = [asyncio.ensure_future(send(*pair)) for pair in zip(samples, departures(args, samples), strict=True)]
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:  # Ctrl-C: the records so far are reported
            run.interrupted = True
        finally:
            run.end_s = time.perf_counter()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return run

    async def _ask(self, sample: Sample) -> Record:
        body = msgspec.json.encode(self._body(sample))
        record = Record(sample, time.perf_counter())
        reader = StreamReader(record)
        try:
            async with asyncio.timeout(REQUEST_S):
                response = await self._client.post(self._path, body, reader)
        except TimeoutError:
            record.error = f"no end in {REQUEST_S:g} s"
        except LostConnectionError as error:
            record.error = record.error or str(error)
        else:
            if response.status == 200:
                reader.finish()
            else:
                record.error = _failure_of(response)
        return record

    def _body(self, sample: Sample) -> dict[str, Any]:
        args = self.args
        body: dict[str, Any] = {"model": self.model}
        if args.is_chat:
            body |= {"messages": [{"role": "user", "content": sample.prompt}]}
        else:
            body |= {"prompt": sample.prompt}
        body["max_completion_tokens" if args.is_chat else "max_tokens"] = sample.num_output
        sampling = ("temperature", "top_p", "top_k", "min_p")
        body |= {name: value for name in sampling if (value := getattr(args, name)) is not None}
        if args.ignore_eos:
            body["ignore_eos"] = True
        return body | {"stream": True, "stream_options": {"include_usage": True}} | dict(args.extra_body or {})


def departures(args: BenchArgs, samples: Sequence[Sample]) -> list[float]:
    """Start time of each request, in seconds after the start of the run."""
    if samples[0].time_s is not None:
        return [sample.time_s or 0.0 for sample in samples]
    if args.request_rate == float("inf"):
        return [0.0] * len(samples)
    from octavo.simulate.traces import bursty

    return list(islice(bursty(args.request_rate, args.burstiness, args.seed), len(samples)))


def _failure_of(response: Response) -> str:
    try:
        body = msgspec.json.decode(response.body)
        reason = _reason_of(body.get("error") or body.get("detail") or "") if isinstance(body, dict) else ""
    except JSON_ERRORS:
        reason = response.body[:100].decode("utf-8", "replace")
    return f"{response.status} {reason}".strip()


def _reason_of(error: Any) -> str:
    """An error object's code and message, cut to 200 characters, so that equal errors count together."""
    if not isinstance(error, dict):
        return str(error)[:200]
    words = [str(error[name]) for name in ("code", "message") if error.get(name)]
    return ": ".join(words)[:200]


def run_until_done(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on a new event loop and return its result. The first Ctrl-C cancels it."""
    from octavo.utils.event_loop import new_event_loop

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main())


def main(args: BenchArgs, progress: Progress = lambda done, of: None) -> dict[str, Any]:
    """Run the load, print the tables, write the JSON file if requested, and return the summary.

    Raises `KeyboardInterrupt` afterwards if Ctrl-C interrupted the run, `OctavoError` if no request succeeded.
    """
    if saves := args.save_result or args.save_detailed or args.append_result:
        folder = Path(args.result_dir or ".")
        path = folder / args.result_filename if args.result_filename else None
        os.makedirs(path.parent if path else folder, exist_ok=True)  # fails before the load, if at all
        check_output("result_filename", path)
    run = run_until_done(lambda: Bench(args).run(progress))
    summary = report.summary(run, args)
    print("\n".join(report.lines(summary, run, args)), flush=True)
    if saves:
        print(f"written to {report.save(summary, args)}")
    if run.interrupted:
        raise KeyboardInterrupt
    if not summary["completed"]:
        raise OctavoError(f"none of {len(run.records)} requests succeeded")
    return summary
