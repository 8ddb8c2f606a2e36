"""Processes that lose their GPU during a step, for tests.

    python -m tests.runner.lose_device MODEL FRONT HARM     FRONT: llm or async
    python -m tests.runner.lose_device HARM ONCE FD         an engine process

The engine process loses its GPU only if the file ONCE exists, which it deletes. HARM is the cause: "write" to an
invalid address, "index" out of a tensor's bounds, or "fake", a CPU with an invented CUDA error. The first two need a
GPU.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.config import EngineArgs
from octavo.core.plan import StepPlan
from octavo.errors import EngineError
from octavo.frontend.build import BuiltEngine, build
from octavo.frontend.input_processor import InputProcessor
from octavo.frontend.process_transport import process_client
from octavo.runner.model_runner import ModelRunner
from octavo.runner.step import Step
from tests.runner.stub_platform import use_stub_platform

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 200,
    "block_size": 8,
    "max_model_len": 64,
    "decode_window": 2,
}
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
PROMPTS = [[3 + i, 5, 7 + i] for i in range(4)]
ROOT = Path(__file__).parents[2]
AT = 4
"""The last good step: others are in flight."""
MESSAGES = {
    "write": "CUDA error: an illegal memory access was encountered",
    "index": "CUDA error: device-side assert triggered",
    "fake": "CUDA error: an illegal memory access was encountered",
}


def options_for(harm: str) -> dict[str, Any]:
    return OPTIONS | {"device": "cpu" if harm == "fake" else "cuda"}


def lose(runner: ModelRunner, harm: str) -> None:
    """Let `AT` steps run, then lose the device."""
    execute, num_launched = runner.execute, 0

    def raise_cuda_error(*_: Any) -> Any:
        raise RuntimeError(f"{MESSAGES[harm]}\nSearch for it.\nCompile with `TORCH_USE_CUDA_DSA` ...\n")

    def broken(plan: StepPlan) -> Step:
        nonlocal num_launched
        num_launched += 1
        if num_launched > AT and harm == "fake":
            runner.platform.synchronize = raise_cuda_error  # type: ignore[method-assign]
            raise_cuda_error()
        elif num_launched == AT + 1 and harm == "write":
            from tests.runner.wild_write import write_to

            write_to[(1,)](16)
        elif num_launched == AT + 1:
            torch.zeros(4, device="cuda").index_select(0, torch.tensor([1 << 20], device="cuda"))
        return execute(plan)

    runner.execute = broken  # type: ignore[method-assign]


def prepare(built: LLM | BuiltEngine, harm: str) -> None:
    if harm == "fake":
        use_stub_platform(built)  # type: ignore[arg-type]
    lose(built.engine.executor.runner, harm)  # type: ignore[attr-defined]


def run_llm(model: str, harm: str) -> None:
    llm = LLM(model, **options_for(harm))
    prepare(llm, harm)
    print("started", flush=True)
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def run_async(model: str, harm: str) -> None:
    built = build(EngineArgs(model=model, **options_for(harm)))
    prepare(built, harm)
    print("started", flush=True)

    async def one(engine: AsyncLLM, prompt: list[int]) -> None:
        async for _ in engine.generate(prompt, PARAMS):
            pass

    async def main() -> None:
        engine = AsyncLLM(built.engine)
        ends = await asyncio.gather(*(one(engine, prompt) for prompt in PROMPTS), return_exceptions=True)
        assert all(isinstance(end, EngineError) and str(end).endswith(MESSAGES[harm]) for end in ends), ends
        assert isinstance(ends[0], EngineError) and not engine.is_running
        raise ends[0]

    asyncio.run(main())


def run_engine_process(harm: str, once: Path) -> None:
    from octavo.frontend import engine_main as engine_process

    def build_one(options: dict[str, Any], enter: Any) -> tuple[Any, Any, dict[str, Any]]:
        enter("loading the model")
        built = build(EngineArgs(**options))
        if once.exists():
            once.unlink()
            prepare(built, harm)
        return built.engine, InputProcessor(built.tokenizer, built.engine.limits.vocab_size), {}

    engine_process.run(build_one)


# -- checks ------------------------------------------------------------------------------------------------------------


def check_process(model: str, front: str, harm: str) -> None:
    """The process exits with one line that ends in CUDA's message, and its children exit too."""
    command = [sys.executable, "-m", "tests.runner.lose_device", model, front, harm]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=300)  # a process that is left would hold stderr
        assert process.returncode == 1 and out == "started\n", err
        assert err.rstrip().splitlines()[-1].endswith(MESSAGES[harm]), err
        assert not is_alive(process.pid)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_alive(group: int) -> bool:
    """True if the process group has a process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def check_engine_process(model: str, harm: str, tmp_path: Path) -> None:
    """The engine process is replaced, and its requests get the same tokens as without the failure."""

    once = tmp_path / "once"
    once.touch()
    command = (sys.executable, "-m", "tests.runner.lose_device", harm, str(once))

    async def one(client: Any, prompt: list[int]) -> list[int]:
        return [output async for output in client.generate(prompt, PARAMS)][-1].outputs[0].token_ids

    async def all_of(client: Any) -> list[list[int]]:
        return await asyncio.gather(*(one(client, prompt) for prompt in PROMPTS))

    async def main() -> None:
        async with process_client(model, command=command, **options_for(harm)) as client:
            first = client.transport.pid
            outputs = await all_of(client)
            health = client.health()
            assert health.num_restarts == 1 and not once.exists() and client.transport.pid != first
            assert health.reason.startswith("DeviceLostError: ") and health.reason.endswith(MESSAGES[harm])
            assert first is not None and not is_alive(first)
            assert await all_of(client) == outputs  # without a failure
            assert client.health().num_restarts == 1

    asyncio.run(asyncio.wait_for(main(), 300))


if __name__ == "__main__":
    if len(sys.argv[2:]) == 2 and sys.argv[2] in ("llm", "async"):
        {"llm": run_llm, "async": run_async}[sys.argv[2]](sys.argv[1], sys.argv[3])
    else:
        run_engine_process(sys.argv[1], Path(sys.argv[2]))
