"""What `octavo bench serve` sends: prompts as text, of the number of tokens that was asked for.

    random             words drawn for each prompt, behind `random_prefix_len` tokens that all share
    prefix_repetition  few beginnings, each shared by many prompts
    sharegpt           the first rounds of conversations in a file, with the lengths of their answers
    timed_trace        the lengths, times and shared beginnings of a trace; what it says of the words is nothing

A client need not have the model's tokenizer. It asks how many tokens texts have (the server's /tokenize knows) and
looks for words of which one more is always one token more; of those a prompt of any length can be made.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

from octavo.bench.args import BenchArgs
from octavo.errors import ParameterError, TraceError

Count = Callable[[str], Awaitable[int]]
"""How many tokens a text has as a prompt, those that the tokenizer puts around it included."""

WORDS = (
    "the of and to in is was for on with as by at from his it an were are which this be or has had not but first one"
    " their its new after who they two her she been other when there all year into over out more some only can if work"
    " time people world city house book water river road hand day night light music name part place land war school"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
FEWEST_PIECES = 8
COUNTED_AT_ONCE = 32
MOST_TEXT_BYTES = 32 * 1024
"""ShareGPT's prompts beyond this are of more than `MOST_PROMPT` tokens by any tokenizer: they need not be counted."""
LEAST, MOST_PROMPT, MOST_TOTAL = 4, 1024, 2048
"""Conversations outside these numbers of tokens are left out, as every benchmark with ShareGPT does."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A request to come. `time_s`: when, from the begin; None: as the rate has it."""

    prompt: str
    num_prompt: int
    num_output: int
    time_s: float | None = None


class Vocabulary:
    """Pieces of text that are one token each, wherever they stand in a row of such; `around` tokens stand around."""

    def __init__(self, pieces: Sequence[str], around: int) -> None:
        self.pieces = pieces
        self.around = around

    @classmethod
    async def find(cls, count: Count) -> Vocabulary:
        """Raises `ParameterError` for a tokenizer that knows neither common words nor letters."""
        for family in ([f" {word}" for word in WORDS.split()], list(LETTERS)):
            one = await count_all(count, family)
            two = await count_all(count, [piece * 2 for piece in family])
            three = await count_all(count, [piece * 3 for piece in family])
            pieces = [p for p, a, b, c in zip(family, one, two, three, strict=True) if b - a == c - b == 1]
            if len(pieces) >= FEWEST_PIECES:
                mixed = "".join(pieces)
                around = await count(mixed) - len(pieces)
                if around >= 0 and await count(mixed * 2) == around + 2 * len(pieces):
                    return cls(pieces, around)
        raise ParameterError(
            "the tokenizer makes no single tokens of common words or letters, so that no prompt of a known length can "
            "be made for it; use the sharegpt dataset",
            param="dataset_name",
        )

    def text(self, num_tokens: int, random: Random) -> str:
        return "".join(random.choices(self.pieces, k=num_tokens))


async def count_all(count: Count, texts: Sequence[str]) -> list[int]:
    """A few at a time."""
    gate = asyncio.Semaphore(COUNTED_AT_ONCE)

    async def counted(text: str) -> int:
        async with gate:
            return await count(text)

    return await asyncio.gather(*map(counted, texts))


async def make_samples(args: BenchArgs, count: Count) -> list[Sample]:
    """At most `num_prompts` of them. Raises `ParameterError` or `TraceError`."""
    if args.dataset_name == "sharegpt":
        return await sharegpt(args, count)
    vocabulary = await Vocabulary.find(count)
    make = {"random": drawn, "prefix_repetition": prefix_repetition, "timed_trace": timed_trace}
    return make[args.dataset_name](args, vocabulary)


def drawn(args: BenchArgs, vocabulary: Vocabulary) -> list[Sample]:
    """Lengths evenly from (1 - random_range_ratio) to (1 + random_range_ratio) times those asked for."""
    random = Random(args.seed)
    shared = vocabulary.text(args.random_prefix_len, random)

    def length(middle: int) -> int:
        spread = int(middle * args.random_range_ratio)
        return random.randint(max(1, middle - spread), middle + spread)

    samples = []
    for _ in range(args.num_prompts):
        num_own, num_output = length(args.random_input_len), length(args.random_output_len)
        num_own = max(1, num_own - vocabulary.around)
        num_prompt = vocabulary.around + args.random_prefix_len + num_own
        samples.append(Sample(shared + vocabulary.text(num_own, random), num_prompt, num_output))
    return samples


