"""Perplexity and bits per byte of a checkpoint on given texts, through the worker's own network and pages.

Long texts are read in overlapping windows, so that every token except the first few has at least `length - stride`
tokens of context, and each token counts once:

    window 0   [0 ................ L)             counts 1 .. L
    window 1           [s ................ s+L)   counts L .. s+L
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.space_model import SpaceModel

from space_eval.data import load_records
from space_eval.flags import RecordError

TEXT_FIELDS = (("text",), ("content",), ("document",), ("article",), ("code",))
_ROWS = 256  # per forward pass and logits matmul: 256 rows of a vocabulary of 128k are 131 MB of logits
_BLOCK = 16


@dataclass(frozen=True)
class TextScore:
    """A model's log-loss on a text."""

    nats: float  # -log p of the counted tokens
    num_tokens: int  # counted
    num_bytes: int  # UTF-8 bytes of the counted tokens

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte; comparable between any two models."""
        return self.nats / math.log(2) / self.num_bytes


@dataclass(frozen=True)
class Window:
    """A range of ids that is read from position 0, and the part that counts."""

    start: int
    first_counted: int  # absolute
    end: int


def windows(num_ids: int, length: int, stride: int) -> Iterator[Window]:
    """Yield windows of at most `length` ids, `stride` apart; every id except the first counts in exactly one."""
    if not 1 <= stride < length:
        raise ValueError(f"stride must lie in 1..{length - 1}, below the window; got {stride}.")
    start, counted = 0, 1
    while counted < num_ids:
        end = min(start + length, num_ids)
        yield Window(start, counted, end)
        counted, start = end, start + stride


class PerplexityMeter:
    """Scores texts with one model and its transformers tokenizer."""

    def __init__(self, model: SpaceModel, tokenizer: Any, *, length: int = 1024, stride: int | None = None) -> None:
        """`length`: most ids of a window, limited by the model's window; `stride`: default half a window."""
        self.length = min(length, model.facts.window)
        self.stride = self.length // 2 if stride is None else stride
        next(windows(2, self.length, self.stride))  # reject an invalid stride now
        self._model, self._tokenizer = model, tokenizer
        num_blocks = -(-self.length // _BLOCK)
        self._kv = model.allocate_kv(num_blocks, _BLOCK)
        self._pages = range(num_blocks)

    def score(self, text: str) -> TextScore:
        """Score the whole text after the tokenizer's BOS; without one, the first token is only context.

        A text without a counted token scores 0 nats, 0 tokens, 0 bytes.
        """
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids: list[int] = list(encoding["input_ids"])
        num_bytes = len(text.encode())
        begin = self._tokenizer.bos_token_id
        if begin is not None:
            ids = [begin, *ids]
        elif ids:
            num_bytes -= len(text[: encoding["offset_mapping"][0][1]].encode())
        if len(ids) < 2:
            return TextScore(0.0, 0, 0)
        return TextScore(self.nats(ids), len(ids) - 1, num_bytes)

    def nats(self, ids: Sequence[int]) -> float:
        """Return -log p of all ids but the first, which is only context."""
        return sum(self._nats(ids, window) for window in windows(len(ids), self.length, self.stride))

    def _nats(self, ids: Sequence[int], window: Window) -> float:
        total = 0.0
        for first in range(window.start, window.end, _ROWS):
            last = min(first + _ROWS, window.end)
            hidden = self._hidden(ids[first:last], first - window.start)
            # row r is position first+r and predicts the id after it
            rows = range(max(window.first_counted - 1 - first, 0), min(last, window.end - 1) - first)
            if len(rows) == 0:
                continue
            targets = torch.tensor(ids[first + rows.start + 1 : first + rows.stop + 1], device=hidden.device)
            logits = self._model.logits(hidden[rows.start : rows.stop])  # [rows, V] float32
            chosen = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])
            total -= float(chosen.double().sum())
        return total

    def _hidden(self, ids: Sequence[int], start: int) -> torch.Tensor:
        segment = Segment(ids=ids, start=start, pages=self._pages)
        device = self._model.facts.device
        batch = ForwardBatch.build([segment], block_size=_BLOCK, mask_ids=(), device=device)
        return self._model.forward(batch, self._kv)


def load_texts(source: str) -> dict[str, str]:
    """Return texts by name: the records of a JSONL file or hub data set, another file as one text, or the `.txt`, `.md`
    and `.py` files of a folder. Raises RecordError if there is none."""
    path = Path(source).expanduser()
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.suffix in {".txt", ".md", ".py"} and file.is_file()]
        if not files:
            raise RecordError(f"{source} has no .txt, .md or .py file. Give a folder that has, or a JSONL file.")
        return {str(file.relative_to(path)): _read(file) for file in files}
    if path.is_file() and path.suffix not in {".jsonl", ".json"}:
        return {path.name: _read(path)}
    records = load_records(source, needs=TEXT_FIELDS)
    fields = [next(name for (name,) in TEXT_FIELDS if isinstance(record.get(name), str)) for record in records]
    return {str(number): record[field] for number, (record, field) in enumerate(zip(records, fields, strict=True))}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{file} cannot be read as text: {error}.") from error
