"""Text between markers that are special tokens, in any pieces."""

from __future__ import annotations

import pytest

from octavo.text.formats.markers import MarkerParser
from octavo.text.output_parser import OutputPart


class Recorder(MarkerParser):
    """Text is content, and a marker ends it."""

    markers = frozenset(("<|a>", "<b|>", '<|"|>'))

    def _take_text(self, text: str) -> None:
        self._emit("content", text)

    def _take_marker(self, marker: str) -> None:
        self._emit("reasoning", marker)

    def _end(self) -> None:
        self._emit("reasoning", "end")


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_markers_are_found_in_any_pieces(size: int) -> None:
    text = '<|a>x<<|"|>y<pad><div><b|<b|><|pad|>z<|'
    parser = Recorder(["<pad>", "<|pad|>", "<|a>"])
    parts = [part for i in range(0, len(text), size) for part in parser.push(text[i : i + size])] + parser.finish()
    assert [part.text for part in parts if part.kind == "reasoning"] == ["<|a>", '<|"|>', "<b|>", "end"]
    assert "".join(part.text for part in parts if part.kind == "content") == "x<y<div><b|z<|"


def test_only_the_start_of_a_marker_is_held() -> None:
    parser = Recorder()
    assert parser.push("a <") == [OutputPart("content", "a ")]
    assert parser.push("c <") == [OutputPart("content", "<c ")]
    assert parser.push("b") == [] and parser.push(" c") == [OutputPart("content", "<b c")]
    assert parser.push('"<|"|') == [OutputPart("content", '"')] and parser.push(">") == [
        OutputPart("reasoning", '<|"|>')
    ]
