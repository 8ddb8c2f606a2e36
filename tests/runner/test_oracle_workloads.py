"""The oracle's random workloads on real executors: a third platform gives the same tokens as the CPU.

`HashModel` does on a device's tensors what the oracle does in lists. The slot of a position holds a hash of the slot
before it, the position and the token. Logits are a hash of all visible slots, read through the block table. So a stale
slot, a lost copy or a wrong table shows as a wrong token, and `expected_outputs` computes every output without a pool.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.core.plan import BlockCopy, StepPlan
from octavo.core.request import Request
from octavo.engine.executor import GrammarBitmask, GrammarDrafts
from octavo.errors import StepError
from octavo.kernels import reference
from octavo.kernels.metadata import SamplingTensors
from octavo.kernels.row_state import DecodeInputs, DraftLines, RowState
from octavo.runner import checksums
from octavo.runner.platform import CpuPlatform, Platform
from octavo.runner.streams import CompletedEvent, RecordableEvent
from tests.proof import oracle as o
from tests.proof.workloads import World
from tests.runner.executor_process import ExecutorProcess, RemoteExecutor
from tests.runner.hash_drafts import guess_by_habit
from tests.runner.hash_model import HashExecutor, Sizes, logits_of, mix, visible, windows_of
from tests.runner.stub_platform import StubPlatform

FORBIDDEN = o.VOCAB - 1
"""The token that requests with structured output never sample."""


# -- the model's outputs without a KV pool -----------------------------------------------------------------------------


def expected_outputs(request: Request, windows: tuple[int, ...]) -> list[tuple[int, list[int]]]:
    """As `oracle.reference`, with the tokens of a `HashModel`."""
    prompt = list(request.prompt_token_ids)
    assert request.max_tokens is not None
    limit = len(prompt) + request.max_tokens

    def line(tokens: list[int]) -> Tensor:
        """Logits after these tokens, as they are sampled."""
        values = [0]
        for p, token in enumerate(tokens):
            values.append(mix(values[-1], p, token))
        logits = torch.tensor([logits_of(visible(values[1:], windows))])
        if request.select_beams is not None:
            logits = logits.log_softmax(-1)
        if request.use_structured_output:
            logits[0, FORBIDDEN] = -torch.inf
        return logits

    def ends(tokens: list[int]) -> bool:
        return tokens[-1] in request.stop_ids or len(tokens) >= limit

    out: list[tuple[int, list[int]]] = []
    if request.select_beams is None:
        for j in range(request.width):
            tokens = list(prompt)
            while tokens == prompt or not ends(tokens):
                params = SamplingTensors.from_lists([1.0], [0], [1.0], [0.0], [request.seed], [j], [len(tokens)])
                tokens.append(int(reference.sample(line(tokens), params)))
            out.append((j, tokens))
        return out
    live = [(0, prompt)]
    while live:
        ranked = []
        for i, tokens in live:
            top = line(tokens)[0].topk(min(request.num_samples, o.VOCAB))
            pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
            ranked += [(score, -i, token, tokens) for score, token in pairs if score > -torch.inf]
        ranked.sort(key=lambda candidate: candidate[:3], reverse=True)
        longer = [(k, [*tokens, token]) for k, (_, _, token, tokens) in enumerate(ranked[: request.width])]
        out += [(k, tokens) for k, tokens in longer if ends(tokens)]
        live = [(k, tokens) for k, tokens in longer if not ends(tokens)]
    return sorted(out)


# -- the executor in place of the oracle -------------------------------------------------------------------------------


class Device:
    """An executor as `World` drives the oracle. Plans, bitmasks and results pass as bytes."""

    def __init__(self, world: World, executor: HashExecutor | RemoteExecutor) -> None:
        self.executor = executor
        sizes = Sizes.of(world)
        assert executor.start()[:2] == (sizes.num_blocks, sizes.num_host_blocks)
        self.poisoned: dict[int, set[int]] = {}  # unknown here: a wrong token shows it
        self.counts: Counter[str] = Counter()
        self._handles: dict[int, Any] = {}
        self._corrupts, self._flips = world.habits.corrupts, random.Random(world.seed + 0.5)

    def submit(self, plan: StepPlan) -> Any:
        if plan.swap_ins and self._flips.random() < self._corrupts:
            self._flip_bit(self._flips.choice(plan.swap_ins).src)
        handle = self._handles[id(plan)] = self.executor.submit(plan)
        if slices := list(plan.bitmask_slices):
            drafts = {i: GrammarDrafts([0] * d, range(d)) for i, (_, d) in plan.drafts.items() if i in slices}
            num_masks = len(slices) + sum(len(guess.tokens) for guess in drafts.values())
            allowed = np.full((num_masks, 1), ~(1 << FORBIDDEN), dtype=np.int32)
            for _ in range(plan.num_bitmask_columns):
                handle.put_bitmask(GrammarBitmask(slices, allowed, drafts))
        self.counts["steps"] += 1
        self.counts["bitmasks"] += plan.num_bitmask_columns
        return handle

    def _flip_bit(self, block: int) -> None:
        """Flip a bit of a host block that has its checksum."""
        assert isinstance(self.executor, HashExecutor)
        self.executor.flip_bit(block, self._flips)
        self.counts["flipped bits"] += 1

    def check_checkpoints(self) -> None:
        """These models have no states."""

    def fail(self, plans: list[StepPlan]) -> None:
        """The scheduler has taken these plans back: nothing may read what they moved."""
        for plan in plans:
            self._handles[id(plan)].result()
            if isinstance(self.executor, HashExecutor):
                self.executor.spoil(plan)


class LateEvent(CompletedEvent):
    """Completes at some query, or when it is waited for: steps overlap, and return column by column."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.is_reached = chance, False

    def record(self) -> None:
        self.is_reached = False

    def query(self) -> bool:
        self.is_reached = self.is_reached or self.chance.random() < 0.5
        return self.is_reached

    def synchronize(self) -> None:
        self.is_reached = True


