"""Models: `config` and `families` read a `spec`, `decoder` and `gpt` compute it, `loading` fills its weights.

Reading a spec imports no torch, so memory can be planned from a config.json alone.
"""
