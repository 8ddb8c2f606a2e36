"""`EngineClient`: an engine in a process of its own, for programs on an event loop (a `serve.backend.EngineInterface`).

The text is made in this process, the tokens in the other one. When that one dies or hangs, it is started again and is
given every request as far as it had come (`engine.mirror`): its readers notice a pause, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

from octavo.checkpoint.generation_config import sampling_defaults
from octavo.checkpoint.resolve import open_checkpoint
from octavo.config import EngineArgs
from octavo.core.kv_cache_manager import KVStats
from octavo.engine.engine import PIN_PARAMS, check_priority, check_prompt, draw_seed, pin_id
from octavo.engine.failure_bisection import FailureBisection
from octavo.engine.outputs import RequestOutput, request_failed_error
from octavo.engine.process.ipc import (
    BAD_MESSAGE,
    DELIVERED,
    AbortRequest,
    BadMessage,
    Command,
    Ready,
    RequestUpdate,
    RpcCall,
    RpcReply,
    StepReport,
    StopSample,
    encoded,
)
from octavo.engine.process.supervisor import ENGINE_COMMAND, EngineTimeouts, Supervisor, rebuild_error
from octavo.engine.process.thread import again
from octavo.engine.stats import EngineStats, Health, StatsSnapshot
from octavo.errors import EngineError, EngineQueryError, OctavoError, ParameterError, RequestFailedError
from octavo.frontend.client_request import ClientRequest, TokensLostError
from octavo.frontend.cooperative import YIELD_POINT, run_cooperatively
from octavo.frontend.input_processor import InputProcessor, Messages, Prompt
from octavo.frontend.interface import ClientStats
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import RequestOutputKind, SamplingParams
from octavo.text import chat_template
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger("octavo.client")

DEATHS_TO_TRIAL = 2
"""Engines that may die with a request before it has got a token further; then the next ones are given halves of such
requests. If one dies that had no other request, it was the request's doing, and the request is given up."""
MAX_LOSSES = 3
"""Times that a request is begun again because messages about it were lost."""
KILLS_A_DEATH = 8
"""Engines that are killed count as one that died: a request that the system's memory does not suffice for must end."""


class _Stream:
    """A request and its reader. What has come is put together when it is read: whoever reads slowly costs no memory.

    num_deaths   of engines that had this request, since it last got on
    num_kills    how many of them somebody killed: a person, or a system without memory, which is seldom its doing
    num_losses   times that messages about it were lost, since it last got on
    begun        its first tokens have come
    sent         the engine that runs has it
    ending       it is to be aborted, and only the engine knows with what answers (a beam search)
    """

    def __init__(self, mirror: ClientRequest, *, only_final: bool) -> None:
        self.mirror = mirror
        self.only_final = only_final
        self.news = asyncio.Event()
        self.error: OctavoError | None = None
        self.num_deaths = self.num_kills = self.num_losses = 0
        self.begun = self.sent = self.ending = False

    @property
    def blame(self) -> float:
        return self.num_deaths - self.num_kills + self.num_kills / KILLS_A_DEATH

    @property
    def failure(self) -> str:
        """Why it ended without what it was for; "" while it has not, and of one that did well."""
        request = self.mirror.state.request
        if self.error is not None:
            return str(self.error)
        bad = [s.finish_reason for s in request.finished_sequences if s.finish_reason in ("abort", "error")]
        return request.error or bad[0] if bad else ""

    def tell(self) -> None:
        if self.mirror.finished or not self.only_final:
            self.news.set()

    def take_in(self, update: RequestUpdate) -> list[int]:
        """Returns the samples that end in a stop string now."""
        stopped = self.mirror.take_in(update)
        self.num_deaths = self.num_kills = self.num_losses = 0
        return stopped

    def num_new(self, update: RequestUpdate) -> int:
        """Tokens that an update, taken in, stands for: its own, and with the first of them what was computed of the
        prompt, though that may have taken several steps. So does vLLM count."""
        count = sum(len(sample.token_ids) for sample in update.samples)
        if count and not self.begun:
            self.begun, request = True, self.mirror.state.request
            count += len(request.prompt_token_ids) - request.num_cached_tokens
        return count

    def fail(self, error: OctavoError) -> None:
        self.error = error
        self.news.set()

    async def read(self) -> RequestOutput:
        await self.news.wait()
        self.news.clear()
        await run_cooperatively(YIELD_POINT for _ in self.mirror.state.prepare())
        if self.error is not None:
            raise again(self.error)
        output = self.mirror.output()
        if any(c.finish_reason == "error" for c in output.outputs):
            raise request_failed_error(output)
        return output


