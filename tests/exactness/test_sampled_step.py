"""Steps in one compiled call give plain decoding's text, with drafts refused, taken in part and taken whole, and masks
draft in them what they draft in steps call by call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest
from doubles.worker import PROMPTS, ScriptedDrafts
from exactness_matrix import Subject
from space_common.worker.client import ClientSequence, WorkerClient
from space_model.geometry.draft_layout import DraftLayout
from space_model.loading.load import load_model
from space_model.networks.sampled_step import SampledStep
from space_proto import worker_pb2 as pb
from space_server.drafters.recurrent_drafter import RecurrentDrafter
from space_server.drafters.sequential_drafts import HeadRun
from space_server.host_runner import HostRunner
from space_server.model_runner import SequenceOutput
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from tiny_checkpoints import tiny_adapter, tiny_checkpoint
from torch import Tensor

MAX_TOKENS = 24
GREEDY = (pb.Sampling(),)
SAMPLED = (
    pb.Sampling(seed=3, temperature=0.9),
    pb.Sampling(),
    pb.Sampling(seed=4, temperature=1.2, top_p=0.95, top_k=50),
)


def chains(most: int, head_drafts: int = 0) -> FixedLayout:
    """Drafts without masks; `head_drafts`: that a recurrent head makes for the next step."""
    return FixedLayout(lambda limit: DraftLayout.by_head(min(limit.num_drafts, most), head_drafts))


def decode(subject: Subject, *, in_one_call: bool, k: int = 0, source: ScriptedDrafts | SomeDrafts | None = None,
           samplings: tuple[pb.Sampling, ...] = GREEDY, head_drafts: int = 0) -> list[ClientSequence]:  # fmt: skip
    """Every prompt's run, with the samplings in turn, at first on one page more than it needs for the prompt."""
    worker = Worker(subject.model, num_blocks=64, block_size=4, controller=chains(k, head_drafts), draft_source=source)
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


SIZES: dict[str, int] = {"hidden_size": 32, "num_heads": 2, "kv_heads": 1}
BY_NOISE = (pb.Sampling(seed=3, temperature=0.9), pb.Sampling(seed=4, temperature=1.2))
TRUNCATED = (
    pb.Sampling(seed=3, temperature=0.9, top_p=0.9),
    pb.Sampling(seed=4, temperature=1.2, top_k=20, min_p=0.02),
)
MIXED = (BY_NOISE[0], pb.Sampling())
LAYOUTS = {
    "k1": DraftLayout.full(1, 1),
    "k3": DraftLayout.full(3, 3),
    "pruned": DraftLayout.of(2, (1, 2, 2)),
    "late": DraftLayout.of(3, (0, 2, 0, 1)),  # nothing behind the root, and behind the second draft the first's masks
}


class SomeDrafts:
    """The text's own next ids at two positions of three, a wrong one among them in turn; else the masks draft."""

    def __init__(self, texts: dict[int, list[int]]) -> None:
        self._texts = texts

    def propose(self, seq_id: int, known: Sequence[int], wanted: int) -> list[int] | None:
        if len(known) % 3 == 0:
            return None
        drafts = self._texts[seq_id][len(known) : len(known) + wanted]
        return [id_ ^ 1 if n == len(known) % 4 else id_ for n, id_ in enumerate(drafts)]


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """What the masks drafted, step after step, and for which sequence."""
    found: list[tuple[int, list[int]]] = []
    draft = HostRunner._draft

    def kept(runner: HostRunner, outputs: Sequence[SequenceOutput], computed: object) -> None:
        draft(runner, outputs, computed)  # type: ignore[arg-type]
        found.extend((output.plan.sequence.seq_id, output.drafts) for output in outputs if output.draft_depth)

    monkeypatch.setattr(HostRunner, "_draft", kept)
    return found


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Return a model with two gated adapters and no mask ids of its own."""
    folder = tmp_path_factory.mktemp("gated")
    path = tiny_checkpoint(folder / "base", "llama", seed=1, num_masks=0, **SIZES)
    adapters = {
        name: tiny_adapter(folder / name, path, num_masks=masks, rank=rank, seed=5)
        for name, masks, rank in (("other", 3, 2), ("used", 5, 8))
    }
    return Subject("gated", load_model(path, dtype="bfloat16", adapters=adapters), adapters=("used",))


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Return a model with a recurrent head."""
    sizes = SIZES | {"tie_word_embeddings": False}
    path = tiny_checkpoint(tmp_path_factory.mktemp("headed"), seed=1, head_drafts=3, draft_vocab=60, **sizes)
    return Subject("headed", load_model(path, dtype="bfloat16"))


def decode_by_masks(
    subject: Subject, layout: DraftLayout, samplings: tuple[pb.Sampling, ...], source: SomeDrafts | None,
    *, in_one_call: bool, head_rows: int,
) -> list[ClientSequence]:  # fmt: skip
    """Every prompt's run."""
    model = copy(subject.model)
    model.facts = replace(model.facts, head_rows=head_rows)
    fixed = FixedLayout(lambda limit: layout.with_drafts(limit.num_drafts))
    worker = Worker(model, num_blocks=64, block_size=4, controller=fixed, draft_source=source)
    if not in_one_call:
        worker.engine.host._sampled_step = None
    router = WorkerClient(worker)
    numbers = [
        router.admit(
            prompt, max_tokens=MAX_TOKENS - n, sampling=samplings[n % len(samplings)], adapter=subject.adapters[0]
        )
        for n, prompt in enumerate(PROMPTS)
    ]
    router.run()
    return [router.sequences[number] for number in numbers]


