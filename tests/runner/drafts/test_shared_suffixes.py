"""Matches in other sequences: right ones alone, of the same salt alone, within a bound of bytes."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from octavo.engine.suffixes import MAX_MATCH
from octavo.kernels.row_state import MAX_DRAFTS
from octavo.runner.drafts import shared_suffixes
from octavo.runner.drafts.shared_suffixes import SIZES, SharedSuffixes

SHORT, LONG = SIZES[-1], SIZES[0]
SALTS = b"", b"tenant"
NUM_ROWS, MAX_LEN = 3, 400


class Rows:
    """Rows with their histories, which sequences overwrite."""

    def __init__(self, shared: SharedSuffixes) -> None:
        self.shared = shared
        self.history = np.zeros((NUM_ROWS, MAX_LEN), dtype=np.int32)
        self.lengths = [0] * NUM_ROWS

    def begin(self, row: int, salt: bytes = b"") -> None:
        self.shared.begin(row, salt)
        self.history[row], self.lengths[row] = 9999, 0

    def append(self, row: int, tokens: list[int]) -> None:
        begin, end = self.lengths[row], min(self.lengths[row] + len(tokens), MAX_LEN)
        self.history[row, begin:end] = tokens[: end - begin]
        self.lengths[row] = end
        self.shared.extend(row, self.history[row, :end])

    def tokens(self, row: int) -> list[int]:
        return self.history[row, : self.lengths[row]].tolist()

    def match(self, row: int, tokens: list[int]) -> tuple[int, list[int]]:
        return self.shared.match(row, np.array(tokens, dtype=np.int32))

    def play(self, row: int, tokens: list[int], salt: bytes = b"") -> None:
        """A whole sequence, and the beginning of another."""
        self.begin(row, salt)
        self.append(row, tokens)
        self.begin(row, salt)


def places(tokens: list[int], last: list[int]) -> list[int]:
    return [end for end in range(len(last), len(tokens)) if tokens[end - len(last) : end] == last]


# -- against a search of everything ------------------------------------------------------------------------------------

TURNS = st.lists(
    st.tuples(
        st.integers(0, NUM_ROWS - 1),
        st.sampled_from([None, None, *SALTS]),  # None: the row's sequence goes on
        st.lists(st.integers(0, 3), min_size=1, max_size=80),
    ),
    min_size=4,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(TURNS)
def test_matches_are_those_of_a_search(turns: list[tuple[int, bytes | None, list[int]]]) -> None:
    """A match is in a sequence of the same salt, and no longer there. All of an ended sequence is found."""
    shared = SharedSuffixes()
    rows, salts = Rows(shared), [b""] * NUM_ROWS
    for row in range(NUM_ROWS):
        rows.begin(row)
    ended: list[tuple[bytes, list[int]]] = []
    for row, salt, tokens in turns:
        if salt is not None:
            ended.append((salts[row], rows.tokens(row)))
            salts[row] = salt
            rows.begin(row, salt)
        rows.append(row, tokens)
    everything = ended + [(salts[row], rows.tokens(row)) for row in range(NUM_ROWS)]
    grams = {(s, n, tuple(t[i : i + n])) for s, t in everything for n in SIZES for i in range(len(t) - n + 1)}
    slots = {int(shared._slots(s, np.array(gram), n)[0]) for s, n, gram in grams}
    assume(len(slots) == len(grams))  # no hash of one hides another
    for row in range(NUM_ROWS):
        for last in (rows.tokens(row), *(tokens[: len(tokens) // 2] for _, tokens in everything)):
            length, following = rows.match(row, last)
            mine = [tokens for salt, tokens in everything if salt == salts[row]]
            if length:
                assert following and SHORT <= length <= MAX_MATCH
                found = [(t, end) for t in mine for end in places(t, last[-length:])]
                found = [(t, end) for t, end in found if t[end : end + MAX_DRAFTS] == following]
                assert found
                if length < min(MAX_MATCH, len(last)):
                    longest = [end == length or t[end - length - 1] != last[-length - 1] for t, end in found]
                    assert any(longest)
            for size in SIZES:
                if any(salt == salts[row] and places(t, last[-size:]) for salt, t in ended) and len(last) >= size:
                    assert length >= size


# -- examples ----------------------------------------------------------------------------------------------------------


def test_a_match_grows_backwards_up_to_the_most() -> None:
    rows = Rows(SharedSuffixes())
    rows.play(0, [*range(100)])
    for num in (SHORT, LONG, MAX_MATCH, MAX_MATCH + 9):
        assert rows.match(0, [777, *range(40 - num, 40)]) == (min(num, MAX_MATCH), [*range(40, 40 + MAX_DRAFTS)])
    assert rows.match(0, [*range(40 - SHORT + 1, 40)]) == (0, [])
    assert rows.match(0, [*range(90, 97)]) == (7, [97, 98, 99])
    assert rows.match(0, [*range(90, 100)]) == (0, [])  # nothing follows


def test_a_running_sequence_is_found_but_for_its_newest_tokens() -> None:
    """What is found has all drafts after it: equal requests that run together find what an earlier one wrote."""
    rows = Rows(SharedSuffixes())
    rows.begin(0)
    rows.begin(1)
    rows.append(0, [*range(60)])
    assert rows.match(1, [*range(30)]) == (MAX_MATCH, [*range(30, 30 + MAX_DRAFTS)])
    assert rows.match(1, [*range(60 - MAX_DRAFTS)])[0] == MAX_MATCH
    assert rows.match(1, [*range(61 - MAX_DRAFTS)]) == (0, [])
    for token in range(60, 200):
        rows.append(0, [token])
    for end in range(MAX_MATCH, 170):
        assert rows.match(1, [*range(end)]) == (MAX_MATCH, [*range(end, end + MAX_DRAFTS)])


def test_the_newest_of_several_places_is_found_and_the_longer_match_first() -> None:
    rows = Rows(SharedSuffixes())
    rows.play(0, [*range(LONG), 50])
    rows.play(0, [99, *range(LONG - SHORT, LONG), 60])
    assert rows.match(0, [*range(LONG)]) == (LONG, [50])
    assert rows.match(0, [98, *range(1, LONG)]) == (SHORT, [60])


# -- salts -------------------------------------------------------------------------------------------------------------


def test_other_salts_are_not_found_even_if_all_hashes_are_equal() -> None:
    for num_slots in (1, 10**6):
        shared = SharedSuffixes()
        shared._table = np.zeros(num_slots, dtype=np.int64)
        rows = Rows(shared)
        rows.begin(0, b"ours")
        rows.append(0, [*range(100)])
        rows.begin(1, b"theirs")
        end = 100 - MAX_DRAFTS  # the last position of all
        assert rows.match(1, [*range(end)]) == (0, [])
        rows.begin(1, b"ours")
        assert rows.match(1, [*range(end)]) == (MAX_MATCH, [*range(end, 100)])
        rows.begin(0, b"theirs")  # the tokens keep their salt
        assert rows.match(0, [*range(99)]) == (0, []) and rows.match(1, [*range(99)]) == (MAX_MATCH, [99])


# -- the bound ---------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(TURNS, st.sampled_from([4_000, 8_000, 20_000]))
def test_copies_and_the_table_stay_within_the_bound(turns: list[Any], max_bytes: int) -> None:
    """Running sequences are views of the rows' histories."""
    rows = Rows(SharedSuffixes(max_bytes))
    for row, salt, tokens in turns * 3:
        if salt is not None or not rows.lengths[row]:
            rows.begin(row, salt or b"")
        rows.append(row, tokens)
        shared = rows.shared
        copies = [d for d in shared._documents.values() if not np.shares_memory(d.tokens, rows.history)]
        assert len(copies) == len(shared._copied)
        assert shared._table.nbytes + sum(d.num_bytes for d in copies) == max_bytes - shared._room <= max_bytes
        assert len(shared._documents) - len(copies) <= NUM_ROWS