class EngineClient:
    """Make it, then `await start()`; everything else on the same event loop. The options are those of `EngineArgs`.

        client = EngineClient("smollm2-135m-instruct")
        await client.start()

    command   how the engine's process is started; limits: when it counts as hung
    on_step   an attribute: called with how many tokens a step was about, unless no request got one by it

    Making one raises what a model or an option without which nothing can start deserves (see `LLM`).
    """

    def __init__(
        self,
        model: str,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        limits: EngineTimeouts | None = None,
        **options: Any,
    ) -> None:
        args = EngineArgs(model=str(model), **options)
        checkpoint = open_checkpoint(args.model, revision=args.revision, weights=args.load_format != "dummy")
        template = None if args.chat_template is None else chat_template.load(args.chat_template)
        tokenizer = None if args.skip_tokenizer_init else Tokenizer.from_checkpoint(checkpoint, chat_template=template)
        self._prompts = InputProcessor(tokenizer)
        self._default_params = sampling_defaults(args.generation_config, checkpoint).params
        self._supervisor = Supervisor(
            asdict(args),
            on_ready=self._on_ready,
            on_step=self._on_step,
            on_bad=self._on_bad,
            on_down=self._on_down,
            on_failed=self._on_failed,
            command=command,
            limits=limits,
        )
        self._seeds = random.Random(args.seed)
        self._names = itertools.count()
        self._questions = itertools.count()
        self._streams: dict[str, _Stream] = {}  # that have not finished, oldest first
        self._num_early = 0  # requests that no stream is opened for before an engine is up
        self._ending: set[str] = set()  # whose streams are gone, while the engine may still tell of them
        self._pins: dict[str, _Pin] = {}  # by request id; the next engine computes them again, as requests
        self._asked: dict[int, asyncio.Future[RpcReply]] = {}
        self._outbox: list[msgspec.Raw] = []
        self._suspects: FailureBisection[_Stream] = FailureBisection()  # that several engines died over
        self._audit: _Audit | None = None
        self._will_audit = False
        self._up = asyncio.Event()  # an engine runs, or none ever will again
        self._error: OctavoError | None = None
        self._info: Ready | None = None
        self._stats = StatsSnapshot(EngineStats(), None)
        self._past = EngineStats()  # of engines that have died
        self.on_step: Callable[[int], object] = lambda count: None

    async def start(self) -> None:
        """Start the engine, and wait until it takes requests. Raises the root cause if it does not come up."""
        try:
            await self._supervisor.start()
        except OctavoError as error:
            self._on_failed(error)
            raise

    # -- generating ----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        salt: bytes = b"",
        tenant: int = 0,
        rank: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `AsyncLLM.generate`. While the engine is being started (again), requests wait."""
        params = self._prompts.prepare_params(self._default_params if sampling_params is None else sampling_params)
        text, token_ids = await self._prompts.encode_async(prompt)
        self._num_early += 1
        try:
            info = await self._when_up()
        finally:
            self._num_early -= 1
        check_prompt(token_ids, info.vocab_size)
        check_priority(priority)
        name = f"octavo-{next(self._names)}" if request_id is None else request_id
        if name in self._streams:
            raise ParameterError(f"a request {name!r} is running already; ids must differ", param="request_id")
        mirror = ClientRequest(
            name,
            token_ids,
            params,
            seed=draw_seed(self._seeds) if getattr(params, "seed", None) is None else 0,
            eos_token_ids=info.eos_token_ids,
            prompt=text,
            priority=priority,
            salt=salt,
            tenant=tenant,
            rank=rank,
            make_detokenizer=self._prompts.make_detokenizer,
            vocab_size=info.vocab_size,
        )
        kind = params.output_kind if isinstance(params, SamplingParams) else RequestOutputKind.FINAL_ONLY
        stream = self._open(mirror, only_final=kind is RequestOutputKind.FINAL_ONLY)
        try:
            while True:
                output = await stream.read()
                yield output
                if output.finished:
                    return
        finally:
            self._leave(stream)

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        salt: bytes = b"",
        **template: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `AsyncLLM.chat`."""
        prompt = await asyncio.to_thread(self._prompts.chat, messages, **template)
        run = self.generate(prompt, sampling_params, request_id, priority=priority, salt=salt)
        async with contextlib.aclosing(run):
            async for output in run:
                yield output

    async def abort(self, request_id: str) -> bool:
        """End a request, whatever it is doing; its iterator ends with what there is. Whether it was running."""
        stream = self._streams.get(request_id)
        if stream is None:
            return False
        if stream.sent:
            self._send(AbortRequest(request_id))
        if stream.sent and stream.mirror.state.search is not None:
            stream.ending = True
        else:
            self._end(stream, "abort")
        return True

    def _open(self, mirror: ClientRequest, *, only_final: bool) -> _Stream:
        stream = self._streams[mirror.request_id] = _Stream(mirror, only_final=only_final)
        if not self._suspects:
            self._give(stream)
        return stream

    def _leave(self, stream: _Stream) -> None:
        """Its reader has gone."""
        if self._streams.get(stream.mirror.request_id) is stream:
            del self._streams[stream.mirror.request_id]
            if stream.sent:
                self._send(AbortRequest(stream.mirror.request_id))
                self._ending.add(stream.mirror.request_id)
            self._settle(stream)
        stream.mirror.release()

    def _end(self, stream: _Stream, reason: str, error: str = "") -> None:
        """With what there is, and without the engine."""
        del self._streams[stream.mirror.request_id]
        if stream.sent:
            self._ending.add(stream.mirror.request_id)
        stream.mirror.end(reason, error)
        stream.tell()
        self._settle(stream)

    def _fail(self, stream: _Stream, error: OctavoError) -> None:
        """Alone, though the engine may have it."""
        name = stream.mirror.request_id
        del self._streams[name]
        if stream.sent:
            self._send(AbortRequest(name))
            self._ending.add(name)
        stream.fail(error)
        self._settle(stream)

    # -- prompts that stay ---------------------------------------------------------------------------------------------

    async def pin_prefix(self, prefix: Prompt | Messages, name: str | None = None, *, salt: bytes = b"") -> str:
        """As `LLM.pin_prefix`, for requests of that salt. An engine that takes this one's place pins it anew."""
        token_ids = await asyncio.to_thread(self._prompts.encode_prefix, prefix)
        name = str(next(self._names)) if name is None else name
        check_prompt(token_ids, (await self._when_up()).vocab_size)
        if (request_id := pin_id(name)) in self._pins or request_id in self._streams:
            raise ParameterError(f"{name!r} is pinned already; unpin it, or take another name", param="name")
        pin = _Pin(token_ids, salt)
        stream = self._open(pin.mirror(request_id), only_final=True)
        try:
            await stream.read()
        except BaseException:
            self._give_back(request_id)
            raise
        finally:
            self._leave(stream)
        self._pins[request_id] = pin
        return name

    def _give_back(self, request_id: str) -> None:
        """The blocks of a pin that came to nothing: the engine may have computed it already."""
        self._send(RpcCall(next(self._questions), "unpin", request_id.removeprefix(pin_id(""))))

    async def unpin_prefix(self, name: str) -> int:
        """Give back what was pinned under that name; how many blocks that are. Who runs with them goes on."""
        if self._pins.pop(pin_id(name), None) is None:
            raise ParameterError(f"nothing of the name {name!r} is pinned", param="name", code="not_found")
        if (stream := self._streams.get(pin_id(name))) is not None:
            self._leave(stream)
        return int(await self._ask("unpin", name) or 0)

    # -- looking, and leaving ------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        return self._prompts.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without sampling_params gets: from the model's generation_config.json, as `LLM` has it."""
        return self._default_params

    @property
    def is_running(self) -> bool:
        """Whether requests are taken: neither shut down nor given up. True while the engine is started again."""
        return self._error is None

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together, at most; 0 before the engine is ready for the first time."""
        return 0 if self._info is None else self._info.max_model_len

    @property
    def summary(self) -> dict[str, Any]:
        """What the engine settled on: device, dtype, num_blocks, kv_bytes, ...; empty before it is ready."""
        return {} if self._info is None else self._info.summary

    @property
    def pid(self) -> int | None:
        """Of the engine's process."""
        return self._supervisor.pid

    def health(self) -> Health:
        return self._supervisor.health()

    async def stats(self) -> StatsSnapshot:
        """At most a moment old; at once, also while the engine is busy or away."""
        num_held = self._num_early + sum(not stream.sent for stream in self._streams.values())
        engine, stats = self._past.plus(self._stats.engine), self._stats
        num_waiting = stats.num_waiting + num_held
        return ClientStats(engine, stats.kv, stats.num_running, num_waiting, stats.num_swapped, stats.waits, num_held)

    async def kv_stats(self) -> KVStats:
        """The KV cache between two steps."""
        return KVStats(**await self._ask("kv_stats"))

    async def reset_prefix_cache(self) -> int:
        """Forget all cached blocks; returns how many there were."""
        return int(await self._ask("reset_prefix_cache"))

    async def debug_request(self, request_id: str) -> dict[str, Any] | None:
        answer: dict[str, Any] | None = await self._ask("debug_request", request_id)
        return answer

    async def debug_kv(self) -> dict[str, Any]:
        answer: dict[str, Any] = await self._ask("debug_kv")
        return answer

    async def view_rpc(self, question: str, argument: str) -> Any:
        return await self._ask(question, argument)

    async def _ask(self, question: str, argument: str = "") -> Any:
        while True:
            await self._when_up()
            number = next(self._questions)
            future = self._asked[number] = asyncio.get_running_loop().create_future()
            try:
                self._send(RpcCall(number, question, argument))
                answer = await future
            except _Gone:
                continue  # the next engine may know
            finally:
                self._asked.pop(number, None)
            if answer.error:
                raise EngineQueryError(answer.error)
            return answer.value

    def shutdown(self) -> None:
        """End everything; iterators get an `EngineError`. On the event loop; a second call does nothing."""
        self._on_failed(EngineError("the engine is closed; make a new one"))
        self._supervisor.close()

    async def __aenter__(self) -> EngineClient:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    # -- what comes from the engine ------------------------------------------------------------------------------------

    async def _when_up(self) -> Ready:
        await self._up.wait()
        if self._error is not None:
            raise again(self._error)
        assert self._info is not None
        return self._info

    def _on_ready(self, ready: Ready) -> None:
        self._info = ready
        self._up.set()
        pins = {name: _Stream(pin.mirror(name), only_final=True) for name, pin in self._pins.items()}
        self._streams = pins | self._streams  # first of all, so that no request stands in their way
        self._feed()

    def _on_step(self, step: StepReport) -> None:
        if step.stats is not None:
            if step.stats.engine.num_bad_messages > self._stats.engine.num_bad_messages:
                self._look_for_losses()
            self._stats = step.stats
        for refusal in step.refusals:
            if refusal.request_id in self._ending:
                self._ended(refusal.request_id)
            elif (stream := self._streams.pop(refusal.request_id, None)) is not None:
                stream.fail(rebuild_error(refusal.error, refusal.message, refusal.param, refusal.code))
                self._settle(stream)
        num_new = 0
        for update in step.updates:
            if update.request_id in self._ending:  # its reader has gone
                if update.finished:
                    self._ended(update.request_id)
                continue
            if (stream := self._streams.get(update.request_id)) is None:
                continue  # it was given up here
            try:
                stopped = stream.take_in(update)
            except TokensLostError as error:  # begun again, if they really are
                self._on_bad(BadMessage("an update", f"request {update.request_id!r}: {error}"))
                continue
            except Exception as error:  # its own alone
                self._on_bad(BadMessage("an update", str(error), update.request_id))
                continue
            for index in stopped:
                self._send(StopSample(update.request_id, index))
            num_new += stream.num_new(update)
            if stream.mirror.finished:
                del self._streams[update.request_id]
                if not update.finished:
                    self._ending.add(update.request_id)
            stream.tell()
            self._settle(stream)
        if num_new:
            self.on_step(num_new)
        for answer in step.answers:
            if self._audit is not None and answer.number == self._audit.number:
                self._repair(self._audit, answer)
            future = self._asked.get(answer.number)
            if future is not None and not future.done():
                future.set_result(answer)

    def _ended(self, request_id: str) -> None:
        """The engine has told the last of it. Another of that name may begin."""
        self._ending.remove(request_id)
        stream = self._streams.get(request_id)
        if stream is not None and not stream.sent and (not self._suspects or stream in self._suspects.on_trial):
            self._give(stream)

    # -- messages that are lost ----------------------------------------------------------------------------------------

    def _on_bad(self, bad: BadMessage) -> None:
        """What the engine said cannot be used: the request that it names fails. What else was lost is looked for."""
        self._past.num_bad_messages += 1
        logger.warning("%s", bad)
        stream = None if bad.request_id is None else self._streams.get(bad.request_id)
        if stream is not None and stream.sent:
            text = f"request {bad.request_id} failed: {bad}; send it again"
            self._fail(stream, RequestFailedError(text, code=BAD_MESSAGE))
        self._look_for_losses()

    def _look_for_losses(self) -> None:
        """Ask the engine what it has told so far, once for all that was bad in this turn of the loop."""
        if not self._will_audit:
            self._will_audit = True
            asyncio.get_running_loop().call_soon(self._ask_for_losses)

    def _ask_for_losses(self) -> None:
        self._will_audit = False
        if self._supervisor.is_up:
            sent = [stream for stream in self._streams.values() if stream.sent]
            self._audit = _Audit(next(self._questions), sent, set(self._ending))
            self._send(RpcCall(self._audit.number, DELIVERED))

    def _repair(self, audit: _Audit, answer: RpcReply) -> None:
        """Begin those again, from what has come of them, of which messages were lost; and say again what the engine
        has not heard."""
        self._audit = None
        told: dict[str, dict[int, int] | None] = answer.value if isinstance(answer.value, dict) else {}
        for stream in audit.sent if not answer.error else ():
            name, mirror = stream.mirror.request_id, stream.mirror
            if self._streams.get(name) is not stream or not stream.sent:
                continue
            if name in told and ((counts := told[name]) is None or mirror.agrees(counts)):
                for index in () if counts is None else mirror.stopped_of(counts):
                    self._send(StopSample(name, index))
                continue
            stream.num_losses += 1
            if stream.num_losses > MAX_LOSSES:
                lost = f"request {name} failed: messages about it were lost {stream.num_losses} times; send it again"
                self._fail(stream, RequestFailedError(lost, code=BAD_MESSAGE))
                continue
            logger.warning("messages about request %s were lost; it is begun again where it was", name)
            stream.sent = False
            if name in told:
                self._send(AbortRequest(name))
                self._ending.add(name)
            else:
                self._give(stream)
        for name in audit.ending & self._ending:
            if name in told:
                self._send(AbortRequest(name))
            else:
                self._ended(name)
        for number, future in list(self._asked.items()):
            if number < audit.number and not future.done():
                future.set_exception(_Gone())

    def _on_down(self, by_itself: bool) -> None:
        self._up.clear()
        self._outbox.clear()
        self._past = self._past.plus(self._stats.engine)
        self._stats = StatsSnapshot(EngineStats(), self._stats.kv, waits=self._stats.waits)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(_Gone())
        self._ending.clear()
        self._audit = None
        there = [stream for stream in self._streams.values() if stream.sent]
        suspects = []
        for stream in there:
            stream.sent = False
            stream.num_deaths += 1
            stream.num_kills += not by_itself
            if stream.ending:
                self._end(stream, "abort")
            elif stream.blame > DEATHS_TO_TRIAL and len(there) == 1:
                died = f"{stream.num_deaths} engines died over it, the last with no other request"
                self._end(stream, "error", died)
            elif stream.blame >= DEATHS_TO_TRIAL:
                suspects.append(stream)
        if suspects:
            self._suspects.failed(suspects)

    def _on_failed(self, error: OctavoError) -> None:
        if self._error is None:
            # Of whatever kind the cause is: it is no mistake of the requests that come now.
            self._error = error if type(error) is EngineError else EngineError(str(error))
            self._error.__cause__ = error
            self._up.set()
            for stream in self._streams.values():
                stream.fail(EngineError(str(error)))
            self._streams.clear()
            for future in self._asked.values():
                if not future.done():
                    future.set_exception(again(self._error))

    # -- what goes to the engine ---------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Give the engine what it does not have. Requests that several died over are tried first, in halves."""
        for stream in self._suspects.on_trial or list(self._streams.values()):
            if not stream.sent:
                self._give(stream)

    def _settle(self, stream: _Stream) -> None:
        """This one got on, or has left. If it was on trial, that is over. A pin that fails is no pin any more."""
        name = stream.mirror.request_id
        if (why := stream.failure) and self._pins.pop(name, None) is not None:
            logger.warning("%s is not pinned any more: %s", name, why)
            self._give_back(name)
        if self._suspects and self._suspects.cleared([stream]):
            self._feed()

    def _give(self, stream: _Stream) -> None:
        if not self._supervisor.is_up or stream.mirror.request_id in self._ending:
            return
        try:
            self._send(stream.mirror.add())
            stream.sent = True
        except OctavoError as error:  # its reader's alone
            del self._streams[stream.mirror.request_id]
            stream.fail(error)
            self._settle(stream)

    def _send(self, command: Command) -> None:
        """All of one turn of the loop goes in one message. Raises as `encoded`."""
        said = encoded(command)
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(said)

    def _flush(self) -> None:
        commands, self._outbox = self._outbox, []
        if commands and self._supervisor.is_up:
            self._supervisor.send(commands)


class _Pin(NamedTuple):
    """A prompt whose blocks stay. A request computes it."""

    token_ids: Sequence[int]
    salt: bytes

    def mirror(self, request_id: str) -> ClientRequest:
        return ClientRequest(request_id, self.token_ids, PIN_PARAMS, seed=0, salt=self.salt, pin=True)


class _Audit(NamedTuple):
    """A question of what the engine has told. `sent`, `ending`: what it knew of when it was asked."""

    number: int
    sent: list[_Stream]
    ending: set[str]


class _Gone(Exception):  # noqa: N818  # never leaves this file
    """The engine that was asked has died."""
