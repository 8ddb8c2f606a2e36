"""What a server can be told, and its defaults: `ServeArgs`. The engine's own options are `octavo.config.EngineArgs`."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from octavo.errors import ParameterError
from octavo.params.validation import ValidatedParams
from octavo.serve.http.allowed_hosts import is_host, is_loopback
from octavo.serve.request_limits import MAX_LOGPROBS, SEQUENCES_TO_RUN, TOKENS_TO_CACHE, RequestLimits

MIB = 1 << 20
UnknownParams = Literal["refuse", "warn"]
LogLevel = Literal["debug", "info", "warning", "error", "critical"]
ToolFormat = Literal["auto", "hermes", "llama3_json", "none"]
ReasoningFormat = Literal["auto", "think", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeArgs(ValidatedParams):
    """The server's options; names and meanings are vLLM's where it has the option.

    host, port, uds              where it listens: an address and a port (0: any free one), or a Unix socket's path
    served_model_name            names that requests may use; responses have the first. Default: the model as given
    api_key                      keys, one of which every request but /health and /ready must bring
    api_key_file                 more of them, one a line; a file is not seen in the list of processes
    admin_key                    keys whose holders see all requests in /debug and /view; others see their own. The
                                 holder of the only key sees all without
    admin_key_file               more of them, one a line
    insecure                     listen beyond loopback without a key
    ssl_keyfile, ssl_certfile    TLS: the server's key and certificate
    ssl_ca_certs                 authorities of which clients must bring a certificate
    allowed_origins              origins whose scripts may read responses (CORS); none unless told, "*" for all
    allowed_hosts                names by which requests may call it, beside loopback's and the bound address; "*" for
                                 all. None: with keys all, without keys no others
    root_path                    prefix of the paths, behind a proxy
    max_num_queued_reqs          requests beyond those that run; more get 429
    max_num_queued_tokens        their prompts' tokens in all; None: no limit
    max_request_sequences        prompts x samples (n, best_of, beams) of one request. None: eight times those that run
                                 together, and at most half of those that may be here
    max_request_tokens           its prompts, and max_tokens for each of its sequences. None: four times what the KV
                                 cache holds, and at least the longest sequence
    max_request_logprobs         its log-probabilities, those of its prompts included. None: 131,072
    queue_timeout                seconds that a request may wait before it runs, then 503
    max_body_bytes               None: 64 KiB and 32 bytes for each token of max_model_len, at most 8 MiB
    unknown_params               refuse a request with a parameter that does not exist, or warn and go on without it
    strict_openai                OpenAI's own limits where they are narrower: model required, 4 stops, 5 logprobs
    trust_request_chat_template  let requests bring chat templates
    default_chat_template_kwargs variables of the chat template, unless a request sets them
    tool_call_parser             how the model writes calls of tools; auto: read off its chat template
    reasoning_parser             how it sets its reasoning apart; auto likewise
    pin_prefix                   files of what many prompts begin with, computed at the start and kept: messages in a
                                 .json file, text in any other
    max_json_whitespace          characters of white space between two parts of JSON that a request constrains, unless
                                 it says so itself; 0: none, -1: any number
    shutdown_timeout             seconds that running requests get after the first SIGTERM or SIGINT
    sse_keep_alive_interval      seconds of silence after which a stream gets a comment; 0: never
    metrics_public               /metrics takes no key
    view_text                    /view shows the tokens in a block, and their text
    otlp_traces_endpoint         an OpenTelemetry collector, over HTTP, that gets a span for each request
    enable_log_requests          a line for each request, without its text
    disable_log_stats            no line of numbers every ten seconds
    disable_access_log_for_endpoints  paths whose requests are not logged
    uvicorn_log_level            how much is logged
    """

    TITLE: ClassVar[str] = "the server"

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    served_model_name: Sequence[str] = ()
    api_key: Sequence[str] = ()
    api_key_file: str | None = None
    admin_key: Sequence[str] = ()
    admin_key_file: str | None = None
    insecure: bool = False
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    allowed_origins: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()
    root_path: str = ""
    max_num_queued_reqs: int = 4096
    max_num_queued_tokens: int | None = None
    max_request_sequences: int | None = None
    max_request_tokens: int | None = None
    max_request_logprobs: int | None = None
    queue_timeout: float = 600.0
    max_body_bytes: int | None = None
    unknown_params: UnknownParams = "refuse"
    strict_openai: bool = False
    trust_request_chat_template: bool = False
    default_chat_template_kwargs: Mapping[str, Any] | None = None
    tool_call_parser: ToolFormat = "auto"
    reasoning_parser: ReasoningFormat = "auto"
    pin_prefix: Sequence[str] = ()
    max_json_whitespace: int = 12
    shutdown_timeout: float = 30.0
    sse_keep_alive_interval: float = 0.0
    metrics_public: bool = False
    view_text: bool = False
    otlp_traces_endpoint: str | None = None
    enable_log_requests: bool = False
    disable_log_stats: bool = False
    disable_access_log_for_endpoints: Sequence[str] = ()
    uvicorn_log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        self._check_integer("port", 0, 65535)
        self._check_integer("max_num_queued_reqs", 0, 1 << 30)
        self._check_integer("max_num_queued_tokens", 0, 1 << 50, optional=True)
        for name in ("max_request_sequences", "max_request_tokens", "max_request_logprobs"):
            self._check_integer(name, 1, 1 << 50, optional=True)
        self._check_integer("max_body_bytes", 1, 1 << 40, optional=True)
        self._check_integer("max_json_whitespace", -1, 1000)
        for name in ("queue_timeout", "shutdown_timeout", "sse_keep_alive_interval"):
            self._check_number(name, 0.0, 1e6)
        self._check_bool("insecure", "strict_openai", "trust_request_chat_template", "metrics_public", "view_text")
        self._check_bool("enable_log_requests", "disable_log_stats")
        self._check_choice("unknown_params", ("refuse", "warn"))
        self._check_choice("tool_call_parser", ("auto", "hermes", "llama3_json", "none"))
        self._check_choice("reasoning_parser", ("auto", "think", "none"))
        for name in ("served_model_name", "api_key", "admin_key", "allowed_origins"):
            self._set(name, self._check_strings(name, 256))
        self._set("disable_access_log_for_endpoints", self._check_strings("disable_access_log_for_endpoints", 256))
        self._set("allowed_hosts", self._check_strings("allowed_hosts", 256))
        for host in self.allowed_hosts:
            if not is_host(host):
                text = f"allowed_hosts has {host!r}; write names or addresses without a port, *.example.com, or *"
                raise ParameterError(text, param="allowed_hosts")
        self._set("pin_prefix", self._check_strings("pin_prefix", 4096))
        for name in ("api_key", "admin_key"):
            for key in getattr(self, name):
                check_key(key, name)
        if (url := self.otlp_traces_endpoint) is not None and not str(url).startswith(("http://", "https://")):
            text = f"otlp_traces_endpoint is {url!r}, it must be a URL such as http://localhost:4318/v1/traces"
            raise ParameterError(text, param="otlp_traces_endpoint")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ParameterError("ssl_keyfile and ssl_certfile go together; give both or none", param="ssl_certfile")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ParameterError("ssl_ca_certs needs TLS; give ssl_keyfile and ssl_certfile too", param="ssl_ca_certs")

    def check_tls(self) -> None:
        """Raises `ParameterError` where the files of TLS cannot be used."""
        if self.ssl_certfile is None:
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        name = "ssl_certfile"
        try:
            for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
                if (path := getattr(self, name)) is not None:
                    Path(path).read_bytes()
            name = "ssl_certfile"  # with its key
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password="")
            name = "ssl_ca_certs"
            if self.ssl_ca_certs is not None:
                context.load_verify_locations(self.ssl_ca_certs)
        except ssl.SSLError as error:
            what = "a certificate and its own key" if name == "ssl_certfile" else "certificates"
            text = f"{name} {getattr(self, name)}: {error.reason or error}; it must be {what}, PEM and not encrypted"
            raise ParameterError(text, param=name) from None
        except OSError as error:
            text = f"{name} {getattr(self, name)}: {error.strerror}; name a file that can be read"
            raise ParameterError(text, param=name) from None

    def check_exposure(self, keys: Sequence[str]) -> None:
        """Raises `ParameterError` where anybody on the network could use the server without a key."""
        if keys or self.insecure or self.uds is not None or is_loopback(self.host):
            return
        raise ParameterError(
            f"host {self.host} can be reached from other machines, and there is no key; set api_key, or say --insecure",
            param="host",
        )

    def request_limits(self, max_num_seqs: int | None, max_model_len: int, num_kv_tokens: int | None) -> RequestLimits:
        """What one request may come to on an engine of this size. A request that the queue could never take is beyond
        them, too."""
        sequences, tokens = self.max_request_sequences, self.max_request_tokens
        if max_num_seqs is not None:
            room = max_num_seqs + self.max_num_queued_reqs
            unasked = min(SEQUENCES_TO_RUN * max_num_seqs, max(max_num_seqs, room // 2))
            sequences = min(room, unasked if sequences is None else sequences)
        if tokens is None and num_kv_tokens is not None:
            tokens = max(TOKENS_TO_CACHE * num_kv_tokens, max_model_len)
        logprobs = MAX_LOGPROBS if self.max_request_logprobs is None else self.max_request_logprobs
        return RequestLimits(sequences, tokens, logprobs, self.max_num_queued_tokens, max_model_len, num_kv_tokens)

    def body_limit(self, max_model_len: int) -> int:
        """Bytes that a request's body may have."""
        if self.max_body_bytes is not None:
            return self.max_body_bytes
        return min(64 * 1024 + 32 * max_model_len, 8 * MIB)


def check_key(key: str, name: str = "api_key") -> None:
    """Raises `ParameterError` for a key that no header can carry. The key itself is not repeated."""
    if not key or not all("!" <= c <= "~" for c in key):
        raise ParameterError(
            f"an {name} must be printable ASCII without spaces, and not empty; write another one", param=name
        )
