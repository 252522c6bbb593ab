"""The files of the web page, read once at import. There is no build step, and nothing comes from other servers."""

import hashlib
import importlib.resources
from dataclasses import dataclass

from starlette.responses import Response

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Content type by file extension; files with other extensions are not served."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""The page may load only these files and connect only to this server."""


@dataclass(frozen=True)
class PageFile:
    """One served file."""

    path: str  # of the URL
    content_type: str
    content: bytes
    tag: str  # ETag

    def answer(self, known_tags: str | None) -> Response:
        """Return the file, or 304 if the client has it. `known_tags`: the request's If-None-Match."""
        headers = {
            "etag": self.tag,
            "cache-control": "no-cache",  # cached but always revalidated, so that a new version is seen at once
            "content-security-policy": POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }
        known = {tag.strip().removeprefix("W/") for tag in (known_tags or "").split(",")}
        if self.tag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers={**headers, "content-type": self.content_type})


def _read() -> dict[str, PageFile]:
    """Read the page's files by URL path: index.html is `/`, the others are in `/page/`."""
    found = {}
    for file in importlib.resources.files(__package__).iterdir():
        if (content_type := CONTENT_TYPES.get("." + file.name.rpartition(".")[2])) is not None:
            path, content = "/" if file.name == "index.html" else f"/page/{file.name}", file.read_bytes()
            found[path] = PageFile(path, content_type, content, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found


PAGE_FILES = _read()
