"""Earlier matches of the last tokens of a sequence: what followed them is a guess of what comes next."""

from __future__ import annotations

import numpy as np

MAX_MATCH = 16
"""Last tokens of a sequence that are looked for in what is before them."""


def match_suffix(tokens: np.ndarray) -> tuple[int, int]:
    """Find the longest earlier match of the last tokens -> (its length up to MAX_MATCH, the position after it).

    Returns (0, 0) if there is none.

    tokens  [num_tokens], at least one
    """
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    if not len(ends):
        return 0, 0
    length = 1
    while length < MAX_MATCH:
        longer = ends[np.searchsorted(ends, length) :]
        longer = longer[tokens[longer - length] == tokens[last - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return length, int(ends[-1]) + 1
