"""`octavo view`: the playground, recordings, and other servers' KV events. A server has the page under /view."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.bench.args import is_address
from octavo.cli.commands.simulate import SIMULATION_OPTIONS, Device, NumRequests, SimulatedModel, arrivals_of, setup_of
from octavo.cli.options import options_of, refuse_unused_options
from octavo.config import EngineArgs
from octavo.errors import OctavoError, ParameterError, naming_file

if TYPE_CHECKING:
    from octavo.simulate.simulation import SimConfig
    from octavo.simulate.traces import Arrival
    from octavo.view.live.messages import Frame
    from octavo.view.recording.frames import Replay

DUMPS = (".flight",)
FRAMES = (".frames", ".frames.gz")


@options_of(EngineArgs, into="engine", only=SIMULATION_OPTIONS)
def view(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]", help="A recording: .frames, a flight recorder's .flight, or a trace for the simulator."
        ),
    ] = None,
    *,
    host: Annotated[str, typer.Option(help="An address of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 0,
    attach: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Show another server's prefix cache by its KV events, such as vLLM's."),
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(metavar="URL", help="Its /metrics, for the numbers of requests.")
    ] = None,
    replay_endpoint: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Its replay socket, for missed events."),
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="OUT", help="Write the recording as .frames, and exit.")] = None,
    model: SimulatedModel = "llama-3.1-8b",
    gpu: Device = "h200",
    requests: NumRequests = None,
    engine: dict[str, Any],
) -> None:
    """Show every block: of a playground, of a recording, or of another server's prefix cache.

    A trace is simulated first. The options below are the simulator's.
    """
    from rich.console import Console

    from octavo.serve.http.allowed_hosts import is_loopback
    from octavo.view.recording.frames import Replay, encode_frames

    if not is_loopback(host):
        raise ParameterError(f"host {host} is not a loopback address; use `octavo serve` with keys", param="host")
    check_combination(file, attach, metrics, replay_endpoint, save)
    if file is None or is_recording(file):
        use = "a recording" if file is not None else "the playground" if attach is None else "--attach"
        refuse_unused_options(context, ("model", "gpu", "requests", *engine), f"{use}, only with a trace")
    if file is None:
        serve_page(host, port, attach=attach, metrics=metrics, replay_endpoint=replay_endpoint)
        return
    check_files(file, save)
    if is_recording(file):
        frames = recorded_frames(file)
    else:
        setup = setup_of(model, gpu, engine)
        frames = simulated_frames(setup, arrivals_of(str(file), None, requests))
    with Console(stderr=True).status(f"reading {file.name}"):
        if save is not None:
            write_whole(save, (encode_frames([frame]) for frame in frames))
            return
        replay = Replay(frames)
    serve_page(host, port, name=file.name, replay=replay)


def check_combination(
    file: Path | None, attach: str | None, metrics: str | None, replay_endpoint: str | None, save: Path | None
) -> None:
    """Raises `ParameterError` for options that exclude or require each other."""
    if file is not None and attach is not None:
        raise ParameterError("a recording and --attach cannot be combined; give one of them", param="attach")
    if metrics is not None and (attach is None or not is_address(metrics)):
        raise ParameterError("metrics is an http:// address and requires --attach", param="metrics")
    if replay_endpoint is not None and attach is None:
        raise ParameterError("replay_endpoint requires --attach", param="replay_endpoint")
    if save is not None and file is None:
        raise ParameterError("save requires a FILE and no --attach", param="save")


def check_files(file: Path, save: Path | None) -> None:
    """Raises `ParameterError` if the file is missing, or would be read and written."""
    if not file.exists():
        raise ParameterError(f"no file {str(file)!r}", param="file")
    if save is not None and save.exists() and save.samefile(file):
        raise ParameterError(f"save is {str(save)!r}, the file that is read; choose another name", param="save")


def is_recording(file: Path) -> bool:
    return file.suffix in DUMPS or file.name.endswith(FRAMES)


def recorded_frames(file: Path) -> Iterator[Frame]:
    from octavo.view.recording.frames import frames_of_recording, read_frames

    return frames_of_recording(file) if file.suffix in DUMPS else read_frames(file)


def serve_page(
    host: str,
    port: int,
    *,
    name: str = "",
    replay: Replay | None = None,
    attach: str | None = None,
    metrics: str | None = None,
    replay_endpoint: str | None = None,
) -> None:
    """Serve the page until Ctrl-C: a replay, another server's prefix cache, or else the playground."""
    from octavo.serve import view_server
    from octavo.serve.http.server import bind
    from octavo.serve.view_routes import View
    from octavo.view.live.external import ExternalPool
    from octavo.view.live.hub import Hub

    with contextlib.ExitStack() as stack:
        hubs: list[Hub] = []
        if attach is not None:
            external = stack.enter_context(contextlib.closing(ExternalPool(attach, metrics, replay=replay_endpoint)))
            hubs = [Hub(external.query)]
        try:
            sock = stack.enter_context(contextlib.closing(bind(host, port)))
        except OSError as error:
            raise OctavoError(f"cannot listen on {error.filename}: {error.strerror}; choose another port") from None
        with contextlib.suppress(KeyboardInterrupt):
            view_server.run(
                View(name or attach or "", hubs=hubs, replay=replay), sock, lambda url: print(url, flush=True)
            )


def write_whole(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file and put it in place with one rename: if `pieces` raises, the old file stays."""
    if path.exists() and not path.is_file():  # a pipe or a device must not be replaced
        with naming_file(path), path.open("wb") as out:
            out.writelines(pieces)
        return
    path = path.resolve()  # the target of a link: a rename would replace the link
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=".save-", dir=path.parent))
        except OSError as error:
            raise ParameterError(f"cannot write to {path.parent}: {error.strerror}", param="save") from None
        part = Path(folder) / path.name
        with naming_file(path), part.open("wb") as out:
            out.writelines(pieces)
        os.replace(part, path)


def simulated_frames(setup: SimConfig, arrivals: Iterator[Arrival]) -> Iterator[Frame]:
    """The frames of a simulated replica that serves a trace, on the simulator's clock."""
    from octavo.simulate.simulation import Records, Replica
    from octavo.view.live.publisher import Publisher
    from octavo.view.recording.frames import FRAME_INTERVAL_S

    replica = Replica(setup, Records(), interval_s=float("inf"))
    publisher = Publisher(replica.scheduler, clock=replica.clock, begin_s=0.0)
    next_s = 0.0

    def frames_until(time_s: float) -> Iterator[Frame]:
        nonlocal next_s
        while next_s < time_s:
            replica.run_until(next_s)
            if (frame := publisher.frame(publisher.last)) is not None:
                yield frame
            next_s = max(next_s + FRAME_INTERVAL_S, replica.clock.now if replica.num_requests else time_s)
        replica.run_until(time_s)

    with replica.engine.gc_pause:
        for index, arrival in enumerate(arrivals):
            yield from frames_until(arrival.time_s)
            replica.submit(index, arrival)
        while replica.num_requests:
            yield from frames_until(next_s + FRAME_INTERVAL_S)
    if (frame := publisher.frame(publisher.last)) is not None:
        yield frame
