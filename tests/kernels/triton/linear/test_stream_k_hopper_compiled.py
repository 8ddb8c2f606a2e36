"""How programs share the tiles of a product on Hopper."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from octavo.kernels.triton.linear import stream_k_hopper

BOUNDARY = stream_k_hopper.boundary.fn


def share_of_each_program(
    patch: pytest.MonkeyPatch, num_programs: int, num_tiles: int, num_steps: int, min_steps: int
) -> Iterator[list[tuple[int, int, int]]]:
    """A program's items (tile, first step, end), by the kernel's own functions."""
    programs = [0]
    language = SimpleNamespace(
        minimum=min,
        maximum=max,
        where=lambda condition, yes, no: yes if condition else no,
        num_programs=lambda axis: num_programs,
        program_id=lambda axis: programs[0],
    )
    patch.setattr(stream_k_hopper, "gl", language)
    patch.setattr(stream_k_hopper, "boundary", BOUNDARY)
    for programs[0] in range(num_programs):
        rounds, _, _, begin, end = stream_k_hopper.share.fn(num_tiles, num_steps, min_steps)
        items = range(stream_k_hopper.num_items.fn(rounds, begin, end, num_steps))
        yield [stream_k_hopper.load_item.fn(item, rounds, begin, end, num_steps) for item in items]


@pytest.mark.parametrize("min_steps", [4, 8])
def test_every_step_is_computed_once(min_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a program's first item of the last round begins within a tile: there is room for one's sums."""
    for num_sms in (1, 3, 132):
        for num_tiles, num_steps in itertools.product(
            (*range(1, 30), 96, 131, 132, 133, 300), (1, 2, 3, 4, 5, 32, 112)
        ):
            programs = min(num_sms, max(num_tiles, num_tiles * num_steps // min_steps))
            steps: set[tuple[int, int]] = set()
            for items in share_of_each_program(monkeypatch, programs, num_tiles, num_steps, min_steps):
                own = {(tile, step) for tile, first, stop in items for step in range(first, stop)}
                assert items and not own & steps and all(first < stop <= num_steps for _, first, stop in items)
                assert sum(first > 0 for _, first, _ in items) <= 1
                steps |= own
            assert len(steps) == num_tiles * num_steps and max(steps) == (num_tiles - 1, num_steps - 1)
