"""The names by which a server may be called: its check against DNS rebinding.

A browser that has loaded a page from evil.example sends the requests of that page to whatever address the name has a
moment later, 127.0.0.1 included, and lets the page read the answers. Such a request says `Host: evil.example`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.serve.openai.errors import ApiError, bad_request

ANY = "*"
_HOST = re.compile(r"(?P<name>[A-Za-z0-9_.-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>[0-9]{0,5}))?")


class AllowedHosts:
    """The hosts that a server answers to.

    names        also these; "*.example.com" stands for all names below example.com, "*" for every name
    bound        the address that the server is bound to, or a name of it
    any_address  and every address: it is bound to all of the machine's, and no page can be loaded from an address that
                 is not its server's own
    """

    def __init__(self, names: Sequence[str] = (), *, bound: str | None = None, any_address: bool = False) -> None:
        self._any = ANY in names
        self._names = {plain(name) for name in (*names, "localhost", *([bound] if bound else []))}
        self._domains = (".localhost", *(name[1:] for name in self._names if name.startswith("*.")))
        self._any_address = any_address

    @classmethod
    def of(cls, names: Sequence[str], *, host: str, uds: str | None, has_keys: bool) -> AllowedHosts:
        """Those of a server. One that wants a key, or listens on a Unix socket, is out of a strange page's reach: it
        answers to every name unless some are listed."""
        if not names and (has_keys or uds is not None):
            return cls([ANY])
        if is_wildcard(host):
            return cls([*names, socket.gethostname()], any_address=True)
        return cls(names, bound=host)

    def refusal(self, scope: Mapping[str, Any], *, any_name: bool = False) -> ApiError | None:
        """What is wrong with a request's Host. `any_name`: only how it is written matters."""
        given = [value for name, value in scope["headers"] if name == b"host"]
        if not given and scope.get("http_version") == "1.0":  # which does not know the field
            return None
        if len(given) != 1:
            text = f"a request has exactly one Host field, this one has {len(given)}"
            return _closing(bad_request("invalid_host", f"{text}; name the server in one"))
        (value,) = given
        found = _HOST.fullmatch(value.decode("latin-1"))
        if found is None or int(found["port"] or 0) > 65535:
            text = f"Host is {value[:100].decode('latin-1')!r}, it must be a name or an address, and a port if need be"
            return _closing(bad_request("invalid_host", text))
        here, _ = scope.get("server") or (None, None)  # the address that the connection was made to
        if any_name or self.includes(found["name"]) or plain(found["name"]) == here:
            return None
        name = found["name"][:100]
        text = f"this server does not answer to the name {name}; call it by its address, or start it with"
        return ApiError(403, "wrong_host", f"{text} --allowed-hosts {name}")

    def includes(self, name: str) -> bool:
        name = plain(name)
        if self._any or name in self._names or name.endswith(self._domains):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self._any_address or address.is_loopback


def plain(name: str) -> str:
    """A name or an address as it is compared."""
    return name.strip("[]").lower().removesuffix(".")


def is_host(name: str) -> bool:
    """Whether it can stand in a list of allowed hosts."""
    found = _HOST.fullmatch(name.removeprefix("*."))
    return name == ANY or (found is not None and found["port"] is None)


def is_wildcard(host: str) -> bool:
    """Whether it stands for all addresses of the machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host == ""


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _closing(problem: ApiError) -> ApiError:
    problem.close = True
    return problem
