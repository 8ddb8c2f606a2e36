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
        is_search = isinstance(params, BeamSearchParams)
        width = params.beam_width if isinstance(params, BeamSearchParams) else params.width
        num_sequences, num_prompt = width * len(lengths), sum(lengths)
        if self.max_sequences is not None and num_sequences > self.max_sequences:
            remedy = "send fewer prompts" if len(lengths) > 1 else f"lower {'beam_width' if is_search else 'n'}"
            raise self._beyond(
                f"{num_sequences} sequences ({len(lengths)} prompts x {width})", self.max_sequences, "sequences", remedy
            )
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
            remedy = "lower max_tokens or n, or send fewer prompts"
            raise self._beyond(f"{num_prompt + max_tokens * num_sequences} tokens", self.max_tokens, "tokens", remedy)
        if by_logprobs is not None and self.max_logprobs is not None and max_tokens > by_logprobs:
            num = num_prompt_logprobs + max_tokens * per_token * num_sequences
            remedy = "lower logprobs, prompt_logprobs or max_tokens, or send fewer prompts"
            api_error = self._beyond(f"{num} log-probabilities", self.max_logprobs, "logprobs", remedy)
            api_error.param = "logprobs" if per_token else "prompt_logprobs"
            raise api_error
        return params

    @staticmethod
    def _prompt_logprobs(params: Params, num_prompt: int) -> int:
        if isinstance(params, BeamSearchParams):
            return 0
        wanted = [params.prompt_logprobs, params.logprobs if params.echo else None]
        return num_prompt * max((num + 1 for num in wanted if num is not None), default=0)

    @staticmethod
    def _beyond(amount: str, limit: int, name: str, remedy: str) -> ApiError:
        param = {"sequences": "n", "tokens": "max_tokens", "logprobs": "logprobs"}[name]
        text = f"the request can reach {amount}; the limit is {limit} (--max-request-{name}); {remedy}"
        return bad_request("request_too_large", text, param)


def _remaining(limit: int | None, used: int, per_token: int) -> int | None:
    """Tokens per sequence that fit into the rest of a limit; 0 or less if `used` exceeds it. None: no limit."""
    if limit is None or (not per_token and used <= limit):
        return None
    return (limit - used) // max(1, per_token)
