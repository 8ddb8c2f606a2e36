"""Incremental detokenization: returned text is never taken back.

Two things are held back: the first bytes of a character whose other bytes are in later tokens, and text that may become
a stop string. The result does not depend on how the tokens are split into calls.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

from octavo.errors import ParameterError
from octavo.text.stop_strings import ROOT, StopStrings

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

NUM_CONTEXT_IDS = 4
"""Prompt tokens that can affect the next text: a character has at most four bytes."""
MAX_PENDING_IDS = 64
"""Tokens without text are held until this many are pending, far more than a character has bytes."""


class Detokenizer:
    """Incremental detokenizer of one sequence.

    `text` is the text returned so far, without held-back text. When a stop string completes, `stop_reason` is that
    string, the text ends before it (after it with `include_stop`), and later tokens are ignored. The stop string that
    completes first wins; of several that complete at the same character, the longest. Sequences may share one
    `StopStrings` as `stop`. `num_tokens_kept` counts the tokens up to and including the one that completed it: a call
    may bring more. Stop strings completed within the first `min_tokens` tokens do not count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: Sequence[str] | StopStrings = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        if not isinstance(stop, StopStrings):
            if any(not isinstance(s, str) or not s for s in stop):
                raise ParameterError(
                    f"stop strings must be strings of at least one character, not {list(stop)!r}", param="stop"
                )
            stop = StopStrings(stop)
        self.text = ""
        self.stop_reason: str | None = None
        self.num_tokens_kept = 0
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._num_ids = tokenizer.vocab_size
        last = filter(self._is_visible, reversed(prompt_ids[-MAX_PENDING_IDS:]))  # a prompt may be all special ids
        context_ids = list(islice(last, NUM_CONTEXT_IDS))[::-1]
        self._decoder = (
            _ByteDecoder(tokenizer, context_ids)
            if tokenizer.has_token_bytes
            else _WindowDecoder(tokenizer, context_ids, skip_special_tokens, spaces_between_special_tokens)
        )
        self._stops, self._state = stop, ROOT
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""

    def push(self, ids: Sequence[int]) -> str:
        """Append tokens; returns the new text."""
        shown = []
        for token_id in ids:
            if self.stop_reason is not None:
                break
            self.num_tokens_kept += 1
            if self._is_visible(token_id):
                shown.append(self._show(self._decoder.push(token_id)))
        return self._add(shown)

    def finish(self) -> str:
        """End of the sequence: returns the held-back text. Bytes of an incomplete character become U+FFFD."""
        if self.stop_reason is not None:
            return ""
        shown = [self._show(self._decoder.flush())]
        if self.stop_reason is None:
            shown.append(self._held)
            self._held = ""
        return self._add(shown)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of other tokens, such as a prompt. A single token keeps its leading space."""
        if len(ids) == 1 and self._tokenizer.has_token_bytes:
            skipped = skip_special_tokens and ids[0] in self._tokenizer.special_ids
            return "" if skipped else self._tokenizer.token_bytes(ids[0]).decode("utf-8", "replace")
        return self._tokenizer.decode(ids, skip_special_tokens)

    def _is_visible(self, token_id: int) -> bool:
        """False for skipped special ids and for ids in the padding of the embedding, which have no text."""
        return token_id not in self._skipped_ids and 0 <= token_id < self._num_ids

    def _add(self, shown: list[str]) -> str:
        new = "".join(shown)
        if new:
            # CPython appends in place only while a local variable holds the sole reference.
            text, self.text = self.text, ""
            text += new
            self.text = text
        return new

    def _show(self, piece: str) -> str:
        """Takes new text; returns the text that can no longer become a stop string."""
        stops, state = self._stops, self._state
        if not piece or (state == ROOT and not stops.may_start_in(piece)):
            return piece
        text, num_before = self._held + piece, len(self._held)
        for at, char in enumerate(piece, start=num_before + 1):  # text[:at] ends with char
            state = stops.step(state, char)
            match = stops.match_at(state)
            if match is not None and self.num_tokens_kept <= self._min_tokens:
                state = stops.skip_matches(state)
            elif match is not None:
                self.stop_reason, self._held = match, ""
                return text[:at] if self._include_stop else text[: at - len(match)]
        self._state, num_partial = state, stops.num_partial_chars(state)
        shown, self._held = text[: len(text) - num_partial], text[len(text) - num_partial :]
        return shown


class _ByteDecoder:
    """Decodes tokens that are bytes (byte-level BPE, SentencePiece) with an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer, context_ids: Sequence[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips_space = tokenizer.strips_first_space and not any(map(self._token_bytes, context_ids))
        for token_id in context_ids:  # the prompt may end inside a character
            self._utf8.decode(self._token_bytes(token_id))

    def push(self, token_id: int) -> str:
        return self._stripped(self._utf8.decode(self._token_bytes(token_id)))

    def flush(self) -> str:
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text


class _WindowDecoder:
    """Decodes the tokens of any other decoder with the library's stream, which decodes a window of tokens and
    compares."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        context_ids: Sequence[int],
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._spaces_between_special_tokens = spaces_between_special_tokens
        self._after_special = False
        self._pending_ids: list[int] = []  # tokens whose text is not returned yet
        self._context_ids: list[int] = []  # the tokens before them
        self._stream = self._restart(context_ids)

    def push(self, token_id: int) -> str:
        self._pending_ids.append(token_id)
        try:
            text = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:
            # "Invalid prefix": later tokens changed the text of earlier ones, which is returned already and stays.
            return self.flush()
        if text is None:  # the library decodes all pending tokens again at each token
            return self.flush() if len(self._pending_ids) >= MAX_PENDING_IDS else ""
        self._context_ids = self._pending_ids[-NUM_CONTEXT_IDS:]
        self._pending_ids = []
        between = self._after_special and token_id in self._tokenizer.special_ids
        self._after_special = token_id in self._tokenizer.special_ids
        return text.removeprefix(" ") if between and not self._spaces_between_special_tokens else str(text)

    def flush(self) -> str:
        """Text of the pending tokens: with the context before them if that yields a continuation, else alone."""
        before, decoded = self._decode(self._context_ids), self._decode(self._context_ids + self._pending_ids)
        text = decoded[len(before) :] if decoded.startswith(before) else self._decode(self._pending_ids)
        self._stream = self._restart(self._context_ids + self._pending_ids)
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)

    def _restart(self, ids: Sequence[int]) -> DecodeStream:
        """A stream that continues after `ids`, with nothing pending."""
        self._context_ids = list(ids[-NUM_CONTEXT_IDS:])
        self._pending_ids = []
        return DecodeStream(ids=self._context_ids, skip_special_tokens=self._skip_special_tokens)
