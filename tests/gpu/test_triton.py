"""The Triton kernels on a GPU: the interpreter's cases compiled, and what only a GPU shows."""

from __future__ import annotations

import math

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from octavo.kernels import cuda, reference
from octavo.kernels.batch import RaggedBatch
from tests.kernels.pool import relative_error
from tests.kernels.triton_cases import *  # noqa: F403


def test_a_captured_graph_replays_with_other_lengths() -> None:
    block_size, tables = 16, [[1 + s * 20 + i for i in range(20)] for s in range(4)]
    batch = RaggedBatch.from_lists([1] * 4, [300, 1, 64, 65], tables, block_size, device="cuda")
    kv = torch.randn(81, 1, 2, 2, block_size, 64, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(4, 8, 64, device="cuda", dtype=torch.bfloat16)
    cuda.paged_attention(q, kv[:, 0], batch, scale=0.1)  # compiled before the capture
    batch.derived.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cuda.paged_attention(q, kv[:, 0], batch, scale=0.1)
    for lens in ([300, 1, 64, 65], [1, 0, 0, 320], [0, 0, 0, 0], [17, 300, 129, 2]):
        batch.seq_lens.copy_(torch.tensor(lens))
        graph.replay()
        expected = reference.paged_attention(q.double(), kv[:, 0].double(), batch, scale=0.1)
        assert float((out.double() - expected).norm()) <= 5e-3 * float(expected.norm())


def test_the_last_block_of_a_pool_past_2_to_the_32_elements() -> None:
    block_size, heads, head_dim = 16, 8, 128
    num_blocks = (1 << 32) // (2 * heads * block_size * head_dim) + 2
    if torch.cuda.mem_get_info()[0] < 3 * num_blocks * heads * block_size * head_dim * 2:
        pytest.skip("needs 13 GB of free GPU memory")
    kv = torch.empty(num_blocks + 1, 1, 2, heads, block_size, head_dim, device="cuda", dtype=torch.bfloat16)
    kv[-2:] = math.nan
    for query_len in (1, 9):
        batch = RaggedBatch.from_lists([query_len], [9], [[num_blocks]], block_size, device="cuda")
        k, v = torch.randn(2, 9, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        cuda.kv_write(k, v, kv[:, 0], torch.arange(9, device="cuda") + num_blocks * block_size)
        assert torch.equal(kv[num_blocks, 0, 0, :, :9].transpose(0, 1), k)
        q = torch.randn(query_len, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        out = cuda.paged_attention(q, kv[:, 0], batch, scale=0.1)
        near = RaggedBatch.from_lists([query_len], [9], [[1]], block_size, device="cuda")
        expected = reference.paged_attention(q.double(), kv[-2:, 0].double(), near, scale=0.1)
        assert relative_error(out, expected) < 1.5e-2
    cuda.block_copy(kv, torch.tensor([num_blocks], device="cuda"), torch.tensor([1], device="cuda"))
    assert torch.equal(kv[1, 0, :, :, :9], kv[num_blocks, 0, :, :, :9])
