"""Tokenizers of checkpoints without tokenizer.json, against SentencePiece itself and BPE by rank written out."""

from __future__ import annotations

import base64
import io
import itertools
import json
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from space_common.tokenizer import tokenizer_files
from space_common.tokenizer.tokenizer_files import TokenizerFileError, published_tokenizer, tokenizer_json
from space_model.checkpoint.checkpoint import Checkpoint
from space_router.text.checkpoint import locate
from space_router.text.tokenizer import Tokenizer
from space_server.grammar import TokenVocabulary

WORDS = (
    "The model drafts tokens and verifies them in one pass; 12345 tokens, naïve café, 模型 同时 起草 和 验证 标记。 "
    "Ein größeres Haus steht am Fluß. def add(a, b):\n    return a + b\n философия philosophy sophisticated 🙂 "
)
Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(content: bytes, name: str = "tokenizer.model", **files: Mapping[str, Any]) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        for stem, value in ({"config": {"model_type": "internlm2"}} | files).items():
            (folder / f"{stem}.json").write_text(json.dumps(value))
        return folder

    return make


def sentencepiece_model(**settings: Any) -> bytes:
    """Return a small SentencePiece model of the BPE kind, trained on WORDS."""
    written = io.BytesIO()
    texts = [WORDS[start : start + 60].strip() for start in range(len(WORDS) - 20)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=written,
        vocab_size=420,
        **{
            "model_type": "bpe",
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "minloglevel": 2,
            "character_coverage": 0.99,
            "num_threads": 1,
        }
        | settings,
    )
    return written.getvalue()


def sample_texts() -> list[str]:
    """Return texts of pieces of WORDS and of characters that no model has seen."""
    source = random.Random(0)
    texts = []
    for _ in range(200):
        parts = []
        for _ in range(source.randrange(1, 6)):
            start = source.randrange(len(WORDS))
            parts.append(WORDS[start : start + source.randrange(1, 30)])
            parts.append(source.choice(["", " ", "  ", "\n", "ﬁ", "Ⅳ", "𝔄", "é", "<"]))
        texts.append("".join(parts))
    return [*texts, "a", " a", "  two  spaces  "]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"add_dummy_prefix": False},
        {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
        {"user_defined_symbols": ["<tool>"], "control_symbols": ["<sep>"]},
    ],
    ids=["identity", "no-prefix", "nfkc", "own-symbols"],
)
def test_a_sentencepiece_model_gives_its_own_ids(settings: dict[str, Any], write: Write) -> None:
    content = sentencepiece_model(**settings)
    folder = write(content)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=content)
    tokenizer = Tokenizer.load(folder)
    for text in sample_texts():
        assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text), text
        assert tokenizer.encode(text) == [oracle.bos_id(), *oracle.encode(text)], text


def ids_by_rank(text: bytes, ranks: Mapping[bytes, int]) -> list[int]:
    """Return a word's ids: of all neighbours, the two with the lowest joint rank are merged, the leftmost first."""
    if text in ranks:
        return [ranks[text]]
    parts = [text[i : i + 1] for i in range(len(text))]
    while True:
        found = [(ranks[parts[i] + parts[i + 1]], i) for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in ranks]
        if not found:
            return [ranks[part] for part in parts]
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """A tiktoken table: all bytes, then the most frequent pairs of WORDS, one by one."""
    table = {bytes([byte]): byte for byte in range(256)}
    words = [word.encode() for word in re.findall(r"\s?\S+", WORDS)]
    parts = [[word[i : i + 1] for i in range(len(word))] for word in words]
    while len(table) < 400:
        counts: dict[bytes, int] = {}
        for word in parts:
            for left, right in itertools.pairwise(word):
                counts[left + right] = counts.get(left + right, 0) + 1
        best = max((pair for pair in counts if pair not in table), key=lambda pair: (counts[pair], pair))
        table[best] = len(table)
        for word in parts:
            at = 0
            while at < len(word) - 1:
                if word[at] + word[at + 1] == best:
                    word[at : at + 2] = [best]
                at += 1
    return table


def tiktoken_file(ranks: Mapping[bytes, int]) -> bytes:
    """Return the lines of a tiktoken table."""
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items())


def test_a_tiktoken_table_gives_the_ids_of_its_ranks(ranks: dict[bytes, int], write: Write) -> None:
    folder = write(tiktoken_file(ranks), "qwen.tiktoken", config={"model_type": "qwen"})
    tokenizer = Tokenizer.load(folder)
    source = random.Random(1)
    letters = "".join(sorted({letter for letter in WORDS if letter.isalpha()}))
    for _ in range(300):  # words of letters alone, which the pre-tokenizer leaves whole
        word = "".join(source.choice([letters[source.randrange(len(letters))], "token", "phi"]) for _ in range(6))
        assert tokenizer.encode(word) == ids_by_rank(word.encode(), ranks), word
    assert tokenizer.encode("add 123")[-3:] == [ord(digit) for digit in "123"]  # the first Qwen reads digits alone
    for text in sample_texts():
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_special_tokens_of_the_first_qwen_follow_its_table(ranks: dict[bytes, int], write: Write) -> None:
    tokenizer = Tokenizer.load(write(tiktoken_file(ranks), "qwen.tiktoken", config={"model_type": "qwen"}))
    first = len(ranks)
    turn = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert (turn[0], turn[-1]) == (first + 1, first + 2)
    assert tokenizer.num_ids == first + 208
    assert {first, first + 1, first + 2, first + 207} <= tokenizer.special_ids


