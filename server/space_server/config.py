"""The worker's command line, its models' folders, and its GPU."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from pathlib import Path

import torch
from space_common import default_model
from space_common.default_model import DEFAULT_BASE
from space_common.hub import Hub, HubError, is_hub_id
from space_common.visible_gpus import VISIBLE
from space_common.worker.settings import WorkerSettings
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.draft_networks import mtp
from space_model.draft_networks.eagle_files import EagleFiles
from space_model.model_error import CheckpointNotFound, InvalidSetting
from space_model.released_adapters import AdapterFormat, split_place

from space_server.tensor_parallel import RankPlace

parse = WorkerSettings.parse


class ModelSource:
    """The configured model, its base and its adapters."""

    def __init__(self, config: WorkerSettings) -> None:
        self._model = config.model
        self._draft_model, self._draft_head = config.draft_model, config.draft_head
        self._embedding_model = config.embedding_model
        self._adapters = config.adapter
        self._hub = Hub(config.revision, config.token_file, config.download_folder, config.offline, say)
        self._folders: dict[str, Path] = {}

    def checkpoint(self) -> Checkpoint:
        """Open the model, fetching it if needed. Raises ModelError."""
        return Checkpoint.open(self._model, self.fetch)

    def draft_checkpoint(self) -> Checkpoint | None:
        """Open the model that drafts, fetching it if needed, or the model's own MTP layer; None: there is none. Raises
        ModelError."""
        if self._draft_model == mtp.NAME:
            return mtp.mtp_checkpoint(self.checkpoint())
        return None if self._draft_model is None else Checkpoint.open(self._draft_model, self.fetch)

    def draft_head(self) -> EagleFiles | None:
        """Open the EAGLE head that drafts, fetching it if needed; None: there is none. Raises ModelError."""
        if self._draft_head is None:
            return None
        if self._draft_model is not None:
            raise InvalidSetting("--draft-model and --draft-head draft in place of each other: leave one of them out.")
        return EagleFiles.open(self._draft_head, self.fetch)

    def encoder_checkpoint(self) -> Checkpoint | None:
        """Open the encoder, fetching it if needed; None: there is none. Raises ModelError."""
        return None if self._embedding_model is None else Checkpoint.open(self._embedding_model, self.fetch)

    def adapters(self) -> dict[str, str]:
        """Return each adapter's folder by name, fetching it if needed. Raises ModelError."""
        return {name: self._adapter(place) for name, place in self._adapters}

    def _adapter(self, place: str) -> str:
        """Return the adapter's folder, behind its format if `place` names one."""
        form, named = split_place(place)
        if not is_hub_id(named) or Path(named).exists():
            return place
        folder = str(self.fetch(named))
        return folder if form is AdapterFormat.SPACE else f"{form}:{folder}"

    def local_adapters(self) -> dict[str, str]:
        """Return by name the adapters that are on this machine: their folders, behind their formats as given."""
        return {name: place for name, place in self._adapters if Path(split_place(place)[1]).exists()}

    def fetch(self, model: str) -> Path:
        """Return the folder of a hub id, or the file of the default model's weights. The configured revision applies to
        the model only, not to its base, what drafts for it or adapters."""
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


_log = logging.getLogger(__name__)


def on_first_gpu(
    config: WorkerSettings,
    place: RankPlace | None,
    environment: MutableMapping[str, str],
    count: Callable[[], int] | None = None,
) -> tuple[WorkerSettings, RankPlace | None]:
    """Make the GPU of `--device`, or of this rank, the only visible one, and return both arguments adapted to it.

    Kernels, events and graphs use a thread's current device, which is GPU 0 in every new thread. Must run before torch
    initializes CUDA, which reads the variable once. `count`: returns the number of GPUs visible afterwards. Raises
    InvalidSetting if the variable leaves no such GPU, or was read already.
    """
    if place is None:
        number = config.device.removeprefix("cuda:") if config.device.startswith("cuda:") else ""
        if number.isdecimal() and int(number):
            _see(int(number), environment, count or torch.cuda.device_count)
            return replace(config, device="cuda:0"), None
    elif place.local_rank and config.device in ("auto", "cuda"):
        _see(place.local_rank, environment, count or torch.cuda.device_count)
        return config, replace(place, local_rank=0)
    return config, place


def _see(number: int, environment: MutableMapping[str, str], count: Callable[[], int]) -> None:
    """Make only this one of the visible GPUs visible."""
    seen = [name.strip() for name in environment.get(VISIBLE, "").split(",") if name.strip()]
    if VISIBLE in environment and number >= len(seen):
        raise InvalidSetting(
            f"GPU {number} is asked for; {VISIBLE}={environment[VISIBLE]} leaves {len(seen)}, counted from 0."
        )
    environment[VISIBLE] = seen[number] if seen else str(number)
    found = count()
    if found > 1:
        raise InvalidSetting(
            f"GPU {number} cannot be made the only one of this process: torch sees {found}. Start it with "
            f"{VISIBLE}={environment[VISIBLE]}."
        )
    if found:
        _log.info("this process sees GPU %d alone, as cuda:0", number)
