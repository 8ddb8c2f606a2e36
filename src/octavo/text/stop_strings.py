"""All stop strings of a request in one Aho-Corasick automaton (1975), shared by all of the request's samples.

A sample's state is one integer: the trie node of the longest stop-string prefix that the sample's text ends with.

    strings   "abcd", "abx", "bc"
    states    0  1 a  2 ab  3 abc  4 abcd  5 abx  6 b  7 bc     strings with a common prefix share its states
    failure   3 abc -> 7 bc                                     the next shorter state that the text also ends with

The trie is laid out with slices, one string at a time. A failure link is computed when a text first reaches its state:
64 strings of 4,096 characters are a quarter of a million states, of which a text visits few.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

ROOT = 0


class StopStrings:
    """The automaton of `texts`. Immutable but for its cached failure links."""

    def __init__(self, texts: Sequence[str]) -> None:
        ordered = sorted(set(texts))
        chars = ["\0"]  # by state: its last character
        self._depths = array("i", [0])
        self._branch_children: dict[tuple[int, str], int] = {}  # children not stored directly after their parent
        self._branch_parents: dict[int, int] = {}  # parents of these
        self._ends: dict[int, str] = {}
        self.num_chars = max(map(len, ordered), default=0)
        path, previous = array("i", [ROOT]), ""  # the states of the previous string
        for text in ordered:
            shared, first = _num_shared(previous, text), len(self._depths)
            num_new = len(text) - shared
            parent = path[shared]
            if parent != first - 1:
                self._branch_children[parent, text[shared]] = first
                self._branch_parents[first] = parent
            chars.append(text[shared:])
            self._depths.extend(range(shared + 1, len(text) + 1))
            path = path[: shared + 1] + array("i", range(first, first + num_new))
            self._ends[path[-1]] = text
            previous = text
        self._chars = "".join(chars) + "\0"
        self._depths.append(0)
        self._firsts = frozenset(text[0] for text in ordered)
        self._failures = array("i", [-1]) * len(self._depths)
        self._matches: dict[int, str] = {}  # state -> longest string that ends there; set with its failure link
        self._failures[ROOT] = ROOT

    def may_start_in(self, text: str) -> bool:
        """True if a character of the text begins a stop string."""
        return not self._firsts.isdisjoint(text)

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while (child := self._child(state, char)) < 0:
            if state == ROOT:
                return ROOT
            state = self._failure(state)
        self._failure(child)
        return child

    def match_at(self, state: int) -> str | None:
        """The longest stop string that ends at this state."""
        return self._matches.get(state)

    def num_partial_chars(self, state: int) -> int:
        """Characters at the end of the text that may become a stop string."""
        return self._depths[state]

    def skip_matches(self, state: int) -> int:
        """The state after complete strings that do not count: their suffixes may begin others."""
        while state in self._ends and not self._has_children(state):
            state = self._failure(state)
        return state

    def _child(self, state: int, char: str) -> int:
        child = state + 1
        if self._chars[child] == char and self._depths[child] == self._depths[state] + 1:
            return child
        return self._branch_children.get((state, char), -1)

    def _has_children(self, state: int) -> bool:
        # The first child is always stored directly after its parent.
        return self._depths[state + 1] == self._depths[state] + 1

    def _parent(self, state: int) -> int:
        return self._branch_parents.get(state, state - 1)

    def _failure(self, state: int) -> int:
        """The failure link of `state`. Computes missing links on the path from the root."""
        path = []
        while self._failures[state] < 0:
            path.append(state)
            state = self._parent(state)
        for child in reversed(path):
            char, fail = self._chars[child], self._failures[state]
            if state == ROOT:
                fail = ROOT
            else:
                while (target := self._child(fail, char)) < 0 and fail != ROOT:
                    fail = self._failure(fail)  # a shallower state of another string, which bounds the recursion
                fail = max(target, ROOT)
                self._failure(fail)
            self._failures[child] = fail
            if (match := self._ends.get(child) or self._matches.get(fail)) is not None:
                self._matches[child] = match
            state = child
        return self._failures[state]


def _num_shared(first_text: str, second_text: str) -> int:
    """Length of the common prefix, by bisection: comparing slices is nearly free."""
    low, high = 0, min(len(first_text), len(second_text))
    while low < high:
        middle = (low + high + 1) // 2
        if first_text[low:middle] == second_text[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
