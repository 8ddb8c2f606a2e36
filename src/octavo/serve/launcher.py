"""Starts `octavo serve`: reads keys and files, binds the address, starts the engine, serves, and cleans up."""

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

from octavo.config import EngineArgs
from octavo.core.cache.kv_stats import KVStats
from octavo.engine.query import DumpRecording, GetKVStats, RecordingDump
from octavo.errors import OctavoError, ParameterError
from octavo.frontend.engine_client import EngineClient, Transport
from octavo.frontend.input_processor import Messages, Prompt
from octavo.frontend.process_transport import ProcessTransport, process_client
from octavo.frontend.replicas import Replicas, replicas_client
from octavo.serve.app import App
from octavo.serve.args import ServeArgs, check_key
from octavo.serve.http.gc_tuning import defer_full_gc
from octavo.serve.http.middleware import ApiKeys
from octavo.serve.http.server import HTTPServer, StartupServer, bind, connection_limits, raise_file_limit
from octavo.serve.service import EngineLimits, Service, combine_salts
from octavo.serve.tracing import Tracing
from octavo.utils.event_loop import new_event_loop

logger = logging.getLogger("octavo.serve")


class StartupTimer:
    """Durations of the phases of the start, for one log line."""

    def __init__(self) -> None:
        self._begin = self._last = time.monotonic()
        self._rows: list[tuple[str, float]] = []

    def record(self, name: str) -> None:
        now = time.monotonic()
        self._rows.append((name, now - self._last))
        self._last = now

    def summary(self) -> str:
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self._rows)
        return f"the server started in {self._last - self._begin:.2f} s: {phases}"


def load_keys(
    settings: ServeArgs, environment: Sequence[str] = (), *, name: Literal["api_key", "admin_key"] = "api_key"
) -> list[str]:
    """All keys: of the option, its file and the environment. Raises `ParameterError` for a malformed key."""
    keys, file = [*getattr(settings, name), *environment], f"{name}_file"
    if (given := getattr(settings, file)) is not None:
        path = Path(given)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            mode = path.stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ParameterError(f"cannot read {file} {path}: {reason}", param=file) from None
        if mode & 0o077:
            logger.warning("%s is readable by other users; run chmod 600 on it", path)
        keys += [line.strip() for line in lines if line.strip()]
        if not any(line.strip() for line in lines):
            raise ParameterError(f"{path} has no keys; write one per line", param=file)
    for key in keys:
        check_key(key, name)
    return keys


def load_pin_prefixes(settings: ServeArgs) -> dict[str, Prompt | Messages]:
    """The prefixes of `pin_prefix`, by file name. Raises `ParameterError` for an unreadable or malformed file."""
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
            text = f'pin_prefix {name} has no messages; write [{{"role": "system", "content": "..."}}, ...]'
            raise ParameterError(text, param="pin_prefix")
        prefixes[name] = prefix
    return prefixes


async def serve(
    args: EngineArgs,
    settings: ServeArgs,
    *,
    keys: Sequence[str] = (),
    admin_keys: Sequence[str] = (),
    timer: StartupTimer | None = None,
) -> None:
    """Serves until a signal stops it. The address is bound before the model is loaded. All resources are released."""
    timer = timer or StartupTimer()
    settings.check_exposure([*keys, *admin_keys])
    settings.check_tls()
    connection_limits(raise_file_limit())
    api_keys, prefixes = ApiKeys(keys, admin_keys), load_pin_prefixes(settings)
    if not api_keys.has_operator:
        logger.warning("several API keys and no admin key: /debug and /view show each key only its own requests")
    tracing = None
    if settings.otlp_traces_endpoint is not None:
        tracing = Tracing.to(settings.otlp_traces_endpoint, (*settings.served_model_name, args.model)[0])
    sock = _bind(settings)
    uds_stat = None if settings.uds is None else os.stat(settings.uds)
    startup_server = contextlib.AsyncExitStack()
    try:
        await startup_server.enter_async_context(StartupServer(settings).on(sock))
        backend: EngineClient[ProcessTransport] | EngineClient[Replicas]
        if settings.data_parallel_size > 1:
            backend = replicas_client(args, settings.data_parallel_size, settings.dp_router)
        else:
            backend = process_client(**{f.name: getattr(args, f.name) for f in fields(args)})
        timer.record("tokenizer")
        try:
            await backend.start()
            timer.record("engine process")
            kv = await backend.kv_stats()
            limits = engine_limits(args, backend.transport.summary, kv, settings.data_parallel_size)
            service = Service(backend, settings, args.model, limits, tracing)
            _log_capacity(kv, backend.max_model_len, service.limits.device)
            backend.transport.listen(service.metrics.iteration_tokens.observe)
            caches = [await engine.query(GetKVStats()) for engine in backend.transport.engines]
            service.metrics.set_cache_config(caches)
            app = App(service, api_keys)
            for name, prefix in prefixes.items():
                for tenant in api_keys.users:
                    await backend.pin_prefix(prefix, tenant.pin_name(name), salt=combine_salts(tenant.salt))
            if prefixes:
                timer.record("prefixes")
            if args.flight_recorder is not None:
                _dump_recorder_on_signal(backend)
            timer.record("routes")
            await startup_server.aclose()
            try:
                await app.start()
                async with defer_full_gc(lambda: app.is_idle):
                    await HTTPServer(app, _log_ready(timer)).run_on(sock)
            finally:
                await app.close()
                if tracing is not None:
                    tracing.close()
        finally:
            backend.shutdown()
    finally:
        await startup_server.aclose()
        sock.close()
        if settings.uds is not None and uds_stat is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(uds_stat, os.stat(settings.uds)):  # another server may own the path by now
                    Path(settings.uds).unlink()
    logger.info("the server has stopped")


