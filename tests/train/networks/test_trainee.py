"""A training pass lays out the rows of the decoder's own step: same hidden rows, whatever the family."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles.training import decoder_rows, random_ids, read_model, rows_for, tiny_plan
from safetensors.torch import load_file
from space_model.adapters import GATED_LORA_FILE, GatedLora
from space_model.heads import BaseSpec
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_train.data.train_batch import AnchorRows, Texts, TrainBatch, anchor_rows, train_batch, within_documents
from space_train.networks import losses
from space_train.networks.adapters import AdaptedLinear, Adapters, Gate
from space_train.networks.losses import (
    CROSS_ENTROPY,
    FrozenOutput,
    Losses,
    best,
    distilled,
    hard,
    reach_probability,
    soft,
)
from space_train.networks.trainee import Decoder, Trainee, attention_for, block_mask
from space_train.train_plan import DraftObjective, HeadForm, Method, TrainPlan
from tiny_checkpoints import random_gated_lora, tiny_checkpoint
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from transformers.integrations import flex_attention as transformers_flex

E, V, N = 4, 7, 9


def logits(hidden: Tensor) -> Tensor:
    return hidden @ torch.randn(E, V, generator=torch.Generator().manual_seed(9))


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(N, E, generator=torch.Generator().manual_seed(0))


LABELS = torch.arange(N) % V
WEIGHTS = torch.linspace(0.0, 1.0, N)


def test_a_mask_is_reached_if_all_drafts_before_it_in_its_group_are_accepted() -> None:
    chance = torch.tensor([[0.5, 0.2, 0.9, 0.25, 0.8]]).log()  # two groups: three masks, two masks
    depth = torch.tensor([[1, 2, 3, 1, 2]])
    torch.testing.assert_close(reach_probability(chance, depth), torch.tensor([[1.0, 0.5, 0.1, 1.0, 0.25]]))
    chance = torch.full((1, 4000), -15.0)
    chance[0, -2:] = math.log(0.5)
    depth = torch.tensor([[1, 2] * 2000])
    assert reach_probability(chance, depth)[0, -2:].tolist() == pytest.approx([1.0, 0.5], abs=1e-6)


def test_the_soft_loss_is_the_cross_entropy_to_the_teachers_distribution(hidden: Tensor) -> None:
    teacher = torch.randn(N, E, generator=torch.Generator().manual_seed(1))
    p, log_q = logits(teacher).softmax(-1), logits(hidden).log_softmax(-1)
    nats = [-float((a * b).sum()) for a, b in zip(p, log_q, strict=True)]
    assert float(soft(logits, hidden, teacher)) == pytest.approx(sum(nats), rel=1e-5)
    rows = hidden.clone().requires_grad_()
    soft(logits, rows, hidden).backward()
    torch.testing.assert_close(rows.grad, torch.zeros(N, E), rtol=0, atol=1e-5)
    teacher = hidden.clone().requires_grad_()
    student = hidden.flip(0).clone().requires_grad_()
    soft(logits, student, teacher).backward()
    assert teacher.grad is None


def test_the_hard_loss_is_the_nats_of_the_labels(hidden: Tensor) -> None:
    nats = [-float(row[label]) for row, label in zip(logits(hidden).log_softmax(-1), LABELS, strict=True)]
    assert float(hard(logits, hidden, LABELS)) == pytest.approx(sum(nats), rel=1e-5)
    assert best(logits, hidden).tolist() == logits(hidden).argmax(-1).tolist()


@pytest.mark.parametrize("chunk", [1, 2, 4, N])
def test_losses_do_not_depend_on_rows_at_once(chunk: int, hidden: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> tuple[Tensor, ...]:
        rows = hidden.clone().requires_grad_()
        total = hard(logits, rows, LABELS) + soft(logits, rows, hidden.flip(0))
        total.backward()
        return total.detach(), rows.grad, best(logits, hidden)

    whole = found()
    monkeypatch.setattr(losses, "CHUNK", chunk)
    for one, other in zip(found(), whole, strict=True):
        torch.testing.assert_close(one, other)


def test_no_rows_are_no_loss_and_have_a_gradient_of_nothing() -> None:
    rows = torch.zeros(0, E, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    total = hard(logits, rows, none)
    (total + soft(logits, rows, rows)).backward()
    assert total.item() == 0.0
    assert rows.grad is not None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path, "llama", num_masks=0)


def test_an_adapted_linear_adds_its_delta_while_the_gate_is_open_and_no_bit_otherwise() -> None:
    linear, gate = nn.Linear(3, 2), Gate()
    adapted = AdaptedLinear(linear, rank=1, scale=0.5, gate=gate)
    with torch.no_grad():
        adapted.a.copy_(torch.tensor([[1.0, 2.0, 3.0]]))
        adapted.b.copy_(torch.tensor([[4.0], [-2.0]]))
    x = torch.tensor([[1.0, 1.0, 1.0]])
    assert torch.equal(adapted(x), linear(x))
    with gate.open():
        torch.testing.assert_close(adapted(x), linear(x) + torch.tensor([[12.0, -6.0]]))
    assert torch.equal(adapted(x), linear(x))


def test_the_gate_closes_behind_an_error() -> None:
    gate = Gate()
    with pytest.raises(RuntimeError, match="out of memory"), gate.open():
        raise RuntimeError("out of memory")
    assert not gate.is_on


def test_every_linear_of_the_layers_is_adapted_and_the_output_is_not(folder: Path) -> None:
    model = read_model(folder)
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    adapters = Adapters(model, rank=2, alpha=4.0, num_masks=3)
    assert set(adapters.export(torch.float32).pairs) == names


def test_fresh_adapters_change_nothing_and_masks_start_near_the_mean(folder: Path) -> None:
    model = read_model(folder)
    ids = torch.tensor([random_ids(8, 0)])
    with torch.no_grad():
        plain = model(ids).logits
        adapters = Adapters(model, rank=2, alpha=4.0, num_masks=3)
        adapters.initialise(torch.Generator().manual_seed(0), torch.full((64,), 0.25), 0.01)
        with adapters.gate.open():
            assert torch.equal(model(ids).logits, plain)
    torch.testing.assert_close(adapters.mask_embeddings.detach(), torch.full((3, 64), 0.25), atol=0.06, rtol=0)


def test_a_served_adapter_is_taken_on_and_written_again_with_the_same_deltas(folder: Path, tmp_path: Path) -> None:
    """Whatever alpha it was trained with."""
    model = read_model(folder)
    served = random_gated_lora(model, num_masks=3, rank=2, seed=5)
    adapters = Adapters(model, rank=2, alpha=16.0, num_masks=3)
    adapters.take(served)
    adapters.export(torch.float32).save(tmp_path / "adapter.safetensors")
    again = GatedLora.load(tmp_path / "adapter.safetensors", BaseSpec(64, torch.float32), 3)
    assert again.scale == 8.0 != served.scale
    assert torch.equal(again.mask_embeddings, served.mask_embeddings)
    assert again.pairs.keys() == served.pairs.keys()
    for name, (a, b) in served.pairs.items():
        torch.testing.assert_close(again.scale * again.pairs[name][1] @ again.pairs[name][0], served.scale * b @ a)


R = 40  # beyond the window of 24 that some families have


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return lambda family: tiny_checkpoint(tmp_path_factory.mktemp(family), family)


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, positions that come twice, and a visibility that is not causal."""
    ids = torch.tensor([random_ids(R, seed) for seed in (1, 2)])
    positions = torch.cat((torch.arange(30), torch.arange(10, 20))).expand(2, -1)
    visible = torch.rand(2, R, R, generator=torch.Generator().manual_seed(0)) < 0.5
    return ids, positions, visible | torch.eye(R, dtype=torch.bool)


