"""`AsyncLLM`: the engine for programs that run on an event loop."""

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
from octavo.engine.engine import Engine, pin_id
from octavo.engine.outputs import RequestOutput, request_failed_error
from octavo.engine.process.thread import EngineThread
from octavo.engine.stats import Health, StatsSnapshot
from octavo.engine.timeline import describe_kv, describe_request
from octavo.errors import OctavoError
from octavo.frontend.input_processor import InputProcessor, Messages, Prompt
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import RequestOutputKind, SamplingParams
from octavo.text.tokenizer import Tokenizer
from octavo.view.live import publisher

T = TypeVar("T")


class AsyncLLM:
    """A model behind an engine on a thread of its own; any number of requests at once, each an async iterator.

        engine = AsyncLLM.from_options("smollm2-135m-instruct")
        async with engine:
            async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    `engine` belongs to this object from here on.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None = None) -> None:
        self._prompts = InputProcessor(tokenizer, engine.vocab_size, engine.max_model_len)
        self._default_params = engine.default_params
        self._max_model_len = engine.max_model_len
        self._begin = time.monotonic()
        self._thread = EngineThread(engine)
        self._names = itertools.count()
        self._looks = publisher.view_rpc_methods()
        # Whoever forgets to shut it down gets the memory back with the object.
        self._finalizer = weakref.finalize(self, self._thread.close)

    @classmethod
    def from_options(cls, model: str, **options: Any) -> AsyncLLM:
        """Load a model; the options are those of `octavo.config.EngineArgs`, and the errors those of `LLM`.

        This takes seconds and blocks: call it before the event loop runs, or in `asyncio.to_thread`.
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
        """Complete one prompt; yields its output so far whenever it has grown, as `output_kind` says.

        `sampling_params` None: `get_default_sampling_params()`. `priority`: lower first, where the engine goes by it.
        `salt`: requests of different salts share no blocks. `tenant`: whose it is; tenants share steps evenly. `rank`:
        how many of the same call stand before it; they let others pass.

        A reader who is slower than the model gets fewer and larger outputs, and the last of a request has `finished`
        set. Closing the iterator, cancelling its task or forgetting it aborts the request before the next step.

        Raises a `UsageError` if the request is not acceptable, `RequestFailedError` if it failed on its own, and
        `EngineError` if the engine died or was shut down; the errors of one request reach no other.
        """
        params = self._prompts.prepare_params(self._default_params if sampling_params is None else sampling_params)
        text, token_ids = await self._prompts.encode_async(prompt)
        grammar = await self._prompts.compile_grammar_async(params)
        name = f"octavo-{next(self._names)}" if request_id is None else request_id
        kind = params.output_kind if isinstance(params, SamplingParams) else RequestOutputKind.FINAL_ONLY
        mail = self._thread.open(name, joins=kind is RequestOutputKind.DELTA)
        try:
            await asyncio.wrap_future(
                self._thread.call(
                    lambda engine: engine.add_request(
                        name,
                        token_ids,
                        params,
                        prompt=text,
                        priority=priority,
                        salt=salt,
                        tenant=tenant,
                        rank=rank,
                        grammar=grammar,
                        make_detokenizer=self._prompts.make_detokenizer,
                        stream=kind is not RequestOutputKind.FINAL_ONLY,
                    )
                )
            )
            while True:
                output = await mail.read()
                if any(c.finish_reason == "error" for c in output.outputs):
                    raise request_failed_error(output)
                yield output
                if output.finished:
                    return
        finally:
            self._thread.leave(mail)

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
        """Answer one conversation, as `generate` completes a prompt.

        `template` is what `LLM.chat` takes of the kind: add_generation_prompt, continue_final_message, tools,
        chat_template, chat_template_kwargs.
        """
        # On a worker thread, since a template may take its time.
        prompt = await asyncio.to_thread(self._prompts.chat, messages, **template)
        run = self.generate(prompt, sampling_params, request_id, priority=priority, salt=salt)
        async with contextlib.aclosing(run):
            async for output in run:
                yield output

    async def abort(self, request_id: str) -> bool:
        """End a request, whatever it is doing; its iterator ends with what there is. Whether it was running."""
        return await asyncio.wrap_future(self._thread.abort(request_id))

    # -- prompts that stay ---------------------------------------------------------------------------------------------

    async def pin_prefix(self, prefix: Prompt | Messages, name: str | None = None, *, salt: bytes = b"") -> str:
        """As `LLM.pin_prefix`, for requests of that salt."""
        token_ids = await asyncio.to_thread(self._prompts.encode_prefix, prefix)
        name = str(next(self._names)) if name is None else name
        mail = self._thread.open(pin_id(name))
        queued: list[str] = []
        try:
            await self._ask(lambda engine: queued.append(engine.pin(name, token_ids, salt=salt)))
            output = await mail.read()
            if output.outputs[0].finish_reason == "error":
                raise request_failed_error(output)
        except asyncio.CancelledError:
            self._thread.leave(mail)
            # It may be computed already. Of a name that was taken, the pin that is there is another's.
            with contextlib.suppress(OctavoError):
                self._thread.call(lambda engine: [engine.scheduler.unpin(request_id) for request_id in queued])
            raise
        finally:
            self._thread.leave(mail)
        return name

    async def unpin_prefix(self, name: str) -> int:
        """Give back what was pinned under that name; how many blocks that are. Who runs with them goes on."""
        return await self._ask(lambda engine: engine.unpin(name))

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

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together, at most."""
        return self._max_model_len

    def health(self) -> Health:
        """How the engine is; nobody starts one again that has died in this process."""
        return Health("running" if self.is_running else "failed", time.monotonic() - self._begin)

    async def stats(self) -> StatsSnapshot:
        """What the engine has done so far, and how full it is."""
        return await self._ask(StatsSnapshot.of)

    async def kv_stats(self) -> KVStats:
        """The KV cache between two steps."""
        return await self._ask(lambda engine: engine.scheduler.stats())

    async def reset_prefix_cache(self) -> int:
        """Forget all cached blocks; returns how many there were."""
        return await self._ask(lambda engine: engine.scheduler.cache.reset_prefix_cache())

    async def debug_request(self, request_id: str) -> dict[str, Any] | None:
        """What a request does, waits for and holds, and what happened to it so far. None: never heard of."""
        return await self._ask(lambda engine: describe_request(engine, request_id))

    async def debug_kv(self) -> dict[str, Any]:
        """The KV cache, and who holds how much of it."""
        return await self._ask(describe_kv)

    async def view_rpc(self, question: str, argument: str) -> Any:
        """One of `view.publisher.view_rpc_methods`, for who shows the pool."""
        return await self._ask(lambda engine: self._looks[question](engine, argument))

    async def _ask(self, question: Callable[[Engine], T]) -> T:
        """Between two steps."""
        return await asyncio.wrap_future(self._thread.call(question))

    def shutdown(self) -> None:
        """Abort what runs and give the memory back; waits for the step that runs. Iterators get an `EngineError`.

        A second call does nothing.
        """
        self._finalizer()
        self._prompts.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)
