"""Exception classes, and whose mistake each one reports.

OctavoError                       base of everything that Octavo raises on purpose
├── UsageError (ValueError)       the caller's mistake: the message names the value, the limit and the remedy
│   ├── UnknownOptionError        an argument or option that does not exist; names the nearest that does
│   ├── ParameterError            a value out of its range (temperature, top_p, block_size, ...)
│   ├── PromptError               an empty prompt, a token id outside the vocabulary, a prompt of the wrong type
│   ├── ContextLengthError        prompt, or prompt + max_tokens, longer than the model's context
│   ├── CapacityError             a request that could never run in the pool, the row budget or the token budget
│   ├── TemplateError             a chat that the model's template rejects, or a model without a template
│   └── TraceError                a trace of requests that cannot be read; names the line and the expected format
├── ModelError                    the model cannot be loaded
│   ├── ModelNotFoundError        no such directory, file, name in the catalogue, or hub repository
│   ├── UnsupportedModelError     an architecture, a feature or a file format that Octavo does not support
│   └── CheckpointError           files that are missing, cut short, corrupt, or of the wrong shape or dtype
├── MemoryBudgetError             weights, activations and KV blocks do not fit; the message prints the budget
└── EngineError                   the engine failed
    ├── PlanError                 bytes that are no plan, or a plan of another version; executors in other processes
    ├── StepError                 a step raised on the device; the scheduler has rolled back its plan
    │   └── StepMemoryError       the step ran out of memory; later steps are smaller
    ├── DeviceLostError           the device no longer responds: the engine is dead, and waiting callers fail
    ├── RequestFailedError        one request failed (non-finite logits, ...); no other is affected
    └── EngineQueryError          the engine could not answer a query about its state; it goes on (code
                                  "no_replica": a cluster has no such replica now)

"No room now" is a value, not an exception: the scheduler reports a request's wait reason (`core.events.Waiting`).
A broken invariant is a bug in Octavo and an `assert`.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterable, Iterator

MAX_MESSAGE = 4000
"""Maximum characters of a message. Most messages quote input, and input may have any length."""
MAX_WORD = 500
"""Maximum characters of a word in a message: a path or a URL may be long."""
MAX_QUOTE = 100
"""Maximum characters of a quoted name or value."""


def cut(text: object, limit: int = MAX_QUOTE) -> str:
    """`text` on one line; the middle is left out if it is longer than `limit`."""
    line = text if isinstance(text, str) else str(text)
    if len(line) > limit:
        line = f"{line[: limit - limit // 3]}...{line[-(limit // 3) :]} ({len(line):,} characters)"
    return " ".join(line.split()) if not line.isprintable() else line


def bounded(message: str) -> str:
    """`message` with long words shortened, and shortened as a whole if it is still too long."""
    if len(message) <= MAX_WORD:
        return message
    return cut(re.sub(rf"\S{{{MAX_WORD},}}", lambda word: cut(word[0]), message), MAX_MESSAGE)


@contextlib.contextmanager
def naming_file(path: os.PathLike[str]) -> Iterator[None]:
    """Adds the file's name to an `OSError` without one: the system names no file if a write fails."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def check_output(name: str, path: os.PathLike[str] | None) -> None:
    """Raises `ParameterError` if no file can be written there; called before minutes of work."""
    if path is None:
        return
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        problem = "a directory"
    elif not os.path.isdir(folder):
        problem = "whose directory does not exist"
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        problem = "which may not be written"
    else:
        return
    raise ParameterError(f"{name} is {os.fspath(path)!r}, {problem}; name another", param=name)


class OctavoError(Exception):
    """Base class. `code` is a stable machine-readable name; `param` is the argument at fault, if any."""

    code = "error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(bounded(message))
        self.param = param
        if code is not None:
            self.code = code


class UsageError(OctavoError, ValueError):
    code = "invalid_value"


class UnknownOptionError(UsageError, TypeError):
    """Also a `TypeError`, like Python's error for an unexpected keyword argument."""

    code = "unknown_parameter"

    @classmethod
    def of(cls, owner: str, name: str, known: Iterable[str]) -> UnknownOptionError:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
        return cls(f"{owner} has no option {name!r}; {hint}", param=name)


class ParameterError(UsageError):
    pass


class PromptError(UsageError):
    pass


class ContextLengthError(UsageError):
    code = "context_length_exceeded"


class CapacityError(UsageError):
    code = "exceeds_kv_capacity"


class TemplateError(UsageError):
    code = "no_chat_template"


class TraceError(UsageError):
    code = "bad_trace"


class ModelError(OctavoError):
    code = "model_error"


class ModelNotFoundError(ModelError):
    code = "model_not_found"


class UnsupportedModelError(ModelError):
    code = "unsupported_model"


class CheckpointError(ModelError):
    code = "bad_checkpoint"


class MemoryBudgetError(OctavoError):
    code = "out_of_memory"


class EngineError(OctavoError):
    code = "engine_error"


class PlanError(EngineError):
    code = "invalid_plan"


class StepError(EngineError):
    code = "step_failed"


class StepMemoryError(StepError):
    code = "out_of_memory"


class DeviceLostError(EngineError):
    code = "device_lost"


class RequestFailedError(EngineError):
    code = "numerical_error"


class EngineQueryError(EngineError):
    code = "no_answer"
