"""The interface between scheduler and executor: `StepPlan` one way, `StepResult` back.

A plan is plain data: the memory operations of one step and the positions that it computes. The scheduler takes all
decisions; the executor carries them out.

An executor must keep stream order. Plan k+1 runs after plan k on the device, and within a plan the order is:

    row setups and table writes -> swaps out -> swaps in -> copies -> slices (in any order among themselves)

A plan owns its data, and nothing in it aliases live state, so the device may read it late. It encodes to bytes, for an
executor in another process: a header, int32 numbers, then the row setups. So does its result: a header, int32 numbers,
float64 numbers, then the texts of errors.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Container, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from octavo.core.types import BlockId, HostBlockId, Row
from octavo.errors import ParameterError, PlanError
from octavo.params.sampling_params import SamplingParams


class BlockCopy(NamedTuple):
    """Copy-on-write: a whole block, over all layers, device to device."""

    src: BlockId
    dst: BlockId


class SwapOut(NamedTuple):
    """Device to host."""

    src: BlockId
    dst: HostBlockId


class SwapIn(NamedTuple):
    """Host to device."""

    src: HostBlockId
    dst: BlockId


class TableWrite(NamedTuple):
    """block_tables[line, start : start + len(block_ids)] = block_ids. A new row starts with its whole tables.

    line  a row has one for each group, in their order, and two for its state: row * num_lines + group. The first of
          these has the blocks that slices write, the second those that the row's next slice reads. Each slice sets
          the second to the first
    """

    line: int
    start: int
    block_ids: tuple[BlockId, ...]


class RowSetup(NamedTuple):
    """Assigns a row to a sequence: every token sampled on the row from now on belongs to it.

    Sampling noise is a function of (seed, sample_index, position) only. `stop_ids` stop the sequence early on the
    device; the host makes the final decision.

    num_prompt          tokens of the prompt; later ones are output
    token_ids           all tokens of the sequence, complete because no token is in flight when a row is assigned. Only
                        if `SamplingParams.needs_history` or the request drafts, else None. The device appends its
                        sampled tokens and the host tokens of slices
    returns_candidates  beam search: slices with `num_samples` return the top candidates, best first, as pairs of
                        (log-probability, token), and sample nothing
    salt                that of the request if it drafts: drafts may come from requests with the same salt
    """

    row: Row
    sampling_params: SamplingParams
    seed: int
    sample_index: int
    stop_ids: frozenset[int]
    num_prompt: int = 0
    token_ids: array[int] | None = None
    returns_candidates: bool = False
    salt: bytes = b""


class Drafts(NamedTuple):
    """Speculation of a slice: `num_passes` forward passes, each over the row's last token and up to `num_draft_tokens`
    drafts after it.

    A pass samples at each position as it would without drafts, and continues while the draft equals the sampled token.
    It accepts 0 to `num_draft_tokens` drafts and returns one token more. The device cuts a pass's drafts so that the
    slice returns at most its `num_sampled` tokens and writes nothing at or after `starts + counts`, accepted or not.
    """

    num_passes: int
    num_draft_tokens: int


class Slice(NamedTuple):
    """One sequence's part of a step. `StepPlan.slices` yields these for callers that are not performance-critical.

    start, num_positions  positions [start, start + num_positions) are computed
    num_sampled           the last `num_sampled` positions each sample a token. All but the first of these positions are
                          the decode window, whose inputs are the tokens just sampled on the device
    num_samples           tokens from the last row of logits: 1, the samples of a request about to fork, or the
                          candidates of a beam search
    token_ids             the input tokens known to the host; None if the row holds the last token
    drafts                how it speculates, None if it does not. If it does, both numbers are upper bounds

        position   start                  start + num_positions
           |  chunk of known tokens  |  window    |
           +-------------------------+------------+
                                  ^ the first token is sampled from this position
    """

    row: Row
    start: int
    num_positions: int
    num_sampled: int
    num_samples: int
    token_ids: array[int] | None
    drafts: Drafts | None = None


T = TypeVar("T")
COLUMN = "I"
"""Array type of a plan's columns: int32 numbers from 0 on. Python fills unsigned arrays three times as fast."""
VERSION = 6
"""Format of encoded plans and results. Both sides must be of the same version."""

