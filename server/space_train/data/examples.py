"""Training examples: documents encoded to ids, conversations through their chat template, targets marked.

    records (JSON lines, JSON, text, tables) -> conversations or texts -> chat template -> ids, learned

Only answers are learned, each with its end token; plain text is learned whole. The border between context
and target is where the prompt ends at inference: no token crosses it.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from space_train.data.corpus import hash_of
from space_train.data.records import (
    BadRecord,
    ConversationTurn,
    DataConversation,
    DataError,
    Document,
    NothingToLearn,
    PlainText,
    Role,
    SourceRecord,
    UnusableTemplate,
    UnusableTokenizer,
    documents,
    records,
)

PAPER_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
ALPACA_SYSTEM = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)


_BODY = """
{%- if messages and messages[0]['role'] == 'system' -%}
{%- set system = messages[0]['content'] -%}{%- set messages = messages[1:] -%}
{%- endif -%}
{%- if system -%}{{- system + behind_system -}}{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}{{- before_answer + message['content'] + eos_token -}}
{%- else -%}{{- ('' if loop.first else between) + before_question + message['content'] -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- before_answer.rstrip(' ') -}}{%- endif -%}
"""


def _template(**words: str) -> str:
    """Return the Jinja source of a plain chat template that puts these words around questions and answers."""
    return "".join(f"{{%- set {name} = {json.dumps(word)} -%}}" for name, word in words.items()) + _BODY.strip()


TEMPLATES: dict[str, str] = {
    "plain": _template(
        system="", behind_system="\n", before_question="User: ", before_answer="\nAssistant: ", between="\n"
    ),
    "paper": _template(
        system=PAPER_SYSTEM, behind_system="\n", before_question="Human: ", before_answer="\nAssistant: ", between="\n"
    ),
    "vicuna": _template(
        system=PAPER_SYSTEM, behind_system=" ", before_question="USER: ", before_answer=" ASSISTANT: ", between=""
    ),
    "alpaca": _template(
        system=ALPACA_SYSTEM,
        behind_system="\n\n",
        before_question="### Instruction:\n",
        before_answer="\n\n### Response:\n",
        between="\n\n",
    ),
    "raw": _template(system="", behind_system="", before_question="", before_answer="", between=""),
}
"""Built-in chat templates. `plain` is used if the tokenizer has none; `paper` is the one SPACE was published with;
`raw` joins question and answer as they are. The space after 'Assistant:' belongs to the answer, as tokenizers join it.
The prefix that a tokenizer adds to a text (BOS) is part of the template, because a server adds none to a rendered chat.
"""

FALLBACK = "plain"


@dataclass(frozen=True)
class AnsweredText:
    """A rendered conversation; answers[i] is the half-open character range of the model's i-th answer."""

    text: str
    answers: tuple[tuple[int, int], ...]

    @property
    def borders(self) -> list[int]:
        """The offsets at which answers begin and end, in order."""
        return [border for answer in self.answers for border in answer]


