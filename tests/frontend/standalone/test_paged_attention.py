"""`PagedAttention` gives what plain attention over contiguous K and V gives, whatever happens to its blocks."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.errors import CapacityError, ParameterError
from octavo.frontend.standalone.paged_attention import PagedAttention
from octavo.kernels import reference
from octavo.kernels.cpu import ops as cpu

PAGE = Path(__file__).parents[3] / "docs" / "paged-attention.md"
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 14, 2, 16
LENGTHS = [1, 3, 4, 5, 16, 17, 33]
OPS = pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
KV = tuple[Tensor, Tensor]


def make(num_blocks: int = 64, block_size: int = 4, **options: Any) -> PagedAttention:
    """Every slot is NaN until it is written, those of the null block too."""
    sizes = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM}
    attention = PagedAttention(num_blocks, block_size, **sizes | options)
    attention.kv.fill_(torch.nan)
    return attention


def random_kv(num_tokens: int, dtype: torch.dtype = torch.float32) -> KV:
    k, v = torch.randn(2, num_tokens, NUM_KV_HEADS, HEAD_DIM, dtype=dtype)
    return k, v


def random_q(num_tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, dtype=dtype)


def test_kernels_get_whole_rows_whatever_the_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's `kv_write` copies a token's heads as one row."""
    written = []

    def kv_write(k: Tensor, v: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
        written.extend([k.is_contiguous(), v.is_contiguous()])

    monkeypatch.setattr(reference, "kv_write", kv_write)
    make().append_kv(0, *torch.randn(2, NUM_KV_HEADS, 5, HEAD_DIM).transpose(1, 2))
    assert written == [True, True]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last len(q) tokens over contiguous K and V, [num_tokens, heads, head_dim] each."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    heads = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    out: Tensor = F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def contents(attention: PagedAttention) -> tuple[Any, ...]:
    pool = attention.manager.pool
    tables = {i: (entry.table.block_ids[:], entry.num_tokens[:]) for i, entry in attention._entries.items()}
    return tables, list(pool.refs), attention.stats(), attention.kv.nan_to_num(123.0).clone().tolist()


@OPS
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_ragged_batch_equals_plain_attention(ops: Any, block_size: int, dtype: torch.dtype, tolerance: float) -> None:
    """Whole prompts, chunks and decode tokens in one call, and each alone."""
    torch.manual_seed(0)
    attention = make(128, block_size, dtype=dtype, ops=ops)
    kv = [random_kv(n, dtype) for n in LENGTHS]
    for i, (k, v) in enumerate(kv):
        attention.append_kv(i, k, v)
    query_lens = [1, 3, 1, 2, 16, 1, 20]
    queries = [random_q(n, dtype) for n in query_lens]
    wanted = [plain(q, k, v) for q, (k, v) in zip(queries, kv, strict=True)]
    out = attention.compute_batch(range(len(LENGTHS)), torch.cat(queries), query_lens=query_lens)
    assert torch.allclose(out, torch.cat(wanted), atol=tolerance, rtol=0)
    for i, q in enumerate(queries):
        assert torch.allclose(attention.compute_attention(i, q), wanted[i], atol=tolerance, rtol=0)


@OPS
def test_a_batch_of_decode_tokens_equals_each_alone(ops: Any) -> None:
    """A token is written before it attends: it sees itself."""
    torch.manual_seed(1)
    attention = make(ops=ops)
    kv = [random_kv(n) for n in LENGTHS]
    for i, (k, v) in enumerate(kv):
        for token in range(len(k)):
            attention.append_kv(i, k[token], v[token])
    q = random_q(len(kv))
    together = attention.compute_batch(range(len(kv)), q)
    for i, (k, v) in enumerate(kv):
        alone = attention.compute_attention(i, q[i])
        assert alone.shape == q[i].shape
        assert torch.allclose(together[i], alone, atol=1e-6)
        assert torch.allclose(alone, plain(q[i : i + 1], k, v)[0], atol=1e-5)
    shuffled = [3, 0, 3]
    assert torch.allclose(attention.compute_batch(shuffled, q[shuffled]), together[shuffled], atol=1e-6)


def test_a_token_without_earlier_ones_returns_its_value() -> None:
    """One K/V head for seven query heads; nothing is repeated in the pool."""
    attention = make()
    k, v = random_kv(1)
    attention.append_kv(5, k, v)
    out = attention.compute_attention(5, random_q(1))
    assert torch.allclose(out, v.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1), atol=1e-6)
    assert attention.kv.shape[3] == NUM_KV_HEADS


