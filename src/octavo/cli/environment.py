"""The environment variables that Octavo reads, and a check for misspelt names.

Without the check, a misspelt name such as OCTAVO_API_KEYS would start a server without an API key.

OCTAVO_API_KEY    a key of the server; also for `octavo top` and `octavo bench serve`
VLLM_API_KEY      another key of the server; also for `octavo bench serve`
OCTAVO_ADMIN_KEY  an admin key of the server; also for `octavo top`, before `OCTAVO_API_KEY`
OCTAVO_CACHE      the directory for models and compiled kernels, instead of `~/.cache/octavo`
OCTAVO_DEBUG      1: a traceback with every error, as `--debug`
OCTAVO_NATIVE     0: no compiled CPU kernels; otherwise the compiler's `-march` for them
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from octavo.errors import UsageError, cut

SERVER_KEYS = ("OCTAVO_API_KEY", "VLLM_API_KEY")
"""API keys of the server. Each request needs one of them."""
ADMIN_KEY = "OCTAVO_ADMIN_KEY"
"""The key that sees all requests in /debug and /view."""
KNOWN_VARIABLES = (*SERVER_KEYS, ADMIN_KEY, "OCTAVO_CACHE", "OCTAVO_DEBUG", "OCTAVO_NATIVE")
TEST_VARIABLES = re.compile(r"OCTAVO_(TEST|FUZZ|SOAK)_\w+|OCTAVO_(CHROMIUM|AXE)")
"""Variables of Octavo's own tests."""
SERVICE_LINK = re.compile(r"OCTAVO(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
"""Kubernetes sets these in every container of a namespace with a service whose name begins with "octavo"."""
SECRET = re.compile(r"(OCTAVO|VLLM)_(\w*_)?(API_?)?(KEYS?|TOKENS?|SECRETS?)")
MIN_SIMILARITY = 0.8
"""Minimum similarity (difflib ratio) of a misspelt name to a known one."""


def check_environment(environment: Mapping[str, str], *, for_server: bool) -> list[str]:
    """Warnings about unknown variables and empty keys.

    With `for_server`, raises `UsageError` for a misspelt variable or an empty key. Variables of vLLM are ignored,
    unless they resemble VLLM_API_KEY.
    """
    problems = [
        f"{name} is set, but empty; give a key, or unset it"
        for name in (*SERVER_KEYS, ADMIN_KEY)
        if not environment.get(name, "-")
    ]
    warnings = []
    for name, suggestion in _unknown_variables(environment):
        text = f"{cut(name)} is set, but Octavo reads no such variable"
        if suggestion is None:
            warnings.append(f"{text}; it reads {', '.join(KNOWN_VARIABLES)}")
        else:
            problems.append(f"{text}; did you mean {suggestion}? Rename or unset it")
    if problems and for_server:
        raise UsageError(problems[0])
    return problems + warnings


def _unknown_variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    """Unknown variables with names like Octavo's, each with the known name that it resembles, or None."""
    for name in sorted(environment):
        upper = name.upper()
        if name in KNOWN_VARIABLES or TEST_VARIABLES.fullmatch(name) or SERVICE_LINK.fullmatch(name):
            continue
        near = difflib.get_close_matches(upper[:200], KNOWN_VARIABLES, n=1, cutoff=MIN_SIMILARITY)
        suggestion = near[0] if near else None
        if suggestion is None and SECRET.fullmatch(upper):
            suggestion = SERVER_KEYS[0] if upper.startswith("OCTAVO") else SERVER_KEYS[1]
        if suggestion is not None or upper.startswith("OCTAVO_"):
            yield name, suggestion
