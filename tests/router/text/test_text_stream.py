"""However the ids come, the same text, the same tokens, the same end."""

from dataclasses import replace

import tokenizers
from doubles.tokenizers import EOS_ID, FIRST_BYTE_ID, SPECIAL, sentencepiece_tokenizer, tiny_tokenizer
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from space_common.tokenizer.byte_level import byte_letters
from space_router.engine.request.request import Delta, Finish, TokenLogprobs
from space_router.text.text_stream import (
    Detokenizer,
    FinishReason,
    StopStrings,
    TextDelta,
    TextRules,
    TextStatistics,
    TextStream,
    TextToken,
)
from space_router.text.tokenizer import Tokenizer
from tokenizers import AddedToken, decoders, models

TINY = tiny_tokenizer()
QUICK = settings(max_examples=150, deadline=None)

# A small alphabet makes stop strings likely; é and 😀 take two and four tokens.
TEXTS = st.text(alphabet="abST OPé😀", max_size=30)
STOPS = st.lists(st.text(alphabet="abST OPé😀", min_size=1, max_size=4), min_size=1, max_size=3)
CUTS = st.lists(st.integers(1, 5), max_size=40)


def in_steps(ids: list[int], sizes: list[int], finish: Finish = Finish.LENGTH) -> list[Delta]:
    """The ids as deltas of these sizes, then of one, the last with the finish; every third id was predicted."""
    deltas, begin, rest = [], 0, list(sizes)
    while begin < len(ids):
        part = tuple(ids[begin : begin + (rest.pop(0) if rest else 1)])
        places = range(begin, begin + len(part))
        logprobs = tuple(TokenLogprobs(id_, -float(place), ()) for place, id_ in zip(places, part, strict=True))
        predicted = tuple(int(place % 3 == 0) for place in places)
        decoded = begin > 0
        deltas.append(Delta(part, logprobs, decoded=decoded, drafted=4, accepted=len(part) - 1, predicted=predicted))
        begin += len(part)
    if deltas:
        deltas[-1] = deltas[-1]._replace(finish=finish)
    return deltas


def read(stream: TextStream, deltas: list[Delta]) -> list[TextDelta]:
    made: list[TextDelta] = []
    for delta in deltas:
        if (one := stream.push(delta)) is not None:
            made.append(one)
            if one.finish is not None:
                break
    return made


def outcome(ids: list[int], sizes: list[int], rules: TextRules) -> tuple[str, list[int], FinishReason | None, object]:
    made = read(TextStream(TINY, (1,), rules), in_steps(ids, sizes))
    tokens = [token.span.id for one in made for token in one.tokens]
    return "".join(one.text for one in made), tokens, made[-1].finish, made[-1].stop_reason


