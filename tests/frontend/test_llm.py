"""`LLM`: outputs, streams, rejected arguments, and recovery from failures."""

from __future__ import annotations

import gc
import math
import os
import random
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from octavo import LLM, RequestOutput, SamplingParams
from octavo.engine.request_update import RequestUpdate
from octavo.errors import (
    CapacityError,
    ContextLengthError,
    EngineError,
    MemoryBudgetError,
    ModelNotFoundError,
    ParameterError,
    PromptError,
    UnknownOptionError,
    UsageError,
)
from tests.engine.models import WrappedModel

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
OPTIONS: dict[str, Any] = {"block_size": 4, "num_gpu_blocks_override": 120, "max_num_seqs": 16}


@pytest.fixture
def make_llm(model: str) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        made.append(LLM(model, **(OPTIONS | options)))
        return made[-1]

    yield make
    for llm in made:
        at_rest(llm)
        llm.close()


@pytest.fixture
def llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm()


def at_rest(llm: LLM) -> None:
    """Check that no request runs, and that only the prefix cache holds blocks."""
    assert llm.thread.call(lambda engine: engine.drain()).result() == []  # a step planned before the end may still run
    stats = llm.kv_stats()
    assert stats.num_used == stats.num_host_used == 0
    assert not llm.engine.num_requests and not llm.engine.has_work and not llm.engine.scheduler.has_work
    assert llm.engine.scheduler.cache.rows.num_free == llm.config.args.max_num_seqs


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [c.token_ids for output in outputs for c in output.outputs]


def texts_of(outputs: list[RequestOutput]) -> list[str]:
    return [c.text for output in outputs for c in output.outputs]


def generate(llm: LLM, prompts: Any, params: Any = GREEDY, **kwargs: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False, **kwargs)


PROMPTS = ["Hello", "What?", "a", "give-me-a-story", "Hello,world", "1+1=", "xyzzy", "The"]

# -- outputs ----------------------------------------------------------------------------------------------------------


def test_outputs_keep_the_prompt_order_and_are_independent(llm: LLM) -> None:
    together = generate(llm, PROMPTS)
    assert [o.prompt for o in together] == PROMPTS
    llm.reset_prefix_cache()
    alone = [generate(llm, prompt)[0] for prompt in reversed(PROMPTS)]
    assert tokens_of(together) == tokens_of(alone[::-1])
    assert len(set(texts_of(together))) == len(PROMPTS)
    for output in together:
        (completion,) = output.outputs
        assert output.finished and completion.finish_reason == "length" and completion.stop_reason is None
        assert completion.text == llm.get_tokenizer().decode(completion.token_ids, skip_special_tokens=True)


def test_prompt_forms(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("Hello")
    wanted = tokens_of(generate(llm, "Hello"))
    same: list[Any] = [
        ["Hello"], ids, tuple(ids), [ids], {"prompt": "Hello"}, [{"prompt": "Hello"}], {"prompt_token_ids": ids},
        {"prompt": "a text of one's own", "prompt_token_ids": ids},
    ]  # fmt: skip
    for prompt in same:
        assert tokens_of(generate(llm, prompt)) == wanted, prompt
    (output,) = generate(llm, ids)
    assert output.prompt is None and output.prompt_token_ids == ids


def test_one_params_per_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=i + 1, n=1 + i % 2) for i in range(4)]
    outputs = generate(llm, PROMPTS[:4], params)
    assert [[len(c.token_ids) for c in o.outputs] for o in outputs] == [[1], [2, 2], [3], [4, 4]]


