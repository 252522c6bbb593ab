"""The error for unsupported or broken GGUF files."""

from __future__ import annotations


class GgufError(Exception):
    """The file cannot be read or served; the message names what is unsupported or broken, and what to do."""
