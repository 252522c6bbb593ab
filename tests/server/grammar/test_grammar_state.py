"""What may come next depends on the text so far, however it was reached: by ids, by drafts, or back from drafts."""

from __future__ import annotations

import json
import random
from importlib import resources
from pathlib import Path

import pytest
import tokenizers
from doubles.tokenizers import write_checkpoint
from space_common.grammar import LIMITS, GrammarError, compile_grammar
from space_router.text.tokenizer import Tokenizer
from space_server.drafts import Forced
from space_server.grammar import CompiledGrammar, GrammarState, NoVocabulary, TokenVocabulary, bits_of, ids_of
from space_server.machine.threads import DeepStackExecutor
from tiny_checkpoints import tiny_checkpoint
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


MASK, EOS, STOP = 0, 1, 2
TEXTS = [b"", b"", b"", *(bytes([byte]) for byte in range(256)), b'{"', b'":', b"na", b"name", b'"name"', b"  ", b"yes"]
VOCABULARY = TokenVocabulary(TEXTS, {EOS: b"<eos>", STOP: b"<stop>"})
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name"],
    "additionalProperties": False,
}


def state(kind: str, source: object, *, output: bytes = b"", **settings: object) -> GrammarState:
    text = source if isinstance(source, str) else json.dumps(source)
    compiled = compile_grammar(VOCABULARY.tokenizer, kind, text)
    settings = {"eos_ids": [EOS]} | settings
    return GrammarState(VOCABULARY, compiled.deep_copy, output=ids(output), **settings)  # type: ignore[arg-type]


def ids(text: bytes) -> list[int]:
    return [3 + byte for byte in text]


def next_ids(known: GrammarState, tail: list[int] | None = None) -> list[int]:
    possible = known.possible(tail or []).ids
    assert possible is not None
    return ids_of(possible)


def next_texts(known: GrammarState, tail: bytes = b"") -> set[bytes]:
    return {TEXTS[id_] for id_ in next_ids(known, ids(tail))}


def test_ids_follow_the_bytes_and_not_their_cut() -> None:
    by_bytes = state("json_schema", PERSON, output=b'{"name":')
    by_words = state("json_schema", PERSON)
    by_words.advance([TEXTS.index(b'{"'), TEXTS.index(b"na")])
    by_words.advance([3 + ord("m"), 3 + ord("e"), TEXTS.index(b'":')])
    assert next_ids(by_words) == next_ids(by_bytes)
    assert next_texts(by_words) == {b" ", b"\n", b'"', b'":', b'"name"'}  # a colon can begin a name, too


@pytest.mark.parametrize("seed", range(6))
def test_looking_ahead_and_back_gives_what_going_there_gives(seed: int) -> None:
    chance = random.Random(seed)
    walking, output = state("json_schema", PERSON), list[int]()
    for _ in range(40):
        tails = []
        for _ in range(3):  # drafts that are looked at and given up
            tail: list[int] = []
            for _ in range(chance.randint(0, 4)):
                allowed = [id_ for id_ in next_ids(walking, tail) if id_ != EOS]
                if not allowed:
                    break
                tail.append(chance.choice(allowed))
            tails.append(tail)
        fresh = state("json_schema", PERSON)
        fresh.advance(output)
        for tail in tails:
            other = state("json_schema", PERSON)
            other.advance([*output, *tail])
            assert next_ids(walking, tail) == next_ids(fresh, tail) == next_ids(other)
        tokens = tails[0] or [chance.choice(next_ids(walking))]
        walking.advance(tokens)
        output += tokens
        if EOS in tokens:
            break


def test_drafts_are_cut_at_the_first_that_cannot_be_and_behind_an_end() -> None:
    known = state("choice", ["yes", "yesterday"])
    assert known.num_possible([], ids(b"yexs")) == 2
    assert known.num_possible([], [TEXTS.index(b"yes"), EOS, EOS]) == 2
    assert known.num_possible(ids(b"ye"), ids(b"sz")) == 1
    assert known.possible(ids(b"yx")).ids is None  # nobody gets there
    assert next_texts(known) == {b"y", b"yes"}


def test_forced_text_is_one_run_of_ids_up_to_the_first_choice_or_the_end() -> None:
    known = state("regex", '"name": (yes|no)')
    assert known.forced([], 9) == Forced((TEXTS.index(b'"name"'), *ids(b": ")))  # it could begin with the quote alone
    assert known.forced([], 2) == Forced((TEXTS.index(b'"name"'), *ids(b":")))
    assert known.forced(ids(b'"name": '), 9) == Forced((), certain=True)
    assert known.forced(ids(b'"name": n'), 9) == Forced((*ids(b"o"), EOS), certain=True)
    assert known.forced(ids(b'"name": no'), 9) == Forced((EOS,), certain=True)


def test_an_end_is_possible_where_the_text_may_end_and_alone_where_it_must() -> None:
    known = state("regex", "ab?")
    assert next_ids(known, ids(b"a")) == [EOS, *ids(b"b")]
    assert not known.possible(ids(b"a")).only_end
    assert next_ids(known, ids(b"ab")) == [EOS]
    assert known.possible(ids(b"ab")).only_end
    assert next_ids(known) == ids(b"a")


def test_who_ignores_eos_ends_only_where_the_text_must() -> None:
    known = state("regex", "ab?", ignores_eos=True)
    assert next_ids(known, ids(b"a")) == ids(b"b")
    assert next_ids(known, ids(b"ab")) == [EOS]


