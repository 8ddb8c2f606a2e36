"""Starts `octavo cluster`: checks the file, joins or starts Ray, deploys, waits, and shuts down what it started."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.cluster.options import ClusterArgs
from octavo.errors import OctavoError, ParameterError, cut
from octavo.frontend.preflight import check_model

logger = logging.getLogger("octavo.cluster")

IMPORT_PATH = "octavo.cluster.app:build"
POLL_S = 0.5
CONNECT_S = 5.0
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before Ray is imported, and for the processes that it starts


def require_ray() -> None:
    """Raises `OctavoError` if Ray is not installed."""
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        text = f"octavo cluster needs Ray Serve ({error}); install it: pip install 'octavo[cluster]'"
        raise OctavoError(text) from None


def read_config(path: str, port: int | None = None) -> dict[str, Any]:
    """The configuration in a file of `serve deploy`, checked. Raises `ParameterError` for a bad one."""
    import yaml  # comes with Ray
    from ray.serve.schema import ServeDeploySchema

    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        ServeDeploySchema.model_validate(config)
    except OSError as error:
        raise ParameterError(f"cannot read {path}: {error.strerror}", param="config") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ParameterError(f"{path} is no configuration of Ray Serve: {cut(error, 300)}", param="config") from None
    options = config.setdefault("http_options", {})
    options.setdefault("host", "127.0.0.1")
    options["port"] = options.get("port", 8000) if port is None else port
    ours = [app for app in config["applications"] if app["import_path"] == IMPORT_PATH]
    if not ours:
        raise ParameterError(f"{path} has no application with import_path: {IMPORT_PATH}", param="config")
    for app in ours:
        _check_application(ClusterArgs(**app.get("args", {})), options["host"])
    return dict(config)


def _check_application(args: ClusterArgs, host: str) -> None:
    keys, admin_keys = args.keys(os.environ)
    replace(args.server_args(), host=host).check_exposure([*keys, *admin_keys])
    check_model(args.engine_args())


def check_port(host: str, port: int) -> None:
    """Raises `OctavoError` if another program listens there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OctavoError(f"address in use: {host}:{port}; choose another --port") from None
        raise OctavoError(f"cannot listen on {host}:{port}: {error.strerror}") from None


def check_address(address: str) -> None:
    """Raises `OctavoError` if nobody listens at HOST:PORT. Ray itself would wait for a minute."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except (OSError, OverflowError) as error:
            text = f"no Ray cluster at RAY_ADDRESS={address}: {getattr(error, 'strerror', None) or error}"
            raise OctavoError(f"{text}; start it with ray start --head, or unset RAY_ADDRESS") from None


@contextlib.contextmanager
def joined_ray() -> Iterator[None]:
    """Join the Ray cluster of this machine, or of RAY_ADDRESS; start one for the time being if there is none.

    Raises `OctavoError` if the cluster of RAY_ADDRESS cannot be reached.
    """
    import ray

    check_address(os.environ.get("RAY_ADDRESS", ""))

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init(address="auto", **quiet)
        logger.info("joined the Ray cluster at %s", ray.get_runtime_context().gcs_address)
    except ConnectionError:
        ray.init(address="local", include_dashboard=False, **quiet)
        logger.info("started Ray on this machine")
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def deployed(config: dict[str, Any]) -> Iterator[str]:
    """Deploy a configuration, wait until it serves, and shut it down at the end. Yields the URL.

    Raises `OctavoError` if it cannot be deployed. A Ray Serve that runs already gets the configuration and goes on.
    """
    import ray
    from ray import serve
    from ray.serve import context
    from ray.serve.schema import ServeDeploySchema

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    host, port = config["http_options"]["host"], config["http_options"]["port"]
    is_running = any(actor["name"] == "SERVE_CONTROLLER_ACTOR" for actor in ray.util.list_named_actors(True))
    if not is_running:
        check_port(host, port)
    serve.start(proxy_location=config.get("proxy_location"), http_options=dict(config["http_options"]))
    try:
        client: Any = context._get_global_client()  # what `serve run FILE` calls; Ray has no public name for it
        client.deploy_apps(ServeDeploySchema.model_validate(config))
        wait_until_running([app.get("name", "default") for app in config["applications"]])
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        yield f"http://{shown}:{port}{config['applications'][0].get('route_prefix', '/').rstrip('/')}"
    finally:
        if not is_running:
            serve.shutdown()


def wait_until_running(names: list[str]) -> None:
    """Raises `OctavoError` with the cause if an application cannot run."""
    from ray import serve

    waiting, last = set(names), ""
    while waiting:
        applications = serve.status().applications
        for name in [name for name in waiting if name in applications]:
            app = applications[name]
            if app.status == "RUNNING":
                waiting.discard(name)
            elif app.status == "DEPLOY_FAILED":
                raise OctavoError(f"the application {name!r} cannot be deployed: {_cause(app)}")
            states = ", ".join(f"{d}: {dict(info.replica_states)}" for d, info in app.deployments.items())
            states += "".join(f"; {cut(info.message, 200)}" for info in app.deployments.values() if info.message)
            if states != last:
                last = states
                logger.info("%s is %s; %s", name, str(app.status.value).lower(), states)
        time.sleep(POLL_S)


def _cause(app: Any) -> str:
    """The line of a status that names the error: Octavo's own, or the last."""
    messages = [app.message, *(info.message for info in app.deployments.values())]
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("octavo.errors.")]
    last = (ours or lines or ["see `serve status`"])[-1]
    name, _, text = last.partition(": ") if ours else ("", "", last)
    remedy = "; or lower num_replicas or max_replicas" if name.endswith(".MemoryBudgetError") else ""
    return cut(text, 400) + remedy


def run(path: str, port: int | None = None) -> None:
    """Serve until a signal stops it."""
    require_ray()
    config = read_config(path, port)
    with joined_ray():
        _end_on_signal()
        _serve(config)


def _end_on_signal() -> None:
    """SIGTERM ends the command as Ctrl-C does. Ray replaces the handlers of its process when it starts."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)


def _serve(config: dict[str, Any]) -> None:
    with deployed(config) as url:
        logger.info("serving on %s", url)
        while True:
            time.sleep(3600)
