"""What the process of an engine and the process of its callers say to each other.

    callers                                                   engine
    -------                                                   ------
    Launch  ------------------- lifeline ------------------>
            <------------------ lifeline --------------------  Heartbeat, a few times a second
    [AddRequest, AbortRequest, StopSample, RpcCall] --- channel, once a turn ------->
            <------------------ channel, once a step --------  Ready, then Step after Step; Failed at last

The channel is a ZeroMQ pair over a Unix socket in a directory of its own. The lifeline is a pair of sockets that dies
with either process, and each notices at once. Messages are msgspec structs, checked as they are decoded; nothing that
arrives is executed. A part of a message that cannot be read is dropped with the request that it names (`BadMessage`);
the rest of the message counts.
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
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
import zmq
from msgspec import Meta

from octavo.core.plan import TokenLogprobs
from octavo.engine.beam_search import Hypothesis
from octavo.engine.stats import StatsSnapshot
from octavo.errors import ParameterError, PromptError
from octavo.log_setup import LogSettings
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import INT64, RequestOutputKind, SamplingParams
from octavo.params.validation import INT32

MAX_SAMPLES = 128
"""Of a request: `SamplingParams.n` and `BeamSearchParams.beam_width` have no more."""
Index: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_SAMPLES)]
Count: TypeAlias = Annotated[int, Meta(ge=0)]
Size: TypeAlias = Annotated[int, Meta(ge=1, le=INT32)]
Token: TypeAlias = Annotated[int, Meta(ge=0, le=INT32)]
Int64: TypeAlias = Annotated[int, Meta(ge=-INT64, le=INT64 - 1)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0)]
FinishReason: TypeAlias = Literal["", "stop", "length", "abort", "error", "pruned"]

# -- to the engine -----------------------------------------------------------------------------------------------------


class Launch(msgspec.Struct, array_like=True):
    """The first thing that an engine's process hears. `options` are those of `octavo.config.EngineArgs`; its logs are
    as its parent's are, None: as Python has them."""

    endpoint: str
    options: dict[str, Any]
    logs: LogSettings | None = None


class AddRequest(msgspec.Struct, array_like=True, tag="add"):
    """A new request, or one of an engine that has died: `resume` holds the outputs of the samples that live, by index.

    prompt, outputs   token ids, as int32 in native byte order
    params            what differs from the defaults of `SamplingParams`; of `BeamSearchParams` if `is_beam_search`
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
    rank: int = 0


class AbortRequest(msgspec.Struct, array_like=True, tag="abort"):
    """Abort a request. A last `RequestUpdate` returns its tokens."""

    request_id: str


class StopSample(msgspec.Struct, array_like=True, tag="stop"):
    """End one sample at a stop string, which the client finds in its text.

    After the last sample a `RequestUpdate` reports that the request has finished.
    """

    request_id: str
    index: Index


class RpcCall(msgspec.Struct, array_like=True, tag="rpc"):
    """`question` is one that the engine's `EngineServer` knows; an `RpcReply` of that number comes back."""

    number: Count
    question: str
    argument: str = ""


class CloseEngine(msgspec.Struct, array_like=True, tag="close"):
    """Leave."""


Command: TypeAlias = AddRequest | AbortRequest | StopSample | RpcCall | CloseEngine

# -- from the engine ---------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """The channel stands; its directory is not needed any more."""


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The engine takes requests. The fields are those of `Engine`; `summary` is for people."""

    vocab_size: Size
    max_model_len: Size
    eos_token_ids: list[Token]
    max_logprobs: int
    summary: dict[str, Any]


class SampleUpdate(msgspec.Struct, array_like=True, gc=False):
    """What is new of one sample: the tokens of its output from `position` on. `logprobs` has an entry for each of them,
    where they are asked for."""

    index: Index
    token_ids: list[Token]
    finish_reason: FinishReason = ""
    stop_token: Token | None = None
    logprobs: list[TokenLogprobs] | None = None
    position: Count = 0


class RequestStats(msgspec.Struct, array_like=True, gc=False):
    """Of a whole request, told with its first tokens and its last. Times are the monotonic clock's, in seconds."""

    num_cached_tokens: Count
    num_preemptions: Count
    scheduled_time: float | None
    error: str = ""
    hypotheses: list[Hypothesis] | None = None


class RequestUpdate(msgspec.Struct, array_like=True, gc=False):
    """What is new of one request. `prompt_logprobs` are those of the prompt's tokens from `prompt_position` on."""

    request_id: str
    samples: list[SampleUpdate]
    finished: bool = False
    facts: RequestStats | None = None
    prompt_position: Count = 0
    prompt_logprobs: list[TokenLogprobs] | None = None


class RequestError(msgspec.Struct, array_like=True):
    """A request that the engine does not take: a class of `octavo.errors`, and what it says."""

    request_id: str
    error: str
    message: str
    param: str | None = None
    code: str | None = None


