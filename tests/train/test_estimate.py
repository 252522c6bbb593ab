"""Memory and time of a run, computed: held against hand-made sums, torch's own counters, and the run's counter."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.training import random_ids, read_model, rows_for, tiny_plan
from space_train.data.examples import Example
from space_train.data.rows import MixedRows, PackedExamples, RowStream
from space_train.data.train_batch import TrainBatch, train_batch
from space_train.estimate import (
    ALLOWANCE,
    FILL,
    GB,
    GPUS,
    SHAPES,
    ModelCost,
    ModelShape,
    TrainingEstimate,
    UnknownShape,
    activation_bytes,
    cure_of,
    estimate,
    fitted,
    flops_of,
    main,
    masks_per_token,
    number,
    to_markdown,
)
from space_train.networks import trainee as trainee_module
from space_train.networks.trainee import Decoder, Trainee
from space_train.train_plan import Anchors, HeadForm, Method, TrainPlan
from tiny_checkpoints import tiny_checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

TINY = ModelShape("tiny", 128, 64, 2, 4, 2, 16, 128, tied=True)
PLAN = TrainPlan(length=64, rows_per_step=4, head_hidden=16, lora_rank=4)
TRAINING = [Method.GATED_LORA, Method.FULL, Method.SFT, Method.HEAD]


def plan_of(method: Method, **changes: Any) -> TrainPlan:
    head = HeadForm.NONE if method is Method.SFT else HeadForm.MLP
    return replace(PLAN, **{"method": method, "head": head, **changes})


def llama(shape: ModelShape, *, layers: int | None = None) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=layers or shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
    )


def trainee_of(plan: TrainPlan, dtype: torch.dtype = torch.float32) -> Trainee:
    model = LlamaForCausalLM(llama(TINY)).to(dtype)
    by_id = plan.method in {Method.FULL, Method.HEAD}
    return Trainee(model, plan, list(range(4, 4 + plan.num_masks)) if by_id else [])


def batch_of(plan: TrainPlan) -> TrainBatch:
    """Texts that fill their rows: every token is real, and all but the first are targets."""
    ids = torch.randint(20, 128, (8, plan.length), generator=torch.Generator().manual_seed(0)).tolist()
    examples = [Example(row, [True] * plan.length) for row in ids]
    data = PackedExamples(examples, length=plan.length, seed=0, pad_id=0)
    return train_batch(MixedRows([RowStream(data, 1.0)], 0), plan, 0, plan.rows_per_step)


def test_masks_for_one_token_are_those_that_the_conditional_drop_leaves() -> None:
    assert masks_per_token(TrainPlan()) == pytest.approx(0.375 * (1 + 0.7 + 0.49 + 0.343 + 0.2401))  # 1.04
    assert masks_per_token(TrainPlan(num_masks=7, anchors_per_token=0.1)) == pytest.approx(0.1 * (2.7731 + 0.2 * 2))
    assert masks_per_token(TrainPlan(method=Method.SFT, head=HeadForm.NONE)) == 0
    # A text of 1000 is cut at 500 on average, and five masks follow.
    one = TrainPlan(anchors=Anchors.ONE, pack=False, length=1000)
    assert masks_per_token(one) == pytest.approx(0.01)


def test_operations_are_two_for_each_weight_and_direction() -> None:
    shape = ModelShape("toy", 10, 2, 1, 1, 1, 2, 3, tied=True)
    assert shape.body == 4 * (2 * 2) + 3 * (2 * 3)  # 34
    assert (shape.output, shape.attention) == (20, 8)
    plan = TrainPlan(num_masks=1, anchors_per_token=0.5, length=14, head=HeadForm.NONE, lora_rank=1, distill=False)
    found = estimate(shape, plan)
    row = 2 * 34 + 8 * 7  # seven keys on average
    assert found.flops == {
        "real rows": row,  # frozen: forward alone
        "mask rows": 2 * row * 0.5,  # and through the frozen weights
        "adapters": 6 * (4 * 4 + 3 * 5) * 0.5,
        "mask logits": 4 * 20 * 0.5,
    }
    assert found.flops_per_token == sum(found.flops.values())
    full = estimate(shape, replace(plan, method=Method.FULL))
    assert full.flops == {
        "real rows": 3 * row,
        "mask rows": 3 * row * 0.5,
        "next-token logits": 6 * 20,
        "mask logits": 6 * 20 * 0.5,
    }
    again = estimate(shape, replace(plan, method=Method.FULL, activation_checkpointing=True))
    assert (again.flops, again.recomputed) == (full.flops, full.recomputed + row * 1.5)


def test_memory_holds_four_numbers_for_each_weight_that_learns_and_two_bytes_for_each_that_does_not() -> None:
    shape = SHAPES["7b"]
    full = estimate(shape, TrainPlan(method=Method.FULL))
    weights = shape.num_parameters + 384 * 3 * 4096
    assert full.num_trained == weights
    kept = ("trained weights", "gradients", "optimiser")
    assert sum(full.memory[part] for part in kept) == 16 * weights
    gated = estimate(shape, TrainPlan())
    assert gated.memory["frozen weights"] == 2 * shape.num_parameters
    assert gated.num_trained == shape.adapters(32) + 5 * 4096 + 384 * 3 * 4096
    assert gated.num_trained < 0.013 * shape.num_parameters
    muon = estimate(shape, TrainPlan(method=Method.FULL, optimiser="muon"))
    assert 4 * weights < muon.memory["optimiser"] < 4.3 * weights
    assert gated.memory["allowance"] == ALLOWANCE


def test_time_is_operations_over_the_rate_of_the_gpu_and_its_utilisation() -> None:
    found = TrainingEstimate(TINY, PLAN, 0.0, 0, {"real rows": 3e10}, 1e10, {})
    # 10 M tokens of 4e10 operations at 0.4 · 989e12 a second
    assert found.seconds(10e6, GPUS["h100"], 0.4) == pytest.approx(4e17 / 395.6e12)


def test_a_plan_is_cut_into_parts_until_it_fits_and_layers_are_computed_twice_only_then() -> None:
    shape, plan = SHAPES["7b"], TrainPlan(method=Method.FULL)
    assert fitted(shape, plan, 80e9) is None  # 108 GB of weights, gradients and optimiser
    smallest = replace(plan, accumulate=8)
    assert fitted(shape, plan, 1.01 * estimate(shape, smallest).bytes / FILL) == smallest
    fit = fitted(shape, plan, 0.99 * estimate(shape, smallest).bytes / FILL)
    assert fit.activation_checkpointing
    roomy = fitted(shape, plan, 1e12)
    assert roomy == plan
    tight = fitted(SHAPES["13b"], TrainPlan(), 80e9)
    assert tight.accumulate > 1
    assert not tight.activation_checkpointing


@pytest.mark.parametrize("shape", [TINY, *SHAPES.values()], ids=lambda shape: shape.name)
def test_weights_are_those_that_torch_counts(shape: ModelShape) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(llama(shape))
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    layers = sum(m.weight.numel() for m in model.model.modules() if isinstance(m, torch.nn.Linear))
    assert shape.body == layers


def test_a_checkpoint_says_its_own_shape(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", num_masks=0)
    shape = ModelShape.of(str(folder))
    assert replace(shape, name="tiny") == TINY
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    experts = tiny_checkpoint(tmp_path / "experts", "mixtral", num_masks=0)
    with pytest.raises(UnknownShape, match="experts"):
        ModelShape.of(str(experts))


@pytest.mark.parametrize("method", TRAINING)
def test_weights_that_learn_are_those_of_the_run(method: Method) -> None:
    plan = plan_of(method)
    trained = trainee_of(plan).trained.values()
    assert estimate(TINY, plan).num_trained == sum(p.numel() for p in trained)


@pytest.mark.parametrize("method", TRAINING)
@pytest.mark.parametrize("ar_share", [0.0, 0.5])
def test_operations_are_those_that_the_run_counts_for_itself(method: Method, ar_share: float) -> None:
    plan = plan_of(method, ar_share=ar_share)
    trainee, batch = trainee_of(plan), batch_of(plan)
    counted = flops_of(trainee, ModelCost.of(trainee), batch) / batch.num_tokens
    assert estimate(TINY, plan).flops_per_token == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize("method", TRAINING)
def test_products_are_those_that_torch_counts(method: Method, as_on_a_gpu: None) -> None:
    plan = plan_of(method)
    trainee, batch = trainee_of(plan), batch_of(plan)
    counter = FlopCounterMode(display=False)
    with counter:
        losses = trainee(batch)
        total = losses.next_token + losses.masks + losses.head
        total.backward()
    by_operation = counter.get_flop_counts()["Global"]
    products = sum(count for op, count in by_operation.items() if "attention" not in str(op)) / batch.num_tokens
    # Attention is left out on both sides: here every row multiplies with every key, seen or not.
    found = estimate(TINY, plan)
    attention = TINY.attention * plan.length / 2
    real = 3 if plan.trains_base else 1
    masks = {Method.FULL: 3, Method.GATED_LORA: 2}.get(method, 1)
    wanted = found.flops_per_token + found.recomputed - attention * (real + masks * found.masks_per_token)
    assert products == pytest.approx(wanted, rel=0.05)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention by a mask, and transformers' own norms and MLPs."""
    monkeypatch.setattr(Decoder, "uses_query_blocks", False)
    monkeypatch.setattr(trainee_module, "replace_frozen_layers", lambda model: None)


