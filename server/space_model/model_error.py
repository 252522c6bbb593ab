"""Errors for checkpoints that cannot be served. Messages name the cause, the value, and the cure if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ModelError(Exception):
    """A checkpoint that cannot be loaded."""


class CheckpointNotFound(ModelError):
    """The path does not exist, or a file is missing."""


class UnsupportedModel(ModelError):
    """The model needs something that this server does not support."""


class InvalidSpaceSection(ModelError):
    """The masks or the draft head, as declared by the checkpoint or a flag, do not fit it."""


class InvalidLora(ModelError):
    """A LoRA adapter that cannot be served with this model."""


class InvalidSetting(ModelError):
    """A load_model setting that this checkpoint or machine does not support."""


@contextmanager
def malformed_is_unsupported() -> Iterator[None]:
    """Convert Python errors caused by malformed checkpoint files to UnsupportedModel. Out-of-memory errors pass
    through."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, OSError) as error:
        raise UnsupportedModel(_said(error)) from error
    except RuntimeError as error:
        if type(error) not in (RuntimeError, RecursionError, NotImplementedError):
            raise  # torch's subclasses, such as out of memory
        raise UnsupportedModel(_said(error)) from error


def _said(error: Exception) -> str:
    words = " ".join(str(error).split())[:300]
    return f"A file of the checkpoint says what cannot be: {type(error).__name__}: {words}. Fetch or convert it again."
