"""A client of an engine without a thread: tests take one step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

from octavo import LLM
from octavo.engine.engine import Engine
from octavo.engine.engine_request import EngineRequest
from octavo.engine.outputs import RequestOutput
from octavo.engine.request_update import RequestUpdate
from octavo.frontend.client_request import ClientRequest


def at_rest(llm: LLM) -> None:
    """Process the steps that are still in flight after the last request has ended."""
    assert llm.thread.call(lambda engine: engine.drain()).result() == []


class StepClient:
    """Turns an engine's updates into outputs. The engine must be idle otherwise, as that of an idle `LLM` is."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine, self.clock = engine, clock
        self.requests: dict[str, ClientRequest] = {}

    def add_request(self, new: EngineRequest) -> None:
        self.engine.add_request(new)
        self.requests[new.request_id] = ClientRequest(
            new, eos_token_ids=self.engine.limits.eos_token_ids, clock=self.clock
        )

    def step(self) -> list[RequestOutput]:
        """The outputs of requests that stream or have finished."""
        return self._outputs(self.engine.step())

    def drain(self) -> list[RequestOutput]:
        return self._outputs(self.engine.drain())

    def abort(self, request_id: str) -> RequestOutput | None:
        update = self.engine.abort(request_id)
        return None if update is None else self._outputs([update])[0]

    def run_to_end(self) -> list[RequestOutput]:
        outputs = []
        while self.engine.has_work:
            outputs += self.step()
        return outputs

    def _outputs(self, updates: list[RequestUpdate]) -> list[RequestOutput]:
        outputs = []
        for update in updates:
            request = self.requests[update.request_id]
            for index in request.apply_update(update):
                self.engine.stop(update.request_id, index)
            if request.finished:
                del self.requests[update.request_id]
            if request.finished or request.new.stream:
                outputs.append(request.output())
        return outputs
