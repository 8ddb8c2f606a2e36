"""The check of Host headers, against DNS rebinding.

A browser that loaded a page from evil.example sends that page's requests to whatever address the name resolves to
later, including 127.0.0.1, and lets the page read the responses. Such requests have `Host: evil.example`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.serve.openai.errors import ApiError, bad_request

ANY_HOST = "*"
_HOST = re.compile(r"(?P<name>[A-Za-z0-9_.-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>[0-9]{0,5}))?")


class AllowedHosts:
    """The Host names that a server accepts. localhost and loopback addresses are always accepted.

    names        further names; "*.example.com" accepts all subdomains, "*" every name
    bound        the address or name that the server is bound to
    any_address  accept every IP address, for a server bound to all interfaces: DNS rebinding needs a name
    """

    def __init__(self, names: Sequence[str] = (), *, bound: str | None = None, any_address: bool = False) -> None:
        self._any = ANY_HOST in names
        self._names = {normalize_host(name) for name in (*names, "localhost", *([bound] if bound else []))}
        self._domains = (".localhost", *(name[1:] for name in self._names if name.startswith("*.")))
        self._any_address = any_address

    @classmethod
    def for_server(cls, names: Sequence[str], *, host: str, uds: str | None, has_keys: bool) -> AllowedHosts:
        """The hosts of a server. With keys or on a Unix socket a foreign page cannot use it: every name is accepted
        unless `names` are given."""
        if not names and (has_keys or uds is not None):
            return cls([ANY_HOST])
        if is_wildcard(host):
            return cls([*names, socket.gethostname()], any_address=True)
        return cls(names, bound=host)

    def check(self, scope: Mapping[str, Any], *, any_name: bool = False) -> ApiError | None:
        """The error of a request's Host header, if there is one. `any_name`: checks the syntax only."""
        given = [value for name, value in scope["headers"] if name == b"host"]
        if not given and scope.get("http_version") == "1.0":  # where Host is optional
            return None
        if len(given) != 1:
            return _closing(bad_request("invalid_host", f"the request has {len(given)} Host headers; send exactly one"))
        (value,) = given
        found = _HOST.fullmatch(value.decode("latin-1"))
        if found is None or int(found["port"] or 0) > 65535:
            text = f"Host is {value[:100].decode('latin-1')!r}; it must be a name or an address, with an optional port"
            return _closing(bad_request("invalid_host", text))
        server_address, _ = scope.get("server") or (None, None)
        if any_name or self.accepts(found["name"]) or normalize_host(found["name"]) == server_address:
            return None
        name = found["name"][:100]
        text = f"this server does not accept the Host {name}; use its address, or start it with"
        return ApiError(403, "wrong_host", f"{text} --allowed-hosts {name}")

    def accepts(self, name: str) -> bool:
        name = normalize_host(name)
        if self._any or name in self._names or name.endswith(self._domains):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self._any_address or address.is_loopback


def normalize_host(name: str) -> str:
    """Lower case, without the brackets of an IPv6 address and without a trailing dot."""
    return name.strip("[]").lower().removesuffix(".")


def is_host(name: str) -> bool:
    """Whether `name` is valid in `allowed_hosts`."""
    found = _HOST.fullmatch(name.removeprefix("*."))
    return name == ANY_HOST or (found is not None and found["port"] is None)


def is_wildcard(host: str) -> bool:
    """Whether `host` binds all interfaces of the machine."""
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


def _closing(api_error: ApiError) -> ApiError:
    api_error.close = True
    return api_error
