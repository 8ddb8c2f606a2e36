"""`octavo chat`: the messages of a conversation, and Ctrl-C."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from octavo.checkpoint.generation_config import SamplingDefaults
from octavo.cli.commands import chat as chat_module
from octavo.params.sampling_params import SamplingParams
from tests.cli.conftest import Call
from tests.cli.fake_llm import FakeLLM, Output, Tokenizer, decode


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, call: Call, fake: type[FakeLLM]) -> Callable[..., Any]:
    """`chat("hello", "again")` types these lines into `octavo chat` and ends its input."""

    def chat(*lines: str, options: tuple[str, ...] = ()) -> Any:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return call("chat", *options)

    return chat


def prompts_of(fake: type[FakeLLM]) -> list[str]:
    return [decode(prompts[0]["prompt_token_ids"]) for prompts, _ in fake.made[0].requests]


def test_next_prompt_begins_with_the_previous_turn(chat: Callable[..., Any], fake: type[FakeLLM]) -> None:
    done = chat("hello", "", "bye", options=("--system", "short"))
    assert done.code == 0
    first = "system: short user: hello"
    assert done.lines[0] == "hello user: short system:"
    assert prompts_of(fake) == [first, f"{first} assistant: hello user: short system: user: bye"]
    assert fake.made[0].closed


def test_statistics_of_each_answer_are_printed_on_stderr(chat: Callable[..., Any]) -> None:
    done = chat("a b c")
    assert done.err.startswith("4 tokens, ")
    assert " tokens/s, first after " in done.err
    assert done.err.rstrip().endswith("2 of 4 prompt tokens cached")
    assert "tokens/s" not in done.out


def test_new_keeps_only_the_system_message(chat: Callable[..., Any], fake: type[FakeLLM]) -> None:
    chat("hello", "/new", "bye", options=("--system", "short"))
    assert prompts_of(fake)[1] == "system: short user: bye"


def test_an_unknown_command_is_no_message(chat: Callable[..., Any], fake: type[FakeLLM]) -> None:
    done = chat("/clear", "/new topic", " /clear", "/usr/bin is a path")
    assert done.err.startswith("no command /clear; /new: ") and "no command /new topic; /new: " in done.err
    assert [prompt.rpartition("user: ")[2] for prompt in prompts_of(fake)] == ["/clear", "/usr/bin is a path"]


def test_exit_command(chat: Callable[..., Any], fake: type[FakeLLM]) -> None:
    assert chat("/exit", "hello").code == 0
    assert prompts_of(fake) == []


def test_max_tokens_is_the_users_or_the_models_or_the_chats(
    chat: Callable[..., Any], fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    chat("a")
    done = chat("a b", options=("--max-tokens", "2"))
    assert done.err.startswith("cut at --max-tokens: 2 tokens, ")
    values = {"max_tokens": 9}
    monkeypatch.setattr(fake, "sampling_defaults", SamplingDefaults(SamplingParams(**values), values, "x.json"))
    chat("a")
    chat("a", options=("--max-tokens", "1024"))
    assert [llm.requests[0][1].max_tokens for llm in fake.made] == [1024, 2, 9, 1024]


def test_several_samples_are_refused(chat: Callable[..., Any], fake: type[FakeLLM]) -> None:
    done = chat("a", options=("--n", "2"))
    assert (done.code, fake.made) == (2, [])


def test_message_that_does_not_fit_is_removed(chat: Callable[..., Any], fake: type[FakeLLM]) -> None:
    done = chat("hello", "TOO LONG", "bye")
    assert done.code == 0
    assert "error: This model's maximum context length is 7 tokens" in done.err
    assert "TOO LONG" not in prompts_of(fake)[2]
    assert prompts_of(fake)[2].endswith("user: bye")


def test_turn_of_a_failed_answer_is_removed(chat: Callable[..., Any], fake: type[FakeLLM]) -> None:
    done = chat("FAIL", "bye")
    assert done.err.startswith("error: request 0 failed: numbers that are not finite")
    assert prompts_of(fake)[1] == "user: bye"


def test_control_characters_do_not_reach_the_terminal(chat: Callable[..., Any]) -> None:
    assert "\x1b" not in chat("red \x1b[31m").out


@pytest.fixture
def press(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`press(2, times=1)` presses Ctrl-C before the second token of each answer is printed."""
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


def test_ctrl_c_stops_the_answer_and_keeps_its_text(
    chat: Callable[..., Any], fake: type[FakeLLM], press: Callable[..., None]
) -> None:
    press(2)
    done = chat("a b c", "d")
    assert done.code == 0
    assert done.lines[0] == "c b" and done.err.startswith("interrupted: 2 tokens")
    assert prompts_of(fake)[1] == "user: a b c assistant: c b user: d"
    assert fake.made[0].num_aborted == 2


def test_ctrl_c_twice_exits(chat: Callable[..., Any], fake: type[FakeLLM], press: Callable[..., None]) -> None:
    press(2, times=2)
    done = chat("a b c", "d")
    assert done.code == 130
    assert "Traceback" not in done.err
    assert len(prompts_of(fake)) == 1
    assert fake.made[0].closed


def test_sigint_handler_is_restored_after_an_answer(chat: Callable[..., Any]) -> None:
    before = signal.getsignal(signal.SIGINT)
    chat("a")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("presses", "code"), [(["d"], 0), ([KeyboardInterrupt], 130)])
def test_ctrl_c_at_the_prompt_exits_only_when_repeated(
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
    assert "(press Ctrl-C again to exit)" in done.out


def test_model_without_a_chat_template_is_refused(
    chat: Callable[..., Any], fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "chat_template", None)
    done = chat("hello", options=("--model", "dir"))
    assert done.code == 2
    assert done.err == (
        "error: dir has no chat template; give one with --chat-template, or complete plain text with octavo generate\n"
    )
    assert prompts_of(fake) == []


def test_chat_template_options(chat: Callable[..., Any], fake: type[FakeLLM]) -> None:
    chat("hello", options=("--chat-template-kwargs", '{"thinking": false}', "--chat-template", "x.jinja"))
    assert prompts_of(fake) == ["user: hello thinking=False"]
    assert fake.made[0].engine == {"chat_template": "x.jinja"}
    for text in ("[1]", "{", "thinking"):
        done = chat("hello", options=("--chat-template-kwargs", text))
        assert done.code == 2 and "--chat-template-kwargs" in done.err and "not a JSON object" in done.err