@contextmanager
def kept_bytes(excepted: set[int]) -> Iterator[dict[int, int]]:
    """Bytes of the tensors that are kept for the backward pass, by storage; without masks of attention, which a GPU
    does not write out."""
    kept: dict[int, int] = {}
    held: list[torch.Tensor] = []  # so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_mask = tensor.dim() == 4 and tensor.shape[1] == 1
        if storage.data_ptr() not in excepted and not is_mask:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


@pytest.mark.parametrize("method", [Method.GATED_LORA, Method.SFT])
def test_a_layer_keeps_as_many_bytes_of_a_row_as_torch_keeps(method: Method, as_on_a_gpu: None) -> None:
    """Two depths of one model: the difference is the layers'. In half precision, as on a GPU."""
    shape = replace(TINY, num_kv_heads=TINY.num_heads)
    plan = plan_of(method, distill=False, head=HeadForm.NONE)
    batch, totals = batch_of(plan), []
    for layers in (2, 6):
        model = LlamaForCausalLM(llama(shape, layers=layers))
        trainee = Trainee(model if plan.trains_base else model.to(torch.bfloat16), plan, [])
        weights = {p.untyped_storage().data_ptr() for p in trainee.parameters()}
        with torch.autocast("cpu", torch.bfloat16), kept_bytes(weights) as kept:
            trainee(batch)
            totals.append(sum(kept.values()))
    texts = batch.plain if plan.trains_base else batch.masked
    rows = texts.num_real if batch.anchors is None else batch.anchors.depth.numel()
    found = estimate(shape, plan)
    # Counted apart: half-precision copies of what learns, and the real rows' keys and values.
    copies = 2 * (shape.body if plan.trains_base else shape.adapters(plan.lora_rank))
    apart = (copies + found.memory.get("keys and values", 0)) / shape.num_layers
    assert ((totals[1] - totals[0]) / 4 - apart) / rows == pytest.approx(activation_bytes(shape, plan), rel=0.05)


