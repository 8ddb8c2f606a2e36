"""The arguments of vLLM 0.26, and what Octavo does with each: the engine's, the server's, and those of sampling.

One table serves Python and the command line. An argument is *taken* if Octavo has it too. Another is *accepted* where
its value asks for what there is, which includes vLLM's default, and else *refused* with the reason. None, and an empty
text or collection, mean "not set" everywhere.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo.errors import ParameterError, UnknownOptionError, cut

logger = logging.getLogger("octavo")

Owner = Literal["engine", "server", "sampling", "beam search", "call", "benchmark", "speculation"]


class _AnyValue:
    """Stands for every value."""


ANY = _AnyValue()


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of vLLM.

    owner     whose argument it is
    accepted  values that ask for what there is, the first as if it were not set; ANY; None: the argument is taken
    reason    what there is instead, as half a sentence; for ANY why every value is fine
    warns     a value that is set is accepted with a warning
    """

    name: str
    owner: Owner
    accepted: tuple[Any, ...] | _AnyValue | None
    reason: str = ""
    warns: bool = False

    @property
    def is_taken(self) -> bool:
        return self.accepted is None

    @property
    def is_flag(self) -> bool:
        """True if the command line gives it no value."""
        return isinstance(self.accepted, tuple) and bool(self.accepted) and isinstance(self.accepted[0], bool)

    def check(self, value: Any) -> None:
        """Raises `ParameterError` if the value asks for something that is not there."""
        if _is_unset(value) or self.accepted is None:
            return
        if isinstance(self.accepted, tuple):
            if not any(v == value and isinstance(v, bool) is isinstance(value, bool) for v in self.accepted):
                values = " or ".join(map(repr, self.accepted))
                remedy = f"leave it at {values}" if values else "leave it out"
                raise ParameterError(f"{self.name} is {cut(repr(value))}: {self.reason}; {remedy}", param=self.name)
            if value == self.accepted[0]:
                return
        if self.warns:
            logger.warning("%s has no effect: %s", self.name, self.reason)

    @property
    def effect(self) -> str:
        """For the documentation."""
        if self.accepted is None:
            return "taken"
        if self.warns:
            return f"accepted with a warning: {self.reason}"
        if not isinstance(self.accepted, tuple) or {*self.accepted} == {True, False}:
            return f"accepted: {self.reason}"
        values = ", ".join(f"`{value!r}`" for value in self.accepted)
        return f"{values} accepted, else refused: {self.reason}" if values else f"refused: {self.reason}"


def _is_unset(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple | dict | set) and not value)


def _taken(owner: Owner, names: str) -> Iterator[Argument]:
    return (Argument(name, owner, None) for name in names.split())


def _only(owner: Owner, reason: str, names: str = "", **accepted: Any) -> Iterator[Argument]:
    """Arguments with one reason: `names` have no value that is accepted, the others the value or tuple of values."""
    yield from (Argument(name, owner, (), reason) for name in names.split())
    for name, values in accepted.items():
        yield Argument(name, owner, values if isinstance(values, tuple) else (values,), reason)


def _any(owner: Owner, reason: str, names: str = "", *, flags: str = "", warns: bool = False) -> Iterator[Argument]:
    """Arguments of which every value is accepted; `flags` are booleans."""
    yield from (Argument(name, owner, ANY, reason, warns) for name in names.split())
    yield from (Argument(name, owner, (False, True), reason, warns) for name in flags.split())