def eager_flex(query: Tensor, key: Tensor, value: Tensor, training: bool = False, **keywords: Any) -> Any:
    """Not compiled: the tiny shapes of a test are not worth a compiler's minute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow so
        return flex_attention(query, key, value, **keywords)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "cohere2"])
@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
def test_every_attention_function_sees_what_sdpa_sees(
    family: str, attention: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_flex, "compile_friendly_flex_attention", eager_flex)
    folder = folder_of(family)
    with torch.no_grad():
        expected = Decoder(read_model(folder, "sdpa")).rows(*rows())
        other = Decoder(read_model(folder, attention))
        assert other.attention == attention
        torch.testing.assert_close(other.rows(*rows()), expected, rtol=1e-4, atol=1e-4)


def test_flex_attention_caps_scores_as_eager(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_flex, "compile_friendly_flex_attention", eager_flex)
    folder = folder_of("gemma2")
    with torch.no_grad():
        found = [Decoder(read_model(folder, name)).rows(*rows()) for name in ("eager", "flex_attention")]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_block_mask_sees_what_the_tensor_says_and_skips_blocks_in_which_nothing_is_seen() -> None:
    visible = torch.rand(2, 200, 300, generator=torch.Generator().manual_seed(0)) < 0.01
    visible[0, :128, 128:256] = False
    mask = block_mask(visible)
    assert tuple(mask.shape) == (2, 1, 200, 300)
    everywhere = torch.meshgrid(torch.arange(2), torch.arange(200), torch.arange(300), indexing="ij")
    text, row, key = everywhere
    assert torch.equal(mask.mask_mod(text, torch.zeros_like(text), row, key), visible)
    assert mask.to_dense()[0, 0, 0].tolist() == [1, 0, 1]
    assert mask.to_dense()[1, 0].min() == 1


@pytest.mark.parametrize(
    ("family", "given", "chosen"),
    [
        ("llama", "sdpa", "sdpa"),
        ("llama", "eager", "eager"),
        ("llama", "flex_attention", "flex_attention"),
        ("gemma2", None, "eager"),  # sdpa would leave out the soft cap of the scores
        ("gemma2", "flex_attention", "flex_attention"),
    ],
)
def test_the_attention_function_takes_masks_and_computes_the_family(
    family: str, given: str | None, chosen: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = read_model(folder_of(family), given)
    assert attention_for(model) == chosen
    if family == "llama":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert attention_for(model) == "flex_attention"
        model.config.attention_dropout = 0.1  # which flex_attention refuses
        assert attention_for(model) == ("eager" if given == "eager" else "sdpa")


@pytest.mark.parametrize("compile", [False, True])
def test_the_state_names_each_weight_once(
    compile: bool, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda body, dynamic: compiled(body, dynamic=dynamic, backend="eager"))
    model = read_model(folder_of("llama"))
    names = [f"model.{name}" for name in model.state_dict()]
    assert list(Decoder(model, compile=compile).state_dict()) == names


def test_inputs_enter_the_first_layer_as_they_are_and_leave_no_trace(folder_of: Callable[[str], Path]) -> None:
    decoder = Decoder(read_model(folder_of("gemma3")))
    ids, positions, visible = rows()
    scale = 64**0.5  # which Gemma puts on embeddings
    with torch.no_grad():
        plain = decoder.rows(ids, positions, visible)
        entered = decoder.rows(torch.zeros_like(ids), positions, visible, inputs=scale * decoder.embed(ids))
        torch.testing.assert_close(entered, plain, rtol=1e-5, atol=1e-5)
        assert torch.equal(decoder.rows(ids, positions, visible), plain)


def test_a_compiled_body_gets_its_own_inputs(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph must not keep those of the first: captured here as for a compiler, and run without one."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda body, dynamic: compiled(body, dynamic=dynamic, backend="eager"))
    folder = folder_of("llama")
    decoder, plain = Decoder(read_model(folder), compile=True), Decoder(read_model(folder))
    ids, positions, visible = rows()
    for seed in (0, 1):
        inputs = torch.randn(2, R, 64, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        found, expected = (d.rows(ids, positions, visible, inputs=inputs) for d in (decoder, plain))
        torch.testing.assert_close(found, expected)
        (gradient,) = torch.autograd.grad(found.square().sum(), inputs)
        assert bool(gradient.any())
    with torch.no_grad():
        torch.testing.assert_close(decoder.rows(ids, positions, visible), plain.rows(ids, positions, visible))
    torch.compiler.reset()


FAMILIES = ["llama", "mistral", "qwen3", "gemma2", "gemma3", "granite", "cohere2", "phi3", "qwen3_moe", "deepseek_v2"]
FAMILIES += ["gemma4", "mimo_v2_flash", "gemma3n", "xglm", "falcon"]
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
    file = folder / GATED_LORA_FILE
    trainee.adapters.take(GatedLora.load(file, BaseSpec(64, torch.float32), NUM_MASKS))
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


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "deepseek_v2"])  # all: test_family_sweep
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
    tensors = load_file(folder / "draft_head.safetensors")
    with torch.no_grad():
        trainee.head.w1.copy_(tensors["draft_head.w1.weight"])
        trainee.head.w2.copy_(tensors["draft_head.w2.weight"])
        mine = trainee.head(hidden, trainee.decoder.embed(previous))
    weights = server.drafting.draft_head
    embedded = weights.embedding_scale * server.embed(previous)
    inner = torch.nn.functional.silu(torch.cat((hidden, embedded), dim=1) @ weights.w1.T)
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
    trainee.head.initialise(torch.Generator().manual_seed(0))
    losses: Losses = trainee(train_batch(rows_for(plan), plan, 0, 4))
    assert float(losses.next_token) == 0.0
    (losses.masks + losses.head).backward()
    learnt = {name for name, p in trainee.named_parameters() if p.grad is not None}
    assert learnt == set(trainee.trained)
    assert not any(name.endswith("linear.weight") or "embed_tokens" in name for name in learnt)


def test_rows_without_masks_still_give_every_parameter_a_gradient(checkpoint_of: Checkpoints) -> None:
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


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_loss_of_a_frozen_output_and_its_gradients_are_those_of_autograd(softcap: float | None) -> None:
    """In several chunks, the last one shorter; both students of one teacher."""
    rng = torch.Generator().manual_seed(0)
    weight, bias, teacher = (torch.randn(*size, generator=rng) for size in ((48, E), (48,), (N, E)))
    output = FrozenOutput(weight, None if softcap else bias, 0.7, softcap)

    def logits_of(hidden: Tensor) -> Tensor:
        found = 0.7 * torch.nn.functional.linear(hidden, weight, output.bias)
        return found if softcap is None else softcap * torch.tanh(found / softcap)

    students = [torch.randn(N, E, generator=rng).requires_grad_() for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(losses.LOGITS_AT_ONCE, "cpu", 4 * 48)
        values, acceptance = distilled(output, teacher, students, CROSS_ENTROPY)
    found = torch.autograd.grad((values @ WEIGHTS).sum(), students)
    target = logits_of(teacher).softmax(-1)
    expected = [-WEIGHTS @ (target * logits_of(student).log_softmax(-1)).sum(-1) for student in students]
    torch.testing.assert_close(values @ WEIGHTS, torch.stack(expected))
    torch.testing.assert_close(found, torch.autograd.grad(sum(expected), students))
    p, q = (logits_of(rows).softmax(-1) for rows in (teacher, students[1]))
    torch.testing.assert_close(acceptance[1], torch.minimum(p, q).sum(-1))


@pytest.mark.parametrize("packed", [False, True])
def test_attention_by_query_blocks_and_fused_losses_learn_what_the_dense_pass_learns(
    packed: bool, checkpoint_of: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and gradients in float32, of texts longer than a block, alone or several in a row."""
    length = 300
    ids = torch.tensor([random_ids(length, seed) for seed in (1, 2)])
    document = torch.zeros_like(ids)
    if packed:
        document[0, 90:], document[0, 200:], document[1, 280:] = 1, 2, -1
    texts = Texts(ids, document >= 0, document, torch.ones(2, dtype=torch.bool))
    places = [[(m, 1 + m % NUM_MASKS) for m in range(first, length - 4, 3)] for first in (1, 1)]
    anchors = within_documents(anchor_rows(places, texts.is_target.numpy()), texts)
    batch = TrainBatch(None, texts, anchors)
    found = []
    for is_fast in (True, False):
        trainee = trainee_of(checkpoint_of("llama", 4), tiny_plan(lora_rank=4, lora_alpha=8.0))
        assert trainee.decoder.uses_query_blocks
        with torch.no_grad():
            trainee.head.initialise(torch.Generator().manual_seed(3))
            trainee.head.w2.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(4))
        if not is_fast:
            monkeypatch.setattr(Decoder, "uses_query_blocks", False)
            monkeypatch.setattr(Decoder, "frozen_output", None)
        found.append((losses := trainee(batch), gradients_of(trainee, losses)))
    (one, grads), (other, expected) = found
    torch.testing.assert_close((one.masks, one.head), (other.masks, other.head), rtol=1e-5, atol=1e-5)
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-3, atol=1e-3 * float(expected[name].abs().max()))


