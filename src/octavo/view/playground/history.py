"""Histories of playgrounds. A history is the session: `64x16;new,64;fork,A,3` has the pool and all actions.

A pool that is not in memory is made again from its history. So nothing has to be stored, undo is a shorter history, and
a link holds everything.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from threading import Lock
from typing import Any

from octavo.view.playground.phases import Phase
from octavo.view.playground.picture import picture_of
from octavo.view.playground.pool import Explanation, Pool, RefusedError, count_of, invalid
from octavo.view.playground.session import Playground

MAX_ACTIONS, MAX_CHARS = 500, 16_384
MAX_POOLS = 16
"""Pools in memory. The least recently used one is dropped; it can be made again from its history."""


class Playgrounds:
    """Playgrounds by their histories. Thread-safe: one action at a time."""

    def __init__(self) -> None:
        self._playgrounds: OrderedDict[str, Playground] = OrderedDict()
        self._lock = Lock()

    def answer(self, history: str, action: str | None = None) -> dict[str, Any]:
        """PROTOCOL.md's reply after one more action, or without one. Raises `ParameterError` for an invalid history.

        An action that cannot be done changes nothing, and is not in the history of the reply.
        """
        actions = check_history(history, action)
        with self._lock:
            playground = self._playgrounds.pop(history, None)
            explanation, done = Explanation("", ""), True
            if playground is None or not action:  # without an action, the reply explains the last one
                playground, explanation = self._replay(actions)
            before = ";".join(actions[:-1]) if len(actions) > 1 else history
            if action:
                before = history
                try:
                    with playground.phases.trace:
                        explanation = playground.do(action)
                    history = f"{history};{action}"
                except RefusedError as refused:
                    (playground, _), explanation, done = self._replay(actions), refused.explanation, False
                    playground.phases.latest.clear()
                    playground.phases.latest.append(Phase("refuse", explanation.text))
            self._store(history, playground)
            return {
                "history": history,
                "before": before,
                "pool": actions[0],
                "done": done,
                "says": explanation.text,
                "why": explanation.reason,
                **picture_of(playground),
            }

    def _replay(self, actions: list[str]) -> tuple[Playground, Explanation]:
        playground = Playground(Pool.parse(actions[0]))
        pool = playground.pool
        explanation = Explanation(
            f"{count_of(pool.num_blocks, 'block')} of {count_of(pool.block_size, 'token')}, all free.",
            "A block holds the keys and values of that many tokens. A sequence's block table lists its blocks.",
        )
        for number, action in enumerate(actions[1:], 1):
            is_last = number == len(actions) - 1
            try:
                with playground.phases.trace if is_last else nullcontext():
                    explanation = playground.do(action)
            except RefusedError as refused:
                raise invalid(f"action {number} of the history, {action[:40]}, cannot be done: {refused}") from None
        return playground, explanation

    def _store(self, history: str, playground: Playground) -> None:
        self._playgrounds[history] = playground
        while len(self._playgrounds) > MAX_POOLS:
            self._playgrounds.popitem(last=False)


def check_history(history: str, action: str | None) -> list[str]:
    """Split a history into the pool and the actions. Raises `ParameterError`."""
    actions = history.split(";")
    if len(history) + len(action or "") > MAX_CHARS or len(actions) > MAX_ACTIONS:
        raise invalid(f"a history has at most {MAX_ACTIONS} actions and {MAX_CHARS} characters; reset the pool")
    if action is not None and ";" in action:
        raise invalid("send one action at a time, without a semicolon")
    return actions
