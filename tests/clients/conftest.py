"""A server with a tiny model, as a process of its own, for other people's clients."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address; its key is "key". OCTAVO_TEST_SERVER: one that runs already, for an environment without torch."""
    if (url := os.environ.get("OCTAVO_TEST_SERVER")) is not None:
        yield url
        return
    from tests.clients.tiny_server import serving

    with serving(tmp_path_factory.mktemp("server")) as url:
        yield url
