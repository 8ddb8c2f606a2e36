"""What the HTTP side asks of an engine, wherever that engine runs: `EngineInterface`.

`octavo.frontend.async_llm.AsyncLLM` is one, with the engine on a thread of this process;
`octavo.frontend.engine_client.EngineClient` is another: it runs the engine in a watched process, restarts it
and sends its requests again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.core.kv_cache_manager import KVStats
from octavo.engine.outputs import RequestOutput
from octavo.engine.stats import Health, StatsSnapshot
from octavo.frontend.input_processor import Messages, Prompt
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import SamplingParams
from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ClientStats(StatsSnapshot):
    """num_deferred   of those that wait, how many do so because no engine can take them now, be there room or not"""

    num_deferred: int = 0


class EngineInterface(Protocol):
    def generate(
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
        """Complete one prompt; yields its output whenever it has grown, as the parameters' `output_kind` says.

        `salt`: requests of different salts share no blocks. `tenant`, `rank`: whose it is, and how many of the same
        call stand before it; see `core.request.Request`. Closing the iterator aborts the request.

        Before the first output it raises `UsageError` for a request that is not acceptable. At any time it raises
        `RequestFailedError` if this request failed, and `EngineError` if the engine is gone for good; an engine that
        is being restarted shows as a pause.
        """

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        salt: bytes = b"",
        **template: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation, as `generate` completes a prompt; `template` is what `LLM.chat` takes of it."""

    async def abort(self, request_id: str) -> bool:
        """End a request; its iterator ends with what there is. Whether it was running."""

    async def pin_prefix(self, prefix: Prompt | Messages, name: str | None = None, *, salt: bytes = b"") -> str:
        """Compute the beginning of prompts to come, of requests of that salt, and keep it, as `LLM.pin_prefix` does.
        Returns its name."""

    async def unpin_prefix(self, name: str) -> int:
        """Give it back; how many blocks that are. Raises `ParameterError` for a name that nothing is pinned under."""

    # -- looking: these answer at once, with what is known here --------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether requests are taken: neither shut down nor given up. True while it is started again."""

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together, at most; 0 before the engine is ready for the first time."""

    def health(self) -> Health: ...

    def get_tokenizer(self) -> Tokenizer: ...

    def get_default_sampling_params(self) -> SamplingParams: ...

    # -- looking: these ask the engine, between two steps --------------------------------------------------------------

    async def stats(self) -> StatsSnapshot:
        """Counters and gauges for /metrics and /load; at most a moment old."""

    async def kv_stats(self) -> KVStats: ...

    async def reset_prefix_cache(self) -> int:
        """Forget all cached blocks; returns how many there were."""

    async def debug_request(self, request_id: str) -> dict[str, Any] | None:
        """What a request does, waits for and holds, and what happened to it so far (`engine.inspect`), as plain data.
        None: never heard of, or forgotten."""

    async def debug_kv(self) -> dict[str, Any]:
        """The pool: `kv_stats`, and who holds how much, as plain data."""

    async def view_rpc(self, question: str, argument: str) -> Any:
        """One of `view.publisher.view_rpc_methods`."""

    def shutdown(self) -> None:
        """Abort what runs and give everything back. Iterators get an `EngineError`. A second call does nothing."""
