"""`octavo doctor`: whether a model fits, before any of it is loaded.

From config.json (or a GGUF file's head) and the machine: weights, activations, bytes of K and V a token, how many
tokens fit, how many requests of several lengths that serves at once; and where it does not fit, the flag that makes it.
The budget is the engine's own, `runner.memory.plan_memory`; what goes into it is worked out here, without torch. On a
CPU that is the same arithmetic. A GPU's activations and graphs are estimates: its engine runs the largest passes, and
looks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from octavo.checkpoint.resolve import Checkpoint, open_checkpoint
from octavo.config import DEFAULT_GPU_MEMORY_UTILIZATION, GIB, EngineArgs
from octavo.errors import MemoryBudgetError, ParameterError
from octavo.integers import cdiv
from octavo.models.config import DecoderSpec, ModelSpec, spec_from_config
from octavo.models.param_count import num_params, weight_bytes
from octavo.runner.memory.budget import MemoryBudget, doctor_hint, free_memory, plan_memory

GPUS = {"h200": 139.8, "h100": 79.1, "a100-80": 79.1, "a100-40": 39.4, "l4": 22.0}
"""GiB, as CUDA reports them: less than what the data sheet calls GB."""
CONTEXT_BYTES = 512 << 20
"""What CUDA itself holds on a GPU that is otherwise empty: an estimate."""
SPARE_BYTES = 256 << 20
GRAPH_BYTES = 8 << 20
NUM_CHUNK_GRAPHS = 17
"""As `runner.memory.profile` and `runner.prefill_batch` have them, which need torch to be read; a test compares."""
LENGTHS = (1024, 4096, 16384, 65536)
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the model is to run.

    device_bytes   of the GPU, None on a CPU      held_bytes   of these, what others and CUDA itself hold
    free_bytes     of the host
    """

    name: str
    free_bytes: int
    device_bytes: int | None = None
    held_bytes: int = 0

    @property
    def device(self) -> str:
        return "cpu" if self.device_bytes is None else "cuda"


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What a model takes, in bytes, before any K and V."""

    dtype: str
    weights: int
    activations: int
    graphs: int
    kv_per_token: int

    @property
    def all(self) -> int:
        return self.weights + self.activations + self.graphs


@dataclass(frozen=True, slots=True)
class Report:
    """budget    what is settled, by the remedy's flags where there is one; None: nothing fits
    problem      why it does not fit as asked; None: it does        remedy   flags that make it fit, if any do
    at_once      requests by their length in tokens
    """

    model: str
    spec: ModelSpec
    machine: Machine
    args: EngineArgs
    need: MemoryNeeds
    budget: MemoryBudget | None
    problem: str | None = None
    remedy: tuple[str, ...] = ()
    advice: str = ""
    at_once: dict[int, float] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        return self.problem is None

    def as_dict(self) -> dict[str, Any]:
        budget, need = self.budget, self.need
        told: dict[str, Any] = {
            "model": self.model,
            "architecture": self.spec.architecture,
            "num_params": num_params(self.spec),
            "machine": asdict(self.machine) | {"device": self.machine.device},
            "dtype": need.dtype,
            "weight_bytes": need.weights,
            "activation_bytes": need.activations,
            "graph_bytes": need.graphs,
            "kv_bytes_per_token": need.kv_per_token,
            "fits": self.fits,
            "problem": self.problem,
            "remedy": list(self.remedy),
            "advice": self.advice or None,
        }
        if budget is not None:
            told |= {
                "block_size": budget.block_size,
                "num_blocks": budget.num_blocks,
                "num_tokens": budget.num_blocks * budget.block_size,
                "num_host_blocks": budget.num_host_blocks,
                "max_model_len": budget.max_model_len,
                "requests_at_once": {str(length): round(n, 2) for length, n in self.at_once.items()},
                "warnings": list(budget.warnings),
            }
        return told


def examine(args: EngineArgs, gpu: str | None = None) -> Report:
    """What `args` would come to on this machine, or on one with the GPU that is named. Downloads and loads nothing.

    Raises `ModelError` for a model that is not here or cannot be served, `ParameterError` for an unknown GPU.
    """
    checkpoint = open_checkpoint(args.model, revision=args.revision, download=False, weights=False)
    spec = spec_from_config(checkpoint.config, checkpoint.generation_config)
    if gpu is not None and args.device == "cpu":
        raise ParameterError(f"device is cpu, and the GPU {gpu}; leave one of them out", param="device")
    machine = this_machine(args.device) if gpu is None else machine_with(gpu)
    args = args.resolved(machine.device)
    name = Path(args.model).name or args.model
    _check_quantization(args, machine)

    def plan(args: EngineArgs) -> MemoryBudget:
        return _plan(args, spec, need_of(args, spec, checkpoint, machine), machine)

    problem, remedy, advice = None, cast("tuple[str, ...]", ()), ""
    budget: MemoryBudget | None
    try:
        budget = plan(args)
    except MemoryBudgetError as error:
        problem = str(error).removesuffix(f"; {doctor_hint(args)}")  # this is it
        args, remedy, budget = next(_remedies(args, machine, spec, plan), (args, (), None))
        if budget is None:
            advice = _where_instead(args, spec, checkpoint)
    need = need_of(args, spec, checkpoint, machine)
    at_once = _at_once(budget, spec) if budget is not None else {}
    return Report(name, spec, machine, args, need, budget, problem, remedy, advice, at_once)


# -- what it needs -----------------------------------------------------------------------------------------------------


def need_of(args: EngineArgs, spec: ModelSpec, checkpoint: Checkpoint, machine: Machine) -> MemoryNeeds:
    dtype = dtype_of(args, spec, checkpoint, machine.device)
    size = ITEMSIZE[dtype]
    activations = activation_bytes(args, spec, size)
    graphs = 0
    if machine.device == "cuda" and not args.enforce_eager:
        graphs = activations + (num_decode_graphs(args.max_num_seqs or 1) + NUM_CHUNK_GRAPHS) * GRAPH_BYTES
    per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * size
    weights = weight_bytes(spec, size, int8=args.quantization == "int8")
    return MemoryNeeds(dtype, weights, activations, graphs, per_token)


def dtype_of(args: EngineArgs, spec: ModelSpec, checkpoint: Checkpoint, device: str) -> str:
    """What the engine would compute in; see `EngineArgs.dtype`."""
    if args.dtype != "auto":
        return args.dtype
    if device == "cpu":
        quantised = checkpoint.format == "gguf" and "dtype" not in checkpoint.config
        halves = (quantised or spec.dtype != "float32") and multiplies_bfloat16()
        return "bfloat16" if halves or args.quantization else "float32"
    return "bfloat16" if spec.dtype == "float32" else spec.dtype


def multiplies_bfloat16() -> bool:
    """Whether this processor does."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    return "avx512_bf16" in flags or "amx_tile" in flags


