"""Chooses how many drafts decode passes have: as many as measurements justify.

    tokens known so far -> a guess of what follows -> its chance to be right -> drafts that raise tokens per time

A pass takes longer with each draft, and returns more tokens with each that is right. Both are measured: the time of a
pass by its number of lines, and how often drafts of a match of this length were right. Every pass makes guesses, and
learns from those that it did not compute, too: the next token tells if the first one was right.

`Drafter` does this for each row and pass, where the host sees the device's memory. `DraftLimit` does it for each plan,
where the device makes the guesses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from octavo.engine.executor import GrammarDrafts
from octavo.engine.suffixes import MAX_MATCH, NEXT_KIND, match_suffix
from octavo.kernels.row_state import MAX_DRAFTS, RowState
from octavo.runner.drafts.shared_suffixes import SharedSuffixes
from octavo.runner.streams import Timer

MAX_LINES, MAX_DEVICE_LINES = 64, 512
"""Lines up to which a pass gets drafts, from a `Drafter` and from a `DraftLimit`."""
FIRST_SLOPE, FIRST_GPU_SLOPE = 0.1, 0.005
"""Cost of a line before any is measured, in parts of a pass of one line."""
FIRST_DRAFT = 0.2
"""Cost of a draft model's pass before any is measured, likewise."""
DECAY_OF_TIMES, DECAY_OF_CHANCES, DECAY_OF_ROWS, DECAY_OF_LIMITS = 0.97, 0.995, 0.9, 0.99
NO_GRAMMARS: Mapping[int, GrammarDrafts] = {}
SHARED = 4 * NEXT_KIND
"""Added to the length of a match in a shared document: its drafts have chances of their own, as kinds have."""
ROW_WEIGHT = 1.0
"""Right drafts that each row begins with, in place of experience."""
KIND_WEIGHT = 2.0
"""Drafts that a kind of match begins with, likewise: so many, right as often as those of its length are."""


class PassTimes:
    """Seconds of a pass by its number of lines: a line through the measured ones, of which the last weigh most."""

    def __init__(self, first_slope: float = FIRST_SLOPE) -> None:
        self._first_slope = first_slope
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def record(self, num_lines: int, seconds: float, num_drafts: int = 0) -> None:
        """num_drafts: cost nothing"""
        if self._weight > 3:  # the machine may have done something else
            seconds = min(seconds, 2 * self.predict(num_lines))
        self._weight, self._x, self._y, self._xx, self._xy = (
            DECAY_OF_TIMES * total + new
            for total, new in (
                (self._weight, 1.0),
                (self._x, num_lines),
                (self._y, seconds),
                (self._xx, num_lines**2),
                (self._xy, num_lines * seconds),
            )
        )

    def line(self) -> tuple[float, float]:
        """(seconds of no line, seconds of each). The slope is drawn to the first one, as by one line measured twice."""
        if not self._weight:
            return 1.0, self._first_slope
        x, y = self._x / self._weight, self._y / self._weight
        first = self._first_slope * y / (1 + self._first_slope * (x - 1))
        spread, product = self._xx - self._weight * x * x, self._xy - self._weight * x * y
        slope = max((product + first) / (spread + 1.0), 0.0)
        return y - slope * x, slope

    def predict(self, num_lines: int, num_drafts: int = 0) -> float:
        base, slope = self.line()
        return base + slope * num_lines


