"""Sampling parameters of `LLM`: rejected values, contents of outputs, and isolation of requests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.engine.engine_request import EngineRequest
from octavo.errors import CheckpointError, ContextLengthError, ModelNotFoundError, ParameterError
from octavo.params.sampling_params import RequestOutputKind

BASE: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
GREEDY = SamplingParams(**BASE)
OPTIONS: dict[str, Any] = {"block_size": 4, "num_gpu_blocks_override": 400, "max_num_seqs": 40}
PROMPTS = ["Hello", "What?", "a", "give-me-a-story", "Hello,world", "1+1=", "xyzzy", "The"]
EOS = 2


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, **OPTIONS) as made:
        yield made


def sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(**(BASE | fields))


def generate(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def one(llm: LLM, prompt: Any, **words: Any) -> Any:
    (output,) = generate(llm, prompt, sampling(**words))
    return output.outputs[0]


def close(entries: Any) -> Any:
    """Log-probabilities, equal up to the last digits of float32, which depend on the batch shape."""
    if entries is None:
        return None
    return [
        e and [(t, p.rank, p.decoded_token, pytest.approx(p.logprob, abs=1e-4)) for t, p in e.items()] for e in entries
    ]


def known(entries: Any) -> Any:
    """Log-probabilities as numbers, for comparison with `close`."""
    return entries and [e and [(t, p.rank, p.decoded_token, p.logprob) for t, p in e.items()] for e in entries]


def same(ours: Any, wanted: Any) -> bool:
    """True if two completions are equal."""
    mine, other = ([c.index, c.text, c.token_ids, c.finish_reason, c.stop_reason] for c in (ours, wanted))
    return mine == other and known(ours.logprobs) == close(wanted.logprobs)


# -- rejected values --------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"stop_token_ids": [97]}, "invalid_token_id", "stop_token_ids has token 97, the vocabulary has 97 tokens"),
    ({"allowed_token_ids": [5, 1 << 30]}, "invalid_token_id", "allowed_token_ids has token 1073741824, "),
    ({"bad_words_token_ids": [[5], [6, 97]]}, "invalid_token_id", "bad_words_token_ids has token 97, "),
    ({"logit_bias": {97: 1}}, "invalid_logit_bias", "logit_bias has token 97, the vocabulary has 97 tokens"),
    ({"logprobs": 21}, "invalid_value", "logprobs is 21, and the limit is 20; raise max_logprobs"),
    ({"logprobs": -1}, "invalid_value", "logprobs is -1, and the limit is 20; raise max_logprobs"),
    ({"prompt_logprobs": 21}, "invalid_value", "prompt_logprobs is 21, and the limit is 20"),
    ({"max_tokens": None, "min_tokens": 200}, "invalid_value", "min_tokens is 200, and the output has at most 123"),
    (
        {"allowed_token_ids": [5, 6], "bad_words_token_ids": [[6], [5], [5, 7]]},
        "no_allowed_token",
        "forbid all of allowed_token_ids",
    ),
    (
        {"allowed_token_ids": [EOS, 9], "stop_token_ids": [9], "min_tokens": 1, "ignore_eos": False},
        "no_allowed_token",
        "forbid all of allowed_token_ids",
    ),
]


@pytest.mark.parametrize(("words", "code", "message"), BAD, ids=[m[:40] for _, _, m in BAD])
def test_parameter_out_of_range_for_the_model_is_rejected(
    llm: LLM, words: dict[str, Any], code: str, message: str
) -> None:
    for ask in (lambda: generate(llm, PROMPTS, sampling(**words)), lambda: llm.stream("Hello", sampling(**words))):
        with pytest.raises(ParameterError) as caught:
            ask()
        text = str(caught.value)
        assert message in text and "\n" not in text
        assert (caught.value.code, caught.value.param) == (code, next(n for n in words if n in text))
    assert not llm.engine.num_requests


def test_boundary_values_are_accepted(llm: LLM) -> None:
    completion = one(
        llm, "Hello", logprobs=20, allowed_token_ids=[0, 96], stop_token_ids=[96], logit_bias={96: -100, 0: 100},
        bad_words_token_ids=[[96, 96]], min_tokens=1,
    )  # fmt: skip
    assert completion.token_ids == [0] * 16 and len(completion.logprobs[0]) == 21  # the top tokens are others


def test_bad_words_need_a_tokenizer(model: str) -> None:
    with LLM(model, skip_tokenizer_init=True, **OPTIONS) as llm:
        with pytest.raises(ParameterError, match="skip_tokenizer_init"):
            generate(llm, [5], sampling(bad_words=["x"]))
        with pytest.raises(ParameterError, match="use bad_words_token_ids"):
            llm.engine.add_request(EngineRequest("x", [5], sampling(bad_words=["x"])))
        assert one(llm, [5], bad_words_token_ids=[[7]]).text == ""


# -- one request and its neighbours -----------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 8])
@pytest.mark.parametrize("seed", range(3))
def test_request_without_allowed_tokens_fails_alone(model: str, window: int, seed: int) -> None:
    """Its only token may come twice; the third time it completes a bad word, and every token is masked."""
    prompts = [[20 + i, 9, 9, 9, 30 + i] for i in range(32)]
    mix: list[dict[str, Any]] = [
        {}, {"temperature": 0.9, "seed": 4}, {"repetition_penalty": 1.5}, {"logprobs": 2}, {"logit_bias": {7: 3.0}},
        {"allowed_token_ids": list(range(40))}, {"bad_words": ["ab", "c"]}, {"prompt_logprobs": 1}, {"min_tokens": 9},
    ]  # fmt: skip
    params = [sampling(**mix[i % len(mix)]) for i in range(32)]
    victim = (7, 16, 31)[seed]
    with LLM(model, decode_window=window, enable_prefix_caching=False, **OPTIONS) as llm:
        wanted = generate(llm, prompts, params)
        params[victim] = sampling(allowed_token_ids=[5], bad_words_token_ids=[[5, 5, 5]], temperature=0.5, logprobs=0)
        outputs = generate(llm, prompts, params)
        for i, (output, healthy) in enumerate(zip(outputs, wanted, strict=True)):
            if i == victim:
                (completion,) = output.outputs
                # Earlier tokens of the decode window in which it fails may be lost.
                assert completion.finish_reason == "error" and completion.token_ids in ([5, 5], [5], [])
                assert completion.token_ids == [5, 5] or window > 1
                assert str(completion.stop_reason).startswith("no_allowed_token: ")
                assert len(completion.logprobs or []) == len(completion.token_ids)
            else:
                assert same(output.outputs[0], healthy.outputs[0])
                assert known(output.prompt_logprobs) == close(healthy.prompt_logprobs)
        assert not llm.kv_stats().num_used


# -- bad words, minimum and stops -------------------------------------------------------------------------------------


def test_bad_words_are_forbidden_with_and_without_a_space(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = one(llm, "Hello").text
    words = [plain[4:6], plain[0]]
    text = one(llm, "Hello", bad_words=words).text
    assert text != plain and not any(word in text for word in words)
    tokenizer = llm.input_processor.tokenizer
    monkeypatch.setattr(tokenizer, "encode", lambda text, add_special_tokens=True: [1000 + len(text)])
    prepared = llm.input_processor.prepare_params(sampling(bad_words=[" to", "be"], bad_words_token_ids=[[3, 4]]))
    assert prepared.bad_words_token_ids == ((3, 4), (1002,), (1003,))  # "to" and " to", as "be" and " be"


def test_min_tokens_delays_every_stop(llm: LLM) -> None:
    plain = one(llm, "Hello")
    first, text = plain.token_ids[0], plain.text
    stops_first = sampling(stop_token_ids=[first])
    assert one(llm, "Hello", stop_token_ids=[first]).token_ids == [first]
    delayed = one(llm, "Hello", stop_token_ids=[first], min_tokens=5)
    assert len(delayed.token_ids) >= 6 and first not in delayed.token_ids[:5]
    # A stop string completed within min_tokens never counts; the next one does.
    stop = text[1:3]
    assert one(llm, "Hello", stop=[stop]).text == text[:1]
    for n in (3, 4):  # its last character is that of the third token
        completion = one(llm, "Hello", stop=[stop], min_tokens=n)
        again = text.find(stop, 2)
        assert completion.text == (text if again < 0 else text[:again])
    assert one(llm, "Hello", stop=[stop], min_tokens=2).text == text[:1]
    assert stops_first.stop_token_ids == (first,)


def test_stop_string_cuts_logprobs_with_the_tokens(model: str) -> None:
    with LLM(model, decode_window=8, **OPTIONS) as llm:
        plain = one(llm, "Hello", logprobs=1)
        completion = one(llm, "Hello", logprobs=1, stop=[plain.text[3:5]])
        assert len(completion.token_ids) == 5 and known(completion.logprobs) == close(plain.logprobs[:5])
        total = sum(entry[t].logprob for entry, t in zip(completion.logprobs, completion.token_ids, strict=True))
        assert completion.cumulative_logprob == pytest.approx(total)
        for entry, token in zip(plain.logprobs, plain.token_ids, strict=True):
            assert entry[token].rank == 1 and entry[token].decoded_token == llm.get_tokenizer().decode([token])


# -- the prompt -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["Hello", [5, 6, 7, 8, 9, 10, 11]], ids=["text", "ids"])
def test_echo_prepends_the_prompt(llm: LLM, prompt: Any) -> None:
    plain, (output,) = one(llm, prompt, logprobs=2), generate(llm, prompt, sampling(echo=True, logprobs=2))
    (completion,) = output.outputs
    ids = output.prompt_token_ids
    shown = prompt if isinstance(prompt, str) else llm.get_tokenizer().decode(prompt)
    assert completion.text == shown + plain.text and output.prompt == shown
    assert completion.token_ids == ids + plain.token_ids
    assert completion.logprobs[0] is None and completion.logprobs[: len(ids)] == output.prompt_logprobs
    assert known(completion.logprobs[len(ids) :]) == close(plain.logprobs)
    assert [next(iter(entry)) for entry in completion.logprobs[1:]] == completion.token_ids[1:]
    assert completion.cumulative_logprob == pytest.approx(plain.cumulative_logprob, abs=1e-4)
    assert output.metrics.num_generation_tokens == 16


def test_max_tokens_zero_returns_the_prompt_only(llm: LLM, model: str) -> None:
    """lm-eval computes the likelihood of a text this way. The prompt may fill the whole context."""
    with pytest.raises(ParameterError, match="max_tokens is 0"):
        sampling(max_tokens=0)
    longest = [3 + i % 90 for i in range(128)]
    for prompt in ([5], [5, 6, 7], longest):
        (output,) = generate(llm, prompt, sampling(max_tokens=0, prompt_logprobs=1))
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
        (completion,) = output.outputs
        assert (completion.token_ids, completion.text, completion.finish_reason) == ([], "", "length")
        assert completion.stop_reason is None and completion.logprobs is None
        (output,) = generate(llm, prompt, sampling(max_tokens=0, echo=True, logprobs=0, stop_token_ids=list(range(97))))
        (completion,) = output.outputs
        assert completion.token_ids == prompt and completion.logprobs == output.prompt_logprobs
        assert (completion.text, completion.finish_reason) == (llm.get_tokenizer().decode(prompt), "length")
        assert completion.cumulative_logprob == 0.0 and output.metrics.num_generation_tokens == 0
    with pytest.raises(ContextLengthError, match="128"):
        generate(llm, [5] * 129, sampling(max_tokens=0, echo=True))
    assert not llm.kv_stats().num_used


# -- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 4])
def test_deltas_add_up_and_final_only_yields_once(model: str, window: int) -> None:
    words = {"n": 2, "temperature": 0.9, "seed": 3, "logprobs": 1, "echo": True, "max_tokens": 12}
    with LLM(model, decode_window=window, **OPTIONS) as llm:
        (whole,) = generate(llm, "give-me-a-story", sampling(**words))
        parts = list(llm.stream("give-me-a-story", sampling(**words, output_kind=RequestOutputKind.DELTA)))
        assert len(parts) > 2 and [p.finished for p in parts] == [False] * (len(parts) - 1) + [True]
        assert known(parts[0].prompt_logprobs) == close(whole.prompt_logprobs)
        assert all(p.prompt_logprobs is None for p in parts[1:])
        for wanted in whole.outputs:
            mine = [c for p in parts for c in p.outputs if c.index == wanted.index]
            assert "".join(c.text for c in mine) == wanted.text
            assert [t for c in mine for t in c.token_ids] == wanted.token_ids
            assert known([entry for c in mine for entry in c.logprobs or []]) == close(wanted.logprobs)
            assert mine[-1].finish_reason == wanted.finish_reason and all(c.finish_reason is None for c in mine[:-1])
        assert all(c.token_ids or c.finish_reason for p in parts for c in p.outputs)
        (final,) = llm.stream("give-me-a-story", sampling(**words, output_kind=RequestOutputKind.FINAL_ONLY))
        assert all(map(same, final.outputs, whole.outputs))
        cumulative = list(llm.stream("give-me-a-story", sampling(**words)))
        assert all(map(same, cumulative[-1].outputs, whole.outputs))
        for before, after in pairwise(cumulative):
            for a, b in zip(before.outputs, after.outputs, strict=False):
                assert (b.logprobs or [])[: len(a.logprobs or [])] == a.logprobs


def test_unread_deltas_of_a_stream_are_merged(llm: LLM) -> None:
    params = sampling(output_kind=RequestOutputKind.DELTA, logprobs=0)
    (whole,) = generate(llm, "Hello", params)
    stream = llm.stream("Hello", params)
    parts = [next(stream)]
    generate(llm, "What?", sampling(max_tokens=40))  # meanwhile the first one finishes
    parts += stream
    assert len(parts) == 2
    assert [t for p in parts for t in p.outputs[0].token_ids] == whole.outputs[0].token_ids
    assert known([e for p in parts for e in p.outputs[0].logprobs or []]) == close(whole.outputs[0].logprobs)


# -- defaults ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_defaults(model: str, tmp_path: Path) -> Callable[..., Path]:
    """Makes copies of the model with the given generation_config.json."""

    def make(**words: Any) -> Path:
        path = tmp_path / "model"
        shutil.copytree(model, path)
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 17]} | words))
        return path

    return make


def test_defaults_come_from_generation_config(with_defaults: Callable[..., Path], tmp_path: Path) -> None:
    path = with_defaults(temperature=0.6, top_p=0.95, top_k=None, max_new_tokens=9, do_sample=True, typical_p=1.0)
    with LLM(str(path), **OPTIONS) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_p=0.95, max_tokens=9)
        message = "sampling defaults from generation_config.json: temperature 0.6, top_p 0.95, max_tokens 9"
        assert str(llm.sampling_defaults) == message
        assert set(llm.engine.limits.eos_token_ids) == {EOS, 17}
        assert len(llm.generate("Hello", use_tqdm=False)[0].outputs[0].token_ids) <= 9
        longer = replace(llm.get_default_sampling_params(), max_tokens=12, ignore_eos=True)
        assert len(generate(llm, "Hello", longer)[0].outputs[0].token_ids) == 12
        own = generate(llm, "Hello", SamplingParams(ignore_eos=True))  # explicit parameters ignore the defaults
        assert len(own[0].outputs[0].token_ids) == 16
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"temperature": 0.1}')
    for choice, wanted in (
        ("vllm", SamplingParams()),
        (str(other), SamplingParams(temperature=0.1)),
        (str(other / "generation_config.json"), SamplingParams(temperature=0.1)),
    ):
        with LLM(str(path), generation_config=choice, **OPTIONS) as llm:
            assert llm.get_default_sampling_params() == wanted
            assert set(llm.engine.limits.eos_token_ids) == {EOS, 17}  # the model's end-of-sequence tokens stay
            assert bool(str(llm.sampling_defaults)) == (choice != "vllm")


def test_invalid_defaults_are_rejected(with_defaults: Callable[..., Path], tmp_path: Path) -> None:
    path = with_defaults(temperature=-7)
    with pytest.raises(CheckpointError, match=r"generation_config.json: temperature is -7, .*generation_config='vllm'"):
        LLM(str(path), **OPTIONS)
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        LLM(str(path), generation_config=str(tmp_path / "nowhere"), **OPTIONS)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"broken.json is not valid JSON"):
        LLM(str(path), generation_config=str(tmp_path / "broken.json"), **OPTIONS)
    with pytest.raises(ParameterError, match="generation_config must be"):
        LLM(str(path), generation_config="", **OPTIONS)


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_of_a_request(llm: LLM) -> None:
    llm.reset_prefix_cache()
    (first,) = generate(llm, "give-me-a-story", sampling(n=2, temperature=0.9))
    (second,) = generate(llm, "give-me-a-story")
    for output, num_tokens, num_cached in ((first, 32, 0), (second, 16, 12)):
        m = output.metrics
        assert (m.num_generation_tokens, m.num_cached_tokens, output.num_cached_tokens) == (
            num_tokens,
            num_cached,
            num_cached,
        )
        times = [m.arrival_time, m.first_scheduled_time, m.first_token_time, m.last_token_time, m.finished_time]
        assert None not in times and times == sorted(t for t in times if t is not None)
        assert m.first_token_time is not None and m.last_token_time is not None
        assert m.time_in_queue_s is not None and m.time_to_first_token_s is not None and m.latency_s is not None
        assert 0 <= m.time_in_queue_s <= m.time_to_first_token_s <= m.latency_s
        assert m.time_per_output_token_s == (m.last_token_time - m.first_token_time) / (num_tokens - 1)
    (short,) = generate(llm, "a", sampling(max_tokens=1))
    assert short.metrics.time_per_output_token_s is None
