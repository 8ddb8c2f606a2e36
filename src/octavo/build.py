"""The composition root: from what the caller said to an engine that runs. The one place that knows all the parts."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np
import torch

from octavo.checkpoint import open_checkpoint
from octavo.config import EngineArgs, EngineConfig
from octavo.core.kv_cache import KVCache
from octavo.core.policy import Policy, PreemptionMode
from octavo.core.scheduler import Scheduler
from octavo.engine.engine import Engine
from octavo.errors import MemoryBudgetError
from octavo.kernels import cpu as cpu_ops
from octavo.models.decoder import Decoder
from octavo.models.spec import DecoderSpec, spec_from_config
from octavo.models.weights import load_decoder
from octavo.runner.executor import LocalExecutor
from octavo.runner.memory import Budget, free_memory, plan_memory
from octavo.runner.runner import ModelRunner
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger("octavo")


@dataclass(frozen=True, slots=True)
class Built:
    """An engine and what was settled on the way."""

    engine: Engine
    config: EngineConfig
    spec: DecoderSpec
    tokenizer: Tokenizer | None


def build(args: EngineArgs) -> Built:
    """Load the model, plan the memory, and put the engine together. Raises `ModelError` or `MemoryBudgetError`."""
    checkpoint = open_checkpoint(args.model, revision=args.revision)
    spec = spec_from_config(checkpoint.config, checkpoint.generation_config)
    tokenizer = None if args.skip_tokenizer_init else Tokenizer.from_checkpoint(checkpoint)
    dtype = torch.float32 if args.dtype == "auto" else getattr(torch, args.dtype)
    # Planned before anything large is loaded: the system kills who takes too much.
    weight_bytes = Decoder(spec, ops=cpu_ops, dtype=dtype, device="meta", max_len=1).num_bytes
    budget = plan_memory(
        args,
        bytes_per_token=spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize,
        weight_bytes=weight_bytes,
        model_len=spec.max_position_embeddings,
        free_bytes=free_memory() - weight_bytes,
    )
    for warning in budget.warnings:
        logger.warning(warning)
    decoder = load_decoder(checkpoint, spec, dtype=dtype, device="cpu", ops=cpu_ops, max_len=budget.max_model_len)
    config = EngineConfig(
        args=args,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=budget.max_model_len,
        num_blocks=budget.num_blocks,
        num_host_blocks=budget.num_host_blocks,
        bytes_per_block=budget.bytes_per_block,
        weight_bytes=budget.weight_bytes,
    )
    executor = LocalExecutor(_runner(decoder, config, budget, dtype))
    eos = {*spec.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ())}
    engine = Engine(
        make_scheduler(config),
        executor,
        vocab_size=spec.vocab_size,
        max_model_len=config.max_model_len,
        eos_token_ids=sorted(eos),
        overlap=args.async_scheduling,
        seed=args.seed,
    )
    return Built(engine, config, spec, tokenizer)


def make_scheduler(config: EngineConfig) -> Scheduler:
    """The core that a configuration describes."""
    args = config.args
    cache = KVCache(
        config.num_blocks,
        args.block_size,
        config.num_host_blocks,
        num_rows=args.max_num_seqs,
        enable_prefix_caching=args.enable_prefix_caching,
    )
    return Scheduler(
        cache,
        max_num_batched_tokens=args.max_num_batched_tokens,
        decode_window=args.decode_window,
        num_watermark_blocks=int(args.watermark * config.num_blocks),
        policy=Policy(
            by_priority=args.scheduling_policy == "priority",
            mode=None if args.preemption_mode == "auto" else PreemptionMode(args.preemption_mode),
        ),
    )


def _runner(decoder: Decoder, config: EngineConfig, budget: Budget, dtype: torch.dtype) -> ModelRunner:
    spec = decoder.spec
    block = (spec.num_layers, 2, spec.num_kv_heads, config.args.block_size, spec.head_dim)
    try:
        kv = _lazy_zeros((config.num_blocks + 1, *block), dtype)
        host_kv = _lazy_zeros((config.num_host_blocks + 1, *block), dtype)
    except MemoryError as error:
        raise MemoryBudgetError(
            f"No available memory for the cache blocks: {budget.table()}; lower num_gpu_blocks_override, "
            "kv_cache_memory_bytes or swap_space"
        ) from error
    return ModelRunner(
        decoder, kv, host_kv, num_rows=config.args.max_num_seqs, max_model_len=config.max_model_len, ops=cpu_ops
    )


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory where they are first written; torch.zeros writes them all, which takes seconds."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
