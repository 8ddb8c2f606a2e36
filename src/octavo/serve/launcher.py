"""A server's life, from the command line to the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import uvloop

from octavo.config import EngineArgs
from octavo.core.kv_cache_manager import KVStats
from octavo.errors import OctavoError, ParameterError
from octavo.frontend.engine_client import EngineClient
from octavo.frontend.input_processor import Messages, Prompt
from octavo.serve.app import App
from octavo.serve.args import ServeArgs, check_key
from octavo.serve.http.gc_tuning import defer_full_gc
from octavo.serve.http.middleware import ApiKeys
from octavo.serve.http.server import HTTPServer, StartupServer, bind, connection_limits, raise_file_limit
from octavo.serve.service import EngineLimits, Service, combine_salts
from octavo.serve.tracing import Tracing

logger = logging.getLogger("octavo.serve")


class StartupTimer:
    """How long each part of the start took, for the table that ends it."""

    def __init__(self) -> None:
        self._begin = self._last = time.monotonic()
        self._rows: list[tuple[str, float]] = []

    def done(self, name: str) -> None:
        now = time.monotonic()
        self._rows.append((name, now - self._last))
        self._last = now

    def table(self) -> str:
        rows = [*self._rows, ("all", self._last - self._begin)]
        return "start-up: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in rows)


def load_keys(
    settings: ServeArgs, environment: Sequence[str] = (), *, name: Literal["api_key", "admin_key"] = "api_key"
) -> list[str]:
    """Every key of this option, of its file, and of the environment. Raises `ParameterError` for one that cannot be
    one."""
    keys, file = [*getattr(settings, name), *environment], f"{name}_file"
    if (given := getattr(settings, file)) is not None:
        path = Path(given)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            mode = path.stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ParameterError(f"cannot read {file} {path}: {reason}", param=file) from None
        if mode & 0o077:
            logger.warning("%s can be read by other users; chmod 600 keeps its keys", path)
        keys += [line.strip() for line in lines if line.strip()]
        if not any(line.strip() for line in lines):
            raise ParameterError(f"{path} has no key in it; write one a line", param=file)
    for key in keys:
        check_key(key, name)
    return keys


def load_pin_prefixes(settings: ServeArgs) -> dict[str, Prompt | Messages]:
    """What `pin_prefix` names, by file. Raises `ParameterError` for one that cannot be read, or holds no messages."""
    prefixes: dict[str, Prompt | Messages] = {}
    for name in settings.pin_prefix:
        is_json = name.endswith(".json")
        try:
            text = Path(name).read_text(encoding="utf-8")
            prefix: Any = json.loads(text) if is_json else text
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise ParameterError(f"cannot read pin_prefix {name}: {reason}", param="pin_prefix") from None
        if is_json and not (
            isinstance(prefix, list)
            and prefix
            and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in prefix)
        ):
            text = f'pin_prefix {name} holds no messages; write [{{"role": "system", "content": "..."}}, ...]'
            raise ParameterError(text, param="pin_prefix")
        prefixes[name] = prefix
    return prefixes


async def serve(
    args: EngineArgs,
    settings: ServeArgs,
    *,
    keys: Sequence[str] = (),
    admin_keys: Sequence[str] = (),
    phases: StartupTimer | None = None,
) -> None:
    """Serve until told to leave. The address is taken before anything is loaded; nothing is left when this returns."""
    phases = phases or StartupTimer()
    settings.check_exposure([*keys, *admin_keys])
    settings.check_tls()
    connection_limits(raise_file_limit())
    known, prefixes = ApiKeys(keys, admin_keys), load_pin_prefixes(settings)
    if not known.has_operator:
        logger.warning("several API keys and no admin key: /debug and /view show each key its own requests alone")
    tracing = None
    if settings.otlp_traces_endpoint is not None:
        tracing = Tracing.to(settings.otlp_traces_endpoint, (*settings.served_model_name, args.model)[0])
    sock = _bound(settings)
    place = None if settings.uds is None else os.stat(settings.uds)
    starting = contextlib.AsyncExitStack()
    try:
        await starting.enter_async_context(StartupServer(settings).on(sock))
        backend = EngineClient(**{f.name: getattr(args, f.name) for f in fields(args)})
        phases.done("tokenizer")
        try:
            await backend.start()
            phases.done("engine")
            kv = await backend.kv_stats()
            limits = engine_limits(args, backend.summary, kv.num_blocks * kv.block_size)
            service = Service(backend, settings, args.model, limits, tracing)
            _tell_capacity(kv, backend.max_model_len, service.limits.device)
            backend.on_step = service.metrics.iteration_tokens.observe
            service.metrics.config({"block_size": kv.block_size, "num_gpu_blocks": kv.num_blocks})
            app = App(service, known)
            for name, prefix in prefixes.items():
                for tenant in known.users:
                    await backend.pin_prefix(prefix, tenant.pin_name(name), salt=combine_salts(tenant.salt))
            if prefixes:
                phases.done("prefixes")
            if args.flight_recorder is not None:
                _dump_on_signal(backend)
            phases.done("routes")
            await starting.aclose()
            try:
                await app.start()
                async with defer_full_gc(lambda: app.is_idle):
                    await HTTPServer(app, _announcing(phases)).run_on(sock)
            finally:
                await app.close()
                if tracing is not None:
                    tracing.close()
        finally:
            backend.shutdown()
    finally:
        await starting.aclose()
        sock.close()
        if settings.uds is not None and place is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(place, os.stat(settings.uds)):  # it may have become another server's
                    Path(settings.uds).unlink()
    logger.info("the server has stopped")


def _dump_on_signal(backend: EngineClient) -> None:
    """SIGUSR1 has the engine's last minutes written down; requests go on."""
    tasks: set[asyncio.Task[None]] = set()

    async def dump() -> None:
        try:
            told = await backend.view_rpc("dump_recording", "asked")
        except OctavoError as error:
            told = {"error": str(error)}
        if "path" in told:
            logger.info("the engine's last minutes are in %s", told["path"])
        else:
            logger.error("%s", told["error"])

    def begin() -> None:
        task = asyncio.create_task(dump())
        tasks.add(task)  # else nobody holds it
        task.add_done_callback(tasks.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, begin)