def test_eos_is_in_the_tokens_but_not_in_the_text(llm: LLM) -> None:
    tokens = tokens_of(generate(llm, "Hello"))[0]
    cut = next(i for i in range(3, 16) if tokens[i] not in tokens[:i])
    llm.engine.limits.eos_token_ids = (tokens[cut],)
    params = SamplingParams(temperature=0, max_tokens=16)
    (completion,) = generate(llm, "Hello", params)[0].outputs
    assert completion.token_ids == tokens[: cut + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert completion.text == llm.get_tokenizer().decode(tokens[:cut])
    by_id = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, stop_token_ids=[tokens[cut]])
    (completion,) = generate(llm, "Hello", by_id)[0].outputs
    assert completion.token_ids == tokens[: cut + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", tokens[cut])
    for kept in (by_id, replace(by_id, stop="never!")):  # as in vLLM, its text is included like a stop string
        (completion,) = generate(llm, "Hello", replace(kept, include_stop_str_in_output=True))[0].outputs
        assert completion.text == llm.get_tokenizer().decode(tokens[: cut + 1])


@pytest.mark.parametrize("window", [1, 8])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_across_tokens(make_llm: Callable[..., LLM], window: int, overlap: bool, stream: bool) -> None:
    llm = make_llm(decode_window=window, async_scheduling=overlap)
    run = (lambda *a: [o for o in llm.stream(*a) if o.finished]) if stream else (lambda *a: generate(llm, *a))
    whole = texts_of(generate(llm, "Hello"))[0]
    stop = whole[5:8]  # three tokens
    at = whole.index(stop)
    for keep in (False, True):
        params = SamplingParams(
            temperature=0, max_tokens=16, ignore_eos=True, stop=["never!", stop], include_stop_str_in_output=keep
        )
        (completion,) = run("Hello", params)[0].outputs
        assert completion.text == whole[: at + 3 * keep]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert len(completion.token_ids) == at + 3  # up to the token that completed it
        at_rest(llm)
    # Text held back as the start of a stop string is output at the end.
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, stop=[whole[-2:] + "never"])
    (completion,) = run("Hello", params)[0].outputs
    assert completion.text == whole and completion.finish_reason == "length"


@pytest.mark.parametrize("window", [1, 4])
def test_stream_grows_to_the_output_of_generate(make_llm: Callable[..., LLM], window: int) -> None:
    llm = make_llm(decode_window=window)
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=6 + i, n=1 + 2 * (i == 3)) for i in range(len(PROMPTS))
    ]
    wanted = {o.prompt: o for o in generate(llm, PROMPTS, params)}
    seen: dict[str, list[RequestOutput]] = {prompt: [] for prompt in PROMPTS}
    for output in llm.stream(PROMPTS, params):
        seen[output.prompt or ""].append(output)
    for prompt, parts in seen.items():
        assert [p.finished for p in parts] == [False] * (len(parts) - 1) + [True]
        last = parts[-1].outputs
        assert [(c.token_ids, c.text, c.finish_reason) for c in last] == [
            (c.token_ids, c.text, c.finish_reason) for c in wanted[prompt].outputs
        ]
        lengths = [sum(len(c.token_ids) for c in p.outputs) for p in parts]
        assert lengths == sorted(lengths)
        assert len(parts) > 1  # it streams; a reader slower than the engine gets larger parts
        for before, after in pairwise(parts):
            for a, b in zip(before.outputs, after.outputs, strict=False):
                assert b.text.startswith(a.text) and b.token_ids[: len(a.token_ids)] == a.token_ids


def test_decode_window_streams_token_by_token(make_llm: Callable[..., LLM]) -> None:
    """Columns of a decode window are output as they arrive: the earlier ones while a later pass is blocked."""
    llm = make_llm(decode_window=8, async_scheduling=False)
    received = threading.Event()
    WrappedModel(llm, before=lambda number, tokens: None if number < 4 else _wait(received))
    for output in llm.stream("Hello", GREEDY):
        if len(output.outputs[0].token_ids) >= 4:
            received.set()
    assert received.is_set()


def _wait(event: threading.Event) -> None:
    if not event.wait(20):
        raise TimeoutError("the tokens before this pass were not output")


def test_interleaved_streams_lose_no_output(llm: LLM) -> None:
    """A step runs for all streams; no output is lost when a stream is closed."""
    wanted = texts_of(generate(llm, PROMPTS[:3]))
    first, second = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    third = llm.stream(PROMPTS[2], GREEDY)
    next(first)
    next(third)
    assert texts_of(generate(llm, PROMPTS[1])) == [wanted[1]]  # meanwhile the others continue, perhaps to their ends
    third.close()  # type: ignore[attr-defined]
    assert texts_of([list(first)[-1]]) == [wanted[0]]
    assert texts_of([list(second)[-1]]) == [wanted[1]]


