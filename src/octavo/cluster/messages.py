"""What a front and a replica tell each other, beside the messages of `engine.process.ipc`."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

import octavo
from octavo.checkpoint.resolve import open_checkpoint
from octavo.config import EngineArgs
from octavo.engine.process import ipc
from octavo.engine.stats import Health, StatsSnapshot

HEAD_BYTES = 1 << 16
"""What `digest_of` reads of each file: a safetensors header, or the first keys of a GGUF file."""
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


REFUSED = "Refused"
"""`EngineFailed.error` of a replica that has not taken a request: it is not the request's fault."""


class Fingerprint(msgspec.Struct, array_like=True, frozen=True):
    """What a front and its replicas must have in common: a request may move from one replica to another."""

    version: str
    model: str
    digest: str
    dtype: str
    quantization: str
    kv_cache_dtype: str

    def difference(self, other: Fingerprint) -> str:
        """Where `other` differs, for a person; "" if it does not."""
        names = [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]
        return ", ".join(f"{name} {getattr(other, name)!r} instead of {getattr(self, name)!r}" for name in names)


def fingerprint(args: EngineArgs) -> Fingerprint:
    """The fingerprint of an engine with these options on this machine."""
    name = args.model if args.revision is None else f"{args.model}@{args.revision}"
    dtypes = str(args.dtype), args.quantization or "", args.kv_cache_dtype
    return Fingerprint(octavo.__version__, name, digest_of(args), *dtypes)


def digest_of(args: EngineArgs) -> str:
    """A digest of a model's files: of each its name, its size and its first bytes."""
    checkpoint = open_checkpoint(args.model, revision=args.revision, weights=args.load_format != "dummy")
    path = checkpoint.path
    paths = [path] if path.is_file() else [*(path / name for name in MODEL_FILES), *checkpoint.shards]
    digest = hashlib.sha256()
    for file in filter(Path.is_file, paths):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(HEAD_BYTES))
    return digest.hexdigest()[:16]


class Report(msgspec.Struct, array_like=True):
    """A replica's state, for one front.

    ready        of the last engine that ran; None before the first
    sequence     number of the last change of the prefix cache
    is_whole     `stored` is all that the cache holds, not what has changed since the front's last report
    stored       hashes of blocks (`engine.kv_events`)
    """

    fingerprint: Fingerprint
    health: Health
    stats: StatsSnapshot
    ready: ipc.Ready | None = None
    sequence: int = 0
    is_whole: bool = False
    stored: list[int] = []
    removed: list[int] = []


REPORT = msgspec.msgpack.Decoder(Report)
