"""The engine loop on the oracle executor: random requests through `add_request`, `step` and `abort`, no tensors."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from operator import add
from typing import Any, cast
from zlib import crc32

import numpy as np
import pytest

from octavo.core import events as ev
from octavo.core.in_flight import InFlightStep
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import StepPlan, StepResult, TokenLogprobs
from octavo.core.policy import Policy, PreemptionMode
from octavo.core.request import Request, Sequence
from octavo.core.scheduler import Scheduler
from octavo.core.scheduling.preemption import preempt
from octavo.engine import oom_backoff
from octavo.engine.engine import Engine
from octavo.engine.engine_request import MAX_PRIORITY, EngineRequest, pin_id
from octavo.engine.executor import GrammarBitmask
from octavo.engine.oom_backoff import OOMBackoff, first_pass_size
from octavo.engine.outputs import RequestOutput, request_failed_error
from octavo.engine.timeline import describe_kv
from octavo.errors import ContextLengthError, EngineError, ParameterError, PromptError, StepError, StepMemoryError
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import SamplingParams
from tests.engine.client import StepClient
from tests.proof import oracle as o

MAX_MODEL_LEN = 64
EOS = 4


class Letters:
    """A detokenizer: token 0 is "a", token 1 is "b", and so on. Supports one stop string."""

    def __init__(self, prompt_token_ids: Any, params: SamplingParams) -> None:
        self.stop = params.stop_strings
        self.text, self.stop_reason, self.num_tokens_kept = "", None, 0  # type: ignore[assignment]

    text: str
    stop_reason: str | None

    def push(self, ids: Any) -> str:
        for token in ids:
            if self.stop_reason is None:
                self.num_tokens_kept += 1
                self.text += chr(ord("a") + token)
                for stop in self.stop:
                    if self.text.endswith(stop):
                        self.stop_reason, self.text = stop, self.text.removesuffix(stop)
        return ""

    def finish(self) -> str:
        return ""


class CountingGrammar:
    """A grammar and matcher that allows everything; its bitmasks encode the tokens that the matcher accepted."""

    is_accepting, error = True, ""

    def __init__(self, tokens: tuple[int, ...] = ()) -> None:
        self.tokens = tokens

    def start(self) -> CountingGrammar:
        return CountingGrammar()

    def fork(self) -> CountingGrammar:
        return CountingGrammar(self.tokens)

    def accept_tokens(self, token_ids: Any) -> None:
        self.tokens += tuple(token_ids)

    def bitmasks(self, matchers: Any) -> np.ndarray:
        return np.array([[0, *self._words(m.tokens)] for m in matchers], dtype=np.int32)

    @staticmethod
    def words(seq: Sequence) -> list[int]:
        """The expected bitmask of a sequence; an ignored end-of-sequence token never reaches the grammar."""
        request = seq.request
        ignored = {EOS} - request.stop_ids
        return CountingGrammar._words(
            tuple(t for t in seq.token_ids[len(request.prompt_token_ids) :] if t not in ignored)
        )

    @staticmethod
    def _words(tokens: tuple[int, ...]) -> list[int]:
        return [len(tokens), crc32(bytes(tokens)) >> 1]


class FlakyOracle:
    """The oracle as an executor whose steps fail at random; a failed step fails all steps after it.

    room   returns the number of positions for which a plan's first pass has memory
    """

    def __init__(
        self, oracle: o.Oracle, rng: random.Random, failing: float, room: Callable[[o.Received], int] | None = None
    ) -> None:
        self.oracle, self.random, self.failing = oracle, rng, failing
        self.room = room or (lambda plan: 1 << 30)
        self.too_large: list[int] = []
        self.queued: deque[_FlakyHandle] = deque()
        self.closed = 0

    def submit(self, plan: StepPlan) -> _FlakyHandle:
        assert all(r.num_bitmasks == r.plan.num_bitmask_columns for r in self.queued), (
            "a plan was submitted while an earlier one waits for a bitmask"
        )
        handle = _FlakyHandle(self, plan, self.oracle.submit(plan))
        self.queued.append(handle)
        return handle

    def close(self) -> None:
        self.closed += 1


class _FlakyHandle:
    def __init__(self, executor: FlakyOracle, plan: StepPlan, handle: Any) -> None:
        self.executor, self.plan, self.handle = executor, plan, handle
        self.num_bitmasks, self.num_columns, self.fails = 0, 0, False

    @property
    def done(self) -> bool:
        return self.fails or (self.num_bitmasks == self.plan.num_bitmask_columns and bool(self.handle.done))

    def poll(self, timeout_s: float = 0.0) -> StepResult | None:
        assert self.num_columns < self.num_bitmasks or self.num_columns >= self.plan.num_bitmask_columns, (
            "a column arrived without its bitmask"
        )
        self.fails = self.executor.random.random() < self.executor.failing / 4
        if self.fails or (result := self.handle.poll(timeout_s)) is None:
            return None
        self.num_columns += 1
        return cast("StepResult", result)

    def put_bitmask(self, masks: GrammarBitmask | None) -> None:
        """Check: one mask per live slice with a token in the next column, computed from all its earlier tokens."""
        plan, sequences, column = self.plan, self.handle.plan.sequences, self.num_bitmasks
        assert self.executor.queued[0] is self and column < plan.num_bitmask_columns
        live = [i for i in plan.bitmask_slices if plan.num_sampled[i] > column and not sequences[i].finish_reason]
        assert (list(masks.slices) if masks is not None else []) == live
        for line, i in enumerate(live):
            seq = sequences[i]
            assert len(seq.token_ids) == plan.starts[i] + plan.counts[i] - plan.num_sampled[i] + 1 + column
            assert masks is not None and masks.bitmask[line].tolist()[1:] == CountingGrammar.words(seq)
        self.num_bitmasks += 1

    def result(self) -> StepResult:
        executor = self.executor
        assert executor.queued[0] is self, "results are read in order"
        assert self.fails or self.num_bitmasks == self.plan.num_bitmask_columns
        if self.fails or executor.random.random() < executor.failing:
            executor.oracle.fail([r.handle.plan for r in executor.queued])
            executor.queued.clear()
            raise StepError("planted")
        if (size := first_pass_size(self.plan)) > executor.room(self.handle.plan):
            executor.too_large.append(size)
            executor.oracle.fail([r.handle.plan for r in executor.queued])
            executor.queued.clear()
            raise StepMemoryError(f"no memory for {size} positions")
        executor.queued.popleft()
        result: StepResult = self.handle.result()
        return result


class World:
    """One engine on one oracle, with random requests."""

    def __init__(self, seed: int, *, overlap: bool, failing: float = 0.0) -> None:
        self.random = rng = random.Random(seed)
        size = rng.choice([1, 2, 4, 8])
        num_blocks = max(5, rng.randint(36, 70) // size)
        self.cache = KVCacheManager(num_blocks, size, rng.choice([0, num_blocks]), num_rows=rng.choice([4, 8]))
        self.scheduler = Scheduler(
            self.cache,
            max_num_batched_tokens=rng.choice([8, 13, 64]),
            decode_window=rng.choice([1, 3, 8]),
            policy=Policy(rng.random() < 0.5, rng.choice([None, *PreemptionMode])),
        )
        habits = o.Habits(*(rng.random() < 0.5 for _ in range(5)))
        self.executor = FlakyOracle(o.Oracle(self.scheduler, habits, seed), rng, failing)
        self.limits: list[ev.Recomputed] = []
        self.clock = 0.0
        self.engine = Engine(
            self.scheduler,
            self.executor,
            vocab_size=o.VOCAB,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(EOS,),
            overlap=overlap,
            clock=self._tick,
        )
        self.client = StepClient(self.engine, self._tick)
        self.wanted: dict[str, tuple[Request, list[tuple[int, list[int]]]]] = {}
        self.aborted: dict[str, RequestOutput] = {}
        self.streams: dict[str, list[RequestOutput]] = {}
        self.finished: dict[str, RequestOutput] = {}
        self.seen: Counter[str] = Counter()
        self.scheduler.events.subscribe(self._on_event)

    def _tick(self) -> float:
        self.clock += 1.0
        return self.clock

    def _on_event(self, event: ev.Event) -> None:
        self.seen[type(event).__name__ + (f" {event.how}" if isinstance(event, ev.Preempted) else "")] += 1
        if isinstance(event, ev.Recomputed) and event.why == "out of memory":
            self.limits.append(event)

    def run(self, num_requests: int) -> None:
        pending, turns = list(range(num_requests)), 0
        while pending or self.engine.has_work:
            turns += 1
            assert turns < 5000, "livelock"
            while pending and (self.random.random() < 0.8 or not self.engine.has_work):
                self._add(f"r{pending.pop()}")
            if self.random.random() < 0.03 and self.wanted:
                self._abort(self.random.choice(list(self.wanted)))
            for output in self.client.step():
                self._collect(output)
            o.check(self.scheduler)
        assert self.cache.stats().num_used == self.cache.stats().num_host_used == 0
        assert not self.scheduler.has_work and not self.engine.num_requests
        assert self.engine.drain() == [] and not self.client.requests
        assert not self.engine._num_streams  # no request streams any more
        for name in self.wanted:
            self._compare(name)

    def _add(self, name: str) -> None:
        rng = self.random
        prompt = [rng.randrange(o.VOCAB) for _ in range(rng.randint(1, 12))]
        if self.wanted and rng.random() < 0.4:
            prompt = self.wanted[rng.choice(list(self.wanted))][0].prompt_token_ids.tolist() + prompt[:3]
        stop = rng.choice([None, None, "abc", "dd", "ca"])
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 2, 3]),
            max_tokens=rng.randint(1, rng.choice([6, 24])),
            ignore_eos=rng.random() < 0.6,
            stop_token_ids=rng.choice([None, None, [0]]),
            stop=stop,
            seed=rng.getrandbits(60) - (1 << 59),
        )
        prompt = prompt[:20]
        needs = self.cache.blocks_at_max_length(len(prompt), params.max_tokens or 0, params.n)
        if needs > self.cache.pool.num_blocks:
            return
        self.client.add_request(EngineRequest(
            name, prompt, params, priority=rng.choice([0, 0, 1]), make_detokenizer=Letters,
            stream=rng.random() < 0.5, grammar=CountingGrammar() if rng.random() < 0.3 else None,
        ))  # fmt: skip
        request = self.scheduler.requests[name]
        self.wanted[name] = request, o.reference(request)

    def _abort(self, name: str) -> None:
        output = self.client.abort(name)
        assert (output is None) == (name in self.finished or name in self.aborted)
        if output is not None:
            assert output.finished
            self.aborted[name] = output

    def _collect(self, output: RequestOutput) -> None:
        name = output.request_id
        assert name not in self.aborted and name not in self.finished
        if output.finished:
            self.finished[name] = output
        else:
            self.streams.setdefault(name, []).append(output)

    def _compare(self, name: str) -> None:
        request, reference = self.wanted[name]
        output = self.aborted.get(name) or self.finished[name]
        got = {c.index: c for c in output.outputs}
        num_prompt, params = len(request.prompt_token_ids), request.sampling_params
        failed = any(c.finish_reason == "error" for c in output.outputs)
        for index, tokens in reference:
            tokens = tokens[num_prompt:]
            letters = "".join(chr(ord("a") + t) for t in tokens)
            text = letters[:-1] if tokens[-1] in request.stop_ids else letters
            reason: Any = "stop" if tokens[-1] in request.stop_ids else "length"
            for stop in params.stop_strings:
                if (at := text.find(stop)) >= 0:
                    tokens, text, reason = tokens[: at + len(stop)], text[:at], "stop"
            for part in [*self.streams.get(name, []), output]:
                for c in part.outputs:
                    if c.index == index:
                        assert c.token_ids == tokens[: len(c.token_ids)], name
                        assert letters.startswith(c.text)
            if name in self.finished and not failed:
                c = got[index]
                assert (c.token_ids, c.text, c.finish_reason) == (tokens, text, reason), name
        assert self.aborted.get(name) or [c.index for c in output.outputs] == list(range(params.n)) or failed
        metrics = output.metrics
        times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time]
        known = [t for t in times if t is not None]
        assert known == sorted(known)
        assert name in self.aborted or failed or None not in times


@pytest.mark.parametrize("overlap", [False, True])
def test_outputs_equal_the_reference(overlap: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(150):
        world = World(seed, overlap=overlap)
        world.run(num_requests=world.random.randint(2, 14))
        assert set(world.wanted) == set(world.aborted) | set(world.finished)
        assert all(c.finish_reason != "error" for x in world.finished.values() for c in x.outputs)
        seen += world.seen
        seen["aborted"] += len(world.aborted)
        seen["streamed"] += sum(map(len, world.streams.values()))
        stats = world.engine.stats
        assert stats.num_finished == world.seen["Finished"]
        assert stats.num_preemptions == world.seen["Preempted swap"] + world.seen["Preempted recompute"]
        assert stats.num_swap_preemptions == world.seen["Preempted swap"]
    for event in ("Preempted swap", "Preempted recompute", "SwappedIn", "aborted", "streamed", "Finished"):
        assert seen[event] > 20, (event, seen)


@pytest.mark.parametrize("overlap", [False, True])
def test_failed_steps_lose_no_tokens(overlap: bool) -> None:
    num_errors = num_failed = num_finished = 0
    for seed in range(120):
        world = World(seed + 1000, overlap=overlap, failing=0.08)
        world.run(num_requests=world.random.randint(2, 10))
        num_failed += world.engine.stats.num_failed_steps
        num_finished += len(world.finished)
        num_errors += sum(
            any(c.finish_reason == "error" and c.stop_reason == "planted" for c in x.outputs)
            for x in world.finished.values()
        )
    assert num_failed > 50
    assert 0 < num_errors < num_finished // 4  # only requests whose steps failed twice without a new token


@pytest.mark.parametrize("overlap", [False, True])
def test_out_of_memory_steps_lose_no_tokens_and_no_requests(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The free memory varies; the samples of one request always fit."""
    monkeypatch.setattr(oom_backoff, "INITIAL_PATIENCE", 4)
    num_short = num_grown = 0
    for seed in range(120):
        world = World(seed + 2000, overlap=overlap, failing=0.01 if seed % 4 == 0 else 0.0)
        rooms = random.Random(seed)
        room = [1 << 30]

        def has_room(plan: StepPlan, rooms: random.Random = rooms, room: list[int] = room) -> int:
            if rooms.random() < 0.1:
                room[0] = rooms.choice([3, 3, 4, 6, 9, 1 << 30])
            return room[0]

        world.executor.room = has_room
        world.run(num_requests=world.random.randint(2, 12))
        errors = [c.stop_reason for x in world.finished.values() for c in x.outputs if c.finish_reason == "error"]
        assert set(errors) <= {"planted"} and (not errors or seed % 4 == 0)
        num_short += len(world.executor.too_large)
        limits = [event.limit for event in world.limits]
        assert all(event.limit < event.num_tokens for event in world.limits)
        num_grown += any(
            later > before for before, later in itertools.pairwise(limits)
        )  # the limit grew and was too large again
        assert world.executor.too_large or not limits
    assert num_short > 100 and num_grown > 1


