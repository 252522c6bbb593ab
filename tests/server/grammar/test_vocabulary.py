"""What the worker takes ids for, byte by byte, is what the router makes of them."""

import json
from importlib import resources
from pathlib import Path

import pytest
import tokenizers
from doubles.tokenizers import write_checkpoint
from space_model.testing import tiny_checkpoint
from space_router.text.tokenizer import Tokenizer
from space_server.grammar.vocabulary import NoVocabulary, TokenVocabulary, bits_of, ids_of
from tokenizers import AddedToken, decoders, models, normalizers


def sentencepiece(folder: Path) -> Path:
    """As Llama-2's: a metaspace, bytes for what has no piece, and added tokens of both kinds."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "é", "{", '":', "▁▁"]
    model = models.BPE(
        vocab={piece: id_ for id_, piece in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>"
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<|tool|>"])
    tokenizer.add_tokens([AddedToken("<call> ", special=False)])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(params=["byte-level", "few letters", "sentencepiece", "embedded"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    match request.param:
        case "byte-level":
            return tiny_checkpoint(tmp_path / "tiny", vocab_size=320, words=True)
        case "few letters":
            return tiny_checkpoint(tmp_path / "tiny", vocab_size=128)
        case "sentencepiece":
            return sentencepiece(tmp_path / "pieces")
        case _:
            return Path(str(resources.files("space_demo")))


def test_every_id_has_the_bytes_that_clients_get(folder: Path) -> None:
    router = Tokenizer.load(folder)
    count = 20 + max(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"].values())
    vocabulary = TokenVocabulary.read(folder, count)
    for id_, text in enumerate(vocabulary.texts):
        assert text == (b"" if id_ in router.special_ids else router.bytes_of[id_])


def test_special_ids_have_no_text_and_masks_are_in_no_grammar(folder: Path) -> None:
    special = sorted(Tokenizer.load(folder).special_ids)
    vocabulary = TokenVocabulary.read(folder, 300, never=special[:1])
    possible = ids_of(vocabulary.possible)
    assert special[0] not in possible
    assert [id_ for id_ in special[1:] if id_ < 300 and id_ not in possible] == []
    assert all(vocabulary.texts[id_] for id_ in possible if id_ not in special)


@pytest.mark.parametrize("num_ids", [1, 31, 32, 33, 1000])
def test_a_set_of_ids_is_as_many_bits(num_ids: int) -> None:
    some = sorted({0, num_ids // 2, num_ids - 1})
    assert ids_of(bits_of(some, num_ids)) == some
    assert len(bits_of(some, num_ids)) == -(-num_ids // 32)


def test_a_checkpoint_whose_bytes_nobody_knows_is_refused_with_the_reason(tmp_path: Path) -> None:
    def why() -> str:
        with pytest.raises(NoVocabulary) as caught:
            TokenVocabulary.read(tmp_path, 8)
        return str(caught.value)

    assert why() == "the checkpoint has no tokenizer.json"
    wordpiece = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    wordpiece.decoder = decoders.WordPiece()
    wordpiece.save(str(tmp_path / "tokenizer.json"))
    assert why() == "tokenizer.json has the decoder ['WordPiece'], neither byte-level nor SentencePiece's"
    (tmp_path / "tokenizer.json").write_text("{")
    assert "cannot be read" in why()


def test_files_with_a_byte_order_mark_and_special_tokens_of_the_other_files_are_known(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(content).encode())
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    vocabulary = TokenVocabulary.read(tmp_path, 16)
    assert (vocabulary.texts[0], vocabulary.texts[2]) == (b"", b""), "special ids are no text"
    assert vocabulary.texts[1] == b"<|im_start|>", "which only tokenizer.json could have called special"
