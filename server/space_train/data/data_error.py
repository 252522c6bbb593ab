"""Why training data is not used. Each message names the place, the value, and the cure where there is one."""

from __future__ import annotations


class DataError(Exception):
    """Training data that cannot be used."""


class SourceNotFound(DataError):
    """There is nothing at the path, and the hub has no such dataset or split."""


class BadRecord(DataError):
    """A record that is broken, or is in no known form, or in another form than its file."""


class UnusableTemplate(DataError):
    """A chat template that does not exist, or does not render a conversation."""


class UnusableTokenizer(DataError):
    """A tokenizer whose ids do not do for training this model."""


class NothingToLearn(DataError):
    """Everything that was read is empty, or all that it teaches was cut away."""
