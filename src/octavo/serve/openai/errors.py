"""API errors: every exception maps to a status and an OpenAI error object here.

    {"error": {"message": ..., "type": ..., "param": ... or null, "code": ...}}

Clients see only messages that Octavo wrote. The text of a `UsageError` is shown. Any other exception becomes one of the
fixed errors below, and its own text goes to the log.
"""

from __future__ import annotations

import json
import re
from typing import Any

from octavo.errors import (
    CapacityError,
    EngineError,
    EngineQueryError,
    ParameterError,
    RequestFailedError,
    TemplateError,
    UsageError,
)

MAX_ERROR_BYTES = 4096
MAX_PARAM_CHARS = 128
ALLOW_MORE = "allowed_token_ids, bad_words and structured_outputs together leave none; allow more"
LONG_WORD = re.compile(r"(\w{60})\w{40,}+")
"""A number or a name of a hundred characters or more; only its beginning is repeated to the client."""
PATH_PATTERN = re.compile(r"""'[^']*/[^']*'|"[^"]*/[^"]*"|[^\s'"]*/[^\s'"]*""")

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
"""Error types by status; every other status is an invalid_request_error."""


class ApiError(Exception):
    """An HTTP error response. It may be raised anywhere while a request is handled.

    retry_after_s   the Retry-After header of a 429 or 503, in seconds
    close           close the connection after the response
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        *,
        retry_after_s: int | None = None,
        close: bool = False,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.close = close
        self.extra_headers = headers or {}

    @property
    def type(self) -> str:
        return ERROR_TYPES.get(self.status, "invalid_request_error")

    def as_dict(self) -> dict[str, Any]:
        """The error object; its message is cut until the body has at most `MAX_ERROR_BYTES`."""
        param = None if self.param is None else _sanitized(self.param)[:MAX_PARAM_CHARS]
        message = LONG_WORD.sub(r"\1...", _sanitized(self.message))
        error = {"message": message, "type": self.type, "param": param, "code": self.code}
        while len(_encode(error)) > MAX_ERROR_BYTES:
            message = message[: len(message) * 3 // 4]
            error["message"] = message + "..."
        return {"error": error}

    def body(self) -> bytes:
        return _encode(self.as_dict()["error"])

    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json", **self.extra_headers}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        elif self.status == 500:  # the same request would fail again
            headers["x-should-retry"] = "false"
        if self.close:
            headers["connection"] = "close"
        return headers


def _encode(error: dict[str, Any]) -> bytes:
    return json.dumps({"error": error}, ensure_ascii=False, separators=(",", ":")).encode()


def _sanitized(text: str) -> str:
    """Text without lone surrogates and control characters, of at most `MAX_ERROR_BYTES` characters."""
    text = text[:MAX_ERROR_BYTES].encode("utf-8", "backslashreplace").decode()
    return re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", text)


def redact_paths(text: str) -> str:
    """Hides file paths from callers without a key."""
    return PATH_PATTERN.sub("(a path)", text)


# -- common errors -----------------------------------------------------------------------------------------------------


def bad_request(code: str, message: str, param: str | None = None) -> ApiError:
    """400: the request is invalid."""
    return ApiError(400, code, message, param)


def not_found(message: str, param: str | None = None) -> ApiError:
    return ApiError(404, "not_found", message, param)


def internal_error(request_id: str) -> ApiError:
    return ApiError(500, "internal_error", f"internal server error; the server's log has details under {request_id}")


def engine_unavailable() -> ApiError:
    """503: the engine has failed permanently. Requests that arrive during an engine restart wait instead."""
    text = "the engine has failed and will not be restarted; restart the server or use another one"
    return ApiError(503, "engine_unavailable", text, retry_after_s=5)


def shutting_down() -> ApiError:
    return ApiError(503, "shutting_down", "the server is shutting down; use another one", retry_after_s=5, close=True)


# -- exceptions to errors ----------------------------------------------------------------------------------------------

CODE_OVERRIDES = {
    # The API's error codes where they differ from those of the engine's Python interface.
    ("best_of", "integer_out_of_range"): "invalid_value",
    ("beam_width", "integer_out_of_range"): "invalid_value",
    ("top_k", "integer_out_of_range"): "decimal_out_of_range",
    ("stop_token_ids", "integer_out_of_range"): "invalid_token_id",
    ("bad_words_token_ids", "invalid_token_id"): "invalid_token_id",
}
PARAM_NAMES = {"bad_words_token_ids": "bad_words"}


def to_api_error(error: BaseException, request_id: str) -> ApiError:
    """The response to an exception. An unknown exception is a bug: internal_error, and the caller logs it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UsageError):
        return _usage(error)
    if isinstance(error, RequestFailedError):
        if error.code == "no_allowed_token":
            return bad_request(error.code, f"no token is allowed at this position; {ALLOW_MORE}", "allowed_token_ids")
        if error.code == "grammar_too_complex":
            text = "structured_outputs: the grammar's automaton grew too large during generation; simplify the grammar"
            return bad_request(error.code, text, "structured_outputs")
        if error.code == "grammar_unavailable":
            return ApiError(503, error.code, str(error), retry_after_s=5)
        if error.code == "queue_full":
            return ApiError(429, error.code, str(error), retry_after_s=1)
        if error.code == "out_of_memory":
            return ApiError(500, error.code, "the request needs more memory than the device has; shorten it")
        if error.code == RequestFailedError.code:
            return ApiError(500, error.code, "the request's logits are not finite; other requests are not affected")
        return internal_error(request_id)
    if isinstance(error, EngineQueryError) and error.code == "no_replica":
        return ApiError(503, error.code, str(error), retry_after_s=1)
    if isinstance(error, EngineError) and not isinstance(error, EngineQueryError):
        return engine_unavailable()
    return internal_error(request_id)


def _usage(error: UsageError) -> ApiError:
    param, code = error.param, error.code
    if isinstance(error, CapacityError) and param == "n":
        code = "integer_out_of_range"
    if isinstance(error, TemplateError) and code == "template_timeout":
        return ApiError(500, code, str(error))  # the server's own template; `Service.render` handles a request's
    if isinstance(error, ParameterError):
        code = CODE_OVERRIDES.get((param or "", code), code)
    return bad_request(code, str(error), PARAM_NAMES.get(param or "", param))
