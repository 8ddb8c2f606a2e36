"""The one form of a quantised weight that all formats of checkpoints are read into. Imports no torch.

A weight is (values - zeros) * scales, where a block of values shares a zero and a scale. Formats differ in the shape of
the blocks, and in how each of the three matrices is stored. `loading.dequantised` computes rows of the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from octavo.checkpoint.keys import KeyUse
from octavo.errors import CheckpointError, UnsupportedModelError, cut
from octavo.integers import cdiv
from octavo.kernels.group_form import GroupForm

if TYPE_CHECKING:
    from octavo.models.loading.stored_tensor import StoredTensor

KEY = "quantization_config"
FILE = f"{KEY} of config.json"
REMEDY = "use the unquantised checkpoint or a GGUF file"
MAX_SIZE = 2**28
FLOATS = ("F32", "F16", "BF16")
KVScheme: TypeAlias = Literal["", "static", "dynamic"]
"""K and V in float8, as a checkpoint asks: with scales in its files, or without; "": it does not ask."""
WHOLE: EllipsisType = ...
"""The rows of a whole tensor, of any number of dimensions."""


class TensorError(Exception):
    """A quantised weight that cannot be computed; the message names the tensor."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """A matrix [rows, columns] as a checkpoint stores it. A vector is one column.

    bits           of an integer in words of int32 or bytes, from the lowest; 0: each number is an element
    along          the dimension along which the integers of a word are neighbours: 0 in a column, 1 in a row
    is_transposed  stored as [columns, rows]
    places         place in a word of each of its integers, along a column; empty: in order
    word_offset    added to each word, without a carry out of it, along a column
    offset         added to each number
    is_exponent    a byte b is 2 ** (b - 127), and 255 is NaN
    is_e2m1        4 bits are a code of `kernels.groups.E2M1`
    """

    name: str
    tensor: StoredTensor
    bits: int = 0
    along: Literal[0, 1] = 1
    is_transposed: bool = False
    places: tuple[int, ...] = ()
    word_offset: int = 0
    offset: int = 0
    is_exponent: bool = False
    is_e2m1: bool = False


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """The weight of a linear layer, [num_out, num_in].

    block   rows and columns that share a scale and a zero; those at the end may be fewer
    groups  which column of `scales` each column has, [num_in]; None: as by `block`
    """

    shape: tuple[int, int]
    block: tuple[int, int]
    values: Numbers
    scales: Numbers
    zeros: Numbers | None = None
    groups: Numbers | None = None

    @property
    def num_scales(self) -> tuple[int, int]:
        return cdiv(self.shape[0], self.block[0]), cdiv(self.shape[1], self.block[1])


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of one quantised module, by the last part of their names.

    module  Transformers' name of it    names  this, and the one in the file, for lists of modules
    """

    module: str
    tensors: dict[str, StoredTensor]

    @property
    def names(self) -> tuple[str, str]:
        return self.module, next(iter(self.tensors.values())).key.rpartition(".")[0]

    def name(self, part: str) -> str:
        return f"{self.module}.{part}"

    def find(self, part: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> StoredTensor:
        """A tensor of one of these dtypes and shapes; no shapes: a matrix. Raises `TensorError`."""
        found = self.tensors.get(part)
        if found is None:
            raise TensorError(f"{cut(self.name(part))} is missing")
        if found.dtype not in dtypes:
            raise TensorError(f"{cut(self.name(part))} has dtype {found.dtype}, expected {' or '.join(dtypes)}")
        if found.shape not in shapes if shapes else len(found.shape) != 2 or 0 in found.shape:
            expected = " or ".join(str(list(shape)) for shape in shapes) or "two dimensions"
            raise TensorError(f"{cut(self.name(part))} has shape {cut(list(found.shape))}, expected {expected}")
        return found


class Format(Protocol):
    """How the files of one checkpoint are quantised: its `quantization_config`, read and checked.

    parts  last parts of the names of a quantised module's tensors; "weight" may also be that of a plain module
    keys   what becomes of the keys of `quantization_config`
    kv_scheme  how K and V are to be stored
    """

    @property
    def parts(self) -> tuple[str, ...]: ...

    @property
    def keys(self) -> KeyUse: ...

    @property
    def kv_scheme(self) -> KVScheme: ...

    @property
    def description(self) -> str:
        """What the files hold, for people: "awq, 4 bits in groups of 128"."""
        ...

    def read(self, parts: Parts) -> QuantisedWeight:
        """The weight of a module. Raises `TensorError`."""
        ...

    def form(self, module: str, num_in: int) -> GroupForm | None:
        """How the file keeps a module of this name; None: not quantised, or of no form. For plans of memory."""
        ...


# -- keys --------------------------------------------------------------------------------------------------------------


def choose(config: dict[str, Any], key: str, choices: tuple[Any, ...], default: Any = None) -> Any:
    """One of `choices`. null is the same as absent. Raises `UnsupportedModelError`."""
    value = config.get(key)
    value = default if value is None else value
    value = value.lower() if isinstance(value, str) else value
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        known = ", ".join(str(choice) for choice in choices)
        raise unsupported(f"{key} {cut(repr(value))} is not supported; supported: {known}")
    return value


def read_group_size(config: dict[str, Any], default: int | None = None) -> int:
    """Columns that share a scale; -1: all."""
    value = config.get("group_size")
    value = default if value is None else value
    if type(value) is not int or not (value == -1 or 1 <= value <= MAX_SIZE):
        raise invalid("group_size", value, f"-1 or a whole number from 1 to {MAX_SIZE}")
    return value


def read_names(config: dict[str, Any], key: str) -> tuple[str, ...]:
    value = config.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise invalid(key, value, "a list of names")
    return tuple(value)


def in_groups(group_size: int) -> str:
    return "a row" if group_size == -1 else f"groups of {group_size}"


def unsupported(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{KEY}: {what}", param=KEY)


def invalid(key: str, value: object, expected: str) -> CheckpointError:
    found = "is missing" if value is None else f"is {cut(repr(value))}"
    return CheckpointError(f"{KEY}: {key} {found}; expected {expected}", param=KEY)


def is_excluded(module: str, names: tuple[str, ...]) -> bool:
    """names: an excluded module's whole name, its first parts or its last ones; * stands for anything"""
    return any(fnmatchcase(f".{module}.", f"*.{name}.*") for name in names)


def check_excluded(parts: Parts, names: tuple[str, ...], key: str) -> None:
    """Raise `TensorError` for a quantised module that `key` excludes."""
    if any(is_excluded(module, names) for module in parts.names):
        raise TensorError(f"{cut(parts.module)} is quantised, although {key} lists it")
