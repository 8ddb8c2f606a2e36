"""Traces: reading files, generating arrivals, and errors for malformed files."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from octavo.errors import ParameterError, TraceError
from octavo.simulate import traces
from octavo.simulate.executor import OUTPUT_TOKEN
from octavo.simulate.traces import FIRST_TOKEN, Arrival, read_trace

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "traces"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n"


def mooncake(time_ms: float, num_prompt: int, num_output: int, ids: list[int]) -> str:
    row = {"timestamp": time_ms, "input_length": num_prompt, "output_length": num_output, "hash_ids": ids}
    return json.dumps(row) + "\n"


def write(path: Path, text: str) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mooncake_trace_is_read(tmp_path: Path, suffix: str) -> None:
    text = mooncake(0, 1000, 20, [7, 8]) + "\n" + mooncake(0, 600, 5, [7, 9]) + mooncake(3000, 3, 1, [10])
    first, second, third = read_trace(write(tmp_path / f"t.jsonl{suffix}", text))
    assert first.runs == ((FIRST_TOKEN + 7, 512), (FIRST_TOKEN + 8, 488)) and first.num_prompt == 1000
    assert second.runs == ((FIRST_TOKEN + 7, 512), (FIRST_TOKEN + 9, 88)) and second.num_output == 5
    assert [a.time_s for a in (first, second, third)] == [0.0, 1.5, 3.0]  # spread over the tick
    prompt = first.prompt()
    assert len(prompt) == 1000 and prompt[511] == FIRST_TOKEN + 7 and prompt[512] == FIRST_TOKEN + 8


def test_scaled_trace_keeps_its_sharing(tmp_path: Path) -> None:
    text = mooncake(0, 1600, 160, [1, 2, 3, 4]) + mooncake(10, 1600, 160, [1, 2, 3, 5])
    a, b = read_trace(write(tmp_path / "t.jsonl", text), scale=1 / 16)
    assert (a.num_prompt, a.num_output) == (100, 10)
    assert a.runs[:3] == b.runs[:3] == tuple((FIRST_TOKEN + h, 32) for h in (1, 2, 3)) and a.runs[3] != b.runs[3]


def test_azure_and_vidur_traces_are_read(tmp_path: Path) -> None:
    azure = AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    a, b = read_trace(write(tmp_path / "a.csv", azure))
    assert (a.time_s, a.num_prompt, a.num_output) == (0.0, 374, 44)
    assert b.time_s == pytest.approx(4.314579, abs=1e-5) and b.runs[0][0] != a.runs[0][0]
    vidur = write(tmp_path / "v.csv.gz", VIDUR + "0.5,10,3\n2.5,20,1\n")
    assert [(v.time_s, v.num_prompt, v.num_output) for v in read_trace(vidur)] == [(0.0, 10, 3), (2.0, 20, 1)]


def test_rate_rescales_the_times(tmp_path: Path) -> None:
    path = write(tmp_path / "v.csv", VIDUR + "".join(f"{i / 2},10,3\n" for i in range(11)))
    arrivals = list(read_trace(path, rate=8.0))
    assert arrivals[10].time_s == pytest.approx(10 / 8)


def test_lengths_file_gets_poisson_arrivals(tmp_path: Path) -> None:
    np.savez(tmp_path / "l.npz", input_len=np.array([3, 4]), output_len=np.array([5, 6]))
    a, b = read_trace(tmp_path / "l.npz", rate=2.0)
    assert (a.num_prompt, a.num_output, b.num_prompt, b.num_output) == (3, 5, 4, 6) and 0 < a.time_s < b.time_s
    with pytest.raises(ParameterError, match="no times"):
        next(read_trace(tmp_path / "l.npz"))


UNITS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


@pytest.mark.parametrize("unit", UNITS)
def test_times_in_each_unit_are_exact_and_may_be_equal(tmp_path: Path, unit: str) -> None:
    times = [0, 3, 3, 4]
    start = 1_700_000_000
    csv_file = write(tmp_path / "v.csv", VIDUR + "".join(f"{(start + t) * UNITS[unit]},10,3\n" for t in times))
    lines = "".join(mooncake((start + t) * UNITS[unit], 5, 3, []) for t in times)
    for path in (csv_file, write(tmp_path / "m.jsonl", lines)):
        assert [a.time_s for a in read_trace(path, time_unit=unit)] == pytest.approx(times, abs=1e-6)


def test_without_a_unit_only_mooncakes_ticks_are_spread(tmp_path: Path) -> None:
    rows = [(0, 0), (0, 1.5), (3000, 3), (3500, 3.5), (3500, 3.5)]
    path = write(tmp_path / "m.jsonl", "".join(mooncake(ms, 5, 3, []) for ms, _ in rows))
    assert [a.time_s for a in read_trace(path)] == [s for _, s in rows]
    path = write(tmp_path / "v.csv", VIDUR + "5,10,3\n5,10,3\n6,10,3\n")
    assert [a.time_s for a in read_trace(path)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("name", "text", "unit", "message"),
    [
        ("v.csv", VIDUR + "0,10,3\n", "min", "time_unit is 'min', it must be one of s, ms, us, ns"),
        ("a.csv", AZURE + "2023-11-16 18:15:46,10,3\n", "s", "TIMESTAMP is a date; remove it"),
        ("l.npz", "", "s", "which has no times; remove it"),
    ],
)
def test_time_unit_without_effect_is_refused(tmp_path: Path, name: str, text: str, unit: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        next(read_trace(write(tmp_path / name, text), time_unit=unit))


BAD = {
    "negative length": ("v.csv", VIDUR + "0,10,3\n1,-4,3\n", ":3: num_prefill_tokens is '-4'"),
    "no output": ("v.csv", VIDUR + "0,10,0\n", ":2: num_decode_tokens is '0'"),
    "half a token": ("v.csv", VIDUR + "0,10,1.5\n", ":2: num_decode_tokens is '1.5'"),
    "NaN": ("v.csv", VIDUR + "nan,10,3\n", ":2: arrived_at is 'nan'; expected a finite number"),
    "no number": ("v.csv", VIDUR + "0,ten,3\n", ":2: num_prefill_tokens is 'ten'"),
    "unsorted": ("v.csv", VIDUR + "5,10,3\n4,10,3\n", ":3: a time before the line before; expected rising times"),
    "columns": ("v.csv", "a,b,c\n1,2,3\n", ":1: columns a, b, c.*expected TIMESTAMP, ContextTokens"),
    "a column missing": ("v.csv", VIDUR + "0,10\n", ":2: 2 columns; expected 3"),
    "timestamp": ("v.csv", AZURE + "yesterday,10,3\n", ":2: TIMESTAMP 'yesterday'; expected one such as"),
    "empty": ("v.csv", "", "has no requests"),
    "only a head": ("v.csv", VIDUR, "has no requests"),
    "no JSON": ("m.jsonl", "{", ":1: no JSON object; expected {timestamp"),
    "a list": ("m.jsonl", "[1]\n", ":1: no JSON object"),
    "a key missing": ("m.jsonl", '{"timestamp": 0, "input_length": 3}\n', ":1: no 'output_length'"),
    "hash ids": ("m.jsonl", mooncake(0, 1025, 3, [1, 2]), ":1: 2 hash_ids for 1025 tokens; expected one for 512.*3"),
    "a hash id": ("m.jsonl", mooncake(0, 5, 3, [-1]), ":1: hash id -1; expected an integer"),
    "time in ticks": ("m.jsonl", mooncake(3000, 5, 3, [1]) + mooncake(0, 5, 3, [1]), "2: .*expected rising times"),
    "time in ticks names the file": (
        "m.jsonl",
        mooncake(9, 5, 3, [1]) + mooncake(0, 5, 3, [1]),
        r"m\.jsonl:2: time 0 s",
    ),
    "NaN in JSON": ("m.jsonl", '{"timestamp": NaN, "input_length": 3, "output_length": 3}', ":1: timestamp is 'nan'"),
    "negative in JSON": ("m.jsonl", mooncake(0, -5, 3, []), ":1: input_length is '-5'; expected a number of tokens"),
    "a long number": ("m.jsonl", '{"timestamp": ' + "9" * 5000 + "}", ":1: no JSON object"),
    "a long field": ("v.csv", VIDUR + "0," + "1" * 140_000 + ",3\n", ":2: field larger than field limit"),
    "a quote without an end": ("v.csv", VIDUR + '0,"1,3\n', ":2: 2 columns; expected 3"),
    "infinite": ("v.csv", VIDUR + "inf,10,3\n", ":2: arrived_at is 'inf'; expected a finite number"),
    "a huge length": ("v.csv", VIDUR + "0,1e300,3\n", ":2: num_prefill_tokens is "),
    "true": ("m.jsonl", '{"timestamp": 0, "input_length": true, "output_length": 3}', "input_length is 'True'"),
    "binary": ("v.csv.gz", "no gzip", "expected a complete text file"),
    "what": ("v.txt", "x", "is not a trace; pass a .jsonl, .csv or .npz"),
    "lengths": ("l.npz", "PK no", "expected an .npz file"),
}


@pytest.mark.parametrize("case", BAD)
def test_trace_error_names_the_line(tmp_path: Path, case: str) -> None:
    name, text, message = BAD[case]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceError, match=message) as raised:
        list(read_trace(path, rate=1.0 if name.endswith("npz") else None))
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


def test_bad_lengths_error_names_the_row(tmp_path: Path) -> None:
    np.savez(tmp_path / "l.npz", input_len=np.array([3, 0]), output_len=np.array([5, 6]))
    with pytest.raises(TraceError, match=r"input_len\[1\] is 0"):
        next(read_trace(tmp_path / "l.npz", rate=1.0))


def test_trace_is_read_lazily(tmp_path: Path) -> None:
    """An error a million lines later does not matter to a reader of ten; at most a thousand lines are read ahead."""
    path = write(tmp_path / "v.csv", VIDUR + "".join(f"{i},10,3\n" for i in range(3000)) + "rubbish\n")
    assert len(list(itertools.islice(read_trace(path, rate=5.0), 10))) == 10
    with pytest.raises(TraceError, match=":3002:"):
        list(read_trace(path))


class EndlessFile(io.StringIO):
    """An endless Vidur file that counts its lines."""

    num_lines = 0

    def readline(self, size: int | None = -1, /) -> str:
        self.num_lines += 1
        return VIDUR if self.num_lines == 1 else f"{self.num_lines},10,3\n"


def test_endless_trace_is_read_lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read ahead are only the header and the first thousand requests, for the rate."""
    file = EndlessFile()
    monkeypatch.setattr(traces, "_open", lambda path: file)
    arrivals = read_trace(Path("v.csv"), rate=5.0)
    for num_used in range(1, 3000):
        assert next(arrivals).num_prompt == 10
        assert file.num_lines <= max(num_used, 1000) + 1


