"""Error messages of failed sequences, as clients see them."""

from __future__ import annotations

TOO_LARGE = (
    "There is not enough memory on the device for the sequence's step, even alone. Send a shorter prompt, or start the "
    "worker with a smaller --kv-memory or --prefill-budget."
)


def failure_message(what: str, error: Exception) -> str:
    """Return one line: what failed, and the first line of the error."""
    line = str(error).partition("\n")[0][:200]
    return f"{what}: {type(error).__name__}: {line}"
