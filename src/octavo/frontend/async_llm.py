"""`AsyncLLM`: the engine on a thread, for programs on an event loop."""

from __future__ import annotations

import asyncio
import weakref
from types import TracebackType
from typing import Any

from octavo.config import EngineArgs
from octavo.engine.engine import Engine
from octavo.frontend.engine_client import EngineClient
from octavo.frontend.input_processor import InputProcessor
from octavo.frontend.thread_transport import ThreadTransport
from octavo.text.tokenizer import Tokenizer


class AsyncLLM(EngineClient[ThreadTransport]):
    """A model and its engine on a thread. Any number of requests run at once, each as an async iterator.

        engine = AsyncLLM.from_options("smollm2-135m-instruct")
        async with engine:
            async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    The object owns `engine`. It serves several event loops; an iterator belongs to the loop on which it started.
    """

    cuts_max_tokens = True

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None = None) -> None:
        text = InputProcessor(tokenizer, engine.limits.vocab_size, engine.limits.max_model_len)
        super().__init__(ThreadTransport(engine, text), text, engine.default_params)
        # Frees the memory of an object that was never shut down.
        self._finalizer = weakref.finalize(self, self.transport.close)

    @classmethod
    def from_options(cls, model: str, **options: Any) -> AsyncLLM:
        """Load a model. The options are the fields of `octavo.config.EngineArgs`; the errors are those of `LLM`.

        This blocks for seconds: call it before the event loop runs, or in `asyncio.to_thread`.
        """
        return cls.from_engine_args(EngineArgs(model=str(model), **options))

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> AsyncLLM:
        """As `from_options`."""
        from octavo.frontend.build import build

        built = build(args)
        return cls(built.engine, built.tokenizer)

    def shutdown(self) -> None:
        """Abort all requests and free the memory, after the current step. Iterators get an `EngineError`.

        A second call does nothing.
        """
        self._finalizer()
        self.input_processor.close()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)