def test_closing_a_stream_keeps_outputs_of_others(llm: LLM) -> None:
    (wanted,) = texts_of(generate(llm, PROMPTS[0]))
    llm.reset_prefix_cache()
    first, second = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    for output in second:
        if len(output.outputs[0].token_ids) == 15:
            break
    second.close()  # type: ignore[attr-defined]
    assert texts_of(list(first)) == [wanted]


@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("how", ["close", "drop"])
def test_closed_stream_frees_everything(llm: LLM, begin: bool, how: str) -> None:
    stream = llm.stream(PROMPTS, GREEDY)
    if begin:
        next(stream)
        assert llm.kv_stats().num_used
    if how == "close":
        stream.close()  # type: ignore[attr-defined]
    else:
        del stream
    at_rest(llm)


# -- rejected arguments -----------------------------------------------------------------------------------------------

LONG = [5] * 200
BAD_PROMPTS: list[tuple[Any, type[UsageError], list[str]]] = [
    ("", PromptError, ["empty"]),
    ([[]], PromptError, ["empty"]),
    ([], PromptError, ["non-empty"]),
    ({"prompt_token_ids": []}, PromptError, ["empty"]),
    ({}, PromptError, ["empty"]),
    ({"promt": "x"}, UnknownOptionError, ["'promt'", "'prompt'"]),
    ({"prompt_token_ids": 5}, PromptError, ["prompt_token_ids", "int"]),
    ({"prompt_token_ids": "abc"}, PromptError, ["prompt_token_ids", "str"]),
    ({"prompt": 5}, PromptError, ["int"]),
    (5, PromptError, ["5"]),
    (None, PromptError, ["None"]),
    ([3, -1], PromptError, ["token 1", "-1", "0 to 96"]),
    ([3, 4, 97], PromptError, ["token 2", "97", "0 to 96"]),
    ([[3, True]], PromptError, ["token 1", "True"]),
    ([True], PromptError, ["token 0", "True"]),
    ([[3, 2.0]], PromptError, ["token 1", "2.0"]),
    ([[3, 1 << 70]], PromptError, ["token 1", "0 to 96"]),
    ([[3, "x"]], PromptError, ["token 1", "'x'"]),
    (LONG, ContextLengthError, ["128", "200", "shorten"]),
    ([5] * 128, ContextLengthError, ["128", "shorten"]),
]


@pytest.mark.parametrize(("prompt", "error", "words"), BAD_PROMPTS, ids=[str(p)[:30] for p, _, _ in BAD_PROMPTS])
def test_invalid_prompt_is_rejected(llm: LLM, prompt: Any, error: type[UsageError], words: list[str]) -> None:
    for ask in (lambda: generate(llm, prompt), lambda: llm.stream(prompt, GREEDY)):
        with pytest.raises(error) as caught:
            ask()
        message = str(caught.value)
        assert "\n" not in message
        assert all(word in message for word in words), message
        at_rest(llm)


@pytest.mark.parametrize("bad", ["", [3, -1], LONG, {"promt": "x"}, 5])
def test_one_invalid_prompt_of_many_queues_nothing(llm: LLM, bad: Any) -> None:
    with pytest.raises(UsageError):
        generate(llm, [*PROMPTS, bad])
    at_rest(llm)
    assert llm.stats().num_steps == 0


def test_max_tokens_ends_where_the_models_length_does(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()  # 128 positions, 120 blocks of 4
    prompt = [5] * 100
    for max_tokens in (28, 29, 1 << 20, None):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, min_tokens=min(40, max_tokens or 0))
        params.ignore_eos = True
        (output,) = generate(llm, prompt, params)
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (28, "length")
    params.max_tokens = 1000
    assert [len(t) for t in tokens_of(generate(llm, [prompt, [5] * 127, [5]], params))] == [28, 1, 127]
    assert params.max_tokens == 1000
    (last,) = (output for output in llm.stream(prompt, params) if output.finished)
    assert len(last.outputs[0].token_ids) == 28
    with pytest.raises(ContextLengthError, match=r"128.*requested 128 .*shorten"):
        generate(llm, [5] * 128, params)


