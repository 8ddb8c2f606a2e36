"""The planner finds the cheapest deployment that meets the SLO by simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.simulate.devices import DEVICES
from octavo.simulate.models import MODELS
from octavo.simulate.planner import Planner
from octavo.simulate.report import SLO
from octavo.simulate.traces import Arrival, from_lengths, poisson, sharegpt_like

MODEL = MODELS["qwen2.5-7b"]


def load(rate: float, num: int = 120) -> list[Arrival]:
    return list(from_lengths(sharegpt_like(num, seed=4), poisson(rate)))


def planner(rate: float, slo: SLO, **options: object) -> Planner:
    return Planner(MODEL, load(rate), slo, **options)  # type: ignore[arg-type]


def test_fewest_gpus_then_least_memory_win() -> None:
    answer = planner(5.0, SLO(1.0, 0.05), devices=[DEVICES["h200"], DEVICES["a100-40"]]).search()
    assert answer.best is not None
    assert (answer.best.num_gpus, answer.best.device.name) == (1, "a100-40")
    assert answer.best.kept >= 0.95 and answer.margin >= 1
    assert answer.tried[0] is answer.best


def test_window_groups_save_a_machine() -> None:
    """Gemma 3 27B with long prompts: an H100 has room for 18 GiB of K and V beside the weights."""
    arrivals = [Arrival(8.0 * i, ((9 + i, 24_000),), 400) for i in range(16)]
    shapes = MODELS["gemma3-27b"], replace(MODELS["gemma3-27b"], windows=(), spec=None)
    settings = {"max_model_len": 32768, "kv_cache_memory_bytes": 18 << 30}
    grouped, alike = (
        Planner(shape, arrivals, SLO(10.0, 0.08), devices=[DEVICES["h100"]], settings=settings).search().best
        for shape in shapes
    )
    assert grouped is not None and alike is not None
    assert grouped.num_gpus < alike.num_gpus


def test_prices_decide_if_given() -> None:
    devices = [DEVICES["a100-40"], DEVICES["h200"]]
    answer = planner(5.0, SLO(1.0, 0.05), devices=devices, prices={"h200": 1.0, "a100-40": 5.0}).search()
    assert answer.best is not None and answer.best.device.name == "h200" and answer.best.price == 1.0
    only = planner(5.0, SLO(1.0, 0.05), devices=devices, prices={"h200": 1.0}).search()
    assert {c.device.name for c in only.tried} == {"h200"}


def test_one_replica_fewer_misses_the_slo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best deployment was also tried with one replica fewer and every variant of the settings."""
    monkeypatch.setattr("octavo.simulate.planner.NUMBERS_OF_DEVICES", (1,))
    answer = planner(250.0, SLO(1.0, 0.1), devices=[DEVICES["l4"]]).search()
    best = answer.best
    assert best is not None
    plain = {c.num_replicas: c.kept >= 0.95 for c in answer.tried if not c.settings}
    fewest = min(n for n, kept in plain.items() if kept)
    assert fewest not in (1, 2, 4, 8), "it is to be bisected"
    assert plain[fewest - 1] is False and not any(kept for n, kept in plain.items() if n < fewest)
    assert best.num_replicas < fewest and best.settings, "here a setting saves a machine"
    fewer = [c for c in answer.tried if c.num_replicas == best.num_replicas - 1 and c.settings]
    assert len(fewer) > 3 and all(c.kept < 0.95 for c in fewer)


def test_unreachable_slo_has_no_best_deployment() -> None:
    answer = planner(5.0, SLO(None, 0.0005), devices=[DEVICES["l4"]], max_gpus=4).search()
    assert answer.best is None and answer.margin == 0 and answer.tried
    assert all(c.num_gpus <= 4 for c in answer.tried)
    kept = [c.kept for c in answer.tried]
    assert kept == sorted(kept, reverse=True)


def test_replicas_are_added_while_they_help() -> None:
    """One and two replicas are overloaded alike, and more are not."""
    fixed = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "decode_window": 8, "block_size": 16}
    slo, devices = SLO(0.5, 0.06), [DEVICES["l4"]]
    answer = planner(150.0, slo, devices=devices, share=0.14, max_gpus=8, settings=fixed).search()
    kept = {c.num_replicas: c.kept for c in answer.tried}
    assert kept[2] <= kept[1] + 0.01 < 0.1
    assert answer.best is not None and answer.best.num_replicas > 2


def test_model_that_does_not_fit_is_not_tried() -> None:
    answer = Planner(
        MODELS["llama-3.1-70b"], load(0.2, 10), SLO(5.0), devices=[DEVICES["h100"]], max_gpus=4, max_devices=4
    ).search()
    assert answer.best is not None and answer.best.num_devices >= 2
    assert all(c.num_devices >= 2 for c in answer.tried)


def test_margin_is_sustained() -> None:
    slo, devices = SLO(0.5, 0.03), [DEVICES["h100"]]
    search = planner(30.0, slo, devices=devices, max_gpus=1)
    answer = search.search()
    assert answer.best is not None and answer.margin > 1
    again = planner(30.0 * answer.margin, slo, devices=devices, max_gpus=1).search()
    assert again.best is not None
