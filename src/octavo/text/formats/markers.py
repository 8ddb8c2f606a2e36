"""What parsers share whose markers are special tokens: the text between markers, in any pieces."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar, Literal

from octavo.text.output_parser import OutputPart

_MARKER = re.compile(r'<\|?(?:[a-z_0-9]{1,32}|")\|?>')
_MARKER_START = re.compile(r'<\|?(?:[a-z_0-9]{1,32}|")?\|?\Z')


class MarkerParser:
    """Incremental parser of one output, with the interface of `OutputParser`.

    skipped     texts of further special tokens that are dropped
    """

    markers: ClassVar[frozenset[str]]
    reasoning_begin: ClassVar[str]
    reasoning_end: ClassVar[str]

    def __init__(self, skipped: Collection[str] = ()) -> None:
        self.num_calls = 0
        self._known = self.markers.union(skipped)
        self._buffer = ""  # may be the start of a marker
        self._parts: list[OutputPart] = []

    @property
    def in_reasoning(self) -> bool:
        raise NotImplementedError

    def push(self, text: str) -> list[OutputPart]:
        """Append text; returns the parts that are certain."""
        buffer, at = self._buffer + text, 0
        for found in _MARKER.finditer(buffer):
            if found[0] in self._known:
                self._take_text(buffer[at : found.start()])
                at = found.end()
                if found[0] in self.markers:
                    self._take_marker(found[0])
        partial = _MARKER_START.search(buffer, at)
        is_held = partial is not None and any(marker.startswith(partial[0]) for marker in self._known)
        end = partial.start() if partial is not None and is_held else len(buffer)
        self._take_text(buffer[at:end])
        self._buffer = buffer[end:]
        return self._take_parts()

    def finish(self) -> list[OutputPart]:
        """End of the output: returns the held text as what it turned out to be."""
        self._take_text(self._buffer)
        self._buffer = ""
        self._end()
        return self._take_parts()

    def _take_parts(self) -> list[OutputPart]:
        parts, self._parts = self._parts, []
        return parts

    def _emit(self, kind: Literal["reasoning", "content", "call"], text: str) -> None:
        if text:
            self._parts.append(OutputPart(kind, text, self.num_calls if kind == "call" else 0))

    def _take_text(self, text: str) -> None:
        raise NotImplementedError

    def _take_marker(self, marker: str) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        """Ends what is open at the end of the output."""
        raise NotImplementedError
