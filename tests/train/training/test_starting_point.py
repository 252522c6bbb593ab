"""What a run starts from: what the checkpoint has, where it fits, and what it leaves behind is said."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.training import TOKENIZER_SIZE, read_model, run, tiny_plan
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from space_model.checkpoint.checkpoint import Checkpoint
from space_train.train_plan import Budget, HeadForm, InvalidPlan, Method, TrainPlan
from space_train.training.checkpoint import embedding_spread, mask_ids, start_masks, starting_point, with_own_sizes
from tiny_checkpoints import tiny_checkpoint
from transformers import PreTrainedModel


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run of gated-lora left: three masks, rank 4, a draft head 16 wide."""
    base = tiny_checkpoint(tmp_path_factory.mktemp("base"), num_masks=0)
    return run(base, tiny_plan(), tmp_path_factory.mktemp("run"), dtype=torch.float32).folder


def no_step(method: Method = Method.GATED_LORA, **changes: Any) -> TrainPlan:
    return tiny_plan(method, budget=Budget(steps=0), **changes)


def weights(folder: Path | None, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / name)


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("start: ")]


@pytest.mark.parametrize("alpha", [32.0, 8.0])
def test_a_run_goes_on_from_the_adapter_and_the_draft_head_of_another(
    alpha: float, gated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever their alpha: what is served is alpha/rank times B."""
    folder = run(gated, no_step(lora_alpha=alpha), tmp_path, dtype=torch.float32).folder
    for name in ("gated_lora.safetensors", "draft_head.safetensors"):
        before, after = weights(gated, name), weights(folder, name)
        assert before.keys() == after.keys()
        for key in before:
            scale = 32.0 / alpha if key.endswith(".b") else 1.0
            torch.testing.assert_close(after[key], before[key] * scale)
    assert said(capsys) == [f"start: from the adapter and the draft head of {gated}."]


def test_an_adapter_of_another_rank_is_refused_by_name(gated: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidPlan, match="has an adapter of rank 4, this run one of rank 8: give --lora-rank 4"):
        run(gated, no_step(lora_rank=8), tmp_path)


def test_every_linear_learns_also_where_the_adapter_that_is_gone_on_from_had_none(gated: Path, tmp_path: Path) -> None:
    """A and B of zeros would have no gradient, for ever."""
    source = tmp_path / "part"
    shutil.copytree(gated, source)
    file = source / "gated_lora.safetensors"
    with safe_open(file, framework="pt") as tensors:
        metadata = tensors.metadata()
    kept = {name: tensor for name, tensor in load_file(file).items() if "mlp" not in name}
    save_file(kept, file, metadata=metadata)
    after = weights(run(source, tiny_plan(), tmp_path / "out").folder, "gated_lora.safetensors")
    grown = [name for name in after if "mlp" in name and name.endswith(".b")]
    assert grown
    assert all(bool(after[name].any()) for name in grown)


def own_sizes(folder: Path, plan: TrainPlan, *given: str) -> tuple[TrainPlan, str | None]:
    checkpoint = Checkpoint.open(folder)
    sizes = {name: int(checkpoint.config[name]) for name in ("hidden_size", "vocab_size")}
    return with_own_sizes(checkpoint, plan, given, **sizes)


def test_a_run_takes_the_sizes_that_it_can_go_on_from(gated: Path) -> None:
    plan, flags = own_sizes(gated, TrainPlan(length=64))
    assert (plan.num_masks, plan.lora_rank, plan.head, plan.head_hidden) == (3, 4, HeadForm.MLP, 16)
    assert flags == "--num-masks 3 --lora-rank 4 --head mlp --head-hidden 16 --head-scale 8"
    plan, flags = own_sizes(gated, TrainPlan(method=Method.HEAD))
    assert (plan.num_masks, plan.lora_rank, plan.head_hidden) == (3, TrainPlan().lora_rank, 16)


def test_sizes_that_the_command_names_stay(gated: Path) -> None:
    other = TrainPlan(head=HeadForm.LOW_RANK)
    plan, flags = own_sizes(gated, other, "head")
    assert (plan.num_masks, plan.head, plan.head_hidden) == (3, HeadForm.LOW_RANK, other.head_hidden)
    assert flags == "--num-masks 3 --lora-rank 4"
    assert own_sizes(gated, TrainPlan(num_masks=2), "num_masks") == (TrainPlan(num_masks=2), None), "a new adapter"
    assert own_sizes(gated, TrainPlan(method=Method.FULL)) == (TrainPlan(method=Method.FULL), None)
    assert (
        own_sizes(gated, TrainPlan(num_masks=3), "num_masks", "lora_rank")[1]
        == "--head mlp --head-hidden 16 --head-scale 8"
    )


def test_masks_with_ids_and_recurrent_heads_have_sizes_too(tmp_path: Path) -> None:
    space = tiny_checkpoint(tmp_path / "space", num_masks=3, draft_head=False)
    assert own_sizes(space, TrainPlan(method=Method.FULL)) == (
        TrainPlan(method=Method.FULL, num_masks=3),
        "--num-masks 3",
    )
    sizes = {"recurrent_head": 8, "recurrent_drafts": 2, "draft_vocab": 40}
    both = run(tiny_checkpoint(tmp_path / "base", num_masks=0), no_step(**sizes), tmp_path / "run").folder
    assert both is not None
    plan, flags = own_sizes(both, TrainPlan())
    assert {name: getattr(plan, name) for name in sizes} == sizes
    assert flags is not None
    assert flags.endswith("--recurrent-head 8 --recurrent-drafts 2 --draft-vocab 40")


HEAD, ALL = "the draft head", "the adapter and the draft head"


@pytest.mark.parametrize(
    ("plan", "behind", "cure"),
    [
        (no_step(num_masks=2), ALL, "It has 3 masks, this run 2: give --num-masks 3 to go on from there."),
        (no_step(Method.FULL), ALL, "Give --method gated-lora to go on from there."),
        (no_step(head=HeadForm.LOW_RANK), HEAD, "Give --head mlp --head-hidden 16 --head-scale 8 to go on from it."),
        (
            no_step(Method.HEAD, head_hidden=8),
            HEAD,
            "Give --head mlp --head-hidden 16 --head-scale 8 to go on from it.",
        ),
    ],
    ids=["other masks", "other method", "other head", "head alone"],
)
def test_what_is_left_behind_is_said_with_what_would_keep_it(
    plan: TrainPlan, behind: str, cure: str, gated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(gated, plan, tmp_path)
    assert said(capsys)[-1] == f"start: without {behind} of {gated}. {cure}"


def test_masks_with_ids_are_gone_on_from_or_left_behind_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = tiny_checkpoint(tmp_path / "space", num_masks=3, draft_head=False)
    for number, (method, given, words) in enumerate(
        (
            (Method.FULL, None, f"from the masks of {space}."),
            (Method.FULL, [7, 8, 9], f"without the masks of {space}. Leave --mask-ids out to go on from there."),
            (Method.GATED_LORA, None, f"without the masks of {space}. Give --method full to go on from there."),
        )
    ):
        run(space, no_step(method), tmp_path / str(number), given_mask_ids=given)
        assert said(capsys) == [f"start: {words}"]


def test_a_base_without_masks_is_nothing_to_speak_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tiny_checkpoint(tmp_path / "base", num_masks=0), no_step(), tmp_path / "out")
    assert said(capsys) == []


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "granite"])
def test_private_mask_inputs_start_as_large_as_what_enters_the_first_layer(family: str, tmp_path: Path) -> None:
    """Also in families that scale their embeddings: mask inputs enter behind that. Their noise is half as wide."""
    source = tiny_checkpoint(tmp_path, family, num_masks=0)
    model = read_model(source)
    ids = torch.arange(model.config.vocab_size)[None]
    inputs = model(ids, output_hidden_states=True).hidden_states[0][0]
    trainee = starting_point(model, Checkpoint.open(source), tiny_plan(), TOKENIZER_SIZE, None)
    noise = trainee.adapters.mask_embeddings - inputs.mean(0)
    assert 0.4 * inputs.std() < noise.std() < 0.6 * inputs.std()


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    """128 ids."""
    return read_model(tiny_checkpoint(tmp_path, "llama", num_masks=0))


def ids_of(model: PreTrainedModel, *, shared: bool = False, given: list[int] | None = None, size: int) -> list[int]:
    return mask_ids(model, 3, shared=shared, given=given, tokenizer_size=size)


def test_spare_rows_of_the_vocabulary_are_taken_before_it_grows(model: PreTrainedModel) -> None:
    assert ids_of(model, size=100) == [100, 101, 102]
    assert ids_of(model, size=100, shared=True) == [100, 100, 100]
    assert len(model.get_input_embeddings().weight) == 128


@pytest.mark.parametrize("tied", [True, False])
def test_a_full_vocabulary_grows_by_as_many_rows_as_it_lacks(tied: bool, tmp_path: Path) -> None:
    model = read_model(tiny_checkpoint(tmp_path, "llama", num_masks=0, tie_word_embeddings=tied))
    before = model.get_input_embeddings().weight.detach().clone()
    assert ids_of(model, size=126) == [126, 127, 128]
    inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert len(inputs) == len(outputs) == model.config.vocab_size == 129
    assert (inputs is outputs) == tied
    assert torch.equal(inputs[:128], before)


def test_given_ids_win_and_the_published_one_behind_the_vocabulary_makes_it_grow(model: PreTrainedModel) -> None:
    assert ids_of(model, size=128, given=[7]) == [7, 7, 7]
    assert ids_of(model, size=128, given=[9, 8, 7]) == [9, 8, 7]
    assert len(model.get_input_embeddings().weight) == 128
    assert ids_of(model, size=128, given=[130]) == [130, 130, 130]
    assert len(model.get_input_embeddings().weight) == model.config.vocab_size == 131


def test_ids_that_do_not_do_are_refused_by_name(model: PreTrainedModel) -> None:
    with pytest.raises(InvalidPlan, match="3 masks need 1 or 3 mask ids; got 2"):
        ids_of(model, size=128, given=[1, 2])
    with pytest.raises(InvalidPlan, match="Mask id 5000 is outside the vocabulary of 128, which grows by at most 64"):
        ids_of(model, size=128, given=[5000])
    with pytest.raises(InvalidPlan, match="Mask id -1 is outside"):
        ids_of(model, size=128, given=[-1])


def test_masks_start_near_the_mean_embedding_and_no_other_row_moves(model: PreTrainedModel) -> None:
    before = model.get_input_embeddings().weight.detach().clone()
    mean, spread = embedding_spread(model)
    start_masks(model, [100, 101, 101], torch.Generator().manual_seed(0))
    after = model.get_input_embeddings().weight.detach()
    moved = (after != before).any(1).nonzero().flatten().tolist()
    assert moved == [100, 101]
    assert not torch.equal(after[100], after[101])
    for row in (100, 101):
        assert 0.3 * spread < float((after[row] - mean).std()) < 0.7 * spread
