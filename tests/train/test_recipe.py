"""The one command, from a corpus of a few files to a checkpoint that transformers loads, in seconds."""

import json
import warnings
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from space_train import demo
from space_train.data.corpus import Source, build_corpus, train_tokenizer, write_tokenizer
from space_train.networks.network import NetworkShape, TrainNetwork, export, load_llama
from space_train.run_folder import load_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

FILES = ("heapq.py", "json/decoder.py", "json/encoder.py", "statistics.py")
TINY = "--threads 1 --no-compile --vocabulary 400 --hidden 32 --heads 1 --layers 1 --intermediate 32 --masks 3"
STATES = ("next_token.pt", "space/state.pt", "head/state.pt")
BUDGET = "--minutes 0.02 --unlearn-weight 0.5 --space-minutes 0.02 --head-minutes 0.01 --own-texts 4"
BUDGET += " --tokens-per-step 2048 --rows-per-step 2"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("recipe")
    library = Path(json.__file__).parent.parent
    held_out = Source("toolz", "1.0", "BSD-3-Clause", library, ("textwrap.py",))
    build_corpus([held_out, Source("python", "3", "PSF-2.0", library, FILES)], folder / "corpus")
    (folder / "installed").mkdir()
    arguments = f"--out {folder} --install {folder / 'installed'} {TINY} {BUDGET}"
    assert demo.main(arguments.split()) == 0
    return folder


def test_the_recipe_ends_with_a_checkpoint_that_transformers_loads_and_continues(out: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(out / "installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(out / "installed", dtype=torch.float32)
    ids = tokenizer("def push(heap, item):\n", return_tensors="pt")["input_ids"]
    assert model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False).shape[1] == ids.shape[1] + 5


def test_the_card_names_the_data_its_licences_the_command_and_the_figures(out: Path) -> None:
    card = (out / "installed" / "README.md").read_text()
    for fact in ("| python | 3 | PSF-2.0 | 4 |", "| toolz | 1.0 | BSD-3-Clause | 1 |", "python -m space_train.demo"):
        assert fact in card
    for fact in ("bits per byte", "with the draft head", "characters per", "draft head alone"):
        assert fact in card


def test_a_second_run_trains_nothing_again(out: Path) -> None:
    before = {name: load_checkpoint(out / name)["counters"]["step"] for name in STATES}
    assert demo.main(f"--out {out} {TINY} {BUDGET}".split()) == 0
    assert {name: load_checkpoint(out / name)["counters"]["step"] for name in STATES} == before


def test_help_says_what_happens_in_which_order_and_how_to_resume(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.arguments(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "corpus, tokenizer, tokens, next-token, own-text, space, head, export" in text
    assert "continues from its last checkpoint" in text


MOST_BYTES = 32 * 1024 * 1024
EMBEDDED_FILES = ("config.json", "generation_config.json", "model.safetensors", "draft_head.safetensors", "README.md")
EMBEDDED_FILES += ("tokenizer.json", "tokenizer_config.json")


def test_the_embedded_model_is_whole_and_what_its_card_says() -> None:
    sizes = [len((files("space_demo") / name).read_bytes()) for name in EMBEDDED_FILES]
    assert min(sizes) > 0
    assert sum(sizes) <= MOST_BYTES
    config = json.loads((files("space_demo") / "config.json").read_text())
    assert config["vocab_size"] >= 4096
    space = config["space"]
    assert (space["num_masks"], len(set(space["mask_token_ids"])), space["adapter"]) == (5, 5, None)
    hidden, width = config["hidden_size"], space["draft_head"]["hidden"]
    with safe_open(str(files("space_demo") / space["draft_head"]["file"]), "pt") as head:
        assert head.get_slice("draft_head.w1.weight").get_shape() == [width, 2 * hidden]
        assert head.get_slice("draft_head.w2.weight").get_shape() == [hidden, width]
    card = " ".join((files("space_demo") / "README.md").read_text().split())
    before, _ = card.split(" characters per token")
    assert float(before.split()[-1]) >= 3.0
    assert "| with the draft head |" in card
    assert "python -m space_train.demo" in card


SHAPE = NetworkShape(300, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=48)


def trained(folder: Path) -> TrainNetwork:
    generator = torch.Generator().manual_seed(0)
    network = TrainNetwork(SHAPE)
    network.initialise(generator)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    write_tokenizer(train_tokenizer(["x = 1\n"] * 2, 300), folder / "tokenizer", SHAPE.window)
    return network


def test_transformers_computes_the_same_logits_and_counts_the_same_parameters(tmp_path: Path) -> None:
    network = trained(tmp_path)
    export(network, tmp_path / "tokenizer", tmp_path / "model", dtype=torch.float32)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ids = torch.randint(12, 300, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(network.logits(network(ids)), oracle(ids).logits, rtol=1e-4, atol=1e-5)
    assert SHAPE.num_parameters == sum(parameter.numel() for parameter in oracle.parameters())
    assert SHAPE.num_parameters == sum(parameter.numel() for parameter in network.parameters())


def test_an_exported_checkpoint_is_read_back_exactly(tmp_path: Path) -> None:
    network = trained(tmp_path)
    export(network, tmp_path / "tokenizer", tmp_path / "model", dtype=torch.float32)
    other = TrainNetwork(SHAPE)
    load_llama(other, tmp_path / "model")
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_weights_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    export(trained(tmp_path), tmp_path / "tokenizer", tmp_path / "model")
    with pytest.raises(ValueError, match=r"not of this shape \(first difference: .*mlp.down_proj"):
        load_llama(TrainNetwork(replace(SHAPE, intermediate_size=40)), tmp_path / "model")


def test_the_weights_are_written_in_bf16(tmp_path: Path) -> None:
    export(trained(tmp_path), tmp_path / "tokenizer", tmp_path / "model")
    assert {tensor.dtype for tensor in load_file(tmp_path / "model" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "model" / "config.json").read_text())["torch_dtype"] == "bfloat16"
