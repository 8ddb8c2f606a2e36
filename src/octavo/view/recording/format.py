"""The file of the flight recorder: gzip over msgpack. `Segment` is a snapshot and the calls to the scheduler after it.

A recording holds no text and no tokens. Blocks of prompts and outputs are stored as 8-byte digests under a key that is
discarded with the recorder: a recording shows which requests share content, not the content.
"""

from __future__ import annotations

import gzip
import os
import zlib
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec

from octavo.core import events as ev
from octavo.core.snapshot import State
from octavo.errors import TraceError

VERSION = 6
DIGEST_BYTES = 8
"""Among a million blocks, two digests collide by chance once in forty million recordings."""
STOP_MARK = b"stop"
"""Stands in place of a digest."""
MAX_BYTES = 1 << 30
"""Limit of an unpacked file."""


class CallKind(IntEnum):
    """A recorded call to the scheduler, and what `Segment.numbers` holds for it.

    ADD, RESET      nothing; ADD takes the next request of the segment
    ABORT           the request, and 1 if it failed
    UNPIN           the request
    STOP            the request, and the index of the sample that ended in a stop string
    PLAN            nothing; `costs` has preemption's three costs in seconds, `checksums` the plan's checksum
    RESULT          nothing: all tokens of the oldest plan in flight returned
    UNEVEN_RESULT   the number of slices, the number of tokens of each; the number of failed slices, and their indices
    PARTIAL_RESULT  the same; more of the result follows
    FAIL            the index of the failed plan in flight, and the new step limit if it ran out of memory, else 0
    STEP_LIMIT      the new step limit
    CONFINE         the number of requests that alone are planned from here on, and the requests; 0: all are
    CORRUPT         the number of corrupt host blocks that the next result reports, and their ids
    ACCEPTED        the number of drafts that the next result found right
    """

    ADD = 0
    ABORT = 1
    STOP = 2
    UNPIN = 3
    RESET = 4
    PLAN = 5
    RESULT = 6
    UNEVEN_RESULT = 7
    PARTIAL_RESULT = 8
    FAIL = 9
    STEP_LIMIT = 10
    CONFINE = 11
    CORRUPT = 12
    ACCEPTED = 13


class RecordedSample(msgspec.Struct, array_like=True):
    """An output: its number of tokens, and whether the last one is a stop token.

    block_digests   of its full blocks, after those of the prompt
    token_digests   as `RecordedRequest.token_digests`, for blocks after the prompt's full ones
    """

    num_tokens: int
    stopped: bool
    block_digests: bytes
    token_digests: dict[int, bytes] = {}


class RecordedRequest(msgspec.Struct, array_like=True):
    """A request. `block_digests` are those of the full blocks of its prompt.

    resumed        index -> number of output tokens that another engine had generated
    samples        by index, as far as they have been generated; empty for a beam search
    beam_choices   of a beam search: for each step the number of continuations, and for each continuation the index of
                   its parent and the encoded token: its token digest; if it fills a block, the token digests of the
                   block and then the block digest; `STOP_MARK` if it ends the beam
    token_digests  block index of the prompt -> digests of its first tokens, as many as it has in common with the tail
                   of a pin; for the last block of a beam search, of all tokens. A token digest covers a token and those
                   before it in the block
    marks          as the request's, in tokens of the prompt
    """

    number: int
    num_prompt: int
    max_tokens: int
    width: int
    num_draws: int
    beam_search: bool
    constrained: bool
    pin: bool
    priority: int
    skip_prefix_cache: bool
    salt: bytes
    block_digests: bytes
    resumed: dict[int, int] = {}
    samples: dict[int, RecordedSample] = {}
    beam_choices: list[int | bytes] = []
    token_digests: dict[int, bytes] = {}
    tenant: int = 0
    rank: int = 0
    num_draft_tokens: int = 0
    marks: list[int] = []


class Segment(msgspec.Struct, array_like=True):
    """A part of a recording. Arrays are bytes: u8 `CallKind`s, f64 seconds, i64 numbers, f64 costs and u32 checksums.

    snapshot        as `Scheduler.snapshot` returns it, without `keys`. Requests also have their `number`, sequences
                    their `beam_digests`: of a beam's full blocks and of the tokens after them, None for other
                    sequences. `num_beam_choices`: number of a request -> length of `beam_choices` at that time
    sealed_blocks   (block, seal id of its parent, salt if it has none, block digest), see `Digests.of_sealed`
    """

    snapshot: State
    sealed_blocks: list[tuple[int, int, bytes, bytes]]
    kinds: bytes
    times_s: bytes
    numbers: bytes
    costs: bytes
    checksums: bytes


class RecordingFile(msgspec.Struct):
    """Everything a dump holds. `requests` are in order of arrival; those present when the first segment began come
    first."""

    version: int
    reason: str
    settings: State
    engine: dict[str, Any]
    requests: list[RecordedRequest]
    segments: list[Segment]


def plan_crc(step: ev.Step) -> int:
    """A checksum of a plan's `Step` event, by which a replay detects that it planned something else. An empty plan has
    no event, and 0 as its checksum."""
    return zlib.crc32(repr(tuple(step)).encode())


def write_file(file: RecordingFile, path: Path) -> None:
    """Write a dump that only its owner can read, or nothing. Raises `OSError`."""
    data = gzip.compress(msgspec.msgpack.encode(file), compresslevel=1)
    part = path.with_suffix(".part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            out.write(data)
        part.replace(path)
    finally:  # an incomplete file, of a full disk for example, must not stay
        part.unlink(missing_ok=True)


def read_file(path: Path) -> RecordingFile:
    """Read a dump. Raises `TraceError` if the file is not a dump or has another version; `OSError` if it cannot be
    read."""
    try:
        with gzip.open(path) as packed:
            data = packed.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise TraceError(f"{path} has over {MAX_BYTES >> 30} GiB; a dump of the flight recorder has less")
        raw = msgspec.msgpack.decode(data, type=dict[str, Any])
        if (version := raw.get("version")) != VERSION:
            raise TraceError(f"{path} has version {version} of another Octavo; this one reads {VERSION}")
        return msgspec.convert(raw, RecordingFile)
    except (gzip.BadGzipFile, EOFError, zlib.error, msgspec.MsgspecError) as error:
        raise TraceError(f"{path} is not a dump of the flight recorder: {error}") from None
