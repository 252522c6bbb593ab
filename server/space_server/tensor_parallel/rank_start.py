"""Starts a worker of several ranks: rank 0 with its followers, or a follower."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NoReturn

import torch
from space_common.worker_settings import WorkerSettings
from space_model.networks.tensor_parallel import Ranks
from space_model.space_model import SpaceModel

from space_server.machine.memory import free_bytes
from space_server.tensor_parallel.follower import follow
from space_server.tensor_parallel.lead_model import TensorParallelLeader
from space_server.tensor_parallel.rank_place import Followers, RankPlace, followers
from space_server.tensor_parallel.ranks import RankGroup, end_process

Load = Callable[[Ranks, str], SpaceModel]
"""Loads a rank's part of the model on this device."""


@contextmanager
def leading(
    config: WorkerSettings,
    arguments: Sequence[str],
    place: RankPlace,
    load: Load,
    lost: Callable[[str], NoReturn] = end_process,
) -> Iterator[TensorParallelLeader]:
    """Run rank 0 of a complete group. The followers are released at the end of the block.

    `lost`: called when the ranks cannot continue together.
    """
    group = RankGroup(0, place.size, watchdog=config.rank_timeout, lost=lost)
    device = place.device(config.device)
    with ExitStack() as stack:
        store = place.store()
        others = Followers([], group.lost)
        if place.starts_others:
            others = stack.enter_context(followers(arguments, place, store.port, group.lost))
        model = load(group, device)
        group.join(store, model.facts.device, others.check)
        lead = TensorParallelLeader(model, group, free=partial(_free_bytes, model, place), alive=others.check)
        try:
            yield lead
        except BaseException:
            group.abandon()
            lead.abandon()
            raise
        others.leaving = True
        lead.end()
        group.leave()


def following(config: WorkerSettings, place: RankPlace, load: Load) -> None:
    """Run another rank until rank 0 sends END."""
    group = RankGroup(place.rank, place.size, watchdog=config.rank_timeout)
    device = place.device(config.device)
    store = place.store()
    model = load(group, device)
    group.join(store, model.facts.device)
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
    ):  # rank 0 handles signals: it finishes running sequences and sends END
        signal.signal(number, signal.SIG_IGN)
    follow(model, group, partial(_free_bytes, model, place))
    group.leave()


def _free_bytes(model: SpaceModel, place: RankPlace) -> int:
    """Bytes free for this rank; ranks on one machine's CPU share its memory."""
    device: torch.device = model.facts.device
    return free_bytes(device) // (place.size if device.type == "cpu" else 1)
