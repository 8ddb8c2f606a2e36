"""Structured output: grammars compiled once, and followed token by token by one `Matcher` per sequence.

A grammar is text in llguidance's dialect of Lark, or EBNF (`grammar_ebnf`); schemas, patterns and choices are converted
to Lark. A caller's grammar is first compiled in a subprocess (`grammar_sandbox`) under limits of time and memory. Only
on success is it compiled in this process, on a thread of the compiler's.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, regex_to_lark

from octavo.errors import EngineError, ParameterError, RequestFailedError
from octavo.integers import cdiv
from octavo.text import grammar_sandbox
from octavo.text.grammar_sandbox import TOO_COMPLEX, GuidanceTokenizer, compile_grammar
from octavo.text.helper_process import HelperLostError, HelperPool, JobTooLargeError
from octavo.text.tokenizer import Tokenizer
from octavo.turns import Turns

COMPILE_S = 2.0
"""Limit of CPU time for compiling a grammar."""
NUM_SANDBOXES = max(2, min(4, (os.cpu_count() or 1) // 2))
"""Grammars that compile concurrently."""
NUM_CACHED = 256
MAX_CACHED_BYTES = 64 << 20
"""Memory of all cached grammars. A single one may take more."""
MAX_WAITING_CHARS = 64 << 20
MIN_WAITING_CHARS = 1 << 15
"""Limit of all grammars that wait or compile, and what a small one counts."""
MAX_MESSAGE_CHARS = 300
SOURCE_LINES = re.compile(r"\n *\d+ \| ")
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,12}"
"""White space between two parts of JSON. If any amount were allowed, a small model might write nothing else. The limit
is lm-format-enforcer's: a line break, and indentation of five levels of two spaces."""
LIMIT_PATTERN = re.compile(r"too (many|complex|large|big)|TooComplex|fuel|limit|exceed|max is \d", re.IGNORECASE)
"""Matches llguidance's errors for a grammar whose automaton exceeds `grammar_sandbox.LIMITS`."""
JSON_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
JSON_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{JSON_CHARACTER}{{1,{n}}}" for n in (2, 4, 6, 8, 10, 16, 30)),
    f"{JSON_CHARACTER}+",
]
"""Token classes whose tokens are allowed together. llguidance's own classes have two lengths, so that in a string with
room for few characters it would check nearly every token on its own."""
FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
"""Formats of JSON strings that llguidance knows. Any other is an annotation, as JSON Schema allows."""
VALUE_KEYWORDS = frozenset(("const", "default", "enum", "example", "examples", "x-guidance"))
"""Keywords of a JSON schema whose values are no schemas."""
NAME_KEYWORDS = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
"""Keywords of a JSON schema whose values have schemas by name."""
MAX_LOGGED_FORMATS = 64

logger = logging.getLogger(__name__)
_logged_formats: set[str] = set()


def json_grammar(schema: str, *, any_whitespace: bool = True, whitespace_pattern: str | None = None) -> str:
    """A grammar for JSON that follows `schema`, itself JSON. The schema's "x-guidance" applies to options not given
    here."""
    value = json.loads(schema)
    _drop_unknown_formats(value)
    given = value.get("x-guidance")
    options: dict[str, object] = dict(given) if isinstance(given, dict) else {}
    if not any_whitespace:
        options["whitespace_flexible"] = False
    if whitespace_pattern is not None:
        options["whitespace_pattern"] = whitespace_pattern
    elif options.get("whitespace_flexible") is not False:  # else a pattern would override it
        options.setdefault("whitespace_pattern", WHITESPACE)
    value["x-guidance"] = options
    return f"start: %json {json.dumps(value)}"


def _drop_unknown_formats(schema: dict[str, Any]) -> None:
    """Removes the formats that llguidance refuses. Each is logged once."""
    waiting: list[tuple[Any, bool]] = [(schema, False)]  # with True for names -> schemas
    while waiting:
        value, has_names = waiting.pop()
        if isinstance(value, list):
            waiting += [(inner, False) for inner in value]
        if not isinstance(value, dict):
            continue
        name = value.get("format")
        if not has_names and isinstance(name, str) and name not in FORMATS:
            del value["format"]
            if name not in _logged_formats and len(_logged_formats) < MAX_LOGGED_FORMATS:
                _logged_formats.add(name)
                logger.info("a JSON schema has the format %.80r, which does not constrain the output", name)
        for key, inner in value.items():
            if has_names or key not in VALUE_KEYWORDS:
                waiting.append((inner, not has_names and key in NAME_KEYWORDS))


def regex_grammar(pattern: str) -> str:
    r"""A grammar for text that matches `pattern` as a whole. The syntax is Rust's regex crate, but \d matches 0 to 9
    only: Unicode digit tables differ between libraries."""
    return f"start: /{regex_to_lark(pattern, 'd')}/"


def choice_grammar(choices: Sequence[str]) -> str:
    return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices))


