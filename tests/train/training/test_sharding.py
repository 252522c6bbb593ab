"""What cannot be spread over processes is refused by name. (That spreading changes no result: test_processes.)"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from doubles.training import rows_for, run, tiny_plan
from space_model.testing import tiny_checkpoint
from space_train.data.train_batch import train_batch
from space_train.networks.trainee import Trainee
from space_train.train_plan import InvalidPlan, Method
from space_train.training import sharding
from space_train.training.sharding import SWITCH, check_can_shard, check_parts, shard_like, take_request, whole
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def test_a_request_is_heard_and_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "true")
    assert take_request()
    assert SWITCH not in os.environ
    assert not take_request()


def test_frozen_bases_and_muon_are_refused() -> None:
    check_can_shard(tiny_plan(Method.FULL))
    with pytest.raises(InvalidPlan, match="Method gated-lora shards nothing, its base is frozen: start it without"):
        check_can_shard(tiny_plan())
    with pytest.raises(InvalidPlan, match="Muon needs whole matrices"):
        check_can_shard(tiny_plan(Method.FULL, optimiser="muon"))


def test_parts_with_other_passes_than_the_others_are_refused() -> None:
    plan = tiny_plan(Method.FULL, ar_share=0.5)
    data = rows_for(plan)
    check_parts([train_batch(data, plan, first, 2) for first in (0, 2)])
    with pytest.raises(InvalidPlan, match="every part of an update needs rows with and without masks"):
        check_parts([train_batch(data, plan, first, 1) for first in (0, 1)])


def test_what_is_whole_already_stays_as_it_is() -> None:
    tensor = torch.arange(3.0)
    tree = {"a": [tensor, {"b": 2}], "c": "text"}
    assert whole(tree, keep=True) == tree
    assert shard_like(tensor, torch.nn.Parameter(torch.zeros(3))) is tensor


def test_what_is_put_together_is_kept_where_it_is_asked_for() -> None:
    """A process that writes nothing takes part, and holds no copy of the model."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        tensor = torch.arange(4.0)
        tree = {"a": [distribute_tensor(tensor, init_device_mesh("cpu", (1,)), [Shard(0)])], "b": 2}
        kept = whole(tree, keep=True)
        assert torch.equal(kept["a"][0], tensor)
        assert whole(tree, keep=False) == {"a": [None], "b": 2}
    finally:
        distributed.destroy_process_group()


class Seen(Exception):
    """The test has what it wants."""


def test_weights_that_are_spread_were_on_no_device_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[str] = set()

    def shard(trainee: Trainee, *_: Any) -> None:
        found.update(parameter.device.type for parameter in trainee.parameters())
        raise Seen

    monkeypatch.setattr(sharding, "shard", shard)
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    monkeypatch.setattr(Accelerator, "device", torch.device("meta"))  # any other than where it was read
    monkeypatch.setenv(SWITCH, "true")
    with pytest.raises(Seen):
        run(tiny_checkpoint(tmp_path / "base", num_masks=0), tiny_plan(Method.FULL), tmp_path / "out")
    assert found == {"cpu"}
