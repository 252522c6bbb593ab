"""The oracle itself, in numbers small enough to do by hand."""

import numpy as np
import pytest
from exact_distribution import chi_square_p, chi_square_tail, choice_probabilities, counts_of, joint_distribution
from space_proto import worker_pb2 as pb

FOUR = np.log(np.array([0.4, 0.3, 0.2, 0.1]))


def distribution_of(sampling: pb.Sampling, prefix: list[int] | None = None, **more: tuple[int, ...]) -> list[float]:
    p = choice_probabilities(FOUR, prefix or [0], 1, sampling, **more)
    return [round(float(x), 6) for x in p]


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        (pb.Sampling(temperature=0.0), [1, 0, 0, 0]),
        (pb.Sampling(temperature=1.0), [0.4, 0.3, 0.2, 0.1]),
        (pb.Sampling(temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        (pb.Sampling(temperature=1.0, top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (pb.Sampling(temperature=1.0, top_p=0.5), [4 / 7, 3 / 7, 0, 0]),
        (pb.Sampling(temperature=1.0, min_p=0.4), [4 / 9, 3 / 9, 2 / 9, 0]),
        (pb.Sampling(temperature=1.0, typical_p=0.2), [0, 1, 0, 0]),  # entropy 1.28 lies nearest to -log 0.3
        (pb.Sampling(temperature=1.0, allowed_ids=[1, 3]), [0, 0.75, 0, 0.25]),
        (pb.Sampling(temperature=1.0, logit_bias={3: float(np.log(3))}), [4 / 12, 3 / 12, 2 / 12, 3 / 12]),
    ],
)
def test_each_stage_keeps_the_ids_it_should(sampling: pb.Sampling, wanted: list[float]) -> None:
    assert distribution_of(sampling) == pytest.approx(wanted, abs=1e-5)


def test_stages_that_look_back_see_prompt_and_output_apart() -> None:
    presence = pb.Sampling(temperature=1.0, presence_penalty=float(np.log(2)))
    assert distribution_of(presence, [0, 1, 1]) == pytest.approx(
        [0.4 / 0.85, 0.15 / 0.85, 0.2 / 0.85, 0.1 / 0.85], abs=1e-5
    )
    frequency = pb.Sampling(temperature=1.0, frequency_penalty=float(np.log(2)))
    assert distribution_of(frequency, [0, 1, 1])[1] == pytest.approx(0.075 / 0.775, abs=1e-5)
    repetition = pb.Sampling(temperature=1.0, repetition_penalty=2.0)
    assert distribution_of(repetition, [0])[0] == pytest.approx(0.16 / 0.76, abs=1e-5)  # negative logits are multiplied
    bad_word = pb.Sampling(temperature=1.0, bad_words=[pb.IdRun(ids=[2, 0])])
    assert distribution_of(bad_word, [1, 2])[0] == 0
    assert distribution_of(bad_word, [2, 1])[0] == pytest.approx(0.4)
    early = pb.Sampling(temperature=1.0, min_tokens=2)
    assert distribution_of(early, [1, 1], end_ids=(0,))[0] == 0
    assert distribution_of(early, [1, 1, 1], end_ids=(0,))[0] == pytest.approx(0.4)


def test_the_joint_distribution_is_the_product_along_each_run() -> None:
    table = np.log(np.array([[0.9, 0.1], [0.2, 0.8]]))
    distribution = joint_distribution(
        lambda prefixes: table[[p[-1] for p in prefixes]], [0], 2, pb.Sampling(temperature=1.0), vocab_size=2
    )
    assert distribution == pytest.approx(np.array([[0.81, 0.09], [0.02, 0.08]]))
    ended = joint_distribution(
        lambda prefixes: table[[p[-1] for p in prefixes]],
        [0],
        2,
        pb.Sampling(temperature=1.0),
        vocab_size=2,
        end_ids=(1,),
    )
    assert ended == pytest.approx(np.array([[0.81, 0.09], [0.0, 0.1]]))


def test_chi_square_passes_a_true_distribution_and_fails_a_false_one() -> None:
    assert chi_square_tail(3.841459, 1) == pytest.approx(0.05, abs=1e-6)
    draws = np.random.default_rng(0).choice(4, size=(20_000, 1), p=np.exp(FOUR))
    counts = counts_of(draws.tolist(), vocab_size=4, depth=1)
    assert chi_square_p(counts, np.exp(FOUR)) > 1e-3
    assert chi_square_p(counts, np.array([0.37, 0.33, 0.2, 0.1])) < 1e-6
    assert chi_square_p(counts, np.array([0.0, 0.7, 0.2, 0.1])) == 0.0
