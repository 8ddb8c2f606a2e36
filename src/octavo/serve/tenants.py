"""Tenants: the holders of keys, whose request is whose, and what a tenant may see."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from octavo.engine.engine import pin_id

OTHER_TENANT = "another tenant"
"""Stands where the id of a request of another tenant would."""
NONCE_BYTES, TAG_BYTES = 10, 6
NAME = re.compile(r"(?:cmpl-|chatcmpl-|resp_)?([0-9a-f]{32})(?:-[0-9]{1,9})?")
"""An id in the engine: an object's prefix, our own id, and the number of a prompt where there are several."""
_SECRET = secrets.token_bytes(32)


@dataclass(frozen=True, slots=True)
class Tenant:
    """The holder of a key; without keys, every caller.

    A request's id contains a MAC under the tenant's salt, so an id alone says whose it is, also after its end and after
    a restart of the engine. Nothing has to be remembered.

    salt      16 bytes that part its cached blocks from those of others; empty where there is one tenant
    sees_all  it sees the requests of all tenants, and not only its own
    number    by which the scheduler shares, and the queue counts
    """

    salt: bytes = b""
    sees_all: bool = True
    number: int = 0

    def pin_name(self, name: str) -> str:
        """Of a pinned prefix of its own. Where there are several tenants, it ends with whose it is."""
        return name + self._pin_end

    @property
    def _pin_end(self) -> str:
        return f" {self.salt.hex()[:8]}" if self.salt else ""

    def new_request_id(self) -> str:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return (nonce + self._tag(nonce)).hex()

    def sees(self, name: str) -> bool:
        """Whether it may see the request of this id. The time that this takes does not depend on what runs."""
        if self.sees_all:
            return True
        if name.startswith(pin_id("")):
            return name.endswith(self._pin_end)
        if (found := NAME.fullmatch(name)) is None:
            return False
        data = bytes.fromhex(found[1])
        return secrets.compare_digest(data[NONCE_BYTES:], self._tag(data[:NONCE_BYTES]))

    def _tag(self, nonce: bytes) -> bytes:
        return blake2b(nonce, digest_size=TAG_BYTES, key=_SECRET, person=self.salt).digest()

    # -- what it sees of the engine's answers --------------------------------------------------------------------------

    def request(self, found: dict[str, Any]) -> dict[str, Any]:
        """A request of its own (`engine.timeline.describe_request`) without the ids of others in its timeline."""
        return found | {"timeline": [self.redact(entry) for entry in found["timeline"]]}

    def redact(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """What happened to a request of its own. Another's request may have been the cause."""
        cause = event.get("for_request")
        return {**event, "for_request": OTHER_TENANT} if cause is not None and not self.sees(cause) else dict(event)

    def kv(self, found: dict[str, Any]) -> dict[str, Any]:
        """The pool (`engine.timeline.describe_kv`), with its own requests one by one and the others as a sum."""
        if self.sees_all:
            return found
        own = {name: held for name, held in found["requests"].items() if self.sees(name)}
        others = [held for name, held in found["requests"].items() if name not in own]
        sums = {name: sum(held[name] for held in others) for name in ("num_blocks", "num_host_blocks")}
        return found | {"requests": own, "other_tenants": {"num_requests": len(others), **sums}}


DEFAULT_TENANT = Tenant()
