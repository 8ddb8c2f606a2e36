"""Workloads of `octavo bench serve`: prompts as text, with an exact number of tokens.

    random             random words after `random_prefix_len` shared tokens
    prefix_repetition  few prefixes, each shared by many prompts
    sharegpt           the first rounds of conversations in a file, with their output lengths
    timed_trace        the lengths, times and shared prefixes of a trace, which contains no text

The client needs no tokenizer. It counts tokens with the server's /tokenize and collects words that always add exactly
one token; they make a prompt of any length.
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
"""Counts the tokens of a text as a prompt, with the special tokens that the tokenizer adds."""

WORDS = (
    "the of and to in is was for on with as by at from his it an were are which this be or has had not but first one"
    " their its new after who they two her she been other when there all year into over out more some only can if work"
    " time people world city house book water river road hand day night light music name part place land war school"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MIN_WORDS = 8
MAX_CONCURRENT_COUNTS = 32
MAX_TEXT_BYTES = 32 * 1024
"""Longer ShareGPT prompts exceed `MAX_PROMPT` tokens with any tokenizer and need no count."""
MIN_TOKENS, MAX_PROMPT, MAX_TOTAL = 4, 1024, 2048
"""Bounds on a conversation's tokens, as in other benchmarks with ShareGPT."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A request to send, `time_s` seconds after the start; None: at the configured rate."""

    prompt: str
    num_prompt: int
    num_output: int
    time_s: float | None = None


class SingleTokenWords:
    """Words that are one token each, in any sequence of them. Each prompt has `num_special` further tokens."""

    def __init__(self, words: Sequence[str], num_special: int) -> None:
        self.words = words
        self.num_special = num_special

    @classmethod
    async def find(cls, count: Count) -> SingleTokenWords:
        """Find single-token words. Raises `ParameterError` if neither common words nor letters are single tokens."""
        for family in ([f" {word}" for word in WORDS.split()], list(LETTERS)):
            one = await count_all(count, family)
            two = await count_all(count, [piece * 2 for piece in family])
            three = await count_all(count, [piece * 3 for piece in family])
            words = [p for p, a, b, c in zip(family, one, two, three, strict=True) if b - a == c - b == 1]
            if len(words) >= MIN_WORDS:
                mixed = "".join(words)
                num_special = await count(mixed) - len(words)
                if num_special >= 0 and await count(mixed * 2) == num_special + 2 * len(words):
                    return cls(words, num_special)
        raise ParameterError(
            "the tokenizer has no single tokens for common words or letters, so no prompt has a known length; "
            "use the sharegpt dataset",
            param="dataset_name",
        )

    def text(self, num_tokens: int, random: Random) -> str:
        return "".join(random.choices(self.words, k=num_tokens))


async def count_all(count: Count, texts: Sequence[str]) -> list[int]:
    """Count the tokens of each text, `MAX_CONCURRENT_COUNTS` at a time."""
    gate = asyncio.Semaphore(MAX_CONCURRENT_COUNTS)

    async def counted(text: str) -> int:
        async with gate:
            return await count(text)

    return await asyncio.gather(*map(counted, texts))


def local_counter(tokenizer: str) -> Count:
    """Counts with the tokenizer of a model on this machine."""
    from octavo.checkpoint.resolve import open_checkpoint
    from octavo.text.tokenizer import Tokenizer

    encode = Tokenizer.from_checkpoint(open_checkpoint(tokenizer, download=False, weights=False)).encode

    async def count(text: str) -> int:
        return len(encode(text))

    return count


async def make_samples(args: BenchArgs, count: Count) -> list[Sample]:
    """At most `num_prompts` requests. Raises `ParameterError` or `TraceError`."""
    if args.dataset_name == "sharegpt":
        return await sharegpt(args, count)
    words = await SingleTokenWords.find(count)
    make = {"random": random_words, "prefix_repetition": prefix_repetition, "timed_trace": timed_trace}
    return make[args.dataset_name](args, words)


def random_words(args: BenchArgs, words: SingleTokenWords) -> list[Sample]:
    """Random words. Lengths are uniform within the configured ones times 1 +- random_range_ratio."""
    random = Random(args.seed)
    shared = words.text(args.random_prefix_len, random)

    def length(middle: int) -> int:
        spread = int(middle * args.random_range_ratio)
        return random.randint(max(1, middle - spread), middle + spread)

    samples = []
    for _ in range(args.num_prompts):
        num_unique, num_output = length(args.random_input_len), length(args.random_output_len)
        num_unique = max(1, num_unique - words.num_special)
        num_prompt = words.num_special + args.random_prefix_len + num_unique
        samples.append(Sample(shared + words.text(num_unique, random), num_prompt, num_output))
    return samples


