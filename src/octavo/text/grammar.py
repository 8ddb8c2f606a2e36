"""Grammars that an output must follow: compiled once, and followed token by token by a `Matcher` each.

A grammar is text in llguidance's dialect of Lark; schemas, patterns and lists of choices are written in it, too. What a
stranger sends is compiled in a process of its own first (see `grammar_trial`), under limits of time and memory, and in
this one, on a thread of the compiler's, only when that went well.
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
from octavo.text import grammar_sandbox as grammar_trial
from octavo.text.grammar_sandbox import TOO_COMPLEX, Vocabulary, compiled
from octavo.text.tokenizer import Tokenizer

COMPILE_S = 2.0
"""How long a grammar may take to compile."""
START_S = 60.0
"""How long the process for trials may take to start, on a machine that does much else."""
NUM_TRIALS = max(2, min(4, (os.cpu_count() or 1) // 2))
"""Grammars that are compiled at the same time."""
NUM_CACHED = 256
CACHED_CHARS = 1 << 21
"""Of all grammars that are kept: a compiled one takes up to 200 bytes for each character of its text."""
MAX_MESSAGE = 300
SOURCE_LINES = re.compile(r"\n *\d+ \| ")
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,12}"
"""Between two parts of JSON: where any amount may come, a small model may write nothing else. lm-format-enforcer allows
as much: a line break, and the indentation of five levels of two."""
LIMIT_WORDS = re.compile(r"too (many|complex|large|big)|TooComplex|fuel|limit|exceed|max is \d", re.IGNORECASE)
"""In what llguidance says of a grammar whose automaton grows beyond `grammar_trial.LIMITS`."""
JSON_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
JSON_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{JSON_CHARACTER}{{1,{n}}}" for n in (2, 4, 6, 8, 10, 16, 30)),
    f"{JSON_CHARACTER}+",
]
"""Tokens that are looked at together where all of them may come next. Those of llguidance have two lengths: in a string
that has room for a few characters, nearly every token would be looked at by itself."""
NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""The mask allows every token whose bytes may come next. By default, where only one text can come next, it allows one
way alone to cut that text into tokens, which tokenizing it anew each time finds out."""


def json_grammar(schema: str, *, any_whitespace: bool = True, whitespace_pattern: str | None = None) -> str:
    """JSON that a schema, given as JSON, describes. The schema's own "x-guidance" is heeded where we say nothing."""
    value = json.loads(schema)
    given = value.get("x-guidance")
    options: dict[str, object] = dict(given) if isinstance(given, dict) else {}
    if not any_whitespace:
        options["whitespace_flexible"] = False
    if whitespace_pattern is not None:
        options["whitespace_pattern"] = whitespace_pattern
    elif options.get("whitespace_flexible") is not False:  # a pattern is heeded in spite of it
        options.setdefault("whitespace_pattern", WHITESPACE)
    value["x-guidance"] = options
    return f"start: %json {json.dumps(value)}"


def regex_grammar(pattern: str) -> str:
    """Text that a pattern matches as a whole. The syntax is that of Rust's regex crate, except that a digit is one of 0
    to 9: tables of all the world's digits differ from one library to the next."""
    return f"start: /{regex_to_lark(pattern, 'd')}/"


def choice_grammar(choices: Sequence[str]) -> str:
    return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices))


class Matcher:
    """Where one sequence is in its grammar."""

    def __init__(self, inner: LLMatcher, num_words: int) -> None:
        self.inner = inner
        self.num_words = num_words  # of 32 tokens, of a mask

    def fork(self) -> Matcher:
        return Matcher(self.inner.deep_copy(), self.num_words)

    def accept_tokens(self, token_ids: list[int]) -> None:
        self.inner.consume_tokens(token_ids)

    @property
    def is_accepting(self) -> bool:
        """Whether what has come so far is an output, whole."""
        return bool(self.inner.is_accepting())

    @property
    def error(self) -> str:
        """Why there is no going on: a token came that the grammar does not allow, or it has become too complex. ""."""
        error = self.inner.get_error()
        if not error or error.startswith("NoExtension"):
            return ""
        line = _one_line(error)
        if LIMIT_WORDS.search(line):
            return f"grammar_too_complex: following the grammar takes more memory or time than it may have ({line})"
        return line


def compute_bitmasks(matchers: Sequence[Matcher]) -> np.ndarray:
    """The tokens that may come next, of each.

    [len(matchers), num_words + 1] int32: token t is bit t % 32 of word t // 32, and the last word is empty. No end
    token is ever among them. All zero where nothing can come, which is no `error`: the output may end there, or cannot
    go on.
    """
    words = np.empty((len(matchers), matchers[0].num_words + 1), dtype=np.int32)
    size, address = words.strides[0], words.ctypes.data
    for i, matcher in enumerate(matchers):
        matcher.inner.unsafe_compute_mask_ptr(address + i * size, size)
    words[:, -1] = 0  # it has the token that stands for an end: all that is allowed behind one, or behind an error
    return words


class Grammar:
    """A compiled grammar, for any number of sequences. Safe to use from several threads."""

    def __init__(self, beginning: Matcher) -> None:
        self._beginning = beginning
        self._lock = threading.Lock()

    def start(self) -> Matcher:
        with self._lock:
            return self._beginning.fork()

    def bitmasks(self, matchers: Sequence[Matcher]) -> np.ndarray:
        """`compute_bitmasks` these, of this grammar or others of the same compiler's."""
        return compute_bitmasks(matchers)


