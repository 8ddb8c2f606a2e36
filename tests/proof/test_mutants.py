"""Each planted bug names one place in the code, whatever the format of the code."""

from __future__ import annotations

import ast

import pytest
from scripts.mutants import stale

from tests.proof.mutants import MUTANTS
from tests.proof.planting import change
from tests.proof.runner_mutants import RUNNER_MUTANTS


def test_mutants_match_the_code() -> None:
    assert not stale(MUTANTS + RUNNER_MUTANTS)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"where": "BlockPool.no_such_method"}, "is defined 0 times"),
        ({"where": "release"}, "must be defined once"),
        ({"old": "no_such_name"}, "occurs 0 times"),
        ({"where": "BlockPool", "old": "self.num_free += 1"}, "must occur once"),
        ({"where": "BlockPool.share", "old": "Shared(...)", "new": "-..."}, "several items"),
        ({"where": "BlockPool.release", "old": "refs >= 0", "new": "else"}, "invalid syntax"),
        ({"where": "BlockPool.release", "old": "self._link(block)", "new": "break"}, "'break' outside loop"),
    ],
)
def test_a_mutant_that_has_no_place_of_its_own_is_stale(changes: dict[str, str], error: str) -> None:
    (found,) = stale([MUTANTS[0]._replace(**changes)])
    assert error in found


CODE = """
def take(self, n):
    if n > 0 and self.free:  # enough
        self.log("took",
                 n)
    while self.full:
        self.wait()
    return n
"""


@pytest.mark.parametrize(
    ("old", "new", "text", "planted"),
    [
        ("n > 0", "n >= 0", "n > 0", "n >= 0"),
        ("n > 0", "", "n > 0 and self.free", "self.free"),
        ("self.log('took', n)", "", "self.log('took', n)", "pass"),
        ("self.log('took', n)", "n = 0; self.log('took', n)", "self.log", "n = 0; self.log"),
        ("self.log(..., n)", "self.log(n, ...)", "'took', n", "n, 'took'"),
        ("if ...: self.log(...)", "if ... or n: self.log(...)", "n > 0 and self.free", "n > 0 and self.free or n"),
        ("while ...: ...", "while ...: n = 1; ...", "self.wait()", "n = 1; self.wait()"),
        ("if n > 0 and self.free: ...", "...", "if n > 0 and self.free:\n        self.log", "self.log"),
    ],
)
def test_old_becomes_new(old: str, new: str, text: str, planted: str) -> None:
    (scope,) = ast.parse(CODE).body
    plain = ast.unparse(scope)
    assert plain.count(text) == 1
    change(scope, old, new)
    assert ast.unparse(scope) == ast.unparse(ast.parse(plain.replace(text, planted)))
