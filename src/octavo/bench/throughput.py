"""`octavo bench throughput` and `latency`: workloads of token ids with forced lengths, so all engines do equal work.

A workload depends only on its name, a seed and the vocabulary size. "mixed256" is nano-vllm's benchmark. Times cover
one `generate` call. A warm-up precedes the first workload, because first use is slower. Start-up is reported apart.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from octavo.errors import ParameterError
from octavo.params.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.frontend.llm import LLM

LARGEST_TOKEN = 10_000
"""Prompts are random ids from 0 to this one, or to the end of a smaller vocabulary."""
LATENCY_BATCHES = (1, 32, 256)
LATENCY_INPUT, LATENCY_OUTPUT = 1024, 129
SEED_STEP = 1000
"""Difference of a workload's seeds from round to round."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of random tokens.

    lengths      (min, max) of the prompts, uniform; equal bounds use no random number
    outputs      the same for output lengths
    prefix       length of a shared prefix, in addition
    n            samples of each prompt
    """

    requests: int
    lengths: tuple[int, int]
    outputs: tuple[int, int]
    seed: int
    temperature: float = 0.6
    prefix: int = 0
    n: int = 1

    def make(self, vocab_size: int) -> tuple[list[list[int]], list[int]]:
        """(prompts, output lengths). The order of random numbers is part of the workload: each prompt's length and its
        tokens, prompt by prompt, then all output lengths."""
        random = Random(self.seed)
        largest = min(vocab_size - 1, LARGEST_TOKEN)

        def tokens(count: int) -> list[int]:
            return [random.randint(0, largest) for _ in range(count)]

        def length(bounds: tuple[int, int]) -> int:
            return bounds[0] if bounds[0] == bounds[1] else random.randint(*bounds)

        head = tokens(self.prefix)
        prompts = [head + tokens(length(self.lengths)) for _ in range(self.requests)]
        return prompts, [length(self.outputs) for _ in range(self.requests)]


def uniform(requests: int, num_in: int, num_out: int, seed: int, **more: Any) -> Workload:
    return Workload(requests, (num_in, num_in), (num_out, num_out), seed, **more)


WARMUP = uniform(8, 64, 16, seed=9)
WORKLOADS = {
    "mixed256": Workload(256, (100, 1024), (100, 1024), seed=0),
    "mixed256_greedy": Workload(256, (100, 1024), (100, 1024), seed=3, temperature=0.0),
    "uniform256": uniform(256, 512, 128, seed=1),
    "shared_prefix_256x2048": uniform(256, 64, 64, seed=2, temperature=0.0, prefix=2048),
    "parallel_n4_64x512": uniform(64, 512, 128, seed=40, n=4),
}


class Subject(Protocol):
    """An engine with a model, Octavo's or another."""

    engine: str
    model: str
    vocab_size: int

    def generate(self, prompts: list[list[int]], lengths: list[int], temperature: float, n: int) -> int:
        """Complete all prompts together, each to its forced length; returns the number of generated tokens."""


class Octavo:
    """This engine, with `logprobs` for every token."""

    engine = "octavo"

    def __init__(self, llm: LLM, model: str, logprobs: int | None = None) -> None:
        from tqdm import tqdm

        self.llm = llm
        self.model = model
        self.vocab_size = llm.spec.vocab_size
        self.bar = partial(tqdm, leave=False) if sys.stderr.isatty() else False
        self.params: dict[str, Any] = {"ignore_eos": True, "detokenize": False, "logprobs": logprobs}

    def generate(self, prompts: list[list[int]], lengths: list[int], temperature: float, n: int) -> int:
        params = [SamplingParams(temperature=temperature, n=n, max_tokens=length, **self.params) for length in lengths]
        outputs = self.llm.generate(prompts, params, use_tqdm=self.bar)
        return sum(len(c.token_ids) for output in outputs for c in output.outputs)


def measure_throughput(subject: Subject, names: Sequence[str], rounds: int = 1) -> Iterator[dict[str, Any]]:
    """One object per workload: engine, model, case, s, out_tokens, in_tokens, out_tok_s."""
    run(subject, WARMUP, "warmup")
    for name in names:
        yield median_run(subject, WORKLOADS[name], name, rounds)