def test_file_of_ten_gigabytes_is_read_lazily(tmp_path: Path) -> None:
    """The rest of the file is a hole: reading it would take minutes, holding it more memory than there is."""
    path = write(tmp_path / "v.csv", VIDUR + "".join(f"{i},10,3\n" for i in range(5000)))
    try:
        os.truncate(path, 10 << 30)
    except OSError as error:
        pytest.skip(f"no room for a hole: {error}")
    arrivals = read_trace(path)
    assert len(list(itertools.islice(arrivals, 5000))) == 5000
    with pytest.raises(TraceError, match=":5002: a line of over 16 MiB"):
        next(arrivals)


def test_requests_with_one_timestamp_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_REQUESTS_PER_TICK", 50)
    path = write(tmp_path / "m.jsonl", mooncake(0, 5, 3, [1]) * 60)
    with pytest.raises(TraceError, match=":51: over 50 requests at 0 s; expected rising times"):
        list(read_trace(path))


def test_endless_line_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_LINE_BYTES", 64)
    with pytest.raises(TraceError, match=":1: a line of over"):
        list(read_trace(write(tmp_path / "m.jsonl", "x" * 65)))


# -- generated traces -------------------------------------------------------------------------------------------------


def test_arrivals_are_poisson_or_bursty() -> None:
    for burstiness, deviation in ((1.0, 1.0), (1 / 9, 3.0), (4.0, 0.5)):
        gaps = np.diff(list(itertools.islice(traces.bursty(4.0, burstiness, seed=3), 20_000)))
        assert gaps.min() >= 0
        assert gaps.mean() == pytest.approx(0.25, rel=0.06)
        assert gaps.std() / gaps.mean() == pytest.approx(deviation, rel=0.06)
    again = list(itertools.islice(traces.poisson(4.0, 3), 10))
    assert (
        again
        == list(itertools.islice(traces.bursty(4.0, 1.0, 3), 10))
        != list(itertools.islice(traces.poisson(4.0), 10))
    )


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_rate_must_be_positive(rate: float) -> None:
    with pytest.raises(ParameterError, match="rate is"):
        next(traces.poisson(rate))


