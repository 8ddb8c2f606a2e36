"""What can go wrong, and whose fault it is.

OctavoError                       anything that Octavo raises on purpose
├── UsageError (ValueError)       the caller's mistake: the message names the value, the limit and the remedy
│   ├── UnknownOptionError        an argument or option that does not exist; names the nearest that does
│   ├── ParameterError            a value out of its range (temperature, top_p, block_size, ...)
│   ├── PromptError               an empty prompt, a token id outside the vocabulary, a prompt of the wrong type
│   ├── ContextLengthError        prompt, or prompt + max_tokens, longer than the model's context
│   ├── CapacityError             a request that could never run in the pool, the row budget or the token budget
│   ├── TemplateError             a chat that the model's template refuses, or a model without one
│   └── TraceError                a trace of requests that cannot be read; names the line and what is expected there
├── ModelError                    the model cannot be loaded
│   ├── ModelNotFoundError        no such directory, file, name in the catalogue, or hub repository
│   ├── UnsupportedModelError     an architecture, a feature or a file format that Octavo does not have
│   └── CheckpointError           files that are missing, cut short, corrupt, or of the wrong shape or dtype
├── MemoryBudgetError             weights, activations and KV blocks do not fit; the message prints the budget
└── EngineError                   the engine failed
    ├── StepError                 a step raised on the device; the scheduler has taken back what it had promised
    │   └── StepMemoryError       it took more memory than there is; those after it are smaller
    ├── DeviceLostError           the device does not answer this process any more: the engine is dead, whoever waits
    ├── RequestFailedError        one request failed (numbers that are not finite, ...); no other was touched
    └── EngineQueryError               the engine has no answer to a question about it, and goes on

"No room now" is no exception but a value: the scheduler says what a request waits for (see `core.events.Waiting`).
A broken invariant is our own bug and an `assert`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

MAX_MESSAGE = 4000
"""Characters of a message. Most messages quote input, and input may have any length."""
MAX_WORD = 500
"""Characters of a word in a message: a path or a URL may be long."""
MAX_QUOTE = 100
"""Characters of a name or value that a message quotes."""


def cut(text: object, limit: int = MAX_QUOTE) -> str:
    """`text` on one line, its middle left out if it is longer than `limit`."""
    line = text if isinstance(text, str) else str(text)
    if len(line) > limit:
        line = f"{line[: limit - limit // 3]}...{line[-(limit // 3) :]} ({len(line):,} characters)"
    return " ".join(line.split()) if not line.isprintable() else line


def bounded(message: str) -> str:
    """`message` with long words cut, and cut itself if it is still long."""
    if len(message) <= MAX_WORD:
        return message
    return cut(re.sub(rf"\S{{{MAX_WORD},}}", lambda word: cut(word[0]), message), MAX_MESSAGE)


class OctavoError(Exception):
    """Root of the tree. `code` is a stable machine-readable word, `param` the argument at fault, if one is."""

    code = "error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(bounded(message))
        self.param = param
        if code is not None:
            self.code = code


class UsageError(OctavoError, ValueError):
    code = "invalid_value"


class UnknownOptionError(UsageError, TypeError):
    """Also a `TypeError`, as Python's own complaint about an unexpected keyword argument is."""

    code = "unknown_parameter"

    @classmethod
    def of(cls, what: str, name: str, known: Iterable[str]) -> UnknownOptionError:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
        return cls(f"{what} has no option {name!r}; {hint}", param=name)


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


AnswerError = EngineQueryError  # the name until 0.1; kept for one release
