"""The oracle's check on a real device: beside the model's keys and values, a tag in every slot, compared in every pass.

The tag of a position is a hash of its sequence's tokens up to there. It lies in the pool itself, as one layer more that
the model does not know of: so it goes wherever its block goes, by the kernels that copy and swap blocks. Each pass
writes tags where it writes K and V (`slot_mapping`), and compares those of the whole context, read as attention reads
it (`block_tables`), with what the row's history gives. What loses its last owner is overwritten before anybody can take
it. All of it is queued with the pass, or captured with it: nothing waits, so that what overlaps still does.

It serves the GPU's runner, there or on a CPU, and the CPU's own; `tests.proof.oracle` does the same without a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.core import events as ev
from octavo.core.plan import StepPlan
from octavo.core.request import Request
from octavo.engine.executor import StepHandle
from octavo.errors import CapacityError
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.row_state import DecodeInputs, RowState
from octavo.runner.cuda_executor import CudaExecutor
from octavo.runner.cuda_model_runner import CudaModelRunner
from octavo.runner.executor import LocalExecutor
from octavo.runner.model_runner import ModelRunner, SlicePart
from octavo.runner.recorded_graphs import Model
from tests.proof.oracle import ReadBack
from tests.proof.workloads import World

POISON = -0x6B6B6B6B6B6B6B6B
UNKNOWN = -1
"""A token that no host has told the device: it comes from the pass before."""


def mix(position: Tensor, token: Tensor) -> Tensor:
    """A hash of both, int64; products wrap around."""
    x = (token + 1) * 0x2545F4914F6CDD1D + (position + 1) * 0x5851F42D4C957F2D
    x = (x ^ (x >> 31)) * 0x369DEA0F31A53F85
    return x ^ (x >> 29)


class Note(NamedTuple):
    """What the host knows of a plan when it is submitted, and the device cannot."""

    step: int
    lost: list[int]  # blocks that nobody owned before the plan was made
    known: list[tuple[int, list[int]]]  # (row, all tokens of its sequence), where the host feeds tokens


class Tags:
    """kv   [num_blocks + 1, num_layers + 1, 2, num_kv_heads, block_size, head_dim], of which the last layer holds tags

    history   [num_rows + 1, max_len] int64: tokens of each row's sequence, by position. The host's, where it tells any
    rows      [num_seqs] int64: whose sequences the pass that is about to run computes; the null row's are not looked at
    wrong     [5] int64: slots found wrong; and of the first one step, row, position, and 1 if it was the token that was
    seen      [1] int64: slots compared
    num_lost  blocks overwritten because nobody owned them
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

    def begin(self, note: Note) -> None:
        """Before a plan's first effect."""
        self.step.fill_(note.step)
        self.num_lost += len(note.lost)
        if note.lost:
            self.tags[torch.tensor(note.lost, device=self.device)] = POISON
        for row, token_ids in note.known:
            self.history[row] = UNKNOWN
            self.history[row, : len(token_ids)] = torch.tensor(token_ids, device=self.device)

    def look(self, token_ids: Tensor, batch: RaggedBatch) -> None:
        """Write the tags of a pass, and compare all that it reads. A graph can hold it: no shape hangs on a value."""
        rows, size = self.rows, self.block_size  # rows: [num_seqs]
        ends = batch.query_start[1:].long()
        number = torch.arange(len(token_ids), device=self.device)
        sequence = torch.searchsorted(ends, number, right=True).clamp(max=len(rows) - 1)  # [num_tokens]
        row, position = rows[sequence], batch.positions.long()
        live = (row != self.null_row) & (number < ends[-1])
        row, position = torch.where(live, row, self.null_row), torch.where(live, position, 0)
        told = self.history[row, position]
        self._note(live & (told >= 0) & (told != token_ids), row, position, of_token=1)
        self.history[row, position] = torch.where(told >= 0, told, token_ids)

        places = torch.arange(self.history.shape[1], device=self.device)
        expected = mix(places, self.history[rows]).cumsum(1)  # [num_seqs, max_len]
        slot = batch.slot_mapping.long()
        tag = expected[sequence, position].view(-1, 1, 1, 1).expand(-1, *self.tags.shape[1:3], self.tags.shape[4])
        self.tags[slot // size, :, :, slot % size] = tag  # [num_tokens, 2, num_kv_heads, words of a head]

        places = places[: batch.block_tables.shape[1] * size]
        blocks = batch.block_tables.long()[:, places // size]  # [num_seqs, num_places]
        found = self.tags[blocks, :, :, (places % size).expand_as(blocks)]  # [num_seqs, num_places, 2, ...]
        differs = (found != expected[:, : len(places), None, None, None]).flatten(2).any(2)
        read = (places < batch.seq_lens.unsqueeze(1)) & (rows != self.null_row).unsqueeze(1)
        self.seen += read.sum()
        self._note(read & differs, rows.unsqueeze(1).expand_as(read), places.expand_as(read), of_token=0)

    def _note(self, wrong: Tensor, row: Tensor, position: Tensor, *, of_token: int) -> None:
        first = wrong.flatten().int().argmax().view(1)
        place = torch.cat((self.step, row.take(first), position.take(first), torch.full_like(first, of_token)))
        self.wrong[1:] = torch.where((self.wrong[0] == 0) & wrong.any(), place, self.wrong[1:])
        self.wrong[0] += wrong.sum()

    def check(self) -> int:
        """Raises `ReadBack` if any slot was ever wrong. Returns how many were compared."""
        num, step, row, position, of_token = self.wrong.tolist()
        if num:
            what = "token" if of_token else "slot"
            raise ReadBack(f"{num} slots; first the {what} at", "step", step, "row", row, "position", position)
        return int(self.seen)


# -- into an engine ----------------------------------------------------------------------------------------------------


class TaggedModel:
    def __init__(self, model: Model, tags: Tags) -> None:
        self.model = model
        self.tags = tags

    def forward(self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None) -> Tensor:
        self.tags.look(token_ids, batch)
        return self.model.forward(token_ids, batch, kv, logits_rows)


class TaggedOps:
    """Operations, of which those that make a batch tell whose sequences are in it."""

    def __init__(self, ops: Any, tags: Tags) -> None:
        self.ops = ops
        self.tags = tags

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def prepare_decode_inputs(self, state: RowState, step: DecodeInputs, block_size: int) -> None:
        self.ops.prepare_decode_inputs(state, step, block_size)
        self.tags.rows = step.live_rows

    def prepare_prefill_inputs(self, state: RowState, rows: Tensor, *rest: Any) -> None:
        self.ops.prepare_prefill_inputs(state, rows, *rest)
        self.tags.rows = torch.where(state.done[rows], state.null_row, rows)


class Losses:
    """Blocks without an owner, which are to be overwritten at the next plan's beginning.

    A plan may still read what its own making has released (a victim's blocks go out, a copy's source): only what had
    been lost before its making is overwritten by it, and what it takes again itself is its own.
    """

    def __init__(self) -> None:
        self.turn = 0
        self._idle: dict[int, int] = {}  # block with content that can still be found -> turn in which it was released
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
    """Tells the tags of each plan what only the host knows, before the plan's first effect."""

    def __init__(self, executor: CudaExecutor | LocalExecutor, tags: Tags, losses: Losses) -> None:
        self.executor = executor
        self.close = executor.close
        self._losses = losses
        self._notes: dict[int, Note] = {}
        way = "launch" if isinstance(executor.runner, CudaModelRunner) else "run"
        run = getattr(executor.runner, way)

        def begin(plan: StepPlan, *rest: Any) -> Any:
            tags.begin(self._notes.pop(id(plan)))
            return run(plan, *rest)

        setattr(executor.runner, way, torch.inference_mode()(begin))

    def submit(self, plan: StepPlan) -> StepHandle:
        known = [(plan.rows[i], plan.sequences[i].token_ids.tolist()) for i in plan.host_tokens]
        self._notes[id(plan)] = Note(plan.step, self._losses.collect(), known)
        return self.executor.submit(plan)


def tag(llm: LLM, ops: Any, *, rows_on_device: bool, graphs: bool | Callable[[Tensor], Any] = False) -> Tags:
    """Give an engine that has done nothing yet a pool with tags, and a runner that looks at them.

    rows_on_device  the GPU's runner, whatever the device is, else the CPU's
    graphs          with its graphs; or what plays their part, made of its step_counter
    """
    engine, args = llm.engine, llm.config.args
    old: Any = engine.executor.runner  # type: ignore[attr-defined]
    kv = _with_tags(old.kv)
    host_kv = _with_tags(old.swapper.host_kv if isinstance(old, CudaModelRunner) else old.host_kv)
    num_rows, max_len = args.max_num_seqs or 1, llm.config.max_model_len
    tags = Tags(kv, num_rows, max_len + 1)
    model = TaggedModel(old.model, tags)
    executor: CudaExecutor | LocalExecutor
    host_sampling: ModelRunner
    if rows_on_device:
        runner = CudaModelRunner(
            model,
            kv,
            host_kv,
            num_rows=num_rows,
            max_model_len=max_len,
            max_num_tokens=args.max_num_batched_tokens or 1,
            max_decode_steps=args.decode_window or 1,
            vocab_size=engine.vocab_size,
            ops=TaggedOps(ops, tags),  # type: ignore[arg-type]
            graphs=graphs is True,
        )
        if callable(graphs):
            runner.graphs = graphs(runner.input_buffers.step_counter)
        host_sampling, executor = runner.host_sampling, CudaExecutor(runner)
    else:
        host_sampling = ModelRunner(model, kv, host_kv, num_rows=num_rows, max_model_len=max_len, ops=ops)
        executor = LocalExecutor(host_sampling)
    run_pass = host_sampling._pass

    def noted(plan: StepPlan, parts: list[SlicePart], *rest: Any) -> None:
        tags.rows = torch.tensor([part.row for part in parts], device=kv.device)
        run_pass(plan, parts, *rest)

    setattr(host_sampling, "_pass", noted)  # noqa: B010 (mypy refuses the plain way)
    losses, schedule = Losses(), engine.scheduler.schedule

    def next_turn() -> StepPlan:
        losses.turn += 1
        return schedule()

    setattr(engine.scheduler, "schedule", next_turn)  # noqa: B010
    engine.scheduler.events.subscribe(losses, blocks=True)
    engine.executor.close()
    engine.executor = TaggedExecutor(executor, tags, losses)
    return tags


def _with_tags(kv: Tensor) -> Tensor:
    """As many blocks, of one layer more."""
    return torch.zeros(
        (kv.shape[0], kv.shape[1] + 1, *kv.shape[2:]), dtype=kv.dtype, device=kv.device, pin_memory=kv.is_pinned()
    )


# -- what it runs ------------------------------------------------------------------------------------------------------


class Load(NamedTuple):
    """The oracle's requests of a seed, for an engine: the same prompts, prefixes, chats, samples, beams and salts."""

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
        extra = {3: {"logprobs": 21}, 5: {"logprobs": 1}}.get(number % 7, {})  # the former goes another way on a GPU
        params = SamplingParams(n=request.width, temperature=1.5, seed=number, detokenize=False, **common, **extra)
    return Load(request.request_id, [3 + token for token in request.prompt_token_ids], params, request.salt)


def serve(llm: LLM, seed: int) -> tuple[dict[str, list[list[int]]], Counter[str]]:
    """What became of a seed's requests, which come a few at a time, and some of which go again; and what was seen."""
    engine, random, seen = llm.engine, Random(seed), Counter[str]()
    stop = engine.scheduler.events.subscribe(lambda event: seen.update([type(event).__name__]), blocks=True)
    to_come, outputs = loads(seed), {}
    while to_come or engine.has_work:
        while to_come and (random.random() < 0.7 or not engine.has_work):
            load = to_come.pop(0)
            with suppress(CapacityError):
                engine.add_request(load.request_id, load.prompt, load.params, salt=load.salt)
        if random.random() < 0.02 and engine.num_requests > 1:
            engine.abort(next(reversed(engine.scheduler.requests)))
        for output in engine.step():
            outputs[output.request_id] = [list(sample.token_ids) for sample in output.outputs]
    stop()
    return outputs, seen