def activation_bytes(args: EngineArgs, spec: ModelSpec, itemsize: int) -> int:
    """The most that a step holds at a time: its widest layer, or the logits of every row, which are float32 besides."""
    num_tokens = args.max_num_batched_tokens or 1
    num_rows = min(args.max_num_seqs or 1, num_tokens)
    heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim  # Q, K, V, and what attention gives
    mlp = (3 if isinstance(spec, DecoderSpec) else 2) * spec.intermediate_size
    layer = num_tokens * (2 * spec.hidden_size + max(heads, mlp)) * itemsize
    logits = num_tokens * 2 * spec.hidden_size * itemsize + num_rows * spec.vocab_size * (itemsize + 4)
    return max(layer, logits)


def num_decode_graphs(most: int) -> int:
    """Sizes of decode graphs up to `most` rows, and of those whose rows begin alike."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, most + 32, 32)]
    sizes = [*(size for size in sizes if size < most), most]
    return len(sizes) + len([size for size in sizes if size in (8, 16) or size % 32 == 0 or size == most >= 8])


# -- where it would run ------------------------------------------------------------------------------------------------


def this_machine(device: str) -> Machine:
    """Raises `ParameterError` where a GPU is asked for and none is found."""
    found = None if device == "cpu" else _nvidia_gpu()
    if found is None and device == "cuda":
        raise ParameterError("device is cuda, and nvidia-smi finds none here; name a GPU, or use cpu", param="device")
    if found is not None:
        name, total, held = found
        return Machine(name, free_memory(), total, max(held, CONTEXT_BYTES))
    return Machine(f"{os.cpu_count()} cores", free_memory())


def machine_with(gpu: str) -> Machine:
    """A GPU by its name in `GPUS`, or any by its GiB, otherwise empty; the host's memory is this machine's."""
    gib = GPUS.get(gpu.lower())
    if gib is None:
        try:
            gib = float(gpu.lower().removesuffix("gib"))
        except ValueError:
            gib = 0.0
        if not 1 <= gib <= 4096:
            known = ", ".join(GPUS)
            raise ParameterError(f"no GPU {gpu!r}; known: {known}, or its memory, such as 48GiB", param="gpu")
    return Machine(gpu.lower(), free_memory(), int(gib * GIB), CONTEXT_BYTES)


def _nvidia_gpu() -> tuple[str, int, int] | None:
    """(name, bytes, bytes in use) of the first."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        name, total, used = done.stdout.splitlines()[0].rsplit(",", 2)
        return name.strip(), int(total) << 20, int(used) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