class ChatText:
    """Renders conversations with one chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.name, self.template = _chosen(tokenizer, template)

    def render(self, turns: Sequence[ConversationTurn], asking: bool) -> str:
        """Render `turns`; `asking` adds the generation prompt."""
        messages = [{"role": str(turn.role), "content": turn.content} for turn in turns]
        try:
            text = self.tokenizer.apply_chat_template(
                messages, chat_template=self.template, tokenize=False, add_generation_prompt=asking
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise UnusableTemplate(
                f"the chat template ({self.name}) does not take this conversation: {error}. "
                f"Choose another with `template`: {', '.join(TEMPLATES)}, or a .jinja file."
            ) from error
        return str(text)

    def texts(self, conversation: DataConversation) -> list[AnsweredText]:
        """Return the texts to train on: none without an answer, otherwise one.

        Assistant turns before the first user turn are skipped. If the template rewrites earlier turns as the
        conversation continues, as those of reasoning models do, it returns one text per answer, because only the last
        answer of a text then reads as the model would write it.
        """
        turns: Sequence[ConversationTurn] = conversation.turns
        first = next((i for i, turn in enumerate(turns) if turn.role in (Role.USER, Role.TOOL)), len(turns))
        turns = [turn for i, turn in enumerate(turns) if i >= first or turn.role is Role.SYSTEM]
        asked = [i for i, turn in enumerate(turns) if turn.learned and turn.content.strip()]
        if not asked:
            return []
        single = [self._last_answered(turns[: i + 1]) for i in asked]
        whole = single[-1].text
        if all(whole.startswith(text.text) for text in single):
            return [AnsweredText(whole, tuple(text.answers[0] for text in single))]
        return single

    def _last_answered(self, turns: Sequence[ConversationTurn]) -> AnsweredText:
        """Return the conversation up to its last answer, with the range of that answer."""
        text, prompt = self.render(turns, False), self.render(turns[:-1], True)
        last_word = turns[-1].content.split()[-1]  # templates may reformat whitespace before it
        if text.startswith(prompt) and last_word in text[len(prompt) :]:
            return AnsweredText(text, ((len(prompt), len(text)),))
        # The text before an answer can differ from the generation prompt, so search for the answer itself.
        before = self.render(turns[:-1], False)
        start = text.find(turns[-1].content.strip(), len(before) if text.startswith(before) else 0)
        if start < 0:
            raise UnusableTemplate(
                "the chat template does not show the assistant's words as they are, so that they cannot be learned. "
                f"Choose another with `template`: {', '.join(TEMPLATES)}, or a .jinja file."
            )
        return AnsweredText(text, ((start, len(text)),))


def _chosen(tokenizer: PreTrainedTokenizerBase, template: str | None) -> tuple[str, str]:
    """Return name and Jinja source of the requested template, else the tokenizer's own, else the fallback."""
    if template is None:
        own = getattr(tokenizer, "chat_template", None)
        if own:
            return "the tokenizer's own", str(own["default"] if isinstance(own, dict) else own)
        return f"{FALLBACK}, as the tokenizer has none", _beginning(tokenizer) + TEMPLATES[FALLBACK]
    if template in TEMPLATES:
        return template, _beginning(tokenizer) + TEMPLATES[template]
    if template.endswith(".jinja"):
        try:
            return template, Path(template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UnusableTemplate(f"The chat template {template} cannot be read: {error}.") from error
    raise UnusableTemplate(f"There is no template {template!r}: use {', '.join(TEMPLATES)}, or a .jinja file.")


def _beginning(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the Jinja source of the prefix that the tokenizer adds to a text; empty if it adds none."""
    prefix = own_prefix(tokenizer)
    if not prefix:
        return ""
    if prefix == [tokenizer.bos_token_id]:
        return "{{- bos_token or '' -}}"
    return f"{{{{- {json.dumps(''.join(tokenizer.convert_ids_to_tokens(prefix)))} -}}}}"


def own_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that the tokenizer adds before a text (BOS, if it has one)."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return list(whole[:start])
    return []


NOT_LEARNED = -100  # the label that transformers' losses ignore


@dataclass(frozen=True)
class Example:
    """One document as ids; learned[i]: ids[i] is a target (False: it is context)."""

    ids: list[int]
    learned: list[bool]

    @property
    def num_learned(self) -> int:
        """Number of targets."""
        return sum(self.learned)

    def feature(self) -> dict[str, list[int]]:
        """Return the record for `transformers.Trainer`: input_ids and labels, -100 where nothing is learned."""
        labels = [id if learned else NOT_LEARNED for id, learned in zip(self.ids, self.learned, strict=True)]
        return {"input_ids": self.ids, "labels": labels}

    def pieces(self, length: int) -> list[Example]:
        """Split into pieces of at most `length` ids, dropping pieces without targets.

        Each piece after the first starts with the previous id as context, so that no target is lost:

            length 4, all learned:   a b c d e f   ->   a b c d | (d) e f
        """
        pieces, starts = [], range(0, max(1, len(self.ids) - 1), length - 1)
        for start in starts:
            learned = [False, *self.learned[start + 1 : start + length]]
            if any(learned):
                pieces.append(Example(self.ids[start : start + length], learned))
        return pieces


class Encoder:
    """Turns documents into examples with one tokenizer and one chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat: ChatText,
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
        self.prefix = own_prefix(tokenizer)
        self._known: dict[str, list[int]] = {}

    def examples(self, documents: Sequence[tuple[SourceRecord, Document]]) -> list[list[Example]]:
        """Return the examples of each document, none if it has no targets. Large batches encode faster."""
        texts = [self._texts(document, record) for record, document in documents]
        self._encode(text.text[:border] for some in texts for text in some for border in text.borders)
        found = []
        for (record, document), some in zip(documents, texts, strict=True):
            is_plain = isinstance(document, PlainText)
            examples = [self._plain(text.text) if is_plain else self._answered(text) for text in some]
            for example in examples:
                if self.vocab_size is not None and (most := max(example.ids)) >= self.vocab_size:
                    raise UnusableTokenizer(
                        f"{record.where}: token {self.tokenizer.convert_ids_to_tokens(most)!r} has id {most}, the "
                        f"model only ids below {self.vocab_size}. Use the tokenizer that belongs to the model."
                    )
            found.append(examples)
        self._known.clear()
        return found

    def _texts(self, document: Document, record: SourceRecord) -> list[AnsweredText]:
        if isinstance(document, PlainText):
            return [AnsweredText(document.text, ((0, len(document.text)),))] if document.text.strip() else []
        try:
            return self.chat.texts(document)
        except UnusableTemplate as error:
            raise BadRecord(f"{record.where}: {error}") from error

    def _plain(self, text: str) -> Example:
        ids = self._ids(text)
        return Example([*self.prefix, *ids, self.eos_id], [False] * len(self.prefix) + [True] * (len(ids) + 1))

    def _answered(self, text: AnsweredText) -> Example:
        """Encode a rendered conversation up to the end of its last answer."""
        runs = self._runs(text.text[: text.borders[-1]], [0, *text.borders])  # context, target, context, target, …
        ids: list[int] = []
        learned: list[bool] = []
        for number, run in enumerate(runs):
            is_answer, is_last = number % 2 == 1, number == len(runs) - 1
            if not is_answer:
                ids, learned = ids + run, learned + [False] * len(run)
                continue
            # An answer ends with its last end token; the model never writes the template text after it.
            end = max((place + 1 for place, id in enumerate(run) if id in self.end_ids), default=None)
            if is_last:
                run = [*run, self.eos_id] if end is None else run[:end]
            ids, learned = ids + run, learned + [end is None or place < end for place in range(len(run))]
        return Example(ids, learned)

    def _runs(self, text: str, borders: Sequence[int]) -> list[list[int]]:
        """Return the ids between consecutive `borders`, which start at 0 and end with the text. The text is encoded
        whole. Only if a token would cross a border is it encoded in two parts, as at inference, where the prompt ends
        at the border."""
        runs, base, done = [], 0, 0
        rest = self._ids(text)  # encodes text[base:]; its first `done` ids are already returned
        for start, end in pairwise(borders):
            head = rest if end == len(text) else self._ids_behind(text[base:end]) if base else self._ids(text[:end])
            fits = head[:done] == rest[:done]
            runs.append(head[done:] if fits else self._ids_behind(text[start:end]))
            if fits and head == rest[: len(head)]:
                done = len(head)
            else:
                base, done, rest = end, 0, self._ids_behind(text[end:])
        return runs

    def _encode(self, texts: Iterable[str]) -> None:
        wanted = list(dict.fromkeys(texts))
        if wanted:
            without = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
            encoded = self.tokenizer(wanted, verbose=False, **without)
            self._known.update(zip(wanted, encoded["input_ids"], strict=True))

    def _ids(self, text: str) -> list[int]:
        if text not in self._known:
            self._encode([text])
        return self._known[text]

    def _ids_behind(self, text: str) -> list[int]:
        """Encode text that follows other text: some tokenizers put a space before the very first word."""
        for guard in ("\n", self.tokenizer.eos_token):
            before, both = self._ids(guard), self._ids(guard + text)
            if both[: len(before)] == before:
                return both[len(before) :]
        return self._ids(text)


def pad_id(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """Return the padding id: the tokenizer's own, else its EOS. Padding is neither seen nor learned."""
    for id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if id is not None and 0 <= id < vocab_size:
            return int(id)
    raise UnusableTokenizer(
        f"The tokenizer has padding {tokenizer.pad_token_id} and EOS {tokenizer.eos_token_id}; neither is one of the "
        f"{vocab_size} ids of the model. Use the tokenizer that belongs to the model."
    )


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
    same for every tokenizer, order and run (of few records at least one; of one long text, or its copies, the end).
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
                found.append((hash_of(document.content), admitted))
    examples, held_out = parted(found, held_out_share)
    report.num_examples, report.num_held_out = len(examples), len(held_out)
    report.num_tokens = sum(len(example.ids) for example in examples)
    report.num_learned = sum(example.num_learned for example in examples)
    _check(source, report, held_out_share, max_length)
    if not quiet:
        print(f"data: {report}", file=sys.stderr, flush=True)
    return LoadedExamples(examples, held_out, report)


def parted(found: Sequence[tuple[int, list[Example]]], share: float) -> tuple[list[Example], list[Example]]:
    """Split into training and held-out examples: held-out records have a digest in the lowest `share` of all digests;
    of few records the one with the lowest digest is held out. Copies of a record are held out together, or not at all
    where they are more than the share. Where all records are the same text, its end is held out; of a text of one
    example, nothing."""
    parts: tuple[list[Example], list[Example]] = ([], [])
    copies = Counter(digest for digest, _ in found)
    if len(copies) == 1 and share:
        for _, examples in found:
            border = len(examples) - math.ceil(share * len(examples)) if len(examples) > 1 else 1
            parts[0].extend(examples[:border])
            parts[1].extend(examples[border:])
        return parts
    most = max(min(copies.values(), default=1), share * len(found))
    few = [digest for digest, count in copies.items() if count <= most]
    bound = max(share * 2**64, min(few, default=0) + 1 if share else 0)
    for digest, examples in found:
        parts[digest < bound and copies[digest] <= most].extend(examples)
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
