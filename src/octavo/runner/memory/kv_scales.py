"""Scales of K and V in float8: one for each layer, head, and K or V, fixed before the engine starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.integers import cdiv
from octavo.kernels.metadata import RaggedBatch
from octavo.models.loading.loader import Model

logger = logging.getLogger("octavo")

MAX_TOKENS = 4096
HEADROOM = 2.0
"""Largest magnitude that is not cut off, by the largest of the calibration. A float8 keeps its precision below."""


def fix_scales(
    model: Model, read_text: Callable[[], Sequence[int]], kv: KVCacheSpec, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Set the scales that the checkpoint has, or else those of `calibrate`. read_text: its ids"""
    scales = model.stored_kv_scales
    if scales is None:
        calibrate(model, read_text(), kv, dtype=dtype, device=device)
        return
    model.set_kv_scales(scales)
    logger.info("K and V in float8: scales of %d layers are the checkpoint's", len(scales))
    if (scales == 1).all():
        logger.warning("K and V in float8: all scales of the checkpoint are 1, as if it had not been calibrated")


def calibrate(
    model: Model, ids: Sequence[int], kv: KVCacheSpec, *, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Set the scales of a model from the K and V that it computes for a text in one pass. Without one, they are 1.

    ids    tokens of the text
    kv     of the float8 pool; dtype: of the activations
    """
    spec = model.spec
    shape = (spec.num_layers, 2, kv.num_kv_heads)
    if not ids:
        logger.warning("K and V in float8 have scales of 1: without a tokenizer there is no text to calibrate them on")
        model.set_kv_scales(torch.ones(shape, device=device))
        return
    blocks = range(1, cdiv(len(ids), kv.block_size) + 1)
    pool = torch.zeros(len(blocks) + 1, *shape, kv.block_size, spec.head_dim, dtype=dtype, device=device)
    batch = RaggedBatch.from_lists([len(ids)], [len(ids)], [blocks], kv.block_size, device=device)
    model.forward(torch.tensor(ids, device=device), batch, pool, batch.positions[:1])
    largest = torch.stack([pool[1:, layer].abs().amax((0, 3, 4)) for layer in range(spec.num_layers)]).float()
    limit = torch.finfo(getattr(torch, kv.dtype)).max
    model.set_kv_scales((largest * (HEADROOM / limit)).clamp_min_(1e-9))
    logger.info("K and V in float8: scales of %d layers calibrated on %d tokens", spec.num_layers, len(ids))
