"""Models: `spec` reads config.json, `decoder` is the Llama family built of `layers`, `weights` fills it from files.

`spec` imports no torch, so that memory can be planned from a config.json alone.
"""
