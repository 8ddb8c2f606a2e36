"""`EngineClient` with a real model in the engine process: the same outputs as `LLM`, also after crashes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.engine.outputs import CompletionOutput
from octavo.errors import ParameterError
from octavo.frontend.process_transport import ProcessClient
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import RequestOutputKind
from tests.engine.process.engines import OPTIONS, own_directory, real_client, run, serving, until  # noqa: F401

LENGTH: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
CASES: dict[str, SamplingParams | BeamSearchParams] = {
    "greedy": SamplingParams(temperature=0, **LENGTH),
    "sampled without a seed": SamplingParams(**LENGTH),
    "sampled with a seed": SamplingParams(seed=-7, top_p=0.9, top_k=30, min_p=0.01, **LENGTH),
    "samples": SamplingParams(n=3, seed=1, logprobs=2, **LENGTH),
    "best of": SamplingParams(n=2, best_of=4, seed=2, **LENGTH),
    "logprobs": SamplingParams(temperature=0, logprobs=3, prompt_logprobs=2, **LENGTH),
    "penalties": SamplingParams(
        seed=3, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.2, bad_words=["a", "x1"], **LENGTH
    ),
    "stop strings": SamplingParams(n=3, seed=4, stop=["3", "H", "qv"], min_tokens=4, **LENGTH),
    "stop tokens": SamplingParams(n=2, seed=5, stop_token_ids=[20, 30, 40], min_tokens=3, **LENGTH),
    "bias": SamplingParams(seed=6, logit_bias={5: 4.0, 6: -100.0}, allowed_token_ids=list(range(3, 60)), **LENGTH),
    "echo": SamplingParams(temperature=0, echo=True, logprobs=1, max_tokens=8),
    "prompt only": SamplingParams(echo=True, logprobs=1, max_tokens=0),
    "regex": SamplingParams(seed=9, n=2, structured_outputs={"regex": "[a-c]{3,30}[x-z]{9}"}, max_tokens=60),  # type: ignore[arg-type]
    "eos": SamplingParams(seed=8, max_tokens=60, logit_bias={2: 4.0}),
    "beams": BeamSearchParams(beam_width=3, max_tokens=30, logprobs=2),
    "beams that stop": BeamSearchParams(beam_width=4, n=2, max_tokens=30, stop=["3", "H"], length_penalty=0.5),
}


@pytest.fixture(scope="module")
def wanted(model: str) -> dict[str, RequestOutput]:
    with LLM(model, dtype="float32", **OPTIONS) as llm:
        beams = {name: params for name, params in CASES.items() if isinstance(params, BeamSearchParams)}
        others = {name: params for name, params in CASES.items() if isinstance(params, SamplingParams)}
        outputs = llm.generate([name + "?" for name in others], list(others.values()), use_tqdm=False)
        found = dict(zip(others, outputs, strict=True))
        return found | {name: llm.beam_search(name + "?", params, use_tqdm=False)[0] for name, params in beams.items()}


def check(got: RequestOutput, want: RequestOutput, *, cached: bool = True) -> None:
    """Equal except for times, log-probabilities up to the summation order. `cached`: also the cached tokens."""
    assert len(got.outputs) == len(want.outputs)
    for a, b in zip(got.outputs, want.outputs, strict=True):
        assert plain(a) == plain(b)
        assert close(a.cumulative_logprob, b.cumulative_logprob) and close(a.score, b.score)
        check_logprobs(a.logprobs, b.logprobs)
    check_logprobs(got.prompt_logprobs, want.prompt_logprobs)
    assert (got.prompt, got.prompt_token_ids, got.finished) == (want.prompt, want.prompt_token_ids, want.finished)
    assert got.num_cached_tokens == want.num_cached_tokens or not cached
    times = got.metrics
    assert times.first_scheduled_time is not None and times.finished_time is not None
    assert times.arrival_time <= times.first_scheduled_time <= times.finished_time
    assert times.num_generation_tokens == want.metrics.num_generation_tokens


def plain(c: CompletionOutput) -> tuple[Any, ...]:
    return c.index, c.text, c.token_ids, c.finish_reason, c.stop_reason


def close(a: float | None, b: float | None) -> bool:
    return a == b if a is None or b is None else a == pytest.approx(b, abs=1e-3)


def check_logprobs(a: Any, b: Any) -> None:
    assert (a is None) == (b is None)
    for x, y in zip(a or (), b or (), strict=True):
        assert (x is None) == (y is None)
        for token in x or ():
            assert close(x[token].logprob, y[token].logprob), (token, x, y)
            assert (x[token].rank, x[token].decoded_token) == (y[token].rank, y[token].decoded_token)
        assert list(x or ()) == list(y or ())


async def last_of(client: ProcessClient, name: str) -> RequestOutput:
    async for output in client.generate(name + "?", CASES[name]):
        last = output
    assert last.finished
    return last


async def all_of(client: ProcessClient) -> AsyncIterator[tuple[str, RequestOutput]]:
    for name, output in zip(CASES, await asyncio.gather(*[last_of(client, name) for name in CASES]), strict=True):
        yield name, output


async def test_outputs_equal_those_of_llm(model: str, wanted: dict[str, RequestOutput]) -> None:
    """All cases at once; then output kinds, an aborted beam search, and an invalid grammar."""
    async with serving(real_client(model)) as client:
        async for name, output in all_of(client):
            check(output, wanted[name])
        for kind in (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY):
            params = SamplingParams(temperature=0, output_kind=kind, **LENGTH)
            outputs = [output async for output in client.generate("greedy?", params)]
            assert "".join(o.outputs[0].text for o in outputs) == wanted["greedy"].outputs[0].text
            assert (len(outputs) == 1) == (kind is RequestOutputKind.FINAL_ONLY)
        with pytest.raises(ParameterError) as caught:
            async for _ in client.generate("x", SamplingParams(structured_outputs={"regex": "("})):  # type: ignore[arg-type]
                pass
        assert caught.value.code == "invalid_grammar"
        stream = client.generate("y", BeamSearchParams(beam_width=2, max_tokens=100), "more beams")
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: "more beams" in client.transport.handles)
        await asyncio.sleep(0.02)
        assert await client.abort("more beams")
        assert [c.finish_reason for c in (await first).outputs] == ["abort", "abort"]


async def test_outputs_are_the_same_when_the_engine_is_killed(model: str, wanted: dict[str, RequestOutput]) -> None:
    """The kill happens while all requests run."""
    async with serving(real_client(model)) as client:

        async def kill() -> None:
            await until(lambda: max(map(num_received, client.transport.handles.values()), default=0) >= 8)
            os.kill(client.transport.pid or 0, signal.SIGKILL)

        killing = asyncio.ensure_future(kill())
        async for name, output in all_of(client):
            check(output, wanted[name], cached=False)  # the new engine has no cached blocks of finished requests
        await killing
        assert client.health().num_restarts == 1


def num_received(handle: Any) -> int:
    """Tokens received of the longest live sample."""
    return max(len(s.token_ids) for s in handle.request.samples.values() if not s.finish_reason)
