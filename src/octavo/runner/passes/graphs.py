"""What a model runner needs of a model, and of graphs: captured work that is replayed without Python."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.runner.passes.pass_shape import PassShape


class Model(Protocol):
    def forward(
        self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None, sliced: bool = False
    ) -> Tensor:
        """See `models.decoder.Decoder.forward`."""


class Graphs(Protocol):
    """Captured work, by name: `runner.passes.cuda_graphs.CudaGraphs`, `runner.passes.recorded_graphs.RecordedGraphs`.

    whole_passes  captures all passes from their inputs to their sampled tokens; else a model's forward pass, over the
                  buffers of `DecodeInputs`, and only some whole passes
    max_slices    most slices of a decode pass that is captured
    """

    whole_passes: bool
    max_slices: int

    def __contains__(self, name: Hashable) -> bool: ...

    def takes(self, shape: PassShape) -> bool:
        """True if it captures such work, of any size."""

    def capture(self, name: Hashable, work: Callable[[], Tensor | None]) -> None:
        """Capture the kernels that `work` launches, which may run several times. It must be harmless and must not
        depend on tensor values."""

    def replay(self, name: Hashable) -> Tensor | None:
        """Run captured work again, on the present contents of the same memory. Returns the tensor that it returned."""

    def release(self) -> None:
        """Free all captured work."""
