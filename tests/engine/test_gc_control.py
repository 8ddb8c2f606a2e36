"""Objects of finished requests are freed by reference count: while an engine works, only young ones are collected."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.config import EngineArgs
from octavo.core.request import Request, Sequence
from octavo.engine.beam_search import BeamSearch
from octavo.engine.engine import Engine
from octavo.engine.gc_control import GCPause
from octavo.engine.process.ipc import (
    AbortRequest,
    AddRequest,
    CloseEngine,
    Command,
    StepReport,
    pack_tokens,
    params_to_wire,
)
from octavo.engine.process.server import EngineServer
from octavo.engine.request_state import RequestState
from octavo.engine.structured_output import RequestGrammar
from octavo.errors import RequestFailedError
from octavo.frontend.build import build
from octavo.frontend.client_request import ClientRequest
from octavo.frontend.input_processor import InputProcessor
from octavo.params.beam_search_params import BeamSearchParams
from tests.engine.client import at_rest
from tests.engine.models import WrappedModel
from tests.engine.process.engines import last_of, oracle_client, own_directory, run, serving  # noqa: F401

OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 64, "max_num_seqs": 8}
KINDS = (Request, Sequence, RequestState, BeamSearch, RequestGrammar, ClientRequest)
LENGTH: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "seed": 3}
CASES: dict[str, SamplingParams | BeamSearchParams] = {
    "plain": SamplingParams(**LENGTH),
    "a stop string": SamplingParams(stop=["a", "e", "i"], **LENGTH),
    "samples": SamplingParams(n=3, **LENGTH),
    "best of": SamplingParams(n=1, best_of=3, **LENGTH),
    "logprobs": SamplingParams(logprobs=1, prompt_logprobs=1, **LENGTH),
    "a form": SamplingParams(structured_outputs={"regex": "[a-c]{20}"}, **LENGTH),  # type: ignore[arg-type]
    "beams": BeamSearchParams(beam_width=3, max_tokens=12),
    "beams with stop strings": BeamSearchParams(beam_width=3, max_tokens=12, stop=["a", "e"]),
    "beams of a form": BeamSearchParams(beam_width=2, max_tokens=9, structured_outputs={"regex": "[a-c]{20}"}),  # type: ignore[arg-type]
}


@contextlib.contextmanager
def without_collection() -> Iterator[Callable[[], Counter[str]]]:
    """Disable collection; yields a function that counts the request objects created since then and still alive."""
    gc.collect()
    before = {id(o) for o in gc.get_objects() if type(o) in KINDS}
    gc.disable()
    try:
        yield lambda: Counter(type(o).__name__ for o in gc.get_objects() if type(o) in KINDS and id(o) not in before)
    finally:
        gc.enable()


def make_logits_nan(number: int, tokens: list[int], logits: Any) -> None:
    if number == 3:
        logits[:, 7] = math.nan


def slow_down(number: int, tokens: list[int]) -> None:
    time.sleep(0.01)


class EngineHolder:
    """Has an `engine`, which is all that `WrappedModel` needs of an `LLM`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine


def only_last_plan_left(left: Counter[str]) -> bool:
    """True if at most the last plan's objects are left, which the device thread holds until the next plan."""
    return left["Request"] <= 1 and left.keys() <= {"Request", "Sequence", "BeamSearch"}


@pytest.mark.parametrize("how", ["finished", "failed"])
@pytest.mark.parametrize("case", CASES)
def test_llm_releases_finished_requests(model: str, case: str, how: str) -> None:
    params = CASES[case]
    with LLM(model, **OPTIONS) as llm, without_collection() as left:
        for _ in range(3):
            if how == "failed":
                WrappedModel(llm, after=make_logits_nan)
            if isinstance(params, BeamSearchParams):
                (output,) = llm.beam_search(["abc"], params, use_tqdm=False)
            else:
                (output,) = llm.generate(["abc"], params, use_tqdm=False)
            assert ("error" in {c.finish_reason for c in output.outputs}) == (how == "failed")
        at_rest(llm)
        assert only_last_plan_left(left())


def test_llm_releases_closed_streams_and_unpinned_prefixes(model: str) -> None:
    with LLM(model, **OPTIONS) as llm, without_collection() as left:
        for _ in range(3):
            stream = llm.stream(["abc"], SamplingParams(**LENGTH))
            next(stream)
            stream.close()
            llm.unpin_prefix(llm.pin_prefix("abcdefgh"))
        del stream
        at_rest(llm)
        assert only_last_plan_left(left())


