"""An LLM without a model: it answers a prompt with the prompt's own tokens in reverse, one at a time.

A token is a word; its id is its place in `VOCABULARY`, which grows. Enough of `octavo.LLM` for the commands, so that
their tests say what the commands do and not what models do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from octavo.checkpoint.generation_config import SamplingDefaults
from octavo.core.kv_cache_manager import KVCacheManager, KVStats
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


def known(token_id: int, num_top: int) -> dict[int, Logprob]:
    """A token that is the second likeliest, and the likeliest, which is the first word of all."""
    best = {0: Logprob(-0.25, 1, decode([0]))} if num_top else {}
    return {token_id: Logprob(-1.5, 2, decode([token_id]))} | best


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
    """Records how it was made and asked. `FAIL` in a prompt fails that request, `TOO LONG` refuses the call."""

    made: ClassVar[list[FakeLLM]] = []
    sampling_defaults: ClassVar[SamplingDefaults] = SamplingDefaults()

    def __init__(self, model: str, **engine: Any) -> None:
        if model.startswith("absent"):
            raise ModelNotFoundError(f"no model {model!r}")
        self.model, self.engine = model, engine
        self.asked: list[tuple[list[Any], SamplingParams]] = []
        self.tokenizer = Tokenizer()
        self.kv = KVCacheManager(64, 4)
        self.closed = False
        self.num_aborted = 0
        FakeLLM.made.append(self)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return self.sampling_defaults.params

    def kv_stats(self) -> KVStats:
        return self.kv.stats()

    def stream(self, prompts: list[Any], params: SamplingParams) -> Iterator[Output]:
        """All the prompts' first words, then all their second ones, and so on; cumulative text."""
        self.asked.append((prompts, params))
        return self._answers([self._output(str(i), prompt, params.n) for i, prompt in enumerate(prompts)], params)

    def _answers(self, outputs: list[Output], params: SamplingParams) -> Iterator[Output]:
        try:
            while growing := [output for output in outputs if not output.finished]:
                for output in growing:
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
                    completion.logprobs = [known(i, params.logprobs) for i in completion.token_ids]
                if num + 1 == len(output.prompt_token_ids):
                    completion.finish_reason = "stop"
                elif num + 1 == params.max_tokens:
                    completion.finish_reason = "length"
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None, *(known(i, 0) for i in output.prompt_token_ids[1:])]
        output.finished = output.outputs[0].finish_reason is not None
