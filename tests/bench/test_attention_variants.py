"""Every rung gives the same attention; the table of `octavo bench attention` gives the same tokens and true figures."""

from __future__ import annotations

import json

import pytest
import torch

from octavo.bench import attention
from octavo.bench import attention_variants as ladder
from octavo.errors import ParameterError
from octavo.kernels.metadata import RaggedBatch
from tests.kernels.pool import make_case, naive_attention, relative_error

EVERY_RUNG = pytest.mark.parametrize("rung", ladder.RUNGS.values(), ids=ladder.RUNGS)
MIXED = ([5, 1, 1, 7, 3], [5, 1, 9, 30, 11])


@EVERY_RUNG
@pytest.mark.parametrize("block_size", [1, 2, 16, 256])
@pytest.mark.parametrize("window", [0, 3])
def test_every_rung_is_attention(rung: ladder.Rung, block_size: int, window: int) -> None:
    case = make_case(*MIXED, block_size=block_size)
    out = rung(case.q, case.kv_layer, case.batch, scale=case.scale, window=window)
    assert relative_error(out, naive_attention(case, window)[0]) < 2e-6


@EVERY_RUNG
@pytest.mark.parametrize(("num_kv_heads", "group_size", "head_dim"), [(1, 1, 8), (3, 1, 24), (2, 7, 16), (1, 16, 80)])
def test_every_rung_shares_kv_heads_alike(rung: ladder.Rung, num_kv_heads: int, group_size: int, head_dim: int) -> None:
    case = make_case(*MIXED, num_kv_heads=num_kv_heads, group_size=group_size, head_dim=head_dim)
    out = rung(case.q, case.kv_layer, case.batch, scale=case.scale)
    assert relative_error(out, naive_attention(case)[0]) < 2e-6


@EVERY_RUNG
def test_every_rung_sums_in_float32(rung: ladder.Rung) -> None:
    """SEEDS B3.10: 3,000 values of about 0.1 with equal weights; a sum in float16 stops growing long before the end."""
    case = make_case([1], [3000], dtype=torch.float16, block_size=2, num_kv_heads=1)
    case.q.zero_()
    case.kv[:, :, 1].mul_(0.001).add_(0.1)  # V
    out = rung(case.q, case.kv_layer, case.batch, scale=case.scale)
    assert out.dtype == torch.float16
    assert float((out.double() - 0.1).abs().max()) < 2e-4


@EVERY_RUNG
def test_every_rung_is_exact_in_float64(rung: ladder.Rung) -> None:
    case = make_case(*MIXED, dtype=torch.float64)
    out = rung(case.q, case.kv_layer, case.batch, scale=case.scale)
    assert relative_error(out, naive_attention(case)[0]) < 1e-13


@pytest.mark.parametrize("query_tile", [1, 2, 5, 16])
def test_parallel_with_every_tile(query_tile: int) -> None:
    case = make_case(*MIXED)
    out = ladder.parallel(case.q, case.kv_layer, case.batch, scale=case.scale, query_tile=query_tile)
    assert relative_error(out, naive_attention(case)[0]) < 2e-6


def test_the_padded_baseline_is_attention() -> None:
    """Three prompts padded to 9 slots each; results of padding rows do not matter."""
    lengths, capacity = [9, 4, 1], 12
    q = torch.randn(3 * 9, 6, 8)
    kv = torch.randn(4, 1, 2, 2, capacity, 8)
    batch = RaggedBatch.from_lists([9] * 3, [9] * 3, [[2], [1], [3]], capacity)
    is_token = torch.arange(capacity) < torch.tensor(lengths).unsqueeze(1)
    out = ladder.contiguous(q, kv[:, 0], batch, scale=0.3, is_token=is_token).view(3, 9, 6, 8)
    for s, (length, block) in enumerate(zip(lengths, (2, 1, 3), strict=True)):
        alone = RaggedBatch.from_lists([length], [length], [[block]], capacity)
        expected = ladder.ragged(q.view(3, 9, 6, 8)[s, :length], kv[:, 0], alone, scale=0.3)
        assert relative_error(out[s, :length], expected.double()) < 2e-6


def test_softmax_over_nothing_yet_is_not_nan() -> None:
    """SEEDS B3.10: a block of which a query sees nothing, before it has seen anything."""
    state = ladder._Online.empty(torch.zeros(1, 2, 4))
    state = state.add(torch.full((1, 2, 3), -torch.inf), torch.ones(1, 3, 4))
    assert torch.equal(state.total, torch.zeros(1, 2))
    state = state.add(torch.tensor([[[0.0, 1.0, -torch.inf]] * 2]), torch.eye(4)[:3].unsqueeze(0))
    expected = torch.tensor([0.0, 1.0]).softmax(0)
    assert torch.allclose(state.result()[0, 0], torch.tensor([*expected.tolist(), 0.0, 0.0]))


