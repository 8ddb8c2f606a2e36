"""Replays a dump of the flight recorder: the same calls to the same scheduler, which then decides as it did.

Tokens are made up from block digests, so that prefix cache hits happen again. Only the last token of a full block
identifies its content:

    prompt, output   1 1 1 n1 | 1 1 1 n2 | 1 1 1 n3 | 1 1        n1, n2, ...: numbers for block digests

Two samples that diverge within a block differ in its last token, and the cache compares full blocks only. The tails of
pins are the exception. Sequences that begin like one, and all beams, have token digests there: m1 m2 m3 n1.
"""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from octavo.core import events as ev
from octavo.core.block_pool import _pack
from octavo.core.in_flight import InFlightStep
from octavo.core.plan import StepResult
from octavo.core.request import Request, SelectBeams, Sequence
from octavo.core.scheduler import Scheduler
from octavo.core.snapshot import SchedulerState, new_request, restore_scheduler
from octavo.errors import TraceError
from octavo.view.recording.recorder import DIGEST_BYTES, VERSION, CallKind, RecordedRequest, RecordingFile, plan_crc

MAX_BYTES = 1 << 30
"""Limit of an unpacked dump."""
FILL, STOP, FIRST_TOKEN = 1, 2, 3
NAMES_V5 = {
    "arrivals": "requests", "decides": "beam_search", "given": "host_tokens", "known": "scheduled", "legs": "segments",
    "num_choices": "num_beam_choices", "said": "beam_digests", "skips": "skip_prefix_cache", "why": "reason",
}  # fmt: skip
"""Names of version 5 of the file -> names of today."""


class ReplayedCall(NamedTuple):
    """One call to the scheduler and its result.

    time_s    since the beginning of the recording
    step      of a PLAN: the new step, which may have no plan; of a result: its step
    request   that arrived or was aborted
    finished  requests that a result finished
    """

    kind: CallKind
    time_s: float
    step: InFlightStep | None = None
    request: Request | None = None
    finished: Seq[Request] = ()


