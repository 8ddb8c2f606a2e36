"""What a caller asks an engine for, and the checks that turn it into a `RequestState`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

from octavo.core.request import Request
from octavo.engine.beam_search import BeamSearch
from octavo.engine.outputs import RequestMetrics
from octavo.engine.request_state import RequestState
from octavo.engine.structured_output import Grammar, RequestGrammar
from octavo.engine.text_processor import MakeDetokenizer
from octavo.errors import ContextLengthError, ParameterError, PromptError
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import INT64, RequestOutputKind, SamplingParams

MAX_PRIORITY = 1 << 31
"""Bound on the magnitude of a request's priority."""
PIN_PARAMS = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
"""Parameters of a request that only computes a pinned prefix."""


class TurnOpenings(NamedTuple):
    """The tokens that open a turn of the user, and of the model, in a chat; empty: not known."""

    user: tuple[int, ...] = ()
    model: tuple[int, ...] = ()

    def marks(self, prompt: Seq[int]) -> tuple[int, ...]:
        """Where later prompts are likely to part from this one: after the system prompt and the tools, and before the
        opening of the answer, which a template may write otherwise once the answer is there."""
        end = len(prompt) - len(self.model)
        if not self.model or end <= 0 or tuple(prompt[end:]) != self.model:
            return ()
        begin = prompt.index(self.model[0])
        while self.user and begin < end:
            if tuple(prompt[begin : begin + len(self.user)]) == self.user:
                return begin, end
            begin = prompt.index(self.model[0], begin + 1)
        return (end,)


NO_OPENINGS = TurnOpenings()


@dataclass(slots=True)
class EngineRequest:
    """A request as a front end passes it to an engine. `octavo.engine.process.ipc.AddRequest` is its message.

    prompt           the prompt's text, if it had one
    cut_max_tokens   a max_tokens beyond the model's length ends there, as in vLLM's engines; otherwise it is refused
    tenant           see `core.request.Request`, also for `index_in_call`
    seed             used if the parameters have none; None: the engine generates one
    resume           outputs so far from another engine with the same seed (see `core.request.Request`)
    pin              only compute the prompt and keep its blocks; `pinning` makes such a request
    stream           send an update whenever there are new tokens, otherwise when the request has finished
    grammar          the compiled `structured_outputs` of the parameters
    """

    request_id: str
    prompt_token_ids: Seq[int]
    params: SamplingParams | BeamSearchParams
    prompt: str | None = None
    priority: int = 0
    salt: bytes = b""
    tenant: int = 0
    index_in_call: int = 0
    seed: int | None = None
    resume: Mapping[int, Seq[int]] | None = None
    pin: bool = False
    stream: bool = False
    grammar: Grammar | None = None
    make_detokenizer: MakeDetokenizer | None = None
    cut_max_tokens: bool = False

    @classmethod
    def pinning(cls, name: str, token_ids: Seq[int], salt: bytes = b"") -> EngineRequest:
        """The request that computes and pins a prefix for requests with that salt; it finishes once it is computed."""
        return cls(pin_id(name), token_ids, PIN_PARAMS, salt=salt, pin=True)

    @property
    def output_kind(self) -> RequestOutputKind:
        """A beam search and a pin have a final output only."""
        if self.pin or isinstance(self.params, BeamSearchParams):
            return RequestOutputKind.FINAL_ONLY
        return self.params.output_kind


