"""Runs a trace through engines that wait for nobody: the engine's own loop, with arrivals where a server has callers.

arrivals -> router -> replicas (an `Engine` each, on its own `VirtualClock`) -> `Records`
"""

from __future__ import annotations

import gc
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from octavo.config import DEFAULT_GPU_MEMORY_UTILIZATION, DEFAULT_SWAP_BYTES, GIB, EngineArgs
from octavo.core import events as ev
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.scheduler import Scheduler
from octavo.engine.engine import Engine
from octavo.engine.outputs import RequestOutput
from octavo.errors import EngineError, MemoryBudgetError, UsageError
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import SamplingParams
from octavo.simulate.allocators import MemorySplit, split_of
from octavo.simulate.clock import VirtualClock
from octavo.simulate.cost import CostModel, Device, RooflineCost
from octavo.simulate.executor import SimulatedExecutor, TokenSource
from octavo.simulate.models import ModelShape
from octavo.simulate.traces import Arrival

VOCAB_SIZE = 1 << 31
"""Of a simulated model: every token that a trace can hold."""
MAX_POOL_SAMPLES = 1024
"""Looks at the memory that are kept; when there are more, every second one goes."""

MANY = 1000
"""Requests after which the memory of a simulation is worth looking for."""

MakeCache = Callable[[int, int, int, int, bool], KVCacheManager]
"""From blocks, block size, host blocks, rows, and whether prefixes are cached."""


def paged(num_blocks: int, block_size: int, num_host_blocks: int, num_rows: int, prefixes: bool) -> KVCacheManager:
    """The engine's own."""
    return KVCacheManager(num_blocks, block_size, num_host_blocks, num_rows=num_rows, enable_prefix_caching=prefixes)


