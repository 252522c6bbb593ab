"""Models on the meta device: shapes alone, but for what is computed from positions."""

import torch
from space_model.loading.meta_tensors import MetaModel
from torch import nn


def test_embeddings_have_a_shape_alone_and_positions_have_values() -> None:
    with MetaModel(), torch.device("meta"):
        embedding = nn.Embedding(7, 3)
        angles = 1.0 / 10.0 ** (torch.arange(0, 8, 2, dtype=torch.int64).float() / 8)
    assert embedding.weight.is_meta
    assert embedding.weight.shape == (7, 3)
    torch.testing.assert_close(angles, torch.tensor([1, 10**-0.25, 10**-0.5, 10**-0.75]))


def test_other_devices_are_left_alone() -> None:
    torch.manual_seed(0)
    plain = nn.Embedding(5, 2).weight
    torch.manual_seed(0)
    with MetaModel():
        drawn = nn.Embedding(5, 2).weight
        counted = torch.arange(3)
    assert torch.equal(plain, drawn)
    assert counted.tolist() == [0, 1, 2]
