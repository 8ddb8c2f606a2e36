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
from enum import Enum
from typing import Literal

from octavo.text.formats.markers import MarkerParser
from octavo.text.output_parser import GEMMA_CALL, GEMMA_CHANNEL, OutputPart, is_unicode

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


class _State(Enum):
    TEXT = 0  # reasoning or content
    CHANNEL = 1  # a channel's name may follow
    HEAD = 2  # a call's name may follow
    ITEM = 3  # a key, an item of an array or a closing bracket
    COLON = 4  # after a quoted key
    VALUE = 5
    KEY = 6  # a bare one
    WORD = 7
    STRING = 8
    PLAIN = 9  # a string of JSON


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
        self._state = _State.TEXT
        self._head = ""  # of a channel or call, undecided
        self._open: list[str] = []  # the brackets of the arguments
        self._is_first = True  # in its bracket
        self._is_key = False  # the current string
        self._held: list[str] = []  # pieces of a key, word or string of JSON
        self._is_escaped = False  # the next character of a string of JSON
        self._steps: dict[_State, Callable[[str, int], int]] = {
            _State.TEXT: self._text,
            _State.CHANNEL: self._channel,
            _State.HEAD: self._call_head,
            _State.ITEM: self._item,
            _State.COLON: self._colon,
            _State.VALUE: self._value,
            _State.KEY: self._bare_key,
            _State.WORD: self._word,
            _State.STRING: self._string,
            _State.PLAIN: self._plain,
        }

    @property
    def in_reasoning(self) -> bool:
        is_open = self._kind == "reasoning" or self._state == _State.CHANNEL
        return is_open and self._kind_of_thought == "reasoning"

    def _take_text(self, text: str) -> None:
        at = 0
        while at < len(text):
            at = self._steps[self._state](text, at)

    def _take_marker(self, marker: str) -> None:
        if self._state == _State.STRING and marker != QUOTE:
            self._take_text(marker)
        elif marker == QUOTE:
            if self._state == _State.PLAIN:
                self._end_plain()
            elif self._state == _State.STRING:
                self._end_string('"')
            elif self._state in (_State.ITEM, _State.COLON, _State.VALUE):
                self._begin_string(_State.STRING)
        else:
            if self._open:
                self._end_call()
            self._end()
            if marker in (GEMMA_CHANNEL, END_CHANNEL, GEMMA_CALL):
                self._kind = "content"
            if marker == GEMMA_CHANNEL:
                self._state = _State.CHANNEL
            elif marker == GEMMA_CALL and self._tools:
                self._state = _State.HEAD

    def _end(self) -> None:
        if self._state in (_State.CHANNEL, _State.HEAD):
            self._emit("content", "" if self._head == THOUGHT.rstrip() else self._head)
            self._head, self._state = "", _State.TEXT

    # -- states: each takes text from a position, and returns the position up to which it has --------------------------

    def _text(self, text: str, at: int) -> int:
        self._emit(self._kind, text[at:])
        return len(text)

    def _channel(self, text: str, at: int) -> int:
        rest = THOUGHT[len(self._head) :]
        piece = text[at : at + len(rest)]
        if not rest.startswith(piece):
            self._emit("content", self._head)
            self._head, self._state = "", _State.TEXT
            return at
        self._head += piece
        if self._head == THOUGHT:
            self._head, self._state, self._kind = "", _State.TEXT, self._kind_of_thought
        return at + len(piece)

    def _call_head(self, text: str, at: int) -> int:
        head = self._head + text[at : at + MAX_HEAD_CHARS - len(self._head)]
        if (found := _HEAD.match(head)) is not None:
            at += found.end() - len(self._head)
            self._head, self._state = "", _State.ITEM
            self._parts.append(OutputPart("call", "", self.num_calls, found[1]))
            self._open_bracket("{")
            return at
        if len(head) < MAX_HEAD_CHARS and _MAY_BE_HEAD.fullmatch(head) is not None:
            self._head = head
            return len(text)
        self._end()
        return at

    def _item(self, text: str, at: int) -> int:
        at = _end_of(_BETWEEN, text, at)
        if at == len(text):
            return at
        if text[at] in "}]":
            self._close_bracket()
            return at + 1
        if self._open[-1] == "[":
            self._begin_item()
            self._state = _State.VALUE
        elif text[at] == '"':
            self._begin_string(_State.PLAIN)
            return at + 1
        else:
            self._begin_item()
            self._state = _State.KEY
        return at

    def _colon(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        self._state = _State.VALUE
        return at + (text[at] == ":")

    def _value(self, text: str, at: int) -> int:
        c = text[at]
        if c.isspace():
            return at + 1
        if c in ",}]":
            self._end_value("null")
            return at
        if c == '"':
            self._begin_string(_State.PLAIN)
            return at + 1
        if c in _CLOSING and len(self._open) < MAX_DEPTH:
            self._open_bracket(c)
            return at + 1
        self._state = _State.WORD
        return at

    def _bare_key(self, text: str, at: int) -> int:
        end = _end_of(_KEY, text, at)
        self._held.append(text[at:end])
        if end < len(text):
            self._end_key()
            return end + 1
        return end

    def _word(self, text: str, at: int) -> int:
        end = _end_of(_WORD, text, at)
        self._held.append(text[at:end])
        if end < len(text):
            self._end_word()
        return end

    def _string(self, text: str, at: int) -> int:
        self._emit("call", _quoted(text[at:])[1:-1])
        return len(text)

    def _plain(self, text: str, at: int) -> int:
        end = _end_of(_PLAIN, text, at + self._is_escaped)
        self._is_escaped = text.startswith("\\", end)  # the last character
        end += self._is_escaped
        self._held.append(text[at:end])
        if end < len(text):
            self._end_plain()
            return end + 1
        return end

    # -- the JSON of arguments -----------------------------------------------------------------------------------------

    def _open_bracket(self, bracket: str) -> None:
        self._emit("call", bracket)
        self._open.append(bracket)
        self._state, self._is_first = _State.ITEM, True

    def _close_bracket(self) -> None:
        self._end_value(_CLOSING[self._open.pop()])
        if not self._open:
            self.num_calls += 1
            self._state = _State.TEXT

    def _begin_item(self) -> None:
        if not self._is_first:
            self._emit("call", ", ")
        self._is_first = False

    def _begin_string(self, state: _State) -> None:
        self._is_key = self._state == _State.ITEM and self._open[-1] == "{"
        if self._state == _State.ITEM:
            self._begin_item()
        self._state = state
        if state == _State.STRING:
            self._emit("call", '"')

    def _end_string(self, text: str) -> None:
        if self._is_key:
            self._emit("call", f"{text}: ")
            self._state = _State.COLON
        else:
            self._end_value(text)

    def _end_value(self, text: str) -> None:
        self._emit("call", text)
        self._state, self._is_first = _State.ITEM, False

    def _end_key(self) -> None:
        self._emit("call", f"{_quoted(self._take_held().strip())}: ")
        self._state = _State.VALUE

    def _end_word(self) -> None:
        word = self._take_held().strip()
        is_number = _NUMBER.fullmatch(word) is not None
        self._end_value(word if is_number else _WORDS.get(word) or _quoted(word))

    def _end_plain(self) -> None:
        text = self._take_held()
        with contextlib.suppress(ValueError):  # a backslash that is no escape: the text as it is
            text = json.loads(f'"{text}"', strict=False)
        self._is_escaped = False
        self._end_string(_quoted(text))

    def _end_call(self) -> None:
        """Closes all that is open."""
        if self._state == _State.STRING:
            self._end_string('"')
        elif self._state == _State.KEY:
            self._end_key()
        elif self._state == _State.WORD:
            self._end_word()
        elif self._state == _State.PLAIN:
            self._end_plain()
        if self._state in (_State.COLON, _State.VALUE):
            self._end_value("null")
        while self._open:
            self._close_bracket()

    def _take_held(self) -> str:
        held, self._held = "".join(self._held), []
        return held


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=not is_unicode(text))


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Position after the match at `at`; the pattern may match the empty string."""
    found = pattern.match(text, at)
    assert found is not None
    return found.end()