class GrammarCompiler:
    """Compiles grammars for one model's tokens, and keeps those of late. Safe to use from several threads.

    vocab_size   tokens that the model has logits for; a mask has a bit for each, in whole words of 32

    Raises `ParameterError` for a tokenizer whose tokens have no bytes of their own.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        if not tokenizer.has_token_bytes:
            raise ParameterError(
                "structured_outputs take a tokenizer whose tokens each have bytes of their own; this model's has none",
                param="structured_outputs",
            )
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._futures: OrderedDict[str, Future[Grammar]] = OrderedDict()  # of late last
        self._threads = ThreadPoolExecutor(NUM_TRIALS, thread_name_prefix="octavo-grammar")
        self._vocabulary: Vocabulary | None = None
        self._inner: LLTokenizer | None = None
        self._for_json: LLTokenizer | None = None
        self._making = threading.Lock()
        self._closed = False
        self._trials = _Trials()
        self._finalizer = weakref.finalize(self, self._trials.close)

    def submit(self, grammar: str, code: str = "invalid_grammar") -> Future[Grammar]:
        """Begin to compile; the result may be there already. It raises `ParameterError` with that code."""
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
        """As `submit`, and wait."""
        return self.submit(grammar, code).result()

    def close(self) -> None:
        """End the processes. Whoever forgets it loses nothing: they end with this object."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._finalizer()

    def _compile(self, grammar: str, code: str) -> Grammar:
        text = grammar + NO_FORCING
        tokenizer, vocabulary = self._prepared(is_json="%json" in grammar)
        error = self._trials.run(vocabulary, text)
        if not error:
            beginning = compiled(tokenizer, text)
            error = beginning.get_error()
        if error:
            if error.startswith("NoExtension"):
                error = "no output of this model's tokens follows it"
            elif error.startswith(TOO_COMPLEX):
                code = "grammar_too_complex"
            raise ParameterError(f"structured_outputs: {_one_line(error)}", param="structured_outputs", code=code)
        return Grammar(Matcher(beginning, cdiv(self._vocab_size, 32)))

    def _prepared(self, *, is_json: bool) -> tuple[LLTokenizer, Vocabulary]:
        """Made when the first grammar comes: a tenth of a second for fifty thousand tokens, and another for JSON."""
        with self._making:
            if self._inner is None or self._vocabulary is None:
                known = min(self._vocab_size, self._tokenizer.vocab_size)
                tokens = [self._tokenizer.token_bytes(i) for i in range(known)]
                tokens += [b""] * (self._vocab_size - known)
                special = [i for i in sorted(self._tokenizer.special_ids) if i < known]
                self._vocabulary = Vocabulary(tokens, special)
                self._inner = self._vocabulary.compiler_tokenizer()
            if not is_json:
                return self._inner, self._vocabulary
            if self._for_json is None:
                self._for_json = self._inner.with_slices(JSON_SLICES)
            return self._for_json, self._vocabulary


class _Trials:
    """The processes in which grammars are tried: as many as there are trials at a time, and they wait for the next."""

    def __init__(self) -> None:
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._closed = False

    def run(self, vocabulary: Vocabulary, grammar: str) -> str:
        """What is wrong with a grammar; "" for nothing."""
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is not None and process.poll() is not None:  # a system short of memory ends whom it likes
            _end(process)
            process = None
        if process is None:
            process = self._start(vocabulary)
        error = self._ask(process, grammar, COMPILE_S)
        if error is None:
            _end(process)
            return f"it takes more than {COMPILE_S:g} s to compile, or more memory than it may have; simplify it"
        with self._lock:
            if not self._closed:
                self._idle.append(process)
                return error
        _end(process)
        return error

    def _start(self, vocabulary: Vocabulary) -> subprocess.Popen[bytes]:
        # -P: its own folder, which has a `tokenizer.py`, is no place to import from.
        command = [sys.executable, "-P", str(Path(grammar_trial.__file__))]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise _no_process(str(error)) from error
        tokens = [token.hex() for token in vocabulary.tokens[: vocabulary.eos_token_id]]
        told = {"tokens": tokens, "special_token_ids": vocabulary.special_token_ids[:-1]}
        if self._ask(process, told, START_S) is None:
            _end(process)
            raise _no_process(f"it does not answer within {START_S:g} s")
        return process

    @staticmethod
    def _ask(process: subprocess.Popen[bytes], question: object, timeout_s: float) -> str | None:
        """None where no answer comes."""
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            if wait([process.stdout.fileno()], timeout_s) and (line := process.stdout.readline()):
                return str(json.loads(line))
        return None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            _end(process)


def _no_process(why: str) -> RequestFailedError:
    text = f"no process to compile a grammar in: {why}; is there memory for it? Try again, or without a grammar"
    return RequestFailedError(text, code="grammar_unavailable")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # what was still to be written
            if pipe is not None:
                pipe.close()
    process.wait()


def _one_line(error: str) -> str:
    """Without the lines of source, or the hint, that a message ends with."""
    return " ".join(SOURCE_LINES.split(error)[0].removesuffix("<non-verbose/>").split())[:MAX_MESSAGE]
