"""`EngineClient`: an engine for callers on an event loop, wherever the engine runs.

AsyncLLM     --> EngineClient --> ThreadTransport    frontend.thread_transport: an engine on a thread
octavo serve --> EngineClient --> ProcessTransport   frontend.process_transport: an engine in a process of its own
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, cast

from octavo.core.cache.kv_stats import KVStats
from octavo.engine.engine_request import EngineRequest, pin_id, unknown_pin_error
from octavo.engine.outputs import RequestOutput, request_failed_error
from octavo.engine.query import DescribeKV, DescribeRequest, GetKVStats, Query, ResetPrefixCache
from octavo.engine.stats import Health, StatsSnapshot
from octavo.frontend.input_processor import InputProcessor, Messages, Prompt
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import SamplingParams
from octavo.router.router import Router
from octavo.text.tokenizer import Tokenizer

R = TypeVar("R")


class OutputStream(Protocol):
    """The outputs of one request, for one reader."""

    async def get(self) -> RequestOutput:
        """Wait for the next output: for a slow reader, all that is new. Raises the request's or the engine's error."""


class Transport(Protocol):
    """Carries requests, outputs and queries between a client and its engine.

    is_running      False after a shutdown or the engine's final failure
    max_model_len   maximum tokens of prompt and output together; 0 before the engine is ready for the first time
    engines         the engines behind it, each of which answers queries for itself
    router          chooses among several engines; None: there is one
    """

    @property
    def engines(self) -> Sequence[Transport]: ...

    @property
    def router(self) -> Router | None: ...

    @property
    def is_running(self) -> bool: ...

    @property
    def max_model_len(self) -> int: ...

    async def start(self) -> None:
        """Start the engine and wait until it accepts requests. Raises the root cause if it does not start."""

    async def submit(self, request: EngineRequest) -> OutputStream:
        """Queue a request. Raises `UsageError` for an invalid one, `EngineError` if the engine is gone for good."""

    def close_stream(self, stream: Any) -> None:
        """The reader of a stream leaves: abort its request, if it is unfinished, before the next step."""

    async def abort(self, request_id: str) -> bool:
        """Abort a request; its stream gets a last output. True if the request was running."""

    def discard_pin(self, request_id: str) -> None:
        """Remove a pin whose caller has left, once the engine has processed the earlier commands."""

    async def unpin(self, request_id: str) -> int | None:
        """Remove a pin and return its number of blocks; None if there is none."""

    async def query(self, query: Query[R], /) -> R:
        """Answer a query between two steps. Raises `EngineQueryError` if that fails."""

    async def stats(self) -> StatsSnapshot: ...

    def health(self) -> Health: ...

    def close(self) -> None: ...


T = TypeVar("T", bound=Transport)


class EngineClient(Generic[T]):
    """An engine for callers on an event loop. Any number of requests run at once, each as an async iterator.

    cuts_max_tokens   a max_tokens beyond the model's length ends there; otherwise it is refused
    """

    cuts_max_tokens = False

    def __init__(self, transport: T, input_processor: InputProcessor, default_params: SamplingParams) -> None:
        self.transport = transport
        self.input_processor = input_processor
        self._default_params = default_params
        self._names = itertools.count()

    async def start(self) -> None:
        """Start the engine and wait until it accepts requests. Raises the root cause if it does not start."""
        await self.transport.start()

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
        engine is gone for good. Errors of one request affect no other. Requests wait while an engine process starts or
        restarts.
        """
        params = self.input_processor.prepare_params(
            self._default_params if sampling_params is None else sampling_params
        )
        text, token_ids = await self.input_processor.encode_async(prompt)
        request = EngineRequest(
            f"octavo-{next(self._names)}" if request_id is None else request_id,
            token_ids,
            params,
            prompt=text,
            priority=priority,
            salt=salt,
            tenant=tenant,
            index_in_call=rank,
            stream=True,
            make_detokenizer=self.input_processor.make_detokenizer,
            cut_max_tokens=self.cuts_max_tokens,
        )
        stream = await self.transport.submit(request)
        try:
            while True:
                output = await stream.get()
                if any(c.finish_reason == "error" for c in output.outputs):
                    raise request_failed_error(output)
                yield output
                if output.finished:
                    return
        finally:
            self.transport.close_stream(stream)

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
        prompt = await asyncio.to_thread(self.input_processor.chat, messages, **template)
        run = self.generate(prompt, sampling_params, request_id, priority=priority, salt=salt)
        async with contextlib.aclosing(run):
            async for output in run:
                yield output

    async def abort(self, request_id: str) -> bool:
        """Abort a request; its iterator yields a last output. True if the request was running."""
        return await self.transport.abort(request_id)

    # -- pinned prefixes -----------------------------------------------------------------------------------------------

    async def pin_prefix(self, prefix: Prompt | Messages, name: str | None = None, *, salt: bytes = b"") -> str:
        """As `LLM.pin_prefix`, for requests with that salt. A restarted engine process pins the prefix again."""
        token_ids = await asyncio.to_thread(self.input_processor.encode_prefix, prefix)
        name = str(next(self._names)) if name is None else name
        stream = await self.transport.submit(EngineRequest.pinning(name, token_ids, salt))
        try:
            output = await stream.get()
            if any(c.finish_reason == "error" for c in output.outputs):
                raise request_failed_error(output)
        except BaseException:
            self.transport.close_stream(stream)
            self.transport.discard_pin(pin_id(name))
            raise
        self.transport.close_stream(stream)
        return name

    async def unpin_prefix(self, name: str) -> int:
        """As `LLM.unpin_prefix`."""
        if (num_blocks := await self.transport.unpin(pin_id(name))) is None:
            raise unknown_pin_error(name)
        return num_blocks

    # -- state, and shutdown -------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        return self.input_processor.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling parameters of requests without any: from the model's generation_config.json, as in `LLM`."""
        return self._default_params.clone()

    @property
    def is_running(self) -> bool:
        """True while requests are accepted, also during a restart; False after shutdown or final failure."""
        return self.transport.is_running

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of prompt and output together; 0 before the engine is ready for the first time."""
        return self.transport.max_model_len

    def health(self) -> Health:
        return self.transport.health()

    async def stats(self) -> StatsSnapshot:
        """Counters and gauges; of an engine process a fraction of a second old, and at once even while it is down."""
        return await self.transport.stats()

    async def query(self, query: Query[R], /) -> R:
        """Ask the engine; it answers between two steps. Raises `EngineQueryError` if its process cannot answer."""
        return await self.transport.query(query)

    async def kv_stats(self) -> KVStats:
        """The KV cache between two steps."""
        return await self.query(GetKVStats())

    async def reset_prefix_cache(self) -> int:
        """Empty the prefix cache; returns the number of cached blocks."""
        return await self.query(ResetPrefixCache())

    async def debug_request(self, request_id: str) -> dict[str, Any] | None:
        """A request's state, wait reason, blocks and events (`engine.timeline`); None if unknown."""
        return cast("dict[str, Any] | None", await self.query(DescribeRequest(request_id)))

    async def debug_kv(self) -> dict[str, Any]:
        """The KV cache, and the blocks that each request holds."""
        return (await self.query(DescribeKV())).as_dict()

    def shutdown(self) -> None:
        """Abort all requests and free all resources. Iterators get an `EngineError`. A second call does nothing."""
        self.transport.close()
        self.input_processor.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()
