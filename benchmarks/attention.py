"""The cost of each attention variant on the same prompts.

One decoder with random weights generates greedily, first over padded contiguous K and V, then over blocks on every rung
of `attention_variants`, and last on the CPU's fast path. All must give the same tokens; the table shows what differs:

    PYTHONPATH=src python benchmarks/attention.py
    PYTHONPATH=src python benchmarks/attention.py --variant ragged --lengths 128,64 --repeats 5
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from types import ModuleType

import attention_variants as ladder  # beside this file
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.errors import EngineError
from octavo.integers import cdiv
from octavo.kernels import reference
from octavo.kernels.cpu import ops as cpu
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.ops import ModelOps
from octavo.models.decoder import Decoder
from octavo.models.linear import LayerFactory
from octavo.models.spec import DecoderSpec

LENGTHS = (128, 64, 32, 8)
VOCAB_SIZE = 512
VARIANTS = ("baseline", *ladder.RUNGS, "cpu")
TOKEN_BUDGET = 64
"""Tokens per step of the ragged variants: fewer than the prompts have, so chunks and decode tokens share steps."""


@dataclass(slots=True)
class Work:
    """Query-key pairs, and rows of the prefill's linear layers, that were computed, and how many were padding.

    A pair is a query with a key at or before its position; masked pairs do not count. It is padding if either part is.
    """

    prefill_pairs: int = 0
    prefill_padding: int = 0
    decode_pairs: int = 0
    decode_padding: int = 0
    prefill_rows: int = 0
    row_padding: int = 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """One variant's run. `num_blocks` is the most in use at once, `kv_bytes` the memory reserved for them."""

    variant: str
    time_s: float
    steps: int
    num_blocks: int
    kv_bytes: int
    prefill_padding: float  # shares, 0 to 1
    decode_padding: float
    row_padding: float
    token_ids: tuple[tuple[int, ...], ...]


