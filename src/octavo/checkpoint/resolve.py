"""Finds a model's files and reads their configuration, before any weight is read.

`open_checkpoint` accepts a directory, a .gguf file, a name of the catalogue, or a repository of the Hugging Face hub.
It returns a `Checkpoint`: a safetensors directory or one GGUF file, with its configuration in the keys of config.json
either way. Missing, damaged or unsupported files raise one-line errors. No code of a model runs: pickles and
configurations with custom code are rejected.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, Literal

from octavo.checkpoint import catalog
from octavo.errors import CheckpointError, ModelError, ModelNotFoundError, UnsupportedModelError, cut

if TYPE_CHECKING:
    from octavo.checkpoint.gguf import GGUFFile

CONVERSION_PAGE = "docs/models.md"
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "tokenizer*", "vocab*", "merges.txt")
HUB_COPIES = ("consolidated*", "original/*")
"""The same weights in their authors' format, which some repositories hold beside Transformers'."""
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
CUSTOM_CODE_KEYS = ("auto_map", "custom_code", "trust_remote_code")
INDEXES = ("model.safetensors.index.json", "consolidated.safetensors.index.json")
"""The index of Transformers' files, and of Mistral's own, which may be beside them."""
MAX_JSON_BYTES = 256 << 20
"""Maximum size of a JSON file; the largest tokenizer.json in use has about 35 MB."""
MAX_PROBLEMS = 10
"""Maximum number of problems listed in one error."""


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk. `generation_config` has the keys of generation_config.json for both formats."""

    path: Path  # the directory, or the .gguf file
    format: Literal["safetensors", "gguf"]
    config: dict[str, Any]  # the parsed config.json; empty for a GGUF file, whose metadata `octavo.models` reads
    generation_config: dict[str, Any] = field(default_factory=dict)
    shards: tuple[Path, ...] = ()  # the safetensors files; all exist

    @cached_property
    def gguf(self) -> GGUFFile:
        """The open GGUF file, memory-mapped, with every tensor checked to lie within it. Requires `format ==
        "gguf"`."""
        from octavo.checkpoint.gguf import open_gguf

        if self.format != "gguf":
            raise CheckpointError(f"{self.path} is a safetensors directory, not a GGUF file")
        return open_gguf(self.path)


def open_checkpoint(
    model: str | Path, *, revision: str | None = None, download: bool = True, weights: bool = True
) -> Checkpoint:
    """Resolve `model`, in this order: directory, .gguf file, name of the catalogue, hub repository "org/name".

    A directory without config.json does not shadow a catalogue name. With `download=False` a catalogue model or
    repository must be on this machine already. `revision` is a hub branch, tag or commit. With `weights=False` a
    directory needs no weights: config.json suffices for a model's shape. Raises `ModelNotFoundError`,
    `UnsupportedModelError` or `CheckpointError`.
    """
    text = os.fspath(model)
    path = Path(text).expanduser() if text.strip() and "\0" not in text else None
    kind = _path_kind(path) if path is not None else None
    in_catalog = catalog.find(text) is not None
    if path is not None and kind == "directory" and ((path / "config.json").exists() or not in_catalog):
        return _open_directory(path, weights)
    if path is not None and kind == "file":
        return _open_file(path)
    if in_catalog:
        return _open_file(catalog.fetch(text) if download else catalog.cached_path(text))
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", text) and isinstance(model, str) and not text.endswith(".gguf"):
        return _open_hub(text, revision, download)
    raise _not_found(text)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model. Raises `CheckpointError` with the file's name."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{cut(path)} is not a regular file; fetch it again")
        if status.st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{cut(path)} has {status.st_size:,} bytes; at most {MAX_JSON_BYTES:,} are read")
        return parse_json(path.read_bytes())
    except OSError as e:
        raise CheckpointError(f"cannot read {cut(path)}: {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{cut(path)} is not valid JSON ({cut(e, 200)}); fetch it again") from e


