"""The formats of https://github.com/vllm-project/compressed-tensors: a scheme for each group of modules.

int-, float- and naive-quantized    weight  [num_out, num_in] int8 or e4m3
pack-quantized    weight_packed  [num_out, num_in * bits / 32] int32    weight_shape  num_out and num_in
weight_scale    [] or [1]; [num_out] or [num_out, 1]; [num_out, num_groups]; or of blocks
weight_zero_point    likewise; pack-quantized packs those of groups and rows along num_out
weight_g_idx    [num_in], the group of each input    input_scale    of activations, which are not quantised here
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from octavo.checkpoint.keys import KeyTable, KeyUse
from octavo.errors import cut
from octavo.integers import cdiv
from octavo.kernels.group_form import GroupForm
from octavo.models.quantization.form import (
    FILE,
    FLOATS,
    REMEDY,
    WHOLE,
    KVScheme,
    Numbers,
    Parts,
    QuantisedWeight,
    TensorError,
    choose,
    in_groups,
    invalid,
    read_group_size,
    read_names,
    unsupported,
)
from octavo.models.quantization.fp8 import read_block

KEYS = KeyTable(
    read=("quant_method", "config_groups", "format", "ignore", "sparsity_config", "kv_cache_scheme"),
    inert=("quantization_status", "global_compression_ratio", "version", "run_compressed", "dequantize",
           "use_optimized_inference"),
    refused={"transform_config": ({},), "moe_sparsity_config": ()},
)  # fmt: skip
GROUP_KEYS = KeyTable(
    read=("targets", "weights", "format"), inert=("input_activations",), refused={"output_activations": ()}
)
WEIGHT_KEYS = KeyTable(
    read=("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric", "actorder"),
    inert=("observer", "observer_kwargs", "scale_dtype", "zp_dtype"),  # the tensors have dtypes
    refused={"dynamic": (False,)},
)
KV_KEYS = KeyTable(
    read=("num_bits", "type", "strategy", "symmetric", "dynamic"),
    inert=("observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
    refused={"group_size": (), "block_structure": (), "actorder": ()},
)
PACKED = "pack-quantized"
STORED = {  # format -> (type, bits) of weights -> dtype of the tensor
    PACKED: {("int", 4): "I32", ("int", 8): "I32"},
    "int-quantized": {("int", 4): "I8", ("int", 8): "I8"},
    "float-quantized": {("float", 8): "F8_E4M3"},
    "naive-quantized": {("int", 4): "I8", ("int", 8): "I8", ("float", 8): "F8_E4M3"},
}
MAX_PATTERN = 500
MAX_CHOICES = 6  # a name has some 50 characters, and each choice may multiply the steps by that


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of one group of modules are quantised. group_size: -1 for strategies without groups"""

    targets: tuple[str, ...]
    format: str
    kind: str
    bits: int
    strategy: str
    group_size: int
    block: tuple[int, int] | None
    symmetric: bool
    has_order: bool

    @property
    def description(self) -> str:
        kind = "fp8 (e4m3)" if self.kind == "float" else f"{self.bits} bits"
        shapes = {"tensor": "a tensor", "channel": "a row", "group": in_groups(self.group_size)}
        blocks = f"blocks of {self.block[0]}x{self.block[1]}" if self.block else ""
        return f"{self.format}, {kind} in {shapes.get(self.strategy, blocks)}"


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    schemes: tuple[Scheme, ...]
    ignored: tuple[str, ...]
    keys: KeyUse
    kv_scheme: KVScheme = ""
    parts: tuple[str, ...] = (
        *("weight", "weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx"),
        *("input_scale", "input_zero_point"),
    )

    @property
    def description(self) -> str:
        schemes = [scheme.description for scheme in self.schemes]
        return f"compressed-tensors: {'; '.join([*schemes, *(['K and V in fp8 (e4m3)'] if self.kv_scheme else [])])}"

    def form(self, module: str, num_in: int) -> GroupForm | None:
        scheme = None if any(_matches(name, (module,)) for name in self.ignored) else self._find_scheme((module,))
        if scheme is None:
            return None
        size = min(num_in, scheme.block[1]) if scheme.block else scheme.group_size if scheme.group_size > 0 else num_in
        if num_in % size:
            return None
        is_float = scheme.kind == "float"
        zero = 0 if is_float else 1 << (scheme.bits - 1)
        bits = scheme.bits if scheme.format == PACKED else 8
        ordered_in = num_in if scheme.has_order and size < num_in else 0
        if is_float and ordered_in:
            return None
        return GroupForm(bits, size, zero, is_float=is_float, has_zeros=not scheme.symmetric, ordered_in=ordered_in)

    def read(self, parts: Parts) -> QuantisedWeight:
        if any(_matches(name, parts.names) for name in self.ignored):
            raise TensorError(f"{cut(parts.module)} is quantised, although ignore lists it")
        scheme = self._find_scheme(parts.names)
        if scheme is None:
            raise TensorError(f"{cut(parts.module)} is quantised, but no config_groups has it as a target")
        return _read_weight(parts, scheme)

    def _find_scheme(self, names: tuple[str, ...]) -> Scheme | None:
        """The scheme with the most specific target: a name, a pattern, or a class of modules."""
        for kind in (_is_name, _is_pattern, _is_class):
            for scheme in self.schemes:
                if any(kind(target) and _matches(target, names) for target in scheme.targets):
                    return scheme
        return None


