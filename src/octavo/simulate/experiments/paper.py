"""Common parts of the paper's experiments (SOSP'23, section 6.1)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from octavo.config import EngineArgs
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import StepPlan
from octavo.errors import ParameterError, naming_file
from octavo.simulate import traces
from octavo.simulate.allocators import BatchCache, ContiguousCache, Estimate, maximum, oracle, pow2
from octavo.simulate.cost import CostModel, LinearCost, collectives
from octavo.simulate.devices import DEVICES, Device
from octavo.simulate.executor import TokenSource
from octavo.simulate.models import MODELS, ModelShape
from octavo.simulate.plot import Chart, Line, svg
from octavo.simulate.report import latency
from octavo.simulate.simulation import PoolSample, Records, SimConfig, paged, simulate
from octavo.simulate.traces import Arrival, Lengths

OURS, ORACLE, POW2, MAX, FT = "Octavo", "Orca (Oracle)", "Orca (Pow2)", "Orca (Max)", "FasterTransformer"
ORCAS: dict[str, Estimate] = {ORACLE: oracle, POW2: pow2, MAX: maximum}
KNEE_S, TOP_S = 0.5, 1.0
"""Seconds per output token at which throughputs are compared, and the top of the paper's plots."""
BRACKET = 1.2
"""A knee is looked for between a guess divided and multiplied by this number."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a figure's table: the paper's number or range, None if it has none, and the simulated one."""

    system: str
    metric: str
    paper: float | tuple[float, float] | None
    ours: float

    def difference(self) -> str:
        """In points if both are percentages, else in per cent of the paper's number; or where in its range."""
        if self.paper is None:
            return ""
        if isinstance(self.paper, tuple):
            low, high = self.paper
            return "below" if self.ours < low else "above" if self.ours > high else "within"
        if self.metric.endswith("%"):
            return f"{self.ours - self.paper:+.1f}"
        return f"{self.ours / self.paper - 1:+.0%}" if self.paper else ""


@dataclass(slots=True)
class Figure:
    """A reproduced figure of the paper. `notes` list the differences from the original experiment."""

    name: str
    title: str
    setup: dict[str, Any]
    rows: list[Entry] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, system: str, metric: str, ours: float, paper: float | tuple[float, float] | None = None) -> None:
        self.rows.append(Entry(system, metric, paper, ours))

    def as_dict(self) -> dict[str, Any]:
        rows = [{"system": r.system, "metric": r.metric, "paper": r.paper, "ours": round(r.ours, 4)} for r in self.rows]
        return {"figure": self.name, "setup": self.setup, "rows": rows, "notes": self.notes}

    def write(self, folder: Path) -> list[Path]:
        """Write NAME.json and NAME.svg; returns the paths."""
        files = {"json": json.dumps(self.as_dict(), indent=1, ensure_ascii=False) + "\n"}
        if self.charts:
            files["svg"] = svg(self.charts)
        folder.mkdir(parents=True, exist_ok=True)
        for kind, text in files.items():
            with naming_file(path := folder / f"{self.name}.{kind}"):
                path.write_text(text)
        return [folder / f"{self.name}.{kind}" for kind in files]

    def lines(self) -> list[str]:
        """The figure as a text table."""
        table = [("system", "", "paper", "ours", "")]
        table += [(r.system, r.metric, _text(r.paper), f"{r.ours:.4g}", r.difference()) for r in self.rows]
        widths = [max(len(row[i]) for row in table) for i in range(5)]
        text_lines = []
        for row in table:
            texts = [cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False)]
            numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
            text_lines.append("  ".join(texts + numbers).rstrip())
        about = [f"{key}: {value}" for key, value in self.setup.items()]
        return [f"{self.name}  {self.title}", *about, "", *text_lines, *(f"note: {note}" for note in self.notes)]


