"""The fixture `world`, and hypothesis' profile for runs that only ask whether anything fails: `unshrunk`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import Phase, settings

from tests.core.lab import Lab, Worlds

settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.generate])


@pytest.fixture
def world() -> Iterator[Worlds]:
    """Makes a `Lab` like its class. After the test, all run to their end, and pins are removed."""
    made: list[Lab] = []

    def make(*args: int, **options: Any) -> Lab:
        made.append(Lab(*args, **options))
        return made[-1]

    yield make
    for lab in made:
        lab.run(depth=2, unpins=True)
