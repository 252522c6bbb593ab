"""A stage that was killed ends as if it had not been, and training teaches what it says."""

from pathlib import Path

import numpy as np
import pytest
import torch
from space_train.anchors import anchor_rows
from space_train.draft_head import DraftHead
from space_train.network import Network, NetworkShape
from space_train.packed_tokens import PackedTokens
from space_train.pretrain import PretrainPlan, bits_per_byte, pretrain
from space_train.sar_sft import SpacePlan, space_loss, start_masks, teacher_forced_acceptance, train_space
from space_train.schedule import Budget
from space_train.stage import Measures, Pace

SHAPE = NetworkShape(40, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16)
OFTEN = Pace(checkpoint=0.0, line=1e9, evaluation=1e9)
PRETRAIN = PretrainPlan(tokens_per_step=64, lengths=(16, 32), compile=False, autocast=False)
SPACE = SpacePlan(num_masks=3, tokens_per_step=64, lengths=(16, 32), plain_length=32, compile=False, autocast=False)


def counting(num_ids: int = 4000) -> PackedTokens:
    """Text that counts 12, 13, …, 39, 12, …: the next tokens are known, also behind a token not yet seen."""
    return PackedTokens((12 + np.arange(num_ids) % 28).astype(np.uint16), seed=0)


STREAMS = {"files": counting(), "functions": counting()}


def no_measures() -> Measures:
    return {}


def next_token(folder: Path, steps: int, stop_after: int | None = None) -> Network:
    network = Network(SHAPE)
    budget = Budget(tokens=64 * steps)
    counters = pretrain(
        network, STREAMS, no_measures, PRETRAIN, budget, folder / "a.pt", pace=OFTEN, stop_after_steps=stop_after
    )
    assert counters.step == (steps if stop_after is None else counters.step)
    return network


def masks(folder: Path, start: Network, steps: int, stop_after: int | None = None) -> tuple[Network, DraftHead]:
    network, head = Network(SHAPE), DraftHead(16, width=16)
    network.load_state_dict(start.state_dict())
    generator = torch.Generator().manual_seed(0)
    start_masks(network, 3, generator)
    head.initialise(generator)
    budget, streams = Budget(tokens=128 * steps), STREAMS | {"own": counting()}
    train_space(
        network, head, streams, no_measures, SPACE, budget, folder / "b.pt", pace=OFTEN, stop_after_steps=stop_after
    )
    return network, head


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


def test_killed_and_resumed_mask_training_equals_uninterrupted_training(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    start = next_token(tmp_path, steps=2)
    whole = masks(tmp_path / "whole", start, steps=7)
    masks(tmp_path / "killed", start, steps=7, stop_after=4)
    for one, other in zip(whole, masks(tmp_path / "killed", start, steps=7), strict=True):
        assert_equal(one, other)


def test_a_finished_stage_is_not_trained_again(tmp_path: Path) -> None:
    first = next_token(tmp_path, steps=3)
    written = (tmp_path / "a.pt").stat().st_mtime_ns
    assert_equal(first, next_token(tmp_path, steps=3))
    assert (tmp_path / "a.pt").stat().st_mtime_ns == written


def test_training_teaches_the_next_token_and_then_the_drafts_behind_it(tmp_path: Path) -> None:
    network = next_token(tmp_path, steps=120)
    held_out, bytes_of_id = counting().windows(0, 4, 32), torch.full((40,), 2)
    measures = bits_per_byte(network, held_out, bytes_of_id)
    assert measures["loss"] < 2.0  # ln 28 = 3.3 at first
    assert measures["bits_per_byte"] == pytest.approx(measures["loss"] / np.log(2) / 2, rel=1e-5)
    network, head = masks(tmp_path, network, steps=120)
    acceptance = teacher_forced_acceptance(network, head, held_out, num_masks=3)
    assert min(acceptance[f"head_{j}"] for j in (1, 2, 3)) > 0.15  # 0.04 by chance


def test_at_first_the_head_changes_nothing_and_the_next_token_loss_is_the_ordinary_one() -> None:
    network, head = Network(SHAPE), DraftHead(16, width=16)
    network.initialise(torch.Generator().manual_seed(0))
    head.initialise(torch.Generator().manual_seed(0))
    ids = counting().windows(0, 1, 16).repeat(2, 1)
    loss, mask, guided = space_loss(network, head, ids, anchor_rows(16, [(3, 3), (7, 1)]))
    assert float(mask.detach()) == pytest.approx(float(guided.detach()))
    ordinary = bits_per_byte(network, ids, torch.ones(40, dtype=torch.int64))["loss"]
    assert float(loss.detach()) == pytest.approx(ordinary, rel=1e-5)


def test_the_head_adds_a_correction_made_of_the_hidden_row_and_the_scaled_embedding() -> None:
    head = DraftHead(2, width=1, embedding_scale=8.0)
    with torch.no_grad():
        head.w1.copy_(torch.tensor([[1.0, 0.0, 0.0, 0.5]]))
        head.w2.copy_(torch.tensor([[2.0], [-1.0]]))
        row = head(torch.tensor([0.25, 3.0]), torch.tensor([9.0, 0.1]))
    inner = torch.nn.functional.silu(torch.tensor(0.25 + 0.5 * 8 * 0.1))
    torch.testing.assert_close(row, torch.tensor([0.25, 3.0]) + torch.stack((2 * inner, -inner)))


def test_a_frozen_network_stays_as_it_was_while_the_head_learns(tmp_path: Path) -> None:
    network, head = Network(SHAPE), DraftHead(16, width=16)
    network.initialise(torch.Generator().manual_seed(0))
    head.initialise(torch.Generator().manual_seed(0))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    plan = SpacePlan(num_masks=3, tokens_per_step=64, lengths=(16,), compile=False, autocast=False, train_network=False)
    train_space(network, head, STREAMS, no_measures, plan, Budget(tokens=64 * 3), tmp_path / "h.pt", pace=OFTEN)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert float(head.w2.detach().abs().max()) > 0