def _text(number: float | tuple[float, float] | None) -> str:
    if isinstance(number, tuple):
        return f"{number[0]:.4g} to {number[1]:.4g}"
    return "-" if number is None else f"{number:.4g}"


@dataclass(frozen=True, slots=True)
class Server:
    """A row of the paper's table 1: a model on its GPUs, and the KV slots left there."""

    model: ModelShape
    device: Device
    num_devices: int
    num_slots: int
    batch_sizes: tuple[int, int]
    """FasterTransformer's batch sizes, for ShareGPT and for Alpaca."""


OPT_13B = Server(replace(MODELS["opt-13b"], num_params=13_000_000_000), DEVICES["a100-40"], 1, 15_728, (5, 14))
OPT_66B = Server(replace(MODELS["opt-66b"], num_params=66_000_000_000), DEVICES["a100-40"], 4, 9_696, (2, 8))
OPT_175B = Server(replace(MODELS["opt-175b"], num_params=173_000_000_000), DEVICES["a100-80"], 8, 60_096, (24, 80))
LLAMA_13B = replace(OPT_13B, model=replace(MODELS["llama-13b"], num_params=13_000_000_000))

SEQUENCE_S = 0.1e-3
"""Host time per sequence of a step in 2023: sampling and returning its token."""
SLOW_SEQUENCE_S = 0.3e-3
"""The same where a figure tries whether it explains a difference. It is fitted to figure 13: with it, Octavo runs about
as many of Alpaca's requests at a time as the paper's system."""
PASS_SHARE, PROMPT_SHARE, KV_SHARE = 0.5, 0.7, 0.88
"""Shares of a GPU's peak: of the bandwidth by weights, including the host's work between two steps; of the operations
by prefill, whose matrix products are large; of the bandwidth by K and V."""

COPY_S = 3.3e-6
"""Time to launch a copy between device and host: the 40,960 copies of figure 19 then take its 135 ms."""
LINK = 25e9
"""Bytes per second of PCIe 4.0, reached."""


def era_cost(server: Server, *, share: float = PASS_SHARE, sequence_s: float = SEQUENCE_S) -> LinearCost:
    """Step times of 2023: the GPUs' peaks and the three shares above.

    A forward pass reads the weights, and a prefill token takes 2 operations per parameter: 33 ms and 0.12 ms for
    OPT-13B. The former is the assumption that affects the knees most, and their ratios less: figure 12 includes other
    shares. Several GPUs are the engine's tensor parallel ranks: each has its own share of weights, operations, K and V,
    and they add its collectives; the row of logits of a prompt is left out.
    """
    own, device = server.model.of_rank(server.num_devices), server.device
    each = collectives(own, device, server.num_devices)
    bandwidth, kv = device.bandwidth, own.kv_cache(16)
    return LinearCost(
        pass_s=own.weight_bytes / (bandwidth * share) + each.pass_s,
        new_s=2 * own.num_params / (device.flops * PROMPT_SHARE) + each.token_s,
        decode_s=sequence_s + each.token_s + each.row_s,
        kv_s=kv.bytes_per_token / (bandwidth * KV_SHARE),
        copy_s=2 * kv.bytes_per_block / (bandwidth * KV_SHARE),
        move_s=move_s(server, 16, num_copies=2 * server.model.num_layers),
    )


def move_s(server: Server, block_size: int, num_copies: int) -> float:
    """Time to move a block to the host or back. In the artifact K and V of each layer are separate, which takes many
    copies."""
    own = server.model.of_rank(server.num_devices)
    return num_copies * COPY_S + own.kv_cache(block_size).bytes_per_block / LINK