@pytest.mark.parametrize("num_tokens", [1, 10, 300])
def test_the_bound_counts_all_that_is_allocated(num_tokens: int) -> None:
    tracemalloc.start()
    try:
        rows = Rows(SharedSuffixes(200_000))
        for i in range(1500):
            rows.play(0, [i] * num_tokens, b"%0100d" % i)
        # Other threads allocate too, so only what these two files allocated counts.
        files = [tracemalloc.Filter(True, file) for file in (shared_suffixes.__file__, __file__)]
        traces = tracemalloc.take_snapshot().filter_traces(files).traces
    finally:
        tracemalloc.stop()
    num_bytes = sum(trace.size for trace in traces)
    assert rows.shared._room < 3_000 and 150_000 < num_bytes < 230_000


def test_the_oldest_tokens_make_room() -> None:
    rows = Rows(SharedSuffixes(100_000))
    sequences = [[*range(1000 * i, 1000 * i + 300)] for i in range(60)]
    for tokens in sequences:
        rows.play(0, tokens)
    found = [any(rows.match(0, tokens[:end])[0] for end in range(20, 200, 10)) for tokens in sequences]
    num = sum(found)
    assert found == [False] * (60 - num) + [True] * num and 10 < num < 20
    assert len(rows.shared._documents) == num


def test_a_sequence_longer_than_the_bound_is_dropped() -> None:
    rows = Rows(SharedSuffixes(4_000))
    rows.play(0, [*range(MAX_LEN)])
    assert rows.match(0, [*range(200)]) == (0, []) and not rows.shared._documents
