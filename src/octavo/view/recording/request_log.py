"""The requests of a recording: numbered, with digests of their prompts and outputs."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable

from octavo.core.cache.prefix_index import common_prefix_length
from octavo.core.request import Request, Sequence
from octavo.view.recording.digests import Digests
from octavo.view.recording.format import DIGEST_BYTES, STOP_MARK, RecordedRequest, RecordedSample

MAX_CACHED_DIGESTS = 64
"""Digests of beams' last full blocks that are cached, so that they are not recomputed for each token."""


class RequestLog:
    """Requests while calls may name them: unfinished ones, pins, and those that finished with a plan in flight."""

    def __init__(self, digests: Digests) -> None:
        self.num_requests = 0
        self._digests, self._block_size = digests, digests.block_size
        self._live: dict[Request, RecordedRequest] = {}
        self._unfinished: dict[str, Request] = {}
        self._ended: deque[tuple[int, Request]] = deque()  # with the step up to which they are needed
        self._tails: dict[bytes, dict[bytes, array[int]]] = {}  # digest before -> tails of pins; few, never removed
        self._last_digests: dict[tuple[Request, bytes], bytes] = {}  # full blocks of a beam -> digest of the last one

    def __contains__(self, request: Request) -> bool:
        return request in self._live

    def __getitem__(self, request: Request) -> RecordedRequest:
        return self._live[request]

    def __len__(self) -> int:
        return len(self._live)

    def numbers(self, requests: Iterable[Request]) -> list[int]:
        return [self._live[request].number for request in requests]

    def add(self, request: Request, max_tokens: int) -> RecordedRequest:
        blocks = self._digests.of_blocks(request.prompt_token_ids, request.salt)
        recorded = self._live[request] = RecordedRequest(
            number=self.num_requests,
            num_prompt=len(request.prompt_token_ids),
            max_tokens=max_tokens,
            beam_search=request.select_beams is not None,
            skip_prefix_cache=request.sampling_params.skip_reading_prefix_cache,
            salt=self._digests.of_salt(request.salt),
            block_digests=blocks,
            resumed={index: len(list(output)) for index, output in (request.resume or {}).items()},
            **Request.INPUTS.save(request),
        )
        tail = request.prompt_token_ids[len(blocks) // DIGEST_BYTES * self._block_size :]
        if request.pin and tail:
            tails = self._tails.setdefault(self._digests.last(blocks, request.salt), {})
            tails[tail.tobytes()] = tail
        self.num_requests += 1
        self._unfinished[request.request_id] = request
        return recorded

    def finish(self, request_id: str, step: int, *, is_pinned: bool) -> RecordedRequest:
        """Record the output of a request that has finished after `step` plans."""
        request = self._unfinished.pop(request_id)
        self._record_outputs(request)
        if not is_pinned:
            self._ended.append((step, request))
        return self._live[request]

    def forget_ended(self, oldest_step: int) -> None:
        """Forget finished requests that no plan from this step on holds."""
        while self._ended and self._ended[0][0] <= oldest_step:
            del self._live[self._ended.popleft()[1]]

    def unpin(self, request: Request) -> int:
        """Forget a pin and return its number."""
        return self._live.pop(request).number

    # -- outputs -------------------------------------------------------------------------------------------------------

    def record_outputs(self) -> None:
        """Record what is known of all unfinished outputs by now."""
        for request in self._unfinished.values():
            self._record_outputs(request)

    def _record_outputs(self, request: Request) -> None:
        """The tail of a pin, after its last full block, is shared token by token, so token digests are recorded there.
        A beam search has its outputs in `beam_choices`."""
        recorded, prompt, salt = self._live[request], request.prompt_token_ids, request.salt
        blocks = recorded.block_digests
        num_full = len(blocks) // DIGEST_BYTES
        recorded.token_digests = self._tail_digests(salt, prompt, blocks, 0)
        if recorded.beam_search:
            rest = prompt[num_full * self._block_size :]
            recorded.token_digests[num_full] = self._digests.of_tokens(self._digests.last(blocks, salt), rest)
            return
        recorded.samples = {}
        for seq in (*request.sequences, *request.finished_sequences):
            all_blocks = self._digests.of_blocks(seq.token_ids, salt, blocks)
            recorded.samples[seq.index] = RecordedSample(
                len(seq.token_ids) - recorded.num_prompt,
                seq.stop_token is not None,
                all_blocks[len(blocks) :],
                self._tail_digests(salt, seq.token_ids, all_blocks, num_full),
            )

    def _tail_digests(self, salt: bytes, tokens: array[int], blocks: bytes, first: int) -> dict[int, bytes]:
        """Token digests of the blocks from `first` on: as many as a block has tokens in common with the tail of any
        pin."""
        size, found = self._block_size, {}
        for block in range(first, len(blocks) // DIGEST_BYTES + 1) if self._tails else ():
            before = self._digests.last(blocks[: block * DIGEST_BYTES], salt)
            held = tokens[block * size : (block + 1) * size]
            num = max([common_prefix_length(tail, held) for tail in self._tails.get(before, {}).values()], default=0)
            if num:
                found[block] = self._digests.of_tokens(before, held[:num])
        return found

    # -- beams ---------------------------------------------------------------------------------------------------------

    def beam_digests(self, beam: Sequence) -> bytes:
        """Digests of a beam's full blocks, and of the tokens after them."""
        request = beam.request
        return self._digests.of_beam(beam.token_ids, request.salt, self._live[request].block_digests)

    def add_choices(self, request: Request, parents: list[Sequence], selected: list[tuple[Sequence, int]]) -> None:
        choices = self._live[request].beam_choices
        choices.append(len(selected))
        for parent, token in selected:
            choices += (parents.index(parent), self._encode_choice(request, parent.token_ids, token))

    def _encode_choice(self, request: Request, before: array[int], token: int) -> bytes:
        """A beam's next token, as in `RecordedRequest.beam_choices`."""
        if token in request.stop_ids:
            return STOP_MARK
        begin = len(before) // self._block_size * self._block_size
        last, tokens = self._last_digest(request, before[:begin]), before[begin:] + array("i", (token,))
        if len(tokens) < self._block_size:
            return self._digests.digest(last, b"mark" + tokens.tobytes())
        return self._digests.of_tokens(last, tokens[:-1]) + self._digests.digest(last, tokens.tobytes())

    def _last_digest(self, request: Request, tokens: array[int]) -> bytes:
        """The digest of the last of a beam's full blocks."""
        key = request, tokens.tobytes()
        if key not in self._last_digests:
            if len(self._last_digests) >= MAX_CACHED_DIGESTS:
                self._last_digests.clear()
            blocks = self._digests.of_blocks(tokens, request.salt, self._live[request].block_digests)
            self._last_digests[key] = self._digests.last(blocks, request.salt)
        return self._last_digests[key]
