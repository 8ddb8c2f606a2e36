"""The device's operations: plain torch (`reference`, the oracle), the CPU's fast path (`cpu`), Triton (`cuda`).

A model takes one of these modules as its `ops`: a function that several have, has one signature. `cpu` lacks what only
a GPU's runner calls.
`ladder` climbs from gathered to parallel attention, one idea a rung.
"""
