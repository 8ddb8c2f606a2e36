"""`AsyncEngine`: the engine for programs that run on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import weakref
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any

from octavo.core.kv_cache import KVStats
from octavo.core.sampling_params import RequestOutputKind, SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.outputs import RequestOutput
from octavo.engine.thread import EngineThread
from octavo.errors import RequestFailedError
from octavo.prompts import Messages, Prompt, Prompts
from octavo.text.tokenizer import Tokenizer

LONG_TEXT_CHARS = 4096
"""A text longer than this is tokenised on a worker thread: shorter ones take less time than the way there."""


class AsyncEngine:
    """A model behind an engine on a thread of its own; any number of requests at once, each an async iterator.

        engine = AsyncEngine.from_options("smollm2-135m-instruct")
        async with engine:
            async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    `engine` belongs to this object from here on.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None = None) -> None:
        self._prompts = Prompts(tokenizer)
        self._default_params = engine.default_params
        self._thread = EngineThread(engine)
        self._names = itertools.count()
        # Whoever forgets to shut it down gets the memory back with the object.
        self._finalizer = weakref.finalize(self, self._thread.close)

    @classmethod
    def from_options(cls, model: str, **options: Any) -> AsyncEngine:
        """Load a model; the options are those of `octavo.config.EngineArgs`, and the errors those of `LLM`.

        This takes seconds and blocks: call it before the event loop runs, or in `asyncio.to_thread`.
        """
        from octavo.build import build
        from octavo.config import EngineArgs

        built = build(EngineArgs(model=str(model), **options))
        return cls(built.engine, built.tokenizer)

    # -- generating ----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt; yields its output so far whenever it has grown, as `output_kind` says.

        `sampling_params` None: `get_default_sampling_params()`. `priority`: lower first, where the engine goes by it.

        A reader who is slower than the model gets fewer and larger outputs, and the last of a request has `finished`
        set. Closing the iterator, cancelling its task or forgetting it aborts the request before the next step.

        Raises a `UsageError` if the request is not acceptable, `RequestFailedError` if it failed on its own, and
        `EngineError` if the engine died or was shut down; the errors of one request reach no other.
        """
        params = self._prompts.ready(self._default_params if sampling_params is None else sampling_params)
        text, token_ids = await self._encoded(prompt)
        name = f"octavo-{next(self._names)}" if request_id is None else request_id
        mail = self._thread.open(name, joins=params.output_kind is RequestOutputKind.DELTA)
        try:
            await asyncio.wrap_future(
                self._thread.call(
                    lambda engine: engine.add(
                        name,
                        token_ids,
                        params,
                        prompt=text,
                        priority=priority,
                        make_detokenizer=self._prompts.make_detokenizer,
                        stream=params.output_kind is not RequestOutputKind.FINAL_ONLY,
                    )
                )
            )
            while True:
                output = await mail.read()
                if any(c.finish_reason == "error" for c in output.outputs):
                    raise _failure(output)
                yield output
                if output.finished:
                    return
        finally:
            self._thread.leave(mail)

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **template: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation, as `generate` completes a prompt.

        `template` is what `LLM.chat` takes of the kind: add_generation_prompt, continue_final_message, tools,
        chat_template, chat_template_kwargs.
        """
        # On a worker thread, since a template may take its time.
        prompt = await asyncio.to_thread(self._prompts.chat, messages, **template)
        async with contextlib.aclosing(self.generate(prompt, sampling_params, request_id, priority=priority)) as run:
            async for output in run:
                yield output

    async def _encoded(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if isinstance(text, str) and len(text) > LONG_TEXT_CHARS:
            return await asyncio.to_thread(self._prompts.encode, prompt)
        return self._prompts.encode(prompt)

    async def abort(self, request_id: str) -> bool:
        """End a request, whatever it is doing; its iterator ends with what there is. Whether it was running."""
        return await asyncio.wrap_future(self._thread.abort(request_id))

    # -- looking, and leaving ------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        return self._prompts.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without sampling_params gets: from the model's generation_config.json, as `LLM` has it."""
        return self._default_params

    @property
    def is_running(self) -> bool:
        """Whether requests are taken: neither shut down nor dead."""
        return self._thread.alive

    async def kv_stats(self) -> KVStats:
        """The KV cache between two steps."""
        return await asyncio.wrap_future(self._thread.call(lambda engine: engine.scheduler.stats()))

    async def reset_prefix_cache(self) -> int:
        """Forget all cached blocks; returns how many there were."""
        return await asyncio.wrap_future(self._thread.call(lambda engine: engine.scheduler.cache.reset_prefix_cache()))

    def shutdown(self) -> None:
        """Abort what runs and give the memory back; waits for the step that runs. Iterators get an `EngineError`.

        A second call does nothing.
        """
        self._finalizer()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)


def _failure(output: RequestOutput) -> RequestFailedError:
    reason = next(c.stop_reason for c in output.outputs if c.finish_reason == "error")
    code = "no_allowed_token" if str(reason).startswith("no_allowed_token") else None
    return RequestFailedError(f"request {output.request_id} failed: {reason}", code=code)
