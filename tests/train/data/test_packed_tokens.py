"""Windows come once per epoch, in an order that the seed alone fixes."""

from pathlib import Path

import numpy as np
import pytest
from space_train.data.corpus import END_OF_TEXT_ID, train_tokenizer
from space_train.data.rows import PackedTokens, write_packed


def stream(seed: int = 0, num_ids: int = 103, *, aligned: bool = False) -> PackedTokens:
    return PackedTokens(np.arange(num_ids, dtype=np.uint16), seed, aligned=aligned)


def test_an_epoch_draws_every_window_once() -> None:
    windows = stream().windows(0, 9, 10)
    starts = sorted(windows[:, 0].tolist())
    assert windows.shape == (9, 10)
    assert starts == list(range(starts[0], starts[0] + 90, 10))
    assert (windows.diff(dim=1) == 1).all()


def test_what_is_drawn_depends_only_on_the_seed_and_on_how_much_was_drawn() -> None:
    whole = stream().windows(0, 30, 10)
    assert (stream().windows(120, 18, 10) == whole[12:]).all()
    assert (stream(seed=1).windows(0, 30, 10) != whole).any()


def test_an_aligned_stream_is_cut_at_multiples_of_the_length() -> None:
    assert (stream(aligned=True).windows(0, 9, 10)[:, 0] % 10 == 0).all()


def test_a_stream_too_short_for_a_window_says_so() -> None:
    assert not stream(num_ids=19).holds(10)
    with pytest.raises(ValueError, match=r"has 19 ids; windows of 10 need at least 20"):
        stream(num_ids=19).windows(0, 1, 10)


def test_texts_are_packed_one_after_the_other_each_with_an_end(tmp_path: Path) -> None:
    tokenizer, texts = train_tokenizer(["ab abc"] * 4, 300), ["ab abc", "abc"]
    count = write_packed(tokenizer, texts, tmp_path / "ids.bin")
    ids = np.fromfile(tmp_path / "ids.bin", dtype=np.uint16).tolist()
    assert count == len(ids)
    first = tokenizer.encode("ab abc").ids
    assert ids == [*first, END_OF_TEXT_ID, *tokenizer.encode("abc").ids, END_OF_TEXT_ID]
