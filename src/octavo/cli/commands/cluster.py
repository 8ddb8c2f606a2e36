"""`octavo cluster`: runs the server on all machines of a Ray cluster."""

from __future__ import annotations

from typing import Annotated

import typer


def cluster(
    config: Annotated[str, typer.Argument(help="A configuration file of Ray Serve, as `serve deploy` takes it.")],
    *,
    port: Annotated[int | None, typer.Option(help="Port of the API. Default: of the file, or 8000.")] = None,
) -> None:
    """Serve a model on all machines of a Ray cluster.

    Joins the cluster that this machine belongs to. Without one it starts Ray on this machine alone. Ctrl-C ends what
    the command has started. Needs the extra octavo[cluster].
    """
    from octavo import log_setup as logs
    from octavo.cluster import launcher

    logs.set_up(logs.LogSettings("info"))
    launcher.run(config, port)
