"""An LLM without a model: it completes a prompt with the prompt's own tokens in reverse, one at a time.

A token is a word; its id is its index in `VOCABULARY`, which grows. Implements the part of `octavo.LLM` that the
commands use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from octavo.checkpoint.generation_config import SamplingDefaults
from octavo.core.cache.kv_stats import KVStats
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.engine.outputs import Logprob
from octavo.errors import ContextLengthError, ModelNotFoundError
from octavo.params.sampling_params import RequestOutputKind, SamplingParams

VOCABULARY: list[str] = []


def encode(text: str) -> list[int]:
    words = text.split()
    VOCABULARY.extend(word for word in dict.fromkeys(words) if word not in VOCABULARY)
    return [VOCABULARY.index(word) for word in words]


def decode(ids: list[int]) -> str:
    return " ".join(VOCABULARY[i] for i in ids)


def logprobs_of(token_id: int, num_top: int) -> dict[int, Logprob]:
    """Log-probabilities of a token with rank 2, and of the top token, the first word of `VOCABULARY`."""
    top = {0: Logprob(-0.25, 1, decode([0]))} if num_top else {}
    return {token_id: Logprob(-1.5, 2, decode([token_id]))} | top


@dataclass
class Completion:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob] | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class Output:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class Tokenizer:
    chat_template: str | None = "role: content"

    def encode_chat(self, messages: list[dict[str, str]], **variables: Any) -> tuple[str, list[int]]:
        parts = [f"{m['role']}: {m['content']}" for m in messages] + [f"{k}={v}" for k, v in variables.items()]
        text = " ".join(parts)
        return text, encode(text)


class FakeLLM:
    """Records options and requests. `FAIL` in a prompt fails that request, `TOO LONG` raises `ContextLengthError`."""

    made: ClassVar[list[FakeLLM]] = []
    sampling_defaults: ClassVar[SamplingDefaults] = SamplingDefaults()

    def __init__(self, model: str, **engine: Any) -> None:
        if model.startswith("absent"):
            raise ModelNotFoundError(f"no model {model!r}")
        self.model, self.engine = model, engine
        self.requests: list[tuple[list[Any], SamplingParams]] = []
        self.tokenizer = Tokenizer()
        self.kv = KVCacheManager(64, 4)
        self.closed = False
        self.num_aborted = 0
        FakeLLM.made.append(self)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    @property
    def input_processor(self) -> FakeLLM:
        return self  # it has the tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return self.sampling_defaults.params

    def kv_stats(self) -> KVStats:
        return self.kv.stats()

    def stream(self, prompts: list[Any], params: SamplingParams) -> Iterator[Output]:
        """Yields the first token of every prompt, then the second ones, and so on, with cumulative text."""
        self.requests.append((prompts, params))
        return self._generate([self._output(str(i), prompt, params.n) for i, prompt in enumerate(prompts)], params)

    def _generate(self, outputs: list[Output], params: SamplingParams) -> Iterator[Output]:
        try:
            while unfinished := [output for output in outputs if not output.finished]:
                for output in unfinished:
                    self._step(output, params)
                    if output.finished or params.output_kind is not RequestOutputKind.FINAL_ONLY:
                        yield output
        except GeneratorExit:
            self.num_aborted += 1
            raise

    def _output(self, request_id: str, prompt: Any, n: int) -> Output:
        text = prompt if isinstance(prompt, str) else prompt.get("prompt")
        ids = encode(text) if text is not None else prompt["prompt_token_ids"]
        if "TOO LONG" in decode(ids):
            raise ContextLengthError("This model's maximum context length is 7 tokens. However, there are more")
        completions = [Completion(i) for i in range(n)]
        return Output(request_id, text or decode(ids), ids, completions, num_cached_tokens=len(ids) // 2)

    def _step(self, output: Output, params: SamplingParams) -> None:
        for completion in output.outputs:
            num = len(completion.token_ids)
            if "FAIL" in (output.prompt or ""):
                completion.finish_reason, completion.stop_reason = "error", "numbers that are not finite"
            else:
                completion.token_ids = [*completion.token_ids, output.prompt_token_ids[-1 - num]]
                completion.text = decode(completion.token_ids)
                if params.logprobs is not None:
                    completion.logprobs = [logprobs_of(i, params.logprobs) for i in completion.token_ids]
                if num + 1 == len(output.prompt_token_ids):
                    completion.finish_reason = "stop"
                elif num + 1 == params.max_tokens:
                    completion.finish_reason = "length"
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None, *(logprobs_of(i, 0) for i in output.prompt_token_ids[1:])]
        output.finished = output.outputs[0].finish_reason is not None
