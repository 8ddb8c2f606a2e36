"""`octavo doctor`: reports whether a model fits, before any of it is loaded.

Reads config.json (or a GGUF file's header) and the machine. Reports the memory of weights, activations and K/V, the
tokens that fit, the concurrent requests at several lengths, and, if the model does not fit, the flags that make it fit.
It also lists the keys of the model's files: those that are read, those known to change nothing, and unknown ones.
The budget is computed by the engine's own `runner.memory.budget.plan_memory`; its inputs are computed here, without
torch. On a CPU they are exact. On a GPU activations and CUDA graphs are estimates: the engine measures them by running
the largest passes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from octavo.checkpoint import generation_config
from octavo.checkpoint.keys import KeyUse
from octavo.checkpoint.resolve import Checkpoint, open_checkpoint
from octavo.config import DEFAULT_GPU_MEMORY_UTILIZATION, GIB, EngineArgs
from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.errors import MemoryBudgetError, ModelNotFoundError, ParameterError
from octavo.models.config import config_key_uses, read_spec
from octavo.models.spec import DecoderSpec, ModelSpec
from octavo.runner.memory import needs
from octavo.runner.memory.budget import MemoryBudget, doctor_hint, free_memory, plan_memory
from octavo.runner.memory.needs import (
    CONTEXT_BYTES,
    Machine,
    MemoryNeeds,
    free_for_kv,
    memory_needs,
)
from octavo.simulate.devices import DEVICES, find_device
from octavo.simulate.models import find_shape

LENGTHS = (1024, 4096, 16384, 65536)
MAX_RANKS = 8
"""GPUs of one machine that may share a model, at most: remedies with more are not looked for."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of `examine`.

    budget       the memory plan, with the remedy's flags applied if there is a remedy; None: nothing fits
    problem      why the model does not fit as configured; None: it fits        remedy   flags that make it fit, if any
    at_once      request length in tokens -> concurrent requests
    keys         the keys of each of the model's files
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
    keys: tuple[KeyUse, ...] = ()

    @property
    def fits(self) -> bool:
        return self.problem is None

    @property
    def expert_bytes(self) -> int:
        """Of the weights, those of experts: their share of the parameters."""
        own = self.spec.of_rank(self.args.tensor_parallel_size)
        return self.need.weights * own.num_expert_params // own.num_params

    def as_dict(self) -> dict[str, Any]:
        budget, need = self.budget, self.need
        report: dict[str, Any] = {
            "model": self.model,
            "architecture": self.spec.architecture,
            "num_params": self.spec.num_params,
            "machine": asdict(self.machine) | {"device": self.machine.device},
            "dtype": need.dtype,
            "kv_cache_dtype": need.kv.dtype,
            "weight_bytes": need.weights,
            "expert_bytes": self.expert_bytes,
            "stored_as": self.spec.stored_as or None,
            "activation_bytes": need.activations,
            "graph_bytes": need.graphs,
            "kv_bytes_per_token": need.kv.bytes_per_token,
            "kv_bytes_per_token_of_a_group": need.kv.bytes_per_block // need.kv.block_size,
            "kv_windows": list(need.kv.windows),
            "kv_padding_layers": need.kv.num_places - self.spec.num_layers + len(self.spec.recurrent_layers),
            "state_bytes": need.kv.state_bytes,
            "state_blocks": need.kv.state_blocks,
            "fits": self.fits,
            "problem": self.problem,
            "remedy": list(self.remedy),
            "advice": self.advice or None,
            "keys": [asdict(use) for use in self.keys],
        }
        if budget is not None:
            report |= {
                "block_size": budget.kv.block_size,
                "num_blocks": budget.num_blocks,
                "num_tokens": budget.num_tokens,
                "num_host_blocks": budget.num_host_blocks,
                "max_model_len": budget.max_model_len,
                "requests_at_once": {str(length): round(n, 2) for length, n in self.at_once.items()},
                "warnings": list(budget.warnings),
            }
        return report


