"""`AsyncLLM`: the engine on a thread, for programs on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import weakref
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Any, TypeVar

from octavo.core.kv_cache_manager import KVStats
from octavo.engine.engine import Engine
from octavo.engine.engine_request import EngineRequest, pin_id
from octavo.engine.outputs import RequestOutput, request_failed_error
from octavo.engine.process.thread import EngineThread
from octavo.engine.stats import Health, StatsSnapshot
from octavo.errors import OctavoError
from octavo.frontend.input_processor import InputProcessor, Messages, Prompt
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import RequestOutputKind, SamplingParams
from octavo.text.tokenizer import Tokenizer
from octavo.view.live import publisher

T = TypeVar("T")


class AsyncLLM:
    """A model and its engine on a thread. Any number of requests run at once, each as an async iterator.

        engine = AsyncLLM.from_options("smollm2-135m-instruct")
        async with engine:
            async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    The object owns `engine`.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None = None) -> None:
        self._input_processor = InputProcessor(tokenizer, engine.limits.vocab_size, engine.limits.max_model_len)
        self._default_params = engine.default_params
        self._max_model_len = engine.limits.max_model_len
        self._started_at = time.monotonic()
        self._thread = EngineThread(engine)
        self._names = itertools.count()
        self._view_methods = publisher.view_rpc_methods()
        # Frees the memory of an object that was never shut down.
        self._finalizer = weakref.finalize(self, self._thread.close)

    @classmethod
    def from_options(cls, model: str, **options: Any) -> AsyncLLM:
        """Load a model. The options are the fields of `octavo.config.EngineArgs`; the errors are those of `LLM`.

        This blocks for seconds: call it before the event loop runs, or in `asyncio.to_thread`.
        """
        from octavo.config import EngineArgs
        from octavo.frontend.build import build

        built = build(EngineArgs(model=str(model), **options))
        return cls(built.engine, built.tokenizer)

    # -- generating ----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        salt: bytes = b"",
        tenant: int = 0,
        rank: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt; yields its output so far whenever it has grown, as `output_kind` selects.

        sampling_params   None: `get_default_sampling_params()`
        priority          lower first, with the priority scheduling policy
        salt              requests of different salts share no blocks
        tenant            tenants share the engine's steps evenly
        rank              number of earlier requests of the same call; a higher rank lets other requests pass

        A reader slower than the model gets fewer, larger outputs. The last output has `finished` set. Closing the
        iterator, cancelling its task or dropping it aborts the request before the next step.

        Raises `UsageError` for an invalid request, `RequestFailedError` if this request fails, and `EngineError` if the
        engine died or was shut down. Errors of one request affect no other.
        """
        params = self._input_processor.prepare_params(
            self._default_params if sampling_params is None else sampling_params
        )
        text, token_ids = await self._input_processor.encode_async(prompt)
        grammar = await self._input_processor.compile_grammar_async(params)
        name = f"octavo-{next(self._names)}" if request_id is None else request_id
        kind = params.output_kind if isinstance(params, SamplingParams) else RequestOutputKind.FINAL_ONLY
        queue = self._thread.open_queue(name, merge=kind is RequestOutputKind.DELTA)
        try:
            await asyncio.wrap_future(
                self._thread.call(
                    lambda engine: engine.add_request(
                        EngineRequest(
                            name,
                            token_ids,
                            params,
                            prompt=text,
                            priority=priority,
                            salt=salt,
                            tenant=tenant,
                            index_in_call=rank,
                            grammar=grammar,
                            make_detokenizer=self._input_processor.make_detokenizer,
                            stream=kind is not RequestOutputKind.FINAL_ONLY,
                        )
                    )
                )
            )
            while True:
                output = await queue.get()
                if any(c.finish_reason == "error" for c in output.outputs):
                    raise request_failed_error(output)
                yield output
                if output.finished:
                    return
        finally:
            self._thread.close_queue(queue)

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        salt: bytes = b"",
        **template: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one conversation, as `generate` does a prompt.

        `template`: the template arguments of `LLM.chat`: add_generation_prompt, continue_final_message, tools,
        chat_template and chat_template_kwargs.
        """
        # On a worker thread: a template may be slow.
        prompt = await asyncio.to_thread(self._input_processor.chat, messages, **template)
        run = self.generate(prompt, sampling_params, request_id, priority=priority, salt=salt)
        async with contextlib.aclosing(run):
            async for output in run:
                yield output

    async def abort(self, request_id: str) -> bool:
        """Abort a request; its iterator yields a last output. True if the request was running."""
        return await asyncio.wrap_future(self._thread.abort(request_id))

    # -- pinned prefixes -----------------------------------------------------------------------------------------------

    async def pin_prefix(self, prefix: Prompt | Messages, name: str | None = None, *, salt: bytes = b"") -> str:
        """As `LLM.pin_prefix`, for requests with that salt."""
        token_ids = await asyncio.to_thread(self._input_processor.encode_prefix, prefix)
        name = str(next(self._names)) if name is None else name
        queue = self._thread.open_queue(pin_id(name))
        request, queued = EngineRequest.pinning(name, token_ids, salt), []

        def pin(engine: Engine) -> None:
            engine.add_request(request)
            queued.append(request.request_id)

        try:
            await self._call(pin)
            output = await queue.get()
            if output.outputs[0].finish_reason == "error":
                raise request_failed_error(output)
        except asyncio.CancelledError:
            self._thread.close_queue(queue)
            # The prefix may be pinned by now. If the name was taken, `queued` is empty, and the other pin stays.
            with contextlib.suppress(OctavoError):
                self._thread.call(lambda engine: [engine.scheduler.unpin(request_id) for request_id in queued])
            raise
        finally:
            self._thread.close_queue(queue)
        return name

    async def unpin_prefix(self, name: str) -> int:
        """As `LLM.unpin_prefix`."""
        return await self._call(lambda engine: engine.unpin(name))

    # -- state, and shutdown -------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        return self._input_processor.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling parameters of requests without any: from the model's generation_config.json, as in `LLM`."""
        return self._default_params

    @property
    def is_running(self) -> bool:
        """True while requests are accepted: neither shut down nor dead."""
        return self._thread.alive

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of prompt and output together."""
        return self._max_model_len

    def health(self) -> Health:
        """The engine's health; an engine that dies in this process is not restarted."""
        return Health("running" if self.is_running else "failed", time.monotonic() - self._started_at)

    async def stats(self) -> StatsSnapshot:
        """Counters and gauges of the engine."""
        return await self._call(Engine.stats_snapshot)

    async def kv_stats(self) -> KVStats:
        """The KV cache between two steps."""
        return await self._call(lambda engine: engine.scheduler.stats())

    async def reset_prefix_cache(self) -> int:
        """Empty the prefix cache; returns the number of cached blocks."""
        return await self._call(lambda engine: engine.scheduler.cache.reset_prefix_cache())

    async def debug_request(self, request_id: str) -> dict[str, Any] | None:
        """A request's state, wait reason, blocks and events; None if unknown."""
        return await self._call(lambda engine: engine.describe_request(request_id))

    async def debug_kv(self) -> dict[str, Any]:
        """The KV cache, and the blocks that each request holds."""
        return await self._call(Engine.describe_kv)

    async def view_rpc(self, method: str, argument: str) -> Any:
        """Call a method of the live view (`octavo.view.live.publisher`)."""
        return await self._call(lambda engine: self._view_methods[method](engine, argument))

    async def _call(self, work: Callable[[Engine], T]) -> T:
        """Call `work` with the engine between two steps."""
        return await asyncio.wrap_future(self._thread.call(work))

    def shutdown(self) -> None:
        """Abort all requests and free the memory, after the current step. Iterators get an `EngineError`.

        A second call does nothing.
        """
        self._finalizer()
        self._input_processor.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)
