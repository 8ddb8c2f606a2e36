"""`RequestStream`: the outputs of one request, for one reader on an event loop."""

from __future__ import annotations

import asyncio

from octavo.engine.engine_request import EngineRequest
from octavo.engine.outputs import RequestOutput
from octavo.engine.process.thread import copy_error
from octavo.errors import EngineError, OctavoError
from octavo.frontend.client_request import ClientRequest
from octavo.frontend.cooperative import YIELD_POINT, run_cooperatively
from octavo.params.sampling_params import RequestOutputKind


class RequestStream:
    """A request and its reader, on the event loop that creates the stream.

    Outputs are built when they are read: a slow reader gets all that is new in one, and costs no memory.
    """

    def __init__(self, request: ClientRequest) -> None:
        self.request = request
        self.loop = asyncio.get_running_loop()
        self._only_final = request.new.output_kind is RequestOutputKind.FINAL_ONLY
        self._has_new = False
        self._updated = asyncio.Event()
        self.error: OctavoError | None = None

    @property
    def new(self) -> EngineRequest:
        return self.request.new

    @property
    def failure(self) -> str:
        """Why it failed or was aborted; "" if it runs or has succeeded."""
        return self.request.failure if self.error is None else str(self.error)

    def notify(self) -> None:
        """The request has changed."""
        if self.request.finished or not self._only_final:
            self._has_new = True
            self._updated.set()

    def fail(self, error: OctavoError) -> None:
        """Nothing more will come; the reader gets the error after what it has not read yet."""
        self.error = error
        self._updated.set()

    async def get(self) -> RequestOutput:
        """Wait for the next output. Raises the request's or the engine's error."""
        if asyncio.get_running_loop() is not self.loop:
            raise EngineError("this iterator was started on another event loop; read it there")
        await self._updated.wait()
        if self._has_new:
            self._has_new = False
            if self.error is None:
                self._updated.clear()
            await run_cooperatively(YIELD_POINT for _ in self.request.build_logprobs())
            return self.request.output()
        assert self.error is not None
        raise copy_error(self.error)
