"""The keys of config.json: which are read, which change nothing, and which change the model and are not supported.

They are those of Transformers' configurations, versions 4 and 5. Transformers ignores all others, too.
"""

from __future__ import annotations

from typing import Any

from octavo.checkpoint.keys import KeyTable
from octavo.models.family import Family

OUTER_KEYS = (
    "architectures", "model_type", "text_config", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config",
)  # fmt: skip
"""Keys of a multimodal model's config.json that are read beside `text_config`."""

READ = (*OUTER_KEYS, "vocab_size", "eos_token_id", "bos_token_id", "layer_types")
"""Keys that are read for every family."""

# fmt: off
INERT = (
    # where the file comes from, and which code Transformers runs
    "transformers_version", "transformers.js_config", "_name_or_path", "name_or_path", "_commit_hash", "model_name",
    "auto_map", "custom_code", "trust_remote_code", "is_llama_config", "unsloth_version", "unsloth_fixed",
    "unsloth_tracing_sdpa", "_attn_implementation*", "attn_implementation", "_flash_attn_2_enabled",
    "_experts_implementation*", "experts_implementation", "auto_class", "gradient_checkpointing", "use_bfloat16",
    # training
    "initializer_range", "init_std", "*dropout*", "*_pdrop", "layerdrop", "rope_init_fn", "output_router_logits",
    "router_aux_loss_coef", "router_jitter_noise",
    # outputs of Transformers and heads other than the language model's
    "output_attentions", "output_hidden_states", "output_scores", "return_dict*", "use_return_dict", "torchscript",
    "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params", "summary_*",
    "tie_last_hidden_states", "classifier_*", "keys_to_ignore_at_inference",
    # execution: the same numbers in another order
    "use_cache", "cache_implementation", "pretraining_tp", "chunk_size_feed_forward", "reorder_and_upcast_attn",
    # ids of the tokenizer, and its limits
    "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id", "tokenizer_class", "prefix", "word_*",
    "model_max_length",
    # parameters of generation: read from generation_config.json only, as in Transformers 5
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "encoder_repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "epsilon_cutoff",
    "eta_cutoff", "exponential_decay_length_penalty", "num_assistant_tokens*", "assistant_*", "target_lookbehind",
    # encoders and images, which are not served
    "vision_config", "*_token_index", "mm_tokens_per_image", "tie_encoder_decoder", "cross_attention_hidden_size",
    "is_decoder", "_sliding_window_pattern", "max_window_layers", "vocab_size_per_layer_input",
)
# fmt: on

REFUSED: dict[str, tuple[Any, ...]] = {
    "per_layer_config": ({},),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
    "adapters": (),
}
"""Keys that Transformers obeys in every family."""


def config_keys(family: Family) -> KeyTable:
    """The table of a family's config.json."""
    refused = {key: values for key, values in REFUSED.items() if key not in family.keys}
    return KeyTable(read=(*READ, *family.keys), inert=INERT, refused={**refused, **family.refused})
