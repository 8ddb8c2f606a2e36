"""Loads a model's tokenizer from tokenizer.json, from vocab.json and merges.txt, or from the vocabulary of a GGUF file.

Every reader returns `TokenizerParts` and reports a broken file as a one-line `CheckpointError`. Encoding and decoding
are in `octavo.text.tokenizer`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import tokenizers
from tokenizers import AddedToken

from octavo.checkpoint.keys import KeyTable, KeyUse
from octavo.checkpoint.resolve import MAX_JSON_BYTES, Checkpoint, read_json, reject_custom_code
from octavo.errors import CheckpointError, ModelError, UnsupportedModelError, cut
from octavo.text.formats import harmony
from octavo.text.tokenizer_config import (
    KEYS,
    PIPELINE_KEYS,
    REMEDY,
    SPECIAL_NAMES,
    add_tokens,
    check_pipeline,
    content_of,
    named_tokens,
    pipeline_keys,
    read_settings,
)

if TYPE_CHECKING:
    from octavo.checkpoint.gguf import GGUFFile

T = TypeVar("T")

# fmt: off
GGUF_KEYS = KeyTable(
    read=(
        *(f"tokenizer.ggml.{key}" for key in (
            "model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token",
            "add_space_prefix", "bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id", "unknown_token_id",
            "seperator_token_id", "padding_token_id")),
        "tokenizer.chat_template", "tokenizer.chat_template.*", "tokenizer.chat_templates",
    ),
    inert=("tokenizer.ggml.token_type_count", "tokenizer.ggml.mask_token_id", "tokenizer.ggml.cls_token_id",
           "tokenizer.ggml.fim_*", "tokenizer.ggml.prefix_token_id", "tokenizer.ggml.suffix_token_id",
           "tokenizer.ggml.middle_token_id", "tokenizer.huggingface.json", "tokenizer.rwkv.world"),
    refused={
        "tokenizer.ggml.remove_extra_whitespaces": (False,),
        "tokenizer.ggml.precompiled_charsmap": ([],),
        "tokenizer.ggml.add_sep_token": (False,),
        "tokenizer.ggml.normalizer.lowercase": (False,),
        "tokenizer.ggml.suppress_tokens": ([],),
    },
)
# fmt: on


def tokenizer_key_uses(checkpoint: Checkpoint) -> list[KeyUse]:
    """What becomes of the keys of a tokenizer's files, for `octavo doctor`."""
    if checkpoint.format == "gguf":
        names = [key for key in checkpoint.gguf.fields if key.startswith("tokenizer.")]
        return [GGUF_KEYS.sort(names, f"{checkpoint.path.name}: tokenizer")]
    uses = [KEYS.sort(read_settings(checkpoint.path), "tokenizer_config.json")]
    if (path := checkpoint.path / "tokenizer.json").is_file():
        uses.append(_load_backend(path)[1])
    return uses


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """The contents of a tokenizer."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]  # bos_token, eos_token, ... -> the token's text
    eos_token_ids: list[int]  # from config.json and generation_config.json
    chat_templates: dict[str, str]  # "default", "tool_use", ... -> Jinja source
    num_ids: int  # the model's vocab_size; 0 if unknown


def load_tokenizer_parts(checkpoint: Checkpoint) -> TokenizerParts:
    """Raises `CheckpointError` if the tokenizer is missing, broken or of an unknown kind."""
    if checkpoint.format == "gguf":
        return _wrap_errors(checkpoint.path.name, lambda: _read_gguf(checkpoint))
    return _read_directory(checkpoint)


# ---- from a directory


def _read_directory(checkpoint: Checkpoint) -> TokenizerParts:
    folder = checkpoint.path
    settings = read_settings(folder)
    reject_custom_code(settings, folder / "tokenizer_config.json")
    KEYS.check(settings, "tokenizer_config.json", REMEDY)
    model_type = str(checkpoint.config.get("model_type", ""))
    if (folder / "tokenizer.json").is_file():
        backend, _ = _load_backend(folder / "tokenizer.json")
        check_pipeline(backend, settings, model_type)
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        settings = _DEFAULT_SPECIALS | settings
        backend = _wrap_errors(str(folder), lambda: _read_vocabulary(folder, settings, model_type))
    else:
        raise CheckpointError(
            f"{folder} has no tokenizer.json, nor vocab.json and merges.txt; copy them from the model that it "
            f"was made from, or {REMEDY}"
        )
    # config.json's ids give none: Transformers' templates do not see them
    special_tokens = {name: content_of(token) for name, token in named_tokens(settings).items()}
    _wrap_errors(str(folder / "tokenizer_config.json"), lambda: add_tokens(backend, folder, settings))
    eos_ids = _id_list(checkpoint.config.get("eos_token_id")) + _id_list(
        checkpoint.generation_config.get("eos_token_id")
    )
    templates = _directory_templates(folder, settings.get("chat_template"))
    return TokenizerParts(backend, special_tokens, eos_ids, templates, _vocab_size(checkpoint))


def _load_backend(path: Path) -> tuple[tokenizers.Tokenizer, KeyUse]:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{path} has {path.stat().st_size:,} bytes; at most {MAX_JSON_BYTES:,} are read; {REMEDY}"
        )
    data = path.read_bytes()
    backend = _wrap_errors(str(path), lambda: tokenizers.Tokenizer.from_buffer(data))
    file = _wrap_errors(str(path), lambda: msgspec.json.decode(data, type=dict[str, msgspec.Raw]))
    use = PIPELINE_KEYS.check(dict.fromkeys(pipeline_keys(backend, file)), path.name, REMEDY)
    # The library silently changes the id of an added token whose id is taken or leaves a gap.
    added = msgspec.json.decode(file.get("added_tokens", b"[]"))
    _check_added(backend, {token["content"]: token["id"] for token in added}, path)
    return backend, use


def _check_added(backend: tokenizers.Tokenizer, added: dict[str, int], path: Path) -> None:
    """Raise `CheckpointError` for tokens with ambiguous ids: the model looks up its embedding by id."""
    for content, token_id in added.items():
        if backend.token_to_id(content) not in (token_id, None):
            raise CheckpointError(
                f"{path} adds the token {cut(repr(content))} as id {token_id}, which belongs to another token or "
                f"leaves a gap (the next would be {backend.token_to_id(content)}); fetch it again, or {REMEDY}"
            )
    ids = sorted(backend.get_vocab().values())
    duplicate = next((a for a, b in itertools.pairwise(ids) if a == b), None)
    if duplicate is not None:
        raise CheckpointError(f"{path} assigns the id {duplicate} to two tokens; fetch it again, or {REMEDY}")


def _wrap_errors(source: str, build: Callable[[], T]) -> T:
    """Return `build()`. The library's errors (plain Exceptions, and Rust panics, which are BaseExceptions) become
    `CheckpointError`."""
    try:
        return build()
    except (KeyboardInterrupt, SystemExit, MemoryError, ModelError):
        raise
    except BaseException as e:
        detail = " ".join(str(e).split())[:200]
        raise CheckpointError(f"the tokenizer in {source} is broken ({detail}); fetch it again, or {REMEDY}") from e


def _directory_templates(folder: Path, setting: Any) -> dict[str, str]:
    """Chat templates by name. As in Transformers, template files replace all those of tokenizer_config.json."""
    templates: dict[str, str] = {}
    if isinstance(setting, str):
        templates["default"] = setting
    elif isinstance(setting, list):
        named = [t for t in setting if isinstance(t, dict)]
        templates |= {
            str(t["name"]): t["template"] for t in named if "name" in t and isinstance(t.get("template"), str)
        }
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if any(path.is_file() for path in files.values()):
        templates.clear()
    for name, path in files.items():
        if path.is_file():
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as e:
                raise CheckpointError(f"cannot read {path}: {e}; fetch the model again") from e
    return templates


def _id_list(value: Any) -> list[int]:
    """The ids in a value of config.json: an id, a list of ids, or null; negative ids are dropped."""
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int) and 0 <= i < 1 << 31]


def _vocab_size(checkpoint: Checkpoint) -> int:
    size = checkpoint.config.get("vocab_size")
    return size if isinstance(size, int) else 0


# ---- from vocab.json and merges.txt

_DEFAULT_SPECIALS = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
"""Defaults of GPT-2's and Qwen's tokenizers."""
_PRE_TOKENIZER_OF_CLASS = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}


def _read_vocabulary(folder: Path, settings: dict[str, Any], model_type: str) -> tokenizers.Tokenizer:
    """Byte-level BPE in the files of the first such models: GPT-2, OPT, Qwen. `settings` is tokenizer_config.json."""
    path = folder / "vocab.json"
    kind = str(settings.get("tokenizer_class") or ("Qwen2" if model_type.startswith("qwen") else "GPT2") + "Tokenizer")
    pre = _PRE_TOKENIZER_OF_CLASS.get(kind.removesuffix("Fast"))
    if pre is None:
        raise _unsupported(str(folder), "tokenizer_class", kind, _PRE_TOKENIZER_OF_CLASS)
    vocab = read_json(path)
    added = read_json(folder / "added_tokens.json") if (folder / "added_tokens.json").is_file() else {}
    entries = settings.get("added_tokens_decoder")
    entries = [{"id": i, **entry} for i, entry in entries.items()] if isinstance(entries, dict) else []
    added |= {entry["content"]: int(entry["id"]) for entry in entries}
    special = {content_of(settings.get(name)) for name in SPECIAL_NAMES}
    special |= {content_of(token) for token in settings.get("additional_special_tokens") or []}
    special |= {entry["content"] for entry in entries if entry.get("special")}
    ids = vocab | added
    if not all(isinstance(i, int) and 0 <= i < 1 << 31 for i in ids.values()):
        raise CheckpointError(f"{path} contains ids that are not integers from 0; fetch it again, or {REMEDY}")
    lines = (folder / "merges.txt").read_text(encoding="utf-8", errors="replace").split("\n")
    merges = [tuple(line.split()) for line in lines if line.strip() and not line.startswith("#version")]
    backend = _wrap_errors(
        str(path), lambda: _byte_level(ids, merges, pre, prefix_space=bool(settings.get("add_prefix_space")))
    )
    _check_added(backend, added, path)
    for content in sorted((special | set(added)) & set(ids), key=lambda content: int(ids[content])):
        backend.add_tokens([AddedToken(content, normalized=False, special=content in special)])
    bos, eos = (
        content if settings.get(f"add_{name}") and (content := content_of(settings.get(name))) in ids else None
        for name in ("bos_token", "eos_token")  # OPT has BOS
    )
    _surround(backend, bos, eos)
    return backend


def _byte_level(
    vocab: dict[str, int], merges: Sequence[Any], pre: str, *, prefix_space: bool = False
) -> tokenizers.Tokenizer:
    """BPE merges over bytes written as printable characters, inside the words that `PRE_TOKENIZERS[pre]` splits off."""
    patterns = PRE_TOKENIZERS[pre]
    # tiktoken looks up whole words before it merges: merges alone do not reach some of its tokens.
    is_tiktoken = patterns in ((LLAMA3_WORDS,), (GPT4O_WORDS,))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, ignore_merges=is_tiktoken))
    split, byte_level = tokenizers.pre_tokenizers.Split, tokenizers.pre_tokenizers.ByteLevel
    if prefix_space and pre == "gpt-2":  # a space before the text, not before each word, as the library does
        backend.pre_tokenizer = byte_level(True)
    else:
        cuts = [split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*cuts, byte_level(False, use_regex=False)])
    if patterns in ((QWEN2_WORDS,), (QWEN35_WORDS,)):
        backend.normalizer = tokenizers.normalizers.NFC()
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


# ---- from a GGUF file

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""`tokenizer.ggml.token_type`"""

