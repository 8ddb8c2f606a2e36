"""A server process with a tiny model, for tests of third-party clients.

OCTAVO_TEST_SERVER and OCTAVO_TEST_MODEL: the address of a running server and its model's directory, for environments
without torch.
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
    """The server's address. Its API key is "key"."""
    return place[0]


@pytest.fixture(scope="session")
def tokenizer(place: tuple[str, Path]) -> Path:
    """The model's directory, for clients that count tokens themselves."""
    return place[1]
