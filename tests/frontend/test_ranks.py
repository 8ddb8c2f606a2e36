"""An engine of two tensor parallel ranks: the tokens of one, and one fate."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, RequestOutput, SamplingParams
from octavo.config import EngineArgs
from octavo.core.plan import StepPlan
from octavo.errors import DeviceLostError, EngineError, MemoryBudgetError, ParameterError
from octavo.frontend.build import _resolve
from octavo.frontend.process_transport import process_client
from octavo.frontend.replicas import replicas_client
from octavo.params.beam_search_params import BeamSearchParams
from octavo.runner.ranks import rank_group
from octavo.runner.ranks.communicator import Communicator
from octavo.runner.ranks.rank_group import RankGroup
from octavo.runner.sampling.sampler import NOT_FINITE
from tests.engine.models import WrappedModel, make_talking_checkpoint
from tests.models.tiny import make_tiny_checkpoint
from tests.proof.reliability import ranks_under_fire
from tests.proof.tally import Tally, World
from tests.serve.event_loop import run

ROOT = Path(__file__).parents[2]
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 4,
    "num_gpu_blocks_override": 120,
    "max_num_seqs": 16,
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True, n=3, logprobs=2)
PROMPTS = ["hello", "The-quick-brown-fox-jumps", "abcabcabcabcabc", "The-quick-brown-fox-runs"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its sizes are multiples of two."""
    return str(make_talking_checkpoint(tmp_path_factory.mktemp("talking"), intermediate_size=48))


def child_pids(pid: int) -> list[int]:
    """Ranks that this process started and that live."""
    found = subprocess.run(
        ["pgrep", "-P", str(pid), "-f", "octavo.frontend.ranks.rank_main"], capture_output=True, text=True
    )
    return [int(word) for word in found.stdout.split()]


def is_gone(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return True


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """No process, descriptor or thread of ranks is left."""
    before, threads = set(os.listdir("/proc/self/fd")), torch.get_num_threads()
    yield
    wait_until(lambda: not child_pids(os.getpid()))
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in set(os.listdir("/proc/self/fd")) - before if fd_exists(fd)]
    assert not [link for link in links if "octavo" in link or "memfd" in link], links
    assert not [thread for thread in threading.enumerate() if thread.name == "octavo-ranks"]
    assert torch.get_num_threads() == threads


def fd_exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def results(outputs: list[RequestOutput]) -> list[Any]:
    return [[(c.token_ids, c.text, c.finish_reason) for c in output.outputs] for output in outputs]


def both(model: str, use: Callable[[LLM], Any], *, num_ranks: int = 2, **options: Any) -> tuple[Any, Any]:
    """What one rank gives, and what several give."""
    found = []
    for size in (1, num_ranks):
        with LLM(model, **(OPTIONS | options), tensor_parallel_size=size) as llm:
            found.append(use(llm))
    return found[0], found[1]


def generate(llm: LLM, prompts: Any = PROMPTS, params: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def test_two_ranks_give_the_tokens_of_one(model: str) -> None:
    regex = SamplingParams(temperature=0, max_tokens=20, structured_outputs={"regex": "[a-f]{3}-[0-9]{5}"})  # type: ignore[arg-type]
    beams = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)

    def use(llm: LLM) -> Any:
        found = [
            results(generate(llm)),
            results(generate(llm, PROMPTS, SEEDED)),
            results(generate(llm, PROMPTS, regex)),
        ]
        penal = SamplingParams(temperature=0.8, seed=1, top_k=20, top_p=0.9, repetition_penalty=1.2, max_tokens=20)
        found.append(results(generate(llm, PROMPTS, penal)))
        found.append([[s.tokens for s in o.sequences] for o in llm.beam_search(PROMPTS[:2], beams, use_tqdm=False)])
        assert llm.kv_stats().num_hit_tokens
        return found

    one, two = both(model, use)
    assert one == two


