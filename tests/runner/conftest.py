from __future__ import annotations

import pytest

from tests.engine.models import make_talking_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_talking_checkpoint(tmp_path_factory.mktemp("tiny") / "llama"))
