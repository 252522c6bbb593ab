"""Every attention function of transformers gets our rows' visibility in its own form."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.training import random_ids, read_model
from space_model.testing import tiny_checkpoint
from space_train.networks.trainee import Decoder, attention_for, block_mask
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from transformers.integrations import flex_attention as transformers_flex

R = 40  # beyond the window of 24 that some families have


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
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
    family: str, attention: str, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_flex, "compile_friendly_flex_attention", eager_flex)
    folder = checkpoint_of(family)
    with torch.no_grad():
        expected = Decoder(read_model(folder, "sdpa")).rows(*rows())
        other = Decoder(read_model(folder, attention))
        assert other.attention == attention
        torch.testing.assert_close(other.rows(*rows()), expected, rtol=1e-4, atol=1e-4)


def test_flex_attention_caps_scores_as_eager_attention_does(
    checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_flex, "compile_friendly_flex_attention", eager_flex)
    folder = checkpoint_of("gemma2")
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
    family: str, given: str | None, chosen: str, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = read_model(checkpoint_of(family), given)
    assert attention_for(model) == chosen
    if family == "llama":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert attention_for(model) == "flex_attention"
        model.config.attention_dropout = 0.1  # which flex_attention refuses
        assert attention_for(model) == ("eager" if given == "eager" else "sdpa")


@pytest.mark.parametrize("compile", [False, True])
def test_the_state_names_each_weight_once(
    compile: bool, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda body, dynamic: compiled(body, dynamic=dynamic, backend="eager"))
    model = read_model(checkpoint_of("llama"))
    names = [f"model.{name}" for name in model.state_dict()]
    assert list(Decoder(model, compile=compile).state_dict()) == names


def test_inputs_enter_the_first_layer_as_they_are_and_leave_no_trace(checkpoint_of: Callable[[str], Path]) -> None:
    decoder = Decoder(read_model(checkpoint_of("gemma3")))
    ids, positions, visible = rows()
    scale = 64**0.5  # which Gemma puts on embeddings
    with torch.no_grad():
        plain = decoder.rows(ids, positions, visible)
        entered = decoder.rows(torch.zeros_like(ids), positions, visible, inputs=scale * decoder.embed(ids))
        torch.testing.assert_close(entered, plain, rtol=1e-5, atol=1e-5)
        assert torch.equal(decoder.rows(ids, positions, visible), plain)


def test_a_compiled_body_gets_the_inputs_of_each_pass(
    checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph must not keep those of the first: captured here as for a compiler, and run without one."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda body, dynamic: compiled(body, dynamic=dynamic, backend="eager"))
    folder = checkpoint_of("llama")
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
