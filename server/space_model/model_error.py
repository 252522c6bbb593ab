"""Why a checkpoint is not served. Each message names the cause, the value, and the cure where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ModelError(Exception):
    """A checkpoint that cannot be loaded."""


class CheckpointNotFound(ModelError):
    """There is nothing at the path, or a file is missing."""


class UnsupportedModel(ModelError):
    """The architecture needs something that this server does not do."""


class InvalidSpaceSection(ModelError):
    """The masks or the draft head that the checkpoint (or a flag) declares do not fit it."""


class InvalidSetting(ModelError):
    """A setting given to load_model that this checkpoint or machine cannot have."""


@contextmanager
def malformed_is_unsupported() -> Iterator[None]:
    """A checkpoint's files may say anything: what Python says to that is a reason to refuse it, and no crash.

    Memory that is not there is another matter.
    """
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, OSError) as error:
        raise UnsupportedModel(_said(error)) from error
    except RuntimeError as error:
        if type(error) not in (RuntimeError, RecursionError, NotImplementedError):  # torch's own, such as out of memory
            raise
        raise UnsupportedModel(_said(error)) from error


def _said(error: Exception) -> str:
    words = " ".join(str(error).split())[:300]
    return f"A file of the checkpoint says what cannot be: {type(error).__name__}: {words}. Fetch or convert it again."
