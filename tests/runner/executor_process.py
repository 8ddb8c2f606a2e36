"""An executor in another process, which gets bytes and nothing else.

    python -m tests.runner.executor_process

Each message has four bytes of length in front. A request begins with a letter and the number of a plan: "n" makes the
executor of a `HashModel`, "p" submits a plan, "b" puts a bitmask. "s", "d", "l" and "r" have an answer: the capacity of
the started executor, whether the plan is done, a part of its result, and the rest.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from octavo.core.plan import StepPlan, StepResult
from octavo.engine.executor import Capacity, GrammarBitmask, decode_error, encode_error
from octavo.errors import DeviceLostError, StepError
from tests.core.plan_worker import receive, send

if TYPE_CHECKING:
    from tests.runner.hash_model import Sizes

HEAD = struct.Struct("=cI")


class ExecutorProcess:
    """A process for one executor after the other."""

    def __enter__(self) -> ExecutorProcess:
        command = [sys.executable, "-m", "tests.runner.executor_process"]
        self._process = subprocess.Popen(
            command, cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait(20) == 0 or kind is not None

    def executor(self, sizes: Sizes) -> RemoteExecutor:
        self.tell(b"n", 0, struct.pack(f"={len(sizes) + len(sizes.windows) - 1}I", *sizes[:-1], *sizes.windows))
        return RemoteExecutor(self)

    def tell(self, what: bytes, number: int, data: bytes = b"") -> None:
        assert self._process.stdin is not None
        send(self._process.stdin, HEAD.pack(what, number) + data)  # type: ignore[arg-type]

    def ask(self, what: bytes, number: int) -> bytes:
        self.tell(what, number)
        answer = receive(self._process.stdout)  # type: ignore[arg-type]
        assert answer is not None, "the process has ended"
        return answer


class RemoteExecutor:
    def __init__(self, process: ExecutorProcess) -> None:
        self._process = process
        self._num_plans = 0

    def start(self) -> Capacity:
        return Capacity.decode(self._process.ask(b"s", 0))

    def submit(self, plan: StepPlan) -> RemoteHandle:
        self._process.tell(b"p", self._num_plans, plan.encode())
        self._num_plans += 1
        return RemoteHandle(self._process, self._num_plans - 1, plan)

    def close(self) -> None:
        """The next executor takes its place."""


class RemoteHandle:
    def __init__(self, process: ExecutorProcess, number: int, plan: StepPlan) -> None:
        self._process, self._number, self.plan = process, number, plan

    @property
    def done(self) -> bool:
        return self._process.ask(b"d", self._number) == b"yes"

    def put_bitmask(self, masks: GrammarBitmask | None) -> None:
        self._process.tell(b"b", self._number, b"" if masks is None else masks.encode())

    def poll(self, timeout_s: float = 0.0) -> StepResult | None:
        part = self._process.ask(b"l", self._number)
        return StepResult.decode(part) if part else None

    def result(self) -> StepResult:
        answer = self._process.ask(b"r", self._number)
        if answer[:1] == b"e":
            raise decode_error(answer[1:])
        return StepResult.decode(answer[1:])


def main() -> None:
    from octavo.runner.executor import Executor, StepHandle
    from octavo.runner.platform import CpuPlatform
    from tests.runner.hash_model import HashExecutor, Sizes

    executor: Executor | None = None
    handles: dict[int, StepHandle] = {}
    while (message := receive(sys.stdin.buffer)) is not None:
        (what, number), data = HEAD.unpack(message[: HEAD.size]), message[HEAD.size :]
        if what == b"n":
            if executor is not None:
                executor.close()
            numbers = struct.unpack(f"={len(data) // 4}I", data)
            executor, handles = HashExecutor(Sizes(*numbers[:7], windows=numbers[7:]), CpuPlatform()).inner, {}
        elif what == b"s":
            assert executor is not None
            send(sys.stdout.buffer, executor.start().encode())
        elif what == b"p":
            assert executor is not None
            handles[number] = executor.submit(StepPlan.decode(data))
        elif what == b"b":
            handles[number].put_bitmask(GrammarBitmask.decode(data) if data else None)
        elif what == b"d":
            send(sys.stdout.buffer, b"yes" if handles[number].done else b"no")
        elif what == b"l":
            part = handles[number].poll()
            send(sys.stdout.buffer, b"" if part is None else part.encode())
        else:
            try:
                answer = b"r" + handles.pop(number).result().encode()
            except (StepError, DeviceLostError) as error:
                answer = b"e" + encode_error(error)
            send(sys.stdout.buffer, answer)


if __name__ == "__main__":
    main()