class LatePlatform(StubPlatform):
    def __init__(self) -> None:
        super().__init__()
        self.chance = random.Random(0)

    def record_event(self, *, blocking: bool = False) -> RecordableEvent:
        return LateEvent(self.chance)


def play(
    seed: int,
    platform: Platform,
    totals: Counter[str],
    *,
    kind: str | None = None,
    graphs: bool = False,
    speculates: bool = False,
    groups: bool = False,
) -> dict[str, Any]:
    """Run the workload of this seed on a platform -> outputs of its requests. Raises the oracle's findings."""
    world = World(seed, totals, kind=kind, speculates=speculates, groups=groups)
    device = Device(world, HashExecutor(Sizes.of(world), platform, graphs=graphs))
    if speculates:
        guess_by_habit(device.executor.runner, world, totals)
    return finish(world, device, totals)


def finish(world: World, device: Device, totals: Counter[str]) -> dict[str, Any]:
    world.oracle = device  # type: ignore[assignment]
    try:
        world.run()
    finally:
        device.executor.close()
    totals.update(device.counts + world.seen)
    whole = world.finished - world.aborted - world.stopped - world.failed
    return {name: o.outputs(world.wanted[name]) for name in whole}


WORKLOADS = [*((seed, None) for seed in range(50)), *((seed, "swap") for seed in range(1000, 1014))]


@pytest.fixture(scope="module", autouse=True)
def expect_outputs_of_hash_model() -> Iterator[None]:
    make_requests = World._requests
    with pytest.MonkeyPatch.context() as patch:

        def requests(world: World) -> list[Request]:
            windows = windows_of(world)
            patch.setattr(o, "reference", lambda request: expected_outputs(request, windows))
            return make_requests(world)

        patch.setattr(World, "_requests", requests)
        yield


@functools.cache
def on_cpu(seed: int, kind: str | None, groups: bool) -> dict[str, Any]:
    return play(seed, CpuPlatform(), Counter(), kind=kind, groups=groups)