def test_request_larger_than_the_pool_is_rejected(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(num_gpu_blocks_override=12, max_model_len=40)
    prompt = [5] * 10
    with pytest.raises(CapacityError, match=r"needs 26 blocks of 4 .*pool has 12.*at most 7"):
        generate(llm, prompt, SamplingParams(max_tokens=20, n=4, temperature=0))
    fits = SamplingParams(max_tokens=7, n=4, temperature=0, ignore_eos=True)
    assert [len(t) for t in tokens_of(generate(llm, prompt, fits))] == [7] * 4
    as_many = SamplingParams(max_tokens=None, n=4, temperature=0, ignore_eos=True)
    assert [len(t) for t in tokens_of(generate(llm, prompt, as_many))] == [7] * 4


def test_more_samples_than_rows_are_rejected(llm: LLM) -> None:
    with pytest.raises(CapacityError, match=r"17 sequences together and at most 16 .*max_num_seqs"):
        generate(llm, [5], SamplingParams(max_tokens=1, n=17))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (math.nan, math.inf, -math.inf, -1.0, 1e31, True, "1")),
        *(("max_tokens", value) for value in (-1, 0, 1.5, True)),
    ],
)
def test_invalid_sampling_value_is_rejected(name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=name):
        SamplingParams(**{name: value})


def test_unknown_option_suggests_the_nearest(model: str) -> None:
    with pytest.raises(UnknownOptionError, match="'blocksize'; did you mean 'block_size'"):
        LLM(model, blocksize=8)
    with pytest.raises(UnknownOptionError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]
    assert issubclass(UnknownOptionError, TypeError)


BAD_OPTIONS: list[tuple[str, Any]] = [
    ("block_size", 3),
    ("block_size", 512),
    ("block_size", True),
    ("max_num_seqs", 0),
    ("max_num_batched_tokens", -5),
    ("num_gpu_blocks_override", 0),
    ("max_model_len", 0),
    ("max_model_len", -2),
    ("dtype", "int8"),
    ("device", "tpu"),
    ("preemption_mode", "drop"),
    ("swap_space", math.nan),
    ("swap_space", -1),
    ("watermark", 0.9),
    ("async_scheduling", 1),
    ("seed", "x"),
    ("decode_window", 0),
]


@pytest.mark.parametrize(("name", "value"), BAD_OPTIONS)
def test_invalid_option_is_rejected(model: str, name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=name) as caught:
        LLM(model, **{name: value})
    assert caught.value.param == name and str(value) in str(caught.value)


def test_missing_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))


def test_too_small_pool_reports_the_length_that_fits(model: str) -> None:
    with pytest.raises(MemoryBudgetError, match=r"100.*25 blocks.*pool has 10.*max_model_len that fits is 41\b"):
        LLM(model, block_size=4, num_gpu_blocks_override=10, max_model_len=100)
    with LLM(model, block_size=4, num_gpu_blocks_override=10, max_model_len=41) as llm:  # the reported length fits
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        assert len(tokens_of(generate(llm, [5], params))[0]) == 40
        with pytest.raises(ContextLengthError, match="41"):
            generate(llm, [5] * 41, params)


def test_argument_lists_of_wrong_length_or_type_are_rejected(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="2 sampling_params for 3 prompts"):
        generate(llm, ["a", "b", "c"], [GREEDY, GREEDY])
    with pytest.raises(ParameterError, match="1 priorities for 2 prompts"):
        generate(llm, ["a", "b"], priority=[1])
    with pytest.raises(ParameterError, match="priority"):
        generate(llm, ["a", "b"], priority=[1, "x"])
    for wrong in ({"temperature": 0}, [None], "greedy", 3):
        with pytest.raises(ParameterError, match="sampling_params"):
            generate(llm, ["a"], wrong)
    at_rest(llm)


