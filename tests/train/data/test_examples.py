"""Of a conversation exactly the answers are learned, of a text everything; what is left out is counted."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from space_model.random_checkpoint import END, FIRST_MASK
from space_router.config import ServeConfig
from space_router.text.chat_template import BUILT_IN
from space_router.text.model_text import ModelText
from space_train.data.examples import TEMPLATES, ChatText, Encoder, Example, LoadedExamples, pad_id, read_examples
from space_train.data.records import (
    BadRecord,
    ConversationTurn,
    DataConversation,
    DataError,
    NothingToLearn,
    PlainText,
    Role,
    SourceRecord,
    UnusableTemplate,
    UnusableTokenizer,
)
from tiny_checkpoints import tiny_checkpoint
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

HERE = SourceRecord("data", 1, {})
ASKED = [("user", "Hi?"), ("assistant", "Ho.")]
# Rewrites earlier answers, as templates of reasoning models do: only the last is shown whole.
FORGETFUL = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] if loop.last or m['role'] == 'user' else '...' }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
# Asks with other words than stand before an answer.
UNEVEN = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One id a byte, with a ChatML template."""
    return AutoTokenizer.from_pretrained(tiny_checkpoint(tmp_path_factory.mktemp("model"), vocab_size=300))


def merging_tokenizer(chat_template: str | None = None, **tokens: str) -> Any:
    """Byte-level BPE that joins ' foo', '.\\n\\n' and 'foobar'; no chat template but the given."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        [" foo", ".\n\n", "foobar"] * 20, trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet)
    )
    inner.add_special_tokens([AddedToken(token, special=True) for token in ("</s>", "<s>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, chat_template=chat_template, **({"eos_token": "</s>"} | tokens)
    )


def conversation(*turns: tuple[str, str]) -> DataConversation:
    return DataConversation(
        tuple(ConversationTurn(Role(role), content, learned=role == "assistant") for role, content in turns)
    )


def encode(tokenizer: Any, *turns: tuple[str, str], template: str | None = None, **options: Any) -> list[Example]:
    encoder = Encoder(tokenizer, ChatText(tokenizer, template), **options)
    (examples,) = encoder.examples([(HERE, conversation(*turns))])
    return examples


def encode_text(tokenizer: Any, text: str) -> Example:
    ((example,),) = Encoder(tokenizer, ChatText(tokenizer)).examples([(HERE, PlainText(text))])
    return example


def split(tokenizer: Any, example: Example) -> list[tuple[str, bool]]:
    """The text of an example as runs that are learned or not."""
    runs: list[tuple[list[int], bool]] = []
    for id, learned in zip(example.ids, example.learned, strict=True):
        if not runs or runs[-1][1] != learned:
            runs.append(([], learned))
        runs[-1][0].append(id)
    return [(tokenizer.decode(ids), learned) for ids, learned in runs]


def write(path: Path, records: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def read(path: Path, records: Sequence[dict[str, Any]], tokenizer: Any, **options: Any) -> LoadedExamples:
    return read_examples(write(path / "data.jsonl", records), tokenizer, **options)


def test_exactly_the_answers_are_learned_behind_the_prompt_that_the_server_encodes(tokenizer: Any) -> None:
    (example,) = encode(tokenizer, *ASKED)
    assert split(tokenizer, example) == [
        ("<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n", False),
        ("Ho.<|im_end|>\n<|endoftext|>", True),
    ]
    (example,) = encode(tokenizer, *ASKED)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi?"}], add_generation_prompt=True)
    assert example.ids[: example.learned.index(True)] == prompt["input_ids"]
    (example,) = encode(tokenizer, ("system", "S"), *ASKED, ("user", "And?"), ("assistant", "No."), ("user", "Bye"))
    assert [text for text, learned in split(tokenizer, example) if learned] == [
        "Ho.<|im_end|>\n",
        "No.<|im_end|>\n<|endoftext|>",
    ]
    assert "Bye" not in tokenizer.decode(example.ids)


def test_an_answer_is_over_with_its_end_token_and_what_the_template_writes_behind_it_is_not_learned() -> None:
    template = "{% for m in messages %}{{ m['content'] }}</s>\n{% endfor %}"
    tokenizer = merging_tokenizer(template)
    (example,) = encode(tokenizer, *ASKED, ("user", "And?"), ("assistant", "No."))
    assert split(tokenizer, example) == [
        ("Hi?</s>\n", False),
        ("Ho.</s>", True),
        ("\nAnd?</s>\n", False),
        ("No.</s>", True),
    ]


def test_an_end_token_of_the_model_ends_an_answer_too(tokenizer: Any) -> None:
    (example,) = encode(tokenizer, *ASKED, end_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")])
    assert split(tokenizer, example)[-1] == ("Ho.<|im_end|>", True)


def test_no_token_reaches_across_the_border_between_question_and_answer() -> None:
    tokenizer = merging_tokenizer()
    assert tokenizer.tokenize(" foo") == ["Ġfoo"]
    (joined,) = encode(tokenizer, ("user", "say "), ("assistant", "foo"), template="raw")
    assert split(tokenizer, joined) == [("say ", False), ("foo</s>", True)]
    assert joined.ids[:4] == tokenizer("say ")["input_ids"]


def test_borders_behind_a_parted_token_are_exact_too() -> None:
    tokenizer = merging_tokenizer()
    turns = [("user", "a foo"), ("assistant", "bar.\n"), ("user", "\nb"), ("assistant", " foo"), ("user", "foo")]
    (example,) = encode(tokenizer, *turns, ("assistant", "bar"), template="raw")
    runs = [
        ("a foo", False),
        ("bar.\n</s>", True),
        ("\nb", False),
        (" foo</s>", True),
        ("foo", False),
        ("bar</s>", True),
    ]
    assert split(tokenizer, example) == runs


@pytest.mark.parametrize("kind", ["pre-tokenizer", "normalizer"])
def test_a_tokenizer_that_begins_texts_with_a_space_adds_none_behind_a_parted_token(kind: str) -> None:
    inner = Tokenizer(models.BPE(unk_token="?"))
    if kind == "pre-tokenizer":
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    else:  # as Llama 2 has it: also behind every special token
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        inner.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # to learn words; taken away again below
    inner.train_from_iterator(["foobar foo bar \n"] * 9, trainers.BpeTrainer(vocab_size=40, special_tokens=["?"]))
    if kind == "normalizer":
        inner.pre_tokenizer = pre_tokenizers.Sequence([])
    inner.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    assert "foobar" in tokenizer.tokenize("foobar")[-1]
    (example,) = encode(tokenizer, ("user", "foo"), ("assistant", "bar"), template="raw")
    tokens = tokenizer.convert_ids_to_tokens(example.ids)
    assert "".join(tokens) == "▁foobar</s>"
    assert "".join(tokens[example.learned.index(True) :]) == "bar</s>"


def test_a_template_that_rewrites_earlier_turns_gives_one_example_for_each_answer(tokenizer: Any) -> None:
    tokenizer = merging_tokenizer(FORGETFUL)
    found = encode(tokenizer, *ASKED, ("user", "And?"), ("assistant", "No."))
    assert [split(tokenizer, example) for example in found] == [
        [("user: Hi?\nassistant: ", False), ("Ho.\n</s>", True)],
        [("user: Hi?\nassistant: ...\nuser: And?\nassistant: ", False), ("No.\n</s>", True)],
    ]


def test_a_template_that_asks_with_other_words_than_it_answers_is_searched_for_the_answer() -> None:
    tokenizer = merging_tokenizer(UNEVEN)
    (example,) = encode(tokenizer, ("user", "Ho."), ("assistant", " Ho. "))
    assert split(tokenizer, example) == [("<user> Ho.\n<assistant> ", False), ("Ho.\n</s>", True)]


def test_an_assistant_that_speaks_unasked_is_left_out(tokenizer: Any) -> None:
    (example,) = encode(tokenizer, ("assistant", "Welcome!"), *ASKED)
    assert example == encode(tokenizer, *ASKED)[0]
    assert encode(tokenizer, ("assistant", "Welcome!")) == []


@pytest.mark.parametrize(
    ("template", "given"),
    [
        ("plain", "User: Hi?\nAssistant:"),
        ("vicuna", "polite answers to the user's questions. USER: Hi? ASSISTANT:"),
        ("paper", "polite answers to the user's questions.\nHuman: Hi?\nAssistant:"),
        ("alpaca", "appropriately completes the request.\n\n### Instruction:\nHi?\n\n### Response:\n"),
        ("raw", "Hi?"),
    ],
)
def test_built_in_templates(template: str, given: str) -> None:
    tokenizer = merging_tokenizer()
    (example,) = encode(tokenizer, *ASKED, template=template)
    (asked, first), (answered, second) = split(tokenizer, example)
    assert (first, second) == (False, True)
    assert asked.endswith(given)
    assert answered.strip() == "Ho.</s>"
    (longer,) = encode(tokenizer, ("system", "Sys."), *ASKED, *ASKED, template=template)
    assert tokenizer.decode(longer.ids).startswith("Sys.")
    assert longer.num_learned == 2 * example.num_learned
    assert set(TEMPLATES) == {"plain", "vicuna", "paper", "alpaca", "raw"}


def test_a_tokenizer_without_a_template_gets_the_plain_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = read(tmp_path, [{"prompt": "Hi?", "completion": "Ho."}], merging_tokenizer())
    assert loaded.report.template == TEMPLATES["plain"]
    assert "chat template: plain, as the tokenizer has none" in capsys.readouterr().err


def test_a_template_may_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    tokenizer = merging_tokenizer()
    (example,) = encode(tokenizer, *ASKED, template=str(tmp_path / "own.jinja"))
    assert split(tokenizer, example) == [("[Hi?]", False), ("[Ho.]</s>", True)]


@pytest.mark.parametrize("tokens", [{"bos_token": "<s>"}, {}], ids=["bos", "another token"])
def test_a_beginning_that_the_tokenizer_adds_by_itself_is_added_and_not_learned(tokens: dict[str, str]) -> None:
    tokenizer = merging_tokenizer(**tokens)
    from tokenizers.processors import TemplateProcessing

    begin = tokenizer.convert_tokens_to_ids("<s>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    assert split(tokenizer, encode_text(tokenizer, "ab")) == [("<s>", False), ("ab</s>", True)]
    (asked,) = encode(tokenizer, *ASKED)
    assert split(tokenizer, asked)[0] == ("<s>User: Hi?\nAssistant:", False)
    own = "<s>{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    tokenizer.chat_template = own
    (asked,) = encode(tokenizer, *ASKED)
    assert split(tokenizer, asked)[0] == ("<s>[Hi?]", False)


def test_plain_text_and_letters_of_several_bytes_are_learned_whole(tokenizer: Any) -> None:
    example = encode_text(tokenizer, "one\ntwo")
    assert example.learned == [True] * 8
    assert example.ids == [*tokenizer("one\ntwo")["input_ids"], END]
    (example,) = encode(tokenizer, ("user", "größe"), ("assistant", "日本 ü"))
    assert split(tokenizer, example)[1] == ("日本 ü<|im_end|>\n<|endoftext|>", True)


def test_what_is_left_out_or_cut_is_reported(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [("Hi?", "Ho."), ("Hi?", "long " * 20), ("Hi?", " "), ("", ""), ("Hi?" * 40, "Ho."), ("Hi?", "<|mask_1|>")]
    records = [{"prompt": question, "completion": answer} for question, answer in pairs]
    loaded = read(tmp_path, records, tokenizer, max_length=60, mask_ids=[FIRST_MASK])
    report = loaded.report
    assert (report.num_records, report.num_examples, report.num_empty, report.num_with_masks) == (6, 2, 2, 1)
    assert (report.num_cut, report.num_cut_away) == (1, 1)
    assert max(len(example.ids) for example in loaded.examples) == 60
    assert report.num_learned == sum(example.num_learned for example in loaded.examples)
    line = capsys.readouterr().err
    assert line.startswith("data: 6 records (6 prompt and completion): 2 examples of ")
    for part in (
        "2 empty ones",
        "1 with a mask token",
        "1 cut at the end",
        "1 left out whose prompt alone is too long",
    ):
        assert part in line


def test_a_long_text_becomes_examples_that_learn_every_id_but_the_first_once(tmp_path: Path, tokenizer: Any) -> None:
    text = "abcdefghijklmnop"
    examples = read(tmp_path, [{"text": text}], tokenizer, max_length=6).examples
    assert [len(example.ids) for example in examples] == [6, 6, 6, 2]
    assert "".join(text for example in examples for text, learned in split(tokenizer, example) if learned) == (
        text[1:] + "<|endoftext|>"
    )


def test_records_are_held_out_by_what_they_say_alone(tmp_path: Path, tokenizer: Any) -> None:
    records = [{"text": f"text number {number}"} for number in range(60)]
    forward = read(tmp_path, records, tokenizer, held_out_share=0.3)
    other = merging_tokenizer()
    backward = read(tmp_path, records[::-1], other, held_out_share=0.3)
    texts = {tokenizer.decode(example.ids[:-1]) for example in forward.held_out}
    assert texts == {other.decode(example.ids[:-1]) for example in backward.held_out}
    assert 6 < len(texts) == forward.report.num_held_out < 30
    trained = {tokenizer.decode(example.ids[:-1]) for example in forward.examples}
    assert texts | trained == {record["text"] for record in records}
    wider = read(tmp_path, records, tokenizer, held_out_share=0.5)
    assert texts < {tokenizer.decode(example.ids[:-1]) for example in wider.held_out}


def test_of_few_records_one_is_held_out_and_of_a_single_text_its_end(tmp_path: Path, tokenizer: Any) -> None:
    few = read(tmp_path, [{"text": text} for text in ("a", "b", "c")], tokenizer, held_out_share=1e-9)
    assert (len(few.examples), len(few.held_out)) == (2, 1)
    one = read(tmp_path, [{"text": "abcdefghijklmno"}], tokenizer, max_length=4, held_out_share=0.2)
    assert (len(one.examples), len(one.held_out)) == (4, 1)
    assert tokenizer.decode(one.held_out[0].ids) == "mno<|endoftext|>"
    alone = read(tmp_path, [{"text": "a"}], tokenizer, held_out_share=0.2)
    assert (len(alone.examples), len(alone.held_out)) == (1, 0)


def test_copies_of_one_text_are_not_all_held_out(tmp_path: Path, tokenizer: Any) -> None:
    """Nor is a copy held out beside those that are learnt."""
    short = read(tmp_path, [{"text": "a"}] * 3, tokenizer, held_out_share=0.02)
    assert (len(short.examples), len(short.held_out)) == (3, 0)
    long = read(tmp_path, [{"text": "abcdefghijklmno"}] * 2, tokenizer, max_length=4, held_out_share=0.2)
    assert (len(long.examples), len(long.held_out)) == (8, 2)
    assert {tokenizer.decode(example.ids) for example in long.held_out} == {"mno<|endoftext|>"}
    two = read(tmp_path, [{"text": "a"}] * 3 + [{"text": "b"}] * 3, tokenizer, held_out_share=0.02)
    assert (len(two.examples), len(two.held_out)) == (3, 3)


def test_sources_are_read_one_after_the_other_up_to_the_limit(tmp_path: Path, tokenizer: Any) -> None:
    source = write(tmp_path / "data.jsonl", [{"text": "ab"}, {"text": "cd"}, {"no": "form"}])
    assert len(read_examples(source, tokenizer, limit=2).examples) == 2
    sources = [write(tmp_path / f"{name}.jsonl", [{"text": name}]) for name in ("b", "a")]
    assert [tokenizer.decode(e.ids[:1]) for e in read_examples(sources, tokenizer).examples] == ["b", "a"]


@pytest.mark.parametrize(
    ("records", "options", "error", "message"),
    [
        ([], {}, NothingToLearn, r"data\.jsonl is empty: it holds no record"),
        ([{"text": " "}] * 3, {}, NothingToLearn, r"of 3 records 3 have no answer or text, 0 hold a mask token"),
        ([{"prompt": "Hi?", "completion": "Ho."}], {"max_length": 9}, NothingToLearn, r"long \(max_length 9\)"),
        ([{"text": "<|mask_1|>"}], {"mask_ids": [FIRST_MASK]}, NothingToLearn, r"1 hold a mask token"),
        ([{"text": "a"}, {"text": "b"}], {"held_out_share": 0.9999999}, NothingToLearn, r"all 2 .* are held out"),
        ([{"text": "a"}], {"held_out_share": 1}, DataError, r"held_out_share must be from 0 to below 1; got 1"),
        ([{"text": "a"}], {"limit": 0}, DataError, r"limit must be at least 1; got 0"),
        ([{"text": "a"}], {"max_length": 1}, DataError, r"max_length must be at least 2; got 1"),
        ([{"text": "a"}], {"template": "owl"}, UnusableTemplate, r"There is no template 'owl': use plain, paper"),
        ([{"text": "a"}], {"template": "no.jinja"}, UnusableTemplate, r"The chat template no.jinja cannot be read"),
        ([{"text": "zebra"}], {"vocab_size": 100}, UnusableTokenizer, r":1: token 'z' has id \d+, the model only"),
    ],
)  # fmt: skip
def test_what_leaves_nothing_to_learn_or_makes_no_sense_is_refused(
    tmp_path: Path, tokenizer: Any, records: list[dict[str, Any]], options: Any, error: type[DataError], message: str
) -> None:
    with pytest.raises(error, match=message):
        read(tmp_path, records, tokenizer, **options)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system, please') }}", r"data:1: .*does not take this conversation: no system, please"),
        ("{% for m in messages %}{{ m['role'] }}{% endfor %}", r"data:1: .*does not show the assistant's words"),
        ("{% for %}", r"data:1: .*does not take this conversation"),
    ],
)
def test_a_template_that_does_not_render_a_conversation_is_refused_with_its_place(template: str, message: str) -> None:
    with pytest.raises(BadRecord, match=message):
        encode(merging_tokenizer(template), *ASKED)


def test_a_tokenizer_without_a_usable_end_is_refused() -> None:
    endless = merging_tokenizer()
    endless.eos_token = None
    with pytest.raises(UnusableTokenizer, match="has no EOS token, so no answer would ever end"):
        Encoder(endless, ChatText(endless))
    tokenizer = merging_tokenizer()
    with pytest.raises(
        UnusableTokenizer, match=r"EOS has id \d+, the model only ids below 50\. Use the tokenizer that"
    ):
        Encoder(tokenizer, ChatText(tokenizer), vocab_size=50)


def test_padding_falls_back_to_the_end_token_and_features_are_those_of_the_trainer() -> None:
    tokenizer = merging_tokenizer()
    assert tokenizer.pad_token_id is None
    assert pad_id(tokenizer, 300) == tokenizer.eos_token_id
    assert pad_id(merging_tokenizer(pad_token="<s>"), 300) == tokenizer.convert_tokens_to_ids("<s>")
    with pytest.raises(UnusableTokenizer, match=r"has padding None and EOS \d+; neither is one of the 10 ids"):
        pad_id(tokenizer, 10)
    assert Example([5, 6, 7], [False, True, True]).feature() == {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}


TURNS = [("system", "Be kind."), ("user", "Hi?"), ("assistant", "Ho."), ("user", "And?"), ("assistant", "No.")]


def bare_model(folder: Path, *, begins: bool) -> Any:
    """The tokenizer of a base without a chat template, which puts BOS before a text or does not."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint(folder, vocab_size=300, num_masks=0))
    tokenizer.chat_template, tokenizer.bos_token = None, "<|im_start|>"
    if begins:
        begin = (tokenizer.bos_token, tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("template", [None, *sorted(TEMPLATES)])
def test_a_chat_begins_in_training_as_when_it_is_served(template: str | None, begins: bool, tmp_path: Path) -> None:
    """With the template that a run leaves, and with the server's own of that name: a chat's ids are its text's."""
    tokenizer = bare_model(tmp_path, begins=begins)
    chat = ChatText(tokenizer, template)
    turns = tuple(ConversationTurn(Role(role), content, learned=role == "assistant") for role, content in TURNS)
    ((example,),) = Encoder(tokenizer, chat).examples([(SourceRecord("data", 1, {}), DataConversation(turns))])
    (tmp_path / "chat_template.jinja").write_text(chat.template)
    messages = [{"role": role, "content": content} for role, content in TURNS]
    for choice in (None, template) if begins and template in BUILT_IN else (None,):
        served = ModelText.load(ServeConfig(model=str(tmp_path), chat_template=choice))
        for num_given in (2, 4):
            text = served.chat_template.render(messages[:num_given])
            ids = served.tokenizer.encode(text, add_special_tokens=False)
            assert (ids[0] == tokenizer.bos_token_id) == begins
            assert example.ids[: len(ids)] == ids
            assert example.learned[len(ids) - 1 : len(ids) + 1] == [False, True]


def test_a_record_of_many_copies_is_not_held_out_whole(tmp_path: Path, tokenizer: Any) -> None:
    for word in "abcdefgh":  # whichever has the lowest digest
        found = read(tmp_path, [{"text": word}] * 50 + [{"text": "another"}], tokenizer, held_out_share=0.02)
        assert (len(found.examples), len(found.held_out)) == (50, 1)
    both = read(tmp_path, [{"text": "a"}] * 5 + [{"text": "b"}] * 5, tokenizer, held_out_share=0.02)
    assert (len(both.examples), len(both.held_out)) == (5, 5)