class PaddedCost:
    """FasterTransformer's cost: every prompt of a batch is padded to the longest, and all run until the last is
    done."""

    host_s = host_slice_s = host_chunk_s = move_s = 0.0

    def __init__(self, cost: LinearCost) -> None:
        self.cost = cost
        self._num_rows = 0

    def step_s(self, plan: StepPlan) -> float:
        cost = self.cost
        if plan.host_tokens:
            self._num_rows = len(plan.rows)
            padded = self._num_rows * max(plan.counts)
            return cost.pass_s + cost.new_s * padded + cost.kv_s * padded
        return cost.pass_s + self._num_rows * (cost.decode_s + cost.kv_s * (max(plan.starts) + 1))


@dataclass(frozen=True, slots=True)
class Paper:
    """Settings of the experiments.

    lengths_file   real lengths of ShareGPT, as an .npz file; None: drawn from the percentiles in the code
    time           multiplies the seconds of each trace: 1 for the published results, less for a quick look
    progress       told how many simulations of a figure are done
    pool           processes for the simulations; None: this one
    """

    lengths_file: Path | None = None
    time: float = 1.0
    seed: int = 0
    progress: Callable[[str], None] | None = None
    pool: Executor | None = None

    def each(self, job: Callable[..., T], cases: Iterable[tuple[Any, ...]]) -> list[T]:
        """`job(paper, *case)` for each case. The results are in the order of the cases, whichever is done first."""
        plain, cases = Paper(self.lengths_file, self.time, self.seed), list(cases)
        if self.pool is None:
            return [job(plain, *case) for case in cases]
        futures = [self.pool.submit(job, plain, *case) for case in cases]
        for i, _ in enumerate(as_completed(futures)):
            if self.progress is not None:
                self.progress(f"{i + 1} of {len(futures)} simulations")
        return [future.result() for future in futures]

    def sharegpt(self, num: int, seed: int | None = None) -> Lengths:
        seed = self.seed if seed is None else seed
        if self.lengths_file is None:
            return traces.sharegpt_like(num, seed)
        every = Lengths("sharegpt", *traces.load_lengths(self.lengths_file)).below(2048)
        chosen = np.random.default_rng([seed, 5]).integers(len(every.prompts), size=num)
        return Lengths("sharegpt", every.prompts[chosen], every.outputs[chosen])

    def about(self, server: Server, cost: LinearCost, **more: Any) -> dict[str, Any]:
        """The header of a figure's table: everything that its numbers depend on."""
        where = f"{server.num_devices} x {server.device.name}, {server.num_slots:,} slots of KV"
        step = f"{cost.pass_s * 1e3:.1f} ms + {cost.new_s * 1e3:.3f} ms a prompt token + {cost.decode_s * 1e3:.2f} ms "
        step += f"a sequence + {cost.kv_s * 1e6:.2f} us a token of context"
        setup: dict[str, Any] = {"server": f"{server.model.name} on {where}", "step": step}
        setup["lengths"] = "generated with ShareGPT's percentiles" if self.lengths_file is None else "ShareGPT's"
        return {**setup, "seed": self.seed, **more}


def config_for(
    system: str,
    server: Server,
    cost: CostModel,
    *,
    block_size: int = 16,
    alpaca: bool = False,
    prefixes: bool = False,
    swap: bool = False,
) -> SimConfig:
    """One of the five systems on a server, with the options of the paper's artifact: 2,560 tokens and 2,048 sequences
    per step, no overlap of steps, and for Octavo 1 % of the blocks kept free on admission."""
    num_blocks = server.num_slots // block_size
    args = EngineArgs(
        model=server.model.name,
        block_size=block_size,
        num_gpu_blocks_override=num_blocks,
        max_num_batched_tokens=1 << 20 if system == FT else 2560,
        max_num_seqs=2048,
        enable_prefix_caching=prefixes and system == OURS,
        watermark=0.01 if system == OURS else 0.0,
        decode_window=1,
        async_scheduling=False,
        swap_space=20.0,
        preemption_mode="swap" if swap else "recompute",
    )
    make: Callable[[SimConfig, int, int], KVCacheManager] = paged
    if system in ORCAS:
        make = partial(_baseline_cache, ContiguousCache, estimate=ORCAS[system], max_len=server.model.max_len)
    elif system == FT:
        make = partial(_baseline_cache, BatchCache, batch_size=server.batch_sizes[alpaca], max_len=server.model.max_len)
        assert isinstance(cost, LinearCost)
        cost = PaddedCost(cost)
    return SimConfig(server.model, server.device, args, server.num_devices, cost=cost, make_cache=make)