class DraftModelTimes:
    """Seconds of a pass by its number of lines and its drafts: a draft model runs once for each, and once more.

    A plane through the measured points, of which the last weigh most. Both slopes are drawn to the first ones.
    """

    def __init__(self) -> None:
        self._products, self._moments = np.zeros((3, 3)), np.zeros(3)

    def record(self, num_lines: int, seconds: float, num_drafts: int) -> None:
        if self._products[0, 0] > 3:  # as in `PassTimes`
            seconds = min(seconds, 2 * self.predict(num_lines, num_drafts))
        x = np.array([1.0, num_lines, num_drafts + 1])
        self._products = DECAY_OF_TIMES * self._products + np.outer(x, x)
        self._moments = DECAY_OF_TIMES * self._moments + x * seconds

    def predict(self, num_lines: int, num_drafts: int) -> float:
        plane = np.array([1.0, FIRST_SLOPE, FIRST_DRAFT])
        if total := self._products[0] @ plane:
            plane *= self._moments[0] / total
            missing = self._moments - self._products @ plane
            plane += np.linalg.solve(self._products + np.diag([1e-3, 1.0, 1.0]), missing)
        return max(float(plane @ np.array([1.0, num_lines, num_drafts + 1])), 1e-9)


class Guess(NamedTuple):
    """What a row's next tokens may be.

    position     that of the last token when it was made
    tokens       may be more than were computed
    num_matched  of each token: length of the match that it continues, and NEXT_KIND times its kind more (see
                 `match_suffix`), or SHARED more if it is in a shared document; 0: its bytes are the only ones of the
                 grammar
    """

    position: int
    tokens: Sequence[int]
    num_matched: Sequence[int]