def _dump_recorder_on_signal(backend: EngineClient[Any]) -> None:
    """SIGUSR1 writes the flight recorder of each engine to a file; requests continue."""
    tasks: set[asyncio.Task[None]] = set()

    async def dump(engine: Transport) -> None:
        try:
            result = await engine.query(DumpRecording("asked"))
        except OctavoError as error:
            result = RecordingDump(error=str(error))
        if "path" in result:
            logger.info("the flight recorder was written to %s", result["path"])
        else:
            logger.error("%s", result["error"])

    def start_dump() -> None:
        for engine in backend.transport.engines:
            task = asyncio.create_task(dump(engine))
            tasks.add(task)  # the loop keeps only weak references
            task.add_done_callback(tasks.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, start_dump)


def engine_limits(args: EngineArgs, summary: Mapping[str, Any], kv: KVStats, num_engines: int = 1) -> EngineLimits:
    """The limits of all engines together, with their options resolved for their device.

    kv   of all engines; a request finds room in the cache of one
    """
    device = str(summary.get("device", "cpu"))
    max_num_seqs = args.resolved(device).max_num_seqs
    assert max_num_seqs
    return EngineLimits(
        max_num_seqs=num_engines * max_num_seqs,
        max_logprobs=args.max_logprobs,
        priority_scheduling=args.scheduling_policy == "priority",
        device="CPU" if device == "cpu" else "GPU",
        num_kv_tokens=kv.num_blocks * kv.block_size // num_engines,
    )


def run(
    args: EngineArgs,
    settings: ServeArgs,
    keys: Sequence[str] = (),
    timer: StartupTimer | None = None,
    *,
    admin_keys: Sequence[str] = (),
) -> None:
    """Runs `serve` on a new event loop. Raises `OctavoError` if the server cannot start."""

    async def serve_cancellable() -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        # For the start; `HTTPServer` replaces the handlers. asyncio handles Ctrl-C itself. nohup ignores SIGHUP.
        for number in (signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, task.cancel)
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # a flight recorder replaces the first
            loop.add_signal_handler(number, logger.info, "ignored: %s", number.name)
        await serve(args, settings, keys=keys, admin_keys=admin_keys, timer=timer)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            runner.run(serve_cancellable())
        except asyncio.CancelledError:
            raise OctavoError("stopped by a signal during the start") from None


def _log_ready(timer: StartupTimer) -> Callable[[str], None]:
    def log_ready(url: str) -> None:
        timer.record("listening")
        logger.info("%s", timer.summary())
        logger.info("serving on %s", url)
        if url.startswith("http"):
            logger.info("see its requests and blocks at %s/view/", url)

    return log_ready


def _bind(settings: ServeArgs) -> socket.socket:
    try:
        return bind(settings.host, settings.port, settings.uds)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            remedy = "another port, or 0 for a free one" if settings.uds is None else "another path"
            raise OctavoError(f"address in use: {error.filename}; choose {remedy}") from None
        raise OctavoError(f"cannot listen on {error.filename or settings.host}: {error.strerror}") from None


def _log_capacity(kv: KVStats, max_model_len: int, device: str) -> None:
    num_tokens = kv.num_blocks * kv.block_size
    logger.info("%s KV cache size: %s tokens", device, f"{num_tokens:,}")
    logger.info(
        "Maximum concurrency for %s tokens per request: %.2fx", f"{max_model_len:,}", num_tokens / max(1, max_model_len)
    )
