"""Adapters as Uno and I-DLM release them: the drafts are those of their own draft forward, the text is the base's."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from space_common.worker.client import WorkerClient
from space_model.adapters import GatedLora
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.heads import BaseSpec
from space_model.loading.load import load_model
from space_model.model_error import InvalidSpaceSection, ModelError, UnsupportedModel
from space_model.networks.llama_network import LlamaNetwork
from space_model.released_adapters import AdapterFormat, MaskInputs, split_place
from space_model.space_model import SpaceModel
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from tiny_checkpoints import released_adapter, tiny_checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config

K = 3
MASK_ID = 100  # of the I-DLM adapter, and the end of Uno's ids
PROMPT = [70, 71, 90, 33, 52, 48, 77]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("base") / "model", "qwen3", num_masks=0, seed=4)


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return released_adapter(tmp_path_factory.mktemp("released"), base)


def declare(folder: Path, where: Path, form: str, **section: object) -> Path:
    """A copy of the adapter with a config.json that declares what it is."""
    shutil.copytree(folder, where)
    declared = {"adapter": ".", "adapter_format": form, **section}
    (where / "config.json").write_text(json.dumps({"space": declared}), encoding="utf-8")
    return where


class DenseDrafts:
    """A draft forward as SGLang's UnoWorkerV2 runs it: [text, seed, rows of noise], causal, LoRA on the noise alone.
    Built from transformers and the adapter's file; nothing of this repository computes here."""

    def __init__(self, base: Path, adapter: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        weights = load_file(adapter / "adapter_model.safetensors")
        self._gate = torch.zeros(1, 1, 1)
        for name, a in weights.items():
            if name.endswith(".lora_A.weight"):
                b = weights[name.replace("lora_A", "lora_B")]
                path = name.removesuffix(".lora_A.weight").removeprefix("base_model.model.")
                self._adapt(self._model.get_submodule(path), a, b, config["lora_alpha"] / config["r"])

    def _adapt(self, linear: nn.Module, a: Tensor, b: Tensor, scale: float) -> None:
        linear.register_forward_hook(lambda _, x, y: y + self._gate * (x[0] @ a.T @ b.T * scale))

    @torch.no_grad()
    def logits(self, text: Sequence[int], noise: Sequence[int], *, adapted: bool = True) -> Tensor:
        """[text + noise, V]"""
        ids = torch.tensor([[*text, *noise]])
        self._gate = adapted * (torch.arange(ids.shape[1]) >= len(text)).float()[None, :, None]
        logits: Tensor = self._model(ids, use_cache=False).logits[0]
        return logits


def decode(
    model: SpaceModel, name: str, k: int, controller: FixedLayout | None = None
) -> tuple[list[int], list[tuple[int, list[int]]]]:
    """The text; and after each step the tokens so far and the drafts behind them."""
    router = WorkerClient(Worker(model, num_blocks=64, block_size=4, controller=controller or FixedLayout.full(k)))
    sequence = router.sequences[router.admit(PROMPT, max_tokens=24, adapter=name)]
    drafts: list[tuple[int, list[int]]] = []

    def look() -> None:
        for live in router.worker.batch:
            drafts.append((len(sequence.tokens), list(live.drafts)))

    router.run(after_step=look)
    return sequence.tokens, drafts


def noise_of(form: str) -> Callable[[int], int]:
    """The id that a mask at a position reads."""
    ids = MaskInputs(AdapterFormat(form), K, MASK_ID).ids(PreTrainedConfig(), 128)
    assert len(set(ids)) > 90 if form == "uno" else ids == [MASK_ID]
    assert min(ids) >= 1
    assert max(ids) == (MASK_ID if form == "i-dlm" else MASK_ID - 1)
    return lambda position: ids[position % len(ids)]


@pytest.mark.parametrize("network", ["compact", "transformers"])
@pytest.mark.parametrize("form", ["uno", "i-dlm"])
def test_the_drafts_are_those_of_the_formats_own_draft_forward(
    form: str, network: str, base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if network == "transformers":
        monkeypatch.setattr(LlamaNetwork, "fits", lambda config, dtype: False)
    place = declare(adapter, tmp_path / form, form, mask_token_id=MASK_ID, num_masks=K)
    model = load_model(base, dtype="float32", num_threads=1, adapters={"released": place})
    assert isinstance(model._network, LlamaNetwork) == (network == "compact")
    text, drafted = decode(model, "released", K)
    assert text == decode(model, "", 0)[0]
    dense, noise_at, found, unadapted = DenseDrafts(base, adapter), noise_of(form), [], []
    for emitted, drafts in drafted:
        known = [*PROMPT, *text[: emitted - 1]]  # ends with the seed, behind which the bonus is not known yet
        noise = [noise_at(len(known) + j) for j in range(K)]
        wanted = dense.logits(known, noise).argmax(-1)[len(known) - 1 :].tolist()
        assert wanted[0] == text[emitted - 1]
        assert wanted[1 : 1 + len(drafts)] == drafts
        found += drafts
        unadapted += dense.logits(known, noise, adapted=False).argmax(-1)[len(known) :].tolist()
    assert len(found) > 40
    assert sum(a == b for a, b in zip(found, unadapted, strict=False)) < len(found) / 4


@pytest.mark.parametrize(("form", "dtype"), [("uno", "float32"), ("uno", "bfloat16"), ("i-dlm", "bfloat16")])
def test_every_group_is_a_draft_forward_behind_its_draft(
    form: str, dtype: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    place = declare(adapter, tmp_path / form, form, mask_token_id=MASK_ID, num_masks=K)
    model = load_model(base, dtype=dtype, num_threads=1, adapters={"released": place})
    kv, layout = model.allocate_kv(4, 16), DraftLayout.full(2, K)
    segment = Segment(PROMPT, 0, [0, 1], layout, 0)
    batch = ForwardBatch.build([segment], block_size=16, mask_ids=(), adapter_masks=[K])
    logits, dense, noise_at = model.logits(model.forward(batch, kv)), DenseDrafts(base, adapter), noise_of(form)
    for group, rows in enumerate(batch.mask_rows[0]):
        known = PROMPT[: len(PROMPT) - 2 + group]
        wanted = dense.logits(known, [noise_at(len(known) + j) for j in range(K)])[len(known) :]
        if dtype == "float32":
            torch.testing.assert_close(logits[list(rows)], wanted, rtol=1e-4, atol=1e-4)
        else:
            assert torch.cosine_similarity(logits[list(rows)], wanted).min() > 0.99


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's own
def test_the_file_is_a_lora_of_peft(base: Path, adapter: Path) -> None:
    """The files that the tests write are read by peft, whose adapted model is the dense one with LoRA on every row."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    dense = DenseDrafts(base, adapter)
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(dense.logits([], PROMPT), wanted, rtol=1e-4, atol=1e-4)


def test_in_turns_the_drafts_are_the_same_behind_the_known_bonus(base: Path, adapter: Path, tmp_path: Path) -> None:
    """As Uno's servers decode: a draft forward behind the last token, then a forward that verifies."""
    place = declare(adapter, tmp_path / "uno", "uno", mask_token_id=MASK_ID, num_masks=K)
    model = load_model(base, dtype="float32", num_threads=1, adapters={"released": place})
    text, drafted = decode(model, "released", K, FixedLayout(lambda room: DraftLayout.turns(K)))
    assert text == decode(model, "", 0)[0]
    dense, noise_at = DenseDrafts(base, adapter), noise_of("uno")
    assert [len(drafts) for _, drafts in drafted[:8]] == [K, 0] * 4
    for emitted, drafts in drafted:
        known = [*PROMPT, *text[: emitted - 1]]
        noise = [noise_at(len(known) + j) for j in range(K)]
        assert dense.logits(known, noise).argmax(-1)[len(known) :].tolist()[: len(drafts)] == drafts


def test_names_with_and_without_pefts_prefix_are_read(base: Path, adapter: Path, tmp_path: Path) -> None:
    """K2-Horizon's adapters name their tensors model.layers…, without base_model.model."""
    bare = released_adapter(tmp_path / "bare", base, prefix="")
    spec, inputs = BaseSpec(64, torch.float32), MaskInputs(AdapterFormat.UNO, 7, None)
    ours, theirs = (GatedLora.load_released(folder, spec, inputs) for folder in (adapter, bare))
    assert ours.pairs.keys() == theirs.pairs.keys()
    assert (ours.rank, ours.scale, ours.num_masks) == (128, 16.0, 7)


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        ("uno:runs/a", ("uno", "runs/a")), ("i-dlm:OWNER/NAME", ("i-dlm", "OWNER/NAME")),
        ("runs/uno:a", ("space", "runs/uno:a")), ("eagle:runs/a", ("space", "eagle:runs/a")), ("uno", ("space", "uno")),
    ],
)  # fmt: skip
def test_a_place_may_begin_with_a_format(place: str, wanted: tuple[str, str]) -> None:
    assert split_place(place) == wanted


def test_the_formats_have_the_masks_of_their_blocks(base: Path, adapter: Path) -> None:
    uno = load_model(base, dtype="float32", adapters={"released": f"uno:{adapter}"})
    assert [a.num_masks for a in uno.facts.adapters] == [7]
    idlm = MaskInputs(AdapterFormat.IDLM, 3, None)
    assert idlm.ids(Qwen3Config(), 151936) == [151669]
    assert idlm.ids(Qwen3Config(mask_token_id=7), 151936) == [7]
    assert max(MaskInputs(AdapterFormat.UNO, 7, None).ids(Qwen3Config(mask_token_id=7), 151936)) == 6


def spoiled(adapter: Path, where: Path, kind: str) -> Path:
    """A copy of the adapter that is not served."""
    shutil.copytree(adapter, where)
    config_file, weights_file = where / "adapter_config.json", where / "adapter_model.safetensors"
    config, weights = json.loads(config_file.read_text(encoding="utf-8")), load_file(weights_file)
    layer = "base_model.model.model.layers.0."
    match kind:
        case "dora":
            config["use_dora"] = True
        case "patterns":
            config["rank_pattern"] = {"q_proj": 8}
        case "rank":
            config["r"] = 64
        case "head":
            pair = {"A": torch.ones(128, 64), "B": torch.ones(128, 128)}
            weights |= {f"base_model.model.lm_head.lora_{side}.weight": value for side, value in pair.items()}
        case "embedding":
            weights["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.ones(128, 128)
        case "fused":
            for side in "AB":
                name = f"{layer}self_attn.{{}}.lora_{side}.weight"
                weights[name.format("qkv_proj")] = weights.pop(name.format("q_proj"))
        case "half":
            del weights[f"{layer}mlp.up_proj.lora_B.weight"]
        case "finite":
            weights[f"{layer}mlp.up_proj.lora_B.weight"][0, 0] = torch.nan
        case "empty":
            weights = {}
        case "masks":
            save_file({"gated_lora.mask_embeddings": torch.ones(3, 64)}, where / "mask_embeddings.safetensors")
        case "config":
            config_file.unlink()
            return where
        case "other format":
            (where / "config.json").write_text(json.dumps({"space": {"adapter_format": "i-dlm"}}), encoding="utf-8")
        case "pickled":
            weights_file.rename(where / "adapter_model.bin")
            return where
    config_file.write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, weights_file)
    return where


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("dora", "use_dora = True, which is not served"),
        ("patterns", "rank_pattern = {'q_proj': 8}, which is not served"),
        ("rank", "has shape (128, 128); adapter_config.json says r 64"),
        ("head", "adapts lm_head, which is no linear of the model's model.layers"),
        ("embedding", "embed_tokens.lora_embedding_A, which is no part of a gated LoRA"),
        ("fused", "self_attn.qkv_proj, which is no linear of the model's model.layers"),
        ("half", "lacks model.layers.0.mlp.up_proj.lora_B.weight"),
        ("finite", "model.layers.0.mlp.up_proj in"),
        ("empty", "adapter_model.safetensors is empty"),
        ("masks", "so it is a gated adapter as spaceserve writes it, and none of uno"),
        ("config", "has no adapter_config.json; an adapter of uno is a folder with one"),
        ("other format", "declares the adapter format 'i-dlm', not uno"),
        ("pickled", "has its weights as adapter_model.bin, which can run code"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused(
    kind: str, words: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    folder = spoiled(adapter, tmp_path / "spoiled", kind)
    with pytest.raises(ModelError, match=re.escape(words)) as caught:
        load_model(base, dtype="float32", adapters={"released": f"uno:{folder}"})
    assert str(caught.value).startswith("Adapter released: ")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"adapter_format": "eagle"}, "There is no adapter format 'eagle'; there are space, uno, i-dlm."),
        ({"adapter_format": "uno", "mask_token_id": "<mask>"}, "must be an id; got '<mask>'"),
        ({"adapter_format": "uno", "mask_token_id": 1}, "mask_token_id must be from 2 to 128; got 1."),
        ({"adapter_format": "uno", "mask_token_id": 129}, "mask_token_id must be from 2 to 128; got 129."),
        ({"adapter_format": "i-dlm", "mask_token_id": 128}, "mask_token_id must be from 0 to 127; got 128."),
        ({"adapter_format": "i-dlm"}, "mask_token_id must be from 0 to 127; got 151669."),
    ],
)
def test_a_section_that_cannot_be_is_refused(
    section: dict[str, object], words: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    shutil.copytree(adapter, tmp_path / "adapter")
    (tmp_path / "adapter" / "config.json").write_text(json.dumps({"space": {"adapter": "."} | section}))
    with pytest.raises(InvalidSpaceSection, match=re.escape(words)):
        load_model(base, dtype="float32", adapters={"released": tmp_path / "adapter"})


def test_an_i_dlm_adapter_of_a_base_of_unknown_mask_id_is_refused(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "llama", "llama", num_masks=0)
    adapter = released_adapter(tmp_path / "adapter", base, rank=8)
    with pytest.raises(InvalidSpaceSection, match=r'this one is of type llama\. Declare "mask_token_id"'):
        load_model(base, dtype="float32", adapters={"released": f"i-dlm:{adapter}"})


def test_a_base_that_changes_embeddings_is_refused(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "granite", "granite", num_masks=0)
    adapter = released_adapter(tmp_path / "adapter", base, rank=8)
    with pytest.raises(UnsupportedModel, match=r"Adapter released: .* models of type 'granite' change them"):
        load_model(base, dtype="float32", adapters={"released": f"uno:{adapter}"})


def test_a_lora_that_is_not_said_to_draft_is_refused_with_both_ways(base: Path, adapter: Path) -> None:
    with pytest.raises(InvalidSpaceSection, match=re.escape(f"NAME=uno:{adapter}, NAME=i-dlm:{adapter}")):
        load_model(base, dtype="float32", adapters={"released": adapter})


def test_a_checkpoint_may_be_a_released_adapter_on_its_base(base: Path, adapter: Path, tmp_path: Path) -> None:
    own = declare(adapter, tmp_path / "own", "uno", base=str(base), num_masks=K)
    model = load_model(own, dtype="float32", num_threads=1)
    assert model.facts.num_masks == K
    text, drafts = decode(model, "", K)
    assert text == decode(load_model(base, dtype="float32", num_threads=1), "", 0)[0]
    assert max(len(after) for _, after in drafts) == K
