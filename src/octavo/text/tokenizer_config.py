"""tokenizer_config.json, special_tokens_map.json and added_tokens.json: keys, special tokens, and the tokens they add.

tokenizer.json, if there is one, is the whole pipeline. Its neighbours name special tokens, add tokens that it lacks,
and may contradict it; the rules are those of Transformers 5's `TokenizersBackend`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken

from octavo.checkpoint.keys import KeyTable
from octavo.checkpoint.resolve import read_json
from octavo.errors import CheckpointError, UnsupportedModelError, cut

REMEDY = "set skip_tokenizer_init=True in Python to use token ids only"
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FORCED_CLEAN_UP = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"

# fmt: off
KEYS = KeyTable(
    read=("*_token", "extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens",
          "added_tokens_decoder", "chat_template", "tokenizer_class", "add_prefix_space",
          "clean_up_tokenization_spaces", "auto_map", "custom_code", "trust_remote_code"),
    inert=(
        "name_or_path", "tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file", "backend",
        "is_local", "is_fast", "local_files_only", "legacy", "processor_class", "use_fast",
        # lengths and sides of batches, and inputs of other models
        "model_max_length", "max_length", "max_len", "padding", "padding_side", "pad_to_multiple_of",
        "pad_token_type_id",
        "truncation", "truncation_side", "truncation_strategy", "stride", "model_input_names", "return_tensors",
        "return_token_type_ids", "trim_offsets",
        # Transformers' own ways with chats
        "chat_control_tokens", "response_template", "response_schema", "use_default_system_prompt",
        # of tokenizers that these models do not have; tokenizer.json holds the result
        "add_dummy_prefix_space", "sp_model_kwargs", "unk_token_id", "from_slow", "errors", "normalization",
        "spaces_between_special_tokens", "do_lower_case", "remove_space", "keep_accents", "strip_accents",
    ),
    refused={
        "split_special_tokens": (False,),
        FORCED_CLEAN_UP: (False,),
        "fix_mistral_regex": (False,),
        "fast_tokenizer_files": ([], ["tokenizer.json"]),
        "init_inputs": ([],),
    },
)
"""Keys of tokenizer_config.json and special_tokens_map.json. `add_bos_token` and `add_eos_token` have no effect beside
a tokenizer.json, whose post-processor adds these tokens."""
PIPELINE_KEYS = KeyTable(
    read=("version", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder",
          *(f"model.{key}" for key in (
              "type", "vocab", "merges", "dropout", "unk_token", "unk_id", "continuing_subword_prefix",
              "end_of_word_suffix", "max_input_chars_per_word", "fuse_unk", "byte_fallback", "ignore_merges")),
          "*.add_prefix_space"),  # in old Metaspace steps
    inert=("truncation", "padding", "*.str_rep"),
)
"""Keys of tokenizer.json, which the library obeys. Texts are neither truncated nor padded, as in Transformers."""
# fmt: on

REBUILT = {
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "GPTNeoXTokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GemmaTokenizer": {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
}
"""Classes that Transformers 5 rebuilds from the vocabulary, with their special tokens for keys that are absent."""
NOT_REBUILT = ("mistral", "ministral", "mixtral", "phi3", "olmo2", "granite", "internlm2", "internlm3")
"""Model types for which Transformers takes tokenizer.json whatever class the file names."""


def read_settings(folder: Path) -> dict[str, Any]:
    """The keys of tokenizer_config.json and special_tokens_map.json, with Transformers' precedence."""
    settings: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file() and "added_tokens_decoder" not in settings:
            settings |= read_json(folder / name)
    return settings


def pipeline_keys(backend: tokenizers.Tokenizer, file: dict[str, msgspec.Raw]) -> list[str]:
    """The keys of a tokenizer.json, and `step.key` for those inside a step that the library skips."""
    keys = [key for key in file if key != "model"]
    keys += [f"model.{key}" for key in msgspec.json.decode(file["model"], type=dict[str, msgspec.Raw])]
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (step := getattr(backend, name)) is not None:
            keys += [
                f"{name}.{key}" for key in _skipped(msgspec.json.decode(file[name]), json.loads(step.__getstate__()))
            ]
    return keys


def _skipped(written: Any, state: Any) -> list[str]:
    """The keys in a step of a file that are absent from the library's state."""
    if isinstance(written, list):
        return [key for one, other in zip(written, state, strict=True) for key in _skipped(one, other)]
    if not isinstance(written, dict):
        return []
    inner = [key for name in written.keys() & state.keys() for key in _skipped(written[name], state[name])]
    return [*(written.keys() - state.keys()), *inner]