class Matcher:
    """The state of one sequence in its grammar."""

    def __init__(self, inner: LLMatcher, num_words: int, tokenizer: LLTokenizer) -> None:
        self.inner = inner
        self.num_words = num_words  # int32 words of a bitmask
        self._tokenizer = tokenizer

    def fork(self) -> Matcher:
        return Matcher(self.inner.deep_copy(), self.num_words, self._tokenizer)

    def accept_tokens(self, token_ids: list[int]) -> None:
        self.inner.consume_tokens(token_ids)

    def num_allowed(self, token_ids: list[int]) -> int:
        """How many of these tokens, from the first on, the grammar allows next."""
        return int(self.inner.validate_tokens(token_ids))

    def forced_tokens(self) -> list[int]:
        """Tokens that spell the only bytes that can come next, each as long as possible."""
        forced = self.inner.compute_ff_bytes()
        return list(self._tokenizer.greedy_tokenize(forced.decode("utf-8", "ignore"))) if forced else []

    @property
    def is_accepting(self) -> bool:
        """True if the text so far is a complete output."""
        return bool(self.inner.is_accepting())

    @property
    def error(self) -> str:
        """The reason why the matcher cannot continue: a token outside the grammar, or a limit exceeded; "" for none."""
        error = self.inner.get_error()
        if not error or error.startswith("NoExtension"):
            return ""
        line = _one_line(error)
        if LIMIT_PATTERN.search(line):
            return f"grammar_too_complex: following the grammar exceeds its memory or time limit ({line}); simplify it"
        return line


def compute_bitmasks(matchers: Sequence[Matcher]) -> np.ndarray:
    """The bitmask of allowed next tokens of each matcher.

    [len(matchers), num_words + 1] int32: token t is bit t % 32 of word t // 32; the last word is 0. End tokens are
    never set. A mask of zeros is not an `error`: the output may end there, or cannot continue.
    """
    bitmasks = np.empty((len(matchers), matchers[0].num_words + 1), dtype=np.int32)
    size, address = bitmasks.strides[0], bitmasks.ctypes.data
    for i, matcher in enumerate(matchers):
        matcher.inner.unsafe_compute_mask_ptr(address + i * size, size)
    bitmasks[:, -1] = 0  # the end-of-output token, the only one allowed after an end or an error
    return bitmasks


class Grammar:
    """A compiled grammar for any number of sequences. Thread-safe."""

    def __init__(self, initial: Matcher) -> None:
        self._initial = initial
        self._lock = threading.Lock()

    def start(self) -> Matcher:
        with self._lock:
            return self._initial.fork()

    def bitmasks(self, matchers: Sequence[Matcher]) -> np.ndarray:
        """`compute_bitmasks` of matchers of this or any other grammar of the same compiler."""
        return compute_bitmasks(matchers)


class Compilation(Future["Grammar"]):
    """A grammar that compiles, or is compiled.

    num_callers   callers that wait for it
    num_bytes     memory that it takes when compiled
    """

    def __init__(self, grammar: str, code: str) -> None:
        super().__init__()
        self.grammar, self.code = grammar, code
        self.num_callers = self.num_bytes = 0

    @property
    def has_failed(self) -> bool:
        return self.done() and (self.cancelled() or self.exception() is not None)