@pytest.mark.parametrize("overlap", [False, True])
def test_only_a_request_that_does_not_fit_alone_fails(overlap: bool) -> None:
    num_errors = 0
    for seed in range(60):
        world = World(seed + 3000, overlap=overlap)
        oversized = "r1"

        def has_room(plan: o.Received, oversized: str = oversized) -> int:
            return 0 if any(seq.request.request_id == oversized for seq in plan.sequences) else 1 << 30

        world.executor.room = has_room
        world.run(num_requests=6)
        if oversized not in world.finished:
            continue
        for name, output in world.finished.items():
            reasons = {c.finish_reason for c in output.outputs}
            if name != oversized:
                assert "error" not in reasons
                continue
            if "error" not in reasons:  # all its tokens arrived before its last step failed
                assert world.executor.oracle.habits.splits
                continue
            error = request_failed_error(output)
            assert error.code == "out_of_memory"
            assert "lower --gpu-memory-utilization or --max-num-batched-tokens" in str(error)
            num_errors += 1
            assert world.scheduler.max_num_scheduled_tokens == world.scheduler.max_num_batched_tokens
    assert num_errors > 30


def test_step_limit_halves_until_steps_fit_and_grows_again() -> None:
    """Four requests decode in windows; memory shrinks to one position, then all of it returns."""
    engine, executor = make_engine(overlap=True, decode_window=2, max_num_batched_tokens=64)
    client = StepClient(engine)
    events: list[Any] = []
    engine.scheduler.events.subscribe(events.append)
    for name in "abcd":
        client.add_request(EngineRequest(name, [1, 2, 3], SamplingParams(max_tokens=12, ignore_eos=True)))
    wanted = {name: o.reference(request) for name, request in engine.scheduler.requests.items()}
    outputs = {}
    for _ in range(3):
        client.step()
    executor.room = lambda plan: 1
    sizes = []
    while engine.num_requests > 1:
        sizes.append(engine.scheduler.max_num_scheduled_tokens)
        outputs |= {output.request_id: output for output in client.step()}
    assert executor.too_large == [4, 2]
    assert [limit for limit, _ in itertools.groupby(sizes)][:3] == [64, 2, 1]
    executor.room = lambda plan: 1 << 30
    while engine.has_work:
        outputs |= {output.request_id: output for output in client.step()}
    for name, output in outputs.items():
        assert [(c.index, [1, 2, 3, *c.token_ids]) for c in output.outputs] == wanted[name]
    recomputed = [event for event in events if isinstance(event, ev.Recomputed)]
    assert {(e.why, e.limit) for e in recomputed} == {("out of memory", 2), ("out of memory", 1)}
    waits = [event for event in events if isinstance(event, ev.Waiting) and event.reason == "budget"]
    assert {event.request_id for event in waits} >= {"b", "c", "d"}
    assert engine.stats.num_failed_steps == 2


