"""GPTQ (arXiv 2210.17323), as AutoGPTQ and GPTQModel store it; n is 32 / bits.

qweight  [num_in / n, num_out] int32    qzeros  [num_groups, num_out / n] int32    scales  [num_groups, num_out]
g_idx    [num_in] int32, the group of each input; with `desc_act` they are in no order
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.checkpoint.keys import KeyTable, KeyUse
from octavo.integers import cdiv
from octavo.kernels.group_form import GroupForm
from octavo.models.quantization.form import (
    FILE,
    FLOATS,
    REMEDY,
    KVScheme,
    Numbers,
    Parts,
    QuantisedWeight,
    check_excluded,
    choose,
    in_groups,
    invalid,
    is_excluded,
    read_group_size,
    read_names,
    unsupported,
)

KEYS = KeyTable(
    # `sym` and `lm_head` say what the tensors show: the zeros, and whether the head is quantised.
    read=("quant_method", "bits", "group_size", "desc_act", "checkpoint_format", "format", "dynamic",
          "modules_to_not_convert", "sym", "lm_head"),
    inert=("damp_*", "static_groups", "true_sequential", "model_name_or_path", "model_file_base_name", "meta",
           "batch_size", "dataset", "tokenizer", "use_exllama", "exllama_config", "disable_exllama", "use_cuda_fp16",
           "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block", "backend", "mse",
           "modules_in_block_to_quantize", "pad_token_id", "max_input_length", "cache_block_outputs", "hyb_act",
           "act_group_aware", "quantizer", "offload_to_disk*"),
    refused={"is_marlin_format": (False,), "pack_dtype": ("int32",), "adapter": (), "rotation": ()},
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GPTQ:
    """zero_offset: what is added to each zero; 1 in the first version of the format."""

    bits: int
    group_size: int
    desc_act: bool
    zero_offset: int
    excluded: tuple[str, ...]
    keys: KeyUse
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")
    kv_scheme: KVScheme = ""

    @property
    def description(self) -> str:
        order = ", by order of activation" if self.desc_act else ""
        return f"gptq, {self.bits} bits in {in_groups(self.group_size)}{order}"

    def form(self, module: str, num_in: int) -> GroupForm | None:
        size = num_in if self.group_size == -1 else self.group_size
        is_plain = module.endswith("lm_head") or is_excluded(module, self.excluded) or num_in % size
        ordered_in = num_in if self.desc_act and size < num_in else 0
        return None if is_plain else GroupForm(self.bits, size, has_zeros=True, ordered_in=ordered_in)

    def read(self, parts: Parts) -> QuantisedWeight:
        check_excluded(parts, self.excluded, "modules_to_not_convert")
        bits, per_word = self.bits, 32 // self.bits
        qweight = parts.find("qweight", ("I32",))
        num_in, num_out = per_word * qweight.shape[0], qweight.shape[1]
        group = num_in if self.group_size == -1 else self.group_size
        num_groups = cdiv(num_in, group)
        qzeros = parts.find("qzeros", ("I32",), (num_groups, cdiv(num_out, per_word)))
        scales = parts.find("scales", FLOATS, (num_groups, num_out))
        groups = None
        if self.desc_act or "g_idx" in parts.tensors:
            groups = Numbers(parts.name("g_idx"), parts.find("g_idx", ("I32", "I64"), (num_in,)))
        # All zeros of a word at once: writers subtract 1 from words, so a zero of 0 borrows from its neighbour.
        ones = sum(self.zero_offset << shift for shift in range(0, 32, bits))
        return QuantisedWeight(
            shape=(num_out, num_in),
            block=(1, group),
            values=Numbers(parts.name("qweight"), qweight, bits=bits, along=1, is_transposed=True),
            zeros=Numbers(parts.name("qzeros"), qzeros, bits=bits, along=0, is_transposed=True, word_offset=ones),
            scales=Numbers(parts.name("scales"), scales, is_transposed=True),
            groups=groups,
        )


def read_gptq(config: dict[str, Any]) -> GPTQ:
    """The format of a GPTQ checkpoint. Raises as `formats.read_format`."""
    keys = KEYS.check(config, FILE, REMEDY)
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise invalid("dynamic", dynamic, "an object")
    if changed := [name for name in dynamic if not name.startswith("-:")]:  # "-:" only leaves modules out
        raise unsupported(f"dynamic {changed[0]!r} is not supported: modules quantised in several ways; {REMEDY}")
    version = choose(
        config,
        "checkpoint_format" if config.get("checkpoint_format") is not None else "format",
        ("gptq", "gptq_v2"),
        "gptq",
    )
    choose(config, "sym", (True, False), True)
    return GPTQ(
        bits=choose(config, "bits", (4, 8)),
        group_size=read_group_size(config, 128),
        desc_act=choose(config, "desc_act", (True, False), False),
        zero_offset=1 if version == "gptq" else 0,
        excluded=read_names(config, "modules_to_not_convert"),
        keys=keys,
    )
