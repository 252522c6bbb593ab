"""Which paths need no API key, which generate text, and the key that a request carries."""

from starlette.requests import Request

from space_router.web_ui.files import PAGE_FILES

OPEN_PATHS = frozenset(
    {"/health", "/readyz", "/ping", "/livez", "/startupz", "/version", "/metrics", "/docs", "/openapi.json"}
)
"""Paths for probes, metric scrapers and the documentation; they need no API key."""

GENERATING_PATHS = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate", "/generate_stream", "/", "/invocations"}
)
"""A POST to these paths generates text. API key limits apply, and a full queue refuses it before the body is read."""


def is_open(path: str, method: str) -> bool:
    """Return whether the path needs no API key. The web page (`GET /`) asks for a key itself; `POST /` needs one."""
    return path in OPEN_PATHS or (method in ("GET", "HEAD") and path in PAGE_FILES)


def key_of(request: Request) -> str:
    """Return the name of the request's API key (a hash of the key), or "" if the server has no keys."""
    name: str = request.scope.get("spaceserve.key", "")
    return name