def test_patience_doubles_after_failed_growth() -> None:
    engine, _ = make_engine(max_num_batched_tokens=64)
    scheduler, backoff = engine.scheduler, OOMBackoff(engine.scheduler)
    step = InFlightStep(StepPlan())
    step.plan.set_slices([0, 1, 2], [0, 0, 0], [30, 8, 4], [0, 8, 1])
    step.sequences = [type("S", (), {"request": i})() for i in range(3)]  # type: ignore[misc]

    def steps_until_it_grows() -> int:
        before, num = scheduler.max_num_scheduled_tokens, 0
        while scheduler.max_num_scheduled_tokens == before:
            backoff.record_success()
            num += 1
        return num

    assert first_pass_size(step.plan) == 35
    for wanted in (17, 8, 4):
        scheduler.max_num_scheduled_tokens = backoff.smaller_limit(step)
        assert scheduler.max_num_scheduled_tokens == wanted or wanted < 17
        scheduler.max_num_scheduled_tokens = wanted
    assert [steps_until_it_grows() for _ in range(2)] == [32, 32] and scheduler.max_num_scheduled_tokens == 16
    scheduler.max_num_scheduled_tokens = backoff.smaller_limit(step)
    assert [steps_until_it_grows() for _ in range(3)] == [64] * 3 and scheduler.max_num_scheduled_tokens == 64
    backoff.record_success()
    scheduler.max_num_scheduled_tokens = backoff.smaller_limit(step)
    assert steps_until_it_grows() == 32  # it reached full size before


