"""The runner queues the same work on a device as ever: fixed events and tokens of a few loads.

A change of these figures is a change of what a GPU runs. Compare the events of the failed test with those of the commit
before, and give the reason for the new figures in the commit.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest

from octavo import LLM, BeamSearchParams, RequestOutput, SamplingParams
from octavo.runner.passes import prefill_batch
from tests.runner.recorder import Recorder
from tests.runner.test_stub_platform import CASES, OPTIONS, completions, params_of

EXPECTED: dict[tuple[str, str], tuple[int, int, int, int, int]] = {
    ("plain", "plain"): (69, 4048957835, 223132457, 3968064875, 1216950887),
    ("plain", "windows"): (69, 287642204, 223132457, 889988466, 1216950887),
    ("plain", "chunks"): (142, 448220315, 223132457, 3544300058, 1216950887),
    ("plain", "recompute"): (161, 3689145590, 223132457, 3478008911, 1216950887),
    ("plain", "swap"): (168, 636605123, 223132457, 4227577472, 1216950887),
    ("plain", "few rows"): (150, 639993348, 223132457, 3998987117, 1216950887),
    ("plain", "no overlap"): (53, 2161372805, 223132457, 1584375733, 1216950887),
    ("plain", "blocks of one"): (75, 1787842752, 223132457, 2648269992, 1216950887),
    ("grammars", "plain"): (208, 38587137, 223132457, 3223202692, 2280361260),
    ("grammars", "windows"): (201, 1898461726, 223132457, 3259822883, 2280361260),
    ("grammars", "chunks"): (384, 3938644139, 223132457, 1344367904, 2280361260),
    ("grammars", "recompute"): (509, 1516597668, 223132457, 1899514537, 2280361260),
    ("grammars", "swap"): (500, 505680827, 223132457, 3638125763, 2280361260),
    ("grammars", "no overlap"): (160, 115217067, 223132457, 4012723509, 2280361260),
    ("logprobs", "plain"): (139, 2316555684, 2834795449, 1522642055, 3313441391),
    ("logprobs", "windows"): (152, 1096675920, 181042613, 3677936620, 3313441391),
    ("logprobs", "chunks"): (333, 2910136400, 2361599053, 1962446949, 3313441391),
    ("logprobs", "recompute"): (389, 3338813150, 1845369089, 2267246947, 3313441391),
    ("logprobs", "swap"): (387, 254346527, 1193286830, 3367322151, 3313441391),
    ("logprobs", "few rows"): (351, 556085558, 1269836733, 3574559186, 3313441391),
    ("logprobs", "no overlap"): (130, 3038056244, 4249311322, 1827430960, 3313441391),
    ("logprobs", "blocks of one"): (188, 3285106839, 3189739906, 4063829095, 3313441391),
    ("processors", "windows"): (186, 3369880011, 223132457, 1751191361, 2307432855),
    ("processors", "chunks"): (357, 4158097752, 223132457, 47499672, 2307432855),
    ("processors", "recompute"): (468, 1525159108, 223132457, 1284998678, 2307432855),
    ("processors", "few rows"): (406, 749539171, 223132457, 3130085625, 2307432855),
    ("host", "plain"): (86, 3356737278, 3142384215, 2214390421, 1293418734),
    ("host", "windows"): (104, 474022042, 579283162, 2235593174, 1293418734),
    ("processors and host", "windows"): (219, 2698473369, 2590176751, 1104908751, 1788136549),
    ("processors and host", "chunks"): (402, 4147601465, 4104596871, 925166513, 1788136549),
    ("processors and host", "recompute"): (533, 619520745, 2214293159, 4116535318, 1788136549),
    ("grammars with logprobs", "windows"): (74, 3063740976, 1537076100, 3653648290, 3613186686),
    ("beams", "plain"): (21, 1930579802, 3297208510, 417716416, 3969714117),
    ("beams", "chunks"): (20, 4055891266, 2122949154, 223132457, 3969714117),
    ("beams", "swap"): (21, 1436080879, 3297208510, 2887577013, 3969714117),
}
"""Requests and options of `test_stub_platform` -> number of events; checksums of the events, of the columns that the
host sampled, of the captured shapes, and of the tokens."""
WINDOW = """\
plan of 1 slices
no bitmasks
capture logits prefill (16, 8, 8, 16, 128)
replay logits prefill (16, 8, 8, 16, 128)
capture sample prefill (16, 8, 8, 16, 128)
replay logits prefill (16, 8, 8, 16, 128)
bitmasks of [0] for [0]
replay sample prefill (16, 8, 8, 16, 128)
column of [0]
plan of 1 slices
no bitmasks
capture logits decode 1
replay logits decode 1
capture sample and logits decode 1
no bitmasks
replay logits decode 1
capture sample decode 1
replay logits decode 1
bitmasks of [0] for [0]
replay sample and logits decode 1
column of [0]
bitmasks of [0] for [0]
replay sample and logits decode 1
column of [0]
bitmasks of [] for [0]
replay sample decode 1
column of [0]
"""
"""The events of a window with a grammar."""


def checksum(values: Any) -> int:
    return crc32(repr(values).encode())


def run(llm: LLM, kind: str) -> list[Any]:
    """Token ids, finish reason and stop reason of each completion, or the token ids of each beam."""
    if kind == "beams":
        beams = BeamSearchParams(beam_width=3, max_tokens=7, ignore_eos=True)
        started: Any = [{"prompt_token_ids": [3 + (5 * i + j) % 90 for j in range(6 + i)]} for i in range(2)]
        found = llm.beam_search(started, beams, use_tqdm=False)
        return [beam.token_ids for output in found for beam in output.outputs]
    params = params_of(kind)
    prompts = [[3 + (7 * i + j * j) % 90 for j in range(3 + 5 * i % 23)] for i in range(len(params))]
    outputs: list[RequestOutput] = llm.generate(prompts, params, use_tqdm=False)
    return [entry[:3] for entry in completions(outputs)]


@pytest.mark.parametrize(("kind", "case"), EXPECTED)
def test_the_device_gets_the_same_work(model: str, kind: str, case: str) -> None:
    """The second run finds all its work captured, so its events do not depend on when that was."""
    with LLM(model, **(OPTIONS | {"enable_prefix_caching": False} | CASES[case])) as llm:
        recorder = Recorder(llm)
        first = run(llm, kind)
        recorder.events.clear()
        recorder.results.clear()
        assert run(llm, kind) == first
    sums = (checksum(x) for x in (recorder.events, recorder.results, sorted(recorder.shapes), first))
    assert (len(recorder.events), *sums) == EXPECTED[kind, case], "\n".join(recorder.events)


def test_prompt_logits_in_several_passes_change_no_token(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes give one column, whose tokens are committed together."""
    monkeypatch.setattr(prefill_batch, "MAX_PROMPT_LOGITS", 3)
    with LLM(model, **(OPTIONS | CASES["windows"])) as llm:
        Recorder(llm)
        assert checksum(run(llm, "host")) == EXPECTED["host", "windows"][-1]


def test_the_shortest_pass_is_timed_and_changes_nothing(model: str) -> None:
    """Without graphs of whole passes nothing is timed."""
    with LLM(model, **(OPTIONS | CASES["windows"])) as llm:
        recorder = Recorder(llm)
        runner = llm.engine.executor.runner  # type: ignore[attr-defined]
        before = run(llm, "plain")
        assert 0 < runner.passes.measure() < 1
        assert run(llm, "plain") == before
        assert recorder.events
    with LLM(model, **(OPTIONS | {"enforce_eager": True})) as llm:
        assert llm.engine.executor.runner.measure_pass() == 0  # type: ignore[attr-defined]


def test_captures_come_before_the_pass_that_they_would_disturb(model: str) -> None:
    """A window with a grammar: each column is sampled together with the next pass, but for the first and the last."""
    params = SamplingParams(temperature=1, seed=1, max_tokens=6, structured_outputs={"regex": "[a-d]+"})
    with LLM(model, **(OPTIONS | {"decode_window": 3})) as llm:
        recorder = Recorder(llm)
        (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert output.outputs[0].token_ids == [68, 68, 2]
    assert recorder.events == WINDOW.splitlines()
