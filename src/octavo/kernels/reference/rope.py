"""Rotary position embedding (arXiv 2104.09864) and its scalings."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.errors import UnsupportedModelError
from octavo.kernels.reference.norms import accumulation_dtype


def rope_table(
    head_dim: int,
    max_len: int,
    theta: float,
    *,
    scaling: dict[str, Any] | None = None,
    rotary_dim: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """cos and sin of the angles of each position -> [max_len, head_dim]: head_dim / 2 cosines, then the sines.

    `scaling` is `rope_scaling` or `rope_parameters` of config.json: "default", "linear", "dynamic", "llama3", "yarn"
    (arXiv 2309.00071), "longrope" (arXiv 2402.13753) or "proportional" (Gemma 4: the first pairs are rotated, by the
    angles that they have if all are). Raises `UnsupportedModelError` for another.

    "dynamic" and "longrope" depend on the length of a sequence, but K in the cache has its angles already. So max_len
    chooses the angles once: those of short sequences up to the trained length, else of a sequence of max_len tokens.

    rotary_dim  dimensions of a head that are rotated, the first rotary_dim / 2 pairs; None: all. The angle of the
                others is 0
    """
    wide = accumulation_dtype(dtype)
    scaling = scaling or {}
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    whole = rotary_dim
    if kind == "proportional":
        rotary_dim = 2 * int(scaling["partial_rotary_factor"] * head_dim // 2)
    if kind == "dynamic":
        stretch = max(1.0, max_len / scaling["original_max_position_embeddings"])
        theta *= (scaling["factor"] * (stretch - 1) + 1) ** (rotary_dim / (rotary_dim - 2))
    exponents = torch.arange(0, rotary_dim, 2, device=device).to(wide) / whole
    wavelengths = torch.pow(theta, exponents)  # [rotary_dim / 2], of a radian
    amplitude = 1.0
    if kind == "longrope":
        stretched, amplitude = _longrope_factors(scaling, max_len)
        wavelengths *= torch.tensor(stretched, dtype=wide, device=device)
    frequencies: Tensor = 1.0 / wavelengths
    if kind in ("linear", "proportional"):
        frequencies = frequencies / scaling["factor"]
    elif kind == "llama3":
        frequencies = _llama3_frequencies(frequencies, scaling)
    elif kind == "yarn":
        frequencies, amplitude = _yarn_frequencies(frequencies, theta, scaling)
    elif kind not in ("default", "dynamic", "longrope"):
        supported = "default, linear, dynamic, llama3, yarn, longrope, proportional"
        raise UnsupportedModelError(
            f"rope scaling {kind!r} is not supported; supported: {supported}", param="rope_scaling"
        )
    angles = torch.outer(torch.arange(max_len, device=device).to(wide), frequencies)  # [max_len, rotary_dim / 2]
    rest = 0, (head_dim - rotary_dim) // 2
    cos, sin = F.pad(angles.cos() * amplitude, rest, value=1.0), F.pad(angles.sin() * amplitude, rest)
    return torch.cat((cos, sin), dim=-1).to(dtype)


def _longrope_factors(scaling: dict[str, Any], max_len: int) -> tuple[list[float], float]:
    """LongRoPE's factor on each wavelength, for sequences up to max_len, and the factor on cos and sin."""
    trained, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    amplitude = scaling.get("attention_factor")
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return scaling["long_factor" if max_len > trained else "short_factor"], float(amplitude)


def _llama3_frequencies(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, those between blended.

    turns = rotations of a frequency within the original context:

        turns    0 ..... low_freq_factor ..... high_freq_factor ..... inf
        scaled   f / factor      |   linear blend     |        f
    """
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi / frequencies)
    return _blend(frequencies, scaling["factor"], keep=((turns - low) / (high - low)).clamp(0, 1))


def _yarn_frequencies(frequencies: Tensor, theta: float, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """YaRN's blend of kept and stretched frequencies, and the factor on cos and sin (arXiv 2309.00071, 3.2 to 3.4)."""
    factor = scaling["factor"]
    context = scaling["original_max_position_embeddings"]
    num_pairs = frequencies.shape[0]

    def pair_that_turns(times: float) -> float:  # fractional index of the frequency with that many turns
        return num_pairs * math.log(context / (times * 2 * math.pi)) / math.log(theta)

    low = pair_that_turns(scaling.get("beta_fast") or 32)
    high = pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    pairs = torch.arange(num_pairs, device=frequencies.device).to(frequencies.dtype)
    blended = _blend(frequencies, factor, keep=1 - ((pairs - low) / max(high - low, 0.001)).clamp(0, 1))

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    amplitude = scaling.get("attention_factor")
    if amplitude is None:
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        amplitude = temperature(mscale) / temperature(mscale_all) if mscale and mscale_all else temperature(1.0)
    return blended, float(amplitude)


def _blend(frequencies: Tensor, factor: float, keep: Tensor) -> Tensor:
    """Transformers' order of operations: at position 100,000, a frequency's rounding error is a visible angle."""
    blended: Tensor = (1 - keep) * frequencies / factor + keep * frequencies
    return blended


def apply_rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate each pair (i, i + head_dim / 2) of a head by its position's angle (arXiv 2104.09864, in Llama's layout).

    q [num_tokens, num_heads, head_dim], k [num_tokens, num_kv_heads, head_dim], positions [num_tokens], cos_sin from
    `rope_table` -> (q, k), rotated
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, head_dim / 2] each
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(accumulation_dtype(x.dtype)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