# -- whether it fits ---------------------------------------------------------------------------------------------------


def _plan(args: EngineArgs, spec: ModelSpec, need: MemoryNeeds, machine: Machine) -> MemoryBudget:
    device_bytes = None
    free_bytes = machine.free_bytes - need.weights
    if machine.device_bytes is not None:
        free_bytes = machine.free_bytes
        share = int(machine.device_bytes * (args.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION))
        device_bytes = share - need.all - machine.held_bytes - SPARE_BYTES
        if device_bytes <= 0:
            raise MemoryBudgetError(
                f"No available memory for the cache blocks: {_gib(share)} of {machine.name}'s "
                f"{_gib(machine.device_bytes)} may be used; weights take {_gib(need.weights)}, activations "
                f"{_gib(need.activations)}, CUDA graphs {_gib(need.graphs)}, CUDA and others {_gib(machine.held_bytes)}"
            )
    return plan_memory(
        args,
        bytes_per_token=need.kv_per_token,
        weight_bytes=need.weights,
        model_len=spec.num_positions(args.max_model_len),
        free_bytes=free_bytes,
        device_bytes=device_bytes,
    )


def _remedies(
    args: EngineArgs, machine: Machine, spec: ModelSpec, plan: Any
) -> Iterator[tuple[EngineArgs, tuple[str, ...], MemoryBudget]]:
    """Settings that fit, the smallest change first, with the flags that say them."""
    for changes in _changes(args, machine):
        changed = replace(args, **changes)
        try:
            budget: MemoryBudget = plan(changed)
        except (MemoryBudgetError, ParameterError):
            continue
        if changes.get("max_model_len") == -1:  # a number says more than "as long as fits"
            changes = changes | {"max_model_len": budget.max_model_len}
        yield changed, tuple(_flag(name, value) for name, value in changes.items()), budget


def _changes(args: EngineArgs, machine: Machine) -> Iterator[dict[str, Any]]:
    asked = {"num_gpu_blocks_override", "kv_cache_memory_bytes", "swap_space"}
    shorter = {"max_model_len": -1} if (args.max_model_len or 0) > 0 else {}
    as_comes = {name: None for name in sorted(asked) if getattr(args, name) is not None}
    smaller: list[dict[str, Any]] = []
    if machine.device == "cuda":
        now = args.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
        smaller += [{"gpu_memory_utilization": share} for share in (0.95, 0.98) if share > now]
        fewer = {"max_num_batched_tokens": 2048, "max_num_seqs": 64}
        fewer = {name: most for name, most in fewer.items() if (getattr(args, name) or 0) > most}
        smaller += [fewer, fewer | {"gpu_memory_utilization": max(now, 0.98)}]
        smaller += [fewer | {"gpu_memory_utilization": max(now, 0.98), "enforce_eager": True}]
        if args.dtype == "float32":
            smaller += [{"dtype": "bfloat16"}, {"dtype": "bfloat16"} | smaller[-2]]
    else:
        if args.gpu_memory_utilization is not None:
            smaller += [{"gpu_memory_utilization": share} for share in (0.5, 0.8, 0.95)]
        if args.dtype in ("auto", "float32"):
            smaller += [{"dtype": "bfloat16"}]
        if args.quantization is None and multiplies_bfloat16():
            smaller += [{"quantization": "int8"} | ({"dtype": "auto"} if args.dtype == "float32" else {})]
    yield from (shorter, as_comes, shorter | as_comes)
    for change in smaller:
        yield from (change, change | shorter, change | shorter | as_comes)


