"""The secret of a worker's port: router and worker prove to each other that they know it, and never send it.

A worker answers a call without a proof with a challenge, 32 fresh random bytes, and hangs up. The router calls again
with a number of its own and HMAC-SHA256(secret, "router", both numbers) in the call's metadata; the worker takes each
challenge once, and says HMAC-SHA256(secret, "worker", both numbers) in its Hello. No message of a peer that has not
proven itself is read, and none ends the session of the router that has.

A machine on the way that changes packets can pass both proofs on and take the connection over: mutual TLS prevents it.
Secrets are read again when their file changes, so they are exchanged without a restart: put the new one beside the
old one at all ends, then take the old one out.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from space_common.certificate import file_stamp

log = logging.getLogger(__name__)

SHORTEST_SECRET = 32  # characters: a recorded proof lets short ones be guessed
MAX_SECRETS = 4
NUM_BYTES = 32  # of a challenge and of a router's number
METADATA_KEY = "spaceserve-proof"
CHALLENGE_SECONDS = 30.0  # in which a challenge may be answered
MAX_CHALLENGES = 4096  # unanswered; beyond them the oldest is forgotten
LOG_SECONDS = 60.0  # between two log lines about peers without a proof
CURE = "give it --worker-secret-file, with a secret that is in the other side's file, too"


class SecretError(ValueError):
    """The file cannot be used; the message names the file and the line, never its content."""


class SecretFile:
    """Secrets that can be exchanged while the process runs. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Raises SecretError."""
        self._path = path
        self._lock = threading.Lock()
        self._seen = file_stamp(path)
        self._last = _read(path)

    def latest(self) -> tuple[bytes, ...]:
        """Return the file's secrets, 1 to `MAX_SECRETS`; those of its last usable content while it has none."""
        with self._lock:
            stamp = file_stamp(self._path)
            if stamp != self._seen:
                self._seen = stamp
                try:
                    self._last = _read(self._path)
                    log.info("the secrets in %s are used from now on", self._path)
                except SecretError as error:
                    log.warning("renewed secrets are not used yet: %s", error)
            return self._last


def _read(path: Path) -> tuple[bytes, ...]:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise SecretError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SecretError(f"{path}: is not ASCII text") from None
    found = []
    for number, line in enumerate(lines, 1):
        word = line.strip()
        if not word or word.startswith("#"):
            continue
        if len(word) < SHORTEST_SECRET or len(word.split()) != 1:
            raise SecretError(
                f"{path}, line {number}: a secret is one word of at least {SHORTEST_SECRET} characters; make one with "
                "`openssl rand -hex 32`"
            )
        found.append(word.encode())
    if not 1 <= len(found) <= MAX_SECRETS:
        raise SecretError(f"{path}: has {len(found)} secrets, one a line; it may have 1 to {MAX_SECRETS}")
    return tuple(found)


def _proof(secret: bytes, role: bytes, nonce: bytes, challenge: bytes) -> bytes:
    """Return 32 bytes; `nonce` and `challenge` have `NUM_BYTES` each, so their concatenation is unambiguous."""
    return hmac.digest(secret, b"spaceserve worker port\0" + role + b"\0" + nonce + challenge, "sha256")


class NotProven(Exception):
    """The peer is to be refused with this reason and a fresh challenge."""

    def __init__(self, reason: str, challenge: bytes) -> None:
        super().__init__(reason)
        self.reason, self.challenge = reason, challenge


class WorkerSide:
    """Challenges of one worker, and the answers to them."""

    def __init__(self, file: SecretFile, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._open: OrderedDict[bytes, float] = OrderedDict()  # unanswered challenges -> when they were made
        self._num_refused = 0  # since the last log line
        self._logged: float | None = None

    def check(self, metadata: Iterable[tuple[str, str | bytes]], peer: str) -> bytes:
        """Return the worker's own proof, for its Hello. Raises NotProven unless the call's metadata has a good one."""
        given = next((value for name, value in metadata if name == METADATA_KEY), None)
        if given is None:
            reason = f"This worker asks for the secret of its port: start the router with it ({CURE})."
            raise NotProven(reason, self._challenge())
        own = self._check(given)
        if own is None:
            self._report(peer)
            reason = f"The router has not proven that it knows this worker's secret: {CURE}."
            raise NotProven(reason, self._challenge())
        return own

    def _check(self, given: str | bytes) -> bytes | None:
        try:
            words = (given if isinstance(given, str) else given.decode("ascii")).split(" ")
            nonce, challenge, *proofs = map(bytes.fromhex, words)
        except ValueError:
            return None
        made = self._open.pop(challenge, None)
        if made is None or self._clock() - made > CHALLENGE_SECONDS or len(nonce) != NUM_BYTES:
            return None
        for secret in self._file.latest():
            wanted = _proof(secret, b"router", nonce, challenge)
            if any(hmac.compare_digest(wanted, proof) for proof in proofs[:MAX_SECRETS]):
                return _proof(secret, b"worker", nonce, challenge)
        return None

    def _challenge(self) -> bytes:
        now = self._clock()
        while self._open and (
            len(self._open) >= MAX_CHALLENGES or now - next(iter(self._open.values())) > CHALLENGE_SECONDS
        ):
            self._open.popitem(last=False)
        challenge = secrets.token_bytes(NUM_BYTES)
        self._open[challenge] = now
        return challenge

    def _report(self, peer: str) -> None:
        self._num_refused += 1
        now = self._clock()
        if self._logged is None or now - self._logged > LOG_SECONDS:
            log.warning("refused %d peers that do not know the secret, at last %s", self._num_refused, peer)
            self._num_refused, self._logged = 0, now


@dataclass(frozen=True)
class RouterProof:
    """A router's answer to one challenge."""

    metadata: tuple[tuple[str, str], ...]  # of the call that is to be let in
    _wanted: tuple[bytes, ...]

    @classmethod
    def of(cls, known: Sequence[bytes], challenge: bytes) -> RouterProof:
        """`known`: the router's secrets. Raises ValueError if the challenge is none."""
        if len(challenge) != NUM_BYTES:
            raise ValueError(f"a challenge has {NUM_BYTES} bytes, this one {len(challenge)}")
        nonce = secrets.token_bytes(NUM_BYTES)
        proofs = [_proof(secret, b"router", nonce, challenge) for secret in known]
        text = " ".join(part.hex() for part in (nonce, challenge, *proofs))
        return cls(((METADATA_KEY, text),), tuple(_proof(secret, b"worker", nonce, challenge) for secret in known))

    def is_answered_by(self, proof: bytes) -> bool:
        """Return whether the worker that says this knows one of the secrets."""
        return any(hmac.compare_digest(wanted, proof) for wanted in self._wanted)


def is_local(address: str, *, resolve: bool = True) -> bool:
    """Return whether only this machine reaches the address: a path, or a host that is loopback alone.

    An address that cannot be understood or resolved counts as open to others, and without `resolve` so does each name
    but localhost.
    """
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if not host:
        return False
    try:
        if not resolve:
            return host == "localhost" or ipaddress.ip_address(host).is_loopback
        found = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
        return bool(found) and all(ipaddress.ip_address(one).is_loopback for one in found)
    except (OSError, ValueError):  # of a name too long, too
        return False
