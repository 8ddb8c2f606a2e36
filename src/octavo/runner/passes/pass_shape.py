"""Forward passes, and the shapes that they are captured for."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Literal, NamedTuple

from torch import Tensor

from octavo.runner.passes.prefill_batch import PrefillBatch, PrefillSize

Part = Literal["pass", "logits", "sample", "sample and logits", "candidates", "model"]
"""What of a pass: all of it; up to its logits, which are kept; the sampling of kept logits; that and the next decode
pass up to its logits; the best tokens of a beam step; only the model's forward pass."""


class PassShape(NamedTuple):
    """All that captured work depends on. Fields that a part does not depend on keep their defaults.

    size               number of lines of a decode pass, or the size of a prefill pass, with padding
    logits_processors  samples with the rows' logits processors
    logprobs           returns log-probabilities
    cascade            uses cascade attention
    num_drafts         lines of each slice besides the first. Where the host chooses the lines, 1 stands for any number
    num_candidates     of the part "candidates"
    filters            rows may have top_k, top_p or min_p. A GPU's work depends on it only if `sliced`: else True there
    sliced             each tensor parallel rank has the logits of its slice of the vocabulary, and samples from them
    """

    size: int | PrefillSize
    part: Part = "pass"
    logits_processors: bool = False
    logprobs: bool = False
    cascade: bool = False
    num_drafts: int = 0
    num_candidates: int = 0
    filters: bool = True
    sliced: bool = False


PLAIN = PassShape(0)


class Pass(NamedTuple):
    """A forward pass whose inputs are on the device.

    slices  the slice of each line of logits that it samples
    size    of a prefill pass, with padding. None: a decode pass, of the lines in the head of `InputBuffers`
    packed  inputs of a prefill pass
    batch   likewise, on the host
    """

    slices: Seq[int]
    size: PrefillSize | None = None
    packed: Tensor | None = None
    batch: PrefillBatch | None = None

    @property
    def has_work(self) -> bool:
        """False for a decode pass without slices: all of them are done."""
        return bool(self.slices) or self.size is not None


Column = list[Pass]
"""The passes that give the next column of tokens: one, or several prefill passes for many prompt logits."""
