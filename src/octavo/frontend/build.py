"""Builds an engine from its options: the composition root, which alone knows all parts."""

from __future__ import annotations

import contextlib
import inspect
import logging
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

import octavo.config
from octavo.checkpoint.generation_config import SamplingDefaults, sampling_defaults
from octavo.checkpoint.resolve import Checkpoint, open_checkpoint
from octavo.config import GIB, EngineArgs, EngineConfig
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.kv_cache_spec import ITEMSIZE, KVCacheSpec
from octavo.core.scheduler import Scheduler
from octavo.engine.engine import Engine
from octavo.engine.engine_request import NO_OPENINGS, TurnOpenings
from octavo.engine.executor import MAX_DECODE_WINDOW, Capacity, Executor
from octavo.engine.kv_events import KVEventPublisher
from octavo.errors import MemoryBudgetError, ParameterError
from octavo.models.config import read_spec
from octavo.models.linear import SINGLE_RANK
from octavo.models.linear_methods import find_linear_method
from octavo.models.loading.loader import Model, dummy_model, find_forms, load_model
from octavo.models.spec import ModelSpec
from octavo.runner.drafts.draft_model import Draft
from octavo.runner.executor import Executor as LocalExecutor
from octavo.runner.executor import make_executor
from octavo.runner.memory.budget import LESS_SWAP, FreeMemory, MemoryBudget, doctor_hint, free_memory, plan_memory
from octavo.runner.memory.kv_scales import MAX_TOKENS, fix_scales
from octavo.runner.memory.profile import GPUMemoryProfile, Precompile, smaller_passes
from octavo.runner.model_runner import ModelRunner
from octavo.runner.platform import Platform, find_platform
from octavo.runner.ranks.communicator import Communicator
from octavo.runner.ranks.rank_group import RankGroup, RankMember
from octavo.runner.ranks.ranked_executor import RankedExecutor
from octavo.text import chat_template
from octavo.text.tokenizer import Tokenizer
from octavo.view.recording.recorder import FlightRecorder

logger = logging.getLogger("octavo")


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
        return f"the model is ready in {self._last - self._start:.1f} s: {', '.join(self._laps)}"