@pytest.mark.parametrize("overlap", [True, False])
def test_windows_and_overlap(model: str, overlap: bool) -> None:
    def use(llm: LLM) -> Any:
        streamed = [o.outputs[0].token_ids for o in llm.stream(PROMPTS, GREEDY) if o.finished]
        return sorted(streamed), results(generate(llm, PROMPTS, SEEDED))

    one, two = both(model, use, decode_window=4, async_scheduling=overlap)
    assert one == two


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_speculation(model: str, method: str) -> None:
    def use(llm: LLM) -> Any:
        few = SamplingParams(temperature=1.0, seed=2, max_tokens=60, ignore_eos=True, allowed_token_ids=[5, 6])
        found = results(generate(llm, PROMPTS, few)), results(generate(llm, PROMPTS, SEEDED))
        assert llm.config.args.tensor_parallel_size == 1 or llm.stats().num_draft_tokens  # one rank measures its passes
        return found

    one, two = both(model, use, spec_method=method, spec_tokens=4)
    assert one == two


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests_continue(model: str, mode: str) -> None:
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=60, ignore_eos=True, n=2)

    def use(llm: LLM) -> Any:
        found = results(generate(llm, PROMPTS, params))
        stats = llm.stats()
        assert (stats.num_swap_preemptions if mode == "swap" else stats.num_preemptions) > 2
        return found

    one, two = both(
        model, use, preemption_mode=mode, num_gpu_blocks_override=60, swap_space=0.1, max_model_len=100, max_num_seqs=8
    )
    assert one == two


def test_a_draft_model_runs_whole_on_each_rank(model: str, tmp_path: Path) -> None:
    draft = make_talking_checkpoint(tmp_path / "draft", seed=3)  # 37 columns of the MLP, which two does not divide
    one, two = both(model, lambda llm: results(generate(llm)), spec_model=str(draft), spec_tokens=3)
    assert one == two


