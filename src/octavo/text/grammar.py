"""Structured output: grammars compiled once, and followed token by token by one `Matcher` per sequence.

A grammar is text in llguidance's dialect of Lark; schemas, patterns and choices are converted to it. A caller's grammar
is first compiled in a subprocess (`grammar_sandbox`) under limits of time and memory. Only on success is it compiled in
this process, on a thread of the compiler's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer, regex_to_lark

from octavo.errors import EngineError, ParameterError, RequestFailedError
from octavo.integers import cdiv
from octavo.text import grammar_sandbox
from octavo.text.grammar_sandbox import TOO_COMPLEX, GuidanceTokenizer, compile_grammar
from octavo.text.tokenizer import Tokenizer

COMPILE_S = 2.0
"""Time limit for compiling a grammar."""
START_S = 60.0
"""Time limit for starting a sandbox process on a loaded machine."""
NUM_SANDBOXES = max(2, min(4, (os.cpu_count() or 1) // 2))
"""Grammars that compile concurrently."""
NUM_CACHED = 256
CACHED_CHARS = 1 << 21
"""Maximum characters of all cached grammars: a compiled grammar takes up to 200 bytes per character."""
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
NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""Turns off forced tokens: the bitmask allows every token whose bytes may come next. By default, where only one text
can follow, llguidance allows a single tokenization of it, which it finds by tokenizing each time."""


def json_grammar(schema: str, *, any_whitespace: bool = True, whitespace_pattern: str | None = None) -> str:
    """A grammar for JSON that follows `schema`, itself JSON. The schema's "x-guidance" applies to options not given
    here."""
    value = json.loads(schema)
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


def regex_grammar(pattern: str) -> str:
    r"""A grammar for text that matches `pattern` as a whole. The syntax is Rust's regex crate, but \d matches 0 to 9
    only: Unicode digit tables differ between libraries."""
    return f"start: /{regex_to_lark(pattern, 'd')}/"


def choice_grammar(choices: Sequence[str]) -> str:
    return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices))


class Matcher:
    """The state of one sequence in its grammar."""

    def __init__(self, inner: LLMatcher, num_words: int) -> None:
        self.inner = inner
        self.num_words = num_words  # int32 words of a bitmask

    def fork(self) -> Matcher:
        return Matcher(self.inner.deep_copy(), self.num_words)

    def accept_tokens(self, token_ids: list[int]) -> None:
        self.inner.consume_tokens(token_ids)

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


class GrammarCompiler:
    """Compiles grammars for one model's tokens, with a cache of recent ones. Thread-safe.

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
        self._futures: OrderedDict[str, Future[Grammar]] = OrderedDict()  # most recent last
        self._threads = ThreadPoolExecutor(NUM_SANDBOXES, thread_name_prefix="octavo-grammar")
        self._vocabulary: GuidanceTokenizer | None = None
        self._llg_tokenizer: LLTokenizer | None = None
        self._llg_json_tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._closed = False
        self._sandboxes = _SandboxPool()
        self._finalizer = weakref.finalize(self, self._sandboxes.close)

    def submit(self, grammar: str, code: str = "invalid_grammar") -> Future[Grammar]:
        """Start compiling; returns a future, done already if cached. It raises `ParameterError` with `code`."""
        with self._lock:
            if self._closed:
                raise EngineError("the engine is closed; make a new one")
            future = self._futures.get(grammar)
            if future is None or (future.done() and future.exception() is not None):
                future = self._futures[grammar] = self._threads.submit(self._compile, grammar, code)
            self._futures.move_to_end(grammar)
            while len(self._futures) > NUM_CACHED or sum(map(len, self._futures)) > CACHED_CHARS:
                self._futures.popitem(last=False)
        return future

    def compile(self, grammar: str, code: str = "invalid_grammar") -> Grammar:
        """Compile and wait."""
        return self.submit(grammar, code).result()

    def close(self) -> None:
        """End the sandbox processes. Optional: they end with this object."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._finalizer()

    def _compile(self, grammar: str, code: str) -> Grammar:
        text = grammar + NO_FORCING
        tokenizer, vocabulary = self._tokenizers(is_json="%json" in grammar)
        error = self._sandboxes.run(vocabulary, text)
        if not error:
            initial = compile_grammar(tokenizer, text)
            error = initial.get_error()
        if error:
            if error.startswith("NoExtension"):
                error = "no output of this model's tokens matches it"
            elif error.startswith(TOO_COMPLEX):
                code = "grammar_too_complex"
            raise ParameterError(f"structured_outputs: {_one_line(error)}", param="structured_outputs", code=code)
        return Grammar(Matcher(initial, cdiv(self._vocab_size, 32)))

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


class _SandboxPool:
    """Idle sandbox processes, at most one per concurrent compilation."""

    def __init__(self) -> None:
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._closed = False

    def run(self, vocabulary: GuidanceTokenizer, grammar: str) -> str:
        """The error of a grammar; "" for none."""
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is not None and process.poll() is not None:  # for example, ended by the OOM killer
            _kill(process)
            process = None
        if process is None:
            process = self._start(vocabulary)
        error = self._exchange(process, grammar, COMPILE_S)
        if error is None:
            _kill(process)
            return f"it takes more than {COMPILE_S:g} s to compile, or exceeds the memory limit; simplify it"
        with self._lock:
            if not self._closed:
                self._idle.append(process)
                return error
        _kill(process)
        return error

    def _start(self, vocabulary: GuidanceTokenizer) -> subprocess.Popen[bytes]:
        # -P: do not import from its folder, which has a `tokenizer.py`.
        command = [sys.executable, "-P", str(Path(grammar_sandbox.__file__))]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise _unavailable(str(error)) from error
        tokens = [token.hex() for token in vocabulary.tokens[: vocabulary.eos_token_id]]
        setup = {"tokens": tokens, "special_token_ids": vocabulary.special_token_ids[:-1]}
        if self._exchange(process, setup, START_S) is None:
            _kill(process)
            raise _unavailable(f"it does not respond within {START_S:g} s")
        return process

    @staticmethod
    def _exchange(process: subprocess.Popen[bytes], message: object, timeout_s: float) -> str | None:
        """Send a message and return the reply; None on a timeout or if the process has ended."""
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
            if wait([process.stdout.fileno()], timeout_s) and (line := process.stdout.readline()):
                return str(json.loads(line))
        return None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            _kill(process)


def _unavailable(reason: str) -> RequestFailedError:
    text = f"cannot start a process to compile a grammar: {reason}; free memory and retry, or remove the grammar"
    return RequestFailedError(text, code="grammar_unavailable")


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # buffered output
            if pipe is not None:
                pipe.close()
    process.wait()


def _one_line(error: str) -> str:
    """The message without the source excerpt or hint at its end."""
    return " ".join(SOURCE_LINES.split(error)[0].removesuffix("<non-verbose/>").split())[:MAX_MESSAGE_CHARS]
