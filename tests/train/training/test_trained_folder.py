"""What a run leaves is a checkpoint that serves, and a report."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles.training import decoder_rows, random_examples, random_ids, read_model, rows_for, run, tiny_plan
from safetensors.torch import load_file, save_file
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.loading.load import load_model
from space_model.model_error import InvalidSpaceSection, UnsupportedModel
from space_train.data.examples import Example
from space_train.data.rows import MixedRows, PackedExamples, PackedTokens, RowStream, TokenRows
from space_train.data.train_batch import Texts
from space_train.reports import write_report
from space_train.run_folder import STATE_FILE, fingerprint, load_checkpoint, save_atomically
from space_train.session import load_base
from space_train.train_plan import Budget, HeadForm, InvalidPlan, Method, TrainPlan
from space_train.training.checkpoint import OwnMasks
from tiny_checkpoints import released_adapter, tiny_checkpoint
from torch.nn import functional


def stopped() -> None:
    raise KeyboardInterrupt


def trained(out: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = load_checkpoint(out / STATE_FILE)["trained"]
    return weights


def test_adapters_leave_every_bit_of_the_base_and_of_its_text(base: Path, tmp_path: Path) -> None:
    result = run(base, tiny_plan(), tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (base, result.folder))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (result.folder / "model.safetensors").samefile(base / "model.safetensors")
    ids = random_ids(30, 5)
    plain, adapted = load_model(base), load_model(result.folder)
    assert adapted.facts.adapters[0].num_masks == 3
    assert [0 <= chance <= 1 for chance in adapted.facts.adapters[0].acceptance] == [True] * 3
    alone, beside = decoder_rows(plain, ids, 0), decoder_rows(adapted, ids, 3, 0)
    assert torch.equal(plain.logits(alone), adapted.logits(beside[:30]))


def test_an_adapter_names_the_weights_it_was_trained_on_and_is_refused_on_others(base: Path, tmp_path: Path) -> None:
    folder = run(base, tiny_plan(), tmp_path / "out").folder
    own = hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()
    assert json.loads((folder / "config.json").read_text())["space"]["base_sha256"] == own
    assert load_model(folder).facts.num_masks == 3
    assert load_model(base, adapters={"mine": folder}).facts.adapters[0].num_masks == 3
    other = tiny_checkpoint(tmp_path / "other", num_masks=0, seed=99)
    with pytest.raises(InvalidSpaceSection, match=f"made for weights with the sha256 {own}; those of"):
        load_model(other, adapters={"mine": folder})
    (folder / "model.safetensors").unlink()  # a link to the base's
    shutil.copyfile(other / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(InvalidSpaceSection, match=own):
        load_model(folder)


@pytest.mark.parametrize(
    ("method", "rank", "names"), [(Method.HEAD, 2, True), (Method.HEAD, None, False), (Method.FULL, None, False)]
)
def test_only_an_adapter_names_weights(method: Method, rank: int | None, names: bool, tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", num_masks=3, adapter_rank=rank)
    folder = run(source, tiny_plan(method), tmp_path / "out", dtype=torch.float32).folder
    assert ("base_sha256" in json.loads((folder / "config.json").read_text())["space"]) == names
    assert load_model(folder).facts.num_masks == 3


def test_weights_have_the_asked_type_and_a_frozen_base_its_own(base: Path, space: Path, tmp_path: Path) -> None:
    for method, source, frozen in ((Method.FULL, base, False), (Method.HEAD, space, True), (Method.SFT, base, False)):
        folder = run(source, tiny_plan(method), tmp_path / method, dtype=torch.bfloat16).folder
        dtypes = {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()}
        assert dtypes == {torch.float32 if frozen else torch.bfloat16}
        config = json.loads((folder / "config.json").read_text())
        assert config.get("dtype", config.get("torch_dtype")) == ("float32" if frozen else "bfloat16")
        assert load_model(folder).facts.dtype == dtypes.pop()
        if method is not Method.SFT:
            head = load_file(folder / "draft_head.safetensors")
            assert {tensor.dtype for tensor in head.values()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_grown_vocabulary_is_written_whole_tied_weights_once(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "base", num_masks=0, tie_word_embeddings=tied)
    folder = run(source, tiny_plan(Method.FULL), tmp_path / "out", tokenizer_size=127, dtype=dtype).folder
    weights = load_file(folder / "model.safetensors")
    assert len(weights["model.embed_tokens.weight"]) == 130
    assert ("lm_head.weight" in weights) != tied
    model = load_model(folder)
    assert (model.facts.vocab_size, model.facts.mask_ids) == (130, (127, 128, 129))


def test_masks_that_the_checkpoint_has_are_trained_on_not_replaced(space: Path, tmp_path: Path) -> None:
    """Others in their place would leave the old ids in the vocabulary, to be written into texts."""
    plan = tiny_plan(Method.FULL, budget=Budget(steps=0))
    folder = run(space, plan, tmp_path, dtype=torch.float32).folder
    assert load_model(folder).facts.mask_ids == load_model(space).facts.mask_ids == (4, 5, 6)
    name = "model.embed_tokens.weight"
    assert torch.equal(load_file(folder / "model.safetensors")[name], load_file(space / "model.safetensors")[name])


def test_a_head_is_trained_on_an_adapter_of_any_rank_which_it_leaves_as_it_is(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "gated", num_masks=3, adapter_rank=2)
    folder = run(source, tiny_plan(Method.HEAD, lora_rank=8), tmp_path / "out", dtype=torch.float32).folder
    before, after = (load_file(place / "gated_lora.safetensors") for place in (source, folder))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor)
    assert load_model(folder).facts.adapters[0].has_draft_head


def section_of(folder: Path | None) -> dict[str, Any]:
    section: dict[str, Any] = json.loads((folder / "config.json").read_text())["space"]
    return section


RECURRENT = {"recurrent_head": 8, "recurrent_drafts": 4, "draft_vocab": 40}


def test_a_recurrent_head_is_written_beside_masks_and_draft_head(base: Path, tmp_path: Path) -> None:
    result = run(base, tiny_plan(**RECURRENT), tmp_path)
    section = section_of(result.folder)["recurrent_head"]
    assert section.pop("acceptance") == [round(result.final[f"recurrent_{j}"], 3) for j in (1, 2, 3, 4)]
    assert section == {"file": "recurrent_head.safetensors", "hidden": 8, "embedding_scale": 8.0, "num_drafts": 4}
    tensors = load_file(result.folder / "recurrent_head.safetensors")
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    ids = tensors["recurrent_head.ids"]
    number = tensors["recurrent_head.w1.weight"].dtype
    assert shapes == {
        "recurrent_head.w1.weight": ((8, 128), number),
        "recurrent_head.w2.weight": ((64, 8), number),
        "recurrent_head.ids": ((40,), torch.int64),
    }
    assert bool((ids[1:] > ids[:-1]).all())
    assert load_model(result.folder).facts.adapters[0].has_draft_head


def test_a_whole_vocabulary_is_not_listed(base: Path, tmp_path: Path) -> None:
    folder = run(base, tiny_plan(recurrent_head=8), tmp_path).folder
    assert set(load_file(folder / "recurrent_head.safetensors")) == {
        "recurrent_head.w1.weight",
        "recurrent_head.w2.weight",
    }
    assert section_of(folder)["recurrent_head"]["num_drafts"] == 3


def test_a_recurrent_head_alone_leaves_adapter_and_draft_head_as_they_are(base: Path, tmp_path: Path) -> None:
    source = run(base, tiny_plan(), tmp_path / "masks").folder
    plan = tiny_plan(Method.HEAD, head=HeadForm.NONE, **RECURRENT)
    folder = run(source, plan, tmp_path / "out").folder
    for name in ("gated_lora.safetensors", "draft_head.safetensors"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    section = section_of(folder)
    assert section.pop("recurrent_head")["hidden"] == 8
    assert section == section_of(source)
    assert load_model(folder).facts.num_masks == 3
    plain = run(base, plan, tmp_path / "plain").folder
    assert section_of(plain)["num_masks"] == 0
    assert load_model(plain).facts.num_masks == 0


def test_a_run_goes_on_from_the_recurrent_head_of_another(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its vocabulary, whatever the new texts; with other sizes it begins anew, and says so."""
    plan = tiny_plan(Method.HEAD, head=HeadForm.NONE, **RECURRENT)
    source = run(base, plan, tmp_path / "first", dtype=torch.float32).folder
    none = {"budget": Budget(steps=0), "head": HeadForm.NONE}
    other = rows_for(plan, random_examples(5, 20, 32))
    folder = run(
        source, tiny_plan(Method.HEAD, **none | RECURRENT), tmp_path / "on", data=other, dtype=torch.float32
    ).folder
    before, after = (load_file(place / "recurrent_head.safetensors") for place in (source, folder))
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert f"start: from the recurrent head of {source}." in capsys.readouterr().err
    run(source, tiny_plan(Method.HEAD, **none | RECURRENT | {"recurrent_head": 6}), tmp_path / "anew")
    assert "Give --recurrent-head 8 --head-scale 8 --draft-vocab 40 to go on from it." in capsys.readouterr().err
    changed = {name: tensor + 1.0 if "w2" in name else tensor for name, tensor in before.items()}
    save_file(changed, source / "recurrent_head.safetensors")
    with pytest.raises(InvalidPlan, match="holds a run with adapter and draft head of the model = "):
        run(source, tiny_plan(Method.HEAD, **none | RECURRENT), tmp_path / "on", data=other)


