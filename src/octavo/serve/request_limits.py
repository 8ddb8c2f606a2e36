"""What one request may come to at most, worked out when it arrives: sequences, tokens and log-probabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import SamplingParams
from octavo.serve.openai.errors import ApiError, bad_request

SEQUENCES_TO_RUN = 8
"""Sequences of one request unasked, by those that run at a time."""
TOKENS_TO_CACHE = 4
"""Its tokens, by those that the KV cache holds."""
MAX_LOGPROBS = 1 << 17
"""Its log-probabilities unasked: a response of about 10 MB."""
SLACK_TOKENS = 256
"""A block a sequence, of the largest there are: an output shorter than the cache by that fits for sure."""

Params = SamplingParams | BeamSearchParams


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits on the whole of a request, whatever runs beside it. None: no limit.

    max_sequences      prompts x samples of each (n, best_of, or beams)
    max_tokens         the prompts, and max_tokens for each sequence
    max_logprobs       log-probabilities: at each position that has them one, and the likeliest beside it
    max_prompt_tokens  the prompts alone: more could never stand in the queue
    max_model_len      tokens of a sequence; num_kv_tokens: what the KV cache holds. None: not known here
    """

    max_sequences: int | None
    max_tokens: int | None
    max_logprobs: int | None
    max_prompt_tokens: int | None = None
    max_model_len: int = 0
    num_kv_tokens: int | None = None

    def fit(self, params: Params, lengths: Sequence[int]) -> Params:
        """The parameters for prompts of these lengths; a default max_tokens is cut to what is allowed, a number never.

        Raises `ApiError` 400 for a request beyond a limit.
        """
        is_search = isinstance(params, BeamSearchParams)
        width = params.beam_width if isinstance(params, BeamSearchParams) else params.width
        num_sequences, num_prompt = width * len(lengths), sum(lengths)
        if self.max_sequences is not None and num_sequences > self.max_sequences:
            remedy = "send fewer prompts" if len(lengths) > 1 else f"lower {'beam_width' if is_search else 'n'}"
            raise self._beyond(
                f"{num_sequences} sequences ({len(lengths)} prompts x {width})", self.max_sequences, "sequences", remedy
            )
        if self.max_prompt_tokens is not None and num_prompt > self.max_prompt_tokens:
            text = f"prompts of {num_prompt} tokens never fit the queue: it takes {self.max_prompt_tokens}"
            raise bad_request("request_too_large", f"{text} (--max-num-queued-tokens); shorten the prompt", "prompt")
        at_each = 0 if params.logprobs is None else params.logprobs + 1
        before = self._prompt_logprobs(params, num_prompt)
        by_tokens = _room(self.max_tokens, num_prompt, num_sequences)
        by_logprobs = _room(self.max_logprobs, before, at_each * num_sequences)
        if params.max_tokens is not None:
            most = params.max_tokens
        else:
            most = max(1, self.max_model_len - max(lengths))
            if self.num_kv_tokens is not None:
                most = max(1, min(most, (self.num_kv_tokens - max(lengths)) // width - SLACK_TOKENS))
            allowed = min(room for room in (most, by_tokens, by_logprobs) if room is not None)
            if 0 < allowed < most:
                assert isinstance(params, SamplingParams)
                most, params = allowed, dataclasses.replace(params, max_tokens=allowed)
        if by_tokens is not None and self.max_tokens is not None and most > by_tokens:
            remedy = "lower max_tokens or n, or send fewer prompts"
            raise self._beyond(f"{num_prompt + most * num_sequences} tokens", self.max_tokens, "tokens", remedy)
        if by_logprobs is not None and self.max_logprobs is not None and most > by_logprobs:
            num = before + most * at_each * num_sequences
            remedy = "lower logprobs, prompt_logprobs or max_tokens, or send fewer prompts"
            raise self._beyond(f"{num} log-probabilities", self.max_logprobs, "logprobs", remedy)
        return params

    @staticmethod
    def _prompt_logprobs(params: Params, num_prompt: int) -> int:
        if isinstance(params, BeamSearchParams):
            return 0
        wanted = [params.prompt_logprobs, params.logprobs if params.echo else None]
        return num_prompt * max((num + 1 for num in wanted if num is not None), default=0)

    @staticmethod
    def _beyond(what: str, limit: int, name: str, remedy: str) -> ApiError:
        param = {"sequences": "n", "tokens": "max_tokens", "logprobs": "logprobs"}[name]
        text = f"the request may come to {what}, at most {limit} are allowed (--max-request-{name}); {remedy}"
        return bad_request("request_too_large", text, param)


def _room(limit: int | None, spent: int, each: int) -> int | None:
    """How many of each there may be beside what is spent: 0 or less if that is too much already. None: any number."""
    if limit is None or (not each and spent <= limit):
        return None
    return (limit - spent) // max(1, each)
