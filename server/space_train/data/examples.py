"""Training examples, ids with a mask of targets, and how they are loaded from a source.

records (JSON lines, JSON, text, tables) -> conversations or texts -> chat template -> ids, learned
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from transformers import PreTrainedTokenizerBase

from space_train.data.example_encoder import ChatText, Encoder, Example
from space_train.data.records import DataError, Document, NothingToLearn, PlainText, SourceRecord, documents, records


@dataclass
class LoadReport:
    """Counts of records read, and of those skipped by reason."""

    num_records: int = 0
    num_empty: int = 0  # without targets
    num_with_masks: int = 0  # skipped: they contain a mask token
    num_cut: int = 0  # conversations longer than max_length, cut at their end
    num_cut_away: int = 0  # skipped: their prompt alone fills max_length
    num_examples: int = 0
    num_held_out: int = 0
    num_tokens: int = 0  # of the examples to train on
    num_learned: int = 0
    template: str = ""  # Jinja source, written to the checkpoint for serving
    template_name: str = ""
    forms: Counter[str] = field(default_factory=Counter)

    @property
    def has_conversations(self) -> bool:
        """Whether the chat template was needed."""
        return bool(set(self.forms) - {"plain text"})

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
            + (f"; chat template: {self.template_name}" if self.has_conversations else "")
        )


RECORDS_AT_ONCE = 64


@dataclass(frozen=True)
class LoadedExamples:
    """Training and held-out examples, and the report of the records read."""

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
    """Return the training examples of `source`; see `read_examples` for the arguments."""
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
    quiet: bool = False,
) -> LoadedExamples:
    """Read, render and encode the records of one or several sources, and print a report to stderr.

    `template`: a name in chat_text.TEMPLATES or a .jinja file; default the tokenizer's own, else `plain`.
    `limit`: records to read at most. `max_length`: ids at most; conversations are cut at their end, plain texts become
    several examples. `held_out_share`: share of the records, chosen by a hash of their text, so that the choice is the
    same for every tokenizer, order and run (of few records at least one; of a single long text its end).
    `vocab_size`: of the model, to reject ids beyond it. `end_ids`: ids besides the tokenizer's EOS that end an
    answer. Records that contain one of `mask_ids` are skipped. `quiet`: print nothing. Raises DataError.
    """
    if not 0 <= held_out_share < 1:
        raise DataError(f"held_out_share must be from 0 to below 1; got {held_out_share}.")
    for name, value, least in (("limit", limit, 1), ("max_length", max_length, 2)):
        if value is not None and value < least:
            raise DataError(f"{name} must be at least {least}; got {value}.")
    encoder = Encoder(tokenizer, ChatText(tokenizer, template), end_ids=end_ids, vocab_size=vocab_size)
    report = LoadReport(template=encoder.chat.template, template_name=encoder.chat.name)
    found: list[tuple[int, list[Example]]] = []  # per record: the digest that selects held-out records, its examples
    reader = islice(_documents(source, split, quiet), limit)
    while some := list(islice(reader, RECORDS_AT_ONCE)):
        encoded = encoder.examples([(record, document) for record, _, document in some])
        for (_, form, document), examples in zip(some, encoded, strict=True):
            report.num_records += 1
            report.forms[form] += 1
            admitted = _admitted(examples, max_length, document, set(mask_ids), report)
            if admitted:
                found.append((digest(document.content), admitted))
    examples, held_out = _parted(found, held_out_share)
    report.num_examples, report.num_held_out = len(examples), len(held_out)
    report.num_tokens = sum(len(example.ids) for example in examples)
    report.num_learned = sum(example.num_learned for example in examples)
    _check(source, report, held_out_share, max_length)
    if not quiet:
        print(f"data: {report}", file=sys.stderr, flush=True)
    return LoadedExamples(examples, held_out, report)


def digest(content: str) -> int:
    """Return a 64-bit hash of a document's text."""
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "big")


def _parted(found: Sequence[tuple[int, list[Example]]], share: float) -> tuple[list[Example], list[Example]]:
    """Split into training and held-out examples: held-out records have a digest in the lowest `share` of all digests.

    At least the record with the lowest digest is held out; of a single long text, its end.
    """
    if len(found) == 1 and share:
        examples = found[0][1]
        border = len(examples) - math.ceil(share * len(examples)) if len(examples) > 1 else 1
        return examples[:border], examples[border:]
    lowest = min((digest for digest, _ in found), default=0)
    bound = max(share * 2**64, lowest + 1 if share else 0)
    parts: tuple[list[Example], list[Example]] = ([], [])
    for digest, examples in found:
        parts[digest < bound].extend(examples)
    return parts


def _documents(source: str | Sequence[str], split: str, quiet: bool) -> Iterator[tuple[SourceRecord, str, Document]]:
    """Yield every document of every source; a progress bar appears after two seconds."""
    from tqdm import tqdm

    for one in [source] if isinstance(source, str) else source:
        found = documents(records(one, split=split))
        yield from tqdm(found, desc=f"reading {one}", unit=" records", delay=2, file=sys.stderr, disable=quiet or None)


def _admitted(
    found: list[Example], max_length: int | None, document: Document, mask_ids: set[int], report: LoadReport
) -> list[Example]:
    """Return the usable examples of a document, cut to `max_length`."""
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
    if not report.num_examples:
        raise NothingToLearn(
            f"At held_out_share {held_out_share:g} all {report.num_held_out} examples of {name} are held out; none is "
            "left to train on. Take a smaller share, or give more data."
        )
