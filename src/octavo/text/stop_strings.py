"""All stop strings of a request in one automaton (Aho and Corasick 1975), which all its samples share.

A sample's place in it is one integer: the longest beginning of any stop string that its text ends with.

    strings  "abcd", "abx", "bc"
    places   0  1 a  2 ab  3 abc  4 abcd  5 abx  6 b  7 bc      strings that begin alike share their places
    fails    3 abc -> 7 bc                                      the next shorter place that the text ends with, too

The trie is laid out with slices, a string at a time. A place's fail is worked out when a text first comes there: 64
strings of 4,096 characters are a quarter of a million places, of which a text visits few.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

ROOT = 0


class StopStrings:
    def __init__(self, texts: Sequence[str]) -> None:
        ordered = sorted(set(texts))
        chars = ["\0"]  # by place: the character that leads there
        self._depths = array("i", [0])
        self._branches: dict[tuple[int, str], int] = {}  # children that do not come right behind their parent
        self._parents: dict[int, int] = {}  # of those
        self._ends: dict[int, str] = {}
        self.num_chars = max(map(len, ordered), default=0)
        path, before = array("i", [ROOT]), ""  # the places of the string before
        for text in ordered:
            shared, first = _num_shared(before, text), len(self._depths)
            new = len(text) - shared
            parent = path[shared]
            if parent != first - 1:
                self._branches[parent, text[shared]] = first
                self._parents[first] = parent
            chars.append(text[shared:])
            self._depths.extend(range(shared + 1, len(text) + 1))
            path = path[: shared + 1] + array("i", range(first, first + new))
            self._ends[path[-1]] = text
            before = text
        self._chars = "".join(chars) + "\0"
        self._depths.append(0)
        self._firsts = frozenset(text[0] for text in ordered)
        self._fails = array("i", [-1]) * len(self._depths)
        self._found: dict[int, str] = {}  # place -> the longest string that ends there, for places whose fail is known
        self._fails[ROOT] = ROOT

    def begins_in(self, text: str) -> bool:
        """Whether a character of the text begins a stop string."""
        return not self._firsts.isdisjoint(text)

    def step(self, place: int, char: str) -> int:
        """The next place."""
        while (following := self._child(place, char)) < 0:
            if place == ROOT:
                return ROOT
            place = self._fail(place)
        self._fail(following)
        return following

    def found(self, place: int) -> str | None:
        """The longest stop string that is complete there."""
        return self._found.get(place)

    def num_held(self, place: int) -> int:
        """Characters at the end of the text that may become a stop string."""
        return self._depths[place]

    def pass_over(self, place: int) -> int:
        """The place after strings that are complete and do not count: their ends may begin others."""
        while place in self._ends and not self._has_children(place):
            place = self._fail(place)
        return place

    def _child(self, place: int, char: str) -> int:
        following = place + 1
        if self._chars[following] == char and self._depths[following] == self._depths[place] + 1:
            return following
        return self._branches.get((place, char), -1)

    def _has_children(self, place: int) -> bool:
        # Others than the one right behind there are only where that one is.
        return self._depths[place + 1] == self._depths[place] + 1

    def _parent(self, place: int) -> int:
        return self._parents.get(place, place - 1)

    def _fail(self, place: int) -> int:
        path = []
        while self._fails[place] < 0:
            path.append(place)
            place = self._parent(place)
        for child in reversed(path):
            char, fail = self._chars[child], self._fails[place]
            if place == ROOT:
                fail = ROOT
            else:
                while (following := self._child(fail, char)) < 0 and fail != ROOT:
                    fail = self._fail(fail)  # a lower place, of another string: no deeper than there are strings
                fail = max(following, ROOT)
                self._fail(fail)
            self._fails[child] = fail
            if (found := self._ends.get(child) or self._found.get(fail)) is not None:
                self._found[child] = found
            place = child
        return self._fails[place]


def _num_shared(one: str, other: str) -> int:
    """Characters that both begin with, found by halving: a comparison of slices costs next to nothing."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