def engine_limits(args: EngineArgs, summary: Mapping[str, Any], num_kv_tokens: int) -> EngineLimits:
    """What the engine's options come to on its device."""
    device = str(summary.get("device", "cpu"))
    return EngineLimits(
        max_num_seqs=args.resolved(device).max_num_seqs,
        max_logprobs=args.max_logprobs,
        priority_scheduling=args.scheduling_policy == "priority",
        device="CPU" if device == "cpu" else "GPU",
        num_kv_tokens=num_kv_tokens,
    )


def run(
    args: EngineArgs,
    settings: ServeArgs,
    keys: Sequence[str] = (),
    phases: StartupTimer | None = None,
    *,
    admin_keys: Sequence[str] = (),
) -> None:
    """`serve` on a loop of its own. Raises `OctavoError` for what keeps it from starting."""

    async def until_told() -> None:
        task = asyncio.current_task()
        assert task is not None
        # While it starts; once it serves, `HTTPServer` has its own way. Ctrl-C does the same without our help.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await serve(args, settings, keys=keys, admin_keys=admin_keys, phases=phases)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(until_told())
        except asyncio.CancelledError:
            raise OctavoError("told to stop while it was starting") from None


def _announcing(phases: StartupTimer) -> Callable[[str], None]:
    def announce(url: str) -> None:
        phases.done("listening")
        logger.info("%s", phases.table())
        logger.info("serving on %s", url)

    return announce


def _bound(settings: ServeArgs) -> socket.socket:
    try:
        return bind(settings.host, settings.port, settings.uds)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            other = "another port, 0 takes a free one" if settings.uds is None else "another path"
            raise OctavoError(f"address in use: {error.filename}; choose {other}") from None
        raise OctavoError(f"cannot listen on {error.filename or settings.host}: {error.strerror}") from None


def _tell_capacity(kv: KVStats, max_model_len: int, device: str) -> None:
    num_tokens = kv.num_blocks * kv.block_size
    logger.info("%s KV cache size: %s tokens", device, f"{num_tokens:,}")
    logger.info(
        "Maximum concurrency for %s tokens per request: %.2fx", f"{max_model_len:,}", num_tokens / max(1, max_model_len)
    )
