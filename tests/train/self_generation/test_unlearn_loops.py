"""A model's own loops are found, and become unlikely beside whatever else it learns."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from doubles.training import random_ids, run, tiny_plan
from space_model.checkpoint.checkpoint import Checkpoint
from space_train.data.rows import PackedTokens
from space_train.networks.network import NetworkShape, TrainNetwork
from space_train.networks.trainee import Trainee
from space_train.run_folder import STATE_FILE, load_checkpoint
from space_train.self_generation.loops import (
    DECAY,
    LoopsToUnlearn,
    greedy_texts,
    loop_loss,
    looped,
    repeats,
    unlikelihood,
)
from space_train.session import load_base
from space_train.train_plan import Budget, Method
from tiny_checkpoints import tiny_checkpoint

END, PAD = 0, 1
MASK_IDS = [2, 3, 4]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("base"), num_masks=3, draft_head=False)


@pytest.fixture
def trainee(source: Path) -> Trainee:
    plan = replace(tiny_plan(Method.FULL), budget=Budget(steps=1))
    return Trainee(load_base(Checkpoint.open(source), plan), plan, MASK_IDS)


def stream() -> PackedTokens:
    return PackedTokens(np.array(random_ids(400, 3), dtype=np.uint16), seed=0)


def loops(**changes: float) -> LoopsToUnlearn:
    sizes = {"prompt": 6, "written": 24, "loops_from": 0.0}
    return LoopsToUnlearn([(stream(), 3)], END, PAD, MASK_IDS, **sizes | changes)  # type: ignore[arg-type]


def test_an_id_that_closes_a_4_gram_seen_behind_the_prompt_is_a_repetition() -> None:
    prompt, written = [20, 21, 22, 23], [20, 21, 22, 23, 24, 20, 21, 22, 23, 24]
    closed = repeats(torch.tensor([prompt + written + [PAD] * 2]), len(prompt), PAD)
    # The first 20 21 22 23 is in the prompt too, but only what was written counts; the second closes at its 23.
    assert closed[0].tolist() == [False] * 12 + [True, True] + [False] * 2


def test_greedy_texts_are_the_models_own_most_likely_ids(trainee: Trainee) -> None:
    prompts = torch.tensor([[15, 30, 22], [17, 12, 39]])
    texts = greedy_texts(trainee.decoder.model, prompts, 6, END, PAD, MASK_IDS)
    assert texts.shape == (2, 9)
    assert torch.equal(texts[:, :3], prompts)
    with torch.no_grad():
        logits = trainee.decoder.model(texts).logits
    logits[..., MASK_IDS] = -torch.inf
    for row in range(2):
        for at in range(3, 9):
            if texts[row, at - 1] == END or texts[row, at] == PAD:
                break
            assert int(texts[row, at]) == int(logits[row, at - 1].argmax())


def test_repetitions_become_less_likely_and_nothing_costs_where_there_are_none(trainee: Trainee) -> None:
    texts = torch.tensor([[15, 30, 30, 30, 30, 30, 30, 30]])
    closed = repeats(texts, 1, PAD)
    assert int(closed.sum()) == 3
    optimiser = torch.optim.Adam(trainee.trained.values(), lr=1e-2)
    first = float(unlikelihood(trainee, texts, closed).detach())
    for _ in range(10):
        unlikelihood(trainee, texts, closed).backward()
        optimiser.step()
        optimiser.zero_grad()
    assert float(unlikelihood(trainee, texts, closed).detach()) < 0.5 * first
    assert float(unlikelihood(trainee, texts, torch.zeros_like(closed)).detach()) == 0.0


def test_texts_that_hardly_repeat_do_not_count(trainee: Trainee) -> None:
    all_of_them, none = loops(), loops(loops_from=1.01)
    all_of_them.loss(trainee, 0)
    assert all_of_them.looping > 0
    assert float(none.loss(trainee, 0).detach()) == none.looping == 0.0


def test_texts_are_written_anew_only_now_and_then(trainee: Trainee) -> None:
    some = loops(updates_each=2)
    written = []
    for step in range(4):
        some.loss(trainee, step)
        written.append(some._texts)
    assert written[0] is written[1]
    assert written[1] is not written[2]
    assert not torch.equal(written[0][:, :6], written[2][:, :6])


def test_a_run_that_unlearns_beside_goes_the_same_way_when_it_is_cut(source: Path, tmp_path: Path) -> None:
    plan = replace(tiny_plan(Method.FULL), budget=Budget(steps=4))
    given = {"given_mask_ids": MASK_IDS}
    run(source, plan, tmp_path / "whole", beside=loops(), **given)
    run(source, plan, tmp_path / "cut", beside=loops(), stop_after_steps=3, **given)
    run(source, plan, tmp_path / "cut", beside=loops(), **given)
    run(source, plan, tmp_path / "without", **given)
    whole, cut, without = (load_checkpoint(tmp_path / name / STATE_FILE) for name in ("whole", "cut", "without"))
    for name, tensor in whole["trained"].items():
        assert torch.equal(tensor, cut["trained"][name]), name
    assert whole["counters"]["losses"] == cut["counters"]["losses"] != without["counters"]["losses"]


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
