"""Forward passes, and the shapes that they are captured for."""

from __future__ import annotations

from typing import Literal, NamedTuple

from octavo.runner.prefill_batch import PrefillSize

Part = Literal["pass", "logits", "sample", "sample and logits", "candidates", "model"]
"""What of a pass: all of it; up to its logits, which are kept; the sampling of kept logits; that and the next decode
pass up to its logits; the best tokens of a beam step; only the model's forward pass."""


class PassShape(NamedTuple):
    """All that captured work depends on. Fields that a part does not depend on keep their defaults.

    size               number of slices of a decode pass, or the size of a prefill pass, with padding
    logits_processors  samples with the rows' logits processors
    logprobs           returns log-probabilities
    cascade            uses cascade attention
    num_candidates     of the part "candidates"
    """

    size: int | PrefillSize
    part: Part = "pass"
    logits_processors: bool = False
    logprobs: bool = False
    cascade: bool = False
    num_candidates: int = 0


PLAIN = PassShape(0)
