"""`ProcessTransport`: an `EngineClient`'s way to an engine in a process of its own, over `engine.process.ipc`.

This process makes the text, the other one the tokens. A dead or hung engine process is restarted and gets every
unfinished request again, with its tokens so far (`frontend.client_request`): readers only notice a pause.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias, TypeVar

import msgspec

from octavo.checkpoint.generation_config import sampling_defaults
from octavo.checkpoint.resolve import open_checkpoint
from octavo.config import EngineArgs
from octavo.engine.engine_request import EngineRequest, check_priority, check_prompt, generate_seed, pin_id
from octavo.engine.failure_bisection import FailureBisection
from octavo.engine.process import ipc
from octavo.engine.process.supervisor import ENGINE_COMMAND, EngineTimeouts, Supervisor, rebuild_error
from octavo.engine.process.thread import copy_error
from octavo.engine.query import Query, Unpin
from octavo.engine.request_update import RequestUpdate
from octavo.engine.stats import EngineStats, Health, StatsSnapshot
from octavo.errors import EngineError, EngineQueryError, OctavoError, ParameterError, RequestFailedError
from octavo.frontend.client_request import ClientRequest
from octavo.frontend.engine_client import EngineClient, Transport
from octavo.frontend.input_processor import InputProcessor
from octavo.frontend.request_stream import RequestStream
from octavo.text import chat_template
from octavo.text.tokenizer import Tokenizer

R = TypeVar("R")
T = TypeVar("T", bound=Transport)
logger = logging.getLogger("octavo.client")

DEATHS_TO_TRIAL = 3
"""Engine deaths without a new token after which a request is a suspect. Later engines get halves of the suspects. A
suspect fails when an engine dies that had no other request."""


class RequestHandle(RequestStream):
    """A request, in an engine process or between two.

    num_deaths   deaths of engines with this request since its last new token
    started      its first tokens have arrived
    sent         the running engine has it
    aborting     the engine is aborting it, and alone knows its last output (a beam search)
    """

    def __init__(self, request: ClientRequest) -> None:
        super().__init__(request)
        self.num_deaths = 0
        self.started = self.sent = self.aborting = False

    def apply_update(self, update: RequestUpdate) -> list[int]:
        """Returns the samples that end in a stop string now."""
        stopped = self.request.apply_update(update)
        self.num_deaths = 0
        return stopped

    def count_tokens(self, update: RequestUpdate) -> int:
        """Tokens that an applied update stands for: its own and, with the first of them, the computed prompt tokens,
        even if their prefill took several steps. vLLM counts the same way."""
        count = sum(len(sample.token_ids) for sample in update.samples)
        if count and not self.started:
            self.started = True
            count += len(self.new.prompt_token_ids) - self.request.metrics.num_cached_tokens
        return count


def process_client(
    model: str, *, command: Sequence[str] = ENGINE_COMMAND, timeouts: EngineTimeouts | None = None, **options: Any
) -> ProcessClient:
    """A client of an engine in a process of its own. `await start()`; use it on that event loop only.

        client = process_client("smollm2-135m-instruct")
        await client.start()

    command    the command that starts the engine process
    timeouts   when the process counts as hung
    options    the fields of `EngineArgs`

    Raises the errors of a model or option without which no engine can start (see `LLM`).
    """
    args = EngineArgs(model=str(model), **options)
    return make_client(args, ProcessTransport(args, command, timeouts))


def make_client(args: EngineArgs, transport: T) -> EngineClient[T]:
    """A client over a transport, with the model's tokenizer and default parameters."""
    checkpoint = open_checkpoint(args.model, revision=args.revision, weights=args.load_format != "dummy")
    template = None if args.chat_template is None else chat_template.load(args.chat_template)
    tokenizer = None if args.skip_tokenizer_init else Tokenizer.from_checkpoint(checkpoint, chat_template=template)
    default_params = sampling_defaults(args.generation_config, checkpoint).params
    return EngineClient(transport, InputProcessor(tokenizer), default_params)


