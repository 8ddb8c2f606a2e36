"""Capacity planning: the cheapest machines that serve a trace within an SLO, and their margin, found by simulation.

For each device and tensor parallel size, the number of replicas is bisected with the engine's defaults. Then each
variant of the settings is tried with one replica fewer, and so on. Nothing is extrapolated: every candidate simulates
the whole trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.config import EngineArgs
from octavo.errors import MemoryBudgetError, ParameterError
from octavo.simulate.devices import DEVICES, Device
from octavo.simulate.models import ModelShape
from octavo.simulate.report import SLO, summary
from octavo.simulate.simulation import SimConfig, simulate
from octavo.simulate.traces import Arrival

NUMBERS_OF_DEVICES = (1, 2, 4, 8)
"""Tensor parallel sizes of a replica, tried up to `max_devices` where they can share the model."""
VARIANTS: tuple[dict[str, Any], ...] = (
    {"max_num_seqs": 512},
    {"max_num_seqs": 128},
    {"max_num_batched_tokens": 2048},
    {"max_num_batched_tokens": 16384},
    {"block_size": 32},
)
"""Settings tried besides the engine's defaults, one at a time."""
MAX_MARGIN = 4.0
"""The margin is searched up to this multiple of the load."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A simulated deployment. `kept` is the share of requests that met the SLO; refused requests count as not met."""

    device: Device
    num_devices: int
    num_replicas: int
    settings: dict[str, Any]
    kept: float
    report: dict[str, Any] = field(repr=False)
    price: float = 0.0
    num_blocks: int = 0

    @property
    def num_gpus(self) -> int:
        return self.num_devices * self.num_replicas

    @property
    def sort_key(self) -> tuple[float, float, float]:
        """Cheapest first; without prices the fewest GPUs, then the least memory; then the best share within the SLO."""
        return (self.price or self.num_gpus, self.num_gpus * self.device.memory_bytes, -self.kept)

    def is_faster_than(self, other: Deployment) -> bool:
        """True if more requests meet the SLO, or latencies are at least 5 % lower."""
        if self.kept > other.kept + 0.01 or not other.report["num_requests"]:
            return True
        names = "ttft_s", "tpot_s", "latency_s"
        return any(self.report[name]["p50"] < 0.95 * other.report[name]["p50"] for name in names)

    def as_dict(self) -> dict[str, Any]:
        return {
            "gpu": self.device.name,
            "num_gpus": self.num_gpus,
            "tensor_parallel_size": self.num_devices,
            "replicas": self.num_replicas,
            "settings": self.settings,
            "slo_kept": self.kept,
            "price": self.price or None,
            "num_blocks": self.num_blocks,
            "ttft_s": self.report.get("ttft_s"),
            "tpot_s": self.report.get("tpot_s"),
        }


@dataclass(frozen=True, slots=True)
class PlannerResult:
    """best        None: no deployment within the maximum number of GPUs meets the SLO
    margin      multiple of the load that `best` sustains
    tried       all deployments, those that meet the SLO first"""

    best: Deployment | None
    margin: float
    tried: list[Deployment]


