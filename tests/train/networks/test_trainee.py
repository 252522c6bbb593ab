"""A training pass lays out the rows of the decoder's own step: same hidden rows, whatever the family."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from doubles.training import decoder_rows, random_ids, read_model, rows_for, tiny_plan
from safetensors.torch import load_file
from space_model.adapters import GATED_LORA_FILE, GatedLora
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_model.testing import tiny_checkpoint
from space_train.data.train_batch import AnchorRows, Texts, TrainBatch, anchor_rows, train_batch
from space_train.networks.trainee import Losses, Trainee
from space_train.train_plan import Method, TrainPlan
from torch import Tensor

FAMILIES = ["llama", "mistral", "qwen3", "gemma2", "gemma3", "granite", "cohere2", "phi3", "qwen3_moe"]
LENGTH = 40  # beyond the window of 24 that some families have
NUM_MASKS, MASK_IDS = 3, [4, 5, 6]
ANCHORS = [[(1, 3), (9, 2), (30, 3), (38, 1)], [(2, 3), (20, 3), (31, 1), (36, 2)]]

Checkpoints = Callable[[str, int | None], Path]


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """The folder of a tiny checkpoint: masks with ids, or (with a rank) of a gated adapter."""
    made: dict[tuple[str, int | None], Path] = {}

    def make(family: str, rank: int | None) -> Path:
        if (family, rank) not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            made[family, rank] = tiny_checkpoint(folder, family, num_masks=NUM_MASKS, adapter_rank=rank)
        return made[family, rank]

    return make


def two_texts() -> Texts:
    ids = torch.tensor([random_ids(LENGTH, seed) for seed in (1, 2)])
    every = torch.ones_like(ids, dtype=torch.bool)
    return Texts(ids, every, torch.zeros_like(ids), torch.ones(2, dtype=torch.bool))


def anchors_of(texts: Texts) -> AnchorRows:
    return anchor_rows(ANCHORS, np.ones(texts.ids.shape, dtype=np.bool_))


def trainee_of(folder: Path, plan: TrainPlan) -> Trainee:
    """A trainee that goes on from the masks of the checkpoint."""
    model = read_model(folder)
    if plan.method is Method.FULL:
        return Trainee(model, plan, MASK_IDS).eval()
    trainee = Trainee(model, plan, []).eval()
    assert trainee.adapters is not None
    file = folder / GATED_LORA_FILE
    trainee.adapters.take(GatedLora.load(file, num_masks=NUM_MASKS, hidden_size=64, dtype=torch.float32))
    return trainee


def assert_rows_are_those_of_the_server(trainee: Trainee, server: SpaceModel, adapter: int | None) -> None:
    texts = two_texts()
    anchors = anchors_of(texts)
    with torch.no_grad():
        real, masks = trainee.hidden_rows(texts, anchors)
    for text, ids in enumerate(texts.ids.tolist()):
        whole = decoder_rows(server, ids, 0)
        torch.testing.assert_close(real[text], whole, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(trainee.decoder.logits(real[text]), server.logits(whole), rtol=1e-4, atol=1e-4)
        for group, (m, depth) in enumerate(ANCHORS[text]):
            step = decoder_rows(server, ids[:m], NUM_MASKS, adapter)[m : m + depth]
            mine = masks[text][anchors.group[text] == group]
            torch.testing.assert_close(mine, step, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_the_whole_model_are_those_of_the_servers_step(family: str, checkpoint_of: Checkpoints) -> None:
    folder = checkpoint_of(family, None)
    trainee = trainee_of(folder, tiny_plan(Method.FULL))
    assert_rows_are_those_of_the_server(trainee, load_model(folder), None)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_gated_adapters_are_those_of_the_servers_step(family: str, checkpoint_of: Checkpoints) -> None:
    folder = checkpoint_of(family, 4)
    trainee = trainee_of(folder, tiny_plan(lora_rank=4, lora_alpha=8.0))
    assert_rows_are_those_of_the_server(trainee, load_model(folder), 0)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_draft_head_and_the_logits_are_the_servers(family: str, checkpoint_of: Checkpoints) -> None:
    folder = checkpoint_of(family, None)
    server = load_model(folder)
    trainee = trainee_of(folder, tiny_plan(Method.FULL, head_hidden=32, head_scale=2.0))
    hidden, previous = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)), torch.tensor(random_ids(5, 3))
    assert trainee.head is not None
    assert server.draft_head is not None
    tensors = load_file(folder / "draft_head.safetensors")
    with torch.no_grad():
        trainee.head.w1.copy_(tensors["draft_head.w1.weight"])
        trainee.head.w2.copy_(tensors["draft_head.w2.weight"])
        mine = trainee.head(hidden, trainee.decoder.embed(previous))
    weights = server.draft_head
    told = weights.embedding_scale * server.embed(previous)
    inner = torch.nn.functional.silu(torch.cat((hidden, told), dim=1) @ weights.w1.T)
    torch.testing.assert_close(mine, hidden + inner @ weights.w2.T)
    torch.testing.assert_close(trainee.decoder.logits(mine), server.logits(mine), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_real_rows_are_those_of_the_plain_model(family: str, checkpoint_of: Checkpoints) -> None:
    texts = two_texts()
    with torch.no_grad():
        plain = read_model(checkpoint_of(family, None)).base_model(texts.ids).last_hidden_state
        real, _ = trainee_of(checkpoint_of(family, None), tiny_plan(Method.FULL)).hidden_rows(texts, anchors_of(texts))
    torch.testing.assert_close(real, plain, rtol=1e-4, atol=1e-4)


def test_a_text_has_the_same_rows_alone_and_behind_another_in_its_row(checkpoint_of: Checkpoints) -> None:
    trainee = trainee_of(checkpoint_of("mistral", None), tiny_plan(Method.FULL))
    first, second = random_ids(15, 1), random_ids(25, 2)
    ids = torch.tensor([first + second])
    learned = torch.ones_like(ids, dtype=torch.bool)
    packed = Texts(ids, learned, torch.tensor([[0] * 15 + [1] * 25]), torch.ones(1, dtype=torch.bool))
    alone = Texts(ids[:, 15:], learned[:, 15:], torch.zeros(1, 25).long(), packed.teaches)
    with torch.no_grad():
        real, masks = trainee.hidden_rows(packed, anchor_rows([[(18, 3), (33, 2)]], learned.numpy()))
        own, own_masks = trainee.hidden_rows(alone, anchor_rows([[(3, 3), (18, 2)]], learned[:, 15:].numpy()))
    torch.testing.assert_close(real[:, 15:], own, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(masks, own_masks, rtol=1e-4, atol=1e-4)


def test_masks_change_no_bit_of_the_real_rows(checkpoint_of: Checkpoints) -> None:
    """The same number of rows, and other masks: what real rows are does not depend on them."""
    folder = checkpoint_of("llama", None)
    texts, found = two_texts(), []
    for mask_ids in (MASK_IDS, [9, 9, 9]):
        trainee = Trainee(read_model(folder), tiny_plan(Method.FULL), mask_ids).eval()
        with torch.no_grad():
            found.append(trainee.hidden_rows(texts, anchors_of(texts))[0])
    assert torch.equal(*found)


def test_no_gradient_flows_from_the_ordinary_loss_to_masks(checkpoint_of: Checkpoints) -> None:
    folder = checkpoint_of("llama", None)
    texts, gradients = two_texts(), []
    for with_masks in (True, False):
        trainee = Trainee(read_model(folder), tiny_plan(Method.FULL, mask_loss_weight=0.0), MASK_IDS).eval()
        batch = TrainBatch(None, texts, anchors_of(texts)) if with_masks else TrainBatch(texts, None, None)
        trainee(batch).next_token.backward()
        gradients.append({name: p.grad for name, p in trainee.decoder.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-5)


def test_frozen_rows_in_two_passes_are_those_of_one_pass(checkpoint_of: Checkpoints) -> None:
    folder = checkpoint_of("gemma3", None)
    texts = two_texts()
    found = []
    for method in (Method.FULL, Method.HEAD):
        trainee = Trainee(read_model(folder), tiny_plan(method), MASK_IDS).eval()
        with torch.no_grad():
            found.append(trainee.hidden_rows(texts, anchors_of(texts)))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", [Method.GATED_LORA, Method.HEAD])
def test_a_frozen_base_gets_no_gradient(method: Method, checkpoint_of: Checkpoints) -> None:
    plan = tiny_plan(method, lora_rank=4, ar_share=0.25)
    trainee = Trainee(read_model(checkpoint_of("llama", None)), plan, [] if method is Method.GATED_LORA else MASK_IDS)
    assert trainee.head is not None
    trainee.head.initialise(torch.Generator().manual_seed(0))
    losses: Losses = trainee(train_batch(rows_for(plan), plan, 0, 4))
    assert float(losses.next_token) == 0.0
    (losses.masks + losses.head).backward()
    learnt = {name for name, p in trainee.named_parameters() if p.grad is not None}
    assert learnt == set(trainee.trained)
    assert not any(name.endswith("linear.weight") or "embed_tokens" in name for name in learnt)


def test_rows_without_masks_still_give_every_parameter_a_gradient_for_processes_wait_for_all(
    checkpoint_of: Checkpoints,
) -> None:
    for method, mask_ids in ((Method.GATED_LORA, []), (Method.FULL, MASK_IDS), (Method.HEAD, MASK_IDS)):
        trainee = Trainee(read_model(checkpoint_of("llama", None)), tiny_plan(method), list(mask_ids))
        losses = trainee(TrainBatch(two_texts(), None, None))
        (losses.next_token + losses.masks + losses.head).backward()
        assert all(p.grad is not None for p in trainee.trained.values()), method


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_base_in_half_precision_takes_adapters_and_head_in_whole(precision: str, checkpoint_of: Checkpoints) -> None:
    plan = tiny_plan(precision=precision)
    trainee = Trainee(read_model(checkpoint_of("llama", None)).to(torch.bfloat16), plan, [])
    batch = train_batch(rows_for(plan), plan, 0, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        losses = trainee(batch)
    (losses.masks + losses.head).backward()
    assert {p.grad.dtype for p in trainee.trained.values() if p.grad is not None} == {torch.float32}


def test_activation_checkpointing_changes_no_gradient(checkpoint_of: Checkpoints) -> None:
    found: list[dict[str, Tensor]] = []
    for checkpointing in (False, True):
        plan = tiny_plan(Method.FULL, activation_checkpointing=checkpointing)
        trainee = Trainee(read_model(checkpoint_of("llama", None)), plan, MASK_IDS).train()
        losses = trainee(train_batch(rows_for(plan), plan, 0, 4))
        (losses.next_token + losses.masks + losses.head).backward()
        found.append({name: p.grad for name, p in trainee.trained.items() if p.grad is not None})
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name])
