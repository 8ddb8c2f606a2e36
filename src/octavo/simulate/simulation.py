"""Runs a trace through simulated engines: the engine's own loop, with a trace in the place of a server's callers.

arrivals -> `Router` -> replicas (an `Engine` each, on its own `VirtualClock`) -> `Records`

The router is the server's own. At an arrival it has heard what the replicas reported until then, and nothing later: a
replica's last step may end after the arrival, and what happens at its end waits in `Replica.reports`. An engine seals
blocks when it plans the step that computes them. Reports travel in no time.
"""

from __future__ import annotations

import gc
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TypeAlias

import numpy as np

from octavo.config import DEFAULT_SWAP_BYTES, GIB, EngineArgs
from octavo.core import events as ev
from octavo.core.block_pool import group_of
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.core.scheduler import Scheduler
from octavo.engine.engine import Engine
from octavo.engine.engine_request import EngineRequest, TurnOpenings
from octavo.engine.kv_events import CoreEvent, KVEventTranslator, update_index
from octavo.engine.request_state import RequestState
from octavo.engine.request_update import RequestUpdate
from octavo.errors import EngineError, ParameterError, UsageError
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import SamplingParams
from octavo.router.router import Router, RouterPolicy
from octavo.runner.memory.budget import free_memory, plan_memory
from octavo.runner.memory.needs import CONTEXT_BYTES, Machine, MemoryNeeds, free_for_kv, memory_needs
from octavo.simulate.allocators import MemorySplit, split_of
from octavo.simulate.clock import VirtualClock
from octavo.simulate.cost import CostModel, RooflineCost
from octavo.simulate.devices import Device
from octavo.simulate.executor import SimulatedExecutor, TokenSource
from octavo.simulate.models import ModelShape
from octavo.simulate.traces import Arrival

VOCAB_SIZE = 1 << 31
"""Vocabulary of a simulated model: any token of a trace."""
HOST_BYTES = 1 << 40
"""Host memory of a simulated machine with GPUs: swap space is never short."""
MAX_POOL_SAMPLES = 1024
"""Maximum number of pool samples kept; beyond, every second one is dropped."""

SLICE_S = 10.0
"""Simulated time between two questions whether a run is enough."""
GC_THRESHOLD = 1000
"""Number of requests from which a simulation runs the garbage collector at its end."""


def paged(config: SimConfig, num_blocks: int, num_host_blocks: int) -> KVCacheManager:
    """The engine's own KV cache."""
    args, kv, windows = config.resolved(), config.kv, config.model.windows
    return KVCacheManager(
        num_blocks,
        args.block_size,
        num_host_blocks,
        num_rows=args.max_num_seqs or 0,
        enable_prefix_caching=args.enable_prefix_caching,
        attention_window=max(windows) if windows and all(windows) else 0,
        windows=kv.windows,
        max_chunk=kv.max_chunk,
        state_blocks=kv.state_blocks,
        checkpoint_interval=args.checkpoint_interval if kv.state_blocks else 0,
    )


