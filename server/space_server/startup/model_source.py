"""Resolves the worker's models: folders, and hub ids, each fetched once."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from space_common import default_model
from space_common.default_model import DEFAULT_BASE
from space_common.hub import Hub, HubError, is_hub_id
from space_common.worker_settings import WorkerSettings
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.model_error import CheckpointNotFound


class ModelSource:
    """The configured model, its base and its adapters."""

    def __init__(self, config: WorkerSettings) -> None:
        self._model = config.model
        self._adapters = config.adapter
        self._hub = Hub(config.revision, config.token_file, config.download_folder, config.offline, say)
        self._folders: dict[str, Path] = {}

    def checkpoint(self) -> Checkpoint:
        """Open the model, fetching it if needed. Raises ModelError."""
        return Checkpoint.open(self._model, self.fetch)

    def adapters(self) -> dict[str, str]:
        """Return each adapter's folder by name, fetching it if needed. Raises ModelError."""
        return {
            name: str(self.fetch(place)) if is_hub_id(place) and not Path(place).exists() else place
            for name, place in self._adapters
        }

    def fetch(self, model: str) -> Path:
        """Return the folder of a hub id, or the file of the default model's weights.

        The configured revision applies to the model only, not to its base or adapters.
        """
        if model not in self._folders:
            hub = self._hub if model == self._model else replace(self._hub, revision=None)
            try:
                self._folders[model] = default_model.fetch(hub) if model == DEFAULT_BASE else hub.fetch(model)
            except HubError as error:
                raise CheckpointNotFound(str(error)) from error
        return self._folders[model]


def say(line: str) -> None:
    """Tell the waiting parent process that the worker is busy, not failed."""
    sys.stdout.write(f"busy {line}\n")
    sys.stdout.flush()
