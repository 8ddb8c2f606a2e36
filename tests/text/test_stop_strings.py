"""The stop string automaton against plain comparison, and its cost."""

from __future__ import annotations

import time
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from octavo import SamplingParams
from octavo.frontend.input_processor import InputProcessor
from octavo.text.stop_strings import ROOT, StopStrings
from octavo.text.tokenizer import Tokenizer
from tests.text.samples import train_byte_level

words = st.text(st.sampled_from("abc"), min_size=1, max_size=7)


@given(texts=st.lists(words, min_size=1, max_size=7), text=st.text(st.sampled_from("abc"), max_size=30))
def test_automaton_agrees_with_plain_comparison(texts: list[str], text: str) -> None:
    stops, place = StopStrings(texts), ROOT
    for at in range(1, len(text) + 1):
        before = text[:at]
        place = stops.step(place, text[at - 1])
        complete = [s for s in texts if before.endswith(s)]
        assert stops.match_at(place) == (max(complete, key=len) if complete else None)
        place = stops.skip_matches(place)
        begun = (n for s in texts for n in range(1, len(s)) if before.endswith(s[:n]))
        assert stops.num_partial_chars(place) == max(begun, default=0)


def test_samples_of_a_request_share_one_automaton() -> None:
    tokenizer = Tokenizer(train_byte_level())
    params = SamplingParams(n=3, stop=["one", "two"])
    make = InputProcessor(tokenizer).make_detokenizer
    assert make is not None
    assert len({id(make([5], params)._stops) for _ in range(3)}) == 1


def test_time_is_linear_in_strings_and_text() -> None:
    """The largest stop strings of a request, and texts that repeatedly fail late in them."""

    def taken_s(n: int, strings: Callable[[int], list[str]]) -> float:
        text = ("a" * (n - 1) + "c") * 8

        def run_once() -> float:
            begin, stops, place = time.perf_counter(), StopStrings(strings(n)), ROOT
            for char in text:
                place = stops.step(place, char)
            return time.perf_counter() - begin

        return min(run_once() for _ in range(3))

    kinds: list[Callable[[int], list[str]]] = [
        lambda n: ["a" * n + chr(100 + i) for i in range(64)],
        lambda n: ["a" * (i * n // 64) + "b" * (n - i * n // 64) for i in range(64)],
        lambda n: [("a" * i + "b") * (n // (i + 1)) for i in range(64)],
    ]
    for strings in kinds:
        assert taken_s(4096, strings) < 4 * 5 * taken_s(1024, strings)
