"""Checks of `ValidatedParams`, the base of all options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from octavo.errors import ParameterError, UnknownOptionError
from octavo.params.validation import ValidatedParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(ValidatedParams):
    TITLE: ClassVar[str] = "the test"

    size: int | None = 1
    share: float | None = 0.5
    kind: str = "red"
    loud: bool = False

    def __post_init__(self) -> None:
        self._check_integer("size", 1, 8, optional=True)
        self._check_number("share", 0.0, 1.0, optional=True)
        self._check_choice("kind", ("red", "blue"))
        self._check_bool("loud")


def test_values_within_their_limits_are_kept() -> None:
    for given in ({}, {"size": 8}, {"size": None, "share": None}, {"share": 0}, {"kind": "blue", "loud": True}):
        options = Options(**given)
        assert {name: getattr(options, name) for name in given} == given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 0}, "size is 0, it must be from 1 to 8"),
        ({"size": 9}, "size is 9, it must be from 1 to 8"),
        ({"size": True}, "size must be an integer, not True"),
        ({"size": 2.0}, "size must be an integer, not 2.0"),
        ({"share": 1.5}, "share is 1.5, it must be from 0 to 1"),
        ({"share": float("inf")}, "share must be a finite number, not inf"),
        ({"share": 10**400}, f"share is {10**400}, it must be from 0 to 1"),  # which no float can hold
        ({"share": True}, "share must be a finite number, not True"),
        ({"share": "much"}, "share must be a finite number, not 'much'"),
        ({"kind": "green"}, "kind is 'green', it must be one of red, blue"),
        ({"loud": 1}, "loud must be True or False, not 1"),
    ],
)
def test_values_out_of_range_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as refused:
        Options(**given)
    assert str(refused.value) == message and refused.value.param == next(iter(given))


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UnknownOptionError, match="the test has no option 'sise'; did you mean 'size'"):
        Options(sise=1)  # type: ignore[call-arg]
