"""`octavo chat`: the conversation that it keeps, and how it is interrupted."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from octavo.cli.commands import chat as chat_module
from tests.cli.conftest import Call
from tests.cli.fake_llm import FakeLLM, Output, Tokenizer, decode


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, call: Call, fake: type[FakeLLM]) -> Callable[..., Any]:
    """`say("hello", "again")` types these lines into `octavo chat` and ends its input."""

    def say(*lines: str, options: tuple[str, ...] = ()) -> Any:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return call("chat", *options)

    return say


def asked(fake: type[FakeLLM]) -> list[str]:
    return [decode(prompts[0]["prompt_token_ids"]) for prompts, _ in fake.made[0].asked]


def test_a_turn_is_answered_and_the_next_one_begins_with_it(say: Callable[..., Any], fake: type[FakeLLM]) -> None:
    done = say("hello", "", "bye", options=("--system", "short"))
    assert done.code == 0
    first = "system: short user: hello"
    assert done.lines[0] == "hello user: short system:"
    assert asked(fake) == [first, f"{first} assistant: hello user: short system: user: bye"]
    assert fake.made[0].closed


def test_what_each_answer_took_is_told_on_stderr(say: Callable[..., Any]) -> None:
    done = say("a b c")
    assert done.err.startswith("4 tokens, ")
    assert " tokens/s, first after " in done.err
    assert done.err.rstrip().endswith("2 of 4 prompt tokens cached")
    assert "tokens/s" not in done.out


def test_new_forgets_all_but_the_system_message(say: Callable[..., Any], fake: type[FakeLLM]) -> None:
    say("hello", "/new", "bye", options=("--system", "short"))
    assert asked(fake)[1] == "system: short user: bye"


def test_exit_ends_it(say: Callable[..., Any], fake: type[FakeLLM]) -> None:
    assert say("/exit", "hello").code == 0
    assert asked(fake) == []


def test_an_answer_may_be_as_long_as_fits_unless_told(say: Callable[..., Any], fake: type[FakeLLM]) -> None:
    say("a")
    assert fake.made[0].asked[0][1].max_tokens is None
    say("a", options=("--max-tokens", "2"))
    assert fake.made[1].asked[0][1].max_tokens == 2


def test_several_samples_are_no_conversation(say: Callable[..., Any], fake: type[FakeLLM]) -> None:
    done = say("a", options=("--n", "2"))
    assert (done.code, fake.made) == (2, [])


def test_a_turn_that_does_not_fit_is_taken_back(say: Callable[..., Any], fake: type[FakeLLM]) -> None:
    done = say("hello", "TOO LONG", "bye")
    assert done.code == 0
    assert "error: This model's maximum context length is 7 tokens" in done.err
    assert "TOO LONG" not in asked(fake)[2]
    assert asked(fake)[2].endswith("user: bye")


def test_an_answer_that_failed_is_taken_back(say: Callable[..., Any], fake: type[FakeLLM]) -> None:
    done = say("FAIL", "bye")
    assert done.err.startswith("error: request 0 failed: numbers that are not finite")
    assert asked(fake)[1] == "user: bye"


def test_control_characters_do_not_reach_the_terminal(say: Callable[..., Any]) -> None:
    assert "\x1b" not in say("red \x1b[31m").out


@pytest.fixture
def press(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`press(2, times=1)` presses Ctrl-C while the second token of each answer is on its way."""
    stream = FakeLLM.stream

    def press(at: int, times: int = 1) -> None:
        def interrupted(self: FakeLLM, prompts: list[Any], params: Any) -> Iterator[Output]:
            answers = stream(self, prompts, params)
            try:
                for i, output in enumerate(answers, 1):
                    if i == at:
                        for _ in range(times):
                            signal.raise_signal(signal.SIGINT)
                    yield output
            finally:
                answers.close()  # type: ignore[attr-defined]

        monkeypatch.setattr(FakeLLM, "stream", interrupted)

    return press


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(
    say: Callable[..., Any], fake: type[FakeLLM], press: Callable[..., None]
) -> None:
    press(2)
    done = say("a b c", "d")
    assert done.code == 0
    assert done.lines[0] == "c b"
    assert asked(fake)[1] == "user: a b c assistant: c b user: d"
    assert fake.made[0].num_aborted == 2


def test_ctrl_c_twice_leaves(say: Callable[..., Any], fake: type[FakeLLM], press: Callable[..., None]) -> None:
    press(2, times=2)
    done = say("a b c", "d")
    assert done.code == 130
    assert "Traceback" not in done.err
    assert len(asked(fake)) == 1
    assert fake.made[0].closed


def test_ctrl_c_is_as_before_after_an_answer(say: Callable[..., Any]) -> None:
    before = signal.getsignal(signal.SIGINT)
    say("a")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("presses", "code"), [(["d"], 0), ([KeyboardInterrupt], 130)])
def test_ctrl_c_at_the_prompt_asks_for_a_second(
    call: Call, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, presses: list[Any], code: int
) -> None:
    typed: list[Any] = [KeyboardInterrupt, *presses, None]

    def read(prompt: str) -> str | None:
        line = typed.pop(0)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line  # type: ignore[no-any-return]

    monkeypatch.setattr(chat_module, "read_line", read)
    monkeypatch.setattr(chat_module, "on_terminal", lambda: True)
    done = call("chat")
    assert done.code == code
    assert "(Ctrl-C again leaves)" in done.out


def test_a_model_without_a_template_is_refused_at_once(
    say: Callable[..., Any], fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "chat_template", None)
    done = say("hello", options=("--model", "dir"))
    assert done.code == 2
    assert done.err == (
        "error: dir has no chat template; give one with --chat-template, or complete plain text with octavo generate\n"
    )
    assert asked(fake) == []


def test_variables_of_the_template(say: Callable[..., Any], fake: type[FakeLLM]) -> None:
    say("hello", options=("--chat-template-kwargs", '{"thinking": false}', "--chat-template", "x.jinja"))
    assert asked(fake) == ["user: hello thinking=False"]
    assert fake.made[0].engine == {"chat_template": "x.jinja"}
    for text in ("[1]", "{", "thinking"):
        done = say("hello", options=("--chat-template-kwargs", text))
        assert done.code == 2 and "--chat-template-kwargs" in done.err and "no JSON object" in done.err