class ProcessTransport:
    """An engine process and the requests that it runs. All methods are for one event loop."""

    router = None

    def __init__(
        self,
        args: EngineArgs,
        command: Sequence[str] = ENGINE_COMMAND,
        timeouts: EngineTimeouts | None = None,
        placement: ipc.Placement | None = None,
    ) -> None:
        self.supervisor = Supervisor(
            asdict(args),
            on_ready=self._on_ready,
            on_step=self._on_step,
            on_down=self._on_down,
            on_failed=self._on_failed,
            command=command,
            timeouts=timeouts,
            placement=placement,
        )
        self._seeds = random.Random(args.seed)
        self._rpc_numbers = itertools.count()
        self.handles: dict[str, RequestHandle] = {}  # unfinished requests by id, oldest first
        self._num_early = 0  # requests without a handle: they wait for the first engine
        self._ended_here: set[str] = set()  # ids without a handle whose last update the engine has not sent yet
        self.pins: dict[str, EngineRequest] = {}  # by request id; a restarted engine computes them again, as requests
        self.rpc_futures: dict[int, asyncio.Future[ipc.RpcReply]] = {}
        self._outbox: list[msgspec.Raw] = []
        self.suspects: FailureBisection[RequestHandle] = FailureBisection()  # several engines died with them
        self.up = asyncio.Event()  # an engine runs, or has failed for good
        self._error: OctavoError | None = None
        self._info: ipc.Ready | None = None
        self.last_stats = StatsSnapshot(EngineStats(), None)
        self.past_stats = EngineStats()  # of engines that have died
        self._listener: Callable[[int], object] = lambda count: None

    async def start(self) -> None:
        """Start the engine and wait until it accepts requests. Raises the root cause if it does not start."""
        try:
            await self.supervisor.start()
        except OctavoError as error:
            self._on_failed(error)
            raise

    # -- requests ------------------------------------------------------------------------------------------------------

    async def submit(self, request: EngineRequest) -> RequestHandle:
        """As `Transport.submit`. Requests wait while the engine starts or restarts."""
        self._num_early += 1
        try:
            info = await self._when_up()
        finally:
            self._num_early -= 1
        check_prompt(request.prompt_token_ids, info.vocab_size)
        check_priority(request.priority)
        name, params = request.request_id, request.params
        if request.pin and (name in self.pins or name in self.handles):
            pin = name.removeprefix(pin_id(""))
            raise ParameterError(f"{pin!r} is pinned already; unpin it, or use another name", param="name")
        if name in self.handles:
            raise ParameterError(f"a request {name!r} is running already; ids must differ", param="request_id")
        if not request.pin and getattr(params, "seed", None) is None:
            request.seed = generate_seed(self._seeds)
        handle = self.handles[name] = self._new_handle(request, info)
        if not self.suspects:
            self._send_request(handle)
        return handle

    def _new_handle(self, request: EngineRequest, info: ipc.Ready) -> RequestHandle:
        return RequestHandle(ClientRequest(request, eos_token_ids=info.eos_token_ids))

    async def abort(self, request_id: str) -> bool:
        handle = self.handles.get(request_id)
        if handle is None:
            return False
        if handle.sent:
            self._send(ipc.AbortRequest(request_id))
        if handle.sent and handle.request.beams is not None:
            handle.aborting = True
        else:
            self._finish(handle, "abort")
        return True

    def close_stream(self, handle: RequestHandle) -> None:
        if self.handles.get(handle.request.request_id) is handle:
            self._remove(handle, abort=True)
            self._on_progress(handle)

    def _finish(self, handle: RequestHandle, reason: str, error: str = "") -> None:
        """Finish a request on this side with its tokens so far."""
        self._remove(handle)
        handle.request.finish(reason, error)
        handle.notify()
        self._on_progress(handle)

    def _fail(self, handle: RequestHandle, error: OctavoError) -> None:
        """Fail one request; the engine aborts it."""
        self._remove(handle, abort=True)
        handle.fail(error)
        self._on_progress(handle)

    def _remove(self, handle: RequestHandle, *, abort: bool = False) -> None:
        name = handle.request.request_id
        del self.handles[name]
        if handle.sent:
            if abort:
                self._send(ipc.AbortRequest(name))
            self._ended_here.add(name)

    # -- pinned prefixes -----------------------------------------------------------------------------------------------

    def discard_pin(self, request_id: str) -> None:
        """Free the blocks of a failed pin, which the engine may have computed already."""
        self.pins.pop(request_id, None)
        self._send(ipc.RpcCall(next(self._rpc_numbers), Unpin(request_id)))

    async def unpin(self, request_id: str) -> int | None:
        if self.pins.pop(request_id, None) is None:
            return None
        if (handle := self.handles.get(request_id)) is not None:
            self.close_stream(handle)
        return await self.query(Unpin(request_id)) or 0

    # -- state, and shutdown -------------------------------------------------------------------------------------------

    @property
    def engines(self) -> Sequence[ProcessTransport]:
        return (self,)

    def listen(self, on_step: Callable[[int], object]) -> None:
        """Call `on_step` with the number of tokens of each step that gives a request new tokens."""
        self._listener = on_step

    @property
    def is_running(self) -> bool:
        """True while requests are accepted, also during a restart; False after shutdown or final failure."""
        return self._error is None

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of prompt and output together; 0 before the engine is ready for the first time."""
        return 0 if self._info is None else self._info.max_model_len

    @property
    def summary(self) -> dict[str, Any]:
        """The engine's resolved configuration: device, dtype, num_blocks, kv_bytes, ...; {} before it is ready."""
        return {} if self._info is None else self._info.summary

    @property
    def pid(self) -> int | None:
        """The process id of the engine."""
        return self.supervisor.pid

    def health(self) -> Health:
        return self.supervisor.health()

    async def stats(self) -> StatsSnapshot:
        """Counters and gauges, a fraction of a second old; returns at once, even while the engine is busy or down."""
        num_deferred = self._num_early + sum(not handle.sent for handle in self.handles.values())
        engine, stats = self.past_stats.plus(self.last_stats.engine), self.last_stats
        num_waiting = stats.num_waiting + num_deferred
        return StatsSnapshot(
            engine, stats.kv, stats.num_running, num_waiting, stats.num_swapped, stats.wait_counts, num_deferred
        )

    async def query(self, query: Query[R], /) -> R:
        while True:
            await self._when_up()
            number = next(self._rpc_numbers)
            future = self.rpc_futures[number] = asyncio.get_running_loop().create_future()
            try:
                self._send(ipc.RpcCall(number, query))
                reply = await future
            except _EngineGoneError:
                continue  # call the next engine
            finally:
                self.rpc_futures.pop(number, None)
            if reply.error:
                raise EngineQueryError(reply.error)
            try:
                answer: R = msgspec.convert(reply.value, query.answer_type())
            except msgspec.ValidationError as error:
                raise EngineQueryError(f"the answer to {type(query).__name__} is unusable: {error}") from None
            return answer

    def close(self) -> None:
        """As `Transport.close`, on the event loop."""
        self._on_failed(EngineError("the engine is closed; create a new one"))
        self.supervisor.close()

    # -- messages from the engine --------------------------------------------------------------------------------------

    async def _when_up(self) -> ipc.Ready:
        await self.up.wait()
        if self._error is not None:
            raise copy_error(self._error)
        assert self._info is not None
        return self._info

    def _on_ready(self, ready: ipc.Ready) -> None:
        self._info = ready
        self.up.set()
        pins = {name: self._new_handle(pin, ready) for name, pin in self.pins.items()}
        self.handles = pins | self.handles  # pins first, so that no request takes their blocks
        self._send_unsent()

    def _on_step(self, step: ipc.StepReport) -> None:
        if step.stats is not None:
            self.last_stats = step.stats
        for error in step.errors:
            if error.request_id in self._ended_here:
                self._on_last_update(error.request_id)
            elif (handle := self.handles.pop(error.request_id, None)) is not None:
                handle.fail(rebuild_error(error.error, error.message, error.param, error.code))
                self._on_progress(handle)
        num_tokens = 0
        for update in step.updates:
            if update.request_id in self._ended_here:
                if update.finished:
                    self._on_last_update(update.request_id)
                continue
            if (handle := self.handles.get(update.request_id)) is None:
                continue  # it ended on this side
            try:
                stopped = handle.apply_update(update)
            except ipc.MessageError:
                raise
            except Exception as error:  # of its text: fails this request only
                logger.error("request %s failed", update.request_id, exc_info=error)
                text = f"request {update.request_id} failed: {type(error).__name__}: {error}"
                self._fail(handle, RequestFailedError(text, code="internal_error"))
                continue
            for index in stopped:
                self._send(ipc.StopSample(update.request_id, index))
            num_tokens += handle.count_tokens(update)
            if handle.request.finished:
                del self.handles[update.request_id]
                if handle.request.new.pin and not handle.failure:
                    self.pins[update.request_id] = handle.request.new
                if not update.finished:
                    self._ended_here.add(update.request_id)
            handle.notify()
            self._on_progress(handle)
        if num_tokens:
            self._listener(num_tokens)
        for reply in step.replies:
            future = self.rpc_futures.get(reply.number)
            if future is not None and not future.done():
                future.set_result(reply)

    def _on_last_update(self, request_id: str) -> None:
        """The engine has sent the last update of a request that ended here; a new request may use its id."""
        self._ended_here.remove(request_id)
        handle = self.handles.get(request_id)
        if handle is not None and not handle.sent and (not self.suspects or handle in self.suspects.active):
            self._send_request(handle)

    def _on_down(self) -> None:
        self.up.clear()
        self._outbox.clear()
        self.past_stats = self.past_stats.plus(self.last_stats.engine)
        self.last_stats = StatsSnapshot(EngineStats(), self.last_stats.kv, wait_counts=self.last_stats.wait_counts)
        for future in self.rpc_futures.values():
            if not future.done():
                future.set_exception(_EngineGoneError())
        self._ended_here.clear()
        sent = [handle for handle in self.handles.values() if handle.sent]
        suspects = []
        for handle in sent:
            handle.sent = False
            handle.num_deaths += 1
            if handle.aborting:
                self._finish(handle, "abort")
            elif handle.num_deaths > DEATHS_TO_TRIAL and len(sent) == 1:
                error = f"{handle.num_deaths} engines died while they ran it, the last with no other request"
                self._finish(handle, "error", error)
            elif handle.num_deaths >= DEATHS_TO_TRIAL:
                suspects.append(handle)
        if suspects:
            self.suspects.split(suspects)

    def _on_failed(self, error: OctavoError) -> None:
        if self._error is None:
            # An `EngineError` whatever the cause: later requests are not at fault.
            self._error = error if type(error) is EngineError else EngineError(str(error))
            self._error.__cause__ = error
            self.up.set()
            for handle in self.handles.values():
                handle.fail(EngineError(str(error)))
            self.handles.clear()
            for future in self.rpc_futures.values():
                if not future.done():
                    future.set_exception(copy_error(self._error))

    # -- commands to the engine ----------------------------------------------------------------------------------------

    def _send_unsent(self) -> None:
        """Send the requests that the engine does not have; while there are suspects, only the active ones."""
        for handle in self.suspects.active or list(self.handles.values()):
            if not handle.sent:
                self._send_request(handle)

    def _on_progress(self, handle: RequestHandle) -> None:
        """A request got a token or ended: it is no suspect any more. A failed pin is removed."""
        name = handle.request.request_id
        if (why := handle.failure) and self.pins.pop(name, None) is not None:
            logger.warning("%s is not pinned any more: %s", name, why)
            self.discard_pin(name)
        if self.suspects and self.suspects.clear([handle]):
            self._send_unsent()

    def _send_request(self, handle: RequestHandle) -> None:
        if not self.supervisor.is_up or handle.request.request_id in self._ended_here:
            return
        try:
            self._send(handle.request.add_command())
            handle.sent = True
        except OctavoError as error:  # fails this request only
            del self.handles[handle.request.request_id]
            handle.fail(error)
            self._on_progress(handle)

    def _send(self, command: ipc.Command) -> None:
        """Send all commands of one turn of the loop in one message. Raises as `encode_command`."""
        data = ipc.encode_command(command)
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(data)

    def _flush(self) -> None:
        commands, self._outbox = self._outbox, []
        if commands and self.supervisor.is_up:
            self.supervisor.send(commands)


ProcessClient: TypeAlias = EngineClient[ProcessTransport]


class _EngineGoneError(Exception):
    """The engine died; it never leaves this module."""
