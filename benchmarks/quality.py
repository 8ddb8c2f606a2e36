"""What fewer bits cost SmolLM2-135M: perplexity of a text with rounded weights, activations, K and V.

    python benchmarks/quality.py [--text FILE] [--tokens N]

The catalogue's file has 4 bits in groups of 32 inputs, which rounding to such groups would not change. So channels are
put in another, random order first: the same model in exact arithmetic, whose groups have numbers of other scales.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from cpu_compare import ROOT, SMOLLM2, smollm2
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo import LLM
from octavo.bench.quality import perplexity
from octavo.checkpoint.resolve import open_checkpoint
from octavo.kernels.groups import GroupForm
from octavo.kernels.rounding import round_to_groups
from octavo.text.tokenizer import Tokenizer

CHOICES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "K and V in int8": {"kv_cache_dtype": "int8"},
    "float8 weights": {},
}
FLOAT8 = GroupForm(8, 128, is_float=True)


def reorder(tensors: dict[str, Tensor], *, head_dim: int) -> None:
    """Permute the channels of the residual stream, of each MLP, and of each head of V."""
    generator = torch.Generator().manual_seed(0)
    hidden = tensors["model.embed_tokens.weight"].shape[1]
    order = torch.randperm(hidden, generator=generator)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = tensor[order]
        elif tensor.shape[-1] == hidden:
            tensors[name] = tensor[..., order]
    for layer in sorted({name.split(".")[2] for name in tensors if ".layers." in name}):
        mlp, attention = f"model.layers.{layer}.mlp.", f"model.layers.{layer}.self_attn."
        inner = torch.randperm(len(tensors[f"{mlp}up_proj.weight"]), generator=generator)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{mlp}{name}.weight"] = tensors[f"{mlp}{name}.weight"][inner]
        tensors[f"{mlp}down_proj.weight"] = tensors[f"{mlp}down_proj.weight"][:, inner]
        head = torch.randperm(head_dim, generator=generator)
        v, out = tensors[f"{attention}v_proj.weight"], tensors[f"{attention}o_proj.weight"]
        tensors[f"{attention}v_proj.weight"] = v.view(-1, head_dim, v.shape[1])[:, head].flatten(0, 1)
        tensors[f"{attention}o_proj.weight"] = out.view(len(out), -1, head_dim)[:, :, head].flatten(1)


def round_linears(tensors: dict[str, Tensor]) -> None:
    """As `--quantization fp8` rounds weights on a GPU."""
    for name, tensor in tensors.items():
        if name.endswith("proj.weight") and tensor.shape[1] % FLOAT8.group_size == 0:
            tensors[name] = round_to_groups(tensor, FLOAT8).dequantised().to(tensor.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=ROOT / "docs" / "memory.md")
    parser.add_argument("--tokens", type=int, default=8192, help="at most so many")
    args = parser.parse_args()
    token_ids = Tokenizer.from_checkpoint(open_checkpoint(SMOLLM2)).encode(args.text.read_text(encoding="utf-8"))
    token_ids = token_ids[: args.tokens]
    with tempfile.TemporaryDirectory() as folder:
        tensors = load_file(smollm2() / "model.safetensors")
        reorder(tensors, head_dim=64)
        (Path(folder) / "config.json").write_bytes((smollm2() / "config.json").read_bytes())
        base = 0.0
        print(
            f"| SmolLM2-135M, {len(token_ids):,} tokens of {args.text.name} | perplexity | to bfloat16 |\n|---|--:|--:|"
        )
        for name, options in CHOICES.items():
            if name == "float8 weights":
                round_linears(tensors)
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, f"{folder}/model.safetensors")
            options = {"dtype": "bfloat16", "skip_tokenizer_init": True, "max_model_len": 513} | options
            with LLM(folder, **options) as llm:
                value = perplexity(llm, token_ids)
            base = value if name == "bfloat16" else base
            print(f"| {name} | {value:.3f} | {f'{value / base - 1:+.2%}' if base else ''} |", flush=True)


if __name__ == "__main__":
    main()