@pytest.mark.parametrize("how", ["finished", "aborted", "failed"])
@pytest.mark.parametrize("case", ["samples", "beams with stop strings"])
async def test_async_llm_releases_requests(model: str, case: str, how: str) -> None:
    built = build(EngineArgs(model=model, **OPTIONS))
    async with AsyncLLM(built.engine, built.tokenizer) as engine:

        async def read_all() -> None:
            async for _ in engine.generate("abc", CASES[case], "it"):
                pass

        async def run_request() -> None:
            if how == "failed":
                WrappedModel(EngineHolder(built.engine), after=make_logits_nan)  # type: ignore[arg-type]
                with pytest.raises(RequestFailedError):
                    await read_all()
                return
            task = asyncio.ensure_future(read_all())
            while how == "aborted" and not await engine.abort("it"):
                await asyncio.sleep(0.005)
            await task

        if how == "aborted":
            WrappedModel(EngineHolder(built.engine), before=slow_down)  # type: ignore[arg-type]
        with without_collection() as left:
            for _ in range(3):
                await run_request()
            await engine.kv_stats()  # the engine thread has passed its next step
            assert only_last_plan_left(left())


class FakeChannel:
    """A channel with given messages; None in place of a message means: run a step first."""

    def __init__(self, *messages: list[Command] | None) -> None:
        self.messages = deque(messages)
        self.ended: list[list[str]] = []

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        if timeout_s is None or (timeout_s == 0 and len(self.messages) > 1):
            message = self.messages.popleft()
            return None if message is None else msgspec.msgpack.encode(message)
        return None

    def send(self, message: Any) -> None:
        if isinstance(message, StepReport):
            self.ended += [[s.finish_reason for s in u.samples] for u in message.updates if u.finished]


class NoHeartbeats:
    def __call__(self, *_: Any) -> None:
        pass

    enter = begin_work = rest = advance = __call__


@pytest.mark.parametrize("how", ["finished", "aborted", "failed"])
@pytest.mark.parametrize("case", ["samples", "a form", "beams with stop strings"])
def test_engine_server_releases_requests(model: str, case: str, how: str) -> None:
    params = CASES[case]
    built = build(EngineArgs(model=model, **OPTIONS))
    engine = built.engine
    if how == "failed":
        WrappedModel(EngineHolder(engine), after=make_logits_nan)  # type: ignore[arg-type]
    prompts = InputProcessor(built.tokenizer, engine.limits.vocab_size, engine.limits.max_model_len)
    add = AddRequest("it", pack_tokens([5, 6, 7]), params_to_wire(params), isinstance(params, BeamSearchParams), 3)
    with without_collection() as left:
        rest: list[list[Command] | None] = [None, None, [AbortRequest("it")]] if how == "aborted" else []
        channel = FakeChannel([add], *rest, [CloseEngine()])
        server = EngineServer(engine, channel, NoHeartbeats(), prompts, {})  # type: ignore[arg-type]
        server.serve()
        reason = {"finished": "length", "aborted": "abort", "failed": "error"}[how]
        assert len(channel.ended) == 1 and (reason in channel.ended[0] or "beams" in case)
        assert not left()
    prompts.close()


@pytest.mark.parametrize("how", ["finished", "aborted", "closed"])
async def test_engine_client_releases_requests(model: str, how: str) -> None:
    params = SamplingParams(n=3, **LENGTH)
    async with serving(oracle_client(model, step_s=0.002)) as client:
        with without_collection() as left:
            if how == "finished":
                await last_of(client, [1, 2, 3], params)
            else:
                async for output in client.generate([1, 2, 3], params, "it"):
                    if how == "closed":
                        break
                    if not output.finished:
                        await client.abort("it")
                del output
            await asyncio.sleep(0.05)
            assert not left()


def test_gc_pause_is_reentrant_and_restores_collection() -> None:
    pause = GCPause()
    assert gc.isenabled()
    with pause:
        with pause:
            assert not gc.isenabled() and gc.get_freeze_count()
        assert not gc.isenabled()
    assert gc.isenabled() and not gc.get_freeze_count()
