"""Drafts change no token: an engine with speculation gives the outputs of one without, whatever the drafts are."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from octavo import LLM, BeamSearchParams, RequestOutput, SamplingParams
from octavo.core.policy import PreemptionMode
from octavo.engine.engine import Engine
from octavo.engine.engine_request import EngineRequest
from tests.differential.cases import PreemptingScheduler
from tests.differential.drafters import HABITS, PLACES, count_drafts, draft_by
from tests.differential.test_transformers import ManualScheduler
from tests.engine.client import StepClient
from tests.engine.models import WrappedModel, write_tokenizer
from tests.models.tiny import make_tiny_checkpoint

EOS = 2
TOLERANCE = 1e-5
"""Tolerance of log-probabilities, absolute and relative."""
SPECULATION = {"method": "suffix", "num_speculative_tokens": 5}
OPTIONS: dict[str, Any] = {"block_size": 4, "num_gpu_blocks_override": 300, "max_num_seqs": 12, "device": "cpu"}
BAD_WORDS = [[7], [20, 21], *([a, b] for a in range(60) for b in range(30, 50))]


# -- requests ----------------------------------------------------------------------------------------------------------


class Ask(NamedTuple):
    prompt: list[int]
    params: SamplingParams


def ask(i: int, **params: Any) -> Ask:
    """Prompts repeat patterns of 2 to 6 tokens. Every third begins with the same two blocks."""
    pattern = [3 + (11 * i + 5 * j * j) % 90 for j in range(2 + i % 5)]
    prompt = [5, 6, 7, 8] * 2 * (i % 3 == 0) + (pattern * 9)[: 1 + 7 * i % 20]
    common: dict[str, Any] = {"temperature": 0, "seed": 100 + i, "max_tokens": 16, "ignore_eos": True}
    return Ask(prompt, SamplingParams(**(common | params)))


def asks() -> list[Ask]:
    """At most every other one is greedy. `logit_bias` makes loops, in which drafts are right by themselves."""
    noise: dict[str, Any] = {"temperature": 1.0}
    loops: dict[str, Any] = {"logit_bias": {40: 8.0, 41: 7.5, 42: 7.0}}
    params: list[dict[str, Any]] = [
        {},
        noise | {"n": 3},
        {"max_tokens": 30} | loops,
        noise | {"top_k": 7, "top_p": 0.9, "min_p": 0.01} | loops,
        {"logprobs": 3},
        noise | {"logprobs": 20, "repetition_penalty": 1.4} | loops,
        {"presence_penalty": 0.7, "frequency_penalty": 0.9} | loops,
        noise | {"frequency_penalty": -1.5, "n": 2},
        {"allowed_token_ids": [9, 10, 50]},
        noise | {"allowed_token_ids": [EOS, 4, 5], "min_tokens": 9, "ignore_eos": False, "logprobs": 0},
        {"bad_words_token_ids": BAD_WORDS},
        noise | {"bad_words_token_ids": BAD_WORDS, "repetition_penalty": 0.8, "presence_penalty": -0.5},
        {"stop_token_ids": list(range(3, 97, 5)), "logprobs": 1},
        noise | {"stop_token_ids": list(range(5, 97, 5)), "min_tokens": 4, "frequency_penalty": 0.3},
        {"ignore_eos": False, "logit_bias": {EOS: 4.0, 11: -100.0}},
        noise | {"stop": ["I", "JI"], "logit_bias": {43: 3.0, 44: 3.0}, "max_tokens": 40},
        {"stop": [chr(c) for c in range(66, 126, 6)], "include_stop_str_in_output": True, "presence_penalty": 0.5},
        noise | {"best_of": 3, "n": 2, "max_tokens": 9},
        {"spec": False} | loops,
        noise | {"spec": False, "logprobs": 2},
        {"prompt_logprobs": 2, "logprobs": 1},
        noise | {"max_tokens": 1, "prompt_logprobs": 0},
        noise | {"max_tokens": 2},
        {"max_tokens": 3, "repetition_penalty": 1.9},
        {"frequency_penalty": -0.5, "repetition_penalty": 1.1, "logprobs": 2} | loops,
    ]
    return [ask(i, **each) for i, each in enumerate(params)]


def on_host() -> list[Ask]:
    """A step with one of these is sampled on the host, without drafts."""
    return [ask(30, logprobs=30, max_tokens=5), ask(31, temperature=1.0, prompt_logprobs=25, logprobs=21, max_tokens=4)]


def with_grammars() -> list[Ask]:
    """Parts of these texts are forced, others repeat."""

    def of(i: int, pattern: str, **params: Any) -> Ask:
        params = {"max_tokens": 12, "ignore_eos": False} | params
        return ask(40 + i, structured_outputs={"regex": pattern}, **params)

    items = "(ITEM-[a-d]:(YES|NO|MAYBE);){2,6}END"
    return [
        of(0, "[a-f]{5,9}"),
        of(1, "(ab)+c", temperature=1.0, repetition_penalty=1.2),
        of(2, "[x-z]*", n=2),
        of(3, items, max_tokens=70),
        of(4, items, max_tokens=70, temperature=1.0, n=2, frequency_penalty=0.2),
        of(5, items, max_tokens=40, temperature=1.0, stop=["YES"], min_tokens=9),
        of(6, items, max_tokens=30, ignore_eos=True, stop_token_ids=[50, 51]),
        of(7, items, max_tokens=5, logprobs=2),
    ]


def unstopped(asks: list[Ask]) -> list[Ask]:
    """The same tokens, and more after the end."""
    endless: dict[str, Any] = {
        "stop": None,
        "stop_token_ids": None,
        "ignore_eos": True,
        "max_tokens": 48,
        "logprobs": None,
    }
    return [Ask(prompt, replace(params, **endless)) for prompt, params in asks if params.stop or params.stop_token_ids]


# -- engines -----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _use_manual_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.frontend.build.Scheduler", ManualScheduler)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    @functools.cache
    def of(kind: str) -> str:
        directory = make_tiny_checkpoint(kind, tmp_path_factory.mktemp("tiny") / kind)
        write_tokenizer(directory)
        return str(directory)

    return of


def generate(llm: LLM, asks: list[Ask]) -> list[RequestOutput]:
    return llm.generate([prompt for prompt, _ in asks], [params for _, params in asks], use_tqdm=False)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    """Prompts with each of their samples."""
    return [[*o.prompt_token_ids, *c.token_ids] for o in outputs for c in o.outputs]


class Expected(NamedTuple):
    """Without speculation: outputs, and whole sequences that go on after their stop tokens and strings."""

    asks: list[Ask]
    outputs: list[RequestOutput]
    known: list[list[int]]


@pytest.fixture(scope="module")
def expected(model: Callable[[str], str]) -> Callable[[str], Expected]:
    @functools.cache
    def of(kind: str) -> Expected:
        asked = [*asks(), *on_host(), *(with_grammars() if kind == "llama" else ())]
        with LLM(model(kind), max_logprobs=30, **OPTIONS) as llm:
            outputs, longer = generate(llm, asked), generate(llm, unstopped(asked))
        return Expected(asked, outputs, tokens_of(longer) + tokens_of(outputs))

    return of


def check(outputs: list[RequestOutput], expected: Expected) -> None:
    for output, wanted, (_, params) in zip(outputs, expected.outputs, expected.asks, strict=True):
        same = [
            [(c.index, c.token_ids, c.finish_reason, c.stop_reason, c.text) for c in o.outputs]
            for o in (output, wanted)
        ]
        assert same[0] == same[1], params
        for place, other in zip(logprobs_of(output), logprobs_of(wanted), strict=True):
            assert list(place) == list(other) and [p.rank for p in place.values()] == [p.rank for p in other.values()]
            for token, entry in place.items():
                assert entry.logprob == pytest.approx(other[token].logprob, rel=TOLERANCE, abs=TOLERANCE), params


def logprobs_of(output: RequestOutput) -> list[Any]:
    return [*(output.prompt_logprobs or ())[1:], *(p for c in output.outputs for p in c.logprobs or ())]


# -- the same outputs --------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    kind: str
    place: str
    habit: str
    options: dict[str, Any]
    preempts: str = ""


WINDOWS, PLAIN = {"decode_window": 4}, {"async_scheduling": False}
CHUNKS, SWAP = {"max_num_batched_tokens": 20, "max_num_seqs": 5}, {"preemption_mode": "swap"}
ONES: dict[str, Any] = {"block_size": 1, "num_gpu_blocks_override": 600}
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 50, "preemption_mode": "recompute"}
CASES = [
    Case("llama", "cpu", "suffix", {}),
    Case("llama", "graphs", "mixed", WINDOWS),
    Case("mistral", "cpu", "mixed", WINDOWS, "recompute"),
    Case("qwen2", "stub", "suffix", {}),
    Case("qwen3", "cpu", "right", PLAIN | WINDOWS),
    Case("gemma3", "stub", "mixed", CHUNKS),
    Case("gpt2", "cpu", "wrong", CHUNKS | WINDOWS),
    Case("opt", "graphs", "right", PLAIN, "swap"),
    Case("phi3", "cpu", "mixed", SMALL | WINDOWS | SWAP),
    Case("olmo2", "graphs", "suffix", SMALL),
    Case("smollm3", "stub", "wrong", WINDOWS, "recompute"),
    Case("granite", "cpu", "suffix", ONES | PLAIN, "swap"),
    Case("starcoder2", "stub", "right", ONES | WINDOWS),
    Case("internlm2", "cpu", "right", CHUNKS | SMALL | {"num_gpu_blocks_override": 24}),
    Case("internlm3", "cpu", "mixed", {"enable_prefix_caching": False}),
]
MORE = [
    Case(kind, place, habit, options, preempts)
    for kind in ("llama", "mistral", "gemma3")
    for place in PLACES
    for habit in HABITS
    for options, preempts in ((WINDOWS | CHUNKS, "swap"), (SMALL | PLAIN, "recompute"), (ONES, ""))
]


def run(case: Case, model: str, expected: Expected, speculation: Mapping[str, Any] = SPECULATION) -> Counter[str]:
    """Run a case -> its drafts."""
    llm = LLM(model, max_logprobs=30, speculative_config=speculation, **(OPTIONS | case.options))
    with draft_by(llm, case.place, case.habit, expected.known):
        scheduler, counts = llm.engine.scheduler, count_drafts(llm)
        if case.preempts:
            assert isinstance(scheduler, PreemptingScheduler)
            scheduler.preempt_randomly(PreemptionMode(case.preempts), seed=1, max_preemptions=12)
        check(generate(llm, expected.asks), expected)
        stats = llm.kv_stats()
        assert not llm.stats().num_failed_steps
        assert stats.num_used == stats.num_host_used == 0
        assert bool(scheduler.num_preemptions) == bool(case.preempts or "preemption_mode" in case.options)
        assert bool(stats.num_swapped_in) == ("swap" in (case.preempts, case.options.get("preemption_mode")))
        assert bool(stats.num_hits) == case.options.get("enable_prefix_caching", True)
    return counts


def check_counts(case: Case, counts: Counter[str]) -> None:
    right, wrong = counts["right"], counts["wrong"]
    assert not counts["unwanted"]
    if case.habit == "right":  # but for unknown sequences, such as those of an earlier sample
        assert right > 60 and wrong < right / 5, counts
    elif case.habit == "wrong":  # by chance, a random draft after the end of a known sequence is right
        assert wrong > 50 and right < wrong / 20, counts
    else:
        assert right > 20 and wrong > 8, counts


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}-{case.place}-{case.habit}")
def test_drafts_change_no_output(case: Case, model: Any, expected: Callable[[str], Expected]) -> None:
    counts = run(case, model(case.kind), expected(case.kind))
    check_counts(case, counts)


@pytest.mark.proof
@pytest.mark.parametrize("case", MORE, ids=lambda case: f"{case.kind}-{case.place}-{case.habit}-{len(case.options)}")
def test_drafts_change_no_output_in_more_cases(case: Case, model: Any, expected: Callable[[str], Expected]) -> None:
    assert run(case, model(case.kind), expected(case.kind))["passes"] > 5


# -- beside beams, and after another engine ----------------------------------------------------------------------------


def in_engine_thread(llm: LLM, work: Callable[[Engine], Any]) -> Any:
    assert llm.thread is not None
    return llm.thread.call(work).result()


@pytest.mark.parametrize(("place", "window"), [("cpu", 1), ("stub", 4), ("graphs", 4)])
def test_beams_are_the_same_beside_drafts(model: Any, place: str, window: int) -> None:
    """A step with beams is sampled on the host, without drafts. Drafts begin when the beams have ended."""
    beams = BeamSearchParams(beam_width=3, max_tokens=7, ignore_eos=True)
    asked = [*asks()[:4], *(Ask(prompt, beams) for prompt, _ in asks()[4:6]), *asks()[6:9]]  # type: ignore[arg-type]

    def outputs(engine: Engine) -> list[Any]:
        client = StepClient(engine)
        for i, (prompt, params) in enumerate(asked):
            client.add_request(EngineRequest(str(i), prompt, params))
        found = sorted(client.run_to_end(), key=lambda output: int(output.request_id))
        return [[(c.token_ids, c.finish_reason) for c in output.outputs] for output in found]

    with LLM(model("llama"), **OPTIONS) as llm:
        expected = in_engine_thread(llm, outputs)
    llm = LLM(model("llama"), decode_window=window, speculative_config=SPECULATION, **OPTIONS)
    with draft_by(llm, place, "suffix"):
        counts = count_drafts(llm)
        assert in_engine_thread(llm, outputs) == expected and len(expected[4]) == 3
    assert counts["right"] > 10 and counts["wrong"] > 5


@pytest.mark.parametrize(("habit", "window"), [("suffix", 1), ("mixed", 4)])
def test_grammars_get_the_same_tokens_in_fewer_passes(model: Any, habit: str, window: int) -> None:
    asked = [Ask([*prompt, 3 + i], params) for i in range(3) for prompt, params in with_grammars()]
    with LLM(model("llama"), **OPTIONS) as llm:
        outputs = generate(llm, asked)
    llm = LLM(model("llama"), speculative_config=SPECULATION, decode_window=window, **OPTIONS)
    with draft_by(llm, "cpu", habit):
        counts = count_drafts(llm)
        check(generate(llm, asked), Expected(asked, outputs, []))
    assert counts["right"] > 150 and counts["wrong"] > 20


@pytest.mark.parametrize(("place", "window"), [("cpu", 4), ("stub", 1), ("graphs", 4)])
def test_resumed_requests_get_the_same_tokens(model: Any, expected: Any, place: str, window: int) -> None:
    """Each resumes after 1 to 9 tokens of each sample, and its drafts begin with tokens of another engine."""
    want = expected("llama")
    chosen = [i for i, (_, p) in enumerate(want.asks) if not (p.stop or p.best_of or p.structured_outputs)]

    def tokens(engine: Engine) -> dict[tuple[int, int], list[int]]:
        found = {}
        for i in chosen:
            cut = {c.index: c.token_ids[: 1 + i % 9] for c in want.outputs[i].outputs}
            live = {j: list(cut[j]) for j in cut if len(cut[j]) < len(want.outputs[i].outputs[j].token_ids)}
            found.update({(i, j): list(tokens) for j, tokens in live.items()})
            if live:
                prompt, params = want.asks[i]
                engine.add_request(EngineRequest(str(i), prompt, params, resume=live))
        while engine.has_work:
            for update in engine.step():
                for sample in update.samples:
                    known = found[int(update.request_id), sample.index]
                    known[sample.position :] = sample.token_ids
        return found

    options = OPTIONS | {"decode_window": window, "max_logprobs": 30}
    llm = LLM(model("llama"), speculative_config=SPECULATION, **options)
    with draft_by(llm, place, "mixed", want.known):
        counts = count_drafts(llm)
        found = in_engine_thread(llm, tokens)
    assert len(found) == 20
    assert found == {(i, j): want.outputs[i].outputs[j].token_ids for i, j in found}
    assert counts["right"] > 20 and counts["wrong"] > 10


# -- logits that are not finite ----------------------------------------------------------------------------------------

NAN_ASKS = [ask(i, max_tokens=20, temperature=float(i % 2)) for i in range(6)]
VICTIM = 3


def poisoned(llm: LLM, chosen: Callable[[Tensor, Tensor], Tensor]) -> list[int]:
    """Let decode passes return NaN for the `chosen` ones of their lines (depths, token ids), and write NaN to their
    blocks -> the depths of these lines, in time."""
    depths_hit: list[int] = []

    def spoil(number: int, tokens: list[int], logits: Tensor) -> None:
        inputs = runner.passes.inputs
        if len(tokens) > len(inputs.rows) or tokens != inputs.token_ids[: len(tokens)].tolist():
            return  # a prefill pass
        depths = inputs.depths[: len(tokens)]
        hit = chosen(depths, torch.tensor(tokens)) & (inputs.live_rows[: len(tokens)] != runner.state.rows.null_row)
        logits[hit] = math.nan
        slots = inputs.batch.slot_mapping[: len(tokens)][hit]
        size = runner.state.kv.shape[4]
        runner.state.kv[slots // size, :, :, :, slots % size] = math.nan
        depths_hit.extend(depths[hit].tolist())

    runner = WrappedModel(llm, after=spoil).runner
    return depths_hit


@pytest.fixture(scope="module")
def finite(model: Any) -> list[list[int]]:
    with LLM(model("llama"), **OPTIONS) as llm:
        return tokens_of(generate(llm, NAN_ASKS))


@pytest.mark.parametrize(("place", "window"), [("cpu", 1), ("cpu", 4), ("stub", 4)])
def test_nan_at_rejected_positions_fails_nobody(model: Any, finite: list[list[int]], place: str, window: int) -> None:
    llm = LLM(model("llama"), decode_window=window, speculative_config=SPECULATION, **OPTIONS)
    with draft_by(llm, place, "wrong", finite):
        hits = poisoned(llm, lambda depths, tokens: depths > 0)
        for _ in range(2):  # blocks that hold NaN serve again
            assert tokens_of(generate(llm, NAN_ASKS)) == finite
    assert len(hits) > 100


@pytest.mark.parametrize(("place", "window"), [("cpu", 1), ("cpu", 4), ("stub", 4)])
def test_nan_at_an_accepted_position_fails_one_request(
    model: Any, finite: list[list[int]], place: str, window: int
) -> None:
    """At tokens that are in no other request. At least one of them was a draft."""
    others = {token for i, tokens in enumerate(finite) for token in tokens if i != VICTIM}
    tokens, num_prompt = finite[VICTIM], len(NAN_ASKS[VICTIM].prompt)
    found = [at for at in range(num_prompt + 2, len(tokens) - 2) if tokens[at] not in others.union(tokens[:at])]
    depths: list[int] = []
    for at in found[:3]:
        llm = LLM(model("llama"), decode_window=window, speculative_config=SPECULATION, **OPTIONS)
        with draft_by(llm, place, "right", finite):
            hits = poisoned(llm, lambda depths, ids, spoilt=tokens[at]: ids == spoilt)  # type: ignore[misc]
            outputs = generate(llm, NAN_ASKS)
        failed = outputs.pop(VICTIM).outputs[0]
        assert failed.finish_reason == "error" and "not finite" in str(failed.stop_reason)
        num = len(failed.token_ids)  # the tokens of the step that failed are lost
        assert num <= at + 1 - num_prompt and failed.token_ids == tokens[num_prompt : num_prompt + num]
        assert tokens_of(outputs) == finite[:VICTIM] + finite[VICTIM + 1 :]
        depths.append(hits[0])
    assert max(depths) > 0


# -- drafts from other requests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "window"), [("suffix", 1), ("suffix", 4), ("ngram", 1)])
def test_equal_requests_of_one_salt_draft_from_each_other(model: Any, method: str, window: int) -> None:
    """One after another, with noise. Those of another salt begin without the tokens of the first."""
    prompt, params = list(range(3, 20)), SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True)
    salts = [b"a", b"a", b"b", b"b", b"", b"a"]

    def outputs(engine: Engine) -> tuple[list[list[int]], list[int]]:
        client, found, num_right = StepClient(engine), [], []
        for i, salt in enumerate(salts):
            before = counts["right"]
            client.add_request(EngineRequest(str(i), prompt, params, salt=salt))
            (output,) = client.run_to_end()
            found.append(list(output.outputs[0].token_ids))
            num_right.append(counts["right"] - before)
        return found, num_right

    with LLM(model("llama"), **OPTIONS) as llm:
        counts = count_drafts(llm)
        expected, _ = in_engine_thread(llm, outputs)
    config = SPECULATION | {"method": method}
    llm = LLM(model("llama"), decode_window=window, speculative_config=config, **OPTIONS)
    with draft_by(llm, "cpu", "suffix"):
        counts = count_drafts(llm)
        found, num_right = in_engine_thread(llm, outputs)
    assert found == expected and len(set(map(tuple, found))) == 1
    firsts, repeats = ([num_right[i] for i in which] for which in ((0, 2, 4), (1, 3, 5)))
    assert firsts == [0, 0, 0]
    assert min(repeats) > 40 if method == "suffix" else repeats == [0, 0, 0]


def test_all_kinds_of_requests_draft_from_what_they_gave_before(model: Any, expected: Any) -> None:
    want, num_right = expected("llama"), []
    llm = LLM(model("llama"), max_logprobs=30, decode_window=4, speculative_config=SPECULATION, **OPTIONS)
    with draft_by(llm, "cpu", "suffix"):
        counts = count_drafts(llm)
        for _ in range(2):
            check(generate(llm, want.asks), want)
            num_right.append(counts["right"])
    assert num_right[1] - num_right[0] > num_right[0] and not counts["unwanted"], num_right