_EMPTY: array[int] = array(COLUMN)
_MAGIC = b"octp"
_HEADER = struct.Struct("=4sIq10I")
_RESULT_MAGIC = b"octr"
_RESULT_HEADER = struct.Struct("=4sI8I")
_NUMBERS = {f.name: "d" if f.type == "float" else "i" for f in fields(SamplingParams) if f.type in ("float", "int")}
"""The numbers among the sampling parameters, and their codes in a setup's bytes."""
_SETUP = struct.Struct(f"=3Iq{''.join(_NUMBERS.values())}2i?7i")
_TOP_BYTE = 3 if sys.byteorder == "little" else 0
_NONE = -2
"""Stands for None where -1 has a meaning."""


class StepPlan:
    """One step as parallel columns with one entry per slice, without an object per slice because host time counts.

    rows, starts, counts   the slice's row, first position and number of positions: arrays of int32
    num_sampled            tokens that the slice returns: 0 for a prefill chunk, 1, or the length of a decode window
    num_samples            slice -> tokens taken from its last row of logits, where that is not 1
    drafts                 slice -> how it speculates, if it does: `counts` and `num_sampled` are upper bounds then, and
                           so are the columns of the row's later slices until its result is known. The device continues
                           where the row is. Columns are exact for slices with host tokens
    bitmask_slices         slices of structured outputs. Each of their tokens is sampled through a bitmask, which is put
                           while the step runs, once all earlier tokens are known
    host_tokens            slice -> its first input tokens; absent: the row's last token. They clear the row's done flag
    """

    __slots__ = (
        "bitmask_slices",
        "copies",
        "counts",
        "drafts",
        "host_tokens",
        "num_sampled",
        "num_samples",
        "row_setups",
        "rows",
        "starts",
        "step",
        "swap_ins",
        "swap_outs",
        "table_writes",
    )

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self.rows = _EMPTY[:]
        self.starts = _EMPTY[:]
        self.counts = _EMPTY[:]
        self.num_sampled = _EMPTY[:]
        self.num_samples: dict[int, int] = {}
        self.drafts: dict[int, Drafts] = {}
        self.bitmask_slices: list[int] = []
        self.host_tokens: dict[int, array[int]] = {}
        self.row_setups: list[RowSetup] = []
        self.table_writes: list[TableWrite] = []
        self.swap_outs: list[SwapOut] = []
        self.swap_ins: list[SwapIn] = []
        self.copies: list[BlockCopy] = []

    def set_slices(self, rows: list[Row], starts: list[int], counts: list[int], num_sampled: list[int]) -> None:
        """Set the columns. The scheduler appends to lists, which is faster than appending to arrays."""
        self.rows, self.starts = array(COLUMN, rows), array(COLUMN, starts)
        self.counts, self.num_sampled = array(COLUMN, counts), array(COLUMN, num_sampled)

    def __bool__(self) -> bool:
        """False if there is nothing to do. A plan with swaps alone is true: dropping it would lose their copies."""
        return bool(self.rows or self.swap_outs or self.swap_ins)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def num_bitmask_columns(self) -> int:
        """The number of leading token columns that wait for bitmasks."""
        return max(map(self.num_passes, self.bitmask_slices), default=0)

    def num_passes(self, i: int) -> int:
        """Forward passes of a slice that samples: its columns of tokens."""
        return self.drafts[i].num_passes if i in self.drafts else self.num_sampled[i]

    @property
    def most_passes(self) -> int:
        """Forward passes of the whole plan, at most; 0 for a plan without slices."""
        if not self.drafts:
            return max(1, *self.num_sampled) if self.rows else 0
        return max(1, *map(self.num_passes, range(len(self.rows))))

    def num_unverified(self, i: int) -> int:
        """Tokens of `num_sampled` that a slice does not return if every draft is rejected."""
        return self.num_sampled[i] - self.drafts[i].num_passes if i in self.drafts else 0

    def slices(self) -> Iterator[Slice]:
        for i, columns in enumerate(zip(self.rows, self.starts, self.counts, self.num_sampled, strict=True)):
            yield Slice(*columns, self.num_samples.get(i, 1), self.host_tokens.get(i), self.drafts.get(i))

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """Return the plan as bytes, in this machine's byte order. `decode` is the inverse.

        Row setups lose the parameters that no device needs: texts, limits of length, kinds of output.
        """
        ints: list[int] = []
        for pair in self.num_samples.items():
            ints += pair
        for i, drafts in self.drafts.items():
            ints += i, *drafts
        ints += self.bitmask_slices
        for i, tokens in self.host_tokens.items():
            ints += i, len(tokens)
        for row, start, block_ids in self.table_writes:
            ints += row, start, len(block_ids), *block_ids
        for pairs in (self.swap_outs, self.swap_ins, self.copies):
            ints += chain.from_iterable(pairs)
        header = _HEADER.pack(
            _MAGIC,
            VERSION,
            self.step,
            len(self.rows),
            len(self.num_samples),
            len(self.drafts),
            len(self.bitmask_slices),
            len(self.host_tokens),
            len(self.table_writes),
            len(self.swap_outs),
            len(self.swap_ins),
            len(self.copies),
            len(self.row_setups),
        )
        columns = header, self.rows, self.starts, self.counts, self.num_sampled, array(COLUMN, ints)
        return b"".join((*columns, *self.host_tokens.values(), *map(_encode_setup, self.row_setups)))

    @classmethod
    def decode(cls, data: bytes) -> StepPlan:
        """Return the plan that `encode` made these bytes of. Takes time and memory proportional to their length.

        Raises `PlanError` for bytes of another version, of a wrong length, or that are no plan.
        """
        reader = _Reader(data)
        step, *counts = reader.header(_HEADER, _MAGIC)
        num_slices, num_samples, num_drafts, num_bitmasks, num_inputs, num_writes, *num_pairs, num_setups = counts
        plan = cls(step)
        plan.rows, plan.starts, plan.counts, plan.num_sampled = (reader.ints(num_slices, COLUMN) for _ in range(4))
        plan.num_samples = dict(reader.pairs(num_samples))
        drafts = reader.ints(3 * num_drafts)
        plan.drafts = {drafts[j]: Drafts(*drafts[j + 1 : j + 3]) for j in range(0, len(drafts), 3)}
        plan.bitmask_slices = reader.ints(num_bitmasks).tolist()
        inputs = reader.pairs(num_inputs)
        for _ in range(num_writes):
            row, start, num_blocks = reader.ints(3)
            plan.table_writes.append(TableWrite(row, start, tuple(reader.ints(num_blocks))))
        outs, ins, copies = map(reader.pairs, num_pairs)
        plan.swap_outs = [SwapOut(*pair) for pair in outs]
        plan.swap_ins = [SwapIn(*pair) for pair in ins]
        plan.copies = [BlockCopy(*pair) for pair in copies]
        plan.host_tokens = {i: reader.ints(num_tokens) for i, num_tokens in inputs}
        for i in chain(plan.num_samples, plan.drafts, plan.bitmask_slices, plan.host_tokens):
            if i >= num_slices:
                raise PlanError(f"the plan names slice {i} and has {num_slices}; its bytes are damaged")
        plan.row_setups = [_decode_setup(reader) for _ in range(num_setups)]
        reader.end()
        return plan


