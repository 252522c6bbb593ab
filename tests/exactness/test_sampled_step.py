"""Steps in one compiled call give plain decoding's text, with drafts refused, taken in part and taken whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from doubles.worker import PROMPTS, ScriptedDrafts
from exactness_matrix import Subject
from space_common.worker.client import ClientSequence, WorkerClient
from space_model.geometry.draft_layout import DraftLayout
from space_model.networks.sampled_step import SampledStep
from space_proto import worker_pb2 as pb
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker

MAX_TOKENS = 24
GREEDY = (pb.Sampling(),)
SAMPLED = (
    pb.Sampling(seed=3, temperature=0.9),
    pb.Sampling(),
    pb.Sampling(seed=4, temperature=1.2, top_p=0.95, top_k=50),
)


def chains(most: int) -> FixedLayout:
    """Drafts without masks."""
    return FixedLayout(lambda limit: DraftLayout.by_head(min(limit.num_drafts, most), 0))


def decode(subject: Subject, *, in_one_call: bool, k: int = 0, source: ScriptedDrafts | None = None,
           samplings: tuple[pb.Sampling, ...] = GREEDY) -> list[ClientSequence]:  # fmt: skip
    """Every prompt's run, with the samplings in turn, at first on one page more than it needs for the prompt."""
    worker = Worker(subject.model, num_blocks=64, block_size=4, controller=chains(k), draft_source=source)
    if not in_one_call:
        worker.engine.host._sampled_step = None
    router = WorkerClient(worker)
    numbers = [
        router.admit(prompt, max_tokens=MAX_TOKENS - n, sampling=samplings[n % len(samplings)])
        for n, prompt in enumerate(PROMPTS)
    ]
    router.run()
    assert worker.num_forwards == sum(report.stepped for report in router.reports)
    return [router.sequences[number] for number in numbers]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[int] | None]:
    """What each step in one call gave."""
    found: list[list[int] | None] = []
    run = SampledStep.run

    def counted(step: SampledStep) -> list[int] | None:
        found.append(run(step))
        return found[-1]

    monkeypatch.setattr(SampledStep, "run", counted)
    return found


@pytest.mark.parametrize("samplings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("k", "kind"), [(0, "none"), (3, "oracle"), (3, "half right"), (5, "wrong")])
def test_the_text_and_the_accepted_drafts_are_those_of_steps_call_by_call(
    k: int,
    kind: str,
    samplings: tuple[pb.Sampling, ...],
    subject_of: Callable[[str, str], Subject],
    runs: list[list[int] | None],
) -> None:
    subject = subject_of("llama", "bfloat16")
    if subject.model.facts.attention != "compiled":
        pytest.skip("there are no compiled operations here")
    plain = decode(subject, in_one_call=False, samplings=samplings)
    assert not runs
    texts = {n: prompt + one.tokens for n, (prompt, one) in enumerate(zip(PROMPTS, plain, strict=True), start=1)}
    wrong = {"half right": lambda position: position % 16 in (0, 1, 4), "wrong": lambda position: True}.get(kind)
    source = None if kind == "none" else ScriptedDrafts(texts, wrong=wrong or (lambda position: False))
    found = decode(subject, in_one_call=True, k=k, source=source, samplings=samplings)
    assert runs
    assert None not in runs
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    by_calls = decode(subject, in_one_call=False, k=k, source=source, samplings=samplings)
    assert [one.verifications for one in found] == [one.verifications for one in by_calls]
    accepted = {count for one in found for drafted, count in one.verifications if drafted == k}
    if kind == "half right":
        assert {0, k} <= accepted
        assert accepted & set(range(1, k))
    assert kind != "wrong" or accepted == {0}


def test_a_step_beside_a_penalised_sequence_goes_call_by_call(
    subject_of: Callable[[str, str], Subject], runs: list[list[int] | None]
) -> None:
    subject = subject_of("llama", "bfloat16")
    mixed = (pb.Sampling(), pb.Sampling(repetition_penalty=1.2))
    found, wanted = (decode(subject, in_one_call=one, samplings=mixed) for one in (True, False))
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    assert len(runs) < MAX_TOKENS / 2
