"""Where chats leave checkpoints of their states."""

from __future__ import annotations

import pytest

from octavo.engine.engine_request import TurnOpenings

START, USER, MODEL, NEWLINE, END, SYSTEM = 1, 2, 3, 4, 5, 6
CHAT = TurnOpenings((START, USER, NEWLINE), (START, MODEL, NEWLINE))


def turn(role: int, *content: int) -> list[int]:
    return [START, role, NEWLINE, *content, END, NEWLINE]


@pytest.mark.parametrize(
    ("prompt", "marks"),
    [
        (turn(SYSTEM, 7, 8) + turn(USER, 9) + [START, MODEL, NEWLINE], (7, 13)),
        (turn(SYSTEM, 7) + turn(USER, 9) + turn(MODEL, 9) + turn(USER, 9, 9) + [START, MODEL, NEWLINE], (6, 25)),
        ([*turn(USER, 9), START, MODEL, NEWLINE], (0, 6)),
        ([*turn(SYSTEM, 7, 8), START, MODEL, NEWLINE], (7,)),  # no turn of the user
        (turn(SYSTEM, 7, 8) + turn(USER, 9), ()),  # no answer is opened
        ([START, MODEL, NEWLINE], ()),
        ([7, 8, 9], ()),
    ],
)
def test_marks_are_before_the_first_question_and_before_the_answer(prompt: list[int], marks: tuple[int, ...]) -> None:
    assert CHAT.marks(prompt) == marks


def test_a_template_without_openings_leaves_no_marks() -> None:
    assert TurnOpenings().marks(turn(USER, 9)) == ()
    assert TurnOpenings((), (START, MODEL)).marks([*turn(SYSTEM, 7), *turn(USER, 9), START, MODEL]) == (12,)
