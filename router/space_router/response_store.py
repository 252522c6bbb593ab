"""Stored responses, for `previous_response_id`: in memory or in an SQLite file, bounded in bytes."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from space_router.errors import ConfigError
from space_router.text import written_numbers

log = logging.getLogger(__name__)

MEMORY = "memory"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT NOT NULL,
    owner TEXT NOT NULL,
    used INTEGER NOT NULL,  -- in order of use
    size INTEGER NOT NULL,
    content BLOB NOT NULL,
    PRIMARY KEY (id, owner)
);
CREATE INDEX IF NOT EXISTS responses_used ON responses (used);
"""


VERSION = 1
"""Of the file's content, in SQLite's `user_version`; files from before it was written have the same content."""

_NEXT = "(SELECT COALESCE(MAX(used), 0) + 1 FROM responses)"


class StoredResponse(NamedTuple):
    """A response and the conversation up to its end, as items of an `input`."""

    response: dict[str, Any]
    items: list[Any]


class ResponseStore:
    """Responses by id and the API key that made them. The least recently used are dropped beyond `max_bytes`."""

    def __init__(self, place: str, max_bytes: int) -> None:
        """`place`: `memory`, or a file's path. Raises ConfigError if the file cannot be used."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        path = ":memory:" if place == MEMORY else str(Path(place).expanduser())
        try:
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            found: int = self._database.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, VERSION):
                log.warning(
                    "%s has responses of version %d, not %d: it is left as it is, and responses are kept in memory "
                    "until --response-store names another file",
                    path,
                    found,
                    VERSION,
                )
                self._database.close()
                self._database = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
            self._database.execute(f"PRAGMA user_version={VERSION}")
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.executescript(_SCHEMA)
            self._size: int = self._database.execute("SELECT COALESCE(SUM(size), 0) FROM responses").fetchone()[0]
        except sqlite3.Error as error:
            raise ConfigError(f"--response-store={place!r}: {error}. Give a file that can be written.") from None

    async def get(self, id_: str, owner: str) -> StoredResponse | None:
        """Return a response, or None if there is none of this id that the key named `owner` made."""
        return await asyncio.to_thread(self._get, id_, owner)

    async def put(self, id_: str, owner: str, stored: StoredResponse) -> bool:
        """Keep a response. Returns False, with a line in the log, if the file cannot be written."""
        try:
            return await asyncio.to_thread(self._put, id_, owner, stored)
        except sqlite3.Error as error:
            log.warning("response %s is not stored: %s", id_, error)
            return False

    async def delete(self, id_: str, owner: str) -> bool:
        """Drop a response; return whether there was one."""
        return await asyncio.to_thread(self._delete, id_, owner)

    def close(self) -> None:
        self._database.close()

    def _get(self, id_: str, owner: str) -> StoredResponse | None:
        with self._lock:
            found = self._database.execute(
                "SELECT content FROM responses WHERE id = ? AND owner = ?", (id_, owner)
            ).fetchone()
            if found is None:
                return None
            self._database.execute(f"UPDATE responses SET used = {_NEXT} WHERE id = ? AND owner = ?", (id_, owner))
        return StoredResponse(*written_numbers.loads(zlib.decompress(found[0])))

    def _put(self, id_: str, owner: str, stored: StoredResponse) -> bool:
        content = zlib.compress(written_numbers.as_bytes(list(stored)), 1)
        if len(content) > self._max_bytes:
            log.warning("response %s is not stored: it has %d bytes, above --response-store-size", id_, len(content))
            return False
        with self._lock:
            self._remove(id_, owner)
            self._database.execute(
                f"INSERT INTO responses VALUES (?, ?, {_NEXT}, ?, ?)", (id_, owner, len(content), content)
            )
            self._size += len(content)
            while self._size > self._max_bytes:
                oldest = self._database.execute("SELECT id, owner FROM responses ORDER BY used LIMIT 1").fetchone()
                self._remove(*oldest)
        return True

    def _delete(self, id_: str, owner: str) -> bool:
        with self._lock:
            found = self._database.execute("SELECT 1 FROM responses WHERE id = ? AND owner = ?", (id_, owner))
            if found.fetchone() is None:
                return False
            self._remove(id_, owner)
            return True

    def _remove(self, id_: str, owner: str) -> None:
        found = self._database.execute(
            "DELETE FROM responses WHERE id = ? AND owner = ? RETURNING size", (id_, owner)
        ).fetchall()
        self._size -= sum(size for (size,) in found)