@dataclass(frozen=True, slots=True)
class ResolvedDraft:
    """A draft model before its weights are loaded. dtype: as `ResolvedModel.dtype`"""

    checkpoint: Checkpoint
    spec: ModelSpec
    dtype: str

    def check(self, target: ModelSpec, args: EngineArgs, model: str) -> None:
        """Raises `ParameterError` if it cannot draft for the target. model: its name"""
        wanted_len, own_len = (spec.max_model_len(args.max_model_len) for spec in (target, self.spec))
        if (args.max_model_len or -1) > 0:
            wanted_len = min(wanted_len, args.max_model_len or 0)
        window, own_window = target.kv_window, self.spec.kv_window
        if self.spec.recurrent_layers:
            text, remedy = "recurrent layers, which cannot take back a draft", "use one without"
        elif self.spec.vocab_size != target.vocab_size:
            text = f"{self.spec.vocab_size} tokens in its vocabulary, and {args.model} {target.vocab_size}"
            remedy = "use one with the same tokenizer"
        elif own_len < wanted_len:
            text = f"{own_len} positions, and {args.model} {wanted_len}"
            remedy = f"set max_model_len to {own_len}, or use another"
        elif window is not None and (own_window is None or own_window > window):
            text = f"{own_window or 'no'} tokens as attention window, and {args.model} keeps {window}"
            remedy = "use one that attends to no more"
        else:
            return
        raise ParameterError(f"the draft model {model} has {text}; {remedy}", param="speculative_config")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """All that is known before the weights are loaded.

    args    with a number in place of every None that depends on the platform alone
    dtype   of the weights and activations, such as "bfloat16"
    kv      of one rank
    ranks   connects the tensor parallel ranks; None: there is one
    """

    args: EngineArgs
    platform: Platform
    checkpoint: Checkpoint
    spec: ModelSpec
    dtype: str
    kv: KVCacheSpec
    tokenizer: Tokenizer | None
    sampling_defaults: SamplingDefaults
    draft: ResolvedDraft | None = None
    ranks: Communicator | None = None

    @property
    def model_len(self) -> int:
        return self.spec.max_model_len(self.args.max_model_len)

    @property
    def weight_bytes(self) -> int:
        """Bytes of one rank's weights once they are loaded and packed. Each rank has the whole draft model."""
        return sum(
            each.spec.of_rank(size).weight_bytes(ITEMSIZE[each.dtype], self.args.quantization, self.platform.name)
            for each, size in ((self, self.args.tensor_parallel_size), (self.draft, 1))
            if each is not None
        )

    @property
    def kernel_key(self) -> str:
        """See `Platform.precompiler`."""
        args = self.args
        sizes = args.block_size, args.max_num_seqs, args.max_num_batched_tokens, self.model_len
        dtypes = self.dtype, self.kv.dtype
        passes = args.enforce_eager, args.tensor_parallel_size, args.batch_invariant
        return f"{self.spec} {dtypes} {sizes} {passes} {self.draft and (self.draft.spec, self.draft.dtype)}"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights, its draft model, and the memory for their K and V.

    profile   None if the platform is the host
    """

    model: Model
    draft: Model | None
    budget: MemoryBudget
    profile: GPUMemoryProfile | None = None


def build(args: EngineArgs) -> BuiltEngine:
    """Load the model, plan the memory, and assemble the engine. Raises `ModelError` or `MemoryBudgetError`."""
    if args.flight_recorder is not None:
        check_folder(args.flight_recorder)
    timer = _StartupTimer()
    with contextlib.ExitStack() as undo:
        group = None
        if args.tensor_parallel_size > 1:
            group = RankGroup(args.tensor_parallel_size, asdict(args))
            undo.callback(group.close)
        resolved, config, local, capacity = _build_rank(args, group, timer)
        engine = _assemble(resolved, config, local if group is None else RankedExecutor(local, group), capacity)
        undo.pop_all()
    logger.info("%s", timer)
    return BuiltEngine(engine, config, resolved.spec, resolved.tokenizer, resolved.sampling_defaults)


def build_rank(args: EngineArgs, member: RankMember) -> LocalExecutor:
    """What a rank other than 0 has of an engine: a started executor over its part of the model."""
    return _build_rank(args, member, _StartupTimer())[2]


def _build_rank(
    args: EngineArgs, ranks: RankGroup | RankMember | None, timer: _StartupTimer
) -> tuple[ResolvedModel, EngineConfig, LocalExecutor, Capacity]:
    """The same steps on all ranks, in the same order: passes and captures are collective."""
    resolved = _resolve(args)
    timer.lap("files")
    with contextlib.nullcontext() if ranks is None else ranks.start_errors():
        if ranks is not None:
            resolved = replace(resolved, ranks=ranks.connect(resolved.platform.device))
        with resolved.platform.precompiler(resolved.kernel_key, resolved.ranks) as precompile:
            if resolved.platform.is_host:
                loaded = _plan_and_load(resolved, timer)
            else:
                loaded = _load_and_measure(resolved, precompile, timer)
            config = _config(resolved, loaded.budget)
            executor, capacity = _start_executor(resolved, loaded, config, precompile)
            timer.lap("pool" if loaded.profile is None else "pool and graphs")
    return resolved, config, executor, capacity


def _resolve(args: EngineArgs) -> ResolvedModel:
    """Read the model's small files, and choose the platform."""
    checkpoint = open_checkpoint(args.model, revision=args.revision, weights=args.load_format != "dummy")
    spec = read_spec(checkpoint)
    args = args.for_checkpoint(spec.quant_method)
    template = None if args.chat_template is None else chat_template.load(args.chat_template)
    defaults = sampling_defaults(args.generation_config, checkpoint)
    if defaults.values:
        logger.info("%s", defaults)
    tokenizer = None if args.skip_tokenizer_init else Tokenizer.from_checkpoint(checkpoint, chat_template=template)
    platform = find_platform(args.device)
    platform.check_ranks(args.tensor_parallel_size)
    if spec.recurrent_layers:
        args.check_recurrent(spec.architecture)
    args = args.resolved(platform.name)
    dtype = args.resolved_dtype(platform.name, spec.dtype, has_bfloat16=platform.prefers_bfloat16(spec))
    if args.batch_invariant:
        platform.make_batch_invariant(spec, dtype, args)
    max_len = args.grouped_len(spec.max_model_len(args.max_model_len))
    own = spec.of_rank(args.tensor_parallel_size)
    kv = KVCacheSpec.of(own, args.block_size, _kv_dtype(args, spec, platform, dtype), max_len=max_len)
    draft = _resolve_draft(args, spec, platform)
    if draft is not None:
        draft_dtype = _kv_dtype(args, draft.spec, platform, draft.dtype)
        kv = replace(kv, draft=KVCacheSpec.of(draft.spec, args.block_size, draft_dtype))
    return ResolvedModel(args, platform, checkpoint, spec, dtype, kv, tokenizer, defaults, draft)


