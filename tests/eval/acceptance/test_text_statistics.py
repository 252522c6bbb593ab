from space_eval.acceptance.texts import is_blank, is_filler, is_looping, repeated_share


def test_a_text_without_repetition_repeats_nothing() -> None:
    assert repeated_share(range(20)) == 0.0


def test_a_period_of_two_repeats_all_but_its_first_two_grams() -> None:
    assert repeated_share([1, 2] * 10) == 1 - 2 / 17


def test_texts_shorter_than_a_gram_repeat_nothing() -> None:
    assert repeated_share([1, 1, 1]) == 0.0


def test_half_of_the_grams_repeated_is_a_loop() -> None:
    assert is_looping([1, 2, 3, 4] * 3)
    assert not is_looping([*range(30), 1, 2, 3, 4])


def test_filler_is_space_and_punctuation_only() -> None:
    assert is_filler(" ):\n")
    assert not is_filler(" x)")
    assert is_blank("\n    ")
    assert not is_blank(" )")
