"""A running server, as `spaceserve chat` and `spaceserve workers` ask it: plain HTTP, one connection per request."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from space_common.files import api_key_in
from space_common.server_tls import client_context, tls_trouble

URL = "http://127.0.0.1:8080"
CONNECT_SECONDS = 10.0  # for a server to accept a connection, and to answer anything but a generation
KEY_VARIABLE = "SPACESERVE_API_KEY"
CACERT = "with https, authorities that are trusted beside the system's, PEM [else: SSL_CERT_FILE]"


class ChatError(Exception):
    """What the terminal shows instead of an answer; the message names the cure."""


@dataclass(frozen=True)
class ServerClient:
    """Where the server is, and the key it is asked with."""

    url: str
    key: str | None = field(default=None, repr=False)
    cacert: Path | None = None  # certificates of further authorities, for https

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
        except ValueError:
            known = False
        if not known:
            raise ChatError(f"--url is {self.url!r}; it must be like http://127.0.0.1:8080.")

    def info(self) -> dict[str, Any]:
        """Return the server's /info. Raises ChatError."""
        with self._answer("/info", None, CONNECT_SECONDS) as answer:
            try:
                value: dict[str, Any] = json.loads(answer.read())
                value["speculation"]["default"]
            except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
                raise ChatError(f"What answers at {self.url} is no spaceserve: its /info is something else.") from None
        return value

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer of another route, a POST if there is a body. Raises ChatError."""
        with self._answer(path, body, CONNECT_SECONDS) as answer:
            try:
                value: dict[str, Any] = json.loads(answer.read())
            except (ValueError, OSError, http.client.HTTPException) as error:
                raise ChatError(f"{self.url}{path} answered something else than JSON ({error}).") from None
        return value

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        """Yield the events of an answer; closing the iterator closes the connection, which ends the request there.

        Raises ChatError, also if the stream ends before it is complete.
        """
        with self._answer(path, body, None) as answer:
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
                raise ChatError(f"The connection to {self.url} was lost ({error}).") from None
            except ValueError:  # half an event
                pass
            raise ChatError(f"{self.url} ended the answer in the middle.")

    def _connection(self, host: str, port: int | None, encrypted: bool) -> http.client.HTTPConnection:
        if not encrypted:
            return http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS)
        try:
            context = client_context(self.cacert)
        except OSError:
            raise ChatError(f"--cacert {self.cacert}: there is no certificate in it.") from None
        return http.client.HTTPSConnection(host, port, timeout=CONNECT_SECONDS, context=context)

    @contextmanager
    def _answer(self, path: str, body: Any, seconds: float | None) -> Iterator[http.client.HTTPResponse]:
        """Yield a successful answer, its connection open for the block; `seconds`: for each read of it."""
        parts = urlsplit(self.url)
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        content = None if body is None else json.dumps(body).encode()
        if content is not None:
            headers["Content-Type"] = "application/json"
        with closing(self._connection(parts.hostname or "", parts.port, parts.scheme == "https")) as connection:
            try:
                connection.connect()
            except (OSError, UnicodeError) as error:
                if trouble := tls_trouble(error):
                    raise ChatError(f"{self.url} answers, but {trouble}") from None
                raise ChatError(
                    f"No server answers at {self.url} ({getattr(error, 'strerror', None) or error}). "
                    "Start one with `spaceserve serve`, or say with --url where it is."
                ) from None
            connection.sock.settimeout(seconds)
            method = "GET" if content is None else "POST"
            try:
                connection.request(method, parts.path.rstrip("/") + path, content, headers)
                answer = connection.getresponse()
                refusal = b"" if answer.status == 200 else answer.read(65536)
            except (OSError, http.client.HTTPException) as error:
                raise ChatError(f"{self.url} took the request and did not answer ({error}).") from None
            if answer.status == 401:
                raise ChatError(
                    "The server wants an API key that it knows. Put the key into a file and give --api-key-file FILE, "
                    f"or set {KEY_VARIABLE}."
                )
            if answer.status != 200:
                try:
                    message = _message(json.loads(refusal))
                except ValueError:
                    message = f"{self.url}{path} answered {answer.status} {answer.reason}."
                raise ChatError(message)
            yield answer


def _message(answer: Any) -> str:
    """Return the server's own words, in OpenAI's shape or TGI's. Raises ValueError if there are none."""
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    if not isinstance(message, str):
        raise ValueError("an error without a message")
    return message


def own_key(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The key from a file's first word or from the environment; never from a flag, which every process can read."""
    if file is None:
        return environment.get(KEY_VARIABLE, "").strip() or None
    try:
        return api_key_in(file)
    except ValueError as error:
        raise ChatError(str(error)) from None