def measure_latency(
    subject: Subject, batches: Sequence[int] = LATENCY_BATCHES, rounds: int = 1
) -> Iterator[dict[str, Any]]:
    """For batches of equal prompts: the time to all first tokens, and the time per output token.

    Measures 1 and 129 output tokens after prompts of 1,024. The difference divided by 128 is the time per output token.
    """
    run(subject, WARMUP, "warmup")
    run(subject, uniform(1, 128, 1, seed=11, temperature=0.0), "warmup")
    yield median_run(subject, uniform(1, 128, 1, seed=12, temperature=0.0), "prefill_bs1_in128", rounds)
    for size in batches:
        first = uniform(size, LATENCY_INPUT, 1, seed=10 + size, temperature=0.0)
        whole = uniform(size, LATENCY_INPUT, LATENCY_OUTPUT, seed=20 + size, temperature=0.0)
        prefill = median_run(subject, first, f"prefill_bs{size}_in{LATENCY_INPUT}", rounds)
        yield prefill
        decode = median_run(subject, whole, f"decode_bs{size}_in{LATENCY_INPUT}_out{LATENCY_OUTPUT}", rounds)
        yield decode
        per_token_s = (decode["s"] - prefill["s"]) / (LATENCY_OUTPUT - 1)
        about = {"engine": subject.engine, "model": subject.model}
        yield about | {"case": f"tpot_ms_bs{size}", "ms": round(per_token_s * 1e3, 4)}


def median_run(subject: Subject, workload: Workload, name: str, rounds: int) -> dict[str, Any]:
    """The median of several runs. Each has other prompts, so none hits another's blocks."""
    runs = [run(subject, replace(workload, seed=workload.seed + SEED_STEP * i), name) for i in range(rounds)]
    return sorted(runs, key=lambda row: row["out_tok_s"])[rounds // 2]


def run(subject: Subject, workload: Workload, name: str) -> dict[str, Any]:
    """Run a workload once."""
    prompts, lengths = workload.make(subject.vocab_size)
    start = time.perf_counter()
    num_out = subject.generate(prompts, lengths, workload.temperature, workload.n)
    time_s = time.perf_counter() - start
    return {
        "engine": subject.engine,
        "model": subject.model,
        "case": name,
        "s": round(time_s, 4),
        "out_tokens": num_out,
        "in_tokens": sum(map(len, prompts)),
        "out_tok_s": round(num_out / time_s, 1),
    }


def main(
    model: str,
    names: Sequence[str] = ("mixed256",),
    *,
    latency: bool = False,
    as_json: bool = False,
    **engine: Any,
) -> None:
    """Create an engine, run the named workloads ("all": all of them) or the latency table, and print the times."""
    names = check_names(names)
    from octavo import __version__
    from octavo.frontend.llm import LLM

    short = Path(model).name
    start = time.perf_counter()
    with LLM(model, skip_tokenizer_init=True, **engine) as llm:
        startup = {"engine": "octavo", "version": __version__, "model": short}
        _show(startup | {"startup_s": round(time.perf_counter() - start, 3)}, as_json)
        subject = Octavo(llm, short)
        for row in measure_latency(subject) if latency else measure_throughput(subject, names):
            _show(row, as_json)


def check_names(names: Sequence[str]) -> list[str]:
    """Expand "all". Raises `ParameterError` for an unknown workload."""
    for name in names:
        if name not in WORKLOADS and name != "all":
            raise ParameterError(f"no workload {name!r}; there are {', '.join(WORKLOADS)} and all", param="workload")
    return list(WORKLOADS) if "all" in names else list(names)


def _show(row: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(row), flush=True)
    elif "startup_s" in row:
        print(f"{row['model']}: {row['startup_s']:.1f} s to start", flush=True)
    elif "ms" in row:
        print(f"{row['case']:<30}{row['ms']:>10.3f} ms per token", flush=True)
    else:
        print(f"{row['case']:<30}{row['s']:>10.3f} s{row['out_tok_s']:>12,.0f} output tokens/s", flush=True)
