"""What is result of records that are known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import report
from octavo.bench.args import BenchArgs
from octavo.bench.records import Record, Run
from octavo.bench.samples import Sample
from octavo.errors import ParameterError, UnknownOptionError

ASKED = Sample("x", 10, 3)


def run_of(*records: Record, num_samples: int = 0) -> Run:
    return Run("org/name", num_samples or len(records), list(records), begin_s=100.0, end_s=102.0)


def answered(start: float, first: float, *gaps: float, num_output: int | None = None) -> Record:
    times = [100 + start, 100 + start + first]
    last = times[1] + sum(gaps)
    return Record(ASKED, times[0], times[1], last, list(gaps), 10, num_output or 1 + len(gaps), ["a", "b"])


THREE = (
    answered(0.0, 0.100, 0.010, 0.030),
    answered(0.1, 0.300, 0.020, num_output=5),  # four tokens in its second chunk
    answered(1.5, 0.200),
)


def test_figures() -> None:
    result = report.summary(run_of(*THREE), BenchArgs(metric_percentiles="50,99,99.9"))
    assert (result["completed"], result["failed"], result["duration"]) == (3, 0, 2.0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 9)
    assert (result["request_throughput"], result["output_throughput"]) == (1.5, 4.5)
    assert result["total_token_throughput"] == 19.5 and result["request_goodput"] is None
    assert result["mean_ttft_ms"] == pytest.approx(200) and result["median_ttft_ms"] == pytest.approx(200)
    assert result["p99_ttft_ms"] == pytest.approx(298) and result["p99.9_ttft_ms"] == pytest.approx(299.8)
    assert result["std_ttft_ms"] == pytest.approx(81.6497, abs=1e-3)
    # Of (40 ms over two tokens) and (20 ms over four); the third has none after its first.
    assert result["mean_tpot_ms"] == pytest.approx((20 + 5) / 2)
    assert result["mean_itl_ms"] == pytest.approx(20) and result["median_itl_ms"] == pytest.approx(20)
    assert result["mean_e2el_ms"] == pytest.approx((140 + 320 + 200) / 3)
    assert result["max_concurrent_requests"] == 2


@pytest.mark.parametrize(
    ("goodput", "good"),
    [
        (("ttft:250",), 2),
        (("ttft:250 tpot:15",), 1),
        (("ttft:250", "e2el:150"), 1),
        (("tpot:15",), 2),
        (("ttft:99",), 0),
    ],
)
def test_goodput_counts_who_keeps_every_objective(goodput: tuple[str, ...], good: int) -> None:
    args = BenchArgs(goodput=goodput)
    result = report.summary(run_of(*THREE), args)
    assert result["request_goodput"] == good / 2
    assert f"{'Request goodput (req/s):':<40} {good / 2:<10.2f}" in report.lines(result, run_of(*THREE), args)


def test_failures_are_counted_by_reason_and_in_nothing_else() -> None:
    refused = [Record(ASKED, 100.0, error="429 queue_full") for _ in range(2)]
    run = run_of(*refused, Record(ASKED, 100.0, 100.1, 100.2, [0.1], 10, 2, error="cut"), THREE[0], num_samples=6)
    run.interrupted = True
    args = BenchArgs()
    result = report.summary(run, args)
    assert (result["completed"], result["failed"], result["unfinished"]) == (1, 3, 2)
    assert result["failures"] == {"429 queue_full": 2, "cut": 1}
    assert result["total_output_tokens"] == 3 and result["mean_ttft_ms"] == pytest.approx(100)
    lines = report.lines(result, run, args)
    assert lines[-2:] == ["2 failed: 429 queue_full", "1 failed: cut"]
    assert f"{'Unfinished requests:':<40} {2:<10}" in lines


def test_labels_that_scripts_look_for() -> None:
    args = BenchArgs(request_rate=4.0, max_concurrency=7, percentile_metrics="ttft,tpot,itl")
    text = "\n".join(report.lines(report.summary(run_of(*THREE), args), run_of(*THREE), args))
    for label, value in [
        ("Successful requests:", "3"),
        ("Maximum request concurrency:", "7"),
        ("Request rate configured (RPS):", "4.00"),
        ("Benchmark duration (s):", "2.00"),
        ("Request throughput (req/s):", "1.50"),
        ("Output token throughput (tok/s):", "4.50"),
        ("Total token throughput (tok/s):", "19.50"),
        ("Mean TTFT (ms):", "200.00"),
        ("Median TTFT (ms):", "200.00"),
        ("P99 TTFT (ms):", "298.00"),
        ("Mean TPOT (ms):", "12.50"),
        ("P99 ITL (ms):", "29.80"),
    ]:
        assert re.search(rf"^{re.escape(label):<40}", text, re.MULTILINE), label
        assert f"{label:<40} {value:<10}" in text
    assert "E2EL" not in text and "=== Serving Benchmark Result ===" in text


def test_of_nothing_everything_is_nothing() -> None:
    args = BenchArgs()
    result = report.summary(run_of(Record(ASKED, 100.0, error="x")), args)
    assert result["mean_ttft_ms"] == result["p99_itl_ms"] == result["std_tpot_ms"] == result["output_throughput"] == 0
    assert report.lines(result, run_of(), args)


def test_the_file(tmp_path: Path) -> None:
    given: dict[str, Any] = {"save_result": True, "result_dir": str(tmp_path / "new"), "metadata": ["version=0.3"]}
    run = run_of(*THREE)
    args = BenchArgs(**given, max_concurrency=9, label="mine")
    path = report.save(report.summary(run, args), args)
    assert re.fullmatch(r"mine-infqps-concurrency9-name-\d{8}-\d{6}\.json", path.name)
    result = json.loads(path.read_text())
    assert (
        result["version"] == "0.3" and result["request_rate"] == "inf" and result["p99_ttft_ms"] == pytest.approx(298)
    )
    assert not set(report.DETAILS) & set(result)
    args = BenchArgs(**given, save_detailed=True, append_result=True, result_filename="a.json")
    for _ in range(2):
        path = report.save(report.summary(run, args), args)
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["ttfts"] == second["ttfts"] == pytest.approx([0.1, 0.3, 0.2])
    assert first["itls"][0] == pytest.approx([0.01, 0.03]) and first["generated_texts"] == ["ab"] * 3
    assert first["start_times"] == pytest.approx([0.0, 0.1, 1.5]) and first["output_lens"] == [3, 5, 1]


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"request_rate": 0.0}, "request_rate", "above 0, or inf"),
        ({"request_rate": float("nan")}, "request_rate", "above 0, or inf"),
        ({"dataset_name": "sharegpt"}, "dataset_path", "needs a file"),
        ({"dataset_path": "x"}, "dataset_path", "is generated"),
        ({"goodput": ["ttft"]}, "goodput", "ttft:500"),
        ({"goodput": ["itl:5"]}, "goodput", "'itl:5'"),
        ({"goodput": ["ttft:-5"]}, "goodput", "'ttft:-5'"),
        ({"percentile_metrics": "ttft,latency"}, "percentile_metrics", "ttft, tpot, itl, e2el"),
        ({"metric_percentiles": "50,x"}, "metric_percentiles", "such as 50,99"),
        ({"metric_percentiles": "101"}, "metric_percentiles", "such as 50,99"),
        ({"header": ["key"]}, "header", "NAME=VALUE"),
        ({"base_url": "localhost:8000"}, "base_url", "http://localhost:8000"),
        ({"base_url": "http://localhost:99999"}, "base_url", "http://localhost:8000"),
        ({"base_url": "http://localhost:abc"}, "base_url", "http://localhost:8000"),
        ({"base_url": "http://localhost:0"}, "base_url", "http://localhost:8000"),
        ({"base_url": "http://[::1"}, "base_url", "http://localhost:8000"),
        ({"base_url": f"http://{'a' * 70}"}, "base_url", "http://localhost:8000"),
        ({"base_url": "http://localhost/\u4f8b"}, "base_url", "http://localhost:8000"),
        ({"host": "::1"}, "host", "[::1]"),
        ({"num_prompts": 0}, "num_prompts", "from 1"),
        ({"random_range_ratio": 1.0}, "random_range_ratio", "0.999"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(message)) as caught:
        BenchArgs(**options)
    assert caught.value.param == param


def test_an_option_that_there_is_not() -> None:
    with pytest.raises(UnknownOptionError, match="did you mean 'num_prompts'"):
        BenchArgs(num_prompt=3)
