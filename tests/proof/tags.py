"""The oracle's check with a real model runner: each KV slot has a tag, which every pass compares.

The tag of a position is a hash of its sequence's tokens up to there. Tags are one more layer of the KV pool, unknown to
the model. So the kernels that copy and swap blocks move them, too. Each pass writes tags through `slot_mapping`, like K
and V. It reads the tags of the whole context through `block_tables`, like attention, and compares them with the tokens
of the row's history. Blocks without an owner are overwritten before the next plan. All of this is queued or captured
with the pass and does not wait, so steps overlap as they do without tags.

It works with `ModelRunner` on any platform. `tests.proof.oracle` does the same check without a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from contextlib import suppress
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.core import events as ev
from octavo.core.in_flight import InFlightStep
from octavo.core.plan import StepPlan
from octavo.core.request import Request
from octavo.engine.engine_request import EngineRequest
from octavo.engine.executor import StepHandle
from octavo.errors import CapacityError
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.row_state import DecodeInputs, RowState
from octavo.runner.executor import Executor, make_executor
from octavo.runner.model_runner import ModelRunner
from octavo.runner.passes.graphs import Model
from octavo.runner.platform import Platform
from tests.engine.client import StepClient
from tests.proof.oracle import ReadBack
from tests.proof.workloads import World

POISON = -0x6B6B6B6B6B6B6B6B
UNKNOWN = -1
"""A token that the host has not sent: the device sampled it in an earlier pass."""


def mix(position: Tensor, token: Tensor) -> Tensor:
    """A hash of position and token, int64; products wrap around."""
    x = (token + 1) * 0x2545F4914F6CDD1D + (position + 1) * 0x5851F42D4C957F2D
    x = (x ^ (x >> 31)) * 0x369DEA0F31A53F85
    return x ^ (x >> 29)


class PlanFacts(NamedTuple):
    """Facts of a submitted plan that the device cannot know."""

    step: int
    lost: list[int]  # blocks without an owner when the plan was made
    known: list[tuple[int, list[int]]]  # (row, all tokens of its sequence), for slices with host tokens


class Tags:
    """The tags of a KV pool, and the history that they are checked against.

    kv        [num_blocks + 1, num_layers + 1, 2, num_kv_heads, block_size, head_dim]; the last layer holds the tags
    history   [num_rows + 1, max_len] int64: tokens of each row's sequence, by position; host tokens take precedence
    rows      [num_seqs] int64: rows of the next pass. The null row is not checked
    wrong     [5] int64: number of wrong slots; then step, row, position of the first one, and 1 if its token was wrong
    seen      [1] int64: slots compared
    num_lost  blocks overwritten because they had no owner
    """

    def __init__(self, kv: Tensor, num_rows: int, max_len: int) -> None:
        self.block_size = kv.shape[4]
        self.device = kv.device
        self.tags = kv.view(torch.int64)[:, -1]  # [num_blocks + 1, 2, num_kv_heads, block_size, words of a head]
        self.null_row = num_rows
        self.num_lost = 0
        self.history = self._full((num_rows + 1, max_len), UNKNOWN)
        self.rows = self._full((1,), num_rows)
        self.step, self.seen, self.wrong = self._full((1,), -1), self._full((1,), 0), self._full((5,), 0)

    def _full(self, shape: tuple[int, ...], value: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.int64, device=self.device)

    def begin(self, facts: PlanFacts) -> None:
        """Update the history and overwrite lost blocks, before a plan starts."""
        self.step.fill_(facts.step)
        self.num_lost += len(facts.lost)
        if facts.lost:
            self.tags[torch.tensor(facts.lost, device=self.device)] = POISON
        for row, token_ids in facts.known:
            self.history[row] = UNKNOWN
            self.history[row, : len(token_ids)] = torch.tensor(token_ids, device=self.device)

    def check_pass(self, token_ids: Tensor, batch: RaggedBatch) -> None:
        """Write the tags of a pass, and compare all tags that it reads. No shape depends on a value, as graphs need."""
        rows, size = self.rows, self.block_size  # rows: [num_seqs]
        ends = batch.query_start[1:].long()
        index = torch.arange(len(token_ids), device=self.device)
        sequence = torch.searchsorted(ends, index, right=True).clamp(max=len(rows) - 1)  # [num_tokens]
        row, position = rows[sequence], batch.positions.long()
        live = (row != self.null_row) & (index < ends[-1])
        row, position = torch.where(live, row, self.null_row), torch.where(live, position, 0)
        known = self.history[row, position]
        self._record(live & (known >= 0) & (known != token_ids), row, position, of_token=1)
        self.history[row, position] = torch.where(known >= 0, known, token_ids)

        positions = torch.arange(self.history.shape[1], device=self.device)
        expected = mix(positions, self.history[rows]).cumsum(1)  # [num_seqs, max_len]
        slot = batch.slot_mapping.long()
        tag = expected[sequence, position].view(-1, 1, 1, 1).expand(-1, *self.tags.shape[1:3], self.tags.shape[4])
        self.tags[slot // size, :, :, slot % size] = tag  # [num_tokens, 2, num_kv_heads, words of a head]

        positions = positions[: batch.block_tables.shape[1] * size]
        blocks = batch.block_tables.long()[:, positions // size]  # [num_seqs, num_positions]
        found = self.tags[blocks, :, :, (positions % size).expand_as(blocks)]  # [num_seqs, num_positions, 2, ...]
        differs = (found != expected[:, : len(positions), None, None, None]).flatten(2).any(2)
        read = (positions < batch.seq_lens.unsqueeze(1)) & (rows != self.null_row).unsqueeze(1)
        self.seen += read.sum()
        self._record(read & differs, rows.unsqueeze(1).expand_as(read), positions.expand_as(read), of_token=0)

    def _record(self, wrong: Tensor, row: Tensor, position: Tensor, *, of_token: int) -> None:
        first = wrong.flatten().int().argmax().view(1)
        entry = torch.cat((self.step, row.take(first), position.take(first), torch.full_like(first, of_token)))
        self.wrong[1:] = torch.where((self.wrong[0] == 0) & wrong.any(), entry, self.wrong[1:])
        self.wrong[0] += wrong.sum()

    def check(self) -> int:
        """Raises `ReadBack` if any slot was ever wrong. Returns the number of compared slots."""
        num, step, row, position, of_token = self.wrong.tolist()
        if num:
            kind = "token" if of_token else "slot"
            raise ReadBack(f"{num} slots; first the {kind} at", "step", step, "row", row, "position", position)
        return int(self.seen)


# -- tagged engine -----------------------------------------------------------------------------------------------------


class TaggedModel:
    def __init__(self, model: Model, tags: Tags) -> None:
        self.model = model
        self.tags = tags

    def forward(
        self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None, sliced: bool = False
    ) -> Tensor:
        self.tags.check_pass(token_ids, batch)
        return self.model.forward(token_ids, batch, kv, logits_rows, sliced)


class TaggedOps:
    """Operations that set `Tags.rows` when they prepare a batch."""

    def __init__(self, ops: Any, tags: Tags) -> None:
        self.ops = ops
        self.tags = tags

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def prepare_decode_inputs(self, state: RowState, inputs: DecodeInputs, block_size: int) -> None:
        self.ops.prepare_decode_inputs(state, inputs, block_size)
        self.tags.rows = inputs.live_rows

    def prepare_prefill_inputs(self, state: RowState, rows: Tensor, *rest: Any) -> None:
        self.ops.prepare_prefill_inputs(state, rows, *rest)
        self.tags.rows = torch.where(state.done[rows], state.null_row, rows)


class LostBlocks:
    """Blocks without an owner, to be overwritten before the next plan.

    A plan may read blocks that were released while it was made, such as the source of a swap or a copy. So only blocks
    released before that are overwritten, and not those that it allocates again.
    """

    def __init__(self) -> None:
        self.turn = 0
        self._idle: dict[int, int] = {}  # cached block -> turn in which it was released
        self._lost: dict[int, int] = {}

    def __call__(self, event: ev.Event) -> None:
        match event:
            case ev.Released(block_id=block, refs=0, cached=cached):
                (self._idle if cached else self._lost)[block] = self.turn
            case ev.Evicted(block_id=block) if block in self._idle:
                self._lost[block] = self._idle.pop(block)
            case ev.Shared(block_id=block):
                self._idle.pop(block, None)
            case ev.Allocated(block_id=block):
                if self._lost.get(block) == self.turn:
                    del self._lost[block]

    def collect(self) -> list[int]:
        lost = [block for block, turn in self._lost.items() if turn < self.turn]
        for block in lost:
            del self._lost[block]
        return lost


class TaggedExecutor:
    """Passes each plan's facts to the tags before the plan starts."""

    def __init__(self, executor: Executor, tags: Tags, losses: LostBlocks, in_flight: Seq[InFlightStep]) -> None:
        self.executor, self._in_flight = executor, in_flight
        self.close = executor.close
        self._losses = losses
        self._facts: dict[int, PlanFacts] = {}
        execute = executor.runner.execute

        def begin(plan: StepPlan) -> Any:
            tags.begin(self._facts.pop(id(plan)))
            return execute(plan)

        setattr(executor.runner, "execute", torch.inference_mode()(begin))  # noqa: B010 (mypy refuses the plain way)

    def submit(self, plan: StepPlan) -> StepHandle:
        sequences = self._in_flight[-1].sequences
        known = [(plan.rows[i], sequences[i].token_ids.tolist()) for i in plan.host_tokens]
        self._facts[id(plan)] = PlanFacts(plan.step, self._losses.collect(), known)
        return self.executor.submit(plan)


