"""Why a checkpoint is not served. Each message names the cause, the value, and the cure where there is one."""

from __future__ import annotations


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
