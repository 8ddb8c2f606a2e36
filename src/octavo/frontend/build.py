"""Builds an engine from its options: the composition root, which alone knows all parts."""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch

from octavo.checkpoint.generation_config import SamplingDefaults, sampling_defaults
from octavo.checkpoint.resolve import Checkpoint, open_checkpoint
from octavo.config import GIB, EngineArgs, EngineConfig
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.core.scheduler import Scheduler
from octavo.engine.engine import Engine
from octavo.engine.kv_events import KVEventPublisher
from octavo.errors import MemoryBudgetError, ParameterError
from octavo.kernels.cpu import native
from octavo.kernels.cpu import packed_linear as packed
from octavo.kernels.ops import Ops
from octavo.models.config import read_spec
from octavo.models.linear_methods import find_linear_method
from octavo.models.loading.loader import Model, dummy_model, load_model
from octavo.models.spec import ModelSpec
from octavo.runner.executor import Executor
from octavo.runner.memory.budget import FreeMemory, MemoryBudget, doctor_hint, free_memory, plan_memory
from octavo.runner.memory.diagnostics import check_weights, find_gpu, startup_errors, unusable_gpu_reason
from octavo.runner.memory.profile import GPUMemoryProfile, Precompile, measure, smaller_passes
from octavo.runner.platform import CpuPlatform, CudaPlatform, Platform
from octavo.text import chat_template
from octavo.text.tokenizer import Tokenizer
from octavo.view.recording.recorder import FlightRecorder

logger = logging.getLogger("octavo")

LESS_SWAP = "lower swap_space, or set it to 0"


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine with its resolved configuration, model and tokenizer."""

    engine: Engine
    config: EngineConfig
    spec: ModelSpec
    tokenizer: Tokenizer | None
    sampling_defaults: SamplingDefaults


class _StartupTimer:
    """Times the phases of a start."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._laps: list[str] = []

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self._laps.append(f"{phase} {now - self._last:.1f}")
        self._last = now

    def __str__(self) -> str:
        return f"ready in {self._last - self._start:.1f} s: {', '.join(self._laps)}"


def build(args: EngineArgs) -> BuiltEngine:
    """Load the model, plan the memory, and assemble the engine. Raises `ModelError` or `MemoryBudgetError`."""
    if args.flight_recorder is not None:
        check_folder(args.flight_recorder)
    with ExitStack() as starting:
        return _build(args, starting)


