"""Earlier matches of the last tokens of a sequence: what followed them is a guess of what comes next."""

from __future__ import annotations

import numpy as np

MAX_MATCH = 16
"""Last tokens of a sequence that are looked for in what is before them."""
NEXT_KIND = 64
"""Longer than any match with its drafts: the lengths of kind k begin at k * NEXT_KIND. See `match_suffix`."""


def match_suffix(tokens: np.ndarray) -> tuple[int, int, int]:
    """Find the longest earlier match of the last tokens -> (length up to MAX_MATCH, position after it, kind).

    Returns (0, 0, 0) if there is none. The latest of the longest matches counts. Its kind is 0 if it is the only one,
    else by how many of the matches go on with the same token: 1: all, 2: at least half, 3: fewer.

    tokens  [num_tokens], at least one
    """
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    if not len(ends):
        return 0, 0, 0
    length = 1
    while length < MAX_MATCH:
        longer = ends[np.searchsorted(ends, length) :]
        longer = longer[tokens[longer - length] == tokens[last - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    following = tokens[ends + 1]
    agreeing = np.count_nonzero(following == following[-1])
    kind = 0 if len(ends) == 1 else 1 if agreeing == len(ends) else 2 if 2 * agreeing >= len(ends) else 3
    return length, int(ends[-1]) + 1, kind