class Planner:
    """The search. `share` of the requests must meet the SLO; `prices` are per device and hour."""

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
        max_devices: int = 1,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.model, self.arrivals, self.slo, self.share = model, arrivals, slo, share
        self.devices = [d for d in devices if prices is None or d.name in prices]
        self.prices = prices or {}
        self.settings = dict(settings or {})
        self.max_gpus = max_gpus
        self.max_devices = max_devices
        self.progress = progress
        self.tried: list[Deployment] = []

    def search(self) -> PlannerResult:
        for device in self.devices:
            for num_devices in NUMBERS_OF_DEVICES:
                if num_devices <= self.max_devices and self._can_share(num_devices):
                    self._search(device, num_devices)
        self.tried.sort(key=lambda c: (0.0, *c.sort_key) if self._meets_slo(c) else (1.0, -c.kept, *c.sort_key[:2]))
        best = next((c for c in self.tried if self._meets_slo(c)), None)
        return PlannerResult(best, self._margin(best) if best is not None else 0.0, self.tried)

    def _can_share(self, num_devices: int) -> bool:
        try:
            self.model.of_rank(num_devices)
        except ParameterError:
            return False
        return True

    def _meets_slo(self, candidate: Deployment) -> bool:
        return candidate.kept >= self.share

    def _max_replicas(self, device: Device, num_devices: int) -> int:
        """Replicas beyond which a cheaper deployment is known already."""
        each = self.prices.get(device.name, 0.0) * num_devices or num_devices
        best = min((c.sort_key[0] for c in self.tried if self._meets_slo(c)), default=float("inf"))
        return int(min(self.max_gpus // num_devices, best // each))

    def _search(self, device: Device, num_devices: int) -> None:
        """The fewest replicas: doubled until the SLO is met, then bisected, then reduced with other settings."""
        max_replicas = self._max_replicas(device, num_devices)
        low, high = 0, 1
        while high <= max_replicas and (deployment := self._try(device, num_devices, high, self.settings)) is not None:
            if self._meets_slo(deployment):
                break
            if low and not deployment.is_faster_than(self.tried[-2]):
                return  # more replicas do not help: single steps are too slow
            low, high = high, 2 * high
        else:
            high = max_replicas + 1
        while high - low > 1:
            middle = (low + high) // 2
            deployment = self._try(device, num_devices, middle, self.settings)
            if deployment is None:
                return
            low, high = (low, middle) if self._meets_slo(deployment) else (middle, high)
        fewer = min(high - 1, max_replicas)
        while fewer >= 1 and self._try_variants(device, num_devices, fewer):
            fewer -= 1

    def _try_variants(self, device: Device, num_devices: int, num_replicas: int) -> bool:
        """True if a variant of the settings meets the SLO with this number of replicas."""
        kept = False
        for variant in VARIANTS:
            if not set(variant) & set(self.settings):
                deployment = self._try(device, num_devices, num_replicas, self.settings | variant)
                kept = kept or (deployment is not None and self._meets_slo(deployment))
        return kept

    def _try(self, device: Device, num_devices: int, num_replicas: int, settings: dict[str, Any]) -> Deployment | None:
        """Simulate a deployment; None if the model does not fit."""
        price = self.prices.get(device.name, 0.0) * num_devices * num_replicas
        config = SimConfig(self.model, device, EngineArgs(model=self.model.name, **settings), num_devices, num_replicas)
        self.progress(f"{num_replicas} x {num_devices} {device.name}")
        try:
            num_blocks, report = config.num_blocks(), self._run(config, 1.0)
        except MemoryBudgetError:
            return None
        found = Deployment(device, num_devices, num_replicas, settings, report["kept"], report, price, num_blocks)
        self.tried.append(found)
        return self.tried[-1]

    def _run(self, config: SimConfig, load: float) -> dict[str, Any]:
        arrivals = (a._replace(time_s=a.time_s / load) for a in self.arrivals) if load != 1 else self.arrivals
        records = simulate(config, arrivals, interval_s=1e9)
        report = summary(records, self.slo)
        return report | {"kept": report.get("slo_kept", 0.0) * len(records) / len(self.arrivals)}

    def _margin(self, best: Deployment) -> float:
        args = EngineArgs(model=self.model.name, **best.settings)
        config = SimConfig(self.model, best.device, args, best.num_devices, best.num_replicas)
        low, high = 1.0, MAX_MARGIN
        for _ in range(6):
            middle = (low * high) ** 0.5
            self.progress(f"the margin: {middle:.2f} times the load")
            kept = self._run(replace(config), middle)["kept"]
            low, high = (middle, high) if kept >= self.share else (low, middle)
        return low