def _is_pattern(target: str) -> bool:
    return target.startswith("re:")


def _is_class(target: str) -> bool:
    return target in ("Linear", "Embedding")


def _is_name(target: str) -> bool:
    return not _is_pattern(target) and not _is_class(target)


def _matches(target: str, names: tuple[str, ...]) -> bool:
    """names: of a module"""
    if _is_pattern(target):
        return any(re.match(target.removeprefix("re:"), name) for name in names)
    if _is_class(target):
        return (target == "Embedding") == ("embed" in names[0].rpartition(".")[2])
    return target in names


def _read_weight(parts: Parts, scheme: Scheme) -> QuantisedWeight:
    dtype = STORED[scheme.format][scheme.kind, scheme.bits]
    is_packed = scheme.format == PACKED
    half = 1 << (scheme.bits - 1) if is_packed else 0  # packed integers are unsigned, and half means 0
    if is_packed:
        values = parts.find("weight_packed", (dtype,))
        num_out, num_in = _read_shape(parts)
        if values.shape != (num_out, cdiv(num_in * scheme.bits, 32)):
            name = parts.name("weight_packed")
            raise TensorError(
                f"{cut(name)} has shape {list(values.shape)}, which weight_shape {cut([num_out, num_in])} contradicts"
            )
        numbers = Numbers(parts.name("weight_packed"), values, bits=scheme.bits, offset=-half)
    else:
        values = parts.find("weight", (dtype,))
        num_out, num_in = values.shape
        numbers = Numbers(parts.name("weight"), values)
    blocks = {"tensor": (num_out, num_in), "channel": (1, num_in), "group": (1, scheme.group_size)}
    block = scheme.block or blocks[scheme.strategy]
    if scheme.strategy == "group" and num_in % scheme.group_size:
        raise TensorError(
            f"{cut(numbers.name)} has rows of {num_in}, which groups of {scheme.group_size} do not divide"
        )
    rows, columns = cdiv(num_out, block[0]), cdiv(num_in, block[1])
    shapes: list[tuple[int, ...]] = [(rows, columns)]
    shapes += [(rows,)] if columns == 1 else []
    shapes += [()] if rows == columns == 1 else []
    scales = parts.find("weight_scale", FLOATS, *shapes)
    return QuantisedWeight(
        shape=(num_out, num_in),
        block=block,
        values=numbers,
        scales=Numbers(parts.name("weight_scale"), scales),
        zeros=_read_zeros(parts, scheme, shapes),
        groups=_read_groups(parts, scheme, num_in),
    )


def _read_shape(parts: Parts) -> tuple[int, int]:
    stored = parts.find("weight_shape", ("I64", "I32"), (2,))
    num_out, num_in = stored.read(WHOLE).tolist()
    return num_out, num_in


def _read_zeros(parts: Parts, scheme: Scheme, shapes: list[tuple[int, ...]]) -> Numbers | None:
    name = "weight_zero_point"
    if scheme.symmetric and name not in parts.tensors:
        return None
    if scheme.format == PACKED and not scheme.symmetric and scheme.strategy != "tensor":
        rows, columns = shapes[0]
        packed = parts.find(name, ("I32",), (cdiv(rows * scheme.bits, 32), columns))
        half = 1 << (scheme.bits - 1)
        return Numbers(parts.name(name), packed, bits=scheme.bits, along=0, offset=-half)
    return Numbers(parts.name(name), parts.find(name, ("I8", "F8_E4M3"), *shapes))


def _read_groups(parts: Parts, scheme: Scheme, num_in: int) -> Numbers | None:
    name = "weight_g_idx"
    if not scheme.has_order and name not in parts.tensors:
        return None
    return Numbers(parts.name(name), parts.find(name, ("I32", "I64"), (num_in,)))


