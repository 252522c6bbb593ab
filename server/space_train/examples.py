"""Training examples: token ids, and which of them the model learns to write.

    records (JSONL, JSON, text, tables) -> conversations or text -> chat template -> ids with a `learned` mask

Only answers are learned, each with the token that ends it; plain text is learned whole. The border between what is
given and what is learned is where the prompt ends when the model is asked: no token reaches across it.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

from transformers import PreTrainedTokenizerBase

from space_train.chat_text import AnsweredText, ChatText
from space_train.data_error import BadRecord, DataError, NothingToLearn, UnusableTemplate, UnusableTokenizer
from space_train.data_forms import Document, PlainText, documents
from space_train.data_source import Record, records

NOT_LEARNED = -100
"""The label transformers' losses leave out."""


@dataclass(frozen=True)
class Example:
    """One document as ids; learned[i]: the model learns to write ids[i] (False: it is given)."""

    ids: list[int]
    learned: list[bool]

    @property
    def num_learned(self) -> int:
        """Ids that are learned."""
        return sum(self.learned)

    def feature(self) -> dict[str, list[int]]:
        """As a dataset for `transformers.Trainer` has it: input_ids, and labels of which -100 are not learned."""
        labels = [id if learned else NOT_LEARNED for id, learned in zip(self.ids, self.learned, strict=True)]
        return {"input_ids": self.ids, "labels": labels}

    def pieces(self, length: int) -> list[Example]:
        """This example in pieces of at most `length` ids that learn something.

        Each piece after the first begins with the id before it, given, so that no target is lost:

            length 4, all learned:   a b c d e f   ->   a b c d | (d) e f
        """
        pieces, starts = [], range(0, max(1, len(self.ids) - 1), length - 1)
        for start in starts:
            learned = [False, *self.learned[start + 1 : start + length]]
            if any(learned):
                pieces.append(Example(self.ids[start : start + length], learned))
        return pieces


@dataclass
class LoadReport:
    """What was read, what was left out, and why."""

    num_records: int = 0
    num_empty: int = 0  # nothing to learn in them
    num_with_masks: int = 0  # left out: they hold a mask token, which no text may
    num_cut: int = 0  # conversations longer than max_length, cut at their end
    num_cut_away: int = 0  # left out: their prompt alone fills max_length
    num_examples: int = 0
    num_held_out: int = 0
    num_tokens: int = 0  # of the examples to train on
    num_learned: int = 0
    template: str = ""  # Jinja source, so that a checkpoint can be served with it
    template_name: str = ""
    forms: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        forms = ", ".join(f"{count:,} {name}" for name, count in self.forms.items())
        left_out = [
            f"{count:,} {reason}"
            for count, reason in (
                (self.num_empty, "empty ones left out"),
                (self.num_with_masks, "with a mask token left out"),
                (self.num_cut, "cut at the end"),
                (self.num_cut_away, "left out whose prompt alone is too long"),
                (self.num_held_out, "held out"),
            )
            if count
        ]
        return (
            f"{self.num_records:,} records ({forms or 'none'}): {self.num_examples:,} examples of "
            f"{self.num_tokens:,} tokens, {self.num_learned:,} learned"
            + "".join(f"; {part}" for part in left_out)
            + (f"; chat template: {self.template_name}" if set(self.forms) - {"plain text"} else "")
        )


@dataclass(frozen=True)
class LoadedExamples:
    """Examples to train on, those held out, and what became of the records."""

    examples: list[Example]
    held_out: list[Example]
    report: LoadReport


def load_examples(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str = "train",
    template: str | None = None,
    limit: int | None = None,
    max_length: int | None = None,
) -> list[Example]:
    """The examples of `source`; `read_examples` says what the arguments mean, and gives more."""
    loaded = read_examples(source, tokenizer, split=split, template=template, limit=limit, max_length=max_length)
    return loaded.examples


