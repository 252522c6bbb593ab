"""A text does not depend on the steps of its ids: characters of many tokens, tokens of many characters, any end."""

from dataclasses import replace

import tokenizers
from doubles.tokenizers import SPECIAL
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from space_router.engine.request.request import Delta, Finish, TokenLogprobs
from space_router.text.text_stream import (
    FinishReason,
    StopStrings,
    TextDelta,
    TextRules,
    TextStatistics,
    TextStream,
    TextToken,
)
from space_router.text.tokenizer import Tokenizer, byte_alphabet
from tokenizers import AddedToken, decoders, models

STEADY = settings(max_examples=250, deadline=None)
ALPHABET = "ab \né中文😀\u0301\u200d\ufffd"
TEXTS = st.text(alphabet=ALPHABET, min_size=1, max_size=24)
SIZES = st.lists(st.integers(1, 6), max_size=40)
EOS_ID, SKIPPED_ID = 0, 1


def tokenizer_of(pieces: list[bytes]) -> tuple[Tokenizer, list[int]]:
    """A byte-level vocabulary that has just these pieces, and their ids."""
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
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
    said = bytearray(draw(TEXTS).encode())
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


def in_steps(ids: list[int], sizes: list[int], finish: Finish) -> list[Delta]:
    """The ids as deltas of these sizes, then of one; every third id was predicted."""
    deltas, begin, rest = [], 0, list(sizes)
    while begin < len(ids):
        part = tuple(ids[begin : begin + (rest.pop(0) if rest else 1)])
        places = range(begin, begin + len(part))
        logprobs = tuple(TokenLogprobs(id_, -float(place), ()) for place, id_ in zip(places, part, strict=True))
        predicted = tuple(int(place % 3 == 0) for place in places)
        decoded = begin > 0
        deltas.append(Delta(part, logprobs, decoded=decoded, drafted=5, accepted=len(part) - 1, predicted=predicted))
        begin += len(part)
    deltas[-1] = deltas[-1]._replace(finish=finish)
    return deltas


def read(stream: TextStream, deltas: list[Delta]) -> list[TextDelta]:
    made = []
    for delta in deltas:
        if (one := stream.push(delta)) is not None:
            made.append(one)
            if one.finish is not None:
                break
    return made


def told(
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
    one_by_one = told(tokenizer, in_steps(ids, [], end), rules)
    assert told(tokenizer, in_steps(ids, sizes, end), rules) == one_by_one
    assert told(tokenizer, in_steps(ids, others, end), rules) == one_by_one
    assert told(tokenizer, in_steps(ids, [len(ids)], end), rules) == one_by_one


@STEADY
@given(st.data(), tokenized(), SIZES)
def test_the_text_is_that_of_all_bytes_up_to_the_first_stop_string(
    data: st.DataObject, made: tuple[Tokenizer, list[int], list[bytes]], sizes: list[int]
) -> None:
    tokenizer, ids, pieces = made
    whole = b"".join(pieces).decode("utf-8", "replace")
    rules = replace(data.draw(rules_for(whole)), min_tokens=0)
    text, tokens, finish, reason, num_tokens, num_predicted = told(
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
@given(TEXTS, st.lists(TEXTS.map(lambda text: text[:4]), min_size=1, max_size=3), SIZES)
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
        assert told(tokenizer, in_steps(ids, sizes, Finish.LENGTH), TextRules(stops=("bc",)))[-1] == 1
        assert told(tokenizer, in_steps(ids, sizes, Finish.LENGTH), TextRules(stops=("d",)))[-1] == 1
        assert told(tokenizer, in_steps(ids, sizes, Finish.LENGTH), TextRules())[-1] == 2
