"""`BeamSearch` on logits from Transformers: the same sequences and scores as its `generate`."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.request import Request, Sequence
from octavo.engine.beam_search import BeamCandidate, BeamSearch
from octavo.errors import ParameterError, UnknownOptionError
from octavo.params.beam_search_params import MAX_LENGTH_PENALTY, BeamSearchParams
from octavo.params.sampling_params import SamplingParams
from octavo.params.validation import INT32
from tests.models.tiny import make_tiny_checkpoint, random_prompts

STOPS = frozenset({5, 77, 130})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import transformers

    path: Path = make_tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), seed=1)
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@torch.inference_mode()
def run_search(model: Any, prompt: list[int], search: BeamSearch, candidates: Callable[..., Any]) -> None:
    """Run the search as the engine does, without a KV cache."""
    request = Request("r", prompt, SamplingParams(), max_tokens=1)
    live = [Sequence(request, 0, array("i", prompt), 1 << 20)]
    while live:
        parents = [(seq, candidates(model, seq.token_ids.tolist(), search.num_candidates)) for seq in live]
        beams = search.select_beams(parents)
        live = [Sequence(request, i, seq.token_ids + array("i", [t]), 1 << 20) for i, (seq, t) in enumerate(beams)]


def top_candidates(model: Any, token_ids: list[int], num: int) -> list[BeamCandidate]:
    logprobs = model(torch.tensor([token_ids])).logits[0, -1].log_softmax(-1).topk(num)
    return [BeamCandidate(*c) for c in zip(logprobs.values.tolist(), logprobs.indices.tolist(), strict=True)]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [1, 2, 4, 6])
def test_same_sequences_and_scores_as_transformers(
    model: Any, width: int, length_penalty: float, early_stopping: bool | str
) -> None:
    for prompt in random_prompts(5, 9, seed=width):
        params = BeamSearchParams(
            beam_width=width, max_tokens=10, length_penalty=length_penalty, early_stopping=early_stopping
        )
        search = BeamSearch(params, len(prompt), STOPS)
        run_search(model, prompt, search, top_candidates)
        if width == 1:  # with one beam `generate` decodes greedily
            expected = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=10,
                eos_token_id=sorted(STOPS),
                pad_token_id=0,
            )
            assert search.hypotheses[0].token_ids == expected[0, len(prompt) :].tolist()
            continue
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=10,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=sorted(STOPS),
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for hypothesis, sequence, score in zip(
            search.hypotheses, expected.sequences, expected.sequences_scores.tolist(), strict=True
        ):
            output = sequence[len(prompt) :].tolist()
            length = next((i + 1 for i, t in enumerate(output) if t in STOPS), len(output))
            assert hypothesis.token_ids == output[:length]
            assert hypothesis.score == pytest.approx(score, abs=1e-4)
            assert hypothesis.finish_reason == ("stop" if output[length - 1] in STOPS else "length")


def test_search_continues_when_all_top_tokens_stop(model: Any) -> None:
    """The top three tokens of every sequence are stop tokens; the fourth continues."""

    def always(_: Any, token_ids: list[int], num: int) -> list[BeamCandidate]:
        order = [*sorted(STOPS), *(t for t in range(200) if t not in STOPS)]
        return [BeamCandidate(-0.1 * i, t) for i, t in enumerate(order[:num])]

    params = BeamSearchParams(beam_width=2, max_tokens=4, length_penalty=2.0, early_stopping="never")
    search = BeamSearch(params, 1, STOPS)
    assert search.num_candidates == 8
    run_search(model, [1], search, always)
    assert len(search.hypotheses) == 2


def test_stop_string_ends_a_hypothesis(model: Any) -> None:
    (prompt,) = random_prompts(6, seed=3)
    free = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=8), len(prompt), frozenset())
    run_search(model, prompt, free, top_candidates)
    third = free.hypotheses[0].token_ids[:3]
    search = BeamSearch(
        BeamSearchParams(beam_width=2, max_tokens=8, length_penalty=-5.0),
        len(prompt),
        frozenset(),
        ends_in_stop_string=lambda output: output[-3:] == third,
    )
    run_search(model, prompt, search, top_candidates)
    stopped = [h for h in search.hypotheses if h.token_ids == third]
    assert stopped and stopped[0].finish_reason == "stop"


def test_aborted_search_turns_live_sequences_into_hypotheses(model: Any) -> None:
    search = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=8), 1, frozenset())
    request = Request("r", [1], SamplingParams(), max_tokens=1)
    root = Sequence(request, 0, array("i", [1]), 99)
    beams = search.select_beams(
        [(root, [BeamCandidate(-1.0, 4), BeamCandidate(-2.0, 6), BeamCandidate(-3.0, 7), BeamCandidate(-9.0, 8)])]
    )
    assert beams == [(root, 4), (root, 6)]
    search.finish([Sequence(request, i, array("i", [1, t]), 99) for i, (_, t) in enumerate(beams)], "abort")
    assert [(h.logprob, h.token_ids, h.finish_reason) for h in search.hypotheses] == [
        (-1.0, [4], "abort"),
        (-2.0, [6], "abort"),
    ]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 129}, "beam_width"),
        ({"n": 5}, "n"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 0.5}, "temperature"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"length_penalty": 30.1}, "length_penalty"),
        ({"length_penalty": -31}, "length_penalty"),
        ({"max_tokens": 1 << 31}, "max_tokens"),
        ({"length_penalty": float("nan")}, "length_penalty"),
    ],
)
def test_parameter_out_of_range_is_rejected(options: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as error:
        BeamSearchParams(**({"beam_width": 4, "max_tokens": 8} | options))
    assert error.value.param == param


@pytest.mark.parametrize("penalty", [-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY])
def test_every_length_has_a_finite_score(penalty: float) -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=INT32, length_penalty=penalty)
    search = BeamSearch(params, 1, frozenset())
    for length in (0, 1, 2, 1000, 1 << 20, INT32):
        assert -math.inf < search._score(-20.0 * length - 0.05, length) < 0


def test_unknown_parameter_is_rejected() -> None:
    with pytest.raises(UnknownOptionError, match="length_penalty"):
        BeamSearchParams(beam_width=2, max_tokens=2, lenght_penalty=1.0)  # type: ignore[call-arg]
