"""Duration of a step in seconds, from a device's roofline or from measurements on this machine.

A cost is a function of a `StepPlan` alone. The plan's work is summed up in `StepWork` first:

    dense work      tokens that go through the weights: `num_new` prefill tokens in `num_chunks` chunks, and
                    `num_decoding` decode tokens, the latter in `num_passes` successive passes of a decode window
    attention       `chunk_pairs` (query, key) pairs of prefill chunks, which cost arithmetic; `kv_tokens` whose K and V
                    are read for single queries, which costs bandwidth. Both are of a layer without a sliding window;
                    `work_in_window` are those of a layer with one
    memory          blocks copied on the device, and moved to or from the host
    states          of recurrent layers: read and written once for a chunk or a decode token, with arithmetic per token
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from operator import mul
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.core.plan import StepPlan
from octavo.errors import UsageError, naming_file
from octavo.simulate.devices import Device
from octavo.simulate.models import ModelShape, find_shape

STATE_FLOPS = 7
"""Operations of a token on each number of a state, as in a Gated DeltaNet: it fades, is read twice and written once."""
NUM_FIRST_TOKENS = 8
"""Tokens of a pass that each add to the time of the matrix products, as on a CPU; further tokens cost less."""


class StepWork(NamedTuple):
    """The work of one step, as counts; see the module docstring."""

    num_slices: int
    num_new: int
    num_decoding: int
    num_passes: int
    chunk_pairs: int
    kv_tokens: int
    num_copied: int
    num_swapped: int
    num_chunks: int

    @property
    def num_first_tokens(self) -> float:
        """The first `NUM_FIRST_TOKENS` tokens of each pass. Prefill chunks belong to the first pass of a window."""
        per_pass, limit = self.num_decoding / self.num_passes, NUM_FIRST_TOKENS
        return min(self.num_new + per_pass, limit) + (self.num_passes - 1) * min(per_pass, limit)


def step_work(plan: StepPlan) -> StepWork:
    """The work of a plan, by sums that run in C: this is called for every step of a simulation."""
    starts, counts = plan.starts, plan.counts
    num_tokens = sum(counts)
    num_chunks = num_new = chunk_pairs = chunk_reads = 0
    for i in plan.host_tokens:
        count = counts[i]
        if count > 1:
            num_chunks += 1
            num_new += count
            chunk_pairs += count * starts[i] + count * (count + 1) // 2
            chunk_reads += starts[i] + count
    num_passes = plan.most_passes or 1
    if num_passes == 1 and not num_new:
        kv_tokens = sum(starts) + num_tokens
    else:
        pairs = sum(map(mul, starts, counts)) + (sum(map(mul, counts, counts)) + num_tokens) // 2
        kv_tokens = pairs - chunk_pairs + chunk_reads
    return StepWork(
        len(counts),
        num_new,
        num_tokens - num_new,
        num_passes,
        chunk_pairs,
        kv_tokens,
        len(plan.copies),
        len(plan.swap_outs) + len(plan.swap_ins),
        num_chunks,
    )


def work_in_window(plan: StepPlan, window: int) -> tuple[int, int]:
    """`chunk_pairs` and `kv_tokens` of a layer in which a query attends to the last `window` keys."""
    starts, counts = (np.array(column, np.int64) for column in (plan.starts, plan.counts))
    is_chunk = np.zeros(len(counts), bool)
    is_chunk[list(plan.host_tokens)] = True
    is_chunk &= counts > 1

    def pairs_until(ends: np.ndarray) -> np.ndarray:  # of the queries before this position
        short = np.minimum(ends, window)
        return np.asarray(short * (short + 1) // 2 + (ends - short) * window)

    pairs = pairs_until(starts + counts) - pairs_until(starts)
    reads = counts + np.minimum(starts, window - 1)
    return int(pairs[is_chunk].sum()), int(pairs[~is_chunk].sum() + reads[is_chunk].sum())


class CostModel(Protocol):
    """Interface of the cost models."""

    @property
    def host_s(self) -> float:
        """Host time to plan and submit a step, hidden behind the device if steps overlap."""

    @property
    def host_slice_s(self) -> float:
        """Additional host time per sequence in the step."""

    @property
    def host_chunk_s(self) -> float:
        """Additional host time per prefill chunk, for admitting its request."""

    @property
    def move_s(self) -> float:
        """Time to move a block to or from the host."""

    def step_s(self, plan: StepPlan) -> float:
        """Device time of a plan."""


WINNER_BYTES = 12
"""Of a row and device: see `kernels.reference.race`."""


class Collectives(NamedTuple):
    """Time of the collectives of tensor parallel ranks: of a pass before the first byte, and for each token and each
    row of logits."""

    pass_s: float
    token_s: float
    row_s: float


def collectives(own: ModelShape, device: Device, num_devices: int) -> Collectives:
    """Of ranks with these sizes. All-reduces of `[num_tokens, hidden_size]`, two in a layer and one for the embedding:
    each device of a ring sends (n - 1) / n of it twice. A gather of the winners of each device's slice: it sends
    all but one of them, as rows without filters need.
    """
    if num_devices == 1:
        return Collectives(0.0, 0.0, 0.0)
    num_reduces, others = 2 * own.num_layers + 1, num_devices - 1
    token_bytes = 2 * others / num_devices * own.hidden_size * own.itemsize
    per_token_s, per_row_s = num_reduces * token_bytes / device.peer_link, others * WINNER_BYTES / device.peer_link
    return Collectives((num_reduces + 1) * device.peer_s, per_token_s, per_row_s)


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """Roofline model of one of `num_devices` tensor parallel ranks of one host, each on its own device. `model` and
    `kv` are the sizes of the rank: it reads its own share, and the others theirs meanwhile."""

    model: ModelShape
    device: Device
    kv: KVCacheSpec
    num_devices: int = 1

    @property
    def host_s(self) -> float:
        return self.device.host_s

    @property
    def host_slice_s(self) -> float:
        return 0.0  # part of `slice_s`

    @property
    def host_chunk_s(self) -> float:
        return 0.0

    @property
    def move_s(self) -> float:
        return self.device.move_s + self.kv.bytes_per_block / self.device.host_link

    def step_s(self, plan: StepPlan) -> float:
        work, model, device = step_work(plan), self.model, self.device
        bandwidth, flops = device.bandwidth * device.bandwidth_share, device.flops * device.flops_share
        layers_s, head_s = 2 * model.num_layer_params / flops, 2 * model.num_head_params / flops
        per_pass = work.num_decoding / work.num_passes
        passes = work.num_passes - 1
        kind = "cpu" if device.name == "cpu" else "cuda"
        first_s, weights_s = (
            model.bytes_per_pass(kind, num_tokens) / bandwidth for num_tokens in (work.num_new + per_pass, per_pass)
        )
        hidden_bytes = model.num_layers * model.hidden_size * model.itemsize
        activation_bytes = device.activation_passes * hidden_bytes / self.num_devices
        num_rows = per_pass + work.num_chunks  # at most one token of a chunk goes through the head
        attention_s = 0.0
        for window, num_layers in model.num_layers_by_window.items():
            pairs, kv_tokens = work_in_window(plan, window) if window else (work.chunk_pairs, work.kv_tokens)
            compute_s = pairs * model.flops_per_pair(window) / flops
            attention_s += num_layers * (compute_s + kv_tokens * self.kv.layer_bytes(window) / bandwidth)
        num_tokens, num_uses = work.num_new + work.num_decoding, work.num_chunks + work.num_decoding
        states_s = num_tokens * STATE_FLOPS * model.state_size / flops + num_uses * 2 * self.kv.state_bytes / bandwidth
        return (
            max(first_s, (work.num_new + per_pass) * layers_s + num_rows * head_s)
            + passes * max(weights_s, per_pass * (layers_s + head_s))
            + num_tokens * activation_bytes / bandwidth
            + attention_s
            + states_s
            + work.num_passes * model.num_layers * device.layer_s
            + (device.chunk_s if work.num_chunks else 0.0)
            + (work.num_slices + work.num_decoding - per_pass) * device.slice_s
            + self._collectives_s(work.num_new + per_pass, num_rows)
            + passes * self._collectives_s(per_pass, per_pass)
            + self._block_moves_s(work, bandwidth)
        )

    def _collectives_s(self, num_tokens: float, num_rows: float) -> float:
        each = collectives(self.model, self.device, self.num_devices)
        return each.pass_s + num_tokens * each.token_s + num_rows * each.row_s

    def _block_moves_s(self, work: StepWork, bandwidth: float) -> float:
        if not work.num_copied and not work.num_swapped:
            return 0.0
        return work.num_copied * 2 * self.kv.bytes_per_block / bandwidth + work.num_swapped * self.move_s


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A linear model, which `octavo calibrate` fits: each term is the time of one unit of work.

    pass_s      a forward pass
    few_s       additional time of each of the first `NUM_FIRST_TOKENS` tokens of a pass
    chunk_s     a step with prefill chunks, whatever their number and length
    new_s       a prefill token
    decode_s    a decode token
    pair_s      a (query, key) pair of a prefill chunk
    kv_s        a token whose K and V are read
    copy_s      a block copied on the device
    move_s      a block moved to or from the host
    host_s, host_slice_s, host_chunk_s  see `CostModel`
    """

    pass_s: float
    new_s: float
    decode_s: float
    pair_s: float = 0.0
    kv_s: float = 0.0
    copy_s: float = 0.0
    move_s: float = 0.0
    host_s: float = 0.0
    host_slice_s: float = 0.0
    host_chunk_s: float = 0.0
    few_s: float = 0.0
    chunk_s: float = 0.0

    def step_s(self, plan: StepPlan) -> float:
        return self.work_s(step_work(plan))

    def work_s(self, work: StepWork) -> float:
        return (
            self.pass_s * work.num_passes
            + self.few_s * work.num_first_tokens
            + self.chunk_s * (work.num_new > 0)
            + self.new_s * work.num_new
            + self.decode_s * work.num_decoding
            + self.pair_s * work.chunk_pairs
            + self.kv_s * work.kv_tokens
            + self.copy_s * work.num_copied
            + self.move_s * work.num_swapped
        )

    def faster(self, factor: float) -> LinearCost:
        """The cost model of a machine that is `factor` times as fast."""
        return replace(self, **{f.name: getattr(self, f.name) / factor for f in fields(self)})

    def save(self, path: Path, **metadata: object) -> None:
        with naming_file(path):
            path.write_text(json.dumps({**metadata, "cost": asdict(self)}, indent=2) + "\n")

    @classmethod
    def load_for(cls, path: Path, model: str, device: str, *, allow_mismatch: bool = False) -> LinearCost:
        """`load` a file that was measured with this model and device. Raises `UsageError` for those of others."""
        cost = cls.load(path)
        measured = json.loads(path.read_text(encoding="utf-8"))
        of_model, of_device = measured.get("model", model), measured.get("device", device)
        shape = find_shape(str(of_model))
        is_same = model in (Path(str(of_model)).name, shape and shape.name)
        if not allow_mismatch and not (is_same and of_device == device):
            raise UsageError(
                f"{path} was measured with {of_model} on {of_device}, not with {model} on {device}; calibrate "
                "these, or pass --allow-mismatched-cost",
                param="cost",
            )
        return cost

    @classmethod
    def load(cls, path: Path) -> LinearCost:
        """Read a file written by `save`. Raises `UsageError` for any other content."""
        names = {f.name for f in fields(cls)}
        try:
            cost = json.loads(path.read_text(encoding="utf-8"))["cost"]
            is_valid = set(cost) <= names and {"pass_s", "new_s", "decode_s"} <= set(cost)
            is_valid = is_valid and all(math.isfinite(value) and value >= 0 for value in cost.values())
        except OSError as error:
            message = f"cannot read {path}: {error.strerror}; run `octavo calibrate --output {path}`"
            raise UsageError(message, param="cost") from None
        except (ValueError, TypeError, KeyError):
            is_valid = False
        if not is_valid:
            raise UsageError(f"{path} is not a calibration; run `octavo calibrate --output {path}`", param="cost")
        return cls(**cost)
