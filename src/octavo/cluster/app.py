"""The Ray Serve application: `import_path: octavo.cluster.app:build` in a configuration file.

Front    deployment of the API app; more than one may run
Engine   deployment of the engines; a replica is one engine process on one node
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec
import ray
from ray import serve

from octavo import log_setup as logs
from octavo.cluster.calls import RayCalls
from octavo.cluster.messages import REFUSED, fingerprint
from octavo.cluster.options import ClusterArgs
from octavo.cluster.replica import EngineReplica
from octavo.cluster.transport import ClusterTransport
from octavo.engine.process import ipc
from octavo.frontend.process_transport import make_client
from octavo.router.router import Router
from octavo.serve import launcher
from octavo.serve.app import App
from octavo.serve.http.middleware import ApiKeys
from octavo.serve.service import Service

MAX_ONGOING = 1 << 20
"""Requests that Serve hands to a replica or a front at most: the front's own limits refuse more, with a reason."""
DRAIN_S = 60.0
"""How long a replica that is to stop may finish its streams; then they go on elsewhere."""


QUIET = {"enable_access_log": False}
"""Serve would log each report of each replica, and the requests that the API app logs itself."""
_asgi: Any = None
"""The API app of the front in this process."""


class Engine:
    """One replica: see `octavo.cluster.replica`."""

    async def __init__(self, options: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        args = ClusterArgs(**options)
        logs.set_up(logs.LogSettings(args.server_args().uvicorn_log_level))
        self._name = serve.get_replica_context().replica_id.unique_id
        self._replica = EngineReplica(args.engine_args())
        await self._replica.start()

    async def generate(self, front: str, command: bytes, *, replica: str) -> AsyncGenerator[bytes, None]:
        if replica != self._name:
            yield msgspec.msgpack.encode(ipc.EngineFailed(REFUSED, f"it is not {replica}"))
            return
        stream = self._replica.generate(front, command)
        try:
            async for data in stream:
                yield data
        finally:
            await stream.aclose()

    async def stop(self, request_id: str, index: int, *, replica: str) -> None:
        self._replica.stop(request_id, index)  # of another replica's requests it knows none

    async def query(self, query: bytes, *, replica: str) -> bytes:
        return await self._replica.query(query)

    async def report(self, front: str, since: int, *, replica: str) -> bytes:
        return self._replica.report(front, since) if replica == self._name else b""

    async def check_health(self) -> None:
        self._replica.check()

    async def __del__(self) -> None:
        if hasattr(self, "_replica"):
            self._replica.close()


class Front:
    """The API app over all replicas."""

    async def __init__(self, engines: Any, options: Mapping[str, Any]) -> None:  # type: ignore[misc]
        global _asgi
        args = ClusterArgs(**options)
        settings, engine = args.server_args(), args.engine_args()
        logs.set_up(logs.LogSettings(settings.uvicorn_log_level))
        calls = RayCalls(engines, secrets.token_hex(8))
        await calls.connect()
        self._client = make_client(engine, ClusterTransport(calls, fingerprint(engine), engine.seed))
        await self._client.start()
        kv = await self._client.kv_stats()
        self._client.transport.pool.router = Router(args.routing, kv.block_size)
        limits = launcher.engine_limits(engine, self._client.transport.summary, kv)
        service = Service(self._client, settings, args.model, limits)
        service.metrics.set_cache_config([kv])
        self._app = App(service, ApiKeys(*args.keys(os.environ)), self._client.transport.pool.slots)
        await self._app.start()
        _asgi = self._app.asgi

    async def __del__(self) -> None:
        if hasattr(self, "_app"):
            await self._app.close()
        if hasattr(self, "_client"):
            self._client.shutdown()


def asgi_app() -> Any:
    """The API app, once `Front` is made."""
    return _asgi


def build(args: dict[str, Any]) -> serve.Application:
    """The application for Ray Serve. `args`: fields of `ClusterArgs`."""
    options = ClusterArgs(**args)
    engine, has_gpus = options.engine_args(), ray.cluster_resources().get("GPU", 0) > 0
    options.server_args()
    num_gpus = int(options.engine.get("tensor_parallel_size", 1)) if has_gpus and engine.device != "cpu" else 0
    engines = serve.deployment(
        name="Engine",
        # One bundle is on one node: the processes of a tensor parallel group see each other's GPUs.
        placement_group_bundles=[{"CPU": 1.0, "GPU": float(num_gpus)} if num_gpus else {"CPU": 1.0}],
        placement_group_strategy="STRICT_PACK",
        ray_actor_options={"num_cpus": 1, "num_gpus": num_gpus},
        max_ongoing_requests=MAX_ONGOING,
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=DRAIN_S,
        logging_config=QUIET,
        request_router_config={"request_router_class": "octavo.cluster.named_router:NamedReplicaRouter"},
    )(Engine)
    front = serve.deployment(
        name="Front",
        ray_actor_options={"num_cpus": 1},
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_timeout_s=DRAIN_S,
        logging_config=QUIET,
    )(serve.ingress(asgi_app)(Front))
    return front.bind(engines.bind(options.as_options()), options.as_options())
