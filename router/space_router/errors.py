"""Errors of configuration and of the APIs. Each message has the limit, the value and what to do.

RouterError
├── ConfigError        a flag, a variable or a file is invalid: the process does not start
└── ApiError           a request that is answered with an error status
    ├── ClientError        the request itself is wrong
    │   ├── InvalidRequest     400: a field is wrong, `param` names it
    │   │   └── TooManyTokens      400: prompt and output do not fit the window
    │   ├── NotFound           404
    │   ├── MethodNotAllowed   405
    │   ├── SlowRequest        408: the body came too slowly
    │   ├── Conflict           409: another operation must end first
    │   ├── BodyTooLarge       413
    │   └── UnsupportedMedia   415
    ├── Unauthorized       401
    ├── Forbidden          403: the key is valid but not an operator's
    ├── TimedOut           408: the request's own deadline
    ├── Overloaded         429, with Retry-After: the queue is full
    │   ├── QueueTimedOut      429, with Retry-After: its turn in the queue did not come in time
    │   └── RateLimited        429, with Retry-After: the API key has reached a limit
    ├── ClientGone         499: the client has disconnected; only logged
    │   └── SlowReader     the client is connected but does not read
    ├── GenerationFailed   500: this request failed, others are not affected
    ├── Internal           500: with an id that is in the log, and no internals
    └── Unavailable        503: starting or draining
"""

import math


class RouterError(Exception):
    """Base class of this package's errors."""


class ConfigError(RouterError):
    """A flag, environment variable or file is invalid."""


class ApiError(RouterError):
    """An error that is answered with a status, in the format of the API that was called."""

    status = 500
    kind = "server_error"  # OpenAI's `type`
    tgi_kind = "generation"  # TGI's `error_type`
    tgi_status: int | None = None  # TGI's status if it differs
    anthropic_kind = "api_error"  # Anthropic's `type`
    anthropic_status: int | None = None  # Anthropic's status if it differs
    reason: str | None = None  # label of the metric `rejected_total`
    should_retry: bool | None = False  # whether the same request may succeed soon; None: that is not known

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.request_id: str | None = None  # of the request that failed, if it had one
        self.details: dict[str, int] = {}  # further fields of the error object
        self.headers: dict[str, str] = {}
        self.retry_seconds: float | None = None  # until it may succeed


class ClientError(ApiError):
    status = 400
    kind = "invalid_request_error"
    tgi_kind = "validation"
    anthropic_kind = "invalid_request_error"


class InvalidRequest(ClientError):
    tgi_status = 422
    reason = "invalid"


class TooManyTokens(InvalidRequest):
    reason = "too_long"

    def __init__(self, message: str, *, num_prompt: int, limit: int, param: str = "prompt") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")
        self.details = {"n_prompt_tokens": num_prompt, "n_ctx": limit}


class Unauthorized(ApiError):
    status = 401
    kind = "authentication_error"
    tgi_kind = "authentication"
    anthropic_kind = "authentication_error"
    reason = "unauthorized"

    def __init__(self) -> None:
        message = "The API key is missing or not known. Send `Authorization: Bearer KEY`, or `x-api-key: KEY`."
        super().__init__(message, code="invalid_api_key")
        self.headers = {"WWW-Authenticate": "Bearer"}


class Forbidden(ApiError):
    status = 403
    kind = "permission_error"
    tgi_kind = "authentication"
    anthropic_kind = "permission_error"
    reason = "unauthorized"


class Conflict(ClientError):
    status = 409


class NotFound(ClientError):
    status = 404
    tgi_kind = "not_found"
    anthropic_kind = "not_found_error"


class MethodNotAllowed(ClientError):
    status = 405


class TimedOut(ApiError):
    status = 408
    kind = "timeout_error"
    anthropic_kind = "timeout_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="timeout", code="deadline_exceeded")


class SlowRequest(ClientError):
    status = 408
    should_retry = None
    reason = "slow_request"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="slow_request")
        self.headers = {"Connection": "close"}  # the rest of the body may still arrive


class BodyTooLarge(ClientError):
    status = 413
    anthropic_kind = "request_too_large"
    reason = "body_too_large"


class UnsupportedMedia(ClientError):
    status = 415
    reason = "invalid"


class Overloaded(ApiError):
    status = 429
    kind = "rate_limit_error"
    tgi_kind = "overloaded"
    anthropic_kind = "overloaded_error"
    anthropic_status: int | None = 529
    reason = "queue_full"
    error_code = "queue_full"
    should_retry = True

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message, code=self.error_code)
        self.retry_seconds = max(0.0, retry_after)
        self.headers = {"Retry-After": str(max(1, math.ceil(retry_after)))}


class QueueTimedOut(Overloaded):
    error_code = "queue_timeout"


class RateLimited(Overloaded):
    anthropic_kind = "rate_limit_error"
    anthropic_status = None
    reason = "rate_limited"
    error_code = "rate_limit_exceeded"


class ClientGone(ApiError):
    status = 499
    kind = "cancelled"
    tgi_kind = "incomplete_generation"


class SlowReader(ClientGone):
    """The client has not read for too long; its connection is closed."""


class GenerationFailed(ApiError):
    tgi_status = 424


class Internal(ApiError):
    should_retry = None
    tgi_kind = "incomplete_generation"

    def __init__(self, error_id: str) -> None:
        super().__init__(f"Internal error {error_id}. The server's log has it under this id.", code="internal_error")


class Unavailable(ApiError):
    status = 503
    kind = "service_unavailable_error"
    tgi_kind = "unhealthy"
    anthropic_kind = "overloaded_error"
    should_retry = True

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message, code=reason)
        self.retry_seconds = 1.0
        self.reason = reason
        self.headers = {"Retry-After": "1"}
