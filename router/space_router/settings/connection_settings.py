"""Connection limits: part of the group `HTTP and gRPC` of `ServeConfig`."""

from dataclasses import dataclass

from space_router.settings import parse
from space_router.settings.setting import setting

_GROUP = "HTTP and gRPC"


@dataclass(frozen=True)
class ConnectionSettings:
    """Limits of sizes and times of client connections."""

    max_connections: int = setting(
        4096,
        _GROUP,
        "most HTTP connections at once, and most gRPC connections and calls; a further one takes the place of the HTTP "
        "connection that is idle longest; where none is, 503 with Retry-After (gRPC: UNAVAILABLE) and a closed "
        "connection, but probes and scrapers are still answered. Each takes an open file",
        parse.whole(1, 1_000_000),
        "CONNECTIONS",
    )
    max_body: int = setting(
        4 * 1024**2,
        _GROUP,
        "largest request body, in bytes (KiB, MiB allowed); the default holds a prompt of about a million tokens",
        parse.size,
        "SIZE",
    )
    max_header: int = setting(
        32 * 1024,
        _GROUP,
        "most bytes of a request's first line and headers together, beyond them 431; proxies send a few KiB",
        parse.size,
        "SIZE",
    )
    receive_timeout: float = setting(
        30.0,
        _GROUP,
        "seconds that a client has to send a request's headers, and as many again for its body; beyond them 408. The "
        "largest body takes so long at 140 KiB/s",
        parse.seconds(0.1),
        "SECONDS",
    )
    keep_alive: float = setting(
        75.0,
        _GROUP,
        "seconds for which a connection is kept without a request. More than a load balancer in front keeps its own "
        "(60 s is usual), which would else send a request into a connection that is being closed: 502",
        parse.seconds(0.1),
        "SECONDS",
    )
    slow_reader_timeout: float = setting(
        60.0,
        _GROUP,
        "seconds for which a client may leave what was sent to it unread: its request gets no more pages meanwhile, "
        "then its connection is cut (spaceserve_slow_readers_cut_total)",
        parse.seconds(0.1),
        "SECONDS",
    )
    client_buffer: int = setting(
        256 * 1024,
        _GROUP,
        "bytes that the system may hold for one connection, HTTP or gRPC, that does not read; less feels a slow reader "
        "earlier, more sends long log-probabilities faster over far networks",
        parse.size,
        "SIZE",
    )
