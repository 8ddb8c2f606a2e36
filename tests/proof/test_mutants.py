"""The planted bugs can still be planted: each replaces text that is there, once."""

from __future__ import annotations

from scripts.mutants import stale

from tests.proof.mutants import MUTANTS


def test_no_mutant_has_gone_stale() -> None:
    assert not stale(MUTANTS)
    assert stale([MUTANTS[0]._replace(old="what nobody has written")])
