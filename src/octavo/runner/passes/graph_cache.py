"""Captured passes by shape: one key type, and one place that captures and replays."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor

from octavo.kernels.row_state import DecodeInputs
from octavo.runner.passes.graphs import Graphs, Model
from octavo.runner.passes.pass_shape import PassShape
from octavo.runner.passes.prefill_batch import PrefillSize


class GraphCache:
    """The platform's graphs. Without any, all work runs as it is.

    captured       None: none
    prefill_sizes  sizes of prefill passes that may be captured
    """

    def __init__(self, captured: Graphs | None, prefill_sizes: list[PrefillSize]) -> None:
        self.captured = captured
        self.prefill_sizes = prefill_sizes

    @property
    def whole_passes(self) -> bool:
        return self.captured is not None and self.captured.whole_passes

    def __contains__(self, shape: PassShape) -> bool:
        return self.captured is not None and shape in self.captured

    def takes(self, shape: PassShape) -> bool:
        """True if work of this shape is captured on first use."""
        if self.captured is None or not self.captured.takes(shape):
            return False
        size = shape.size
        return size <= self.captured.max_slices if isinstance(size, int) else size in self.prefill_sizes

    def capture(
        self,
        shape: PassShape,
        work: Callable[[], Tensor | None],
        harmless: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Capture work, unless it is captured already. harmless: inside, passes have only inactive rows."""
        if self.captured is not None and shape not in self.captured:
            with harmless():
                self.captured.capture(shape, work)

    def replay(self, shape: PassShape) -> Tensor | None:
        assert self.captured is not None
        return self.captured.replay(shape)

    def release(self) -> None:
        """Free the captured work; nothing is captured again."""
        if self.captured is not None:
            self.captured.release()
        self.captured = None

    def decode_logits(self, model: Model, inputs: DecodeInputs, kv: Tensor, *, sliced: bool = False) -> Tensor:
        """A model's logits of all lines, from a graph of the model alone where graphs do not take whole passes.

        sliced   see `PassShape`
        """
        forward: Callable[[], Tensor] = partial(model.forward, inputs.token_ids, inputs.batch, kv, None, sliced)
        shape = PassShape(len(inputs.rows), "model", sliced=sliced)
        if not self.takes(shape):
            return forward()
        self.capture(shape, forward)
        logits = self.replay(shape) if shape in self else None
        return forward() if logits is None else logits
