"""Writing to stdout without failing if it is a full disk or a closed pipe."""

import contextlib
import sys


def say(line: str) -> None:
    """Write and flush one line to stdout; write errors are ignored."""
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def let_go() -> None:
    """Drop unwritable output before exit; Python would turn the error into an exit code."""
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except (OSError, ValueError, AttributeError):
            setattr(sys, name, None)
