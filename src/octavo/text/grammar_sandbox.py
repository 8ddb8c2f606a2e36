"""A subprocess that compiles each grammar first: it may run out of time or memory, or crash.

The compiler bounds most of the work that a grammar can cause, but not all: {"multipleOf": 99999989} keeps it busy for
far too long, and a chain of ten thousand "$ref"s overflows its stack. A thread cannot be stopped in the middle of that;
a process can.

The first message holds the vocabulary, every further one a grammar. Its reply holds the error, "" for none, and the
memory that the compiled grammar takes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import time
from collections.abc import Callable, Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from octavo.text.grammar_ebnf import ebnf_to_lark, is_ebnf
from octavo.text.helper_process import serve

MEMORY_BYTES = 1 << 30
"""Address space limit of the process, ten times its own needs."""
STACK_BYTES = 3 << 19
"""Stack limit of the process, whatever its parent's. It is less than 2 MB, the minimum stack of the thread that
compiles the grammar next in the main process: only there could a shorter stack still fail. Deep schemas need half of
it."""
NICENESS = 5
"""Priority below the engine's, so that steps and streams run first when a flood of grammars takes the last core."""
NUM_PROBE_TOKENS = 32
TOO_COMPLEX = "too complex: "
"""Prefix of the error for a grammar that compiles but is too complex to follow."""
MAX_CPU_S = 30
"""CPU time limit per grammar, in case the parent process is gone."""
NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""Turns off forced tokens: the bitmask allows every token whose bytes may come next. By default, where only one text
can follow, llguidance allows a single tokenization of it, which it finds by tokenizing each time."""
LIMITS = LLParserLimits(
    step_lexer_fuel=50_000,  # a bitmask takes at most 4 ms; the whole batch waits for it
    step_max_items=10_000,  # a bitmask of an ambiguous grammar takes 0.7 s with llguidance's 50,000 and 2,000,
    max_items_in_row=500,  # and 12 ms with these
    max_lexer_states=50_000,  # up to 100 MB per sequence
    verbose_errors=False,  # errors go to callers: exclude parser state
)


class GuidanceTokenizer(TokenizerWrapper):
    """A model's tokens in the form llguidance requires.

    tokens             bytes of each token. The model's tokens are padded to a multiple of 32, then comes one
                       for "the output may end here": the request decides which of the model's tokens end it
    special_token_ids  tokens that no text spells
    """

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[int]) -> None:
        self.is_tokenizer_wrapper = True  # distinguishes the object from a path in llguidance
        self.bos_token_id = None
        self.eos_token_id = (len(tokens) + 31) // 32 * 32
        self.tokens = [*tokens, *[b""] * (self.eos_token_id + 1 - len(tokens))]
        self.special_token_ids = [*special_token_ids, self.eos_token_id]

    def __call__(self, text: str) -> list[int]:
        """Tokenization is needed only for forced tokens, which are turned off."""
        raise NotImplementedError

    def to_wire(self) -> bytes:
        """The vocabulary for `make`."""
        tokens = [token.hex() for token in self.tokens[: self.eos_token_id]]
        return json.dumps({"tokens": tokens, "special_token_ids": self.special_token_ids[:-1]}).encode()

    def compiler_tokenizer(self) -> LLTokenizer:
        return LLTokenizer(self, eos_token=self.eos_token_id)


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the start of a grammar, with its first bitmask computed. Its `get_error` reports a failure.

    Raises ValueError for EBNF that cannot be converted.
    """
    lark = ebnf_to_lark(grammar) if is_ebnf(grammar) else grammar
    matcher = LLMatcher(tokenizer, lark + NO_FORCING, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # may already exceed the limits
    return matcher


def probe(matcher: LLMatcher) -> None:
    """Follow the grammar for some tokens. The parser gives up, after tens of milliseconds, if too many choices follow
    the first token: better here than in a step that other requests share."""
    for _ in range(NUM_PROBE_TOKENS):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if not allowed or matcher.is_error() or matcher.is_stopped():
            return
        matcher.consume_token((allowed & -allowed).bit_length() - 1)


class _MallInfo(ctypes.Structure):
    _fields_ = [(f"field{i}", ctypes.c_size_t) for i in range(10)]


def allocated_bytes() -> int:
    """Bytes that this process has allocated; 0 where the C library does not tell."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return 0
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return int(info.field7 + info.field4)  # uordblks, in arenas, and hblkhd, mapped


def set_limit(kind: int, max_value: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # the system lacks this limit
        resource.setrlimit(kind, (max_value, resource.getrlimit(kind)[1]))


def make(vocabulary: bytes) -> Callable[[bytes], bytes]:
    """The function that compiles a grammar and returns its error, for the vocabulary as JSON."""
    os.nice(NICENESS)
    set_limit(resource.RLIMIT_CORE, 0)
    set_limit(resource.RLIMIT_AS, MEMORY_BYTES)
    set_limit(resource.RLIMIT_STACK, STACK_BYTES)
    given = json.loads(vocabulary)
    tokens = [bytes.fromhex(token) for token in given["tokens"]]
    tokenizer = GuidanceTokenizer(tokens, given["special_token_ids"]).compiler_tokenizer()

    def compile_alone(grammar: bytes) -> bytes:
        set_limit(resource.RLIMIT_CPU, int(time.process_time()) + MAX_CPU_S)
        num_bytes = allocated_bytes()
        try:
            matcher = compile_grammar(tokenizer, grammar.decode())
            num_bytes = max(0, allocated_bytes() - num_bytes)
            error = matcher.get_error()
            if not error:
                probe(matcher)
                probe_error = matcher.get_error()
                error = TOO_COMPLEX + probe_error if probe_error and not probe_error.startswith("NoExtension") else ""
        except Exception as cause:  # text that is not Unicode
            error = str(cause)
        return json.dumps({"error": error[:2000], "num_bytes": num_bytes}).encode()

    return compile_alone


if __name__ == "__main__":
    serve(make)