def _kv_dtype(args: EngineArgs, spec: ModelSpec, platform: Platform, dtype: str) -> str:
    """The dtype of a model's K and V. dtype: of its activations"""
    prefers_float8 = bool(spec.kv_scheme) and platform.has_float8
    kv_dtype = args.resolved_kv_dtype(platform.name, dtype, prefers_float8=prefers_float8)
    if spec.kv_scheme and args.kv_cache_dtype == "auto":
        reason = "" if prefers_float8 else ": this device has no float8 for it"
        logger.info("kv_cache_scheme of config.json: K and V are in %s%s", kv_dtype, reason)
    return kv_dtype


def _resolve_draft(args: EngineArgs, target: ModelSpec, platform: Platform) -> ResolvedDraft | None:
    if (speculation := args.speculation()) is None or speculation.model is None:
        return None
    checkpoint = open_checkpoint(speculation.model, weights=args.load_format != "dummy")
    spec = read_spec(checkpoint)
    dtype = args.resolved_dtype(platform.name, spec.dtype, has_bfloat16=platform.prefers_bfloat16(spec))
    draft = ResolvedDraft(checkpoint, spec, dtype)
    draft.check(target, args, speculation.model)
    return draft


def _plan_and_load(resolved: ResolvedModel, timer: _StartupTimer) -> LoadedModel:
    """Plan before anything large is loaded: the system kills a process that takes too much memory."""
    num_bytes = resolved.weight_bytes
    share = free_memory() // resolved.args.tensor_parallel_size
    budget = _plan(resolved, FreeMemory(weights=num_bytes, host=share - num_bytes))
    model, draft = _load(resolved, budget.max_model_len)
    timer.lap("weights")
    return LoadedModel(model, draft, budget)


def _load_and_measure(resolved: ResolvedModel, precompile: Precompile | None, timer: _StartupTimer) -> LoadedModel:
    """Load the weights on a device with memory of its own, and plan with what its largest passes leave."""
    args, platform, num_bytes = resolved.args, resolved.platform, resolved.weight_bytes
    free_some = f"free as much as the weights take, {num_bytes / GIB:.2f} GiB; {doctor_hint(args)}"
    if resolved.kv.dtype == "float8_e4m3fn" and not platform.has_float8:
        text = f"kv_cache_dtype {args.kv_cache_dtype!r} needs a GPU of compute capability 8.9; use fp8_e5m2"
        raise ParameterError(text, param="kv_cache_dtype")
    with platform.startup_errors("loading the weights", lambda _: free_some):
        platform.check_weights(num_bytes, args)
        model, draft = _load(resolved, resolved.model_len)
    timer.lap("weights")
    with platform.startup_errors("computing its largest steps", lambda _: smaller_passes(args) or doctor_hint(args)):
        profile = platform.measure(model, args, kv_cache=resolved.kv, precompile=precompile, draft=draft)
    profile.check(args, resolved.kv)
    timer.lap("kernels and memory")
    available = (
        profile.available_kv_bytes if resolved.ranks is None else resolved.ranks.least(profile.available_kv_bytes)
    )
    host = free_memory() // args.tensor_parallel_size
    budget = _plan(resolved, FreeMemory(weights=num_bytes, host=host, device=available))
    logger.info("%s", profile.table(budget))
    return LoadedModel(model, draft, budget, profile)


def _fix_kv_scales(resolved: ResolvedModel, model: Model, draft: Model | None) -> None:
    """Of pools in float8."""
    args, tokenizer = resolved.args, resolved.tokenizer

    def read_text() -> list[int]:
        ids = [] if tokenizer is None else tokenizer.encode(inspect.getsource(octavo.config))
        return ids[: min(MAX_TOKENS, args.max_num_batched_tokens or 1, resolved.model_len)]

    for each, kv, loaded in ((resolved, resolved.kv, model), (resolved.draft, resolved.kv.draft, draft)):
        if each is not None and kv is not None and loaded is not None and kv.dtype.startswith("float8"):
            fix_scales(loaded, read_text, kv, dtype=getattr(torch, each.dtype), device=resolved.platform.device)


