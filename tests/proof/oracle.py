"""The oracle: an executor without tensors that checks KV memory at every step.

A slot of its KV cache holds a hash of the value one position before (read through the block table), the position and
the token. A value thus depends on every block before it. Every step reads every slot of every scheduled sequence again,
so an aliased block, a stale prefix hit, a lost copy or swaps in a wrong order are noticed at once. The sampled token is
a hash of the value, so `reference` computes every output without memory and without a scheduler. A slot of a window
group holds a hash of the same value and its group. A state holds in every slot of its block i a hash of the value at
its last position and i. Whoever continues from a state reads all of it: the value becomes another if a slot is wrong.
A pass reads it through the row's read line, writes it through the line before that, and sets the first to the second.

Host blocks may be corrupted while they are swapped out. The device keeps a checksum of each, reports changed blocks at
swap-in, and continues. Values computed from them are poison, and no result of poison may be committed.

The device uses the plan alone, like a real one: rows, setups and table writes, as it arrives in bytes (`Received`). The
checks also read the scheduler's step for the owner of a slice, which an executor must not.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from octavo.core.block_pool import BlockPool
from octavo.core.in_flight import InFlightStep
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import RowSetup, StepPlan, StepResult
from octavo.core.request import Request, Sequence, Status
from octavo.core.scheduler import Scheduler
from octavo.core.snapshot import Roster
from octavo.engine.executor import GrammarBitmask

VOCAB = 5
GARBAGE = "garbage"


class ReadBack(AssertionError):  # noqa: N818 (named for the finding)
    """A slot holds another value than its sequence's history implies."""


class WrongOutput(AssertionError):  # noqa: N818
    """An output differs from the reference."""


class Invariant(AssertionError):  # noqa: N818
    """The structure is broken."""


class Stall(AssertionError):  # noqa: N818
    """There is no progress although there could be."""


def need(ok: Any, kind: type[AssertionError], *what: object) -> None:
    if not ok:
        raise kind(*what)


# -- the "model" -------------------------------------------------------------------------------------------------------


class Poison(int):
    """The value of a slot that was corrupted, or was computed from one."""


def root(salt: bytes) -> int:
    return hash((77, len(salt)))


def value(before: int, position: int, token: int) -> int:
    return hash((before, position, token))


def in_group(h: int, group: int) -> int:
    """The value of a position's slot in a group: the full one is 0."""
    if not group:
        return h
    return type(h)(hash((h, 9, group)))


def in_state(h: int, block: int) -> int:
    """The value of every slot in a state's block, counted from 0, after the position with this value."""
    own = hash((h, 100 + block))
    return Poison(own) if isinstance(h, Poison) else own


def sampled(h: int, sample_index: int) -> int:
    return hash((h, 5, sample_index)) % VOCAB


def candidates(h: int, num: int) -> list[tuple[int, int]]:
    """(score, token) pairs, for beam searches."""
    return [(hash((h, 6, j)) % 997, hash((h, 7, j)) % VOCAB) for j in range(num)]


def keep_best(width: int) -> Callable[[list[tuple[Sequence, Any]]], list[tuple[Sequence, int]]]:
    """A minimal beam search: keeps the best `width` continuations."""

    def select_beams(parents: list[tuple[Sequence, Any]]) -> list[tuple[Sequence, int]]:
        ranked = [(score, -seq.index, token, seq) for seq, found in parents for score, token in found]
        ranked.sort(key=lambda c: c[:3], reverse=True)
        return [(seq, token) for _, _, token, seq in ranked[:width]]

    return select_beams


def reference(request: Request) -> list[tuple[int, list[int]]]:
    """Return the expected outputs, computed without memory: (index, prompt and output) of each sequence."""
    prompt, salt = list(request.prompt_token_ids), request.salt
    assert request.max_tokens is not None
    limit = len(prompt) + request.max_tokens
    start = root(salt)
    for p, t in enumerate(prompt):
        start = value(start, p, t)
    out: list[tuple[int, list[int]]] = []
    if request.select_beams is None:
        for j in range(request.width):
            tokens, h = list(prompt), start
            while True:
                t = sampled(h, j)
                tokens.append(t)
                if t in request.stop_ids or len(tokens) >= limit:
                    break
                h = value(h, len(tokens) - 1, t)
            out.append((j, tokens))
        return out
    live = [(0, prompt, start)]
    while live:
        ranked = [(s, -i, t, tokens, h) for i, tokens, h in live for s, t in candidates(h, request.num_samples)]
        ranked.sort(key=lambda c: c[:3], reverse=True)
        live = []
        for k, (_, _, t, tokens, h) in enumerate(ranked[: request.width]):
            longer = [*tokens, t]
            if t in request.stop_ids or len(longer) >= limit:
                out.append((k, longer))
            else:
                live.append((k, longer, value(h, len(longer) - 1, t)))
    return sorted(out)


def outputs(request: Request) -> list[tuple[int, list[int]]]:
    return sorted((s.index, s.token_ids.tolist()) for s in request.finished_sequences if s.finish_reason != "pruned")


# -- the device --------------------------------------------------------------------------------------------------------


@dataclass
class Habits:
    """Freedoms of a device. Correct plans give the same results either way."""

    eager: bool = True  # runs a plan when it is submitted, else when its result is requested
    stops: bool = True  # its stop test ends a decode window early, and skips slices of done rows
    shuffles: bool = False  # runs a plan's slices in another order
    forgets: bool = False  # clears a table beyond a new owner's blocks
    splits: bool = False  # returns a decode window column by column
    corrupts: float = 0.0  # the chance that a host block loses a slot before a step
    drafts: str = "lot"  # always "right" or "wrong", "random" tokens, or right and wrong by "lot"
    lazy: bool = False  # drafts fewer tokens than allowed now and then