def test_window_groups(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    sizes["max_position_embeddings"] = 4096  # shorter sequences have one group
    gemma = str(make_tiny_checkpoint("gemma3", tmp_path / "gemma", **sizes))

    def use(llm: LLM) -> Any:
        assert llm.config.kv.windows
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
        return [o.outputs[0].token_ids for o in generate(llm, [[5, 6, 7] * 9, [8, 9]], params)]

    one, two = both(gemma, use, skip_tokenizer_init=True, num_gpu_blocks_override=3000)
    assert one == two


# -- sampling from slices of the vocabulary ----------------------------------------------------------------------------


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What rank 0 gives to each gather."""
    found, all_gather = list[torch.Tensor](), Communicator.all_gather

    def recorded(self: Communicator, x: torch.Tensor) -> torch.Tensor:
        found.append(x.clone())
        return all_gather(self, x)

    monkeypatch.setattr(Communicator, "all_gather", recorded)
    return found


WINNERS, TOPS, LOGITS = 3, 65, 56
"""Columns of a gather: of 97 tokens, rank 0 has 56, and the other rank 41."""
RANDOM = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True, n=3)


@pytest.mark.parametrize(
    ("params", "columns"),
    [
        ([GREEDY], {WINNERS}),
        ([RANDOM], {WINNERS}),
        ([RANDOM, GREEDY, SamplingParams(temperature=0, top_k=5, max_tokens=9)], {WINNERS}),
        ([replace(RANDOM, top_k=5)], {TOPS, WINNERS}),
        ([replace(RANDOM, top_k=64, top_p=0.8), GREEDY, replace(RANDOM, top_k=60, min_p=0.1)], {TOPS, WINNERS}),
        ([replace(RANDOM, top_k=65)], {LOGITS}),
        ([replace(RANDOM, top_k=5), replace(RANDOM, top_k=5, logprobs=1)], {LOGITS}),
        ([replace(RANDOM, top_p=0.8)], {LOGITS}),
        ([replace(RANDOM, min_p=0.1)], {LOGITS}),
        ([replace(RANDOM, logprobs=1)], {LOGITS}),
        ([replace(GREEDY, presence_penalty=1.0)], {LOGITS}),
        ([RANDOM, replace(GREEDY, max_tokens=30), replace(RANDOM, n=1, top_p=0.8, max_tokens=6)], {WINNERS, LOGITS}),
    ],
)
def test_plain_rows_gather_no_logits(
    model: str, gathers: list[torch.Tensor], params: list[SamplingParams], columns: set[int]
) -> None:
    """12 bytes a row and rank, with a top_k 272. A row that needs all logits takes the others of its step with it."""
    used = [params[i % len(params)] for i in range(len(PROMPTS))]
    one, two = both(model, lambda llm: results(generate(llm, PROMPTS, used)))
    assert one == two
    assert {x.shape[1] for x in gathers} == columns
    assert all(x.dtype == torch.float32 for x in gathers)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_slices_of_more_tokens_than_are_sent(tmp_path: Path, gathers: list[torch.Tensor], num_ranks: int) -> None:
    """Of 1003 tokens the last rank has fewer than the others."""
    sizes = {"vocab_size": 1003, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 48}
    model = str(make_tiny_checkpoint("llama", tmp_path / "model", **sizes))
    filters = (
        {"top_k": 20, "top_p": 0.95},
        {"top_k": 64, "min_p": 0.05},
        {"top_k": 40, "top_p": 0.6},
        {"top_k": 2},
        {},
    )
    params = [GREEDY, *(replace(RANDOM, **each) for each in filters)]
    prompts = [[5 + 9 * i, 800, 3 + i] for i in range(len(params))]
    options: dict[str, Any] = {"num_ranks": num_ranks, "skip_tokenizer_init": True}
    one, several = both(model, lambda llm: results(generate(llm, prompts, params)), **options)
    assert one == several
    assert {x.shape[1] for x in gathers} == {TOPS, WINNERS}


def test_a_slice_that_is_not_finite_fails_its_row(model: str) -> None:
    """On all ranks, of which one has finite logits. Others go on."""

    def spoil(number: int, tokens: list[int], logits: torch.Tensor) -> None:
        assert logits.shape[1] == LOGITS
        if number == 5:
            logits[1, 7] = torch.nan

    mixed = [GREEDY, replace(RANDOM, n=1)] * 2
    with LLM(model, **OPTIONS) as llm:
        expected = results(generate(llm, PROMPTS, mixed))
    with LLM(model, **OPTIONS, tensor_parallel_size=2) as llm:
        WrappedModel(llm, after=spoil)
        found = generate(llm, PROMPTS, mixed)
    failed = found[1].outputs[0]
    assert (failed.finish_reason, failed.stop_reason, len(failed.token_ids)) == ("error", NOT_FINITE, 5)
    assert results(found[:1] + found[2:]) == expected[:1] + expected[2:]


# -- sizes and errors --------------------------------------------------------------------------------------------------


def test_a_rank_has_its_part_of_the_memory(model: str) -> None:
    def use(llm: LLM) -> tuple[int, int]:
        return llm.config.kv.bytes_per_block, llm.config.weight_bytes

    (block, weights), (half_block, half_weights) = both(model, use)
    assert block == 2 * half_block and half_weights < weights


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"tensor_parallel_size": 3}, ParameterError, "tensor_parallel_size 3 does not divide the model's"),
        ({"tensor_parallel_size": 0}, ParameterError, "tensor_parallel_size"),
        ({"num_gpu_blocks_override": 1 << 30}, MemoryBudgetError, "num_gpu_blocks_override"),
    ],
)
def test_a_start_that_fails_says_why(model: str, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        LLM(model, **(OPTIONS | {"tensor_parallel_size": 2} | options))


def test_kernels_of_ranks_are_compiled_for_their_number(model: str) -> None:
    """A start of one rank compiles other kernels than one of two."""
    keys = [_resolve(EngineArgs(model, **OPTIONS, tensor_parallel_size=size)).kernel_key for size in (1, 2)]
    assert keys[0] != keys[1]


def test_a_rank_that_cannot_start_is_named(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankGroup.__init__, "__defaults__", ((sys.executable, "-c", "raise SystemExit(3)"),))
    with pytest.raises(EngineError, match="rank 1 exited with code 3 while it started"):
        LLM(model, **OPTIONS, tensor_parallel_size=2)


def test_a_rank_that_never_comes_is_named(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankGroup.__init__, "__defaults__", ((sys.executable, "-c", "import time; time.sleep(60)"),))
    monkeypatch.setattr(rank_group, "CONNECT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(rank_group, "EXIT_S", 0.1)
    with pytest.raises(EngineError, match=r"rank 1 could not reach the others within 0.5 s"):
        LLM(model, **OPTIONS, tensor_parallel_size=2)


# -- one fate ----------------------------------------------------------------------------------------------------------

LONG = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
SWAPPING: dict[str, Any] = {
    "preemption_mode": "swap",
    "num_gpu_blocks_override": 60,
    "swap_space": 0.1,
    "max_model_len": 100,
    "max_num_seqs": 8,
}
SWAPPED = SamplingParams(temperature=0.9, seed=3, max_tokens=60, ignore_eos=True, n=2)
DEATH = r"rank 1 was killed by SIGKILL, at plan \d+, (in|after) collective \d+"


@pytest.mark.parametrize("when", ["idle", "mid-step"])
def test_the_death_of_a_rank_ends_the_group_and_is_named(model: str, when: str) -> None:
    with LLM(model, **OPTIONS, tensor_parallel_size=2) as llm:
        generate(llm)
        (pid,) = child_pids(os.getpid())
        died_at = 0.0

        def kill() -> None:
            nonlocal died_at
            died_at = time.monotonic()
            os.kill(pid, signal.SIGKILL)

        execute, num_steps = llm.engine.executor.runner.execute, 0  # type: ignore[attr-defined]

        def execute_and_kill(plan: StepPlan) -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 5:
                kill()
            return execute(plan)

        if when == "idle":
            kill()
            died_at = time.monotonic()
        else:
            llm.engine.executor.runner.execute = execute_and_kill  # type: ignore[attr-defined]
        with pytest.raises(DeviceLostError, match=DEATH) as raised:
            generate(llm, PROMPTS, LONG)
        assert time.monotonic() - died_at < 5.0  # mostly a tenth of a second
        assert "\n" not in str(raised.value)
        with pytest.raises(DeviceLostError, match=DEATH):
            generate(llm)


HANG = r"rank 1 hangs: it stands at plan \d+, (in|after) collective \d+ for \d+ s, and others wait"


@pytest.fixture
def is_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "HANG_S", 2.0)


@pytest.mark.usefixtures("is_impatient")
def test_a_rank_that_hangs_ends_the_group_without_a_supervisor(model: str) -> None:
    with LLM(model, **OPTIONS, tensor_parallel_size=2) as llm:
        generate(llm)
        (pid,) = child_pids(os.getpid())
        time.sleep(3.0)  # an idle group does not hang
        generate(llm)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(DeviceLostError, match=HANG) as raised:
            generate(llm, PROMPTS, LONG)
        assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("is_impatient")
def test_a_hang_in_a_check_of_swapped_blocks_ends_the_group(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All collectives of the plan are over then."""
    code = (
        "import time; from octavo.runner.ranks.status_board import StatusBoard as b\n"
        "b.set_checked = lambda self, num_plans: time.sleep(1000)\n"
        "from octavo.frontend.ranks.rank_main import run; run()"
    )
    monkeypatch.setattr(RankGroup.__init__, "__defaults__", ((sys.executable, "-c", code),))
    with (
        LLM(model, **OPTIONS | SWAPPING, tensor_parallel_size=2) as llm,
        pytest.raises(DeviceLostError, match=HANG),
    ):
        generate(llm, PROMPTS, SWAPPED)


def test_an_error_of_a_rank_ends_the_group_and_is_named(model: str) -> None:
    """A message of the ring that is no plan."""
    with LLM(model, **OPTIONS, tensor_parallel_size=2) as llm:
        generate(llm)
        group = llm.engine.executor.group  # type: ignore[attr-defined]
        llm.thread.call(lambda engine: group.send(b"p" + b"\0" * 100)).result()
        with pytest.raises(DeviceLostError, match=r"rank 1 failed: PlanError: .*, at plan"):
            generate(llm, PROMPTS, LONG)


def test_a_damaged_ring_ends_the_group(model: str) -> None:
    with LLM(model, **OPTIONS, tensor_parallel_size=2) as llm:
        generate(llm)
        group = llm.engine.executor.group  # type: ignore[attr-defined]

        def send_torn(engine: Any) -> None:
            group._writer._number += 1
            group.send(b"p")

        llm.thread.call(send_torn).result()
        with pytest.raises(DeviceLostError, match=r"rank 1 failed: RingError: .* lost or repeated"):
            generate(llm, PROMPTS, LONG)


def test_an_error_of_rank_0_ends_the_group(model: str) -> None:
    """A lone engine computes a failed step again. The memories of ranks have parted."""
    with LLM(model, **OPTIONS, tensor_parallel_size=2) as llm:
        runner = llm.engine.executor.runner  # type: ignore[attr-defined]

        def fail(plan: StepPlan) -> Any:
            raise ValueError("planted")

        runner.execute = fail
        with pytest.raises(DeviceLostError, match="rank 0 failed in plan 1: ValueError: planted"):
            generate(llm)


SCRIPT = """
import sys, time
from octavo import LLM
options = {"num_gpu_blocks_override": 50, "max_num_seqs": 4, "max_model_len": 64}
llm = LLM(sys.argv[1], device="cpu", tensor_parallel_size=2, **options)
print("up", flush=True)
if sys.argv[2] == "wait":
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["SIGKILL", "exit"])
def test_ranks_end_with_rank_0(model: str, how: str) -> None:
    command = [sys.executable, "-c", SCRIPT, model, "wait" if how == "SIGKILL" else "exit"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        ranks = child_pids(process.pid)
        if how == "SIGKILL":
            assert len(ranks) == 1
            process.kill()
        process.wait(30)
    wait_until(lambda: all(map(is_gone, ranks)))


def test_a_rank_that_is_closed_has_not_failed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It mostly exits before rank 0, which has more to free."""
    llm = LLM(model, **OPTIONS, tensor_parallel_size=2)
    generate(llm)
    executor: Any = llm.engine.executor
    group, (child,) = executor.group, executor.group._children
    close = executor.local.close

    def close_late() -> None:
        assert child.process.wait(10) == 0
        time.sleep(2 * rank_group.WATCH_S)
        close()

    monkeypatch.setattr(executor.local, "close", close_late)
    llm.close()
    assert group.failure == ""


def test_a_corrupt_swapped_block_of_a_rank_ends_the_group(model: str, tmp_path: Path) -> None:
    """Rank 0 must not return tokens that were computed with it."""
    code = (
        "import sys; from octavo.runner import checksums as c; work = c.Checksums._work\n"
        "c.Checksums._work = lambda self, outs, ins, moved: [*work(self, outs, ins, moved), *ins]\n"
        "from octavo.frontend.ranks.rank_main import run; run()"
    )
    before = RankGroup.__init__.__defaults__
    RankGroup.__init__.__defaults__ = ((sys.executable, "-c", code),)
    try:
        llm = LLM(model, **OPTIONS | SWAPPING, tensor_parallel_size=2)
    finally:
        RankGroup.__init__.__defaults__ = before
    with llm, pytest.raises(DeviceLostError, match=r"rank 1 failed: StepError: .* swapped blocks came back corrupted"):
        generate(llm, PROMPTS, SWAPPED)


# -- the engine process ------------------------------------------------------------------------------------------------


async def test_an_engine_process_whose_rank_dies_is_replaced_and_requests_continue(model: str) -> None:
    async def tokens(client: Any, i: int) -> list[int]:
        last = None
        async for output in client.generate([3 + i, 5, 7], LONG):
            last = output
        assert last is not None
        return list(last.outputs[0].token_ids)

    with LLM(model, **OPTIONS) as llm:
        expected = [list(o.outputs[0].token_ids) for o in generate(llm, [[3 + i, 5, 7] for i in range(4)], LONG)]
    client = process_client(model, **OPTIONS, tensor_parallel_size=2)
    await client.start()
    try:
        pid = client.transport.supervisor.pid
        assert pid is not None
        (rank,) = child_pids(pid)
        assert os.getpgid(rank) == pid
        tasks = [asyncio.create_task(tokens(client, i)) for i in range(4)]
        await asyncio.sleep(0.1)
        os.kill(rank, signal.SIGKILL)
        assert await asyncio.gather(*tasks) == expected
        health = client.health()
        assert health.num_restarts == 1 and re.search(DEATH, health.reason), health
        pid = client.transport.supervisor.pid
        assert pid is not None
        ranks = child_pids(pid)
    finally:
        client.transport.close()
    wait_until(lambda: is_gone(rank) and all(map(is_gone, ranks)))


async def test_a_rank_that_hangs_is_named_and_its_engine_replaced(model: str) -> None:
    from octavo.engine.process.supervisor import EngineTimeouts

    client = process_client(model, **OPTIONS, tensor_parallel_size=2, timeouts=EngineTimeouts(step_s=2.5))
    await client.start()
    try:
        async for _ in client.generate([3, 5, 7], LONG):  # the first steps may take long
            pass
        pid = client.transport.supervisor.pid
        assert pid is not None
        (rank,) = child_pids(pid)
        await asyncio.sleep(0.3)  # a heartbeat
        assert [(r.plan > 0, r.is_behind) for r in client.health().ranks] == [(True, False)] * 2
        os.kill(rank, signal.SIGSTOP)
        seen = set[tuple[bool, ...]]()

        async def watch() -> None:
            while client.transport.supervisor.pid == pid:  # ranks that start may be behind
                seen.add(tuple(place.is_behind for place in client.health().ranks))
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        outputs = [output async for output in client.generate([4, 5, 7], GREEDY)]
        watching.cancel()
        assert (False, True) in seen and (True, False) not in seen
        assert len(outputs[-1].outputs[0].token_ids) == 24
        assert re.search(r"a step took .* \(rank 1 at plan \d+, collective \d+; rank 0 at", client.health().reason)
    finally:
        client.transport.close()
    wait_until(lambda: is_gone(rank))


async def test_an_idle_engine_whose_rank_dies_is_replaced(model: str) -> None:
    """Before the next request."""
    client = process_client(model, **OPTIONS, tensor_parallel_size=2)
    await client.start()
    try:
        pid = client.transport.supervisor.pid
        assert pid is not None
        os.kill(child_pids(pid)[0], signal.SIGKILL)
        deadline = time.monotonic() + 60.0
        while client.health().num_restarts == 0 or client.health().state != "running":
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert re.search(DEATH, client.health().reason)
        assert client.transport.supervisor.pid != pid
    finally:
        client.transport.close()


async def test_a_stopped_rank_0_takes_the_others_with_it(model: str) -> None:
    """It is the engine process, whose heartbeats cease."""
    from octavo.engine.process.supervisor import EngineTimeouts

    timeouts = EngineTimeouts(silence_s=2.5)
    client = process_client(model, **OPTIONS, tensor_parallel_size=2, timeouts=timeouts)
    await client.start()
    try:
        expected = [output async for output in client.generate([4, 5, 7], LONG)][-1].outputs[0].token_ids
        pid = client.transport.supervisor.pid
        assert pid is not None
        (rank,) = child_pids(pid)
        task = asyncio.create_task(last(client, [4, 5, 7]))
        await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGSTOP)
        assert await task == expected
        assert re.search("it sent no heartbeat for", client.health().reason)
        wait_until(lambda: is_gone(pid) and is_gone(rank))
    finally:
        client.transport.close()