def _flag(name: str, value: Any) -> str:
    option = f"--{name.replace('_', '-')}"
    if value is None:
        return f"without {option}"
    return option if value is True else f"{option} {value}"


def _where_instead(args: EngineArgs, spec: ModelSpec, checkpoint: Checkpoint) -> str:
    """The smallest GPU that is known and holds it."""
    for name in sorted(GPUS, key=lambda name: GPUS[name]):
        machine, settled = machine_with(name), replace(args, quantization=None)
        try:
            _plan(settled, spec, need_of(settled, spec, checkpoint, machine), machine)
        except MemoryBudgetError:
            continue
        return f"no flag makes it fit here; one {name} holds it"
    return "no flag makes it fit here, and no one GPU that is known holds it; take a smaller model"


def _at_once(budget: MemoryBudget, spec: ModelSpec) -> dict[int, float]:
    """How many requests of so many tokens each the pool holds; where every layer has a window, blocks that no layer
    looks at any more are given back."""
    lengths = [n for n in LENGTHS if n < budget.max_model_len] + [budget.max_model_len]
    most = budget.max_model_len if spec.kept_window is None else spec.kept_window + budget.block_size
    size = budget.block_size
    return {n: budget.num_blocks / cdiv(min(n, most), size) for n in lengths}


def _check_quantization(args: EngineArgs, machine: Machine) -> None:
    if args.quantization is not None and machine.device != "cpu":
        raise ParameterError(
            f"quantization {args.quantization!r} is for CPUs; leave it out on {machine.name}", param="quantization"
        )


# -- for people --------------------------------------------------------------------------------------------------------


def format_report(report: Report) -> list[str]:
    spec, need, budget, machine = report.spec, report.need, report.budget, report.machine
    heads = f"{spec.num_layers} layers, {spec.num_heads} heads over {spec.num_kv_heads} of K and V"
    out = [
        f"{report.model}: {spec.architecture}, {_count(num_params(spec))} parameters, {heads}, "
        f"{spec.max_position_embeddings:,} positions"
    ]
    if machine.device_bytes is None:
        where = f"this machine: {machine.name}, {_gib(machine.free_bytes)} of memory free"
    else:
        where = (
            f"{machine.name}: {_gib(machine.device_bytes)}, of which CUDA and others hold {_gib(machine.held_bytes)}"
        )
    out += [f"{where}; in {need.dtype}", ""]

    def row(name: str, num_bytes: int, text: str = "") -> None:
        out.append(f"  {name:<12} {_gib(num_bytes):>12}   {text}".rstrip())

    row("weights", need.weights, "in int8" if report.args.quantization else "")
    row("activations", need.activations, f"of a step of {report.args.max_num_batched_tokens:,} tokens; an estimate")
    if need.graphs:
        row("CUDA graphs", need.graphs, "an estimate")
    if budget is not None:
        kv, size = (budget.num_blocks + 1) * budget.bytes_per_block, budget.block_size
        each = f"{need.kv_per_token / 1024:,.1f} KiB a token"
        row("KV pool", kv, f"{each}: {budget.num_blocks:,} blocks of {size}, {budget.num_blocks * size:,} tokens")
        row("swap space", budget.num_host_blocks * budget.bytes_per_block, "of the host")
    else:
        out.append(f"  {'KV':<12} {need.kv_per_token / 1024:>8,.1f} KiB   a token")
    if report.problem is not None:
        out += ["", f"It does not fit: {report.problem}"]
        if report.remedy:
            out.append(f"This makes it fit: {' '.join(report.remedy)}; the figures above are with it.")
        if report.advice:
            out.append(report.advice[0].upper() + report.advice[1:] + ".")
    if budget is not None:
        out += ["", "  tokens each    requests at once"]
        out += [f"  {n:>11,}    {count:>16,.1f}" for n, count in report.at_once.items()]
        out += [f"note: {warning}" for warning in budget.warnings]
    return out


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes >= GIB // 100 else f"{num_bytes / 1024:,.0f} KiB"


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} B" if number >= 1e9 else f"{number / 1e6:,.1f} M"
