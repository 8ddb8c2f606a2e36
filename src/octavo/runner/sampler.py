"""From logits to tokens, for the rows of a step that sample."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import ModuleType

from torch import Tensor

from octavo.core.plan import RowSetup
from octavo.kernels.batch import SamplingTensors

NOT_FINITE = "the model gave numbers that are not finite for this request"


def sample(
    logits: Tensor, setups: Seq[RowSetup], sample_indices: Seq[int], positions: Seq[int], ops: ModuleType
) -> tuple[list[int], list[bool]]:
    """One token for each row of logits, and whether its logits were numbers at all.

    logits          [num_rows, vocab_size] float32
    setups          how the row is sampled
    sample_indices  which of its request's samples the row draws for
    positions       position that the token will have
    """
    params = [s.sampling_params for s in setups]
    tensors = SamplingTensors.from_lists(
        [0.0 if p.greedy else p.temperature for p in params],
        [p.top_k for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
        [s.seed for s in setups],
        sample_indices,
        positions,
    )
    finite: list[bool] = ops.finite_rows(logits).tolist()
    if not all(finite):
        logits = logits.nan_to_num(0.0, 0.0, 0.0)  # such a row's token is thrown away; the sampler must survive it
    tokens: list[int] = ops.sample(logits, tensors).tolist()
    return tokens, finite