def _encode_setup(setup: RowSetup) -> bytes:
    params, history = setup.sampling_params, setup.token_ids
    allowed, bias, words = params.allowed_token_ids, params.logit_bias or {}, params.bad_words_token_ids or ()
    fixed = _SETUP.pack(
        setup.row,
        setup.sample_index,
        setup.num_prompt,
        setup.seed,
        *(getattr(params, name) for name in _NUMBERS),
        _NONE if params.logprobs is None else params.logprobs,
        _NONE if params.prompt_logprobs is None else params.prompt_logprobs,
        setup.returns_candidates,
        _NONE if params.best_of is None else params.best_of,
        len(setup.stop_ids),
        _NONE if history is None else len(history),
        _NONE if allowed is None else len(allowed),
        len(bias),
        len(words),
        len(setup.salt),
    )
    ints = array("i", chain(sorted(setup.stop_ids), history or (), allowed or (), bias))
    words_ints = array("i", chain.from_iterable((len(word), *word) for word in words))
    return b"".join((fixed, ints, array("d", bias.values()), words_ints, setup.salt))


def _decode_setup(reader: _Reader) -> RowSetup:
    row, sample_index, num_prompt, seed, *rest = reader.unpack(_SETUP)
    numbers, rest = dict(zip(_NUMBERS, rest, strict=False)), rest[len(_NUMBERS) :]
    logprobs, prompt_logprobs, returns_candidates, best_of, num_stops, num_history, num_allowed, *rest = rest
    num_biases, num_words, num_salt = rest
    stop_ids = frozenset(reader.ints(num_stops))
    history = None if num_history == _NONE else reader.ints(num_history)
    allowed = None if num_allowed == _NONE else reader.ints(num_allowed).tolist()
    biased = reader.ints(num_biases)
    bias = dict(zip(biased, reader.doubles(num_biases), strict=True))
    words = [reader.ints(reader.ints(1)[0]).tolist() for _ in range(num_words)]
    try:
        params = SamplingParams(
            **numbers,
            best_of=None if best_of == _NONE else best_of,
            logit_bias=bias or None,
            allowed_token_ids=allowed,
            bad_words_token_ids=words,
            max_tokens=None,
            logprobs=None if logprobs == _NONE else logprobs,
            prompt_logprobs=None if prompt_logprobs == _NONE else prompt_logprobs,
            detokenize=False,
        )
    except ParameterError as error:
        raise PlanError(f"the plan has parameters that no request can have: {error}; its bytes are damaged") from None
    salt = reader.take(num_salt)
    return RowSetup(row, params, seed, sample_index, stop_ids, num_prompt, history, returns_candidates, salt)


