"""Earlier matches of a sequence's last tokens, against a search position by position."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.suffixes import MAX_MATCH, NEXT_KIND, match_suffix
from octavo.kernels.row_state import MAX_DRAFTS


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60))
def test_the_longest_and_latest_match_is_found_with_how_many_agree(tokens: list[int]) -> None:
    by_length: dict[int, list[int]] = {}
    for end in range(1, len(tokens)):
        length = 0
        while length < min(MAX_MATCH, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length:
            by_length.setdefault(length, []).append(end)
    best = (0, 0, 0)
    if by_length:
        length = max(by_length)
        *others, end = by_length[length]
        agree = [tokens[other] == tokens[end] for other in (*others, end)]
        best = (length, end, 0 if not others else 1 if all(agree) else 2 if sum(agree) / len(agree) >= 0.5 else 3)
    assert match_suffix(np.array(tokens, dtype=np.int32)) == best


def test_the_lengths_of_two_kinds_never_meet() -> None:
    assert MAX_MATCH + MAX_DRAFTS < NEXT_KIND