def prefix_repetition(args: BenchArgs, words: SingleTokenWords) -> list[Sample]:
    """Equally many prompts for each prefix, in random order."""
    random = Random(args.seed)
    num_prefixes = min(args.prefix_repetition_num_prefixes, args.num_prompts)
    prefixes = [words.text(args.prefix_repetition_prefix_len, random) for _ in range(num_prefixes)]
    num_suffix = max(1, args.prefix_repetition_suffix_len - words.num_special)
    num_prompt = words.num_special + args.prefix_repetition_prefix_len + num_suffix
    samples = [
        Sample(
            prefixes[i % num_prefixes] + words.text(num_suffix, random),
            num_prompt,
            args.prefix_repetition_output_len,
        )
        for i in range(args.num_prompts)
    ]
    if not args.disable_shuffle:
        random.shuffle(samples)
    return samples


def timed_trace(args: BenchArgs, words: SingleTokenWords) -> list[Sample]:
    """A trace. Equal runs of tokens in two prompts become equal text."""
    from octavo.simulate.traces import read_trace

    assert args.dataset_path is not None
    rate = None if args.request_rate == float("inf") else args.request_rate
    path = _existing_file(args.dataset_path)
    arrivals = read_trace(path, scale=args.timed_trace_scale, rate=rate, seed=args.seed)
    samples = []
    for arrival in islice(arrivals, args.num_prompts):
        parts = [words.text(count, Random(f"{args.seed} {token}")) for token, count in arrival.runs]
        num_prompt = arrival.num_prompt + words.num_special
        samples.append(Sample("".join(parts), num_prompt, arrival.num_output, arrival.time_s))
    return samples


async def sharegpt(args: BenchArgs, count: Count) -> list[Sample]:
    """Each conversation's first message, with the length of the second as output. Repeats a file that is too short.

    Skips lengths below `MIN_TOKENS`, prompts above `MAX_PROMPT`, and totals above `MAX_TOTAL`.
    """
    assert args.dataset_path is not None
    path = _existing_file(args.dataset_path)
    pairs = read_conversations(path)
    if not args.disable_shuffle:
        Random(args.seed).shuffle(pairs)
    samples: list[Sample] = []
    for begin in range(0, len(pairs), 4 * MAX_CONCURRENT_COUNTS):
        some = [
            (p, a) for p, a in pairs[begin : begin + 4 * MAX_CONCURRENT_COUNTS] if len(p.encode()) <= MAX_TEXT_BYTES
        ]
        some = [(p, a) for p, a in some if len(a.encode()) <= MAX_TEXT_BYTES or args.sharegpt_output_len]
        prompts = await count_all(count, [prompt for prompt, _ in some])
        if args.sharegpt_output_len is None:
            outputs = await count_all(count, [answer for _, answer in some])
        else:
            outputs = [args.sharegpt_output_len] * len(some)
        for (prompt, _), num_prompt, num_output in zip(some, prompts, outputs, strict=True):
            is_short = num_prompt < MIN_TOKENS or (args.sharegpt_output_len is None and num_output < MIN_TOKENS)
            if not is_short and num_prompt <= MAX_PROMPT and num_prompt + num_output <= MAX_TOTAL:
                samples.append(Sample(prompt, num_prompt, num_output))
        if len(samples) >= args.num_prompts:
            return samples[: args.num_prompts]
    if not samples:
        raise TraceError(f"{path} has no conversation of {MIN_TOKENS} to {MAX_TOTAL} tokens; expected ShareGPT's")
    return [samples[i % len(samples)] for i in range(args.num_prompts)]


def read_conversations(path: Path) -> list[tuple[str, str]]:
    """(prompt, answer) of each conversation with two messages or more. Raises `TraceError`."""
    expected = 'expected a list of {"conversations": [{"value": text}, {"value": text}, ...]}'
    try:
        rows = json.loads(path.read_bytes())
        conversations = [row.get("conversations") or row.get("conversation") or [] for row in rows]
        return [(str(pair[0]["value"]), str(pair[1]["value"])) for pair in conversations if len(pair) >= 2]
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: {' '.join(str(error).split())[:200]}; {expected}") from None
    except (KeyError, TypeError, AttributeError):
        raise TraceError(f"{path}: no conversations; {expected}") from None


def _existing_file(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_file():
        raise ParameterError(f"no file {name!r}; set --dataset-path to the dataset's file", param="dataset_path")
    return path
