"""llama.cpp's blocks in planes are the numbers that llama.cpp's own package computes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from octavo.kernels.group_form import GGUF_FORMS
from octavo.models.loading.gguf_groups import read_blocks
from tests.models.tiny import random_blocks


@pytest.mark.parametrize("name", GGUF_FORMS)
def test_planes_are_the_blocks(name: str) -> None:
    blocks = random_blocks(name, np.empty((6, 5 * 256)), scale=1.0)
    groups = read_blocks(name, blocks)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    assert torch.equal(groups.dequantised(), torch.from_numpy(expected))
    assert int(groups.values.max()) < 2**groups.form.bits
    # Scales and minima of 6 bits take whole bytes.
    more = 4 * 6 * 5 if groups.form.has_minima and groups.form.is_nested else 0
    assert groups.form.num_bytes(groups.values.numel()) == blocks.nbytes + more
