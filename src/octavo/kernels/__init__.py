"""The device's operations: `reference` in plain torch (the oracle), `cpu.ops` for the CPU, `triton.ops` for GPUs.

A model takes one of these modules as its `ops`. An operation has the same signature in all of them. `cpu.ops` lacks the
operations that only a GPU's model runner calls.
"""
