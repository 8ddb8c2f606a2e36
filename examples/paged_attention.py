"""A model of Transformers over Octavo's paged KV cache: several prompts, one forward pass for all.

Start it with: python examples/paged_attention.py
"""

import argparse
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from octavo.checkpoint.resolve import open_checkpoint
from octavo.frontend.standalone.paged_attention import PagedAttention

parser = argparse.ArgumentParser(description="Generate with Transformers over a paged KV cache.")
parser.add_argument("--model", default="smollm2-135m-instruct", help="a name, a directory or a .gguf file")
args = parser.parse_args()

path = open_checkpoint(args.model).path
file = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
folder = path.parent if file else path
tokenizer = AutoTokenizer.from_pretrained(folder, **file)
model = AutoModelForCausalLM.from_pretrained(folder, **file, dtype=torch.float32)
prompts = ["The capital of France is", "Once upon a time, there was a fox who", "1 2 3 4"]
tokens = [tokenizer(prompt).input_ids for prompt in prompts]
own = [model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0].tolist() for ids in tokens]

config = model.config
heads = {"num_heads": config.num_attention_heads, "num_kv_heads": config.num_key_value_heads}
attention = PagedAttention(64, **heads, head_dim=config.head_dim, num_layers=config.num_hidden_layers)
pending = dict(enumerate(tokens))  # tokens without K and V, by sequence: a prompt, then one token at a time


def attend(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, None]:
    """Attention of one layer, for the tokens of all sequences. q, k, v: [1, heads, num_tokens, head_dim]."""
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    lengths, layer = [len(ids) for ids in pending.values()], module.layer_idx
    for seq_id, new_k, new_v in zip(pending, k.split(lengths), v.split(lengths), strict=True):
        attention.append_kv(seq_id, new_k, new_v, layer)
    return attention.compute_batch(list(pending), q, layer, query_lens=lengths).unsqueeze(0), None


AttentionInterface.register("octavo", attend)
model.set_attn_implementation("octavo")
for _ in range(24):
    row = torch.tensor([[token for ids in pending.values() for token in ids]])
    positions = [p for i, ids in pending.items() for p in range(len(tokens[i]) - len(ids), len(tokens[i]))]
    with torch.inference_mode():
        logits = model(row, position_ids=torch.tensor([positions]), use_cache=False).logits[0]
    last = torch.tensor([len(ids) for ids in pending.values()]).cumsum(0) - 1
    pending = {i: [token] for i, token in zip(pending, logits[last].argmax(-1).tolist(), strict=True)}
    tokens = [ids + pending.get(i, []) for i, ids in enumerate(tokens)]
    for i in [i for i, new in pending.items() if new == [config.eos_token_id]]:
        attention.free_sequence(i)
        del pending[i]
    if not pending:
        break
print(*map(tokenizer.decode, tokens), sep="\n\n")
same = sum(ids == other for ids, other in zip(tokens, own, strict=True))
print(f"\n{same} of {len(own)} as the model's own generation; {attention.stats().num_used} blocks in use")
