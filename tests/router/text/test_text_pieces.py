"""Long texts are tokenised in pieces, with the ids and places of the whole."""

import json
import random
from collections.abc import Iterator

import pytest
import tokenizers
from doubles.tokenizers import byte_level
from space_router.text import text_pieces
from space_router.text.text_pieces import StretchTooLong
from space_router.text.tokenizer import Tokenizer
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

WORDS = ("hello", "world", "a", "12", "345", "'s", ".", ", ", " ", "  ", "\n", "\r\n", "\t", "é", "e\u0301", "你好",
         "，", "。", "x y", "foo bar", "= 1", "<|im_start|>", "<s>", "▁", "☺")  # fmt: skip
PATTERN = r"'s|'t|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT_2 = r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def random_text(random_: random.Random, length: int) -> str:
    return "".join(random_.choice(WORDS) for _ in range(length))


def byte_level_with(pattern: str) -> Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|im_start|>", "<s>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([random_text(random.Random(1), 4000)], trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A <s>", special_tokens=[("<s>", 1)])
    return Tokenizer(made, {})


def sentencepiece() -> Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    made.train_from_iterator(["hello world, a foo bar is 12 345 x y"] * 20, trainer)
    content = json.loads(made.to_str())
    content["added_tokens"] = content["added_tokens"][:2]
    made = tokenizers.Tokenizer.from_str(json.dumps(content))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = None
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    return Tokenizer(made, {"bos_token": "<s>", "add_bos_token": True})


def with_prefix_space() -> Tokenizer:
    made = byte_level()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return Tokenizer(made, {})


@pytest.fixture(params=["llama-3", "gpt-2", "sentencepiece", "no pattern", "prefix space"], scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    made = {
        "llama-3": lambda: byte_level_with(PATTERN),
        "gpt-2": lambda: byte_level_with(GPT_2),
        "sentencepiece": sentencepiece,
        "no pattern": lambda: Tokenizer(byte_level(), {}),
        "prefix space": with_prefix_space,
    }
    return made[request.param]()


@pytest.fixture
def tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(text_pieces, "PIECE", 4)
        yield


def test_the_pieces_of_a_text_have_the_ids_and_places_of_the_whole(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_cut = 0
    for seed in range(400):
        text = random_text(random.Random(seed), 60)
        for special in (True, False):
            whole = tokenizer.encode(text, add_special_tokens=special)
            spans = tokenizer.encode_spans(text, add_special_tokens=special)
            with monkeypatch.context() as patch:
                patch.setattr(text_pieces, "PIECE", 4)
                assert tokenizer.encode(text, add_special_tokens=special) == whole, text
                assert tokenizer.encode_spans(text, add_special_tokens=special) == spans, text
                num_cut += len([*tokenizer.bytes_of.cuts.pieces(text)]) - 1
    assert num_cut > 400


def test_no_text_is_cut_where_a_token_crosses_the_place(tiny_pieces: None) -> None:
    made = byte_level()
    content = json.loads(made.to_str())
    content["model"]["vocab"] |= {"oĠ": 268, "oĠw": 269}
    content["model"]["merges"] = [*content["model"]["merges"], ["o", "Ġ"], ["oĠ", "w"]]
    crossing = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)), {})
    assert [piece.end for piece in crossing.bytes_of.cuts.pieces("so whole\nso whole")] == [8, 17]


@pytest.mark.parametrize("change", ["unigram", "strip", "lookbehind", "eats space"])
def test_a_tokenizer_that_looks_across_every_cut_is_given_texts_whole(change: str, tiny_pieces: None) -> None:
    made = byte_level()
    if change == "strip":
        made.normalizer = normalizers.Strip()
    elif change == "lookbehind":
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(r"(?<=a) "), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
    elif change == "eats space":
        made.add_tokens([AddedToken("word", lstrip=True)])
    else:
        made = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("a", -1.0)], 0))
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    cuts = Tokenizer(made, {}).bytes_of.cuts
    assert not cuts.has_any
    assert [*cuts.pieces("a b c d e f g h")] == [(0, 15)]
    with pytest.raises(StretchTooLong, match="1048577 characters"):
        list(cuts.pieces("a" * (text_pieces.MAX_UNCUT + 1)))


def test_a_text_with_no_place_to_cut_is_refused_before_it_is_tokenised() -> None:
    tokenizer = Tokenizer(byte_level(), {})
    with pytest.raises(StretchTooLong, match="262145 characters without a space"):
        tokenizer.encode("a" * (text_pieces.MAX_STRETCH + 1))
