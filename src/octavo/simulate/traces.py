"""Traces of requests: read from a file line by line, or generated.

A trace is an iterator of `Arrival`s in order of time, so that a file of 10 GB needs no memory. A prompt's tokens are
runs, (token, count): memory depends on which prompts share a prefix, not on their content.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from octavo.errors import ParameterError, TraceError
from octavo.integers import cdiv
from octavo.simulate.executor import OUTPUT_TOKEN

Run = tuple[int, int]
Draw = Callable[[np.random.Generator], int]

FIRST_TOKEN = OUTPUT_TOKEN + 1
"""Prompts consist of tokens from this one on."""
MAX_TOKENS = 1 << 30
"""Maximum token id and length; a larger value indicates a damaged file."""
TICK_S = 3.0
"""Mooncake's timestamps are rounded down to multiples of this."""
TIME_UNITS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
"""Units of a file's times, a second each."""
HASHED_TOKENS = 512
"""Prompt tokens per hash id in Mooncake's traces."""
MAX_LINE_BYTES = 1 << 24
MAX_REQUESTS_PER_TICK = 100_000
"""Maximum requests with the same timestamp, which are held in memory to be spread."""


class Arrival(NamedTuple):
    """A request: its arrival time, its prompt, and the number of tokens it generates.

    runs        the prompt as (token, count) pairs
    n           number of samples; with `beams`, the beam width
    marks       of the prompt, as of `core.request.Request`
    """

    time_s: float
    runs: tuple[Run, ...]
    num_output: int
    n: int = 1
    beams: bool = False
    marks: tuple[int, ...] = ()

    @property
    def num_prompt(self) -> int:
        return sum([count for _, count in self.runs])

    def prompt(self) -> array[int]:
        tokens: array[int] = array("i")
        for token, count in self.runs:
            tokens += array("i", (token,)) * count
        return tokens


# -- files -------------------------------------------------------------------------------------------------------------


def read_trace(
    path: Path, *, scale: float = 1.0, rate: float | None = None, seed: int = 0, time_unit: str | None = None
) -> Iterator[Arrival]:
    """Read a trace. The format is determined by the file's name and first line.

        *.jsonl(.gz)  Mooncake: timestamp (ms), input_length, output_length, hash_ids (one for 512 tokens); optionally
                      hash_tokens, the tokens per hash id, and n, the number of samples
        *.csv(.gz)    Azure: TIMESTAMP, ContextTokens, GeneratedTokens;
                      Vidur: arrived_at (s), num_prefill_tokens, num_decode_tokens
        *.npz         lengths only: input_len, output_len; arrivals are drawn at `rate` per second

    Lengths, shared prefixes included, are multiplied by `scale`: a Mooncake trace at 1/16 fits models with 8k context.
    With `rate`, times are multiplied so that the first thousand requests arrive at that rate. `time_unit`, a key of
    `TIME_UNITS`, takes the place of the format's; times are then exact, relative to the first, and requests may share
    one.

    Raises `TraceError` with the line, the problem and the expected format.
    """
    if not 0 < scale <= 1:
        raise ParameterError(f"scale is {scale}, it must be above 0 and at most 1", param="scale")
    name = path.name.removesuffix(".gz")
    if time_unit is not None and time_unit not in TIME_UNITS:
        text = f"time_unit is {time_unit!r}, it must be one of {', '.join(TIME_UNITS)}"
        raise ParameterError(text, param="time_unit")
    if time_unit is not None and not name.endswith((".jsonl", ".csv")):
        raise ParameterError(f"time_unit has no effect with {path}, which has no times; remove it", param="time_unit")
    if name.endswith(".npz"):
        return _lengths(path, scale, rate, seed)
    if name.endswith(".jsonl"):
        rows = _mooncake(path, scale, time_unit)
        if time_unit is None:
            arrivals = _spread_ticks(rows, path)
        else:
            arrivals = _check_order(((line, arrival) for line, _, arrival in rows), path)
    elif name.endswith(".csv"):
        arrivals = _check_order(_csv(path, scale, time_unit), path)
    else:
        raise TraceError(f"{path} is not a trace; pass a .jsonl, .csv or .npz file (.jsonl.gz and .csv.gz work too)")
    return _require_one(arrivals if rate is None else _at_rate(arrivals, rate), path)


