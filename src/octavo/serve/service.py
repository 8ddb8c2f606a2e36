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
from functools import cached_property
from typing import Any

from octavo.engine.outputs import RequestOutput
from octavo.errors import ParameterError, RequestFailedError, TemplateError, UsageError
from octavo.frontend.engine_client import EngineClient
from octavo.frontend.input_processor import InputProcessor
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import SamplingParams
from octavo.serve.admission import Admission, Ticket
from octavo.serve.args import ServeArgs
from octavo.serve.metrics import Metrics
from octavo.serve.openai.errors import ApiError, bad_request, to_api_error
from octavo.serve.openai.request import MAX_PROMPTS, ParsedRequest, RequestParser, rename_params
from octavo.serve.openai.response import ChatResponseBuilder, CompletionResponseBuilder
from octavo.serve.tenants import DEFAULT_TENANT, Tenant
from octavo.serve.text_worker import TextWorkerPool
from octavo.serve.tracing import Tracing
from octavo.text.formats.gemma_calls import END_CHANNEL, THOUGHT_HEADER, GemmaParser
from octavo.text.formats.harmony import CHANNEL, FINAL_HEADER, START, HarmonyParser, harmony_messages
from octavo.text.formats.markers import MarkerParser
from octavo.text.formats.xml_calls import XmlCallParser
from octavo.text.output_parser import (
    END_THINK,
    THINK,
    OutputParser,
    ReasoningFormat,
    ToolFormat,
    detect_reasoning_format,
    detect_tool_format,
    no_tools_reason,
)
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger("octavo.serve")

PROMPT_SUFFIX_TOKENS = 16
"""Tokens decoded from the end of a prompt: more than "<think>" and the white space after it."""
LONG_TEXT_CHARS = 4096
MANY_TOKENS = 1024
"""Longer texts are encoded, and more tokens decoded, in separate processes: see `text_worker`."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt's token ids, and its text if known."""

    text: str | None
    token_ids: list[int]

    def as_prompt(self) -> dict[str, Any]:
        return {"prompt": self.text, "prompt_token_ids": self.token_ids}


