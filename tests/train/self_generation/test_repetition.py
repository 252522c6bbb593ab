"""Loops made of real windows, and a loss that falls as a network leaves them."""

import numpy as np
import torch
from space_train.networks.network import NetworkShape, TrainNetwork
from space_train.self_generation.loops import DECAY, loop_loss, looped

LINE_END = 9


def test_a_looped_window_repeats_lines_or_a_few_ids_to_its_end() -> None:
    ids = torch.arange(256)[None] + 20
    ids[0, 7::9] = LINE_END
    ends_line = np.arange(300) == LINE_END
    lines = 0
    for seed in range(20):
        windows, starts, periods = looped(ids, ends_line, np.random.default_rng(seed))
        start, period = int(starts), int(periods)
        assert torch.equal(windows[0, : start + period], ids[0, : start + period])
        assert torch.equal(windows[0, start + period :], windows[0, start:-period])
        lines += bool(ids[0, start - 1] == LINE_END and ids[0, start + period - 1] == LINE_END)
    assert 5 <= lines <= 15


def test_a_window_without_lines_loops_too() -> None:
    ids = torch.arange(256)[None] + 20
    windows, starts, periods = looped(ids, np.zeros(300, dtype=np.bool_), np.random.default_rng(1))
    start, period = int(starts), int(periods)
    assert torch.equal(windows[0, start + period :], windows[0, start:-period])


def test_the_loss_asks_each_round_for_a_share_of_the_round_before() -> None:
    network = TrainNetwork(NetworkShape(20, hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16))
    network.initialise(torch.Generator().manual_seed(0))
    windows, start, period = torch.tensor([[1, 2, 3, 4, 3, 4, 3, 4]]), torch.tensor([2]), torch.tensor([2])
    chance = network.logits(network(windows)).softmax(-1)[0].detach()
    of = [float(chance[t - 1, windows[0, t]]) for t in range(1, 8)]  # of the ids at 1 .. 7
    expected = [-np.log(1 - abs(of[t - 1] - DECAY * of[t - 3])) for t in range(4, 8)]
    assert abs(float(loop_loss(network, windows, start, period).detach()) - np.mean(expected)) < 1e-5


def test_training_on_loops_lowers_the_chance_of_another_round() -> None:
    torch.manual_seed(0)
    network = TrainNetwork(NetworkShape(20, hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=32))
    network.initialise(torch.Generator().manual_seed(0))
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-2)
    windows, start, period = torch.tensor([[1, 2, *([3, 4, 5] * 8)]]), torch.tensor([2]), torch.tensor([3])
    for _ in range(30):  # first it learns to loop
        torch.nn.functional.cross_entropy(network.logits(network(windows))[0, :-1], windows[0, 1:]).backward()
        optimiser.step()
        optimiser.zero_grad()

    def last_round() -> float:
        chance = network.logits(network(windows)).softmax(-1)[0].detach()
        return sum(float(chance[t - 1, windows[0, t]]) for t in range(23, 26)) / 3

    before = last_round()
    for _ in range(30):
        loop_loss(network, windows, start, period).backward()
        optimiser.step()
        optimiser.zero_grad()
    assert before > 0.6
    assert last_round() < 0.6 * before