# fmt: off
ENGINE: tuple[Argument, ...] = (
    *_taken("engine", "model revision skip_tokenizer_init chat_template dtype load_format quantization seed block_size"
        " kv_cache_dtype num_gpu_blocks_override kv_cache_memory_bytes gpu_memory_utilization max_model_len"
        " max_num_batched_tokens max_num_seqs enable_prefix_caching kv_offloading_size generation_config"
        " max_logprobs disable_hybrid_kv_cache_manager scheduling_policy long_prefill_token_threshold"
        " max_long_partial_prefills watermark enforce_eager async_scheduling kv_events_config"
        " speculative_config spec_method spec_model spec_tokens mamba_block_size tensor_parallel_size"),
    *_any("engine", "nothing from a model's directory is ever run as code", flags="trust_remote_code", warns=True),
    *_only("engine", "the model's own tokenizer is used", "tokenizer tokenizer_revision", tokenizer_mode="auto"),
    *_only("engine", "processes of one machine share a model; set tensor_parallel_size",
        "data_parallel_rank data_parallel_start_rank"
        " data_parallel_address data_parallel_rpc_port numa_bind_nodes numa_bind_cpus device_ids"
        " distributed_timeout_seconds cpu_distributed_timeout_seconds max_parallel_loading_workers",
        pipeline_parallel_size=1, data_parallel_size_local=1,
        prefill_context_parallel_size=1, decode_context_parallel_size=1, dcp_kv_cache_interleave_size=1,
        cp_kv_cache_interleave_size=1, dcp_comm_backend="ag_rs", nnodes=1, node_rank=0, master_addr="127.0.0.1",
        master_port=29501, numa_bind=False, data_parallel_hybrid_lb=False, data_parallel_external_lb=False,
        data_parallel_multi_port_external_lb=False, data_parallel_backend="mp",
        distributed_executor_backend=("mp", "uni"), ray_workers_use_nsight=False, _api_process_count=1,
        _api_process_rank=0),
    *_only("engine", "this is one engine; `octavo serve` runs several", data_parallel_size=1),
    *_any("engine", "one device does not communicate", flags="disable_custom_all_reduce"
        " disable_nccl_for_dp_synchronization"),
    *_only("engine", "no family here has experts", enable_expert_parallel=False, enable_ep_weight_filter=False,
        enable_elastic_ep=False, enable_eplb=False, enable_return_routed_experts=False, moe_backend="auto",
        all2all_backend="allgather_reducescatter", expert_placement_strategy="linear", enable_bf16x3_router_gemm=False),
    *_only("engine", "no family here has experts", "eplb_config"),
    *_only("engine", "a step is one batch", enable_dbo=False, ubatch_size=0, dbo_decode_token_threshold=32,
        dbo_prefill_token_threshold=512),
    *_only("engine", "LoRA adapters are not supported; merge the adapter into the weights", enable_lora=False),
    *_any("engine", "no effect without enable_lora", "max_loras max_lora_rank max_cpu_loras lora_dtype"
        " lora_target_modules default_mm_loras", flags="fully_sharded_loras enable_tower_connector_lora"
        " specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras"),
    *_only("engine", "models generate text token by token", "pooler_config diffusion_config io_processor_plugin"),
    *_only("engine", "models generate text token by token", runner=("auto", "generate"), convert=("auto", "none")),
    *_only("engine", "prompts are text or token ids", enable_prompt_embeds=False, enable_mm_embeds=False),
    *_any("engine", "prompts have no images, audio or video", "allowed_local_media_path allowed_media_domains"
        " limit_mm_per_prompt media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type"
        " mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype"
        " mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin"
        " video_pruning_rate mm_tensor_ipc mm_ipc_gpu_memory_gb", flags="language_model_only interleave_mm_strings"
        " mm_encoder_only skip_mm_profiling disable_chunked_mm_input enable_mm_processor_stats"),
    *_only("engine", "a model is its directory as it stands; edit a copy of its files", "hf_config_path hf_overrides"
        " model_class_overrides override_attention_dtype model_weights", config_format=("auto", "hf"),
        model_impl=("auto", "vllm")),
    *_only("engine",
        "the model's generation_config.json sets defaults; set generation_config to another file, or pass parameters",
        "override_generation_config"),
    *_any("engine", "code of a repository is never loaded", "code_revision"),
    *_only("engine", "the hub's token comes from the environment variable HF_TOKEN", "hf_token"),
    *_any("engine", "models are kept in OCTAVO_CACHE, or the hub's cache under HF_HOME", "download_dir", warns=True),
    *_any("engine", "weights are mapped from their files, however they are read", "safetensors_load_strategy"
        " safetensors_prefetch_num_threads safetensors_prefetch_block_size pt_load_map_location ignore_patterns",
        flags="use_tqdm_on_load"),
    *_only("engine", "loaders have no options", "model_loader_extra_config"),
    *_only("engine", "kv_cache_dtype is that of all layers", "kv_cache_dtype_skip_layers"),
    *_only("engine", "scales of K and V are calibrated or exact whenever kv_cache_dtype needs some",
        calculate_kv_scales=False),
    *_only("engine", "quantization is int8, int4, fp8, or what the checkpoint stores", "quantization_config",
        allow_deprecated_quantization=False),
    *_only("engine", "prefixes are looked up by SHA-256", prefix_caching_hash_algo=("sha256", "sha256_cbor")),
    *_only("engine", "prefixes are shared in whole blocks", "prefix_match_unit"),
    *_only("engine", "windows of the model are always applied", disable_sliding_window=False),
    *_any("engine", "the device chooses the kernels; results are the same", "attention_backend attention_config"
        " kernel_config ir_op_priority gdn_prefill_backend linear_backend", flags="disable_cascade_attn"
        " enable_flashinfer_autotune kv_sharing_fast_prefill", warns=True),
    *_any("engine", "models are not compiled; enforce_eager turns CUDA graphs off", "compilation_config"
        " cudagraph_capture_sizes max_cudagraph_capture_size optimization_level performance_mode", warns=True),
    *_only("engine", "weights stay on the device; choose a smaller model or quantization", "cpu_offload_params"
        " offload_params", offload_backend="auto", cpu_offload_gb=0, offload_group_size=0, offload_num_in_group=1,
        offload_prefetch_step=1),
    *_only("engine", "swap space is memory of the host", kv_offloading_backend="native"),
    *_only("engine", "long prompts prefill in chunks; to avoid it, raise max_num_batched_tokens to max_model_len",
        enable_chunked_prefill=True),
    *_only("engine", "set max_num_batched_tokens", "max_num_scheduled_tokens", max_num_partial_prefills=1,
        prefill_schedule_interval=1),
    *_only("engine", "a request is admitted once its prompt's blocks are free", scheduler_reserve_full_isl=True),
    *_only("engine", "the scheduler is built in", "scheduler_cls"),
    *_only("engine", "no code of others runs in the engine", "logits_processors worker_extension_cls"
        " additional_config reasoning_parser_plugin", worker_cls="auto"),
    *_only("engine", "log-probabilities are the model's, before other parameters apply", logprobs_mode="raw_logprobs"),
    *_only("engine", "noise is float32", use_fp64_gumbel=False),
    *_any("engine", "statistics are counted anyway; see llm.stats() and llm.get_metrics()", flags="disable_log_stats"),
    *_any("engine", "there is one engine", flags="aggregate_engine_logging"),
    *_only("engine", "see `octavo serve`'s metrics and `octavo view`", "show_hidden_metrics_for_version"
        " collect_detailed_traces profiler_config", kv_cache_metrics=False, cudagraph_metrics=False,
        enable_layerwise_nvtx_tracing=False, enable_mfu_metrics=False, enable_logging_iteration_details=False),
    *_any("engine", "no effect without the metrics or the compiler that it tunes", "kv_cache_metrics_sample"),
    *_any("engine", "nothing is compiled while requests run", "jit_monitor_mode", flags="jit_monitor_verbose"),
    *_only("engine", "grammars have one backend", "structured_outputs_config reasoning_config"),
    *_only("engine", "K and V stay in this engine", "kv_transfer_config ec_transfer_config weight_transfer_config"),
    *_only("engine", "close the LLM to free its memory", enable_sleep_mode=False, enable_cumem_allocator=False),
    *_only("engine", "states of recurrent layers are float32", mamba_cache_dtype=("auto", "float32"),
        mamba_ssm_cache_dtype=("auto", "float32"), enable_mamba_cache_stochastic_rounding=False),
    *_only("engine", "checkpoints of states are left where they spare most; set mamba_block_size",
        mamba_cache_mode=("none", "align", "all")),
    *_only("engine", "recurrent layers have no options", "mamba_config"),
    *_any("engine", "there is one implementation of recurrent layers", "mamba_backend mamba_cache_philox_rounds"),
    *_only("engine", "every token is streamed", stream_interval=1),
    *_any("engine", "text is encoded by one thread a core", "renderer_num_workers"),
    *_only("engine", "set skip_tokenizer_init", tokens_only=False),
    *_any("engine", "`octavo serve` always refuses misspelt variables", flags="fail_on_environ_validation"),
    *_any("engine", "vLLM has removed it", "num_lookahead_slots guided_decoding_backend", flags="use_v2_block_manager"
        " disable_log_requests", warns=True),
)
SERVER: tuple[Argument, ...] = (
    *_taken("server", "served_model_name reasoning_parser otlp_traces_endpoint shutdown_timeout"
        " trust_request_chat_template default_chat_template_kwargs tool_call_parser host port uds uvicorn_log_level"
        " disable_access_log_for_endpoints allowed_origins api_key ssl_keyfile ssl_certfile ssl_ca_certs root_path"
        " enable_log_requests enable_auto_tool_choice enable_prompt_tokens_details enable_request_id_headers"
        " max_num_queued_reqs max_num_queued_tokens sse_keep_alive_interval return_tokens_as_token_ids"
        " enable_force_include_usage enable_tokenizer_info_endpoint data_parallel_size"),
    *_only("server", "the server is one process", data_parallel_supervisor_port=9256,
        dp_supervisor_probe_interval_s=5.0, dp_supervisor_probe_timeout_s=5.0, dp_supervisor_probe_failure_threshold=3,
        api_server_count=1, headless=False, grpc=False),
    *_only("server", "LoRA adapters are not supported; merge the adapter into the weights", "lora_modules"),
    *_only("server", "options come from the command line", "config log_config_file"),
    *_only("server", "no code of others runs in the server", "middleware tool_parser_plugin tool_server"),
    *_only("server", "the server answers as OpenAI's", chat_template_content_format=("auto", "string", "openai"),
        response_role="assistant", exclude_tools_when_tool_choice_none=False, enable_per_request_metrics=False),
    *_any("server", "/load always counts the requests in progress", flags="enable_server_load_tracking"),
    *_only("server", "texts of requests are not logged", "max_log_len", enable_log_outputs=False, log_error_stack=False,
        disable_uvicorn_access_log=False),
    *_only("server", "responses carry one fingerprint", "fingerprint_value", fingerprint_mode="full"),
    *_only("server", "CORS lets scripts of allowed_origins read responses", "allowed_methods allowed_headers"),
    *_only("server", "CORS lets scripts of allowed_origins read responses", allow_credentials=False),
    *_only("server", "TLS has Python's defaults", "ssl_ciphers", enable_ssl_refresh=False, ssl_cert_reqs=0),
    *_any("server", "texts of requests are not logged", flags="enable_log_deltas"),
    *_any("server", "there are no such pages", flags="disable_fastapi_docs"),
    *_only("server", "there are no such pages", enable_offline_docs=False),
    *_any("server", "the server's own limits apply", "h11_max_incomplete_event_size h11_max_header_count"),
    *_any("server", "models generate text", flags="enable_flash_late_interaction"),
)
SAMPLING: tuple[Argument, ...] = (
    *_taken("sampling", "n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed"
        " stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs detokenize"
        " skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind structured_outputs"
        " logit_bias allowed_token_ids bad_words skip_reading_prefix_cache"),
    *_only("sampling", "the sampler ranks the top tokens only; use logprobs", "logprob_token_ids"),
    *_any("sampling", "log-probabilities are a list of dicts, which reads the same", flags="flat_logprobs", warns=True),
    *_any("sampling", "parameters are copied when they are used", "skip_clone"),
    *_only("sampling", "no plugin reads it", "extra_args"),
    *_only("sampling", "no code of others runs in the sampler; use logit_bias, allowed_token_ids or structured_outputs",
        "logits_processors"),
    *_only("sampling", "pass the last ids of get_tokenizer().encode(prompt) as the prompt", "truncate_prompt_tokens"),
    *_only("sampling", "it is not supported", "thinking_token_budget repetition_detection"),
    *_only("sampling", "no family here has experts", routed_experts_prompt_start=0),
    *_only("sampling", "an inner field of vLLM's", output_text_buffer_length=0),
    *_only("sampling", "use structured_outputs", "guided_decoding"),
    *_only("sampling", "use llm.beam_search", use_beam_search=False),
)
BEAM_SEARCH: tuple[Argument, ...] = (
    *_taken("beam search", "beam_width max_tokens ignore_eos temperature length_penalty structured_outputs"),
    *_only("beam search", "a stop string is not in the text", include_stop_str_in_output=False),
)
CALL: tuple[Argument, ...] = (
    *_only("call", "LoRA adapters are not supported; merge the adapter into the weights", "lora_request"),
    *_only("call", "encode prompts with get_tokenizer() and pass the ids", "tokenization_kwargs"),
    *_any("call", "prompts have no images, audio or video", "mm_processor_kwargs"),
    *_any("call", "templates get the content as one text", "chat_template_content_format"),
)
SPECULATION: tuple[Argument, ...] = (
    *_taken("speculation", "method model num_speculative_tokens"),
    *_only("speculation", "a draft model runs as the engine's model does", "quantization moe_backend attention_backend"
        " kv_cache_dtype max_model_len revision code_revision index_share_for_mtp_iteration draft_load_config"
        " dspark_draft_topk", draft_tensor_parallel_size=1, tensor_parallel_size=1, use_heterogeneous_vocab=False,
        parallel_drafting=False, draft_sample_method="greedy", enable_adaptive_verification=False,
        disable_eagle_block_drop=False, disable_padded_drafter_batch=False, use_local_argmax_reduction=False),
    *_any("speculation", "the longest match counts, and the engine measures how many drafts pay off",
        "prompt_lookup_max prompt_lookup_min num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth"
        " suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob",
        warns=True),
    *_any("speculation", "the engine's own enforce_eager counts", flags="enforce_eager", warns=True),
    *_only("speculation", "a draft is right if it equals the sampled token", "synthetic_acceptance_rates"
        " synthetic_acceptance_length", rejection_sample_method="standard"),
)
"""Keys of `speculative_config`."""
BENCHMARK: tuple[Argument, ...] = (
    *_only("benchmark", "requests arrive at one rate", "ramp_up_strategy ramp_up_start_rps ramp_up_end_rps"),
)
# fmt: on
RENAMED: Mapping[str, str] = {"kv_offloading_size": "swap_space"}
"""Taken arguments with another name here."""
SAME: Mapping[str, str] = {"tokenizer": "model", "tokenizer_revision": "revision", "served_model_name": "model"}
"""Arguments of the engine that may also have the value of another one."""
SHORT_FLAGS: Mapping[str, str] = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-sc": "speculative_config",
    "-cc": "compilation_config",
    "-ac": "attention_config",
}