@pytest.mark.parametrize("groups", [False, True], ids=["alike", "groups"])
@pytest.mark.parametrize(
    ("way", "every"),
    [
        ("eager", 2),
        pytest.param("late", 1, marks=pytest.mark.proof),
        pytest.param("graphs", 1, marks=pytest.mark.proof),
    ],
)
def test_random_workloads_on_a_third_platform_give_the_cpus_tokens(way: str, every: int, groups: bool) -> None:
    totals, num_compared = Counter[str](), 0
    for seed, kind in WORKLOADS[every - 1 :: every]:
        expected = on_cpu(seed, kind, groups)
        platform = LatePlatform() if way == "late" else StubPlatform(graphs=way == "graphs")
        outputs = play(seed, platform, totals, kind=kind, graphs=way == "graphs", groups=groups)
        # A request that one platform returns late may be aborted there before its end.
        both = outputs.keys() & expected.keys()
        assert {name: outputs[name] for name in both} == {name: expected[name] for name in both}
        num_compared += len(both)
    assert num_compared > 200 / every and totals["steps"] > 2_000 / every
    reached = [
        *("Preempted recompute", "Preempted swap", "SwappedIn", "Recomputed", "Copied", "Shared", "Evicted", "Corrupt"),
        *("failed steps", "out of memory", "abort running", "stop a sequence", "Pinned", "bitmasks", "flipped bits"),
    ]
    assert [what for what in reached if not totals[what]] == []
    assert way != "late" or totals["columns"] > 50


@pytest.mark.parametrize("groups", [False, True], ids=["alike", "groups"])
@pytest.mark.parametrize(
    ("way", "every"),
    [("host", 1), ("eager", 2), *(pytest.param(way, 1, marks=pytest.mark.proof) for way in ("late", "graphs"))],
)
def test_random_workloads_with_drafts_give_the_same_tokens(way: str, every: int, groups: bool) -> None:
    """The world checks each output against the model's without a pool. Drafts are right, wrong or random."""
    totals = Counter[str]()
    for seed, kind in WORKLOADS[every - 1 :: every]:
        platforms = {"host": CpuPlatform, "late": LatePlatform}
        platform = platforms[way]() if way in platforms else StubPlatform(graphs=way == "graphs")
        play(seed, platform, totals, kind=kind, graphs=way == "graphs", speculates=True, groups=groups)
    assert totals["accepted"] > 50 / every and totals["rejected"] > 100 / every
    reached = (
        "cut by the end",
        "Preempted recompute",
        "Preempted swap",
        "failed steps",
        "abort running",
        "bitmasks",
        "Copied",
    )
    assert [what for what in reached if not totals[what]] == []


def test_random_workloads_in_another_process_give_the_same_tokens() -> None:
    """It gets bytes and nothing else."""
    totals, num_compared = Counter[str](), 0
    with ExecutorProcess() as process:
        for seed, kind in WORKLOADS[::4]:
            world = World(seed, totals, kind=kind)
            world.habits.corrupts = 0.0
            outputs = finish(world, Device(world, process.executor(Sizes.of(world))), totals)
            expected = on_cpu(seed, kind, groups=False)
            both = outputs.keys() & expected.keys()
            assert {name: outputs[name] for name in both} == {name: expected[name] for name in both}
            num_compared += len(both)
    assert num_compared > 50 and min(totals[what] for what in ("Preempted swap", "failed steps", "bitmasks")) > 0


def test_an_error_in_another_process_is_raised_here() -> None:
    world = World(0, Counter())
    with ExecutorProcess() as process:
        executor = process.executor(Sizes.of(world))
        plan = StepPlan()
        plan.set_slices([0], [0], [1], [1])
        plan.copies = [BlockCopy(1, 10**6)]  # no such block
        with pytest.raises(StepError):
            executor.submit(plan).result()


# -- planted bugs ------------------------------------------------------------------------------------------------------


class BuggyOps:
    """The reference's operations, one of them with a bug."""

    def __init__(self, name: str, operation: Callable[..., Any]) -> None:
        setattr(self, name, operation)

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)


def keep_done_flags(state: RowState, rows: Tensor, *rest: Any) -> None:
    done = state.done.clone()
    reference.prepare_prefill_inputs(state, rows, *rest)
    state.done.logical_or_(done)


def use_one_table_for_all_groups(state: RowState, inputs: DecodeInputs, block_size: int) -> None:
    reference.prepare_decode_inputs(state, inputs, block_size)
    batch = inputs.batch
    for group in range(1, batch.num_groups):
        batch.group(group).block_tables.copy_(batch.block_tables)