def test_stop_ids_of_text_are_text_and_others_end_as_eos_does() -> None:
    known = state("regex", "a[xy]{1,2}", stop_ids=[STOP, 3 + ord("x")])
    assert next_ids(known, ids(b"a")) == ids(b"xy")
    assert next_ids(known, ids(b"ay")) == [EOS, STOP, *ids(b"xy")]
    assert next_ids(known, ids(b"ayx")) == [EOS, STOP]
    unending = state("regex", "a[xy]{1,2}", stop_ids=[STOP], ignores_eos=True)
    assert next_ids(unending, ids(b"ay")) == [STOP, *ids(b"xy")]
    assert next_ids(unending, ids(b"ayx")) == [EOS, STOP]


def test_special_ids_come_only_where_a_grammar_names_them() -> None:
    anything = state("regex", r"[\s\S]*")
    assert {MASK, STOP}.isdisjoint(next_ids(anything))
    named = state("lark", f'start: "a" <[{STOP}]> "b"')
    assert next_ids(named, ids(b"a")) == [STOP]
    assert next_ids(named, [*ids(b"a"), STOP]) == ids(b"b")
    assert next_ids(state("lark", f'start: "a" (<[{MASK}]> | "b")'), ids(b"a")) == ids(b"b")


def test_an_output_of_before_is_read_again_and_a_foreign_one_refused() -> None:
    again = state("json_schema", PERSON, output=b'{"name":"Al"')
    assert next_texts(again) == {b"}", b",", b" ", b"\n"}
    with pytest.raises(ValueError, match="12 ids generated before"):
        state("json_schema", PERSON, output=b'{"nome":"Al"')


def test_a_place_without_a_way_on_harms_nobody_who_does_not_go_there() -> None:
    narrow = TokenVocabulary([b"", b"a", b"b"])
    compiled = compile_grammar(narrow.tokenizer, "regex", "a(b|c)|bc")
    known = GrammarState(narrow, compiled.deep_copy, eos_ids=[0])
    assert next_ids(known) == [1, 2]
    assert next_ids(known, [2]) == []  # only c goes on, which no id writes
    assert known.trouble == "no id goes on with it"
    assert next_ids(known, [1]) == [2]
    known.advance([1])
    assert next_ids(known, [2]) == [0]


def test_whitespace_is_free_and_bounded() -> None:
    known = state("json_schema", PERSON)
    assert next_texts(known, b'{"name"') == {b" ", b"\n", b":"}
    assert next_texts(known, b'{"name" ') == {b":"}
    indented = b"{\n" + b" " * 40
    assert next_texts(known, indented[:-1]) >= {b" ", b"\t", b'"'}
    assert next_texts(known, indented) == {b'"', b'"name"'}
    assert next_texts(known) == {b"{", b'{"'}
    assert next_ids(known, ids(b'{"name":"a"}')) == [EOS]


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("regex", "a(", "unclosed group"),
        ("regex", "(?=a)b", "look-ahead"),
        ("regex", "[^\\s\\S]", "No text can be made by it"),
        ("regex", "(" * 70 + ")" * 70, "nested more than 64 deep"),
        ("choice", "[]", "at least one string"),
        ("choice", '"a"', "at least one string"),
        ("lark", 'start: "a" b', 'line 1, column 8: unknown name: "b"'),
        ("lark", "what", "line 1, column 5"),
        ("json_schema", "{", "no JSON"),
        ("json_schema", "[1]", "is an object"),
        ("json_schema", '{"type":"strin"}', "Invalid type: strin"),
        ("json_schema", '{"not":{"type":"string"}}', 'Unimplemented keys: ["not"]'),
        ("json_schema", '{"$ref":"http://a.b/c"}', "http://a.b/c"),
        ("json_schema", '{"items":' * 65 + "{}" + "}" * 65, "nested more than 64 deep"),
        ("json_schema", '{"x-guidance":{}}', "x-guidance"),
        ("json_schema", '{"minimum": NaN}', "no JSON"),
        ("json_schema", " " * 300_000, "at most 262144"),
        ("ebnf", "", "no kind of grammar named 'ebnf'"),
    ],
)
def test_a_grammar_that_is_none_is_refused_in_one_line(kind: str, source: str, reason: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compile_grammar(VOCABULARY.tokenizer, kind, source)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 320


def test_a_lexer_with_too_many_states_is_replaced_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = json.dumps({"type": "string", "pattern": "^(.*a.{9}b)*$"})
    compiled = compile_grammar(VOCABULARY.tokenizer, "json_schema", schema)
    monkeypatch.setitem(LIMITS, "max_lexer_states", 300)
    made: list[object] = []

    def again() -> object:
        made.append(compile_grammar(VOCABULARY.tokenizer, "json_schema", schema))
        return made[-1]

    shared = CompiledGrammar(again(), again, DeepStackExecutor("grammar", 1))  # type: ignore[arg-type]
    chance = random.Random(1)
    text = ids(b'"' + bytes(chance.choice(b"ab") for _ in range(60)))
    whole = GrammarState(VOCABULARY, compiled.deep_copy, eos_ids=[EOS])
    fresh, renewed = zip(*(shared.copies() for _ in range(2)), strict=True)
    several = [GrammarState(VOCABULARY, fresh[one], eos_ids=[EOS], renewed=renewed[one]) for one in range(2)]
    alone = GrammarState(VOCABULARY, shared.copies()[0], eos_ids=[EOS])
    for place, id_ in enumerate(text):
        drafts = text[place : place + 3]
        for one in several:
            assert next_ids(one, drafts) == next_ids(whole, drafts)
            one.advance([id_])
        whole.advance([id_])
        alone.possible()
        alone.advance([id_])
    assert len(made) > 1
    assert alone.trouble == "a regular expression in it can be matched in too many ways (too many states: 300 >= 300)"