def make_engine(**options: Any) -> tuple[Engine, FlakyOracle]:
    cache = KVCacheManager(20, 4, 0, num_rows=4)
    scheduler_options = {
        name: options.pop(name) for name in ("decode_window", "max_num_batched_tokens") if name in options
    }
    scheduler = Scheduler(cache, **scheduler_options)
    executor = FlakyOracle(o.Oracle(scheduler), random.Random(0), 0.0)
    return Engine(scheduler, executor, vocab_size=o.VOCAB, max_model_len=MAX_MODEL_LEN, **options), executor


def test_add_request_validates_its_arguments() -> None:
    engine, _ = make_engine()
    params = SamplingParams(max_tokens=4)
    engine.add_request(EngineRequest("a", [1, 2], params))
    with pytest.raises(ParameterError, match="'a' is running already"):
        engine.add_request(EngineRequest("a", [1, 2], params))
    for prompt, word in (([], "empty"), ([5], "0 to 4"), ([-1], "-1"), ([True], "True")):
        with pytest.raises(PromptError, match=word):
            engine.add_request(EngineRequest("b", prompt, params))
    with pytest.raises(ContextLengthError, match="64"):
        engine.add_request(EngineRequest("b", [1] * 61, params))
    assert engine.num_requests == 1
    assert engine.abort("b") is None
    update = engine.abort("a")
    assert update is not None and update.finished and update.samples[0].finish_reason == "abort"
    assert not engine.has_work and engine.step() == []


