"""Encoding and decoding between text and token ids.

The `tokenizers` library does the work. This module checks its inputs and outputs, and keeps special tokens spelled in
user text from becoming control tokens.

For the latter it inserts a *mark*: a Unicode noncharacter, which is reserved for internal use and occurs in no valid
text. The tokenizer's normalizer deletes it. The library searches for special tokens before normalizing, so a mark
inside "<|im_end|>" hides it from the search, and the text is encoded as the ten characters that the user typed:

    user text      a<|im_end|>b
    marked         a<M|im_end|>b        no special token is found
    normalized     a<|im_end|>b         the mark is gone; the pieces are those of plain text
    ids            a, <, |, im, ...     the same as in a tokenizer without special tokens
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from octavo.checkpoint.resolve import Checkpoint
from octavo.errors import PromptError, TemplateError
from octavo.text import chat_template
from octavo.text.end_of_turn import find_end_of_turn
from octavo.text.formats import gemma_calls, harmony
from octavo.text.tokenizer_loader import load_tokenizer_parts

MARK = "\ufdd0"
FIELDS = frozenset(("role", "content", "name", "type", "text", "tool_calls", "function", "arguments", "parameters"))
"""Keys by which templates read messages and tools: a mark would hide the value."""
SHORT_CHARS = 2048
"""Longer texts are encoded on the library's thread pool, which releases the GIL."""