class Received(StepPlan):
    """A plan as it arrived in bytes. `origin`, the scheduler's step, is for the checks only."""

    __slots__ = ("origin",)
    origin: InFlightStep

    @classmethod
    def of(cls, step: InFlightStep) -> Received:
        data = step.plan.encode()
        plan = cls.decode(data)
        assert isinstance(plan, Received)
        need(plan.encode() == data, Invariant, "a plan that bytes change", step.plan)
        for name in StepPlan.__slots__:
            sent, got = getattr(step.plan, name), getattr(plan, name)
            if name == "row_setups":
                sent, got = ([for_device(s) for s in setups] for setups in (sent, got))
            need(sent == got, Invariant, "a plan that bytes change", name, sent, got)
        plan.origin = step
        return plan

    @property
    def sequences(self) -> list[Sequence]:
        return self.origin.sequences


def for_device(setup: RowSetup) -> tuple[Any, ...]:
    """A row setup without the parameters that no device needs."""
    return *setup._replace(sampling_params=None), *(getattr(setup.sampling_params, name) for name in ON_DEVICE)  # type: ignore[arg-type]


ON_DEVICE = (
    "n", "best_of", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words_token_ids", "min_tokens", "logprobs",
    "prompt_logprobs",
)  # fmt: skip


def _arrived(result: StepResult) -> StepResult:
    """A result as it arrives in bytes."""
    got = StepResult.decode(result.encode())
    need(got == result, Invariant, "a result that bytes change", result, got)
    return got


class _Running:
    def __init__(self, oracle: Oracle, plan: Received) -> None:
        self.oracle, self.plan = oracle, plan
        self._whole: list[list[list[Any]]] | None = None
        self._given = 0

    @property
    def done(self) -> bool:
        """False while `poll` has a column to return, as on a device that still computes the rest.

        Plans with bitmasks always return column by column.
        """
        num_columns = max(map(self.plan.num_passes, range(len(self.plan.rows))), default=0)
        return not (self.oracle.habits.splits or self.plan.bitmask_slices) or self._given + 1 >= num_columns

    def poll(self, timeout_s: float = 0.0) -> StepResult | None:
        if self.done:
            return None
        tokens = self._tokens()
        column = [list(chain.from_iterable(columns[self._given : self._given + 1])) for columns in tokens]
        self._given += 1
        return _arrived(StepResult(column, corrupt=self.oracle.corrupt.pop(id(self.plan), [])))

    def put_bitmask(self, masks: GrammarBitmask | None) -> None:
        """Ignore bitmasks: tokens depend on the slots alone."""

    def result(self) -> StepResult:
        tokens = self._tokens()
        corrupt = self.oracle.corrupt.pop(id(self.plan), [])
        rest = [list(chain.from_iterable(columns[self._given :])) for columns in tokens]
        return _arrived(StepResult(rest, corrupt=corrupt))

    def _tokens(self) -> list[list[list[Any]]]:
        """By slice and column. Slices with `num_samples` return all of them in the first column."""
        if self._whole is None:
            self._whole, firsts = self.oracle.finish(self.plan)
            for i in firsts.keys() & self.plan.bitmask_slices:
                seq = self.plan.sequences[i]
                known = len(seq.token_ids) == firsts[i]
                need(
                    known or seq.finish_reason or i in self.plan.origin.void_slices,
                    Invariant,
                    "a mask of unknown tokens",
                    seq,
                )
        return self._whole


