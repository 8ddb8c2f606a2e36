"""The token that ends an assistant's turn, from the chat template: the files of some models do not name it."""

from __future__ import annotations

from collections.abc import Collection

from octavo.errors import TemplateError
from octavo.text import chat_template

FIRST, ANSWER, SECOND = "firstquestion", "itsanswer", "secondquestion"
CONVERSATION = [
    {"role": "user", "content": FIRST},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": SECOND},
]


def find_end_of_turn(template: str, special_tokens: dict[str, str], contents: Collection[str]) -> str | None:
    """The special token that directly follows the assistant's text, white space aside; None if there is none.

    A token that begins the prompt or stands right before the user's text opens turns instead. `contents` are the texts
    of all special tokens.
    """
    for messages in (CONVERSATION, CONVERSATION[:2]):
        try:
            text = chat_template.render(template, messages, add_generation_prompt=False, special_tokens=special_tokens)
        except TemplateError:
            continue  # it rejects the sample
        before, found, after = text.partition(ANSWER)
        end = _leading(after, contents)
        if not found or end is None:
            continue
        if end in _first_tokens(before, contents) or after.lstrip()[len(end) :].lstrip().startswith(SECOND):
            return None
        return end
    return None


def _leading(text: str, contents: Collection[str]) -> str | None:
    """The special token with which a text begins, white space aside."""
    text = text.lstrip()
    return max(filter(text.startswith, filter(None, contents)), key=len, default=None)


def _first_tokens(text: str, contents: Collection[str]) -> list[str]:
    """The special tokens before the first word of a text, at most eight: a template may write a million."""
    found: list[str] = []
    while len(found) < 8 and (first := _leading(text, contents)) is not None:
        found.append(first)
        text = text.lstrip()[len(first) :]
    return found
