"""Messages and sockets between the engine process and its client.

    client                                                     engine process
    ------                                                     --------------
    Launch  ------------------- lifeline -------------------->
            <------------------ lifeline ----------------------  Heartbeat, a few times a second
    [Command, ...] ------------ channel, once a loop turn ---->
            <------------------ channel, once a step ----------  Ready, then StepReports; EngineFailed at the end

The channel is a ZeroMQ pair over a Unix socket in a private directory. The lifeline is a socket pair that breaks when
either process dies, so the other one notices at once. Messages are msgspec structs, validated by decoding; received
data is never executed. A message that does not decode, or that contradicts what its reader knows, ends the connection
(`MessageError`): the process is replaced, and its requests resume with the tokens that the client has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import zmq
from msgspec import Meta

from octavo.engine.executor import RankPlace
from octavo.engine.kv_events import KVCacheEvent
from octavo.engine.request_update import Count, Index, RequestUpdate, Token
from octavo.engine.stats import StatsSnapshot
from octavo.errors import EngineError, ParameterError, PromptError
from octavo.log_setup import LogSettings
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import INT64, RequestOutputKind, SamplingParams
from octavo.params.validation import INT32

Size: TypeAlias = Annotated[int, Meta(ge=1, le=INT32)]
Int64: TypeAlias = Annotated[int, Meta(ge=-INT64, le=INT64 - 1)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0)]

# -- to the engine process ---------------------------------------------------------------------------------------------


class Placement(msgspec.Struct, array_like=True):
    """The part of the machine that an engine process gets, as one of several.

    cpus            the processors that it may run on
    gpu             its first GPU, counted from the first visible one
    host_bytes      the free memory that it may count on
    reports_cache   its step reports tell what its cache stores and removes
    """

    cpus: list[int]
    gpu: int
    host_bytes: int
    reports_cache: bool = True
    num_gpus: int = 1


class Launch(msgspec.Struct, array_like=True):
    """The first message to an engine process.

    options     fields of `octavo.config.EngineArgs`
    logs        the parent's log settings; None: Python's defaults
    placement   None: the whole machine
    """

    endpoint: str
    options: dict[str, Any]
    logs: LogSettings | None = None
    placement: Placement | None = None


class AddRequest(msgspec.Struct, array_like=True, tag="add"):
    """Add a request, or resume one of an engine that died: `resume` holds the outputs of its live samples, by index.

    prompt, resume   token ids, as int32 in native byte order
    params           fields that differ from the defaults of `SamplingParams`, or `BeamSearchParams` if `is_beam_search`
    """

    request_id: str
    prompt: bytes
    params: dict[str, Any]
    is_beam_search: bool = False
    seed: Int64 = 0
    priority: int = 0
    salt: bytes = b""
    resume: dict[Index, bytes] | None = None
    pin: bool = False
    tenant: int = 0
    index_in_call: int = 0


class AbortRequest(msgspec.Struct, array_like=True, tag="abort"):
    """Abort a request. A last `RequestUpdate` returns its new tokens."""

    request_id: str


class StopSample(msgspec.Struct, array_like=True, tag="stop"):
    """End one sample at a stop string, which the client finds in its text.

    After the last sample a `RequestUpdate` reports that the request has finished.
    """

    request_id: str
    index: Index


class RpcCall(msgspec.Struct, array_like=True, tag="rpc"):
    """Ask a `Query`; an `RpcReply` with the same number has the answer."""

    number: Count
    query: Any


class CloseEngine(msgspec.Struct, array_like=True, tag="close"):
    """Shut the engine process down."""


Command: TypeAlias = AddRequest | AbortRequest | StopSample | RpcCall | CloseEngine

# -- from the engine process -------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """The channel is connected; its directory can be removed."""


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The engine accepts requests. The fields are those of `Engine`; `summary` is for people."""

    vocab_size: Size
    max_model_len: Size
    eos_token_ids: list[Token]
    max_logprobs: int
    summary: dict[str, Any]


class RequestError(msgspec.Struct, array_like=True):
    """A request that the engine rejects: the name of an exception of `octavo.errors`, and its fields."""

    request_id: str
    error: str
    message: str
    param: str | None = None
    code: str | None = None