def _open(path: Path) -> IO[str]:
    if path.name.endswith(".gz"):
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Non-empty lines with their numbers."""
    try:
        with _open(path) as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                if len(line) == MAX_LINE_BYTES:
                    raise TraceError(f"{path}:{number}: a line of over {MAX_LINE_BYTES >> 20} MiB; this is not a trace")
                if line.strip():
                    yield number, line
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: {error}; expected a complete text file") from error


def _require_one(arrivals: Iterator[Arrival], path: Path) -> Iterator[Arrival]:
    first = next(arrivals, None)
    if first is None:
        raise TraceError(f"{path} has no requests; expected one a line")
    yield first
    yield from arrivals


def _mooncake(path: Path, scale: float, time_unit: str | None) -> Iterator[tuple[int, bool, Arrival]]:
    """Yields (line number, True if the time is exact, arrival)."""
    expected = "expected {timestamp (ms), input_length, output_length, hash_ids}"
    for line, text in _lines(path):
        where = f"{path}:{line}"
        try:
            row = json.loads(text)
            time_ms, num_prompt, num_output = row["timestamp"], row["input_length"], row["output_length"]
            ids, hash_size, n = row.get("hash_ids") or [], row.get("hash_tokens", HASHED_TOKENS), row.get("n", 1)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            missing = f"no {error}" if isinstance(error, KeyError) else "no JSON object"
            raise TraceError(f"{where}: {missing}; {expected}") from None
        time_s = _number(time_ms, where, "timestamp") / TIME_UNITS[time_unit or "ms"]
        tokens, hash_size = _length(num_prompt, where, "input_length"), _length(hash_size, where, "hash_tokens")
        if not isinstance(ids, list) or (ids and len(ids) != cdiv(tokens, hash_size)):
            found = len(ids) if isinstance(ids, list) else "no list of"
            one_each = f"one for {hash_size} tokens, {cdiv(tokens, hash_size)}"
            raise TraceError(f"{where}: {found} hash_ids for {tokens} tokens; expected {one_each}")
        each, num_left = max(1, round(hash_size * scale)), max(1, round(tokens * scale))
        runs: list[Run] = []
        for hash_id in ids:
            count = min(each, num_left)
            if count:
                runs.append((_hash_id(hash_id, where), count))
                num_left -= count
        if not ids:
            runs.append((MAX_TOKENS + line, num_left))
        num_output = _scaled(num_output, scale, where, "output_length")
        is_exact = "hash_tokens" in row or time_s % TICK_S != 0
        yield line, is_exact, Arrival(time_s, tuple(runs), num_output, _length(n, where, "n"))


def _hash_id(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MAX_TOKENS - FIRST_TOKEN:
        raise TraceError(f"{where}: hash id {value!r}; expected an integer from 0")
    return FIRST_TOKEN + value


def _spread_ticks(rows: Iterator[tuple[int, bool, Arrival]], path: Path) -> Iterator[Arrival]:
    """Spreads rounded timestamps evenly over their tick: all at once would be an artificial burst."""
    tick: list[Arrival] = []
    tick_s = 0.0
    for line, exact, arrival in rows:
        if tick and arrival.time_s != tick[0].time_s:
            if arrival.time_s < tick[0].time_s:
                times = f"time {arrival.time_s:g} s after {tick[0].time_s:g} s"
                raise TraceError(f"{path}:{line}: {times}; expected rising times: sort the file")
            yield from _spread_tick(tick, min(tick_s, arrival.time_s - tick[0].time_s))
            tick = []
        tick_s = 0.0 if exact else TICK_S
        tick.append(arrival)
        if len(tick) > MAX_REQUESTS_PER_TICK:
            raise TraceError(
                f"{path}:{line}: over {MAX_REQUESTS_PER_TICK:,} requests at {arrival.time_s:g} s; expected rising times"
            )
    yield from _spread_tick(tick, tick_s)


def _spread_tick(tick: list[Arrival], tick_s: float) -> Iterator[Arrival]:
    for i, arrival in enumerate(tick):
        yield arrival._replace(time_s=arrival.time_s + tick_s * i / len(tick))


AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
VIDUR = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")


def _csv(path: Path, scale: float, time_unit: str | None) -> Iterator[tuple[int, Arrival]]:
    rows = _lines(path)
    first = next(rows, None)
    if first is None:
        return
    header = _fields(first[1], f"{path}:{first[0]}")
    names = next((n for n in (AZURE, VIDUR) if set(n) <= set(header)), None)
    if names is None:
        expected = f"{', '.join(AZURE)} or {', '.join(VIDUR)}"
        raise TraceError(f"{path}:{first[0]}: columns {', '.join(header)[:80]}; expected {expected}")
    if names is AZURE and time_unit is not None:
        text = f"time_unit has no effect with {path}, whose TIMESTAMP is a date; remove it"
        raise ParameterError(text, param="time_unit")
    columns = [header.index(name) for name in names]
    for line, text in rows:
        where = f"{path}:{line}"
        row = _fields(text, where)
        if len(row) != len(header):
            raise TraceError(f"{where}: {len(row)} columns; expected {len(header)}, as in the first line")
        time, prompt, output = (row[c] for c in columns)
        if names is AZURE:
            time_s = _timestamp(time, where)
        else:
            time_s = _number(time, where, names[0]) / TIME_UNITS[time_unit or "s"]
        num_prompt = _scaled(_integer(prompt, where, names[1]), scale, where, names[1])
        num_output = _scaled(_integer(output, where, names[2]), scale, where, names[2])
        yield line, Arrival(time_s, ((FIRST_TOKEN + line, num_prompt),), num_output)


def _fields(text: str, where: str) -> list[str]:
    try:
        return next(csv.reader([text]))
    except csv.Error as error:  # a field of over 128 KiB
        raise TraceError(f"{where}: {error}; expected a line of values between commas") from None


def _timestamp(text: str, where: str) -> float:
    """Azure's seconds have seven decimals, of which Python accepts six."""
    try:
        return datetime.fromisoformat(text[:26]).timestamp()
    except (ValueError, OverflowError):
        raise TraceError(
            f"{where}: TIMESTAMP {text[:40]!r}; expected one such as 2023-11-16 18:15:46.6805900"
        ) from None


