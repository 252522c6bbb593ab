"""Drafts of a checkpoint's own MTP layer: what transformers computes of it, and which checkpoints have one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.worker import drafted_reports
from safetensors.torch import load_file, save_file
from space_common.worker.client import WorkerClient
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.draft_networks.mtp import load_mtp
from space_model.loading.load import load_model
from space_model.model_error import InvalidSetting
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from tiny_checkpoints import add_mtp_layer, tiny_checkpoint
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5", "mimo", "qwen3_5_moe", "mimo_v2_flash")
PROMPT = [20, 30, 40, 50, 31, 90]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model of one layer and an MTP layer behind it."""
    made: dict[str, Path] = {}

    def find(family: str) -> Path:
        if family not in made:
            more: dict[str, Any] = {"mlp_layer_types": ["sparse"]} if family == "glm4_moe_lite" else {}
            if family == "mimo_v2_flash":
                more = {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]}
            if family in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
                more = {"layer_types": ["full_attention"], "num_hidden_layers": 1}
            folder = tiny_checkpoint(
                tmp_path_factory.mktemp(family), "qwen2" if family == "mimo" else family, num_masks=0, num_layers=1,
                seed=2, tie_word_embeddings=False, num_nextn_predict_layers=1, **more,
            )  # fmt: skip
            if family == "mimo":
                rewrite(folder, lambda config: {**config, "model_type": "mimo", "rope_theta": 10000.0})
            made[family] = add_mtp_layer(folder)
        return made[family]

    return find