def test_lengths_match_the_paper() -> None:
    """Figure 11: ShareGPT 161 and 338 tokens, Alpaca 19.31 and 58.45; all below 2,048 together."""
    sharegpt, alpaca = traces.sharegpt_like(60_000), traces.alpaca_like(60_000)
    assert len(sharegpt.prompts) == len(sharegpt.outputs) == 60_000
    assert sharegpt.prompts.mean() == pytest.approx(161.2, rel=0.01)
    assert sharegpt.outputs.mean() == pytest.approx(338.0, rel=0.015)
    totals = np.percentile(sharegpt.prompts + sharegpt.outputs, [10, 50, 90, 95, 99])
    assert totals == pytest.approx([91, 369, 1118, 1423, 1874], rel=0.035), "of the real pairs"
    assert np.percentile(sharegpt.outputs, 50) == pytest.approx(271, rel=0.03)
    assert alpaca.prompts.mean() == pytest.approx(19.31, rel=0.02)
    assert alpaca.outputs.mean() == pytest.approx(58.45, rel=0.03)
    for lengths in (sharegpt, alpaca):
        assert (lengths.prompts + lengths.outputs).max() < 2048 and min(
            lengths.prompts.min(), lengths.outputs.min()
        ) >= 1
    assert (traces.sharegpt_like(50, 1).prompts != sharegpt.prompts[:50]).any()


