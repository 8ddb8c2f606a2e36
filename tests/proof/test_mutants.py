"""The text that each planted bug replaces occurs exactly once in the code."""

from __future__ import annotations

from scripts.mutants import stale

from tests.proof.mutants import MUTANTS


def test_mutants_match_the_code() -> None:
    assert not stale(MUTANTS)
    assert stale([MUTANTS[0]._replace(old="a text that is not in the code")])