def test_float16_sums_in_float32() -> None:
    """The mean of 4,096 values of 3: a sum in float16 stops growing long before 12,288."""
    attention = make(256, 16, dtype=torch.float16)
    k = torch.zeros(4096, NUM_KV_HEADS, HEAD_DIM)
    attention.append_kv(0, k, k + 3)
    out = attention.compute_attention(0, random_q(1).half())
    assert out.dtype == torch.float16 and torch.allclose(out.float(), torch.tensor(3.0), atol=1e-3)


# -- layers ----------------------------------------------------------------------------------------------------------


def test_layers_share_one_block_table() -> None:
    torch.manual_seed(2)
    attention = make(4, 4, num_layers=3)
    kv = [random_kv(9) for _ in range(3)]
    for start, end in [(0, 5), (5, 6), (6, 9)]:
        for layer, (k, v) in enumerate(kv):
            attention.append_kv(0, k[start:end], v[start:end], layer)
            q = random_q(end - start)
            assert torch.allclose(attention.compute_attention(0, q, layer), plain(q, k[:end], v[:end]), atol=1e-5)
    assert attention.stats().num_used == 3


def test_a_layer_without_its_k_and_v_cannot_attend_or_fork() -> None:
    attention = make(num_layers=2)
    attention.append_kv(0, *random_kv(3))
    with pytest.raises(ParameterError, match=r"1 queries of sequence 0, which has 0 tokens in layer 1"):
        attention.compute_attention(0, random_q(1), layer=1)
    with pytest.raises(ParameterError, match=r"has \[3, 0\] tokens in its layers"):
        attention.fork(0)
    attention.append_kv(0, *random_kv(3), layer=1)
    assert attention.fork(0) == 1


# -- forks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [4, 6])
def test_a_fork_shares_blocks_and_copies_the_last_on_write(length: int) -> None:
    """A full last block is not copied. The last owner writes in place."""
    torch.manual_seed(3)
    attention = make(num_layers=2)
    kv = [random_kv(length) for _ in range(2)]
    for layer in range(2):
        attention.append_kv(7, *kv[layer], layer)
    child = attention.fork(7)
    assert child == 8 and attention.stats().num_used == attention.stats().num_saved_by_sharing == -(-length // 4)
    own = {i: [random_kv(1) for _ in range(2)] for i in (child, 7)}
    for i, both in own.items():
        for layer, (k, v) in enumerate(both):
            attention.append_kv(i, k, v, layer)
    stats = attention.stats()
    assert (stats.num_used, stats.num_saved_by_sharing, stats.num_copied) == (3, 1, length % 4 > 0)
    for i, both in own.items():
        for layer in range(2):
            k, v = (torch.cat(pair) for pair in zip(kv[layer], both[layer], strict=True))
            q = random_q(2)
            assert torch.allclose(attention.compute_attention(i, q, layer), plain(q, k, v), atol=1e-5)


def test_no_tokens_are_a_sequence_without_blocks_and_copy_nothing() -> None:
    attention = make(2)
    attention.append_kv(0, *random_kv(0))
    assert attention.fork(0) == 1 and attention.stats().num_used == 0
    for i, num_unfilled in enumerate([1, 2]):
        attention.append_kv(i, *random_kv(3))
        assert attention.stats().num_unfilled_slots == num_unfilled
    assert attention.fork(0) == 2
    attention.append_kv(2, *random_kv(0))
    assert attention.stats().num_copied == 0 and attention.compute_batch([], random_q(0)).shape == random_q(0).shape


def test_a_fork_outlives_its_parent() -> None:
    attention = make(3)
    k, v = random_kv(6)
    attention.append_kv(0, k, v)
    child = attention.fork(0)
    attention.free_sequence(0)
    attention.append_kv(1000, *random_kv(4))
    q = random_q(1)
    assert torch.allclose(attention.compute_attention(child, q), plain(q, k, v), atol=1e-5)
    attention.free_sequence(child)
    assert attention.fork(1000) == 1001 and attention.stats().num_free == 2


# -- the pool --------------------------------------------------------------------------------------------------------


def test_blocks_are_used_again_after_free() -> None:
    """What the previous owner left in them, NaN here, has no effect."""
    attention = make(2)
    for length in (8, 3, 5):
        attention.append_kv(0, torch.full((8, NUM_KV_HEADS, HEAD_DIM), torch.nan), random_kv(8)[1])
        attention.free_sequence(0)
        k, v = random_kv(length)
        attention.append_kv(1, k, v)
        q = random_q(1)
        assert torch.allclose(attention.compute_attention(1, q), plain(q, k, v), atol=1e-5)
        attention.free_sequence(1)
        attention.free_sequence(1)
        attention.free_sequence(99)
        assert attention.stats().num_free == 2
    with pytest.raises(ParameterError, match="no sequence 1; append_kv begins one"):
        attention.compute_attention(1, q)


@pytest.mark.parametrize(("seq_id", "count", "needed"), [(0, 8, 2), (1, 1, 1), (2, 5, 2), (9, 5, 2)])
def test_a_full_pool_changes_nothing(seq_id: int, count: int, needed: int) -> None:
    """A sequence that grows, a fork that copies, one that does both, and a new one."""
    attention = make(4)
    attention.append_kv(0, *random_kv(6))
    attention.append_kv(1, *random_kv(2))
    assert attention.fork(1) == 2
    attention.append_kv(3, *random_kv(1 if seq_id != 1 else 4))
    if seq_id in (2, 9):
        attention.free_sequence(3)
    before = contents(attention)
    with pytest.raises(CapacityError, match=rf"sequence {seq_id} needs {needed} more blocks; [01] of 4 are free"):
        attention.append_kv(seq_id, *random_kv(count))
    assert contents(attention) == before


KV_SHAPE = (NUM_KV_HEADS, HEAD_DIM)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda a: a.append_kv(1, torch.zeros(3, 14, 16), torch.zeros(3, 14, 16)),
            r"\[3, 14, 16\]; expected \[2, 16\]",
        ),
        (lambda a: a.append_kv(1, torch.zeros(3, *KV_SHAPE), torch.zeros(2, *KV_SHAPE)), "k has 3 tokens and v has 2"),
        (lambda a: a.append_kv(1, *random_kv(1), layer=1), "layer is 1, and num_layers 1"),
        (lambda a: a.append_kv(1, *random_kv(1), layer=-1), "layer is -1"),
        (lambda a: a.compute_attention(0, random_q(3)), "3 queries of sequence 0, which has 2 tokens"),
        (lambda a: a.compute_batch([0], random_q(2)), r"q has 2 tokens, and query_lens \[1\]"),
        (lambda a: a.compute_batch([0], random_q(2), query_lens=[1, 1]), r"query_lens \[1, 1\]"),
        (lambda a: a.compute_batch([0, 0], random_q(1), query_lens=[2, -1]), "-1 queries of sequence 0"),
        (lambda a: a.fork(4), "no sequence 4"),
    ],
)
def test_a_wrong_argument_changes_nothing(call: Any, message: str) -> None:
    attention = make()
    attention.append_kv(0, *random_kv(2))
    before = contents(attention)
    with pytest.raises(ParameterError, match=message):
        call(attention)
    assert contents(attention) == before


