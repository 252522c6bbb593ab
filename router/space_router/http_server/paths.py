"""Which paths need no key, which generate text, and the key a request came with."""

from starlette.requests import Request

from space_router.web_ui.files import PAGE_FILES

OPEN_PATHS = frozenset(
    {"/health", "/readyz", "/ping", "/livez", "/startupz", "/version", "/metrics", "/docs", "/openapi.json"}
)
"""What probes, scrapers and readers of the documentation reach without a key."""

GENERATING_PATHS = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate", "/generate_stream", "/", "/invocations"}
)
"""Where a POST asks for text: what an API key's limits are about, and what a full queue refuses unread."""


def is_open(path: str, method: str) -> bool:
    """Needs no key. The page asks for one itself; `POST /` is not the page."""
    return path in OPEN_PATHS or (method in ("GET", "HEAD") and path in PAGE_FILES)


def key_of(request: Request) -> str:
    """The name of the API key that a request came with, a hash of it; "" where the server has no keys."""
    name: str = request.scope.get("spaceserve.key", "")
    return name