def test_skip_tokenizer_init(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(skip_tokenizer_init=True)
    (output,) = generate(llm, [5, 6, 7])
    assert len(output.outputs[0].token_ids) == 16 and output.outputs[0].text == ""
    for ask in (
        lambda: generate(llm, "text"),
        lambda: generate(llm, [5], SamplingParams(stop="x")),
        llm.get_tokenizer,
        lambda: llm.chat([{"role": "user", "content": "x"}]),
    ):
        with pytest.raises(ParameterError, match="skip_tokenizer_init"):
            ask()


# -- failures and recovery --------------------------------------------------------------------------------------------


def test_use_after_close(model: str) -> None:
    llm = LLM(model, **OPTIONS)
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    runner = weakref.ref(llm.engine.executor.runner)  # type: ignore[attr-defined]
    llm.close()
    llm.close()
    assert runner() is None  # the weights and the pool are freed, too
    for ask in (lambda: list(stream), lambda: generate(llm, "a"), lambda: llm.stream("a")):
        with pytest.raises(EngineError, match="closed"):
            ask()
    assert llm.engine.scheduler.stats().num_used == 0


def test_dropped_llm_is_closed(model: str) -> None:
    llm = LLM(model, **OPTIONS)
    thread = llm.engine.executor.thread  # type: ignore[attr-defined]
    generate(llm, "a")
    del llm
    gc.collect()
    assert not thread.is_alive()


@pytest.mark.parametrize("overlap", [False, True])
def test_ctrl_c_during_generate(make_llm: Callable[..., LLM], overlap: bool) -> None:
    llm = make_llm(async_scheduling=overlap)
    wanted = texts_of(generate(llm, PROMPTS))
    hit = WrappedModel(llm, before=lambda number, _: os.kill(os.getpid(), signal.SIGINT) if number == 3 else None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            generate(llm, PROMPTS)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert hit.num_passes < 16
    at_rest(llm)
    assert gc.isenabled()
    assert texts_of(generate(llm, PROMPTS)) == wanted


class OnPasses:
    """A hook that raises in the given passes, and in every pass with the token `poison`."""

    def __init__(self, *numbers: int, poison: int = -1) -> None:
        self.numbers, self.poison = numbers, poison

    def __call__(self, number: int, tokens: list[int]) -> None:
        if number in self.numbers or self.poison in tokens:
            raise RuntimeError("planted")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("window", [1, 8])
@pytest.mark.parametrize("number", [0, 1, 5, 9])
def test_step_that_fails_once_is_recomputed(
    make_llm: Callable[..., LLM], overlap: bool, window: int, number: int
) -> None:
    options = {"async_scheduling": overlap, "decode_window": window}
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=16, n=1 + i % 3) for i in range(len(PROMPTS))]
    wanted = tokens_of(generate(make_llm(**options), PROMPTS, params))
    for stream in (False, True):
        llm = make_llm(**options)
        WrappedModel(llm, before=OnPasses(number))
        outputs = (
            sorted((o for o in llm.stream(PROMPTS, params) if o.finished), key=lambda o: int(o.request_id))
            if stream
            else generate(llm, PROMPTS, params)
        )
        assert tokens_of(outputs) == wanted
        assert llm.stats().num_failed_steps == 1
        at_rest(llm)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("passes", "rows"),
    [pytest.param((1, 4, 9, 14, 20), 16, id="with tokens in between"), pytest.param((2, 3), 4, id="twice by chance")],
)
def test_steps_that_fail_sometimes_fail_no_request(
    make_llm: Callable[..., LLM], passes: tuple[int, ...], rows: int, overlap: bool
) -> None:
    options = {"async_scheduling": overlap, "max_num_seqs": rows}
    wanted = texts_of(generate(make_llm(**options), PROMPTS))
    llm = make_llm(**options)
    WrappedModel(llm, before=OnPasses(*passes))
    assert texts_of(generate(llm, PROMPTS)) == wanted
    assert llm.stats().num_failed_steps == len(passes)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("guilty", [(0,), (11,), (15,), (3, 4, 12)])
