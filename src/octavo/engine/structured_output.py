"""Structured output: keeps the outputs of a request within its grammar, by a bitmask of allowed tokens per position.

The core only knows that the request is constrained. A matcher follows the tokens of its sequence that the host knows.
The host never takes a token back, so preemption, swapping and recomputation need no special handling.

With speculation, the host also guesses the next tokens of constrained sequences: the drafts must be known for the
bitmasks after them.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from octavo.core.request import Sequence
from octavo.engine.executor import GrammarBitmask, GrammarDrafts

if TYPE_CHECKING:  # engine clients import this module, too, and need no numpy
    import numpy as np

MAX_MASKS = 64
"""Bitmasks of a column up to which its slices get drafts."""


class Matcher(Protocol):
    """The position of one output in a grammar; `octavo.text.grammar` implements it."""

    def fork(self) -> Matcher: ...

    def accept_tokens(self, token_ids: list[int]) -> None: ...

    def num_allowed(self, token_ids: list[int]) -> int:
        """How many of these tokens, from the first on, the grammar allows next."""

    def forced_tokens(self) -> list[int]:
        """Tokens that spell the only bytes that can come next. Other tokens may spell them, too."""

    @property
    def is_accepting(self) -> bool: ...

    @property
    def error(self) -> str: ...


class Grammar(Protocol):
    """A compiled grammar."""

    def start(self) -> Matcher: ...

    def bitmasks(self, matchers: Seq[Any]) -> np.ndarray:
        """`GrammarBitmask.bitmask`, one row per matcher: of this grammar, or of another grammar of the same model."""


class _SequenceMatcher:
    """The matcher of one sequence; it has accepted the first `num_known` tokens, prompt included."""

    def __init__(self, sequence: Sequence, matcher: Matcher, num_known: int) -> None:
        self.sequence = sequence
        self.matcher = matcher
        self.num_known = num_known


class RequestGrammar:
    """The grammar of a request, with a matcher for each of its sequences.

    stop_ids     tokens that end an output; allowed exactly where the output is complete
    ignored_ids  the model's end-of-sequence tokens under `ignore_eos`; they fill up an output that is complete and
                 cannot be continued
    """

    def __init__(
        self, grammar: Grammar, num_prompt: int, stop_ids: Iterable[int], ignored_ids: Iterable[int] = ()
    ) -> None:
        self.grammar = grammar
        self._num_prompt = num_prompt
        self._stop_ids = frozenset(stop_ids)
        self._ignored_ids = frozenset(ignored_ids) - self._stop_ids
        self._matchers: dict[Sequence, _SequenceMatcher] = {}

    def advance(self, sequences: Seq[Sequence]) -> None:
        """Advance the matchers of all live sequences of the request; call it before computing their bitmasks."""
        if len(sequences) != len(self._matchers) or not all(map(self._matchers.__contains__, sequences)):
            # Fork before any matcher advances: a forked sequence starts at its parent's old position.
            self._matchers = {s: self._matchers.get(s) or self._new_matcher(s) for s in sequences}
        for matcher in self._matchers.values():
            self._accept_new_tokens(matcher)

    def matcher(self, sequence: Sequence) -> Matcher:
        """The matcher of a sequence given to `advance`."""
        return self._matchers[sequence].matcher

    def draft(self, sequence: Sequence, limit: int) -> tuple[GrammarDrafts, list[Matcher]]:
        """Up to `limit` guesses of the next tokens -> (drafts, the matcher after each).

        A guess is what followed an earlier match of the last tokens, as far as the grammar allows it. If it does not
        allow its first token, the guess is what the grammar forces.
        """
        import numpy as np

        from octavo.engine.suffixes import NEXT_KIND, match_suffix

        tokens = np.array(sequence.token_ids, dtype=np.int32)
        drafts: list[int] = []
        num_matched: list[int] = []
        matcher, matchers = self.matcher(sequence), list[Matcher]()
        while len(drafts) < limit:
            length, begin, kind = match_suffix(tokens)
            found = tokens[begin : begin + limit - len(drafts)].tolist() if length else []
            if num := matcher.num_allowed(found):
                first = kind * NEXT_KIND + length
                num_matched += range(first, first + num)
            else:
                found = matcher.forced_tokens()[: limit - len(drafts)]
                num = matcher.num_allowed(found)
                num_matched += [0] * num
            if not num:
                break
            for token in found[:num]:
                matcher = matcher.fork()
                matcher.accept_tokens([token])
                matchers.append(matcher)
            drafts += found[:num]
            tokens = np.append(tokens, found[:num])
        return GrammarDrafts(drafts, num_matched), matchers

    def apply_stop_tokens(self, matcher: Matcher, mask: memoryview) -> None:
        """Allow or forbid stop tokens, which the grammar does not know, in a freshly filled mask of bytes.

        Raises `ValueError` if the grammar has become too complex to continue.
        """
        if error := matcher.error:
            raise ValueError(error)
        is_accepting = matcher.is_accepting
        _set_bits(mask, self._stop_ids, is_accepting)
        if self._ignored_ids:
            _set_bits(mask, self._ignored_ids, False)
            if is_accepting and not any(mask):
                _set_bits(mask, self._ignored_ids, True)

    def _new_matcher(self, sequence: Sequence) -> _SequenceMatcher:
        """Fork the matcher of the sequence that shares the longest prefix; without one, start at the beginning."""
        best: _SequenceMatcher | None = None
        for other in self._matchers.values():
            n = other.num_known
            if (best is None or n > best.num_known) and other.sequence.token_ids[:n] == sequence.token_ids[:n]:
                best = other
        if best is None:
            return _SequenceMatcher(sequence, self.grammar.start(), self._num_prompt)
        return _SequenceMatcher(sequence, best.matcher.fork(), best.num_known)

    def _accept_new_tokens(self, matcher: _SequenceMatcher) -> None:
        if new := matcher.sequence.token_ids[matcher.num_known :].tolist():
            matcher.num_known += len(new)
            if self._ignored_ids:
                new = [token for token in new if token not in self._ignored_ids]
            matcher.matcher.accept_tokens(new)


class BitmaskRow(NamedTuple):
    """A slice of a plan that waits for bitmasks: its sequence, grammar, and limit of drafts."""

    slice_index: int
    sequence: Sequence
    grammar: RequestGrammar
    max_drafts: int = 0


def compute_bitmask(rows: Seq[BitmaskRow]) -> tuple[GrammarBitmask | None, dict[int, Exception]]:
    """Draft tokens, and compute the bitmasks of these rows. Also returns slice -> error, for each row whose request
    fails."""
    advanced: set[RequestGrammar] = set()
    matched: list[tuple[BitmaskRow, list[Matcher]]] = []
    drafts: dict[int, GrammarDrafts] = {}
    errors: dict[int, Exception] = {}
    most = max(0, MAX_MASKS // len(rows) - 1) if rows else 0
    for row in rows:
        try:
            if row.grammar not in advanced:
                advanced.add(row.grammar)
                row.grammar.advance(row.sequence.request.sequences)
            matchers = [row.grammar.matcher(row.sequence)]
            if limit := min(row.max_drafts, most):
                drafts[row.slice_index], later = row.grammar.draft(row.sequence, limit)
                matchers += later
            matched.append((row, matchers))
        except Exception as error:
            errors[row.slice_index] = error
    if not matched:
        return None, errors
    bitmask = matched[0][0].grammar.grammar.bitmasks([matcher for _, matchers in matched for matcher in matchers])
    octets = memoryview(bitmask).cast("B")  # type: ignore[arg-type]
    size, begin = bitmask.strides[0], 0
    kept: list[int] = []
    for row, matchers in matched:
        for depth, matcher in enumerate(matchers):
            i = begin + depth
            try:
                row.grammar.apply_stop_tokens(matcher, octets[i * size : (i + 1) * size])
            except Exception as error:
                if depth:  # the draft may never become a token
                    tokens, num_matched = drafts[row.slice_index]
                    drafts[row.slice_index] = GrammarDrafts(tokens[: depth - 1], num_matched[: depth - 1])
                    break
                errors[row.slice_index] = error
            kept.append(i)
        begin += len(matchers)
    if len(kept) < len(bitmask):
        bitmask = bitmask[kept]
    return GrammarBitmask([row.slice_index for row, _ in matched], bitmask, drafts), errors


def _set_bits(mask: memoryview, token_ids: Iterable[int], allowed: bool) -> None:
    for token in token_ids:
        octet, bit = token // 8, 1 << token % 8
        if octet < len(mask):  # a tokenizer may name a stop token without a logit
            mask[octet] = mask[octet] | bit if allowed else mask[octet] & (255 ^ bit)
