"""`EngineInterface`: what the HTTP server needs from an engine, wherever the engine runs.

`octavo.frontend.async_llm.AsyncLLM` implements it with the engine on a thread of this process.
`octavo.frontend.engine_client.EngineClient` implements it with a supervised engine process, which it restarts, and to
which it sends unfinished requests again.
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
    """num_deferred   waiting requests that no engine has received yet, whether or not there is room for them"""

    num_deferred: int = 0


class EngineInterface(Protocol):
    """An engine for callers on an event loop."""

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
        """Complete one prompt; yields its output whenever it has grown, as the parameters' `output_kind` selects.

        `salt`: requests of different salts share no blocks. `tenant`, `rank`: the tenant of the request, and its
        position in its call; see `core.request.Request`. Closing the iterator aborts the request.

        Raises `UsageError` before the first output for an invalid request, `RequestFailedError` if this request fails,
        and `EngineError` if the engine is gone for good. A restart of the engine is only a pause.
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
        """Complete one conversation, as `generate` does a prompt; `template`: the template arguments of `LLM.chat`."""

    async def abort(self, request_id: str) -> bool:
        """Abort a request; its iterator yields a last output. True if the request was running."""

    async def pin_prefix(self, prefix: Prompt | Messages, name: str | None = None, *, salt: bytes = b"") -> str:
        """Compute and pin a prefix of later prompts with that salt, as `LLM.pin_prefix` does. Returns its name."""

    async def unpin_prefix(self, name: str) -> int:
        """Unpin a prefix and return its number of blocks. Raises `ParameterError` for an unknown name."""

    # -- state known on this side: these return at once ----------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """True while requests are accepted, also during a restart; False after shutdown or final failure."""

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of prompt and output together; 0 before the engine is ready for the first time."""

    def health(self) -> Health: ...

    def get_tokenizer(self) -> Tokenizer: ...

    def get_default_sampling_params(self) -> SamplingParams: ...

    # -- state of the engine: read between two steps -------------------------------------------------------------------

    async def stats(self) -> StatsSnapshot:
        """Counters and gauges for /metrics and /load; may be a fraction of a second old."""

    async def kv_stats(self) -> KVStats: ...

    async def reset_prefix_cache(self) -> int:
        """Empty the prefix cache; returns the number of cached blocks."""

    async def debug_request(self, request_id: str) -> dict[str, Any] | None:
        """A request's state, wait reason, blocks and events (`engine.timeline`), as plain data; None if unknown."""

    async def debug_kv(self) -> dict[str, Any]:
        """The pool: `kv_stats` and the blocks that each request holds, as plain data."""

    async def view_rpc(self, method: str, argument: str) -> Any:
        """Call a method of the live view (`octavo.view.live.publisher`)."""

    def shutdown(self) -> None:
        """Abort all requests and free all resources. Iterators get an `EngineError`. A second call does nothing."""
