"""A network's own repetitions are found, and become unlikely."""

import torch
from space_train.network import Network, NetworkShape
from space_train.tokenizer import PAD_ID
from space_train.unlearn_loops import greedy_texts, repeats, unlikelihood

SHAPE = NetworkShape(40, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16)


def small_network() -> Network:
    network = Network(SHAPE)
    network.initialise(torch.Generator().manual_seed(0))
    return network


def test_an_id_that_closes_a_4_gram_seen_behind_the_prompt_is_a_repetition() -> None:
    prompt, written = [20, 21, 22, 23], [20, 21, 22, 23, 24, 20, 21, 22, 23, 24]
    closed = repeats(torch.tensor([prompt + written + [PAD_ID] * 2]), len(prompt))
    # The first 20 21 22 23 is in the prompt too, but only what was written counts; the second closes at its 23.
    assert closed[0].tolist() == [False] * 12 + [True, True] + [False] * 2


def test_greedy_texts_are_the_networks_own_most_likely_tokens() -> None:
    network, prompts = small_network(), torch.tensor([[15, 30, 22], [17, 12, 39]])
    texts = greedy_texts(network, prompts, 6)
    assert torch.equal(texts[:, :3], prompts)
    with torch.no_grad():
        logits = network.logits(network(texts))
    logits[..., 1:12] = -torch.inf
    for row in range(2):
        for at in range(3, texts.shape[1]):
            if texts[row, at - 1] == 0 or texts[row, at] == PAD_ID:
                break
            assert int(texts[row, at]) == int(logits[row, at - 1].argmax())


def test_repetitions_become_less_likely_and_nothing_costs_where_there_are_none() -> None:
    network, texts = small_network(), torch.tensor([[15, 30, 30, 30, 30, 30, 30, 30]])
    closed = repeats(texts, 1)
    assert int(closed.sum()) == 3
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-2)
    first = float(unlikelihood(network, texts, closed).detach())
    for _ in range(10):
        unlikelihood(network, texts, closed).backward()
        optimiser.step()
        optimiser.zero_grad()
    assert float(unlikelihood(network, texts, closed).detach()) < 0.5 * first
    assert float(unlikelihood(network, texts, torch.zeros_like(closed)).detach()) == 0.0
