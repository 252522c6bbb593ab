"""Errors of training data. Each message names the place, the value and, if there is one, the cure."""

from __future__ import annotations


class DataError(Exception):
    """Training data that cannot be used."""


class SourceNotFound(DataError):
    """The path does not exist, and the hub has no such dataset or split."""


class BadRecord(DataError):
    """A record that is malformed, in no known form, or in another form than the rest of its file."""


class UnusableTemplate(DataError):
    """A chat template that does not exist, or does not render a conversation."""


class UnusableTokenizer(DataError):
    """A tokenizer whose ids do not fit this model."""


class NothingToLearn(DataError):
    """All records are empty, or all their targets were cut off."""