def test_request_that_fails_its_steps_is_found_by_bisection(
    make_llm: Callable[..., LLM], overlap: bool, guilty: tuple[int, ...]
) -> None:
    """Only this request fails; its neighbours, some with several samples, keep every token."""
    poison, rng = 90, random.Random(1)
    prompts = [[rng.randrange(3, 50) for _ in range(2 + i % 7)] for i in range(16)]
    never = [[poison]]
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=12, n=1 + i % 3, bad_words_token_ids=never)
        for i in range(16)
    ]
    options = {"async_scheduling": overlap, "max_num_seqs": 64}
    wanted = [tokens_of([output]) for output in generate(make_llm(**options), prompts, params)]
    llm = make_llm(**options)
    WrappedModel(llm, before=OnPasses(poison=poison))
    outputs = generate(llm, [[*p, poison] if i in guilty else p for i, p in enumerate(prompts)], params)
    for i, (output, want) in enumerate(zip(outputs, wanted, strict=True)):
        if i in guilty:
            assert {c.finish_reason for c in output.outputs} == {"error"}
        else:
            assert tokens_of([output]) == want
    assert llm.stats().num_failed_steps <= 2 + 8 * len(guilty)
    assert [tokens_of([output]) for output in generate(llm, prompts, params)] == wanted
    at_rest(llm)


def test_always_failing_request_does_not_block_others(make_llm: Callable[..., LLM]) -> None:
    """Its neighbours recompute successfully between its failures, so consecutive failures would never add up."""
    llm = make_llm(max_num_batched_tokens=8, enable_prefix_caching=False)
    rng = random.Random(1)
    long, poison = [rng.randrange(3, 50) for _ in range(20)], 90
    WrappedModel(llm, before=OnPasses(poison=poison))
    outputs = generate(llm, [long, [5, 6, poison], [7, 8]], SamplingParams(temperature=0, max_tokens=4))
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert llm.stats().num_failed_steps <= 4


@pytest.mark.parametrize("kind", ["nan", "inf"])
@pytest.mark.parametrize("window", [1, 8])
@pytest.mark.parametrize("n", [1, 3])
def test_non_finite_logits_fail_one_request(make_llm: Callable[..., LLM], kind: str, window: int, n: int) -> None:
    """Neighbours in the batch keep every token, also one that shares the blocks of its prompt."""
    params = SamplingParams(
        temperature=0.7,
        seed=3,
        max_tokens=12,
        ignore_eos=True,
        n=n,
        logprobs=2,
        repetition_penalty=1.2,
        bad_words=["~"],
    )
    prompts = [[20 + i, 9, 9, 9, 30 + i] for i in range(5)]
    wanted = tokens_of(generate(make_llm(decode_window=window), prompts, params))
    llm = make_llm(decode_window=window)

    def make_logits_nan(number: int, tokens: list[int], logits: Tensor) -> None:
        if number == 0:  # five prefills in one step; the logits are those of their last tokens
            assert len(logits) == 5  # one row each, for any n
            logits[2, 7] = float(kind)

    WrappedModel(llm, after=make_logits_nan)
    outputs = generate(llm, prompts, params)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "length", "error", "length", "length"]
    assert "not finite" in str(outputs[2].outputs[0].stop_reason)
    assert outputs[2].outputs[0].token_ids == outputs[2].outputs[0].logprobs == []
    healthy = [o for i, o in enumerate(outputs) if i != 2]
    assert tokens_of(healthy) == wanted[: 2 * n] + wanted[3 * n :]
    at_rest(llm)
    assert tokens_of(generate(llm, prompts, params)) == wanted  # the cache has no block with NaN


