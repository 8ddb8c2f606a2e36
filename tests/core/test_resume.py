"""Resumed requests: they continue another engine's outputs as after a preemption, with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from octavo.core.request import Request
from tests.core.lab import RECOMPUTE, SWAP, Lab, make
from tests.proof import oracle as o

PROMPT = [1, 2, 3, 0, 4]


def cut_at(known: int, width: int, max_tokens: int) -> Iterator[tuple[dict[int, list[int]], int]]:
    """Yield the first `known` output tokens of each sample, by index, with `max_tokens`."""
    whole = o.reference(make("", PROMPT, max_tokens, width=width))
    yield {i: tokens[len(PROMPT) :][:known] for i, tokens in whole}, max_tokens


@pytest.mark.parametrize(("width", "window"), [(1, 1), (1, 4), (3, 1), (3, 4)])
def test_resuming_after_every_token(width: int, window: int) -> None:
    """Two requests in a pool too small for both: resumed ones are preempted like any other."""
    max_tokens = 9
    for known, policy in product(range(1, max_tokens), (RECOMPUTE, SWAP)):
        for resume, _ in cut_at(known, width, max_tokens):
            lab = Lab(6 + 5 * width, host=6, rows=8, window=window, policy=policy)
            for name in ("A", "B"):
                request = lab.add(name, PROMPT, max_tokens, width=width, resume=resume)
                assert request.forked and len(request.sequences) == width
            lab.run(depth=2)
            assert lab.finished and set(lab.finished) == {"A", "B"}


def test_resuming_without_samples_that_have_finished() -> None:
    """The unfinished samples keep their index, and so their noise."""
    lab = Lab(40)
    whole = dict(o.reference(make("", PROMPT, 8, width=4)))
    resume = {i: whole[i][len(PROMPT) :][:3] for i in (1, 3)}
    request = make("A", PROMPT, 8, width=4, resume=resume)
    lab.scheduler.add(request)
    assert lab.scheduler.num_rows_taken == 0
    while lab.scheduler.has_work:
        lab.step()
    assert o.outputs(request) == [(i, whole[i]) for i in (1, 3)]


@pytest.mark.parametrize("resume", [None, {}])
def test_resuming_without_outputs_is_a_new_request(resume: Any) -> None:
    request = Request("A", PROMPT, make("", PROMPT, 3).sampling_params, max_tokens=3, resume=resume)
    request.begin(0, (0, 0), 3)
    assert request.only_sequence is request.sequences[0] and request.only_sequence.token_ids.tolist() == PROMPT
    assert not make("A", PROMPT, 3, width=2, resume=resume).forked
