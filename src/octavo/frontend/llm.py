"""`LLM`: a model and its engine in one object, for offline use from Python."""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import fields
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from octavo.config import EngineArgs
from octavo.core.cache.kv_stats import KVStats
from octavo.engine.engine_request import EngineRequest, pin_id, unknown_pin_error
from octavo.engine.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    RequestOutput,
    request_failed_error,
)
from octavo.engine.process.thread import Delivery, EngineThread
from octavo.engine.query import GetKVStats, GetStats, Query, ResetPrefixCache, Unpin
from octavo.engine.stats import EngineStats
from octavo.errors import EngineError, ParameterError
from octavo.frontend.build import build
from octavo.frontend.client_request import ClientRequest
from octavo.frontend.input_processor import InputProcessor, Messages, Prompt, prompt_list
from octavo.frontend.metrics import Metric, metrics_of
from octavo.notebook import message_html, picture_pool, pool_html
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import SamplingParams
from octavo.params.vllm_arguments import check_call
from octavo.text.script_tokenizer import ScriptTokenizer

P = ParamSpec("P")
R = TypeVar("R")


def _takes(function: Callable[P, object]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Gives a method the arguments of `function` for type checkers, and changes nothing."""
    return lambda method: method


class LLM:
    """A model and its engine, which runs on a thread of its own.

        llm = LLM("smollm2-135m-instruct")
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

    The options are the fields of `octavo.config.EngineArgs`, and vLLM's others where their value asks for what there is
    (docs/vllm.md). Raises `UsageError` for an invalid option, `ModelError` for a model that cannot be loaded,
    `MemoryBudgetError` for one that does not fit.

    A notebook shows an object as its pool, a square for each block (examples/notebook_pool.py).

    Threads may share an object: their requests run in one batch. A forked process may not use it, and a listener to the
    engine's events may not call it; both get an `EngineError`.
    """

    @_takes(EngineArgs)
    def __init__(self, model: str, **options: Any) -> None:
        built = build(EngineArgs(model=str(model), **options))
        self.engine = built.engine
        self.config = built.config
        self.spec = built.spec
        self.sampling_defaults = built.sampling_defaults
        limits = built.engine.limits
        self.input_processor = InputProcessor(built.tokenizer, limits.vocab_size, limits.max_model_len)
        self._ids = itertools.count()
        self.thread = EngineThread(built.engine)
        self._process_id = os.getpid()
        # Frees the memory of an object that was never closed, and ends its threads before the interpreter does.
        weakref.finalize(self, _close_thread, self.thread, self._process_id)

    # -- generating ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete prompts in one continuous batch; returns outputs in the order of the prompts.

        sampling_params   one for all prompts, or one per prompt; None: `get_default_sampling_params()`
        use_tqdm          show a progress bar; a callable replaces `tqdm`
        priority          one per prompt, lower first; needs scheduling_policy="priority"
        others            vLLM's further arguments, where their value asks for what there is

        Raises `UsageError` before anything runs if a prompt or parameter is invalid.
        """
        check_call("generate", others)
        requests = self._requests(prompts, sampling_params, priority)
        place = {request.request_id: i for i, request in enumerate(requests)}
        outputs: list[RequestOutput | None] = [None] * len(requests)
        with self._progress(len(requests), use_tqdm) as bar, contextlib.closing(self._run(requests)) as run:
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
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete one conversation or several; the model's chat template renders each to a prompt.

        add_generation_prompt   start the assistant's turn
        continue_final_message  leave the last message open for the model to continue
        tools                   tools that the model may call, in the template's format
        chat_template           replaces the model's
        chat_template_kwargs    further template variables, such as enable_thinking

        Only the template's own markers become special tokens; one spelled in a message stays text. Raises
        `TemplateError` if the template rejects the conversation, or the model has none.
        """
        check_call("chat", others)
        several = isinstance(messages, list | tuple) and bool(messages) and isinstance(messages[0], list | tuple)
        conversations = cast("Sequence[Messages]", messages if several else [messages])
        prompts = [
            self.input_processor.chat(
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
        concurrency_limit: int | None = None,
        **others: Any,
    ) -> list[BeamSearchOutput]:
        """Beam search; the `sequences` and `outputs` of each prompt are its n best, best first.

        concurrency_limit  prompts that are searched at once; None: all

        A sequence begins with the prompt. An output has its ranking `score` and its `cumulative_logprob`. Raises
        `UsageError` before anything runs if a prompt or parameter is invalid.
        """
        check_call("beam_search", others)
        if not isinstance(params, BeamSearchParams):
            raise ParameterError(f"beam_search needs BeamSearchParams, not {type(params).__name__}", param="params")
        if concurrency_limit is not None and (not isinstance(concurrency_limit, int) or concurrency_limit < 1):
            text = f"concurrency_limit is {concurrency_limit!r}, it must be at least 1"
            raise ParameterError(text, param="concurrency_limit")
        listed = prompt_list(prompts)
        for prompt in listed if concurrency_limit is not None else ():
            self.input_processor.encode(prompt)  # raises before anything runs
        found: list[RequestOutput] = []
        size = concurrency_limit or len(listed)
        for start in range(0, len(listed), size):
            found += self.generate(listed[start : start + size], cast("SamplingParams", params), use_tqdm=use_tqdm)
        return [self._with_sequences(output) for output in found]

    def _with_sequences(self, output: RequestOutput) -> BeamSearchOutput:
        sequences, has_text = [], not self.config.args.skip_tokenizer_init
        for hypothesis in output.outputs:
            tokens = [*output.prompt_token_ids, *hypothesis.token_ids]
            sequences.append(
                BeamSearchSequence(
                    tokens,
                    self.input_processor.tokenizer.decode(tokens, skip_special_tokens=False) if has_text else None,
                    hypothesis.cumulative_logprob or 0.0,
                    hypothesis.logprobs,
                    hypothesis.finish_reason,
                    hypothesis.stop_reason,
                )
            )
        return BeamSearchOutput(**{f.name: getattr(output, f.name) for f in fields(RequestOutput)}, sequences=sequences)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """As `generate`, but yield a request's output so far whenever it has grown, all prompts interleaved.

        The last output of a request has `finished` set. Closing the iterator aborts unfinished requests.
        """
        return self._run(self._requests(prompts, sampling_params, stream=True))

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None = None,
        *,
        stream: bool = False,
    ) -> list[EngineRequest]:
        """The requests of a call. Raises `UsageError` if one is invalid."""
        encoded = [self.input_processor.encode(p) for p in prompt_list(prompts)]
        params = self._params_of(sampling_params, len(encoded))
        grammars = [self.input_processor.compile_grammar(p) for p in params]
        if priority is not None and not (isinstance(priority, Sequence) and all(isinstance(p, int) for p in priority)):
            raise ParameterError(f"priority must be a list of integers, not {priority!r}", param="priority")
        if priority is not None and len(priority) != len(encoded):
            raise ParameterError(f"{len(priority)} priorities for {len(encoded)} prompts; pass one per prompt")
        return [
            EngineRequest(
                str(next(self._ids)),
                token_ids,
                params[i],
                prompt=text,
                priority=0 if priority is None else priority[i],
                grammar=grammars[i],
                make_detokenizer=self.input_processor.make_detokenizer,
                stream=stream,
                cut_max_tokens=True,
            )
            for i, (text, token_ids) in enumerate(encoded)
        ]

    def _params_of(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num: int
    ) -> Sequence[SamplingParams]:
        """One per prompt, from what the caller passed."""
        if isinstance(params, BeamSearchParams):
            return [cast("SamplingParams", self.input_processor.prepare_params(params))] * num
        if params is None or isinstance(params, SamplingParams):
            return [self.input_processor.prepare_params(params or self.engine.default_params)] * num
        if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
            raise ParameterError(f"sampling_params must be SamplingParams, one or a list of them, not {params!r}")
        if len(params) != num:
            raise ParameterError(f"{len(params)} sampling_params for {num} prompts; pass one for all or one per prompt")
        return [self.input_processor.prepare_params(p) for p in params]

    def _run(self, requests: list[EngineRequest]) -> Generator[RequestOutput, None, None]:
        """Queue all requests, or none if one is invalid, and yield their outputs.

        Closing the generator aborts unfinished requests, also before its first output: it is started here because an
        unstarted generator would not notice `close`.
        """
        thread = self._own_thread()
        inbox: SimpleQueue[list[Delivery]] = SimpleQueue()
        eos_token_ids = self.engine.limits.eos_token_ids
        unfinished = {new.request_id: ClientRequest(new, eos_token_ids=eos_token_ids) for new in requests}
        added = thread.add(requests, inbox.put)
        try:
            added.result()
        except BaseException:  # also Ctrl-C
            thread.discard(requests)
            raise
        run = self._outputs(thread, unfinished, inbox)
        next(run)
        return cast("Generator[RequestOutput, None, None]", run)

    def _outputs(
        self, thread: EngineThread, unfinished: dict[str, ClientRequest], inbox: SimpleQueue[list[Delivery]]
    ) -> Generator[RequestOutput | None, None, None]:
        try:
            yield None
            while unfinished:
                for request in self._receive(thread, unfinished, inbox):
                    if request.finished:
                        del unfinished[request.request_id]
                    if request.finished or request.new.stream:
                        yield request.output()
        finally:
            if os.getpid() == self._process_id:
                thread.discard([request.new for request in unfinished.values()])

    @staticmethod
    def _receive(
        thread: EngineThread, unfinished: Mapping[str, ClientRequest], inbox: SimpleQueue[list[Delivery]]
    ) -> list[ClientRequest]:
        """Wait for news, and apply all there are. Returns the requests that have changed."""
        changed = {}
        deliveries = inbox.get()
        while True:
            for new, update in deliveries:
                if isinstance(update, EngineError):
                    raise update
                if (request := unfinished.get(new.request_id)) is not None:  # it may have ended on this side
                    for index in request.apply_update(update):
                        thread.stop(new, index)
                    changed[new.request_id] = request
            if inbox.empty():
                return list(changed.values())
            deliveries = inbox.get()

    def _own_thread(self) -> EngineThread:
        """The engine's thread, for calls of this process."""
        if os.getpid() != self._process_id:
            raise EngineError(
                f"this LLM belongs to process {self._process_id}, where its threads run; create one in this process"
            )
        return self.thread

    def _ask(self, query: Query[R]) -> R:
        return self._own_thread().call(query.answer).result()

    # -- text ----------------------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> ScriptTokenizer:
        """The tokenizer, with the names and defaults of Transformers'."""
        return ScriptTokenizer(self.input_processor.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling parameters of requests without any: the recommendations of the model's generation_config.json.

        The object is a copy, which can be changed and passed to `generate`.
        """
        return self.engine.default_params.clone()

    # -- pinned prefixes -----------------------------------------------------------------------------------------------

    def pin_prefix(self, prefix: Prompt | Messages, name: str | None = None) -> str:
        """Compute a prefix and pin its blocks until `unpin_prefix`, whatever else needs memory.

        prefix   text, token ids, or messages, which the chat template renders without a generation prompt
        name     None: a generated one

        Returns the name. A prompt that begins with the same tokens shares the blocks, even without the prefix cache; it
        gets a copy of a partly filled last block. Raises `CapacityError` if pins would take more than half of the pool,
        or blocks that a waiting request may need.
        """
        token_ids = self.input_processor.encode_prefix(prefix)
        name = str(next(self._ids)) if name is None else name
        (output,) = self._run([EngineRequest.pinning(name, token_ids)])
        if output.outputs[0].finish_reason == "error":
            raise request_failed_error(output)
        return name

    def unpin_prefix(self, name: str) -> int:
        """Unpin a prefix and return its number of blocks; requests that share them continue."""
        if (num_blocks := self._ask(Unpin(pin_id(name)))) is None:
            raise unknown_pin_error(name)
        return num_blocks

    # -- state, and shutdown -------------------------------------------------------------------------------------------

    def kv_stats(self) -> KVStats:
        """The state of the KV cache."""
        return self._ask(GetKVStats())

    def stats(self) -> EngineStats:
        """Counters of the engine."""
        return self.engine.stats

    def get_metrics(self) -> list[Metric]:
        """The engine's counters and gauges, with vLLM's names."""
        return metrics_of(self.config.args.model, self._ask(GetStats()))

    def reset_prefix_cache(self) -> int:
        """Empty the prefix cache; returns the number of cached blocks."""
        return self._ask(ResetPrefixCache())

    def _repr_html_(self) -> str:
        """For notebooks: the pool's blocks, and who holds them."""
        try:
            return pool_html(self.config.args.model, self._own_thread().call(picture_pool).result())
        except EngineError as error:  # closed, or died
            return message_html(self.config.args.model, str(error))

    def close(self) -> None:
        """Abort all requests and free the memory. A second call does nothing."""
        if os.getpid() == self._process_id:  # a forked process owns nothing of it
            self.thread.check_caller()
            self.thread.close()
            self.input_processor.close()

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


def _close_thread(thread: EngineThread, process_id: int) -> None:
    if os.getpid() == process_id:  # a forked process owns nothing of it
        thread.close()
