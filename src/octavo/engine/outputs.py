"""What a caller gets: `RequestOutput`, made from a request's sequences as their tokens arrive.

The text side (detokenising, stop strings) is handed in: the engine knows tokens only.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from octavo.core.request import Request, Sequence


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, by the engine's clock, in seconds. None: not yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's samples. `token_ids` holds the stop token; `text` does not, unless asked to.

    finish_reason   None while it runs; stop, length, abort or error
    stop_reason     the stop string or stop token id that ended it, None for the model's own end token; for an error,
                    what went wrong
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request as far as it has come. `prompt` is None when token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0


class Detokenizer(Protocol):
    """Turns the tokens of one sequence into text, bit by bit, and looks out for stop strings."""

    text: str
    stop_reason: str | None
    num_tokens_kept: int

    def push(self, ids: Seq[int]) -> str: ...

    def finish(self) -> str: ...


MakeDetokenizer = Callable[[Request], Detokenizer]


@dataclass(slots=True)
class _Text:
    """The text of one sequence so far."""

    detokenizer: Detokenizer
    num_pushed: int = 0
    over: bool = False
    error: str = ""


@dataclass(slots=True)
class RequestState:
    """A request, as the caller sees it.

    make_detokenizer   None: token ids only
    incremental        the text is wanted, or watched for stop strings, while it grows; else it is made once, at the end
    stream             the caller hears of every step
    failed_at          tokens known when a step of this request failed; -1: none did
    """

    request: Request
    prompt: str | None
    metrics: RequestMetrics
    make_detokenizer: MakeDetokenizer | None = None
    incremental: bool = False
    stream: bool = False
    failed_at: int = -1
    texts: dict[int, _Text] = field(default_factory=dict)

    @property
    def num_known(self) -> int:
        """Tokens that the host knows, over all sequences."""
        return sum(len(s.token_ids) for s in (*self.request.sequences, *self.request.done))

    def read(self, sequence: Sequence) -> bool:
        """Take in a sequence's new tokens; True when they complete a stop string, or cannot be turned into text."""
        text = self._text_of(sequence)
        if text is None or text.over:
            return False
        tokens = sequence.token_ids[len(self.request.prompt_token_ids) + text.num_pushed :].tolist()
        if sequence.stop_token is not None and tokens:
            tokens.pop()  # the stop token is in token_ids, not in the text
        text.num_pushed += len(tokens)
        try:
            text.detokenizer.push(tokens)
        except Exception as error:  # this request's alone: it must not take the loop along
            text.error = f"its tokens could not be turned into text: {type(error).__name__}: {error}"
        text.over = text.detokenizer.stop_reason is not None or bool(text.error)
        return text.over

    def _text_of(self, sequence: Sequence) -> _Text | None:
        if self.make_detokenizer is None:
            return None
        if sequence.index not in self.texts:
            self.texts[sequence.index] = _Text(self.make_detokenizer(self.request))
        return self.texts[sequence.index]

    def output(self) -> RequestOutput:
        request = self.request
        live = [s for s in request.sequences if not s.finish_reason]
        sequences = sorted([s for s in request.done if s.finish_reason != "pruned"] + live, key=lambda s: s.index)
        return RequestOutput(
            request.request_id,
            self.prompt,
            request.prompt_token_ids.tolist(),
            [self._completion(s) for s in sequences],
            not request.sequences,
            self.metrics,
            max(0, request.num_cached_tokens),
        )

    def _completion(self, sequence: Sequence) -> CompletionOutput:
        text = self._text_of(sequence)
        token_ids = sequence.output_token_ids
        finish_reason = sequence.finish_reason or None
        stop_reason: str | int | None = None
        if text is not None:
            if not self.incremental or sequence.finish_reason:
                self.read(sequence)
            if sequence.finish_reason and not text.over:
                text.detokenizer.finish()
                text.over = True
            if (stop_reason := text.detokenizer.stop_reason) is not None:
                token_ids = token_ids[: text.detokenizer.num_tokens_kept]
                finish_reason = "stop"  # also where a stop token or the length would have ended it, later
            if text.error:
                finish_reason = "error"
        if stop_reason is None and sequence.stop_token in (self.request.sampling_params.stop_token_ids or ()):
            stop_reason = sequence.stop_token
        if finish_reason == "error":
            stop_reason = (text.error if text is not None else "") or self.request.error
        return CompletionOutput(
            sequence.index,
            "" if text is None else text.detokenizer.text,
            token_ids,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
