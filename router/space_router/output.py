"""What this process says on its own output, which may be a file on a full disk or a pipe that nobody reads."""

import contextlib
import sys


def say(line: str) -> None:
    """One line on stdout, at once; where it cannot be written it is lost, and nothing else is."""
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def let_go() -> None:
    """At the end: give up what could not be written, for Python would make an exit code of it."""
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except (OSError, ValueError, AttributeError):
            setattr(sys, name, None)