@pytest.mark.parametrize("sizes", [{"num_kv_heads": 4}, {"head_dim": 0}, {"num_layers": 0}, {"num_kv_heads": 0}])
def test_wrong_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ParameterError, match="num_heads is a multiple of num_kv_heads"):
        make(**sizes)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_random_histories_equal_plain_attention(block_size: int) -> None:
    """Prompts, tokens, forks and frees in any order, over a pool that is often full."""
    torch.manual_seed(block_size)
    rng = random.Random(block_size)
    attention = make(64 // block_size, block_size)
    held: dict[int, KV] = {}
    num_full = 0
    for _ in range(400):
        action, seq_id = rng.random(), rng.choice([*held, len(held) + 1000])
        if action < 0.1 and held:
            victim = rng.choice(list(held))
            attention.free_sequence(victim)
            del held[victim]
        elif action < 0.25 and held and len(held) < 8:
            parent = rng.choice(list(held))
            held[attention.fork(parent)] = held[parent]
        else:
            new = random_kv(rng.choice([1, 1, 1, 7]))
            try:
                attention.append_kv(seq_id, *new)
            except CapacityError:
                num_full += 1
            else:
                old = held.get(seq_id, random_kv(0))
                held[seq_id] = torch.cat([old[0], new[0]]), torch.cat([old[1], new[1]])
        if held:
            q = random_q(len(held))
            wanted = torch.cat([plain(q[i : i + 1], k, v) for i, (k, v) in enumerate(held.values())])
            assert torch.allclose(attention.compute_batch(list(held), q), wanted, atol=1e-5)
    assert num_full > 5 and (attention.stats().num_copied > 5) == (block_size > 1)
    for seq_id in held:
        attention.free_sequence(seq_id)
    assert attention.stats().num_free == attention.stats().num_blocks


def test_the_code_of_its_page_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(code, {})
    (printed,) = re.findall(r"print\(.*# ([\d ]+)\n", code)
    assert capsys.readouterr().out == f"{printed}\n"