def test_overlap_plans_ahead_by_one_step() -> None:
    for overlap in (False, True):
        engine, executor = make_engine(overlap=overlap)
        engine.add_request(EngineRequest("a", [1, 2], SamplingParams(max_tokens=8, ignore_eos=True)))
        deepest = 0
        while engine.has_work:
            engine.step()
            deepest = max(deepest, len(executor.queued))
        assert deepest == (1 if overlap else 0)  # steps in flight when `step` returns


def test_step_that_fails_after_its_first_samples_arrived() -> None:
    """Samples of one request arrive with the first column of another's decode window, and then the step fails: tokens
    that arrived are not pending any more, and are output once."""
    engine, executor = make_engine(overlap=False, decode_window=6, max_num_batched_tokens=8)
    client = StepClient(engine)
    inner = executor.oracle.submit

    class PartialHandle:
        """Returns the first column of every slice, then fails."""

        def __init__(self, plan: StepPlan) -> None:
            self.running = inner(plan)
            whole = self.running.result().tokens
            self.first = [t if i in plan.num_samples else t[:1] for i, t in enumerate(whole)]
            self.plan, self.done = plan, False

        def poll(self, timeout_s: float = 0.0) -> StepResult:
            self.done = True
            return StepResult(self.first)

        def result(self) -> StepResult:
            executor.oracle.fail([self.running.plan])
            raise StepError("planted")

    client.add_request(EngineRequest("window", [1, 2], SamplingParams(max_tokens=20, ignore_eos=True), stream=True))
    client.step()
    client.add_request(
        EngineRequest(
            "samples", [3, 3, 1, 0, 2, 2, 1, 0, 4], SamplingParams(max_tokens=5, n=3, ignore_eos=True), stream=True
        )
    )
    requests = [engine.scheduler.requests[name] for name in ("window", "samples")]
    wanted = {r.request_id: o.reference(r) for r in requests}
    outputs: dict[str, RequestOutput] = {}
    num_failed = 0
    plain = executor.submit

    def submit(plan: StepPlan) -> Any:
        nonlocal num_failed
        if plan.num_samples and max(plan.num_sampled) > 1 and not num_failed:
            num_failed += 1
            return PartialHandle(plan)
        return plain(plan)

    executor.submit = submit  # type: ignore[method-assign,assignment]
    for _ in range(200):
        if not engine.has_work:
            break
        for output in client.step():
            outputs[output.request_id] = output
        o.check(engine.scheduler)
    assert num_failed == 1 and engine.stats.num_failed_steps == 1
    assert not engine.has_work
    for request in requests:
        num_prompt = len(request.prompt_token_ids)
        got = [(c.index, c.token_ids) for c in outputs[request.request_id].outputs]
        assert got == [(i, tokens[num_prompt:]) for i, tokens in wanted[request.request_id]]


