"""Records the work that the runner queues on a device with graphs: captures, replays, bitmasks, columns, commits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from octavo import LLM
from octavo.engine.executor import GrammarBitmask
from octavo.kernels import reference
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.row_state import DecodeInputs
from octavo.runner.output_buffers import StepOutput
from octavo.runner.passes.graphs import Graphs
from octavo.runner.passes.pass_shape import PassShape
from octavo.runner.passes.prefill_batch import PrefillSize
from tests.models.tiny import VOCAB_SIZE
from tests.runner.stub_platform import FakeGraphs, StubPlatform, use_platform


class ScoreModel:
    """Logits are whole 64ths that depend on token and position: no machine rounds them differently."""

    def __init__(self) -> None:
        token, position, target = torch.meshgrid(
            *(torch.arange(n) for n in (VOCAB_SIZE, 64, VOCAB_SIZE)), indexing="ij"
        )
        self.scores = ((token * 31 + position * 57 + target * target * 13 + token * target * 7) % 499) / 64

    def forward(
        self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None, sliced: bool = False
    ) -> Tensor:
        logits = self.scores[token_ids, batch.positions % 64]
        return logits.clone() if logits_rows is None else logits[logits_rows]


class Recorder:
    """The events of an engine's runner, which it moves to a stub platform with graphs.

    events   as text, in order
    results  tokens of the columns that the host sampled; candidates of beams with rounded log-probabilities
    shapes   of the captured work
    """

    def __init__(self, llm: LLM) -> None:
        self.events: list[str] = []
        self.results: list[Any] = []
        self.shapes: set[str] = set()
        self.is_replaying = False
        use_platform(llm, RecordedPlatform(self))
        runner = llm.engine.executor.runner  # type: ignore[attr-defined]
        runner.passes.model = ScoreModel()
        self._follow_columns(runner.output_buffers)
        self._follow_bitmasks(runner.passes.pipeline.bitmask)

    def _follow_columns(self, ring: Any) -> None:
        outputs: list[StepOutput] = []
        new_output: Callable[..., StepOutput] = ring.new_output

        def follow(*args: Any) -> StepOutput:
            outputs[:] = [new_output(*args)]
            self.events.append(f"plan of {args[0]} slices")
            return outputs[0]

        def add_column() -> None:
            (output,) = outputs
            if output.results:
                self.results.append(_rounded(output.results[-1].tokens))
            else:
                self.events.append(f"column of {list(output.slice_ids[-1])}")

        ring.new_output, ring.on_column = follow, add_column

    def _follow_bitmasks(self, buffer: Any) -> None:
        fill, clear = buffer.fill, buffer.clear

        def filled(bitmask: GrammarBitmask | None, slices: Any, depths: Any) -> None:
            self.events.append(f"bitmasks of {[] if bitmask is None else list(bitmask.slices)} for {list(slices)}")
            fill(bitmask, slices, depths)

        def cleared() -> None:
            self.events.append("no bitmasks")
            clear()

        buffer.fill, buffer.clear = filled, cleared


def _rounded(entries: Any) -> Any:
    """Candidates of beams, (log-probability, token), for comparison: processors round log-probabilities differently."""
    if isinstance(entries, tuple):
        return (round(entries[0], 3), *entries[1:])
    return [_rounded(entry) for entry in entries] if isinstance(entries, list) else entries


class RecordedPlatform(StubPlatform):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__(SimpleNamespace(**vars(reference)), graphs=True)
        self.recorder = recorder

        def commit(state: Any, rows: Tensor, *rest: Any) -> None:
            if not recorder.is_replaying:
                recorder.events.append(f"commit {rows.tolist()}")
            reference.commit_sampled_tokens(state, rows, *rest)

        self.ops.commit_sampled_tokens = commit

    def make_graphs(self, inputs: DecodeInputs) -> Graphs:
        return RecordingGraphs(self.recorder, inputs)


class RecordingGraphs(FakeGraphs):
    def __init__(self, recorder: Recorder, inputs: DecodeInputs) -> None:
        super().__init__(inputs.step_counter, len(inputs.rows))
        self.recorder = recorder

    def capture(self, name: Any, work: Callable[[], Tensor | None]) -> None:
        self.recorder.events.append(f"capture {text_of(name)}")
        self.recorder.shapes.add(text_of(name))
        self._quietly(lambda: super(RecordingGraphs, self).capture(name, work))

    def replay(self, name: Any) -> Tensor | None:
        self.recorder.events.append(f"replay {text_of(name)}")
        return self._quietly(lambda: super(RecordingGraphs, self).replay(name))

    def _quietly(self, work: Callable[[], Tensor | None]) -> Tensor | None:
        self.recorder.is_replaying = True
        try:
            return work()
        finally:
            self.recorder.is_replaying = False


def text_of(shape: PassShape) -> str:
    size = f"prefill {tuple(shape.size)}" if isinstance(shape.size, PrefillSize) else f"decode {shape.size}"
    flags = [name for name in ("logits_processors", "logprobs", "cascade") if getattr(shape, name)]
    return " ".join([shape.part, size, *flags, *([str(shape.num_candidates)] if shape.num_candidates else [])])
