"""Fill in the middle: which tokenizers can, and how they want to be asked."""

import pytest
import tokenizers
from doubles.tokenizers import byte_level, tiny_tokenizer
from space_router.text.fim import FillInTheMiddle
from space_router.text.tokenizer import Tokenizer
from tokenizers import AddedToken, decoders, models, normalizers

PREFIX_FIRST = [
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
]


def tokenizer_with(*tokens: str) -> Tokenizer:
    """The tiny one, with some more special tokens at its end."""
    inner = byte_level()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return Tokenizer(inner, {"bos_token": "<|endoftext|>"})


@pytest.mark.parametrize("names", PREFIX_FIRST)
def test_most_families_read_the_prefix_first(names: tuple[str, str, str]) -> None:
    tokenizer = tokenizer_with(*names)
    fim = FillInTheMiddle.of(tokenizer)
    assert fim is not None
    prefix, suffix, middle = (tokenizer.token_to_id(name) for name in names)
    assert fim.ids([1, 2], [7]) == [prefix, 1, 2, suffix, 7, middle]
    assert fim.num_tokens == 3


def test_some_read_the_suffix_first_and_codestral_has_no_token_for_the_middle() -> None:
    codestral = FillInTheMiddle.of(tokenizer_with("[PREFIX]", "[SUFFIX]"))
    assert codestral is not None
    assert codestral.ids([1, 2], [7]) == [codestral.suffix_id, 7, codestral.prefix_id, 1, 2]
    assert codestral.num_tokens == 2
    seed_coder = FillInTheMiddle.of(tokenizer_with("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"))
    assert seed_coder is not None
    expected = [seed_coder.suffix_id, 7, seed_coder.prefix_id, 1, 2, seed_coder.middle_id]
    assert seed_coder.ids([1, 2], [7]) == expected


def test_a_tokenizer_without_all_of_a_familys_tokens_cannot() -> None:
    assert FillInTheMiddle.of(tiny_tokenizer()) is None
    assert FillInTheMiddle.of(tokenizer_with("<fim_prefix>", "<fim_suffix>")) is None
    assert FillInTheMiddle.of(tokenizer_with("[PREFIX]")) is None


def test_what_a_family_writes_behind_the_middle_ends_it() -> None:
    tokenizer = tokenizer_with("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    fim = FillInTheMiddle.of(tokenizer)
    assert fim is not None
    assert fim.end_ids == (tokenizer.token_to_id("▁<EOT>"),)


def test_a_text_inside_another_gets_no_space_before_its_first_word() -> None:
    tokenizer = with_a_space_in_front()

    def tokens(ids: list[int]) -> list[str]:
        return [tokenizer.token_text(id_) for id_ in ids]

    assert tokens(tokenizer.encode("Hi")) == [" Hi"]
    assert tokens(tokenizer.encode_inside("Hi")) == ["H", "i"]
    assert tokens(tokenizer.encode_inside(" Hi")) == [" Hi"]
    assert tokens(tokenizer.encode_inside("\n s")) == ["\n", " ", "s"]
    bytewise = tiny_tokenizer()
    assert bytewise.encode_inside("hello w") == bytewise.encode("hello w")


def with_a_space_in_front() -> Tokenizer:
    """As Llama 2 writes texts: a space before the first word, and ▁ for every space."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "H", "i", "s", "▁H", "▁Hi"]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    merges = [("▁", "H"), ("▁H", "i")]
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(parts)
    return Tokenizer(inner, {"bos_token": "<s>", "eos_token": "</s>"})
