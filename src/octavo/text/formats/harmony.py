"""Splits an output in harmony, the format of gpt-oss, into reasoning, content and tool calls.

    <|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>
                                  `-- reasoning                                     `-- content
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
                                    `-- the call's name              `-- its arguments

A message is a header and a body. The header names the channel and the recipient, in either order. Malformed output
never fails: what is no header is content. See https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Literal

from octavo.text.formats.markers import MarkerParser
from octavo.text.output_parser import OutputPart

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
MARKERS = frozenset((START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL))
END_MARKERS = (RETURN, CALL)
"""Tokens that end an output. <|end|> only ends a message."""
FINAL_HEADER = f"{CHANNEL}final{MESSAGE}"
FUNCTIONS = "functions."
"""Precedes the name of a tool in a recipient."""

MAX_HEADER_CHARS = 400
_ROLE = re.compile(r"[\w.:-]*")
_MAY_BE_RECIPIENT = re.compile(r"\s*+(?:t|to|to=\S*+(?:\s++\w*+\s*+)?)?")
_MAY_BE_CHANNEL = re.compile(r"\s*+\S*+(?:\s++\S*+){0,3}")
_HEADER = re.compile(r"\s*+(?:\w++)?(?:\s*+to=\S*+)?(?:\s++\w*+)?\s*+")
_TO = re.compile(r"(?:\A|\s)to=(\S+)")
_FIRST_WORD = re.compile(r"\s*(?!to=)(\w+)")


class _State(Enum):
    OUTSIDE = 0
    ROLE = 1
    RECIPIENT = 2  # after the role: the header may have a recipient before its channel
    CHANNEL = 3
    BODY = 4


_IN_HEADER = (_State.RECIPIENT, _State.CHANNEL)


class HarmonyParser(MarkerParser):
    """`MarkerParser` for harmony. A header that is open at the end of the output is dropped.

    prompt      the end of the prompt: the output continues its last message
    reasoning   the analysis channel is reasoning; otherwise content
    tool_names  None: there are no calls. A recipient "functions.NAME" is a call of any tool, "NAME" of these
    """

    markers, reasoning_begin, reasoning_end = MARKERS, MESSAGE, END

    def __init__(
        self,
        prompt: str = "",
        *,
        reasoning: bool = True,
        tool_names: Collection[str] | None = None,
        skipped: Collection[str] = (),
    ) -> None:
        super().__init__(skipped)
        self._reasoning = reasoning
        self._tool_names = tool_names
        self._state = _State.OUTSIDE
        self._kind: Literal["reasoning", "content", "call"] = "content"  # of the body
        self._header = self._channel = self._recipient = ""
        if (start := prompt.rfind(START)) >= 0:
            self.push(prompt[start:])
            if self._state == _State.ROLE:
                self._state = _State.RECIPIENT

    @property
    def in_reasoning(self) -> bool:
        return self._state == _State.BODY and self._kind == "reasoning"

    def _take_text(self, text: str) -> None:
        if self._state == _State.ROLE:
            found = _ROLE.match(text)
            assert found is not None
            text = text[found.end() :]
            if text:
                self._state = _State.RECIPIENT
        if self._state == _State.BODY:
            self._emit(self._kind, text)
        elif self._state == _State.OUTSIDE:
            self._emit("content", text)
        elif text:
            self._header += text
            may_be_header = _MAY_BE_RECIPIENT if self._state == _State.RECIPIENT else _MAY_BE_CHANNEL
            if len(self._header) > MAX_HEADER_CHARS or may_be_header.fullmatch(self._header) is None:
                self._emit("content", self._header)
                self._header, self._state = "", _State.OUTSIDE

    def _take_marker(self, marker: str) -> None:
        if marker == MESSAGE:
            if self._state != _State.BODY:
                self._begin_body()
        elif marker == CONSTRAIN and self._state not in _IN_HEADER:
            pass
        elif marker in (CHANNEL, CONSTRAIN):
            if self._state in _IN_HEADER:
                self._read_header()
            else:
                self._end()
            self._state = _State.CHANNEL
        else:
            self._end()
            self._state = _State.ROLE if marker == START else _State.OUTSIDE

    def _read_header(self) -> None:
        """Reads the header's text since its last marker."""
        if (recipient := _TO.search(self._header)) is not None:
            self._recipient = recipient[1]
        channel = _FIRST_WORD.match(self._header)
        if self._state == _State.CHANNEL and channel is not None and not self._channel:
            self._channel = channel[1]
        self._header = ""

    def _begin_body(self) -> None:
        self._read_header()
        name = self._recipient.removeprefix(FUNCTIONS)
        is_tool = self._tool_names is not None and (name != self._recipient or name in self._tool_names)
        if is_tool and name:
            self._kind = "call"
            self._parts.append(OutputPart("call", "", self.num_calls, name))
        else:
            self._kind = "reasoning" if self._channel == "analysis" and self._reasoning else "content"
        self._state = _State.BODY

    def _end(self) -> None:
        if self._state in _IN_HEADER and _HEADER.fullmatch(self._header) is None:
            self._emit("content", self._header)
        self.num_calls += self._state == _State.BODY and self._kind == "call"
        self._header = self._channel = self._recipient = ""
        self._state = _State.OUTSIDE


def harmony_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as the template of gpt-oss reads them.

    It takes reasoning as `thinking`, refuses content beside it in a message with a call, and writes the first call of a
    message only. So reasoning gets the content, and each call a message of its own, followed by its result.
    """
    written: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []  # of the calls that come before, in the order of the input
    for message in [*map(dict, messages), {}]:
        if message.get("role") == "tool":
            results.append(message)
            continue
        written += list(_in_order_of_calls(written, results))
        results = []
        thinking = message.get("reasoning_content")
        if thinking and message.get("tool_calls") and message["content"]:
            thinking, message["content"] = f"{thinking}\n\n{message['content']}", ""
        written.append(message if thinking is None else {**message, "thinking": thinking})
    return written[:-1]


def _in_order_of_calls(written: list[dict[str, Any]], results: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The calls of the last message, which leaves `written` if it has several, and their results."""
    calls = written[-1].get("tool_calls", ()) if written else ()
    if len(calls) > 1:
        first = written.pop()
        for i, call in enumerate(calls):
            yield {**(first if i == 0 else {"role": first["role"], "content": ""}), "tool_calls": [call]}
            yield from (result for result in results if result.get("tool_call_id") == call["id"])
        ids = {call["id"] for call in calls}
        results = [result for result in results if result.get("tool_call_id") not in ids]
    yield from results