@dataclass(slots=True)
class ModelLimits:
    """What a model allows a request.

    vocab_size, max_model_len   limits on prompts
    eos_token_ids               the model's end-of-sequence tokens
    max_logprobs                largest number of top log-probabilities a request may ask for; -1: the vocabulary
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    max_logprobs: int = 20

    def __post_init__(self) -> None:
        # A checkpoint may name tokens without logits: added tokens whose embedding table was never resized.
        self.eos_token_ids = tuple(token for token in self.eos_token_ids if token < self.vocab_size)


class RequestBuilder:
    """Checks requests against a model's limits and resolves their parameters.

    max_output_tokens   (prompt tokens, samples) -> tokens per sample for which the KV cache has room
    seed                seeds the generator of seeds for requests without one
    num_draft_tokens    most drafts of requests that speculate
    num_grammar_drafts  likewise, of those with a grammar
    turn_openings       for models with states, which leave checkpoints between turns
    """

    def __init__(
        self,
        limits: ModelLimits,
        max_output_tokens: Callable[[int, int], int],
        seed: int,
        *,
        num_draft_tokens: int = 0,
        num_grammar_drafts: int = 0,
        turn_openings: TurnOpenings = NO_OPENINGS,
    ) -> None:
        self._turn_openings = turn_openings
        self._limits = limits
        self._max_output_tokens = max_output_tokens
        self._seeds = random.Random(seed)
        self._num_draft_tokens, self._num_grammar_drafts = num_draft_tokens, num_grammar_drafts

    def build(self, new: EngineRequest, arrival_time: float) -> RequestState:
        """Raises `PromptError`, `ContextLengthError` or `ParameterError`."""
        prompt_token_ids = new.prompt_token_ids
        check_prompt(prompt_token_ids, self._limits.vocab_size)
        check_priority(new.priority)
        check_seed(new.seed)
        beams, params = sampling_params_of(new.params)
        max_tokens = self._max_tokens(len(prompt_token_ids), params, cut=new.cut_max_tokens and beams is None)
        if new.pin and (new.resume or params != PIN_PARAMS or not new.request_id.startswith(pin_id(""))):
            text = f"{new.request_id!r:.80} is no request that only pins a prefix; use `EngineRequest.pinning`"
            raise ParameterError(text, param="pin")
        if new.resume:
            check_resume(new.resume, 0 if beams is not None else params.width, max_tokens, self._limits.vocab_size)
        stop_ids = params.stop_ids(self._limits.eos_token_ids)
        self._check_params(params, max_tokens, stop_ids, params.logprobs if beams is None else beams.logprobs)
        if beams is not None and beams.beam_width > self._limits.vocab_size:
            raise ParameterError(
                f"beam_width is {beams.beam_width}, the vocabulary has {self._limits.vocab_size} tokens",
                param="beam_width",
            )
        if params.structured_outputs is not None and new.grammar is None:
            text = "structured_outputs need a tokenizer to compile the grammar, and the engine has none"
            raise ParameterError(text, param="structured_outputs")
        search = None if beams is None else BeamSearch(beams, len(prompt_token_ids), stop_ids)
        if search is not None and params.stop_strings and new.make_detokenizer is not None:
            search.ends_in_stop_string = partial(
                ends_in_stop_string, new.make_detokenizer, new.prompt_token_ids, params
            )
        request = Request(
            new.request_id,
            new.prompt_token_ids,
            params,
            max_tokens=max_tokens,
            seed=self._seed_of(params, new.seed),
            stop_ids=stop_ids,
            priority=new.priority,
            salt=new.salt,
            tenant=new.tenant,
            index_in_call=new.index_in_call,
            width=None if beams is None else beams.beam_width,
            num_samples=None if search is None else search.num_candidates,
            select_beams=None if search is None else search.select_beams,
            use_structured_output=new.grammar is not None,
            pin=new.pin,
            resume=new.resume,
            num_draft_tokens=self._num_drafts(new, params),
            marks=self._turn_openings.marks(prompt_token_ids),
        )
        # The client finds stop strings, as soon as they are complete.
        wants_all = bool(params.stop_strings) or (new.stream and params.output_kind is not RequestOutputKind.FINAL_ONLY)
        state = RequestState(request, RequestMetrics(arrival_time), wants_all and search is None, search)
        if new.grammar is not None:
            state.grammar = RequestGrammar(new.grammar, len(prompt_token_ids), stop_ids, self._limits.eos_token_ids)
        return state

    def _num_drafts(self, new: EngineRequest, params: SamplingParams) -> int:
        """Drafts of a request at most. With a grammar and log-probabilities, the host samples."""
        if not params.spec or new.pin:
            return 0
        if new.grammar is None:
            return self._num_draft_tokens
        return self._num_grammar_drafts if params.logprobs is None else 0

    def _seed_of(self, params: SamplingParams, seed: int | None) -> int:
        if params.seed is not None:
            return params.seed
        return generate_seed(self._seeds) if seed is None else seed

    def _check_params(
        self, params: SamplingParams, max_tokens: int, stop_ids: frozenset[int], logprobs: int | None
    ) -> None:
        """Check what depends on the model or on the resolved `max_tokens`. Raises `ParameterError`."""
        id_lists: dict[str, Iterable[int]] = {
            "stop_token_ids": params.stop_token_ids or (),
            "allowed_token_ids": params.allowed_token_ids or (),
            "bad_words_token_ids": chain.from_iterable(params.bad_words_token_ids or ()),
            "logit_bias": params.logit_bias or (),
        }
        for name, ids in id_lists.items():
            if (largest := max(ids, default=0)) >= self._limits.vocab_size:
                code = "invalid_logit_bias" if name == "logit_bias" else "invalid_token_id"
                text = f"{name} has token {largest}, the vocabulary has {self._limits.vocab_size} tokens"
                raise ParameterError(text, param=name, code=code)
        max_logprobs = self._limits.vocab_size if self._limits.max_logprobs < 0 else self._limits.max_logprobs
        for name, num in (("logprobs", logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if num is not None and (self._limits.vocab_size if num < 0 else num) > max_logprobs:
                raise ParameterError(
                    f"{name} is {num}, and the limit is {max_logprobs}; raise max_logprobs", param=name
                )
        if params.min_tokens > max_tokens and params.max_tokens in (None, max_tokens):  # not cut
            raise ParameterError(
                f"min_tokens is {params.min_tokens}, and the output has at most {max_tokens} tokens; lower it",
                param="min_tokens",
            )
        if params.bad_words and not params.bad_words_token_ids:
            raise ParameterError(
                "bad_words need a tokenizer, and the engine has none; use bad_words_token_ids", param="bad_words"
            )
        if params.allowed_token_ids is not None:
            forbidden = {word[0] for word in params.bad_words_token_ids or () if len(word) == 1}
            if forbidden.union(stop_ids if params.min_tokens else ()).issuperset(params.allowed_token_ids):
                raise ParameterError(
                    "bad_words and min_tokens forbid all of allowed_token_ids; allow more tokens",
                    param="allowed_token_ids",
                    code="no_allowed_token",
                )

    def _max_tokens(self, num_prompt: int, params: SamplingParams, *, cut: bool) -> int:
        """Resolve max_tokens: an explicit one must fit unless `cut`; a default is cut. Raises `ContextLengthError`."""
        limit, asked = self._limits.max_model_len, params.max_tokens
        if asked == 0 and num_prompt <= limit:
            return 1  # the core needs one token; outputs omit it
        if num_prompt + 1 > limit or (asked is not None and not cut and num_prompt + asked > limit):
            completion = f"{asked} for the completion" if asked is not None else "a completion"
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens. However, you requested {num_prompt} tokens in "
                f"the prompt and {completion}; shorten the prompt"
                + (f", or ask for at most {limit - num_prompt} tokens" if num_prompt < limit else ""),
                param="prompt" if num_prompt + 1 > limit else "max_tokens",
            )
        if asked is not None:
            return min(asked, limit - num_prompt)
        max_output = self._max_output_tokens(num_prompt, params.width)
        return max(1, min(limit - num_prompt, max_output))


def sampling_params_of(
    params: SamplingParams | BeamSearchParams,
) -> tuple[BeamSearchParams | None, SamplingParams]:
    """The beam search parameters, if these are, and the sampling parameters."""
    return (params, params.sampling_params) if isinstance(params, BeamSearchParams) else (None, params)


def ends_in_stop_string(
    make_detokenizer: MakeDetokenizer, prompt_token_ids: Seq[int], params: SamplingParams, output: list[int]
) -> bool:
    text = make_detokenizer(prompt_token_ids, params)
    text.push(output)
    return text.stop_reason is not None


def check_prompt(prompt_token_ids: Seq[int], vocab_size: int) -> None:
    """Raises `PromptError` for an empty prompt or an invalid token id."""
    if not prompt_token_ids:
        raise PromptError("the prompt is empty; give it at least one token", param="prompt", code="empty_prompt")
    if set(map(type, prompt_token_ids)) == {int} and min(prompt_token_ids) >= 0 and max(prompt_token_ids) < vocab_size:
        return  # the common case, four times as fast: a thousand prompts may arrive together
    for i, token in enumerate(prompt_token_ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise PromptError(
                f"token {i} of the prompt is {token!r}; token ids are integers from 0 to {vocab_size - 1}",
                param="prompt",
                code="invalid_token_id",
            )


def check_priority(priority: int) -> None:
    """Raises `ParameterError` for a priority that is no integer or exceeds `MAX_PRIORITY` in magnitude."""
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > MAX_PRIORITY:
        raise ParameterError(
            f"priority is {priority!r}, it must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}", param="priority"
        )


def check_seed(seed: int | None) -> None:
    """Raises `ParameterError` for a seed that is no int64, which no step could sample with."""
    if seed is None:
        return
    if not isinstance(seed, int) or isinstance(seed, bool) or not -INT64 <= seed < INT64:
        text = f"seed is {seed!r:.40}, it must be an integer from {-INT64} to {INT64 - 1}"
        raise ParameterError(text, param="seed", code="integer_out_of_range")


def check_resume(resume: Mapping[int, Seq[int]], width: int, max_tokens: int, vocab_size: int) -> None:
    """Raises `ParameterError` for outputs that no engine can have produced for a request with `width` samples."""
    for index, output in resume.items():
        if not 0 <= index < width:
            raise ParameterError(f"resume has sample {index}, and the request has {width} to resume", param="resume")
        if not 0 < len(output) < max_tokens:
            text = f"resume has {len(output)} tokens of sample {index}; an unfinished one has 1 to {max_tokens - 1}"
            raise ParameterError(text, param="resume")
        if min(output) < 0 or max(output) >= vocab_size:
            text = f"resume has a token outside 0 to {vocab_size - 1} in sample {index}"
            raise ParameterError(text, param="resume", code="invalid_token_id")


def pin_id(name: str) -> str:
    """The request id of a pinned prefix; no other request has such an id."""
    return f"pin:{name}"


def unknown_pin_error(name: str) -> ParameterError:
    return ParameterError(f"no prefix is pinned under the name {name!r}", param="name", code="not_found")


def generate_seed(seeds: random.Random) -> int:
    """A seed for a request without one. All frontends use this function, so equal runs get equal seeds."""
    return seeds.getrandbits(63)