def tag(llm: LLM, platform: Platform, *, graphs: bool = True) -> Tags:
    """Give a new engine a KV pool with tags, and a runner on this platform that checks them."""
    engine, args = llm.engine, llm.config.args
    old: ModelRunner = engine.executor.runner  # type: ignore[attr-defined]
    kv, host_kv = _with_tags(old.state.kv), _with_tags(old.state.swapper.host_kv)
    num_rows, max_len = args.max_num_seqs or 1, llm.config.max_model_len
    tags = Tags(kv, num_rows, max_len + 1)
    platform.ops = TaggedOps(platform.ops, tags)  # type: ignore[assignment]
    runner = ModelRunner(
        TaggedModel(old.passes.model, tags),
        kv,
        host_kv,
        platform,
        num_rows=num_rows,
        max_model_len=max_len,
        max_num_tokens=args.max_num_batched_tokens or 1,
        max_decode_steps=args.decode_window or 1,
        vocab_size=engine.limits.vocab_size,
        graphs=graphs,
    )
    executor = make_executor(runner)
    losses, schedule = LostBlocks(), engine.scheduler.schedule

    def next_turn() -> InFlightStep:
        losses.turn += 1
        return schedule()

    setattr(engine.scheduler, "schedule", next_turn)  # noqa: B010 (mypy refuses the plain way)
    engine.scheduler.events.subscribe(losses, blocks=True)
    engine.executor.close()
    engine.executor = TaggedExecutor(executor, tags, losses, engine.scheduler.in_flight)
    return tags


