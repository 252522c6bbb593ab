"""A worker of several ranks from its settings: rank 0 with its followers, or one of the followers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NoReturn

import torch
from space_model.networks.tensor_parallel import Ranks
from space_model.space_model import SpaceModel

from space_server.config import WorkerConfig
from space_server.machine.memory import free_bytes
from space_server.tensor_parallel.follower import follow
from space_server.tensor_parallel.lead_model import TensorParallelLeader
from space_server.tensor_parallel.rank_place import Followers, RankPlace, followers
from space_server.tensor_parallel.ranks import RankGroup, end_process

Load = Callable[[Ranks, str], SpaceModel]
"""The model on this device, of a rank."""


@contextmanager
def leading(
    config: WorkerConfig,
    arguments: Sequence[str],
    place: RankPlace,
    load: Load,
    lost: Callable[[str], NoReturn] = end_process,
) -> Iterator[TensorParallelLeader]:
    """Rank 0 of the group, with all others there. They are let go at the end of the block.

    `lost`: where the ranks cannot go on together.
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


def following(config: WorkerConfig, place: RankPlace, load: Load) -> None:
    """One of the other ranks, until rank 0 says END."""
    group = RankGroup(place.rank, place.size, watchdog=config.rank_timeout)
    device = place.device(config.device)
    store = place.store()
    model = load(group, device)
    group.join(store, model.facts.device)
    for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 hears them, finishes what runs, and says END
        signal.signal(number, signal.SIG_IGN)
    follow(model, group, partial(_free_bytes, model, place))
    group.leave()


def _free_bytes(model: SpaceModel, place: RankPlace) -> int:
    """Of this rank's device; ranks on one machine's CPU have its memory together."""
    device: torch.device = model.facts.device
    return free_bytes(device) // (place.size if device.type == "cpu" else 1)