def _check_order(rows: Iterator[tuple[int, Arrival]], path: Path) -> Iterator[Arrival]:
    """Times relative to the first. A file out of order may be the wrong column, or two files in one."""
    first = last = 0.0
    for i, (line, arrival) in enumerate(rows):
        if not i:
            first = arrival.time_s
        elif arrival.time_s < last:
            raise TraceError(f"{path}:{line}: a time before the line before; expected rising times: sort the file")
        last = arrival.time_s
        yield arrival._replace(time_s=arrival.time_s - first)


def _number(value: Any, where: str, name: str) -> float:
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise TraceError(f"{where}: {name} is {str(value)[:40]!r}; expected a finite number from 0")
    return number


def _integer(text: str, where: str, name: str) -> Any:
    number = _number(text, where, name)
    return int(number) if number.is_integer() else text


def _length(value: Any, where: str, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_TOKENS:
        raise TraceError(f"{where}: {name} is {str(value)[:40]!r}; expected a number of tokens from 1")
    return value


def _scaled(value: Any, scale: float, where: str, name: str) -> int:
    return max(1, round(_length(value, where, name) * scale))


def _at_rate(arrivals: Iterator[Arrival], rate: float) -> Iterator[Arrival]:
    head = list(islice(arrivals, 1000))
    span = head[-1].time_s - head[0].time_s if head else 0.0
    factor = (len(head) - 1) / span / _positive("rate", rate) if span else 1.0
    for arrival in (a for part in (head, arrivals) for a in part):
        yield arrival._replace(time_s=arrival.time_s * factor)


def _lengths(path: Path, scale: float, rate: float | None, seed: int) -> Iterator[Arrival]:
    if rate is None:
        raise ParameterError(f"{path} has lengths but no times; pass a rate, the arrivals per second", param="rate")
    prompts, outputs = load_lengths(path)
    times = poisson(rate, seed)
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        runs = ((FIRST_TOKEN + i, max(1, round(int(prompt) * scale))),)
        yield Arrival(next(times), runs, max(1, round(int(output) * scale)))


def load_lengths(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The arrays input_len and output_len of an .npz file, both [num_requests]. Raises `TraceError`."""
    try:
        with np.load(path, allow_pickle=False) as file:
            prompts, outputs = file["input_len"], file["output_len"]
    except (ValueError, KeyError, OSError, EOFError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise TraceError(f"{path}: {error}; expected an .npz file of input_len and output_len, integers") from None
    for name, lengths in (("input_len", prompts), ("output_len", outputs)):
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or len(lengths) != len(prompts) or not len(lengths):
            raise TraceError(f"{path}: {name} is {lengths.dtype} {lengths.shape}; expected integers, as many in each")
        if lengths.min() < 1 or lengths.max() > MAX_TOKENS:
            row = int(np.argmax((lengths < 1) | (lengths > MAX_TOKENS)))
            raise TraceError(f"{path}: {name}[{row}] is {lengths[row]}; expected a number of tokens from 1")
    return prompts, outputs


# -- times -------------------------------------------------------------------------------------------------------------


def poisson(rate: float, seed: int = 0) -> Iterator[float]:
    """Arrival times in seconds of a Poisson process with `rate` arrivals per second."""
    return bursty(rate, 1.0, seed)


def bursty(rate: float, burstiness: float, seed: int = 0) -> Iterator[float]:
    """Arrival times with gamma-distributed gaps: burstiness 1 is a Poisson process, less is burstier. The standard
    deviation of the gaps is 1 / sqrt(burstiness) of their mean."""
    rng = np.random.default_rng([seed, 1])
    mean, shape = 1 / _positive("rate", rate), _positive("burstiness", burstiness)
    now = 0.0
    while True:  # in batches, for speed
        times = now + np.cumsum(rng.gamma(shape, mean / shape, size=4096))
        yield from times.tolist()
        now = float(times[-1])


def _positive(name: str, value: float) -> float:
    if not math.isfinite(value) or value <= 0:
        raise ParameterError(f"{name} is {value}, it must be above 0", param=name)
    return value


# -- lengths -----------------------------------------------------------------------------------------------------------


SHARES = (0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 85, 90, 95, 97.5, 99, 99.5, 100)
SHAREGPT_INPUT = (1, 2, 7, 9, 13, 18, 24, 35, 55, 94, 203, 324, 506, 863, 1146, 1460, 1636, 2028)
SHAREGPT_OUTPUT = (1, 4, 22, 45, 101, 157, 216, 271, 330, 405, 525, 619, 754, 899, 1092, 1280, 1443, 2009)
"""Percentiles of the first rounds of ShareGPT's conversations by OPT's tokenizer, restricted to prompt and output of
less than 2,048 tokens together: the trace of the paper's evaluation (figure 11)."""
RANK_CORRELATION = 0.15
"""Of prompt and output: longer prompts have slightly longer answers. With it, the sums have the trace's percentiles."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Pairs of prompt and output lengths, `[num_pairs]` each, in a fixed order."""

    name: str
    prompts: np.ndarray
    outputs: np.ndarray

    def below(self, total: int) -> Lengths:
        """The pairs with prompt + output < `total`."""
        keep = self.prompts + self.outputs < total
        return Lengths(self.name, self.prompts[keep], self.outputs[keep])


def sharegpt_like(num: int, seed: int = 0) -> Lengths:
    """Lengths with the percentiles above, prompt and output below 2,048 tokens together.

    Prompts are interpolated on a logarithmic scale, as their tail is long. The shares are spread evenly, so that a
    short trace has the same means. Pairs that are too long exchange their outputs with others: dropping them would
    shorten both.
    """
    rng = np.random.default_rng([seed, 2])
    size = num + 64
    prompt_ranks, own = rng.standard_normal((2, size))
    output_ranks = RANK_CORRELATION * prompt_ranks + math.sqrt(1 - RANK_CORRELATION**2) * own
    shares = [
        (ranks.argsort().argsort() + rng.uniform(size=size)) * 100 / size for ranks in (prompt_ranks, output_ranks)
    ]
    prompts = np.exp(np.interp(shares[0], SHARES, np.log(SHAREGPT_INPUT))).round().astype(int)
    outputs = np.interp(shares[1], SHARES, SHAREGPT_OUTPUT).round().astype(int)
    for _ in range(1000):
        if not len(too_long := np.flatnonzero(prompts + outputs >= 2048)):
            break
        for i in too_long:
            j = rng.integers(size)
            outputs[i], outputs[j] = outputs[j], outputs[i]
    kept = Lengths("sharegpt-like", prompts, outputs).below(2048)
    return Lengths(kept.name, kept.prompts[:num], kept.outputs[:num])


def alpaca_like(num: int, seed: int = 0) -> Lengths:
    """Synthetic lognormal lengths with Alpaca's means from the paper, 19.31 and 58.45."""
    return lognormal("alpaca-like", num, (2.84, 0.5), (3.58, 1.0), seed)


def lognormal(
    name: str, num: int, prompt: tuple[float, float], output: tuple[float, float], seed: int = 0, total: int = 2048
) -> Lengths:
    """Independent lognormal lengths from 1; `prompt` and `output` are the (mean, deviation) of the logarithms."""
    rng = np.random.default_rng([seed, 3])
    prompts = np.maximum(1, rng.lognormal(*prompt, size=num + 64).round()).astype(int)
    outputs = np.maximum(1, rng.lognormal(*output, size=num + 64).round()).astype(int)
    kept = Lengths(name, prompts, outputs).below(total)
    return Lengths(name, kept.prompts[:num], kept.outputs[:num])


# -- generated traces --------------------------------------------------------------------------------------------------


def from_lengths(
    lengths: Lengths, times: Iterable[float], *, prefix: int = 0, n: int = 1, beams: bool = False
) -> Iterator[Arrival]:
    """One request per pair of lengths; all prompts share a prefix of `prefix` tokens."""
    shared = ((FIRST_TOKEN, prefix),) if prefix else ()
    for i, (time_s, prompt, output) in enumerate(
        zip(times, lengths.prompts.tolist(), lengths.outputs.tolist(), strict=False)
    ):
        yield Arrival(time_s, (*shared, (FIRST_TOKEN + 1 + i, prompt)), output, n, beams)


def chat(
    lengths: Lengths,
    times: Iterable[float],
    *,
    new_chance: float = 0.5,
    max_prompt: int = 1024,
    max_output: int = 1016,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Rounds of conversations: each arrival starts a conversation with probability `new_chance`, or continues a random
    one.

    The prompt is the last `max_prompt` tokens of the conversation and the new query, as in the paper's chatbot (section
    6.4). A round's output joins the history at once, slightly early.
    """
    rng = np.random.default_rng([seed, 4])
    conversations: list[list[Run]] = []
    pairs = zip(times, lengths.prompts.tolist(), lengths.outputs.tolist(), strict=False)
    for i, (time_s, query, answer) in enumerate(pairs):
        if not conversations or rng.random() < new_chance:
            conversations.append([])
        history = conversations[-1] if not conversations[-1] else conversations[int(rng.integers(len(conversations)))]
        history.append((FIRST_TOKEN + i, query))
        output = min(answer, max_output)
        yield Arrival(time_s, _last_tokens(history, max_prompt), output)
        history.append((OUTPUT_TOKEN, output))


def _last_tokens(runs: list[Run], num_tokens: int) -> tuple[Run, ...]:
    """The last `num_tokens` tokens of the runs."""
    ends = list(accumulate(count for _, count in runs))
    num_dropped = ends[-1] - num_tokens
    if num_dropped <= 0:
        return tuple(runs)
    first = bisect_right(ends, num_dropped)
    token, _ = runs[first]
    return ((token, ends[first] - num_dropped), *runs[first + 1 :])


def first_seconds(arrivals: Iterable[Arrival], duration_s: float) -> Iterator[Arrival]:
    for arrival in arrivals:
        if arrival.time_s >= duration_s:
            return
        yield arrival
