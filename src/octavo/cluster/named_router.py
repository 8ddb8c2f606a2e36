"""`NamedReplicaRouter`: Serve's router for the engines. It obeys the argument `replica`, since the front chooses.

Serve copies this module by value into every process that calls the engines, so the state is in `octavo.cluster.calls`.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from octavo.cluster import calls


class NamedReplicaRouter(RequestRouter):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        calls.named_router = self

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        name = "" if pending_request is None else pending_request.kwargs.get("replica", "")
        # Any other replica refuses the call, and the front chooses again: faster than to wait for one that is gone.
        return [[r for r in candidate_replicas if r.replica_id.unique_id == name] or candidate_replicas]
