"""A running server as `spaceserve chat` talks to it: plain HTTP, one connection per request."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CONNECT_SECONDS = 10.0
"""For a server that is there to take a connection, or to say what it is."""

KEY_VARIABLE = "SPACESERVE_API_KEY"


class ChatError(Exception):
    """What the terminal shows instead of an answer; the message says what to do about it."""


class NoServer(ChatError):
    """Nobody answers at the URL."""


class BrokenAnswer(ChatError):
    """The stream ended before its end: what was shown is not the whole answer."""


@dataclass(frozen=True)
class ChatServer:
    """Where the server is, and the key it is asked with."""

    url: str
    key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
        except ValueError:
            known = False
        if not known:
            raise ChatError(f"--url is {self.url!r}; it must be like http://127.0.0.1:8080.")

    def info(self) -> dict[str, Any]:
        """What it serves. Raises ChatError."""
        with closing(self._connect(CONNECT_SECONDS)) as connection:
            answer = self._answer(connection, "GET", "/info")
            try:
                value: dict[str, Any] = json.loads(answer.read())
                value["speculation"]["default"]
            except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
                raise ChatError(f"What answers at {self.url} is no spaceserve: its /info is something else.") from None
            return value

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer of another route, a POST where there is a body. Raises ChatError."""
        with closing(self._connect(CONNECT_SECONDS)) as connection:
            sent = None if body is None else json.dumps(body).encode()
            answer = self._answer(connection, "GET" if body is None else "POST", path, sent)
            try:
                value: dict[str, Any] = json.loads(answer.read())
            except (ValueError, OSError, http.client.HTTPException) as error:
                raise BrokenAnswer(f"{self.url}{path} answered something else than JSON ({error}).") from None
            return value

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        """The events of an answer; closing the iterator closes the connection, which ends the request there.

        Raises ChatError, and BrokenAnswer where the stream ends before it is complete.
        """
        with closing(self._connect(None)) as connection:
            answer = self._answer(connection, "POST", path, json.dumps(body).encode())
            try:
                for line in answer:
                    content = line.strip()
                    if content == b"data: [DONE]":
                        return
                    if content.startswith(b"data:"):
                        event: dict[str, Any] = json.loads(content[5:])
                        if "error" in event:
                            raise ChatError(_message(event))
                        yield event
            except (OSError, http.client.HTTPException) as error:
                raise BrokenAnswer(f"The connection to {self.url} was lost ({error}).") from None
            except ValueError:  # half an event
                pass
            raise BrokenAnswer(f"{self.url} ended the answer in the middle.")

    def _connect(self, seconds: float | None) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:
            raise NoServer(
                f"No server answers at {self.url} ({getattr(error, 'strerror', None) or error}). "
                "Start one with `spaceserve serve`, or say with --url where it is."
            ) from None
        connection.sock.settimeout(seconds)
        return connection

    def _answer(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            connection.request(method, urlsplit(self.url).path.rstrip("/") + path, body, headers)
            answer = connection.getresponse()
            if answer.status == 200:
                return answer
            text = answer.read(65536)
        except (OSError, http.client.HTTPException) as error:
            raise BrokenAnswer(f"{self.url} took the request and did not answer ({error}).") from None
        if answer.status == 401:
            raise ChatError(
                "The server wants an API key that it knows. Put the key into a file and give --api-key-file FILE, or "
                "set SPACESERVE_API_KEY."
            )
        try:
            raise ChatError(_message(json.loads(text)))
        except ValueError:
            raise ChatError(f"{self.url}{path} answered {answer.status} {answer.reason}.") from None


def _message(told: Any) -> str:
    """The server's own words, in OpenAI's shape or TGI's."""
    error = told.get("error") if isinstance(told, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])
    if isinstance(error, str):
        return error
    raise ValueError("an error without a message")


def own_key(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The key from a file's first word or from the environment; never from a flag, where every process can read it."""
    if file is None:
        return environment.get(KEY_VARIABLE, "").strip() or None
    try:
        return file.expanduser().read_text(encoding="utf-8-sig").split()[0]
    except (OSError, IndexError, UnicodeError):
        raise ChatError(f"--api-key-file {file}: there is no key in it.") from None