def read_tables_of_the_next_row(state: RowState, inputs: DecodeInputs, block_size: int) -> None:
    reference.prepare_decode_inputs(state, inputs, block_size)
    inputs.batch.block_tables.copy_(inputs.batch.block_tables.roll(1, 0))


def use_one_noise_for_all_samples(logits: Tensor, params: SamplingTensors, *rest: Any) -> Tensor:
    return reference.sample_checked(logits, replace(params, sample_index=params.sample_index * 0), *rest)


BUGS: dict[str, tuple[str, Callable[..., Any]]] = {
    "a lost copy": ("block_copy", lambda kv, src, dst: None),
    "a swap in of the wrong block": (
        "swap_in",
        lambda host, kv, src, dst: reference.swap_in(host, kv, src.flip(0), dst),
    ),
    "rows that stay done": ("prepare_prefill_inputs", keep_done_flags),
    "tables of another row": ("prepare_decode_inputs", read_tables_of_the_next_row),
    "samples with the same noise": ("sample_checked", use_one_noise_for_all_samples),
    "an ignored bitmask": ("apply_token_bitmask", lambda logits, mask_index, bitmask: None),
    "a token too late": (
        "commit_sampled_tokens",
        lambda state, rows, *rest: reference.commit_sampled_tokens(state, rows.roll(1), *rest),
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_an_operation_is_noticed(bug: str) -> None:
    with pytest.raises(AssertionError):
        play_all(lambda: StubPlatform(BuggyOps(*BUGS[bug])))


def accept_all_drafts(state: RowState, rows: Tensor, tokens: Tensor, drafts: DraftLines) -> Tensor:
    return tokens


def accept_one_draft_too_many(state: RowState, rows: Tensor, tokens: Tensor, drafts: DraftLines) -> Tensor:
    kept = reference.reject_drafts(state, rows, tokens, drafts)
    return torch.where((drafts.depths > 0) & (kept.roll(1) >= 0), tokens, kept)


def keep_the_first_token(state: RowState, rows: Tensor, tokens: Tensor, positions: Tensor, *rest: Any) -> None:
    before = state.num_computed.clone()
    reference.commit_sampled_tokens(state, rows, tokens, positions, *rest)
    state.num_computed.copy_(torch.where(state.num_computed > before + 1, before + 1, state.num_computed))


def start_where_the_host_thinks(state: RowState, rows: Tensor, starts: Tensor, known: Tensor, *rest: Any) -> None:
    state.num_computed[rows] = starts
    reference.prepare_prefill_inputs(state, rows, starts, known, *rest)


DRAFT_BUGS: dict[str, tuple[str, Callable[..., Any]]] = {
    "all drafts are right": ("reject_drafts", accept_all_drafts),
    "the token after the wrong draft's": ("reject_drafts", accept_one_draft_too_many),
    "a row that goes on from its first new token": ("commit_sampled_tokens", keep_the_first_token),
    "a row where the host thinks that it is": ("prepare_prefill_inputs", start_where_the_host_thinks),
}


@pytest.mark.parametrize("bug", DRAFT_BUGS)
def test_a_bug_with_drafts_is_noticed(bug: str) -> None:
    with pytest.raises((AssertionError, StepError)):
        play_all(lambda: StubPlatform(BuggyOps(*DRAFT_BUGS[bug])), speculates=True)


def test_a_plan_that_does_not_settle_where_its_rows_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "minimum", lambda a, b, out: out)
    with pytest.raises((AssertionError, StepError)):
        play_all(CpuPlatform, speculates=True)


def test_a_missed_bit_flip_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums.SwapInCheck, "take", lambda check: [])
    with pytest.raises(o.WrongOutput):
        play_all(StubPlatform)


def test_a_table_of_another_group_is_noticed() -> None:
    with pytest.raises(AssertionError):
        play_all(lambda: StubPlatform(BuggyOps("prepare_decode_inputs", use_one_table_for_all_groups)), groups=True)


def play_all(platform: Callable[[], Platform], **features: bool) -> None:
    for seed, kind in reversed(WORKLOADS):  # those with swaps notice most bugs
        play(seed, platform(), Counter(), kind=kind, **features)
