"""Quantised weights: the reference keeps none. They are dequantised while they are loaded."""

from __future__ import annotations

import torch

from octavo.kernels.groups import GroupForm, Groups, PackedHead


def keeps_groups(form: GroupForm, num_in: int, dtype: torch.dtype) -> bool:
    """True if `pack_groups` supports such weights for activations of this dtype."""
    return False


def pack_groups(groups: Groups) -> PackedHead | None:
    """The weight in the layout of its products; None if that would round its scales."""
    return None
