"""What stands before every route: keys, ids, and the log. Whatever is not expressly open is closed."""

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
from octavo.serve.http.endpoint import Message, Receive, RequestContext, Scope, Send, new_request_id, send_error
from octavo.serve.metrics import Metrics
from octavo.serve.openai.errors import ApiError, internal
from octavo.serve.tenants import DEFAULT_TENANT, Tenant

access_log = logging.getLogger("octavo.access")
logger = logging.getLogger("octavo.serve")

OPEN_PATHS = frozenset({b"/health", b"/ready"})
MAX_ID_CHARS = 128


class ApiKeys:
    """The keys of a server, as digests. Comparing takes the same time whichever matches, and if none does.


    The holder of the only key is the operator. Of several keys, only those in `admin_keys` see the requests of others.
    Holders of different keys share no blocks: the time to a first token would tell one what another asks.
    """

    def __init__(self, keys: Sequence[str], admin_keys: Sequence[str] = ()) -> None:
        own, admin = (list(dict.fromkeys(_digest(key.encode()) for key in some)) for some in (keys, admin_keys))
        if set(own) & set(admin):
            raise ParameterError("a key is both an api_key and an admin_key; choose another one", param="admin_key")
        is_only = len(own) + len(admin) == 1
        self._tenants = {
            digest: Tenant(b"" if is_only else digest[:16], sees_all=is_only or digest in admin, number=number)
            for number, digest in enumerate(own + admin)
        }
        tenants = sorted((self._tenants[digest] for digest in own or admin), key=lambda tenant: tenant.salt)
        self.users = tuple(tenants or [DEFAULT_TENANT])
        """Those that are expected to send prompts: an admin only where there is no other key."""

    def __bool__(self) -> bool:
        return bool(self._tenants)

    @property
    def has_operator(self) -> bool:
        """Whether some caller sees the requests of all."""
        return not self._tenants or any(tenant.sees_all for tenant in self._tenants.values())

    def find(self, key: bytes) -> Tenant | None:
        """The holder of a key that is one of ours."""
        digest, found = _digest(key), None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        return found

    def __len__(self) -> int:
        return len(self._tenants)

    def salts(self) -> set[bytes]:
        """Those of `users`."""
        return {tenant.salt for tenant in self.users}


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class AuthMiddleware:
    """An ASGI application around another. `open_paths`: raw paths that take no key."""

    def __init__(
        self,
        app: Any,
        *,
        keys: ApiKeys,
        metrics: Metrics,
        open_paths: Collection[bytes] = OPEN_PATHS,
        quiet_paths: Collection[str] = (),
        origins: Sequence[str] = (),
        hosts: AllowedHosts | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._open_paths = frozenset(open_paths)
        self._quiet_paths = frozenset(quiet_paths)
        self._origins = frozenset(origins)
        self._hosts = hosts or AllowedHosts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        context = RequestContext(scope, new_request_id())
        scope.setdefault("state", {})["context"] = context
        cors = self._cors(context)
        begin = time.monotonic()
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                context.status = context.status or message["status"]
                shown_id = printable_id(dict(scope["headers"]).get(b"x-request-id", b"")) or context.request_id
                extra = [(b"x-request-id", shown_id.encode("ascii")), *cors]
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        try:
            problem = self._refusal(context)
            if problem is not None:
                await send_error(context, send_with_id, problem)
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
            if has_begun:
                raise
            await send_error(context, send_with_id, internal(context.request_id))
        finally:
            self._note(context, time.monotonic() - begin)

    def _refusal(self, context: RequestContext) -> ApiError | None:
        scope = context.scope
        path = scope.get("raw_path") or scope["path"].encode()
        path = path.removeprefix(scope.get("root_path", "").encode())
        is_probe = path in OPEN_PATHS and scope["method"] in ("GET", "HEAD")  # they come by whatever address
        if (problem := self._hosts.refusal(scope, any_name=is_probe)) is not None:
            return problem
        if not self._keys or (path in self._open_paths and scope["method"] in ("GET", "HEAD")):
            return None
        if _is_preflight(context):
            return None  # a browser sends no key with it; the answer has no data
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        for_view = path == b"/view" or path.startswith(b"/view/")
        if len(given) == 1:
            scheme, _, key = given[0].partition(b" ")
            key = key.strip() if scheme.lower() == b"bearer" else _password(key) if for_view else b""
            if (tenant := self._keys.find(key)) is not None:
                context.tenant, context.request_id = tenant, tenant.new_request_id()
                return None
        text = "this server wants an API key: Authorization: Bearer KEY"
        scheme_asked = 'Basic realm="octavo", charset="UTF-8"' if for_view else "Bearer"
        return ApiError(401, "invalid_api_key", text, headers={"www-authenticate": scheme_asked})

    def _cors(self, context: RequestContext) -> list[tuple[bytes, bytes]]:
        origin = context.header(b"origin") if self._origins else None
        if origin is None or not ({origin, "*"} & self._origins):
            return []
        headers = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
        if _is_preflight(context):
            # Whatever they are: OpenAI's package for browsers sends a dozen of its own, and none of them is read.
            asked = context.header(b"access-control-request-headers") or "authorization, content-type, x-request-id"
            headers += [
                (b"access-control-allow-methods", b"GET, POST"),
                (b"access-control-allow-headers", asked.encode("latin-1")),
            ]
        return headers

    def _note(self, context: RequestContext, elapsed_s: float) -> None:
        scope = context.scope
        handler = context.route or "none"  # never the path as it came: that would be a label a request
        method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS") else "other"
        self._metrics.http_requests.labels(method, str(context.status or 499), handler).inc()
        self._metrics.http_seconds.labels(method, handler).observe(elapsed_s)
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # options name paths as the routes do
        if path in self._quiet_paths or not access_log.isEnabledFor(logging.INFO):
            return
        client = scope.get("client") or ("-", 0)
        access = {
            "client": f"{client[0]}:{client[1]}",
            "method": method,
            "path": scope["path"][:256],
            "status": context.status or 499,
            "ms": round(1000 * elapsed_s, 1),
            "id": context.request_id,
        }
        access_log.info("%s", json.dumps(access), extra={"access": access})


def _password(encoded: bytes) -> bytes:
    """Of Basic's NAME:PASSWORD, the way in which browsers ask for a key; b"" if that is not it."""
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


def printable_id(value: bytes) -> str:
    """A client's id as it may stand in a header and a log."""
    return "".join(c for c in value.decode("latin-1") if "!" <= c <= "~")[:MAX_ID_CHARS]
