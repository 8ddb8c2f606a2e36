"""Structured outputs through the whole engine: outputs follow their grammar, and other requests are unaffected."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, AsyncLLM, BeamSearchParams, RequestOutput, SamplingParams
from octavo.core.plan import StepPlan
from octavo.engine.engine_request import EngineRequest
from octavo.engine.structured_output import RequestGrammar
from octavo.errors import ParameterError, RequestFailedError
from octavo.runner.executor import StepHandle, ThreadedExecutor
from octavo.runner.output_buffers import OutputBuffers
from octavo.runner.passes import prefill_batch
from octavo.text import grammar
from octavo.text.grammar import Matcher
from tests.engine.client import StepClient
from tests.engine.models import WrappedModel, make_talking_checkpoint

PAD, BOS, EOS = 0, 1, 2
EXPLOSION = {"json": {"type": "integer", "multipleOf": 99999989}}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", 7]}, "maxItems": 3},
        "on": {"type": "boolean"},
    },
    "required": ["name", "on"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talking_checkpoint(tmp_path_factory.mktemp("constraints"))


def open_llm(path: Path, **options: Any) -> LLM:
    defaults = {"block_size": 4, "num_gpu_blocks_override": 1200, "max_num_seqs": 32, "max_logprobs": -1, "seed": 3}
    return LLM(str(path), **(defaults | options))


@pytest.fixture(scope="module")
def llm(talking: Path) -> Iterator[LLM]:
    with open_llm(talking) as made:
        yield made


def params(structured: dict[str, Any] | None, **options: Any) -> SamplingParams:
    defaults = {"temperature": 1.0, "max_tokens": 60, "seed": 11}
    return SamplingParams(structured_outputs=structured, **(defaults | options))  # type: ignore[arg-type]


def one(llm: LLM, prompt: str, parameters: SamplingParams | BeamSearchParams) -> RequestOutput:
    return llm.generate(prompt, parameters, use_tqdm=False)[0]  # type: ignore[arg-type]


def completions(output: RequestOutput) -> list[tuple[str, list[int], str | None]]:
    return [(c.text, c.token_ids, c.finish_reason) for c in output.outputs]


def logprobs(output: RequestOutput) -> dict[tuple[int, int, int], float]:
    """Log-probabilities by sample, position and token."""
    return {
        (c.index, i, token): entry.logprob
        for c in output.outputs
        for i, entries in enumerate(c.logprobs or ())
        for token, entry in (entries or {}).items()
    }


def fits(text: str) -> bool:
    """True if a text is JSON that conforms to SCHEMA."""
    value = json.loads(text)
    name, tags = value.pop("name"), value.pop("tags", [])
    return (
        isinstance(name, str)
        and len(name) <= 5
        and isinstance(value.pop("on"), bool)
        and len(tags) <= 3
        and all(t in ["a", "bc", 7] for t in tags)
        and not value
    )


# -- the form is kept --------------------------------------------------------------------------------------------------


def test_every_sample_conforms_to_its_schema(llm: LLM) -> None:
    (output,) = llm.generate(["{x}"], params({"json": SCHEMA}, n=24, max_tokens=100), use_tqdm=False)
    assert all(fits(c.text) for c in output.outputs if c.finish_reason == "stop")
    assert sum(c.finish_reason == "stop" for c in output.outputs) >= 23
    assert len({c.text for c in output.outputs}) == 24
    assert all(c.token_ids[-1] == EOS for c in output.outputs if c.finish_reason == "stop")


def test_output_is_one_of_the_choices(llm: LLM) -> None:
    choices = ["yes", "no", "maybe", "yes!", 'say"it\\']
    (output,) = llm.generate(["choose"], params({"choice": choices}, n=30, temperature=2.0), use_tqdm=False)
    assert {c.text for c in output.outputs} <= set(choices) and len({c.text for c in output.outputs}) >= 3
    assert {c.finish_reason for c in output.outputs} == {"stop"}


def test_output_matches_the_regex(llm: LLM) -> None:
    pattern = r"[A-Z][a-z]{1,6}=(\d{1,3}|0x[0-9a-f]+);?"
    (output,) = llm.generate(["x"], params({"regex": pattern}, n=24, max_tokens=30), use_tqdm=False)
    stopped = [c.text for c in output.outputs if c.finish_reason == "stop"]
    assert len(stopped) > 12 and all(re.fullmatch(pattern, text) for text in stopped)


def test_output_follows_the_grammar(llm: LLM) -> None:
    sums = 'start: number ("+" number)~1..3\nnumber: /[1-9][0-9]?/ | "(" start ")"'
    (output,) = llm.generate(["x"], params({"grammar": sums}, n=20), use_tqdm=False)
    stopped = [c.text for c in output.outputs if c.finish_reason == "stop"]
    assert len(stopped) > 10 and all(re.fullmatch(r"[0-9+()]+", t) and eval(t) > 0 and "+" in t for t in stopped)


def test_beam_search_returns_the_best_outputs_of_the_grammar(llm: LLM) -> None:
    choices = ["aw", "awx", "ax", "by", "bz", "c", "cdef", "cdez", "cw", "d", "exyz", "exyw", "fw", "fx", "gab", "gaw"]
    beams = BeamSearchParams(
        beam_width=16, max_tokens=5, length_penalty=0.0, early_stopping="never", structured_outputs={"choice": choices}
    )  # type: ignore[arg-type]
    output = one(llm, "say", beams)
    assert [c.finish_reason for c in output.outputs] == ["stop"] * 16
    assert sorted(c.text for c in output.outputs) == sorted(choices)
    # The score is the model's own log-probability of each output, the stop token included.
    prompt = llm.get_tokenizer().encode("say")
    given = [{"prompt_token_ids": prompt + c.token_ids} for c in output.outputs]
    scored = llm.generate(given, SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
    for c, whole in zip(output.outputs, scored, strict=True):
        assert whole.prompt_logprobs is not None
        entries = zip(c.token_ids, whole.prompt_logprobs[len(prompt) :], strict=True)
        assert c.score == pytest.approx(sum(e[t].logprob for t, e in entries if e is not None), abs=1e-4)


def test_logprobs_are_unmasked(llm: LLM) -> None:
    output = one(llm, "tell", params({"regex": "[ab]{8}"}, logprobs=2, temperature=0.0))
    (c,) = output.outputs
    given = {"prompt_token_ids": [*output.prompt_token_ids, *c.token_ids]}
    whole = one(llm, given, SamplingParams(max_tokens=0, prompt_logprobs=0))  # type: ignore[arg-type]
    assert c.logprobs is not None and whole.prompt_logprobs is not None and set(c.text) <= set("ab")
    num_masked_top = 0
    for token, entry, other in zip(
        c.token_ids, c.logprobs, whole.prompt_logprobs[len(output.prompt_token_ids) :], strict=True
    ):
        assert entry is not None and other is not None
        assert entry[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)
        num_masked_top += len(entry) > 2  # the two top tokens are others: the grammar forbids them
    assert num_masked_top > 4


# -- with the other parameters -----------------------------------------------------------------------------------------


def test_grammar_of_all_texts_changes_nothing(llm: LLM) -> None:
    """The grammar allows any text. Special tokens are no text, so both sides exclude them."""
    letters = {"regex": "[!-~]*"}
    base = {"logit_bias": {PAD: -100.0, BOS: -100.0, EOS: 2.0}, "max_tokens": 25}
    cases: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"n": 4},
        {"best_of": 4, "n": 2},
        {"top_p": 0.7, "top_k": 9, "min_p": 0.01},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.4},
        {"bad_words": ["a", "bc"], "min_tokens": 9},
        {"allowed_token_ids": [EOS, *range(10, 60)]},
        {"stop": ["a", "Q"]},
        {"stop_token_ids": [33, 44], "ignore_eos": True, "logit_bias": {PAD: -100.0, BOS: -100.0, EOS: -100.0}},
        {"logprobs": 3},
        {"echo": True, "logprobs": 1},
    ]
    asked = [params(form, **(base | case)) for form in (None, letters) for case in cases]
    prompts = [f"prompt{i % len(cases)}" for i in range(len(asked))]
    outputs = llm.generate(prompts, asked, use_tqdm=False)
    free, kept = outputs[: len(cases)], outputs[len(cases) :]
    for case, a, b in zip(cases, free, kept, strict=True):
        assert completions(a) == completions(b), case
        assert logprobs(a) == pytest.approx(logprobs(b), abs=1e-4)
    assert len({c.finish_reason for o in free for c in o.outputs}) == 2


def test_other_parameters_choose_among_allowed_tokens(llm: LLM) -> None:
    tokens = llm.input_processor.tokenizer
    a, b, q = (tokens.encode(text)[0] for text in "abq")
    form = {"regex": "[abc]{6}"}
    assert one(llm, "x", params(form, logit_bias={b: 100.0, q: 100.0})).outputs[0].text == "bbbbbb"
    assert one(llm, "x", params(form, allowed_token_ids=[a, q, EOS])).outputs[0].text == "aaaaaa"
    assert "aa" not in one(llm, "x", params(form, bad_words=["aa"], n=8)).outputs[0].text
    stopped = one(llm, "x", params(form, stop="b", logit_bias={b: 50.0})).outputs[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("", "stop", "b")
    short = one(llm, "x", params(form, max_tokens=4)).outputs[0]
    assert (len(short.text), short.finish_reason) == (4, "length")


def test_stop_token_is_allowed_exactly_where_the_output_is_complete(llm: LLM) -> None:
    tokens = llm.input_processor.tokenizer
    (y,) = tokens.encode("y")
    biased_stops = {EOS: 100.0, y: 100.0}
    for options, ends in (
        ({}, [EOS]),
        ({"stop_token_ids": [y]}, [EOS, y]),
        ({"stop_token_ids": [y], "ignore_eos": True}, [y]),
    ):
        output = one(llm, "p", params({"regex": "[xyz]{3,9}"}, logit_bias=dict.fromkeys(ends, 100.0), **options))
        (c,) = output.outputs
        assert c.finish_reason == "stop" and c.token_ids[-1] in ends and len(c.text) == 3
        assert not set(c.token_ids[:-1]) & set(ends), "a stop token is an end, and no letter"
    # min_tokens delays the end where the output can continue.
    output = one(llm, "p", params({"regex": "[xz]{3,9}"}, logit_bias=biased_stops, min_tokens=7))
    assert len(output.outputs[0].text) == 7


def test_ignored_eos_fills_up_complete_outputs(llm: LLM) -> None:
    output = one(llm, "p", params({"choice": ["xx", "zz"]}, ignore_eos=True, max_tokens=9))
    (c,) = output.outputs
    assert c.text in ("xx", "zz") and c.token_ids[2:] == [EOS] * 7 and c.finish_reason == "length"
    # An output that can continue does, even if the model prefers to end.
    output = one(llm, "p", params({"regex": "[xz]{2,}"}, ignore_eos=True, max_tokens=9, logit_bias={EOS: 100.0}))
    assert re.fullmatch("[xz]{9}", output.outputs[0].text)


# -- together with others ----------------------------------------------------------------------------------------------


def test_batch_of_all_kinds_equals_single_requests(talking: Path) -> None:
    requests: list[SamplingParams | BeamSearchParams] = [
        params(None, temperature=0.0, max_tokens=20),
        params(None, n=4, max_tokens=20),
        BeamSearchParams(beam_width=4, max_tokens=12, ignore_eos=True),
        params({"json": SCHEMA}, max_tokens=70),
        params({"json": SCHEMA}, n=3, max_tokens=50),
        BeamSearchParams(beam_width=3, max_tokens=40, structured_outputs={"json": SCHEMA}),  # type: ignore[arg-type]
        params({"regex": "[a-f]+"}, max_tokens=50, ignore_eos=True),
    ]
    prompts = [f"a common beginning, {i}".replace(" ", "_") for i in range(len(requests))]
    solo = []
    for prompt, request in zip(prompts, requests, strict=True):
        with open_llm(talking) as llm:
            solo.append(completions(one(llm, prompt, request)))
    with open_llm(talking, decode_window=4) as llm:
        prompts_of, client = llm.input_processor, StepClient(llm.engine)
        for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
            client.add_request(
                EngineRequest(
                    str(i),
                    prompts_of.encode(prompt)[1],
                    request,
                    grammar=prompts_of.compile_grammar(request),
                    make_detokenizer=prompts_of.make_detokenizer,
                )
            )
        together: dict[str, RequestOutput] = {}
        for step in range(400):
            if step == 15:
                assert (aborted := client.abort("6")) is not None
                assert re.fullmatch("[a-f]+", aborted.outputs[0].text)
            together.update((o.request_id, o) for o in client.step())
            if not llm.engine.has_work:
                break
        for i in (3, 4, 5):
            assert all(fits(text) for text, _, reason in solo[i] if reason == "stop")
        for i in range(6):
            assert completions(together[str(i)]) == solo[i], requests[i]
        assert llm.kv_stats().num_used == 0


def test_steps_are_planned_before_their_bitmasks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device computes the next position while the host computes the mask of the previous token."""
    pending: list[int] = []
    submit = ThreadedExecutor.submit

    def spied(self: ThreadedExecutor, plan: StepPlan) -> StepHandle:
        pending.append(llm.engine.scheduler.in_flight[-1].sequences[0].num_pending)
        return submit(self, plan)

    monkeypatch.setattr(ThreadedExecutor, "submit", spied)
    llm.generate(["abc"], params({"regex": "[ab]{5}"}), use_tqdm=False)
    assert pending == [1] + [2] * 6


