"""A stage that was killed ends as if it had not been, and training teaches what it says."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from space_train.data.rows import PackedTokens
from space_train.networks.adapters import DraftHead
from space_train.networks.network import NetworkShape, TrainNetwork
from space_train.run_folder import Measures
from space_train.train_plan import Budget, HeadForm
from space_train.training.pretrain import PretrainPlan, StagePace, bits_per_byte, pretrain

SHAPE = NetworkShape(40, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16)
OFTEN = StagePace(checkpoint=0.0, line=1e9, evaluation=1e9)
PRETRAIN = PretrainPlan(tokens_per_step=64, lengths=(16, 32), compile=False, autocast=False)


def counting(num_ids: int = 4000) -> PackedTokens:
    """Text that counts 12, 13, …, 39, 12, …: the next tokens are known, also behind a token not yet seen."""
    return PackedTokens((12 + np.arange(num_ids) % 28).astype(np.uint16), seed=0)


STREAMS = {"files": counting(), "functions": counting()}


def no_measures() -> Measures:
    return {}


def next_token(folder: Path, steps: int, stop_after: int | None = None) -> TrainNetwork:
    network = TrainNetwork(SHAPE)
    network.initialise(torch.Generator().manual_seed(0))
    budget = Budget(tokens=64 * steps)
    counters = pretrain(
        network, STREAMS, no_measures, PRETRAIN, budget, folder / "a.pt", pace=OFTEN, stop_after_steps=stop_after
    )
    assert counters.step == (steps if stop_after is None else counters.step)
    return network


def assert_equal(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_killed_and_resumed_next_token_training_equals_uninterrupted_training(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = next_token(tmp_path / "whole", steps=7)
    next_token(tmp_path / "killed", steps=7, stop_after=3)
    # What a kill in the middle of writing leaves behind.
    (tmp_path / "killed" / "a.partial").write_bytes(b"half a checkpoint")
    assert_equal(whole, next_token(tmp_path / "killed", steps=7))


def test_a_finished_stage_is_not_trained_again(tmp_path: Path) -> None:
    first = next_token(tmp_path, steps=3)
    written = (tmp_path / "a.pt").stat().st_mtime_ns
    assert_equal(first, next_token(tmp_path, steps=3))
    assert (tmp_path / "a.pt").stat().st_mtime_ns == written


def test_training_teaches_the_next_token(tmp_path: Path) -> None:
    network = next_token(tmp_path, steps=120)
    held_out, bytes_of_id = counting().windows(0, 4, 32), torch.full((40,), 2)
    measures = bits_per_byte(network, held_out, bytes_of_id)
    assert measures["loss"] < 2.0  # ln 28 = 3.3 at first
    assert measures["bits_per_byte"] == pytest.approx(measures["loss"] / np.log(2) / 2, rel=1e-5)


def test_a_head_corrects_the_hidden_row_by_itself_and_the_scaled_embedding_or_by_that_alone() -> None:
    head = DraftHead(2, width=1, embedding_scale=8.0)
    with torch.no_grad():
        head.w1.copy_(torch.tensor([[1.0, 0.0, 0.0, 0.5]]))
        head.w2.copy_(torch.tensor([[2.0], [-1.0]]))
        row = head(torch.tensor([0.25, 3.0]), torch.tensor([9.0, 0.1]))
    inner = torch.nn.functional.silu(torch.tensor(0.25 + 0.5 * 8 * 0.1))
    torch.testing.assert_close(row, torch.tensor([0.25, 3.0]) + torch.stack((2 * inner, -inner)))
    head = DraftHead(2, width=1, embedding_scale=8.0, form=HeadForm.LOW_RANK)
    with torch.no_grad():
        head.w1.copy_(torch.tensor([[0.5, 0.25]]))
        head.w2.copy_(torch.tensor([[2.0], [-1.0]]))
        row = head(torch.tensor([0.25, 3.0]), torch.tensor([0.1, 0.2]))
    inner = 0.5 * 8 * 0.1 + 0.25 * 8 * 0.2
    torch.testing.assert_close(row, torch.tensor([0.25 + 2 * inner, 3.0 - inner]))


def test_loops_are_unlearnt_beside_the_next_token(tmp_path: Path) -> None:
    network = TrainNetwork(SHAPE)
    network.initialise(torch.Generator().manual_seed(0))
    plan = replace(PRETRAIN, loops_every=1, loop_length=64, loop_tokens=128)
    lines = np.zeros(40, dtype=np.bool_)
    checkpoint = tmp_path / "c.pt"
    counters = pretrain(network, STREAMS, no_measures, plan, Budget(tokens=600), checkpoint, ends_line=lines)
    # Every update of 64 ids also takes 128 ids of loops.
    assert counters.num_tokens == counters.step * (64 + 128)