def gradients_of(trainee: Trainee, losses: Losses) -> dict[str, Tensor]:
    trained = trainee.trained
    found = torch.autograd.grad(losses.masks + losses.head, list(trained.values()))
    return dict(zip(trained, found, strict=True))


def test_gradients_in_bfloat16_are_those_of_float32_up_to_rounding(checkpoint_of: Checkpoints) -> None:
    """By the compiled operations, where this processor has them, on a base held in bfloat16."""
    length = 120
    ids = torch.tensor([random_ids(length, seed) for seed in (1, 2)])
    every = torch.ones_like(ids, dtype=torch.bool)
    texts = Texts(ids, every, torch.zeros_like(ids), torch.ones(2, dtype=torch.bool))
    anchors = anchor_rows([[(m, NUM_MASKS) for m in range(1, length - 4, 2)]] * 2, every.numpy())
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        trainee = trainee_of(checkpoint_of("llama", 4), tiny_plan(lora_rank=4, lora_alpha=8.0))
        trainee.decoder.model.to(dtype)
        for parameter in trainee.adapters.parameters():
            parameter.data = parameter.data.float()
        with torch.no_grad():
            trainee.head.initialise(torch.Generator().manual_seed(3))
            trainee.head.w2.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(4))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            losses = trainee(TrainBatch(None, texts, anchors))
        found.append((losses, gradients_of(trainee, losses)))
    (exact, expected), (rounded, grads) = found
    torch.testing.assert_close(rounded.masks, exact.masks, rtol=0.01, atol=0)
    torch.testing.assert_close(rounded.head, exact.head, rtol=0.01, atol=0)
    for name, grad in grads.items():
        error = (grad - expected[name]).norm() / expected[name].norm().clamp(min=1e-6)
        assert float(error) < 0.08, name