def first_match(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """Oracle: try every end in turn, the longest stop string first."""
    for end in range(1, len(text) + 1):
        fitting = [stop for stop in stops if text[:end].endswith(stop)]
        if fitting:
            stop = max(fitting, key=len)
            return end - len(stop), end, stop
    return None


@QUICK
@given(TEXTS.filter(bool), STOPS, CUTS, st.booleans())
def test_a_text_is_cut_at_the_first_stop_string_whatever_the_steps(
    text: str, stops: list[str], sizes: list[int], keep: bool
) -> None:
    ids = TINY.encode(text)
    got, tokens, finish, reason = outcome(ids, sizes, TextRules(stops=tuple(stops), keep_stop=keep))
    match = first_match(text, stops)
    if match is None:
        assert (got, tokens, finish, reason) == (text, ids, FinishReason.LENGTH, None)
        return
    start, end, stop = match
    cut = end if keep else start
    assert (got, finish, reason) == (text[:cut], FinishReason.STOP, stop)
    # A token stays if one of its characters stays: so many tokens as it takes to begin the last kept character.
    num_bytes, kept = len(text[:cut].encode()), []
    for id_ in ids:
        if num_bytes <= 0:
            break
        kept.append(id_)
        num_bytes -= len(TINY.bytes_of[id_])
    assert tokens == kept


@QUICK
@given(TEXTS, STOPS, CUTS)
def test_no_text_is_held_back_that_cannot_become_a_stop_string(text: str, stops: list[str], sizes: list[int]) -> None:
    search, seen = StopStrings(stops), ""
    for begin in range(0, len(text), 3):
        piece = text[begin : begin + 3]
        seen += piece
        if search.push(piece) is not None:
            return
        held = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert search.num_certain == len(seen) - held


@QUICK
@given(st.lists(st.integers(0, 259), max_size=40))
def test_ids_one_by_one_give_the_text_of_all_and_no_half_characters(ids: list[int]) -> None:
    stream = Detokenizer(TINY)
    pieces = [stream.push(id_)[0] for id_ in ids]
    pieces.append(stream.finish())
    assert "".join(pieces) == TINY.decode(ids)


def test_a_character_of_four_tokens_comes_whole_with_its_tokens() -> None:
    ids = TINY.encode("a😀b")
    made = read(TextStream(TINY, (1,), TextRules()), in_steps(ids, [2, 2, 1, 1]))
    assert [(one.text, len(one.tokens)) for one in made] == [("a", 1), ("😀", 4), ("b", 1)]


def test_half_a_character_at_the_end_becomes_a_replacement_character_and_keeps_its_token() -> None:
    text, tokens, _, _ = outcome([FIRST_BYTE_ID + ord("a"), FIRST_BYTE_ID + 0xE2], [2], TextRules())
    assert (text, len(tokens)) == ("a\ufffd", 2)


def test_broken_bytes_before_a_stop_string_keep_their_own_token_only() -> None:
    ids = [FIRST_BYTE_ID + 0xE2, *TINY.encode("STOP")]
    for sizes in ([1], [9]):
        text, tokens, _, _ = outcome(ids, sizes, TextRules(stops=("STOP",)))
        assert (text, tokens) == ("\ufffd", ids[:1])


def test_a_final_eos_counts_and_has_no_text() -> None:
    stream = TextStream(TINY, (1,), TextRules(skip_special_tokens=False))
    made = read(stream, in_steps([*TINY.encode("ab"), EOS_ID], [3], Finish.EOS))
    assert [(one.text, len(one.tokens), one.finish) for one in made] == [("ab", 3, FinishReason.EOS)]


def test_a_stop_id_is_the_stop_reason() -> None:
    made = read(TextStream(TINY, (1,), TextRules()), in_steps(TINY.encode("ab"), [2], Finish.STOP_ID))
    assert (made[0].text, made[0].finish, made[0].stop_reason) == ("a", FinishReason.STOP, FIRST_BYTE_ID + ord("b"))


def test_stop_strings_are_looked_for_behind_the_first_min_tokens() -> None:
    ids = TINY.encode("abab")
    for sizes in ([1], [4], [3]):
        assert outcome(ids, sizes, TextRules(stops=("ab",), min_tokens=1))[0] == "ab"
        assert outcome(ids, sizes, TextRules(stops=("ab",), min_tokens=3))[0] == "abab"


def test_statistics_count_what_is_inside_the_cut() -> None:
    stream = TextStream(TINY, (1,), TextRules(stops=("c",)))
    read(stream, in_steps(TINY.encode("abcdefg"), [1, 5]))  # prefill gives a; one step of five: b, then the cut
    count = stream.statistics
    assert (count.num_tokens, count.num_steps, count.num_decoded, count.num_accepted) == (2, 1, 1, 1)


def test_the_space_of_the_first_word_belongs_to_the_text_only_behind_other_words() -> None:
    tokenizer = sentencepiece_tokenizer()
    hello = tokenizer.token_to_id("▁Hello")
    assert hello is not None
    assert Detokenizer(tokenizer, [1]).push(hello)[0] == "Hello"
    assert Detokenizer(tokenizer, [1, hello]).push(hello)[0] == " Hello"


STEADY = settings(max_examples=250, deadline=None)
ALPHABET = "ab \né中文😀\u0301\u200d\ufffd"
WIDE_TEXTS = st.text(alphabet=ALPHABET, min_size=1, max_size=24)
SIZES = st.lists(st.integers(1, 6), max_size=40)
SKIPPED_ID = 1


def tokenizer_of(pieces: list[bytes]) -> tuple[Tokenizer, list[int]]:
    """A byte-level vocabulary that has just these pieces, and their ids."""
    letters = {byte: letter for letter, byte in byte_letters().items()}
    vocab = {token: place for place, token in enumerate(SPECIAL)}
    names = ["".join(letters[byte] for byte in piece) for piece in pieces]
    for name in names:
        vocab.setdefault(name, len(vocab))
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return Tokenizer(inner, {"bos_token": SPECIAL[0], "eos_token": SPECIAL[0]}), [vocab[name] for name in names]


@st.composite
def tokenized(draw: st.DrawFn) -> tuple[Tokenizer, list[int], list[bytes]]:
    """Ids of a text that was cut anywhere, also inside characters; bytes that are no text, and special tokens."""
    said = bytearray(draw(WIDE_TEXTS).encode())
    if draw(st.booleans()):  # broken here and there
        for place in draw(st.lists(st.integers(0, len(said) - 1), max_size=3)):
            said[place] = draw(st.sampled_from([0xE2, 0x82, 0xFF, 0xF0, 0x61]))
    content = bytes(said)
    cuts = sorted(draw(st.sets(st.integers(1, len(content)), max_size=len(content))))
    pieces = [content[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(content)], strict=True) if begin < end]
    tokenizer, ids = tokenizer_of(pieces)
    for place in draw(st.lists(st.integers(0, len(ids)), max_size=2)):
        ids.insert(place, SKIPPED_ID)
        pieces.insert(place, b"")
    return tokenizer, ids, pieces