Prompts = Sequence[TokenizedPrompt]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits and properties of the engine that the HTTP server needs. None: not known here."""

    max_num_seqs: int | None = None
    max_logprobs: int = 20
    priority_scheduling: bool = False
    device: str = "CPU"
    num_kv_tokens: int | None = None


class Service:
    """The state that all routes share: the engine's client, the tokenizer, admission and metrics."""

    def __init__(
        self,
        backend: EngineClient[Any],
        settings: ServeArgs,
        model: str,
        limits: EngineLimits,
        tracing: Tracing | None = None,
    ) -> None:
        self.backend = backend
        self.tracing = tracing
        self.settings = settings
        self.limits = limits
        self.model_names = tuple(settings.served_model_name) or (model,)
        self.tokenizer: Tokenizer = backend.get_tokenizer()
        self.prompts = InputProcessor(self.tokenizer, max_model_len=backend.max_model_len)
        self.text_workers = TextWorkerPool(self.tokenizer)
        self.metrics = Metrics(self.model_names[0], backend.max_model_len)
        if backend.transport.router is not None:
            self.metrics.add_router(backend.transport.router)
        self.admission = Admission(
            max_num_seqs=self.limits.max_num_seqs,
            max_num_queued_reqs=settings.max_num_queued_reqs,
            max_num_queued_tokens=settings.max_num_queued_tokens,
            on_refusal=self.metrics.count_rejection,
        )
        self.request_limits = settings.request_limits(limits.max_num_seqs, backend.max_model_len, limits.num_kv_tokens)
        self.started = int(time.time())
        template = self.tokenizer.chat_templates.get("tool_use") or self.tokenizer.chat_template
        self.tool_format: ToolFormat | None = _resolve(settings.tool_call_parser, detect_tool_format(template))
        reasoning: ReasoningFormat | None = _resolve(settings.reasoning_parser, detect_reasoning_format(template))
        self.has_reasoning = reasoning is not None
        markers = _format_of_markers(self.tool_format, reasoning)
        self.is_harmony, self.is_gemma = markers == "openai", markers == "gemma4"
        self.request_parser = RequestParser(
            model_names=self.model_names,
            defaults=backend.get_default_sampling_params(),
            max_logprobs=self.limits.max_logprobs,
            max_num_seqs=self.limits.max_num_seqs,
            num_ids=self.tokenizer.num_ids,
            priority_scheduling=self.limits.priority_scheduling,
            has_tools=self.tool_format is not None,
            reads_specials=markers is not None,
            no_tools_reason=no_tools_reason(template),
            strict_openai=settings.strict_openai,
            warn_unknown=settings.unknown_params == "warn",
            allow_request_templates=settings.trust_request_chat_template,
            template_kwargs=settings.default_chat_template_kwargs or {},
            max_json_whitespace=settings.max_json_whitespace,
            tokens_as_ids=settings.return_tokens_as_token_ids,
            force_usage=settings.enable_force_include_usage,
        )
        self.fingerprint = "octavo-" + hashlib.sha256(f"{self.model_names[0]} {self.started}".encode()).hexdigest()[:8]

    # -- text ----------------------------------------------------------------------------------------------------------

    async def encode(self, request: ParsedRequest, tenant: int = 0) -> list[TokenizedPrompt]:
        """Tokenises the prompts of a completion. Raises `ApiError`, or a `UsageError` with the request's param."""
        for prompt in request.prompts:
            self._check_length(prompt, request)
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
        ids_of_texts = iter(await self.encode_texts(texts, request.add_special_tokens, tenant))
        encoded = []
        for i, prompt in enumerate(request.prompts):
            path = "prompt" if len(request.prompts) == 1 else f"prompt[{i}]"
            if isinstance(prompt, str):
                token_ids = next(ids_of_texts)
                if not token_ids:
                    text = f"{path} is empty, and the model has no begin-of-text token; send a non-empty prompt"
                    raise bad_request("empty_prompt", text, "prompt")
            else:
                self.check_ids(prompt, path)
                token_ids = prompt
            given = prompt if isinstance(prompt, str) else None
            truncated = self._truncated(TokenizedPrompt(given, token_ids), request)
            if request.echo and truncated.text is None:  # of token ids, special ones are shown as well
                shown = await self.decode(truncated.token_ids, given is not None, tenant)
                truncated = TokenizedPrompt(shown, truncated.token_ids)
            encoded.append(truncated)
        return encoded

    def _check_length(self, prompt: str | Sequence[int], request: ParsedRequest, param: str = "prompt") -> None:
        """Raises `ContextLengthError` for a prompt that is too long, before it is walked."""
        if request.truncate is None:
            self.prompts.check_length(prompt, param)

    def check_ids(self, token_ids: Sequence[int], path: str) -> None:
        """Raises `ApiError` for a token id outside the vocabulary, or a text. `path`: its place in the request."""
        try:
            largest = max(token_ids, default=0)
        except TypeError:
            raise bad_request("invalid_type", f"{path} must have items of one type", path) from None
        if largest >= self.tokenizer.num_ids:
            j = token_ids.index(largest)
            text = f"{path}[{j}] is {largest}; the model's token ids are 0 to {self.tokenizer.num_ids - 1}"
            raise bad_request("invalid_token_id", text, f"{path}[{j}]")

    async def encode_texts(
        self, texts: Sequence[str], add_special_tokens: bool = True, tenant: int = 0
    ) -> list[list[int]]:
        """Token ids of texts. The spelling of a special token is encoded as text."""
        if sum(map(len, texts)) > LONG_TEXT_CHARS:
            return await self.text_workers.encode(texts, add_special_tokens, tenant)
        return [self.tokenizer.encode(text, add_special_tokens, parse_special=False) for text in texts]

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool, tenant: int = 0) -> str:
        if len(token_ids) > MANY_TOKENS:
            return await self.text_workers.decode(token_ids, skip_special_tokens, tenant)
        return self.tokenizer.decode(token_ids, skip_special_tokens)

    async def encode_chat(self, request: ParsedRequest, tenant: int = 0) -> TokenizedPrompt:
        """Renders and tokenises the conversation of a chat, as `encode` does the prompts of a completion."""
        self._check_length("".join(m["content"] for m in request.messages), request, "messages")
        prompt = await self.render(request.messages, request.template, tenant)
        constrained = self.is_harmony and _is_constrained(request, CHANNEL)
        if constrained and prompt.text is not None and prompt.text.rpartition(START)[2] == "assistant":
            header = self.tokenizer.encode(FINAL_HEADER, add_special_tokens=False)
            prompt = TokenizedPrompt(prompt.text + FINAL_HEADER, prompt.token_ids + header)
        return self._truncated(prompt, request)

    async def render(
        self, messages: list[dict[str, Any]], template: dict[str, Any], tenant: int = 0
    ) -> TokenizedPrompt:
        messages = harmony_messages(messages) if self.is_harmony else messages
        try:
            text, token_ids = await self.text_workers.chat(messages, template, tenant)
        except TemplateError as error:
            if "chat_template" in template and error.code in ("template_error", "template_timeout"):
                error.code, error.param = "template_error", "chat_template"  # the request's own template
            raise
        if not token_ids:
            raise bad_request("empty_prompt", "the chat template renders these messages as empty", "messages")
        return TokenizedPrompt(text, token_ids)

    async def _with_bad_word_ids(
        self, params: SamplingParams | BeamSearchParams, tenant: int
    ) -> SamplingParams | BeamSearchParams:
        """Tokenises long bad_words in a text worker; the engine's client would do so on the event loop, per prompt."""
        words = params.bad_words if isinstance(params, SamplingParams) else None
        if not words or not isinstance(params, SamplingParams) or sum(map(len, words)) <= LONG_TEXT_CHARS:
            return params
        token_ids = [*(params.bad_words_token_ids or ()), *map(tuple, await self.text_workers.word_ids(words, tenant))]
        return replace(params, bad_words=None, bad_words_token_ids=tuple(dict.fromkeys(token_ids)))

    def _truncated(self, prompt: TokenizedPrompt, request: ParsedRequest) -> TokenizedPrompt:
        """The prompt's first or last tokens, by the request's `truncate`."""
        num, ids = request.truncate, prompt.token_ids
        if num == -1:
            num = max(1, self.backend.max_model_len - max(1, request.params.max_tokens or 0))
        if num is None or len(ids) <= num:
            return prompt
        return TokenizedPrompt(None, ids[-num:] if request.truncation_side == "left" else ids[:num])

    # -- generation ----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        request: ParsedRequest,
        prompts: Prompts,
        name: str,
        tenant: Tenant = DEFAULT_TENANT,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Runs a request's prompts; yields (prompt index, output).

        `trace_headers`: the caller's trace context. Closing the generator aborts the request. Raises `ApiError`, or an
        `OctavoError` that `errors.to_api_error` maps to one.
        """
        arrival = time.monotonic()
        width = request.params.width if isinstance(request.params, SamplingParams) else request.params.beam_width
        lengths = [len(p.token_ids) for p in prompts]
        try:
            params = self.request_limits.fit(request.params, lengths)
        except ApiError as api_error:
            raise _with_request_params(api_error, request) from None
        salt = combine_salts(tenant.salt, request.cache_salt)
        names = [name if len(prompts) == 1 else f"{name}-{i}" for i in range(len(prompts))]
        params = await self._with_bad_word_ids(params, tenant.number)
        trackers = [self.metrics.track(request.params, len(p.token_ids), arrival) for p in prompts]
        with self.admission.admit(width * len(prompts), sum(lengths), tenant.number) as ticket:
            generators = [
                self.backend.generate(
                    p.as_prompt(), params, n, priority=request.priority, salt=salt, tenant=tenant.number, rank=rank
                )
                for rank, (p, n) in enumerate(zip(prompts, names, strict=True))
            ]
            reason = "abort"
            try:
                async with contextlib.aclosing(merge_outputs(generators, self._max_concurrent(width))) as outputs:
                    item = await self._first_output(outputs, names[0], ticket)
                    waiting = set(range(len(prompts)))  # prompts without an output
                    while item is not None:
                        self.admission.check(ticket)
                        i, output = item
                        if i in waiting:
                            waiting.remove(i)
                            if not waiting:
                                self.admission.start(ticket)
                        trackers[i].record(output)
                        yield item
                        item = await anext(outputs, None)
                reason = "stop"
            except UsageError as error:
                reason = "refused"
                raise _with_request_params(to_api_error(error, name), request) from None
            except RequestFailedError as error:
                reason = "error"
                if error.code not in ("grammar_too_complex", "no_allowed_token"):
                    raise
                raise _with_request_params(to_api_error(error, name), request) from None
            except Exception:
                reason = "error"
                raise
            finally:
                for tracker, n in zip(trackers, names, strict=True):
                    finished = tracker.close(reason)
                    if finished is not None and self.tracing is not None:
                        self.tracing.export(n, request.params, finished, trace_headers or {})

    def _max_concurrent(self, width: int) -> int:
        """Prompts of one request that run at a time: an eighth of the batch rows stays free for other requests."""
        num_rows = self.limits.max_num_seqs
        return MAX_PROMPTS if num_rows is None else max(1, (num_rows - num_rows // 8) // width)

    async def _first_output(
        self, outputs: AsyncGenerator[tuple[int, RequestOutput], None], name: str, ticket: Ticket
    ) -> tuple[int, RequestOutput] | None:
        """Waits for the first output.

        Raises `ApiError`: 503 if the request still waits after `queue_timeout`, 429 if it is dropped from the queue.
        """
        first = asyncio.ensure_future(anext(outputs, None))
        ticket.on_drop = first.cancel
        try:
            while not (await asyncio.wait({first}, timeout=self.settings.queue_timeout or None))[0]:
                state = await self.backend.debug_request(name)
                if state is not None and state["status"] == "waiting":
                    text = f"the request has waited {self.settings.queue_timeout:g} s in the queue; try again later"
                    raise ApiError(503, "queue_timeout", text, retry_after_s=self.admission.retry_after_s())
            self.admission.check(ticket)
            return await first
        finally:
            if not first.done():
                first.cancel()
                with contextlib.suppress(BaseException):
                    await first

    # -- responses -----------------------------------------------------------------------------------------------------
    @cached_property
    def _special_texts(self) -> frozenset[str]:
        tokens = self.tokenizer.backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in tokens if token.special)

    def completion_response(self, request: ParsedRequest, name: str) -> CompletionResponseBuilder:
        return CompletionResponseBuilder(request, name, self.tokenizer, self.fingerprint)

    def chat_response(self, request: ParsedRequest, name: str, prompt: TokenizedPrompt) -> ChatResponseBuilder:
        """The response builder of a chat. The rendered `prompt` may end with an open reasoning block."""
        # A truncated prompt has no text; its last tokens are enough.
        text = prompt.text or self.tokenizer.decode(prompt.token_ids[-PROMPT_SUFFIX_TOKENS:], skip_special_tokens=False)
        begin, end = (THOUGHT_HEADER.rstrip(), END_CHANNEL) if self.is_gemma else (THINK, END_THINK)
        starts_in_reasoning = text.rstrip().endswith(begin) and not _is_constrained(request, end)
        names = [tool["function"]["name"] for tool in request.tools]
        reasoning: dict[str, Any] = {"reasoning": self.has_reasoning, "starts_in_reasoning": starts_in_reasoning}

        def make_parser() -> OutputParser | MarkerParser:
            if request.required_tool is not None:  # the grammar makes the output a JSON call
                return OutputParser(tools="llama3_json", tool_names=names)
            skipped = self._special_texts if request.skip_special_tokens else ()
            if self.is_gemma:
                return GemmaParser(tools=bool(self.tool_format and request.tools), skipped=skipped, **reasoning)
            if self.is_harmony:
                tools = names if request.tools else None
                return HarmonyParser(text, reasoning=self.has_reasoning, tool_names=tools, skipped=skipped)
            if self.tool_format == "qwen3_coder" and request.tools:
                return XmlCallParser(tools=request.tools, **reasoning)
            return OutputParser(tools=self.tool_format if request.tools else None, tool_names=names, **reasoning)

        return ChatResponseBuilder(
            request,
            name,
            self.tokenizer,
            self.fingerprint,
            make_parser=make_parser,
            has_reasoning=self.has_reasoning,
            new_call_id=lambda: f"call_{secrets.token_hex(12)}",
        )


def _is_constrained(request: ParsedRequest, marker: str) -> bool:
    """True if a grammar constrains the output from its first token, and does not spell this marker of reasoning."""
    grammar = request.params.structured_outputs
    return grammar is not None and marker not in repr(grammar)


def _format_of_markers(tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> ToolFormat | None:
    """The format whose markers are special tokens. Raises `ParameterError` if only one of the two formats has it."""
    pairs: dict[ToolFormat, ReasoningFormat] = {"openai": "openai_gptoss", "gemma4": "gemma4"}
    for calls, thoughts in pairs.items():
        if tools and reasoning and (tools == calls) != (reasoning == thoughts):
            text = f"tool_call_parser is {tools}, reasoning_parser {reasoning}; use {calls} with {thoughts}, or none"
            raise ParameterError(text, param="tool_call_parser")
        if tools == calls or reasoning == thoughts:
            return calls
    return None


def _with_request_params(api_error: ApiError, request: ParsedRequest) -> ApiError:
    """The error with the parameter names of the request."""
    if request.messages and api_error.param == "prompt":
        api_error.param = "messages"
    params = request.params
    if api_error.code == "no_allowed_token" and isinstance(params, SamplingParams) and params.allowed_token_ids is None:
        api_error.param = "bad_words" if params.bad_words or params.bad_words_token_ids else "structured_outputs"
    return rename_params(api_error, request.param_aliases)


def combine_salts(tenant: bytes, request: bytes = b"") -> bytes:
    """The engine's cache salt. Requests share blocks if they have the same tenant and the same `cache_salt`."""
    return tenant + b"\0" + request if tenant or request else b""


async def merge_outputs(
    generators: Sequence[AsyncGenerator[RequestOutput, None]], max_concurrent: int
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Merges generators; yields (generator index, output) in order of arrival. An exception of one ends all."""
    if len(generators) == 1:
        async with contextlib.aclosing(generators[0]) as generator:
            async for output in generator:
                yield 0, output
        return
    slots = asyncio.Semaphore(max_concurrent)
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(maxsize=len(generators))

    async def pump(i: int, generator: AsyncGenerator[RequestOutput, None]) -> None:
        end: Exception | None = None
        try:
            async with slots, contextlib.aclosing(generator):
                async for output in generator:
                    await queue.put((i, output))
        except Exception as error:
            end = error
        await queue.put((i, end))

    pumps: list[asyncio.Future[None]] = []
    num_left = len(generators)
    try:
        for i, generator in enumerate(generators):
            pumps.append(asyncio.ensure_future(pump(i, generator)))
            await asyncio.sleep(0)  # starting one takes time in proportion to its prompt
        while num_left:
            i, item = await queue.get()
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


def _resolve(option: str, detected: Any) -> Any:
    return detected if option == "auto" else None if option == "none" else option