def test_only_the_prefix_is_shared() -> None:
    a, b = traces.from_lengths(traces.sharegpt_like(2), iter([0.0, 1.0]), prefix=80)
    assert a.runs[0] == b.runs[0] == (FIRST_TOKEN, 80)
    assert a.runs[1][0] != b.runs[1][0] and not {a.runs[1][0], b.runs[1][0]} & {FIRST_TOKEN, OUTPUT_TOKEN}


def rounds(new_chance: float, num: int = 400) -> Iterator[Arrival]:
    lengths = traces.sharegpt_like(num)
    return traces.chat(lengths, traces.poisson(1.0), new_chance=new_chance)


def test_chat_round_continues_its_conversation() -> None:
    """Without truncation, a later round starts with all earlier queries and outputs."""
    lengths = traces.Lengths("short", np.full(50, 7), np.full(50, 5))
    known: set[tuple[tuple[int, int], ...]] = {()}
    for arrival in traces.chat(lengths, traces.poisson(1.0), new_chance=0.3, max_prompt=1 << 20):
        *before, query = arrival.runs
        assert tuple(before) in known and query[1] == 7
        known.add((*arrival.runs, (OUTPUT_TOKEN, 5)))
    assert max(map(len, known)) > 6


def test_chat_prompt_keeps_the_end_of_the_conversation() -> None:
    arrivals = list(rounds(0.05))
    assert max(a.num_prompt for a in arrivals) == 1024
    assert max(a.num_output for a in arrivals) <= 1016
    assert sum(a.num_prompt == 1024 for a in arrivals) > 200
    assert sum(len(a.runs) == 1 for a in rounds(1.0)) == 400


# -- real traces -------------------------------------------------------------------------------------------------------

shared = pytest.mark.skipif(not SHARED.exists(), reason=f"no {SHARED}")


@pytest.mark.shared
@shared
@pytest.mark.parametrize(
    ("name", "num", "mean_prompt", "mean_output"),
    [
        ("mooncake_conversation.jsonl.gz", 12_031, 12_035.1, 342.6),
        ("azure_llm_2023_conv.csv.gz", 19_366, 1_154.7, 211.1),
    ],
)
def test_real_traces_are_read(name: str, num: int, mean_prompt: float, mean_output: float) -> None:
    arrivals = list(read_trace(SHARED / name))
    assert len(arrivals) == num
    assert np.mean([a.num_prompt for a in arrivals]) == pytest.approx(mean_prompt, rel=0.01)
    assert np.mean([a.num_output for a in arrivals]) == pytest.approx(mean_output, rel=0.01)
    assert all(a.time_s <= b.time_s for a, b in itertools.pairwise(arrivals))


@pytest.mark.shared
@shared
def test_real_lengths_match_the_paper() -> None:
    """The paper's filter leaves 79,725 pairs with means of 161.18 and 338.00."""
    lengths = traces.Lengths("real", *traces.load_lengths(SHARED / "sharegpt_opt_lengths.npz")).below(2048)
    assert len(lengths.prompts) == 79_725
    assert (round(lengths.prompts.mean(), 2), round(lengths.outputs.mean(), 2)) == (161.18, 338.00)
    assert re.match("real", lengths.name)
