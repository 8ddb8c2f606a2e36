"""`AsyncLLM`: many readers on event loops, and one engine on its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest

from octavo import LLM, AsyncLLM, CompletionOutput, RequestOutput, SamplingParams
from octavo.config import EngineArgs
from octavo.engine.engine_request import EngineRequest
from octavo.engine.outputs import RequestMetrics, request_failed_error
from octavo.engine.request_update import FinishReason, RequestUpdate, SampleUpdate
from octavo.errors import EngineError, ParameterError, PromptError, TemplateError, UsageError
from octavo.frontend.build import BuiltEngine, build
from octavo.frontend.client_request import ClientRequest
from octavo.frontend.request_stream import RequestStream
from octavo.params.sampling_params import RequestOutputKind
from octavo.text.tokenizer import Tokenizer
from tests.engine.models import WrappedModel
from tests.frontend.conftest import run

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
OPTIONS: dict[str, Any] = {"block_size": 4, "num_gpu_blocks_override": 200, "max_num_seqs": 16}
PROMPTS = ["Hello", "What?", "a", "give-me-a-story", "Hello,world", "1+1=", "xyzzy", "The"]


@pytest.fixture(scope="module")
def wanted(model: str) -> dict[str, str]:
    with LLM(model, **OPTIONS) as llm:
        return {p: llm.generate(p, GREEDY, use_tqdm=False)[0].outputs[0].text for p in PROMPTS}


@pytest.fixture
def built(model: str) -> BuiltEngine:
    """An engine for an `AsyncLLM`, for tests that wrap its model."""
    return build(EngineArgs(model=model, **OPTIONS))


@contextlib.asynccontextmanager
async def serving(built: BuiltEngine) -> AsyncIterator[AsyncLLM]:
    """Start an `AsyncLLM`; on exit its engine must hold no requests and no blocks."""
    async with AsyncLLM(built.engine, built.tokenizer) as engine:
        yield engine
        if engine.is_running:
            assert (await engine.kv_stats()).num_used == 0
            assert not engine.transport.streams


async def test_max_tokens_beyond_the_models_length_ends_there(built: BuiltEngine) -> None:
    async with serving(built) as engine:
        for params in (
            SamplingParams(max_tokens=10_000, ignore_eos=True),
            SamplingParams(max_tokens=10_000, min_tokens=9_000),
        ):
            output = await last_of(engine, "Hello", params)
            assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == engine.max_model_len
            assert output.outputs[0].finish_reason == "length"


async def last_of(engine: AsyncLLM, prompt: Any, params: SamplingParams = GREEDY, **options: Any) -> RequestOutput:
    outputs = [output async for output in engine.generate(prompt, params, **options)]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs[-1]


async def until(ready: Callable[[], bool]) -> None:
    while not ready():
        await asyncio.sleep(0.002)


class Gate:
    """A hook before each forward pass that blocks until the gate is open."""

    def __init__(self) -> None:
        self.open, self.reached = threading.Event(), threading.Event()

    def __call__(self, number: int, tokens: list[int]) -> None:
        self.reached.set()
        if not self.open.wait(20):
            raise TimeoutError("the gate stayed closed")


# -- outputs ----------------------------------------------------------------------------------------------------------


async def test_concurrent_requests_equal_single_ones(built: BuiltEngine, wanted: dict[str, str]) -> None:
    async with serving(built) as engine:
        outputs = await asyncio.gather(*(last_of(engine, PROMPTS[i % 8]) for i in range(64)))
        assert [o.outputs[0].text for o in outputs] == [wanted[PROMPTS[i % 8]] for i in range(64)]
        assert built.engine.stats.peak_running == 16  # as many as there are rows
        assert len({o.request_id for o in outputs}) == 64


async def test_outputs_grow_with_the_tokens(built: BuiltEngine, wanted: dict[str, str]) -> None:
    async with serving(built) as engine:
        texts = [o.outputs[0].text async for o in engine.generate("Hello", GREEDY, "mine")]
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
        assert texts[-1] == wanted["Hello"] and len(texts) > 4
        ids = engine.get_tokenizer().encode("Hello")
        for same in ({"prompt": "Hello"}, ids, {"prompt_token_ids": ids}):
            output = await last_of(engine, same, request_id="again")
            assert (output.request_id, output.outputs[0].text) == ("again", wanted["Hello"])


async def test_chat_completes_a_conversation(model: str, built: BuiltEngine) -> None:
    template = "{% for m in messages %}{{ m.content }}{{ mark }}{% endfor %}"
    async with serving(built) as engine:
        options = {"chat_template": template, "chat_template_kwargs": {"mark": "!"}}
        messages = [{"role": "user", "content": "Hel"}, {"role": "user", "content": "</s>"}]
        outputs = [o async for o in engine.chat(messages, GREEDY, "talk", **options)]
        assert outputs[-1].finished and outputs[-1].request_id == "talk"
        assert outputs[-1].prompt == "Hel!</s>!"
        assert not engine.get_tokenizer().special_ids & set(outputs[-1].prompt_token_ids)
        with pytest.raises(TemplateError, match="no chat template"):
            await anext(engine.chat(messages))
        early = engine.chat(messages, LONG, **options)
        await anext(early)
        await early.aclose()


async def test_slow_reader_gets_merged_outputs_and_misses_nothing(built: BuiltEngine, wanted: dict[str, str]) -> None:
    async with serving(built) as engine:
        slow = engine.generate("Hello", GREEDY)
        first = await anext(slow)
        assert await last_of(engine, "What?") is not None
        await until(lambda: not built.engine.has_work)
        rest = [output async for output in slow]
        assert len(rest) == 1 and rest[0].finished and rest[0].outputs[0].text == wanted["Hello"]
        assert len(first.outputs[0].token_ids) < 16


@pytest.mark.parametrize("kind", RequestOutputKind)
async def test_output_kinds(built: BuiltEngine, wanted: dict[str, str], kind: RequestOutputKind) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, output_kind=kind)
    async with serving(built) as engine:
        stream = engine.generate("Hello", params)
        parts = [await anext(stream)]
        await until(lambda: not built.engine.has_work)  # the rest arrives unread
        parts += [output async for output in stream]
        texts = [c.text for output in parts for c in output.outputs]
        assert parts[-1].finished and parts[-1].outputs[0].finish_reason == "length"
        if kind is RequestOutputKind.DELTA:
            assert "".join(texts) == wanted["Hello"] and len(texts) == 2
            assert sum(len(output.outputs[0].token_ids) for output in parts) == 16
        else:
            assert texts[-1] == wanted["Hello"]
            assert len(texts) == (1 if kind is RequestOutputKind.FINAL_ONLY else 2)


def stream_of(kind: RequestOutputKind) -> RequestStream:
    params = SamplingParams(detokenize=False, max_tokens=8, output_kind=kind)
    return RequestStream(ClientRequest(EngineRequest("r", [1], params)))


def add(stream: RequestStream, *token_ids: int, reason: FinishReason = "") -> None:
    position = len(stream.request.samples[0].token_ids)
    update = RequestUpdate("r", [SampleUpdate(0, list(token_ids), reason, position=position)], bool(reason))
    stream.request.apply_update(update)
    stream.notify()


async def test_unread_deltas_are_merged() -> None:
    stream = stream_of(RequestOutputKind.DELTA)
    add(stream, 1)
    add(stream, 2, 3)
    output = await stream.get()
    assert (output.outputs[0].token_ids, output.finished) == ([1, 2, 3], False)
    add(stream, 4, reason="length")
    output = await stream.get()  # read tokens are not repeated
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason, output.finished) == ([4], "length", True)


async def test_outputs_before_an_error_are_read_first() -> None:
    stream = stream_of(RequestOutputKind.CUMULATIVE)
    add(stream, 1)
    stream.fail(EngineError("gone"))
    assert (await stream.get()).outputs[0].token_ids == [1]
    for _ in range(2):
        with pytest.raises(EngineError, match="gone"):
            await stream.get()


# -- aborts and closed iterators --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "cancel", "forget", "timeout"])
async def test_closed_iterator_aborts_within_a_step(built: BuiltEngine, how: str, wanted: dict[str, str]) -> None:
    wrapped = WrappedModel(_Has(built))
    async with serving(built) as engine:
        neighbour = asyncio.create_task(last_of(engine, "What?"))
        stream: Any = engine.generate("Hello", LONG)
        await anext(stream)
        if how == "close":
            await stream.aclose()
        elif how == "forget":
            del stream
            gc.collect()
            await asyncio.sleep(0)  # the loop closes the dropped generator
        else:

            async def read() -> None:
                async for _ in stream:
                    pass

            reader = asyncio.create_task(read())
            await asyncio.sleep(0)
            if how == "cancel":
                reader.cancel()
            with pytest.raises((asyncio.CancelledError, TimeoutError)):
                await asyncio.wait_for(reader, 0.0 if how == "timeout" else None)
        passes = wrapped.num_passes
        assert (await neighbour).outputs[0].text == wanted["What?"]
        await until(lambda: not built.engine.has_work)
        assert wrapped.num_passes - passes < 40  # it would have had 100 tokens; the neighbour's 16 were computed


async def test_unstarted_iterator_adds_no_request(built: BuiltEngine) -> None:
    async with serving(built) as engine:
        stream = engine.generate("Hello", LONG, "name")
        del stream
        assert not engine.transport.streams
        await last_of(engine, "Hello", request_id="name")
    assert built.engine.stats.num_finished == 1


async def test_cancellation_before_the_request_is_added(built: BuiltEngine) -> None:
    """The task is cancelled between the call and the step that adds the request; its id is free afterwards."""
    gate = Gate()
    WrappedModel(_Has(built), before=gate)
    async with serving(built) as engine:
        busy = asyncio.create_task(last_of(engine, "Hello"))
        await asyncio.to_thread(gate.reached.wait, 20)
        late = asyncio.create_task(last_of(engine, "What?", LONG, request_id="late"))
        await asyncio.sleep(0.01)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        gate.open.set()
        await busy
        assert (await last_of(engine, "What?", request_id="late")).finished
    assert built.engine.stats.num_finished == 2


async def test_abort_ends_the_iterator(built: BuiltEngine) -> None:
    async with serving(built) as engine:
        outputs = []
        async for output in engine.generate("Hello", LONG, "mine"):
            outputs.append(output)
            if len(outputs) == 3:
                assert await engine.abort("mine")
        assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
        assert 0 < len(outputs[-1].outputs[0].token_ids) < 100
        assert not await engine.abort("mine")


# -- errors -----------------------------------------------------------------------------------------------------------


async def test_invalid_request_raises_in_its_iterator_only(built: BuiltEngine, wanted: dict[str, str]) -> None:
    async with serving(built) as engine:
        good = asyncio.create_task(last_of(engine, "Hello", request_id="taken"))
        await asyncio.sleep(0)
        for prompt in ("", [], [3, 97], [5] * 200, None, {"promt": "x"}):
            with pytest.raises(UsageError):
                await anext(engine.generate(prompt, GREEDY))  # type: ignore[arg-type]
        with pytest.raises(ParameterError, match="'taken' is running already"):
            await anext(engine.generate("Hello", GREEDY, "taken"))
        assert (await good).outputs[0].text == wanted["Hello"]


async def test_dead_engine_raises_in_all_iterators(built: BuiltEngine) -> None:
    engine_step, num_steps = built.engine.step, 0

    def step() -> list[RequestUpdate]:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 6:
            raise ZeroDivisionError("planted")
        return engine_step()

    built.engine.step = step  # type: ignore[method-assign]
    async with serving(built) as engine:
        tasks = [asyncio.create_task(last_of(engine, prompt)) for prompt in PROMPTS]
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert len({id(e) for e in errors}) == len(PROMPTS)
        for error in errors:
            assert isinstance(error, EngineError) and "ZeroDivisionError: planted" in str(error)
        assert not engine.is_running
        later: list[Awaitable[Any]] = [last_of(engine, "Hello"), engine.kv_stats(), engine.abort("x")]
        for ask in later:
            with pytest.raises(EngineError, match="planted"):
                await ask


# -- the thread -------------------------------------------------------------------------------------------------------


async def test_idle_engine_sleeps_and_wakes_at_once(built: BuiltEngine) -> None:
    collects: list[bool] = []
    WrappedModel(_Has(built), before=lambda number, tokens: collects.append(gc.isenabled()))
    async with serving(built) as engine:
        await last_of(engine, "Hello")
        assert not any(collects[1:])  # no collection while it works
        await until(lambda: not built.engine.has_work and gc.isenabled())
        steps = built.engine.stats.num_steps
        clock = time.pthread_getcpuclockid(engine.transport.engine.thread.ident)  # type: ignore[arg-type]
        before = time.clock_gettime(clock)
        await asyncio.sleep(0.2)
        assert time.clock_gettime(clock) - before < 0.005
        assert built.engine.stats.num_steps == steps
        await last_of(engine, "What?")


async def test_long_texts_are_tokenized_off_the_event_loop(built: BuiltEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    where: dict[int, bool] = {}
    encode = Tokenizer.encode

    def watched(self: Tokenizer, text: str, *args: Any, **kwargs: Any) -> list[int]:
        where[len(text)] = threading.current_thread() is threading.main_thread()
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    monkeypatch.setattr(Tokenizer, "max_token_chars", 1000)  # otherwise these texts would be rejected first
    async with serving(built) as engine:
        await last_of(engine, "Hello")
        for prompt in ("x" * 50_000, {"prompt": "x" * 60_000}):
            with pytest.raises(UsageError, match="maximum context length"):
                await last_of(engine, prompt)
    assert where == {5: True, 50_000: False, 60_000: False}


async def test_state_queries(built: BuiltEngine) -> None:
    async with serving(built) as engine:
        await last_of(engine, "give-me-a-story")
        stats = await engine.kv_stats()
        assert (stats.num_blocks, stats.num_used) == (200, 0) and stats.num_cached > 3
        assert await engine.reset_prefix_cache() == stats.num_cached
        assert (await engine.kv_stats()).num_cached == 0


async def test_shutdown_during_requests(built: BuiltEngine) -> None:
    runner = weakref.ref(built.engine.executor.runner)  # type: ignore[attr-defined]
    engine = AsyncLLM(built.engine, built.tokenizer)
    stream = engine.generate("Hello", LONG)
    await anext(stream)
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineError, match="closed"):
        async for _ in stream:
            pass
    with pytest.raises(EngineError, match="closed"):
        await last_of(engine, "Hello")
    assert not engine.transport.engine.thread.is_alive()
    assert runner() is None  # the weights and the pool are freed, too


def test_dropped_engine_is_shut_down(built: BuiltEngine) -> None:
    engine = AsyncLLM(built.engine, built.tokenizer)
    run(last_of(engine, "Hello"))
    thread = engine.transport.engine.thread
    del engine
    gc.collect()
    assert not thread.is_alive()


def test_one_engine_serves_several_event_loops(built: BuiltEngine, wanted: dict[str, str]) -> None:
    engine = AsyncLLM(built.engine, built.tokenizer)

    async def read_one() -> None:
        stream = engine.generate("Hello", LONG)
        await anext(stream)  # the loop ends and closes its generators

    run(read_one())
    assert run(last_of(engine, "Hello")).outputs[0].text == wanted["Hello"]
    loop = asyncio.new_event_loop()  # a loop that does not close them
    stream = engine.generate("Hello", LONG)
    loop.run_until_complete(anext(stream))
    loop.close()
    steps, begun = built.engine.stats.num_steps, time.monotonic()
    while built.engine.has_work and time.monotonic() - begun < 60:
        time.sleep(0.002)
    assert built.engine.stats.num_steps - steps < 60  # instead of 100 tokens
    with contextlib.suppress(StopIteration):
        stream.aclose().send(None)  # its loop is closed
    assert run(last_of(engine, "What?")).outputs[0].text == wanted["What?"]
    engine.shutdown()


def test_from_options_raises_the_errors_of_llm(model: str) -> None:
    with pytest.raises(ParameterError, match="block_size is 3"):
        AsyncLLM.from_options(model, block_size=3)
    engine = AsyncLLM.from_options(model, **OPTIONS, skip_tokenizer_init=True)
    with pytest.raises(ParameterError, match="skip_tokenizer_init"):
        run(last_of(engine, "text"))
    assert len(run(last_of(engine, [5, 6])).outputs[0].token_ids) == 16
    with pytest.raises(PromptError):
        run(last_of(engine, [[5]]))
    engine.shutdown()


class _Has:
    """Has an `engine`, which is all that `WrappedModel` needs of an `LLM`."""

    def __init__(self, built: BuiltEngine) -> None:
        self.engine = built.engine


def test_error_codes_of_failed_requests() -> None:
    output = RequestOutput("r", None, [1], [], True, RequestMetrics(0.0))
    output.outputs = [CompletionOutput(0, "", [], finish_reason="error", stop_reason="no_allowed_token: none is left")]
    assert request_failed_error(output).code == "no_allowed_token"
    output.outputs[0].stop_reason = "numbers that are not finite"
    assert request_failed_error(output).code == "numerical_error"


async def test_pinned_prefix_is_not_recomputed(built: BuiltEngine, wanted: dict[str, str]) -> None:
    async with serving(built) as engine:
        name = await engine.pin_prefix("give-me-a-")
        await engine.reset_prefix_cache()
        outputs = [output async for output in engine.generate("give-me-a-story", GREEDY)]
        assert outputs[-1].outputs[0].text == wanted["give-me-a-story"]
        num_pinned = len(engine.get_tokenizer().encode("give-me-a-"))
        assert (outputs[-1].num_cached_tokens or 0) >= num_pinned - 1 > 4  # the last token may differ
        with pytest.raises(ParameterError, match="is pinned already"):
            await engine.pin_prefix("give", name)
        assert await engine.unpin_prefix(name) == -(-num_pinned // 4)
        with pytest.raises(ParameterError, match="no prefix is pinned under the name"):
            await engine.unpin_prefix(name)


async def test_pin_of_a_cancelled_caller_is_removed(built: BuiltEngine) -> None:
    async with serving(built) as engine:
        opened: list[str] = []
        add_requests = engine.transport.engine.add

        def notify_add(requests: Any, mailbox: Any) -> Any:  # the stream may be gone before the loop runs
            opened.append(requests[0].request_id)
            return add_requests(requests, mailbox)

        engine.transport.engine.add = notify_add  # type: ignore[method-assign]
        for wait_s in (0.0, 0.5):  # before and after the computation
            opened.clear()
            pinning = asyncio.ensure_future(engine.pin_prefix("give-me-a-story"))
            while not opened:
                await asyncio.sleep(0)
            time.sleep(wait_s)  # blocks the loop
            pinning.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pinning
            stats = await engine.kv_stats()
            assert (stats.num_used, stats.num_pinned) == (0, 0)


@pytest.mark.parametrize("how", ["abort", "close"])
async def test_reused_id_gets_no_output_of_the_earlier_request(built: BuiltEngine, how: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
    longer = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=0)
    async with serving(built) as engine:
        wanted = (await last_of(engine, "What?", params)).outputs[0]
        for _ in range(12):
            stream = engine.generate("Hello", longer, "x")
            await anext(stream)
            if how == "abort":
                assert await engine.abort("x")
            else:
                await stream.aclose()
                await engine.kv_stats()  # after a step: the request is removed
            found = (await last_of(engine, "What?", params, request_id="x")).outputs[0]
            assert found.token_ids == wanted.token_ids
            assert found.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=0.05)
            await stream.aclose()
