"""`LLM`: the engine in one object, for use from Python."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

from octavo.config import EngineArgs
from octavo.core.kv_cache_manager import KVStats
from octavo.engine.outputs import RequestOutput, request_failed_error
from octavo.engine.process.thread import joined
from octavo.engine.sigint import DeferredSigint
from octavo.engine.stats import EngineStats
from octavo.errors import EngineError, ParameterError
from octavo.frontend.build import build
from octavo.frontend.input_processor import InputProcessor, Messages, Prompt, prompt_list
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import SamplingParams
from octavo.text.tokenizer import Tokenizer

TURN_S = 1e-4
"""How long a thread that shares an `LLM` leaves it to the others between two steps: the lock alone is not fair."""


class LLM:
    """A model behind an engine of its own.

        llm = LLM("smollm2-135m-instruct")
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

    The options are those of `octavo.config.EngineArgs`. Raises `UsageError` for an option that is wrong, `ModelError`
    for a model that cannot be loaded, `MemoryBudgetError` for one that does not fit.

    Threads may share one: their requests run in the same batch, and the threads take turns at its steps. A process that
    was forked off may not, and a listener to the engine's events may not call it: both get an `EngineError`.
    """

    def __init__(self, model: str, **options: Any) -> None:
        built = build(EngineArgs(model=str(model), **options))
        self.engine = built.engine
        self.config = built.config
        self.spec = built.spec
        self.sampling_defaults = built.sampling_defaults
        self._prompts = InputProcessor(built.tokenizer, built.engine.vocab_size, built.engine.max_model_len)
        self._ids = itertools.count()
        self._mail: dict[str, RequestOutput] = {}  # the newest output of requests, for those who run them
        self._lock = threading.RLock()  # over the engine and all of these
        self._in_step = False
        self._num_runs = 0
        self._abandoned: list[str] = []  # requests to abort before the next step
        self._process_id = os.getpid()
        # Whoever forgets to close it gets the memory back with the object, and no thread outlives the interpreter.
        weakref.finalize(self, built.engine.close)

    # -- generating ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all together in one continuous batch; outputs come in the order of the prompts.

        sampling_params   one for all, or one for each; None: `get_default_sampling_params()`
        use_tqdm          show a progress bar; or make it: called as `tqdm` is
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
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. The prompt is what the model's chat template makes of the messages.

        add_generation_prompt   open the assistant's turn
        continue_final_message  leave the final message open instead, for the model to go on with it
        tools                   what the model may call, as its template has it
        chat_template           in the place of the model's
        chat_template_kwargs    further variables of the template, such as enable_thinking

        Only the template's own markers become special tokens: one that is spelled in a message stays text. Raises
        `TemplateError` for a conversation that the template refuses, or a model without one.
        """
        several = isinstance(messages, list | tuple) and bool(messages) and isinstance(messages[0], list | tuple)
        conversations = cast("Sequence[Messages]", messages if several else [messages])
        prompts = [
            self._prompts.chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[RequestOutput]:
        """Search for the likeliest completions of prompts; the outputs of each are its n best, best first.

        Each output's `score` is what it is ranked by, and `cumulative_logprob` its log-probability. Raises a
        `UsageError` before anything runs if one of the prompts is not acceptable.
        """
        if not isinstance(params, BeamSearchParams):
            raise ParameterError(f"a beam search takes BeamSearchParams, not {type(params).__name__}", param="params")
        return self.generate(prompts, cast("SamplingParams", params), use_tqdm=use_tqdm)

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
        encoded = [self._prompts.encode(p) for p in prompt_list(prompts)]
        params = self._params_of(sampling_params, len(encoded))
        grammars = [self._prompts.compile_grammar(p) for p in params]
        if priority is not None and not (isinstance(priority, Sequence) and all(isinstance(p, int) for p in priority)):
            raise ParameterError(f"priority is a list of integers, not {priority!r}", param="priority")
        if priority is not None and len(priority) != len(encoded):
            raise ParameterError(f"{len(priority)} priorities for {len(encoded)} prompts; give one for each")
        names: list[str] = []
        with self._alone(), self.engine.gc_pause:  # the device waits for this, too
            try:
                for i, ((text, token_ids), p) in enumerate(zip(encoded, params, strict=True)):
                    name = str(next(self._ids))
                    self.engine.add_request(
                        name,
                        token_ids,
                        p,
                        prompt=text,
                        priority=0 if priority is None else priority[i],
                        grammar=grammars[i],
                        make_detokenizer=self._prompts.make_detokenizer,
                        stream=stream,
                    )
                    names.append(name)
            except BaseException:
                for name in names:
                    self.engine.abort(name)
                raise
        return names

    def _params_of(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num: int
    ) -> Sequence[SamplingParams]:
        """One for each of so many prompts, from what a caller gave."""
        if isinstance(params, BeamSearchParams):
            return [cast("SamplingParams", self._prompts.prepare_params(params))] * num
        if params is None or isinstance(params, SamplingParams):
            return [self._prompts.prepare_params(params or self.engine.default_params)] * num
        if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
            raise ParameterError(f"sampling_params are SamplingParams, one or a list of them, not {params!r}")
        if len(params) != num:
            raise ParameterError(f"{len(params)} sampling_params for {num} prompts; give one for all or one for each")
        return [self._prompts.prepare_params(p) for p in params]

    def _run(self, names: list[str]) -> Generator[RequestOutput, None, None]:
        """Step the engine until these requests have finished. Whoever leaves early takes his requests along, also
        before the first output: a generator that has not begun would not notice that it is closed."""
        run = self._begun(names)
        next(run)
        return cast("Generator[RequestOutput, None, None]", run)

    def _begun(self, names: list[str]) -> Generator[RequestOutput | None, None, None]:
        mine = set(names)
        with self._lock:
            self._num_runs += 1
        try:
            yield None
            with self.engine.gc_pause:
                while mine:
                    for output in self._step(mine):
                        if output.finished:
                            mine.remove(output.request_id)
                        yield output
        finally:
            with self._lock:
                self._num_runs -= 1
            self._leave(mine)

    def _step(self, mine: set[str]) -> list[RequestOutput]:
        """One step for all, unless another thread's has given these requests something already: their outputs."""
        if self._num_runs > 1:
            time.sleep(TURN_S)
        with DeferredSigint(), self._alone():
            if self._mail.keys().isdisjoint(mine):
                self._in_step = True
                try:
                    self._sort(self.engine.step())
                finally:
                    self._in_step = False
                    self._leave(set())
            return [self._mail.pop(name) for name in list(self._mail) if name in mine]

    def _leave(self, names: set[str]) -> None:
        """Nobody reads these any more. The garbage collector may find an iterator in the middle of a step: then its
        requests end behind that."""
        if os.getpid() != self._process_id:
            return
        with self._lock:
            self._abandoned += names
            if self._in_step or not self._abandoned:
                return
            names, self._abandoned = set(self._abandoned), []
            for name in names:
                self.engine.abort(name)
            self._sort(self.engine.drain())
            for name in names:
                self._mail.pop(name, None)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other thread touches the engine meanwhile."""
        if os.getpid() != self._process_id:
            raise EngineError(
                f"this LLM belongs to process {self._process_id} and its threads stayed there; make one in this process"
            )
        with self._lock:
            if self._in_step:
                raise EngineError("an LLM was called from within a step of its own; call it when that has returned")
            yield

    def _sort(self, outputs: list[RequestOutput]) -> None:
        """Several iterators may take turns, and each step tells of the requests of all."""
        for output in outputs:
            older = self._mail.get(output.request_id)
            self._mail[output.request_id] = joined(older, output) if older is not None and output.is_delta else output

    # -- text ----------------------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        return self._prompts.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of a request that brings none: the model's own, where its generation_config.json recommends some.

        To change one, and keep the others: `dataclasses.replace(llm.get_default_sampling_params(), max_tokens=100)`.
        """
        return self.engine.default_params

    # -- prompts that stay ---------------------------------------------------------------------------------------------

    def pin_prefix(self, prefix: Prompt | Messages, name: str | None = None) -> str:
        """Compute the beginning of prompts to come, and keep it until `unpin_prefix`, whatever else needs memory.

        prefix   text, token ids, or messages: what the chat template makes of them, with no turn opened
        name     what to call it; None: made up
        Returns the name. A prompt that begins with the same tokens begins with its blocks: also without the prefix
        cache, and also with the partly filled last one, of which it gets a copy. Raises `CapacityError` where pins
        would take more than half of the pool, or what a waiting request may come to need.
        """
        token_ids = self._prompts.encode_prefix(prefix)
        name = str(next(self._ids)) if name is None else name
        with self._alone():
            request_id = self.engine.pin(name, token_ids)
        (output,) = self._run([request_id])
        if output.outputs[0].finish_reason == "error":
            raise request_failed_error(output)
        return name

    def unpin_prefix(self, name: str) -> int:
        """Give back what was pinned under that name; how many blocks that are. Who runs with them goes on."""
        with self._alone():
            return self.engine.unpin(name)

    # -- looking, and leaving ------------------------------------------------------------------------------------------

    def kv_stats(self) -> KVStats:
        """The KV cache as it is now."""
        with self._lock:
            return self.engine.scheduler.stats()

    def stats(self) -> EngineStats:
        """What the engine has done so far."""
        return self.engine.stats

    def reset_prefix_cache(self) -> int:
        """Forget all cached blocks; returns how many there were."""
        with self._alone():
            return self.engine.scheduler.cache.reset_prefix_cache()

    def close(self) -> None:
        """Abort what runs and give the memory back. A second call does nothing."""
        if os.getpid() == self._process_id:  # else they are the other process's
            with self._alone():
                self.engine.close()
                self._prompts.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def _progress(total: int, use_tqdm: bool | Callable[..., Any]) -> Any:
        from tqdm import tqdm

        bar = use_tqdm if callable(use_tqdm) else tqdm
        return bar(total=total, desc="Processed prompts", unit="req", disable=not use_tqdm, dynamic_ncols=True)
