"""`python -m chaos EXPERIMENT …`: run one experiment, print its page, and exit with 0 if nothing went wrong, else 1."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping

from perf import harness
from space_common.process import exit_on_sigterm

EXPERIMENTS: Mapping[str, tuple[str, str]] = {
    "faults": ("chaos.faults", "kill, stop and crash the workers under load"),
    "hosts": ("chaos.hosts", "workers on hosts of their own: killed, cut off and restarted"),
    "crowd": ("chaos.crowd", "slow readers beside fast ones, and ten times more requests than can be served"),
    "overload": ("chaos.overload", "API keys of unequal greed at half to ten times the capacity, and who gets what"),
    "soak": ("chaos.soak", "mixed load for an hour: does memory, latency or anything else grow"),
    "day": ("chaos.day", "everything at once for hours: workers, network, disk, clock, memory and clients"),
}

parser = functools.partial(harness.parser, prog="chaos", modules=EXPERIMENTS)
main = functools.partial(harness.main, prog="chaos", modules=EXPERIMENTS)


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
