"""AWQ (arXiv 2306.00978), as AutoAWQ's "gemm" stores it.

qweight  [num_in, num_out / 8] int32    qzeros  [num_groups, num_out / 8] int32    scales  [num_groups, num_out]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.checkpoint.keys import KeyTable, KeyUse
from octavo.kernels.group_form import GroupForm
from octavo.models.quantization.form import (
    FILE,
    FLOATS,
    REMEDY,
    KVScheme,
    Numbers,
    Parts,
    QuantisedWeight,
    TensorError,
    check_excluded,
    choose,
    in_groups,
    is_excluded,
    read_group_size,
    read_names,
)

KEYS = KeyTable(
    read=("quant_method", "bits", "w_bit", "group_size", "q_group_size", "version", "format", "zero_point",
          "modules_to_not_convert"),
    inert=("backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "meta", "sym", "lm_head",
           "damp_*", "true_sequential", "dataset", "tokenizer", "batch_size", "model_seqlen"),
    refused={"desc_act": (False,), "pack_dtype": ("int32",), "dynamic": ({},), "adapter": ()},
)  # fmt: skip
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""From the lowest, the integers of a word are those of columns 0 2 4 6 1 3 5 7."""


@dataclass(frozen=True, slots=True)
class AWQ:
    group_size: int
    excluded: tuple[str, ...]
    keys: KeyUse
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales")
    kv_scheme: KVScheme = ""

    @property
    def description(self) -> str:
        return f"awq, 4 bits in {in_groups(self.group_size)}"

    def form(self, module: str, num_in: int) -> GroupForm | None:
        size = num_in if self.group_size == -1 else self.group_size
        is_plain = module.endswith("lm_head") or is_excluded(module, self.excluded) or num_in % size
        return None if is_plain else GroupForm(4, size, has_zeros=True)

    def read(self, parts: Parts) -> QuantisedWeight:
        check_excluded(parts, self.excluded, "modules_to_not_convert")
        qweight = parts.find("qweight", ("I32",))
        num_in, num_words = qweight.shape
        group = num_in if self.group_size == -1 else self.group_size
        if num_in % group:
            raise TensorError(f"{parts.name('qweight')} has {num_in} rows, which groups of {group} do not divide")
        qzeros = parts.find("qzeros", ("I32",), (num_in // group, num_words))
        scales = parts.find("scales", FLOATS, (num_in // group, 8 * num_words))

        def packed(name: str, tensor: Any) -> Numbers:
            return Numbers(parts.name(name), tensor, bits=4, along=0, is_transposed=True, places=PLACES)

        return QuantisedWeight(
            shape=(8 * num_words, num_in),
            block=(1, group),
            values=packed("qweight", qweight),
            zeros=packed("qzeros", qzeros),
            scales=Numbers(parts.name("scales"), scales, is_transposed=True),
        )


def read_awq(config: dict[str, Any]) -> AWQ:
    """The format of an AWQ checkpoint. Raises as `formats.read_format`."""
    keys = KEYS.check(config, FILE, REMEDY)
    config = {"bits": config.get("w_bit"), "group_size": config.get("q_group_size")} | config
    choose(config, "bits", (4,), 4)
    choose(config, "version" if config.get("version") is not None else "format", ("gemm",), "gemm")
    choose(config, "zero_point", (True,), True)
    return AWQ(read_group_size(config, 128), read_names(config, "modules_to_not_convert"), keys)
