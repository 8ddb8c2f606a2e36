"""The engine with another clock: the same core and loop, over an executor that answers from a cost model.

`traces` says what arrives, `cost` what a step takes, `simulation` runs it and `report` tells what came of it. There is
no scheduler here and no allocator but the contiguous ones that the paper compares with (`allocators`).
"""
