"""ASGI middleware in front of every route: API keys, request ids, CORS, HTTP metrics and the access log.

Every path needs a key unless it is listed as open.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Collection, Sequence
from typing import Any

from octavo.errors import ParameterError
from octavo.serve.http.allowed_hosts import AllowedHosts
from octavo.serve.http.context import Message, Receive, RequestContext, Scope, Send, new_request_id
from octavo.serve.http.endpoint import send_error
from octavo.serve.metrics import Metrics
from octavo.serve.openai.errors import ApiError, internal_error
from octavo.serve.tenants import DEFAULT_TENANT, Tenant, tenant_at

access_log = logging.getLogger("octavo.access")
logger = logging.getLogger("octavo.serve")

OPEN_PATHS = frozenset({b"/health", b"/ready"})
MAX_ID_CHARS = 128


class ApiKeys:
    """A server's API keys, as digests. A lookup takes the same time for every key.

    The holder of the only key is the operator. Of several keys, only `admin_keys` see other tenants' requests. Holders
    of different keys share no cached blocks: a shorter time to the first token would reveal another tenant's prompt.
    """

    def __init__(self, keys: Sequence[str], admin_keys: Sequence[str] = ()) -> None:
        users, admins = (list(dict.fromkeys(_digest(key.encode()) for key in some)) for some in (keys, admin_keys))
        if set(users) & set(admins):
            raise ParameterError("a key is both api_key and admin_key; use another one", param="admin_key")
        is_only = len(users) + len(admins) == 1
        self._tenants = {
            digest: Tenant(b"" if is_only else digest[:16], sees_all=is_only or digest in admins, number=number)
            for number, digest in enumerate(users + admins)
        }
        tenants = sorted((self._tenants[digest] for digest in users or admins), key=lambda tenant: tenant.salt)
        self.users = tuple(tenants or [DEFAULT_TENANT])
        """Tenants that are expected to send prompts. Admins are included only if there is no other key."""

    def __bool__(self) -> bool:
        return bool(self._tenants)

    @property
    def has_operator(self) -> bool:
        """Whether some caller may see all requests."""
        return not self._tenants or any(tenant.sees_all for tenant in self._tenants.values())

    def find(self, key: bytes) -> Tenant | None:
        """The holder of a key; None if the key is unknown."""
        digest, found = _digest(key), None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        return found

    def __len__(self) -> int:
        return len(self._tenants)

    def salts(self) -> set[bytes]:
        """The cache salts of `users`."""
        return {tenant.salt for tenant in self.users}


def _strip_second_root(scope: Scope) -> None:
    """Makes `--root-path` hold for a proxy that keeps the prefix as well: uvicorn adds it in front of every path."""
    root = scope.get("root_path", "")
    if root and scope["path"].startswith(f"{root}{root}/"):
        scope["path"] = scope["path"].removeprefix(root)
        scope["raw_path"] = (scope.get("raw_path") or b"").removeprefix(root.encode())


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class AuthMiddleware:
    """ASGI middleware around `app`. `open_paths`: raw paths without a key; `unlogged_paths`: not in the access log."""

    def __init__(
        self,
        app: Any,
        *,
        keys: ApiKeys,
        metrics: Metrics,
        open_paths: Collection[bytes] = OPEN_PATHS,
        unlogged_paths: Collection[str] = (),
        origins: Sequence[str] = (),
        hosts: AllowedHosts | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._open_paths = frozenset(open_paths)
        self._unlogged_paths = frozenset(unlogged_paths)
        self._origins = frozenset(origins)
        self._hosts = hosts or AllowedHosts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        _strip_second_root(scope)
        context = RequestContext(scope, new_request_id())
        scope.setdefault("state", {})["context"] = context
        cors = self._cors(context)
        start_s = time.monotonic()
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                context.status = context.status or message["status"]
                shown_id = sanitize_request_id(dict(scope["headers"]).get(b"x-request-id", b"")) or context.request_id
                extra = [(b"x-request-id", shown_id.encode("ascii")), *cors]
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        try:
            api_error = self._authenticate(context)
            if api_error is not None:
                await send_error(context, send_with_id, api_error)
            elif _is_preflight(context):
                context.status = 200
                await send_with_id(
                    {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
                )
                await send_with_id({"type": "http.response.body", "body": b""})
            else:
                await self._app(scope, receive, send_with_id)
        except Exception as error:
            logger.error("request %s failed", context.request_id, exc_info=error)
            if has_started:
                raise
            await send_error(context, send_with_id, internal_error(context.request_id))
        finally:
            self._record(context, time.monotonic() - start_s)

    def _authenticate(self, context: RequestContext) -> ApiError | None:
        """Checks host and key and sets the context's tenant. Returns the error for the client, if any."""
        scope = context.scope
        path = scope.get("raw_path") or scope["path"].encode()
        path = path.removeprefix(scope.get("root_path", "").encode())
        is_probe = path in OPEN_PATHS and scope["method"] in ("GET", "HEAD")  # probes use any address
        if (api_error := self._hosts.check(scope, any_name=is_probe)) is not None:
            return api_error
        if not self._keys and (client := scope.get("client")) is not None:
            context.tenant = tenant_at(client[0])
        if not self._keys or (path in self._open_paths and scope["method"] in ("GET", "HEAD")):
            return None
        if _is_preflight(context):
            return None  # browsers send no key with it, and the response has no data
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        for_view = path in (b"/", b"/view") or path.startswith(b"/view/")
        if len(given) == 1:
            scheme, _, key = given[0].partition(b" ")
            key = key.strip() if scheme.lower() == b"bearer" else _basic_password(key) if for_view else b""
            if (tenant := self._keys.find(key)) is not None:
                context.tenant, context.request_id = tenant, tenant.new_request_id()
                return None
        text = "an API key is required: Authorization: Bearer KEY"
        challenge = 'Basic realm="octavo", charset="UTF-8"' if for_view else "Bearer"
        return ApiError(401, "invalid_api_key", text, headers={"www-authenticate": challenge})

    def _cors(self, context: RequestContext) -> list[tuple[bytes, bytes]]:
        origin = context.header(b"origin") if self._origins else None
        if origin is None or not ({origin, "*"} & self._origins):
            return []
        headers = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
        if _is_preflight(context):
            # All requested headers are allowed: OpenAI's package for browsers sends a dozen, and the server reads none.
            requested = context.header(b"access-control-request-headers") or "authorization, content-type, x-request-id"
            headers += [
                (b"access-control-allow-methods", b"GET, POST"),
                (b"access-control-allow-headers", requested.encode("latin-1")),
            ]
        return headers

    def _record(self, context: RequestContext, elapsed_s: float) -> None:
        scope = context.scope
        handler = context.route or "none"  # never the raw path: every request could add a label
        method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS") else "other"
        self._metrics.http_requests.labels(method, str(context.status or 499), handler).inc()
        self._metrics.http_seconds.labels(method, handler).observe(elapsed_s)
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # paths in options have no root_path
        if path in self._unlogged_paths or not access_log.isEnabledFor(logging.INFO):
            return
        client = scope.get("client") or ("-", 0)
        entry = {
            "client": f"{client[0]}:{client[1]}",
            "method": method,
            "path": scope["path"][:256],
            "status": context.status or 499,
            "ms": round(1000 * elapsed_s, 1),
            "id": context.request_id,
        }
        request = json.dumps(f"{method} {entry['path']}")  # a path may contain line ends
        access_log.info(
            "%s %s %s, %s ms, %s", entry["client"], request, *list(entry.values())[3:], extra={"access": entry}
        )


def _basic_password(encoded: bytes) -> bytes:
    """The password of HTTP Basic credentials, in which browsers send a key; b"" if they are malformed."""
    try:
        return base64.b64decode(encoded, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _is_preflight(context: RequestContext) -> bool:
    return (
        context.scope["method"] == "OPTIONS"
        and context.header(b"origin") is not None
        and context.header(b"access-control-request-method") is not None
    )


def sanitize_request_id(value: bytes) -> str:
    """A client's request id, restricted to characters that are safe in headers and logs."""
    return "".join(c for c in value.decode("latin-1") if "!" <= c <= "~")[:MAX_ID_CHARS]
