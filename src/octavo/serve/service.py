"""Runs parsed requests: tokenises prompts, admits the request, submits it to the engine and yields its outputs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.engine.outputs import RequestOutput
from octavo.errors import RequestFailedError, TemplateError, UsageError
from octavo.frontend.input_processor import InputProcessor
from octavo.frontend.interface import EngineInterface
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import SamplingParams
from octavo.serve.admission import Admission
from octavo.serve.args import ServeArgs
from octavo.serve.metrics import Metrics
from octavo.serve.openai.errors import ApiError, bad_request, to_api_error
from octavo.serve.openai.request import MAX_PROMPTS, ParsedRequest, RequestParser, rename_params
from octavo.serve.openai.response import ChatResponseBuilder, CompletionResponseBuilder
from octavo.serve.text_worker import TextWorkerPool
from octavo.serve.tracing import Tracing
from octavo.text.output_parser import END_THINK, THINK, OutputParser, ToolFormat, detect_tool_format, has_reasoning
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger("octavo.serve")

NUM_END_IDS = 16
"""Tokens that the end of a prompt is read from: more than "<think>" and white space behind it have."""
LONG_TEXT_CHARS = 4096
MANY_TOKENS = 1024
"""Longer texts are encoded, and more tokens decoded, in a process of their own: see `text_worker`."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as the engine takes it."""

    text: str | None
    token_ids: list[int]

    def as_prompt(self) -> dict[str, Any]:
        return {"prompt": self.text, "prompt_token_ids": self.token_ids}


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the HTTP side has to know of the engine that runs behind it. None: not known here."""

    max_num_seqs: int | None = None
    max_logprobs: int = 20
    priority_scheduling: bool = False
    device: str = "CPU"
    num_kv_tokens: int | None = None


class Service:
    """What all routes share: the engine, the text side, and who is let in."""

    def __init__(
        self,
        backend: EngineInterface,
        settings: ServeArgs,
        model: str,
        limits: EngineLimits,
        tracing: Tracing | None = None,
    ) -> None:
        self.backend = backend
        self.tracing = tracing
        self.settings = settings
        self.limits = limits
        self.names = tuple(settings.served_model_name) or (model,)
        self.tokenizer: Tokenizer = backend.get_tokenizer()
        self.prompts = InputProcessor(self.tokenizer, max_model_len=backend.max_model_len)
        self.texts = TextWorkerPool(self.tokenizer)
        self.metrics = Metrics(self.names[0], backend.max_model_len)
        self.admission = Admission(
            max_num_seqs=self.limits.max_num_seqs,
            max_num_queued_reqs=settings.max_num_queued_reqs,
            max_num_queued_tokens=settings.max_num_queued_tokens,
            on_refusal=self.metrics.rejected,
        )
        self.request_limits = settings.request_limits(limits.max_num_seqs, backend.max_model_len, limits.num_kv_tokens)
        self.started = int(time.time())
        template = self.tokenizer.chat_templates.get("tool_use") or self.tokenizer.chat_template
        self.tools: ToolFormat | None = _chosen(settings.tool_call_parser, detect_tool_format(template))
        self.thinks = _chosen(settings.reasoning_parser, "think" if has_reasoning(template) else None) is not None
        self.request_parser = RequestParser(
            model_names=self.names,
            defaults=backend.get_default_sampling_params(),
            max_logprobs=self.limits.max_logprobs,
            max_num_seqs=self.limits.max_num_seqs,
            num_ids=self.tokenizer.num_ids,
            priority_scheduling=self.limits.priority_scheduling,
            has_tools=self.tools is not None,
            strict_openai=settings.strict_openai,
            warn_unknown=settings.unknown_params == "warn",
            allow_request_templates=settings.trust_request_chat_template,
            template_kwargs=settings.default_chat_template_kwargs or {},
            max_json_whitespace=settings.max_json_whitespace,
        )
        self.fingerprint = "octavo-" + hashlib.sha256(f"{self.names[0]} {self.started}".encode()).hexdigest()[:8]

    # -- text ----------------------------------------------------------------------------------------------------------

    async def encode(self, request: ParsedRequest) -> list[TokenizedPrompt]:
        """The prompts of a completion. Raises `ApiError`, or a `UsageError` whose param is the request's."""
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
        for text in texts:
            self.prompts.check_length(text)
        ids_of_texts = iter(await self.encode_texts(texts, request.add_special_tokens))
        encoded = []
        for i, prompt in enumerate(request.prompts):
            where = "prompt" if len(request.prompts) == 1 else f"prompt[{i}]"
            if isinstance(prompt, str):
                token_ids = next(ids_of_texts)
                if not token_ids:
                    text = f"{where} is empty, and the model has no token to begin a text with; write something"
                    raise bad_request("empty_prompt", text, "prompt")
                encoded.append(self._cut(TokenizedPrompt(prompt, token_ids), request.truncate))
            else:
                self.check_ids(prompt, where)
                cut = self._cut(TokenizedPrompt(None, prompt), request.truncate)
                if request.echo and len(cut.token_ids) > MANY_TOKENS:
                    skip = getattr(request.params, "skip_special_tokens", True)
                    cut = TokenizedPrompt(await self.decode(cut.token_ids, skip), cut.token_ids)
                encoded.append(cut)
        return encoded

    def check_ids(self, token_ids: Sequence[int], where: str) -> None:
        """Raises `ApiError` for one that the model does not have."""
        if token_ids and (largest := max(token_ids)) >= self.tokenizer.num_ids:
            j = token_ids.index(largest)
            text = f"{where}[{j}] is {largest}; the model's token ids are 0 to {self.tokenizer.num_ids - 1}"
            raise bad_request("invalid_token_id", text, f"{where}[{j}]")

    async def encode_texts(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Special tokens that are spelled in them are text."""
        if sum(map(len, texts)) > LONG_TEXT_CHARS:
            return await self.texts.encode(texts, add_special_tokens)
        return [self.tokenizer.encode(text, add_special_tokens, parse_special=False) for text in texts]

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        if len(token_ids) > MANY_TOKENS:
            return await self.texts.decode(token_ids, skip_special_tokens)
        return self.tokenizer.decode(token_ids, skip_special_tokens)

    async def encode_chat(
        self, messages: list[dict[str, Any]], template: dict[str, Any], truncate: int | None = None
    ) -> TokenizedPrompt:
        self.prompts.check_length("".join(m["content"] for m in messages), "messages")
        try:
            text, token_ids = await self.texts.chat(messages, template)
        except TemplateError as error:
            if "chat_template" in template and error.code in ("template_error", "template_timeout"):
                error.code, error.param = "template_error", "chat_template"  # it is the request's own
            raise
        if not token_ids:
            raise bad_request("empty_prompt", "the chat template makes nothing of these messages", "messages")
        return self._cut(TokenizedPrompt(text, token_ids), truncate)

    async def _ready(self, params: SamplingParams | BeamSearchParams) -> SamplingParams | BeamSearchParams:
        """With bad words as tokens: the engine's client would look them up on the event loop, for each prompt."""
        words = params.bad_words if isinstance(params, SamplingParams) else None
        if not words or not isinstance(params, SamplingParams) or sum(map(len, words)) <= LONG_TEXT_CHARS:
            return params
        found = [*(params.bad_words_token_ids or ()), *map(tuple, await self.texts.word_ids(words))]
        return replace(params, bad_words=None, bad_words_token_ids=tuple(dict.fromkeys(found)))

    @staticmethod
    def _cut(prompt: TokenizedPrompt, truncate: int | None) -> TokenizedPrompt:
        """The last tokens of it."""
        if truncate is None or len(prompt.token_ids) <= truncate:
            return prompt
        return TokenizedPrompt(None, prompt.token_ids[-truncate:])

    # -- running -------------------------------------------------------------------------------------------------------

    async def run(
        self,
        request: ParsedRequest,
        prompts: Sequence[TokenizedPrompt],
        name: str,
        salt: bytes = b"",
        trace: Mapping[str, str] | None = None,
        tenant: int = 0,
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The outputs of every prompt, as (prompt, output); those that are deltas tell what is new. `trace`: the
        headers that say which trace of the caller's it belongs to. `tenant`: the number of the key that it came with.

        Closing it aborts what runs. Raises `ApiError`, or an `OctavoError` whose answer `problems.to_api_error` knows.
        """
        arrival = time.monotonic()
        width = request.params.width if isinstance(request.params, SamplingParams) else request.params.beam_width
        lengths = [len(p.token_ids) for p in prompts]
        params = self.request_limits.fit(request.params, lengths)
        salt = combine_salts(salt, request.salt)
        names = [name if len(prompts) == 1 else f"{name}-{i}" for i in range(len(prompts))]
        params = await self._ready(params)
        watches = [self.metrics.watch(request.params, len(p.token_ids), arrival) for p in prompts]
        with self.admission.admit(width * len(prompts), sum(lengths), tenant) as ticket:
            runs = [
                self.backend.generate(
                    p.as_prompt(), params, n, priority=request.priority, salt=salt, tenant=tenant, rank=rank
                )
                for rank, (p, n) in enumerate(zip(prompts, names, strict=True))
            ]
            reason = "abort"
            try:
                async with contextlib.aclosing(merge_outputs(runs, self._num_together(width))) as outputs:
                    first = await self._in_turn(outputs, names[0])
                    self.admission.start(ticket)
                    if first is not None:
                        watches[first[0]].take(first[1])
                        yield first
                    async for i, output in outputs:
                        watches[i].take(output)
                        yield i, output
                reason = "stop"
            except UsageError as error:
                reason = "refused"
                if request.messages and error.param == "prompt":
                    error.param = "messages"
                raise _blamed(to_api_error(error, name), request) from None
            except RequestFailedError as error:
                reason = "error"
                if error.code != "grammar_too_complex":
                    raise
                raise _blamed(to_api_error(error, name), request) from None
            except Exception:
                reason = "error"
                raise
            finally:
                for watch, n in zip(watches, names, strict=True):
                    ended = watch.close(reason)
                    if ended is not None and self.tracing is not None:
                        self.tracing.tell(n, request.params, ended, trace or {})

    def _num_together(self, width: int) -> int:
        """Prompts of one request that the engine has at a time: an eighth of the rows stays free for others."""
        num_rows = self.limits.max_num_seqs
        return MAX_PROMPTS if num_rows is None else max(1, (num_rows - num_rows // 8) // width)

    async def _in_turn(
        self, outputs: AsyncGenerator[tuple[int, RequestOutput], None], name: str
    ) -> tuple[int, RequestOutput] | None:
        """The first output. A request that has not begun to run in `queue_timeout` seconds is given up: 503."""
        first = asyncio.ensure_future(anext(outputs, None))
        try:
            while not (await asyncio.wait({first}, timeout=self.settings.queue_timeout or None))[0]:
                state = await self.backend.debug_request(name)
                if state is not None and state["status"] == "waiting":
                    text = f"the request has waited {self.settings.queue_timeout:g} s for its turn; try again later"
                    raise ApiError(503, "queue_timeout", text, retry_after_s=self.admission.retry_after_s())
            return await first
        finally:
            if not first.done():
                first.cancel()
                with contextlib.suppress(BaseException):
                    await first

    # -- answers -------------------------------------------------------------------------------------------------------

    def completion_response(self, request: ParsedRequest, name: str) -> CompletionResponseBuilder:
        return CompletionResponseBuilder(request, name, self.tokenizer, self.fingerprint)

    def chat_response(self, request: ParsedRequest, name: str, prompt: TokenizedPrompt) -> ChatResponseBuilder:
        """`prompt` is the rendered conversation: it may have opened the model's reasoning."""
        # One that was cut has no text, but still its end.
        text = prompt.text or self.tokenizer.decode(prompt.token_ids[-NUM_END_IDS:], skip_special_tokens=False)
        # And a form is kept from the first word on, before any reasoning that it does not itself let end.
        form = request.params.structured_outputs
        in_think = text.rstrip().endswith(THINK) and (form is None or END_THINK in repr(form))
        names = [tool["function"]["name"] for tool in request.tools]

        def make_parser() -> OutputParser:
            if request.required_tool is not None:  # the answer is the call, whatever the model's own way to write it
                return OutputParser(tools="llama3_json", tool_names=names)
            tools = self.tools if request.tools else None
            return OutputParser(reasoning=self.thinks, starts_in_reasoning=in_think, tools=tools, tool_names=names)

        return ChatResponseBuilder(
            request,
            name,
            self.tokenizer,
            self.fingerprint,
            make_parser=make_parser,
            reasons=self.thinks,
            new_call_id=lambda: f"call_{secrets.token_hex(12)}",
        )


def _blamed(problem: ApiError, request: ParsedRequest) -> ApiError:
    """With the names that the request has for what is wrong."""
    if request.required_tool and problem.param == "structured_outputs":  # made of their schemas
        problem.param = "tools"
    return rename_params(problem, request.param_aliases)


def combine_salts(tenant: bytes, own: bytes = b"") -> bytes:
    """Of requests that may share blocks: those of one tenant who say the same, or nothing."""
    return tenant + b"\0" + own if tenant or own else b""


async def merge_outputs(
    runs: Sequence[AsyncGenerator[RequestOutput, None]], num_together: int
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of several runs as they come, each with the number of its run; so many run at a time. What one raises
    ends them all."""
    if len(runs) == 1:
        async with contextlib.aclosing(runs[0]) as run:
            async for output in run:
                yield 0, output
        return
    places = asyncio.Semaphore(num_together)
    arrived: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(maxsize=len(runs))

    async def pump(i: int, run: AsyncGenerator[RequestOutput, None]) -> None:
        last: Exception | None = None
        try:
            async with places, contextlib.aclosing(run):
                async for output in run:
                    await arrived.put((i, output))
        except Exception as error:
            last = error
        await arrived.put((i, last))

    pumps: list[asyncio.Future[None]] = []
    num_left = len(runs)
    try:
        for i, run in enumerate(runs):
            pumps.append(asyncio.ensure_future(pump(i, run)))
            await asyncio.sleep(0)  # a run begins with work that its prompt's length decides
        while num_left:
            i, item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_left -= 1
            else:
                yield i, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def _chosen(choice: str, found: Any) -> Any:
    return found if choice == "auto" else None if choice == "none" else choice
