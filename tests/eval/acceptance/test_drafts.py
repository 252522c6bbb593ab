"""`spaceserve eval drafts`: drafts judged over a text are those that a worker accepts while it decodes that text."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from space_common.worker.completion import generate
from space_eval.__main__ import main
from space_eval.acceptance.drafts import DraftsRow
from space_kernels.sampling.sampler import gumbel_argmax
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.loading.load import load_model
from space_proto import worker_pb2 as pb
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from space_train.data.train_batch import Texts
from space_train.session import load_base
from space_train.training.expected_accepted import (
    AcceptedDrafts,
    accepted_drafts,
    chosen_ids,
    drafting_model,
    drafting_plan,
)
from tiny_checkpoints import tiny_checkpoint

SEED = 3


def decoded(model: str | Path, controller: FixedLayout, k: int, temperature: float) -> tuple[list[int], dict[int, int]]:
    """Ids of a text of 150, and the drafts that were accepted by root position, of steps that had all k drafts."""
    loaded = load_model(model, dtype="float32", num_threads=1)
    worker = Worker(loaded, num_blocks=32, max_sequences=1, max_draft_length=k, controller=controller)
    prompt = [1, 40, 41, 42]
    sampling = pb.Sampling(seed=SEED, temperature=temperature)
    (made,) = generate(worker, [prompt], sampling=sampling, max_tokens=150, max_draft_length=k, eos_ids=[])
    accepted = dict[int, int]()
    end = len(prompt)  # position of the last token before the step: the bonus that its drafts follow
    for step in made.steps:
        if step.num_drafted == k and end + k < len(prompt) + len(made.tokens):
            accepted[end - 1] = step.num_accepted
        end += len(step.tokens)
    return prompt + made.tokens, accepted


def judged(model: str | Path, ids: list[int], k: int, temperature: float) -> dict[str, AcceptedDrafts]:
    checkpoint = Checkpoint.open(str(model))
    plan = drafting_plan(checkpoint, precision="no", length=len(ids))
    trainee = drafting_model(load_base(checkpoint, plan), checkpoint, plan)
    everything = torch.ones(1, len(ids), dtype=torch.bool)
    texts = Texts(torch.tensor([ids]), everything, torch.zeros(1, len(ids), dtype=torch.int64), everything[0, :1])
    found = accepted_drafts(trainee, texts, num_drafts=k, temperatures=[temperature], every=1, seed=SEED)
    return {drafts.drafts: drafts for drafts in found}


def check_judged_as_decoded(
    model: str | Path, controller: FixedLayout, k: int, temperature: float, kind: str
) -> dict[int, int]:
    """Return the accepted drafts by root position, which must be what `accepted_drafts` finds in the same text."""
    ids, accepted = decoded(model, controller, k, temperature)
    drafts = judged(model, ids, k, temperature)[kind]
    found = dict(zip(drafts.root.tolist(), drafts.per_step.tolist(), strict=True))
    assert {root: found[root] for root in accepted} == accepted
    assert len(accepted) > 30
    return accepted


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_masks_and_head_are_judged_as_a_worker_does(temperature: float) -> None:
    accepted = check_judged_as_decoded("demo", FixedLayout.full(3), 3, temperature, "head")
    assert len(set(accepted.values())) > 2


@pytest.mark.parametrize("draft_vocab", [None, 60])
def test_a_recurrent_head_is_judged_as_a_worker_does(tmp_path: Path, draft_vocab: int | None) -> None:
    model = tiny_checkpoint(tmp_path / "model", num_masks=0, head_drafts=4, draft_vocab=draft_vocab)
    accepted = check_judged_as_decoded(model, FixedLayout.by_head(4), 4, 3.0, "recurrent")
    assert len(set(accepted.values())) > 1


@pytest.mark.parametrize("adapter_rank", [None, 4])
def test_random_masks_are_judged_as_a_worker_does(tmp_path: Path, adapter_rank: int | None) -> None:
    model = tiny_checkpoint(tmp_path / "model", num_masks=2, adapter_rank=adapter_rank)
    accepted = check_judged_as_decoded(model, FixedLayout.full(2), 2, 1.2, "head")
    assert len(set(accepted.values())) > 1


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.5])
def test_draws_are_the_reference_draws_and_leave_the_logits_alone(temperature: float) -> None:
    logits = 4.0 * torch.randn(30, 500, generator=torch.Generator().manual_seed(SEED))
    logits[:, 7] = -torch.inf
    before, positions = logits.clone(), 11 * torch.arange(30) + 2
    wanted = gumbel_argmax(logits / temperature, torch.full_like(positions, SEED), positions)
    assert chosen_ids(logits, temperature, positions, SEED).tolist() == wanted.tolist()
    assert torch.equal(logits, before)
    assert len(set(wanted.tolist())) > 10


def test_a_row_has_the_mean_its_bounds_and_the_difference_of_the_same_steps() -> None:
    rows, roots = np.repeat(np.arange(40), 5), np.tile(np.arange(5), 40)
    one = AcceptedDrafts("masks", 0.0, np.tile([[True, False], [True, True]], (100, 1)), rows, roots)
    two = AcceptedDrafts("masks", 0.0, np.tile([[True, True], [True, True]], (100, 1)), rows, roots)
    first, second = DraftsRow.of("one", one, None), DraftsRow.of("two", two, one)
    assert (first.accepted_per_step, first.difference, first.conditional) == (1.5, None, (1.0, 0.5))
    assert 1.4 < first.low < 1.5 < first.high < 1.6
    assert second.difference is not None
    assert second.difference[0] == 0.5
    assert 0.4 < second.difference[1] < 0.5 < second.difference[2] < 0.6


def test_the_command_compares_checkpoints_on_the_same_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "held.jsonl"
    texts.write_text(
        "".join(json.dumps({"text": f"def add_{n}(a, b):\n    return a + b + {n}\n" * 8}) + "\n" for n in range(6))
    )
    out = tmp_path / "out"
    given = ["drafts", "--model", "demo", "demo", "--texts", str(texts), "--length", "128", "--temperature", "0"]
    assert main([*given, "--k", "2", "--out", str(out)]) == 0
    assert "over the first" in capsys.readouterr().out
    first, second = (row for row in json.loads((out / "drafts.json").read_text())["rows"] if row["drafts"] == "head")
    assert first["accepted_per_step"] == second["accepted_per_step"] > 0.5
    assert second["difference"] == [0.0, 0.0, 0.0]


def test_what_drafts_nothing_and_too_many_drafts_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "held.jsonl"
    texts.write_text('{"text": "one two three"}\n')
    model = tiny_checkpoint(tmp_path / "model", num_layers=1, num_masks=0)
    assert main(["drafts", "--model", str(model), "--texts", str(texts)]) == 2
    assert "neither masks nor a recurrent head" in capsys.readouterr().err
    assert main(["drafts", "--texts", str(texts), "--k", "99"]) == 2
    assert "--k 99 is more than the" in capsys.readouterr().err
    other = tiny_checkpoint(tmp_path / "other", num_layers=1)
    assert main(["drafts", "--model", "demo", str(other), "--texts", str(texts)]) == 2
    assert "encodes these texts otherwise than demo" in capsys.readouterr().err
    assert main(["drafts", "--texts", str(tmp_path / "nowhere.jsonl")]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err
