"""Tenants (API key holders): which requests belong to a tenant, and what it may see of others."""

from __future__ import annotations

import functools
import ipaddress
import re
import secrets
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from octavo.engine.engine_request import pin_id

OTHER_TENANT = "another tenant"
"""Replaces request ids of other tenants."""
NONCE_BYTES, TAG_BYTES = 10, 6
REQUEST_NAME = re.compile(r"(?:cmpl-|chatcmpl-|resp_)?([0-9a-f]{32})(?:-[0-9]{1,9})?")
"""An engine request id: the API object's prefix, our own id, and the prompt's index if there are several."""
_SECRET = secrets.token_bytes(32)


@dataclass(frozen=True, slots=True)
class Tenant:
    """The holder of an API key; without keys, the callers of one address.

    A request id contains a MAC under the tenant's salt. The id alone identifies its tenant, also after the request has
    ended and after an engine restart. No state is kept.

    salt      16 bytes that separate its cached blocks from other tenants'; empty if there is only one tenant
    sees_all  may see the requests of all tenants
    number    its number in the scheduler's fair sharing and in the queue's counts
    """

    salt: bytes = b""
    sees_all: bool = True
    number: int = 0

    def pin_name(self, name: str) -> str:
        """The engine's name of one of its pinned prefixes: with several tenants it ends with the tenant's tag."""
        return name + self._pin_suffix

    @property
    def _pin_suffix(self) -> str:
        return f" {self.salt.hex()[:8]}" if self.salt else ""

    def new_request_id(self) -> str:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return (nonce + self._tag(nonce)).hex()

    def sees(self, name: str) -> bool:
        """Whether it may see the request with this id. The time taken does not depend on running requests."""
        if self.sees_all:
            return True
        if name.startswith(pin_id("")):
            return name.endswith(self._pin_suffix)
        if (found := REQUEST_NAME.fullmatch(name)) is None:
            return False
        data = bytes.fromhex(found[1])
        return secrets.compare_digest(data[NONCE_BYTES:], self._tag(data[:NONCE_BYTES]))

    def _tag(self, nonce: bytes) -> bytes:
        return blake2b(nonce, digest_size=TAG_BYTES, key=_SECRET, person=self.salt).digest()

    # -- redaction of debug data ---------------------------------------------------------------------------------------

    def redact_request(self, found: dict[str, Any]) -> dict[str, Any]:
        """One of its requests (`engine.timeline.describe_request`), without other tenants' ids in the timeline."""
        return found | {"timeline": [self.redact(entry) for entry in found["timeline"]]}

    def redact(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """An event of one of its requests; the id is hidden if another tenant's request was the cause."""
        cause = event.get("for_request")
        return {**event, "for_request": OTHER_TENANT} if cause is not None and not self.sees(cause) else dict(event)

    def redact_kv(self, found: dict[str, Any]) -> dict[str, Any]:
        """The block pool (`engine.timeline.describe_kv`): its own requests, and the sum of other tenants'."""
        if self.sees_all:
            return found
        own = {name: held for name, held in found["requests"].items() if self.sees(name)}
        others = [held for name, held in found["requests"].items() if name not in own]
        sums = {name: sum(held[name] for held in others) for name in ("num_blocks", "num_host_blocks")}
        return found | {"requests": own, "other_tenants": {"num_requests": len(others), **sums}}


DEFAULT_TENANT = Tenant()


@functools.lru_cache(4096)
def tenant_at(host: str) -> Tenant:
    """The tenant of an address, for fair sharing on a server without keys. In IPv6 it is the network of 64 bits."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return DEFAULT_TENANT
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    return Tenant(number=1 + zlib.crc32(address.packed[:8]))