def test_closed_engine_rejects_calls() -> None:
    engine, executor = make_engine()
    engine.add_request(EngineRequest("a", [1, 2], SamplingParams(max_tokens=8)))
    engine.step()
    engine.close()
    engine.close()
    assert executor.closed == 1 and not engine.num_requests
    assert engine.scheduler.stats().num_used == 0
    for call in (engine.step, lambda: engine.add_request(EngineRequest("b", [1], SamplingParams()))):
        with pytest.raises(EngineError, match="closed"):
            call()


class Scripted:
    """An executor that returns the result of a function for each plan, at once; `clock` is its time, in seconds."""

    def __init__(self, give: Callable[[StepPlan], StepResult]) -> None:
        self.give, self.clock = give, 0.0

    def submit(self, plan: StepPlan) -> Any:
        executor = self

        class Done:
            done = True

            def result(self) -> StepResult:
                return executor.give(plan)

        return Done()

    def close(self) -> None:
        pass


def scripted(give: Callable[[StepPlan], StepResult], *, window: int = 1, budget: int = 64, **options: Any) -> Engine:
    executor, cache = Scripted(give), KVCacheManager(1024, 4, num_rows=options.pop("rows", 8))
    scheduler = Scheduler(cache, decode_window=window, max_num_batched_tokens=budget)
    engine = Engine(
        scheduler, executor, vocab_size=100, max_model_len=2048, overlap=False, clock=lambda: executor.clock, **options
    )  # fmt: skip
    return engine


def outputs_of(engine: Engine, request: EngineRequest) -> list[RequestOutput]:
    client = StepClient(engine)
    client.add_request(request)
    return client.run_to_end()


def ones(plan: StepPlan) -> StepResult:
    return StepResult(
        [[1] * (plan.num_samples.get(i, 1) if i in plan.num_samples else n) for i, n in enumerate(plan.num_sampled)]
    )


def beams(plan: StepPlan, fails_at: int) -> StepResult:
    """The stop token 5 is the top token at first; later all live sequences fail at length `fails_at`."""
    tokens: list[Any] = []
    errors: dict[int, str] = {}
    for i, length in enumerate(map(add, plan.starts, plan.counts)):
        found = [(-0.1 - 0.01 * j, 10 + j) for j in range(plan.num_samples[i])]
        if length == 5:
            found[:2] = [(-0.05, 5), (-0.06, 10)]
        if length == fails_at:
            errors[i] = "out_of_memory: planted"
        tokens.append(found)
    return StepResult(tokens, errors)


