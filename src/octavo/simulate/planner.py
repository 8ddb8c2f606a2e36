"""Which machines, and how many, serve a trace within an SLO: the cheapest answer that simulation finds, and its margin.

For every device and number of devices that share a model, the number of replicas is bisected with the engine's own
defaults; then each other setting is tried with one fewer, and so on. Nothing is extrapolated: every candidate runs the
whole trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.config import EngineArgs
from octavo.errors import MemoryBudgetError
from octavo.simulate.cost import DEVICES, Device
from octavo.simulate.models import ModelShape
from octavo.simulate.report import SLO, summary
from octavo.simulate.simulation import SimConfig, simulate
from octavo.simulate.traces import Arrival

NUMBERS_OF_DEVICES = (1, 2, 4, 8)
VARIANTS: tuple[dict[str, Any], ...] = (
    {"max_num_seqs": 512},
    {"max_num_seqs": 128},
    {"max_num_batched_tokens": 2048},
    {"max_num_batched_tokens": 16384},
    {"decode_window": 1},
    {"block_size": 32},
)
"""What is tried beside the engine's defaults, one at a time."""
MAX_MARGIN = 4.0
"""A margin is not looked for beyond so many times the load."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """Something that was tried. `kept` is the share of requests that kept the SLO, refused ones not among them."""

    device: Device
    num_devices: int
    num_replicas: int
    settings: dict[str, Any]
    kept: float
    told: dict[str, Any] = field(repr=False)
    price: float = 0.0

    @property
    def num_gpus(self) -> int:
        return self.num_devices * self.num_replicas

    @property
    def order(self) -> tuple[float, float, float]:
        """Cheapest first; without prices the fewest GPUs, then the least memory; then who keeps the SLO best."""
        return (self.price or self.num_gpus, self.num_gpus * self.device.memory_bytes, -self.kept)

    def as_dict(self) -> dict[str, Any]:
        return {
            "gpu": self.device.name,
            "num_gpus": self.num_gpus,
            "tensor_parallel_size": self.num_devices,
            "replicas": self.num_replicas,
            "settings": self.settings,
            "slo_kept": self.kept,
            "price": self.price or None,
            "ttft_s": self.told.get("ttft_s"),
            "tpot_s": self.told.get("tpot_s"),
        }


@dataclass(frozen=True, slots=True)
class PlannerResult:
    """best     None: nothing within the number of GPUs keeps the SLO
    margin      how many times the load `best` bears
    tried       all candidates, those that keep the SLO first
    """

    best: Deployment | None
    margin: float
    tried: list[Deployment]


class Planner:
    """A search. `share` of the requests must keep the SLO; `prices` are of a device for an hour."""

    def __init__(
        self,
        model: ModelShape,
        arrivals: Sequence[Arrival],
        slo: SLO,
        *,
        share: float = 0.95,
        devices: Iterable[Device] = DEVICES.values(),
        prices: Mapping[str, float] | None = None,
        settings: Mapping[str, Any] | None = None,
        max_gpus: int = 64,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.model, self.arrivals, self.slo, self.share = model, arrivals, slo, share
        self.devices = [d for d in devices if prices is None or d.name in prices]
        self.prices = prices or {}
        self.settings = dict(settings or {})
        self.max_gpus = max_gpus
        self.progress = progress
        self.tried: list[Deployment] = []

    def search(self) -> PlannerResult:
        for device in self.devices:
            for num_devices in NUMBERS_OF_DEVICES:
                if self.model.num_heads % num_devices == 0:
                    self._search(device, num_devices)
        self.tried.sort(key=lambda c: (0.0, *c.order) if self._keeps(c) else (1.0, -c.kept, *c.order[:2]))
        best = next((c for c in self.tried if self._keeps(c)), None)
        return PlannerResult(best, self._margin(best) if best is not None else 0.0, self.tried)

    def _keeps(self, candidate: Deployment) -> bool:
        return candidate.kept >= self.share

    def _most(self, device: Device, num_devices: int) -> int:
        """Replicas beyond which there is an answer already that costs less."""
        each = self.prices.get(device.name, 0.0) * num_devices or num_devices
        best = min((c.order[0] for c in self.tried if self._keeps(c)), default=float("inf"))
        return int(min(self.max_gpus // num_devices, best // each))

    def _search(self, device: Device, num_devices: int) -> None:
        """The fewest replicas: doubled until they do, then bisected, then fewer with other settings."""
        most = self._most(device, num_devices)
        low, high = 0, 1
        while high <= most and (found := self._try(device, num_devices, high, self.settings)) is not None:
            if self._keeps(found):
                break
            if low and found.kept <= self.tried[-2].kept + 0.01 and found.kept < self.share / 2:
                return  # more replicas do not help: it is each step that takes too long
            low, high = high, 2 * high
        else:
            high = most + 1
        while high - low > 1:
            middle = (low + high) // 2
            found = self._try(device, num_devices, middle, self.settings)
            if found is None:
                return
            low, high = (low, middle) if self._keeps(found) else (middle, high)
        fewer = min(high - 1, most)
        while fewer >= 1 and self._with_other_settings(device, num_devices, fewer):
            fewer -= 1

    def _with_other_settings(self, device: Device, num_devices: int, num_replicas: int) -> bool:
        """Whether one of them keeps the SLO with so many."""
        kept = False
        for variant in VARIANTS:
            if not set(variant) & set(self.settings):
                found = self._try(device, num_devices, num_replicas, self.settings | variant)
                kept = kept or (found is not None and self._keeps(found))
        return kept

    def _try(self, device: Device, num_devices: int, num_replicas: int, settings: dict[str, Any]) -> Deployment | None:
        """None where the model does not fit."""
        price = self.prices.get(device.name, 0.0) * num_devices * num_replicas
        setup = SimConfig(self.model, device, EngineArgs(model=self.model.name, **settings), num_devices, num_replicas)
        self.progress(f"{num_replicas} x {num_devices} {device.name}")
        try:
            told = self._run(setup, 1.0)
        except MemoryBudgetError:
            return None
        self.tried.append(Deployment(device, num_devices, num_replicas, settings, told["kept"], told, price))
        return self.tried[-1]

    def _run(self, setup: SimConfig, load: float) -> dict[str, Any]:
        arrivals = (a._replace(time_s=a.time_s / load) for a in self.arrivals) if load != 1 else self.arrivals
        records = simulate(setup, arrivals, interval_s=1e9)
        told = summary(records, self.slo)
        return told | {"kept": told.get("slo_kept", 0.0) * len(records) / len(self.arrivals)}

    def _margin(self, best: Deployment) -> float:
        args = EngineArgs(model=self.model.name, **best.settings)
        setup = SimConfig(self.model, best.device, args, best.num_devices, best.num_replicas)
        low, high = 1.0, MAX_MARGIN
        for _ in range(6):
            middle = (low * high) ** 0.5
            self.progress(f"the margin: {middle:.2f} times the load")
            kept = self._run(replace(setup), middle)["kept"]
            low, high = (middle, high) if kept >= self.share else (low, middle)
        return low