@pytest.mark.parametrize("loss", list(DraftObjective))
def test_an_objective_is_what_it_says_of_the_acceptances_of_each_group(
    loss: DraftObjective, checkpoint_of: Checkpoints
) -> None:
    texts = two_texts()
    anchors = anchors_of(texts)
    folder = checkpoint_of("llama", 4)
    trainee = trainee_of(folder, tiny_plan(lora_rank=4, lora_alpha=8.0, head=HeadForm.NONE, loss=loss))
    found = trainee(TrainBatch(None, texts, anchors))
    real, masks = trainee.hidden_rows(texts, anchors)
    source = anchors.positions.clamp(max=LENGTH - 1)
    expected = torch.zeros(())
    for text in range(len(ANCHORS)):
        reached, before = torch.ones(()), -1
        for place, group in enumerate(anchors.group[text].tolist()):
            if group != before:
                reached, before = torch.ones(()), group
            if not anchors.learns[text, place]:
                continue
            p = trainee.decoder.logits(real[text, source[text, place]]).softmax(-1)
            q = trainee.decoder.logits(masks[text, place]).softmax(-1)
            acceptance, cross = torch.minimum(p, q).sum(), -(p * q.log()).sum()
            reached = reached * acceptance
            expected = (
                expected
                + {
                    DraftObjective.CROSS_ENTROPY: cross,
                    DraftObjective.ACCEPTANCE: 1 - acceptance,
                    DraftObjective.LOG_ACCEPTANCE: -acceptance.log(),
                    DraftObjective.EXPECTED: -reached,
                }[loss]
            )
    torch.testing.assert_close(found.masks, expected, rtol=1e-4, atol=1e-4)
    trained = list(trainee.adapters.parameters())
    grads = [torch.autograd.grad(total, trained, retain_graph=True) for total in (found.masks, expected)]
    for grad, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


def test_the_focal_weight_is_the_chance_that_the_drafts_before_are_accepted(checkpoint_of: Checkpoints) -> None:
    texts = two_texts()
    anchors = anchors_of(texts)
    plan = tiny_plan(lora_rank=4, lora_alpha=8.0, head=HeadForm.NONE, loss=DraftObjective.ACCEPTANCE)
    folder, sums = checkpoint_of("llama", 4), {}
    for focal in (False, True):
        trainee = trainee_of(folder, replace(plan, focal=focal))
        sums[focal] = trainee(TrainBatch(None, texts, anchors)).masks.item()
    acceptance = torch.full((int(anchors.learns.sum()),), 0.5)
    depth = anchors.depth[anchors.learns]
    torch.testing.assert_close(Trainee._reached(acceptance, anchors), 0.5 ** (depth - 1).float())
    assert 0 < sums[True] < sums[False]