class Recording:
    """A dump, and the tokens that stand for its prompts and outputs."""

    def __init__(self, file: RecordingFile, *, whole_blocks: bool = False) -> None:
        self.file = file
        self._whole_blocks = whole_blocks
        self.requests = {request.number: request for request in file.requests}
        self.block_size: int = file.settings["block_size"]
        self._numbers: dict[bytes, int] = {}
        self._token_digests: dict[bytes, bytes] = {}  # block digest -> digests of the block's first tokens
        self._prompt_ends: dict[int, bytes] = {}  # request number -> token digests after its prompt's full blocks
        self._collect_token_digests()

    def _collect_token_digests(self) -> None:
        """Merge the token digests of equal blocks, and of samples with the end of their prompt.

        prompt   a b . .        A request that came before a pin has fewer token digests than one that came after it
        sample   a b c d = n1   with the same block. Each passes its digests on, until none learns more.
        other    a b c d = n1
        """
        size = DIGEST_BYTES * self.block_size
        ends: list[tuple[RecordedRequest, list[bytes]]] = []
        for request in self.file.requests:
            num_full = len(request.block_digests) // DIGEST_BYTES
            recorded = [(request.block_digests, request.token_digests)]
            for sample in request.samples.values():
                recorded.append((request.block_digests + sample.block_digests, sample.token_digests))
            for blocks, tokens in recorded:
                for block, digests in tokens.items():
                    self._learn(blocks[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES], digests)
            for choice in request.beam_choices:
                if isinstance(choice, bytes) and len(choice) == size:
                    self._learn(choice[-DIGEST_BYTES:], choice[:-DIGEST_BYTES])
            if num_end := DIGEST_BYTES * (request.num_prompt % self.block_size):
                known = [tokens.get(num_full, b"")[:num_end] for _, tokens in recorded]
                self._prompt_ends[request.number] = max(known, key=len)
                followers = [s.block_digests[:DIGEST_BYTES] for s in request.samples.values() if s.block_digests]
                if followers:
                    ends.append((request, followers))
        changed = True
        while changed:
            changed = False
            for request, followers in ends:
                num_end = DIGEST_BYTES * (request.num_prompt % self.block_size)
                known = [self._token_digests.get(digest, b"")[:num_end] for digest in followers]
                end = self._prompt_ends[request.number] = max(self._prompt_ends[request.number], *known, key=len)
                for digest in followers:
                    changed |= self._learn(digest, end)

    def _learn(self, block_digest: bytes, token_digests: bytes) -> bool:
        """Store a block's token digests if they are more than are known. Of two lists of one block, one is a prefix of
        the other."""
        more = bool(block_digest) and len(token_digests) > len(self._token_digests.get(block_digest, b""))
        if more:
            self._token_digests[block_digest] = token_digests
        return more

    @classmethod
    def load(cls, path: Path, *, whole_blocks: bool = False) -> Recording:
        """Read a dump. With `whole_blocks`, every token of a block identifies its content: for other block sizes; the
        replay is no longer exact.

        Raises `TraceError` if the file is not a dump or has another version; `OSError` if it cannot be read."""
        try:
            with gzip.open(path) as packed:
                data = packed.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise TraceError(f"{path} has over {MAX_BYTES >> 30} GiB; a dump of the flight recorder has less")
            raw = msgspec.msgpack.decode(data, type=dict[str, Any])
            if (version := raw.get("version")) not in (5, VERSION):
                raise TraceError(f"{path} has version {version} of another Octavo; this one reads {VERSION}")
            file = msgspec.convert(_renamed(raw) if version == 5 else raw, RecordingFile)
        except (gzip.BadGzipFile, EOFError, zlib.error, msgspec.MsgspecError) as error:
            raise TraceError(f"{path} is not a dump of the flight recorder: {error}") from None
        return cls(file, whole_blocks=whole_blocks)

    @property
    def begin_s(self) -> float:
        """The first time in the recording, on the engine's clock."""
        return next((array("d", segment.times_s)[0] for segment in self.file.segments if segment.times_s), 0.0)

    @property
    def duration_s(self) -> float:
        """Seconds from the first time to the last."""
        segments = reversed(self.file.segments)
        return next((array("d", s.times_s)[-1] for s in segments if s.times_s), 0.0) - self.begin_s

    # -- tokens --------------------------------------------------------------------------------------------------------

    def prompt(self, request: RecordedRequest) -> array[int]:
        end = self._prompt_ends.get(request.number, b"")
        return self.tokens_of(request.block_digests, end, request.num_prompt)

    def sample(self, request: RecordedRequest, index: int) -> array[int]:
        """Prompt and output of one sample."""
        sample = request.samples.get(index)
        if sample is None:
            return self.prompt(request)
        digests = request.block_digests + sample.block_digests
        end = sample.token_digests.get(len(digests) // DIGEST_BYTES, b"")
        if not sample.block_digests:
            end = max(end, self._prompt_ends.get(request.number, b""), key=len)
        tokens = self.tokens_of(digests, end, request.num_prompt + sample.num_tokens)
        if sample.stopped:
            tokens[-1] = STOP
        return tokens

    def tokens_of(self, block_digests: bytes, token_digests: bytes, length: int) -> array[int]:
        """`length` tokens: full blocks with these digests, then tokens with these digests, then fill tokens."""
        tokens = array("i")
        for i in range(0, len(block_digests), DIGEST_BYTES):
            tokens += self.block(block_digests[i : i + DIGEST_BYTES])
        if not self._whole_blocks:
            tokens += self._tokens(token_digests)
        return tokens + array("i", (FILL,)) * (length - len(tokens))

    def block(self, digest: bytes) -> array[int]:
        """The tokens of a full block."""
        if self._whole_blocks:
            return array("i", (self.token(digest),)) * self.block_size
        tokens = array("i", (FILL,)) * self.block_size
        if known := self._token_digests.get(digest):
            tokens[: len(known) // DIGEST_BYTES] = self._tokens(known)
        tokens[-1] = self.token(digest)
        return tokens

    def _tokens(self, digests: bytes) -> array[int]:
        return array("i", [self.token(digests[i : i + DIGEST_BYTES]) for i in range(0, len(digests), DIGEST_BYTES)])

    def beam_token(self, choice: bytes) -> int:
        """The token of an entry of `RecordedRequest.beam_choices`."""
        return STOP if len(choice) < DIGEST_BYTES else self.token(choice[-DIGEST_BYTES:])  # `STOP_MARK` is shorter

    def token(self, digest: bytes) -> int:
        """The token that stands for a digest."""
        return self._numbers.setdefault(digest, FIRST_TOKEN + len(self._numbers))

    def replay(self, first_segment: int = 0) -> Player:
        return Player(self, first_segment)


class Player:
    """Replays a recording from the beginning of one of its segments. `scheduler` is in the state of that moment:
    subscribe to its events, then iterate over `calls`.
    """

    def __init__(self, recording: Recording, first_segment: int = 0) -> None:
        self.recording = recording
        file = recording.file
        self.segments = file.segments[first_segment:]
        self._samples: dict[Request, dict[int, array[int]]] = {}
        self._last_step: ev.Step | None = None
        self._corrupt: list[int] = []  # host blocks that the next result reports
        state = self.segments[0].snapshot
        self._num_beam_choices: dict[int, int] = state["num_beam_choices"]
        present = {request["number"] for request in state["requests"]}
        requests = [request for request in file.requests if request.number not in present]
        if first_segment:
            num_added = [segment.kinds.count(CallKind.ADD) for segment in file.segments]
            requests = file.requests[len(file.requests) - sum(num_added[first_segment:]) :]
        self._requests = iter(requests)
        self.scheduler = self._restore()
        self.scheduler.events.subscribe(self._listen)

    def calls(self) -> Iterator[ReplayedCall]:
        """Make every recorded call again.

        Raises `TraceError` where this version of Octavo plans something else than was recorded, or the file is damaged.
        If the engine crashed of a bug in the scheduler, raises the same error at the same call.
        """
        begin_s = self.recording.begin_s
        for number, segment in enumerate(self.segments):
            numbers, costs = iter(array("q", segment.numbers)), iter(array("d", segment.costs))
            checksums = iter(array("I", segment.checksums))
            for kind, at_s in zip(segment.kinds, array("d", segment.times_s), strict=True):
                call = self._call(CallKind(kind), at_s - begin_s, numbers, costs)
                if kind == CallKind.PLAN and next(checksums) != (plan_crc(self._last_step) if call.step else 0):
                    raise TraceError(
                        f"step {self.scheduler.num_steps - 1}, {call.time_s:.3f} s in (segment {number}), was planned "
                        "differently: another version of Octavo made the recording; replay it with that version"
                    )
                yield call

    def _call(self, kind: CallKind, time_s: float, numbers: Iterator[int], costs: Iterator[float]) -> ReplayedCall:
        scheduler = self.scheduler
        if kind is CallKind.PLAN:
            known = scheduler.policy.costs
            known.token_s, known.step_s, known.move_s = next(costs), next(costs), next(costs)
            return ReplayedCall(kind, time_s, scheduler.schedule())
        if kind in (CallKind.RESULT, CallKind.UNEVEN_RESULT, CallKind.PARTIAL_RESULT):
            step = scheduler.in_flight[0]
            lengths, failed = step.plan.num_sampled.tolist(), []
            if kind is not CallKind.RESULT:
                lengths = [next(numbers) for _ in range(next(numbers))]
                failed = [next(numbers) for _ in range(next(numbers))]
            tokens = self._sampled_tokens(step, lengths)
            result = StepResult(tokens, dict.fromkeys(failed, "as recorded"), corrupt=self._corrupt)
            self._corrupt = []
            finished = scheduler.update(step, result, last=kind is not CallKind.PARTIAL_RESULT)
            for request in finished:
                self._samples.pop(request, None)
            return ReplayedCall(kind, time_s, step, None, finished)
        if kind is CallKind.ADD:
            request = self._new_request(next(self._requests))
            scheduler.add(request)
            return ReplayedCall(kind, time_s, None, request)
        if kind is CallKind.ABORT:
            aborted = scheduler.abort(str(next(numbers)), "error" if next(numbers) else "abort")
            return ReplayedCall(kind, time_s, None, aborted)
        if kind is CallKind.STOP:
            request, index = scheduler.requests[str(next(numbers))], next(numbers)
            scheduler.stop(next(seq for seq in request.sequences if seq.index == index))
        elif kind is CallKind.UNPIN:
            scheduler.unpin(str(next(numbers)))
        elif kind is CallKind.RESET:
            scheduler.cache.reset_prefix_cache()
        elif kind is CallKind.FAIL:
            scheduler.fail(scheduler.in_flight[next(numbers)], next(numbers))
        elif kind is CallKind.CONFINE:
            scheduler.confine([scheduler.requests[str(next(numbers))] for _ in range(next(numbers))])
        elif kind is CallKind.STEP_LIMIT:
            scheduler.max_num_scheduled_tokens = next(numbers)
        elif kind is CallKind.CORRUPT:
            self._corrupt = [next(numbers) for _ in range(next(numbers))]
        return ReplayedCall(kind, time_s)

    def _listen(self, event: ev.Event) -> None:
        if isinstance(event, ev.Step):
            self._last_step = event

    # -- results -------------------------------------------------------------------------------------------------------

    def _sampled_tokens(self, step: InFlightStep, lengths: list[int]) -> list[Any]:
        tokens: list[Any] = []
        for i, (seq, length) in enumerate(zip(step.sequences, lengths, strict=True)):
            if i in step.plan.num_samples and seq.request.select_beams is None:
                first = len(seq.request.prompt_token_ids)
                tokens.append([self._output(seq.request, index, first, 1)[0] for index in range(length)])
            else:
                tokens.append(self._output(seq.request, seq.index, len(seq.token_ids), length))
        return tokens

    def _output(self, request: Request, index: int, begin: int, length: int) -> list[int]:
        """The tokens of a sample from a position on. Past the end of what was recorded they do not matter."""
        samples = self._samples.setdefault(request, {})
        if index not in samples:
            samples[index] = self.recording.sample(self.recording.requests[int(request.request_id)], index)
        known = samples[index][begin : begin + length].tolist()
        return known + [FILL] * (length - len(known))

    def _select_beams(self, request: RecordedRequest) -> SelectBeams:
        choices: Iterator[Any] = iter(request.beam_choices)
        for _ in range(self._num_beam_choices.get(request.number, 0)):
            next(choices)

        def select(parents: list[tuple[Sequence, Any]]) -> list[tuple[Sequence, int]]:
            beam_token = self.recording.beam_token
            return [(parents[next(choices)][0], beam_token(next(choices))) for _ in range(next(choices))]

        return select

    # -- requests and the first state ----------------------------------------------------------------------------------

    def _new_request(self, recorded: RecordedRequest) -> Request:
        request = self._request_of({name: getattr(recorded, name) for name in recorded.__struct_fields__}, recorded)
        if recorded.resumed:
            begin = recorded.num_prompt
            request.resume = {
                index: self.recording.sample(recorded, index)[begin : begin + length]
                for index, length in recorded.resumed.items()
            }
            request.forked, request.needs_result = True, False
        return request

    def _request_of(self, fields: SchedulerState, recorded: RecordedRequest) -> Request:
        select = self._select_beams(recorded) if recorded.beam_search else None
        name, prompt = str(recorded.number), self.recording.prompt(recorded)
        return new_request(name, prompt, fields, stop=STOP, salt=recorded.salt, select_beams=select)

    def _tokens_of(self, request: SchedulerState, sequence: SchedulerState) -> array[int]:
        """The tokens of a sequence that was present when a segment began."""
        length = sequence["num_tokens"]
        if (digests := sequence["beam_digests"]) is not None:
            num_bytes = DIGEST_BYTES * (length // self.recording.block_size)
            return self.recording.tokens_of(digests[:num_bytes], digests[num_bytes:], length)
        return self.recording.sample(self.recording.requests[request["number"]], sequence["index"])[:length]

    def _restore(self) -> Scheduler:
        segment, size, settings = self.segments[0], self.recording.block_size, self.recording.file.settings
        state = segment.snapshot
        content: dict[int, bytes] = {}  # seal id -> tokens, as the sequences have them
        for sequence in state["sequences"]:
            tokens = self._tokens_of(state["requests"][sequence["request"]], sequence)
            for i, seal in enumerate(sequence["seal_ids"]):
                content.setdefault(seal, tokens[i * size : (i + 1) * size].tobytes())
        keys: list[bytes | None] = [None] * (settings["num_blocks"] + 1)
        seals = array("q", state["pool"]["seal_id"])
        for block, parent, salt, digest in segment.sealed_blocks:
            tokens = self.recording.block(digest)
            keys[block] = _pack((parent or salt, content.get(seals[block], tokens.tobytes())))

        def make_request(fields: SchedulerState) -> Request:
            return self._request_of(fields, self.recording.requests[fields["number"]])

        return restore_scheduler(settings, state | {"keys": keys}, make_request, self._tokens_of)


def _renamed(value: Any) -> Any:
    """The contents of a file of version 5, with today's names."""
    if isinstance(value, dict):
        return {NAMES_V5.get(name, name): _renamed(item) for name, item in value.items()}
    return [_renamed(item) for item in value] if isinstance(value, list) else value