def rewrite(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def with_mtp(folder: Path, dtype: str = "float32") -> SpaceModel:
    model = load_model(folder, dtype=dtype, num_threads=1)
    return model.drafted_by(load_mtp(Checkpoint.open(folder), model.facts, dtype=dtype))


class Oracle:
    """The model and its MTP layer in transformers, over a whole text at once."""

    def __init__(self, folder: Path) -> None:
        fields = json.loads((folder / "config.json").read_text())
        self.is_mimo, is_mimo_v2 = fields["model_type"] == "mimo", fields["model_type"] == "mimo_v2_flash"
        config = AutoConfig.for_model(**fields | {"model_type": "qwen2"} if self.is_mimo else fields)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation="eager"
        )
        self.layer = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        tensors = load_file(folder / "model.safetensors")
        self.layer.load_state_dict(self.model.state_dict())
        block = self.layer.model.layers[0]
        self.is_beside = "mtp.fc.weight" in tensors
        self.keeps_first = self.is_beside or is_mimo_v2
        self.passes_normed = self.keeps_first or self.is_mimo
        if self.is_beside:
            own = {name.removeprefix("mtp."): tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
            named = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc"
            self.enorm, self.hnorm, self.eh_proj = (own.pop(f"{name}.weight") for name in named)
            self.enorm, self.hnorm = self.enorm + 1, self.hnorm + 1
            self.layer.model.norm.weight.data = own.pop("norm.weight")
            own = {name.removeprefix("layers.0."): tensor for name, tensor in own.items()}
        elif self.is_mimo:
            at = "model.mtp_layers.0."
            own = {name.removeprefix(at): tensor for name, tensor in tensors.items() if name.startswith(at)}
            named = "token_layernorm", "hidden_layernorm", "input_proj"
            self.enorm, self.hnorm, self.eh_proj = (own.pop(f"{name}.weight") for name in named)
            self.layer.model.norm.weight.data = own.pop("final_layernorm.weight")
        elif is_mimo_v2:
            at = "model.mtp.layers.0."
            own = {name.removeprefix(at): tensor for name, tensor in tensors.items() if name.startswith(at)}
            self.enorm, self.hnorm, self.eh_proj = (own.pop(f"{name}.weight") for name in ("enorm", "hnorm", "eh_proj"))
            self.layer.model.norm.weight.data = own.pop("final_layernorm.weight")
            own["post_attention_layernorm.weight"] = own.pop("pre_mlp_layernorm.weight")
            own = {name.replace("attention_sink_bias", "sinks"): tensor for name, tensor in own.items()}
        else:
            own = {
                name.removeprefix("model.layers.1."): tensor for name, tensor in tensors.items() if ".layers.1." in name
            }
            self.enorm, self.hnorm, self.eh_proj = (own.pop(f"{name}.weight") for name in ("enorm", "hnorm", "eh_proj"))
            self.layer.model.norm.weight.data = own.pop("shared_head.norm.weight")
            self.layer.lm_head.weight.data = own.pop("shared_head.head.weight")
            own.pop("embed_tokens.weight")
        experts = {name: tensor for name, tensor in own.items() if ".experts." in name}
        block.load_state_dict({name: t for name, t in own.items() if name not in experts}, strict=not experts)
        if not experts:
            return
        stack = block.mlp.experts
        for number in range(len(stack.gate_up_proj)):
            gate, up, down = (experts[f"mlp.experts.{number}.{part}_proj.weight"] for part in ("gate", "up", "down"))
            stack.gate_up_proj.data[number] = torch.cat([gate, up])
            stack.down_proj.data[number] = down

    @torch.no_grad()
    def drafts(self, known: list[int], count: int) -> list[int]:
        """Greedy drafts behind `known`."""
        hidden = self.model.model(torch.tensor([known])).last_hidden_state[0]
        states, ids, drafts = [*hidden[: len(known) - 1]], known[1:], list[int]()
        outputs: list[Tensor] = []
        source = self.layer.model.norm if self.passes_normed else self.layer.model.layers[0]
        hook = source.register_forward_hook(lambda *call: outputs.append(call[2]))
        for _ in range(count):
            embedded = self.model.model.embed_tokens(torch.tensor(ids))
            embedded[0] *= self.keeps_first
            parts = [norm(embedded, self.enorm), norm(torch.stack(states), self.hnorm)]
            both = torch.cat(parts[::-1] if self.is_mimo else parts, dim=1)
            logits = self.layer(inputs_embeds=(both @ self.eh_proj.T)[None]).logits[0, -1]
            out = outputs[-1][0] if isinstance(outputs[-1], tuple) else outputs[-1]
            drafts.append(int(logits.argmax()))
            ids, states = [*ids, drafts[-1]], [*states, out.reshape(-1, out.shape[-1])[-1]]
        hook.remove()
        return drafts


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_the_layer_in_transformers(family: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(family)
    oracle, model = Oracle(folder), with_mtp(folder)
    worker = Worker(model, num_blocks=100, block_size=4, controller=FixedLayout.by_head(3))
    client = WorkerClient(worker)
    number = client.admit(PROMPT, max_tokens=40)
    for _ in range(8):
        client.step()
        (sequence,) = worker.batch
        assert sequence.drafts == oracle.drafts(sequence.ids, 3)
    counts = {report.num_accepted for report in client.sequences[number].reports if report.num_drafted}
    assert len(counts) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_plain_decoding_s_and_some_drafts_are_accepted(
    family: str, folder_of: Callable[[str], Path]
) -> None:
    reports = drafted_reports(with_mtp(folder_of(family)), PROMPT, 4, 32)
    assert {report.draft_source for report in reports} == {pb.DRAFT_SOURCE_MTP}
    assert {min(report.num_accepted, 1) for report in reports} == {0, 1}


def test_the_layer_of_a_model_that_also_sees_drafts_for_its_text_part(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    text = folder_of("qwen3_5")
    shutil.copytree(text, tmp_path / "whole")
    rewrite(
        tmp_path / "whole",
        lambda config: {"model_type": "qwen3_5", "text_config": config, "tie_word_embeddings": False},
    )
    tensors = load_file(text / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    renamed["model.visual.patch_embed.bias"] = torch.zeros(2)
    save_file(renamed, tmp_path / "whole" / "model.safetensors")
    found = []
    for folder in (text, tmp_path / "whole"):
        worker = Worker(with_mtp(folder), num_blocks=100, block_size=4, controller=FixedLayout.by_head(3))
        client = WorkerClient(worker)
        client.admit(PROMPT, max_tokens=40)
        drafts = []
        for _ in range(6):
            client.step()
            drafts += [sequence.drafts for sequence in worker.batch]
        found.append(drafts)
    assert found[0] == found[1]
    assert any(found[0])


def test_the_worker_says_that_it_drafts_by_its_mtp_layer(folder_of: Callable[[str], Path]) -> None:
    plain, model = load_model(folder_of("deepseek_v3")), with_mtp(folder_of("deepseek_v3"))
    hello = Worker(model, num_blocks=10, block_size=4).hello("life")
    assert (hello.num_head_drafts, hello.head_kind) == (4, "mtp")
    states = 4 * model.facts.hidden_size
    assert model.facts.kv_bytes_per_token == 2 * plain.facts.kv_bytes_per_token + states


def test_checkpoints_without_an_mtp_layer_are_named(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    llama = tiny_checkpoint(tmp_path / "llama", num_masks=0)
    with pytest.raises(InvalidSetting, match=r"drafts by the MTP layers of .* checkpoints, and .*llama is llama"):
        with_mtp(llama)
    bare = tiny_checkpoint(tmp_path / "bare", "glm4_moe", num_masks=0, num_nextn_predict_layers=1)
    with pytest.raises(InvalidSetting, match=r"has no tensor model\.layers\.2\.eh_proj\.weight"):
        with_mtp(bare)
    assert json.loads((bare / "config.json").read_text())["num_hidden_layers"] == 2
