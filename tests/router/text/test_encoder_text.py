"""An encoder's texts are tokenised as transformers does it, long ones and pairs too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doubles.encoders import FAMILIES, tokenizer_of, write_encoder
from space_router.config import ServeConfig
from space_router.errors import ConfigError, InvalidRequest
from space_router.text.encoder_text import EncoderText, TextTooLong

TEXTS = ["The cat sat on the mat.", "  a dog?  ", "zebra 42 " * 9, "query: a, the"]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder") / request.param, request.param)


def loaded(folder: Path) -> EncoderText:
    text = EncoderText.load(ServeConfig(embedding_model=str(folder)))
    assert text is not None
    return text


@pytest.mark.parametrize("most", [200, 17, 6])
def test_texts_have_the_ids_of_transformers(folder: Path, most: int) -> None:
    wanted = tokenizer_of(folder)(list(TEXTS), truncation=True, max_length=most)
    found = loaded(folder).encode(TEXTS, 1000, truncate=most)
    assert [list(one.ids) for one in found] == wanted["input_ids"]
    assert not any(one.type_ids for one in found)


@pytest.mark.parametrize("most", [200, 31, 16, 9])
def test_pairs_have_the_ids_and_types_of_transformers(folder: Path, most: int) -> None:
    pairs = [(one, other) for one in TEXTS for other in TEXTS]
    wanted = tokenizer_of(folder)(pairs, truncation="longest_first", max_length=most, return_token_type_ids=True)
    found = loaded(folder).encode_pairs(pairs, 1000, truncate=most)
    assert [list(one.ids) for one in found] == wanted["input_ids"]
    types = [list(one.type_ids) or [0] * len(one.ids) for one in found]
    assert types == wanted["token_type_ids"]


def test_what_is_too_long_is_refused_with_its_length(folder: Path) -> None:
    text = loaded(folder)
    [whole] = text.encode([TEXTS[2]], 1000)
    with pytest.raises(TextTooLong) as refused:
        text.encode([TEXTS[2]], len(whole.ids) - 1)
    assert refused.value.num_ids == len(whole.ids)
    with pytest.raises(TextTooLong):
        text.encode_pairs([(TEXTS[2], TEXTS[2])], len(whole.ids))
    with pytest.raises(UnicodeEncodeError):
        text.encode(["a\udc00"], 1000)


def test_prompts_are_those_of_the_files(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "mini")
    text = loaded(folder)
    assert text.name == "mini"
    assert (text.prompt(None), text.prompt("query"), text.prompt_of("document", None)) == ("", "query: ", "text: ")
    with pytest.raises(InvalidRequest, match="query, document"):
        text.prompt("other")
    settings = folder / "config_sentence_transformers.json"
    settings.write_text(json.dumps({"prompts": {"q": "q: "}, "default_prompt_name": "q"}))
    assert loaded(folder).prompt(None) == loaded(folder).prompt_of("query", None) == "q: "
    settings.write_text(json.dumps({"prompts": {}, "default_prompt_name": "q"}))
    with pytest.raises(ConfigError, match="default prompt 'q'"):
        loaded(folder)


def test_lower_case_is_what_the_file_says(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "mini", "qwen3")
    upper, lower = loaded(folder).encode(["ABC", "abc"], 100)
    assert upper != lower
    (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    upper, lower = loaded(folder).encode(["ABC", "abc"], 100)
    assert upper == lower


def test_without_a_tokenizer_the_server_does_not_start(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "mini")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"--embedding-model=.*has no tokenizer\.json"):
        loaded(folder)
    with pytest.raises(ConfigError, match="--embedding-model='nowhere'"):
        EncoderText.load(ServeConfig(embedding_model="nowhere"))