class _Reader:
    """Reads encoded data from the front. Raises `PlanError` instead of reading past its end."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, num_bytes: int) -> bytes:
        begin, size = self.at, len(self.data)
        self.at += num_bytes
        if num_bytes < 0 or self.at > size:
            raise PlanError(f"the plan's field at byte {begin} has {num_bytes} bytes of {size - begin}; it is damaged")
        return self.data[begin : self.at]

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.take(form.size))

    def header(self, form: struct.Struct, magic: bytes) -> tuple[Any, ...]:
        """Return what follows the magic bytes and the version."""
        found, version, *rest = self.unpack(form)
        if found != magic:
            raise PlanError(f"bytes that begin with {found!r} are no plan or result; send what `encode` returns")
        if version != VERSION:
            text = f"the plan or result has format version {version} and this process reads {VERSION}"
            raise PlanError(f"{text}; run the same version of Octavo in all processes")
        return tuple(rest)

    def end(self) -> None:
        if self.at != len(self.data):
            raise PlanError(f"the plan ends after {self.at} of {len(self.data)} bytes; send each plan as one message")

    def ints(self, num: int, typecode: str = "i") -> array[int]:
        """Return the next `num` int32 numbers, which must not be negative."""
        data = self.take(4 * num)
        if not data[_TOP_BYTE::4].isascii():
            raise PlanError(f"the plan has a negative number before byte {self.at}; its bytes are damaged")
        return array(typecode, data)

    def pairs(self, num: int) -> Iterable[tuple[int, int]]:
        ints = self.ints(2 * num)
        return zip(ints[::2], ints[1::2], strict=True)

    def doubles(self, num: int) -> array[float]:
        return array("d", self.take(8 * num))

    def text(self, num_bytes: int) -> str:
        try:
            return self.take(num_bytes).decode()
        except UnicodeDecodeError:
            raise PlanError(f"the text before byte {self.at} is no text; its bytes are damaged") from None


class TokenLogprobs(NamedTuple):
    """The model's log-probabilities at one position, before penalties, temperature and filters.

    rank                the token's rank in the vocabulary, from 1
    top_ids, top        the requested number of top tokens, best first, and their log-probabilities
    """

    logprob: float
    rank: int
    top_ids: list[int]
    top: list[float]


@dataclass(slots=True)
class StepResult:
    """The result of a step, or of a part of it.

    tokens    per slice: the sampled tokens in order; none for a prefill chunk. With drafts there may be fewer than
              planned. A decode window that met a stop id on the device may be shorter than planned, or padded: the host
              cuts it at the first stop token. A slice with
              `num_samples` has its samples, or its candidates for `Request.select_beams` as (logprob, token)
    errors    slice -> what is wrong with it, such as non-finite logits. Only that request fails
    logprobs  slice -> one entry per token, if the request wants them
    prompt_logprobs  slice -> (position, entries): entries for the prompt's tokens from that position on, if wanted
    drafts    slice -> (drafts that were computed, those of them that were right) of each pass with any
    corrupt   host blocks of `swap_ins` whose content changed while they were swapped out. Reported once, with the first
              part of a result; everything that the plan computed from them is wrong
    """

    tokens: Seq[Seq[Any]]
    errors: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
    drafts: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    corrupt: list[HostBlockId] = field(default_factory=list)

    def encode(self) -> bytes:
        """Return the result as bytes, in this machine's byte order. `decode` is the inverse."""
        ints: list[int] = []
        doubles: list[float] = []
        for tokens in self.tokens:
            has_candidates = bool(tokens) and isinstance(tokens[0], tuple)
            ints += len(tokens), has_candidates
            if has_candidates:
                doubles += (logprob for logprob, _ in tokens)
            ints += (token for _, token in tokens) if has_candidates else tokens
        texts = [text.encode("utf-8", "backslashreplace") for text in self.errors.values()]
        for i, text in zip(self.errors, texts, strict=True):
            ints += i, len(text)
        for i, entries in self.logprobs.items():
            ints.append(i)
            _put_entries(entries, ints, doubles)
        for i, (position, entries) in self.prompt_logprobs.items():
            ints += i, position
            _put_entries(entries, ints, doubles)
        for i, passes in self.drafts.items():
            ints += i, len(passes), *chain.from_iterable(passes)
        ints += self.corrupt
        lists = self.tokens, self.errors, self.logprobs, self.prompt_logprobs, self.drafts, self.corrupt
        header = _RESULT_HEADER.pack(_RESULT_MAGIC, VERSION, len(ints), len(doubles), *map(len, lists))
        return b"".join((header, array("i", ints), array("d", doubles), *texts))

    @classmethod
    def decode(cls, data: bytes) -> StepResult:
        """Return the result that `encode` made these bytes of. Takes time and memory proportional to their length.

        Raises `PlanError` for bytes of another version, of a wrong length, or that are no result.
        """
        reader = _Reader(data)
        num_ints, num_doubles, *counts = reader.header(_RESULT_HEADER, _RESULT_MAGIC)
        ints, doubles = iter(reader.ints(num_ints)), iter(reader.doubles(num_doubles))
        num_slices, num_errors, num_logprobs, num_prompts, num_drafts, num_corrupt = counts
        result = cls(tokens := [])
        try:
            for _ in range(num_slices):
                num, has_candidates = next(ints), next(ints)
                logprobs = _next(num, doubles) if has_candidates else []
                found = _next(num, ints)
                tokens.append(list(zip(logprobs, found, strict=True)) if has_candidates else found)
            sizes = {next(ints): next(ints) for _ in range(num_errors)}
            result.logprobs = {next(ints): _next_entries(ints, doubles) for _ in range(num_logprobs)}
            result.prompt_logprobs = {
                next(ints): (next(ints), _next_entries(ints, doubles)) for _ in range(num_prompts)
            }
            result.drafts = {
                next(ints): [(next(ints), next(ints)) for _ in range(next(ints))] for _ in range(num_drafts)
            }
            result.corrupt = _next(num_corrupt, ints)
        except StopIteration:
            raise PlanError("the result has fewer numbers than its header counts; its bytes are damaged") from None
        result.errors = {i: reader.text(size) for i, size in sizes.items()}
        reader.end()
        if any(True for _ in ints) or any(True for _ in doubles):
            raise PlanError("the result has more numbers than its header counts; its bytes are damaged")
        for i in chain(result.errors, result.logprobs, result.prompt_logprobs, result.drafts):
            if i >= num_slices:
                raise PlanError(f"the result names slice {i} and has {num_slices}; its bytes are damaged")
        return result

    def drop(self, slices: Container[int]) -> None:
        """Remove all results of these slices."""
        self.tokens = [() if i in slices else tokens for i, tokens in enumerate(self.tokens)]
        by_slice: tuple[dict[int, Any], ...] = self.errors, self.logprobs, self.prompt_logprobs, self.drafts
        for results in by_slice:
            for i in [i for i in results if i in slices]:
                del results[i]


def _put_entries(entries: list[TokenLogprobs], ints: list[int], doubles: list[float]) -> None:
    ints.append(len(entries))
    for logprob, rank, top_ids, top in entries:
        ints += rank, len(top_ids), *top_ids
        doubles += logprob, *top


def _next_entries(ints: Iterator[int], doubles: Iterator[float]) -> list[TokenLogprobs]:
    entries = []
    for _ in range(next(ints)):
        rank, num_top = next(ints), next(ints)
        entries.append(TokenLogprobs(next(doubles), rank, _next(num_top, ints), _next(num_top, doubles)))
    return entries


def _next(num: int, numbers: Iterator[T]) -> list[T]:
    return [next(numbers) for _ in range(num)]