# fmt: off
END_NAMES = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<EOT>",
    "_<EOT>", "<\uff5cend▁of▁sentence\uff5c>", "<end_of_utterance>", "<turn|>", "<|tool_response>",
))
# fmt: on
"""Tokens that end an output by their name, whatever their type, as in llama.cpp: older files lack the keys for them."""

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AFTER_NUMBERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _AFTER_NUMBERS
QWEN35_WORDS = (  # marks are letters
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT4O_WORDS = (  # a capital letter begins a word
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _AFTER_NUMBERS

PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "gpt-2": (GPT2_WORDS,),
    "smollm": (r"\p{N}", GPT2_WORDS),  # single digits, then GPT-2's words
    "starcoder": (r"\p{N}", GPT2_WORDS),
    "qwen2": (QWEN2_WORDS,),
    "qwen35": (QWEN35_WORDS,),
    "deepseek-r1-qwen": (QWEN2_WORDS,),
    "gpt-4o": (GPT4O_WORDS,),
    "llama-bpe": (LLAMA3_WORDS,),
    "llama3": (LLAMA3_WORDS,),
}
"""`tokenizer.ggml.pre` -> the patterns that split a text into words, applied in order."""


def _read_gguf(checkpoint: Checkpoint) -> TokenizerParts:
    file, name = checkpoint.gguf, checkpoint.path.name
    names = [key for key in file.fields if key.startswith("tokenizer.")]
    GGUF_KEYS.check({key: file.value(key) if key in GGUF_KEYS.refused else None for key in names}, name, REMEDY)
    kind = file.value("tokenizer.ggml.model")
    pieces = file.value("tokenizer.ggml.tokens")
    if kind is None or not pieces:
        raise CheckpointError(f"{name} holds no tokenizer; {REMEDY}")
    builders = {"gpt2": _gguf_byte_level, "llama": _gguf_sentencepiece, "gemma4": _gguf_characters}
    if kind not in builders:
        raise _unsupported(name, "tokenizer.ggml.model", kind, builders)
    counts = Counter(pieces)
    duplicate, count = counts.most_common(1)[0]
    if count > 1:
        raise CheckpointError(f"{name} has token {cut(repr(duplicate))} twice; convert the model again, or {REMEDY}")
    types = file.value("tokenizer.ggml.token_type") or [NORMAL] * len(pieces)
    if len(types) != len(pieces):
        raise CheckpointError(f"{name} has {len(pieces)} tokens but {len(types)} token types; convert the model again")
    if kind == "llama" and USER_DEFINED in types:  # they are found in the text, which has spaces
        pieces = [
            text if t == USER_DEFINED and (text := piece.replace("▁", " ")) not in counts else piece
            for piece, t in zip(pieces, types, strict=True)
        ]
    end_names = END_NAMES - harmony.MARKERS if counts.keys() >= harmony.MARKERS else END_NAMES
    ends = [pieces.index(piece) for piece in end_names if piece in counts]
    types = [CONTROL if i in ends else t for i, t in enumerate(types)] if ends else types
    backend = _wrap_errors(name, lambda: builders[kind](file, name, pieces, types))
    for special in (False, True):
        wanted = (CONTROL, UNKNOWN) if special else (USER_DEFINED,)
        chosen = [p for p, t in zip(pieces, types, strict=True) if t in wanted]
        backend.add_tokens([AddedToken(p, normalized=False, special=special) for p in chosen])
    special_tokens = _gguf_special_tokens(file, pieces)
    _add_ends(backend, file, kind, special_tokens)
    templates = {"default": file.value("tokenizer.chat_template")}
    for other in file.value("tokenizer.chat_templates") or []:
        templates[other] = file.value(f"tokenizer.chat_template.{other}")
    templates = {key: value for key, value in templates.items() if isinstance(value, str)}
    eos_ids = _id_list(checkpoint.generation_config.get("eos_token_id"))
    eos_ids += ends
    return TokenizerParts(backend, special_tokens, eos_ids, templates, len(pieces))


def _unsupported(name: str, key: str, value: Any, known: Iterable[str]) -> CheckpointError:
    return CheckpointError(f"{name} has {key} = {cut(repr(value))}; known: {', '.join(known)}; {REMEDY}")


def _gguf_byte_level(file: GGUFFile, name: str, pieces: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    """Byte-level BPE: GPT-2, SmolLM2, Qwen, Llama 3."""
    pre = file.value("tokenizer.ggml.pre", "")
    if pre not in PRE_TOKENIZERS:
        raise _unsupported(name, "tokenizer.ggml.pre", pre, PRE_TOKENIZERS)
    return _byte_level({piece: i for i, piece in enumerate(pieces)}, _listed_merges(file), pre)


def _listed_merges(file: GGUFFile) -> list[Any]:
    return [tuple(merge.split(" ", 1)) for merge in file.value("tokenizer.ggml.merges") or []]


def _gguf_characters(file: GGUFFile, name: str, pieces: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    """BPE of characters, which the file's merges join (Gemma 4)."""
    return _character_bpe(file, pieces, _listed_merges(file), prefix=False)


def _gguf_sentencepiece(file: GGUFFile, name: str, pieces: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    """SentencePiece BPE (Llama 1 and 2, TinyLlama, Mistral): the neighbours with the best score merge first."""
    scores = file.value("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(pieces):
        raise CheckpointError(f"{name} lacks one score per token; convert the model again, or {REMEDY}")
    prefix = bool(file.value("tokenizer.ggml.add_space_prefix", True))
    return _character_bpe(file, pieces, find_merges(name, pieces, types, scores), prefix=prefix)


def _character_bpe(file: GGUFFile, pieces: Sequence[str], merges: list[Any], *, prefix: bool) -> tokenizers.Tokenizer:
    """Spaces are "▁", and characters without a token are bytes. prefix: a space before the text"""
    vocab = {piece: i for i, piece in enumerate(pieces)}
    unknown = pieces[file.value("tokenizer.ggml.unknown_token_id", 0)]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    spaces = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if prefix else spaces)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return backend


Merge = tuple[float, int, int, str, str]
"""Minus the score, minus the lengths of both parts, the parts."""


def find_merges(
    name: str, pieces: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """The pairs that merge into each token: best score first, then longer left, then longer right part.

    SentencePiece merges the leftmost of equal scores; a longer left part first does the same in runs of one character.
    No merge produces a control token, so no text spells one. Raises `UnsupportedModelError` for what no list of merges
    can express: UNUSED tokens that a text reaches, and some equal scores.
    """
    mergeable = {p: i for i, (p, t) in enumerate(zip(pieces, types, strict=True)) if t in (NORMAL, UNUSED)}
    merges: list[Merge] = []
    for piece, i in mergeable.items():
        for middle in range(1, len(piece)):
            left, right = piece[:middle], piece[middle:]
            if left in mergeable and right in mergeable:
                merges.append((-scores[i], -len(left), -len(right), left, right))
    merges.sort()
    if UNUSED in types:
        for *_, left, right in merges:
            if types[mergeable[left + right]] == UNUSED:  # SentencePiece merges it, and cuts it again at the end
                text = f"UNUSED for {cut(repr(left + right))}, which text reaches"
                raise _unsupported_piece(name, "token_type", text)
    long = [scores[i] for piece, i in mergeable.items() if len(piece) > 1]
    if len(set(long)) < len(long):
        # part -> the first merge that uses it
        best = {part: merge for merge in reversed(merges) for part in merge[-2:]}
        for _, group in itertools.groupby(merges, lambda merge: merge[0]):
            if tie := _find_tie(list(group), best):
                pair = " and ".join(cut(repr(piece)) for piece in tie)
                raise _unsupported_piece(name, "scores", f"the same for {pair}, whose order depends on the text")
    return [(left, right) for *_, left, right in merges]


def _find_tie(equal: list[Merge], best: dict[str, Merge]) -> tuple[str, str] | None:
    """Two tokens among merges of equal score whose order changes the tokens of some text.

    It does if both compete for a part, or if one is part of a token of no lower score, which then merges before the
    rest. Runs of one character are in the right order if all of them have this score.
    """
    made = {left + right for *_, left, right in equal}
    earlier: dict[str, set[str]] = {}  # left part -> tokens
    for cost, _, _, left, right in equal:
        token = left + right
        others = {*(earlier.get(right, set()) - {token}), *({left, right} & made)}
        others = {other for other in others if len(set(other + token)) > 1}
        if len(set(token)) == 1 and any(len(part) > 1 and part not in made for part in (left, right)):
            others |= {other for other in made if other != token and set(other) == set(token)}
        if token in best and best[token][0] < cost:
            others |= made - {token}
        if others:
            return min(others), token
        earlier.setdefault(left, set()).add(token)
    return None


def _unsupported_piece(name: str, key: str, text: str) -> UnsupportedModelError:
    key = f"tokenizer.ggml.{key}"
    return UnsupportedModelError(f"{name}: {key} is {text}: not supported; {REMEDY}", param=key)


def _gguf_special_tokens(file: GGUFFile, pieces: Sequence[str]) -> dict[str, str]:
    keys = {
        "bos_token": "bos",
        "eos_token": "eos",
        "unk_token": "unknown",
        "sep_token": "seperator",
        "pad_token": "padding",
    }
    ids = {name: file.value(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: pieces[i] for name, i in ids.items() if i is not None and 0 <= i < len(pieces)}


def _add_ends(backend: tokenizers.Tokenizer, file: GGUFFile, kind: str, special_tokens: dict[str, str]) -> None:
    """Add BOS before and EOS after a text, as the file's flags require; without flags, as the kind of model expects.

    Texts of Gemma 4 always begin with BOS, even if the flag is false: as in llama.cpp.
    """
    bos_default = kind == "llama" or file.value("tokenizer.ggml.pre") in ("llama-bpe", "llama3")
    has_bos = kind == "gemma4" or file.value("tokenizer.ggml.add_bos_token", bos_default)
    before = special_tokens.get("bos_token") if has_bos else None
    after = special_tokens.get("eos_token") if file.value("tokenizer.ggml.add_eos_token", False) else None
    _surround(backend, before, after)


def _surround(backend: tokenizers.Tokenizer, before: str | None, after: str | None) -> None:
    """Put special tokens before and after each text."""
    if ends := [token for token in (before, after) if token]:
        single = [*([before] if before else []), "$A", *([after] if after else [])]
        pairs = [(token, backend.token_to_id(token)) for token in dict.fromkeys(ends)]
        backend.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=pairs)
