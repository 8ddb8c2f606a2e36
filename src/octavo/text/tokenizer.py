"""Text to token ids and back, for a tokenizer.json or the vocabulary inside a GGUF file.

The work is done by the `tokenizers` library; this file builds its tokenizer, says in one line what is wrong with one,
and keeps user text from turning into control tokens.

That last part works with a *mark*, a character that Unicode reserves for a program's own use and that no text may hold.
The tokenizer's normalizer deletes it. The search for special tokens comes before the normalizer, so a mark inside
"<|im_end|>" hides it from the search, and the text is encoded as the ten characters that the user typed:

    user text      a<|im_end|>b
    marked         a<M|im_end|>b        no special token is found in it
    normalized     a<|im_end|>b         M is gone, the pieces are those of the plain text
    ids            a, <, |, im, ...     the same as if the tokenizer had no special tokens
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken

from octavo.checkpoint import MAX_JSON_BYTES, Checkpoint, read_json, refuse_code
from octavo.errors import CheckpointError, ModelError, PromptError, TemplateError
from octavo.text import chat_template

if TYPE_CHECKING:
    from octavo.gguf_file import GGUFFile

MARK = "\ufdd0"
REMEDY = "skip_tokenizer_init=True takes and gives token ids without one"
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads: nothing changes after construction but caches.

    `eos_token_ids` is the union of every source (the tokenizer, config.json, generation_config.json): a model may name
    the end of a text in one of them and the end of a turn in another. `num_ids` is the range of legal ids; it exceeds
    `vocab_size` where a model's embedding is padded, and an id in between decodes to nothing.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_templates: dict[str, str] | None = None,
        num_ids: int = 0,
    ) -> None:
        self.backend = _prepared(backend)
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        added = self.backend.get_added_tokens_decoder()
        self.vocab_size = max([self.backend.get_vocab_size(with_added_tokens=False), *(i + 1 for i in added)])
        self.num_ids = max(self.vocab_size, num_ids)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_token_id = self._special_id("bos_token")
        eos = self._special_id("eos_token")
        others = [i for i in sorted(set(eos_token_ids)) if i != eos]
        self.eos_token_ids: tuple[int, ...] = (() if eos is None else (eos,)) + tuple(others)
        self.eos_token_id = self.eos_token_ids[0] if self.eos_token_ids else None
        self._marker = _Marker(added[i].content for i in self.special_ids)
        self._bytes_of_piece = _byte_rule(self.backend)
        self._token_bytes: dict[int, bytes] = {}

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Tokenizer:
        """Raises `CheckpointError` if there is none or it is broken, `UnsupportedModelError` for an unknown kind."""
        if checkpoint.format == "gguf":
            return cls(**_read_gguf(checkpoint))
        return cls(**_read_directory(checkpoint))

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True, *, parse_special: bool = True) -> list[int]:
        """The ids of `text`. `add_special_tokens` adds what the model expects around a text (often a BOS).

        With `parse_special=False` the text is only text: "</s>" in it gives the ids of four characters.
        """
        return self._encode([text], add_special_tokens, parse_special)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, *, parse_special: bool = True
    ) -> list[list[int]]:
        """`encode` of each text, in parallel."""
        return self._encode(texts, add_special_tokens, parse_special)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        **kwargs: Any,
    ) -> tuple[str, list[int]]:
        """The conversation as the model's template writes it: (text, ids).

        Only the template's own markers become special tokens; nothing inside the messages, tools or `kwargs` does.
        No BOS is added: a template writes its own. Raises `TemplateError`.
        """
        chosen = template or (self.chat_templates.get("tool_use") if tools else None) or self.chat_template
        if chosen is None:
            raise TemplateError(
                "the model has no chat template; give the prompt as text, or a template", param="messages"
            )
        mark = self._marker.mark_all
        rendered = chat_template.render(
            chosen,
            mark(messages),
            tools=mark(tools),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            special_tokens=self.special_tokens,
            **mark(kwargs),
        )
        return rendered.replace(MARK, ""), self._encode([rendered], False, True)[0]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that form no character become U+FFFD. `PromptError` for an id out of range."""
        self.check_ids(ids)
        return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def check_ids(self, ids: Sequence[int]) -> None:
        """`PromptError` unless every id is an integer in 0 .. num_ids - 1."""
        for i in ids:
            if not isinstance(i, int) or not 0 <= i < self.num_ids:
                raise PromptError(f"token id {i!r} is out of range; the model's ids are 0 to {self.num_ids - 1}")

    @property
    def has_token_bytes(self) -> bool:
        """Whether each token has bytes of its own. False for a decoder that works on whole texts (WordPiece, ...)."""
        return self._bytes_of_piece is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text, which may be a part of a character. Needs `has_token_bytes`."""
        assert self._bytes_of_piece is not None
        known = self._token_bytes.get(token_id)
        if known is None:
            piece = self.backend.id_to_token(token_id) if token_id >= 0 else None
            known = self._token_bytes[token_id] = b"" if piece is None else self._bytes_of_piece(piece)
        return known

    @property
    def strips_first_space(self) -> bool:
        """SentencePiece writes a space before the first word; decoding takes it off again."""
        return isinstance(self._bytes_of_piece, _SentencePieceBytes) and self._bytes_of_piece.strips_first_space

    def _encode(self, texts: Sequence[str], add_special_tokens: bool, parse_special: bool) -> list[list[int]]:
        if not parse_special:
            texts = [self._marker.mark(text) if isinstance(text, str) else text for text in texts]
        try:
            if len(texts) == 1:  # no detour over the library's thread pool
                return [self.backend.encode(texts[0], add_special_tokens=add_special_tokens).ids]
            return [e.ids for e in self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]
        except (TypeError, UnicodeEncodeError) as e:  # the library says TypeError of both
            raise _bad_prompt(texts) from e

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


def _bad_prompt(texts: Sequence[str]) -> PromptError:
    """Why the library took one of `texts` for no string."""
    for text in texts:
        if not isinstance(text, str):
            return PromptError(f"a prompt is a str, not {type(text).__name__}; token ids need no encoding")
        lone = re.search("[\ud800-\udfff]", text)
        if lone:
            return PromptError(f"the prompt is not valid Unicode: a lone surrogate at character {lone.start()}")
    return PromptError("the prompt cannot be encoded")


class _Marker:
    """Hides special tokens that are spelled out in a text. A token of one character cannot be hidden."""

    def __init__(self, contents: Iterable[str]) -> None:
        specials = sorted({c for c in contents if len(c) > 1})
        self._starts = {c[:k] for c in specials for k in range(1, len(c))}
        # Looking ahead and taking one character finds overlapping spellings too.
        self._pattern = re.compile(f"(?=(?:{'|'.join(map(re.escape, specials))}))(.)", re.DOTALL) if specials else None

    def mark(self, text: str) -> str:
        """`text` with a mark after the first character of each special token, and of an unfinished one at its end:

        a template may put two fields side by side, "<|im_" and "end|>", or cut the white space between them.
        """
        if self._pattern is None:
            return text
        tail = text.rstrip()
        for length in range(1, min(len(tail), max(map(len, self._starts))) + 1):
            if tail[-length:] in self._starts:
                at = len(tail) - length + 1
                text = text[:at] + MARK + text[at:]
        return self._pattern.sub(rf"\g<1>{MARK}", text)

    def mark_all(self, value: Any) -> Any:
        """`value` with every string inside marked, keys too; what is no dict, list or string stays as it is."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, dict):
            return {self.mark_all(k): self.mark_all(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark_all(v) for v in value]
        return value


def _prepared(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer with a normalizer that deletes marks, and without the settings that would cut or pad a prompt."""
    if any(token.special and token.normalized for token in backend.get_added_tokens_decoder().values()):
        # Such a token is searched for after the normalizer, where the mark is gone. The flag can be set on paper only.
        paper = json.loads(backend.to_str())
        for token in paper["added_tokens"]:
            token["normalized"] = token["normalized"] and not token["special"]
        backend = tokenizers.Tokenizer.from_str(json.dumps(paper))
    backend.no_truncation()
    backend.no_padding()
    unmark = tokenizers.normalizers.Replace(MARK, "")
    given = backend.normalizer
    backend.normalizer = unmark if given is None else tokenizers.normalizers.Sequence([unmark, given])
    return backend


# ---- from a directory


def _read_directory(checkpoint: Checkpoint) -> dict[str, Any]:
    folder = checkpoint.path
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            settings |= read_json(folder / name)
    refuse_code(settings, folder / "tokenizer_config.json")
    backend = _load_backend(folder / "tokenizer.json")
    special_tokens = {}
    for name in SPECIAL_NAMES:
        value = settings.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            special_tokens[name] = value
    eos_ids = _id_list(checkpoint.config.get("eos_token_id")) + _id_list(
        checkpoint.generation_config.get("eos_token_id")
    )
    for name, ids in (("bos_token", _id_list(checkpoint.config.get("bos_token_id"))), ("eos_token", eos_ids)):
        token = backend.id_to_token(ids[0]) if ids else None
        if token is not None:
            special_tokens.setdefault(name, token)
    return {
        "backend": backend,
        "special_tokens": special_tokens,
        "eos_token_ids": eos_ids,
        "chat_templates": _directory_templates(folder, settings.get("chat_template")),
        "num_ids": _vocab_size(checkpoint),
    }


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise CheckpointError(
            f"{path.parent} has no tokenizer.json; Transformers writes one with "
            f"AutoTokenizer.from_pretrained(d).save_pretrained(d), or {REMEDY}"
        )
    if path.stat().st_size > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{path} has {path.stat().st_size:,} bytes; at most {MAX_JSON_BYTES:,} are read; {REMEDY}"
        )
    return _built(str(path), lambda: tokenizers.Tokenizer.from_file(str(path)))


def _built(what: str, build: Any) -> tokenizers.Tokenizer:
    """`build()`, with the library's complaints (plain Exceptions, and Rust panics, which are BaseExceptions) named."""
    try:
        backend: tokenizers.Tokenizer = build()
    except (KeyboardInterrupt, SystemExit, MemoryError, ModelError):
        raise
    except BaseException as e:
        detail = " ".join(str(e).split())[:200]
        raise CheckpointError(f"the tokenizer in {what} is broken ({detail}); fetch it again, or {REMEDY}") from e
    return backend


def _directory_templates(folder: Path, setting: Any) -> dict[str, str]:
    """Named templates. A file of its own goes before the entry in tokenizer_config.json."""
    templates: dict[str, str] = {}
    if isinstance(setting, str):
        templates["default"] = setting
    elif isinstance(setting, list):
        named = [t for t in setting if isinstance(t, dict)]
        templates |= {t["name"]: t["template"] for t in named if isinstance(t.get("template"), str) and "name" in t}
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, path in files.items():
        if path.is_file():
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as e:
                raise CheckpointError(f"cannot read {path}: {e}") from e
    return templates


def _id_list(value: Any) -> list[int]:
    """An id, a list of ids or nothing, as config.json has it."""
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]


def _vocab_size(checkpoint: Checkpoint) -> int:
    size = checkpoint.config.get("vocab_size")
    return size if isinstance(size, int) else 0


# ---- from a GGUF file

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""`tokenizer.ggml.token_type`"""

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AFTER_NUMBERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _AFTER_NUMBERS
QWEN2_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _AFTER_NUMBERS

PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "gpt-2": (GPT2_WORDS,),
    "smollm": (r"\p{N}", GPT2_WORDS),  # each digit by itself, then GPT-2's words
    "starcoder": (r"\p{N}", GPT2_WORDS),
    "qwen2": (QWEN2_WORDS,),
    "deepseek-r1-qwen": (QWEN2_WORDS,),
    "llama-bpe": (LLAMA3_WORDS,),
    "llama3": (LLAMA3_WORDS,),
}
"""`tokenizer.ggml.pre` -> the patterns that cut a text into words, one after the other."""


def _read_gguf(checkpoint: Checkpoint) -> dict[str, Any]:
    file, name = checkpoint.gguf, checkpoint.path.name
    kind = file.value("tokenizer.ggml.model")
    pieces = file.value("tokenizer.ggml.tokens")
    if kind is None or not pieces:
        raise CheckpointError(f"{name} holds no tokenizer; {REMEDY}")
    builders = {"gpt2": _gguf_byte_level, "llama": _gguf_sentencepiece}
    if kind not in builders:
        raise _unsupported(name, "tokenizer.ggml.model", kind, builders)
    if len(set(pieces)) != len(pieces):
        twice = next(p for i, p in enumerate(pieces) if p in pieces[:i])
        raise CheckpointError(f"{name} has the token {twice!r} twice; convert the model again, or {REMEDY}")
    types = file.value("tokenizer.ggml.token_type") or [NORMAL] * len(pieces)
    if len(types) != len(pieces):
        raise CheckpointError(f"{name} has {len(pieces)} tokens but {len(types)} token types; convert the model again")
    backend = _built(name, lambda: builders[kind](file, name, pieces, types))
    for special in (False, True):
        wanted = (CONTROL, UNKNOWN) if special else (USER_DEFINED,)
        chosen = [p for p, t in zip(pieces, types, strict=True) if t in wanted]
        backend.add_tokens([AddedToken(p, normalized=False, special=special) for p in chosen])
    special_tokens = _gguf_special_tokens(file, pieces)
    _add_ends(backend, file, kind, special_tokens)
    templates = {"default": file.value("tokenizer.chat_template")}
    for other in file.value("tokenizer.chat_templates") or []:
        templates[other] = file.value(f"tokenizer.chat_template.{other}")
    return {
        "backend": backend,
        "special_tokens": special_tokens,
        "eos_token_ids": _id_list(checkpoint.generation_config.get("eos_token_id")),
        "chat_templates": {k: v for k, v in templates.items() if isinstance(v, str)},
        "num_ids": _vocab_size(checkpoint),
    }


def _unsupported(name: str, key: str, value: Any, known: Iterable[str]) -> CheckpointError:
    return CheckpointError(f"{name} has {key} = {value!r}; known: {', '.join(known)}; {REMEDY}")


def _gguf_byte_level(file: GGUFFile, name: str, pieces: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    """Byte-level BPE (GPT-2, SmolLM2, Qwen, Llama 3): merges over bytes that are written as printable characters."""
    pre = file.value("tokenizer.ggml.pre", "")
    if pre not in PRE_TOKENIZERS:
        raise _unsupported(name, "tokenizer.ggml.pre", pre, PRE_TOKENIZERS)
    merges = [tuple(merge.split(" ", 1)) for merge in file.value("tokenizer.ggml.merges") or []]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    llama3 = PRE_TOKENIZERS[pre] == (LLAMA3_WORDS,)
    # Llama 3 looks a whole word up before it merges: some of its words cannot be reached by merges.
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, ignore_merges=llama3))
    split, byte_level = tokenizers.pre_tokenizers.Split, tokenizers.pre_tokenizers.ByteLevel
    words = [split(tokenizers.Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre]]
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*words, byte_level(False, use_regex=False)])
    if PRE_TOKENIZERS[pre] == (QWEN2_WORDS,):
        backend.normalizer = tokenizers.normalizers.NFC()
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def _gguf_sentencepiece(file: GGUFFile, name: str, pieces: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    """SentencePiece BPE (Llama 1 and 2, TinyLlama, Mistral): the best-scored neighbours merge first."""
    scores = file.value("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(pieces):
        raise CheckpointError(f"{name} lacks one score a token; convert the model again, or {REMEDY}")
    vocab = {piece: i for i, piece in enumerate(pieces)}
    unknown = pieces[file.value("tokenizer.ggml.unknown_token_id", 0)]
    model = tokenizers.models.BPE(
        vocab, _merges(pieces, types, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    prefix = bool(file.value("tokenizer.ggml.add_space_prefix", True))
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    spaces = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if prefix else spaces)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return backend


def _merges(pieces: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The pairs that make each token, best score first. Control tokens are made by no merge, so no text spells one."""
    mergeable = {p: i for i, (p, t) in enumerate(zip(pieces, types, strict=True)) if t in (NORMAL, UNUSED)}
    merges: list[tuple[float, int, str, str]] = []
    for piece, i in mergeable.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in mergeable and right in mergeable:
                merges.append((-scores[i], mergeable[left], left, right))
    return [(left, right) for _, _, left, right in sorted(merges)]


def _gguf_special_tokens(file: GGUFFile, pieces: Sequence[str]) -> dict[str, str]:
    keys = {
        "bos_token": "bos",
        "eos_token": "eos",
        "unk_token": "unknown",
        "sep_token": "seperator",
        "pad_token": "padding",
    }
    ids = {name: file.value(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: pieces[i] for name, i in ids.items() if i is not None and i < len(pieces)}


def _add_ends(backend: tokenizers.Tokenizer, file: GGUFFile, kind: str, special_tokens: dict[str, str]) -> None:
    """BOS before and EOS behind a text, as the file's flags say; where it has none, as its kind of model expects."""
    bos_default = kind == "llama" or file.value("tokenizer.ggml.pre") in ("llama-bpe", "llama3")
    before = special_tokens.get("bos_token") if file.value("tokenizer.ggml.add_bos_token", bos_default) else None
    behind = special_tokens.get("eos_token") if file.value("tokenizer.ggml.add_eos_token", False) else None
    ends = [token for token in (before, behind) if token is not None]
    if ends:
        single = [*([before] if before else []), "$A", *([behind] if behind else [])]
        pairs = [(token, backend.token_to_id(token)) for token in dict.fromkeys(ends)]
        backend.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=pairs)


# ---- the bytes of a token


def _byte_rule(backend: tokenizers.Tokenizer) -> _ByteLevelBytes | _SentencePieceBytes | None:
    """How a token's text becomes bytes, read off the decoder; None for a decoder that is neither of the two in use."""
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _ByteLevelBytes()
    kinds = [step["type"] for step in steps]
    spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0] == spaces and steps[3:] in ([], [strip]):
        return _SentencePieceBytes(strips_first_space=steps[3:] == [strip])
    return None


class _ByteLevelBytes:
    """GPT-2's alphabet: each byte is one printable character. A token with any other character is plain text."""

    def __init__(self) -> None:
        printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        rest = [b for b in range(256) if b not in printable]
        self._byte_of = {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(rest)}

    def __call__(self, piece: str) -> bytes:
        try:
            return bytes([self._byte_of[c] for c in piece])
        except KeyError:
            return piece.encode()


class _SentencePieceBytes:
    """ "▁" is a space, "<0x0A>" a byte."""

    def __init__(self, *, strips_first_space: bool) -> None:
        self.strips_first_space = strips_first_space

    def __call__(self, piece: str) -> bytes:
        if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()
