"""While an engine works, the collector looks at young objects alone: what a request was must die by reference count."""

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
from octavo.engine.output_processor import RequestState
from octavo.engine.process.ipc import AbortRequest, AddRequest, CloseEngine, Command, pack_tokens, params_to_wire
from octavo.engine.process.server import EngineServer
from octavo.engine.structured_output import RequestGrammar
from octavo.errors import RequestFailedError
from octavo.frontend.build import build
from octavo.frontend.client_request import ClientRequest
from octavo.frontend.input_processor import InputProcessor
from octavo.params.beam_search_params import BeamSearchParams
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
def by_reference_count() -> Iterator[Callable[[], Counter[str]]]:
    """Nothing is collected. Gives a function that counts what lives of requests that has come to be since."""
    gc.collect()
    before = {id(o) for o in gc.get_objects() if type(o) in KINDS}
    gc.disable()
    try:
        yield lambda: Counter(type(o).__name__ for o in gc.get_objects() if type(o) in KINDS and id(o) not in before)
    finally:
        gc.enable()


def spoil(number: int, tokens: list[int], logits: Any) -> None:
    if number == 3:
        logits[:, 7] = math.nan


def dawdle(number: int, tokens: list[int]) -> None:
    time.sleep(0.01)


class Has:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine


def holds_at_most_the_last(left: Counter[str]) -> bool:
    """The device's thread has the last plan in its hand until there is another."""
    return left["Request"] <= 1 and left.keys() <= {"Request", "Sequence", "BeamSearch"}


@pytest.mark.parametrize("how", ["to its end", "failed"])
@pytest.mark.parametrize("case", CASES)
def test_an_llm_keeps_nothing_of_a_request(model: str, case: str, how: str) -> None:
    params = CASES[case]
    with LLM(model, **OPTIONS) as llm, by_reference_count() as left:
        for _ in range(3):
            if how == "failed":
                WrappedModel(llm, after=spoil)
            if isinstance(params, BeamSearchParams):
                (output,) = llm.beam_search(["abc"], params, use_tqdm=False)
            else:
                (output,) = llm.generate(["abc"], params, use_tqdm=False)
            assert ("error" in {c.finish_reason for c in output.outputs}) == (how == "failed")
        llm.engine.drain()
        assert holds_at_most_the_last(left())


def test_an_llm_keeps_nothing_of_streams_that_are_left_and_of_pins_that_are_given_up(model: str) -> None:
    with LLM(model, **OPTIONS) as llm, by_reference_count() as left:
        for _ in range(3):
            stream = llm.stream(["abc"], SamplingParams(**LENGTH))
            next(stream)
            stream.close()
            llm.unpin_prefix(llm.pin_prefix("abcdefgh"))
        del stream
        llm.engine.drain()
        assert holds_at_most_the_last(left())


@pytest.mark.parametrize("how", ["to its end", "aborted", "failed"])
@pytest.mark.parametrize("case", ["plain", "samples", "beams with stop strings"])
def test_an_async_engine_keeps_nothing_of_a_request(model: str, case: str, how: str) -> None:
    async def main() -> None:
        built = build(EngineArgs(model=model, **OPTIONS))
        async with AsyncLLM(built.engine, built.tokenizer) as engine:

            async def ask() -> None:
                async for _ in engine.generate("abc", CASES[case], "it"):
                    pass

            async def ask_so() -> None:
                if how == "failed":
                    WrappedModel(Has(built.engine), after=spoil)  # type: ignore[arg-type]
                    with pytest.raises(RequestFailedError):
                        await ask()
                    return
                task = asyncio.ensure_future(ask())
                while how == "aborted" and not await engine.abort("it"):
                    await asyncio.sleep(0.005)
                await task

            if how == "aborted":
                WrappedModel(Has(built.engine), before=dawdle)  # type: ignore[arg-type]
            with by_reference_count() as left:
                for _ in range(3):
                    await ask_so()
                await engine.kv_stats()  # the engine's thread has come by
                assert holds_at_most_the_last(left())

    asyncio.run(main())


class Wire:
    """What the engine's server needs of a channel: one message after the other; one that is `None` waits for a step."""

    def __init__(self, *messages: list[Command] | None) -> None:
        self.messages = deque(messages)

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        if timeout_s is None or (timeout_s == 0 and len(self.messages) > 1):
            message = self.messages.popleft()
            return None if message is None else msgspec.msgpack.encode(message)
        return None

    def send(self, message: Any) -> None:
        pass


class NoHeartbeats:
    def __call__(self, *_: Any) -> None:
        pass

    enter = work = rest = advanced = __call__


@pytest.mark.parametrize("how", ["to its end", "aborted", "failed"])
@pytest.mark.parametrize("case", ["plain", "samples", "a form", "beams with stop strings"])
def test_an_engines_host_keeps_nothing_of_a_request(model: str, case: str, how: str) -> None:
    params = CASES[case]
    built = build(EngineArgs(model=model, **OPTIONS))
    engine = built.engine
    if how == "failed":
        WrappedModel(Has(engine), after=spoil)  # type: ignore[arg-type]
    prompts = InputProcessor(built.tokenizer, engine.vocab_size, engine.max_model_len)
    add = AddRequest("it", pack_tokens([5, 6, 7]), params_to_wire(params), isinstance(params, BeamSearchParams), 3)
    ended: list[list[str]] = []
    with by_reference_count() as left:
        rest: list[list[Command] | None] = [None, None, [AbortRequest("it")]] if how == "aborted" else []
        wire = Wire([add], *rest, [CloseEngine()])
        server = EngineServer(engine, wire, NoHeartbeats(), prompts, {})  # type: ignore[arg-type]
        inner = server._send_update

        def tell(state: RequestState) -> None:
            if not state.request.sequences:
                ended.append([s.finish_reason for s in state.request.finished_sequences])
            inner(state)

        server._send_update = tell  # type: ignore[method-assign]
        server.serve()
        reason = {"to its end": "length", "aborted": "abort", "failed": "error"}[how]
        assert len(ended) == 1 and (reason in ended[0] or "beams" in case)
        assert not left()
    prompts.close()


@pytest.mark.parametrize("how", ["to its end", "aborted", "left"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_keeps_nothing_of_a_request(model: str, n: int, how: str) -> None:
    async def main() -> None:
        params = SamplingParams(n=n, **LENGTH)
        async with serving(oracle_client(model, step_s=0.002)) as client:
            with by_reference_count() as left:
                if how == "to its end":
                    await last_of(client, [1, 2, 3], params)
                else:
                    async for output in client.generate([1, 2, 3], params, "it"):
                        if how == "left":
                            break
                        if not output.finished:
                            await client.abort("it")
                    del output
                await asyncio.sleep(0.05)
                assert not left()

    run(main())


def test_it_may_be_entered_again_inside_and_collects_as_before_when_it_is_left() -> None:
    garbage = GCPause()
    assert gc.isenabled()
    with garbage:
        with garbage:
            assert not gc.isenabled() and gc.get_freeze_count()
        assert not gc.isenabled()
    assert gc.isenabled() and not gc.get_freeze_count()