def _build(args: EngineArgs, starting: ExitStack) -> BuiltEngine:
    """starting: resources to release after the start, whether or not it succeeds."""
    timer = _StartupTimer()
    checkpoint = open_checkpoint(args.model, revision=args.revision, weights=args.load_format != "dummy")
    spec = read_spec(checkpoint)
    template = None if args.chat_template is None else chat_template.load(args.chat_template)
    defaults = sampling_defaults(args.generation_config, checkpoint)
    if defaults.values:
        logger.info("%s", defaults)
    tokenizer = None if args.skip_tokenizer_init else Tokenizer.from_checkpoint(checkpoint, chat_template=template)
    device = _device(args)
    args = args.resolved(device.type)
    dtype = _dtype(args, spec, device)
    _check_quantization(args, dtype, device)
    platform: Platform = CpuPlatform() if device.type == "cpu" else CudaPlatform()
    ops = platform.ops
    model_len = spec.max_model_len(args.max_model_len)
    precompile = _precompiler(args, spec, dtype, device, model_len, starting) if device.type == "cuda" else None
    # Plan before anything large is loaded: the system kills a process that takes too much memory.
    weight_bytes = spec.weight_bytes(dtype.itemsize, args.quantization)
    kv = KVCacheSpec.of(spec, args.block_size, str(dtype).removeprefix("torch."))
    gpu: GPUMemoryProfile | None = None
    timer.lap("files")
    if device.type == "cuda":
        free_some = f"free as much as the weights take, {weight_bytes / GIB:.2f} GiB; {doctor_hint(args)}"
        with startup_errors(device, "loading the weights", lambda _: free_some):
            check_weights(weight_bytes, args)
            decoder = _load(checkpoint, spec, args, dtype, device, ops, max_len=model_len)
        timer.lap("weights")
        with startup_errors(device, "computing its largest steps", lambda _: smaller_passes(args) or doctor_hint(args)):
            gpu = measure(decoder, args, ops=ops, kv_cache=kv, precompile=precompile)
        gpu.check(args, kv)
        timer.lap("kernels and memory")
    budget = plan_memory(
        args,
        kv,
        FreeMemory(
            weights=weight_bytes,
            host=free_memory() - (weight_bytes if gpu is None else 0),
            device=None if gpu is None else gpu.available_kv_bytes,
        ),
        model_len=model_len,
    )
    for warning in budget.warnings:
        logger.warning(warning)
    if gpu is None:
        decoder = _load(checkpoint, spec, args, dtype, device, ops, max_len=budget.max_model_len)
        timer.lap("weights")
    else:
        logger.info("%s", gpu.table(budget))
    config = _config(args, spec, device, budget)
    executor = _executor(decoder, config, budget, platform, gpu, precompile)
    timer.lap("pool" if gpu is None else "pool and graphs")
    eos = {*spec.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ())}
    scheduler = make_scheduler(config)
    if config.num_host_blocks:
        with startup_errors(device, "moving blocks to the host", lambda _: LESS_SWAP):
            scheduler.policy.costs.move_s = executor.runner.measure_swap()
    engine = Engine(
        scheduler,
        executor,
        vocab_size=spec.vocab_size,
        max_model_len=config.max_model_len,
        eos_token_ids=sorted(eos),
        max_logprobs=args.max_logprobs,
        default_params=defaults.params,
        overlap=args.async_scheduling,
        seed=args.seed,
    )
    if args.kv_events().is_enabled:
        engine.on_close.append(KVEventPublisher(scheduler.cache, args.kv_events()).close)
    if args.flight_recorder is not None:
        engine.recorder = FlightRecorder(engine, Path(args.flight_recorder))
    logger.info("%s", timer)
    return BuiltEngine(engine, config, spec, tokenizer, defaults)


def check_folder(flight_recorder: str) -> None:
    """Create the folder and test that it is writable now: recordings are written after something went wrong."""
    try:
        Path(flight_recorder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=flight_recorder).close()
    except OSError as error:
        text = f"flight_recorder is {flight_recorder!r}, which is not writable: {error.strerror}; use another folder"
        raise ParameterError(text, param="flight_recorder") from None


def _config(args: EngineArgs, spec: ModelSpec, device: torch.device, budget: MemoryBudget) -> EngineConfig:
    return EngineConfig(
        args=args,
        device=device.type,
        dtype=budget.kv.dtype,
        max_model_len=budget.max_model_len,
        num_blocks=budget.num_blocks,
        num_host_blocks=budget.num_host_blocks,
        kv=budget.kv,
        weight_bytes=budget.free.weights,
        attention_window=spec.kv_window or 0,
    )


def make_scheduler(config: EngineConfig) -> Scheduler:
    """The scheduler and KV cache of a configuration."""
    args = config.args
    assert args.max_num_seqs and args.max_num_batched_tokens and args.decode_window  # resolved
    cache = KVCacheManager(
        config.num_blocks,
        args.block_size,
        config.num_host_blocks,
        num_rows=args.max_num_seqs,
        enable_prefix_caching=args.enable_prefix_caching,
        attention_window=config.attention_window,
    )
    return Scheduler(
        cache,
        max_num_batched_tokens=args.max_num_batched_tokens,
        decode_window=args.decode_window,
        num_watermark_blocks=int(args.watermark * config.num_blocks),
        policy=args.policy(),
    )


def _device(args: EngineArgs) -> torch.device:
    if args.device == "cpu":
        return torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warning takes several lines; the one below is enough
        available = torch.cuda.is_available()
    if args.device == "cuda" or available:
        return find_gpu()
    if reason := unusable_gpu_reason():
        logger.warning("device auto uses the CPU, although there seems to be an NVIDIA GPU: %s", reason)
    return torch.device("cpu")