def content_of(token: Any) -> str:
    """A special token's text, which a file holds as a string or in an object; "" for none."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def named_tokens(settings: dict[str, Any]) -> dict[str, Any]:
    """bos_token, eos_token, image_token, ... -> the token as the file has it, if it has one."""
    named = {key: value for key, value in settings.items() if key.endswith("_token")}
    for key in ("model_specific_special_tokens", "extra_special_tokens"):
        if isinstance(more := settings.get(key), dict):
            named |= more
    return {key: value for key, value in named.items() if content_of(value)}


def check_pipeline(backend: tokenizers.Tokenizer, settings: dict[str, Any], model_type: str) -> None:
    """Complete `settings` with the defaults of the tokenizer's class.

    Raises `UnsupportedModelError` for keys that contradict tokenizer.json, and for parts of it that are not supported.
    """
    model = backend.model
    is_bpe = isinstance(model, tokenizers.models.BPE)
    if is_bpe and model.dropout:
        raise _unsupported("tokenizer.json", "dropout", model.dropout)
    if settings.get("clean_up_tokenization_spaces") and not is_bpe:
        raise _unsupported("tokenizer_config.json", "clean_up_tokenization_spaces", True)
    kind = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
    if model_type in NOT_REBUILT or kind not in REBUILT or (kind == "LlamaTokenizer" and byte_level):
        if backend.padding:
            settings.setdefault("pad_token", backend.padding["pad_token"])
        return
    wanted = settings.get("add_prefix_space")
    if kind != "GemmaTokenizer" and isinstance(wanted, bool) and wanted != _adds_prefix(backend):
        raise _unsupported("tokenizer_config.json", "add_prefix_space", wanted, " beside this tokenizer.json")
    for name, content in REBUILT[kind].items():
        if backend.token_to_id(content) is not None:
            settings.setdefault(name, content)


def _adds_prefix(backend: tokenizers.Tokenizer) -> bool:
    """True if the pipeline puts a space before the first word of a text."""
    parts = [json.loads(part.__getstate__()) for part in (backend.normalizer, backend.pre_tokenizer) if part]
    steps = [step for part in parts for step in part.get("normalizers") or part.get("pretokenizers") or [part]]
    return any(
        step["type"] == "Prepend" or step.get("add_prefix_space") or step.get("prepend_scheme", "never") != "never"
        for step in steps
    )


def _unsupported(file: str, key: str, value: Any, where: str = "") -> UnsupportedModelError:
    return UnsupportedModelError(f"{file}: {key} {cut(repr(value))} is not supported{where}; {REMEDY}", param=key)


def add_tokens(backend: tokenizers.Tokenizer, folder: Path, settings: dict[str, Any]) -> None:
    """Add the tokens of the files that `backend` lacks or has with other flags.

    Raises `CheckpointError` if `added_tokens_decoder` or added_tokens.json gives a new token an id that is not next.
    """
    known = {token.content: _flags(token) for token in backend.get_added_tokens_decoder().values()}
    named = list(named_tokens(settings).values())
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    extra = extra if isinstance(extra, list) else []
    special = set(map(content_of, named))
    path, entries = folder / "added_tokens.json", settings.get("added_tokens_decoder")
    if isinstance(entries, dict):
        ids = {entry["content"]: int(i) for i, entry in entries.items()}
        listed = [_added_token(entries[i]) for i in sorted(entries, key=int)]
    else:
        ids = read_json(path) if path.is_file() else {}
        raw = special.union(map(content_of, extra))
        listed = list(backend.get_added_tokens_decoder().values())
        for content in sorted(ids.keys() - known.keys(), key=lambda content: int(ids[content])):
            listed.append(AddedToken(content, special=content in raw, normalized=content not in raw))
    seen = {*known, *(token.content for token in listed)}
    for value in [*named, *extra]:
        if (content := content_of(value)) and content not in seen:
            seen.add(content)
            listed.append(_added_token(value if isinstance(value, dict) else {"content": value, "special": True}))
    for token in listed:
        token.special = token.special or token.content in special
    new = [content for content in ids if backend.token_to_id(content) is None]
    backend.add_tokens([token for token in listed if known.get(token.content) != _flags(token)])
    for content in new:
        if backend.token_to_id(content) != ids[content]:
            raise CheckpointError(
                f"{folder} adds the token {cut(repr(content))} as id {ids[content]}, but the next id is "
                f"{backend.token_to_id(content)}; fetch the model again, or {REMEDY}"
            )


def _added_token(entry: dict[str, Any]) -> AddedToken:
    return AddedToken(**{key: value for key, value in entry.items() if key not in ("__type", "id")})


def _flags(token: AddedToken) -> tuple[bool, ...]:
    return token.special, token.lstrip, token.rstrip, token.single_word, token.normalized