@pytest.mark.parametrize("overlap", [False, True])
def test_decode_windows_of_constrained_requests(talking: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan for several tokens, each with its own mask; also next to an unconstrained request."""
    plans: list[StepPlan] = []
    submit = ThreadedExecutor.submit

    def spied(self: ThreadedExecutor, plan: StepPlan) -> StepHandle:
        plans.append(plan)
        return submit(self, plan)

    monkeypatch.setattr(ThreadedExecutor, "submit", spied)
    requests = [params({"regex": "[ab]{9}"}), params({"regex": "x[yz]{3}"}, n=2), params(None, max_tokens=11)]
    prompts = ["abc", "ab", "abcd"]
    with open_llm(talking, async_scheduling=overlap) as llm:
        expected = [completions(o) for o in llm.generate(prompts, requests, use_tqdm=False)]
    plans.clear()
    with open_llm(talking, async_scheduling=overlap, decode_window=5) as llm:
        assert [completions(o) for o in llm.generate(prompts, requests, use_tqdm=False)] == expected
    assert max(plan.num_bitmask_columns for plan in plans) == 5 and len(plans) <= 6


def test_first_column_that_arrives_in_parts(talking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a prompt's logits take several passes, its first token arrives after others' of the same step. Masks of the
    second column wait for it."""
    monkeypatch.setattr(prefill_batch, "MAX_PROMPT_LOGITS", 1)
    record = OutputBuffers.record_result

    def slow(self: OutputBuffers, *given: Any) -> None:
        time.sleep(0.02)  # so that tokens of two passes never arrive together
        record(self, *given)

    monkeypatch.setattr(OutputBuffers, "record_result", slow)
    asks = params({"regex": "(c[de]f){4}"}, prompt_logprobs=1, max_tokens=20)
    requests, prompts = [params({"regex": "[ab]{24}"}, max_tokens=30), asks], ["abc", "abcdefghijklmno"]
    found = []
    for window in (1, 3):
        with open_llm(talking, decode_window=window, max_num_batched_tokens=9) as llm:
            outputs = llm.generate(prompts, requests, use_tqdm=False)
        found.append([completions(o) for o in outputs])
        assert [len(o.outputs[0].token_ids) for o in outputs] == [25, 13]
    assert found[0] == found[1]


# -- failures ----------------------------------------------------------------------------------------------------------


def test_request_without_an_allowed_token_fails(llm: LLM) -> None:
    a = llm.get_tokenizer().encode("a")[0]
    asked = [
        params({"choice": ["aa"]}, min_tokens=9),
        params({"regex": "b+"}, allowed_token_ids=[a]),
        params({"regex": "a{3}"}, temperature=0.0),
        BeamSearchParams(beam_width=2, max_tokens=9, structured_outputs={"regex": "aaaa"}),  # type: ignore[arg-type]
        params({"regex": "b+"}, allowed_token_ids=[a], n=3, best_of=4),
        params({"regex": "a漢"}),  # the model has no tokens for it
    ]
    outputs = llm.generate(["x"] * 5, asked[:3] + asked[4:], use_tqdm=False)  # type: ignore[arg-type]
    for failed in (outputs[0], outputs[1], outputs[3], outputs[4]):
        for c in failed.outputs:
            assert c.finish_reason == "error" and str(c.stop_reason).startswith("no_allowed_token: ")
    assert outputs[2].outputs[0].text == "aaa"
    assert one(llm, "x", asked[3]).outputs[0].text == "aaaa"
    assert llm.kv_stats().num_used == 0


def test_grammar_that_breaks_fails_its_request_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a mask is computed, or while a token is accepted: as for a grammar that becomes too complex."""
    calls = {"apply_stop_tokens": 0, "accept_tokens": 0}
    for owner, name in ((RequestGrammar, "apply_stop_tokens"), (Matcher, "accept_tokens")):
        inner = getattr(owner, name)

        def broken(self: Any, *args: Any, name: str = name, inner: Any = inner) -> Any:
            if "Q" in str(getattr(self, "mark", "")) or calls[name] == 7:
                calls[name] += 1
                raise RuntimeError(f"cannot {name}")
            calls[name] += 1
            return inner(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            outputs = llm.generate(
                ["one", "two", "free"],
                [params({"regex": "[ab]{12}"}), params({"regex": "[cd]{12}"}, n=2), params(None, max_tokens=15)],
                use_tqdm=False,
            )
        failed = [o for o in outputs if any(c.finish_reason == "error" for c in o.outputs)]
        assert len(failed) == 1 and outputs[2] is not failed[0]
        assert f"cannot be followed: cannot {name}" in str(failed[0].outputs[0].stop_reason)
        for o, pattern in zip(outputs[:2], ("[ab]{12}", "[cd]{12}"), strict=True):
            assert o is failed[0] or all(re.fullmatch(pattern, c.text) for c in o.outputs)
        assert llm.kv_stats().num_used == 0


def test_failed_request_is_output_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a token of its stream arrived in the same step."""
    finish, calls = RequestGrammar.apply_stop_tokens, []

    def broken(self: RequestGrammar, matcher: Any, mask: memoryview) -> None:
        calls.append(mask)
        if len(calls) == 4:
            raise ValueError("too complex")
        finish(self, matcher, mask)

    monkeypatch.setattr(RequestGrammar, "apply_stop_tokens", broken)
    monkeypatch.setattr(StepHandle, "done", True)  # tokens arrive only with the end of their step
    asked = params({"regex": "[ab]{9}"})
    client = StepClient(llm.engine)
    client.add_request(
        EngineRequest("a", [5, 6, 7], asked, grammar=llm.input_processor.compile_grammar(asked), stream=True)
    )
    outputs = client.run_to_end()
    assert [o.finished for o in outputs] == [False, False, True]
    assert len(outputs[-1].outputs[0].token_ids) == 3 and "too complex" in str(outputs[-1].outputs[0].stop_reason)


def test_failed_step_is_recomputed(talking: Path) -> None:
    asked = [params({"json": SCHEMA}), params({"regex": "[a-z]{20}"}, n=2), params(None)]
    beams = BeamSearchParams(beam_width=3, max_tokens=15, structured_outputs={"regex": "[a-z]{20}"})  # type: ignore[arg-type]
    prompts = ["one", "two", "three"]
    with open_llm(talking) as llm:
        expected = [completions(o) for o in llm.generate(prompts, asked, use_tqdm=False)]
        best = completions(one(llm, "four", beams))

    def fail(number: int, tokens: list[int]) -> None:
        if number in (3, 14, 25, 36):
            raise RuntimeError("no luck")

    with open_llm(talking) as llm:
        WrappedModel(llm, before=fail)
        assert [completions(o) for o in llm.generate(prompts, asked, use_tqdm=False)] == expected
        assert llm.stats().num_failed_steps == 4
    with open_llm(talking) as llm:
        WrappedModel(llm, before=fail)
        assert completions(one(llm, "four", beams)) == best


def test_uncompilable_grammar_is_rejected(llm: LLM) -> None:
    for form, code in (
        ({"json": {"type": "strong"}}, "invalid_json_schema"),
        ({"json": {"$ref": "http://localhost/a"}}, "invalid_json_schema"),
        ({"regex": "(a"}, "invalid_grammar"),
        ({"grammar": "start: start"}, "invalid_grammar"),
        ({"regex": "漢"}, "invalid_grammar"),  # the model has no tokens for it
    ):
        with pytest.raises(ParameterError) as caught:
            llm.generate(["a", "b"], [params(None), params(form)], use_tqdm=False)
        assert (caught.value.code, caught.value.param) == (code, "structured_outputs")
        assert llm.engine.num_requests == 0


def test_structured_outputs_need_a_tokenizer(talking: Path) -> None:
    with (
        open_llm(talking, skip_tokenizer_init=True) as llm,
        pytest.raises(ParameterError, match="no tokenizer"),
    ):
        llm.generate([[3, 4]], params({"regex": "a"}), use_tqdm=False)
    with open_llm(talking) as llm, pytest.raises(ParameterError, match="need a tokenizer"):
        llm.engine.add_request(EngineRequest("x", [3, 4], params({"regex": "a"})))


# -- on an event loop --------------------------------------------------------------------------------------------------


async def test_slow_grammar_compilation_delays_no_stream(talking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "COMPILE_S", 4.0)
    engine = AsyncLLM.from_options(str(talking), num_gpu_blocks_override=400, block_size=4)
    async with engine:

        async def last(prompt: str, asked: SamplingParams) -> RequestOutput:
            return [output async for output in engine.generate(prompt, asked)][-1]

        await asyncio.gather(*(last("warm", params({"regex": letter})) for letter in "abcd"))  # one process each
        begin = time.perf_counter()
        explosions = [asyncio.create_task(last("x", params(EXPLOSION))) for _ in range(3)]
        await asyncio.sleep(0.1)
        one_of_them = await last("form", params({"choice": ["abc", "abd"]}))
        free = await last("free", params(None, max_tokens=20))
        assert not any(task.done() for task in explosions)
        assert one_of_them.outputs[0].text in ("abc", "abd") and len(free.outputs[0].token_ids) > 0
        for task in explosions:
            with pytest.raises(ParameterError, match="to compile") as caught:
                await task
            assert caught.value.code == "invalid_json_schema"
        assert time.perf_counter() - begin < 60
        with pytest.raises(RequestFailedError) as failed:
            await last("x", params({"regex": "b"}, min_tokens=4))
        assert failed.value.code == "no_allowed_token"


async def test_abort_while_the_grammar_compiles(talking: Path) -> None:
    engine = AsyncLLM.from_options(str(talking), num_gpu_blocks_override=400, block_size=4)
    async with engine:

        async def last(asked: SamplingParams) -> str:
            text = ""
            async for output in engine.generate("x", asked):
                text = output.outputs[0].text
            return text

        leaver = asyncio.create_task(last(params({"regex": "abc"})))
        stayer = asyncio.create_task(last(params({"regex": "abc"})))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        leaver.cancel()
        assert await stayer == "abc"
        with pytest.raises(asyncio.CancelledError):
            await leaver