def test_training_teaches_a_recurrent_head_what_comes(base: Path, tmp_path: Path) -> None:
    """To draft what the model itself says: the shares of held-out drafts rise, and the loss falls."""
    plan = tiny_plan(Method.HEAD, head=HeadForm.NONE, recurrent_head=64, budget=Budget(steps=80), anchors_per_token=0.5)
    result = run(base, plan, tmp_path)
    losses, curve = result.counters.losses, result.counters.curve
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert curve[-1]["recurrent_tokens_per_step"] > curve[0]["recurrent_tokens_per_step"]


def test_a_released_adapter_is_not_trained_further(base: Path, tmp_path: Path) -> None:
    adapter = released_adapter(tmp_path / "uno", base, rank=8)
    section = {"base": str(base), "adapter": ".", "adapter_format": "uno"}
    (adapter / "config.json").write_text(json.dumps({"space": section}), encoding="utf-8")
    with pytest.raises(InvalidPlan, match="has an adapter of uno, which is served and not trained further"):
        OwnMasks.read(Checkpoint.open(adapter), tiny_plan(Method.GATED_LORA), hidden_size=64, vocab_size=128)


def test_a_head_needs_masks_and_as_many_as_there_are(base: Path, space: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidPlan, match="has no masks, so no draft head can stand on them"):
        run(base, tiny_plan(Method.HEAD), tmp_path)
    with pytest.raises(InvalidPlan, match="has 3 masks: give --num-masks 3"):
        run(space, tiny_plan(Method.HEAD, num_masks=2), tmp_path)