class GrammarCompiler:
    """Compiles grammars for one model's tokens, with a cache of recent ones. Thread-safe.

    Tenants compile in turns (`Turns`). A grammar that nobody waits for any more is not compiled.

    vocab_size   tokens that the model has logits for; a bitmask has one bit per token, in int32 words

    Raises `ParameterError` if the tokenizer's tokens have no bytes of their own.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        if not tokenizer.has_token_bytes:
            raise ParameterError(
                "structured_outputs need a tokenizer whose tokens have bytes of their own; remove them for this model",
                param="structured_outputs",
            )
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, Compilation] = OrderedDict()  # most recent last
        self._turns: Turns[Compilation] = Turns(NUM_SANDBOXES, MAX_WAITING_CHARS, _refuse)
        self._threads = ThreadPoolExecutor(NUM_SANDBOXES + 1, thread_name_prefix="octavo-grammar")
        self._vocabulary: GuidanceTokenizer | None = None
        self._llg_tokenizer: LLTokenizer | None = None
        self._llg_json_tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._closed = False
        self.sandboxes = HelperPool(grammar_sandbox.__name__, quiet=True)
        self._finalizer = weakref.finalize(self, self.sandboxes.close)

    def submit(self, grammar: str, code: str = "invalid_grammar", tenant: int = 0) -> Compilation:
        """Start compiling; the future is done already if cached. It raises `ParameterError` with `code`, or
        `RequestFailedError`: queue_full, grammar_unavailable."""
        with self._lock:
            if self._closed:
                raise EngineError("the engine is closed; make a new one")
            known = self._cache.get(grammar)
            if known is None or known.has_failed:
                known = self._cache[grammar] = Compilation(grammar, code)
                if self._turns.add(known, tenant, len(grammar) + MIN_WAITING_CHARS):
                    self._threads.submit(self._compile_next)
                else:
                    _refuse(known)
            known.num_callers += 1
            self._cache.move_to_end(grammar)
            self._trim_cache()
        return known

    def withdraw(self, compilation: Compilation) -> None:
        """A caller of `submit` no longer waits."""
        with self._lock:
            compilation.num_callers -= 1
            if not compilation.num_callers and self._turns.withdraw(compilation):
                compilation.cancel()
                if self._cache.get(compilation.grammar) is compilation:
                    del self._cache[compilation.grammar]  # else it would evict another

    def compile(self, grammar: str, code: str = "invalid_grammar") -> Grammar:
        """Compile and wait."""
        return self.submit(grammar, code).result()

    def close(self) -> None:
        """End the sandbox processes. Optional: they end with this object."""
        with self._lock:
            self._closed = True
            for compilation in self._turns.waiting:
                self._turns.withdraw(compilation)
                compilation.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._finalizer()

    @property
    def num_cached_bytes(self) -> int:
        return sum(known.num_bytes for known in self._cache.values())

    def _trim_cache(self) -> None:
        num_bytes = self.num_cached_bytes
        while len(self._cache) > NUM_CACHED or (num_bytes > MAX_CACHED_BYTES and len(self._cache) > 1):
            num_bytes -= self._cache.popitem(last=False)[1].num_bytes

    def _compile_next(self) -> None:
        """Compile the grammars whose turn it is, until none waits or all slots are taken."""
        while True:
            with self._lock:
                compilation = self._turns.take()
                if compilation is None:
                    return
                compilation.set_running_or_notify_cancel()  # from now on, it cannot be cancelled
            grammar = failure = None
            try:
                grammar = self._compile(compilation)
            except BaseException as error:
                failure = error
            with self._lock:
                self._turns.done(compilation)
                self._trim_cache()
            if grammar is None:
                compilation.set_exception(failure)
            else:
                compilation.set_result(grammar)

    def _compile(self, compilation: Compilation) -> Grammar:
        text = compilation.grammar
        tokenizer, vocabulary = self._tokenizers(is_json="%json" in text)
        try:
            reply = self.sandboxes.call(vocabulary.to_wire, text.encode("utf-8", "surrogatepass"), COMPILE_S)
        except JobTooLargeError as error:
            error_text = f"{error} to compile; simplify it"
        except HelperLostError as error:
            text = f"cannot start a process to compile a grammar: {error}; free memory and retry, or remove the grammar"
            raise RequestFailedError(text, code="grammar_unavailable") from error
        else:
            found = json.loads(reply)
            error_text, compilation.num_bytes = found["error"], found["num_bytes"]
        if not error_text:
            initial = compile_grammar(tokenizer, text)
            error_text = initial.get_error()
        if not error_text:
            return Grammar(Matcher(initial, cdiv(self._vocab_size, 32), tokenizer))
        code = compilation.code
        if error_text.startswith("NoExtension"):
            error_text = "no output of this model's tokens matches it"
        elif error_text.startswith(TOO_COMPLEX):
            code = "grammar_too_complex"
        raise ParameterError(f"structured_outputs: {_one_line(error_text)}", param="structured_outputs", code=code)

    def _tokenizers(self, *, is_json: bool) -> tuple[LLTokenizer, GuidanceTokenizer]:
        """llguidance's tokenizer and the vocabulary. Built for the first grammar: 0.1 s for 50,000 tokens, and again
        for JSON."""
        with self._tokenizer_lock:
            if self._llg_tokenizer is None or self._vocabulary is None:
                num_known = min(self._vocab_size, self._tokenizer.vocab_size)
                tokens = [self._tokenizer.token_bytes(i) for i in range(num_known)]
                tokens += [b""] * (self._vocab_size - num_known)
                special = [i for i in sorted(self._tokenizer.special_ids) if i < num_known]
                self._vocabulary = GuidanceTokenizer(tokens, special)
                self._llg_tokenizer = self._vocabulary.compiler_tokenizer()
            if not is_json:
                return self._llg_tokenizer, self._vocabulary
            if self._llg_json_tokenizer is None:
                self._llg_json_tokenizer = self._llg_tokenizer.with_slices(JSON_SLICES)
            return self._llg_json_tokenizer, self._vocabulary


def _refuse(compilation: Compilation) -> None:
    text = "too many grammars wait to be compiled; try again later"
    compilation.set_exception(RequestFailedError(text, code="queue_full"))


def _one_line(error: str) -> str:
    """The message without the source excerpt or hint at its end."""
    return " ".join(SOURCE_LINES.split(error)[0].removesuffix("<non-verbose/>").split())[:MAX_MESSAGE_CHARS]
