"""Embeddings of a rank's part of the vocabulary."""

from __future__ import annotations

from torch import Tensor


def gather_own_rows(table: Tensor, token_ids: Tensor, first: int) -> Tensor:
    """table[token_ids - first], and zeros for the tokens of other ranks; [num_tokens] -> [num_tokens, size].

    table [num_rows, size], the rows of tokens from `first` on. The sum over ranks is the embedding.
    """
    rows = token_ids - first
    own = rows.clamp(0, len(table) - 1)
    return table[own].masked_fill_((rows != own).unsqueeze(1), 0.0)
