"""`octavo bench serve`: load for a server that speaks OpenAI's API, this one or another.

Requests leave when their time has come and a place is free; answers are streamed, and every piece is timed as it comes
in. What is told of them is `report`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import msgspec

from octavo.bench.args import PATHS, BenchArgs
from octavo.bench.http_client import Answer, HTTPClient, LostConnectionError
from octavo.bench.samples import Count, Sample, make_samples
from octavo.errors import OctavoError, ParameterError

T = TypeVar("T")
KEY_VARIABLES = ("OCTAVO_API_KEY", "OPENAI_API_KEY", "VLLM_API_KEY")
REQUEST_S = 6 * 3600.0
RETRY_S = 1.0
GREETING = Sample("Hello", 1, 1)
TEXTS = ("content", "reasoning", "reasoning_content", "tool_calls")
"""What a delta of a chat holds when a token has come; the role alone comes before any."""
NO_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are none, that nest too deeply, or are another than was expected."""

Progress = Callable[[int, int], None]
"""Called with how many requests have ended, and of how many."""


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


@dataclass(slots=True)
class Record:
    """A request that was sent. Times are of one clock, in seconds.

    start_s     it left           first_s     its first token came         last_s    its last one did
    gaps        seconds between chunks with tokens; a chunk may carry several
    error       why it failed; None: it did not
    """

    sample: Sample
    start_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_output: int = 0
    texts: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.start_s

    @property
    def e2el_s(self) -> float:
        return self.last_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """None where there is no token after the first."""
        return (self.last_s - self.first_s) / (self.num_output - 1) if self.num_output > 1 else None


