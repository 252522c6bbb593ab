"""Why a GGUF file is not served."""

from __future__ import annotations


class GgufError(Exception):
    """The file cannot be read or served; the message names what is unsupported or broken, and the cure."""
