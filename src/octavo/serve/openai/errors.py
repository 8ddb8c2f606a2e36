"""What is wrong with a request, as a status and a body: the one table from errors to answers.

Nothing that a library or a bug says reaches a client. A `UsageError`'s text is ours and is shown; any other exception
becomes an entry of the catalogue here, and its own words go to the log.

    {"error": {"message": ..., "type": ..., "param": ... or null, "code": ...}}
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

MAX_BODY_BYTES = 4096
MAX_PARAM_CHARS = 128
PATH = re.compile(r"""'[^']*/[^']*'|"[^"]*/[^"]*"|[^\s'"]*/[^\s'"]*""")

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
"""By status; every other is an invalid_request_error."""


class ApiError(Exception):
    """An answer that is an error, raised anywhere while a request is handled.

    retry_after_s   when to come back, for 429 and 503
    close           end the connection after it
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
        self.more_headers = headers or {}

    @property
    def type(self) -> str:
        return TYPES.get(self.status, "invalid_request_error")

    def as_dict(self) -> dict[str, Any]:
        """The error object, in a body of at most `MAX_BODY_BYTES`."""
        param = None if self.param is None else _shown(self.param)[:MAX_PARAM_CHARS]
        message = _shown(self.message)
        error = {"message": message, "type": self.type, "param": param, "code": self.code}
        while len(_encoded(error)) > MAX_BODY_BYTES:
            message = message[: len(message) * 3 // 4]
            error["message"] = message + "..."
        return {"error": error}

    def body(self) -> bytes:
        return _encoded(self.as_dict()["error"])

    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json", **self.more_headers}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        elif self.status == 500:  # the same request would fail again
            headers["x-should-retry"] = "false"
        if self.close:
            headers["connection"] = "close"
        return headers


def _encoded(error: dict[str, Any]) -> bytes:
    return json.dumps({"error": error}, ensure_ascii=False, separators=(",", ":")).encode()


def _shown(text: str) -> str:
    """Text that any client can read: no lone surrogate, no control character, not endless."""
    text = text[:MAX_BODY_BYTES].encode("utf-8", "backslashreplace").decode()
    return re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", text)


def redact_paths(text: str) -> str:
    """For those who need no key: where the operator's files lie is not theirs to know."""
    return PATH.sub("(a path)", text)


# -- the catalogue -----------------------------------------------------------------------------------------------------


def bad_request(code: str, message: str, param: str | None = None) -> ApiError:
    """A request that is wrong: 400."""
    return ApiError(400, code, message, param)


def not_found(what: str, param: str | None = None) -> ApiError:
    return ApiError(404, "not_found", f"there is no {what}", param)


def internal(request_id: str) -> ApiError:
    return ApiError(500, "internal_error", f"the server failed on this request; its log has more under {request_id}")


def unavailable() -> ApiError:
    """The engine is gone for good: while it is restarted, requests wait."""
    text = "the engine has failed and is not started again; restart the server, or send this to another one"
    return ApiError(503, "engine_unavailable", text, retry_after_s=5)


def shutting_down() -> ApiError:
    return ApiError(
        503, "shutting_down", "the server is shutting down; send this to another one", retry_after_s=5, close=True
    )


# -- errors of the engine's ------------------------------------------------------------------------------------------

CODES = {
    # The engine speaks to Python, and says of some values more than the API's table of answers does.
    ("best_of", "integer_out_of_range"): "invalid_value",
    ("beam_width", "integer_out_of_range"): "invalid_value",
    ("top_k", "integer_out_of_range"): "decimal_out_of_range",
    ("stop_token_ids", "integer_out_of_range"): "invalid_token_id",
    ("bad_words_token_ids", "invalid_token_id"): "invalid_token_id",
}
NAMES = {"bad_words_token_ids": "bad_words"}


def to_api_error(error: BaseException, request_id: str) -> ApiError:
    """The answer to an exception. One that is in no row is a bug: the caller logs it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UsageError):
        return _usage(error)
    if isinstance(error, RequestFailedError):
        if error.code == "no_allowed_token":
            return bad_request(error.code, "no token may come next; allow more", "allowed_token_ids")
        if error.code == "grammar_too_complex":
            text = "structured_outputs: the grammar's automaton grew too large while the output was made; simplify it"
            return bad_request(error.code, text, "structured_outputs")
        if error.code == "grammar_unavailable":
            return ApiError(503, error.code, str(error), retry_after_s=5)
        if error.code == "out_of_memory":
            return ApiError(500, error.code, "the request takes more memory than the device has; shorten it")
        if error.code == RequestFailedError.code:
            return ApiError(500, error.code, "the model's numbers for this request are not finite; no other is touched")
        return internal(request_id)
    if isinstance(error, EngineError) and not isinstance(error, EngineQueryError):
        return unavailable()
    return internal(request_id)


def _usage(error: UsageError) -> ApiError:
    param, code = error.param, error.code
    if isinstance(error, CapacityError) and param == "n":
        code = "integer_out_of_range"
    if isinstance(error, TemplateError) and code == "template_timeout":
        return ApiError(500, code, str(error))  # the operator's template; of one in a request see `Service.encode_chat`
    if isinstance(error, ParameterError):
        code = CODES.get((param or "", code), code)
    return bad_request(code, str(error), NAMES.get(param or "", param))