@st.composite
def rules_for(draw: st.DrawFn, text: str) -> TextRules:
    """Stop strings that are parts of the text, and others."""
    stops = []
    for _ in range(draw(st.integers(0, 3))):
        begin = draw(st.integers(0, max(0, len(text) - 1)))
        part = text[begin : begin + draw(st.integers(1, 6))]
        stops.append(draw(st.sampled_from([part, part + "a"])) or "a")
    return TextRules(
        stops=tuple(dict.fromkeys(stops)), keep_stop=draw(st.booleans()), min_tokens=draw(st.sampled_from([0, 0, 2, 5]))
    )


def streamed_text(
    tokenizer: Tokenizer, deltas: list[Delta], rules: TextRules
) -> tuple[str, list[tuple[object, ...]], FinishReason | None, str | int | None, int, int]:
    """What a reader of the whole has, whatever the pieces; the counts that no step size may change are the last two."""
    stream = TextStream(tokenizer, (EOS_ID,), rules)
    made = read(stream, deltas)
    tokens = [known(token) for one in made for token in one.tokens]
    count: TextStatistics = stream.statistics
    assert count.num_accepted == sum(token.draft for one in made for token in one.tokens if token.step > 0)
    text = "".join(one.text for one in made)
    return text, tokens, made[-1].finish, made[-1].stop_reason, count.num_tokens, count.num_predicted


def known(token: TextToken) -> tuple[object, ...]:
    assert token.logprobs is not None
    return token.span, token.logprobs


@STEADY
@given(st.data(), tokenized(), SIZES, SIZES, st.sampled_from(list(Finish)))
def test_text_ids_logprobs_cut_and_counts_are_the_same_whatever_the_steps(
    data: st.DataObject,
    made: tuple[Tokenizer, list[int], list[bytes]],
    sizes: list[int],
    others: list[int],
    end: Finish,
) -> None:
    tokenizer, ids, _ = made
    rules = data.draw(rules_for(tokenizer.decode(ids)))
    one_by_one = streamed_text(tokenizer, in_steps(ids, [], end), rules)
    assert streamed_text(tokenizer, in_steps(ids, sizes, end), rules) == one_by_one
    assert streamed_text(tokenizer, in_steps(ids, others, end), rules) == one_by_one
    assert streamed_text(tokenizer, in_steps(ids, [len(ids)], end), rules) == one_by_one


@STEADY
@given(st.data(), tokenized(), SIZES)
def test_the_text_is_that_of_all_bytes_up_to_the_first_stop_string(
    data: st.DataObject, made: tuple[Tokenizer, list[int], list[bytes]], sizes: list[int]
) -> None:
    tokenizer, ids, pieces = made
    whole = b"".join(pieces).decode("utf-8", "replace")
    rules = replace(data.draw(rules_for(whole)), min_tokens=0)
    text, tokens, finish, reason, num_tokens, num_predicted = streamed_text(
        tokenizer, in_steps(ids, sizes, Finish.LENGTH), rules
    )
    assert (num_tokens, num_predicted) == (len(tokens), -(-len(tokens) // 3))
    found = [(whole.find(stop) + len(stop), -len(stop), stop) for stop in rules.stops if stop in whole]
    if not found:
        assert (text, len(tokens), finish, reason) == (whole, len(ids), FinishReason.LENGTH, None)
        return
    end, minus_length, stop = min(found)
    cut = end if rules.keep_stop else end + minus_length
    assert (text, finish, reason) == (whole[:cut], FinishReason.STOP, stop)


@STEADY
@given(WIDE_TEXTS, st.lists(WIDE_TEXTS.map(lambda text: text[:4]), min_size=1, max_size=3), SIZES)
def test_the_search_finds_the_same_match_in_any_pieces(text: str, stops: list[str], sizes: list[int]) -> None:
    def match(pieces: list[str]) -> object:
        search = StopStrings(stops)
        return next((found for piece in pieces if (found := search.push(piece)) is not None), None)

    pieces, begin = [], 0
    for size in sizes:
        pieces.append(text[begin : begin + size])
        begin += size
    assume(len(pieces) > 1)
    assert match([*pieces, text[begin:]]) == match(list(text)) == match([text])


def test_a_prediction_counts_the_tokens_that_stay_whatever_the_steps() -> None:
    tokenizer, ids = tokenizer_of([b"a", b"b", b"c", b"d"])
    for sizes in ([], [4], [1, 3], [2, 2]):
        assert streamed_text(tokenizer, in_steps(ids, sizes, Finish.LENGTH), TextRules(stops=("bc",)))[-1] == 1
        assert streamed_text(tokenizer, in_steps(ids, sizes, Finish.LENGTH), TextRules(stops=("d",)))[-1] == 1
        assert streamed_text(tokenizer, in_steps(ids, sizes, Finish.LENGTH), TextRules())[-1] == 2