def test_failed_detokenization_fails_one_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = texts_of(generate(llm, PROMPTS))
    tokenizer = llm.input_processor.tokenizer
    inner, bad = tokenizer.token_bytes, llm.get_tokenizer().encode(wanted[0][4])[0]
    victims = [i for i, text in enumerate(wanted) if wanted[0][4] in text]

    def token_bytes(token_id: int) -> bytes:
        if token_id == bad:
            raise ValueError("planted")
        return inner(token_id)

    monkeypatch.setattr(type(tokenizer), "token_bytes", lambda self, token_id: token_bytes(token_id))
    for outputs in (
        generate(llm, PROMPTS),
        sorted((o for o in llm.stream(PROMPTS, GREEDY) if o.finished), key=lambda o: int(o.request_id)),
    ):
        for i, output in enumerate(outputs):
            completion = output.outputs[0]
            if i in victims:
                assert completion.finish_reason == "error" and "planted" in str(completion.stop_reason)
            else:
                assert (completion.text, completion.finish_reason) == (wanted[i], "length")


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("window", [1, 8])
def test_a_tenth_of_the_memory_gives_the_same_outputs(model: str, mode: str, window: int) -> None:
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 97) for _ in range(rng.randint(1, 30))] for _ in range(200)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=rng.randint(8, 24), ignore_eos=True)
        for i in range(200)
    ]
    size = 4
    need = sum(-(-(len(p) + (q.max_tokens or 0) - 1) // size) for p, q in zip(prompts, params, strict=True))
    options: dict[str, Any] = {"block_size": size, "max_num_seqs": 200, "decode_window": window}
    with LLM(model, num_gpu_blocks_override=need, **options) as llm:
        wanted = tokens_of(generate(llm, prompts, params))
        assert llm.stats().num_preemptions == 0 and llm.stats().peak_running == 200
    with LLM(model, num_gpu_blocks_override=need // 10, preemption_mode=mode, **options) as llm:
        engine, step, num_steps = llm.engine, llm.engine.step, 0

        def checked() -> list[RequestUpdate]:
            nonlocal num_steps
            updates = step()
            num_steps += 1
            sequences = [s for r in engine.scheduler.running for s in r.sequences]
            for s in sequences:
                assert 0 <= len(s.block_ids) * size - s.num_computed < size
            assert engine.scheduler.stats().num_unfilled_slots <= len(sequences) * (size - 1)
            return updates

        engine.step = checked  # type: ignore[method-assign]
        outputs = generate(llm, prompts, params)
        assert tokens_of(outputs) == wanted
        assert all(o.outputs[0].finish_reason == "length" for o in outputs)
        assert num_steps > 30 and llm.stats().peak_used_blocks >= 0.9 * (need // 10)
        stats = llm.stats()
        assert stats.num_preemptions > 20
        assert (stats.num_swap_preemptions > 20) == (mode == "swap")
        assert sum(o.metrics.num_preemptions for o in outputs) == stats.num_preemptions
        at_rest(llm)


def test_lower_priority_value_runs_first(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(scheduling_policy="priority", max_num_seqs=1)
    outputs = generate(llm, PROMPTS[:3], priority=[2, 0, 1])
    finished = [o.metrics.finished_time or 0.0 for o in outputs]
    assert finished[1] < finished[2] < finished[0]


UNDER_O = """
import sys
from octavo import LLM, SamplingParams
from octavo.errors import EngineError, UsageError
assert False, "asserts are off"
def refused(ask, kind):
    try:
        ask()
    except kind:
        return
    sys.exit("not refused")
greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
with LLM(sys.argv[1], block_size=4, num_gpu_blocks_override=30, max_model_len=100) as llm:
    print(llm.generate("Hello", greedy, use_tqdm=False)[0].outputs[0].text)
    for bad in ("", [[]], [3, -1], [3, 97], [5] * 200, None):
        refused(lambda: llm.generate(bad, greedy, use_tqdm=False), UsageError)
    refused(lambda: llm.generate([5], SamplingParams(n=128), use_tqdm=False), UsageError)
    assert llm.kv_stats().num_used == 0
refused(lambda: llm.generate("Hello", greedy, use_tqdm=False), EngineError)
"""


def test_python_o_raises_the_same_errors(llm: LLM, model: str) -> None:
    wanted = texts_of(generate(llm, "Hello"))
    done = subprocess.run([sys.executable, "-O", "-c", UNDER_O, model], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == [*wanted, ""]
