"""Splits an output of Gemma 4 into reasoning, content and tool calls, whose arguments become JSON as they arrive.

    <|channel>thought
    hm<channel|>Let me see. <|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:[1,2],units:{deep:true}}<tool_call|>
    `- reasoning`- content                  `-- the call's name

A string stands between two <|"|>, without escapes, or is one of JSON. A key is that, or the text up to its colon. A
number, true, false and null are JSON's; None, which the template writes in earlier calls, is null. Any other word up to
a comma or a closing bracket is a string. The text of other channels is content.

Malformed output never fails. A call whose head is malformed is content. In arguments any closing bracket closes the
innermost open one, and a key without a value has null. A bracket deeper than `MAX_DEPTH` begins a word. A marker
outside strings closes what is open. The arguments of a call that the output's end cuts stay incomplete JSON.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection
from typing import Literal

from octavo.text.formats.markers import MarkerParser
from octavo.text.output_parser import GEMMA_CALL, GEMMA_CHANNEL, OutputPart, match_end, quoted

END_CHANNEL, END_CALL, QUOTE = "<channel|>", "<tool_call|>", '<|"|>'
RESPONSE = "<|tool_response>"
"""Ends an output: a result must follow. The prompt continues with it."""
MARKERS = frozenset((GEMMA_CHANNEL, END_CHANNEL, GEMMA_CALL, END_CALL, QUOTE))
THOUGHT = "thought\n"
THOUGHT_HEADER = GEMMA_CHANNEL + THOUGHT

MAX_HEAD_CHARS = 400
MAX_DEPTH = 64
_HEAD = re.compile(r"\s*+call:\s*+([^\s{}]{1,256})\s*+\{")
_MAY_BE_HEAD = re.compile(r"\s*+(?:c|ca|cal|call:?|call:\s*+[^\s{}]{0,256}\s*+)?")
_BETWEEN = re.compile(r"[\s,]*+")
_KEY = re.compile(r"[^:]*+")
_WORD = re.compile(r"[^,}\]]*+")
_PLAIN = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*+)(?:\.\d++)?(?:[eE][+-]?\d++)?", re.ASCII)
_WORDS = {"true": "true", "false": "false", "null": "null", "None": "null"}
_CLOSING = {"{": "}", "[": "]"}


class GemmaParser(MarkerParser):
    """`MarkerParser` for Gemma 4.

    reasoning                the channel "thought" is reasoning; otherwise content
    starts_in_reasoning      the prompt has opened that channel
    tools                    False: there are no calls
    """

    markers, reasoning_begin, reasoning_end = MARKERS, GEMMA_CHANNEL, END_CHANNEL

    def __init__(
        self,
        *,
        reasoning: bool = True,
        starts_in_reasoning: bool = False,
        tools: bool = True,
        skipped: Collection[str] = (),
    ) -> None:
        super().__init__(skipped)
        self._tools = tools
        self._kind_of_thought: Literal["reasoning", "content"] = "reasoning" if reasoning else "content"
        self._kind = self._kind_of_thought if starts_in_reasoning else "content"
        self._step: Callable[[str, int], int] = self._text
        self._head = ""  # of a channel or call, undecided
        self._open: list[str] = []  # the brackets of the arguments
        self._is_first = True  # in its bracket
        self._is_key = False  # the current string or word
        self._held: list[str] = []  # its pieces, but for a string between <|"|>
        self._is_escaped = False  # the next character of a string of JSON

    @property
    def in_reasoning(self) -> bool:
        is_open = self._kind == "reasoning" or self._step == self._channel
        return is_open and self._kind_of_thought == "reasoning"

    def _take_text(self, text: str) -> None:
        at = 0
        while at < len(text):
            at = self._step(text, at)

    def _take_marker(self, marker: str) -> None:
        if self._step == self._string and marker != QUOTE:
            self._take_text(marker)
        elif marker == QUOTE:
            if self._step == self._plain:
                self._end_held()
            elif self._step == self._string:
                self._end_item('"')
            elif self._step in (self._item, self._colon, self._value):
                self._begin(self._string)
                self._emit("call", '"')
        else:
            self._end_call()
            self._end()
            if marker in (GEMMA_CHANNEL, END_CHANNEL, GEMMA_CALL):
                self._kind = "content"
            if marker == GEMMA_CHANNEL:
                self._step = self._channel
            elif marker == GEMMA_CALL and self._tools:
                self._step = self._call_head

    def _end(self) -> None:
        if self._step in (self._channel, self._call_head):
            self._emit("content", "" if self._head == THOUGHT.rstrip() else self._head)
            self._head, self._step = "", self._text

    # -- states: each takes text from a position, and returns the position up to which it has --------------------------

    def _text(self, text: str, at: int) -> int:
        self._emit(self._kind, text[at:])
        return len(text)

    def _channel(self, text: str, at: int) -> int:
        rest = THOUGHT[len(self._head) :]
        piece = text[at : at + len(rest)]
        if not rest.startswith(piece):
            self._emit("content", self._head)
            self._head, self._step = "", self._text
            return at
        self._head += piece
        if self._head == THOUGHT:
            self._head, self._step, self._kind = "", self._text, self._kind_of_thought
        return at + len(piece)

    def _call_head(self, text: str, at: int) -> int:
        head = self._head + text[at : at + MAX_HEAD_CHARS - len(self._head)]
        if (found := _HEAD.match(head)) is not None:
            at += found.end() - len(self._head)
            self._head = ""
            self._parts.append(OutputPart("call", "", self.num_calls, found[1]))
            self._open_bracket("{")
            return at
        if len(head) < MAX_HEAD_CHARS and _MAY_BE_HEAD.fullmatch(head) is not None:
            self._head = head
            return len(text)
        self._end()
        return at

    def _item(self, text: str, at: int) -> int:
        """Before a key, an item of an array or a closing bracket."""
        at = match_end(_BETWEEN, text, at)
        if at == len(text):
            return at
        if text[at] in "}]":
            self._close_bracket()
            return at + 1
        if self._open[-1] == "[":
            self._begin(self._value)
        elif text[at] == '"':
            self._begin(self._plain)
            return at + 1
        else:
            self._begin(self._word)
        return at

    def _colon(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        self._step = self._value
        return at + (text[at] == ":")

    def _value(self, text: str, at: int) -> int:
        c = text[at]
        if c in ",}]":
            self._end_value("null")
            return at
        if c == '"':
            self._begin(self._plain)
        elif c in _CLOSING and len(self._open) < MAX_DEPTH:
            self._open_bracket(c)
        elif not c.isspace():
            self._begin(self._word)
            return at
        return at + 1

    def _word(self, text: str, at: int) -> int:
        """In a key or value without quotes."""
        end = match_end(_KEY if self._is_key else _WORD, text, at)
        self._held.append(text[at:end])
        if end < len(text):
            self._end_held()
        return end

    def _string(self, text: str, at: int) -> int:
        self._emit("call", quoted(text[at:])[1:-1])
        return len(text)

    def _plain(self, text: str, at: int) -> int:
        """In a string of JSON."""
        end = match_end(_PLAIN, text, at + self._is_escaped)
        self._is_escaped = text.startswith("\\", end)  # the last character
        end += self._is_escaped
        self._held.append(text[at:end])
        if end < len(text):
            self._end_held()
            return end + 1
        return end

    # -- the JSON of arguments -----------------------------------------------------------------------------------------

    def _begin(self, step: Callable[[str, int], int]) -> None:
        """Begins a key or value."""
        self._is_key = self._step == self._item and self._open[-1] == "{"
        if self._step == self._item and not self._is_first:
            self._emit("call", ", ")
        self._step = step

    def _end_item(self, text: str) -> None:
        if self._is_key:
            self._emit("call", f"{text}: ")
            self._step = self._colon
        else:
            self._end_value(text)

    def _end_value(self, text: str) -> None:
        self._emit("call", text)
        self._step, self._is_first = self._item, False

    def _end_held(self) -> None:
        """Ends a word or a string of JSON."""
        text, self._held = "".join(self._held), []
        if self._step == self._plain:
            with contextlib.suppress(ValueError):  # a backslash that is no escape: the text as it is
                text = json.loads(f'"{text}"', strict=False)
            self._is_escaped = False
            self._end_item(quoted(text))
            return
        text = text.strip()
        literal = text if _NUMBER.fullmatch(text) is not None else _WORDS.get(text)
        self._end_item(quoted(text) if self._is_key or literal is None else literal)

    def _open_bracket(self, bracket: str) -> None:
        self._emit("call", bracket)
        self._open.append(bracket)
        self._step, self._is_first = self._item, True

    def _close_bracket(self) -> None:
        self._end_value(_CLOSING[self._open.pop()])
        if not self._open:
            self.num_calls += 1
            self._step = self._text

    def _end_call(self) -> None:
        """Closes all that is open in arguments."""
        if self._step in (self._word, self._plain):
            self._end_held()
        if self._step in (self._colon, self._value):
            self._end_value("null")
        while self._open:
            self._close_bracket()