class RpcReply(msgspec.Struct, array_like=True):
    """The answer to an `RpcCall`, or its error."""

    number: Count
    value: Any = None
    error: str = ""


class StepReport(msgspec.Struct, array_like=True, tag="step"):
    """Everything new since the previous report. `stats` is included a few times a second.

    cache   what the prefix cache has stored and removed, without token ids, if the placement asks for it
    """

    updates: list[RequestUpdate]
    errors: list[RequestError]
    replies: list[RpcReply]
    stats: StatsSnapshot | None = None
    cache: list[KVCacheEvent] = []


class EngineFailed(msgspec.Struct, array_like=True, tag="failed"):
    """The last message of a failing engine: the name of an exception, of `octavo.errors` or any other, and its text."""

    error: str
    message: str


EngineMessage: TypeAlias = Hello | Ready | StepReport | EngineFailed


class Heartbeat(msgspec.Struct, array_like=True, gc=False):
    """Sign of life of the engine process, with its progress.

    num_steps   steps whose results have arrived
    waited_s    seconds since the last result, or since work arrived; None: there is no work
    allowed_s   limit for `waited_s`, from the times of earlier steps of that size
    phase       the current phase of the start
    place       where tensor parallel ranks are in the current step
    ranks       where each of them is, at any time; empty for one rank
    failure     why the ranks have ended; "" while they live
    """

    num_steps: Count = 0
    waited_s: Seconds | None = None
    allowed_s: Seconds = 0.0
    phase: str = ""
    place: str = ""
    ranks: tuple[RankPlace, ...] = ()
    failure: str = ""


# -- tokens and parameters ---------------------------------------------------------------------------------------------


def pack_tokens(token_ids: Any) -> bytes:
    return array("i", token_ids).tobytes()


def unpack_tokens(data: bytes) -> array[int]:
    """Raises `PromptError` if the size is no multiple of an int32's."""
    token_ids = array("i")
    if len(data) % token_ids.itemsize:
        text = f"{len(data)} bytes of token ids, which take {token_ids.itemsize} bytes each; send the message again"
        raise PromptError(text, param="prompt", code="invalid_token_id")
    token_ids.frombytes(data)
    return token_ids


DEFAULTS = SamplingParams()
CLIENT_ONLY = frozenset(
    {"bad_words", "detokenize", "output_kind", "skip_special_tokens", "spaces_between_special_tokens"}
)
"""Parameters about text and output, which only the client process uses. Bad words are sent as tokens."""


def params_to_wire(params: SamplingParams | BeamSearchParams) -> dict[str, Any]:
    """The parameters that differ from their defaults, without client-only ones."""
    changed = {}
    for f in fields(params):
        default = getattr(DEFAULTS, f.name) if isinstance(params, SamplingParams) else f.default
        value = getattr(params, f.name)
        if f.init and value != default and f.name not in CLIENT_ONLY:
            changed[f.name] = value
    if isinstance(params, SamplingParams):
        changed.pop("stop", None)
    return changed


def params_from_wire(changed: Mapping[str, Any], is_beam_search: bool) -> SamplingParams | BeamSearchParams:
    """Inverse of `params_to_wire`, with full validation. Raises `ParameterError` or `UnknownOptionError`."""
    if is_beam_search:
        return BeamSearchParams(**changed)
    return SamplingParams(**changed, detokenize=False, output_kind=RequestOutputKind.CUMULATIVE)


_COMMAND = msgspec.msgpack.Decoder(Command)


def encode_command(command: Command) -> msgspec.Raw:
    """Encode a command, and decode it as the engine would, which must never receive an unreadable one.

    Raises `ParameterError` for a command with an invalid field, such as an integer of more than 64 bits.
    """
    try:
        data = msgspec.msgpack.encode(command)
        _COMMAND.decode(data)
    except Exception as error:
        raise ParameterError(f"the request cannot be sent to the engine: {type(error).__name__}: {error}") from error
    return msgspec.Raw(data)


# -- reading -----------------------------------------------------------------------------------------------------------


MAX_SHOWN = 120
"""Characters of a reason in a log line."""


class MessageError(EngineError):
    """A message that its sender cannot have meant; the connection is of no use any more."""


