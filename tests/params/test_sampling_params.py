"""`SamplingParams` can be assigned to and copied, as scripts do, and are checked when they are used."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from octavo.errors import ParameterError
from octavo.params.sampling_params import SamplingParams


def test_assigned_values_are_checked_when_used() -> None:
    params = SamplingParams()
    params.max_tokens, params.stop, params.top_k, params.bad_words = 8, ["a"], -1, "b"  # type: ignore[assignment]
    used = params.validated()
    assert used == SamplingParams(max_tokens=8, stop=["a"], top_k=-1, bad_words=["b"])
    assert used.stop_strings == ("a",) and used.top_k == 0 and params.top_k == -1
    params.temperature = -1.0
    with pytest.raises(ParameterError, match="temperature is -1") as caught:
        params.validated()
    assert caught.value.param == "temperature"
    with pytest.raises(AttributeError):
        params.temprature = 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "how", [SamplingParams.clone, copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))]
)
def test_copies_are_equal_and_independent(how: Any) -> None:
    params = SamplingParams(n=2, temperature=0.5, stop="x", structured_outputs={"regex": "a"}, logit_bias={3: 1.0})  # type: ignore[arg-type]
    other = how(params)
    assert other == params and other is not params and other.stop_strings == ("x",)
    other.max_tokens = 99
    assert params.max_tokens == 16


def test_a_clone_shares_no_collection() -> None:
    params = SamplingParams(logit_bias={3: 1.0})
    params.allowed_token_ids = [1]
    other = params.clone()
    other.logit_bias[4] = 2.0  # type: ignore[index]
    other.allowed_token_ids.append(2)  # type: ignore[union-attr]
    assert params.logit_bias == {3: 1.0} and params.allowed_token_ids == [1]


def test_parameters_in_use_are_unaffected_by_assignments() -> None:
    params = SamplingParams()
    params.stop_token_ids = ids = [5]
    params.logit_bias = biases = {1: 1.0}
    used = params.validated()
    params.max_tokens = 2
    ids.append(6)
    biases[2] = 1.0
    assert (used.max_tokens, used.stop_token_ids, used.logit_bias) == (16, (5,), {1: 1.0})


def test_normalised_values_stay_as_they_are() -> None:
    """Checking a second time changes nothing."""
    for given in ({"top_p": 0.0}, {"temperature": 1e-3}, {"echo": True, "logprobs": 2}, {"prompt_logprobs": 0}):
        params = SamplingParams(**given)
        assert params.validated() == params


def test_integers_of_other_types_are_integers() -> None:
    class Id(int):
        """Such as an IntEnum's member."""

    params = SamplingParams(top_k=Id(5), stop_token_ids=[Id(1), 2])
    assert (params.top_k, params.stop_token_ids) == (5, (1, 2))
