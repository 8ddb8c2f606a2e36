"""Models: `config` reads config.json, `decoder` (Llama family) and `gpt` consist of `layers`, `loading` reads weights.

`config` imports no torch, so memory can be planned from a config.json alone.
"""