class RpcReply(msgspec.Struct, array_like=True):
    number: Count
    value: Any = None
    error: str = ""


class StepReport(msgspec.Struct, array_like=True, tag="step"):
    """All that is new since the last one. `stats` comes along a few times a second."""

    updates: list[RequestUpdate]
    refusals: list[RequestError]
    answers: list[RpcReply]
    stats: StatsSnapshot | None = None


class EngineFailed(msgspec.Struct, array_like=True, tag="failed"):
    """The last words of an engine that cannot go on: a class of `octavo.errors`, or any other's name, and a line."""

    error: str
    message: str


EngineMessage: TypeAlias = Hello | Ready | StepReport | EngineFailed


class Heartbeat(msgspec.Struct, array_like=True, gc=False):
    """The engine's process is alive, and how far it is.

    num_steps   steps whose results have come
    waited_s    how long it has been since the last of them, or since there was something to do; None: nothing is
    allowed_s   how long that may be, going by steps of that size before
    phase       what it does while it starts
    """

    num_steps: Count = 0
    waited_s: Seconds | None = None
    allowed_s: Seconds = 0.0
    phase: str = ""


# -- tokens and parameters ---------------------------------------------------------------------------------------------


def pack(token_ids: Any) -> bytes:
    return array("i", token_ids).tobytes()


def unpack(data: bytes) -> array[int]:
    """Raises `PromptError` for what is no list of int32."""
    token_ids = array("i")
    if len(data) % token_ids.itemsize:
        text = f"{len(data)} bytes are no token ids, which take {token_ids.itemsize} each; send the message again"
        raise PromptError(text, param="prompt", code="invalid_token_id")
    token_ids.frombytes(data)
    return token_ids


DEFAULTS = SamplingParams()
HERE = frozenset({"bad_words", "detokenize", "output_kind", "skip_special_tokens", "spaces_between_special_tokens"})
"""Parameters that concern text and telling, and so the process of the callers alone. A bad word travels as tokens."""


def params_to_wire(params: SamplingParams | BeamSearchParams) -> dict[str, Any]:
    """What differs from the defaults."""
    said = {}
    for f in fields(params):
        default = getattr(DEFAULTS, f.name) if isinstance(params, SamplingParams) else f.default
        value = getattr(params, f.name)
        if f.init and value != default and f.name not in HERE:
            said[f.name] = value
    if isinstance(params, SamplingParams):
        said.pop("stop", None)
    return said


def params_from_wire(said: Mapping[str, Any], is_beam_search: bool) -> SamplingParams | BeamSearchParams:
    """Checked as any caller's are. Raises `ParameterError` or `UnknownOptionError`."""
    if is_beam_search:
        return BeamSearchParams(**said)
    return SamplingParams(**said, detokenize=False, output_kind=RequestOutputKind.CUMULATIVE)


_COMMAND = msgspec.msgpack.Decoder(Command)


def encoded(command: Command) -> msgspec.Raw:
    """As it goes to the engine, read again as the engine would: what that could not read would end it.

    Raises `ParameterError` for a command that holds what it must not, an integer of more than 64 bits for one.
    """
    try:
        data = msgspec.msgpack.encode(command)
        _COMMAND.decode(data)
    except Exception as error:
        raise ParameterError(f"the engine cannot be told of it: {type(error).__name__}: {error}") from error
    return msgspec.Raw(data)


# -- messages that cannot be read --------------------------------------------------------------------------------------

MAX_SHOWN = 120
DELIVERED = "delivered"
"""The question by which a client sees whether it knows all that an engine has told."""
BAD_MESSAGE = "bad_message"
"""The code of a request that ends because of one."""


class BadMessage(NamedTuple):
    """A message, or a part of one, that is dropped.

    what        which part of which message
    why         what is wrong with it
    request_id  of the request that it names, None where no name can be read
    is_add      it asks for a new request, or seems to: one of that name that runs already is not touched
    """

    what: str
    why: str
    request_id: str | None = None
    is_add: bool = False

    def __str__(self) -> str:
        name = "no request" if self.request_id is None else f"request {self.request_id!r:.{MAX_SHOWN}}"
        return f"{self.what} of {name} cannot be used and is dropped: {' '.join(self.why.split())[:MAX_SHOWN]}"


_COMMAND_LIST = msgspec.msgpack.Decoder(list[Command])
_RAW_LIST = msgspec.msgpack.Decoder(list[msgspec.Raw])
_MESSAGE = msgspec.msgpack.Decoder(EngineMessage)
_PARTS: tuple[tuple[str, msgspec.msgpack.Decoder[Any]], ...] = (
    ("an update", msgspec.msgpack.Decoder(RequestUpdate)),
    ("a refusal", msgspec.msgpack.Decoder(RequestError)),
    ("an answer", msgspec.msgpack.Decoder(RpcReply)),
)
"""Of a `StepReport`, in order."""