def read_examples(
    source: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str = "train",
    template: str | None = None,
    limit: int | None = None,
    max_length: int | None = None,
    held_out_share: float = 0.0,
    vocab_size: int | None = None,
    end_ids: Collection[int] = (),
    mask_ids: Collection[int] = (),
) -> LoadedExamples:
    """Read, render and encode the records of `source` (or of several), and say on stderr what became of them.

    `template`: a name in chat_text.TEMPLATES or a .jinja file; default the tokenizer's own, else `plain`.
    `limit`: records to read at most. `max_length`: ids at most; conversations are cut at their end, plain texts become
    several examples. `held_out_share`: records that are held out, chosen by a hash of what they say, so that the choice
    is the same for every tokenizer, order and run. `vocab_size`: of the model, to refuse ids it does not have.
    `end_ids`: what else than the tokenizer's EOS ends an answer. Records that hold one of `mask_ids` are left out.
    Raises DataError.
    """
    if not 0 <= held_out_share < 1:
        raise DataError(f"held_out_share must be from 0 to below 1; got {held_out_share}.")
    for name, value, least in (("limit", limit, 1), ("max_length", max_length, 2)):
        if value is not None and value < least:
            raise DataError(f"{name} must be at least {least}; got {value}.")
    encoder = Encoder(tokenizer, ChatText(tokenizer, template), end_ids=end_ids, vocab_size=vocab_size)
    report = LoadReport(template=encoder.chat.template, template_name=encoder.chat.name)
    examples: list[Example] = []
    held_out: list[Example] = []
    for record, form, document in islice(_documents(source, split), limit):
        report.num_records += 1
        report.forms[form] += 1
        found = _admitted(encoder.examples(document, record), max_length, document, set(mask_ids), report)
        (held_out if is_held_out(document.content, held_out_share) else examples).extend(found)
    report.num_examples, report.num_held_out = len(examples), len(held_out)
    report.num_tokens = sum(len(example.ids) for example in examples)
    report.num_learned = sum(example.num_learned for example in examples)
    _check(source, report, held_out_share, max_length)
    print(f"data: {report}", file=sys.stderr, flush=True)
    return LoadedExamples(examples, held_out, report)


