"""Encodes documents to token ids and marks which ids are targets.

Only answers are learned, each with its end token; plain text is learned whole. The border between context
and target is where the prompt ends at inference: no token crosses it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from space_train.data.chat_text import AnsweredText, ChatText, own_prefix
from space_train.data.data_error import BadRecord, UnusableTemplate, UnusableTokenizer
from space_train.data.data_forms import Document, PlainText
from space_train.data.data_source import SourceRecord
from space_train.data.example import Example


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
        self.prefix = own_prefix(tokenizer)
        self._known: dict[str, list[int]] = {}

    def examples(self, documents: Sequence[tuple[SourceRecord, Document]]) -> list[list[Example]]:
        """Return the examples of each document, none if it has no targets. Large batches encode faster."""
        texts = [self._texts(document, record) for record, document in documents]
        self._encode(text.text[:border] for some in texts for text in some for border in text.borders)
        found = []
        for (record, document), some in zip(documents, texts, strict=True):
            examples = [
                self._plain(text.text) if isinstance(document, PlainText) else self._answered(text) for text in some
            ]
            for example in examples:
                self._check_vocabulary(example.ids, record)
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
        """Return the ids between consecutive `borders`, which start at 0 and end with the text.

        The text is encoded whole. Only if a token would cross a border is it encoded in two parts, as at inference,
        where the prompt ends at the border.
        """
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
        """Encode texts in one batch, for later look-ups."""
        wanted = list(dict.fromkeys(texts))
        if wanted:
            encoded = self.tokenizer(
                wanted,
                add_special_tokens=False,
                verbose=False,
                return_attention_mask=False,
                return_token_type_ids=False,
            )
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

    def _check_vocabulary(self, ids: Sequence[int], record: SourceRecord) -> None:
        if self.vocab_size is not None and max(ids) >= self.vocab_size:
            raise UnusableTokenizer(
                f"{record.where}: token {self.tokenizer.convert_ids_to_tokens(max(ids))!r} has id {max(ids)}, the "
                f"model only ids below {self.vocab_size}. Use the tokenizer that belongs to the model."
            )


def pad_id(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """Return the padding id: the tokenizer's own, else its EOS. Padding is neither seen nor learned."""
    for id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if id is not None and 0 <= id < vocab_size:
            return int(id)
    raise UnusableTokenizer(
        f"The tokenizer has padding {tokenizer.pad_token_id} and EOS {tokenizer.eos_token_id}; neither is one of the "
        f"{vocab_size} ids of the model. Use the tokenizer that belongs to the model."
    )
