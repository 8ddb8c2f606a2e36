"""The scheduler: plans which sequences compute how many positions in the next step, and the memory operations for it.

A step is filled from three queues: running requests in order of arrival, then swapped ones, then waiting ones, which
are admitted only while no swapped one is before them. Each queue stops at the first request that does not fit.

Among several tenants the least served is admitted first, their prefills share a step, and the one with most rows gives
way to others. A long prefill gets only part of a step, and further long ones let short ones pass.

The scheduler plans step k+1 while the device runs step k. Its view of a sequence therefore lags the device by the
sequence's `num_pending` tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from operator import sub

from octavo.core import commands as cmd
from octavo.core import events as ev
from octavo.core.cache.kv_stats import KVStats
from octavo.core.in_flight import InFlightStep
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import StepResult
from octavo.core.policy import Policy
from octavo.core.request import Request, Sequence
from octavo.core.scheduling import admission, failures, planning, preemption, results
from octavo.core.scheduling.scheduler_state import SchedulerState
from octavo.core.scheduling.step_draft import StepDraft
from octavo.core.snapshot import Fields, Roster, Snapshot, State


class Scheduler(SchedulerState):
    """The commands that change a scheduler's state. It is the only user of its `KVCacheManager`."""

    SAVED = Fields("num_rows_taken num_steps num_preemptions _num_arrivals step_limit=max_num_scheduled_tokens")

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Append a request to the waiting queue. Raises `CapacityError`, with the numbers, if it could never run.

        A `max_tokens` of None means as many as fit. A number that does not fit is refused, never reduced.
        """
        max_tokens = admission.check_capacity(self, request)
        cache, num_prompt = self.cache, len(request.prompt_token_ids)
        if self.tee.active:
            self.tee.emit(cmd.Add(request, max_tokens))
        if request.pin:
            cache.num_pinned += cache.blocks_to_pin(num_prompt)
        arrival = self._num_arrivals
        self._num_arrivals += 1
        request.begin(arrival, self.policy.order(request, arrival), max_tokens)
        for sequence in request.sequences:
            cache.free(sequence)  # the state after a preemption: a resumed request starts from it too
        self.requests[request.request_id] = request
        self.tenants.enter(request)
        self.enqueue(request)
        if self.events.active:
            self.events.emit(ev.Arrived(request.request_id, num_prompt, max_tokens, request.width, request.priority))

    def unpin(self, name: str) -> int | None:
        """Release a pin by name. Returns its number of blocks, None if there is no such pin."""
        if name not in self.cache.pins:
            return None
        if self.tee.active:
            self.tee.emit(cmd.Unpin(self.cache.pins[name]))
        num_blocks = self.cache.unpin(name)
        if self.events.active:
            self.events.emit(ev.Unpinned(name, num_blocks))
        return num_blocks

    def abort(self, request_id: str, reason: str = "abort") -> Request | None:
        """Finish a request in any state. Unknown and finished requests are ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            if self.tee.active:
                self.tee.emit(cmd.Abort(request, reason))
            results.finish_request(self, request, reason)
        return request

    def stop(self, sequence: Sequence, reason: str = "stop") -> bool:
        """Finish a sequence whose text met a stop string. Returns True if its request finished with it."""
        if sequence.finish_reason:
            return False
        if self.tee.active:
            self.tee.emit(cmd.Stop(sequence, reason))
        return results.finish_sequence(self, sequence, reason)

    def limit_steps(self, limit: int) -> None:
        """Change the limit of positions per step."""
        if self.tee.active and limit != self.max_num_scheduled_tokens:
            self.tee.emit(cmd.LimitSteps(limit))
        self.max_num_scheduled_tokens = limit

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self.in_flight)

    def stats(self) -> KVStats:
        return self.cache.stats()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def schedule(self) -> InFlightStep:
        """Plan the next step. Returns a false one, without a plan, if nothing can run before the next result."""
        if self.tee.active:
            self.tee.emit(cmd.Schedule())
        draft = StepDraft(self)
        num_decode_steps, several = planning.num_decode_steps(self), self.tenants.several and not self.confined_to
        if several:
            preemption.give_way(self, draft)
            draft.shares = planning.prefill_shares(self, num_decode_steps)
        all_planned = planning.plan_running(self, draft, num_decode_steps)
        if all_planned and not draft.preempted:
            admission.resume_swapped(self, draft)
            if several:
                self.tenants.serve(draft.sequences, draft.counts)
            if self.waiting and self.first_swapped() is None:
                admit = admission.admit_confined if self.confined_to else admission.admit_waiting
                admit(self, draft)
        elif several:
            self.tenants.serve(draft.sequences, draft.counts)
        if self.num_speculative_tokens:
            planning.add_drafts(self, draft)
        if self.cache.state_blocks:
            self.cache.settle(draft.plan)
        for sequence in draft.sealable:  # in the index from the next plan on, not within this one
            self.cache.prefixes.seal(sequence)
        step, plan = draft.step, draft.plan
        plan.set_slices(draft.rows, draft.starts, draft.counts, draft.num_sampled)
        if plan:
            self.in_flight.append(step)
            self.num_steps += 1
            if self.events.active:
                self._emit_step(draft)
            planning.note_wait_reason(self, draft)  # also without listeners: `num_decode_steps` reads the reasons
        return step

    def _emit_step(self, draft: StepDraft) -> None:
        pool, plan, before = self.cache.pool, draft.plan, self._counted
        self._counted = now = self.cache.counters()
        num_tokens = self.max_num_scheduled_tokens - draft.budget
        requests = len(self.running), len(self.waiting), len(self.swapped)
        blocks = pool.num_used, pool.num_cached, pool.num_free
        self.events.emit(ev.Step(plan.step, len(plan.rows), num_tokens, *requests, *blocks, *map(sub, now, before)))

    def update(self, step: InFlightStep, result: StepResult, *, last: bool = True) -> list[Request]:
        """Commit the sampled tokens of a step and return the requests that this finished.

        With `last` false the result is partial: the first columns of a decode window that still runs, for streaming.
        Results go to the step's sequences in any state; those of finished sequences are dropped.
        """
        if last:
            assert self.in_flight and self.in_flight[0] is step, "results arrive in the order of the plans"
        if self.tee.active:
            self.tee.emit(cmd.Update(step, result, last))
        return results.commit(self, step, result, last)

    def fail(self, step: InFlightStep, limit: int = 0) -> list[Request]:
        """Handle a step that failed on the device, together with all steps queued after it.

        Seals of these steps are removed, and every request in them is recomputed from the tokens that the host has: its
        blocks may hold anything. Returns these requests; the engine may abort any of them.

        limit   new limit of positions per step if the step ran out of memory; 0: unchanged
        """
        assert step in self.in_flight
        if self.tee.active:
            self.tee.emit(cmd.Fail(step, limit))
        self.max_num_scheduled_tokens = limit or self.max_num_scheduled_tokens
        return failures.undo(self, step, limit)

    def confine(self, requests: Iterable[Request]) -> None:
        """Plan only these requests from now on; with none, plan all requests again.

        The others wait and release their blocks, so that the confined requests can be admitted.
        """
        members = tuple(requests)
        if self.tee.active:
            self.tee.emit(cmd.Confine(members))
        self.confined_to = frozenset(members)
        if self.confined_to:
            for request in (*self.running, *self.swapped):
                if request not in self.confined_to:
                    why = ev.Recomputed(request.request_id, self.num_steps, "confined")
                    failures.recompute(self, request, why)

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def settings(self) -> State:
        """The arguments that the scheduler, its cache and its policy are made with, as plain data."""
        return {
            **self.cache.settings(),
            **self.policy.settings(),
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "decode_window": self.decode_window,
            "num_speculative_tokens": self.num_speculative_tokens,
            "num_watermark_blocks": self.num_watermark_blocks,
        }

    @classmethod
    def from_settings(cls, settings: State) -> Scheduler:
        """An empty scheduler with these settings."""
        return cls(
            KVCacheManager.from_settings(settings),
            max_num_batched_tokens=settings["max_num_batched_tokens"],
            decode_window=settings["decode_window"],
            num_speculative_tokens=settings.get("num_speculative_tokens", 0),  # older recordings have none
            num_watermark_blocks=settings["num_watermark_blocks"],
            policy=Policy.from_settings(settings),
        )

    def snapshot(self) -> Snapshot:
        """The state between two commands, without tokens: see `core.snapshot`."""
        steps, pins = self.in_flight, self.cache.pins.values()
        requests = dict.fromkeys(self.requests.values())
        for step in steps:  # with those that have finished since
            requests |= dict.fromkeys([*(seq.request for seq in step.sequences), *step.swapped_requests])
        requests |= dict.fromkeys(seq.request for seq in pins)
        sequences = dict.fromkeys(seq for r in requests for seq in (*r.sequences, *r.finished_sequences))
        for step in steps:  # with beams that were not selected
            sequences |= dict.fromkeys(step.sequences)
        roster = Roster(requests, sequences | dict.fromkeys(pins))
        return Snapshot(
            {
                **self.cache.snapshot(roster),
                "scheduler": self.SAVED.save(self),
                "counted": list(self._counted),
                "served": self.tenants.snapshot(),
                "costs": self.policy.costs.snapshot(),
                "requests": [request.snapshot(roster) for request in roster.requests],
                "sequences": [seq.snapshot(roster) for seq in roster.sequences],
                "scheduled": roster.indices(self.requests.values()),
                "running": roster.indices(self.running),
                "swapped": roster.indices(self.swapped),
                "waiting": roster.indices(self.waiting),
                "confined": roster.indices(r for r in self.requests.values() if r in self.confined_to),
                "in_flight": [step.snapshot(roster) for step in steps],
            },
            roster,
        )

    def restore(self, state: State, requests: Seq[Request], tokens: Seq[array[int]]) -> None:
        """Continue from a snapshot. This scheduler is new, and has the same settings.

        requests  for each entry of `state["requests"]` the request, which has not begun
        tokens    for each entry of `state["sequences"]` its tokens
        """
        roster = Roster(
            requests,
            [
                Sequence.restored(entry, requests, known)
                for entry, known in zip(state["sequences"], tokens, strict=True)
            ],
        )
        for request, entry in zip(requests, state["requests"], strict=True):
            request.restore(entry, roster)
        self.cache.restore(state, roster)
        self.SAVED.load(self, state["scheduler"])
        self.policy.costs.restore(state["costs"])
        self._counted = tuple(state["counted"])
        self.requests = {request.request_id: request for request in roster.requests_at(state["scheduled"])}
        self.running = roster.requests_at(state["running"])
        self.swapped = roster.requests_at(state["swapped"])
        self.waiting = roster.requests_at(state["waiting"])
        self.confined_to = frozenset(roster.requests_at(state.get("confined", ())))  # recordings before it have none
        self.tenants.restore(state["served"], self.requests.values(), self.waiting)
        self.in_flight.extend(InFlightStep.restored(entry, roster) for entry in state["in_flight"])