def examine(args: EngineArgs, gpu: str | None = None) -> Report:
    """Compute the memory plan of `args` on this machine, or on one with the named GPU. Downloads and loads nothing.

    Raises `ModelError` for a model that is not on this machine or not supported, `ParameterError` for an unknown GPU.
    """
    spec, keys = read_model(args)
    if gpu is not None and args.device == "cpu":
        raise ParameterError(f"device is cpu, but gpu is {gpu}; remove one of them", param="device")
    machine = detect_machine(args.device) if gpu is None else machine_with(gpu)
    args = args.for_checkpoint(spec.quant_method).resolved(machine.device)
    name = Path(args.model).name or args.model

    def plan(args: EngineArgs) -> MemoryBudget:
        return _plan(args, spec, memory_needs(args, spec, machine), machine)

    problem, remedy, advice = None, cast("tuple[str, ...]", ()), ""
    budget: MemoryBudget | None
    try:
        budget = plan(args)
    except MemoryBudgetError as error:
        problem = str(error).removesuffix(f"; {doctor_hint(args)}")  # the hint is to run this command
        args, remedy, budget = next(_remedies(args, machine, spec, plan), (args, (), None))
        if budget is None:
            advice = _suggest_gpu(args, spec)
    need = memory_needs(args, spec, machine)
    at_once = _concurrency(budget, spec) if budget is not None else {}
    return Report(name, spec, machine, args, need, budget, problem, remedy, advice, at_once, keys)


def read_model(args: EngineArgs) -> tuple[ModelSpec, tuple[KeyUse, ...]]:
    """The model of `args.model`, and the keys of its files. Without files, a name of `simulate.models` has sizes."""
    shape = None if Path(args.model).exists() else find_shape(args.model)
    try:
        checkpoint = open_checkpoint(args.model, revision=args.revision, download=False, weights=False)
    except ModelNotFoundError:
        if shape is None or shape.spec is None:
            raise
        return shape.spec, ()
    return read_spec(checkpoint), key_uses(checkpoint)


def key_uses(checkpoint: Checkpoint) -> tuple[KeyUse, ...]:
    """What becomes of the keys of a checkpoint's files."""
    from octavo.text.tokenizer_loader import tokenizer_key_uses  # imports tokenizers

    if checkpoint.format == "gguf":
        from octavo.models.gguf_config import gguf_key_use  # imports numpy

        return gguf_key_use(checkpoint.gguf, checkpoint.path.name), *tokenizer_key_uses(checkpoint)
    generation = checkpoint.generation_config
    return (
        *config_key_uses(checkpoint.config),
        *((generation_config.KEYS.sort(generation, generation_config.FILE),) if generation else ()),
        *tokenizer_key_uses(checkpoint),
    )


# -- machines ----------------------------------------------------------------------------------------------------------


def detect_machine(device: str) -> Machine:
    """Detects the GPU with nvidia-smi. Raises `ParameterError` if device is cuda and none is found."""
    found = None if device == "cpu" else _nvidia_gpu()
    if found is None and device == "cuda":
        raise ParameterError("device is cuda, but nvidia-smi finds no GPU; pass --gpu or --device cpu", param="device")
    if found is not None:
        name, total, held, num_devices = found
        return Machine(name, free_memory(), total, max(held, CONTEXT_BYTES), num_devices)
    return Machine(f"{os.cpu_count()} cores", free_memory())


def machine_with(gpu: str) -> Machine:
    """This host with otherwise empty GPUs: a name or file of `find_device`, or the memory of each in GiB."""
    try:
        num_bytes = float(gpu.lower().removesuffix("gib")) * GIB
    except ValueError:
        if gpu.lower() == "cpu":
            raise ParameterError("gpu is cpu; pass --device cpu", param="gpu") from None
        num_bytes = find_device(gpu).memory_bytes
    if not 1 <= num_bytes / GIB <= 4096:
        known = ", ".join(DEVICES)
        raise ParameterError(f"no GPU {gpu!r}; known: {known}, a .json file, or its memory, such as 48GiB", param="gpu")
    return Machine(gpu.lower(), free_memory(), int(num_bytes), CONTEXT_BYTES, MAX_RANKS)


