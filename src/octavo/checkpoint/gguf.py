"""Opens and checks a GGUF file.

The `gguf` library reads the format; this module adds two things. Arrays are read in one pass: the library creates
three numpy objects per string of the vocabulary, 1.9 s for 49,152 tokens. A truncated or damaged file is rejected on
opening, not in the middle of the weights. `octavo.models.gguf_config` translates the metadata.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).
"""

from __future__ import annotations

import math
import struct
from numbers import Real
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from octavo.errors import CheckpointError, cut

VALUE_TYPES: dict[str, type] = {
    "general.architecture": str,
    "split.count": int,
    "split.no": int,
    "split.tensors.count": int,
    ".embedding_length": int,
    ".block_count": int,
    ".nextn_predict_layers": int,
    ".ssm.inner_size": int,
    ".ssm.time_step_rank": int,
    ".context_length": int,
    ".rope.dimension_count": int,
    ".rope.freq_base": Real,
    ".rope.scale_linear": Real,
    ".rope.scaling.type": str,
    ".rope.scaling.factor": Real,
    ".rope.scaling.attn_factor": Real,
    "tokenizer.ggml.model": str,
    "tokenizer.ggml.pre": str,
    "tokenizer.ggml.tokens": list,
    "tokenizer.ggml.token_type": list,
    "tokenizer.ggml.scores": list,
    "tokenizer.ggml.merges": list,
    "_token_id": int,
    "tokenizer.chat_templates": list,
}
"""Required type of the metadata whose key ends so: all that is computed with or indexed before other code checks it."""


class GGUFFile(gguf.GGUFReader):
    """`gguf.GGUFReader` that reads arrays in one pass instead of creating three numpy views per element.

    As in the library, an array field holds its element type and length before the elements, and `contents()` returns
    the elements. Here an array of numbers is one part, not one part per number.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        item_type, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        kind, count, start = gguf.GGUFValueType(item_type[0]), int(length[0]), orig_offs + 12
        types = [gguf.GGUFValueType.ARRAY, kind]
        if kind == gguf.GGUFValueType.STRING:
            strings, end = self._read_strings(start, count)
            return end - orig_offs, [item_type, length, *strings], list(range(2, 2 + count)), types
        if kind not in self.gguf_scalar_to_np:  # nested arrays, which do not occur in practice
            return super()._get_field_parts(orig_offs, raw_type)
        values = self._get(start, self.gguf_scalar_to_np[kind], count)
        if len(values) != count:
            raise ValueError(f"an array of {count} values reaches past the end of the file")
        return 12 + values.nbytes, [item_type, length, values], [2] if count else [], types

    def _read_strings(self, start: int, count: int) -> tuple[list[memoryview], int]:
        """Read `count` strings from offset `start`, each a 64-bit length and its bytes: (strings, end offset)."""
        data, length_at, at = self.data.data, struct.Struct("=Q").unpack_from, start
        strings = []
        for _ in range(count):
            begin = at + 8
            at = begin + length_at(data, at)[0]
            strings.append(data[begin:at])
        if at > len(data):
            raise ValueError("a string reaches past the end of the file")
        return strings, at

    def value(self, key: str, default: Any = None) -> Any:
        """The metadata value of `key`: a number, bool, str, or a list of them. Raises `CheckpointError` for a wrong
        type."""
        if (field := self.fields.get(key)) is None:
            return default
        try:
            value = field.contents()
        except UnicodeDecodeError as e:
            raise CheckpointError(f"the GGUF metadata {key} is not UTF-8 ({e}); convert the model again") from e
        if field.types[-1] == gguf.GGUFValueType.FLOAT32 and isinstance(value, float):
            value = float(str(np.float32(value)))  # the shortest that rounds to it: 1e-05, not 9.99999974e-06
        kind = next((kind for end, kind in VALUE_TYPES.items() if key.endswith(end)), object)
        if not isinstance(value, kind):
            text = f"the GGUF metadata {key} is {value!r:.60}, it must be of type {kind.__name__}"
            raise CheckpointError(f"{text}; convert the model again")
        return value


def open_gguf(path: Path) -> GGUFFile:
    """Open and check a file, or the first of several parts: its tensors are then those of all parts.

    Raises `CheckpointError` with the place of the damage.
    """
    first = _open_file(path)
    count = first.value("split.count", 1)
    if count < 2:
        return first
    prefix, numbers = path.name[:-20], (first.value("split.no", 0) + 1, count)
    if path.name != _part_name(prefix, *numbers):
        raise CheckpointError(
            f"{path.name} is part {numbers[0]} of {count} and must be named {_part_name('MODEL', *numbers)}"
        )
    if numbers[0] != 1:
        raise CheckpointError(f"{path.name} is part {numbers[0]}; pass the first, {_part_name(prefix, 1, count)}")
    for number in range(2, count + 1):
        part_path = path.with_name(_part_name(prefix, number, count))
        part = _open_file(part_path)
        if (part.value("split.no"), part.value("split.count")) != (number - 1, count):
            raise CheckpointError(f"{part_path} is another part; fetch it again")
        first.tensors += part.tensors
    total = first.value("split.tensors.count")
    if len(first.tensors) != total:
        raise CheckpointError(f"the parts of {path} hold {len(first.tensors)} tensors, not {total}; fetch them again")
    return first


def _part_name(prefix: str, number: int, count: int) -> str:
    """llama.cpp's name of a part."""
    return f"{prefix}-{number:05}-of-{count:05}.gguf"


def _open_file(path: Path) -> GGUFFile:
    try:
        with np.errstate(all="raise"):  # a corrupt offset must not wrap around to a legal one
            reader = GGUFFile(path)
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from e
    except Exception as e:
        # The library checks little: a damaged file raises any error of numpy, struct or an enum.
        detail = cut(e, 200) or type(e).__name__
        raise CheckpointError(
            f"{path} is not an intact GGUF file ({detail}); fetch it again, or convert the model again"
        ) from e
    _check_tensors(path, reader)
    return reader


def _check_tensors(path: Path, reader: GGUFFile) -> None:
    num_bytes = len(reader.data)
    for tensor in reader.tensors:
        num_elements = math.prod(tensor.shape.tolist())  # Python integers: the library's product wraps at 2^64
        end = tensor.data_offset + tensor.n_bytes
        if num_elements != tensor.n_elements or end > num_bytes:
            raise CheckpointError(
                f"{path} is cut short: tensor {cut(tensor.name)} of shape {tensor.shape.tolist()} ends at byte {end}, "
                f"the file at {num_bytes}; fetch it again"
            )


SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "penalty_repeat",
    "xtc_probability": "xtc_probability",
    "mirostat": "mirostat",
    "sequence": "sequence",
}
"""`general.sampling.KEY` -> key of generation_config.json."""


def read_generation_config(reader: GGUFFile) -> dict[str, Any]:
    """Sampling defaults, and the ids that end an output: GGUF has separate entries for end of sequence, of turn and of
    message."""
    ends = [reader.value(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    config = {name: reader.value(f"general.sampling.{key}") for key, name in SAMPLING_KEYS.items()}
    config["eos_token_id"] = sorted({i for i in ends if i is not None}) or None
    return {key: value for key, value in config.items() if value is not None}
