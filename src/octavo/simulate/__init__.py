"""Simulation: the real scheduler and engine loop on a virtual clock, over an executor that answers from a cost model.

`traces` yields the arrivals, `cost` the duration of a step, `simulation` runs them, and `report` summarises the result.
The only other allocators are the contiguous baselines of the paper (`allocators`).
"""