def test_padding_wastes_what_the_lengths_say() -> None:
    """S3.17, B3.2: of [128, 64, 32, 8], 10,900 of 33,024 causal pairs and 232 of 512 tokens are real."""
    prefill, tokens = attention.padding_waste([128, 64, 32, 8])
    assert prefill == pytest.approx(1 - 10900 / 33024)
    assert tokens == pytest.approx(280 / 512)
    assert f"{prefill:.1%} {tokens:.1%}" == "67.0% 54.7%"
    assert attention.padding_waste([7, 7]) == (0.0, 0.0)


def test_all_variants_give_the_same_tokens_and_only_some_pad() -> None:
    lengths, max_tokens = (12, 6, 3, 1), 5
    found = {m.variant: m for m in attention.run("all", lengths, block_size=4, max_tokens=max_tokens)}
    assert tuple(found) == attention.VARIANTS
    assert len({m.token_ids for m in found.values()}) == 1
    tokens = found["baseline"].token_ids
    assert [len(t) for t in tokens] == [max_tokens] * 4
    assert len({t for output in tokens for t in output}) > 5, "a model that repeats itself would prove little"
    waste = attention.padding_waste(lengths)
    assert (found["baseline"].prefill_padding, found["baseline"].row_padding) == pytest.approx(waste)
    assert found["baseline"].decode_padding == pytest.approx(4 * 26 / sum(4 * (12 + step) for step in range(1, 5)))
    assert found["batched"].prefill_padding == 0 < found["batched"].decode_padding
    for name in ("concat", "online", "safe", "ragged", "parallel", "cpu"):
        m = found[name]
        assert (m.prefill_padding, m.decode_padding, m.row_padding) == (0, 0, 0), name
    slot_bytes = 4 * 2 * 2 * 16 * 4
    assert found["baseline"].kv_bytes == 4 * (12 + 4) * slot_bytes
    # ceil((12 + 4) / 4) blocks for the longest alone; for all at once 4 + 3 + 2 + 2
    assert (found["online"].num_blocks, found["ragged"].num_blocks) == (4, 11)
    assert found["ragged"].kv_bytes == 11 * 4 * slot_bytes


def test_the_ragged_schedule_mixes_chunks_with_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof would be empty if chunks never met decode tokens in one call."""
    monkeypatch.setattr(attention, "TOKEN_BUDGET", 6)
    seen: list[list[int]] = []
    forward = attention._forward

    def watch(model: object, kv: object, plan: list[attention.Slice], block_size: int) -> None:
        seen.append([count for _, count in plan])
        forward(model, kv, plan, block_size)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "_forward", watch)
    attention.run("parallel", (4, 14), block_size=4, max_tokens=4)
    assert [4, 2] in seen
    assert [1, 5] in seen
    assert max(map(sum, seen)) <= 6


def test_different_tokens_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = dict(ladder.RUNGS, online=lambda q, *args, **kwargs: torch.zeros_like(q))
    monkeypatch.setattr(ladder, "RUNGS", broken)
    with pytest.raises(attention.EngineError, match="online gave other tokens"):
        attention.run("online", (5, 3), max_tokens=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variant": "raged"}, "no attention variant 'raged'; did you mean 'ragged'"),
        ({"variant": "zzz"}, "known: baseline, concat"),
        ({"lengths": ()}, "at least one"),
        ({"lengths": (4, 0)}, "each at least 1"),
        ({"block_size": 0}, "block_size is 0, it must be at least 1"),
        ({"max_tokens": -1}, "max_tokens is -1"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        attention.run(**arguments)  # type: ignore[arg-type]


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    attention.main("ragged", (6, 2), max_tokens=2, json=True)
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["variant"], found["num_blocks"], found["prefill_padding"]) == ("ragged", 2, 0.0)
    assert found["time_s"] > 0


def test_the_table_names_every_variant_and_the_waste(capsys: pytest.CaptureFixture[str]) -> None:
    attention.main("baseline", (8, 4), max_tokens=1)
    printed = capsys.readouterr().out
    assert "baseline" in printed
    assert "wastes 36.1% of prefill attention, and 25.0% of" in printed
