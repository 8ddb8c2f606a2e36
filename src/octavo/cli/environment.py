"""The environment variables that Octavo reads, and a check for misspelt ones.

A misspelt OCTAVO_API_KEYS would start a server without the key that its owner meant to set.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from octavo.errors import UsageError, cut

SERVER_KEYS = ("OCTAVO_API_KEY", "VLLM_API_KEY")
"""The server's keys. A request must bring one of them."""
ADMIN_KEY = "OCTAVO_ADMIN_KEY"
"""The key that sees the requests of all."""
KNOWN = (*SERVER_KEYS, ADMIN_KEY, "OCTAVO_CACHE", "OCTAVO_DEBUG", "OCTAVO_NATIVE")
TESTS = re.compile(r"OCTAVO_(TEST|FUZZ|SOAK)_\w+|OCTAVO_(CHROMIUM|AXE)")
"""Variables of our own tests."""
SERVICE_LINK = re.compile(r"OCTAVO(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
"""Kubernetes sets these in every container beside a service whose name begins with "octavo"."""
SECRET = re.compile(r"(OCTAVO|VLLM)_(\w*_)?(API_?)?(KEYS?|TOKENS?|SECRETS?)")
SIMILAR = 0.8
"""Least similarity of a misspelt name to the name that was meant, as difflib counts it."""


def check_environment(environment: Mapping[str, str], *, for_server: bool) -> list[str]:
    """Warnings about variables that nothing reads.

    With `for_server`, raises `UsageError` for a variable that is misspelt, or a key that is empty. A name of vLLM's own
    is not ours to judge, unless it resembles VLLM_API_KEY.
    """
    problems = [
        f"{name} is set, but empty; give a key, or unset it"
        for name in (*SERVER_KEYS, ADMIN_KEY)
        if not environment.get(name, "-")
    ]
    warnings = []
    for name, meant in _strangers(environment):
        text = f"{cut(name)} is set, but Octavo reads no such variable"
        if meant is None:
            warnings.append(f"{text}; it reads {', '.join(KNOWN)}")
        else:
            problems.append(f"{text}; did you mean {meant}? Rename or unset it")
    if problems and for_server:
        raise UsageError(problems[0])
    return problems + warnings


def _strangers(environment: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    """Variables that look like ours and are not, each with the name that was probably meant."""
    for name in sorted(environment):
        upper = name.upper()
        if name in KNOWN or TESTS.fullmatch(name) or SERVICE_LINK.fullmatch(name):
            continue
        near = difflib.get_close_matches(upper[:200], KNOWN, n=1, cutoff=SIMILAR)
        meant = near[0] if near else None
        if meant is None and SECRET.fullmatch(upper):
            meant = SERVER_KEYS[0] if upper.startswith("OCTAVO") else SERVER_KEYS[1]
        if meant is not None or upper.startswith("OCTAVO_"):
            yield name, meant