def test_a_generation_config_that_transformers_would_not_write_is_copied(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "base", num_masks=0)
    text = json.dumps({"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 0})  # as Llama 2's
    (source / "generation_config.json").write_text(text)
    (source / "merges.txt").write_text("#version")
    folder = run(source, tiny_plan(Method.FULL), tmp_path / "out").folder
    assert (folder / "generation_config.json").read_text() == text
    assert (folder / "merges.txt").exists()
    (source / "generation_config.json").unlink()
    run(source, tiny_plan(Method.FULL), tmp_path / "out")
    assert not (folder / "generation_config.json").exists()


def test_a_checkpoint_stays_until_the_new_is_whole(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to the chat template, which is written last."""
    folder = run(base, tiny_plan(), tmp_path, chat_template="old").folder
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", lambda *_, **__: stopped())
        with pytest.raises(KeyboardInterrupt):
            run(base, tiny_plan(budget=Budget(steps=4)), tmp_path, chat_template="new")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert not list(tmp_path.glob("model.*"))
    run(base, tiny_plan(budget=Budget(steps=4)), tmp_path, chat_template="new")
    assert (folder / "chat_template.jinja").read_text() == "new"
    assert not list(tmp_path.glob("model.*"))


def test_runs_of_several_precisions_fit_into_one_process(base: Path, tmp_path: Path) -> None:
    losses = []
    for number, precision in enumerate(("no", "bf16", "no")):
        plan = tiny_plan(precision=precision, budget=Budget(steps=1))
        losses.append(run(base, plan, tmp_path / str(number)).counters.losses)
    assert losses[0] == losses[2] != losses[1]


def test_bf16_products_are_near_those_in_float32(base: Path, tmp_path: Path) -> None:
    losses = []
    for precision in ("no", "bf16"):
        plan = tiny_plan(Method.FULL, precision=precision, budget=Budget(steps=2))
        losses.append(run(base, plan, tmp_path / precision).counters.losses)
        assert {tensor.dtype for tensor in trained(tmp_path / precision).values()} == {torch.float32}
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.usefixtures("plots")
def test_a_report_is_written_for_people_and_programs(base: Path, tmp_path: Path) -> None:
    plan = tiny_plan(evaluations=2)
    result = run(base, plan, tmp_path, progress=True)
    write_report(tmp_path, plan, result)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["plan"] == json.loads(json.dumps(plan.as_json()))
    assert len(record["losses"]) == record["step"] == 3
    assert {"loss", "mask_1", "mask_3", "head_1", "tokens_per_step"} <= set(record["curve"][-1])
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    words = (tmp_path / "run.md").read_text()
    assert "# gated-lora, 3 updates" in words
    assert "| mask_1 | " in words
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"train/masks", "train/head", "held_out/mask_1"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("train/masks")] == [1, 2, 3]
    masks = [event.value for event in events.Scalars("train/masks")]
    heads = [event.value for event in events.Scalars("train/head")]
    assert [m + h for m, h in zip(masks, heads, strict=True)] == pytest.approx(record["losses"], rel=1e-5)


def test_held_out_figures_are_counted_within_documents_by_hand(base: Path, tmp_path: Path) -> None:
    """Two packed texts: the loss is that of each alone, and no draft is judged across their border."""
    plan = tiny_plan(Method.SFT, budget=Budget(steps=0))
    one, two = random_ids(15, 1), random_ids(17, 2)
    ids = torch.tensor([one + two])
    learned = torch.ones_like(ids, dtype=torch.bool)
    texts = Texts(ids, learned, torch.tensor([[0] * 15 + [1] * 17]), torch.ones(1, dtype=torch.bool))
    model, nats = read_model(base), 0.0
    with torch.no_grad():
        for text in (one, two):
            row = torch.tensor(text)
            nats += float(functional.cross_entropy(model(row[None]).logits[0, :-1], row[1:], reduction="sum"))
    for method in (Method.SFT, Method.GATED_LORA):
        changed = tiny_plan(method, budget=plan.budget)
        figures = run(base, changed, tmp_path / method, held_out=texts).final
        assert figures["loss"] == pytest.approx(nats / (14 + 16), rel=1e-4)


def test_more_than_nine_masks_are_counted_in_their_order() -> None:
    from space_train.training.trainer import tokens_per_step

    shares = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05]
    product, expected = 1.0, 1.0
    for share in shares:
        product *= share
        expected += product
    assert tokens_per_step({f"mask_{j + 1}": share for j, share in enumerate(shares)}) == pytest.approx(expected)


def test_training_starts_from_no_checkpoint_with_tensors_that_have_no_place(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path)
    file = path / "model.safetensors"
    odd = {"model.layers.1.mlp.up_proj.weight_scale": torch.zeros(1)}
    save_file(load_file(file) | odd, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"up_proj\.weight_scale in model\.safetensors, for which"):
        load_base(Checkpoint.open(path), TrainPlan())


@pytest.fixture
def own_base(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "base", num_masks=0)


def flip(file: Path) -> None:
    """The lowest bit of its last byte: names and shapes stay."""
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_weights_that_differ_in_value_alone_have_another_fingerprint(own_base: Path, tmp_path: Path) -> None:
    same, other = tiny_checkpoint(tmp_path / "same", num_masks=0), tiny_checkpoint(tmp_path / "o", num_masks=0, seed=1)
    prints = [fingerprint(Checkpoint.open(path)) for path in (own_base, same, other)]
    assert prints[0] == prints[1] != prints[2]


def test_other_weights_under_the_same_name_are_refused(own_base: Path, tmp_path: Path) -> None:
    run(own_base, tiny_plan(), tmp_path / "out")
    shutil.rmtree(own_base)
    tiny_checkpoint(own_base, num_masks=0, seed=1)
    with pytest.raises(InvalidPlan, match=r"holds a run with weights of the model = .*--restart"):
        run(own_base, tiny_plan(), tmp_path / "out")


@pytest.mark.parametrize("part", ["gated_lora.safetensors", "draft_head.safetensors"])
def test_another_adapter_or_head_under_the_same_name_is_refused(part: str, own_base: Path, tmp_path: Path) -> None:
    source = run(own_base, tiny_plan(), tmp_path / "masks").folder
    run(source, tiny_plan(Method.HEAD), tmp_path / "out")
    flip(source / part)
    with pytest.raises(InvalidPlan, match="holds a run with adapter and draft head of the model = "):
        run(source, tiny_plan(Method.HEAD), tmp_path / "out")


@pytest.mark.parametrize("what", ["ids", "learned"])
def test_another_text_is_refused_wherever_it_is(what: str, own_base: Path, tmp_path: Path) -> None:
    """Of as many rows, and the same first one."""
    plan, examples = tiny_plan(pack=False), random_examples(12, 16, 32)
    run(own_base, plan, tmp_path / "out", data=rows_for(plan, examples))
    first = rows_for(plan, examples).rows(0, 1).ids[0].tolist()
    place = next(n for n, one in enumerate(examples) if one.ids != first[: len(one.ids)])
    one = examples[place]
    if what == "ids":
        examples[place] = Example([*one.ids[:-1], one.ids[-1] ^ 1], one.learned)
    else:
        examples[place] = Example(one.ids, [*one.learned[:8], not one.learned[8], *one.learned[9:]])
    with pytest.raises(InvalidPlan, match="holds a run with text of the data = "):
        run(own_base, plan, tmp_path / "out", data=rows_for(plan, examples))


def test_a_run_of_an_earlier_version_goes_on_unless_it_used_a_removed_option(own_base: Path, tmp_path: Path) -> None:
    plan, file = tiny_plan(), tmp_path / "out" / STATE_FILE
    run(own_base, plan, tmp_path / "out")

    def with_options(**options: Any) -> None:
        state = load_checkpoint(file)
        save_atomically(state | {"plan": json.dumps(json.loads(state["plan"]) | options)}, file)

    off: dict[str, Any] = {"survival": False, "scheduled_drafting": 0.0}
    for name, value in (("survival", True), ("scheduled_drafting", 0.25), ("loss", "mixed")):
        with_options(**(off | {name: value}))
        with pytest.raises(InvalidPlan, match=rf"{name} = {value}, which was removed .*Give another --out"):
            run(own_base, replace(plan, budget=Budget(steps=5)), tmp_path / "out")
    with_options(**off, loss="cross-entropy")
    assert run(own_base, replace(plan, budget=Budget(steps=5)), tmp_path / "out").counters.step == 5


def test_other_mask_ids_are_refused(own_base: Path, tmp_path: Path) -> None:
    plan = tiny_plan(Method.FULL)
    run(own_base, plan, tmp_path / "out")
    with pytest.raises(InvalidPlan, match=r"mask ids = \[100, 101, 102\]; this one has \[105, 106, 107\]"):
        run(own_base, plan, tmp_path / "out", given_mask_ids=[105, 106, 107])


def test_a_state_of_before_there_were_digests_is_gone_on_with(own_base: Path, tmp_path: Path) -> None:
    run(own_base, tiny_plan(), tmp_path, stop_after_steps=1)
    state = load_checkpoint(tmp_path / STATE_FILE)
    names = {"weights of the model", "adapter and draft head of the model", "text of the data", "mask ids"}
    old = {name: value for name, value in json.loads(state["plan"]).items() if name not in names}
    save_atomically(state | {"plan": json.dumps(old)}, tmp_path / STATE_FILE)
    assert run(own_base, tiny_plan(), tmp_path).counters.step == 3
    assert names <= set(json.loads(load_checkpoint(tmp_path / STATE_FILE)["plan"]))


def test_a_digest_is_over_every_stream_and_what_it_teaches() -> None:
    def tokens(last: int) -> TokenRows:
        return TokenRows(PackedTokens(np.array([*range(99), last], dtype=np.uint16), 0), 8)

    chats = PackedExamples([Example([1, 2, 3], [False, True, True])], length=4, seed=0, pad_id=0)
    own = RowStream(chats, 0.5)
    digests = [
        MixedRows(streams, 0).digest()
        for streams in (
            [RowStream(tokens(1), 0.5), own],
            [RowStream(tokens(1), 0.5), own],
            [RowStream(tokens(2), 0.5), own],
            [RowStream(tokens(1), 0.5), RowStream(chats, 0.5, teaches=False)],
            [RowStream(tokens(1), 0.6), own],
        )
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4