def test_prompts_of_chatglm_begin_with_its_two_tokens(ranks: dict[bytes, int], write: Write) -> None:
    content = sentencepiece_model()
    oracle = sentencepiece.SentencePieceProcessor(model_proto=content)
    folder = write(content, config={"model_type": "chatglm"}, tokenizer_config={"add_bos_token": False})
    size = oracle.vocab_size()
    assert Tokenizer.load(folder).encode("philosophy") == [size + 1, size + 3, *oracle.encode("philosophy")]
    (folder / "tokenizer.model").write_bytes(tiktoken_file(ranks))
    listed = {str(len(ranks) + n): {"content": text, "special": True} for n, text in enumerate(("[gMASK]", "<sop>"))}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    assert Tokenizer.load(folder).encode("phi")[:2] == [len(ranks), len(ranks) + 1]


def test_tokens_beside_the_model_keep_their_ids(write: Write) -> None:
    content = sentencepiece_model()
    size = sentencepiece.SentencePieceProcessor(model_proto=content).vocab_size()
    decoder = {str(size): {"content": "<|im_start|>", "special": True}}
    folder = write(content, tokenizer_config={"added_tokens_decoder": decoder}, added_tokens={"<call>": size + 1})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("<|im_start|><call>") == [1, size, size + 1]
    assert size in tokenizer.special_ids
    assert size + 1 not in tokenizer.special_ids


def test_llamas_tokenizer_is_that_of_transformers(write: Write) -> None:
    from transformers import AutoTokenizer

    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    folder = write(sentencepiece_model(), config={"model_type": "llama"}, tokenizer_config=settings)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in sample_texts():
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), text


def test_the_router_serves_a_folder_with_an_older_tokenizer(write: Write) -> None:
    folder = write(sentencepiece_model())
    assert locate(str(folder)) == folder
    assert published_tokenizer(folder) == folder / "tokenizer.model"
    made = tokenizer_json(folder)
    assert made is not None
    assert made == tokenizer_json(folder)
    (folder / "added_tokens.json").write_text('{"<new>": 420}')
    assert tokenizer_json(folder) != made


@pytest.mark.parametrize(
    ("content", "name", "model_type", "message"),
    [
        (b"not a model", "tokenizer.model", "llama", "neither a SentencePiece model nor a tiktoken table"),
        (b"not a table", "qwen.tiktoken", "qwen", "is no tiktoken table"),
        (b"YQ== 0\n", "own.tiktoken", "own", "does not say how a text is cut into words"),
        (b"YQ== 0\nYg== 5\n", "qwen.tiktoken", "qwen", "ranks that do not count"),
    ],
)
def test_what_is_no_tokenizer_is_refused(
    content: bytes, name: str, model_type: str, message: str, write: Write
) -> None:
    with pytest.raises(TokenizerFileError, match=message):
        tokenizer_json(write(content, name, config={"model_type": model_type}))


def test_a_unigram_model_is_refused_with_the_cure(write: Write) -> None:
    folder = write(sentencepiece_model(model_type="unigram", hard_vocab_limit=False))
    with pytest.raises(TokenizerFileError, match=r"kind UNIGRAM; only BPE is read here. `spaceserve convert` can"):
        tokenizer_json(folder)


def test_the_worker_reads_the_tokenizer_that_the_router_reads(ranks: dict[bytes, int], write: Write) -> None:
    folder = write(
        tiktoken_file(ranks),
        "qwen.tiktoken",
        config={"model_type": "qwen"},
        generation_config={"chat_format": "chatml", "eos_token_id": len(ranks)},
    )
    checkpoint = Checkpoint("qwen", folder, {}, (), folder)
    assert checkpoint.tokenizer_hash() == Tokenizer.load(folder).content_hash
    assert checkpoint.eos_ids(len(ranks) + 208) == (len(ranks), len(ranks) + 2)
    assert TokenVocabulary.read(folder, len(ranks) + 208).texts[300] == next(
        token for token, rank in ranks.items() if rank == 300
    )


def test_ids_of_the_vocabulary_may_be_named_anew(write: Write) -> None:
    content = sentencepiece_model(user_defined_symbols=["[UNUSED_1]"])
    id_ = sentencepiece.SentencePieceProcessor(model_proto=content).piece_to_id("[UNUSED_1]")
    folder = write(
        content, tokenizer_config={"added_tokens_decoder": {id_: {"content": "<|im_end|>", "special": True}}}
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [id_]
    assert id_ in tokenizer.special_ids
    assert tokenizer.num_ids == 420


def test_own_symbols_with_spaces_are_refused(write: Write) -> None:
    folder = write(sentencepiece_model(user_defined_symbols=["▁▁▁▁"]))
    with pytest.raises(TokenizerFileError, match="'▁▁▁▁' as a symbol of its own"):
        tokenizer_json(folder)


def test_files_of_older_and_newer_code_are_left_and_a_line_says_so(
    write: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, kept = write(sentencepiece_model()), tokenizer_files._version()
    made = []
    with caplog.at_level("INFO"):
        for version in ("older", "newer", kept):
            monkeypatch.setattr(tokenizer_files, "_version", lambda version=version: version)
            made.append(tokenizer_json(folder))
            assert "1 of other versions are not used" in caplog.text or version == "older"
            if version != kept:
                made[-1].write_text("of another version")
    assert f"{made[-1].parent}: made anew for this version; 2 of other versions are not used" in caplog.text
    assert [file.read_text() == "of another version" for file in made] == [True, True, False]
