"""Client-side copy of a request that runs in the engine process.

Text is made here. The copy also holds all that another engine needs to resume the request when the first one dies: the
prompt, the tokens so far, and the seed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from octavo.core.request import Sequence
from octavo.engine.engine_request import EngineRequest, build_state, sampling_params_of
from octavo.engine.outputs import RequestOutput
from octavo.engine.process.ipc import (
    AddRequest,
    MessageError,
    RequestStats,
    RequestUpdate,
    SampleUpdate,
    pack_tokens,
    params_to_wire,
)


class ClientRequest:
    """One request.

    new             the request as submitted; its seed must outlive the engine
    eos_token_ids   the model's end-of-sequence tokens
    """

    def __init__(self, new: EngineRequest, *, eos_token_ids: Iterable[int] = ()) -> None:
        self.new = new
        beams, params = sampling_params_of(new.params)
        seed = (new.seed or 0) if params.seed is None else params.seed
        self.state = build_state(new, time.monotonic(), params.stop_ids(eos_token_ids), seed)
        request = self.state.request
        request.sequences = [Sequence(request, 0, request.prompt_token_ids[:], 0)]
        request.only_sequence = request.sequences[0] if request.width == 1 and beams is None else None
        self._num_preemptions = 0  # by engines that have died

    @property
    def request_id(self) -> str:
        return self.state.request.request_id

    @property
    def finished(self) -> bool:
        return not self.state.request.sequences

    @property
    def num_known(self) -> int:
        """Tokens so far over all samples, each with its prompt."""
        return self.state.num_known

    def output(self) -> RequestOutput:
        return self.state.output()

    # -- updates -------------------------------------------------------------------------------------------------------

    def apply_update(self, update: RequestUpdate) -> list[int]:
        """Apply an update. Returns the samples that end in a stop string now, which the engine cannot detect.

        Raises `MessageError` for an update that no engine can send for this request. The tokens known then are right.
        """
        state, request, now = self.state, self.state.request, time.monotonic()
        for sample in update.samples:
            self._check(sample)
        if update.stats is not None:
            self._apply_stats(update.stats)
        if update.prompt_logprobs is not None:
            state.add_prompt_logprobs(update.prompt_position, update.prompt_logprobs)
        if state.search is not None:
            if update.finished:
                reason = update.samples[0].finish_reason if update.samples else "stop"
                self.finish(reason)
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
                state.add_logprobs(sample.index, sample.logprobs)
            sequence.stop_token = sample.stop_token
            if state.incremental and state.detokenize(sequence) and not sample.finish_reason:
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
            live = [s.index for s in request.sequences]
            raise MessageError(f"the request has finished, and its samples {live} have no finish reason")
        return stopped

    def _check(self, sample: SampleUpdate) -> None:
        request, index = self.state.request, sample.index
        if index >= request.width:
            raise MessageError(f"it has sample {index}, and the request has {request.width} samples")
        if self.state.search is not None or any(s.index == index for s in request.finished_sequences):
            return
        num_known = next((len(s.token_ids) for s in request.sequences if s.index == index), 0)
        num_output = max(0, num_known - len(request.prompt_token_ids))
        if sample.position != num_output:
            raise MessageError(f"it continues at token {sample.position} of sample {index}, and {num_output} are known")

    def _sequence(self, sample: SampleUpdate) -> Sequence | None:
        """The live sequence of a sample, created on its first update; None if it has ended on this side."""
        request = self.state.request
        for sequence in request.sequences:
            if sequence.index == sample.index:
                return sequence
        if any(s.index == sample.index for s in request.finished_sequences):
            return None
        sequence = Sequence(request, sample.index, request.prompt_token_ids[:], 0)
        request.sequences.append(sequence)
        return sequence

    def _apply_stats(self, stats: RequestStats) -> None:
        state, metrics = self.state, self.state.metrics
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = stats.scheduled_time
            state.request.num_cached_tokens = stats.num_cached_tokens
        metrics.num_preemptions = self._num_preemptions + stats.num_preemptions
        state.request.error = stats.error
        if state.search is not None and stats.hypotheses is not None:
            state.search.hypotheses = stats.hypotheses

    def finish(self, reason: str, error: str = "") -> None:
        """Finish the request on this side with its tokens so far."""
        request = self.state.request
        request.error = error or request.error
        for sequence in request.sequences:
            sequence.finish_reason = reason
        # The engine sends the hypotheses of a search. Without them, the live sequence becomes the output.
        if self.state.search is None or (reason in ("abort", "error") and not self.state.search.hypotheses):
            request.finished_sequences += request.sequences
        request.sequences = []
        self.state.metrics.finished_time = time.monotonic()

    def release(self) -> None:
        """Break reference cycles after the final output."""
        self.state.release()

    # -- adding it to an engine ----------------------------------------------------------------------------------------

    def add_command(self) -> AddRequest:
        """The command that starts or resumes the request in an engine. A beam search restarts at its prompt."""
        request, start = self.state.request, len(self.state.request.prompt_token_ids)
        self._num_preemptions = self.state.metrics.num_preemptions
        resume = {s.index: pack_tokens(s.token_ids[start:]) for s in request.sequences if len(s.token_ids) > start}
        return AddRequest(
            request.request_id,
            pack_tokens(request.prompt_token_ids),
            params_to_wire(self.new.params),
            self.state.search is not None,
            request.seed,
            request.priority,
            request.salt,
            resume or None,
            request.pin,
            request.tenant,
            request.index_in_call,
        )
