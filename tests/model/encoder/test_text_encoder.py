"""Vectors and scores are those of sentence-transformers' recipe on transformers' own classes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from doubles.encoders import FAMILIES, WINDOW, expected_scores, expected_vectors, tokenizer_of, write_encoder
from safetensors.torch import load_file, save_file
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.encoder.text_encoder import TextEncoder, TextIds, load_encoder
from space_model.model_error import UnsupportedModel

TEXTS = (
    "The cat sat on the mat.",
    "a",
    "A dog, a cat!",
    "query: what sat on the mat? " * 2,
    "zebra 42",
)


def encoder(folder: Path) -> TextEncoder:
    return load_encoder(Checkpoint.open(str(folder)))


def ids_of(folder: Path, *texts: str) -> list[int]:
    found: list[int] = tokenizer_of(folder)(*texts, truncation=True, max_length=WINDOW)["input_ids"]
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_vectors_are_those_of_sentence_transformers_whatever_is_beside_them(name: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / name, name)
    made = encoder(folder)
    wanted = expected_vectors(folder, TEXTS, name)
    texts = [TextIds(ids_of(folder, text)) for text in TEXTS]
    together = made.encode(texts)
    alone = torch.cat([made.encode([text]) for text in texts])
    assert made.facts.num_values == wanted.shape[1]
    assert made.facts.is_normalised == FAMILIES[name].is_normalised
    torch.testing.assert_close(together, wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(alone, wanted, rtol=0, atol=1e-5)
    assert (wanted[0] - wanted[1]).abs().max() > 0.01  # different texts


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_of_pairs_are_those_of_the_classifier(name: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / name, name, num_labels=1)
    made = encoder(folder)
    pairs = [("what sat?", "the cat sat on a mat"), ("a dog", "a"), ("query", "the mat, the cat, the dog")]
    texts = []
    for first, second in pairs:
        read = tokenizer_of(folder)(first, second, return_token_type_ids=True)
        texts.append(TextIds(read["input_ids"], read["token_type_ids"] if name == "bert" else ()))
    assert made.facts.scores_pairs
    assert made.facts.num_types == (2 if name == "bert" else made.facts.num_types)
    torch.testing.assert_close(made.encode(texts), expected_scores(folder, pairs), rtol=0, atol=1e-5)


def test_a_text_may_be_as_long_as_the_least_of_what_the_files_say(tmp_path: Path) -> None:
    assert encoder(write_encoder(tmp_path / "bert")).facts.window == WINDOW
    folder = write_encoder(tmp_path / "xlm", "xlm-roberta")
    for name in ("sentence_bert_config.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert encoder(folder).facts.window == WINDOW  # positions begin behind the padding's


def test_without_modules_it_is_the_mean(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "bert")
    normalised = encoder(folder).encode([TextIds(ids_of(folder, TEXTS[0]))])
    (folder / "modules.json").unlink()
    plain = encoder(folder)
    assert not plain.facts.is_normalised
    vector = plain.encode([TextIds(ids_of(folder, TEXTS[0]))])
    torch.testing.assert_close(torch.nn.functional.normalize(vector, dim=-1), normalised)


def test_another_pooling_is_another_hash(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "bert")
    before = encoder(folder).facts.hash
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    assert encoder(folder).facts.hash != before


def test_what_would_make_other_vectors_is_refused(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "bert")
    weights = load_file(folder / "model.safetensors")
    cut = {name: one for name, one in weights.items() if name != "encoder.layer.1.output.dense.weight"}
    save_file(cut, str(folder / "model.safetensors"), {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"lacks encoder\.layer\.1\.output\.dense\.weight"):
        encoder(folder)
    save_file({**weights, "encoder.adapter.weight": torch.ones(2)}, str(folder / "model.safetensors"), {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"has encoder\.adapter\.weight .* does not read"):
        encoder(folder)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "pools by 'median'"),
        ("1_Pooling/config.json", {"include_prompt": False}, "leaves prompts out"),
        ("modules.json", [{"idx": 0, "path": "", "type": "sentence_transformers.models.LSTM"}], "of the kind 'LSTM'"),
        ("modules.json", [{"idx": 0, "path": "inner", "type": "x.Transformer"}], "transformer in the folder inner"),
    ],
)
def test_a_module_that_is_not_known_is_refused(tmp_path: Path, file: str, content: object, words: str) -> None:
    folder = write_encoder(tmp_path / "bert")
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(UnsupportedModel, match=words):
        encoder(folder)


def test_the_activation_of_scores_is_the_one_that_the_config_names(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "bert", num_labels=1)
    text = TextIds(ids_of(folder, "a", "the cat"))
    scores = encoder(folder).encode([text])
    config = json.loads((folder / "config.json").read_text())
    for said in (
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ):
        (folder / "config.json").write_text(json.dumps(config | said))
        torch.testing.assert_close(encoder(folder).encode([text]).sigmoid(), scores)
    (folder / "config.json").write_text(json.dumps(config | {"sbert_ce_default_activation_function": "os.abort"}))
    with pytest.raises(UnsupportedModel, match=r"names the activation 'os\.abort'"):
        encoder(folder)
