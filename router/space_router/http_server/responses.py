"""Kinds of paths, JSON responses, errors in the format of the API that was called, and event streams."""

import asyncio
import logging
import math
import re
import traceback
import uuid
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from contextvars import ContextVar
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from space_router.errors import ApiError, ClientGone, Internal, TooManyTokens
from space_router.http_server.gone_clients import gone_clients
from space_router.text import written_numbers
from space_router.web_ui.files import PAGE_FILES

OPEN_PATHS = frozenset(
    {"/health", "/readyz", "/ping", "/livez", "/startupz", "/version", "/metrics", "/docs", "/openapi.json"}
)
"""Paths for probes, metric scrapers and the documentation; they need no API key."""

GENERATING_PATHS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/generate",
        "/generate_stream",
        "/",
        "/invocations",
    }
)
"""A POST to these paths generates text. API key limits apply, and a full queue refuses it before the body is read."""

TOKENIZING_PATHS = frozenset(
    {"/tokenize", "/chat_tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"}
)
"""A POST to these paths does the text side of the work only. API key limits apply."""


EMBEDDING_PATHS = frozenset({"/v1/embeddings", "/embed", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"})
"""A POST to these paths makes vectors or scores of texts. API key limits apply."""

LIMITED_PATHS = GENERATING_PATHS | TOKENIZING_PATHS | EMBEDDING_PATHS
"""Paths with the headers of API key limits, and of the request's id."""


def is_open(path: str, method: str) -> bool:
    """Return whether the path needs no API key. The web page (`GET /`) asks for a key itself; `POST /` needs one."""
    return path in OPEN_PATHS or (method in ("GET", "HEAD") and path in PAGE_FILES)


def key_of(request: Request) -> str:
    """Return the name of the request's API key (a hash of the key), or "" if the server has no keys."""
    name: str = request.scope.get("spaceserve.key", "")
    return name


log = logging.getLogger(__name__)

TGI_PATHS = frozenset({"/", "/generate", "/generate_stream", "/info", "/tokenize", "/chat_tokenize", "/invocations"})
"""Paths with errors in TGI's format."""

ANTHROPIC_PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
"""Paths with errors in Anthropic's format."""


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(written_numbers.as_bytes(value), status, headers, media_type="application/json")


def openai_error(error: ApiError) -> dict[str, Any]:
    body = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return {"error": body | error.details}


def tgi_error(error: ApiError) -> dict[str, Any]:
    prefix = {
        "validation": "Input validation error: ",
        "overloaded": "Model is overloaded: ",
        "generation": "Request failed during generation: ",
        "incomplete_generation": "Incomplete generation: ",
    }.get(error.tgi_kind, "")
    return {"error": prefix + error.message, "error_type": error.tgi_kind}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    message = error.message
    if isinstance(error, TooManyTokens):  # coding agents read these words, and shorten the conversation
        most = min(error.details["n_ctx"], error.details["n_prompt_tokens"]) - 1  # one is for the answer
        message = f"prompt is too long: {error.details['n_prompt_tokens']} tokens > {most} maximum"
    return {
        "type": "error",
        "error": {"type": error.anthropic_kind, "message": message},
        "request_id": error.request_id,
    }


def error_response(error: ApiError, path: str) -> Response:
    """Return the error response in the format of the API that `path` belongs to."""
    headers = error.headers | _retry_headers(error)
    if path in ANTHROPIC_PATHS:
        error.request_id = error.request_id or f"req_{uuid.uuid4().hex}"
        headers["request-id"] = error.request_id
        return json_response(anthropic_error(error), status=error.anthropic_status or error.status, headers=headers)
    if path in TGI_PATHS:
        return json_response(tgi_error(error), status=error.tgi_status or error.status, headers=headers)
    return json_response(openai_error(error), status=error.status, headers=headers)


def _retry_headers(error: ApiError) -> dict[str, str]:
    """Return what clients read to decide whether they send the request again, and when."""
    headers: dict[str, str] = {}
    if error.should_retry is not None:
        headers["x-should-retry"] = "true" if error.should_retry else "false"
    if error.retry_seconds is not None:
        headers["retry-after-ms"] = str(math.ceil(1000 * error.retry_seconds))
    return headers


def as_api_error(error: Exception) -> ApiError:
    """Return an ApiError as it is, logged if it is the server's; log any other exception and return an error with the
    id of the log entry.

    The log has the type and the traceback but not the message, which may contain prompt text.
    """
    if isinstance(error, ApiError):
        log_failure(error)
        return error
    error_id = uuid.uuid4().hex[:12]
    frames = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    log.error("internal error %s: %s\n%s", error_id, type(error).__qualname__, frames)
    return Internal(error_id)


def log_failure(error: ApiError) -> None:
    """Log an error with a status of 500 or more: its request, and why."""
    if error.status >= 500 and not isinstance(error, Internal):
        log.warning("request %s: %s, %s", logged_id(error.request_id), error.status, error.message)


_CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=@\-]{1,128}")
_client_id: ContextVar[str] = ContextVar("client_id", default="")


def take_client_id(given: str) -> str:
    """Take the `x-request-id` of the request that is being handled, for its answer and the log; return it, or "" if it
    is none."""
    known = given if _CLIENT_ID.fullmatch(given) else ""
    _client_id.set(known)
    return known


def logged_id(request_id: str | None) -> str:
    """Return a request's id for the log, with the client's own."""
    own = request_id or "without an id"
    return f"{own} (x-request-id {_client_id.get()})" if _client_id.get() else own


_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}


def event_json(value: Any) -> bytes:
    """Return JSON on one line. Unicode line ends are escaped: clients such as Hugging Face's split lines at them."""
    data = written_numbers.as_bytes(value)
    if data.isascii():
        return data
    for end, escaped in _LINE_ENDS.items():
        if end in data:  # can occur only inside a JSON string
            data = data.replace(end, escaped)
    return data


T = TypeVar("T")


async def _gone(receive: Receive) -> None:
    """Return when the client has closed its connection. The body must have been read already."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. Cancels it and raises ClientGone if the client disconnects first."""
    doing = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((doing, watching), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientGone("The client went away.")
    finally:
        for task in (doing, watching):
            task.cancel()
        await asyncio.gather(doing, watching, return_exceptions=True)


SILENT_SECONDS = 10.0  # proxies drop a connection on which nothing comes for 30 to 60 s
COMMENT = b": waiting\n\n"  # which clients skip


class EventStream(Response):
    """A response of server-sent events. `scope` stays open until the last one is sent or the client disconnects."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        scope: AbstractAsyncContextManager[Any],
        headers: Mapping[str, str],
        request_id: str,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        self._events = events
        self._scope = scope
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._scope:
            try:
                await while_connected(receive, self._send(send))
            except ClientGone:
                gone_clients.log(f"request {logged_id(self._request_id)}: 499, the client went away during the stream")

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        num_sent = 0
        is_sending = False

        async def keep_alive() -> None:
            """Send a comment whenever there was no event for a while, as for a request that waits in the queue."""
            known = -1
            while True:
                known = num_sent
                await asyncio.sleep(SILENT_SECONDS)
                if num_sent == known and not is_sending:
                    await send({"type": "http.response.body", "body": COMMENT, "more_body": True})

        silence = asyncio.create_task(keep_alive())
        try:
            async with aclosing(self._events) as events:
                async for chunk in events:
                    is_sending = True
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    is_sending = False
                    num_sent += 1
        finally:
            silence.cancel()
            await asyncio.gather(silence, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
