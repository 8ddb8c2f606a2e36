"""The flight recorder: what an engine was given becomes a trace, and the trace a simulation of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.config import EngineArgs
from octavo.core.sampling_params import SamplingParams
from octavo.simulate.cost import DEVICES, LinearCost
from octavo.simulate.models import MODELS
from octavo.simulate.simulation import Records, Replica, Setup, simulate
from octavo.simulate.traces import Arrival, Lengths, chat, poisson, read_trace
from octavo.view.flight import FlightRecorder

COST = LinearCost(0.05, 1e-5, 1e-5)


def setup(**options: Any) -> Setup:
    defaults = {"block_size": 4, "num_gpu_blocks_override": 120, "decode_window": 1, "preemption_mode": "recompute"}
    return Setup(MODELS["opt-13b"], DEVICES["h100"], EngineArgs(model="x", **(defaults | options)), cost=COST)


def flown(arrivals: list[Arrival], path: Path, **options: Any) -> tuple[Records, int]:
    """What came of it, and how many arrivals were recorded."""
    records = Records()
    replica = Replica(setup(**options), records, sample_s=1e9)
    recorder = FlightRecorder(replica.scheduler, clock=replica.clock)
    for i, arrival in enumerate(arrivals):
        replica.run_until(arrival.time_s)
        replica.offer(i, arrival)
    replica.run_until(float("inf"))
    return records, recorder.dump(path)


def rounds(num: int) -> list[Arrival]:
    lengths = Lengths("short", np.full(num, 9), np.arange(num) % 13 + 1)
    return list(chat(lengths, poisson(3.0), new_chance=0.2, max_prompt=90, max_output=40))


def test_a_flight_is_simulated_again(tmp_path: Path) -> None:
    """The same lengths, the same sharing of prompts, and nearly the same times: half a step is where they differ."""
    arrivals = rounds(80)
    records, num = flown(arrivals, tmp_path / "f.jsonl")
    again = list(read_trace(tmp_path / "f.jsonl"))
    assert num == len(again) == 80
    assert [a.num_prompt for a in again] == [a.num_prompt for a in arrivals]
    assert [a.num_output for a in again] == [a.num_output for a in arrivals]
    simulated = simulate(setup(), again, sample_s=1e9)
    assert len(simulated) == len(records) == 80
    span = [max(r.finished_s) - min(r.arrived_s) for r in (records, simulated)]
    assert span[1] == pytest.approx(span[0], abs=0.5)
    hits = [sum(r.num_cached) for r in (records, simulated)]
    assert hits[0] > 500
    # Blocks that a prompt shares with an answer's middle are not told apart by their names alone; prompts' own are.
    assert 0.5 * hits[0] < hits[1] <= hits[0] * 1.02


def test_other_settings_are_tried_on_it(tmp_path: Path) -> None:
    """With twice the memory, nobody would have been preempted."""
    records, _ = flown(rounds(80), tmp_path / "f.jsonl", num_gpu_blocks_override=48)
    assert records.num_preempted["recompute"] > 0
    again = list(read_trace(tmp_path / "f.jsonl"))
    assert not simulate(setup(num_gpu_blocks_override=400), again).num_preempted
    assert simulate(setup(num_gpu_blocks_override=48), again).num_preempted["recompute"] > 0


def test_there_is_no_text_in_it_and_keys_differ(tmp_path: Path) -> None:
    names = []
    for number in range(2):
        flown(rounds(3), tmp_path / f"{number}.jsonl")
        rows = [json.loads(line) for line in (tmp_path / f"{number}.jsonl").read_text().splitlines()]
        assert set(rows[0]) == {"timestamp", "input_length", "output_length", "hash_ids", "hash_tokens", "n"}
        assert all(len(row["hash_ids"]) == -(-row["input_length"] // 4) for row in rows)
        names.append({h for row in rows for h in row["hash_ids"]})
    assert not names[0] & names[1], "who has the file cannot try out prompts"


def test_old_arrivals_are_forgotten_and_what_runs_is_kept(tmp_path: Path) -> None:
    replica = Replica(setup(), Records(), sample_s=1e9)
    recorder = FlightRecorder(replica.scheduler, keep_s=10.0, clock=replica.clock)
    for i, (time_s, num_output) in enumerate(((0.0, 2), (1.0, 60), (20.0, 2))):
        replica.run_until(time_s)
        replica.offer(i, Arrival(time_s, ((5 + i, 6),), num_output, n=1 + (i == 1)))
    replica.run_until(20.2)
    assert len(recorder) == recorder.dump(tmp_path / "f.jsonl") == 1
    replica.offer(3, Arrival(21.0, ((9, 6),), 50, n=2))
    replica.run_until(22.0)
    assert recorder.dump(tmp_path / "f.jsonl") == 2
    last = json.loads((tmp_path / "f.jsonl").read_text().splitlines()[-1])
    assert last["n"] == 2 and 10 < last["output_length"] < 30, "as far as it is"
    recorder.detach()
    replica.engine.add("late", [1, 2], SamplingParams(max_tokens=2))
    assert len(recorder) == 2


def test_an_abort_counts_as_far_as_it_came(tmp_path: Path) -> None:
    replica = Replica(setup(), Records(), sample_s=1e9)
    recorder = FlightRecorder(replica.scheduler, clock=replica.clock)
    replica.offer(0, Arrival(0.0, ((5, 6),), 60))
    replica.run_until(0.5)
    replica.engine.abort("0")
    recorder.dump(tmp_path / "f.jsonl")
    row = json.loads((tmp_path / "f.jsonl").read_text())
    assert 5 <= row["output_length"] <= 10
