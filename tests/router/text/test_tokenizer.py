"""Tokens are bytes, whatever their neighbours."""

from pathlib import Path

import pytest
import tokenizers
from doubles.tokenizers import (
    FIRST_BYTE_ID,
    VOCAB_SIZE,
    byte_level,
    sentencepiece_tokenizer,
    tiny_tokenizer,
    write_checkpoint,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from space_router.errors import ConfigError
from space_router.text.tokenizer import Tokenizer

TINY, PIECES = tiny_tokenizer(), sentencepiece_tokenizer()
INNER = byte_level()
QUICK = settings(max_examples=60, deadline=None)


@QUICK
@given(st.text())
def test_a_text_comes_back_from_its_ids(text: str) -> None:
    assert TINY.decode(TINY.encode(text), skip_special_tokens=False) == text


@QUICK
@given(st.lists(st.integers(0, VOCAB_SIZE - 1)), st.booleans())
def test_any_ids_decode_as_the_tokenizers_library_decodes_them(ids: list[int], skip: bool) -> None:
    assert TINY.decode(ids, skip_special_tokens=skip) == INNER.decode(ids, skip_special_tokens=skip)


def test_sentencepiece_ids_lose_only_the_space_before_the_first_word() -> None:
    hello, world = PIECES.token_to_id("▁Hello"), PIECES.token_to_id("▁world")
    assert hello is not None
    assert world is not None
    assert PIECES.decode([1, hello, world]) == "Hello world"
    assert PIECES.bytes_of[hello] == b" Hello"


def test_half_a_character_is_named_by_its_bytes() -> None:
    assert TINY.token_text(FIRST_BYTE_ID + 0xE2) == "bytes:\\xe2"
    assert TINY.token_text(FIRST_BYTE_ID + ord("x")) == "x"


def test_an_id_without_a_token_has_no_bytes() -> None:
    assert TINY.bytes_of[VOCAB_SIZE + 5] == b""


def test_bos_is_added_where_only_the_config_says_so() -> None:
    tokenizer = Tokenizer(byte_level(), {"bos_token": "<|endoftext|>", "add_bos_token": True})
    assert tokenizer.encode("x") == [0, FIRST_BYTE_ID + ord("x")]
    assert tokenizer.encode("x", add_special_tokens=False) == [FIRST_BYTE_ID + ord("x")]


def test_an_unknown_decoder_is_refused_by_name() -> None:
    inner = byte_level()
    inner.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        Tokenizer(inner, {})


def test_a_checkpoint_folder_is_read_with_its_hash(tmp_path: Path) -> None:
    loaded = Tokenizer.load(write_checkpoint(tmp_path))
    assert loaded.eos_token == "<|endoftext|>"
    assert len(loaded.content_hash) == 64
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)