@dataclass(frozen=True, slots=True)
class SimConfig:
    """What is simulated.

    args          the engine's options; `model` is a name for people
    num_devices   that share one copy of the model
    num_replicas  copies, behind a router that gives a request to the one with the fewest
    cost          None: the device's roofline
    """

    model: ModelShape
    device: Device
    args: EngineArgs
    num_devices: int = 1
    num_replicas: int = 1
    cost: CostModel | None = None
    make_cache: MakeCache = paged

    def resolved(self) -> EngineArgs:
        return self.args.resolved("cpu" if self.device.name == "cpu" else "cuda")

    @property
    def block_bytes(self) -> int:
        return self.model.kv_bytes_per_token * self.args.block_size

    def num_blocks(self) -> int:
        """Usable blocks of a replica. Raises `MemoryBudgetError` where weights leave room for none."""
        args = self.args
        if args.num_gpu_blocks_override is not None:
            return args.num_gpu_blocks_override
        if args.kv_cache_memory_bytes is not None:
            room = float(args.kv_cache_memory_bytes)
        else:
            share = (
                DEFAULT_GPU_MEMORY_UTILIZATION if args.gpu_memory_utilization is None else args.gpu_memory_utilization
            )
            room = self.device.memory_bytes * self.num_devices * share - self.model.weight_bytes
        if room < self.block_bytes:
            raise MemoryBudgetError(
                f"{self.model.name} takes {self.model.weight_bytes / 1e9:.1f} GB and {self.num_devices} x "
                f"{self.device.name} has {self.device.memory_bytes * self.num_devices / 1e9:.0f} GB: no room for KV "
                "blocks; use more devices or larger ones"
            )
        return int(room // self.block_bytes)

    def num_host_blocks(self) -> int:
        space = self.args.swap_space
        room = DEFAULT_SWAP_BYTES if space is None else space * GIB
        return min(self.num_blocks(), int(room // self.block_bytes))

    def cost_model(self) -> CostModel:
        if self.cost is not None:
            return self.cost
        return RooflineCost(self.model, self.device, self.args.block_size, self.num_devices)


@dataclass(slots=True)
class PoolSample:
    """A look at one replica's memory and queues. `num_saved` blocks more would be used if nothing was shared."""

    time_s: float
    split: MemorySplit
    num_used: int
    num_saved: int
    num_running: int
    num_waiting: int
    num_swapped: int


@dataclass(slots=True)
class Records:
    """What came of every request that finished, as columns; times in seconds from the trace's beginning.

    num_output      tokens of all of its samples, longest: of the one with most
    num_preempted   how often requests were taken off the device, by how
    num_waits       how often a request began to wait, by reason
    refused         the first message of each kind of request that could never run, and how many there were
    """

    arrived_s: array[float] = field(default_factory=lambda: array("d"))
    first_s: array[float] = field(default_factory=lambda: array("d"))
    finished_s: array[float] = field(default_factory=lambda: array("d"))
    num_prompt: array[int] = field(default_factory=lambda: array("q"))
    num_output: array[int] = field(default_factory=lambda: array("q"))
    longest: array[int] = field(default_factory=lambda: array("q"))
    num_cached: array[int] = field(default_factory=lambda: array("q"))
    index: array[int] = field(default_factory=lambda: array("q"))
    num_preempted: Counter[str] = field(default_factory=Counter)
    num_waits: Counter[str] = field(default_factory=Counter)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    samples: list[PoolSample] = field(default_factory=list)
    num_steps: int = 0
    busy_s: float = 0.0
    end_s: float = 0.0
    num_unfinished: int = 0

    def __len__(self) -> int:
        return len(self.index)

    def column(self, name: str) -> np.ndarray:
        values: array[float] = getattr(self, name)
        return np.frombuffer(values, dtype=values.typecode) if values else np.zeros(0)


class Replica:
    """One engine, its clock and its device."""

    def __init__(
        self,
        setup: SimConfig,
        records: Records,
        *,
        token_source: TokenSource | None = None,
        interval_s: float,
    ) -> None:
        args = setup.resolved()
        assert args.max_num_seqs and args.max_num_batched_tokens and args.decode_window  # resolved
        num_blocks = setup.num_blocks()
        self.cache = setup.make_cache(
            num_blocks, args.block_size, setup.num_host_blocks(), args.max_num_seqs, args.enable_prefix_caching
        )
        policy = args.policy()
        policy.costs.move_s = setup.cost_model().move_s
        self.scheduler = Scheduler(
            self.cache,
            max_num_batched_tokens=args.max_num_batched_tokens,
            decode_window=args.decode_window,
            num_watermark_blocks=int(args.watermark * num_blocks),
            policy=policy,
        )
        longest = setup.model.max_len if args.max_model_len in (None, -1) else args.max_model_len
        assert longest is not None
        self.clock = VirtualClock()
        self.executor = SimulatedExecutor(setup.cost_model(), self.clock, token_source)
        self.engine = Engine(
            self.scheduler,
            self.executor,
            vocab_size=VOCAB_SIZE,
            max_model_len=longest,
            overlap=args.async_scheduling,
            clock=self.clock,
        )
        self.records = records
        self._seeded = token_source is not None
        self._arrivals: dict[str, tuple[int, Arrival]] = {}
        self._sample_s, self._next_sample_s = interval_s, 0.0
        self.scheduler.events.subscribe(self._listen)

    @property
    def num_requests(self) -> int:
        return self.engine.num_requests

    def offer(self, index: int, arrival: Arrival) -> None:
        """A request arrives. It is looked at between two steps, as a server does."""
        self.clock.advance_to(arrival.time_s)
        name = str(index)
        try:
            self.engine.add_request(name, arrival.prompt(), _params(arrival, index if self._seeded else None))
        except UsageError as error:
            count, message = self.records.refused.get(type(error).__name__, (0, str(error)))
            self.records.refused[type(error).__name__] = (count + 1, message)
            return
        self._arrivals[name] = (index, arrival)

    def run_until(self, time_s: float) -> None:
        """Step until then, or until there is nothing to do. The last step may end later."""
        engine, clock, scheduler = self.engine, self.clock, self.scheduler
        while clock.now < time_s and engine.has_work:
            num_steps, waits_for_device = scheduler.num_steps, bool(scheduler.in_flight)
            outputs = engine.step()
            if outputs:
                self._record(outputs)
            elif scheduler.num_steps == num_steps and not waits_for_device:
                raise EngineError(f"at {clock.now:.3f} s nothing can be planned: {scheduler.waiting[:1]}")
            if clock.now >= self._next_sample_s:
                self._look()

    def _record(self, outputs: list[RequestOutput]) -> None:
        records = self.records
        for output in outputs:
            index, arrival = self._arrivals.pop(output.request_id)
            metrics = output.metrics
            assert metrics.first_token_time is not None and metrics.finished_time is not None
            records.index.append(index)
            records.arrived_s.append(arrival.time_s)
            records.first_s.append(metrics.first_token_time)
            records.finished_s.append(metrics.finished_time)
            records.num_prompt.append(len(output.prompt_token_ids))
            lengths = [len(c.token_ids) for c in output.outputs]
            records.num_output.append(sum(lengths))
            records.longest.append(max(lengths))
            records.num_cached.append(metrics.num_cached_tokens)

    def _look(self) -> None:
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


@lru_cache(maxsize=8192)
def _made(num_output: int, n: int, beams: bool, seed: int | None) -> SamplingParams | BeamSearchParams:
    if beams:
        return BeamSearchParams(beam_width=n, max_tokens=num_output, ignore_eos=True)
    return SamplingParams(n=n, max_tokens=num_output, ignore_eos=True, seed=seed, detokenize=False)


def _params(arrival: Arrival, seed: int | None) -> SamplingParams | BeamSearchParams:
    """The seed is the channel by which `TokenSource` know whose tokens they are asked for."""
    return _made(arrival.num_output, arrival.n, arrival.beams, seed)


def simulate(
    setup: SimConfig,
    arrivals: Iterable[Arrival],
    *,
    until_s: float = float("inf"),
    interval_s: float = 1.0,
    token_source: TokenSource | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Records:
    """Run a trace to its end, or to a time; what is running then is left out and counted as unfinished.

    interval_s   between two looks at the memory, at first
    progress   called with arrivals so far and the time of the last, now and then
    """
    records = Records()
    replicas = [
        Replica(setup, records, token_source=token_source, interval_s=interval_s) for _ in range(setup.num_replicas)
    ]
    with ExitStack() as stack:
        for replica in replicas:
            stack.enter_context(replica.engine.gc_pause)
        for index, arrival in enumerate(arrivals):
            if arrival.time_s >= until_s:
                break
            for replica in replicas:
                replica.run_until(arrival.time_s)
            min(replicas, key=lambda r: r.num_requests).offer(index, arrival)
            if progress is not None and index % 256 == 0:
                progress(index, arrival.time_s)
        for replica in replicas:
            replica.run_until(until_s)
    records.num_steps = sum(r.scheduler.num_steps for r in replicas)
    records.busy_s = sum(r.executor.busy_s for r in replicas)
    records.end_s = max(r.clock.now for r in replicas)
    records.num_unfinished = sum(r.num_requests for r in replicas)
    if len(records) > MANY:  # an engine and its listeners hold each other, and experiments make hundreds of engines
        del replica, replicas
        gc.collect()
    return records
