"""Tokens get the class that a reader of the text would give them."""

from collections.abc import Sequence

import pytest
from space_eval.token_class import TokenClass, pieces_of, token_classes

W, P, I, N, D, O = (  # noqa: E741
    TokenClass.WHITESPACE,
    TokenClass.PUNCTUATION,
    TokenClass.IDENTIFIER,
    TokenClass.NUMBER,
    TokenClass.WORD,
    TokenClass.OTHER,
)


@pytest.mark.parametrize(
    ("pieces", "classes"),
    [
        (["def", " mean", "_abs", "(", "xs", "):", "\n"], [D, I, I, P, I, P, W]),
        (["    ", "for", " x", " in", " xs", ":\n", "\n"], [W, D, I, D, I, P, W]),
        (["total", " +=", " 3", ".", "14"], [I, P, N, P, N]),
        (["\t", "0x1F", " ", "1_000", ",", "2e5"], [W, N, W, N, P, N]),
        (["self", ".", "name", " =", " None", "\n"], [D, P, I, P, D, W]),
        (["get", "User", "Name", "x", "2"], [I, I, I, I, I]),
        (["return", " result", "\n"], [D, I, W]),
        (["The", " cat", " sat", ",", " of", " course", "."], [D, D, D, P, D, D, P]),
        (["Return", " the", " sum", " of", " the", " list", ".\n"], [D, D, D, D, D, D, P]),
        (["don", "'t", " go"], [D, D, D]),
        (['"""', "\n", "->", " ≤", " €"], [P, W, P, P, P]),
        (["été", " 日本", " 🙂", "", "\ufffd"], [D, D, O, O, O]),
    ],
)
def test_each_token_has_the_class_of_what_it_is_a_piece_of(pieces: list[str], classes: list[TokenClass]) -> None:
    assert token_classes(pieces) == classes


def test_special_tokens_are_no_text() -> None:
    assert token_classes(["a", "<|end|>", "\n"], specials={"<|end|>"}) == [D, O, W]


def test_a_token_is_judged_by_the_run_it_ends_in() -> None:
    assert token_classes(["(n", "umbers", ")\n    return"]) == [D, D, D]
    assert token_classes(["len", "(n", "umbers", ")"]) == [I, I, I, P]


def bytes_of(ids: Sequence[int]) -> str:
    """A decoder of single bytes, as byte-level tokenizers are."""
    return bytes(ids).decode("utf-8", errors="replace")


def test_the_pieces_are_the_text_and_a_character_comes_with_its_last_byte() -> None:
    text = "a é 日本!\n"
    pieces = pieces_of(bytes_of, list(text.encode()))
    assert "".join(pieces) == text
    assert pieces[2:4] == ["", "é"]
    assert len(pieces) == len(text.encode())


def test_words_keep_the_space_that_a_decoder_leaves_out_at_the_start() -> None:
    words = ["So", "it", "goes"]

    def joined(ids: Sequence[int]) -> str:
        return " ".join(words[id_] for id_ in ids)

    assert pieces_of(joined, [0, 1, 2]) == ["So", " it", " goes"]
