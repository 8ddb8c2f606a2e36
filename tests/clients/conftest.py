"""A server with a tiny model, as a process of its own, for other people's clients.

OCTAVO_TEST_SERVER and OCTAVO_TEST_MODEL: the address of one that runs already, and the directory of its model, for an
environment without torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The server's address, and its model's directory."""
    if (url := os.environ.get("OCTAVO_TEST_SERVER")) is not None:
        yield url, Path(os.environ.get("OCTAVO_TEST_MODEL", "model"))
        return
    from tests.clients.tiny_server import serving

    directory = tmp_path_factory.mktemp("server")
    with serving(directory) as url:
        yield url, directory / "model"


@pytest.fixture(scope="session")
def server(place: tuple[str, Path]) -> str:
    """Its address; its key is "key"."""
    return place[0]


@pytest.fixture(scope="session")
def tokenizer(place: tuple[str, Path]) -> Path:
    """The directory of its model, for clients that count its tokens themselves."""
    return place[1]