def is_held_out(content: str, share: float) -> bool:
    """Whether a document is held out: a function of what it says alone, true for about `share` of documents."""
    digest = hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def pad_id(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """What fills up rows: the tokenizer's padding, else its EOS. Padding is neither seen nor learned."""
    for id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if id is not None and 0 <= id < vocab_size:
            return int(id)
    raise UnusableTokenizer(
        f"The tokenizer has padding {tokenizer.pad_token_id} and EOS {tokenizer.eos_token_id}; neither is one of the "
        f"{vocab_size} ids of the model. Use the tokenizer that belongs to the model."
    )


class Encoder:
    """Turns documents into examples with one tokenizer and one chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat: ChatText,
        *,
        end_ids: Collection[int] = (),
        vocab_size: int | None = None,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise UnusableTokenizer(
                "The tokenizer has no EOS token, so no answer would ever end. "
                "Set `eos_token` in tokenizer_config.json to the token that ends the model's texts."
            )
        if vocab_size is not None and not 0 <= tokenizer.eos_token_id < vocab_size:
            raise UnusableTokenizer(
                f"The tokenizer's EOS has id {tokenizer.eos_token_id}, the model only ids below {vocab_size}. "
                "Use the tokenizer that belongs to the model."
            )
        self.tokenizer, self.chat, self.vocab_size = tokenizer, chat, vocab_size
        self.eos_id = int(tokenizer.eos_token_id)
        self.end_ids = frozenset(end_ids) | {self.eos_id}
        self.prefix = _own_prefix(tokenizer, self.end_ids)

    def examples(self, document: Document, record: Record) -> list[Example]:
        """The examples of one document: none if there is nothing to learn in it."""
        if isinstance(document, PlainText):
            if not document.text.strip():
                return []
            ids = self._ids(document.text)
            found = [Example([*self.prefix, *ids, self.eos_id], [False] * len(self.prefix) + [True] * (len(ids) + 1))]
        else:
            try:
                found = [self.answered(text) for text in self.chat.texts(document)]
            except UnusableTemplate as error:
                raise BadRecord(f"{record.where}: {error}") from error
        for example in found:
            self._check_vocabulary(example.ids, record)
        return found

    def answered(self, text: AnsweredText) -> Example:
        """The ids of a rendered conversation up to the end of its last answer."""
        borders = [border for answer in text.answers for border in answer]
        runs = self._runs(text.text[: borders[-1]], [0, *borders])  # given, learned, given, learned, …
        ids: list[int] = []
        learned: list[bool] = []
        for number, run in enumerate(runs):
            is_answer, is_last = number % 2 == 1, number == len(runs) - 1
            if not is_answer:
                ids, learned = ids + run, learned + [False] * len(run)
                continue
            # An answer is over with its last end token: what a template writes behind it, the model never does.
            end = max((place + 1 for place, id in enumerate(run) if id in self.end_ids), default=None)
            if is_last:
                run = [*run, self.eos_id] if end is None else run[:end]
            ids, learned = ids + run, learned + [end is None or place < end for place in range(len(run))]
        if self.prefix and ids[: len(self.prefix)] != self.prefix and self.chat.is_built_in:
            ids, learned = [*self.prefix, *ids], [False] * len(self.prefix) + learned
        return Example(ids, learned)

    def _runs(self, text: str, borders: Sequence[int]) -> list[list[int]]:
        """The ids of text between each border and the next; `borders` begin with 0 and end with the text.

        The text is encoded whole. Only where a token would reach across a border is the text encoded in two parts, as
        it is when the model is asked for what comes behind the border.
        """
        runs, base, done = [], 0, 0
        rest = self._ids(text)  # encodes text[base:]; the first `done` ids of it are given out
        for start, end in pairwise(borders):
            head = rest if end == len(text) else self._ids_behind(text[base:end]) if base else self._ids(text[:end])
            fits = head[:done] == rest[:done]
            runs.append(head[done:] if fits else self._ids_behind(text[start:end]))
            if fits and head == rest[: len(head)]:
                done = len(head)
            else:
                base, done, rest = end, 0, self._ids_behind(text[end:])
        return runs

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _ids_behind(self, text: str) -> list[int]:
        """The ids of text that stands behind other text: some tokenizers put a space before the first word of all."""
        ids = self._ids(self.tokenizer.eos_token + text)
        return ids[1:] if ids[:1] == [self.eos_id] else self._ids(text)

    def _check_vocabulary(self, ids: Sequence[int], record: Record) -> None:
        if self.vocab_size is not None and max(ids) >= self.vocab_size:
            raise UnusableTokenizer(
                f"{record.where}: token {self.tokenizer.convert_ids_to_tokens(max(ids))!r} has id {max(ids)}, the "
                f"model only ids below {self.vocab_size}. Use the tokenizer that belongs to the model."
            )


def _own_prefix(tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int]) -> list[int]:
    """The ids that the tokenizer puts before a text by itself (BOS, where it has one)."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return list(whole[:start])
    return []


def _documents(source: str | Sequence[str], split: str) -> Iterator[tuple[Record, str, Document]]:
    """Every document of every source, with a bar on stderr once reading takes more than two seconds."""
    from tqdm import tqdm

    for one in [source] if isinstance(source, str) else source:
        found = documents(records(one, split=split))
        yield from tqdm(found, desc=f"reading {one}", unit=" records", delay=2, file=sys.stderr, disable=None)


def _admitted(
    found: list[Example], max_length: int | None, document: Document, mask_ids: set[int], report: LoadReport
) -> list[Example]:
    """Those examples of a document that can be trained on, cut to `max_length`."""
    if not any(example.num_learned for example in found):
        report.num_empty += 1
        return []
    if mask_ids and any(not mask_ids.isdisjoint(example.ids) for example in found):
        report.num_with_masks += 1
        return []
    if max_length is None or all(len(example.ids) <= max_length for example in found):
        return found
    if isinstance(document, PlainText):
        return [piece for example in found for piece in example.pieces(max_length)]
    kept = []
    for example in found:
        if len(example.ids) > max_length:
            example = Example(example.ids[:max_length], example.learned[:max_length])
            report.num_cut += bool(example.num_learned)
            report.num_cut_away += not example.num_learned
        if example.num_learned:
            kept.append(example)
    return kept


def _check(source: str | Sequence[str], report: LoadReport, held_out_share: float, max_length: int | None) -> None:
    name = source if isinstance(source, str) else ", ".join(source)
    if not report.num_records:
        raise NothingToLearn(f"{name} is empty: it holds no record.")
    if not report.num_examples + report.num_held_out:
        limit = f" (max_length {max_length})" if report.num_cut_away else ""
        raise NothingToLearn(
            f"{name} has nothing to learn: of {report.num_records} records {report.num_empty} have no answer or text, "
            f"{report.num_with_masks} hold a mask token, {report.num_cut_away} have a prompt that is too long{limit}."
        )
    if held_out_share and not (report.num_examples and report.num_held_out):
        raise NothingToLearn(
            f"Of {name}, {report.num_examples} examples are left to train on and {report.num_held_out} are held out "
            f"at held_out_share {held_out_share}; both are needed. Change the share, or give more data."
        )