@functools.cache
def arguments(*owners: Owner) -> Mapping[str, Argument]:
    """The table of these owners, by name; without any, all but the keys of `speculative_config`."""
    tables = (SPECULATION,) if owners == ("speculation",) else (ENGINE, SERVER, SAMPLING, BEAM_SEARCH, CALL, BENCHMARK)
    return {a.name: a for table in tables for a in table if not owners or a.owner in owners}


def adopt(owner: Owner, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of Octavo's that vLLM's `given` arguments of this owner ask for.

    Raises `ParameterError` for a value that is refused. Names that are not vLLM's are left as they are.
    """
    table, options = arguments(owner), {}
    for name, value in given.items():
        argument = table.get(name)
        if name in SAME and value is not None and value == given.get(SAME[name]):
            continue
        if argument is None and owner == "engine" and name in arguments("server"):
            if value:
                raise ParameterError(f"{name} is an option of the server; pass it to `octavo serve`", param=name)
        elif argument is None or (argument.is_taken and name not in RENAMED):
            options[name] = value
        elif argument.is_taken:
            if value is not None:
                if given.get(RENAMED[name]) is not None:
                    raise ParameterError(f"{name} is the same as {RENAMED[name]}; pass one of them", param=name)
                options[RENAMED[name]] = value
        else:
            argument.check(value)
    return options


def check_call(method: str, given: Mapping[str, Any]) -> None:
    """Check arguments that a method of `LLM` does not have. Raises `ParameterError` or `UnknownOptionError`."""
    for name, value in given.items():
        if (argument := arguments("call").get(name)) is None:
            raise UnknownOptionError.of(f"LLM.{method}", name, ("sampling_params", "use_tqdm", *arguments("call")))
        argument.check(value)


def flag_name(word: str) -> str | None:
    """The argument of vLLM in a word of a command line, without a suffix such as `.method` in
    `--speculative-config.method`; None if there is none."""
    word = word.partition("=")[0].partition(".")[0]
    if word in SHORT_FLAGS:
        return SHORT_FLAGS[word]
    name = word.removeprefix("--").replace("-", "_")
    if not word.startswith("--"):
        return None
    return next((n for n in (name, name.removeprefix("no_")) if n in arguments()), None)


def parse_value(text: str) -> Any:
    """A value on a command line: JSON, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
