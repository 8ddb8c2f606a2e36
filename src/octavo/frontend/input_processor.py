"""Input processing: prompts, conversations, parameters and grammars, from text to tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast, overload

from octavo.errors import ContextLengthError, ParameterError, PromptError, UnknownOptionError, cut
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.structured_outputs import StructuredOutputsParams
from octavo.text.detokenizer import Detokenizer
from octavo.text.stop_strings import StopStrings
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.engine.text_processor import MakeDetokenizer
    from octavo.params.sampling_params import SamplingParams
    from octavo.text.grammar import Compilation, Grammar, GrammarCompiler

logger = logging.getLogger("octavo")

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text; token ids; {"prompt": text}, with "parse_special": True to encode special tokens in it; or
{"prompt_token_ids": ids}."""
Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation: [{"role": "user", "content": "..."}, ...]. A content may be a list of OpenAI's text parts."""
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts, and their fields with text."""
PROMPT_KEYS = ("prompt", "prompt_token_ids", "parse_special")
LONG_TEXT_CHARS = 4096
"""Longer texts are tokenized on a worker thread; for shorter ones the switch costs more than the work."""
TEMPLATE_ARGUMENTS = frozenset(
    {"messages", "tools", "template", "add_generation_prompt", "continue_final_message", "special_tokens"}
)
"""Template variables that have their own argument."""
TEMPLATE_NAMES = frozenset({"self", "loop", "caller", "varargs", "kwargs", "super"})
"""Names with a meaning in Jinja, or in the methods that call it."""


def check_template_names(names: Iterable[object]) -> None:
    """Raises `ParameterError` for a name that no chat template variable can have."""
    for name in names:
        if not isinstance(name, str) or name in TEMPLATE_ARGUMENTS | TEMPLATE_NAMES or name.startswith("__"):
            raise ParameterError(
                f"chat_template_kwargs has {name!r:.80}, which cannot be a template variable; remove it, or pass it "
                "as the argument of that name",
                param="chat_template_kwargs",
            )


def join_parts(messages: Messages) -> Messages:
    """The messages with each list of text parts as one text, as the server joins them. Raises `ParameterError`."""
    if not isinstance(messages, list | tuple):
        return messages  # refused by the template

    def joined(content: Any, path: str) -> Any:
        if not isinstance(content, list | tuple):
            return content
        for i, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if not isinstance(kind, str) or not isinstance(part.get(TEXT_PARTS.get(kind, "")), str):
                text = f"{path}[{i}] is {cut(repr(part), 60)}; only text is supported"
                raise ParameterError(f'{text}: {{"type": "text", "text": "..."}}', param="messages")
        return "\n".join(part[TEXT_PARTS[part["type"]]] for part in content)

    return [
        {**m, "content": joined(m["content"], f"messages[{i}].content")}
        if isinstance(m, Mapping) and "content" in m
        else m
        for i, m in enumerate(messages)
    ]


class InputProcessor:
    """Turns a caller's text into tokens. `tokenizer` is None for an engine that takes and returns token ids only.

    vocab_size      number of tokens with logits, if it differs from the tokenizer's number of ids
    max_model_len   longer texts are rejected before tokenization; None: the engine checks alone
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int | None = None, max_model_len: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._warned = False
        self._compiler: GrammarCompiler | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ParameterError("the engine has no tokenizer (skip_tokenizer_init=True); pass token ids, not text")
        return self._tokenizer

    def encode(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        """Returns a prompt's text, if it has one, and its tokens. Raises `PromptError` for an invalid prompt.

        Special tokens spelled in a text are encoded as plain characters, because most prompts contain words of others.
        "parse_special" encodes them as special tokens.
        """
        text, token_ids, parse_special = _parse_prompt(prompt)
        if token_ids is None:
            assert text is not None
            self.check_length(text)
            token_ids = self.tokenizer.encode(text, parse_special=parse_special)
            if not token_ids:
                raise PromptError("the prompt is empty; give it some text", param="prompt", code="empty_prompt")
            if not parse_special and (spelled := self.tokenizer.find_special_token(text)):
                self._warn_once(spelled)
        return text, token_ids

    def check_length(self, prompt: str | Sequence[int], param: str = "prompt") -> None:
        """Raises `ContextLengthError` for token ids that are too many, or for a text that is too long however it is
        tokenized; does no other work."""
        limit, num = self._max_model_len, len(prompt)
        if limit is None or num <= limit:
            return
        if not isinstance(prompt, str):
            found = f"you requested {num} tokens in the prompt and a completion; shorten the prompt"
        elif num > 4 * limit and num > limit * self.tokenizer.max_token_chars:
            found = f"your text of {num} characters cannot fit; shorten it"
        else:
            return
        text = f"This model's maximum context length is {limit} tokens. However, {found}"
        raise ContextLengthError(text, param=param)

    def encode_prefix(self, prefix: Prompt | Messages) -> Sequence[int]:
        """The tokens of a prefix. Messages go through the chat template, without a generation prompt."""
        if isinstance(prefix, Sequence) and prefix and isinstance(prefix[0], Mapping):
            prefix = self.chat(cast("Messages", prefix), add_generation_prompt=False)
        return self.encode(cast("Prompt", prefix))[1]

    async def encode_async(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        """As `encode`, without blocking the event loop for long."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(text, str) and len(text) > LONG_TEXT_CHARS:
            return await asyncio.to_thread(self.encode, prompt)
        return self.encode(prompt)

    def _warn_once(self, spelled: str) -> None:
        """Warn about chat markers in plain text: they have no effect there, and the model's output is poor."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "a prompt spells the special token %s, which is encoded as text; `chat` adds a conversation's markers, "
                'and {"prompt": text, "parse_special": True} encodes those in a text',
                spelled,
            )

    def chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The prompt that the model's chat template renders from a conversation. Raises `TemplateError`.

        chat_template          replaces the model's
        chat_template_kwargs   further template variables, such as enable_thinking
        """
        if not isinstance(chat_template, str | None):
            raise ParameterError(f"chat_template must be text, not {chat_template!r:.60}", param="chat_template")
        if not isinstance(chat_template_kwargs, Mapping | None):
            text = f"chat_template_kwargs must map names to values, not {chat_template_kwargs!r:.60}"
            raise ParameterError(text, param="chat_template_kwargs")
        variables = dict(chat_template_kwargs or {})
        check_template_names(variables)
        text, token_ids = self.tokenizer.encode_chat(
            join_parts(messages),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template=chat_template,
            **variables,
        )
        return {"prompt": text, "prompt_token_ids": token_ids}

    @overload
    def prepare_params(self, params: SamplingParams) -> SamplingParams: ...
    @overload
    def prepare_params(self, params: BeamSearchParams) -> BeamSearchParams: ...
    def prepare_params(self, params: SamplingParams | BeamSearchParams) -> SamplingParams | BeamSearchParams:
        """The parameters of one call: checked, a copy, and with the tokens of `bad_words`.

        A bad word is forbidden at the start of a text and after a space: most tokenizers encode the two differently.
        """
        if isinstance(params, BeamSearchParams):
            if params.stop or params.structured_outputs:
                _ = self.tokenizer
            return params
        params = params.validated()
        if params.structured_outputs or (params.detokenize and params.stop_strings):
            _ = self.tokenizer  # raises without one
        if not params.bad_words:
            return params
        words = [*(params.bad_words_token_ids or ()), *map(tuple, self.encode_bad_words(params.bad_words))]
        params.bad_words_token_ids = tuple(dict.fromkeys(words))
        return params

    def encode_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """The token ids of bad words, each at the beginning of a text and after a space."""
        texts = [text for word in words for text in (word.lstrip(), " " + word.lstrip())]
        return [ids for text in texts if (ids := self.tokenizer.encode(text, add_special_tokens=False))]

    def compile_grammar(self, params: SamplingParams | BeamSearchParams) -> Grammar | None:
        """Compile the grammar of `structured_outputs`; None for parameters without.

        Raises `ParameterError` with code invalid_json_schema or invalid_grammar if it does not compile within two
        seconds.
        """
        future = self.submit_grammar(params)
        return None if future is None else future.result()

    def submit_grammar(self, params: SamplingParams | BeamSearchParams, tenant: int = 0) -> Compilation | None:
        """As `compile_grammar`, but return a future. Tenants compile in turns."""
        spec = StructuredOutputsParams.of(params.structured_outputs)
        if spec is None:
            return None
        from octavo.text.grammar import GrammarCompiler  # imports a library that most programs never need

        if self._compiler is None:
            self._compiler = GrammarCompiler(self.tokenizer, self._vocab_size or self.tokenizer.num_ids)
        code = "invalid_json_schema" if spec.kind in ("json", "json_object") else "invalid_grammar"
        return self._compiler.submit(_grammar_text(spec), code, tenant)

    def withdraw_grammar(self, compilation: Compilation) -> None:
        """The caller of `submit_grammar` no longer waits."""
        assert self._compiler is not None
        self._compiler.withdraw(compilation)

    def close(self) -> None:
        """Close the grammar compiler. A second call does nothing."""
        if self._compiler is not None:
            self._compiler.close()

    @property
    def make_detokenizer(self) -> MakeDetokenizer | None:
        """A factory of detokenizers, one per sequence of a request; None without a tokenizer.

        Get one per request: its sequences share the automaton of the stop strings.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            return None
        stops: dict[tuple[str, ...], StopStrings] = {}

        def make(prompt_token_ids: Sequence[int], params: SamplingParams) -> Detokenizer:
            if (stop := stops.get(params.stop_strings)) is None:
                stop = stops[params.stop_strings] = StopStrings(params.stop_strings)
            return Detokenizer(
                tokenizer,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                stop=stop,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )

        return make


def _grammar_text(spec: StructuredOutputsParams) -> str:
    """The grammar of structured outputs, as text."""
    from octavo.text.grammar import choice_grammar, json_grammar, regex_grammar

    if spec.grammar is not None:
        return spec.grammar
    if spec.regex is not None:
        return regex_grammar(spec.regex)
    if spec.choice is not None:
        return choice_grammar(spec.choice)
    return json_grammar(
        spec.schema, any_whitespace=not spec.disable_any_whitespace, whitespace_pattern=spec.whitespace_pattern
    )


def _parse_prompt(prompt: Prompt) -> tuple[str | None, Sequence[int] | None, bool]:
    """Returns a prompt's text, its token ids (at least one of the two is set), and "parse_special"."""
    parse_special = False
    if isinstance(prompt, Mapping):
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        parse_special = prompt.get("parse_special", False)
        for name in prompt:
            if name not in PROMPT_KEYS:
                raise UnknownOptionError.of("a prompt", str(name), PROMPT_KEYS)
        if token_ids is not None:
            if not isinstance(token_ids, Sequence) or isinstance(token_ids, str):
                raise PromptError(
                    f"prompt_token_ids must be a list of integers, not {type(token_ids).__name__}", param="prompt"
                )
            return text, list(token_ids), False
        if not isinstance(parse_special, bool):
            raise PromptError(f"parse_special must be True or False, not {parse_special!r}", param="prompt")
        prompt = text if text is not None else ""
    if isinstance(prompt, str):
        return prompt, None, parse_special
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        return None, list(cast("Sequence[int]", prompt)), False
    raise PromptError(
        f"a prompt must be text, a list of token ids or a dict, not {type(prompt).__name__}", param="prompt"
    )


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list; a list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or not prompts:
        raise PromptError(f"prompts must be a non-empty list, not {prompts!r}", param="prompts")
    if isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
