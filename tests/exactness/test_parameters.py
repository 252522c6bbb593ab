"""Every parameter of a request, alone and in random sets, gives the same ids and log-probabilities with speculation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
from exactness_matrix import Mismatch, Subject, describe_difference, make_worker
from space_common.worker.client import ClientSequence, SequenceRequest, WorkerClient
from space_common.worker.errors import CONTRADICTION
from space_eval.acceptance.equivalence import RIGHT, Future, ScriptedDrafts, first_difference
from space_model.loading.load import load_model
from space_proto import worker_pb2 as pb
from space_server.drafts import DraftSources
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from tiny_checkpoints import tiny_checkpoint

Subjects = Callable[[str, str], Subject]

ON_DEVICE = "on device"
MODES = {"k1": 1, "k3": 3, "k5": 5, "lookup": 4, "predicted": 4, ON_DEVICE: 3}
"""Who drafts, and at most how many ids: the masks (and an oracle that is wrong half the time), lookup, a prediction;
on the device the masks alone, the law as tensors, and no log-probabilities."""

WITHOUT_EFFECT_WHEN_GREEDY = ("seed", "choice", "top_k", "top_p", "min_p", "typical_p")
LIMITS = ("max_tokens", "eos_ids", "stop_ids", "min_tokens")
PARAMETERS = (
    *WITHOUT_EFFECT_WHEN_GREEDY,
    "temperature",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "allowed_ids",
    *LIMITS,
)
MAX_TOKENS = 16
NUM_SEATS = 4
NUM_BLOCKS = 800


@dataclass(frozen=True)
class Ground:
    """What values are chosen by, so that they bite: a prompt, and the text of the same seed without parameters."""

    prompt: Sequence[int]
    base: Sequence[int]
    live_ids: Sequence[int]
    mask_ids: Sequence[int]


def set_parameter(name: str, sampling_params: pb.Sampling, limits: pb.Limits, ground: Ground, dice: Random) -> None:
    """A random value of one parameter, extremes among them."""
    base = ground.base
    match name:
        case "seed":
            sampling_params.seed = dice.choice((0, 1, 2**63, 2**64 - 1, dice.getrandbits(64)))
        case "choice":
            sampling_params.choice = dice.randint(1, 127)
        case "temperature":
            sampling_params.temperature = dice.choice((1e-6, 0.3, 1.3, 2.0))
        case "top_k":
            sampling_params.top_k = dice.choice((1, 2, 5, 40, 2**31 - 1))
        case "top_p":
            sampling_params.top_p = dice.choice((1e-30, 0.1, 0.5, 0.9, 0.999))
        case "min_p":
            sampling_params.min_p = dice.choice((0.02, 0.2, 1.0))
        case "typical_p":
            sampling_params.typical_p = dice.choice((1e-30, 0.2, 0.6, 0.95))
        case "presence_penalty":
            sampling_params.presence_penalty = dice.choice((-2.0, -0.3, 0.4, 2.0))
        case "frequency_penalty":
            sampling_params.frequency_penalty = dice.choice((-2.0, -0.1, 0.4, 2.0))
        case "repetition_penalty":
            sampling_params.repetition_penalty = dice.choice((0.4, 0.9, 1.2, 1.7, 30.0))
        case "logit_bias":
            sampling_params.logit_bias[base[0]] = dice.choice((-100.0, -2.5, 1.5))
            for id_ in dice.sample(list(ground.live_ids), dice.randint(0, 30)):
                sampling_params.logit_bias[id_] = dice.uniform(-4.0, 4.0)
            sampling_params.logit_bias[ground.mask_ids[0]] = 100.0  # a mask is never chosen all the same
        case "bad_words":
            own = list(dict.fromkeys(base))
            sampling_params.bad_words.append(pb.IdRun(ids=[dice.choice(own)]))
            sampling_params.bad_words.append(pb.IdRun(ids=[*ground.prompt[-2:], base[0]]))  # begins in the prompt
            for length in (2, 2, 3, 5):
                at = dice.randrange(len(base) - length)
                sampling_params.bad_words.append(pb.IdRun(ids=base[at : at + length]))
            for head, last in zip(dice.choices(own, k=40), dice.choices(own, k=40), strict=True):
                sampling_params.bad_words.append(pb.IdRun(ids=[head, last]))
        case "allowed_ids":
            count = dice.choice((12, len(ground.live_ids) // 2))
            sampling_params.allowed_ids.extend([*dice.sample(list(ground.live_ids), count), *ground.mask_ids])
        case "max_tokens":
            limits.max_tokens = dice.randint(1, MAX_TOKENS - 1)
        case "eos_ids":
            limits.eos_ids.append(base[dice.randrange(3, len(base))])
        case "stop_ids":
            limits.stop_ids.extend(base[at] for at in dice.choices(range(4, len(base)), k=2))
        case "min_tokens":
            sampling_params.min_tokens = dice.randint(1, limits.max_tokens)
            (limits.eos_ids if dice.random() < 0.5 else limits.stop_ids).extend(base[::3])
        case _:
            raise ValueError(name)


def request_with(
    subject: Subject, names: Iterable[str], connection: int, temperature: float, dice: Random
) -> SequenceRequest:
    """The request of a seat under these parameters, with the log-probabilities of its ids and some others."""
    bare = subject.request(connection, temperature, "none")
    base = subject.plain(connection, temperature, "none").tokens
    ground = Ground(bare.prompt, base, subject.live_ids, subject.model.facts.mask_ids)
    sampling_params, limits = pb.Sampling(), pb.Limits()
    sampling_params.CopyFrom(bare.sampling)
    limits.max_tokens = MAX_TOKENS
    for name in sorted(names, key=PARAMETERS.index):
        set_parameter(name, sampling_params, limits, ground, dice)
    possible = set(sampling_params.allowed_ids)
    if possible:  # some id is always left
        kept = [run for run in sampling_params.bad_words if run.ids[-1] not in possible]
        del sampling_params.bad_words[:]
        sampling_params.bad_words.extend(kept)
        limits.max_tokens = MAX_TOKENS if possible <= {*limits.eos_ids, *limits.stop_ids} else limits.max_tokens
    return replace(
        bare, sampling=sampling_params, limits=limits, want_logprobs=True, num_logprobs=dice.choice((0, 1, 5, 20))
    )


def repeating(request: SequenceRequest, live_ids: Sequence[int]) -> SequenceRequest:
    """The same with two ids allowed, so that the text repeats itself: long enough for lookups, right and wrong."""
    sampling_params, limits = pb.Sampling(), pb.Limits()
    sampling_params.CopyFrom(request.sampling)
    del sampling_params.allowed_ids[:]
    sampling_params.allowed_ids.extend(live_ids[:2])
    limits.CopyFrom(request.limits)
    limits.max_tokens = max(limits.max_tokens, 2 * MAX_TOKENS)
    return replace(request, sampling=sampling_params, limits=limits)


def random_request(subject: Subject, dice: Random, connection: int) -> SequenceRequest:
    """Two to seven parameters at random, greedy or sampled, with a bound on drafts of its own."""
    names = dice.sample(PARAMETERS, dice.randint(2, 7))
    greedy = "temperature" not in names and dice.random() < 0.35
    request = request_with(subject, names, connection, 0.0 if greedy else dice.choice((0.8, 1.0)), dice)
    return replace(request, max_draft_length=dice.choice((8, 8, 8, 8, 2, 1)))


def random_batch(subject: Subject, dice: Random, size: int) -> list[SequenceRequest]:
    """Unlike requests, and one that repeats itself."""
    requests = [random_request(subject, dice, connection=number % NUM_SEATS) for number in range(size)]
    requests.append(repeating(request_with(subject, (), 1, 1.0, dice), subject.live_ids))
    return requests


def plain_records(subject: Subject, requests: Sequence[SequenceRequest]) -> list[ClientSequence]:
    """Plain decoding, all at once: that company changes no text is the matrix' and the crowd's to show."""
    records = [ClientSequence(request) for request in requests]
    client = WorkerClient(make_worker(subject.model, FixedLayout.full(0), None, num_blocks=NUM_BLOCKS), automatic=True)
    for record in records:
        client.submit(record)
    client.run()
    return records


class MasksAndOracle(ScriptedDrafts):
    """Every third step has the masks' own drafts, the others an oracle's that is wrong half the time."""

    def propose(self, seq_id: int, ids: Sequence[int], max_drafts: int) -> Sequence[int] | None:  # type: ignore[override]
        return None if len(ids) % 3 == 0 else super().propose(seq_id, ids, max_drafts)


def strays(tokens: Sequence[int], live_ids: Sequence[int]) -> tuple[int, ...]:
    """The text with every fifth id another."""
    return tuple(live_ids[at] if at % 5 == 4 else id_ for at, id_ in enumerate(tokens))


def speculate(subject: Subject, plain: Sequence[ClientSequence], mode: str) -> list[ClientSequence]:
    """The requests in one batch that they join one by one, with drafts."""
    k = MODES[mode]
    oracle = MasksAndOracle(RIGHT["half"], subject.live_ids) if mode.startswith("k") else None
    sources = None if oracle is not None else DraftSources(lookup=mode == "lookup")
    if mode == ON_DEVICE:
        layout = FixedLayout.full(k)
        worker = Worker(
            subject.model, num_blocks=NUM_BLOCKS, block_size=4, controller=layout, device_steps=True, eager=True
        )
    else:
        worker = make_worker(subject.model, FixedLayout.full(k), oracle, num_blocks=NUM_BLOCKS, sources=sources)
    client = WorkerClient(worker, max_prefill_rows=13, automatic=True)
    records = []
    for one in plain:
        prediction = strays(one.tokens, subject.live_ids) if mode == "predicted" else ()
        record = ClientSequence(replace(one.request, prediction=prediction, want_logprobs=mode != ON_DEVICE))
        seq_id = client.submit(record).seq_id
        if oracle is not None:
            oracle.futures[seq_id] = Future(one.ids, k)
        records.append(record)
        client.step()
    client.run()
    client.check_all_free()
    return records


def compare(ours: ClientSequence, plain: ClientSequence, where: str) -> None:
    """Ids, end and log-probabilities, to the last bit."""
    sampling_params = f"{ours.request.sampling} {ours.request.limits}".replace("\n", " ")
    if (at := first_difference(ours.tokens, plain.tokens)) is not None:
        raise Mismatch(f"[{where}] {describe_difference(at, ours, plain)} Under {sampling_params}")
    if ours.request.want_logprobs:
        if (at := first_difference(ours.logprobs, plain.logprobs)) is not None:
            raise Mismatch(
                f"[{where}] other log-probabilities: {describe_difference(at, ours, plain)} Under {sampling_params}"
            )
        assert len(ours.logprobs) == len(ours.tokens)
    assert ours.finish == plain.finish, (where, sampling_params)


def check_batch(
    subject: Subject, requests: Sequence[SequenceRequest], modes: Iterable[str] = MODES
) -> list[ClientSequence]:
    """The plain texts, which every mode gives, too; in each of them drafts are accepted and drafts are rejected."""
    plain = plain_records(subject, requests)
    for mode in modes:
        records = speculate(subject, plain, mode)
        for number, (ours, wanted) in enumerate(zip(records, plain, strict=True)):
            compare(ours, wanted, f"{subject.name}, {mode}, request {number}")
        drafted = sum(drafted for record in records for drafted, _ in record.verifications)
        accepted = sum(accepted for record in records for _, accepted in record.verifications)
        assert accepted < drafted, (mode, accepted, drafted)
        assert accepted > 0 or (mode == ON_DEVICE and subject.name != "embedded")  # a random model's own masks guess
    return plain


@pytest.mark.parametrize("names", [PARAMETERS[first::3] for first in range(3)], ids="-".join)
def test_a_parameter_alone_changes_the_plain_text_and_speculation_does_not(
    names: tuple[str, ...], subject_of: Subjects
) -> None:
    subject, dice = subject_of("llama", "float32"), Random("alone")
    batch_params = [
        (name, connection, temperature) for name in names for connection, temperature in ((0, 1.0), (3, 1.0), (0, 0.0))
    ]
    batch_params = [sampling_params for sampling_params in batch_params if sampling_params != ("temperature", 0, 0.0)]
    requests = [
        request_with(subject, (name,), connection, temperature, dice) for name, connection, temperature in batch_params
    ]
    requests.append(repeating(request_with(subject, (), 1, 1.0, dice), subject.live_ids))
    plain = check_batch(subject, requests)
    effects: dict[tuple[str, bool], bool] = defaultdict(bool)
    for (name, connection, temperature), record in zip(batch_params, plain, strict=False):
        effects[name, temperature == 0.0] |= record.tokens != subject.plain(connection, temperature, "none").tokens
    for (name, greedy), effect in effects.items():
        assert effect == (not greedy or name not in WITHOUT_EFFECT_WHEN_GREEDY), name


@pytest.mark.parametrize("seed", range(3))
def test_random_sets_of_parameters_give_the_plain_texts(seed: int, subject_of: Subjects) -> None:
    subject, dice = subject_of("llama", "float32"), Random(f"set {seed}")
    check_batch(subject, random_batch(subject, dice, 12))


def test_random_sets_give_the_plain_texts_of_the_embedded_model(subject_of: Subjects) -> None:
    subject, dice = subject_of("embedded", "float32"), Random("embedded")
    check_batch(subject, random_batch(subject, dice, 3))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("llama", "float32"),
        ("llama", "bfloat16"),
        ("gemma3", "float32"),
        ("qwen3", "bfloat16"),
        ("embedded", "float32"),
    ],
)
def test_five_hundred_random_sets_give_the_plain_texts(model: str, dtype: str, seed: int, subject_of: Subjects) -> None:
    subject, dice = subject_of(model, dtype), Random(f"{model} {dtype} {seed}")
    check_batch(subject, random_batch(subject, dice, 10))


@pytest.mark.parametrize("k", [1, 3, 5])
def test_the_window_ends_a_text_inside_a_run(k: int, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, seed=1, window=40, hidden_size=32, num_heads=2, kv_heads=1)
    subject = Subject("narrow", load_model(path, dtype="float32"))
    dice = Random(k)
    requests = []
    for connection in range(NUM_SEATS):
        request = request_with(subject, (), connection, (0.0, 1.0)[connection % 2], dice)
        requests.append(replace(request, limits=pb.Limits(max_tokens=100), slots_ahead=40 - len(request.prompt)))
    plain = check_batch(subject, requests, [f"k{k}"])
    assert {len(record.ids) for record in plain} == {40}
    assert {record.finish for record in plain} == {pb.FINISH_LENGTH}


@pytest.mark.parametrize("k", [0, 1, 3, 5])
def test_a_text_that_comes_to_where_every_id_is_forbidden_fails_there_and_not_before(
    k: int, subject_of: Subjects
) -> None:
    subject = subject_of("llama", "float32")
    first, second = subject.live_ids[:2]
    sampling_params = pb.Sampling(temperature=0.0, allowed_ids=[first, second])
    sampling_params.logit_bias[first] = 100.0
    for last in (first, second):  # behind six of the first nothing is left
        sampling_params.bad_words.append(pb.IdRun(ids=[first] * 6 + [last]))
    oracle = ScriptedDrafts(RIGHT["half"], subject.live_ids)
    worker = Worker(subject.model, num_blocks=50, controller=FixedLayout.full(k), draft_source=oracle)
    router = WorkerClient(worker)
    prompt = [subject.live_ids[5]] * 3
    seq_id = router.admit(prompt, max_tokens=20, sampling=sampling_params)
    oracle.futures[seq_id] = Future([*prompt, *[first] * 20], k)
    router.run()
    ran = router.sequences[seq_id]
    assert ran.tokens == [first] * 6
    assert ran.finish == pb.FINISH_ERROR
    assert ran.error.startswith(f"{CONTRADICTION} at position {len(prompt) + 6}")
    assert any(ran.accepted) == (k > 0)