def test_the_command_prints_what_it_computed_and_what_would_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "7b", "--method", "gated-lora", "--tokens", "20M", "--gpu", "a100"]) == 0
    printed = capsys.readouterr().out
    assert "computed, not measured" in printed
    assert "6.74 G frozen, 84.7 M learn" in printed
    assert "A100 80GB: fits; 20 M tokens take" in printed
    assert main(["--model", "13b"]) == 0
    assert "does not fit" in (printed := capsys.readouterr().out)
    assert "With --accumulate 2 it fits" in printed
    assert main(["--model", "13b", "--method", "full"]) == 0
    assert "Nothing makes it fit on one" in capsys.readouterr().out


def test_what_cannot_be_estimated_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words in (["--model", str(tmp_path / "none")], ["--length", "5"]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1


def test_the_table_has_every_model_with_every_method() -> None:
    lines = to_markdown(list(SHAPES.values()), 10e6).splitlines()
    assert len(lines) == 2 + 3 * 4
    assert len({line.count("|") for line in lines}) == 1
    assert [line.split(" | ")[1] for line in lines[2:6]] == ["gated-lora", "full", "sft", "head"]


@pytest.mark.parametrize(
    ("text", "value"), [("10M", 10e6), ("1.5G", 1.5e9), ("250k", 250e3), ("1e7", 1e7), ("0.4", 0.4)]
)
def test_numbers_may_have_units(text: str, value: float) -> None:
    assert number(text) == pytest.approx(value)


FULL_ROWS = [Example(random_ids(32, seed), [True] * 32) for seed in range(8)]


def tiny_trainee(folder: Path, plan: TrainPlan) -> Trainee:
    by_id = plan.method in {Method.FULL, Method.HEAD}
    draft_ids = rows_for(plan).frequent_ids(plan.draft_vocab, 128) if plan.has_recurrent_head else None
    return Trainee(read_model(folder), plan, [4, 5, 6] if by_id else [], draft_ids)


DEFAULT: dict[str, Any] = {}
CHANGES = [DEFAULT, {"distill": False}, {"head": HeadForm.LOW_RANK}]


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        (Method.SFT, DEFAULT),
        *((method, each) for method in Method if method is not Method.SFT for each in CHANGES),
        (Method.GATED_LORA, {"recurrent_head": 24}),
        (Method.HEAD, {"head": HeadForm.NONE, "recurrent_head": 24, "draft_vocab": 64}),
    ],
)
def test_operations_are_those_that_torch_counts(method: Method, changes: dict[str, Any], tmp_path: Path) -> None:
    """Within a tenth, on a model whose products outweigh its attention. Torch counts every pair of row and key, we only
    pairs that see each other; torch counts the gradient of the draft head's inputs only where they learn, we always;
    and we count the weights' gradient of masks that learn nothing."""
    plan = tiny_plan(method, **changes)
    trainee = tiny_trainee(tiny_checkpoint(tmp_path, num_masks=3, hidden_size=128, head_dim=4), plan)
    batch = train_batch(rows_for(plan, FULL_ROWS), plan, 0, 4)
    counter = FlopCounterMode(display=False)
    with counter:
        losses = trainee(batch)
        sum(losses.parts).backward()
    assert flops_of(trainee, ModelCost.of(trainee), batch) == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_a_row_of_a_mixture_of_experts_costs_the_few_it_goes_to(tmp_path: Path) -> None:
    trainee = tiny_trainee(tiny_checkpoint(tmp_path, "mixtral", num_masks=3), tiny_plan(Method.FULL))
    attention = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64)  # of two layers: q, k and v, o
    experts = 2 * 2 * 3 * 64 * 128  # of two layers: two of four experts, each gate, up and down
    assert ModelCost.of(trainee).body == attention + experts


