"""llama.cpp's blocks in planes are the numbers that llama.cpp's own package computes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from octavo.models.loading.gguf_groups import KINDS, read_blocks
from tests.models.tiny import random_blocks


@pytest.mark.parametrize("name", KINDS)
def test_planes_are_the_blocks(name: str) -> None:
    kind, blocks = KINDS[name], random_blocks(name, np.empty((6, 5 * 256)), scale=1.0)
    groups = read_blocks(kind, blocks)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    assert torch.equal(groups.dequantised(), torch.from_numpy(expected))
    assert int(groups.values.max()) < 2**kind.form.bits
    assert kind.form.num_bytes(*groups.shape) == blocks.nbytes + (
        0 if not kind.form.has_minima or not kind.form.is_nested else 4 * 6 * 5
    )
