"""JSON responses and errors, in the format of the API that the path belongs to."""

import logging
import traceback
import uuid
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from space_router.errors import ApiError, Internal

log = logging.getLogger(__name__)

TGI_PATHS = frozenset({"/", "/generate", "/generate_stream", "/info", "/tokenize", "/chat_tokenize", "/invocations"})
"""Paths whose errors have TGI's format."""


def answer(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, media_type="application/json")


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


def error_answer(error: ApiError, path: str) -> Response:
    """Return the error response in the format of the API that `path` belongs to."""
    if path in TGI_PATHS:
        return answer(tgi_error(error), status=error.tgi_status or error.status, headers=error.headers)
    return answer(openai_error(error), status=error.status, headers=error.headers)


def unforeseen(error: Exception) -> Internal:
    """Log an unexpected exception and return an error with the id of the log entry.

    The log has the type and the traceback but not the message, which may contain prompt text.
    """
    error_id = uuid.uuid4().hex[:12]
    frames = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    log.error("internal error %s: %s\n%s", error_id, type(error).__qualname__, frames)
    return Internal(error_id)
