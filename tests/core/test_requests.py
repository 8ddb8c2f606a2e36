"""`SamplingParams` with its ranges, `Request`, `Sequence`, and the order of requests."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from octavo.core.policy import Policy
from octavo.core.request import Request, Status
from octavo.errors import ParameterError, UnknownOptionError
from octavo.params.sampling_params import SamplingParams
from octavo.params.validation import INT32
from tests.core.lab import make
from tests.proof import oracle as o


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("n", 0, "n is 0, it must be from 1 to 128"),
        ("n", 129, "from 1 to 128"),
        ("n", 2.0, "must be an integer, not 2.0"),
        ("n", True, "must be an integer, not True"),
        ("temperature", -0.1, "temperature is -0.1, it must be from 0 to 1e.30"),
        ("temperature", 1e31, "from 0 to 1e.30"),
        ("temperature", math.nan, "must be a finite number, not nan"),
        ("temperature", math.inf, "must be a finite number, not inf"),
        ("temperature", "1", "must be a finite number, not '1'"),
        ("temperature", True, "must be a finite number, not True"),
        ("top_p", -0.5, "from 0 to 1"),
        ("top_p", 1.5, "from 0 to 1"),
        ("min_p", 1.01, "from 0 to 1"),
        ("min_p", -1, "from 0 to 1"),
        ("top_k", -2, "top_k is -2, it must be from -1"),
        ("max_tokens", 0, "max_tokens is 0, it must be at least 1"),
        ("max_tokens", -5, "from 0"),
        ("seed", 1 << 63, "from -9223372036854775808 to 9223372036854775807"),
        ("seed", -(1 << 63) - 1, "seed is"),
        ("seed", "x", "must be an integer"),
        ("stop", "", "non-empty strings, not ''"),
        ("stop", ["a", 3], "non-empty strings, not 3"),
        ("stop", [str(i) for i in range(65)], "stop has 65 strings, at most 64"),
        ("stop_token_ids", [-1], "must be token ids, not -1"),
        ("stop_token_ids", ["x"], "must be token ids, not 'x'"),
        ("stop_token_ids", [True], "must be token ids, not True"),
        ("ignore_eos", 1, "ignore_eos must be True or False, not 1"),
        ("detokenize", None, "detokenize must be True or False"),
        ("skip_special_tokens", "no", "skip_special_tokens must be"),
        ("include_stop_str_in_output", 0, "include_stop_str_in_output must be"),
        ("spaces_between_special_tokens", 1, "spaces_between_special_tokens must be True or False"),
        ("skip_reading_prefix_cache", None, "skip_reading_prefix_cache must be True or False"),
        ("echo", "yes", "echo must be True or False, not 'yes'"),
        ("repetition_penalty", 0, "repetition_penalty is 0, it must be from 0.01 to 100"),
        ("repetition_penalty", -1.5, "from 0.01 to 100"),
        ("repetition_penalty", math.inf, "must be a finite number"),
        ("presence_penalty", 2.1, "presence_penalty is 2.1, it must be from -2 to 2"),
        ("presence_penalty", "0.5", "must be a finite number, not '0.5'"),
        ("frequency_penalty", -2.5, "from -2 to 2"),
        ("frequency_penalty", math.nan, "must be a finite number, not nan"),
        ("best_of", 0, "best_of is 0, it must be from 1"),
        ("best_of", 21, "best_of is 21, it must be from 1 to 20"),
        ("best_of", 2.0, "must be an integer, not 2.0"),
        ("min_tokens", -1, "min_tokens is -1, it must be from 0"),
        ("min_tokens", 17, "min_tokens is 17, it must be at most max_tokens, 16"),
        ("min_tokens", None, "must be an integer, not None"),
        ("logprobs", -2, "logprobs is -2, it must be from -1"),
        ("logprobs", True, "must be an integer, not True"),
        ("logprobs", 2.0, "must be an integer, not 2.0"),
        ("prompt_logprobs", -2, "prompt_logprobs is -2, it must be from -1"),
        ("logit_bias", {5: 101}, "numbers from -100 to 100, not 5 to 101"),
        ("logit_bias", {5: math.nan}, "not 5 to nan"),
        ("logit_bias", {5: "1"}, "not 5 to '1'"),
        ("logit_bias", {"5": 1}, "maps token ids to numbers .* not '5' to 1"),
        ("logit_bias", {-1: 1}, "not -1 to 1"),
        ("logit_bias", {True: 1}, "not True to 1"),
        ("logit_bias", {5: True}, "not 5 to True"),
        ("logit_bias", [5], r"maps token ids to numbers .* not \[5\]"),
        ("allowed_token_ids", [], "is empty, which allows nothing; leave it out"),
        ("allowed_token_ids", [5, -1], "must be token ids, not -1"),
        ("allowed_token_ids", ["5"], "must be token ids, not '5'"),
        ("allowed_token_ids", 5, "must be a list, not 5"),
        ("allowed_token_ids", "5", "must be a list, not '5'"),
        ("stop_token_ids", 5, "must be a list, not 5"),
        ("stop", 5, "must be a list, not 5"),
        ("stop", "x" * 5000, "a string of 5000 characters, at most 4096"),
        ("bad_words", [""], "non-empty strings, not ''"),
        ("bad_words", ["a", None], "non-empty strings, not None"),
        ("bad_words", ["a"] * 5000, "5000 strings, at most 4096"),
        ("bad_words_token_ids", [[5], []], "a list without tokens"),
        ("bad_words_token_ids", [5], "must be a list, not 5"),
        ("bad_words_token_ids", [[5, -6]], "must be token ids, not -6"),
        ("output_kind", "delta", "output_kind is 'delta', it must be one of RequestOutputKind.CUMULATIVE, "),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(name: str, bad: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message) as caught:
        SamplingParams(**{name: bad})
    assert caught.value.param == name and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "bad", "code"),
    [
        ("n", 129, "integer_out_of_range"),
        ("n", "7", "invalid_type"),
        ("temperature", 1e31, "decimal_out_of_range"),
        ("echo", 1, "invalid_type"),
        ("max_tokens", 0, "integer_below_min_value"),
        ("logit_bias", {5: 101}, "invalid_logit_bias"),
        ("allowed_token_ids", [-1], "invalid_token_id"),
        ("allowed_token_ids", [], "no_allowed_token"),
        ("stop", ["x"] * 65, "array_above_max_length"),
        ("stop", [3], "invalid_value"),
    ],
)
def test_a_refused_parameter_has_a_code(name: str, bad: Any, code: str) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{name: bad})
    assert caught.value.code == code


def test_parameters_that_imply_others() -> None:
    plain = SamplingParams()
    assert not plain.needs_history and not plain.skip_reading_prefix_cache and plain.prompt_logprobs is None
    asked = SamplingParams(prompt_logprobs=0, max_tokens=0)
    assert asked.skip_reading_prefix_cache and asked.needs_history and asked.logprobs is None
    echo = SamplingParams(echo=True, logprobs=3, max_tokens=0)
    assert echo.prompt_logprobs == 3 and echo.skip_reading_prefix_cache
    assert SamplingParams(echo=True, logprobs=3, prompt_logprobs=1).prompt_logprobs == 1
    assert replace(plain, prompt_logprobs=2).skip_reading_prefix_cache
    assert SamplingParams(echo=True, max_tokens=0).prompt_logprobs is None
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500


def test_best_of_generates_more_samples_than_it_returns() -> None:
    plain, several, best = SamplingParams(), SamplingParams(n=3), SamplingParams(n=2, best_of=3)
    assert [params.width for params in (plain, several, best)] == [1, 3, 3]
    assert [params.selects_best_of for params in (plain, several, best, SamplingParams(n=3, best_of=3))] == [0, 0, 1, 0]
    with pytest.raises(ParameterError, match="best_of is 2, it must be at least n, 3") as caught:
        SamplingParams(n=3, best_of=2)
    assert caught.value.param == "best_of"


@pytest.mark.parametrize(
    ("words", "needs"),
    [
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"bad_words_token_ids": [[3]]}, True),
        ({"logprobs": 3}, False),
        ({"min_tokens": 3, "logit_bias": {3: 1}, "allowed_token_ids": [3], "bad_words": ["x"]}, False),
    ],
)
def test_needs_history(words: dict[str, Any], needs: bool) -> None:
    assert SamplingParams(**words).needs_history is needs


def test_lists_are_copied() -> None:
    ids, bias = [3, 4], {3: 1.0}
    params = SamplingParams(allowed_token_ids=ids, logit_bias=bias, bad_words_token_ids=[ids], bad_words="x")
    ids.clear()
    bias.clear()
    assert params.allowed_token_ids == (3, 4) and params.bad_words_token_ids == ((3, 4),)
    assert params.logit_bias == {3: 1.0} and params.bad_words == ("x",)


def test_the_bounds_themselves_are_allowed() -> None:
    params = SamplingParams(
        n=128, temperature=2, top_p=1, min_p=1, top_k=INT32, max_tokens=1, seed=-(1 << 63), stop=["x"] * 64
    )
    assert params.n == 128 and len(params.stop_strings) == 64
    assert SamplingParams(n=1, temperature=0, min_p=0, seed=(1 << 63) - 1, max_tokens=None).max_tokens is None
    assert SamplingParams(stop_token_ids=[0, INT32]).stop_token_ids == (0, INT32)


def test_stop_ids_of_a_model_and_a_request() -> None:
    params = SamplingParams(stop_token_ids=[7, 8])
    assert params.stop_ids([2]) == {2, 7, 8} and replace(params, ignore_eos=True).stop_ids([2]) == {7, 8}
    assert SamplingParams(ignore_eos=True).stop_ids([2]) == frozenset()


@pytest.mark.parametrize("name", ["top_k", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs"])
def test_numbers_beyond_int32_are_refused(name: str) -> None:
    """One of them would fail every request that is sampled in the same pass."""
    with pytest.raises(ParameterError, match=f"{name} is 2147483648, it must be from .* to 2147483647"):
        SamplingParams(**{name: 1 << 31})
    assert getattr(SamplingParams(**{"max_tokens": None, name: INT32}), name) == INT32


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "bad_words_token_ids", "logit_bias"])
def test_token_ids_beyond_int32_are_refused(name: str) -> None:
    given: dict[str, Any] = {"bad_words_token_ids": [[1 << 31]], "logit_bias": {1 << 31: 1.0}}
    with pytest.raises(ParameterError, match=f"{name} .*2147483648"):
        SamplingParams(**{name: given.get(name, [1 << 31])})


def test_an_unknown_parameter_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownOptionError, match="no option 'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(UnknownOptionError, match="no option 'stop_strings'"):
        SamplingParams(stop_strings=("x",))  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SamplingParams(0.5)  # type: ignore[misc]


def test_stop_strings_need_the_text() -> None:
    with pytest.raises(ParameterError, match="set detokenize=True or use stop_token_ids"):
        SamplingParams(stop="x", detokenize=False)
    assert SamplingParams(stop_token_ids=[5], detokenize=False).stop_strings == ()


def test_stop_strings_are_one_or_several() -> None:
    assert SamplingParams(stop="###").stop_strings == ("###",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


@pytest.mark.parametrize(
    ("given", "greedy", "kept"),
    [(0, True, 0), (1e-6, True, 1e-6), (1e-5, False, 0.01), (0.005, False, 0.01), (1, False, 1)],
)
def test_greedy_and_the_coldest_temperature(given: float, greedy: bool, kept: float) -> None:
    params = SamplingParams(temperature=given)
    assert (params.greedy, params.temperature) == (greedy, kept)


def test_equivalent_settings_are_normalized() -> None:
    assert SamplingParams(top_k=-1).top_k == 0
    nucleus_of_one = SamplingParams(top_p=0.0)
    assert (nucleus_of_one.top_p, nucleus_of_one.top_k) == (1.0, 1)


def test_requests_sort_by_their_order() -> None:
    first, second = make("a", [1], 1), make("b", [1], 1)
    first.begin(5, (0, 5), 1)
    second.begin(3, (1, 3), 1)
    assert first < second and not second < first
    assert Policy().order(make("c", [1], 1, priority=9), 4) == (0, 4)
    assert Policy(by_priority=True).order(make("c", [1], 1, priority=9), 4) == (9, 4)


def test_a_request_begins_with_its_prompt() -> None:
    request = make("a", [3, 4], 7)
    request.begin(2, (0, 2), 7)
    (seq,) = request.sequences
    assert (seq.token_ids.tolist(), seq.max_length, seq.output_token_ids) == ([3, 4], 9, [])
    assert request.only_sequence is seq and request.status is Status.WAITING
    seq.token_ids.append(5)
    assert seq.output_token_ids == [5] and request.prompt_token_ids.tolist() == [3, 4]
    assert "'a'/0, 3+0 tokens" in repr(seq) and "Request('a', waiting" in repr(request)


@pytest.mark.parametrize(
    ("options", "needs_result", "forked", "num_samples"),
    [
        ({}, False, True, 1),
        ({"use_structured_output": True}, False, True, 1),
        ({"width": 3}, True, False, 3),
        ({"width": 1, "select_beams": o.keep_best(1)}, True, True, 2),
        ({"width": 2, "select_beams": o.keep_best(2)}, True, True, 4),
        ({"width": 2, "select_beams": o.keep_best(2), "num_samples": 7}, True, True, 7),
    ],
)
def test_needs_result_by_kind_of_request(options: dict, needs_result: bool, forked: bool, num_samples: int) -> None:
    request = make("a", [1], 2, **options)
    request.begin(0, (0, 0), 2)
    assert (request.needs_result, request.forked, request.num_samples) == (
        needs_result,
        forked,
        num_samples,
    )
    assert (request.only_sequence is None) == (request.width > 1 or request.select_beams is not None)


def test_a_request_follows_its_sampling_params_where_nothing_else_is_given() -> None:
    params = SamplingParams(max_tokens=3, stop_token_ids=[4])
    assert Request("a", [1], params).max_tokens == 3 and Request("a", [1], params, max_tokens=9).max_tokens == 9
    assert Request("a", [1], params, stop_ids=[5]).stop_ids == {4, 5}
    assert Request("a", [1], SamplingParams(n=4)).width == 4
    assert Request("a", [1], SamplingParams(n=4), width=2).width == 2
