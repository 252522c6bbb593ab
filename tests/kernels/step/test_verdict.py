"""Verification accepts the longest matching prefix of live drafts, for each sequence of a batch independently."""

import torch
from space_kernels.step.verification import num_accepted, verify


def test_every_accepted_length_in_one_batch() -> None:
    drafts = torch.tensor([[1, 2, 3]] * 5)
    samples = torch.tensor([[9, 2, 3, 4], [1, 9, 3, 4], [1, 2, 9, 4], [1, 2, 3, 4], [9, 9, 9, 9]])
    verification = verify(samples, drafts, torch.tensor([3, 3, 3, 3, 3]))
    assert verification.accepted.tolist() == [0, 1, 2, 3, 0]
    assert verification.lengths.tolist() == [1, 2, 3, 4, 1]
    assert verification.emitted.tolist() == [[9, 0, 0, 0], [1, 9, 0, 0], [1, 2, 9, 0], [1, 2, 3, 4], [9, 0, 0, 0]]


def test_drafts_beyond_the_live_ones_never_count() -> None:
    drafts = torch.tensor([[1, 2], [1, 2], [1, 2]])
    samples = torch.tensor([[1, 2, 3]] * 3)
    assert verify(samples, drafts, torch.tensor([0, 1, 2])).accepted.tolist() == [0, 1, 2]


def test_agreement_behind_a_disagreement_does_not_count() -> None:
    assert verify(torch.tensor([[5, 2, 3]]), torch.tensor([[1, 2]]), torch.tensor([2])).accepted.tolist() == [0]


def test_without_drafts_the_sample_is_the_bonus() -> None:
    verification = verify(torch.tensor([[7], [8]]), torch.zeros(2, 0, dtype=torch.int64), torch.tensor([0, 0]))
    assert (verification.accepted.tolist(), verification.emitted.tolist()) == ([0, 0], [[7], [8]])


def test_one_sequence_on_the_host_is_judged_as_it_is_in_a_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    samples = torch.randint(0, 2, (100, 5), generator=generator)
    drafts = torch.randint(0, 2, (100, 4), generator=generator)
    live = torch.randint(0, 5, (100,), generator=generator)
    accepted = verify(samples, drafts, live).accepted.tolist()
    assert set(accepted) == {0, 1, 2, 3, 4}
    for of_row, chosen, drafted, count in zip(accepted, samples.tolist(), drafts.tolist(), live.tolist(), strict=True):
        assert num_accepted(chosen[: count + 1], drafted[:count]) == of_row
