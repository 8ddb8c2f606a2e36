"""The text work that an engine needs from its front end: grammars, and stop strings that decide between beams."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from typing import Any, Protocol

from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import SamplingParams


class Detokenizer(Protocol):
    """Incremental detokenizer of one sequence; also finds stop strings."""

    text: str
    stop_reason: str | None
    num_tokens_kept: int

    def push(self, ids: Seq[int]) -> str: ...

    def finish(self) -> str: ...

    def decode(self, ids: Seq[int], skip_special_tokens: bool) -> str:
        """The text of any token ids, independent of the sequence's own text."""


MakeDetokenizer = Callable[[Seq[int], SamplingParams], Detokenizer]
"""Makes the detokenizer of one sequence, from its prompt's token ids and its parameters."""


class TextProcessor(Protocol):
    """Text work for an engine; `frontend.input_processor.InputProcessor` implements it."""

    @property
    def make_detokenizer(self) -> MakeDetokenizer | None:
        """For beam searches with stop strings, which decide between beams."""

    def submit_grammar(self, params: SamplingParams | BeamSearchParams, tenant: int = 0) -> Future[Any] | None:
        """Compile the grammar of parameters with one. The future raises `UsageError` or `RequestFailedError`."""

    def withdraw_grammar(self, compilation: Any) -> None:
        """The caller of `submit_grammar` no longer waits."""
