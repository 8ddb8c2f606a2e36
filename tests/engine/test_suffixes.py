"""Earlier matches of a sequence's last tokens, against a search position by position."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.suffixes import MAX_MATCH, match_suffix


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60))
def test_the_longest_and_latest_match_is_found(tokens: list[int]) -> None:
    best = (0, 0)
    for end in range(1, len(tokens)):
        length = 0
        while length < min(MAX_MATCH, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length:
            best = max(best, (length, end))
    assert match_suffix(np.array(tokens, dtype=np.int32)) == best