def _plan(resolved: ResolvedModel, free: FreeMemory) -> MemoryBudget:
    """Rank 0 decides for all."""
    ranks = resolved.ranks
    if ranks is not None and ranks.rank:
        num_blocks, num_host_blocks, max_model_len = ranks.share((0, 0, 0))
        return MemoryBudget(resolved.kv, free, num_blocks, num_host_blocks, max_model_len)
    budget = plan_memory(resolved.args, resolved.kv, free, model_len=resolved.model_len)
    for warning in budget.warnings:
        logger.warning(warning)
    if ranks is not None:
        ranks.share((budget.num_blocks, budget.num_host_blocks, budget.max_model_len))
    return budget


def _load(resolved: ResolvedModel, max_len: int) -> tuple[Model, Model | None]:
    """Load and pack the weights of both models, and compile the platform's kernels in parallel."""
    args, platform = resolved.args, resolved.platform
    method = find_linear_method(args.quantization, platform.name, batch_invariant=args.batch_invariant)
    tp = SINGLE_RANK
    if resolved.ranks is not None:
        num_tokens = (args.max_num_batched_tokens or 1) * resolved.spec.has_norms_before_only
        tp = resolved.ranks.make_tensor_parallel(num_tokens, resolved.spec.hidden_size * ITEMSIZE[resolved.dtype])

    def load(each: ResolvedModel | ResolvedDraft) -> Model:
        read: Callable[..., Model] = partial(load_model, each.checkpoint)
        if args.load_format == "dummy":
            read = partial(dummy_model, find_form=find_forms(each.checkpoint, each.spec))
        return read(
            each.spec,
            dtype=getattr(torch, each.dtype),
            device=platform.device,
            ops=platform.ops,
            tp=SINGLE_RANK if each is resolved.draft else tp,
            linear_method=method,
            max_len=max_len,
        )

    # On short-lived threads: a thread's OpenMP workers live as long as the thread, and once there are more workers than
    # cores, the computing ones sleep between any two operations.
    with ThreadPoolExecutor(2) as threads:
        threads.submit(platform.compile_kernels)
        models = [each for each in (resolved, resolved.draft) if each is not None]
        model, *drafts = threads.map(load, models)
    draft = drafts[0] if drafts else None
    _fix_kv_scales(resolved, model, draft)
    return model, draft


def _config(resolved: ResolvedModel, budget: MemoryBudget) -> EngineConfig:
    return EngineConfig(
        args=resolved.args,
        device=resolved.platform.name,
        dtype=resolved.dtype,
        max_model_len=budget.max_model_len,
        num_blocks=budget.num_blocks,
        num_host_blocks=budget.num_host_blocks,
        kv=budget.kv,
        weight_bytes=budget.free.weights,
        attention_window=resolved.spec.kv_window or 0,
    )


