"""`spaceserve convert`: a published checkpoint in, one that this server takes out, the numbers untouched."""

import io
import json
import pickle
from pathlib import Path

import pytest
import sentencepiece
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from space_model.adapters import GatedLora
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.convert.command import main
from space_model.convert.convert import Wish, convert
from space_model.convert.source import ConvertError
from space_model.heads import BaseSpec
from space_model.loading.load import load_model
from space_model.model_error import CheckpointNotFound, InvalidSpaceSection, UnsupportedModel
from tiny_checkpoints import tiny_checkpoint
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
)

VOCAB = 32003  # the released Vicuna-7B SPACE model: 32000, and three added ids of which the last is the mask
MASK = 32002
RELEASED = Wish(mask_ids=(MASK,), num_masks=5)
FORMATS = ["one .bin", "several .bin", "old .bin", "one safetensors", "several safetensors"]


@pytest.fixture(scope="module")
def released() -> LlamaForCausalLM:
    """Random numbers in the released model's layout."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def publish(model: torch.nn.Module, folder: Path, form: str = "one .bin", **config: object) -> Path:
    """Write a checkpoint the way it may have been published."""
    folder.mkdir()
    written = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "float32", **config}
    (folder / "config.json").write_text(json.dumps(written))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if form.endswith(".bin"):
        # Llama checkpoints of that time carry this buffer.
        state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    half = len(state) // 2
    suffix, prefix = (".bin", "pytorch_model") if form.endswith(".bin") else (".safetensors", "model")
    if form.startswith("several"):
        names = [f"{prefix}-0000{part}-of-00002{suffix}" for part in (1, 2)]
        parts = [dict(list(state.items())[:half]), dict(list(state.items())[half:])]
        index = {name: file for file, part in zip(names, parts, strict=True) for name in part}
        (folder / f"{prefix}{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    else:
        names, parts = [prefix + suffix], [state]
    for file, part in zip(names, parts, strict=True):
        if suffix == ".bin":
            torch.save(part, folder / file, _use_new_zipfile_serialization=form != "old .bin")
        else:
            save_file(part, folder / file, metadata={"format": "pt"})
    return folder


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([[1, 5, 9, 31999, MASK]])).logits


@pytest.mark.parametrize("form", FORMATS)
def test_every_published_format_keeps_its_logits_bit_by_bit(released, tmp_path, form) -> None:
    convert(publish(released, tmp_path / "src", form), tmp_path / "dst", RELEASED)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "dst", local_files_only=True).eval()
    assert torch.equal(logits(converted), logits(released))


@pytest.mark.parametrize(
    ("wish", "ids", "num_masks"),
    [
        (RELEASED, [MASK], 5),
        (Wish(mask_ids=(31998, 31999, 32000, 32001, 32002)), [31998, 31999, 32000, 32001, 32002], 5),
        (Wish(add_masks=5), [32003, 32004, 32005, 32006, 32007], 5),
        (Wish(add_masks=1, num_masks=4), [32003], 4),
    ],
    ids=["one shared id", "one id per mask", "five new rows", "one new shared row"],
)
def test_the_converted_checkpoint_is_served_with_its_masks(released, tmp_path, wish, ids, num_masks) -> None:
    convert(publish(released, tmp_path / "src"), tmp_path / "dst", wish)
    space = json.loads((tmp_path / "dst" / "config.json").read_text())["space"]
    assert space == {"adapter": None, "draft_head": None, "num_masks": num_masks, "mask_token_ids": ids}
    facts = load_model(tmp_path / "dst", dtype="float32").facts
    assert facts.mask_ids == tuple(ids if len(ids) > 1 else ids * num_masks)


def test_new_mask_rows_are_the_mean_row_and_change_no_other_logit(released, tmp_path) -> None:
    convert(publish(released, tmp_path / "src"), tmp_path / "dst", Wish(add_masks=2))
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "dst", local_files_only=True).eval()
    assert converted.config.vocab_size == VOCAB + 2
    embedding = released.get_input_embeddings().weight
    torch.testing.assert_close(converted.get_input_embeddings().weight[VOCAB:], embedding.mean(0).expand(2, -1))
    torch.testing.assert_close(logits(converted)[..., :VOCAB], logits(released))


def test_a_tied_head_is_written_once_and_grows_with_the_embedding(tmp_path) -> None:
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    convert(publish(LlamaForCausalLM(config), tmp_path / "src"), tmp_path / "dst", Wish(add_masks=3))
    with safe_open(tmp_path / "dst" / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in set(file.keys())
        assert file.get_slice("model.embed_tokens.weight").get_shape() == [43, 16]


def test_weights_are_written_in_files_of_the_asked_size_with_an_index(released, tmp_path) -> None:
    limit = VOCAB * 16 * 4
    convert(publish(released, tmp_path / "src"), tmp_path / "dst", Wish(max_shard_bytes=limit))
    files = sorted(file.name for file in (tmp_path / "dst").glob("*.safetensors"))
    assert files == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "dst", local_files_only=True).eval()
    assert torch.equal(logits(converted), logits(released))


def test_a_wanted_dtype_is_in_the_weights_and_in_the_config(released, tmp_path) -> None:
    convert(publish(released, tmp_path / "src", torch_dtype="float16"), tmp_path / "dst", Wish(dtype=torch.bfloat16))
    config = json.loads((tmp_path / "dst" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "torch_dtype" not in config
    with safe_open(tmp_path / "dst" / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_a_sentencepiece_tokenizer_becomes_tokenizer_json(released, tmp_path) -> None:
    source = publish(released, tmp_path / "src")
    model = io.BytesIO()
    lines = [f"def function_{i}(x): return x * {i} + 1" for i in range(200)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=320, model_type="bpe", byte_fallback=True,
        minloglevel=2,
    )  # fmt: skip
    (source / "tokenizer.model").write_bytes(model.getvalue())
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    convert(source, tmp_path / "dst", RELEASED)
    text = "def function_3(x): return x"
    pieces = Tokenizer.from_file(str(tmp_path / "dst" / "tokenizer.json")).encode(text, add_special_tokens=False)
    assert pieces.ids == sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).encode(text)


def test_small_files_are_copied_but_no_code_and_no_pickles(released, tmp_path) -> None:
    source = publish(released, tmp_path / "src")
    for name in ("tokenizer.json", "generation_config.json", "LICENSE", "modeling_llama.py", "optimizer.pt"):
        (source / name).write_text("{}")
    convert(source, tmp_path / "dst", RELEASED)
    assert {file.name for file in (tmp_path / "dst").iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "LICENSE",
    }  # fmt: skip


def test_without_mask_flags_the_section_of_the_checkpoint_stays(released, tmp_path) -> None:
    section = {"num_masks": 5, "mask_token_ids": [MASK], "adapter": None, "draft_head": None}
    convert(publish(released, tmp_path / "src", space=section), tmp_path / "dst", Wish())
    assert json.loads((tmp_path / "dst" / "config.json").read_text())["space"] == section


def test_every_file_that_the_section_names_is_copied(tmp_path) -> None:
    source = tiny_checkpoint(tmp_path / "src", adapter_rank=4, num_masks=2, head_drafts=5, draft_vocab=60)
    convert(source, tmp_path / "dst", Wish())
    for name in ("gated_lora.safetensors", "draft_head.safetensors", "recurrent_head.safetensors"):
        assert (tmp_path / "dst" / name).read_bytes() == (source / name).read_bytes()
    assert load_model(tmp_path / "dst").facts.head.num_drafts == 5


def test_an_adapter_is_written_in_eight_bits_on_request(tmp_path) -> None:
    source = tiny_checkpoint(tmp_path / "src", adapter_rank=4, num_masks=2)
    file = "gated_lora.safetensors"
    assert main([str(source), str(tmp_path / "dst"), "--adapter-dtype", "int8"]) == 0
    with safe_open(tmp_path / "dst" / file, framework="pt") as written:
        dtypes = {written.get_tensor(name).dtype for name in written.keys() if name.endswith((".a", ".b"))}  # noqa: SIM118
    assert dtypes == {torch.int8}
    one, other = (GatedLora.load(folder / file, BaseSpec(64, torch.float32)) for folder in (source, tmp_path / "dst"))
    for name, (a, b) in one.pairs.items():
        torch.testing.assert_close(
            other.scale * torch.mm(*other.pairs[name][::-1]), one.scale * b @ a, atol=0.05, rtol=0
        )
    assert torch.equal(one.mask_embeddings, other.mask_embeddings)
    assert load_model(tmp_path / "dst").facts.num_masks == 2


def test_eight_bits_for_an_adapter_that_is_not_there_are_refused(released, tmp_path) -> None:
    with pytest.raises(ConvertError, match="--adapter-dtype int8 needs a checkpoint whose space section names"):
        convert(publish(released, tmp_path / "src"), tmp_path / "dst", Wish(adapter_int8=True))
    assert [file.name for file in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (Wish(mask_ids=(32003,)), "Mask id 32003 is outside the vocabulary of 32003 .* --add-masks"),
        (Wish(mask_ids=(1, 2), num_masks=5), "5 masks need 1 shared id or 5 ids; got 2"),
        (Wish(mask_ids=(MASK,), num_masks=17), "1 to 16 masks; got 17"),
        (Wish(mask_ids=(7, 7), num_masks=2), "repeat"),
        (Wish(num_masks=5), "--num-masks 5 needs --mask-ids or --add-masks"),
        (Wish(mask_ids=(MASK,), add_masks=1), "not both"),
    ],
)
def test_an_unfit_wish_names_value_bound_and_cure_and_writes_nothing(released, tmp_path, wish, message) -> None:
    with pytest.raises(ConvertError, match=message):
        convert(publish(released, tmp_path / "src"), tmp_path / "dst", wish)
    assert [file.name for file in tmp_path.iterdir()] == ["src"]


def test_an_existing_target_is_replaced_only_by_force(released, tmp_path) -> None:
    source, target = publish(released, tmp_path / "src"), tmp_path / "dst"
    target.mkdir()
    (target / "mine").write_text("precious")
    with pytest.raises(ConvertError, match=r"exists already.*--force"):
        convert(source, target, RELEASED)
    assert (target / "mine").read_text() == "precious"
    convert(source, target, Wish(force=True))
    assert not (target / "mine").exists()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["dst", "src"]


def test_a_failure_half_way_leaves_no_target_behind(released, tmp_path) -> None:
    source = publish(released, tmp_path / "src", "several .bin")
    (source / "tokenizer.model").write_bytes(b"not a tokenizer")
    with pytest.raises(ConvertError, match="tokenizer"):
        convert(source, tmp_path / "dst", RELEASED)
    assert [file.name for file in tmp_path.iterdir()] == ["src"]


def test_a_pickle_that_would_run_code_is_refused(released, tmp_path) -> None:
    source = publish(released, tmp_path / "src")
    (source / "pytorch_model.bin").write_bytes(pickle.dumps({"lm_head.weight": Path("anything")}, protocol=2))
    with pytest.raises(ConvertError, match="could run code"):
        convert(source, tmp_path / "dst", RELEASED)


@pytest.mark.parametrize("form", ["one .bin", "one safetensors"])
def test_a_file_cut_short_is_named(released, tmp_path, form) -> None:
    source = publish(released, tmp_path / "src", form)
    file = next(file for file in source.iterdir() if file.suffix in (".bin", ".safetensors"))
    file.write_bytes(file.read_bytes()[:100_000])
    with pytest.raises(ConvertError, match=file.name):
        convert(source, tmp_path / "dst", RELEASED)


def test_a_missing_file_of_several_is_named(released, tmp_path) -> None:
    source = publish(released, tmp_path / "src", "several safetensors")
    (source / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointNotFound, match=r"00002-of-00002.*1 of 2 files are missing"):
        convert(source, tmp_path / "dst", RELEASED)


def test_an_index_cannot_reach_out_of_its_folder(released, tmp_path) -> None:
    source = publish(released, tmp_path / "src", "several safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(ConvertError, match="not a file beside it"):
        convert(source, tmp_path / "dst", RELEASED)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "inside.safetensors"}}))
    (tmp_path / "secret.safetensors").write_bytes(b"")
    (source / "inside.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(ConvertError, match="is a link out of its folder"):
        convert(source, tmp_path / "dst", RELEASED)


def test_a_config_of_another_checkpoint_is_noticed(released, tmp_path) -> None:
    source = publish(released, tmp_path / "src", vocab_size=32000)
    with pytest.raises(ConvertError, match=r"has shape \[32003, 16\]; config.json makes it \[32000, 16\]"):
        convert(source, tmp_path / "dst", Wish(mask_ids=(5,)))


def test_a_missing_head_is_noticed_where_nothing_is_tied(released, tmp_path) -> None:
    source = publish(released, tmp_path / "src", "one safetensors")
    state = {name: tensor.clone() for name, tensor in released.state_dict().items() if name != "lm_head.weight"}
    save_file(state, source / "model.safetensors")
    with pytest.raises(ConvertError, match=r"lacks 1 tensors of its architecture, lm_head.weight"):
        convert(source, tmp_path / "dst", RELEASED)


def test_too_small_a_disk_is_found_before_the_first_byte(released, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1024**2})())
    with pytest.raises(ConvertError, match=r"takes 0.1 GiB; .* has 0.0 GiB free"):
        convert(publish(released, tmp_path / "src"), tmp_path / "dst", RELEASED)
    assert [file.name for file in tmp_path.iterdir()] == ["src"]


def test_the_command_says_what_to_do_next(released, tmp_path, capsys) -> None:
    source, target = publish(released, tmp_path / "src"), tmp_path / "dst"
    (source / "tokenizer.json").write_text("{}")
    assert main([str(source), str(target), "--mask-ids", "32002", "--num-masks", "5"]) == 0
    assert f"spaceserve serve --model {target}" in capsys.readouterr().out
    assert main([str(source), str(target)]) == 1
    assert "--force" in capsys.readouterr().err
    each = [word for id_ in range(31998, 32003) for word in ("--mask-ids", str(id_))]
    assert main([str(source), str(tmp_path / "each"), *each]) == 0
    section = json.loads((tmp_path / "each" / "config.json").read_text())["space"]
    assert section["mask_token_ids"] == [31998, 31999, 32000, 32001, 32002]


def test_a_checkpoint_without_a_tokenizer_is_not_called_ready(released, tmp_path, capsys) -> None:
    source, target = publish(released, tmp_path / "src"), tmp_path / "dst"
    assert main([str(source), str(target)]) == 1
    said = capsys.readouterr()
    assert "is ready" not in said.out
    assert "is written, and is not ready: it has no tokenizer" in said.err
    assert f"hf download OWNER/NAME tokenizer.json tokenizer_config.json --local-dir {target}" in said.err
    assert (target / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "an adapter that is not merged"),
        ("model.layers.1.mlp.up_proj.weight_scale", "quantised weights"),
        ("model.layers.2.mlp.up_proj.weight", "layer 2, and num_hidden_layers is 2"),
        ("lm_head.bias", "no such bias"),
    ],
)
@pytest.mark.parametrize("form", ["one .bin", "several safetensors"])
def test_a_checkpoint_with_an_unplaced_tensor_is_not_ready(released, tmp_path, capsys, name, message, form) -> None:
    more = {**released.state_dict(), name: torch.zeros(3)}
    model = type("Published", (), {"config": released.config, "state_dict": lambda self: more})()
    source, target = publish(model, tmp_path / "src", form), tmp_path / "dst"
    (source / "tokenizer.json").write_text("{}")
    assert main([str(source), str(target)]) == 1
    said = capsys.readouterr()
    assert "is ready" not in said.out
    assert f"is written, and is not ready: {target} has {name} in " in said.err
    assert message in said.err
    with pytest.raises(UnsupportedModel, match=message):
        load_model(target)


def test_what_may_be_left_out_of_a_model_is_no_reason_not_to_be_ready(released, tmp_path) -> None:
    more = {**released.state_dict(), "model.vision_tower.layers.0.fc1.weight": torch.zeros(3)}
    model = type("Published", (), {"config": released.config, "state_dict": lambda self: more})()
    source = publish(model, tmp_path / "src", "one safetensors")
    (source / "tokenizer.json").write_text("{}")
    assert main([str(source), str(tmp_path / "dst")]) == 0


def test_an_adapter_follows_its_base_into_other_files_and_not_to_another_base(tmp_path) -> None:
    source = tiny_checkpoint(tmp_path / "src", num_masks=3, adapter_rank=2)
    config = json.loads((source / "config.json").read_text())
    config["space"]["base_sha256"] = Checkpoint.open(source).weights_sha256()
    (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "dst", Wish(dtype=torch.bfloat16, max_shard_bytes=100_000))
    assert len(Checkpoint.open(tmp_path / "dst").weights) > 1
    assert load_model(tmp_path / "dst").facts.num_masks == 3
    config["space"]["base_sha256"] = "0" * 64
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidSpaceSection, match="The adapter was made for weights with the sha256 0000"):
        convert(source, tmp_path / "other", Wish())
    assert not (tmp_path / "other").exists()


def test_a_checkpoint_of_a_family_that_is_not_served_is_not_called_ready(tmp_path, capsys) -> None:
    config = OpenAIGPTConfig(vocab_size=40, n_embd=16, n_layer=1, n_head=2)
    source = publish(OpenAIGPTLMHeadModel(config), tmp_path / "src")
    (source / "tokenizer.json").write_text("{}")
    assert main([str(source), str(tmp_path / "dst")]) == 1
    assert "is not ready: OpenAIGPTLMHeadModel computes its attention by itself" in capsys.readouterr().err


def test_what_names_code_stays_behind_with_the_code(released, tmp_path, capsys) -> None:
    classes = {"AutoConfig": "configuration_llama.LlamaConfig", "AutoModelForCausalLM": "m.LlamaForCausalLM"}
    source = publish(released, tmp_path / "src", auto_map=classes)
    (source / "m.py").write_text("raise SystemExit('this code ran')")
    (source / "tokenizer.json").write_text("{}")
    (source / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["t.T", None]}, "a": 1}))
    assert main([str(source), str(tmp_path / "dst")]) == 0
    assert "auto_map" not in json.loads((tmp_path / "dst" / "config.json").read_text())
    assert json.loads((tmp_path / "dst" / "tokenizer_config.json").read_text()) == {"a": 1}
    load_model(tmp_path / "dst")


def test_a_model_that_only_its_own_code_can_run_is_not_converted(released, tmp_path) -> None:
    source = publish(released, tmp_path / "src", model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    with pytest.raises(UnsupportedModel, match=r"no models of type 'own'; the code that the checkpoint brings"):
        convert(source, tmp_path / "dst", Wish())
    assert [file.name for file in tmp_path.iterdir()] == ["src"]


def test_a_byte_order_mark_in_the_source_is_skipped(released, tmp_path) -> None:
    source = publish(released, tmp_path / "src", "several safetensors")
    for name in ("config.json", "model.safetensors.index.json"):
        (source / name).write_bytes(b"\xef\xbb\xbf" + (source / name).read_bytes())
    convert(source, tmp_path / "dst", RELEASED)
    load_model(tmp_path / "dst")


def test_quantised_numbers_keep_their_dtype(released, tmp_path) -> None:
    source = publish(released, tmp_path / "src")
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(ConvertError, match=r"is quantised \(ModelOpt FP8\).* Leave out --dtype"):
        convert(source, tmp_path / "dst", Wish(dtype=torch.bfloat16))


def test_an_adapter_is_not_converted_and_says_what_it_is(tmp_path) -> None:
    (tmp_path / "src").mkdir()
    said = {"peft_type": "LORA", "base_model_name_or_path": "owner/base"}
    (tmp_path / "src" / "adapter_config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointNotFound, match="is a LoRA adapter of peft for owner/base, and no model"):
        convert(tmp_path / "src", tmp_path / "dst", Wish())
