"""A third platform, from one file: a device that is no GPU and keeps its state to itself, on the CPU's memory.

It has the reference's operations, and graphs if asked. The model runner treats it like a GPU: it reads no state of the
rows, pads graphs, and queues plans in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo import LLM
from octavo.kernels import reference
from octavo.kernels.row_state import DecodeInputs
from octavo.runner.executor import make_executor
from octavo.runner.model_runner import ModelRunner
from octavo.runner.passes.graphs import Graphs
from octavo.runner.passes.pass_shape import PassShape
from octavo.runner.platform import Platform


class FakeGraphs:
    """CUDA graphs without a GPU: `capture` runs the work once and undoes its step, `replay` runs it again."""

    whole_passes = True

    def __init__(self, step_counter: Tensor, max_slices: int = 0) -> None:
        self.max_slices = max_slices
        self.step_counter = step_counter
        self.work: dict[Any, Callable[[], Tensor | None]] = {}
        self.num_replays = 0

    def __contains__(self, name: Any) -> bool:
        return name in self.work

    def takes(self, shape: PassShape) -> bool:
        return shape.part != "model"

    def capture(self, name: Any, work: Callable[[], Tensor | None]) -> None:
        step_counter = self.step_counter.clone()
        work()
        self.step_counter.copy_(step_counter)
        self.work[name] = work

    def replay(self, name: Any) -> Tensor | None:
        self.num_replays += 1
        return self.work[name]()

    def release(self) -> None:
        self.work.clear()


class StubPlatform(Platform):
    name = "stub"
    device = torch.device("cpu")
    has_cascade = True

    def __init__(self, ops: Any = reference, *, graphs: bool = False) -> None:
        self.ops = ops
        self.has_graphs = graphs

    def make_graphs(self, inputs: DecodeInputs) -> Graphs | None:
        return FakeGraphs(inputs.step_counter, len(inputs.rows)) if self.has_graphs else None


def use_platform(llm: LLM, platform: Platform) -> LLM:
    """The engine, on another platform, without the graphs that are captured at start."""
    old: ModelRunner = llm.engine.executor.runner  # type: ignore[attr-defined]
    runner = ModelRunner(
        old.passes.model,
        old.state.kv,
        old.state.swapper.host_kv,
        platform,
        num_rows=old.state.rows.null_row,
        max_model_len=llm.config.max_model_len,
        max_num_tokens=llm.config.args.max_num_batched_tokens or 0,
        max_decode_steps=llm.config.args.decode_window or 1,
        vocab_size=llm.engine.limits.vocab_size,
        graphs=True,
        num_speculative_tokens=old.num_speculative_tokens,
        draft=old.state.draft,
        vocab_slice=old.passes.pipeline.vocab_slice,
    )
    llm.engine.executor.close()
    llm.engine.executor = make_executor(runner)
    return llm


def use_stub_platform(llm: LLM, *, fake_graphs: bool = False) -> LLM:
    return use_platform(llm, StubPlatform(graphs=fake_graphs))