def padding_waste(lengths: Sequence[int]) -> tuple[float, float]:
    """What padding to the longest wastes, as shares: of prefill attention's pairs, and of the tokens.

    The second is the waste in every linear layer of the prefill, and among the prompts' keys that a decode step reads.
    """
    longest, n = max(lengths), len(lengths)
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return 1 - pairs / (n * (longest * (longest + 1) // 2)), 1 - sum(lengths) / (n * longest)


def run(
    variant: str = "all",
    lengths: Sequence[int] = LENGTHS,
    block_size: int = 16,
    max_tokens: int = 16,
    *,
    seed: int = 0,
    repeats: int = 1,
) -> list[Measurement]:
    """Generate `max_tokens` tokens for a prompt of each length on the named variant, or on all.

    The baseline always runs, as the truth for the others' tokens; it is in the result if it was asked for. Times are
    the best of `repeats`. Raises `ParameterError` for what makes no sense, `EngineError` where tokens differ.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]
    expected = _baseline(prompts, max_tokens, seed)
    measurements = []
    for name in VARIANTS if variant == "all" else [variant]:
        runs = [_measure(name, prompts, block_size, max_tokens, seed) for _ in range(repeats)]
        best = min(runs, key=lambda m: m.time_s)
        if best.token_ids != expected.token_ids:
            raise EngineError(f"variant {name} gave other tokens than the baseline; attention is broken there")
        measurements.append(best)
    return measurements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=(*VARIANTS, "all"), default="all")
    parser.add_argument("--lengths", type=lambda text: [int(n) for n in text.split(",")], default=list(LENGTHS))
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=1, help="number of runs; the best time counts")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args()
    measurements = run(args.variant, args.lengths, args.block_size, args.max_tokens, repeats=args.repeats)
    if args.json:
        for m in measurements:
            print(json.dumps({k: v for k, v in asdict(m).items() if k != "token_ids"}))
        return
    Console().print(_table(measurements, args.lengths, args.block_size, args.max_tokens))
    attention, tokens = padding_waste(args.lengths)
    print(
        f"Padding {args.lengths} to {max(args.lengths)} wastes {attention:.1%} of prefill attention, and {tokens:.1%} "
        "of the linear layers' rows and\nof the prompt keys that a decode step reads. All tokens are equal."
    )


def _table(measurements: list[Measurement], lengths: Sequence[int], block_size: int, max_tokens: int) -> Table:
    table = Table(title=f"prompts of {list(lengths)} tokens, {max_tokens} generated each, blocks of {block_size}")
    table.add_column("variant")
    for heading in ("time ms", "steps", "blocks", "KV KiB", "prefill", "decode", "linear"):
        table.add_column(heading, justify="right")
    for m in measurements:
        table.add_row(
            m.variant,
            f"{m.time_s * 1e3:.1f}",
            str(m.steps),
            str(m.num_blocks or "-"),
            f"{m.kv_bytes / 1024:.0f}",
            *(f"{share:.1%}" for share in (m.prefill_padding, m.decode_padding, m.row_padding)),
        )
    table.caption = "spent on padding: attention of the prefill and of decoding, rows of the prefill's linear layers"
    return table


def _random_decoder(ops: ModelOps, max_len: int, seed: int) -> Decoder:
    """A small decoder of the Llama family, with four query heads a K/V head: of one seed, the same with any `ops`."""
    spec = DecoderSpec(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=max_len,
    )
    model = Decoder(spec, LayerFactory(ops, torch.float32, "cpu"))
    generator = torch.Generator().manual_seed(seed)
    for weight in model.weights():
        if weight.tensor.ndim == 1:
            weight.tensor.fill_(1.0)
        else:
            weight.tensor.normal_(0.0, weight.tensor.shape[1] ** -0.5, generator=generator)
    return model


def _ops_with(attention: Callable[..., Tensor]) -> ModelOps:
    """The reference's operations, with another attention."""
    ops = ModuleType("octavo.bench.attention.ops")
    vars(ops).update({name: getattr(reference, name) for name in cpu.__all__})
    vars(ops)["paged_attention"] = attention
    return ops


def _measure(name: str, prompts: list[list[int]], block_size: int, max_tokens: int, seed: int) -> Measurement:
    if name == "baseline":
        return _baseline(prompts, max_tokens, seed)
    return _paged(name, prompts, block_size, max_tokens, seed)


def _measurement(
    variant: str,
    model: Decoder,
    time_s: float,
    steps: int,
    slots: int,
    blocks: int,
    work: Work,
    tokens: list[list[int]],
) -> Measurement:
    return Measurement(
        variant=variant,
        time_s=time_s,
        steps=steps,
        num_blocks=blocks,
        kv_bytes=slots * KVCacheSpec.of(model.spec, 1, "float32").bytes_per_token,
        prefill_padding=work.prefill_padding / work.prefill_pairs,
        decode_padding=work.decode_padding / max(work.decode_pairs, 1),
        row_padding=work.row_padding / work.prefill_rows,
        token_ids=tuple(map(tuple, tokens)),
    )


# -- contiguous: one run of slots a sequence, as long as the longest may get ------------------------------------------


def _baseline(prompts: list[list[int]], max_tokens: int, seed: int) -> Measurement:
    """Static batching: prompts padded to the longest, and every output after the padding.

    slots    | p p p p p p p p | o o o ..      a sequence's run; what is generated begins at the same slot in all
             | p p p . . . . . | o o o ..
    """
    num_seqs, longest = len(prompts), max(map(len, prompts))
    capacity = longest + max_tokens - 1  # the last token generated is never computed
    lengths = torch.tensor([len(p) for p in prompts])
    seqs = torch.arange(num_seqs)
    is_token = torch.arange(capacity) < lengths.unsqueeze(1)  # [num_seqs, capacity]

    def attention(q: Tensor, kv_layer: Tensor, batch: RaggedBatch, *, scale: float, window: int) -> Tensor:
        assert window == 0
        return ladder.contiguous(q, kv_layer, batch, scale=scale, is_token=is_token)

    model = _random_decoder(_ops_with(attention), capacity + 1, seed)
    kv = _pool(model, num_seqs, capacity)
    work = Work()
    outputs: list[list[int]] = [[] for _ in prompts]
    start = time.perf_counter()
    tokens = torch.tensor([p + [0] * (longest - len(p)) for p in prompts])  # [num_seqs, longest]
    positions = torch.arange(longest).expand(num_seqs, -1)
    for step in range(max_tokens):
        first_slot = longest + step - 1 if step else 0
        num_slots = longest + step
        is_token[:, longest:num_slots] = True
        count = num_slots - first_slot
        batch = RaggedBatch(
            positions=positions.reshape(-1),
            slot_mapping=((seqs + 1).unsqueeze(1) * capacity + torch.arange(first_slot, num_slots)).reshape(-1),
            query_start=torch.arange(num_seqs + 1, dtype=torch.int32) * count,
            seq_lens=torch.full((num_seqs,), num_slots, dtype=torch.int32),
            block_tables=(seqs + 1).to(torch.int32).unsqueeze(1),
            max_query_len=count,
            max_seq_len=num_slots,
        )
        logits_rows = seqs * count + (lengths - 1 if step == 0 else 0)
        sampled = model.forward(tokens.reshape(-1), batch, kv, logits_rows).argmax(-1)
        for output, token in zip(outputs, sampled.tolist(), strict=True):
            output.append(token)
        tokens, positions = sampled.unsqueeze(1), (lengths + step).unsqueeze(1)
        _count_baseline(work, lengths.tolist(), longest, step)
    return _measurement(
        "baseline", model, time.perf_counter() - start, max_tokens, num_seqs * capacity, 0, work, outputs
    )


def _count_baseline(work: Work, lengths: list[int], longest: int, step: int) -> None:
    n = len(lengths)
    if step == 0:
        work.prefill_pairs = n * (longest * (longest + 1) // 2)
        work.prefill_padding = work.prefill_pairs - sum(length * (length + 1) // 2 for length in lengths)
        work.prefill_rows, work.row_padding = n * longest, n * longest - sum(lengths)
    else:
        work.decode_pairs += n * (longest + step)
        work.decode_padding += n * longest - sum(lengths)


# -- paged ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sequence:
    """One counter and no phases: `num_computed` chases the tokens."""

    token_ids: list[int]
    num_prompt: int
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0

    @property
    def remaining(self) -> int:
        return len(self.token_ids) - self.num_computed


Slice = tuple[_Sequence, int]  # and how many of its tokens to compute


def _one_by_one(live: list[_Sequence]) -> list[Slice]:
    """The first sequence until it is finished, then the next."""
    return [(live[0], live[0].remaining)]


def _prompts_first(live: list[_Sequence]) -> list[Slice]:
    """Prompts one by one, then one token of each sequence per step."""
    for seq in live:
        if seq.remaining > 1 or seq.num_computed == 0:
            return [(seq, seq.remaining)]
    return [(seq, 1) for seq in live]


def _mixed(live: list[_Sequence]) -> list[Slice]:
    """Up to TOKEN_BUDGET tokens: decode tokens first, then chunks of prompts."""
    plan: list[Slice] = []
    budget = max(TOKEN_BUDGET, len(live))
    for seq in sorted(live, key=lambda seq: seq.num_computed < seq.num_prompt):
        if count := min(seq.remaining, budget):
            plan.append((seq, count))
            budget -= count
    return plan


SCHEDULES: dict[str, Callable[[list[_Sequence]], list[Slice]]] = {
    "concat": _one_by_one,
    "online": _one_by_one,
    "safe": _one_by_one,
    "batched": _prompts_first,
    "ragged": _mixed,
    "parallel": _mixed,
    "cpu": _mixed,
}


def _paged(name: str, prompts: list[list[int]], block_size: int, max_tokens: int, seed: int) -> Measurement:
    ops = cpu if name == "cpu" else _ops_with(ladder.RUNGS[name])
    model = _random_decoder(ops, max(map(len, prompts)) + max_tokens, seed)
    sequences = [_Sequence(list(prompt), len(prompt)) for prompt in prompts]
    schedule = SCHEDULES[name]
    num_blocks = sum(cdiv(len(prompt) + max_tokens - 1, block_size) for prompt in prompts)
    kv = _pool(model, num_blocks, block_size)
    free = list(range(1, num_blocks + 1))
    work = Work()
    steps = peak = 0
    start = time.perf_counter()
    while live := [seq for seq in sequences if len(seq.token_ids) < seq.num_prompt + max_tokens]:
        plan = schedule(live)
        for seq, count in plan:
            while len(seq.block_ids) * block_size < seq.num_computed + count:
                seq.block_ids.append(free.pop())
        peak = max(peak, num_blocks - len(free))
        _count_paged(work, plan, block_size, pads=name == "batched")
        _forward(model, kv, plan, block_size)
        steps += 1
        for seq, _ in plan:
            if len(seq.token_ids) == seq.num_prompt + max_tokens:
                free += seq.block_ids
    time_s = time.perf_counter() - start
    outputs = [seq.token_ids[seq.num_prompt :] for seq in sequences]
    return _measurement(name, model, time_s, steps, peak * block_size, peak, work, outputs)


def _forward(model: Decoder, kv: Tensor, plan: list[Slice], block_size: int) -> None:
    """One step: all slices flattened into one call; a completed sequence gets a token."""
    batch = RaggedBatch.from_lists(
        [count for _, count in plan],
        [seq.num_computed + count for seq, count in plan],
        [seq.block_ids for seq, _ in plan],
        block_size,
    )
    tokens = [t for seq, count in plan for t in seq.token_ids[seq.num_computed : seq.num_computed + count]]
    ends = batch.query_start[1:].long() - 1
    sampled = model.forward(torch.tensor(tokens), batch, kv, ends).argmax(-1).tolist()
    for (seq, count), token in zip(plan, sampled, strict=True):
        seq.num_computed += count
        if seq.remaining == 0:
            seq.token_ids.append(token)


def _count_paged(work: Work, plan: list[Slice], block_size: int, *, pads: bool) -> None:
    """Padded work of a step. No variant pads rows; a variant that `pads` processes all tables to the longest."""
    most_blocks = max(len(seq.block_ids) for seq, _ in plan)
    for seq, count in plan:
        padding = count * (most_blocks - len(seq.block_ids)) * block_size if pads else 0
        pairs = padding + sum(range(seq.num_computed + 1, seq.num_computed + count + 1))
        if seq.num_computed < seq.num_prompt:
            work.prefill_rows += count
            work.prefill_pairs += pairs
            work.prefill_padding += padding
        else:
            work.decode_pairs += pairs
            work.decode_padding += padding


def _pool(model: Decoder, num_blocks: int, block_size: int) -> Tensor:
    """An empty pool, full of NaN: a slot that is read before it is written would show in every token."""
    spec = KVCacheSpec.of(model.spec, block_size, "float32")
    return torch.full(spec.pool_shape(num_blocks), float("nan"))


if __name__ == "__main__":
    main()
