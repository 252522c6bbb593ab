"""`python -m chaos.older_worker FLAG …`: a worker that reports the protocol's minor version before this one."""

from __future__ import annotations

import sys

import space_server.__main__
import space_server.worker
from space_server.worker_messages import PROTOCOL_MINOR

if __name__ == "__main__":
    vars(space_server.worker)["PROTOCOL_MINOR"] = PROTOCOL_MINOR - 1
    sys.exit(space_server.__main__.main(sys.argv[1:]))