def _with_tags(kv: Tensor) -> Tensor:
    """A KV pool with one more layer, of zeros."""
    return torch.zeros(
        (kv.shape[0], kv.shape[1] + 1, *kv.shape[2:]), dtype=kv.dtype, device=kv.device, pin_memory=kv.is_pinned()
    )


# -- requests ----------------------------------------------------------------------------------------------------------


class Load(NamedTuple):
    """A request of the oracle, for an engine: the same prompt, prefix, chat, samples, beams and salt."""

    request_id: str
    prompt: list[int]
    params: SamplingParams | BeamSearchParams
    salt: bytes


def loads(seed: int) -> list[Load]:
    return [_load(request, number) for number, request in enumerate(World(seed, Counter()).requests) if not request.pin]


def _load(request: Request, number: int) -> Load:
    stops = [3 + token for token in request.stop_ids]
    common: dict[str, Any] = {"max_tokens": request.max_tokens, "ignore_eos": True, "stop_token_ids": stops}
    params: SamplingParams | BeamSearchParams
    if request.select_beams is not None:
        params = BeamSearchParams(beam_width=request.width, **common)
    else:
        extra = {3: {"logprobs": 21}, 5: {"logprobs": 1}}.get(number % 7, {})  # the first needs host sampling
        params = SamplingParams(n=request.width, temperature=1.5, seed=number, detokenize=False, **common, **extra)
    return Load(request.request_id, [3 + token for token in request.prompt_token_ids], params, request.salt)


def serve(llm: LLM, seed: int) -> tuple[dict[str, list[list[int]]], Counter[str]]:
    """Run a seed's requests, which arrive a few at a time; some are aborted. Returns outputs and counts of events."""
    engine, client, random, seen = llm.engine, StepClient(llm.engine), Random(seed), Counter[str]()
    stop = engine.scheduler.events.subscribe(lambda event: seen.update([type(event).__name__]), blocks=True)
    pending, outputs = loads(seed), {}
    while pending or engine.has_work:
        while pending and (random.random() < 0.7 or not engine.has_work):
            load = pending.pop(0)
            with suppress(CapacityError):
                client.add_request(EngineRequest(load.request_id, load.prompt, load.params, salt=load.salt))
        if random.random() < 0.02 and engine.num_requests > 1:
            client.abort(next(reversed(engine.scheduler.requests)))
        for output in client.step():
            outputs[output.request_id] = [list(sample.token_ids) for sample in output.outputs]
    stop()
    return outputs, seen
