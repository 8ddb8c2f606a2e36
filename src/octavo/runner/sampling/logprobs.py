"""Log-probabilities of tokens, and top log-probabilities, for sampling on the host."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from torch import Tensor

from octavo.core.plan import TokenLogprobs
from octavo.runner.platform import Platform


class LogprobsQuery:
    """Log-probabilities of some rows of logits: of one given token each, and of the top `num_top` tokens; -1: all."""

    def __init__(self, names: Seq[int], num_top: Seq[int]) -> None:
        """names: key of each row in `entries`."""
        self._names = names
        self._groups = {num: [i for i, n in enumerate(num_top) if n == num] for num in dict.fromkeys(num_top)}

    def compute(self, logits: Tensor, token_ids: Tensor, platform: Platform) -> list[Tensor]:
        """logits [num_rows, vocab_size], token_ids [num_rows] -> tensors for `to_lists`."""
        tensors: list[Tensor] = []
        for num, rows in self._groups.items():
            part, ids = logits, token_ids
            if len(self._groups) > 1:
                indices = platform.index_tensor(rows)
                part, ids = logits[indices], token_ids[indices]
            tensors += platform.ops.token_logprobs(part, ids, logits.shape[1] if num < 0 else num)
        return tensors

    def entries(self, lists: Seq[list[Any]]) -> dict[int, TokenLogprobs]:
        """Name -> log-probabilities, from the lists of the computed tensors."""
        found: dict[int, TokenLogprobs] = {}
        for group, rows in enumerate(self._groups.values()):
            for i, *entry in zip(rows, *lists[4 * group : 4 * group + 4], strict=True):
                found[self._names[i]] = TokenLogprobs(*entry)
        return dict(sorted(found.items()))