class Chances:
    """How likely a draft is right if those before it are: by length and kind of its match, and by the row's luck."""

    def __init__(self) -> None:
        lengths = np.arange(SHARED + NEXT_KIND) % NEXT_KIND
        self._common = np.arange(len(lengths))  # where all kinds of a length count together
        self._common[:SHARED] = lengths[:SHARED]
        self._right, self._tried = np.where(lengths, 0.9 - 0.7 / lengths.clip(1), 0.9) * 4, np.full(len(lengths), 4.0)
        self._kind_right, self._kind_tried = np.zeros(len(lengths)), np.zeros(len(lengths))
        self._rows: dict[int, tuple[float, float]] = {}  # row -> drafts that were right, drafts expected to be

    def of(self, row: int, num_matched: Sequence[int]) -> np.ndarray:
        """Of each draft -> [num_drafts]. num_matched: see `Guess`"""
        right, expected = self._rows.get(row, (0.0, 0.0))
        luck = (right + ROW_WEIGHT) / (expected + ROW_WEIGHT)
        chances: np.ndarray = np.minimum(self._of_kinds(list(num_matched)) * luck, 0.98)
        return chances

    def learn(self, row: int, guess: Guess, tokens: list[int]) -> None:
        """tokens   what came after the position of the guess; at least one"""
        for i, draft, token in zip(guess.num_matched, guess.tokens, tokens, strict=False):
            right, expected = self._rows.get(row, (0.0, 0.0))
            is_right = draft == token
            chance = float(self._of_kinds([i])[0])
            self._rows[row] = DECAY_OF_ROWS * right + is_right, DECAY_OF_ROWS * expected + chance
            for place, num_right, num_tried in (
                (self._common[i], self._right, self._tried),
                (i, self._kind_right, self._kind_tried),
            ):
                num_right[place] = DECAY_OF_CHANCES * num_right[place] + is_right
                num_tried[place] = DECAY_OF_CHANCES * num_tried[place] + 1
            if not is_right:
                break

    def _of_kinds(self, num_matched: list[int]) -> np.ndarray:
        """Without luck. A kind begins with the chance of its length."""
        common = self._common[num_matched]
        weighted = KIND_WEIGHT * self._right[common] / self._tried[common]
        chances: np.ndarray = (self._kind_right[num_matched] + weighted) / (self._kind_tried[num_matched] + KIND_WEIGHT)
        return chances

    def forget(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._rows.pop(row, None)


class Drafter:
    """Guesses of all rows. Reads `RowState.history` and writes `RowState.drafts`.

    times   of passes
    """

    def __init__(self, state: RowState, shared: SharedSuffixes | None = None, *, measures: bool = True) -> None:
        """shared: None: guesses come from a row's own tokens alone. measures: learns how long passes take"""
        self._measures = measures
        self.times = PassTimes()
        self._state, self._shared = state, shared
        self._chances = Chances()
        self._guesses: dict[int, Guess] = {}
        self._sizes: set[int] = set()  # lines of passes so far

    def record_pass(self, num_lines: int, seconds: float) -> None:
        """Learn the time of a pass, but for the first one of each size: that takes longer, as graphs are recorded."""
        if num_lines in self._sizes and self._measures:
            self.times.record(num_lines, seconds)
        self._sizes.add(num_lines)

    def forget(self, rows: Mapping[int, bytes]) -> None:
        """Rows that get another sequence, with its salt. Their history is still that of the last one."""
        self._chances.forget(rows)
        for row, salt in rows.items():
            self._guesses.pop(row, None)
            if self._shared is not None:
                self._shared.begin(row, salt)

    def choose(
        self,
        rows: np.ndarray,
        ends: np.ndarray,
        limits: np.ndarray,
        grammars: Mapping[int, GrammarDrafts] = NO_GRAMMARS,
    ) -> np.ndarray:
        """Write the next pass's drafts -> their number by slice, [num_slices].

        rows, ends, limits  [num_slices]; no draft is at `ends` or later, and there are at most `limits`
        grammars            row -> its drafts, for rows whose bitmasks follow them
        """
        candidates: list[tuple[float, int]] = []
        for i, (row, end, limit) in enumerate(zip(rows.tolist(), ends.tolist(), limits.tolist(), strict=True)):
            if not limit:
                continue
            guess = self._guess(row, min(limit, MAX_DRAFTS), grammars.get(row))
            num = min(len(guess.tokens), limit, end - 1 - guess.position)
            if num > 0:
                survival = self._chances.of(row, guess.num_matched[:num]).cumprod()
                candidates += ((chance, i) for chance in survival.tolist())
                self._state.drafts.numpy()[row, :num] = guess.tokens[:num]
        candidates.sort(key=lambda candidate: -candidate[0])  # stable: a row's drafts stay in their order
        chosen = candidates[: self._num_worthwhile(len(rows), [chance for chance, _ in candidates])]
        counts: np.ndarray = np.bincount(np.array([i for _, i in chosen], dtype=np.int64), minlength=len(rows))
        return counts

    def _guess(self, row: int, num: int, drafts: GrammarDrafts | None) -> Guess:
        state = self._state
        position = int(state.num_computed[row])
        history = state.history.numpy()[row, : position + 1]
        last = self._guesses.pop(row, None)
        if last is not None and last.position < position:
            self._chances.learn(row, last, history[last.position + 1 :].tolist())
        if drafts is None:
            num_matched, begin, kind = match_suffix(history)
            following = history[begin : begin + num]
            tokens = (following if len(following) == num else np.resize(following, num)).tolist()
            if self._shared is not None:
                num_shared, shared = self._shared.match(row, history) if num_matched < MAX_MATCH else (0, [])
                self._shared.extend(row, history)
                if num_shared > num_matched:
                    num_matched, kind, tokens = num_shared, SHARED // NEXT_KIND, shared[:num]
            first = kind * NEXT_KIND + num_matched
            drafts = GrammarDrafts(tokens, range(first, first + num)) if num_matched else GrammarDrafts()
        guess = self._guesses[row] = Guess(position, *drafts)
        return guess

    def _num_worthwhile(self, num_slices: int, chances: list[float]) -> int:
        """How many of the drafts, likely ones first, give the most tokens per time."""
        base, slope = self.times.line()
        best_num, best_rate, num_tokens = 0, num_slices / (base + slope * num_slices), float(num_slices)
        for num, chance in enumerate(chances[: max(0, MAX_LINES - num_slices)], 1):
            num_tokens += chance
            rate = num_tokens / (base + slope * (num_slices + num))
            if rate > best_rate:
                best_num, best_rate = num, rate
        return best_num


class PassTimers:
    """Measures how long decode passes take, on a device that runs them later."""

    def __init__(self, make_timer: Callable[[], Timer | None] | None) -> None:
        """make_timer: None, or returns None: nothing is measured"""
        self._make_timer = make_timer
        self._running: deque[tuple[Timer, int, int, int]] = deque()
        self._sizes: set[tuple[int, int]] = set()  # lines and drafts of passes so far

    @contextmanager
    def measure(self, num_lines: int, num_drafts: int, num_passes: int) -> Iterator[None]:
        """num_lines, num_drafts: see `PassShape`"""
        timer = None if self._make_timer is None else self._make_timer()
        if timer is None:
            yield
            return
        timer.start()
        yield
        timer.stop()
        self._running.append((timer, num_lines, num_drafts, num_passes))

    def collect(self, times: PassTimes | DraftModelTimes) -> None:
        """Record the passes that are done."""
        while self._running and (seconds := self._running[0][0].seconds()) is not None:
            _, num_lines, num_drafts, num_passes = self._running.popleft()
            if (num_lines, num_drafts) in self._sizes:  # see `Drafter.record_pass`
                times.record(num_lines, seconds / num_passes, num_drafts)
            self._sizes.add((num_lines, num_drafts))


class DraftLimit:
    """How many drafts each sequence of a plan has, where the device or a model makes the guesses: one number, for one
    graph.

    times   of passes by their lines, with the padding of graphs
    timers  measure these
    """

    CHOICES = (0, 1, 3, 7, 15)
    FIRST_PROBE, PROBE_INTERVAL = 4, 64
    """A plan with one draft after so many without: first, and at most. The interval doubles from one to the next."""

    def __init__(self, make_timer: Callable[[], Timer | None] | None, *, drafts_cost: bool = False) -> None:
        """drafts_cost: a model makes them, within the pass"""
        self.times = DraftModelTimes() if drafts_cost else PassTimes(FIRST_GPU_SLOPE)
        self.timers = PassTimers(make_timer)
        self._tried = np.zeros(MAX_DRAFTS)  # by depth: drafts after right ones
        self._right = np.zeros(MAX_DRAFTS)  # of these, the right ones
        self._num_plain, self._interval = 0, self.FIRST_PROBE

    def choose(self, num_lines: int, most: int) -> int:
        """Drafts of each sequence. num_lines: of a pass without drafts; most: drafts, by the plan and by memory"""
        self.timers.collect(self.times)
        gains = self._gains()
        choices = [num for num in self.CHOICES if num <= most]
        rates = [(1 + gains[num]) / self.times.predict(num_lines * (1 + num), num) for num in choices]
        best = choices[int(np.argmax(rates))]
        if best or len(choices) == 1:
            self._num_plain, self._interval = 0, self.FIRST_PROBE
            return best
        self._num_plain += 1
        if self._num_plain < self._interval:
            return 0
        self._num_plain, self._interval = 0, min(2 * self._interval, self.PROBE_INTERVAL)
        return choices[1]

    def learn(self, num_drafts: int, num_right: Sequence[int]) -> None:
        """num_right: of each sequence of a pass"""
        depths = np.arange(1, num_drafts + 1)
        decay = DECAY_OF_LIMITS ** len(num_right)
        reached = np.asarray(num_right).reshape(-1, 1)
        self._tried[:num_drafts] = self._tried[:num_drafts] * decay + (reached >= depths - 1).sum(0)
        self._right[:num_drafts] = self._right[:num_drafts] * decay + (reached >= depths).sum(0)

    def _gains(self) -> list[float]:
        """Right drafts to expect of 0, 1, ... drafts. A depth that was not tried is as good as the one before."""
        gains, survival, chance = [0.0], 1.0, 0.6
        for tried, right in zip(self._tried.tolist(), self._right.tolist(), strict=True):
            chance = (right + 4 * chance) / (tried + 4)
            survival *= chance
            gains.append(gains[-1] + survival)
        return gains
