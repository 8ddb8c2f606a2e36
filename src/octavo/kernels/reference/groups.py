"""Quantised weights: the reference keeps none, so loaders dequantise them."""

from __future__ import annotations

from typing import NoReturn

import torch

from octavo.kernels.groups import GroupForm, Groups


def keeps_groups(form: GroupForm, num_in: int, dtype: torch.dtype) -> bool:
    """True if `pack_groups` packs weights of this form for products with x in `dtype`, and keeps their bits."""
    return False


def pack_groups(groups: Groups) -> NoReturn:
    """Pack a weight of a form that `keeps_groups` accepts. Returns None for a weight that it would have to round."""
    raise NotImplementedError(groups.form)