def _dtype(args: EngineArgs, spec: ModelSpec, device: torch.device) -> torch.dtype:
    if args.dtype != "auto":
        return cast("torch.dtype", getattr(torch, args.dtype))
    if device.type == "cpu":  # the stored dtype if the processor multiplies it fast, which it never does with float16
        use_bfloat16 = spec.dtype != "float32" and packed.has_fast_bfloat16()
        return torch.bfloat16 if use_bfloat16 or args.quantization else torch.float32
    return cast("torch.dtype", getattr(torch, "bfloat16" if spec.dtype == "float32" else spec.dtype))


def _check_quantization(args: EngineArgs, dtype: torch.dtype, device: torch.device) -> None:
    if args.quantization is None:
        return
    if device.type != "cpu":
        raise ParameterError(f"quantization {args.quantization!r} works on CPUs only; remove it", param="quantization")
    if dtype != torch.bfloat16:
        raise ParameterError(
            f"quantization {args.quantization!r} needs bfloat16 for the other layers, not {args.dtype}; use dtype auto",
            param="dtype",
        )


def _precompiler(
    args: EngineArgs, spec: ModelSpec, dtype: torch.dtype, device: torch.device, model_len: int, starting: ExitStack
) -> Precompile:
    """The function that precompiles kernels; GPU only. Its processes start now, while files are read."""
    from octavo.kernels.triton.precompile import Precompiler  # as in `_ops`

    sizes = args.block_size, args.max_num_seqs, args.max_num_batched_tokens, args.enforce_eager, model_len
    return starting.enter_context(Precompiler(f"{spec} {dtype} {sizes}", device)).precompile


def _load(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    args: EngineArgs,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    *,
    max_len: int,
) -> Model:
    """Load and pack the weights; on a CPU compile the native kernels in parallel."""
    method = find_linear_method(args.quantization)
    load: Callable[..., Model] = dummy_model
    if args.load_format == "auto":
        load = partial(load_model, checkpoint)
    # On short-lived threads: a thread's OpenMP workers live as long as the thread, and once there are more workers than
    # cores, the computing ones sleep between any two operations.
    with ThreadPoolExecutor(2) as threads:
        if device.type == "cpu":
            threads.submit(native.library)
        return threads.submit(
            load, spec, dtype=dtype, device=device, ops=ops, max_len=max_len, linear_method=method
        ).result()


def _executor(
    decoder: Model,
    config: EngineConfig,
    budget: MemoryBudget,
    platform: Platform,
    gpu: GPUMemoryProfile | None,
    precompile: Precompile | None,
) -> Executor:
    """The executor, with its KV pool, swap space and graphs."""
    args = config.args
    smaller = (lambda _: "") if gpu is None else partial(gpu.smaller_pool, args, budget)
    assert args.max_num_seqs and args.max_num_batched_tokens and args.decode_window  # resolved
    try:
        with platform.startup_errors("pinning memory of the host for swap space", lambda _: LESS_SWAP):
            host_kv = platform.make_host_pool(config.kv, config.num_host_blocks)
        with platform.startup_errors("making the KV pool and CUDA graphs", smaller):
            return platform.make_executor(
                decoder,
                platform.make_pool(config.kv, config.num_blocks),
                host_kv,
                num_rows=args.max_num_seqs,
                max_model_len=config.max_model_len,
                max_num_tokens=args.max_num_batched_tokens,
                max_decode_steps=args.decode_window,
                vocab_size=decoder.spec.vocab_size,
                graphs=not args.enforce_eager,
                precompile=precompile,
            )
    except MemoryError as error:
        raise MemoryBudgetError(
            f"No available memory for the cache blocks: {budget}; lower num_gpu_blocks_override, "
            f"kv_cache_memory_bytes or swap_space; {doctor_hint(args)}"
        ) from error
