"""`ScriptTokenizer`: a model's tokenizer with the names and defaults of Transformers' tokenizers, for scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.text.tokenizer import Tokenizer


class BatchEncoding(dict[str, Any]):
    """`input_ids` and `attention_mask`, as keys or as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class ScriptTokenizer:
    """A tokenizer as `transformers.AutoTokenizer` gives it, without padding, truncation and tensors.

    Results are Transformers', with one exception: text of a conversation that spells a special token stays text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend

    # -- text to ids ---------------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens)

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> BatchEncoding:
        """One text or several."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return BatchEncoding(input_ids=ids, attention_mask=[1] * len(ids))
        batch = self._tokenizer.encode_batch(text, add_special_tokens)
        return BatchEncoding(input_ids=batch, attention_mask=[[1] * len(ids) for ids in batch])

    def tokenize(self, text: str, add_special_tokens: bool = False) -> Any:
        """The tokens of a text, as the vocabulary spells them."""
        return self.convert_ids_to_tokens(self.encode(text, add_special_tokens))

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> Any:
        """The prompt of one conversation or several; `kwargs` are variables of the template. Raises `TemplateError`.

        tokenize     ids, else text
        return_dict  ids come as a `BatchEncoding`, else as a list
        """
        several = bool(conversation) and not isinstance(conversation[0], Mapping)
        rendered = [
            self._tokenizer.encode_chat(
                one,
                tools=tools,
                template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **kwargs,
            )
            for one in (conversation if several else [conversation])
        ]
        if not tokenize:
            texts = [text for text, _ in rendered]
            return texts if several else texts[0]
        batch = [ids for _, ids in rendered]
        masks = [[1] * len(ids) for ids in batch]
        if not several:
            batch, masks = batch[0], masks[0]  # type: ignore[assignment]
        return BatchEncoding(input_ids=batch, attention_mask=masks) if return_dict else batch

    # -- ids to text ---------------------------------------------------------------------------------------------------

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> Any:
        """The text of an id or of several, or the texts of several lists of ids."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if ids and not isinstance(ids[0], int):
            return [self.decode(i, skip_special_tokens) for i in ids]
        return self._tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    # -- the vocabulary ------------------------------------------------------------------------------------------------

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        return self._backend.get_vocab()

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: i for i, token in self._backend.get_added_tokens_decoder().items()}

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """The tokens of ids, or the token of one id."""
        if isinstance(ids, int):
            return self._backend.id_to_token(ids)
        special = self.all_special_ids if skip_special_tokens else ()
        return [self._backend.id_to_token(i) for i in ids if i not in special]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The ids of tokens, or the id of one token; that of the unknown token, or None, if there is none."""
        if isinstance(tokens, str):
            found = self._backend.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        return self._backend.decoder.decode(list(tokens)) if self._backend.decoder else " ".join(tokens)

    @property
    def vocab_size(self) -> int:
        """Number of tokens without the added ones."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def is_fast(self) -> bool:
        return True

    # -- special tokens ------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """`eos_token`, `eos_token_id` and the like; None if the model has no such token."""
        kind = name.removesuffix("_id")
        if kind not in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; see octavo.text.script_tokenizer")
        token = self._tokenizer.special_tokens.get(kind)
        return token if name == kind or token is None else self._backend.token_to_id(token)

    @property
    def special_tokens_map(self) -> dict[str, str]:
        return dict(self._tokenizer.special_tokens)

    @property
    def all_special_ids(self) -> Any:
        return self.convert_tokens_to_ids(self.all_special_tokens)

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens that have a name."""
        return list(dict.fromkeys(self._tokenizer.special_tokens.values()))

    @property
    def chat_template(self) -> str | None:
        return self._tokenizer.chat_template

    @property
    def backend_tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer`."""
        return self._backend
