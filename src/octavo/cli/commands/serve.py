"""`octavo serve`: the OpenAI-compatible server."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from octavo.cli.commands.models import check, fetch_model, is_named
from octavo.cli.environment import ADMIN_KEY, SERVER_KEYS
from octavo.cli.options import DEFAULT_MODEL, ENGINE, options_of
from octavo.config import EngineArgs
from octavo.serve.args import ServeArgs

SERVE = {
    "host": "Where to listen; beyond this machine only with a key.",
    "port": "0 takes a free one, and prints it.",
    "uds": "Listen on this Unix socket instead.",
    "served_model_name": "The model's name in requests; may be repeated, responses have the first.",
    "api_key": "A key that requests must bring; may be repeated. Also from OCTAVO_API_KEY and VLLM_API_KEY.",
    "api_key_file": "A file with keys, one a line.",
    "admin_key": "A key that sees all requests in /debug and /view, not its own alone. Also from OCTAVO_ADMIN_KEY.",
    "admin_key_file": "A file with such keys, one a line.",
    "insecure": "Listen beyond this machine without a key.",
    "ssl_keyfile": "TLS: the server's private key.",
    "ssl_certfile": "TLS: its certificate.",
    "ssl_ca_certs": "TLS: whose clients' certificates are asked for.",
    "allowed_origins": "An origin whose scripts may read responses, or *; may be repeated.",
    "allowed_hosts": "A name by which requests may call the server, or *; may be repeated.",
    "root_path": "Prefix of the paths, behind a proxy.",
    "max_num_queued_reqs": "Requests that may wait; more get 429.",
    "max_num_queued_tokens": "Tokens of their prompts together; else any number.",
    "max_request_sequences": "Prompts x n of one request; else eight times those that run together.",
    "max_request_tokens": "Its prompts and outputs in all; else four times what the KV cache holds.",
    "max_request_logprobs": "Log-probabilities that it asks for in all; else 131072.",
    "queue_timeout": "Seconds that a request may wait, then 503; 0: any time.",
    "max_body_bytes": "The largest body; else by the context's length, at most 8 MiB.",
    "unknown_params": "What a parameter that does not exist does to a request.",
    "strict_openai": "OpenAI's own limits where they are narrower.",
    "trust_request_chat_template": "Let requests bring chat templates.",
    "default_chat_template_kwargs": "Variables of the chat template, as JSON.",
    "tool_call_parser": "How the model writes calls of tools; auto reads its chat template.",
    "reasoning_parser": "How it sets its reasoning apart; auto likewise.",
    "pin_prefix": "A file that prompts begin with, to keep computed: messages in .json, else text; may be repeated.",
    "max_json_whitespace": "White space in a row that constrained JSON may have; 0: none, -1: any number.",
    "shutdown_timeout": "Seconds that requests get to end after Ctrl-C or SIGTERM; a second one stops at once.",
    "sse_keep_alive_interval": "Seconds of silence before a stream gets a comment; 0: never.",
    "metrics_public": "/metrics takes no key.",
    "view_text": "/view shows what stands in a block.",
    "otlp_traces_endpoint": "An OpenTelemetry collector, such as http://localhost:4318/v1/traces.",
    "enable_log_requests": "Log each request's parameters, never its text.",
    "disable_log_stats": "No line of numbers every ten seconds.",
    "disable_access_log_for_endpoints": "A path whose requests are not logged; may be repeated.",
    "uvicorn_log_level": "How much is logged.",
}
FLIGHT = {"flight_recorder": "Dump the engine's last minutes into this directory when it dies, and on SIGUSR1."}
SEED = {"seed": "Where the seeds of requests that bring none come from."}
ALWAYS = typer.Option(hidden=True)
"""Of vLLM's flags: what they switch on is always on here."""


@options_of(ServeArgs, SERVE, into="server")
@options_of(EngineArgs, ENGINE | SEED | FLIGHT, into="engine")
def serve(
    *,
    model: Annotated[
        str, typer.Argument(help="Directory, .gguf file, name in `octavo models`, or hub id.")
    ] = DEFAULT_MODEL,
    log_format: Annotated[str, typer.Option(help="text, or json: an object a line.")] = "text",
    enable_auto_tool_choice: Annotated[bool, ALWAYS] = True,
    enable_prompt_tokens_details: Annotated[bool, ALWAYS] = True,
    enable_request_id_headers: Annotated[bool, ALWAYS] = True,
    engine: dict[str, Any],
    server: dict[str, Any],
) -> None:
    """Serve a model under OpenAI's API.

    The first Ctrl-C lets the requests that run end, the second stops at once.
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
