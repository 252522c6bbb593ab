"""What cannot be spread over processes is refused by name. (That spreading changes no result: test_processes.)"""

import os

import pytest
import torch
from space_train.sharding import SWITCH, check_can_shard, check_parts, shard_like, take_request, whole
from space_train.testing import rows_for, tiny_plan
from space_train.train_batch import train_batch
from space_train.train_plan import InvalidPlan, Method


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
    assert whole(tree) == tree
    assert shard_like(tensor, torch.nn.Parameter(torch.zeros(3))) is tensor
