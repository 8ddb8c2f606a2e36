"""Copies of small arrays between the host and the device."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a host tensor to a device. On a GPU the copy is queued without waiting for earlier work."""
    if torch.device(device).type != "cuda":
        return tensor
    if not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def index_tensor(values: Seq[int], device: torch.device | str) -> Tensor:
    return to_device(torch.tensor(values, dtype=torch.int64), device)


def to_lists(tensors: Seq[Tensor]) -> list[list[Any]]:
    """All tensors as lists. Waits for a GPU only once."""
    if not any(tensor.is_cuda for tensor in tensors):
        return [tensor.tolist() for tensor in tensors]
    packed = torch.cat(
        [(t.double().view(torch.int64) if t.is_floating_point() else t.long()).flatten() for t in tensors]
    )
    parts = torch.split(packed.cpu(), [t.numel() for t in tensors])
    return [
        (part.view(torch.float64) if t.is_floating_point() else part).view(t.shape).tolist()
        for t, part in zip(tensors, parts, strict=True)
    ]
