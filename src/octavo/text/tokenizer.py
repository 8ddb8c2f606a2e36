"""Text to token ids and back.

The work is done by the `tokenizers` library; this file guards it, and keeps user text from turning into control tokens.

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
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from octavo.checkpoint.resolve import Checkpoint
from octavo.errors import PromptError, TemplateError
from octavo.text import chat_template
from octavo.text.tokenizer_loader import load_tokenizer_parts

MARK = "\ufdd0"
SHORT_CHARS = 2048


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
        self.vocab_size = max(self.backend.get_vocab().values(), default=-1) + 1  # there may be holes
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
    def from_checkpoint(cls, checkpoint: Checkpoint, *, chat_template: str | None = None) -> Tokenizer:
        """With `chat_template` in the place of the model's. Raises `CheckpointError` if there is no tokenizer, or it is
        broken or of an unknown kind.
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
        """All that `from_wire` makes the same tokenizer of in another process, as plain data."""
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
        """Of a text that one token can stand for."""
        return max(4, max(map(len, self.backend.get_vocab()), default=0))

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
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
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

    def find_special_token(self, text: str) -> str | None:
        """The first special token that is spelled in `text`, for a hint to whoever may have meant it."""
        return self._marker.find(text)

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
            # The library's thread pool is a detour for a short text; but it lets other threads run meanwhile, and for a
            # long text `encode` would stop them for seconds.
            if len(texts) == 1 and not (isinstance(texts[0], str) and len(texts[0]) > SHORT_CHARS):
                return [self.backend.encode(texts[0], add_special_tokens=add_special_tokens).ids]
            return [e.ids for e in self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]
        except (TypeError, UnicodeEncodeError) as e:  # the library says TypeError of both
            raise _bad_prompt(texts) from e
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as e:  # a panic in the library is no Exception; a pattern that explodes is one
            raise PromptError(f"the model's tokenizer fails on this text: {' '.join(str(e).split())[:200]}") from e

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


def _bad_prompt(texts: Sequence[str]) -> PromptError:
    """Why the library took one of `texts` for no string."""
    wrong = [text for text in texts if not isinstance(text, str)]
    if wrong:
        return PromptError(f"a prompt is a str, not {type(wrong[0]).__name__}; token ids need no encoding")
    return PromptError("the prompt is not valid Unicode: it holds a lone surrogate")


class _Marker:
    """Hides special tokens that are spelled out in a text. A token of one character cannot be hidden."""

    def __init__(self, contents: Iterable[str]) -> None:
        specials = sorted({c for c in contents if len(c) > 1})
        self._starts = {c[:k] for c in specials for k in range(1, len(c))}
        self._longest = max(map(len, self._starts), default=0)
        # Looking ahead and taking one character finds overlapping spellings too.
        self._pattern = re.compile(f"(?=({'|'.join(map(re.escape, specials))}))(.)", re.DOTALL) if specials else None

    def find(self, text: str) -> str | None:
        found = self._pattern.search(text) if self._pattern else None
        return found[1] if found else None

    def mark(self, text: str) -> str:
        """`text` with a mark after the first character of each special token, and of an unfinished one at its end:

        a template may put two fields side by side, "<|im_" and "end|>", or cut the white space between them.
        """
        if self._pattern is None:
            return text
        tail = text.rstrip()
        for length in range(1, min(len(tail), self._longest) + 1):
            if tail[-length:] in self._starts:
                at = len(tail) - length + 1
                text = text[:at] + MARK + text[at:]
        return self._pattern.sub(rf"\g<2>{MARK}", text)

    def mark_all(self, value: Any) -> Any:
        """`value` with every string inside marked, keys too; what is no mapping, list or string stays as it is."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, Mapping):
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
    if given is None or MARK.encode() not in given.__getstate__():  # else it comes from another process, with it
        backend.normalizer = unmark if given is None else tokenizers.normalizers.Sequence([unmark, given])
    return backend


# ---- the bytes of a token


def _byte_rule(backend: tokenizers.Tokenizer) -> _ByteLevelBytes | _SentencePieceBytes | None:
    """How a token's text becomes bytes, read off the decoder; None for a decoder that is neither of the two in use."""
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
    """In SentencePiece's pieces a "▁" is a space and "<0x0A>" a byte."""

    def __init__(self, *, strips_first_space: bool) -> None:
        self.strips_first_space = strips_first_space

    def __call__(self, piece: str) -> bytes:
        if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()