@pytest.mark.parametrize("head_rows", [0, 40], ids=["two products of the head", "one"])
@pytest.mark.parametrize("samplings", [GREEDY, BY_NOISE, TRUNCATED], ids=["greedy", "sampled", "truncated"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("name", ["llama", "gated", "embedded"])
def test_masks_draft_in_one_call_what_they_draft_call_by_call(
    name: str,
    layout: DraftLayout,
    samplings: tuple[pb.Sampling, ...],
    head_rows: int,
    subject_of: Callable[[str, str], Subject],
    gated: Subject,
    runs: list[list[int] | None],
    drafted: list[tuple[int, list[int]]],
) -> None:
    subject = gated if name == "gated" else subject_of(name, "bfloat16")
    if subject.model.facts.attention != "compiled":
        pytest.skip("there are no compiled operations here")
    plain = decode(subject, in_one_call=False, samplings=samplings)
    texts = {n: prompt + one.tokens for n, (prompt, one) in enumerate(zip(PROMPTS, plain, strict=True), start=1)}
    source = SomeDrafts(texts)
    drafted.clear()
    found = decode_by_masks(subject, layout, samplings, source, in_one_call=True, head_rows=head_rows)
    in_one_call, num_runs = [*drafted], len(runs)
    assert None not in runs
    assert num_runs > MAX_TOKENS / (layout.num_drafts + 2)
    by_calls = decode_by_masks(subject, layout, samplings, source, in_one_call=False, head_rows=head_rows)
    assert len(runs) == num_runs
    assert [one.tokens for one in found] == [one.tokens for one in by_calls] == [one.tokens for one in plain]
    assert [one.verifications for one in found] == [one.verifications for one in by_calls]
    assert in_one_call == drafted[len(in_one_call) :]
    assert len(in_one_call) > MAX_TOKENS / 2
    accepted = {count for one in found for num_drafted, count in one.verifications if num_drafted}
    assert {0, layout.num_drafts} <= accepted


@pytest.mark.parametrize(
    "samplings", [GREEDY, BY_NOISE, TRUNCATED, MIXED], ids=["greedy", "sampled", "truncated", "mixed"]
)
def test_a_recurrent_head_drafts_behind_one_call_what_it_drafts_call_by_call(
    samplings: tuple[pb.Sampling, ...],
    headed: Subject,
    runs: list[list[int] | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if headed.model.facts.attention != "compiled":
        pytest.skip("there are no compiled operations here")
    head = headed.model.recurrent_head_of(None)
    assert head is not None
    assert head.compiled is not None
    drafted: list[list[list[int]]] = []
    draft = RecurrentDrafter.draft

    def kept(drafter: RecurrentDrafter, hidden: Tensor, head_runs: Sequence[HeadRun]) -> list[list[int]]:
        drafted.append(draft(drafter, hidden, head_runs))
        return drafted[-1]

    monkeypatch.setattr(RecurrentDrafter, "draft", kept)
    plain = decode(headed, in_one_call=False, samplings=samplings)
    assert not drafted
    source = SomeDrafts({n: prompt + one.tokens for n, (prompt, one) in enumerate(zip(PROMPTS, plain, strict=True), 1)})
    found = decode(headed, in_one_call=True, k=3, source=source, head_drafts=3, samplings=samplings)
    in_one_call, num_runs = [*drafted], len(runs)
    assert None not in runs
    by_calls = decode(headed, in_one_call=False, k=3, source=source, head_drafts=3, samplings=samplings)
    assert len(runs) == num_runs > MAX_TOKENS / 4
    assert len([made for made in in_one_call if made]) > MAX_TOKENS / 6
    assert in_one_call == drafted[len(in_one_call) :]
    assert [one.tokens for one in found] == [one.tokens for one in by_calls] == [one.tokens for one in plain]
    assert [one.verifications for one in found] == [one.verifications for one in by_calls]
    accepted = {count for one in found for num_drafted, count in one.verifications if num_drafted}
    assert {0, 1} <= accepted


def test_in_one_call_masks_draft_for_greedy_beside_sampled_sequences(
    subject_of: Callable[[str, str], Subject], runs: list[list[int] | None], drafted: list[tuple[int, list[int]]]
) -> None:
    """A greedy sequence's candidates are more beside a sampled one that drafts, and its drafts may be others then."""
    subject = subject_of("embedded", "bfloat16")
    plain = decode(subject, in_one_call=False, samplings=MIXED)
    made = []
    for in_one_call in (True, False):
        drafted.clear()
        found = decode_by_masks(subject, DraftLayout.full(3, 3), MIXED, None, in_one_call=in_one_call, head_rows=40)
        assert [one.tokens for one in found] == [one.tokens for one in plain]
        assert all({0, 3} <= set(one.accepted) for one in found[:2])
        made.append([[drafts for number, drafts in drafted if number == one] for one in (1, 3)])
    assert runs
    assert made[0] == made[1]


def test_masks_of_an_adapter_without_a_draft_head_draft_call_by_call(
    runs: list[list[int] | None], tmp_path: Path
) -> None:
    path = tiny_checkpoint(tmp_path / "base", "llama", seed=1, num_masks=0, **SIZES)
    adapter = tiny_adapter(tmp_path / "adapter", path, num_masks=3, rank=2, seed=5, draft_head=False)
    model = load_model(path, dtype="bfloat16", adapters={"used": adapter})
    if model.facts.attention != "compiled":
        pytest.skip("there are no compiled operations here")
    subject = Subject("gated", model, adapters=("used",))
    found = decode_by_masks(subject, DraftLayout.full(2, 2), GREEDY, None, in_one_call=True, head_rows=8)
    assert len(runs) < MAX_TOKENS / 2  # the last steps, which draft nothing
    assert [one.tokens for one in found] == [one.tokens for one in decode(subject, in_one_call=False)]