class Tokenizer:
    """One model's tokenizer. Thread-safe: only caches change after construction.

    `eos_token_ids` is the union over the tokenizer, config.json and generation_config.json: a model may name its end of
    text in one and its end of turn in another. Legal ids are 0 to `num_ids - 1`. `num_ids` exceeds `vocab_size` if the
    model's embedding is padded; padding ids decode to nothing.
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
        self.backend = _prepare(backend)
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        added = self.backend.get_added_tokens_decoder()
        self.vocab_size = max(self.backend.get_vocab().values(), default=-1) + 1  # there may be holes
        self.num_ids = max(self.vocab_size, num_ids)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_token_id = self._special_id("bos_token")
        eos = self._special_id("eos_token")
        others = [i for i in sorted(set(eos_token_ids)) if i != eos]
        self.eos_token_ids: tuple[int, ...] = (() if eos is None else (eos,)) + tuple(others)
        self.eos_token_id = self.eos_token_ids[0] if self.eos_token_ids else None
        self._marker = _Marker(added[i].content for i in self.special_ids)
        self._piece_to_bytes = _make_piece_to_bytes(self.backend)
        self._token_bytes: dict[int, bytes] = {}

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, *, chat_template: str | None = None) -> Tokenizer:
        """Load a checkpoint's tokenizer. `chat_template` replaces the model's.

        Raises `CheckpointError` if the tokenizer is missing, broken or of an unknown kind.
        """
        parts = load_tokenizer_parts(checkpoint)
        return cls(
            parts.backend,
            special_tokens=parts.special_tokens,
            eos_token_ids=parts.eos_token_ids,
            chat_templates=parts.chat_templates if chat_template is None else {"default": chat_template},
            num_ids=parts.num_ids,
        )

    def to_wire(self) -> dict[str, Any]:
        """Plain data from which `from_wire` builds the same tokenizer in another process."""
        return {
            "backend": self.backend.to_str(),
            "special_tokens": self.special_tokens,
            "eos_token_ids": self.eos_token_ids,
            "chat_templates": self.chat_templates,
            "num_ids": self.num_ids,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Tokenizer:
        return cls(**{**wire, "backend": tokenizers.Tokenizer.from_str(wire["backend"])})

    @cached_property
    def max_token_chars(self) -> int:
        """Maximum number of characters that one token stands for."""
        return max(4, max(map(len, self.backend.get_vocab()), default=0))

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an output: `eos_token_ids`, and the one that ends a turn in the chat template.

        Those of harmony are known: in its template, <|end|> ends a turn, but in an output only a message. An output of
        Gemma 4 also ends where the result of a call must follow.
        """
        contents = {token.content: i for i, token in self.backend.get_added_tokens_decoder().items() if token.special}
        end = find_end_of_turn(self.chat_template, self.special_tokens, contents) if self.chat_template else None
        result = gemma_calls.RESPONSE
        ends = harmony.END_MARKERS if contents.keys() >= harmony.MARKERS else (end or result, result)
        return tuple(dict.fromkeys((*self.eos_token_ids, *(contents[end] for end in ends if end in contents))))

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True, *, parse_special: bool = True) -> list[int]:
        """The ids of `text`. `add_special_tokens` adds the tokens that the model expects around a text, such as BOS.

        With `parse_special=False` special tokens are not recognised: "</s>" gives the ids of four characters.
        """
        return self._encode([text], add_special_tokens, parse_special)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, *, parse_special: bool = True
    ) -> list[list[int]]:
        """`encode` for each text, in parallel."""
        return self._encode(texts, add_special_tokens, parse_special)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        **kwargs: Any,
    ) -> tuple[str, list[int]]:
        """Render a conversation with the model's chat template: (text, ids).

        Only the template's own markers become special tokens; messages, tools and `kwargs` cannot contain any. No BOS
        is added: templates write their own. Raises `TemplateError`.
        """
        chosen = template or (self.chat_templates.get("tool_use") if tools else None) or self.chat_template
        if chosen is None:
            raise TemplateError(
                "the model has no chat template; pass the prompt as text, or pass a template", param="messages"
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

    def turn_openings(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens that open a turn of the user, and of the model, as the chat template writes them; else empty."""

        def encode(text: str, *, add_generation_prompt: bool = False) -> list[int]:
            message = {"role": "user", "content": text}
            return self.encode_chat([message], add_generation_prompt=add_generation_prompt)[1]

        try:
            turn, other, whole = encode("Hi"), encode("Yes"), encode("Hi", add_generation_prompt=True)
        except TemplateError:
            return (), ()
        if whole[: len(turn)] != turn or len(whole) == len(turn):
            return (), ()
        model = whole[len(turn) :]
        common = turn[: next((i for i, (a, b) in enumerate(zip(turn, other, strict=False)) if a != b), 0)]
        num_user = common[::-1].index(model[0]) + 1 if model[0] in common else 0
        return tuple(common[len(common) - num_user :]), tuple(model)

    def find_special_token(self, text: str) -> str | None:
        """The first special token spelled in `text`, for a hint in an error message."""
        return self._marker.find(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; incomplete characters become U+FFFD. Raises `PromptError` for an id out of range."""
        self.check_ids(ids)
        return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise `PromptError` unless every id is an integer from 0 to num_ids - 1."""
        for i in ids:
            if not isinstance(i, int) or not 0 <= i < self.num_ids:
                raise PromptError(f"token id {i!r} is out of range; the model's ids are 0 to {self.num_ids - 1}")

    @property
    def has_token_bytes(self) -> bool:
        """True if each token has its own bytes; False for decoders that work on whole texts (WordPiece, ...)."""
        return self._piece_to_bytes is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token appends to a text, possibly part of a character. Requires `has_token_bytes`."""
        assert self._piece_to_bytes is not None
        found = self._token_bytes.get(token_id)
        if found is None:
            piece = self.backend.id_to_token(token_id) if token_id >= 0 else None
            found = self._token_bytes[token_id] = b"" if piece is None else self._piece_to_bytes(piece)
        return found

    @property
    def strips_first_space(self) -> bool:
        """True for SentencePiece decoders that strip the space which encoding adds before the first word."""
        return isinstance(self._piece_to_bytes, _SentencePieceBytes) and self._piece_to_bytes.strips_first_space

    def _encode(self, texts: Sequence[str], add_special_tokens: bool, parse_special: bool) -> list[list[int]]:
        if not parse_special:
            texts = [self._marker.mark(text) if isinstance(text, str) else text for text in texts]
        try:
            # `encode` holds the GIL, for seconds on a long text; `encode_batch_fast` releases it, at a cost that is not
            # worth it for a short text.
            if len(texts) == 1 and not (isinstance(texts[0], str) and len(texts[0]) > SHORT_CHARS):
                return [self.backend.encode(texts[0], add_special_tokens=add_special_tokens).ids]
            return [e.ids for e in self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]
        except (TypeError, UnicodeEncodeError) as e:  # the library raises TypeError for both
            raise _bad_prompt(texts) from e
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as e:  # a panic in the library is a BaseException
            raise PromptError(f"the model's tokenizer fails on this text: {' '.join(str(e).split())[:200]}") from e

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


def _bad_prompt(texts: Sequence[str]) -> PromptError:
    """The error for a prompt that the library rejects with TypeError."""
    wrong = [text for text in texts if not isinstance(text, str)]
    if wrong:
        return PromptError(f"a prompt is a str, not {type(wrong[0]).__name__}; token ids need no encoding")
    return PromptError("the prompt is not valid Unicode: it contains a lone surrogate; remove it")


class _Marker:
    """Hides special tokens spelled in a text. A special token of one character cannot be hidden."""

    def __init__(self, contents: Iterable[str]) -> None:
        specials = sorted({c for c in contents if len(c) > 1})
        self._proper_prefixes = {c[:k] for c in specials for k in range(1, len(c))}
        self._max_prefix_chars = max(map(len, self._proper_prefixes), default=0)
        # A lookahead that consumes one character also finds overlapping spellings.
        self._pattern = re.compile(f"(?=({'|'.join(map(re.escape, specials))}))(.)", re.DOTALL) if specials else None

    def find(self, text: str) -> str | None:
        """The first special token in `text`, or None."""
        found = self._pattern.search(text) if self._pattern else None
        return found[1] if found else None

    def mark(self, text: str) -> str:
        """Insert a mark after the first character of each special token, and of a partial one at the end of `text`.

        A template may place two fields side by side, "<|im_" and "end|>", or strip the white space between them.
        """
        if self._pattern is None:
            return text
        tail = text.rstrip()
        for length in range(1, min(len(tail), self._max_prefix_chars) + 1):
            if tail[-length:] in self._proper_prefixes:
                at = len(tail) - length + 1
                text = text[:at] + MARK + text[at:]
        return self._pattern.sub(rf"\g<2>{MARK}", text)

    def mark_all(self, value: Any) -> Any:
        """`value` with every string in it marked, keys included; other types are unchanged."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, Mapping):
            return {k if k in FIELDS else self.mark_all(k): self.mark_all(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark_all(v) for v in value]
        return value


def _prepare(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer with a normalizer that deletes marks, and with truncation and padding turned off."""
    if any(token.special and token.normalized for token in backend.get_added_tokens_decoder().values()):
        # The library searches for a normalized token after the normalizer, where the mark is gone. The flag can be
        # cleared only in the serialized form.
        serialized = json.loads(backend.to_str())
        for token in serialized["added_tokens"]:
            token["normalized"] = token["normalized"] and not token["special"]
        backend = tokenizers.Tokenizer.from_str(json.dumps(serialized))
    backend.no_truncation()
    backend.no_padding()
    delete_marks = tokenizers.normalizers.Replace(MARK, "")
    original = backend.normalizer
    if original is None or MARK.encode() not in original.__getstate__():  # else it came through `to_wire`
        sequence = tokenizers.normalizers.Sequence
        backend.normalizer = delete_marks if original is None else sequence([delete_marks, original])
    return backend


# ---- the bytes of a token


def _make_piece_to_bytes(backend: tokenizers.Tokenizer) -> _ByteLevelBytes | _SentencePieceBytes | None:
    """The mapping from a piece to its bytes, derived from the decoder; None for an unknown kind of decoder."""
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _ByteLevelBytes()
    spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0] == spaces and steps[3:] in ([], [strip]):
        return _SentencePieceBytes(strips_first_space=steps[3:] == [strip])
    return None


class _ByteLevelBytes:
    """GPT-2's byte alphabet: each byte is one printable character. A piece with any other character is plain text."""

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
    """SentencePiece: "▁" is a space and "<0x0A>" a byte."""

    def __init__(self, *, strips_first_space: bool) -> None:
        self.strips_first_space = strips_first_space

    def __call__(self, piece: str) -> bytes:
        if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()