def test_tokens_cost_what_their_own_document_lets_them_see(tmp_path: Path) -> None:
    """Two texts of 16 in a row see half as many pairs as one of 32, and a little more."""
    plan = tiny_plan(Method.SFT)
    trainee = tiny_trainee(tiny_checkpoint(tmp_path, num_masks=0), plan)
    cost = ModelCost(0, 0, 0, 0, attention=1)
    halves = [Example(random_ids(16, seed), [True] * 16) for seed in range(16)]
    found = [flops_of(trainee, cost, train_batch(rows_for(plan, texts), plan, 0, 1)) for texts in (FULL_ROWS, halves)]
    assert found == [3 * 32 * 33 / 2, 3 * 2 * 16 * 17 / 2]


def test_padding_costs_nothing(tmp_path: Path) -> None:
    plan = tiny_plan(Method.SFT, pack=False)
    trainee = tiny_trainee(tiny_checkpoint(tmp_path, num_masks=0), plan)
    text = random_ids(10, 1)
    data = rows_for(plan, [Example(text, [True] * 10)])
    cost = ModelCost(body=1, output=0, adapters=0, head=0, attention=0)
    assert flops_of(trainee, cost, train_batch(data, plan, 0, 2)) == 6 * 2 * 10
    assert torch.equal(data.rows(0, 1).ids[0, :10], torch.tensor(text))


ONE_B = SHAPES["1b"]


def test_the_fewest_parts_that_fit_by_the_estimate_are_named() -> None:
    plan = TrainPlan(rows_per_step=8)
    sizes = {parts: estimate(ONE_B, TrainPlan(rows_per_step=8, accumulate=parts)).bytes for parts in (1, 2, 4, 8)}
    memory = int(sizes[4] * 1.2)
    assert sizes[2] > memory
    assert cure_of(plan, 1, ONE_B, memory).startswith("Give --accumulate 4, the smallest that fits by our estimate")
    # What has failed is not named again, whatever the estimate says of it.
    assert "--accumulate 2, the smallest" in cure_of(plan, 1, ONE_B, int(1000 * GB))
    assert "--accumulate 2, the smallest" in cure_of(TrainPlan(rows_per_step=8), 4, ONE_B, int(1000 * GB))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (TrainPlan(rows_per_step=8), "Give --accumulate 8, with which the run goes on; or a shorter --length"),
        (TrainPlan(method=Method.FULL, rows_per_step=2), "Give --accumulate 2, .* or --activation-checkpointing, a"),
        (TrainPlan(rows_per_step=8, accumulate=8), "one row at a time already: give a shorter --length"),
    ],
)
def test_where_nothing_is_known_to_fit_the_least_is_named(plan: TrainPlan, words: str) -> None:
    for shape, memory in ((None, None), (ONE_B, 1000)):
        assert re.search(words, cure_of(plan, 1, shape, memory, resumes=True))


@pytest.mark.parametrize("cpu", [False, True])
@pytest.mark.parametrize("accumulate", [1, 8])
def test_only_a_run_that_has_a_state_goes_on_or_is_restarted(accumulate: int, cpu: bool) -> None:
    plan = TrainPlan(rows_per_step=8, accumulate=accumulate)
    for memory in (None, 1000, int(1000 * GB)):
        fresh, kept = (cure_of(plan, 1, ONE_B, memory, cpu=cpu, resumes=resumes) for resumes in (False, True))
        assert "--restart" not in fresh
        assert "goes on" not in fresh
        assert "--restart" in kept or "goes on" in kept
