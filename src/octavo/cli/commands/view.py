"""`octavo view`: see the blocks. The playground, and recordings; a running server has the same under /view."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.bench.args import is_address
from octavo.cli.commands.simulate import OPTIONS, Device, NumRequests, SimulatedModel, arrivals_of, setup_of
from octavo.cli.options import options_of, refuse_idle
from octavo.config import EngineArgs
from octavo.errors import OctavoError, ParameterError

if TYPE_CHECKING:
    from octavo.simulate.simulation import SimConfig
    from octavo.simulate.traces import Arrival
    from octavo.view.live.messages import Frame

FLIGHTS = (".flight",)
FRAMES = (".frames", ".frames.gz")


@options_of(EngineArgs, OPTIONS, into="engine")
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
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    attach: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Look at a server by its KV events, such as vLLM's.")
    ] = None,
    metrics: Annotated[str | None, typer.Option(metavar="URL", help="Its /metrics, for who runs and waits.")] = None,
    replay_endpoint: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Where it tells again what was missed, as its own option says."),
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="OUT", help="Write the recording as .frames, and leave.")] = None,
    model: SimulatedModel = "llama-3.1-8b",
    gpu: Device = "h200",
    requests: NumRequests = None,
    engine: dict[str, Any],
) -> None:
    """See every block: work a pool by hand, look into a recording, or at another server's cache.

    A trace is run through the simulator first, and the options below are the simulator's.
    """
    from octavo.serve import view_server
    from octavo.serve.http.allowed_hosts import is_loopback
    from octavo.serve.http.server import bind
    from octavo.serve.view_routes import View
    from octavo.view.live.external import ExternalPool
    from octavo.view.live.hub import Hub
    from octavo.view.recording.frames import Replay, encode_frames, frames_of_recording, read_frames

    if not is_loopback(host):
        raise ParameterError(f"host {host} is not of this machine; use `octavo serve` and its keys", param="host")
    replay = None
    if file is not None and attach is not None:
        raise ParameterError(
            "a recording and a server to attach to are two things to look at; give one", param="attach"
        )
    if metrics is not None and (attach is None or not is_address(metrics)):
        raise ParameterError("metrics is a server's address, http://..., and goes with --attach", param="metrics")
    if replay_endpoint is not None and attach is None:
        raise ParameterError("replay_endpoint is a server's address, and goes with --attach", param="replay_endpoint")
    if save is not None and file is None:
        raise ParameterError("save writes down what a FILE holds; name one, and no server to attach to", param="save")
    if file is None or file.suffix in FLIGHTS or file.name.endswith(FRAMES):
        what = "a recording" if file is not None else "the playground" if attach is None else "what a server tells"
        refuse_idle(context, ("model", "gpu", "requests", *engine), f"{what}, but in a trace that is simulated")
    if file is not None:
        if not file.exists():
            raise ParameterError(f"no file {str(file)!r}", param="file")
        if save is not None and save.exists() and save.samefile(file):
            raise ParameterError(f"save is {str(save)!r}, which is what is read; choose another name", param="save")
        if file.suffix in FLIGHTS:
            frames = frames_of_recording(file)
        elif file.name.endswith(FRAMES):
            frames = read_frames(file)
        else:
            setup = setup_of(model, gpu, engine)
            frames = simulated_frames(setup, arrivals_of(str(file), None, requests))
        if save is not None:
            write_whole(save, (encode_frames([frame]) for frame in frames))
            return
        replay = Replay(frames)
    with contextlib.ExitStack() as stack:
        hub = None
        if attach is not None:
            attached = stack.enter_context(contextlib.closing(ExternalPool(attach, metrics, replay=replay_endpoint)))
            hub = Hub(attached.view_rpc)
        try:
            sock = stack.enter_context(contextlib.closing(bind(host, port)))
        except OSError as error:
            raise OctavoError(f"cannot listen on {error.filename}: {error.strerror}; choose another port") from None
        shown = View(file.name if file is not None else attach or "", hub=hub, replay=replay)
        with contextlib.suppress(KeyboardInterrupt):
            view_server.run(shown, sock, lambda url: print(url, flush=True))


def write_whole(path: Path, pieces: Iterable[bytes]) -> None:
    """Put in place with one rename, so that pieces that end in an error leave what was there."""
    if path.exists() and not path.is_file():  # a pipe or a device: it must stay what it is
        with path.open("wb") as out:
            out.writelines(pieces)
        return
    path = path.resolve()  # where a link leads: a rename would replace the link
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=".save-", dir=path.parent))
        except OSError as error:
            raise ParameterError(f"cannot write to {path.parent}: {error.strerror}", param="save") from None
        part = Path(folder) / path.name
        with part.open("wb") as out:
            out.writelines(pieces)
        os.replace(part, path)


def simulated_frames(setup: SimConfig, arrivals: Iterator[Arrival]) -> Iterator[Frame]:
    """What a trace does to the pool of one replica, on the simulator's clock."""
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
