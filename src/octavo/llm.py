"""`LLM`: the engine in one object, for use from Python."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeAlias, cast

from octavo.build import build
from octavo.config import EngineArgs
from octavo.core.kv_cache import KVStats
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.interrupts import BetweenSteps
from octavo.engine.outputs import MakeDetokenizer, RequestOutput
from octavo.engine.stats import EngineStats
from octavo.errors import ParameterError, PromptError, UnknownOptionError
from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text; token ids; {"prompt": text}; or {"prompt_token_ids": ids}."""
Messages: TypeAlias = Sequence[dict[str, Any]]


class LLM:
    """A model behind an engine of its own.

        llm = LLM("smollm2-135m-instruct")
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

    The options are those of `octavo.config.EngineArgs`. Raises `UsageError` for an option that is wrong, `ModelError`
    for a model that cannot be loaded, `MemoryBudgetError` for one that does not fit. Not thread-safe.
    """

    def __init__(self, model: str, **options: Any) -> None:
        built = build(EngineArgs(model=str(model), **options))
        self.engine = built.engine
        self.config = built.config
        self.spec = built.spec
        self._tokenizer = built.tokenizer
        self._ids = itertools.count()
        self._mail: dict[str, RequestOutput] = {}  # the newest output of requests, for those who run them
        # Whoever forgets to close it gets the memory back with the object, and no thread outlives the interpreter.
        weakref.finalize(self, built.engine.close)

    # -- generating ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all together in one continuous batch; outputs come in the order of the prompts.

        sampling_params   one for all, or one for each; None: the defaults
        priority          one for each prompt, lower first; needs scheduling_policy="priority" to matter

        Raises a `UsageError` before anything runs if one of the prompts is not acceptable.
        """
        names = self._add(prompts, sampling_params, priority, stream=False)
        place = {name: i for i, name in enumerate(names)}
        outputs: list[RequestOutput | None] = [None] * len(names)
        with self._progress(len(names), use_tqdm) as bar, contextlib.closing(self._run(names)) as run:
            for output in run:
                outputs[place[output.request_id]] = output
                bar.update(1)
        return [output for output in outputs if output is not None]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. The prompt is what the model's chat template makes of the messages."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        tokenizer = self.get_tokenizer()
        prompts: list[Prompt] = []
        for conversation in [messages] if one else messages:
            text, token_ids = tokenizer.encode_chat(
                conversation,  # type: ignore[arg-type]
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template=chat_template,
                **(chat_template_kwargs or {}),
            )
            prompts.append({"prompt": text, "prompt_token_ids": token_ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """As `generate`, but yields a request's output so far whenever it has grown, all prompts interleaved.

        The last of a request has `finished` set. Closing the iterator aborts what still runs.
        """
        return self._run(self._add(prompts, sampling_params, None, stream=True))

    def _add(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        *,
        stream: bool,
    ) -> list[str]:
        """Queue requests, all or none; returns their ids."""
        encoded = [self._encode(p) for p in _list_of(prompts)]
        params = _one_each(sampling_params, len(encoded))
        if priority is not None and len(priority) != len(encoded):
            raise ParameterError(f"{len(priority)} priorities for {len(encoded)} prompts; give one for each")
        if priority is not None and not all(isinstance(p, int) for p in priority):
            raise ParameterError(f"priority is a list of integers, not {priority!r}", param="priority")
        names: list[str] = []
        try:
            for i, ((text, token_ids), p) in enumerate(zip(encoded, params, strict=True)):
                if p.detokenize and p.stop_strings:
                    self.get_tokenizer()  # a stop string needs one
                name = str(next(self._ids))
                self.engine.add(
                    name,
                    token_ids,
                    p,
                    prompt=text,
                    priority=0 if priority is None else priority[i],
                    make_detokenizer=self._make_detokenizer(),
                    stream=stream,
                )
                names.append(name)
        except BaseException:
            for name in names:
                self.engine.abort(name)
            raise
        return names

    def _run(self, names: list[str]) -> Generator[RequestOutput, None, None]:
        """Step the engine until these requests have finished. Whoever leaves early takes his requests along, also
        before the first output: a generator that has not begun would not notice that it is closed."""
        run = self._begun(names)
        next(run)
        return cast("Generator[RequestOutput, None, None]", run)

    def _begun(self, names: list[str]) -> Generator[RequestOutput | None, None, None]:
        mine = set(names)
        engine = self.engine
        try:
            yield None
            with engine.garbage:
                while mine:
                    with BetweenSteps():
                        self._sort(engine.step())
                    for name in [name for name in self._mail if name in mine]:
                        output = self._mail.pop(name)
                        if output.finished:
                            mine.remove(name)
                        yield output
        finally:
            if mine:
                for name in mine:
                    engine.abort(name)
                self._sort(engine.drain())
                for name in mine:
                    self._mail.pop(name, None)

    def _sort(self, outputs: list[RequestOutput]) -> None:
        """Several iterators may take turns, and each step tells of the requests of all."""
        for output in outputs:
            self._mail[output.request_id] = output

    # -- text ----------------------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ParameterError("the engine has no tokenizer (skip_tokenizer_init=True); give token ids, not text")
        return self._tokenizer

    def _encode(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        """A prompt's text, if it has one, and its tokens."""
        if isinstance(prompt, Mapping):
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            for name in prompt:
                if name not in ("prompt", "prompt_token_ids"):
                    raise UnknownOptionError.of("a prompt", str(name), ("prompt", "prompt_token_ids"))
            if token_ids is not None:
                if not isinstance(token_ids, Sequence) or isinstance(token_ids, str):
                    raise PromptError(
                        f"prompt_token_ids is a list of integers, not {type(token_ids).__name__}", param="prompt"
                    )
                return text, list(token_ids)
            prompt = text if text is not None else ""
        if isinstance(prompt, str):
            tokenizer = self.get_tokenizer()
            token_ids = tokenizer.encode(prompt)
            if not token_ids:
                raise PromptError("the prompt is empty; give it some text", param="prompt", code="empty_prompt")
            return prompt, token_ids
        if isinstance(prompt, Sequence):
            return None, list(cast("Sequence[int]", prompt))
        raise PromptError(
            f"a prompt is text, a list of token ids or a dict, not {type(prompt).__name__}", param="prompt"
        )

    def _make_detokenizer(self) -> MakeDetokenizer | None:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return None

        def make(request: Request) -> Detokenizer:
            params = request.sampling_params
            return Detokenizer(
                tokenizer,
                request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop_strings,
                include_stop=params.include_stop_str_in_output,
            )

        return make

    # -- looking, and leaving ------------------------------------------------------------------------------------------

    def kv_stats(self) -> KVStats:
        """The KV cache as it is now."""
        return self.engine.scheduler.stats()

    def stats(self) -> EngineStats:
        """What the engine has done so far."""
        return self.engine.stats

    def reset_prefix_cache(self) -> int:
        """Forget all cached blocks; returns how many there were."""
        return self.engine.scheduler.cache.reset_prefix_cache()

    def close(self) -> None:
        """Abort what runs and give the memory back. A second call does nothing."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def _progress(total: int, show: bool) -> Any:
        from tqdm import tqdm

        return tqdm(total=total, desc="Processed prompts", unit="req", disable=not show, dynamic_ncols=True)


def _list_of(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a list of integers is one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or not prompts:
        raise PromptError(f"prompts are a list of at least one, not {prompts!r}", param="prompts")
    if isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, num: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise ParameterError(f"sampling_params are SamplingParams, one or a list of them, not {params!r}")
    if len(params) != num:
        raise ParameterError(f"{len(params)} sampling_params for {num} prompts; give one for all or one for each")
    return list(params)