# -- keys --------------------------------------------------------------------------------------------------------------


def read_compressed_tensors(config: dict[str, Any]) -> CompressedTensors:
    """The format of a checkpoint of compressed-tensors. Raises as `formats.read_format`."""
    keys = KEYS.check(config, FILE, REMEDY)
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise unsupported(f"sparsity_config {cut(repr(sparsity))} is not supported; {REMEDY}")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise invalid("config_groups", groups, "an object of groups")
    schemes = tuple(_read_scheme(name, group, config.get("format")) for name, group in groups.items())
    return CompressedTensors(schemes, _read_targets(config, "ignore"), keys, _read_kv_scheme(config))


def _read_kv_scheme(config: dict[str, Any]) -> KVScheme:
    """Whether K and V are to be stored in float8. The tensors show whether a scale is a head's or a layer's."""
    key = "kv_cache_scheme"
    scheme = config.get(key)
    if scheme is None:
        return ""
    if not isinstance(scheme, dict):
        raise invalid(key, scheme, "an object")
    KV_KEYS.check(scheme, f"{FILE}, {key}", REMEDY)
    named = {f"{key}.{name}": value for name, value in scheme.items()}
    choose(named, f"{key}.type", ("float",), "int")
    choose(named, f"{key}.num_bits", (8,), 8)
    choose(named, f"{key}.symmetric", (True,), True)
    choose(named, f"{key}.strategy", ("tensor", "attn_head"), "tensor")
    return "dynamic" if choose(named, f"{key}.dynamic", (False, True), False) else "static"


def _read_scheme(name: str, group: Any, file_format: Any) -> Scheme:
    where = f"{FILE}, {cut(name)}"
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise invalid(f"{cut(name)}.weights", weights, "an object")
    GROUP_KEYS.check(group, where, REMEDY)
    WEIGHT_KEYS.check(weights, where, REMEDY)
    format_ = choose(
        {"format": file_format} | {k: v for k, v in group.items() if v is not None}, "format", tuple(STORED)
    )
    kind, bits = choose(weights, "type", ("int", "float"), "int"), choose(weights, "num_bits", (4, 8), 8)
    if (kind, bits) not in STORED[format_]:
        raise unsupported(f"{cut(name)}: {kind} weights of {bits} bits are not supported in {format_}; {REMEDY}")
    has_groups = weights.get("group_size") is not None
    inferred = ("channel" if weights["group_size"] == -1 else "group") if has_groups else "tensor"
    known = ("tensor", "channel", "group", *(("block",) if format_ != PACKED else ()))
    strategy = choose(weights, "strategy", known, inferred)
    symmetric = choose(weights, "symmetric", (True, False), True)
    if kind == "float" and not symmetric:
        raise unsupported(f"{cut(name)}: symmetric False is not supported for float weights; {REMEDY}")
    group_size, block = -1, None
    if strategy == "group":
        group_size = read_group_size(weights)
        if group_size == -1:
            raise invalid("group_size", -1, "a size of groups, for strategy group")
    if strategy == "block":
        structure = weights.get("block_structure")
        if isinstance(structure, str):  # as older files have it, "128x128"
            structure = [int(n) if n.isdecimal() and len(n) < 10 else n for n in structure.split("x")]
        block = read_block({"block_structure": structure}, "block_structure")
        if block is None:
            raise invalid("block_structure", None, "two whole numbers, for strategy block")
    order = choose(weights, "actorder", ("weight", "static", "group", "dynamic", False), False)
    return Scheme(
        targets=_read_targets(group, "targets"),
        format=format_,
        kind=kind,
        bits=bits,
        strategy=strategy,
        group_size=group_size,
        block=block,
        symmetric=symmetric,
        has_order=order in ("group", "dynamic"),
    )


def _read_targets(config: dict[str, Any], key: str) -> tuple[str, ...]:
    """Names, classes, and patterns after "re:". A pattern that may take long to match is refused."""
    targets = read_names(config, key)
    for target in filter(_is_pattern, targets):
        pattern = target.removeprefix("re:")
        choices = len(re.findall(r"(?<!\\)[*+{(]", pattern.replace("(?:", "(")))
        if len(pattern) > MAX_PATTERN or choices > MAX_CHOICES or re.search(r"\)[*+{]", pattern):
            raise unsupported(f"{key}: the pattern {cut(repr(target))} is not supported: it may take long to match")
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise invalid(key, target, f"a pattern ({error})") from None
    return targets
