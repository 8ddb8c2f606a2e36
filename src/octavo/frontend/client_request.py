"""A request of an engine in another process, kept up here from what that engine tells of it.

The text is made here. And here is all that it takes to begin the request again with another engine, when that one has
died: the prompt, the tokens told so far, and the seed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from octavo.core.request import Request, Sequence
from octavo.engine.beam_search import BeamSearch
from octavo.engine.outputs import MakeDetokenizer, RequestMetrics, RequestOutput, RequestState
from octavo.engine.process.ipc import AddRequest, RequestUpdate, SampleUpdate, pack, params_to_wire
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import SamplingParams
from octavo.params.validation import INT32


class TokensLostError(ValueError):
    """An update goes on behind tokens that have not come: an earlier one was lost, or this one is wrong."""


class ClientRequest:
    """One request.

    seed            for parameters that bring none; it must outlive the engine
    eos_token_ids   the model's own ends of sequence
    vocab_size      beyond all tokens that an engine may tell of
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Seq[int],
        params: SamplingParams | BeamSearchParams,
        *,
        seed: int,
        eos_token_ids: Iterable[int] = (),
        prompt: str | None = None,
        priority: int = 0,
        salt: bytes = b"",
        tenant: int = 0,
        rank: int = 0,
        pin: bool = False,
        make_detokenizer: MakeDetokenizer | None = None,
        vocab_size: int = INT32,
    ) -> None:
        beams, params = (params, params.sampling_params) if isinstance(params, BeamSearchParams) else (None, params)
        self._asked = beams or params
        self._vocab_size = vocab_size
        stop_ids = params.stop_ids(eos_token_ids)
        request = Request(
            request_id,
            prompt_token_ids,
            params,
            seed=seed if params.seed is None else params.seed,
            stop_ids=stop_ids,
            priority=priority,
            salt=salt,
            tenant=tenant,
            index_in_call=rank,
            width=None if beams is None else beams.beam_width,
            pin=pin,
        )
        self._is_alone = request.width == 1 and beams is None
        self._begin(request)
        if not params.detokenize:
            make_detokenizer = None
        self.state = RequestState(
            request,
            prompt,
            RequestMetrics(time.monotonic()),
            make_detokenizer,
            # Else the text is made when somebody reads it, perhaps of several steps at once.
            incremental=make_detokenizer is not None and beams is None and bool(params.stop_strings),
            search=None if beams is None else BeamSearch(beams, len(prompt_token_ids), stop_ids),
        )
        self._num_preemptions = 0  # by engines that have died

    def _begin(self, request: Request) -> None:
        request.sequences = [Sequence(request, 0, request.prompt_token_ids[:], 0)]
        request.only_sequence = request.sequences[0] if self._is_alone else None

    @property
    def request_id(self) -> str:
        return self.state.request.request_id

    @property
    def finished(self) -> bool:
        return not self.state.request.sequences

    @property
    def num_known(self) -> int:
        """Tokens told so far, over all samples, each with its prompt."""
        return self.state.num_known

    def output(self) -> RequestOutput:
        return self.state.output()

    # -- taking in -----------------------------------------------------------------------------------------------------

    def take_in(self, update: RequestUpdate) -> list[int]:
        """What an engine tells. Returns the samples that end in a stop string now, which it cannot know.

        Raises `TokensLostError` where tokens before these did not come, `ValueError` for what no engine can tell of
        this request; then nothing of it is taken in, or the request cannot go on.
        """
        state, request, now = self.state, self.state.request, time.monotonic()
        for sample in update.samples:
            self._check(sample)
        if update.facts is not None:
            self._take_in_facts(update)
        if update.prompt_logprobs is not None:
            state.read_prompt_logprobs(update.prompt_position, update.prompt_logprobs)
        if state.search is not None:
            if update.finished:
                reason = update.samples[0].finish_reason if update.samples else "stop"
                self.end(reason)
            return []
        stopped = []
        for sample in update.samples:
            sequence = self._sequence(sample)
            if sequence is None:
                continue
            if sample.token_ids:
                state.metrics.first_token_time = state.metrics.first_token_time or now
                state.metrics.last_token_time = now
                sequence.token_ids.extend(sample.token_ids)
            if sample.logprobs is not None:
                state.read_logprobs(sample.index, sample.logprobs)
            sequence.stop_token = sample.stop_token
            if state.incremental and state.read(sequence) and not sample.finish_reason:
                stopped.append(sample.index)
                sequence.finish_reason = "stop"
            else:
                sequence.finish_reason = sample.finish_reason
        ended = [s for s in request.sequences if s.finish_reason]
        if ended:
            request.sequences = [s for s in request.sequences if not s.finish_reason]
            request.finished_sequences += ended
            if self.finished:
                state.metrics.finished_time = now
        if update.finished and not self.finished:
            alive = [s.index for s in request.sequences]
            raise ValueError(f"the request is over, and nothing tells of the end of samples {alive}")
        return stopped

    def _check(self, sample: SampleUpdate) -> None:
        request, index, tokens = self.state.request, sample.index, sample.token_ids
        if index >= request.width:
            raise ValueError(f"it tells of sample {index}, and the request has {request.width}")
        if tokens and max(tokens) >= self._vocab_size:
            raise ValueError(f"it has token {max(tokens)}, and the vocabulary has {self._vocab_size}")
        if self.state.search is not None or any(s.index == index for s in request.finished_sequences):
            return
        num_known = next((len(s.token_ids) for s in request.sequences if s.index == index), 0)
        num_told = max(0, num_known - len(request.prompt_token_ids))
        if sample.position != num_told:
            kind = TokensLostError if sample.position > num_told else ValueError
            raise kind(f"it goes on at token {sample.position} of sample {index}, and {num_told} are known")
        if sample.logprobs is not None and len(sample.logprobs) > len(tokens):
            raise ValueError(f"it has log-probabilities of {len(sample.logprobs)} tokens, and {len(tokens)} tokens")

    def _sequence(self, sample: SampleUpdate) -> Sequence | None:
        """A live one, which has begun with this sample if need be; None if it has ended here."""
        request = self.state.request
        for sequence in request.sequences:
            if sequence.index == sample.index:
                return sequence
        if any(s.index == sample.index for s in request.finished_sequences):
            return None
        sequence = Sequence(request, sample.index, request.prompt_token_ids[:], 0)
        request.sequences.append(sequence)
        return sequence

    def _take_in_facts(self, update: RequestUpdate) -> None:
        facts, state, metrics = update.facts, self.state, self.state.metrics
        assert facts is not None
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = facts.scheduled_time
            state.request.num_cached_tokens = facts.num_cached_tokens
        metrics.num_preemptions = self._num_preemptions + facts.num_preemptions
        state.request.error = facts.error
        if state.search is not None and facts.hypotheses is not None:
            state.search.hypotheses = facts.hypotheses

    def end(self, reason: str, error: str = "") -> None:
        """It ends here, with what there is."""
        request = self.state.request
        request.error = error or request.error
        for sequence in request.sequences:
            sequence.finish_reason = reason
        # What a search has found, the engine tells; where that has gone, or has not begun, nothing is found.
        if self.state.search is None or (reason in ("abort", "error") and not self.state.search.hypotheses):
            request.finished_sequences += request.sequences
        request.sequences = []
        self.state.metrics.finished_time = time.monotonic()

    def agrees(self, told: dict[int, int]) -> bool:
        """Whether all that an engine has told (`EngineServer`'s question DELIVERED) has come."""
        state, request = self.state, self.state.request
        if state.search is not None:
            return True  # of a search the last is told alone
        begin = len(request.prompt_token_ids)
        known = {s.index: len(s.token_ids) - begin for s in request.sequences}
        ended = {s.index for s in request.finished_sequences}
        mine = {index: told.get(index, -1) for index in known}
        others = told.keys() - known.keys() - ended - {-1}  # samples that begin with a message that is lost
        return known == mine and not others and told.get(-1, 0) <= len(state.prompt_logprobs)

    def stopped_of(self, told: dict[int, int]) -> list[int]:
        """Samples that ended here, and go on in the engine."""
        return [s.index for s in self.state.request.finished_sequences if s.index in told]

    def release(self) -> None:
        """Nobody looks at it any more."""
        self.state.release()

    # -- beginning it, the first time or again -------------------------------------------------------------------------

    def add(self) -> AddRequest:
        """For an engine that does not know it. A beam search begins at its prompt."""
        request, start = self.state.request, len(self.state.request.prompt_token_ids)
        self._num_preemptions = self.state.metrics.num_preemptions
        begun = {s.index: pack(s.token_ids[start:]) for s in request.sequences if len(s.token_ids) > start}
        return AddRequest(
            request.request_id,
            pack(request.prompt_token_ids),
            params_to_wire(self._asked),
            self.state.search is not None,
            request.seed,
            request.priority,
            request.salt,
            begun or None,
            request.pin,
            request.tenant,
            request.index_in_call,
        )
