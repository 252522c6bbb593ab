"""The published data collator: masks behind a random cut, for an unmodified `transformers.Trainer`."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from space_model.random_checkpoint import FIRST_MASK
from space_train.data.examples import NOT_LEARNED, Example
from space_train.data.paper_collator import PaperCollator, cut_at, cut_places, whole
from space_train.data.train_batch import anchor_rows
from tiny_checkpoints import tiny_checkpoint
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

PAD, MASK = 0, 99
NO = NOT_LEARNED
# y0 .. y9, of which the model learns y4 on.
TEXT = Example(list(range(10, 20)), [place >= 4 for place in range(10)])


def collator(**options: Any) -> PaperCollator:
    return PaperCollator(**({"mask_ids": MASK, "pad_id": PAD, "num_masks": 2, "sar_share": 1.0} | options))


def texts(count: int, length: int = 12) -> list[Example]:
    rng = np.random.default_rng(0)
    return [
        Example(rng.integers(20, 90, length).tolist(), [place >= 4 for place in range(length)]) for _ in range(count)
    ]


def cuts(collator: PaperCollator, examples: list[Example]) -> list[int | None]:
    return [collator.cut_of(example) for example in examples]


def test_cut_texts_are_the_hand_made_ones() -> None:
    sample = cut_at(TEXT, 5, [MASK, MASK + 1])
    #                        y0  y1  y2  y3  y4  M1    M2        y5 .. y7 are learned by y4, M1 and M2
    assert sample.inputs == [10, 11, 12, 13, 14, MASK, MASK + 1]
    assert sample.labels == [NO, NO, NO, NO, 14, 15, 16, 17]
    example = Example([7, 8, 9], [False, True, True])
    assert cut_places(example, 1) == [1]
    assert cut_at(example, 1, [MASK]).inputs == [7, MASK]
    assert cut_at(example, 1, [MASK]).labels == [NO, 8, 9]


def test_the_batch_holds_cut_and_whole_texts_filled_up_on_the_right() -> None:
    short = Example([30, 31], [False, True])  # too short to be cut
    batch = collator(seed=1)([TEXT, short.feature()])
    (cut,) = cuts(collator(seed=1), [TEXT])
    width = cut + 3
    assert batch["input_ids"].tolist() == [[*TEXT.ids[:cut], MASK, MASK, PAD], [30, 31, *[PAD] * (width - 2)]]
    assert batch["attention_mask"].tolist() == [[1] * (width - 1) + [0], [1, 1, *[0] * (width - 2)]]
    expected = [NO] * 4 + TEXT.ids[4 : cut + 3]
    assert batch["labels"].tolist() == [expected, [NO, 31, *[NO] * (width - 2)]]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64


def test_masks_stand_and_learn_as_the_rows_of_the_same_anchor() -> None:
    k = 3
    learnable = np.array([TEXT.learned])
    for cut in cut_places(TEXT, k):
        rows = anchor_rows([[(cut, k)]], learnable)
        sample = cut_at(TEXT, cut, [MASK] * k)
        at = [place for place, id in enumerate(sample.inputs) if id == MASK]
        assert at == rows.positions[0].tolist()
        # The row at p learns the label at p+1.
        assert [sample.labels[place + 1] for place in at] == [TEXT.ids[target] for target in rows.target[0]]
        assert rows.learns.all()
        # Causal attention lets each mask see what the anchor's rows see.
        visible = rows.visible(torch.zeros(1, len(TEXT.ids), dtype=torch.long))[0]
        seen = [len(TEXT.ids[:cut]) + j + 1 for j in range(k)]
        assert visible.sum(1).tolist() == seen


def test_the_label_of_a_row_is_what_transformers_makes_it_learn(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(tmp_path / "model"))
    batch = collator(seed=1)([TEXT])
    (cut,) = cuts(collator(seed=1), [TEXT])
    with torch.no_grad():
        out = model(**batch)
    # Row by row: y3 learns y4 … the root y_{s-1} learns y_s, mask j at s+j-1 learns y_{s+j}.
    rows = list(range(3, cut + 2))
    logits = out.logits[0, rows].log_softmax(-1)
    loss = -logits[torch.arange(len(rows)), torch.tensor(TEXT.ids[4 : cut + 3])].mean()
    torch.testing.assert_close(out.loss, loss)


def test_the_loss_is_that_of_the_published_rows(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(tmp_path / "model"))
    k = 3
    for cut in cut_places(TEXT, k):
        # As published: k+1 masks behind the cut, labels up to the last mask's.
        ids = torch.tensor([TEXT.ids[:cut] + [MASK] * (k + 1)])
        labels = torch.tensor([[NO] * 4 + TEXT.ids[4 : cut + k + 1]])
        ours = cut_at(TEXT, cut, [MASK] * k)
        assert ours.labels == labels[0].tolist()
        with torch.no_grad():
            published = model(input_ids=ids, labels=labels).loss
            batch = {"input_ids": torch.tensor([[*ours.inputs, PAD]]), "labels": torch.tensor([ours.labels])}
            attention_mask = torch.tensor([[1] * len(ours.inputs) + [0]])
            torch.testing.assert_close(model(**batch, attention_mask=attention_mask).loss, published)


def test_every_place_with_all_its_targets_in_one_answer_is_drawn_and_no_other() -> None:
    learned = [False, True, True, True, False, False, True, True, True, True]
    example = Example(list(range(20, 30)), learned)
    assert cut_places(example, 2) == [1, 6, 7]
    drawn = {collator(seed=seed).cut_of(example) for seed in range(60)}
    assert drawn == {1, 6, 7}
    assert cut_places(Example([1, 2, 3, 4], [True] * 4), 1) == [1, 2]
    example = Example([1, 2, 3, 4], [False, True, True, True])
    assert collator(num_masks=3).cut_of(example) is None
    assert collator(num_masks=3).sample(example) == whole(example)


def test_about_the_given_share_of_samples_is_cut() -> None:
    examples = texts(2000)
    for share in (0.0, 0.5, 1.0):
        found = cuts(collator(sar_share=share), examples)
        assert abs(sum(cut is not None for cut in found) / len(found) - share) < 0.04


def test_masks_may_have_ids_of_their_own_and_batches_a_multiple() -> None:
    batch = collator(mask_ids=[97, 98])([TEXT])
    assert [id for id in batch["input_ids"][0].tolist() if id > 90] == [97, 98]
    assert collator(multiple_of=8)([TEXT])["input_ids"].shape[1] in (8, 16)


def test_fixed_cuts_stay_and_fresh_ones_change_with_the_epoch() -> None:
    examples = texts(40)
    fixed, fresh = collator(fixed=True), collator(fixed=False)
    found = []
    for epoch in (0, 1, 0):
        fixed.set_epoch(epoch)
        fresh.set_epoch(epoch)
        found.append((cuts(fixed, examples), cuts(fresh, examples)))
    (fixed_0, fresh_0), (fixed_1, fresh_1), (_, fresh_again) = found
    assert fixed_0 == fixed_1 == fresh_0 == fresh_again
    assert fresh_1 != fresh_0
    assert cuts(collator(seed=7), examples) != fixed_0


def test_a_draw_depends_on_the_sample_and_not_on_its_place_in_a_batch_or_a_run() -> None:
    examples = texts(6)
    one = collator()
    alone = [one([example])["labels"][0] for example in examples]
    for example, labels in zip(examples[::-1], one(examples[::-1])["labels"], strict=True):
        expected = alone[examples.index(example)]
        assert labels[: len(expected)].tolist() == expected.tolist()


def test_fresh_cuts_without_an_epoch_are_refused_with_the_cure() -> None:
    with pytest.raises(RuntimeError, match=r"callbacks=\[collator\]\), call set_epoch, or draw once with fixed=True"):
        collator(fixed=False)([TEXT])


def test_workers_that_outlive_an_epoch_learn_of_the_next() -> None:
    examples = texts(8)
    fresh, alone = collator(fixed=False), collator(fixed=False)
    loader: DataLoader[Any] = DataLoader(
        [example.feature() for example in examples],  # type: ignore[arg-type]
        batch_size=4,
        collate_fn=fresh,
        num_workers=2,
        persistent_workers=True,
    )
    seen = []
    for epoch in (0, 1):
        fresh.set_epoch(epoch)
        alone.set_epoch(epoch)
        batches = list(loader)
        for number, batch in enumerate(batches):
            expected = alone(examples[4 * number : 4 * number + 4])
            assert all(torch.equal(batch[name], expected[name]) for name in expected)
        seen.append([batch["labels"].tolist() for batch in batches])
    assert seen[0] != seen[1]


def test_a_collator_survives_being_sent_to_another_process() -> None:
    one = collator(fixed=False)
    one.set_epoch(3)
    assert cuts(pickle.loads(pickle.dumps(one)), texts(9)) == cuts(one, texts(9))


def features(count: int) -> list[dict[str, list[int]]]:
    """Texts that count upwards from a random id: easy to learn, for the masks too."""
    rng = np.random.default_rng(1)
    return [
        Example(list(range(start, start + 16)), [place >= 3 for place in range(16)]).feature()
        for start in rng.integers(20, 100, count).tolist()
    ]


def mask_loss(model: Any, samples: list[dict[str, list[int]]]) -> float:
    """Of the mask rows alone, every sample cut."""
    batch = PaperCollator(mask_ids=FIRST_MASK, pad_id=PAD, num_masks=3, sar_share=1.0)(samples)
    is_mask = batch["input_ids"][:, :-1] == FIRST_MASK
    batch["labels"][:, 1:][~is_mask] = NO
    model.eval()
    with torch.no_grad():
        return float(model(**batch).loss)


@pytest.fixture
def model(tmp_path: Path) -> Any:
    path = tiny_checkpoint(tmp_path / "model", hidden_size=32, num_layers=1, num_heads=2, kv_heads=1, num_masks=1)
    return AutoModelForCausalLM.from_pretrained(path)


def trainer(model: Any, folder: Path, collator: PaperCollator, **options: Any) -> Trainer:
    settings = {
        "per_device_train_batch_size": 8,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "cosine",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "logging_steps": 1,
    }
    arguments = TrainingArguments(str(folder), **(settings | options))
    callbacks = None if collator.fixed else [collator]
    return Trainer(model, arguments, data_collator=collator, train_dataset=features(64), callbacks=callbacks)


def test_an_unmodified_trainer_teaches_masks_and_text(tmp_path: Path, model: Any) -> None:
    samples = features(32)
    before = mask_loss(model, samples)
    paper = PaperCollator(mask_ids=FIRST_MASK, pad_id=PAD, num_masks=3)
    run = trainer(model, tmp_path, paper, num_train_epochs=6)
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert len(losses) == 48
    assert np.mean(losses[-8:]) < 0.5 * np.mean(losses[:8])
    assert mask_loss(model, samples) < 0.8 * before


def test_the_trainer_tells_the_collator_of_each_epoch(tmp_path: Path, model: Any) -> None:
    fresh = PaperCollator(mask_ids=FIRST_MASK, pad_id=PAD, num_masks=3, fixed=False)
    seen: list[tuple[int, int]] = []
    draw = fresh.cut_of

    def watched(example: Example) -> int | None:
        seen.append((int(fresh._epoch), example.ids[0]))
        return draw(example)

    fresh.cut_of = watched  # type: ignore[method-assign]
    run = trainer(model, tmp_path, fresh, num_train_epochs=3)
    assert np.isfinite(run.evaluate(features(4))["eval_loss"])  # before any epoch, too
    seen.clear()
    run.train()
    firsts = sorted(feature["input_ids"][0] for feature in features(64))
    for epoch in range(3):
        assert sorted(first for reported, first in seen if reported == epoch) == firsts


def test_a_resumed_trainer_draws_the_cuts_of_the_epoch_it_is_in(tmp_path: Path, model: Any) -> None:
    def run(folder: Path, resume: bool, **options: Any) -> Trainer:
        fresh = PaperCollator(mask_ids=FIRST_MASK, pad_id=PAD, num_masks=3, fixed=False)
        path = tiny_checkpoint(folder / "base", hidden_size=32, num_layers=1, num_heads=2, kv_heads=1, num_masks=1)
        one = trainer(AutoModelForCausalLM.from_pretrained(path), folder, fresh, num_train_epochs=2, **options)
        one.train(resume_from_checkpoint=resume)
        return one

    whole_run = run(tmp_path / "whole", False, save_strategy="steps", save_steps=11)
    whole = [entry["loss"] for entry in whole_run.state.log_history if "loss" in entry]
    # As after a kill: the checkpoint of step 11, in the middle of the second epoch, is all that is left.
    resumed_run = run(tmp_path / "whole", True)
    resumed = [entry["loss"] for entry in resumed_run.state.log_history if "loss" in entry]
    assert resumed == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_masks": 0}, "num_masks must be at least 1; got 0"),
        ({"mask_ids": [1, 2, 3]}, r"2 masks need one shared id, or 2 ids; got 3: \[1, 2, 3\]"),
        ({"mask_ids": []}, "2 masks need one shared id, or 2 ids; got 0"),
        ({"mask_ids": -1}, "Ids must be 0 or more; got mask_ids=-1, pad_id=0"),
        ({"pad_id": None}, "Ids must be 0 or more; got mask_ids=99, pad_id=None"),
        ({"sar_share": 1.5}, "sar_share is a chance, from 0 to 1; got 1.5"),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"multiple_of": 0}, "multiple_of 1 or more; got seed=0, multiple_of=0"),
    ],
)
def test_senseless_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collator(**options)


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        ({"text": "x"}, "A sample needs input_ids; this one has text"),
        ({"input_ids": []}, "A sample is empty"),
        ({"input_ids": [1, 2], "labels": [1]}, "A sample has 2 input_ids and 1 labels; they must be as many"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, NO]}, "must be its input_ids, or -100 .*; the model shifts them"),
        ({"input_ids": [1, 0], "attention_mask": [1, 0]}, "A sample is padded already"),
        ({"input_ids": [1, MASK, 2]}, "A sample has the mask id 99 at place 1: a mask is no text"),
    ],
)
def test_broken_samples_are_refused(feature: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collator()([feature])


def test_samples_may_be_tensors_and_an_epoch_below_0_is_refused() -> None:
    ids = torch.tensor([1, 2, 3])
    batch = collator(sar_share=0.0)([{"input_ids": ids, "attention_mask": torch.ones(3)}])
    assert batch["labels"].tolist() == [[NO, 2, 3]]
    with pytest.raises(ValueError, match="Epochs are numbered from 0; got -1"):
        collator().set_epoch(-1)