T = TypeVar("T")
_COMMANDS = msgspec.msgpack.Decoder(list[Command])
_MESSAGE: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)
_HEARTBEAT = msgspec.msgpack.Decoder(Heartbeat)


def read_commands(data: bytes) -> list[Command]:
    """Decode what an engine receives. Raises `MessageError`, as the other readers do."""
    return _read(_COMMANDS, data)


def read_message(data: bytes) -> EngineMessage:
    """Decode what a client receives on the channel."""
    return _read(_MESSAGE, data)


def read_heartbeat(data: bytes) -> Heartbeat:
    return _read(_HEARTBEAT, data)


def _read(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except Exception as error:  # also RecursionError and UnicodeDecodeError
        detail = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_SHOWN]
        raise MessageError(f"a message of {len(data)} bytes is unreadable: {detail}") from error


# -- the channel -------------------------------------------------------------------------------------------------------


DRAIN_S = 0.003
"""Longest run of reading messages before other tasks on the loop run."""


class Channel:
    """One end of the ZeroMQ pair. Sending never blocks: unread messages are queued.

    Messages sent without a peer are lost; the lifeline detects a missing peer. Each part of a multipart message is a
    message to its reader.
    """

    def __init__(self, *, bind: str = "", connect: str = "") -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        try:
            if bind:
                self._socket.bind(bind)
            else:
                self._socket.connect(connect)
        except BaseException:
            self.close()
            raise
        self._encoder = msgspec.msgpack.Encoder()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd = -1
        self._on_data: Callable[[bytes], None] | None = None

    def send(self, message: Any) -> None:
        self.send_bytes(self._encoder.encode(message))

    def send_bytes(self, data: bytes) -> None:
        with contextlib.suppress(zmq.Again):
            self._socket.send(data, zmq.NOBLOCK)
        if self._loop is not None:  # sending may consume the edge that signals an arrival
            self._loop.call_soon(self._drain)

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """The next message; None after `timeout_s` without one. A timeout of None waits for ever."""
        if self._socket.poll(None if timeout_s is None else round(timeout_s * 1000)):
            return self._socket.recv()
        return None

    def attach(self, loop: asyncio.AbstractEventLoop, on_data: Callable[[bytes], None]) -> None:
        """Call `on_data` on this loop with each message from now on."""
        self._loop, self._on_data, self._fd = loop, on_data, int(self._socket.getsockopt(zmq.FD))
        loop.add_reader(self._fd, self._drain)
        loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Read all available messages, since the descriptor signals edges; lets other tasks run if that takes long."""
        begin = time.monotonic()
        while self._on_data is not None and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            try:
                self._on_data(self._socket.recv(zmq.NOBLOCK))
            except BaseException:
                if self._loop is not None:  # the messages after a failing one are read, too
                    self._loop.call_soon(self._drain)
                raise
            if time.monotonic() - begin > DRAIN_S and self._loop is not None:
                self._loop.call_soon(self._drain)
                return

    def close(self, linger_s: float = 0.0) -> None:
        """Wait up to `linger_s` for sent messages to leave. A second call does nothing."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._loop = self._on_data = None
        if not self._socket.closed:
            self._socket.close(linger=round(linger_s * 1000))
            self._context.term()


class Lifeline:
    """One end of a socket pair that keeps message boundaries."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @staticmethod
    def pair() -> tuple[Lifeline, Lifeline]:
        parent, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Lifeline(parent), Lifeline(child)

    @staticmethod
    def inherited(fd: int) -> Lifeline:
        return Lifeline(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any, *, wait: bool = False) -> None:
        """Send a message; without `wait` it is dropped if the buffer is full. Raises `OSError` if the peer is gone."""
        with contextlib.suppress(BlockingIOError):
            self._socket.send(msgspec.msgpack.encode(message), 0 if wait else socket.MSG_DONTWAIT)

    def receive(self, *, wait: bool = True) -> bytes | None:
        """The next message; b"" if the peer is gone, None if there is none and `wait` is False."""
        try:
            return self._socket.recv(1 << 20, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionError:
            return b""

    def close(self) -> None:
        self._socket.close()


def endpoint_in(directory: str) -> str:
    return "ipc://" + os.path.join(directory, "engine")