@pytest.mark.parametrize("n", [1, 2])
def test_failed_beam_search_returns_an_error_despite_a_hypothesis(n: int) -> None:
    """The best hypothesis is complete, but a better one may have been lost."""
    params = BeamSearchParams(beam_width=2, n=n, max_tokens=8, stop_token_ids=[5], early_stopping="never")
    for fails_at in (6, 99):
        engine = scripted(lambda plan, at=fails_at: beams(plan, at))  # type: ignore[misc]
        output = outputs_of(engine, EngineRequest("b", [1, 2, 3, 4], params))[-1]
        assert len(output.outputs) == n and output.outputs[0].token_ids == [10, 5]
        reasons = {(c.finish_reason, c.stop_reason) for c in output.outputs}
        if fails_at == 6:
            assert reasons == {("error", "out_of_memory: planted")}
            assert request_failed_error(output).code == "out_of_memory"
        else:
            assert ("stop", 5) in reasons and reasons <= {("stop", 5), ("length", None)}


def test_failed_best_of_returns_an_error_despite_a_finished_sample() -> None:
    def give(plan: StepPlan) -> StepResult:
        entries = [TokenLogprobs(-0.1, 1, [], []), TokenLogprobs(-2.0, 1, [], [])]
        if 0 in plan.num_samples:  # the first sample ends at once
            return StepResult([[5, 6]], {}, {0: entries})
        return StepResult([[6]], {0: "NaN"}, {0: entries[1:]})

    engine = scripted(give)
    params = SamplingParams(n=1, best_of=2, max_tokens=8, stop_token_ids=[5], logprobs=0)
    (output,) = outputs_of(engine, EngineRequest("b", [1, 2, 3], params))
    assert [(c.finish_reason, c.stop_reason, c.token_ids) for c in output.outputs] == [("error", "NaN", [5])]


@pytest.mark.parametrize("penalty", [-30.0, 30.0])
def test_beam_search_with_extreme_length_penalty_finishes(penalty: float) -> None:
    engine = scripted(lambda plan: beams(plan, -1))
    params = BeamSearchParams(
        beam_width=2, max_tokens=1500, length_penalty=penalty, stop_token_ids=[5], early_stopping="never"
    )
    output = outputs_of(engine, EngineRequest("b", [1, 2, 3, 4], params))[-1]
    assert all(c.score is not None and -1e308 < c.score <= 0 for c in output.outputs)


def test_beam_search_counts_its_output_tokens() -> None:
    """Also those of sequences that were freed when the search finished."""
    engine = scripted(lambda plan: beams(plan, 99))
    events: list[Any] = []
    engine.scheduler.events.subscribe(events.append)
    params = BeamSearchParams(beam_width=2, max_tokens=8)
    (output,) = outputs_of(engine, EngineRequest("b", [1, 2, 3, 4], params))
    assert output.metrics.num_generation_tokens == 16
    assert engine.stats.num_generation_tokens == events[-1].num_tokens == 16 and events[-1].reason == "stop"


@pytest.mark.parametrize("window", [1, 4, 8])
def test_step_cost_is_estimated_for_any_decode_window(window: int) -> None:
    """A pass takes 1 ms plus 10 us per prompt position; a prefill runs next to a decoding request."""

    def give(plan: StepPlan) -> StepResult:
        num_prompt = sum(map(len, plan.host_tokens.values()))
        windows.add(max(plan.num_sampled))
        executor.clock += 1e-3 * max(1, *plan.num_sampled) + 1e-5 * num_prompt
        return ones(plan)

    windows: set[int] = set()
    engine = scripted(give, window=window, budget=200)
    executor = cast("Scripted", engine.executor)
    engine.add_request(EngineRequest("d", [2] * 10, SamplingParams(max_tokens=300)))
    for _ in range(6):
        engine.step()
    engine.add_request(EngineRequest("p", [3] * 900, SamplingParams(max_tokens=8)))
    for _ in range(10):
        engine.step()
    costs = engine.scheduler.policy.costs
    assert costs.step_s == pytest.approx(1e-3) and costs.token_s == pytest.approx(1e-5)
    assert max(windows) == window


