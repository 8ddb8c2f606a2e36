"""Renders chat templates, tokenises and detokenises in helper processes (`text.helper_process`).

The caller determines the size of this work. Templates are pure Python, and the search for special tokens in a long text
is one C call. Both hold the GIL on any thread, and the server could read no connection meanwhile.

There are a few workers, started on demand. Tenants use them in turns.
"""

from __future__ import annotations

import asyncio
import os
import sys
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from octavo.errors import UsageError
from octavo.frontend.input_processor import InputProcessor
from octavo.serve.job_queue import JobQueue
from octavo.serve.openai.errors import ApiError, bad_request
from octavo.text import chat_template
from octavo.text.helper_process import HelperLostError, HelperPool, JobTooLargeError, serve
from octavo.text.tokenizer import Tokenizer
from octavo.utils.signals import ignore_signals

NUM_WORKERS = max(2, min(4, (os.cpu_count() or 1) // 2))
BASE_S = 10.0
CHARS_PER_S = 100_000
"""CPU time of a job: at most `BASE_S`, and a second for this many characters or tokens."""
MAX_JOB_BYTES = 64 << 20
MIN_JOB_BYTES = 64 << 10
"""Limit of all waiting and running jobs, and what a small job counts. Further jobs get 429."""
MAX_TEMPLATE_BYTES = 512 << 20
"""Memory that a chat template may use."""
_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class TextWorkerPool:
    """The workers of one tokenizer. Use it on one event loop, and close it."""

    def __init__(self, tokenizer: Tokenizer, num_workers: int = NUM_WORKERS) -> None:
        self._tokenizer = tokenizer
        self.workers = HelperPool("octavo.serve.text_worker")
        self._threads = ThreadPoolExecutor(num_workers + 1, thread_name_prefix="octavo-text")
        full_text = "too many requests wait to be tokenised; try again later"
        self._jobs: JobQueue[bytes] = JobQueue(num_workers, MAX_JOB_BYTES, full_text)

    async def start(self) -> None:
        """Starts a worker, so that the first request need not wait for it."""
        await self._in_thread(self.workers.start_one, self._tokenizer_state)

    async def encode(self, texts: Sequence[str], add_special_tokens: bool, tenant: int = 0) -> list[list[int]]:
        """Token ids of each text. The spelling of a special token is encoded as text."""
        size = sum(map(len, texts))
        packed: list[bytes] = await self._run("encode", list(texts), add_special_tokens, size=size, tenant=tenant)
        return list(map(_unpack, packed))

    async def chat(
        self, messages: Sequence[dict[str, Any]], template: dict[str, Any], tenant: int = 0
    ) -> tuple[str, list[int]]:
        """Renders a conversation: its text and token ids. Raises `TemplateError`, or `ApiError` 500 after a timeout."""
        size = sum(len(m["content"]) for m in messages)
        slow = "chat_template" in template
        try:
            text, packed = await self._run("chat", messages, template, size=size, tenant=tenant, slow=slow)
        except OverflowError:
            text = "messages, tools or chat_template_kwargs have an integer of more than 64 bits; use a smaller one"
            raise bad_request("integer_out_of_range", text, "messages") from None
        return text, _unpack(packed)

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool, tenant: int = 0) -> str:
        text: str = await self._run("decode", _pack(ids), skip_special_tokens, size=len(ids), tenant=tenant)
        return text

    async def token_strings(self, ids: Sequence[int], tenant: int = 0) -> list[str]:
        """The vocabulary's spelling of each token; "" for an id without any."""
        texts: list[str] = await self._run("token_strings", _pack(ids), size=len(ids), tenant=tenant)
        return texts

    async def word_ids(self, words: Sequence[str], tenant: int = 0) -> list[list[int]]:
        """See `InputProcessor.encode_bad_words`."""
        size = 2 * sum(map(len, words))
        ids: list[list[int]] = await self._run("word_ids", list(words), size=size, tenant=tenant)
        return ids

    async def aclose(self) -> None:
        self.workers.close()
        await self._jobs.aclose()
        self._threads.shutdown(wait=False)

    async def _run(self, *job: Any, size: int, tenant: int, slow: bool = False) -> Any:
        """Runs a job and returns its result. `slow` and large jobs leave the last worker to others.

        A cancelled caller does not stop the worker: restarting it would cost more than finishing the job.
        """
        body, limit_s = _encode(job), BASE_S + size / CHARS_PER_S

        async def run() -> bytes:
            try:
                reply: bytes = await self._in_thread(self.workers.call, self._tokenizer_state, body, limit_s)
                return reply
            except JobTooLargeError as error:
                raise ApiError(500, "text_timeout", f"{error} to process the text; send less") from None
            except HelperLostError as error:
                text = f"cannot tokenise: {error}; try again later"
                raise ApiError(503, "text_unavailable", text, retry_after_s=5) from None

        slow = slow or size > CHARS_PER_S
        reply = _decode(await self._jobs.run(run, tenant, len(body) + MIN_JOB_BYTES, slow=slow))
        if len(reply) == 1:
            return reply[0]
        raise _error(*reply)

    async def _in_thread(self, call: Callable[..., bytes | None], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    def _tokenizer_state(self) -> bytes:
        """The set-up of a worker. Runs on the pool's threads."""
        return _encode(self._tokenizer.to_wire())


def _error(kind: str, message: str, param: str | None, code: str) -> Exception:
    from octavo.engine.process.supervisor import rebuild_error

    if kind == "bug":
        return RuntimeError(message)
    return rebuild_error(kind, message, param, code)


def _pack(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def _unpack(packed: bytes) -> list[int]:
    ids = array("i")
    ids.frombytes(packed)
    return ids.tolist()


# -- in the worker process ---------------------------------------------------------------------------------------------


def run_job(tokenizer: Tokenizer, job: str, args: list[Any]) -> Any:
    if job == "chat":
        messages, template = args
        prompt = InputProcessor(tokenizer).chat(messages, **template)
        return prompt["prompt"], _pack(prompt["prompt_token_ids"])
    if job == "encode":
        texts, add_special_tokens = args
        return list(map(_pack, tokenizer.encode_batch(texts, add_special_tokens, parse_special=False)))
    if job == "decode":
        packed, skip_special_tokens = args
        return tokenizer.decode(_unpack(packed), skip_special_tokens)
    if job == "token_strings":
        return [tokenizer.backend.id_to_token(token) or "" for token in _unpack(*args)]
    if job == "word_ids":
        return InputProcessor(tokenizer).encode_bad_words(*args)
    raise ValueError(job)


def make(tokenizer_state: bytes) -> Callable[[bytes], bytes]:
    """The function that does the jobs of one tokenizer."""
    tokenizer = Tokenizer.from_wire(_decode(tokenizer_state))
    if sys.platform == "linux":  # others do not limit address space
        chat_template.MAX_RENDER_BYTES = MAX_TEMPLATE_BYTES

    def do(request: bytes) -> bytes:
        job, *args = _decode(request)
        try:
            return _encode([run_job(tokenizer, job, args)])
        except UsageError as error:
            return _encode([type(error).__name__, str(error), error.param, error.code])
        except Exception as error:
            return _encode(["bug", f"{type(error).__name__}: {error}"[:1000], None, ""])

    return do


if __name__ == "__main__":
    ignore_signals()
    serve(make)