def read_commands(data: bytes) -> tuple[list[Command], list[BadMessage]]:
    """What an engine receives: the commands that can be read, and what cannot."""
    try:
        return _COMMAND_LIST.decode(data), []
    except Exception as error:  # besides msgspec's own, RecursionError and UnicodeDecodeError
        return _read_each("a command", data, _COMMAND, 1, error)


def read_message(data: bytes) -> tuple[EngineMessage | None, list[BadMessage]]:
    """What an engine's client receives, as `read_commands`."""
    try:
        return _MESSAGE.decode(data), []
    except Exception as error:
        try:
            tag, *parts = _RAW_LIST.decode(data)
            if msgspec.msgpack.decode(tag) != "step" or len(parts) < len(_PARTS):
                raise ValueError("it is no step")
        except Exception:
            return None, [BadMessage(f"a message of {len(data)} bytes", str(error))]
    read = [_read_each(what, part, decoder, 0) for (what, decoder), part in zip(_PARTS, parts, strict=False)]
    updates, refusals, answers = (good for good, _ in read)
    return StepReport(updates, refusals, answers), [bad for _, bads in read for bad in bads]


def _read_each(
    what: str, data: bytes, decoder: msgspec.msgpack.Decoder[Any], place: int, error: Exception | None = None
) -> tuple[list[Any], list[BadMessage]]:
    """The elements of a list, each by itself. `place`: where an element has the name of its request."""
    try:
        elements = _RAW_LIST.decode(data)
    except Exception as none:
        return [], [BadMessage(f"a message of {len(data)} bytes", str(error or none))]
    good, bad = [], []
    for element in elements:
        try:
            good.append(decoder.decode(element))
        except Exception as error:
            bad.append(_named(BadMessage(what, f"{type(error).__name__}: {error}"), element, place))
    return good, bad


def _named(bad: BadMessage, element: msgspec.Raw, place: int) -> BadMessage:
    with contextlib.suppress(Exception):
        fields = [msgspec.msgpack.decode(field) for field in _RAW_LIST.decode(element)[: place + 1]]
        if isinstance(fields[place], str):
            return bad._replace(request_id=fields[place], is_add=place > 0 and fields[0] == "add")
    return bad


def sendable(text: str) -> str:
    """Text that a message can hold: without lone surrogates, which the name of a file may bring."""
    return text.encode("utf-8", "backslashreplace").decode()


# -- the channel -------------------------------------------------------------------------------------------------------


DRAIN_S = 0.003
"""How long messages are taken in before others on the loop have their turn."""


class Channel:
    """One end of the pair. Sending never waits: what the other side has not read yet is kept. What is sent when there
    is no other side is lost; whether there is one, the lifeline knows. Each part of a message of several is a message
    to its reader."""

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
        with contextlib.suppress(zmq.Again):
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        if self._loop is not None:  # sending may have swallowed the signal that something came
            self._loop.call_soon(self._drain)

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """The next message; waits at most that long for it, for ever if None."""
        if self._socket.poll(None if timeout_s is None else round(timeout_s * 1000)):
            return self._socket.recv()
        return None

    def attach(self, loop: asyncio.AbstractEventLoop, on_data: Callable[[bytes], None]) -> None:
        """From now on each message is handed over on this loop."""
        self._loop, self._on_data, self._fd = loop, on_data, int(self._socket.getsockopt(zmq.FD))
        loop.add_reader(self._fd, self._drain)
        loop.call_soon(self._drain)

    def _drain(self) -> None:
        """The descriptor signals edges: all that is there must be read before it signals again. Where that takes long,
        others on the loop have their turn in between."""
        begin = time.monotonic()
        while self._on_data is not None and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            try:
                self._on_data(self._socket.recv(zmq.NOBLOCK))
            except BaseException:
                if self._loop is not None:  # what comes behind a message that fails is read all the same
                    self._loop.call_soon(self._drain)
                raise
            if time.monotonic() - begin > DRAIN_S and self._loop is not None:
                self._loop.call_soon(self._drain)
                return

    def close(self, linger_s: float = 0.0) -> None:
        """Waits at most that long for what was sent to get out. A second call does nothing."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._loop = self._on_data = None
        if not self._socket.closed:
            self._socket.close(linger=round(linger_s * 1000))
            self._context.term()


class Lifeline:
    """One end of a pair of sockets. A message is read as it was written, or not at all."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @staticmethod
    def pair() -> tuple[Lifeline, Lifeline]:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Lifeline(here), Lifeline(there)

    @staticmethod
    def inherited(fd: int) -> Lifeline:
        return Lifeline(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any, *, wait: bool = False) -> None:
        """Without `wait`, dropped if the other side has not read for long. Raises `OSError` if it is gone."""
        with contextlib.suppress(BlockingIOError):
            self._socket.send(msgspec.msgpack.encode(message), 0 if wait else socket.MSG_DONTWAIT)

    def receive(self, *, wait: bool = True) -> bytes | None:
        """The next message, b"" when the other side is gone; None when there is none and nobody waits."""
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