def _baseline_cache(
    kind: type[ContiguousCache], config: SimConfig, num_blocks: int, num_host_blocks: int, **options: Any
) -> KVCacheManager:
    return kind(num_blocks, config.args.block_size, num_rows=config.args.max_num_seqs or 0, **options)


def poisson_trace(
    lengths: Lengths, rate: float, duration_s: float, *, seed: int = 0, n: int = 1, beams: bool = False, prefix: int = 0
) -> Iterator[Arrival]:
    arrivals = traces.from_lengths(lengths, traces.poisson(rate, seed), n=n, beams=beams, prefix=prefix)
    return traces.first_seconds(arrivals, duration_s)


def latency_at(config: SimConfig, arrivals: Iterable[Arrival], tokens: TokenSource | None = None) -> float:
    """Normalised latency: mean seconds per output token over all requests, including those finished after the trace's
    end; of several samples, per token of one. A run ends as soon as the mean is known to exceed `TOP_S`, because the
    rest of an overload takes long to simulate and is above every plot."""
    every = list(arrivals)

    def mean(records: Records) -> float:
        total = latency(records) / records.column("num_output")
        return float(total.sum()) * every[0].n / len(every) if every else 0.0

    return mean(simulate(config, every, token_source=tokens, interval_s=1e9, is_enough=lambda r: mean(r) > TOP_S))


@dataclass(frozen=True, slots=True)
class Curve:
    """Latencies at rising rates, and the knee between them."""

    knee: float
    rates: list[float]
    latencies: list[float]

    def line(self, name: str) -> Line:
        return Line(name, self.rates, self.latencies)


def curve(latency: Callable[[float], float], guess: float, *, steps: int = 3) -> Curve:
    """The curve around the knee that `knee` finds from a guess, with all rates that it tried and two low ones."""
    asked: dict[float, float] = {}

    def ask(rate: float) -> float:
        if rate not in asked:
            asked[rate] = latency(rate)
        return asked[rate]

    found = knee(ask, guess / BRACKET, guess * BRACKET, steps=steps)
    for share in (0.4, 0.7):
        ask(found * share)
    return Curve(found, sorted(asked), [asked[rate] for rate in sorted(asked)])


def knee(latency: Callable[[float], float], low: float, high: float, *, steps: int) -> float:
    """The rate at which the latency is `KNEE_S`: bisected on a logarithmic scale, at last interpolated. `low` and
    `high` move if needed."""
    factor, below, above = high / low, latency(low), latency(high)
    while above < KNEE_S:
        low, high, below, above = high, high * factor, above, latency(high * factor)
        factor *= factor
    while below > KNEE_S:
        low, high, below, above = low / factor, low, latency(low / factor), below
        factor *= factor
    for _ in range(steps):
        middle = float(np.sqrt(low * high))
        if (seconds := latency(middle)) < KNEE_S:
            low, below = middle, seconds
        else:
            high, above = middle, seconds
    below = max(below, 1e-6)
    share = math.log(KNEE_S / below) / math.log(above / below)
    return float(low * (high / low) ** share)


def within(records: Records, begin_s: float, end_s: float) -> list[PoolSample]:
    """The samples of these seconds in which blocks are in use. ParameterError if there is none."""
    samples = [s for s in records.samples if begin_s <= s.time_s <= end_s and s.num_used]
    if not samples:
        raise ParameterError(
            f"nothing runs between seconds {begin_s:g} and {end_s:g}; pass a larger --time", param="time"
        )
    return samples
