"""Sampling from tensors, by the torch reference and by the kernels, equals sampling row by row on the host."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from space_kernels.sampling import device_sampling as reference
from space_kernels.sampling import noise, sampling_triton
from space_kernels.sampling.device_sampling import (
    NO_ID,
    Prefixes,
    SamplingTensors,
    Stages,
    end_bans,
    log_probabilities,
    token_counts,
    word_bans,
)
from space_kernels.sampling.noise_kernels import NEARLY, gumbel_of_bits, nearly_gumbel, random_bits, row_stream
from space_kernels.sampling.sampler import SampledTokens, sample_rows
from space_kernels.sampling.sampler import log_probabilities as log_probabilities_on_host
from space_kernels.sampling.sampling_params import SamplingParams, SamplingRow
from space_kernels.sampling.sampling_triton import LogitsShape
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
V = 96  # a kernel's program takes some 20 ms in the interpreter
BANNED = (3, 90)

Choose = Callable[..., SampledTokens]


def in_small_tiles(*arguments: object, **named: object) -> SampledTokens:
    """Sample in two tiles; the first 32 candidates suffice for some rows only."""
    return sampling_triton.sample(*arguments, shape=LogitsShape(tile=64, few=32, num_warps=1), **named)


WAYS: dict[str, Choose] = {
    "reference": reference.sample,
    "one tile": sampling_triton.sample,
    "small tiles": in_small_tiles,
}


@pytest.fixture(params=["reference", "small tiles", pytest.param("one tile", marks=pytest.mark.slow)])
def choose(request: pytest.FixtureRequest) -> Choose:
    return WAYS[request.param]


class Batch:
    """S sequences of J rows each, on the host and in tensors."""

    def __init__(self, batch_params: list[SamplingParams], J: int, seed: int, vocab_size: int = V) -> None:
        draw = random.Random(seed)
        self.batch_params, self.J, self.V = batch_params, J, vocab_size
        self.known = [[draw.randrange(vocab_size) for _ in range(draw.randrange(1, 40))] for _ in batch_params]
        self.num_prompt = [draw.randrange(1, len(ids) + 1) for ids in self.known]
        self.tails = [[draw.randrange(vocab_size) for _ in range(J - 1)] for _ in batch_params]
        for ids, tail in zip(self.known, self.tails, strict=True):  # ids that occur again
            ids[-2:] = [7, 8][-len(ids) :]
            tail[:2] = [9, 7][: len(tail)]

    def on_host(self, logits: torch.Tensor) -> SampledTokens:
        rows = [
            SamplingRow(sampling_params, ids, num_prompt, tail=tail[:j])
            for sampling_params, ids, num_prompt, tail in zip(
                self.batch_params, self.known, self.num_prompt, self.tails, strict=True
            )
            for j in range(self.J)
        ]
        choice = sample_rows(logits.clone().view(-1, self.V), rows, torch.tensor(BANNED))
        S = len(self.batch_params)
        return SampledTokens(choice.ids.view(S, self.J), choice.valid.view(S, self.J))

    def by(self, choose: Choose, logits: torch.Tensor, only: slice = slice(None)) -> SampledTokens:
        batch_params = self.batch_params[only]
        tensors = SamplingTensors.of(batch_params, self.V, device=DEVICE)
        known, num_prompt = self.known[only], torch.tensor(self.num_prompt[only])
        num_known = torch.tensor([len(ids) for ids in known])
        history = torch.zeros(len(batch_params), 64, dtype=torch.int64)
        for line, ids in enumerate(known):
            history[line, : len(ids)] = torch.tensor(ids)
        tails = torch.tensor(self.tails[only]).view(len(batch_params), self.J - 1)
        place = torch.arange(self.J)
        num_tail = place.expand(len(batch_params), self.J)
        on_device = [each.to(DEVICE) for each in (history, num_known, tails, num_tail)]
        words = word_bans(tensors, *on_device, torch.zeros_like(place).to(DEVICE))
        ends = end_bans(tensors, ((num_known - num_prompt)[:, None] + num_tail).to(DEVICE))
        counts = [token_counts(ids, n, self.V) for ids, n in zip(known, self.num_prompt[only], strict=True)]
        choice = choose(
            logits.clone().view(-1, self.J, self.V)[only].contiguous().to(DEVICE), tensors, Stages.of(batch_params),
            Prefixes(num_known.to(DEVICE), tails.to(DEVICE), num_tail.to(DEVICE), torch.cat([words, ends], dim=2)),
            torch.tensor(BANNED).to(DEVICE), torch.stack(counts).to(DEVICE),
        )  # fmt: skip
        return SampledTokens(choice.ids.cpu(), choice.valid.cpu())


def agree(one: SampledTokens, other: SampledTokens) -> None:
    assert torch.equal(one.valid, other.valid)
    assert one.ids[one.valid].tolist() == other.ids[other.valid].tolist()


def logits_of(S: int, J: int, seed: int, spread: float = 3.0, step: float = 0.0, vocab_size: int = V) -> torch.Tensor:
    """Random; with a `step` rounded to its multiples, so that many are equal."""
    z = torch.randn(S, J, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    return (z / step).round() * step if step else z


EDITS = [
    SamplingParams(temperature=0.0, bias=((7, 4.0), (90, 90.0), (9, -3.0))),
    SamplingParams(temperature=0.0, allowed_ids=(1, 3, 63, 64, 95)),
    SamplingParams(temperature=0.0, min_tokens=8, end_ids=tuple(range(0, V, 2))),
    SamplingParams(temperature=0.0, bad_words=((11,), (8, 12), (7, 8, 13), (8, 9, 14))),
    SamplingParams(key=8, repetition_penalty=1.7, presence_penalty=0.3, frequency_penalty=-0.6),
    SamplingParams(key=9, temperature=0.0, frequency_penalty=3.0, allowed_ids=(7, 8, 9)),
    SamplingParams(key=10, repetition_penalty=0.6, min_tokens=3, end_ids=(7, 8)),
]

CUTS = [
    SamplingParams(key=1),
    SamplingParams(key=2, temperature=0.3),
    SamplingParams(key=3, top_k=1),
    SamplingParams(key=4, top_k=7, temperature=1.6),
    SamplingParams(key=5, top_k=60, temperature=3.0),
    SamplingParams(key=6, top_p=0.3),
    SamplingParams(key=7, top_p=0.93, temperature=1.5),
    SamplingParams(key=8, top_k=40, top_p=0.7),
    SamplingParams(key=9, min_p=0.1),
    SamplingParams(key=10, typical_p=0.5),
    SamplingParams(key=11, typical_p=0.9, top_k=30, top_p=0.95, min_p=0.01, temperature=1.2),
    SamplingParams(key=12, temperature=0.0, top_k=3),
    SamplingParams(key=13, top_p=0.999999),
    SamplingParams(key=14, top_k=93, top_p=0.5, temperature=9.0),
]


def test_rows_are_sampled_as_on_the_host_whatever_cuts_their_distribution(choose: Choose) -> None:
    batch_params = CUTS if choose is reference.sample or DEVICE == "cuda" else CUTS[3:13:2]
    batch = Batch(batch_params, 1, seed=1)
    logits = logits_of(len(batch_params), 1, seed=2)
    logits[1::2] = (logits[1::2] * 2.0).round() / 2.0  # many are equal
    agree(batch.by(choose, logits), batch.on_host(logits))


def test_rows_choose_as_on_the_host_behind_their_hypothetical_prefix(choose: Choose) -> None:
    batch = Batch(EDITS, 3, seed=3)
    logits = logits_of(len(EDITS), 3, seed=4, spread=1.0)
    logits[:, :, 7:15] += 3.0  # the ids in question are likely
    agree(batch.by(choose, logits), batch.on_host(logits))


@pytest.mark.parametrize("spread", [pytest.param(0.0, marks=pytest.mark.slow), 40.0])
def test_flat_and_steep_rows_are_cut_alike(choose: Choose, spread: float) -> None:
    batch_params = [
        SamplingParams(key=1, top_k=50),
        SamplingParams(key=2, top_p=0.8123),
        SamplingParams(key=3, typical_p=0.6123),
        SamplingParams(key=4, top_k=85, top_p=0.7),
    ]
    batch = Batch(batch_params, 1, seed=5)
    logits = logits_of(len(batch_params), 1, seed=6, spread=spread) - 17.0
    agree(batch.by(choose, logits), batch.on_host(logits))


def test_rows_without_a_choice_are_told_and_harm_nobody(choose: Choose) -> None:
    batch_params = [
        SamplingParams(key=1, top_p=0.5),
        SamplingParams(temperature=0.0),
        SamplingParams(key=2, allowed_ids=(3,)),
        SamplingParams(key=3, top_k=5),
        SamplingParams(key=4),
    ]
    batch = Batch(batch_params, 2, seed=7)
    logits = logits_of(len(batch_params), 2, seed=8)
    whole = batch.by(choose, logits)
    logits[0, 1, 95] = math.nan
    logits[1, 0, 5] = math.inf
    logits[3, 0] = -math.inf
    logits[4, 1, 90] = math.nan  # of a banned id: ignored
    harmed = batch.by(choose, logits)
    assert harmed.valid.tolist() == [[True, False], [False, True], [False, False], [False, True], [True, True]]
    assert torch.equal(harmed.ids[harmed.valid], whole.ids[harmed.valid])
    assert ((harmed.ids >= 0) & (harmed.ids < V)).all()


def test_a_row_chooses_alone_what_it_chooses_in_company(choose: Choose) -> None:
    batch_params = [CUTS[7], EDITS[3], EDITS[4]]
    batch = Batch(batch_params, 2, seed=9)
    logits = logits_of(len(batch_params), 2, seed=10)
    together = batch.by(choose, logits)
    for line in (0, 2):
        alone = batch.by(choose, logits, slice(line, line + 1))
        assert torch.equal(alone.ids[0], together.ids[line])


def test_of_equal_logits_at_a_cut_the_lower_id_stays(choose: Choose) -> None:
    z = torch.full((2, 1, V), -20.0)
    z[:, 0, [94, 5, 93]] = torch.tensor([-2.0, 2.0, 2.0])
    batch = Batch([SamplingParams(key=key, top_k=1, temperature=50.0) for key in range(2)], 1, seed=11)
    assert batch.by(choose, z).ids.flatten().tolist() == [5, 5]


@pytest.mark.slow
def test_every_cut_in_every_way(choose: Choose) -> None:
    batch = Batch(CUTS, 1, seed=21)
    logits = logits_of(len(CUTS), 1, seed=22)
    logits[::2] = (logits[::2] * 2.0).round() / 2.0  # many are equal
    agree(batch.by(choose, logits), batch.on_host(logits))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_sampling_params_on_random_rows(choose: Choose, seed: int) -> None:
    draw = random.Random(seed)
    batch_params = [
        SamplingParams(
            key=draw.getrandbits(60), temperature=draw.choice([0.0, 0.4, 1.0, 2.5]),
            top_k=draw.choice([0, 0, 3, 40, 80]), top_p=draw.choice([1.0, 0.2, 0.9, 0.99]),
            min_p=draw.choice([0.0, 0.0, 0.02, 0.5]), typical_p=draw.choice([1.0, 1.0, 0.3, 0.95]),
            repetition_penalty=draw.choice([1.0, 1.2]), frequency_penalty=draw.choice([0.0, 0.5]),
            bias=draw.choice([(), ((4, 2.0), (7, 1.0))]),
        )
        for _ in range(12)
    ]  # fmt: skip
    batch = Batch(batch_params, 2, seed=seed)
    logits = logits_of(12, 2, seed=seed, spread=draw.choice([0.3, 2.0, 8.0]), step=draw.choice([0.0, 0.25]))
    agree(batch.by(choose, logits), batch.on_host(logits))


def test_stages_of_neutral_sampling_params_change_nothing(choose: Choose) -> None:
    plain, busy = (
        SamplingParams(key=5, temperature=0.9),
        SamplingParams(key=6, top_p=0.5, min_p=0.1, frequency_penalty=0.2, bias=((1, 1.0),)),
    )
    batch = Batch([plain, busy], 2, seed=12)
    logits = logits_of(2, 2, seed=13)
    assert torch.equal(batch.by(choose, logits).ids[:1], batch.by(choose, logits, slice(0, 1)).ids)


def test_a_masks_row_knows_nothing_of_the_drafts_before_it() -> None:
    batch_params = SamplingTensors.of([SamplingParams(bad_words=((11,), (8, 12)))], V)
    history, num_known = torch.tensor([[1, 2, 0, 0]]), torch.tensor([2])
    tails, num_tail = torch.tensor([[5, 8]]), torch.tensor([[2, 2]])
    bans = word_bans(batch_params, history, num_known, tails, num_tail, torch.tensor([0, 1]))
    assert bans.tolist() == [[[11, 12], [11, NO_ID]]]


def test_logprobs_are_the_hosts() -> None:
    raw = logits_of(1, 4, seed=14, step=0.5)[0]
    ids = torch.tensor([0, 9, 9, 95])
    logprob, top_ids, top_logprobs = log_probabilities(raw, ids, 4)
    for row, entry in enumerate(log_probabilities_on_host(raw, ids.tolist(), 4)):
        assert (logprob[row].item(), tuple(top_ids[row].tolist())) == (entry.logprob, entry.top_ids)
        assert tuple(top_logprobs[row].tolist()) == entry.top_logprobs
        assert all(one >= other for one, other in pairwise(entry.top_logprobs))


def test_sampling_params_that_do_not_fit_are_refused_with_the_bound() -> None:
    batch_params = SamplingTensors.empty(1, V)
    with pytest.raises(ValueError, match="65 biases"):
        batch_params.put(0, SamplingParams(bias=tuple((n, 1.0) for n in range(65))))
    with pytest.raises(ValueError, match="no allowed ids"):
        batch_params.put(0, SamplingParams(allowed_ids=(1,)))


@triton.jit  # type: ignore[untyped-decorator]
def _cells(keys, positions, ids, bits, exact, near, M, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    stream = row_stream(tl.load(keys + row).to(tl.int64), tl.load(positions + row).to(tl.int64))
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < M
    drawn = random_bits(stream, tl.load(ids + row * M + lanes, inside, other=0))
    tl.store(bits + row * M + lanes, drawn.to(tl.int64), inside)
    tl.store(exact + row * M + lanes, gumbel_of_bits(drawn), inside)
    tl.store(near + row * M + lanes, nearly_gumbel(drawn).to(tl.float64), inside)


def by_kernel(keys: Tensor, positions: Tensor, ids: Tensor) -> list[Tensor]:
    """Return the bits, the noise and the cheap noise of each cell."""
    found = [
        torch.empty(ids.shape, dtype=dtype, device=DEVICE) for dtype in (torch.int64, torch.float64, torch.float64)
    ]
    given = (each.to(DEVICE) for each in (keys, positions, ids))
    _cells[(len(ids), triton.cdiv(ids.shape[1], 1024))](*given, *found, ids.shape[1], BLOCK=1024)
    return [each.cpu() for each in found]


def cells(num_rows: int, num_ids: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_ids)
    keys = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    keys[0] = noise.request_key(2**64 - 1, 0)
    positions = torch.randint(0, 1 << 20, (num_rows,), generator=generator)
    ids = torch.randint(0, 1 << 18, (num_rows, num_ids), generator=generator)
    return keys, positions, ids


def test_bits_are_the_references_bit_by_bit() -> None:
    keys, positions, ids = cells(7, 1500)
    expected = noise.random_bits(noise.row_streams(keys, positions)[:, None], ids)
    assert torch.equal(by_kernel(keys, positions, ids)[0], expected)


def test_noise_agrees_to_the_last_digits() -> None:
    keys, positions, ids = cells(5, 3000)
    expected = noise.gumbel(keys, positions, ids)
    found = by_kernel(keys, positions, ids)[1]
    # One unit in the last place of -log u, carried through the outer logarithm, and one of that.
    assert (found - expected).abs().max() <= 2**-51 * (1 + expected.abs().max())


@pytest.mark.parametrize("bits", [0, 1, 2**31, 2**32 - 2**26 - 3, 2**32 - 2**26 + 3, 2**32 - 300, 2**32 - 1])
def test_the_cheap_noise_is_near_at_every_end(bits: int) -> None:
    # A row's stream and an id's cell are bijections, so an id with wanted bits can be computed backwards.
    key, position = torch.tensor([5]), torch.tensor([9])
    word = (bits << 32) + 12345
    stream = noise.row_streams(key, position)
    id_ = (invert(word) - int(stream)) * pow(0x9E3779B97F4A7C15, -1, 1 << 64) - 1
    ids = torch.tensor([[(id_ + (1 << 63)) % (1 << 64) - (1 << 63)]])
    drawn, _, nearly = by_kernel(key, position, ids)
    assert int(drawn) == bits
    exact = noise.gumbel_of_bits(torch.tensor([bits]))
    assert abs(float(nearly) - float(exact)) < NEARLY


def test_the_cheap_noise_is_near_everywhere() -> None:
    keys, positions, ids = cells(2, 16_000)
    exact = noise.gumbel(keys, positions, ids)
    nearly = by_kernel(keys, positions, ids)[2]
    assert (nearly - exact).abs().max() < NEARLY


def invert(word: int) -> int:
    """SplitMix64's finaliser backwards."""

    def unfold(value: int, shift: int) -> int:
        found = value
        for _ in range(64 // shift + 1):
            found = value ^ (found >> shift)
        return found

    word = unfold(word, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) % (1 << 64)
    word = unfold(word, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) % (1 << 64)
    return unfold(word, 30)