def prefix_repetition(args: BenchArgs, vocabulary: Vocabulary) -> list[Sample]:
    """As many prompts of each prefix as of any other, in random order."""
    random = Random(args.seed)
    num_prefixes = min(args.prefix_repetition_num_prefixes, args.num_prompts)
    prefixes = [vocabulary.text(args.prefix_repetition_prefix_len, random) for _ in range(num_prefixes)]
    num_suffix = max(1, args.prefix_repetition_suffix_len - vocabulary.around)
    num_prompt = vocabulary.around + args.prefix_repetition_prefix_len + num_suffix
    samples = [
        Sample(
            prefixes[i % num_prefixes] + vocabulary.text(num_suffix, random),
            num_prompt,
            args.prefix_repetition_output_len,
        )
        for i in range(args.num_prompts)
    ]
    if not args.disable_shuffle:
        random.shuffle(samples)
    return samples


def timed_trace(args: BenchArgs, vocabulary: Vocabulary) -> list[Sample]:
    """Runs of tokens that are the same in two prompts of the trace are the same text in both."""
    from octavo.simulate.traces import read_trace

    assert args.dataset_path is not None
    rate = None if args.request_rate == float("inf") else args.request_rate
    path = _existing(args.dataset_path)
    arrivals = read_trace(path, scale=args.timed_trace_scale, rate=rate, seed=args.seed)
    samples = []
    for arrival in islice(arrivals, args.num_prompts):
        parts = [vocabulary.text(count, Random(f"{args.seed} {token}")) for token, count in arrival.runs]
        num_prompt = arrival.num_prompt + vocabulary.around
        samples.append(Sample("".join(parts), num_prompt, arrival.num_output, arrival.time_s))
    return samples


async def sharegpt(args: BenchArgs, count: Count) -> list[Sample]:
    """Each conversation's first message, and as many tokens as the second has. A file with fewer is gone through again.

    Lengths below `LEAST` and above `MOST_PROMPT` or, together, `MOST_TOTAL` are left out.
    """
    assert args.dataset_path is not None
    path = _existing(args.dataset_path)
    pairs = read_conversations(path)
    if not args.disable_shuffle:
        Random(args.seed).shuffle(pairs)
    samples: list[Sample] = []
    for begin in range(0, len(pairs), 4 * COUNTED_AT_ONCE):
        some = [(p, a) for p, a in pairs[begin : begin + 4 * COUNTED_AT_ONCE] if len(p.encode()) <= MOST_TEXT_BYTES]
        some = [(p, a) for p, a in some if len(a.encode()) <= MOST_TEXT_BYTES or args.sharegpt_output_len]
        prompts = await count_all(count, [prompt for prompt, _ in some])
        if args.sharegpt_output_len is None:
            outputs = await count_all(count, [answer for _, answer in some])
        else:
            outputs = [args.sharegpt_output_len] * len(some)
        for (prompt, _), num_prompt, num_output in zip(some, prompts, outputs, strict=True):
            is_short = num_prompt < LEAST or (args.sharegpt_output_len is None and num_output < LEAST)
            if not is_short and num_prompt <= MOST_PROMPT and num_prompt + num_output <= MOST_TOTAL:
                samples.append(Sample(prompt, num_prompt, num_output))
        if len(samples) >= args.num_prompts:
            return samples[: args.num_prompts]
    if not samples:
        raise TraceError(f"{path} has no conversation of {LEAST} to {MOST_TOTAL} tokens; expected ShareGPT's")
    return [samples[i % len(samples)] for i in range(args.num_prompts)]


def read_conversations(path: Path) -> list[tuple[str, str]]:
    """(prompt, answer) of each conversation with two messages or more. Raises `TraceError`."""
    expected = 'expected a list of {"conversations": [{"value": text}, {"value": text}, ...]}'
    try:
        rows = json.loads(path.read_bytes())
        said = [row.get("conversations") or row.get("conversation") or [] for row in rows]
        return [(str(both[0]["value"]), str(both[1]["value"])) for both in said if len(both) >= 2]
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: {' '.join(str(error).split())[:200]}; {expected}") from None
    except (KeyError, TypeError, AttributeError):
        raise TraceError(f"{path}: no conversations in it; {expected}") from None


def _existing(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_file():
        raise ParameterError(f"no file {name!r}; name the dataset's", param="dataset_path")
    return path
