"""The drafter alone: the time of passes, the chances of drafts, and how many of them pay off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.engine.executor import GrammarDrafts
from octavo.engine.suffixes import MAX_MATCH, NEXT_KIND
from octavo.kernels.row_state import MAX_DRAFTS, RowState
from octavo.runner.decode_lines import DecodeLines, DecodeSlices
from octavo.runner.drafter import (
    FIRST_SLOPE,
    MAX_LINES,
    SHARED,
    Chances,
    Drafter,
    DraftLimit,
    DraftModelTimes,
    Guess,
    PassTimes,
)
from octavo.runner.drafts.shared_suffixes import SharedSuffixes
from tests.models.tiny import make_tiny_checkpoint

PATTERN = [3, 1, 4, 1, 5, 9, 2, 6]
FAR = 1 << 40
"""An end or a limit that cuts nothing."""


# -- the time of passes ------------------------------------------------------------------------------------------------


def test_before_any_pass_a_line_costs_a_part_of_a_pass() -> None:
    assert PassTimes().line() == (1.0, FIRST_SLOPE)


def test_times_of_one_size_have_the_first_slope() -> None:
    times = PassTimes()
    for _ in range(50):
        times.record(1, 0.02)
    base, slope = times.line()
    assert times.predict(1) == pytest.approx(0.02)
    assert slope == pytest.approx(0.02 * FIRST_SLOPE, rel=1e-6) and base == pytest.approx(0.018)


def test_times_learn_a_line_and_then_another() -> None:
    times = PassTimes()
    for base, slope in ((0.01, 0.001), (0.012, 0.0003)):
        for i in range(300):
            num = 1 + i * 7 % 40
            times.record(num, base + slope * num)
        assert times.line() == (pytest.approx(base, rel=0.02), pytest.approx(slope, rel=0.02))
        assert times.predict(64) == pytest.approx(base + 64 * slope, rel=0.02)


def test_a_pass_that_takes_far_longer_counts_as_twice_as_long() -> None:
    found = []
    for factor in (2, 50):
        times = PassTimes()
        for num in (1, 5, 9, 5, 1):
            times.record(num, 0.01 + 0.001 * num)
        times.record(5, factor * times.predict(5))
        found.append(times.line())
    assert found[0] == found[1]
    for i in range(300):  # a machine that stays slower is believed
        times.record(1 + i % 9, 0.5)
    assert times.predict(5) == pytest.approx(0.5, rel=0.05)


def test_more_lines_never_cost_less() -> None:
    times = PassTimes()
    for i in range(30):
        times.record(1 + i % 10, 0.02 - 0.001 * (i % 10))
    assert times.line()[1] == 0 and times.predict(1) == times.predict(60)


def test_the_first_pass_of_each_size_is_not_measured() -> None:
    drafter = Bench([1, 2]).drafter
    found: list[tuple[int, float]] = []
    drafter.times.record = lambda *args: found.append(args)  # type: ignore[method-assign]
    for num_lines, seconds in ((1, 5.0), (9, 7.0), (1, 1.0), (9, 2.0)):
        drafter.record_pass(num_lines, seconds)
    assert found == [(1, 1.0), (9, 2.0)]


# -- chances -----------------------------------------------------------------------------------------------------------


def test_longer_matches_have_better_chances() -> None:
    chances = Chances().of(0, range(1, 1 + MAX_DRAFTS))
    assert len(chances) == MAX_DRAFTS and (np.diff(chances) > 0).all() and 0 < chances[0] < chances[-1] < 1
    assert len(Chances().of(0, range(MAX_MATCH, MAX_MATCH + MAX_DRAFTS))) == MAX_DRAFTS


def test_luck_is_the_rows_own_until_it_is_forgotten() -> None:
    chances = Chances()
    for _ in range(9):
        chances.learn(4, Guess(0, [7, 7], [2, 3]), [8])
    for _ in range(9):
        chances.learn(5, Guess(0, [7, 7], [2, 3]), [7, 7])
    unlucky, lucky, other = (chances.of(row, [2])[0] for row in (4, 5, 6))
    assert unlucky < 0.6 * other and other < lucky <= 0.98
    chances.forget([4, 5])
    assert chances.of(4, [2])[0] == chances.of(5, [2])[0] == other


def test_what_follows_a_wrong_draft_teaches_nothing() -> None:
    a, b = Chances(), Chances()
    a.learn(0, Guess(0, [7, 8, 9], [2, 3, 4]), [7, 0, 9])
    b.learn(0, Guess(0, [7, 8], [2, 3]), [7, 0])
    assert (a.of(0, range(1, 10)) == b.of(0, range(1, 10))).all()
    assert a.of(0, [4])[0] / a.of(0, [9])[0] == pytest.approx(Chances().of(0, [4])[0] / Chances().of(0, [9])[0])


# -- choices -----------------------------------------------------------------------------------------------------------


class Bench:
    """A drafter whose rows have sequences."""

    def __init__(self, *sequences: list[int], slope: float = FIRST_SLOPE, shared: SharedSuffixes | None = None) -> None:
        self.state = RowState.empty(len(sequences), 4, "cpu", max_len=2000)
        self.drafter = Drafter(self.state, shared)
        self.drafter.times.line = lambda: (1.0, slope)  # type: ignore[method-assign]
        for row, tokens in enumerate(sequences):
            self.state.num_computed[row] = -1
            self.append(row, tokens)

    def append(self, row: int, tokens: list[int]) -> None:
        last = int(self.state.num_computed[row])
        self.state.history[row, last + 1 : last + 1 + len(tokens)] = torch.tensor(tokens)
        self.state.num_computed[row] = last + len(tokens)
        self.state.last_token[row] = tokens[-1]

    def choose(
        self,
        *rows: int,
        ends: int | list[int] = FAR,
        limits: int | list[int] = MAX_DRAFTS,
        grammars: dict[int, GrammarDrafts] | None = None,
    ) -> list[int]:
        columns = (np.broadcast_to(np.array(column, dtype=np.int64), len(rows)) for column in (rows, ends, limits))
        return self.drafter.choose(*columns, grammars or {}).tolist()

    def drafts(self, row: int, num: int) -> list[int]:
        return self.state.drafts[row, :num].tolist()


def play(bench: Bench, row: int, num_passes: int, *, right: bool) -> list[int]:
    """Passes of one row. Its sequence repeats, or ends each time in what was never there before -> drafts of each."""
    found = []
    for i in range(num_passes):
        (num,) = bench.choose(row)
        found.append(num)
        if right:
            position = int(bench.state.num_computed[row]) + 1
            bench.append(row, [PATTERN[(position + j) % len(PATTERN)] for j in range(num + 1)])
            assert bench.drafts(row, num) == [PATTERN[(position + j) % len(PATTERN)] for j in range(num)]
        else:
            bench.append(row, [1000 + i, 3])
    return found


def test_a_row_whose_drafts_are_never_right_gets_none() -> None:
    bench = Bench(PATTERN * 2)
    found = play(bench, 0, 40, right=False)
    assert found[0] > 0 and not any(found[20:])


def test_a_row_whose_drafts_are_always_right_gets_the_most() -> None:
    bench = Bench(PATTERN * 2)
    assert set(play(bench, 0, 60, right=True)[20:]) == {MAX_DRAFTS}


def test_guesses_are_checked_though_they_were_not_computed() -> None:
    """At first, none pays off. All of them are right, and then they do."""
    bench = Bench(PATTERN * 2, slope=5.0)
    found = []
    for i in range(40):
        found += bench.choose(0)
        bench.append(0, [PATTERN[i % len(PATTERN)]])
    assert found[0] == 0 and found[-1] > 0


def test_another_sequence_in_the_row_starts_afresh() -> None:
    bench = Bench(PATTERN * 2)
    first = bench.choose(0)
    play(bench, 0, 20, right=False)
    bench.drafter.forget({0: b""})
    bench.state.num_computed[0] = -1
    bench.append(0, PATTERN * 2)
    bench.drafter._chances = Chances()
    assert bench.choose(0) == first != [0]


def test_a_runner_forgets_the_guesses_of_a_row_that_gets_another_sequence(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("llama", tmp_path)
    options = {"dtype": "float32", "max_num_seqs": 1, "num_gpu_blocks_override": 20, "spec_method": "suffix"}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(str(directory), device="cpu", skip_tokenizer_init=True, **options) as llm:
        drafter = llm.engine.executor.runner.drafter  # type: ignore[attr-defined]
        llm.generate([[5, 6] * 8], params, use_tqdm=False)
        drafter._chances._rows[0] = (100.0, 1.0)  # as after much luck
        drafter._guesses[0] = Guess(2, [5, 6], [2, 3])
        llm.generate([[9, 8, 7, 6]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        assert 0 not in drafter._chances._rows and 0 not in drafter._guesses


def test_a_guess_about_the_rows_last_sequence_teaches_nothing() -> None:
    bench, fresh = Bench(PATTERN * 2), Bench(PATTERN * 4)
    bench.choose(0)
    bench.drafter.forget({0: b""})
    bench.state.num_computed[0] = -1
    bench.append(0, PATTERN[::-1] * 3)
    bench.choose(0)
    assert (bench.drafter._chances.of(0, range(9)) == fresh.drafter._chances.of(0, range(9))).all()


def test_a_row_without_an_earlier_match_gets_no_drafts() -> None:
    assert Bench(list(range(9)), PATTERN * 2).choose(0, 1, ends=FAR)[0] == 0


def test_a_row_with_a_grammar_has_the_drafts_that_its_bitmasks_follow() -> None:
    bench = Bench(PATTERN * 3, PATTERN * 3, slope=0)
    for tokens, num in (([8, 9, 7], 3), ([], 0)):
        grammars = {0: GrammarDrafts(tokens, [0, 0, 2][:num])}
        assert bench.choose(0, 1, limits=5, grammars=grammars) == [num, 5]
        assert bench.drafts(0, num) == tokens and bench.drafts(1, 5) == PATTERN[:5]
    assert bench.choose(0, limits=2, grammars={0: GrammarDrafts([8, 9, 7], [0, 0, 2])}) == [2]


def test_drafts_that_a_grammar_forces_have_a_chance_of_their_own() -> None:
    chances = Chances()
    before = chances.of(1, range(9))
    for _ in range(50):
        chances.learn(0, Guess(0, [7, 7], [0, 0]), [8])
    after = chances.of(1, range(9))
    assert after[0] < 0.2 < 0.8 < before[0] and (after[1:] == before[1:]).all()


def test_drafts_end_before_the_end() -> None:
    bench = Bench(PATTERN * 3, slope=0)
    last = int(bench.state.num_computed[0])
    for room in (-1, 0, 1, 2, 5, 40):
        assert bench.choose(0, ends=last + 1 + room) == [min(max(room, 0), MAX_DRAFTS)]
        bench.drafter.forget({0: b""})


def test_each_row_has_its_own_limit() -> None:
    bench = Bench(*[PATTERN * 3] * 4, slope=0)
    assert bench.choose(0, 1, 2, 3, limits=[0, 1, 6, MAX_DRAFTS + 9]) == [0, 1, 6, MAX_DRAFTS]
    assert bench.drafts(2, 6) == PATTERN[:6]


@pytest.mark.parametrize("num_rows", [1, 5, 40, MAX_LINES - 1, MAX_LINES, MAX_LINES + 3])
def test_a_pass_has_no_more_than_the_most_lines(num_rows: int) -> None:
    bench = Bench(*[PATTERN * 3] * num_rows, slope=0)
    num_drafts = sum(bench.choose(*range(num_rows)))
    assert num_drafts == min(max(0, MAX_LINES - num_rows), num_rows * MAX_DRAFTS)


def test_likely_drafts_come_first_and_only_those_that_pay_off() -> None:
    """Row 0 has matched many tokens, row 1 a single one."""
    bench = Bench(PATTERN * 3, [*range(20, 30), 50, *range(30, 40), 50], slope=0.2)
    long, short = bench.choose(0, 1)
    assert long > short
    bench = Bench(PATTERN * 3, [*range(20, 30), 50, *range(30, 40), 50], slope=5.0)
    assert bench.choose(0, 1) == [0, 0]  # a third line would have to be right with 10 in 11


def test_a_match_at_the_end_goes_on_from_its_own_beginning() -> None:
    bench = Bench([8, 9, 8, 9], slope=0)
    (num,) = bench.choose(0)
    assert bench.drafts(0, num) == [8, 9] * (num // 2) + [8] * (num % 2) and num == MAX_DRAFTS


def test_matches_that_agree_or_not_have_chances_of_their_own() -> None:
    """Drafts follow the latest token 5. Their kind depends on what follows the earlier ones."""
    for before, kind in (([5, 6], 1), ([5, 7], 2), ([5, 7, 5, 7], 3)):
        bench = Bench([*before, 5, 6, 8, 5], slope=0)
        assert bench.choose(0, limits=2) == [2] and bench.drafts(0, 2) == [6, 8]
        assert list(bench.drafter._guesses[0].num_matched) == [kind * NEXT_KIND + 1, kind * NEXT_KIND + 2]
        chances = Chances()
        for row in range(9):
            chances.learn(row, Guess(0, [6], [kind * NEXT_KIND + 1]), [7])
        of_kind, of_other, before_any = (
            c.of(99, [k])[0] for c, k in ((chances, kind * NEXT_KIND + 1), (chances, 1), (Chances(), 1))
        )
        assert 2 * of_kind < of_other < before_any  # all kinds of a length learn, and this one most


# -- drafts from other sequences ---------------------------------------------------------------------------------------


def sharing(*sequences: list[int], salts: tuple[bytes, ...]) -> Bench:
    """The last row has had no pass yet."""
    bench = Bench(*sequences, slope=0, shared=SharedSuffixes())
    bench.drafter.forget(dict(enumerate(salts)))
    for row in range(len(sequences) - 1):
        bench.choose(row)
    return bench


def test_a_row_gets_the_tokens_of_another_with_its_salt() -> None:
    bench = sharing([*range(100)], [7, *range(20, 30)], salts=(b"", b""))
    assert bench.choose(1, limits=9) == [9] and bench.drafts(1, 9) == [*range(30, 39)]
    assert bench.drafter._guesses[1].num_matched[0] == SHARED + 10
    bench = sharing([*range(100)], [7, *range(20, 30)], salts=(b"a", b"b"))
    assert bench.choose(1) == [0]


def test_the_longer_match_wins_and_of_equal_ones_the_rows_own() -> None:
    other = [*range(50, 60), 1, 2, 3, 4, 5, *range(70, 100)]
    for before, expected in ((3, [70, 71]), (1, [8, 9])):
        own = [*range(before, 6), 8, 9, *range(1, 6)]
        assert sharing(other, own, salts=(b"", b"")).choose(1, limits=2) == [2]
        bench = sharing(other, own, salts=(b"", b""))
        bench.choose(1, limits=2)
        assert bench.drafts(1, 2) == expected


def test_shared_matches_have_chances_of_their_own() -> None:
    chances = Chances()
    assert (chances.of(0, range(4, 13)) == chances.of(0, range(SHARED + 4, SHARED + 13))).all()
    for row in range(9):
        chances.learn(row, Guess(0, [7], [SHARED + 4]), [8])
    assert chances.of(99, [SHARED + 4]) < chances.of(99, [4]) == Chances().of(0, [4])
    assert len(chances.of(0, range(SHARED + MAX_MATCH, SHARED + MAX_MATCH + MAX_DRAFTS))) == MAX_DRAFTS


def test_the_tokens_of_a_rows_last_sequence_are_kept() -> None:
    bench = sharing([*range(100)], [7, *range(20, 30)], salts=(b"", b""))
    bench.drafter.forget({0: b"other"})
    bench.state.num_computed[0] = -1
    bench.append(0, [*range(99, -1, -1)])
    assert bench.choose(0) == [0]
    assert bench.choose(1, limits=9) == [9] and bench.drafts(1, 9) == [*range(30, 39)]


# -- a draft model -----------------------------------------------------------------------------------------------------


def drafting_limit(draft_s: float, line_s: float = 0.05) -> DraftLimit:
    """After passes of one sequence, each as long as its lines, its draft model and a constant take."""
    limit = DraftLimit(None, drafts_cost=True)
    for num in [0, 1, 3, 7, 15] * 20:
        limit.times.record(1 + num, 1.0 + line_s * (1 + num) + draft_s * (1 + num), num)
    return limit


@pytest.mark.parametrize("num_rows", [1, 4, 8])
def test_times_of_a_draft_model_are_those_of_its_passes(num_rows: int) -> None:
    times = DraftModelTimes()
    for rows in (1, 2, 6):
        for num in [0, 1, 3] * 30:
            times.record(rows * (1 + num), 1.0 + 0.1 * rows * (1 + num) + 0.3 * (1 + num), num)
    for num in (0, 3, 7):
        expected = 1.0 + 0.1 * num_rows * (1 + num) + 0.3 * (1 + num)
        assert times.predict(num_rows * (1 + num), num) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("draft_s", "num_right", "expected"), [(0.02, [7], 7), (0.02, [0, 1], 1), (2.0, [0, 1], 0), (0.02, [0], 0)]
)
def test_a_draft_model_drafts_only_if_it_pays(draft_s: float, num_right: list[int], expected: int) -> None:
    """Without drafts it runs once, too."""
    limit = drafting_limit(draft_s)
    for _ in range(300):
        limit.learn(15, num_right)
    assert {limit.choose(1, 15) for _ in range(DraftLimit.FIRST_PROBE - 1)} == {expected}


def test_drafts_that_do_not_pay_are_tried_again_ever_more_rarely() -> None:
    limit = drafting_limit(0.02)
    for _ in range(300):
        limit.learn(15, [0])
    tried = [i for i in range(1, 200) if limit.choose(1, 15)]
    assert np.diff([0, *tried]).tolist() == [4, 8, 16, 32, 64, 64]
    for _ in range(300):
        limit.learn(15, [7])
    assert limit.choose(1, 15) > 1
    for _ in range(3000):
        limit.learn(15, [0])
    assert [limit.choose(1, 15) for _ in range(4)] == [0, 0, 0, 1]


@pytest.mark.parametrize(("num_right", "deeper"), [(1, True), (0, False)])
def test_depths_that_were_not_tried_are_as_good_as_those_that_were(num_right: int, deeper: bool) -> None:
    limit = DraftLimit(None)
    before = limit._gains()
    for _ in range(20):
        limit.learn(1, [num_right])
    gains = limit._gains()
    assert (gains[15] > 8 > before[15]) if deeper else (gains[15] < 0.2 < before[15])


def test_a_slice_has_its_own_number_of_passes() -> None:
    state = RowState.empty(3, 4, "cpu", max_len=100)
    columns = np.array([[0, 1, 2], [50] * 3, [1] * 3, [50] * 3, [0] * 3, [1, 3, 2]])
    lines = DecodeLines(DecodeSlices([4, 5, 6], *columns), np.zeros((3, 9), dtype=np.int64), state, None)
    assert [list(lines.next()) for _ in range(4)] == [[4, 5, 6], [5, 6], [5], []]
