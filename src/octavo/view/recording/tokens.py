"""Tokens made up from digests, so that a replay has the same prefix cache hits.

Only the last token of a full block identifies its content:

    prompt, output   1 1 1 n1 | 1 1 1 n2 | 1 1 1 n3 | 1 1        n1, n2, ...: numbers for block digests

Two samples that diverge within a block differ in its last token, and the cache compares full blocks only. The tails of
pins are the exception. Sequences that begin like one, and all beams, have token digests there: m1 m2 m3 n1.
"""

from __future__ import annotations

from array import array

from octavo.view.recording.format import DIGEST_BYTES, RecordedRequest

FILL, STOP, FIRST_TOKEN = 1, 2, 3


class MadeUpTokens:
    """The tokens of a recording's requests. With `whole_blocks`, every token of a block identifies its content."""

    def __init__(self, requests: list[RecordedRequest], block_size: int, *, whole_blocks: bool = False) -> None:
        self.block_size = block_size
        self._whole_blocks = whole_blocks
        self._numbers: dict[bytes, int] = {}
        self._token_digests: dict[bytes, bytes] = {}  # block digest -> digests of the block's first tokens
        self._prompt_ends: dict[int, bytes] = {}  # request number -> token digests after its prompt's full blocks
        self._pass_on([end for request in requests if (end := self._collect(request))])

    def _collect(self, request: RecordedRequest) -> tuple[RecordedRequest, list[bytes]] | None:
        """Store the token digests of a request. If it has a prompt that ends within a block, and samples that fill the
        block, return it with the digests of these blocks."""
        num_full = len(request.block_digests) // DIGEST_BYTES
        recorded = [(request.block_digests, request.token_digests)]
        for sample in request.samples.values():
            recorded.append((request.block_digests + sample.block_digests, sample.token_digests))
        for blocks, tokens in recorded:
            for block, digests in tokens.items():
                self._learn(blocks[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES], digests)
        for choice in request.beam_choices:
            if isinstance(choice, bytes) and len(choice) == DIGEST_BYTES * self.block_size:
                self._learn(choice[-DIGEST_BYTES:], choice[:-DIGEST_BYTES])
        if not (num_end := self._num_end_bytes(request)):
            return None
        self._prompt_ends[request.number] = max(
            (tokens.get(num_full, b"")[:num_end] for _, tokens in recorded), key=len
        )
        followers = [s.block_digests[:DIGEST_BYTES] for s in request.samples.values() if s.block_digests]
        return (request, followers) if followers else None

    def _pass_on(self, ends: list[tuple[RecordedRequest, list[bytes]]]) -> None:
        """Merge the token digests of equal blocks, and of samples with the end of their prompt.

        prompt   a b . .        A request that came before a pin has fewer token digests than one that came after it
        sample   a b c d = n1   with the same block. Each passes its digests on, until none learns more.
        other    a b c d = n1
        """
        changed = True
        while changed:
            changed = False
            for request, followers in ends:
                num_end = self._num_end_bytes(request)
                known = [self._token_digests.get(digest, b"")[:num_end] for digest in followers]
                end = self._prompt_ends[request.number] = max(self._prompt_ends[request.number], *known, key=len)
                for digest in followers:
                    changed |= self._learn(digest, end)

    def _num_end_bytes(self, request: RecordedRequest) -> int:
        """Length of the token digests after the prompt's full blocks."""
        return DIGEST_BYTES * (request.num_prompt % self.block_size)

    def _learn(self, block_digest: bytes, token_digests: bytes) -> bool:
        """Store a block's token digests if they are more than are known. Of two lists of one block, one is a prefix of
        the other."""
        more = bool(block_digest) and len(token_digests) > len(self._token_digests.get(block_digest, b""))
        if more:
            self._token_digests[block_digest] = token_digests
        return more

    def prompt(self, request: RecordedRequest) -> array[int]:
        end = self._prompt_ends.get(request.number, b"")
        return self.of(request.block_digests, end, request.num_prompt)

    def sample(self, request: RecordedRequest, index: int) -> array[int]:
        """Prompt and output of one sample."""
        sample = request.samples.get(index)
        if sample is None:
            return self.prompt(request)
        digests = request.block_digests + sample.block_digests
        end = sample.token_digests.get(len(digests) // DIGEST_BYTES, b"")
        if not sample.block_digests:
            end = max(end, self._prompt_ends.get(request.number, b""), key=len)
        tokens = self.of(digests, end, request.num_prompt + sample.num_tokens)
        if sample.stopped:
            tokens[-1] = STOP
        return tokens

    def of(self, block_digests: bytes, token_digests: bytes, length: int) -> array[int]:
        """`length` tokens: full blocks with these digests, then tokens with these digests, then fill tokens."""
        tokens = array("i")
        for i in range(0, len(block_digests), DIGEST_BYTES):
            tokens += self.of_block(block_digests[i : i + DIGEST_BYTES])
        if not self._whole_blocks:
            tokens += self._of_digests(token_digests)
        return tokens + array("i", (FILL,)) * (length - len(tokens))

    def of_block(self, digest: bytes) -> array[int]:
        """The tokens of a full block."""
        if self._whole_blocks:
            return array("i", (self._number(digest),)) * self.block_size
        tokens = array("i", (FILL,)) * self.block_size
        if known := self._token_digests.get(digest):
            tokens[: len(known) // DIGEST_BYTES] = self._of_digests(known)
        tokens[-1] = self._number(digest)
        return tokens

    def of_choice(self, choice: bytes) -> int:
        """The token of an entry of `RecordedRequest.beam_choices`."""
        return STOP if len(choice) < DIGEST_BYTES else self._number(choice[-DIGEST_BYTES:])  # `STOP_MARK` is shorter

    def _of_digests(self, digests: bytes) -> array[int]:
        return array("i", [self._number(digests[i : i + DIGEST_BYTES]) for i in range(0, len(digests), DIGEST_BYTES)])

    def _number(self, digest: bytes) -> int:
        """The token that stands for a digest."""
        return self._numbers.setdefault(digest, FIRST_TOKEN + len(self._numbers))
