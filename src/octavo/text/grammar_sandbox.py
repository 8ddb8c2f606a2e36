"""A process in which grammars are compiled first. It may take its time, its memory, or die: that is what it is for.

The compiler bounds most of what a grammar can ask of it, but not all: {"multipleOf": 99999989} keeps it busy for longer
than anybody waits, and a chain of ten thousand "$ref"s overruns its stack. No thread can be stopped in the middle of
that; a process can.

It runs as a program, and knows of the rest of Octavo nothing, so that it starts in no time. A line of JSON tells it the
vocabulary, each one after that is a grammar; it answers with a line of JSON each: what is wrong, "" for nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

MEMORY_BYTES = 1 << 30
"""Address space of the process: ten times what it needs by itself."""
STACK_BYTES = 3 << 19
"""Of the process, whatever its starter may have: less than the 2 MB that are the least of the thread which compiles a
grammar next, where nothing but a shorter stack could still go wrong. Deep schemas need half of it."""
NICENESS = 5
"""Steps and streams come first where a flood of grammars would take the last core."""
WALK_TOKENS = 32
TOO_COMPLEX = "too complex: "
"""Before the error of a grammar that compiles and cannot be followed."""
LEFT_ALONE_S = 30
"""Processor time for a grammar, should nobody be there any more to stop it earlier."""
LIMITS = LLParserLimits(
    step_lexer_fuel=50_000,  # a mask takes 4 ms at most, all others' steps wait for it
    max_lexer_states=50_000,  # up to 100 MB a sequence
    verbose_errors=False,  # errors go to callers: no state of the parser in them
)


class Vocabulary(TokenizerWrapper):
    """The tokens of a model, as llguidance asks for them.

    tokens             the bytes of each; the model's own and, past the last word of their bits, one that stands for
                       "the output may end here": which of the model's tokens end an output is the request's to say
    special_token_ids  tokens that no text spells
    """

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[int]) -> None:
        self.is_tokenizer_wrapper = True  # how llguidance tells such an object from a path
        self.bos_token_id = None
        self.eos_token_id = -(-len(tokens) // 32) * 32
        self.tokens = [*tokens, *[b""] * (self.eos_token_id + 1 - len(tokens))]
        self.special_token_ids = [*special_token_ids, self.eos_token_id]

    def __call__(self, s: str) -> list[int]:
        """Asked for only where tokens are forced, which they never are."""
        raise NotImplementedError

    def compiler_tokenizer(self) -> LLTokenizer:
        return LLTokenizer(self, eos_token=self.eos_token_id)


def compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of a grammar, its first mask worked out. What is wrong is its `get_error`."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # also the first thing that may be too much
    return matcher


def walk(matcher: LLMatcher) -> None:
    """Go some tokens into the grammar. Where too many choices begin behind the first of them, the parser gives up, and
    takes tens of milliseconds for that: better here than in a step that others share."""
    for _ in range(WALK_TOKENS):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if not allowed or matcher.is_error() or matcher.is_stopped():
            return
        matcher.consume_token((allowed & -allowed).bit_length() - 1)


def limit(kind: int, most: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # a system that knows no such limit
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def main() -> None:
    os.nice(NICENESS)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_AS, MEMORY_BYTES)
    limit(resource.RLIMIT_STACK, STACK_BYTES)
    vocabulary = json.loads(sys.stdin.readline())
    tokens = [bytes.fromhex(token) for token in vocabulary["tokens"]]
    tokenizer = Vocabulary(tokens, vocabulary["special_token_ids"]).compiler_tokenizer()
    print(json.dumps(""), flush=True)
    for line in sys.stdin:
        limit(resource.RLIMIT_CPU, int(time.process_time()) + LEFT_ALONE_S)
        try:
            matcher = compiled(tokenizer, json.loads(line))
            error = matcher.get_error()
            if not error:
                walk(matcher)
                walked = matcher.get_error()
                error = TOO_COMPLEX + walked if walked and not walked.startswith("NoExtension") else ""
        except Exception as cause:  # a text that is no Unicode
            error = str(cause)
        print(json.dumps(error[:2000]), flush=True)


if __name__ == "__main__":
    main()