async def last(client: Any, prompt: list[int]) -> list[int]:
    outputs = [output async for output in client.generate(prompt, LONG)]
    return list(outputs[-1].outputs[0].token_ids)


@pytest.mark.parametrize(("number", "times"), [(signal.SIGKILL, 3), (signal.SIGSTOP, 2)])
def test_a_storm_of_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, times: int) -> None:
    """The short form of a trial of `make reliability`, which also has bounds of times."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    tally = Tally("")
    run(ranks_under_fire(tally, World("", {}, 1.0, tmp_path / "model"), number, times), limit_s=None)  # type: ignore[arg-type]
    assert tally.runs >= 16
    assert (tally.lost, tally.hung, tally.wrong, tally.leaked) == (0, 0, 0, 0), tally.notes


async def test_replicas_of_two_ranks_each(model: str) -> None:
    with LLM(model, **OPTIONS) as llm:
        expected = [list(o.outputs[0].token_ids) for o in generate(llm, [[3 + i, 5, 7] for i in range(4)])]
    client = replicas_client(EngineArgs(model, **OPTIONS, tensor_parallel_size=2), 2)
    await client.start()
    try:
        pids = [replica.supervisor.pid for replica in client.transport.replicas]
        assert [len(child_pids(pid)) for pid in pids if pid is not None] == [1, 1]

        async def tokens(i: int) -> list[int]:
            outputs = [output async for output in client.generate([3 + i, 5, 7], GREEDY)]
            return list(outputs[-1].outputs[0].token_ids)

        assert await asyncio.gather(*(tokens(i) for i in range(4))) == expected
    finally:
        client.transport.close()
