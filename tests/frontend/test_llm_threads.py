"""One `LLM` in several threads, and calls at unexpected times: clear errors, and a working engine afterwards."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from octavo import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from octavo.errors import EngineError, OctavoError, UsageError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5 + i, 6, 7, 8] for i in range(6)]


@pytest.fixture
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, device="cpu", block_size=4, num_gpu_blocks_override=64) as llm:
        yield llm


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def in_threads(*work: Callable[[], Any]) -> list[Any]:
    """The result or exception of each thread."""
    results: list[Any] = [None] * len(work)

    def one(i: int) -> None:
        try:
            results[i] = work[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def progress_bar(update: Callable[[], Any]) -> Callable[..., Any]:
    """A replacement of `tqdm` that calls a function at every update."""

    class Bar:
        def __init__(self, **_: Any) -> None: ...
        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...
        def update(self, _: int) -> None:
            update()

    return Bar


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return tokens(llm.generate(prompts, params, use_tqdm=False))


def test_threads_share_a_batch(llm: LLM) -> None:
    want = [generate(llm, [prompt])[0] for prompt in PROMPTS]
    steps = llm.stats().num_steps
    jobs = [lambda p=prompt: [generate(llm, [p])[0] for _ in range(4)] for prompt in PROMPTS]
    assert in_threads(*jobs) == [[tokens] * 4 for tokens in want]
    assert llm.stats().num_steps - steps < 4 * steps  # each alone would need as many steps
    assert llm.kv_stats().num_used == 0


def test_streams_pins_and_queries_next_to_generate(llm: LLM) -> None:
    want = generate(llm, PROMPTS[:2])

    def stream() -> list[list[int]]:
        last = {output.request_id: output for output in llm.stream(PROMPTS[:2], GREEDY)}
        return tokens([last[name] for name in sorted(last, key=int)])

    def pin() -> None:
        for i in range(5):
            llm.unpin_prefix(llm.pin_prefix([9, 9, 9, 9, i + 5]))
            llm.reset_prefix_cache()

    def query() -> None:
        for _ in range(200):
            assert llm.kv_stats().num_blocks == 64

    got = in_threads(stream, pin, query, lambda: generate(llm, PROMPTS[:2]), stream)
    assert got == [want, None, None, want, want]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_exception_in_one_thread_does_not_affect_others(llm: LLM, error: type[BaseException]) -> None:
    want = generate(llm, PROMPTS)

    def fail() -> None:
        raise error

    got = in_threads(
        lambda: generate(llm, PROMPTS),
        lambda: llm.generate(PROMPTS, GREEDY, use_tqdm=progress_bar(fail)),
        lambda: generate(llm, PROMPTS),
    )
    assert got[0] == got[2] == want and isinstance(got[1], error)
    assert generate(llm, PROMPTS) == want and llm.kv_stats().num_used == 0


def test_invalid_prompt_in_one_thread_does_not_affect_others(llm: LLM) -> None:
    want = generate(llm, PROMPTS)
    got = in_threads(lambda: generate(llm, PROMPTS), lambda: generate(llm, [[]]), lambda: generate(llm, PROMPTS))
    assert got[0] == got[2] == want and isinstance(got[1], UsageError)


def test_call_during_a_step_is_rejected(llm: LLM) -> None:
    want = generate(llm, PROMPTS)
    raised: list[BaseException] = []

    def call_back() -> None:
        for call in (lambda: generate(llm, PROMPTS), llm.close, llm.reset_prefix_cache, lambda: llm.pin_prefix([5, 6])):
            try:
                call()
            except BaseException as error:
                raised.append(error)

    scheduler, schedule = llm.engine.scheduler, llm.engine.scheduler.schedule

    def calling_schedule() -> Any:
        if not raised:
            call_back()
        return schedule()

    scheduler.schedule = calling_schedule  # type: ignore[method-assign]
    assert generate(llm, PROMPTS) == want
    assert len(raised) == 4 and all("during one of its own steps" in str(error) for error in raised)
    assert all(isinstance(error, EngineError) for error in raised)


def test_progress_bar_may_call_generate(llm: LLM) -> None:
    want = generate(llm, PROMPTS)
    found: list[Any] = []
    bar = progress_bar(lambda: found.append(generate(llm, PROMPTS[:1])))
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=bar)) == want
    assert found == [want[:1]] * len(PROMPTS)


def test_stream_collected_during_a_step_ends_after_it(llm: LLM) -> None:
    want = generate(llm, PROMPTS)
    stream: Any = llm.stream(PROMPTS, SamplingParams(max_tokens=60, ignore_eos=True))
    next(stream)
    dropped = [stream]
    del stream
    schedule = llm.engine.scheduler.schedule

    def collecting_schedule() -> Any:
        dropped.clear()
        gc.collect()
        return schedule()

    llm.engine.scheduler.schedule = collecting_schedule  # type: ignore[method-assign]
    assert generate(llm, PROMPTS) == want
    assert not llm.engine.scheduler.requests and llm.kv_stats().num_used == 0


def test_close_ends_generate_in_other_threads(model: str) -> None:
    llm = LLM(model, device="cpu", block_size=4, num_gpu_blocks_override=64)
    begun = threading.Event()

    def run() -> None:
        for _ in llm.stream(PROMPTS, SamplingParams(max_tokens=110, ignore_eos=True)):
            begun.set()

    def close() -> None:
        assert begun.wait(20)
        llm.close()

    ran, closed = in_threads(run, close)
    assert closed is None and isinstance(ran, EngineError) and "closed" in str(ran)
    for call in (lambda: generate(llm, PROMPTS), lambda: llm.pin_prefix([5, 6]), lambda: next(llm.stream(PROMPTS))):
        with pytest.raises(EngineError, match="closed"):
            call()
    llm.close()


def forked(llm: LLM, found: Any) -> None:
    try:
        generate(llm, PROMPTS)
    except EngineError as error:
        found.put(str(error))
    llm.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_process_gets_an_error(llm: LLM) -> None:
    want = generate(llm, PROMPTS)
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    process = context.Process(target=forked, args=(llm, found))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert "belongs to process" in found.get()
    assert generate(llm, PROMPTS) == want


WRONG: list[Any] = [-1, 10**30, 1.5, object(), len, True, {1: "b"}, [None], [[]], range(3)]
QUESTION = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{type(wrong).__name__} {wrong!r:.12}".split("<")[0])
def test_values_of_wrong_types_are_rejected_by_name(llm: LLM, wrong: Any) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "stop": lambda: llm.beam_search([[5, 6]], BeamSearchParams(beam_width=2, max_tokens=2, stop=wrong)),
        "priority": lambda: llm.generate([[5, 6]], GREEDY, priority=wrong),
        "chat_template": lambda: llm.chat(QUESTION, GREEDY, chat_template=wrong),
        "chat_template_kwargs": lambda: llm.chat(QUESTION, GREEDY, chat_template="x", chat_template_kwargs=wrong),
    }
    for name, call in calls.items():
        with pytest.raises(UsageError, match="priorities|" + name):
            call()
    assert not llm.engine.scheduler.requests


# -- AsyncLLM -------------------------------------------------------------------------------------------------------


def test_async_llm_iterators_belong_to_their_event_loop(model: str) -> None:
    engine = AsyncLLM.from_options(model, device="cpu", block_size=4, num_gpu_blocks_override=64)

    async def whole(prompt: list[int]) -> list[int]:
        outputs = [output async for output in engine.generate(prompt, GREEDY)]
        return list(outputs[-1].outputs[0].token_ids)

    async def first(run: Any) -> Any:
        return await anext(run)

    want = [asyncio.run(whole(prompt)) for prompt in PROMPTS]
    assert in_threads(*[lambda p=prompt: asyncio.run(whole(p)) for prompt in PROMPTS]) == want
    run = engine.generate([5, 6, 7], SamplingParams(max_tokens=100, ignore_eos=True))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(first(run))
    with pytest.raises(EngineError, match="another event loop"):
        asyncio.run(first(run))
    loop.close()
    assert asyncio.run(whole(PROMPTS[0])) == want[0]
    engine.shutdown()
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(whole(PROMPTS[0]))
    with pytest.raises(OctavoError):
        asyncio.run(engine.pin_prefix([5, 6]))
    with pytest.raises(OctavoError):
        asyncio.run(engine.kv_stats())
    engine.shutdown()
