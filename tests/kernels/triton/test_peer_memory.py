"""Which messages of ranks are pushed, and that all others give the same by torch.distributed: gloo here.

Also whole models of two ranks, with all kernels of a pass.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from octavo.kernels.triton import ops, peer_memory
from octavo.kernels.triton.peer_memory import PeerReducer, open_buffers
from octavo.kernels.triton.reduce import SEND_SLOTS
from octavo.models.linear import TensorParallel
from tests.kernels.triton.peers import Case, HostCopies, Inputs, Memory, check, collect
from tests.models.test_tensor_parallel import CASES as MODELS
from tests.models.tiny import (
    PagedRun,
    assert_close,
    load_tiny,
    make_tiny_checkpoint,
    random_prompts,
    transformers_logits,
)

CASES = [
    Case(2, 96, torch.float32),
    Case(8, 600, torch.float32),
    Case(1, 75, torch.float16),
    Case(4, 96, torch.float16),
    Case(2, 2000, torch.float32),
]
PROMPTS, CHUNKS = random_prompts(1, 9, 17), (7, 17)
"""In steps of at most 15 tokens, and in one of 27, of which the small-batch path is too short."""
USES = [4, 0, 0, 4, 4]
"""Of the first slot or block, by each case: with 2 blocks, the second has too many units, the third no whole words.

The fourth has too many rows for its whole norm, and pushes its sum in pairs before.
"""


def all_reduce(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def all_gather(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(("num_tokens", "size"), [(2047, 0), (2048, 1024), (2049, 1152), (4352, 2176), (4353, 0)])
def test_long_batches_are_halved_in_tiles(num_tokens: int, size: int) -> None:
    """If they are long enough, and a part fits a slot."""
    buffers = Memory.allocate(2, 1 << 10, 0, 2176 * 16384).of_rank(0, 0, 3)
    reducer = PeerReducer(buffers, all_reduce, all_gather, HostCopies(0))
    assert reducer.part_size(num_tokens, 16384) == size
    assert replace(reducer, engine=None).part_size(num_tokens, 16384) == 0


def start_gloo(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)


def run_rank(rank: int, memory: Memory, folder: Path) -> None:
    start_gloo(rank, folder)
    buffers = memory.of_rank(rank, 0, spin_limit=200_000)
    reducer, results, epoch = PeerReducer(buffers, all_reduce, all_gather), [], 0
    for case, uses in zip(CASES, USES, strict=True):
        inputs = Inputs.of(case, 0, 2)
        results.append(collect(reducer, case, inputs, rank))
        check(results[-1], inputs, is_pushed=uses > 0 and case.dtype == torch.float32)  # the fourth is rounded twice
        epoch += uses
        assert int(buffers.pairs.epochs[0] + buffers.blocks.epochs[0]) == epoch, case
    assert not buffers.status.item()
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_messages_are_pushed_where_they_fit(tmp_path: Path) -> None:
    mp.spawn(run_rank, (Memory.allocate(2, 1 << 14, 1 << 13), tmp_path), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def run_model(rank: int, memory: Memory, folder: Path, sends: bool) -> None:
    start_gloo(rank, folder)
    buffers = memory.of_rank(rank, 0, spin_limit=200_000)
    peers, chunks = PeerReducer(buffers, all_reduce, all_gather), CHUNKS
    if sends:
        peer_memory.PART_TOKENS = 4
        peers, chunks = replace(peers, engine=HostCopies(rank), min_sent_bytes=0), CHUNKS[1:]
    model = load_tiny(folder / "model", ops, tp=TensorParallel(rank, 2, peers.all_reduce, peers.all_gather, peers))
    results = [PagedRun(model, PROMPTS, block_size=16, tp_size=2).run(chunk) for chunk in chunks]
    assert not buffers.status.item()
    assert model.tp.sums_in_norms == (model.max_small_batch_tokens > 0)
    if sends:
        assert buffers.sends.counters.tolist() == [[len(model.layers), 0]] * SEND_SLOTS  # from 1, and not of the last
    else:
        assert buffers.pairs.epochs[0] > 0 and buffers.blocks.epochs[0] > 0
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="processes share the memory of the host; see tests/gpu/test_ranks"
)
@pytest.mark.parametrize(
    ("case", "sends"),
    [("llama", False), ("qwen3_moe", False), ("qwen3_next", False), ("gemma4", False), ("llama", True)],
)
def test_models_of_two_ranks_give_transformers_logits(tmp_path: Path, case: str, sends: bool) -> None:
    """Small batches, whose sums are added to the residual, and larger ones, whose sums a norm takes or nothing.

    sends: the larger batch in two parts, whose sums are sent
    """
    kind, sizes = MODELS[case]
    directory = make_tiny_checkpoint(kind, tmp_path / "model", **({"intermediate_size": 40} | sizes))
    expected = transformers_logits(directory, PROMPTS)
    mp.spawn(run_model, (Memory.allocate(2, 1 << 20, 1 << 12, 1 << 16), tmp_path, sends), nprocs=2)
    for rank in range(2):
        for result in torch.load(tmp_path / f"{rank}.pt"):
            for actual, wanted in zip(result, expected, strict=True):
                assert_close(actual, wanted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is peer memory")
def test_without_peer_memory_every_rank_learns_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[bytes] = []

    def exchange(data: bytes) -> list[bytes]:
        sent.append(data)
        return [data, bytes(len(data))]

    with caplog.at_level(logging.WARNING, "octavo"):
        assert open_buffers(0, 2, torch.device("cpu"), exchange) is None
    assert "sums over ranks take NCCL: this process has not loaded libcudart" in caplog.text
    assert [len(data) for data in sent] == [64, 64] and sent[1].startswith(b"this process has not")
