"""The named workloads have fixed tokens; the report of a run."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from benchmarks.compare_vllm import table

from octavo.bench import throughput
from octavo.bench.throughput import WORKLOADS, Workload, check_names, measure_latency, measure_throughput, run, uniform
from octavo.errors import ParameterError

VOCAB = 151_936


class Fake:
    engine, model, vocab_size = "fake", "m", VOCAB

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, float, int]] = []

    def generate(self, prompts: list[list[int]], lengths: list[int], temperature: float, n: int) -> int:
        self.asked.append((len(prompts), sum(lengths), temperature, n))
        return n * sum(lengths)


@pytest.mark.parametrize(
    ("name", "num_in", "num_out", "digest"),
    [
        ("mixed256", 142_827, 133_966, "199c6f016a1bff73"),
        ("mixed256_greedy", 143_783, 143_855, "d9bfb1bba372eec5"),
        ("uniform256", 131_072, 32_768, "3084218fea4f0d46"),
        ("shared_prefix_256x2048", 540_672, 16_384, "ecc53c7f732b7672"),
        ("parallel_n4_64x512", 32_768, 8192, "2a99a99e8f23c648"),
    ],
)
def test_a_workload_never_changes(name: str, num_in: int, num_out: int, digest: str) -> None:
    """What was measured once can be compared with as long as the work is the same."""
    prompts, lengths = WORKLOADS[name].make(VOCAB)
    assert (sum(map(len, prompts)), sum(lengths)) == (num_in, num_out)
    assert hashlib.sha256(json.dumps([prompts, lengths]).encode()).hexdigest()[:16] == digest


def test_a_small_vocabulary_bounds_the_tokens() -> None:
    prompts, _ = uniform(4, 100, 1, seed=0).make(50)
    assert 40 < max(map(max, prompts)) <= 49
    assert max(max(p) for p in WORKLOADS["mixed256"].make(VOCAB)[0]) == 10_000


def test_prompts_share_a_prefix_and_no_more() -> None:
    prompts, _ = Workload(3, (5, 5), (1, 1), seed=1, prefix=20).make(VOCAB)
    assert prompts[0][:20] == prompts[1][:20] == prompts[2][:20] and len({tuple(p) for p in prompts}) == 3


def test_report_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 14.0])
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(clock))
    fake = Fake()
    assert run(fake, uniform(2, 30, 10, seed=0, temperature=0.5, n=3), "c") == {
        "engine": "fake",
        "model": "m",
        "case": "c",
        "s": 4.0,
        "out_tokens": 60,
        "in_tokens": 60,
        "out_tok_s": 15.0,
    }
    assert fake.asked == [(2, 20, 0.5, 3)]


def test_time_per_token_is_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def clock() -> float:
        return now

    class Slow(Fake):
        def generate(self, prompts: list[list[int]], lengths: list[int], temperature: float, n: int) -> int:
            nonlocal now
            now += 0.5 + 0.002 * (lengths[0] - 1)
            return sum(lengths)

    monkeypatch.setattr(throughput.time, "perf_counter", clock)
    rows = list(measure_latency(Slow(), batches=(3,)))
    assert [row["case"] for row in rows] == [
        "prefill_bs1_in128",
        "prefill_bs3_in1024",
        "decode_bs3_in1024_out129",
        "tpot_ms_bs3",
    ]
    assert rows[-1]["ms"] == pytest.approx(2.0)


def test_throughput_does_not_report_the_warmup() -> None:
    fake = Fake()
    rows = list(measure_throughput(fake, ["parallel_n4_64x512"]))
    assert [row["case"] for row in rows] == ["parallel_n4_64x512"] and rows[0]["out_tokens"] == 64 * 128 * 4
    assert fake.asked[0] == (8, 128, 0.6, 1)


def test_median_of_several_rounds_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    now, seconds = 0.0, iter([1.0, 9.0, 4.0, 5.0, 3.0])  # the first one warms up

    class Slow(Fake):
        def generate(self, prompts: list[list[int]], lengths: list[int], temperature: float, n: int) -> int:
            nonlocal now
            now += next(seconds)
            asked.append(prompts)
            return sum(lengths)

    asked: list[list[list[int]]] = []
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now)
    monkeypatch.setitem(WORKLOADS, "tiny", uniform(3, 9, 4, seed=1))
    (row,) = measure_throughput(Slow(), ["tiny"], rounds=3)
    assert row["s"] == 5.0, "of 9, 4 and 5"
    assert asked[1] == uniform(3, 9, 4, seed=1).make(VOCAB)[0], "the first round is the workload"
    assert len({prompts[0][0] * 10**6 + prompts[1][0] * 10**3 + prompts[2][0] for prompts in asked[1:]}) == 3


def test_names_of_workloads() -> None:
    assert check_names(["all"]) == list(WORKLOADS) and check_names(["uniform256"]) == ["uniform256"]
    with pytest.raises(ParameterError, match="no workload 'mixed'; there are mixed256"):
        check_names(["mixed"])


def test_it_really_runs(tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With random weights, from a config.json alone."""
    config = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {"num_hidden_layers": 1, "vocab_size": 97, "max_position_embeddings": 128, "rms_norm_eps": 1e-5}
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setitem(WORKLOADS, "tiny", uniform(3, 9, 4, seed=1, n=2))
    throughput.main(str(tmp_path), ["tiny"], as_json=True, load_format="dummy", device="cpu")
    startup, row = map(json.loads, capsys.readouterr().out.splitlines())
    assert startup["startup_s"] > 0 and startup["engine"] == row["engine"] == "octavo"
    assert (row["in_tokens"], row["out_tokens"]) == (27, 24)
    throughput.main(str(tmp_path), ["tiny"], load_format="dummy", device="cpu")
    assert "output tokens/s" in capsys.readouterr().out


def test_two_engines_in_a_table() -> None:
    """Of cases that both have; a ratio is theirs over ours, so above 1 we are faster; less than a second of ours is
    said in milliseconds, of theirs then, too."""

    def row(engine: str, case: str, **numbers: float) -> dict[str, Any]:
        return {"engine": engine, "case": case, **numbers}

    rows = [
        row("octavo", "startup", s=20.0),
        row("octavo", "mixed256, T = 0.6", s=4.0, output_tok_s=1e4),
        row("octavo", "256 sharing", s=0.3),
        row("octavo", "ours alone", s=1.0),
        row("octavo", "per token, batch 1", ms=0.75),
        row("vllm", "per token, batch 1", ms=1.5),
        row("vllm", "startup", s=71.0),
        row("vllm", "256 sharing", s=1.2),
        row("vllm", "mixed256, T = 0.6", s=3.0, output_tok_s=1.3e4),
        row("vllm", "theirs alone", s=1.0),
    ]
    head, *lines = table(rows).splitlines()
    assert head.split() == ["case", "octavo", "vllm", "ratio"]
    assert [(line[:30].strip(), line[30:].split()) for line in lines] == [
        ("startup", ["20.000", "s", "71.000", "s", "3.55"]),
        ("mixed256, T = 0.6", ["4.000", "s", "3.000", "s", "0.75"]),
        ("256 sharing", ["300.000", "ms", "1200.000", "ms", "4.00"]),
        ("per token, batch 1", ["0.750", "ms", "1.500", "ms", "2.00"]),
    ]
    assert len({len(line) for line in (head, *lines)}) == 1