class Oracle:
    """The executor. Its checks run with each step."""

    def __init__(self, scheduler: Scheduler, habits: Habits | None = None, seed: int = 0) -> None:
        self.cache = cache = scheduler.cache
        self._in_flight = scheduler.in_flight
        self.habits = habits or Habits()
        self.block_size = cache.block_size
        self.windows = [cache.attention_window, *cache.windows]  # by group; 0: all
        self.num_groups = cache.num_groups
        self.state_blocks, self.num_lines = cache.state_blocks, cache.rows.num_lines
        self.kv: list[list[Any]] = [[None] * cache.block_size for _ in range(cache.pool.num_blocks + 1)]
        self.host: list[list[Any]] = [[None] * cache.block_size for _ in range(cache.swap_space.num_blocks + 1)]
        num_rows = cache.rows.num_rows
        self.tables: list[list[int]] = [[] for _ in range(num_rows * self.num_lines)]
        self.last: list[Any] = [None] * num_rows
        self.length = [0] * num_rows  # positions computed and accepted: the host may know only bounds
        self.done: list[Any] = [False] * num_rows
        self.setup: list[Any] = [None] * num_rows
        self.counts: Counter[str] = Counter()
        self.has_poison = False
        self.checksums: dict[int, int] = {}  # host block -> checksum of the content swapped out into it
        self.corrupt: dict[int, list[int]] = {}  # plan -> corrupt host blocks that it swapped in and did not report yet
        self.poisoned: dict[int, set[int]] = {}  # plan -> slices that read poison
        self._ends: dict[int, int] = {}  # seal id -> the end of the full block
        self._queue: deque[Received] = deque()
        self._results: dict[int, list[list[list[Any]]]] = {}
        self._firsts: dict[int, dict[int, int]] = {}  # plan -> slice -> position of its first sampled token
        self._held: dict[int, list[list[list[int]]]] = {}  # plan -> tables and states of its sequences when it was made
        self._values: dict[int, int] = {}  # seal id -> the value at the last position of the full block
        self._random = random.Random(seed)
        self._flips = random.Random(seed + 0.5)
        self._expected: dict[Sequence, list[int]] = {}  # expected values of its slots, by position
        self._fed: dict[Sequence, dict[int, int]] = {}  # position -> input token on the device
        self._end: dict[Sequence, int] = {}  # slots after the stop token are arbitrary
        self._written: dict[int, list[tuple[int, int]]] = {}  # plan -> (block, offset) that it wrote
        self._read_states: list[tuple[int, int]] = []  # (slice, block) of states that a plan reads

    def submit(self, sent: StepPlan) -> _Running:
        by_hand = InFlightStep(sent)
        plan = Received.of(next((step for step in reversed(self._in_flight) if step.plan is sent), by_hand))
        self._held[id(plan)] = [[ids[:] for ids, _ in seq.holdings] for seq in plan.sequences]
        self._queue.append(plan)
        if self.state_blocks:
            self._may_write_states(plan)
        if self.habits.eager:
            self._drain(None)
        return _Running(self, plan)

    def close(self) -> None:
        pass

    def finish(self, plan: Received) -> tuple[list[list[list[Any]]], dict[int, int]]:
        """The tokens of a plan by slice and column, and the position of each slice's first one."""
        self._drain(plan)
        self._held.pop(id(plan), None)
        self._written.pop(id(plan), None)
        return self._results.pop(id(plan)), self._firsts.pop(id(plan), {})

    def _drain(self, upto: Received | None) -> None:
        while self._queue and (upto is None or id(upto) not in self._results):
            plan = self._queue.popleft()
            self._results[id(plan)] = self._run(plan)

    def fail(self, plans: Iterable[Received]) -> None:
        """Fail these plans: every slot that they touch holds garbage, whether they had started or not."""
        reached = True
        for plan in plans:
            if plan in self._queue:
                self._queue.remove(plan)
                reached = reached and self._random.random() < 0.5
                if reached:
                    self._apply_tables(plan)
            for held in self._held.pop(id(plan), ()):
                for block in chain.from_iterable(held[self.num_groups :]):
                    self.kv[block] = [GARBAGE] * self.block_size
            for kept in (self._results, self._firsts, self.corrupt, self.poisoned):
                kept.pop(id(plan), None)
            for block, offset in self._written.pop(id(plan), ()):
                self.kv[block][offset] = GARBAGE
            for _, dst in plan.swap_outs:
                self.host[dst] = [GARBAGE] * self.block_size
            for _, dst in [*plan.swap_ins, *plan.copies]:
                self.kv[dst] = [GARBAGE] * self.block_size
            for row, seq in zip(plan.rows, plan.sequences, strict=True):
                self.last[row], self.done[row] = GARBAGE, True
                self._fed.pop(seq, None)
                del self._expected.setdefault(seq, [])[len(seq.token_ids) - 1 :]
                self._end.pop(seq, None)

    # -- one step ------------------------------------------------------------------------------------------------------

    def _run(self, plan: Received) -> list[list[list[Any]]]:
        count = self.counts
        count["steps"] += 1
        count["slices"] += len(plan.rows)
        self._apply_tables(plan)
        self._flip_bits(plan)
        for src, dst in plan.swap_outs:
            self.host[dst] = list(self.kv[src])
        for src, dst in plan.swap_ins:
            self.kv[dst] = list(self.host[src])
        sources = [list(self.kv[src]) for src, _ in plan.copies]  # a batched kernel may read all before it writes any
        need(not {c.src for c in plan.copies} & {c.dst for c in plan.copies}, Invariant, "copies depend on each other")
        for content, (_, dst) in zip(sources, plan.copies, strict=True):
            self.kv[dst] = content
        self._compare(plan)
        count["blocks out"] += len(plan.swap_outs)
        count["blocks in"] += len(plan.swap_ins)
        count["blocks copied"] += len(plan.copies)
        need(len(set(plan.rows)) == len(plan.rows), Invariant, "a row twice in a plan")
        order = list(range(len(plan.rows)))
        if self.habits.shuffles:
            self._random.shuffle(order)
        tokens: list[list[list[Any]]] = [[] for _ in plan.rows]
        self._read_states.clear()
        written: list[tuple[int, int]] = []
        writers: dict[int, int] = {}  # block -> slice
        spans = [(0, 0)] * len(plan.rows)  # positions from the slice's first one to the row's end
        for i in order:
            by_slice: dict[tuple[int, int], None] = {}  # the next pass writes rejected slots again
            row = plan.rows[i]
            is_known = i in plan.host_tokens or (self.done[row] and self.habits.stops)
            begin = plan.starts[i] if is_known else self.length[row]
            tokens[i] = self._slice(plan, i, begin, by_slice)
            spans[i] = begin, self.length[row]
            written += by_slice
            writers |= {block: i for block, _ in by_slice}
        need(len(set(written)) == len(written), ReadBack, "two slices wrote one slot")
        for i, block in self._read_states:
            need(writers.get(block, i) == i, ReadBack, "a slice writes a state that another reads", block)
        self._written[id(plan)] = written
        for i in order:
            self._read_again(plan, i, *spans[i])
        return tokens

    def _apply_tables(self, plan: StepPlan) -> None:
        for setup in plan.row_setups:
            self.setup[setup.row] = setup
        whole = {w.line: i for i, w in enumerate(plan.table_writes) if w.start == 0}  # the last one is the new owner's
        for i, (line, start, ids) in enumerate(plan.table_writes):
            row, group = divmod(line, self.num_lines)
            table = self.tables[line]
            need(start == 0 or start <= len(table), ReadBack, "a hole in a table")
            if group >= self.num_groups:
                whole_state = not start and len(set(ids)) == len(ids) == self.state_blocks
                need(whole_state, Invariant, "no whole state", line, start, ids)
            null = 0 if group < self.num_groups and self.windows[group] else 1
            need(all(null <= b < len(self.kv) for b in ids), Invariant, "a block that does not exist", ids)
            table[start : start + len(ids)] = ids
            if self.habits.forgets and whole.get(line) == i and any(s.row == row for s in plan.row_setups):
                del table[len(ids) :]

    def _get(self, row: int, position: int, group: int = 0) -> Any:
        table = self.tables[row * self.num_lines + group]
        return self.kv[table[position // self.block_size]][position % self.block_size]

    def _state(self, row: int) -> list[int]:
        """The blocks that the row's slices write."""
        return self.tables[row * self.num_lines + self.num_groups] if self.state_blocks else []

    def _read_line(self, row: int) -> list[int]:
        """Those that its next pass reads."""
        return self.tables[row * self.num_lines + self.num_groups + 1] if self.state_blocks else []

    def _read_state(self, i: int, row: int, h: Any) -> Any:
        """The value that a pass continues from: this one if the state that it reads is that after it."""
        reads = self._read_line(row)
        self._read_states += [(i, block) for block in reads]
        self.counts["states moved"] += reads != self._state(row)
        if self._holds(reads, h):
            return h
        return type(h)(hash((h, *(str(slot) for block in reads for slot in self.kv[block]))))

    def _holds(self, blocks: Iterable[int], h: Any) -> bool:
        """True if these blocks hold the state after a position with this value."""
        return all(self.kv[b] == [in_state(h, i)] * self.block_size for i, b in enumerate(blocks))

    def _slice(self, plan: Received, i: int, start: int, written: dict[tuple[int, int], None]) -> list[list[Any]]:
        """Run a slice from `start`, where its row is, and return its columns of tokens."""
        row, num_sampled, seq = plan.rows[i], plan.num_sampled[i], plan.sequences[i]
        known, draws, setup = plan.host_tokens.get(i), plan.num_samples.get(i, 1), self.setup[row]
        num_passes, num_drafts = plan.drafts.get(i, (num_sampled, 0))
        if known is not None:
            self.done[row] = False
        if self.done[row] and self.habits.stops:
            if isinstance(self.done[row], Poison):
                self.poisoned.setdefault(id(plan), set()).add(i)
            return [[]] if i in plan.drafts else [[0]] * num_sampled
        self.length[row] = start
        self.counts["windows"] += num_passes > 1
        self.counts["fed by the row"] += known is None
        is_structured = seq.request.use_structured_output
        need((i in plan.bitmask_slices) == bool(is_structured and num_sampled), Invariant, "masked", seq)
        self._check_bounds(plan, i, start)
        fed = self._fed.setdefault(seq, {})
        h = self._get(row, start - 1) if start else root(seq.request.salt)
        if start:
            h = self._read_state(i, row, h)
        poisoned = self._reads_poison(row, start)
        if poisoned:
            h = Poison(hash((h, 8)))
            self.poisoned.setdefault(id(plan), set()).add(i)
        elif start and not seq.finish_reason and start <= self._end.get(seq, start):
            before = self._expect(seq, start)[start - 1]
            if not self._holds(self._read_line(row), before):
                raise ReadBack(seq, "row", row, "state", self._read_line(row), "before position", start)
            self.counts["states read"] += self.state_blocks > 0

        def write(before: int, position: int, token: int) -> int:
            h = value(before, position, token)
            h = Poison(h) if poisoned else h
            self._write(plan, i, position, h, written)
            return h

        p, end = start, start + plan.counts[i] - num_sampled + (num_sampled > 0)
        inputs = list(known or ()) or [self.last[row]]
        for p in range(start, end):
            fed[p] = inputs[p - start]
            h = write(h, p, fed[p])
        self._write_state(plan, i, h, written)
        p = self.length[row] = end  # the first token is sampled from the position before
        if num_sampled:
            self._firsts.setdefault(id(plan), {})[i] = end
        columns: list[list[Any]] = []
        num_left, stopped = num_sampled, False
        while len(columns) < num_passes and num_left:
            if stopped and self.habits.stops:
                columns.append([] if i in plan.drafts else [0])
                continue
            if columns:
                fed[p] = self.last[row]
                h = write(self._read_state(i, row, h), p, fed[p])
                self._write_state(plan, i, h, written)
                p += 1
            if i in plan.num_samples:
                host = setup.returns_candidates
                columns.append(candidates(h, draws) if host else [sampled(h, m) for m in range(draws)])
                self.last[row] = None if host else columns[-1][0]
                break
            num = min(num_drafts, num_left - 1)
            if num and self.habits.lazy:
                num = self._random.randint(0, num)
            accepted, at, drafted, right = [sampled(h, setup.sample_index)], p, h, True
            for _ in range(num):  # a pass writes all drafts, accepted or not
                guess = self._guess(accepted[-1])
                right = right and guess == accepted[-1]
                drafted = write(drafted, at, guess)
                at += 1
                self.counts["drafted"] += 1
                if right:
                    self.counts["accepted"] += 1
                    fed[p] = guess
                    p, h = at, drafted
                    accepted.append(sampled(h, setup.sample_index))
            first = p - len(accepted)  # position from which the first of them was sampled
            for n, token in enumerate(accepted):
                if token in setup.stop_ids:
                    self.done[row] = stopped = Poison(1) if poisoned else True
                    if not poisoned:
                        self._end.setdefault(seq, first + n + 1)
                    if self.habits.stops:
                        self.counts["stops inside accepted drafts"] += n + 1 < len(accepted)
                        del accepted[n + 1 :]
                        p = first + n + 1
                    break
            columns.append(accepted)
            num_left -= len(accepted)
            self.last[row] = accepted[-1]
            self.length[row] = p
        return columns

    def _check_bounds(self, plan: Received, i: int, start: int) -> None:
        """Check that the row is within the host's bounds, and the slice within what the scheduler may plan."""
        seq, num_sampled = plan.sequences[i], plan.num_sampled[i]
        if not seq.finish_reason and i not in plan.host_tokens and i not in plan.origin.void_slices:
            self.counts["starts unknown to the host"] += start < plan.starts[i]
            need(start <= plan.starts[i], Invariant, "a row after the host's bound", seq, start, plan.starts[i])
            need(start >= len(seq.token_ids) - 1, Invariant, "a row before the host's tokens", seq, start)
        if i in plan.drafts:
            num_passes, num_drafts = plan.drafts[i]
            most = num_passes * (1 + num_drafts)
            need(0 < num_passes < num_sampled <= most and num_drafts > 0, Invariant, "drafts", plan.drafts[i])
            need(i not in plan.num_samples, Invariant, "drafts where the host chooses", seq)

    def _guess(self, right: int) -> int:
        how = self.habits.drafts
        if how == "lot":
            how = "right" if self._random.random() < 0.7 else "wrong"
        if how == "random":
            return self._random.randrange(VOCAB)
        return right if how == "right" else (right + 1) % VOCAB

    def _write(self, plan: Received, i: int, p: int, h: Any, written: dict[tuple[int, int], None]) -> None:
        """Write a slot, which must be of the slice, in a block that its sequence had when the step was planned."""
        seq, size, first_line = plan.sequences[i], self.block_size, plan.rows[i] * self.num_lines
        if not seq.finish_reason:
            need(p < plan.starts[i] + plan.counts[i], Invariant, "written after the slice's end", seq, p)
        for group, held in enumerate(self._held[id(plan)][i][: self.num_groups]):
            block = self.tables[first_line + group][p // size]
            if not seq.finish_reason:
                ours = p // size < len(held) and held[p // size] == block
                need(ours, Invariant, "written into another's block", seq, p, group)
            self.kv[block][p % size] = in_group(h, group)
            written[block, p % size] = None

    def _write_state(self, plan: Received, i: int, h: Any, written: dict[tuple[int, int], None]) -> None:
        """Write the state after a pass whose last position has this value. The next pass reads it."""
        seq, state = plan.sequences[i], self._state(plan.rows[i])
        self._read_line(plan.rows[i])[:] = state
        for index, block in enumerate(state):
            if not seq.finish_reason:
                need(state == self._held[id(plan)][i][-1], Invariant, "written into another's state", seq)
            self.kv[block] = [in_state(h, index)] * self.block_size
            written |= dict.fromkeys((block, offset) for offset in range(self.block_size))

    def _may_write_states(self, plan: Received) -> None:
        """Check that each state that a plan writes is its sequence's alone, and sealed by this plan if at all."""
        pool = self.cache.pool
        for seq in plan.sequences:
            for block in seq.state:
                need(pool.refs[block] == 1, Invariant, "a shared state is written", seq, block)
                sealed = pool.seal_id[block]
                need(not sealed or sealed > plan.origin.seal_mark, Invariant, "a checkpoint is written", seq, block)

    def _compare(self, plan: StepPlan) -> None:
        """Store the checksums of swapped-out blocks and compare those of swapped-in ones."""
        for _, dst in plan.swap_outs:
            self.checksums[dst] = hash(tuple(self.host[dst]))
        for src, _ in plan.swap_ins:
            if hash(tuple(self.host[src])) != self.checksums[src]:
                self.corrupt.setdefault(id(plan), []).append(src)
                self.counts["blocks corrupt"] += 1

    def _flip_bits(self, plan: StepPlan) -> None:
        """Corrupt a random host block now and then, more often one that this step swaps in."""
        if self.checksums and self._flips.random() < self.habits.corrupts:
            block = self._flips.choice([*self.checksums, *[src for src, _ in plan.swap_ins] * 8])
            self.corrupt_block(block, self._flips.randrange(self.block_size))

    def corrupt_block(self, block: int, offset: int) -> None:
        """Replace a slot on the host."""
        self.has_poison = True
        self.host[block][offset] = Poison(self._flips.getrandbits(60))

    def _reads_poison(self, row: int, start: int) -> bool:
        """True if a query at `start` attends to a poisoned slot."""
        if not self.has_poison:
            return False
        return any(
            isinstance(self._get(row, p, group), Poison)
            for group, window in enumerate(self.windows)
            for p in range(max(0, start - window + 1) if window else 0, start)
        ) or any(isinstance(slot, Poison) for block in self._read_line(row) if start for slot in self.kv[block])

    def _expect(self, seq: Sequence, end: int) -> list[int]:
        """Return the values of a sequence's positions, those before `end` at least."""
        expected, tokens, fed = self._expected.setdefault(seq, []), seq.token_ids, self._fed.get(seq, {})
        h = expected[-1] if expected else root(seq.request.salt)
        for p in range(len(expected), end):
            h = value(h, p, tokens[p] if p < len(tokens) else fed[p])
            expected.append(h)
        return expected

    def _read_again(self, plan: Received, i: int, begin: int, end: int) -> None:
        """Compare every position that a query of this slice attends to, through the device's block table."""
        row, seq = plan.rows[i], plan.sequences[i]
        if seq.finish_reason or i in self.poisoned.get(id(plan), ()):
            return
        end = min(end, self._end.get(seq, 1 << 60))
        expected, size, kv = self._expect(seq, end), self.block_size, self.kv
        for group, window in enumerate(self.windows):
            table, first = self.tables[row * self.num_lines + group], max(0, begin - window + 1) if window else 0
            for p in range(first, end):
                if kv[table[p // size]][p % size] != in_group(expected[p], group):
                    raise ReadBack(seq, "row", row, "group", group, "position", p, "of", end, "table", table)
            self.counts["slots of windows read" if group else "slots read"] += max(0, end - first)

    def check_checkpoints(self) -> None:
        """Check that every checkpoint holds the state after the tokens that it is sealed under.

        Plans that did not run yet may fill it: then nothing is checked.
        """
        if not self.state_blocks or self._queue:
            return
        pool, values = self.cache.pool, self._values
        sealed = sorted((pool.seal_id[b], b) for b in range(1, pool.num_blocks + 1) if pool.seal_id[b])
        block_of = dict(sealed)
        for seal, block in sealed:
            key = pool.key_of(block)
            assert key is not None
            if len(key[1]) == 1 or seal in values:
                continue
            parent, content = key
            if isinstance(parent, bytes):
                values[seal], self._ends[seal] = root(parent), 0
            elif parent in values:
                values[seal], self._ends[seal] = values[parent], self._ends[parent]
            else:
                continue  # sealed and evicted between two checks
            for token in memoryview(content).cast("i"):
                values[seal] = value(values[seal], self._ends[seal], token)
                self._ends[seal] += 1
        for states in chains(self.cache):
            key = pool.key_of(states[-1])
            assert key is not None
            if key[0] in values and not any(isinstance(slot, Poison) for b in states for slot in self.kv[b]):
                fits = self._holds(states, values[key[0]])
                need(fits, ReadBack, "a checkpoint", states, "at", self._ends[key[0]], block_of[key[0]])
                self.counts["checkpoints read"] += 1
            else:
                need(self._in_flight or key[0] not in values, ReadBack, "a corrupt checkpoint", states)


# -- the structure -----------------------------------------------------------------------------------------------------


def check(scheduler: Scheduler) -> None:
    """The rules of docs/memory.md that hold after every call."""
    cache = scheduler.cache
    pool, host, size = cache.pool, cache.swap_space, cache.block_size
    owners: Counter[int] = Counter()
    host_owners: Counter[int] = Counter()
    for request in [*scheduler.running, *scheduler.swapped, *scheduler.waiting]:
        for seq in request.sequences:
            need(seq.request is request and not seq.finish_reason, Invariant, "a live sequence is its request's")
            need(seq.num_pending >= 0 <= seq.num_unverified, Invariant, "pending below 0", seq)
            if request.status is Status.RUNNING:
                for (ids, num_dropped), window in zip(
                    seq.tables, (cache.attention_window, *cache.windows), strict=True
                ):
                    owners.update(ids[num_dropped:])
                    need(all(b > 0 for b in ids[num_dropped:]) and not any(ids[:num_dropped]), Invariant, "nulls", seq)
                    need(len(ids) == len(seq.block_ids), Invariant, "tables of unequal length", seq)
                    _check_dropped(seq, num_dropped * size, window)
                owners.update(seq.state)
                _check_state(seq, cache)
                need(seq.room == len(seq.block_ids) * size, Invariant, "room")
                need(len(seq.block_ids) == cache.blocks_for(seq.num_computed), Invariant, "blocks not needed", seq)
                length = len(seq.token_ids) + seq.num_pending
                need(seq.num_computed <= length, Invariant, "beyond its end", seq)
                need(seq.num_computed < seq.max_length, Invariant, "planned beyond the limit", seq)
                need(not seq.row_has_last or seq.num_computed == length - 1, Invariant, "the bounds differ", seq)
                in_flight = [(s, i) for s in scheduler.in_flight for i, x in enumerate(s.sequences) if x is seq]
                num = sum(s.plan.num_unverified(i) for s, i in in_flight if i not in s.void_slices)
                need(seq.num_unverified == num, Invariant, "unverified", seq, seq.num_unverified, num)
                need(len(seq.seal_ids) <= len(seq.block_ids), Invariant, "sealed beyond its blocks", seq)
                if cache.enable_prefix_caching:
                    need(seq.seal_at == (len(seq.seal_ids) + 1) * size, Invariant, "seal_at", seq)
                for i in range(len(seq.seal_ids), len(seq.block_ids)):
                    full = (i + 1) * size <= min(len(seq.token_ids), seq.num_computed)
                    # A sealed block past the chain: a sibling sealed it, or it stayed on the device during a swap.
                    sealed = any(pool.seal_id[ids[i]] for ids, _ in seq.tables)
                    need(full or not sealed, Invariant, "unknown tokens sealed", seq)
            else:
                need(seq.row < 0, Invariant, "a row without running", seq)
            if request.status is Status.SWAPPED:
                _check_state(seq, cache)
                for ids, _ in seq.holdings:
                    host_owners.update(b for b in ids if b > 0)
                    need(all(-b in request.shared_on_device for b in ids if b < 0), Invariant, "shared on device")
            elif request.status is Status.WAITING:
                empty = not any(ids for ids, _ in seq.holdings) and not seq.num_computed
                need(empty, Invariant, "waiting with blocks", seq)
    for name, seq in cache.pins.items():
        need(name == seq.request.request_id and seq.request.status is Status.FINISHED, Invariant, "a pin", name)
        for ids, num_dropped in seq.tables:
            need(len(ids) == cache.blocks_for(seq.num_computed), Invariant, "a pin's blocks", seq)
            owners.update(ids[num_dropped:])
        owners.update(seq.state)
        _check_state(seq, cache)
    coming = [len(r.prompt_token_ids) for r in scheduler.requests.values() if r.pin]
    pinned = [len(s.block_ids) * cache.num_groups + cache.state_blocks for s in cache.pins.values()]
    pinned += [cache.blocks_for(n) * cache.num_groups + cache.state_blocks for n in coming]
    need(cache.num_pinned == sum(pinned) <= pool.num_blocks // 2, Invariant, "pinned", cache.num_pinned, pinned)
    check_pool(pool, owners)
    if cache.state_blocks:
        check_chains(scheduler)
    for b in range(1, host.num_blocks + 1):
        need(host.refs[b] == host_owners[b], Invariant, "host references", b, host.refs[b], host_owners[b])
    need(host.num_used == len(host_owners), Invariant, "host count")
    for request in scheduler.running:
        for seq in request.sequences:
            _check_sealed(seq, pool, size)
            _check_bounded(seq, cache, scheduler)
    rows = [s.row for r in scheduler.running for s in r.sequences if s.row >= 0]
    need(len(set(rows)) == len(rows), Invariant, "a row with two owners")
    need(len(rows) + cache.rows.num_free == scheduler.max_num_seqs, Invariant, "rows lost")
    taken = sum(r.width for r in scheduler.running)
    need(scheduler.num_rows_taken == taken <= scheduler.max_num_seqs, Invariant, "rows taken")
    for line, status in (
        (scheduler.running, "running"),
        (scheduler.swapped, "swapped"),
        (scheduler.waiting, "waiting"),
    ):
        need(all(r.status.value == status for r in line), Invariant, "in the wrong line")
        need([r.order for r in line] == sorted(r.order for r in line), Invariant, "out of order", status)
    here = Counter(r.tenant for r in scheduler.requests.values())
    present = scheduler.tenants.present
    need(here == {number: t.num_requests for number, t in present.items()}, Invariant, "tenants", here)
    for number, tenant in present.items():
        line = [r for r in scheduler.waiting if r.tenant == number]
        need(tenant.waiting == line, Invariant, "a tenant's line", number)
        rows_of = sum(r.width for r in scheduler.running if r.tenant == number)
        need(tenant.num_rows == rows_of, Invariant, "a tenant's rows", number)
    stats = cache.stats()
    device = [s for r in scheduler.running for s in r.sequences if s.block_ids] + list(cache.pins.values())
    most = len(device) * (size - 1) * cache.num_groups
    need(stats.num_unfilled_slots <= most, Invariant, "more waste than a block a sequence")
    need(stats.num_saved_by_sharing == sum(max(0, n - 1) for n in owners.values()), Invariant, "saved by sharing")


def _check_state(seq: Sequence, cache: KVCacheManager) -> None:
    """Check the form of a sequence's state, on the device or on the host."""
    num = len(seq.state)
    need(num == len(set(seq.state)) == (cache.state_blocks if seq.block_ids else 0), Invariant, "a state's blocks", seq)
    need(0 not in seq.state, Invariant, "a null in a state", seq)
    ends = seq.marks
    in_order = ends == sorted(set(ends)) and not any(p % cache.block_size or p <= 0 for p in ends)
    need(in_order, Invariant, "marks", seq, ends)


def chains(cache: KVCacheManager) -> list[list[int]]:
    """The checkpoints in the index, each as a state's blocks in the order of its line: the head last."""
    pool, content = cache.pool, bytes((len(cache.windows),))
    block_of = {pool.seal_id[b]: b for b in range(1, pool.num_blocks + 1) if pool.seal_id[b]}
    keys = {b: key for b in block_of.values() if (key := pool.key_of(b)) is not None and key[1] == content}
    found, num = [], 0
    for block, (parent, _) in keys.items():
        if not isinstance(parent, bytes) and block_of.get(parent) not in keys:
            chain = [block]
            while below := pool.find((pool.seal_id[chain[-1]], content)):
                chain.append(below)
            need(len(chain) == cache.state_blocks, Invariant, "a part of a checkpoint", chain)
            found.append(chain[::-1])
            num += len(chain)
    need(num == len(keys), Invariant, "blocks of checkpoints without a head", keys)
    return found


def check_chains(scheduler: Scheduler) -> None:
    """Check the form of checkpoints: whole, referred to as a whole, and in the right order of eviction."""
    cache = scheduler.cache
    pool, line = cache.pool, list(cache.pool.cached())
    states = {}
    for ids in chains(cache):
        key = pool.key_of(ids[-1])
        assert key is not None
        states[ids[-1]] = ids
        refs = {pool.refs[b] for b in ids}
        need(len(refs) == 1, Invariant, "parts of a checkpoint are shared", ids, refs)
        if not refs.pop():
            need(line.index(ids[-1]) == min(map(line.index, ids)), Invariant, "a head outlives its state", ids)
    owners = [*cache.pins.values(), *(s for r in scheduler.running for s in r.sequences)]
    in_tables = {b for seq in owners for ids, _ in seq.tables for b in ids}
    for seq in owners:
        need(in_tables.isdisjoint(seq.state), Invariant, "a state's block in a table", seq)
        need(len({pool.refs[b] for b in seq.state}) <= 1, Invariant, "parts of a state are shared", seq)
        sealed = [b for b in seq.state if pool.seal_id[b]]
        need(not sealed or states.get(seq.state[-1]) == seq.state, Invariant, "a state sealed otherwise", seq, sealed)
    need(in_tables.isdisjoint(states), Invariant, "a checkpoint in a table")


def _check_dropped(seq: Sequence, dropped: int, window: int) -> None:
    """Check that only positions out of a group's attention window are dropped."""
    end = seq.num_computed - seq.num_unverified - window + 1
    need(not dropped or dropped <= end, Invariant, "dropped too much", seq)
    need(not dropped or window, Invariant, "dropped without a window", seq)


def _check_bounded(seq: Sequence, cache: KVCacheManager, scheduler: Scheduler) -> None:
    """Check that a window group of a lone sequence holds the window and what two steps compute at most."""
    if seq.request.width > 1 or seq.request.select_beams or seq.request.pin or scheduler.num_speculative_tokens:
        return  # what rejected drafts kept goes with the next plan
    for table, window in zip(seq.windows, cache.windows, strict=True):
        most = cache.blocks_for(window + cache.max_chunk - 2) + 1
        need(len(table.block_ids) - table.num_dropped <= most, Invariant, "a window holds too much", seq)


class Themselves(Roster):
    """A roster whose indices are the objects themselves."""

    def indices(self, items: Iterable[Any]) -> list[Any]:
        return list(items)


def holders(cache: KVCacheManager) -> list[Sequence]:
    """The sequences with blocks on the device."""
    return cache.snapshot(Themselves((), ()))["holders"]


def check_pool(pool: BlockPool, owners: Counter[int]) -> None:
    used = 0
    for b in range(1, pool.num_blocks + 1):
        need(pool.refs[b] == owners[b], Invariant, "references", b, pool.refs[b], owners[b])
        used += pool.refs[b] > 0
    need(used == pool.num_used, Invariant, "used + cached + free is not the pool")
    need(pool.num_refs == sum(owners.values()), Invariant, "references counted")
    cached = []
    for b in pool.cached():
        cached.append(b)
        need(len(cached) <= pool.num_blocks, Invariant, "the LRU links go round")
    need(len(cached) == pool.num_cached, Invariant, "cached count")
    need(all(not pool.refs[b] and pool.seal_id[b] for b in cached), Invariant, "cached but used or unsealed")
    free = [b for b in range(1, pool.num_blocks + 1) if not pool.refs[b] and not pool.seal_id[b]]
    need(len(free) == pool.num_free, Invariant, "free count")
    state = pool.snapshot()
    again = state["freed"] + list(range(state["_untouched"], pool.num_blocks + 1))
    need(sorted(again) == free, Invariant, "the free stack")
    sealed = [b for b in range(1, pool.num_blocks + 1) if pool.seal_id[b]]
    need(pool.num_indexed == len(sealed), Invariant, "index")
    need(all(pool.find(pool.key_of(b)) == b for b in sealed if pool.key_of(b)), Invariant, "index entries")
    alive = {pool.seal_id[b] for b in sealed}
    hung = [pool.key_of(b)[0] for b in sealed if len(pool.key_of(b)[1]) == 1]
    need(alive.issuperset(hung), Invariant, "a window's block outlives the full one")
    seals = [pool.seal_id[b] for b in sealed]
    need(len(set(seals)) == len(seals) and max(seals, default=0) <= pool.last_seal_id, Invariant, "seal ids")


def _check_sealed(seq: Sequence, pool: BlockPool, size: int) -> None:
    """Check that sealed blocks are sealed under their own tokens."""
    full = {pool.seal_id[b]: b for b in range(1, pool.num_blocks + 1) if pool.seal_id[b]} if seq.windows else {}
    for i, block in enumerate(seq.block_ids):
        tokens = seq.token_ids[i * size : (i + 1) * size].tobytes()
        key = pool.key_of(block)
        if key is not None:
            need(key[1] == tokens, Invariant, "sealed under other tokens")
        for group, table in enumerate(seq.windows):
            key = pool.key_of(table.block_ids[i])
            if key is not None:
                need(key[1] == bytes((group,)), Invariant, "sealed in another group")
                need(pool.key_of(full[key[0]])[1] == tokens, Invariant, "sealed under another block")


def watch_eviction(cache: KVCacheManager) -> None:
    """Check the order of eviction: the oldest released block first, and a table's tail before its head."""
    pool, line = cache.pool, []

    class Pool(BlockPool):
        __slots__ = ()

        def allocate(self) -> int:
            full = not self.num_free
            block = super().allocate()
            if full:
                need(line and line.pop(0) == block, Invariant, "not the oldest was evicted")
            return block

        def share(self, block: int) -> None:
            if not self.refs[block]:
                line.remove(block)
            super().share(block)

        def release(self, block: int, *, as_oldest: bool = False) -> None:
            super().release(block, as_oldest=as_oldest)
            if not self.refs[block] and self.seal_id[block]:
                line.insert(0 if as_oldest else len(line), block)

        def renew(self, block: int) -> None:
            line.remove(block)
            super().renew(block)
            line.append(block)

        def pass_state(self, head: int) -> None:
            super().pass_state(head)
            if (now := [*self.cached()]) != line:
                moved = now[: self.state_blocks]
                need(moved[0] == head, Invariant, "a checkpoint that is passed is not the oldest", head)
                need(now == [*moved, *(b for b in line if b not in moved)], Invariant, "others moved", head)
                line[:] = now

        def _evict_others(self, seal_id: int, why: str) -> None:
            key = bytes((self.num_windows,))
            others = {self.find((parent, key)) for parent in range(seal_id, seal_id + self.state_blocks - 1)}
            super()._evict_others(seal_id, why)
            line[:] = [block for block in line if block not in others]

        def unseal(self, block: int, why: str = "void") -> None:
            if not self.refs[block]:
                line.remove(block)
            super().unseal(block, why)

    class Cache(KVCacheManager):
        def free(self, sequence: Sequence) -> None:
            swapped = sequence.request.status is Status.SWAPPED
            tables = [] if swapped else [list(ids) for ids, _ in sequence.holdings]
            super().free(sequence)
            for blocks in tables:
                places = [line.index(b) for b in blocks if b in line]
                need(places == sorted(places, reverse=True), Invariant, "a head goes before its tail")

    pool.__class__ = Pool
    cache.__class__ = Cache
