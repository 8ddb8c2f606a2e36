"""What keeps a request's outputs to a grammar: where each of its sequences is in it, and which tokens may come next.

The core knows nothing of it but that the request is constrained. A matcher goes along with what the host knows of its
sequence, and the host never takes a token back: whatever is preempted, swapped or computed again, it stays right.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from octavo.core.request import Sequence
from octavo.engine.executor import GrammarBitmask

if TYPE_CHECKING:
    import numpy as np


class Matcher(Protocol):
    """Where one output is in a grammar; see `octavo.text.grammar`, which has one."""

    def fork(self) -> Matcher: ...

    def accept_tokens(self, token_ids: list[int]) -> None: ...

    @property
    def is_accepting(self) -> bool: ...

    @property
    def error(self) -> str: ...


class Grammar(Protocol):
    """What outputs have to follow."""

    def start(self) -> Matcher: ...

    def bitmasks(self, matchers: Seq[Any]) -> np.ndarray:
        """What may come next of each, of this grammar or another of the same model's: `GrammarBitmask.bitmask`."""


class _Place:
    """Where one sequence is. `num_known` of its tokens, the prompt's included, have been seen."""

    def __init__(self, sequence: Sequence, matcher: Matcher, num_known: int) -> None:
        self.sequence = sequence
        self.matcher = matcher
        self.num_known = num_known


class Constraint:
    """A request's grammar, and its sequences' places in it.

    stop_ids     tokens that end an output: allowed exactly where it is complete
    ignored_ids  the model's ends where they end nothing (`ignore_eos`): what is complete and cannot go on is filled up
                 with them
    """

    def __init__(
        self, grammar: Grammar, num_prompt: int, stop_ids: Iterable[int], ignored_ids: Iterable[int] = ()
    ) -> None:
        self.grammar = grammar
        self._num_prompt = num_prompt
        self._stop_ids = frozenset(stop_ids)
        self._ignored_ids = frozenset(ignored_ids) - self._stop_ids
        self._places: dict[Sequence, _Place] = {}

    def follow(self, sequences: Seq[Sequence]) -> None:
        """Go along with all live sequences of the request, before masks of any are asked for."""
        if len(sequences) != len(self._places) or not all(map(self._places.__contains__, sequences)):
            # All forks are made before anyone moves on: a sequence begins where the one it was forked from had been.
            self._places = {s: self._places.get(s) or self._begin(s) for s in sequences}
        for place in self._places.values():
            self._advance(place)

    def matcher(self, sequence: Sequence) -> Matcher:
        """Where a sequence is that was followed."""
        return self._places[sequence].matcher

    def finish(self, matcher: Matcher, mask: memoryview) -> None:
        """Say of ends what the grammar knows nothing of; mask, of bytes, has just been made.

        Raises `ValueError` when the grammar has become too complex to go on.
        """
        if error := matcher.error:
            raise ValueError(error)
        is_accepting = matcher.is_accepting
        _put(mask, self._stop_ids, is_accepting)
        if self._ignored_ids:
            _put(mask, self._ignored_ids, False)
            if is_accepting and not any(mask):
                _put(mask, self._ignored_ids, True)

    def _begin(self, sequence: Sequence) -> _Place:
        """Where the sequence that shares most of this one's tokens is; failing that, at the beginning."""
        best: _Place | None = None
        for place in self._places.values():
            n = place.num_known
            if (best is None or n > best.num_known) and place.sequence.token_ids[:n] == sequence.token_ids[:n]:
                best = place
        if best is None:
            return _Place(sequence, self.grammar.start(), self._num_prompt)
        return _Place(sequence, best.matcher.fork(), best.num_known)

    def _advance(self, place: _Place) -> None:
        if new := place.sequence.token_ids[place.num_known :].tolist():
            place.num_known += len(new)
            if self._ignored_ids:
                new = [token for token in new if token not in self._ignored_ids]
            place.matcher.accept_tokens(new)


class Wanted(NamedTuple):
    """A mask: for which slice, by whose constraint."""

    slice_index: int
    sequence: Sequence
    constraint: Constraint


def work_out(wanted: Seq[Wanted]) -> tuple[GrammarBitmask | None, dict[int, Exception]]:
    """The masks, and why there is none: slice -> what is wrong with its request alone."""
    followed: set[Constraint] = set()
    found: list[tuple[Wanted, Matcher]] = []
    errors: dict[int, Exception] = {}
    for want in wanted:
        try:
            if want.constraint not in followed:
                followed.add(want.constraint)
                want.constraint.follow(want.sequence.request.sequences)
            found.append((want, want.constraint.matcher(want.sequence)))
        except Exception as error:
            errors[want.slice_index] = error
    if not found:
        return None, errors
    words = found[0][0].constraint.grammar.bitmasks([matcher for _, matcher in found])
    octets = memoryview(words).cast("B")  # type: ignore[arg-type]
    size = len(octets) // len(found)
    for i, (want, matcher) in enumerate(found):
        try:
            want.constraint.finish(matcher, octets[i * size : (i + 1) * size])
        except Exception as error:
            errors[want.slice_index] = error
    return GrammarBitmask([want.slice_index for want, _ in found], words), errors


def _put(mask: memoryview, token_ids: Iterable[int], allowed: bool) -> None:
    for token in token_ids:
        octet, bit = token // 8, 1 << token % 8
        if octet < len(mask):  # a tokenizer may name an end that the model has no logit for
            mask[octet] = mask[octet] | bit if allowed else mask[octet] & (255 ^ bit)