@pytest.mark.parametrize("stream", [False, True])
def test_each_sample_is_detokenized_once_per_step(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    push = Letters.push
    monkeypatch.setattr(Letters, "push", lambda text, ids: (reads.extend(ids), push(text, ids))[1])
    client = StepClient(scripted(ones, rows=32))
    client.add_request(
        EngineRequest(
            "a", [2, 3], SamplingParams(n=32, max_tokens=9, stop=["zz"]), make_detokenizer=Letters, stream=stream
        )
    )
    for _ in range(3):
        client.step()
    reads.clear()
    client.step()
    assert reads == [1] * 32


def test_beam_search_logprobs_are_limited() -> None:
    engine, _ = make_engine(max_logprobs=2)
    for num in (2, 3):
        params = BeamSearchParams(beam_width=2, max_tokens=3, logprobs=num)
        if num == 2:
            engine.add_request(EngineRequest("fine", [1], params))
            continue
        with pytest.raises(ParameterError, match="logprobs is 3, and the limit is 2") as caught:
            engine.add_request(EngineRequest("b", [1], params))
        assert caught.value.param == "logprobs" and engine.num_requests == 1


@pytest.mark.parametrize("priority", [MAX_PRIORITY + 1, -MAX_PRIORITY - 1, 1 << 80, 0.5, "1", True])
def test_priority_out_of_range_is_rejected(priority: Any) -> None:
    engine, _ = make_engine()
    with pytest.raises(ParameterError, match=r"priority is .*, it must be an integer from -2147483648") as caught:
        engine.add_request(EngineRequest("a", [1], SamplingParams(max_tokens=1), priority=priority))
    assert caught.value.param == "priority" and not engine.num_requests
    engine.add_request(EngineRequest("a", [1], SamplingParams(max_tokens=1), priority=-MAX_PRIORITY))


def test_unpinned_prefixes_leave_no_live_timeline() -> None:
    engine = scripted(ones)
    for name in ("a", "b"):
        outputs_of(engine, EngineRequest.pinning(name, [2] * 9))
        engine.scheduler.unpin(pin_id(name))
    assert not engine.timelines.live
    assert [entry["event"] for entry in engine.timelines.of("pin:b")][-2:] == ["finished", "unpinned"]
    engine.timelines(ev.Unpinned("forgotten", 3))
    assert not engine.timelines.live and engine.timelines.of("forgotten") == []


@pytest.mark.parametrize(
    "kinds",
    [
        {"attention_window": 8},
        {"windows": (8, 8), "max_chunk": 8},
        {"windows": (8, 8), "max_chunk": 8, "state_blocks": 3, "checkpoint_interval": 4},
    ],
)
def test_describe_kv_counts_blocks_per_tier_without_null_blocks(kinds: dict[str, Any]) -> None:
    cache = KVCacheManager(24, 4, 24, num_rows=4, **kinds)
    scheduler = Scheduler(cache, policy=Policy(mode=PreemptionMode.SWAP))
    engine = Engine(scheduler, o.Oracle(scheduler), vocab_size=o.VOCAB, max_model_len=64, overlap=False)
    engine.add_request(EngineRequest("w", [1] * 20, SamplingParams(max_tokens=20, ignore_eos=True)))
    for _ in range(6):
        engine.step()
    (seq,) = scheduler.requests["w"].sequences
    assert all(0 in block_ids for block_ids, _ in (*seq.tables,)[bool(seq.windows) :])
    held = describe_kv(engine.scheduler).as_dict()
    assert held["requests"] == {"w": {"status": "running", "num_blocks": held["num_used"], "num_host_blocks": 0}}
    plan = StepPlan()
    preempt(scheduler, seq.request, seq.request, 0, InFlightStep(plan))
    held = describe_kv(engine.scheduler).as_dict()
    assert held["requests"] == {"w": {"status": "swapped", "num_blocks": 0, "num_host_blocks": held["num_host_used"]}}
    assert held["num_host_used"] == len(plan.swap_outs) > 0


def test_eos_token_without_logits_is_ignored() -> None:
    """A checkpoint may name an added token without an embedding; `min_tokens` would mask its missing logit."""
    engine, _ = make_engine(eos_token_ids=[EOS, o.VOCAB, o.VOCAB + 7])
    engine.add_request(EngineRequest("a", [1, 2], SamplingParams(max_tokens=4, min_tokens=2)))
    assert engine.limits.eos_token_ids == (EOS,)
    assert engine.get_state("a").request.stop_ids == {EOS}
