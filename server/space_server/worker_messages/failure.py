"""What a client is told of a sequence that failed."""

from __future__ import annotations

TOO_LARGE = (
    "There is not enough memory on the device for the sequence's step, even alone. Send a shorter prompt, or start the "
    "worker with a smaller --kv-memory or --prefill-budget."
)


def failure_message(what: str, error: Exception) -> str:
    """One line: what failed, and why as far as the error's own first line says."""
    line = str(error).partition("\n")[0][:200]
    return f"{what}: {type(error).__name__}: {line}"