def _start_executor(
    resolved: ResolvedModel, loaded: LoadedModel, config: EngineConfig, precompile: Precompile | None
) -> tuple[LocalExecutor, Capacity]:
    """The executor with its KV pool, swap space and graphs."""
    args, platform, profile, budget = resolved.args, resolved.platform, loaded.profile, loaded.budget
    assert args.max_num_seqs and args.max_num_batched_tokens  # resolved
    smaller_pool = (lambda _: doctor_hint(args)) if profile is None else partial(profile.smaller_pool, args, budget)
    try:
        with platform.startup_errors("pinning memory of the host for swap space", lambda _: LESS_SWAP):
            kvs = [kv for kv in (config.kv, config.kv.draft) if kv is not None]
            host_pools = [platform.make_host_pool(kv, config.num_host_blocks) for kv in kvs]
        with platform.startup_errors("making the KV pool and CUDA graphs", smaller_pool):
            pools = [platform.make_pool(kv, config.num_blocks) for kv in kvs]
            runner = ModelRunner(
                loaded.model,
                pools[0],
                host_pools[0],
                platform,
                num_rows=args.max_num_seqs,
                max_model_len=config.max_model_len,
                max_num_tokens=args.max_num_batched_tokens,
                max_decode_steps=args.decode_window or MAX_DECODE_WINDOW,
                vocab_size=resolved.spec.vocab_size,
                graphs=_has_graphs(resolved),
                num_speculative_tokens=args.num_speculative_tokens,
                shares_suffixes=(speculation := args.speculation()) is not None and speculation.method == "suffix",
                draft=None if loaded.draft is None else Draft(loaded.draft, pools[1], host_pools[1]),
                num_groups=1 + len(config.kv.windows),
                state_blocks=config.kv.state_blocks,
                vocab_slice=loaded.model.vocabulary.slice,
                measures_drafts=resolved.ranks is None,
            )
            is_follower = resolved.ranks is not None and resolved.ranks.rank > 0
            executor = LocalExecutor(runner, precompile) if is_follower else make_executor(runner, precompile)
            return executor, executor.start()
    except MemoryError as error:
        raise MemoryBudgetError(
            f"No available memory for the cache blocks: {budget}; lower num_gpu_blocks_override, "
            f"kv_cache_memory_bytes or swap_space; {doctor_hint(args)}"
        ) from error


def _has_graphs(resolved: ResolvedModel) -> bool:
    """A CPU's recorded passes would record no collective."""
    return not resolved.args.enforce_eager and not (resolved.platform.is_host and resolved.ranks is not None)


def _assemble(resolved: ResolvedModel, config: EngineConfig, executor: Executor, capacity: Capacity) -> Engine:
    """The engine around an executor that has started."""
    args, spec, tokenizer = resolved.args, resolved.spec, resolved.tokenizer
    scheduler = make_scheduler(config, capacity)
    assert (config.num_blocks, config.num_host_blocks) == (capacity.num_blocks, capacity.num_host_blocks)
    if capacity.num_host_blocks:
        scheduler.policy.costs.move_s = capacity.move_s
    engine = Engine(
        scheduler,
        executor,
        vocab_size=spec.vocab_size,
        max_model_len=config.max_model_len,
        eos_token_ids=sorted({*spec.eos_token_ids, *(tokenizer.end_ids if tokenizer else ())}),
        max_logprobs=args.max_logprobs,
        default_params=resolved.sampling_defaults.params,
        overlap=args.async_scheduling,
        drafts_in_grammars=resolved.platform.is_host and resolved.draft is None,
        turn_openings=TurnOpenings(*tokenizer.turn_openings()) if tokenizer and config.kv.state_bytes else NO_OPENINGS,
        seed=args.seed,
    )
    if args.kv_events().is_enabled:
        engine.on_close.append(KVEventPublisher(scheduler.cache, args.kv_events()).close)
    if args.flight_recorder is not None:
        engine.recorder = FlightRecorder(engine, Path(args.flight_recorder))
    return engine


def make_scheduler(config: EngineConfig, capacity: Capacity) -> Scheduler:
    """The scheduler and KV cache of a configuration. capacity: of the executor that has started"""
    args = config.args
    assert args.max_num_seqs and args.max_num_batched_tokens  # resolved
    cache = KVCacheManager(
        config.num_blocks,
        args.block_size,
        config.num_host_blocks,
        num_rows=args.max_num_seqs,
        enable_prefix_caching=args.enable_prefix_caching,
        attention_window=config.attention_window,
        windows=config.kv.windows,
        max_chunk=config.kv.max_chunk,
        state_blocks=config.kv.state_blocks,
        checkpoint_interval=args.checkpoint_interval if config.kv.state_blocks else 0,
    )
    return Scheduler(
        cache,
        max_num_batched_tokens=args.max_num_batched_tokens,
        decode_window=args.decode_window or capacity.decode_window,
        num_speculative_tokens=args.num_speculative_tokens,
        num_watermark_blocks=int(args.watermark * config.num_blocks),
        policy=args.policy(),
    )


def check_folder(flight_recorder: str) -> None:
    """Create the folder and test that it is writable now: recordings are written after something went wrong."""
    try:
        Path(flight_recorder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=flight_recorder).close()
    except OSError as error:
        text = f"flight_recorder is {flight_recorder!r}, which is not writable: {error.strerror}; use another folder"
        raise ParameterError(text, param="flight_recorder") from None