def parse_json(text: bytes) -> dict[str, Any]:
    """The JSON object in `text`. Raises `ValueError` if an object in it repeats a key."""
    value = json.loads(text, object_pairs_hook=_reject_duplicate_keys)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__} instead of an object")
    return value


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Programs differ in which of two values they take, so a file with both is two models."""
    value = dict(pairs)
    if len(value) < len(pairs):
        duplicate = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {cut(repr(duplicate))} occurs twice")
    return value


def join_problems(problems: Sequence[str]) -> str:
    """The first ten problems on one line, and the number of the rest."""
    more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
    return "; ".join(problems[:MAX_PROBLEMS]) + more


def reject_custom_code(config: dict[str, Any], path: Path) -> None:
    """Raise `UnsupportedModelError` for a configuration with custom code, without which the model would be another
    one."""
    for key in CUSTOM_CODE_KEYS:
        if config.get(key):
            raise UnsupportedModelError(
                f"{path} asks for custom code ({key!r}), which is not supported; "
                f"models of a built-in architecture can be used, see {CONVERSION_PAGE}"
            )


def _path_kind(path: Path) -> Literal["directory", "file"] | None:
    """The kind of file at `path`; None if there is none. Unusable files raise errors of their own."""
    try:
        mode = path.stat().st_mode
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise ModelNotFoundError(f"{path} is a loop of symbolic links") from e
        if e.errno == errno.EACCES:
            raise ModelNotFoundError(f"{path} cannot be reached: permission denied") from e
        if os.path.islink(path):  # unlike Path.is_symlink, returns False for a name that is too long
            raise ModelNotFoundError(f"{path} is a symbolic link to {os.readlink(path)}, which does not exist") from e
        return None
    if not os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
        raise ModelNotFoundError(f"{path} cannot be read: permission denied")
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise ModelNotFoundError(f"{path} is neither a file nor a directory")
    return "directory" if stat.S_ISDIR(mode) else "file"


def _not_found(text: str) -> ModelNotFoundError:
    near = difflib.get_close_matches(Path(text).name.lower(), catalog.names(), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"names known: {', '.join(catalog.CATALOG)}"
    if re.match(r"(?i)https?://", text):
        hint = 'name a hub repository as "org/name"'
    return ModelNotFoundError(
        f"no model {text[:200]!r}: expected a directory, a .gguf file, a name that `octavo models` lists, or a hub "
        f"repository; {hint}"
    )


def _open_file(path: Path) -> Checkpoint:
    if not path.name.lower().endswith(".gguf"):
        if path.suffix.lower() in PICKLE_SUFFIXES:
            raise _pickle_error(path)
        raise UnsupportedModelError(f"{path} is a file, but not a .gguf file; pass the directory of the model")
    from octavo.checkpoint import gguf as gguf_reader

    reader = gguf_reader.open_gguf(path)
    checkpoint = Checkpoint(path, "gguf", {}, gguf_reader.read_generation_config(reader))
    checkpoint.__dict__["gguf"] = reader  # opened once
    return checkpoint


def _open_directory(path: Path, weights: bool = True) -> Checkpoint:
    names = sorted(os.listdir(path))
    if "config.json" not in names:
        files = [n for n in names if n.endswith(".gguf")]
        hint = f"; to use the GGUF file in it, pass {path / files[0]}" if files else ""
        raise ModelNotFoundError(f"{path} is a directory without config.json, not a model{hint}")
    config = read_json(path / "config.json")
    generation = read_json(path / "generation_config.json") if "generation_config.json" in names else {}
    return Checkpoint(path, "safetensors", config, generation, _shards(path, names) if weights else ())


def _shards(path: Path, names: Sequence[str]) -> tuple[Path, ...]:
    """The weight files. If there is an index it decides; other files in the directory are ignored."""
    for index in INDEXES:
        if index in names:
            return _indexed_shards(path, path / index)
    files = [n for n in names if n.endswith(".safetensors")]
    if "model.safetensors" in files:
        files = ["model.safetensors"]
    if len(files) > 1:
        raise CheckpointError(
            f"{path} holds {len(files)} safetensors files but no model.safetensors.index.json; fetch the model again"
        )
    if not files:
        pickles = [n for n in names if Path(n).suffix.lower() in PICKLE_SUFFIXES]
        if pickles:
            raise _pickle_error(path / pickles[0])
        raise CheckpointError(f"{path} holds no weights (no *.safetensors); fetch the model again")
    return (_checked_file(path / files[0]),)


def _indexed_shards(path: Path, index: Path) -> tuple[Path, ...]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} holds no weight_map; fetch the model again")
    shards, problems = [], []
    for name in sorted({str(v) for v in weight_map.values()}):
        # Checked by name: in the hub's cache every file is a link that leaves the directory.
        outside = PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive or ".." in re.split(r"[/\\]", name)
        if outside or not name.endswith(".safetensors"):
            problems.append(f"{cut(repr(name))} is not a safetensors file inside the directory")
            continue
        try:
            shards.append(_checked_file(path / name))
        except CheckpointError as e:
            problems.append(str(e))
    if problems:
        raise CheckpointError(f"{index}: {join_problems(problems)}; fetch the model again")
    return tuple(shards)


def _checked_file(path: Path) -> Path:
    if not path.is_file():
        raise CheckpointError(f"{cut(path.name)} is missing")
    if not os.access(path, os.R_OK):
        raise CheckpointError(f"{cut(path.name)} cannot be read: permission denied")
    if path.stat().st_size == 0:
        raise CheckpointError(f"{cut(path.name)} is empty")
    return path


def _pickle_error(path: Path) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path} is a pickle, which can run code when read: safetensors or GGUF only; "
        f"{CONVERSION_PAGE} shows the one line that converts it"
    )


def _open_hub(name: str, revision: str | None, download: bool) -> Checkpoint:
    """The copy in the hub's cache if it is complete; else downloads the repository."""
    import huggingface_hub

    def snapshot(*, local: bool) -> Checkpoint:
        path = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(HUB_PATTERNS),
            ignore_patterns=list(HUB_COPIES),
            local_files_only=local,
        )
        return _open_directory(Path(path))

    try:
        return snapshot(local=True)
    except Exception as e:  # not cached, or an interrupted download
        if not download:
            if isinstance(e, ModelError):
                raise
            raise ModelNotFoundError(
                f"{name!r} is not on this machine and is not downloaded here; run `hf download {name}`"
            ) from e
    try:
        return snapshot(local=False)
    except ModelError:
        raise
    except Exception as e:
        raise ModelNotFoundError(f"no directory {name!r}, and not on the hub: {_hub_reason(e)}") from e


def _hub_reason(e: Exception) -> str:
    reasons = {
        "RepositoryNotFoundError": "no such repository, or a private one (log in with `hf auth login`)",
        "GatedRepoError": "the repository is gated; accept its terms on the hub and log in with `hf auth login`",
        "RevisionNotFoundError": "the repository has no such revision",
        "HFValidationError": "not a legal repository name",
        "LocalEntryNotFoundError": "the hub cannot be reached; check the network, or give a directory or a .gguf file",
        "OfflineModeIsEnabled": "offline mode is on; unset HF_HUB_OFFLINE to download",
    }
    for kind in type(e).__mro__:
        if kind.__name__ in reasons:
            return reasons[kind.__name__]
    if isinstance(e, OSError) and e.errno == errno.ENOSPC:
        return "the disk is full; HF_HOME moves the hub's cache"
    return f"{type(e).__name__}; check the network, or give a directory or a .gguf file"
