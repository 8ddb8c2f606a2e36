"""`ClusterArgs`: the `args` of the application in a configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from octavo.config import EngineArgs
from octavo.errors import ParameterError
from octavo.params.validation import ValidatedParams
from octavo.router.router import ROUTER_POLICIES, RouterPolicy
from octavo.serve import launcher
from octavo.serve.args import ServeArgs

NOT_HERE = ("host", "port", "uds", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "root_path", "pin_prefix")
"""Options of `octavo serve` that belong to Ray's proxy, or to a single engine."""
KEY_VARIABLES, ADMIN_VARIABLES = ("OCTAVO_API_KEY", "VLLM_API_KEY"), ("OCTAVO_ADMIN_KEY",)
"""Environment variables of the nodes that hold keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterArgs(ValidatedParams):
    """The application of a cluster.

    model    directory, .gguf file, name in `octavo models`, or hub id; the same files on every node
    engine   options of `octavo serve` for the engine, such as max_model_len
    api      its options for the API, such as api_key_file
    routing  affinity: the replica with the first token soonest; least-loaded, or round-robin
    """

    TITLE: ClassVar[str] = "args of the application"

    model: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    api: Mapping[str, Any] = field(default_factory=dict)
    routing: RouterPolicy = "affinity"

    def __post_init__(self) -> None:
        self._check_choice("routing", ROUTER_POLICIES)
        for name in ("engine", "api"):
            if not isinstance(getattr(self, name), Mapping):
                raise ParameterError(f"{name} must map options to values, not {getattr(self, name)!r:.60}", param=name)
        for name in NOT_HERE:
            if name in self.api:
                raise ParameterError(f"api has no {name} in a cluster; see docs/cluster.md", param=name)

    def engine_args(self) -> EngineArgs:
        return EngineArgs(model=self.model, **self.engine)

    def server_args(self) -> ServeArgs:
        return ServeArgs(**self.api)

    def keys(self, environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """API keys and admin keys, as of `octavo serve`."""
        settings = self.server_args()
        keys, admin_keys = (
            [key for name in names if (key := environment.get(name))] for names in (KEY_VARIABLES, ADMIN_VARIABLES)
        )
        return launcher.load_keys(settings, keys), launcher.load_keys(settings, admin_keys, name="admin_key")

    def as_options(self) -> dict[str, Any]:
        return asdict(self)
