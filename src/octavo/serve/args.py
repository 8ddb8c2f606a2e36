"""`ServeArgs`, the server's options and defaults. The engine's options are `octavo.config.EngineArgs`."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from octavo.errors import ParameterError
from octavo.params.validation import ValidatedParams
from octavo.params.vllm_arguments import Owner
from octavo.router.router import ROUTER_POLICIES, RouterPolicy
from octavo.serve.http.allowed_hosts import is_host, is_loopback
from octavo.serve.request_limits import MAX_LOGPROBS, SEQUENCES_PER_ROW, TOKENS_PER_CACHE, RequestLimits

MIB = 1 << 20
UnknownParams = Literal["refuse", "warn"]
LogLevel = Literal["debug", "info", "warning", "error", "critical"]
ToolFormat = Literal["auto", "hermes", "llama3_json", "qwen3_coder", "openai", "gemma4", "none"]
ReasoningFormat = Literal["auto", "think", "openai_gptoss", "gemma4", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeArgs(ValidatedParams):
    """Options of the server, with vLLM's names and meanings where vLLM has the option.

    host                         address to listen on; a non-loopback address needs a key
    port                         port to listen on; 0: any free port, which is printed
    uds                          listen on this Unix socket instead
    served_model_name            model names that requests may use; responses have the first. Default: the model
    api_key                      API key; every request needs one, except /health and /ready. Also from OCTAVO_API_KEY
                                 and VLLM_API_KEY
    api_key_file                 file with further keys, one per line; unlike options, not visible in the process list
    admin_key                    key that sees all requests in /debug and /view; other keys see their own requests. A
                                 single key always sees all. Also from OCTAVO_ADMIN_KEY
    admin_key_file               file with further admin keys, one per line
    insecure                     allow a non-loopback address without a key
    ssl_keyfile                  TLS: private key of the server
    ssl_certfile                 TLS: certificate of the server
    ssl_ca_certs                 TLS: certificate authorities; clients must present a certificate signed by one
    allowed_origins              CORS: origins whose scripts may read responses, "*" for all. Default: none
    allowed_hosts                accepted Host names, besides loopback and the bound address; "*" for all. Default: all
                                 if there are keys, else no further ones
    root_path                    path prefix behind a reverse proxy
    max_num_queued_reqs          sequences that may wait beyond max_num_seqs; further requests get 429
    max_num_queued_tokens        prompt tokens of waiting requests; None: no limit
    max_request_sequences        prompts x samples (n, best_of, beams) of one request. None: 8 x max_num_seqs, and at
                                 most half of the sequences that may run and wait
    max_request_tokens           prompt tokens, and max_tokens for each sequence, of one request. None: four times the
                                 KV cache's tokens, and at least the longest sequence
    max_request_logprobs         log-probabilities of one request, prompts included. None: 131,072
    queue_timeout                seconds that a request may wait before it runs; then it gets 503. 0: no limit
    max_body_bytes               size of a request body. None: 64 KiB and 32 bytes per token of max_model_len, at most
                                 8 MiB
    unknown_params               refuse a request with an unknown parameter, or warn and ignore the parameter
    strict_openai                apply OpenAI's narrower limits: model required, 4 stop strings, 5 logprobs
    return_tokens_as_token_ids   tokens of log-probabilities are written token_id:N, unless a request chooses
    enable_force_include_usage   every chunk of a stream has the usage so far, and a last one the whole
    enable_tokenizer_info_endpoint  answer /tokenizer_info: special tokens and the chat template
    trust_request_chat_template  allow chat templates in requests
    default_chat_template_kwargs  chat template variables as JSON, unless a request sets them
    tool_call_parser             format of the model's tool calls; auto: detected from its chat template
    reasoning_parser             format of the model's reasoning; auto: detected from its chat template
    data_parallel_size           engines with a copy of the model each, behind this server; each gets its share of the
                                 processors and the memory, or a GPU
    dp_router                    the engine of a request: affinity, the one with the least predicted time to the first
                                 token, by what each has cached; least-loaded; or round-robin
    pin_prefix                   files with prompt prefixes to compute at the start and keep: messages in a .json file,
                                 else text
    max_json_whitespace          characters of white space between two JSON tokens of constrained output, unless the
                                 request sets its own limit; 0: none, -1: unlimited
    shutdown_timeout             seconds that running requests get after the first SIGTERM or SIGINT
    sse_keep_alive_interval      seconds of silence after which a stream gets a comment; 0: never
    metrics_public               /metrics needs no key
    view_text                    /view shows the token ids and the text of blocks
    otlp_traces_endpoint         URL of an OpenTelemetry collector (OTLP over HTTP) for one span per request
    enable_log_requests          log one line per request, without its text
    disable_log_stats            do not log throughput every ten seconds
    disable_access_log_for_endpoints  paths without access log lines
    uvicorn_log_level            log level
    """

    TITLE: ClassVar[str] = "the server"
    ARGUMENT_OWNER: ClassVar[Owner | None] = "server"

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
    return_tokens_as_token_ids: bool = False
    enable_force_include_usage: bool = False
    enable_tokenizer_info_endpoint: bool = False
    trust_request_chat_template: bool = False
    default_chat_template_kwargs: Mapping[str, Any] | None = None
    tool_call_parser: ToolFormat = "auto"
    reasoning_parser: ReasoningFormat = "auto"
    data_parallel_size: int = 1
    dp_router: RouterPolicy = "affinity"
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
        self._check_integer("data_parallel_size", 1, 1024)
        self._check_choice("dp_router", ROUTER_POLICIES)
        for name in ("queue_timeout", "shutdown_timeout", "sse_keep_alive_interval"):
            self._check_number(name, 0.0, 1e6)
        self._check_bool("insecure", "strict_openai", "trust_request_chat_template", "metrics_public", "view_text")
        self._check_bool("enable_log_requests", "disable_log_stats", "return_tokens_as_token_ids")
        self._check_bool("enable_force_include_usage", "enable_tokenizer_info_endpoint")
        self._check_choice("unknown_params", ("refuse", "warn"))
        self._check_choice("tool_call_parser", get_args(ToolFormat))
        self._check_choice("reasoning_parser", get_args(ReasoningFormat))
        for name in ("served_model_name", "api_key", "admin_key", "allowed_origins"):
            self._set(name, self._check_strings(name, 256))
        self._set("disable_access_log_for_endpoints", self._check_strings("disable_access_log_for_endpoints", 256))
        self._set("allowed_hosts", self._check_strings("allowed_hosts", 256))
        for host in self.allowed_hosts:
            if not is_host(host):
                text = f"allowed_hosts has {host!r}; use names or addresses without a port, *.example.com, or *"
                raise ParameterError(text, param="allowed_hosts")
        self._set("pin_prefix", self._check_strings("pin_prefix", 4096))
        for name in ("api_key", "admin_key"):
            for key in getattr(self, name):
                check_key(key, name)
        if (url := self.otlp_traces_endpoint) is not None and not str(url).startswith(("http://", "https://")):
            text = f"otlp_traces_endpoint is {url!r}, it must be a URL such as http://localhost:4318/v1/traces"
            raise ParameterError(text, param="otlp_traces_endpoint")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ParameterError("ssl_keyfile and ssl_certfile need each other; set both or none", param="ssl_certfile")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ParameterError("ssl_ca_certs needs TLS; set ssl_keyfile and ssl_certfile", param="ssl_ca_certs")

    def check_tls(self) -> None:
        """Raises `ParameterError` if the TLS files cannot be used."""
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
            content = "a certificate and its key" if name == "ssl_certfile" else "certificates"
            text = f"{name} {getattr(self, name)}: {error.reason or error}; it must be {content}, PEM and not encrypted"
            raise ParameterError(text, param=name) from None
        except OSError as error:
            text = f"{name} {getattr(self, name)}: {error.strerror}; use a readable file"
            raise ParameterError(text, param=name) from None

    def check_exposure(self, keys: Sequence[str]) -> None:
        """Raises `ParameterError` if other machines could use the server without a key."""
        if keys or self.insecure or self.uds is not None or is_loopback(self.host):
            return
        raise ParameterError(
            f"host {self.host} is reachable from other machines without a key; set api_key, or insecure to allow this",
            param="host",
        )

    def request_limits(self, max_num_seqs: int | None, max_model_len: int, num_kv_tokens: int | None) -> RequestLimits:
        """The limits of one request on an engine of this size. They exclude requests that could never be queued."""
        sequences, tokens = self.max_request_sequences, self.max_request_tokens
        if max_num_seqs is not None:
            capacity = max_num_seqs + self.max_num_queued_reqs
            default = min(SEQUENCES_PER_ROW * max_num_seqs, max(max_num_seqs, capacity // 2))
            sequences = min(capacity, default if sequences is None else sequences)
        if tokens is None and num_kv_tokens is not None:
            tokens = max(TOKENS_PER_CACHE * num_kv_tokens, max_model_len)
        logprobs = MAX_LOGPROBS if self.max_request_logprobs is None else self.max_request_logprobs
        return RequestLimits(sequences, tokens, logprobs, self.max_num_queued_tokens, max_model_len, num_kv_tokens)

    def body_limit(self, max_model_len: int) -> int:
        """The maximal size of a request body in bytes."""
        if self.max_body_bytes is not None:
            return self.max_body_bytes
        return min(64 * 1024 + 32 * max_model_len, 8 * MIB)


def check_key(key: str, name: str = "api_key") -> None:
    """Raises `ParameterError` for a key that cannot be sent in a header. The message does not contain the key."""
    if not key or not all("!" <= c <= "~" for c in key):
        raise ParameterError(f"{name} must be non-empty printable ASCII without spaces; use another key", param=name)
