"""The device's operations: in plain torch (`reference`, the oracle), and the CPU's fast path (`cpu`).

`reference` and `cpu` have the same functions with the same signatures, so that a model takes either as its `ops`.
`ladder` climbs from gathered to parallel attention, one idea a rung.
"""
