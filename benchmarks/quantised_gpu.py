"""Decoding with quantised weights on a GPU, in the engine: milliseconds of a step.

    PYTHONPATH=src python benchmarks/quantised_gpu.py [--forms bf16,fp8,int4] [--rows 1,16,64,256] [--vllm]
        [--kv-cache-dtype fp8] [--context N] [--layers N] [--mixed]

With `--vllm` it measures vLLM instead, the same way; run both at the same time on two GPUs, or one after the other.
Its engine keeps its memory until the process ends: one form a run.

The model has the shape of Llama-3-8B and random weights, which are as fast as trained ones. Its linear layers have the
forms of checkpoints: `fp8` blocks of 128 x 128 and `fp8_rows` outputs (vLLM, for both: tensors, its fastest), `int4`
groups of 128 (vLLM: gptq). Embeddings and head stay in bfloat16. A step's time is the difference of two runs that find
their prompts in the prefix cache, and of which one has 64 tokens more. `--mixed` adds the workload mixed256 of
`octavo bench`, in output tokens a second.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from compare_vllm import VLLM
from torch import Tensor

from octavo import LLM
from octavo.bench.throughput import Octavo, measure_throughput
from octavo.frontend import build
from octavo.kernels.groups import GroupForm, Groups
from octavo.models.linear_methods import PackedMethod

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FORMS = {
    "bf16": None,
    "fp8": GroupForm(8, 128, is_float=True),
    "fp8_rows": GroupForm(8, 0, is_float=True),  # a scale an output
    "int4": GroupForm(4, 128, zero=8),
}
STEPS = 64


class RandomMethod(PackedMethod):
    """Weights with random values in a form, if the platform keeps it."""

    stored: GroupForm | None = None

    def allocate(self, forms: Sequence[tuple[int, GroupForm | None]]) -> None:
        form = self.stored
        if form and not form.group_size:
            form = replace(form, group_size=self.weight.shape[1])
        form = form if form and self.role == "linear" and self.keeps(form) else None
        super().allocate([(num_rows, form) for num_rows, _ in forms])

    def rows(self, first: int, last: int) -> Tensor | Groups:
        """To be filled with a plain weight's random values; those of groups are made in `finish`."""
        rows = super().rows(first, last)
        return rows if isinstance(rows, Tensor) else rows.scales

    def finish(self) -> None:
        for part in self._parts:
            if isinstance(part, Groups) and part.form.is_float:
                part.values.copy_(torch.randn(part.values.shape, dtype=torch.bfloat16, device=self.device))
                part.scales.fill_(0.02)
            elif isinstance(part, Groups):
                part.values.random_(0, 1 << part.form.bits)
                part.scales.fill_(2.0**-8)
        super().finish()


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
PARTS = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"]]
PARTS += [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]
GPTQ |= {"lm_head": False, "modules_in_block_to_quantize": PARTS}  # else looked for in files, of which there are none
VLLM_FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": ({}, {}),
    "fp8": ({}, {"quantization": "fp8"}),
    "fp8_rows": ({}, {"quantization": "fp8"}),
    "int4": ({"quantization_config": GPTQ}, {}),
}
"""Of each form, vLLM's changes of config.json and of its options."""


def octavo_llm(folder: Path, name: str, options: dict[str, Any]) -> Any:
    method = type("Method", (RandomMethod,), {"stored": FORMS[name]})
    key = build.ResolvedModel.kernel_key.fget  # type: ignore[attr-defined]
    with (
        patch.object(build, "find_linear_method", lambda *args, **options: method),
        patch.object(build.ResolvedModel, "kernel_key", property(lambda self: key(self) + name)),
    ):
        return LLM(str(folder), **options)


def vllm_llm(folder: Path, name: str, options: dict[str, Any]) -> Any:
    import vllm

    changes, more = VLLM_FORMS[name]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return vllm.LLM(str(folder), gpu_memory_utilization=0.85, disable_log_stats=True, **options, **more)


def seconds(llm: Any, prompts: list[Any], num_tokens: int) -> float:
    # vLLM's engine takes vLLM's parameters.
    kind = __import__(type(llm).__module__.partition(".")[0]).SamplingParams
    params = kind(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    best = float("inf")
    for _ in range(4):  # graphs of prompts and of cached prompts are captured in the first two
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        best = min(best, time.perf_counter() - begin)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", type=lambda text: text.split(","), default=["bf16", "fp8", "int4"])
    parser.add_argument("--rows", type=lambda text: tuple(map(int, text.split(","))), default=(1, 16, 64, 256))
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--vllm", action="store_true")
    args = parser.parse_args()
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": args.context + 2 * STEPS}
    options["kv_cache_dtype"] = args.kv_cache_dtype
    if args.mixed:
        options["max_model_len"] = max(options["max_model_len"], 4096)
    base: dict[int, float] = {}
    print(f"{'ms of a step':<14}" + "".join(f"{rows:>8} rows" for rows in args.rows) + "  started", flush=True)
    for name in args.forms:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": args.layers}))
            begin = time.perf_counter()
            llm = (vllm_llm if args.vllm else octavo_llm)(Path(folder), name, options)
            started, line = time.perf_counter() - begin, f"{name:<14}"
            for rows in args.rows:
                prompts = [
                    {"prompt_token_ids": [(7 * i + 31 * row) % 9000 for i in range(args.context)]}
                    for row in range(rows)
                ]
                ms = (seconds(llm, prompts, STEPS + 1) - seconds(llm, prompts, 1)) / STEPS * 1e3
                line += f"{ms:>7.2f} {base.setdefault(rows, ms) / ms:.2f}x"
            if args.mixed:
                subject = VLLM(llm, name, CONFIG["vocab_size"], None) if args.vllm else Octavo(llm, name, None)
                line += f"  mixed256 {next(measure_throughput(subject, ['mixed256']))['out_tok_s']:,.0f}"
            print(line + f"{started:>7.0f} s", flush=True)
            if not args.vllm:
                llm.close()
            del llm
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
