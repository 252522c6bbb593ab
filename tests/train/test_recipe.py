"""The one command, from a corpus of a few files to a checkpoint that transformers loads, in seconds."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from space_train import demo
from space_train.data.corpus import Source, build_corpus
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