class StreamReader:
    """Reads the events of one answer into its record; called with each piece as it comes."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.is_whole = False
        self._rest = b""
        self._usage: _Usage | None = None

    def __call__(self, piece: bytes) -> None:
        now = time.perf_counter()
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)

    def _take(self, data: bytes, now: float) -> None:
        record = self.record
        if data == b"[DONE]":
            self.is_whole = True
            return
        try:
            chunk = msgspec.json.decode(data, type=_Chunk)
        except NO_JSON:
            record.error = record.error or "an event of the stream is no chunk"
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
            record.texts.append(text if isinstance(text, str) else msgspec.json.encode(text).decode())  # in parts

    def finish(self) -> None:
        """The answer has ended. Where it says nothing of its usage, a chunk counts as a token."""
        self(b"\n")  # the last line may lack its end
        record, usage = self.record, self._usage
        record.num_prompt = usage.prompt_tokens if usage else record.sample.num_prompt
        record.num_output = usage.completion_tokens if usage else len(record.gaps) + 1
        if record.error is None and not self.is_whole:
            record.error = "the stream ended without [DONE]"
        if record.error is None and not record.first_s:
            record.error = "the stream held no token"


def _has_token(choice: _Choice, *, first: bool) -> bool:
    if choice.delta is None:
        return True
    return any(choice.delta.get(name) for name in TEXTS) or (first and choice.finish_reason is not None)


@dataclass(slots=True)
class Run:
    """What came of a load. `num_samples` were to be sent; `interrupted`: by Ctrl-C, so that some have no record."""

    model: str
    num_samples: int
    records: list[Record] = field(default_factory=list)
    begin_s: float = 0.0
    end_s: float = 0.0
    interrupted: bool = False


class Bench:
    """One server under load."""

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
        """Find out what is served, make the prompts, send them. Raises `OctavoError` before the first is sent."""
        args = self.args
        try:
            await self._until_ready()
            samples = await make_samples(args, self._counter())
            for _ in range(args.num_warmups):
                await self._ask(samples[0])
            return await self._load(samples, progress)
        except LostConnectionError as error:
            raise OctavoError(f"the server at {args.url} cannot be asked: {error}") from None
        finally:
            self._client.close()

    async def _until_ready(self) -> None:
        """One short request must succeed; meanwhile the first of the server's models is ours, if none was named."""
        deadline = time.monotonic() + self.args.ready_check_timeout_sec
        while (reason := await self._why_not_ready()) is not None:
            if time.monotonic() >= deadline:
                text = f"the server at {self.args.url} does not answer a first request: {reason}; start it"
                raise OctavoError(text + ", or give it time with ready_check_timeout_sec")
            await asyncio.sleep(RETRY_S)

    async def _why_not_ready(self) -> str | None:
        try:
            if not self.model:
                answer = await self._client.get("/v1/models")
                if answer.status != 200:
                    return f"/v1/models says {_failure_of(answer)}"
                self.model = msgspec.json.decode(answer.body)["data"][0]["id"]
            return (await self._ask(GREETING)).error
        except LostConnectionError as error:
            return str(error)
        except (*NO_JSON, LookupError, TypeError):
            return "/v1/models lists no model; name it"

    def _counter(self) -> Count:
        if self.args.tokenizer is None:
            return self._count
        from octavo.checkpoint.resolve import open_checkpoint
        from octavo.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_checkpoint(open_checkpoint(self.args.tokenizer, download=False, weights=False))

        async def count(text: str) -> int:
            return len(tokenizer.encode(text))

        return count

    async def _count(self, text: str) -> int:
        answer = await self._client.post("/tokenize", msgspec.json.encode({"model": self.model, "prompt": text}))
        if answer.status == 200:
            with contextlib.suppress(*NO_JSON):
                return msgspec.json.decode(answer.body, type=_Counted).count
        raise ParameterError(
            f"the server does not count tokens (/tokenize says {_failure_of(answer)}); name a tokenizer",
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
        except asyncio.CancelledError:  # Ctrl-C: what has come is told
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
                answer = await self._client.post(self._path, body, reader)
        except TimeoutError:
            record.error = f"no end in {REQUEST_S:g} s"
        except LostConnectionError as error:
            record.error = record.error or str(error)
        else:
            if answer.status == 200:
                reader.finish()
            else:
                record.error = _failure_of(answer)
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
    """Seconds from the begin at which each leaves."""
    if samples[0].time_s is not None:
        return [sample.time_s or 0.0 for sample in samples]
    if args.request_rate == float("inf"):
        return [0.0] * len(samples)
    from octavo.simulate.traces import bursty

    return list(islice(bursty(args.request_rate, args.burstiness, args.seed), len(samples)))


def _failure_of(answer: Answer) -> str:
    try:
        body = msgspec.json.decode(answer.body)
        reason = _reason_of(body.get("error") or body.get("detail") or "") if isinstance(body, dict) else ""
    except NO_JSON:
        reason = answer.body[:100].decode("utf-8", "replace")
    return f"{answer.status} {reason}".strip()


def _reason_of(error: Any) -> str:
    """An error object in a few words, the same ones for the same mistake wherever it can be helped."""
    if not isinstance(error, dict):
        return str(error)[:200]
    words = [str(error[name]) for name in ("code", "message") if error.get(name)]
    return ": ".join(words)[:200]


def run_until_done(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """On a loop of its own; the first Ctrl-C cancels it, and what it then returns counts."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def main(args: BenchArgs, progress: Progress = lambda done, of: None) -> dict[str, Any]:
    """Run it, print the tables, write the file that was asked for; what it tells. Raises `KeyboardInterrupt` after
    that if there was one, and `OctavoError` if no request succeeded."""
    from octavo.bench import report

    run = run_until_done(lambda: Bench(args).run(progress))
    told = report.summary(run, args)
    print("\n".join(report.lines(told, run, args)), flush=True)
    if args.save_result or args.save_detailed or args.append_result:
        print(f"written to {report.save(told, args)}")
    if run.interrupted:
        raise KeyboardInterrupt
    if not told["completed"]:
        raise OctavoError(f"none of {len(run.records)} requests succeeded")
    return told