def _nvidia_gpu() -> tuple[str, int, int, int] | None:
    """Name, bytes and used bytes of the first GPU, and how many have its name and size; None if there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        gpus = [line.rsplit(",", 2) for line in done.stdout.splitlines()]
        (name, total, used), num_devices = gpus[0], [gpu[:2] for gpu in gpus].count(gpus[0][:2])
        return name.strip(), int(total) << 20, int(used) << 20, num_devices
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


# -- memory plan and remedies ------------------------------------------------------------------------------------------


def _plan(args: EngineArgs, spec: ModelSpec, need: MemoryNeeds, machine: Machine) -> MemoryBudget:
    free = free_for_kv(args, need, machine)
    return plan_memory(args, need.kv, free, model_len=spec.max_model_len(args.max_model_len))


def _remedies(
    args: EngineArgs, machine: Machine, spec: ModelSpec, plan: Any
) -> Iterator[tuple[EngineArgs, tuple[str, ...], MemoryBudget]]:
    """Argument changes that make the model fit, the smallest first: (args, flags, memory plan)."""
    every = list(_changes(args, machine))
    if sizes := range(args.tensor_parallel_size + 1, min(machine.num_devices, MAX_RANKS) + 1):
        shorter = [changes for changes in every if "max_model_len" in changes]
        every = [changes for changes in every if changes not in shorter]
        every += [*({"tensor_parallel_size": size} for size in sizes), *shorter]
    for changes in every:
        changed = replace(args, **changes)
        try:
            budget: MemoryBudget = plan(changed)
        except (MemoryBudgetError, ParameterError):
            continue
        if changes.get("max_model_len") == -1:  # show the resulting number
            changes = changes | {"max_model_len": budget.max_model_len}
        yield changed, tuple(_flag(name, value) for name, value in changes.items()), budget


def _changes(args: EngineArgs, machine: Machine) -> Iterator[dict[str, Any]]:
    overrides = {"num_gpu_blocks_override", "kv_cache_memory_bytes", "swap_space"}
    shorter = {"max_model_len": -1} if (args.max_model_len or 0) > 0 else {}
    without_overrides = {name: None for name in sorted(overrides) if getattr(args, name) is not None}
    smaller: list[dict[str, Any]] = []
    if machine.device == "cuda":
        now = args.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
        smaller += [{"gpu_memory_utilization": share} for share in (0.95, 0.98) if share > now]
        fewer = {"max_num_batched_tokens": 2048, "max_num_seqs": 64}
        fewer = {name: limit for name, limit in fewer.items() if (getattr(args, name) or 0) > limit}
        smaller += [fewer, fewer | {"gpu_memory_utilization": max(now, 0.98)}]
        smaller += [fewer | {"gpu_memory_utilization": max(now, 0.98), "enforce_eager": True}]
        if args.dtype == "float32":
            smaller += [{"dtype": "bfloat16"}, {"dtype": "bfloat16"} | smaller[-2]]
    else:
        if args.gpu_memory_utilization is not None:
            smaller += [{"gpu_memory_utilization": share} for share in (0.5, 0.8, 0.95)]
        if args.dtype in ("auto", "float32"):
            smaller += [{"dtype": "bfloat16"}]
        if args.quantization is None and needs.has_bfloat16_products():
            smaller += [{"quantization": "int8"} | ({"dtype": "auto"} if args.dtype == "float32" else {})]
    yield from (shorter, without_overrides, shorter | without_overrides)
    for change in smaller:
        yield from (change, change | shorter, change | shorter | without_overrides)


def _flag(name: str, value: Any) -> str:
    option = f"--{name.replace('_', '-')}"
    if value is None:
        return f"without {option}"
    return option if value is True else f"{option} {value}"


def _suggest_gpu(args: EngineArgs, spec: ModelSpec) -> str:
    """Advice that names the smallest known GPU on which the model fits."""
    supported = [device for device in DEVICES.values() if device.is_supported]
    for name in (d.name for d in sorted(supported, key=lambda device: device.memory_bytes)):
        machine, gpu_args = machine_with(name), replace(args, quantization=None, kv_cache_dtype="auto")
        try:
            _plan(gpu_args, spec, memory_needs(gpu_args, spec, machine), machine)
        except MemoryBudgetError:
            continue
        return f"no flag makes it fit here; one {name} holds it"
    return "no flag makes it fit here or on any single known GPU; choose a smaller model"


def _concurrency(budget: MemoryBudget, spec: ModelSpec) -> dict[int, float]:
    """Concurrent requests that the pool holds, by length in tokens. Blocks outside sliding windows are freed."""
    lengths = [n for n in LENGTHS if n < budget.max_model_len] + [budget.max_model_len]
    max_kept = budget.max_model_len if spec.kv_window is None else spec.kv_window + budget.kv.block_size
    return {n: budget.num_blocks / budget.kv.blocks_of(min(n, max_kept)) for n in lengths}


# -- report as text ----------------------------------------------------------------------------------------------------


def format_report(report: Report) -> list[str]:
    spec, need, budget, machine = report.spec, report.need, report.budget, report.machine
    heads = f"{spec.num_layers} layers, {spec.num_heads} heads over {spec.num_kv_heads} of K and V"
    if (others := spec.full_kv_heads[0]) != spec.num_kv_heads:
        heads += f" ({others} without a sliding window)"
    out = [
        f"{report.model}: {spec.architecture}, {_count(spec.num_params)} parameters, {heads}, "
        f"{spec.max_position_embeddings:,} positions"
    ]
    if machine.device_bytes is None:
        where = f"this machine: {machine.name}, {_gib(machine.free_bytes)} of memory free"
    else:
        where = (
            f"{machine.name}: {_gib(machine.device_bytes)}, of which CUDA and others hold {_gib(machine.held_bytes)}"
        )
    if (size := report.args.tensor_parallel_size) > 1:
        where += f"; each of {size} ranks"
    kv_dtype = "" if need.kv.dtype == need.dtype else f", K and V in {need.kv.dtype}"
    out += [f"{where}; in {need.dtype}{kv_dtype}", ""]

    def row(name: str, num_bytes: int, text: str = "") -> None:
        out.append(f"  {name:<12} {_gib(num_bytes):>12}   {text}".rstrip())

    row("weights", need.weights, _weights_text(report.args, spec, need.dtype, machine.device))
    if isinstance(spec, DecoderSpec) and spec.experts is not None:
        experts = spec.experts
        row(
            "  experts",
            report.expert_bytes,
            f"of these: {experts.num} a layer, of which a token goes to {experts.top_k}",
        )
    row("activations", need.activations, f"of a step of {report.args.max_num_batched_tokens:,} tokens; an estimate")
    if need.graphs:
        row("CUDA graphs", need.graphs, "an estimate")
    if budget is not None:
        blocks = f"{budget.num_blocks:,} blocks of {budget.kv.block_size}, {budget.num_tokens:,} tokens"
        row("KV pool", budget.pool_bytes, f"{need.kv.bytes_per_token / 1024:,.1f} KiB a token: {blocks}")
        out += _group_lines(need.kv, spec)
        row("swap space", budget.swap_bytes, "of the host")
    else:
        out.append(f"  {'KV':<12} {need.kv.bytes_per_token / 1024:>8,.1f} KiB   a token")
        out += _group_lines(need.kv, spec)
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
    for use in report.keys:
        kinds = (("read", use.read), ("no effect", use.inert), ("unknown", use.unknown))
        lines = [_wrapped(f"  {title:<11} ", names) for title, names in kinds if names]
        out += ["", f"keys of {use.file}", *lines] if lines else []
    return out


def _weights_text(args: EngineArgs, spec: ModelSpec, dtype: str, device: str) -> str:
    if dtype != "float32" and spec.keeps_bits_on(device):
        return f"as the files hold them: {spec.stored_as}"
    files = f"; the files hold {spec.stored_as}" if spec.stored_as else ""
    return f"in {args.quantization or dtype}{files}" if args.quantization or files else ""


def _group_lines(kv: KVCacheSpec, spec: ModelSpec) -> list[str]:
    """What the groups of layers and the states take; nothing if all layers are one group."""
    states = f"{kv.state_bytes / 1024:,.1f} KiB for each sequence in {kv.state_blocks} blocks"
    states = " " * 28 + f"{states}: the state of {len(spec.recurrent_layers)} recurrent layers"
    last = [states] if kv.state_bytes else []
    if not kv.windows:
        return last
    each = kv.bytes_per_block / kv.block_size / 1024
    num_full = kv.num_layers if kv.full is None else kv.full[0]
    lines = [f"{each:,.1f} KiB a token: {num_full} layers without a sliding window"]
    for window, num_groups in Counter(kv.windows).items():
        num_layers = spec.windows.count(window)
        padding = num_groups * kv.num_layers - num_layers
        layers = f"{num_layers} layers in groups of {kv.num_layers}, with {padding} of padding"
        lines.append(f"{num_groups * each:,.1f} KiB for each of the last {window:,} tokens: {layers}")
    return [" " * 28 + line for line in lines] + last


def _wrapped(title: str, names: Sequence[str]) -> str:
    return textwrap.fill(", ".join(names), 100, initial_indent=title, subsequent_indent=" " * len(title))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes >= GIB // 100 else f"{num_bytes / 1024:,.0f} KiB"


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} B" if number >= 1e9 else f"{number / 1e6:,.1f} M"
