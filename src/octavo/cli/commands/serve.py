"""`octavo serve`: runs the OpenAI-compatible server."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from octavo.cli.commands.models import check, fetch_model, is_named
from octavo.cli.environment import ADMIN_KEY, SERVER_KEYS
from octavo.cli.options import DEFAULT_MODEL, options_of
from octavo.config import EngineArgs
from octavo.serve.args import ServeArgs

ALWAYS_ON = typer.Option(hidden=True)
"""Flags of vLLM for features that are always on here."""


@options_of(ServeArgs, into="server")
@options_of(EngineArgs, into="engine", also=("seed", "flight_recorder"))
def serve(
    *,
    model: Annotated[
        str, typer.Argument(help="Directory, .gguf file, name in `octavo models`, or hub id; also --model.")
    ] = DEFAULT_MODEL,
    log_format: Annotated[str, typer.Option(help="text, or json: one object per line.")] = "text",
    enable_auto_tool_choice: Annotated[bool, ALWAYS_ON] = True,
    enable_prompt_tokens_details: Annotated[bool, ALWAYS_ON] = True,
    enable_request_id_headers: Annotated[bool, ALWAYS_ON] = True,
    engine: dict[str, Any],
    server: dict[str, Any],
) -> None:
    """Serve a model with OpenAI's API.

    The first Ctrl-C waits for running requests to finish, the second one stops at once.
    """
    settings = ServeArgs(**server)
    args = EngineArgs(model=model, **engine)
    if log_format not in ("text", "json"):
        raise typer.BadParameter(f"{log_format!r} is neither text nor json", param_hint="--log-format")
    from octavo import log_setup as logs
    from octavo.serve import launcher

    timer = launcher.StartupTimer()
    logs.set_up(logs.LogSettings(settings.uvicorn_log_level, as_json=log_format == "json"))
    keys = launcher.load_keys(settings, [key for name in SERVER_KEYS if (key := os.environ.get(name))])
    admin_keys = launcher.load_keys(settings, [key] if (key := os.environ.get(ADMIN_KEY)) else [], name="admin_key")
    settings.check_exposure([*keys, *admin_keys])
    settings.check_tls()
    check(args)
    if is_named(model):
        fetch_model(model)
    launcher.run(args, settings, keys, timer, admin_keys=admin_keys)
