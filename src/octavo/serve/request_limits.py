"""Limits on the size of one request, checked on arrival: sequences, tokens and log-probabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import SamplingParams
from octavo.serve.openai.errors import ApiError, bad_request

SEQUENCES_PER_ROW = 8
"""Default limit of sequences per request, as a multiple of max_num_seqs."""
TOKENS_PER_CACHE = 4
"""Default limit of tokens per request, as a multiple of the KV cache's tokens."""
MAX_LOGPROBS = 1 << 17
"""Default limit of log-probabilities per request: a response of about 10 MB."""
SLACK_TOKENS = 256
"""The largest block size. A sequence that is this much shorter than the KV cache always fits."""

Params = SamplingParams | BeamSearchParams


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits on one request, independent of the server's load. None: no limit.

    max_sequences      prompts x samples of each (n, best_of, or beams)
    max_tokens         prompt tokens, and max_tokens for each sequence
    max_logprobs       log-probabilities: of the token and of the top tokens at each position
    max_prompt_tokens  prompt tokens alone; a longer request could never be queued
    max_model_len      tokens of a sequence
    num_kv_tokens      capacity of the KV cache; None: not known here
    """

    max_sequences: int | None
    max_tokens: int | None
    max_logprobs: int | None
    max_prompt_tokens: int | None = None
    max_model_len: int = 0
    num_kv_tokens: int | None = None

    def fit(self, params: Params, lengths: Sequence[int]) -> Params:
        """The parameters for prompts of these lengths. A default max_tokens is lowered to fit; an explicit one is not.

        Raises `ApiError` 400 for a request beyond a limit.
        """
        if isinstance(params, BeamSearchParams):
            width, name = params.beam_width, "beam_width"
        else:
            width, name = params.width, "n" if params.best_of is None else "best_of"
        num_sequences, num_prompt = width * len(lengths), sum(lengths)
        if self.max_sequences is not None and num_sequences > self.max_sequences:
            remedy = "send fewer prompts" if len(lengths) > 1 else f"lower {name}"
            amount = f"{num_sequences} sequences ({len(lengths)} prompts x {width})"
            raise _beyond(amount, self.max_sequences, "sequences", remedy, name if width > 1 else "prompt")
        if self.max_prompt_tokens is not None and num_prompt > self.max_prompt_tokens:
            text = f"the prompts have {num_prompt} tokens; the queue holds {self.max_prompt_tokens}"
            raise bad_request("request_too_large", f"{text} (--max-num-queued-tokens); shorten the prompt", "prompt")
        per_token = 0 if params.logprobs is None else params.logprobs + 1
        num_prompt_logprobs = self._prompt_logprobs(params, num_prompt)
        by_tokens = _remaining(self.max_tokens, num_prompt, num_sequences)
        by_logprobs = _remaining(self.max_logprobs, num_prompt_logprobs, per_token * num_sequences)
        if params.max_tokens is not None:
            max_tokens = params.max_tokens
        else:
            max_tokens = max(1, self.max_model_len - max(lengths))
            if self.num_kv_tokens is not None:
                max_tokens = max(1, min(max_tokens, (self.num_kv_tokens - max(lengths)) // width - SLACK_TOKENS))
            allowed = min(limit for limit in (max_tokens, by_tokens, by_logprobs) if limit is not None)
            if 0 < allowed < max_tokens:
                assert isinstance(params, SamplingParams)
                max_tokens, params = allowed, dataclasses.replace(params, max_tokens=allowed)
        if by_tokens is not None and self.max_tokens is not None and max_tokens > by_tokens:
            remedy = f"lower max_tokens or {name}, or send fewer prompts"
            amount = f"{num_prompt + max_tokens * num_sequences} tokens"
            raise _beyond(amount, self.max_tokens, "tokens", remedy, "max_tokens")
        if by_logprobs is not None and self.max_logprobs is not None and max_tokens > by_logprobs:
            num = num_prompt_logprobs + max_tokens * per_token * num_sequences
            remedy = "lower logprobs, prompt_logprobs or max_tokens, or send fewer prompts"
            param = "logprobs" if per_token else "prompt_logprobs"
            raise _beyond(f"{num} log-probabilities", self.max_logprobs, "logprobs", remedy, param)
        return params

    @staticmethod
    def _prompt_logprobs(params: Params, num_prompt: int) -> int:
        if isinstance(params, BeamSearchParams):
            return 0
        wanted = [params.prompt_logprobs, params.logprobs if params.echo else None]
        return num_prompt * max((num + 1 for num in wanted if num is not None), default=0)


def _beyond(amount: str, limit: int, option: str, remedy: str, param: str) -> ApiError:
    text = f"the request can reach {amount}; the limit is {limit} (--max-request-{option}); {remedy}"
    return bad_request("request_too_large", text, param)


def _remaining(limit: int | None, used: int, per_token: int) -> int | None:
    """Tokens per sequence that fit into the rest of a limit; 0 or less if `used` exceeds it. None: no limit."""
    if limit is None or (not per_token and used <= limit):
        return None
    return (limit - used) // max(1, per_token)
