"""Sampling parameters of a request."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from octavo.params.structured_outputs import StructuredOutputsParams
from octavo.params.validation import INT32, ValidatedParams, as_list, as_token_ids, invalid
from octavo.params.vllm_arguments import Owner

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy decoding."""
MAX_TEMPERATURE = 1e30
"""Far inside float32; all tokens are equally probable long before."""

INT64 = 1 << 63


class RequestOutputKind(Enum):
    """Content of a running request's outputs: all tokens so far, the new ones, or no output before the final one."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


OUTPUT_KINDS = tuple(RequestOutputKind)


@dataclass(slots=True, kw_only=True)
class SamplingParams(ValidatedParams):
    """Sampling parameters of one request, with vLLM's names and defaults.

    n                           number of samples of the prompt
    best_of                     generate so many samples (at most 20), and return the n with the largest cumulative
                                log-probability when all have ended
    temperature                 0 to 1e30; below 1e-5 greedy decoding; other values below 0.01 count as 0.01
    top_p                       after top_k, keep the smallest set of tokens with this probability mass
    top_k                       after temperature, keep this many top tokens; 0 or -1: all
    min_p                       after top_p, keep tokens with at least this share of the top token's probability
    repetition_penalty          above 1, tokens of the prompt and the output become less likely: positive logits are
                                divided by it, negative ones multiplied
    presence_penalty            -2 to 2, subtracted from the logits of output tokens
    frequency_penalty           -2 to 2, subtracted from a token's logit for each time that it is in the output
    logit_bias                  token id -> value added to its logit, -100 to 100
    allowed_token_ids           only these tokens can be sampled
    bad_words                   texts that must not occur in prompt and output together. The engine's client tokenizes
                                them with and without a leading space
    bad_words_token_ids         the same as lists of token ids: the last token of a list is masked after the others
    structured_outputs          constraint on the output: `StructuredOutputsParams`, or an object with one of json,
                                json_object, regex, choice and grammar. Only tokens that fit are sampled, and the output
                                ends only where it is complete
    min_tokens                  tokens to generate before a stop token or stop string can end the output
    seed                        any int64. Noise is a function of (seed, sample index, position) only, independent of
                                batch, decode window and preemption. None: the engine picks a seed
    max_tokens                  tokens to generate; None: as many as fit. Of a number that does not fit, `LLM` and
                                `AsyncLLM` generate what fits, and a server refuses it. 0: the prompt only, with echo or
                                prompt_logprobs
    stop                        strings that end the output
    stop_token_ids              token ids that end the output
    ignore_eos                  continue after the model's end-of-sequence tokens
    logprobs                    log-probabilities of each output token, and of this many top tokens at its position; -1:
                                all. They are the model's, before any other parameter applies
    prompt_logprobs             the same for the prompt's tokens
    echo                        outputs begin with the prompt: text, tokens and log-probabilities
    detokenize                  outputs have text
    skip_special_tokens         omit special tokens from the text
    spaces_between_special_tokens  put spaces between special tokens, if the tokenizer puts them between words
    include_stop_str_in_output  keep the matched stop string, or the stop token's text, in the text
    output_kind                 content of outputs while the request runs
    skip_reading_prefix_cache   compute the whole prompt; set by prompt_logprobs, which needs it
    spec                        let an engine with a speculative_config draft tokens of this request

    Fields may be assigned to; `validated` checks them when a request is made. Raises `ParameterError` for a value out
    of range, `UnknownOptionError` for an unknown name.
    """

    TITLE: ClassVar[str] = "SamplingParams"
    ARGUMENT_OWNER: ClassVar[Owner | None] = "sampling"

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    min_tokens: int = 0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    skip_reading_prefix_cache: bool = False
    spec: bool = True
    stop_strings: tuple[str, ...] = field(init=False, repr=False, default=())

    def clone(self) -> SamplingParams:
        """A copy that can be changed without changing this object."""
        params = copy.copy(self)
        for name in self.__slots__:
            if isinstance(value := getattr(params, name), list | dict):
                setattr(params, name, copy.deepcopy(value))
        return params

    def validated(self) -> SamplingParams:
        """A copy for one call: checked, and unaffected by later assignments. Raises `ParameterError`."""
        params = copy.copy(self)
        params.__post_init__()  # replaces lists and dicts
        return params

    def __copy__(self) -> SamplingParams:
        params: SamplingParams = object.__new__(SamplingParams)
        for name in self.__slots__:
            setattr(params, name, getattr(self, name))
        return params

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def width(self) -> int:
        """Number of samples that are generated."""
        return self.n if self.best_of is None else self.best_of

    def stop_ids(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """Return the tokens that end an output of a model with these end-of-sequence tokens."""
        return frozenset(() if self.ignore_eos else eos_token_ids) | frozenset(self.stop_token_ids or ())

    @property
    def selects_best_of(self) -> bool:
        """True if more samples are generated than returned."""
        return self.width > self.n

    @property
    def has_penalties(self) -> bool:
        """True if a repetition, presence or frequency penalty applies."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def has_filters(self) -> bool:
        """True if top_k, top_p or min_p may remove tokens."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def needs_history(self) -> bool:
        """True if sampling needs earlier tokens, or more of the prompt than the current step computes."""
        return self.has_penalties or bool(self.bad_words_token_ids) or self.prompt_logprobs is not None

    def __post_init__(self) -> None:
        self._check_integer("n", 1, 128)
        self._check_integer("best_of", 1, 20, optional=True)
        self._check_number("temperature", 0.0, MAX_TEMPERATURE)
        self._check_number("top_p", 0.0, 1.0)
        self._check_number("min_p", 0.0, 1.0)
        self._check_integer("top_k", -1, INT32)
        self._check_number("repetition_penalty", 0.01, 100.0)
        self._check_number("presence_penalty", -2.0, 2.0)
        self._check_number("frequency_penalty", -2.0, 2.0)
        self._check_integer("max_tokens", 0, INT32, optional=True)
        self._check_integer("min_tokens", 0, INT32)
        self._check_integer("seed", -INT64, INT64 - 1, optional=True)
        self._check_integer("logprobs", -1, INT32, optional=True)
        self._check_integer("prompt_logprobs", -1, INT32, optional=True)
        self._check_bool("ignore_eos", "echo", "detokenize", "skip_special_tokens", "spaces_between_special_tokens")
        self._check_bool("include_stop_str_in_output", "skip_reading_prefix_cache", "spec")
        self._check_choice("output_kind", OUTPUT_KINDS)
        self._set("stop_strings", self._check_strings("stop", 64))
        self._set("bad_words", self._check_strings("bad_words", 4096))
        self._set("stop_token_ids", as_token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", as_token_ids("allowed_token_ids", self.allowed_token_ids))
        words = as_list("bad_words_token_ids", self.bad_words_token_ids)
        self._set("bad_words_token_ids", tuple(as_token_ids("bad_words_token_ids", word) for word in words))
        self._set("logit_bias", self._check_numbers_by_id("logit_bias", -100.0, 100.0))
        self._set("structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        self._normalize()
        self._check_together()

    def _normalize(self) -> None:
        """Replace equivalent settings by one of them."""
        if 0 < self.temperature < 0.01 and not self.greedy:
            self._set("temperature", 0.01)  # smaller values overflow float32 logits
        if self.top_k == -1:
            self._set("top_k", 0)
        if self.top_p == 0.0:  # the smallest set is the top token
            self._set("top_p", 1.0)
            self._set("top_k", 1)
        if self.echo and self.prompt_logprobs is None:
            self._set("prompt_logprobs", self.logprobs)
        if self.prompt_logprobs is not None:  # cached positions have no logits
            self._set("skip_reading_prefix_cache", True)

    def _check_together(self) -> None:
        """Check combinations of parameters that are valid by themselves."""
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            text = "is 0, it must be at least 1 without echo or prompt_logprobs"
            raise invalid("max_tokens", text, "integer_below_min_value")
        if self.width < self.n:
            raise invalid("best_of", f"is {self.best_of}, it must be at least n, {self.n}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise invalid("min_tokens", f"is {self.min_tokens}, it must be at most max_tokens, {self.max_tokens}")
        if self.stop_strings and not self.detokenize:
            raise invalid("stop", "strings need the text: set detokenize=True or use stop_token_ids")
        if self.allowed_token_ids == ():
            text = "is empty, which allows nothing; leave it out to allow all"
            raise invalid("allowed_token_ids", text, "no_allowed_token")
        if not all(self.bad_words_token_ids or ()):
            raise invalid("bad_words_token_ids", "has a list without tokens; leave it out")
