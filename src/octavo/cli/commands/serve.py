"""`octavo serve`: runs the OpenAI-compatible server."""

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
    "host": "Address to listen on; a non-loopback address needs a key.",
    "port": "Port to listen on; 0: any free port, which is printed.",
    "uds": "Listen on this Unix socket instead.",
    "served_model_name": "Model name in requests; may be repeated, responses have the first.",
    "api_key": "API key that requests need; may be repeated. Also from OCTAVO_API_KEY and VLLM_API_KEY.",
    "api_key_file": "File with API keys, one per line.",
    "admin_key": "Key that sees all requests in /debug and /view, not just its own. Also from OCTAVO_ADMIN_KEY.",
    "admin_key_file": "File with admin keys, one per line.",
    "insecure": "Allow a non-loopback address without a key.",
    "ssl_keyfile": "TLS: private key of the server.",
    "ssl_certfile": "TLS: certificate of the server.",
    "ssl_ca_certs": "TLS: certificate authorities; clients need a certificate signed by one.",
    "allowed_origins": "CORS: origin whose scripts may read responses, or *; may be repeated.",
    "allowed_hosts": "Accepted Host name, or *; may be repeated.",
    "root_path": "Path prefix behind a reverse proxy.",
    "max_num_queued_reqs": "Maximum waiting sequences; further requests get 429.",
    "max_num_queued_tokens": "Maximum prompt tokens of waiting requests. Default: no limit.",
    "max_request_sequences": "Maximum prompts x n of one request. Default: 8 x --max-num-seqs.",
    "max_request_tokens": "Maximum tokens of one request's prompts and outputs. Default: four times the KV cache's.",
    "max_request_logprobs": "Maximum log-probabilities of one request, prompts included. Default: 131072.",
    "queue_timeout": "Seconds that a request may wait, then it gets 503; 0: no limit.",
    "max_body_bytes": "Maximum size of a request body. Default: by --max-model-len, at most 8 MiB.",
    "unknown_params": "Refuse a request with an unknown parameter, or warn and ignore the parameter.",
    "strict_openai": "Apply OpenAI's narrower limits.",
    "trust_request_chat_template": "Allow chat templates in requests.",
    "default_chat_template_kwargs": "Chat template variables, as JSON.",
    "tool_call_parser": "Format of the model's tool calls; auto: detected from its chat template.",
    "reasoning_parser": "Format of the model's reasoning; auto: detected from its chat template.",
    "pin_prefix": "File with a prompt prefix to compute and keep: messages in .json, else text; may be repeated.",
    "max_json_whitespace": "Maximum white space between two tokens of constrained JSON; 0: none, -1: unlimited.",
    "shutdown_timeout": "Seconds that running requests get after Ctrl-C or SIGTERM; a second signal stops at once.",
    "sse_keep_alive_interval": "Seconds of silence after which a stream gets a comment; 0: never.",
    "metrics_public": "/metrics needs no key.",
    "view_text": "/view shows the token ids and the text of blocks.",
    "otlp_traces_endpoint": "URL of an OpenTelemetry collector, such as http://localhost:4318/v1/traces.",
    "enable_log_requests": "Log each request's parameters, without its text.",
    "disable_log_stats": "Do not log throughput every ten seconds.",
    "disable_access_log_for_endpoints": "Path without access log lines; may be repeated.",
    "uvicorn_log_level": "Log level.",
}
FLIGHT_RECORDER = {"flight_recorder": "Directory for dumps of the last minutes, on SIGUSR1 or an engine failure."}
SEED = {"seed": "Seed of the generator for requests without a seed."}
ALWAYS_ON = typer.Option(hidden=True)
"""Flags of vLLM for features that are always on here."""


@options_of(ServeArgs, SERVE, into="server")
@options_of(EngineArgs, ENGINE | SEED | FLIGHT_RECORDER, into="engine")
def serve(
    *,
    model: Annotated[
        str, typer.Argument(help="Directory, .gguf file, name in `octavo models`, or hub id.")
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