@dataclass(frozen=True, slots=True)
class SimConfig:
    """The simulated model, machine and engine options.

    args          the engine's options; `model` is only a name in messages
    num_devices   devices that share one copy of the model by tensor parallelism
    num_replicas  copies of the model, each with its own cache
    router        how requests are sent to them
    cost          None: the device's roofline
    make_cache    of this config, with so many blocks on the device and the host
    """

    model: ModelShape
    device: Device
    args: EngineArgs
    num_devices: int = 1
    num_replicas: int = 1
    cost: CostModel | None = None
    make_cache: Callable[[SimConfig, int, int], KVCacheManager] = paged
    router: RouterPolicy = "affinity"

    def __post_init__(self) -> None:
        if self.args.num_speculative_tokens:
            text = "a simulated engine does not speculate; remove speculative_config"
            raise ParameterError(text, param="speculative_config")

    def resolved(self) -> EngineArgs:
        return replace(self.args.resolved(self._platform), tensor_parallel_size=self.num_devices)

    @property
    def _platform(self) -> str:
        return "cpu" if self.device.name == "cpu" else "cuda"

    @property
    def kv(self) -> KVCacheSpec:
        """Of one rank."""
        args = self.args
        max_len = args.grouped_len(self.model.max_model_len(args.max_model_len))
        spec, platform = self.model.spec, self._platform
        prefers_float8 = spec is not None and bool(spec.kv_scheme) and platform == "cuda"
        dtype = args.resolved_kv_dtype(platform, self.model.dtype, prefers_float8=prefers_float8)
        return self.model.of_rank(self.num_devices).kv_cache(args.block_size, max_len, dtype)

    def num_blocks(self) -> int:
        """Usable blocks of a replica, as `octavo doctor` counts them. Raises `MemoryBudgetError` if it does not fit."""
        if self.args.num_gpu_blocks_override is not None:
            return self.args.num_gpu_blocks_override
        args, device, n = self.resolved(), self.device, self.num_devices
        if device.name == "cpu":
            machine = Machine(device.name, free_memory())
        else:
            name = device.name if n == 1 else f"each of {n} {device.name}"
            machine = Machine(name, HOST_BYTES * n, int(device.memory_bytes), CONTEXT_BYTES)
        if self.model.spec is None:
            need = MemoryNeeds(self.kv, self.model.of_rank(n).weight_bytes, 0, 0, self.model.dtype)
        else:
            need = memory_needs(args, self.model.spec, machine)
        model_len = self.model.max_model_len(args.max_model_len)
        return plan_memory(args, need.kv, free_for_kv(args, need, machine), model_len=model_len).num_blocks

    def num_host_blocks(self) -> int:
        space = self.args.swap_space
        room = DEFAULT_SWAP_BYTES if space is None else space * GIB
        return min(self.num_blocks(), int(room // self.kv.bytes_per_block))

    def cost_model(self) -> CostModel:
        if self.cost is not None:
            return self.cost
        return RooflineCost(self.model.of_rank(self.num_devices), self.device, self.kv, self.num_devices)


@dataclass(slots=True)
class PoolSample:
    """State of one replica's pool and queues at a time. Without sharing, `num_saved` more blocks would be in use."""

    time_s: float
    split: MemorySplit
    num_used: int
    num_saved: int
    num_running: int
    num_waiting: int
    num_swapped: int


@dataclass(slots=True)
class Records:
    """Columns with one value per finished request; times in seconds from the start of the trace.

    num_output      generated tokens of all samples; longest: of the longest sample
    replica         number of the replica that ran it; none in a replay
    num_preempted   preemptions by mode
    num_waits       wait reason -> how often a request began to wait for it
    refused         error class -> (count, first message) of requests that could never run
    """

    arrived_s: array[float] = field(default_factory=lambda: array("d"))
    first_s: array[float] = field(default_factory=lambda: array("d"))
    finished_s: array[float] = field(default_factory=lambda: array("d"))
    num_prompt: array[int] = field(default_factory=lambda: array("q"))
    num_output: array[int] = field(default_factory=lambda: array("q"))
    longest: array[int] = field(default_factory=lambda: array("q"))
    num_cached: array[int] = field(default_factory=lambda: array("q"))
    index: array[int] = field(default_factory=lambda: array("q"))
    replica: array[int] = field(default_factory=lambda: array("q"))
    num_preempted: Counter[str] = field(default_factory=Counter)
    num_waits: Counter[str] = field(default_factory=Counter)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    samples: list[PoolSample] = field(default_factory=list)
    num_steps: int = 0
    busy_s: float = 0.0
    end_s: float = 0.0
    num_unfinished: int = 0
    num_replicas: int = 1

    def __len__(self) -> int:
        return len(self.index)

    def column(self, name: str) -> np.ndarray:
        values: array[float] = getattr(self, name)
        return np.frombuffer(values, dtype=values.typecode) if values else np.zeros(0)


Report: TypeAlias = tuple[float, CoreEvent | Callable[[Router], None]]
"""What a replica tells the router, and when: an event of its cache, or a call."""


class ArrivalMarks(TurnOpenings):
    """The marks of the arrival that is being submitted, in place of those at the turns of a chat."""

    current: tuple[int, ...] = ()

    def marks(self, prompt: Sequence[int]) -> tuple[int, ...]:
        return self.current


class Replica:
    """One engine with its clock and simulated device.

    number   None: no router listens to it. With one, `reports` holds what it has yet to hear, in order of time
    """

    def __init__(
        self,
        config: SimConfig,
        records: Records,
        number: int | None = None,
        *,
        token_source: TokenSource | None = None,
        interval_s: float,
    ) -> None:
        args = config.resolved()
        assert args.max_num_seqs and args.max_num_batched_tokens  # resolved
        self.clock = VirtualClock()
        self.executor = SimulatedExecutor(
            config.cost_model(),
            self.clock,
            token_source,
            num_blocks=config.num_blocks(),
            num_host_blocks=config.num_host_blocks(),
        )
        capacity = self.executor.start()
        self.cache = config.make_cache(config, capacity.num_blocks, capacity.num_host_blocks)
        policy = args.policy()
        policy.costs.move_s = capacity.move_s
        self.scheduler = Scheduler(
            self.cache,
            max_num_batched_tokens=args.max_num_batched_tokens,
            decode_window=args.decode_window or capacity.decode_window,
            num_watermark_blocks=int(args.watermark * capacity.num_blocks),
            policy=policy,
        )
        longest = config.model.max_len if args.max_model_len in (None, -1) else args.max_model_len
        assert longest is not None
        self._marks = ArrivalMarks()
        self.engine = Engine(
            self.scheduler,
            self.executor,
            vocab_size=VOCAB_SIZE,
            max_model_len=longest,
            overlap=args.async_scheduling,
            clock=self.clock,
            turn_openings=self._marks,
        )
        self.records = records
        self._seeded = token_source is not None
        self._arrivals: dict[str, tuple[int, Arrival]] = {}
        self._sample_s, self._next_sample_s = interval_s, 0.0
        self.scheduler.events.subscribe(self._listen)
        self.number = number
        self.reports: deque[Report] = deque()
        self._prefilling: dict[str, RequestState] = {}  # admitted, without a token yet; only with a router
        if number is not None and config.router == "affinity" and args.enable_prefix_caching:
            self.cache.events.subscribe(self._listen_to_blocks, blocks=True)

    @property
    def num_requests(self) -> int:
        return self.engine.num_requests

    def submit(self, index: int, arrival: Arrival) -> None:
        """Submit a request at its arrival time. As in a server, requests are accepted between steps."""
        self.clock.advance_to(arrival.time_s)
        name, self._marks.current = str(index), arrival.marks
        try:
            self.engine.add_request(
                EngineRequest(name, arrival.prompt(), _params(arrival, index if self._seeded else None))
            )
        except UsageError as error:
            count, message = self.records.refused.get(type(error).__name__, (0, str(error)))
            self.records.refused[type(error).__name__] = (count + 1, message)
            self._report_end(name)
            return
        self._arrivals[name] = (index, arrival)

    def run_until(self, time_s: float) -> None:
        """Step until `time_s`, or until the engine is idle. The last step may end later."""
        engine, clock, scheduler = self.engine, self.clock, self.scheduler
        while clock.now < time_s and engine.has_work:
            num_steps, waits_for_device = scheduler.num_steps, bool(scheduler.in_flight)
            updates = engine.step()
            if self._prefilling:
                self._report_first_tokens()
            if updates:
                self._record(updates)
            elif scheduler.num_steps == num_steps and not waits_for_device:
                raise EngineError(f"at {clock.now:.3f} s no request can be scheduled: {scheduler.waiting[:1]}")
            if clock.now >= self._next_sample_s:
                self._sample_pool()

    def _record(self, updates: list[RequestUpdate]) -> None:
        records = self.records
        for update in updates:
            index, arrival = self._arrivals.pop(update.request_id)
            assert update.stats is not None  # it has finished
            metrics, hypotheses = update.stats.metrics, update.stats.hypotheses
            assert metrics.first_token_time is not None and metrics.finished_time is not None
            records.index.append(index)
            records.replica.append(self.number or 0)
            self._report_end(update.request_id)
            records.arrived_s.append(arrival.time_s)
            records.first_s.append(metrics.first_token_time)
            records.finished_s.append(metrics.finished_time)
            records.num_prompt.append(arrival.num_prompt)
            lengths = [len(output.token_ids) for output in (update.samples if hypotheses is None else hypotheses)]
            records.num_output.append(sum(lengths))
            records.longest.append(max(lengths))
            records.num_cached.append(metrics.num_cached_tokens)

    def _sample_pool(self) -> None:
        samples, scheduler = self.records.samples, self.scheduler
        split, pool = split_of(self.cache, scheduler.running), self.cache.pool
        blocks = pool.num_used, pool.num_refs - pool.num_used
        queues = len(scheduler.running), len(scheduler.waiting), len(scheduler.swapped)
        samples.append(PoolSample(self.clock.now, split, *blocks, *queues))
        if len(samples) > MAX_POOL_SAMPLES:
            del samples[::2]
            self._sample_s = max(2 * self._sample_s, (samples[-1].time_s - samples[0].time_s) / len(samples))
        self._next_sample_s = self.clock.now + self._sample_s

    def _listen(self, event: ev.Event) -> None:
        if isinstance(event, ev.Preempted):
            self.records.num_preempted[event.how] += 1
        elif isinstance(event, ev.Waiting):
            self.records.num_waits[event.reason] += 1
        elif isinstance(event, ev.Admitted) and self.number is not None:
            state = self.engine.get_state(event.request_id)
            if state is not None and state.metrics.first_token_time is None:
                self._prefilling[event.request_id] = state

    # -- what the router hears -----------------------------------------------------------------------------------------

    def _listen_to_blocks(self, event: ev.Event) -> None:
        if isinstance(event, ev.Evicted) or (isinstance(event, ev.Sealed) and not group_of(event.token_ids)):
            self.reports.append((self.clock.now, (event, b"")))

    def _report_first_tokens(self) -> None:
        for name, state in list(self._prefilling.items()):
            if (time_s := state.metrics.first_token_time) is not None:
                del self._prefilling[name]
                self.reports.append((time_s, partial(Router.start, request_id=name)))

    def _report_end(self, name: str) -> None:
        if self.number is not None:
            self.reports.append((self.clock.now, partial(Router.finish, request_id=name)))


class Fleet:
    """Replicas behind a router on virtual time. One replica has no router."""

    def __init__(
        self, config: SimConfig, records: Records, *, token_source: TokenSource | None, interval_s: float
    ) -> None:
        numbers = [None] if config.num_replicas == 1 else range(config.num_replicas)
        self.replicas = [Replica(config, records, i, token_source=token_source, interval_s=interval_s) for i in numbers]
        block_size = config.args.block_size if config.args.enable_prefix_caching else 0
        self._now = 0.0
        self.router = Router(config.router, block_size, clock=lambda: self._now)
        self._translators = [KVEventTranslator(config.args.block_size) for _ in self.replicas]

    def submit(self, index: int, arrival: Arrival) -> None:
        """Run all replicas up to an arrival, and send it to one of them."""
        for replica in self.replicas:
            replica.run_until(arrival.time_s)
        number = self._route(index, arrival) if len(self.replicas) > 1 else 0
        self.replicas[number].submit(index, arrival)

    def _route(self, index: int, arrival: Arrival) -> int:
        for number, replica in enumerate(self.replicas):
            self._hear(number, replica.reports, arrival.time_s)
        self._now = arrival.time_s
        hashes = self.router.hashes(arrival.prompt())
        among = (1 << len(self.replicas)) - 1
        return self.router.route(str(index), arrival.num_prompt, hashes, among).replica

    def _hear(self, number: int, reports: deque[Report], until_s: float) -> None:
        """Tell the router what a replica has reported until now, each report at its time."""
        blocks: list[CoreEvent] = []
        translator = self._translators[number]
        while reports and reports[0][0] <= until_s:
            self._now, report = reports.popleft()
            if isinstance(report, tuple):
                blocks.append(report)
            else:
                update_index(self.router.index, number, translator.translate(blocks))
                blocks.clear()
                report(self.router)
        update_index(self.router.index, number, translator.translate(blocks))


@lru_cache(maxsize=8192)
def _make_params(num_output: int, n: int, beams: bool, seed: int | None) -> SamplingParams | BeamSearchParams:
    if beams:
        return BeamSearchParams(beam_width=n, max_tokens=num_output, ignore_eos=True)
    return SamplingParams(n=n, max_tokens=num_output, ignore_eos=True, seed=seed, detokenize=False)


def _params(arrival: Arrival, seed: int | None) -> SamplingParams | BeamSearchParams:
    """Sampling parameters of an arrival. The seed identifies the request to a `TokenSource`."""
    return _make_params(arrival.num_output, arrival.n, arrival.beams, seed)


def simulate(
    config: SimConfig,
    arrivals: Iterable[Arrival],
    *,
    until_s: float = float("inf"),
    interval_s: float = 1.0,
    token_source: TokenSource | None = None,
    progress: Callable[[int, float], None] | None = None,
    is_enough: Callable[[Records], bool] | None = None,
) -> Records:
    """Run a trace to its end, or until `until_s`; requests still running then count as unfinished.

    interval_s   initial time between two pool samples
    progress     called every 256 arrivals with their number and the time of the last
    is_enough    asked now and then; true ends the run, as `until_s` does
    """
    records = Records(num_replicas=config.num_replicas)
    fleet = Fleet(config, records, token_source=token_source, interval_s=interval_s)
    replicas = fleet.replicas
    with ExitStack() as stack:
        for replica in replicas:
            stack.enter_context(replica.engine.gc_pause)
        for index, arrival in enumerate(arrivals):
            if arrival.time_s >= until_s or (is_enough is not None and index % 64 == 0 and is_enough(records)):
                until_s = min(until_s, arrival.time_s)
                break
            fleet.submit(index, arrival)
            if progress is not None and index % 256 == 0:
                progress(index, arrival.time_s)
        _finish(replicas, records, until_s, is_enough)
    records.num_steps = sum(r.scheduler.num_steps for r in replicas)
    records.busy_s = sum(r.executor.busy_s for r in replicas)
    records.end_s = max(r.clock.now for r in replicas)
    records.num_unfinished = sum(r.num_requests for r in replicas)
    if len(records) > GC_THRESHOLD:  # engines are reference cycles, and experiments create hundreds
        del replica, replicas, fleet
        gc.collect()
    return records


def _finish(
    replicas: list[Replica], records: Records, until_s: float, is_enough: Callable[[Records], bool] | None
) -> None:
    """Run without further arrivals, in slices of `SLICE_S` if someone wants to be asked between them."""
    time_s = until_s if is_enough is None else 0.0
    while True:
        for replica in replicas:
            replica.run_until(time_s)
        if time_s >= until_s or not any(r.engine.has_work for r in replicas):
            return
        if is_enough is not None and is_enough(records):
            return
        time_s = min(until_s, max(r.clock.now for r in replicas) + SLICE_S)
