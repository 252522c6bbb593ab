"""The paper's SAR-SFT as a data collator: an unmodified `transformers.Trainer` then trains a SPACE model.

    from space_train.data.paper_collator import PaperCollator
    collator = PaperCollator(mask_ids=32002, pad_id=tokenizer.pad_token_id)
    Trainer(model, arguments, train_dataset=[example.feature() for example in examples], data_collator=collator).train()

With probability `sar_share` a sample is cut at a random place s of an answer, and k mask tokens follow (SPACE §4;
arXiv 2402.11809, §3.2). Text y_0 .. y_9, learned from y_4 on, cut at s=5, k=2:

    position       0    1    2    3    4    5    6    7
    input          y0   y1   y2   y3   y4   M1   M2   .        . is padding: it only holds the last label
    label          -    -    -    -    y4   y5   y6   y7       transformers: the row before a label learns it

So the root y4 learns the bonus y5 as usual, and mask j, in the place of y_{s+j-1}, learns y_{s+j}: group 0 of a
decoding step whose root is y_{s-1}. Masks come last, so ordinary causal attention is all they need.

The published loader puts one more mask in the place of the padding, which has no target: the loss is the same. In a
conversation it draws once per answer and cuts the first one selected; here one draw per sample is made, and
any answer may be cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from space_model.geometry.draft_layout import DraftLayout
from torch import Tensor
from transformers import TrainerCallback

from space_train.data.examples import NOT_LEARNED, Example

_UNKNOWN_EPOCH = -1


@dataclass(frozen=True)
class PaperSample:
    """One sample before padding to the length of its batch."""

    inputs: list[int]
    labels: list[int]  # as long as `inputs`, or one longer: the last mask's label has no input of its own


class PaperCollator(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Collates samples {"input_ids", "labels"} (or `Example`s) into a batch; some are cut and followed by masks.

    mask_ids:  one id that all masks share (as published), or one for each of the masks.
    pad_id:    pads a batch; never seen, never learned.
    num_masks: k, the masks after a cut; a text is cut only where k+1 ids of one answer follow.
    sar_share: the probability that a sample is cut.
    fixed:     True: a sample is cut at the same place in every epoch, as published. False: a new draw each epoch, which
               needs the epoch from the Trainer: pass the collator twice, `data_collator=c, callbacks=[c]`.
    seed:      draws depend only on it, the sample's ids and the epoch: not on order, batch, rank or worker.

    Samples come unpadded; `labels` are `input_ids` with -100 where nothing is learned (absent: all is learned). The
    batch has input_ids, attention_mask and labels, [B, longest], padded on the right.
    """

    def __init__(
        self,
        *,
        mask_ids: int | Sequence[int],
        pad_id: int,
        num_masks: int = 5,
        sar_share: float = 0.5,
        seed: int = 0,
        fixed: bool = True,
        multiple_of: int = 1,
    ) -> None:
        if num_masks < 1:
            raise ValueError(f"num_masks must be at least 1; got {num_masks}.")
        ids = [mask_ids] if isinstance(mask_ids, int) else list(mask_ids)
        if len(ids) not in (1, num_masks):
            raise ValueError(f"{num_masks} masks need one shared id, or {num_masks} ids; got {len(ids)}: {ids}.")
        if pad_id is None or min(*ids, pad_id) < 0:
            raise ValueError(f"Ids must be 0 or more; got {mask_ids=}, {pad_id=}.")
        if not 0 <= sar_share <= 1:
            raise ValueError(f"sar_share is a chance, from 0 to 1; got {sar_share}.")
        if seed < 0 or multiple_of < 1:
            raise ValueError(f"seed must be 0 or more and multiple_of 1 or more; got {seed=}, {multiple_of=}.")
        self.mask_ids = ids * num_masks if len(ids) == 1 else ids
        self.pad_id, self.num_masks, self.sar_share = pad_id, num_masks, sar_share
        self.seed, self.fixed, self.multiple_of = seed, fixed, multiple_of
        # In shared memory, so that data-loader workers that outlive an epoch see the next one.
        self._epoch = torch.tensor([0 if fixed else _UNKNOWN_EPOCH])
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0, whose cuts are drawn. (No effect with `fixed`.)"""
        if epoch < 0:
            raise ValueError(f"Epochs are numbered from 0; got {epoch}.")
        self._epoch.fill_(0 if self.fixed else epoch)

    def on_init_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        """Trainer callback: from here on the Trainer reports each epoch."""
        self.set_epoch(0)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: object) -> None:
        """Trainer callback: an epoch begins or is resumed."""
        self.set_epoch(int(state.epoch or 0))

    def __call__(self, features: Sequence[Mapping[str, Any] | Example]) -> dict[str, Tensor]:
        """Return the batch."""
        samples = [self.sample(_example(feature)) for feature in features]
        longest = max(len(sample.labels) for sample in samples)
        shape = (len(samples), -(-longest // self.multiple_of) * self.multiple_of)
        input_ids, labels = torch.full(shape, self.pad_id), torch.full(shape, NOT_LEARNED)
        attention_mask = torch.zeros(shape, dtype=torch.long)
        for row, sample in enumerate(samples):
            input_ids[row, : len(sample.inputs)] = torch.tensor(sample.inputs)
            attention_mask[row, : len(sample.inputs)] = 1
            labels[row, : len(sample.labels)] = torch.tensor(sample.labels)
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}

    def sample(self, example: Example) -> PaperSample:
        """Return one sample, cut if it is drawn."""
        place = next((place for place, id in enumerate(example.ids) if id in self.mask_ids), None)
        if place is not None:
            raise ValueError(
                f"A sample has the mask id {example.ids[place]} at place {place}: a mask is no text. Choose mask ids "
                "that no text has, or leave such samples out (`read_examples(..., mask_ids=...)`)."
            )
        cut = self.cut_of(example)
        return whole(example) if cut is None else cut_at(example, cut, self.mask_ids)

    def cut_of(self, example: Example) -> int | None:
        """Return where this epoch cuts the sample, or None if it stays whole."""
        epoch = int(self._epoch)
        if epoch == _UNKNOWN_EPOCH:
            raise RuntimeError(
                "Fresh cuts need to know the epoch: give the collator to the Trainer as a callback too "
                "(callbacks=[collator]), call set_epoch, or draw once with fixed=True."
            )
        content = np.asarray([*example.ids, *example.learned], dtype=np.int64).tobytes()
        sample = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
        rng = np.random.default_rng([self.seed, epoch, sample])
        if rng.random() >= self.sar_share:
            return None
        places = cut_places(example, self.num_masks)
        return places[int(rng.integers(len(places)))] if places else None


def cut_places(example: Example, num_masks: int) -> list[int]:
    """Return every possible cut s: y_s and the targets of all masks, y_{s+1} .. y_{s+k}, are in one answer."""
    places, run = [], 0  # run: learned ids in a row, up to here
    for place, learned in enumerate(example.learned):
        run = run + 1 if learned else 0
        if run > num_masks and place > num_masks:
            places.append(place - num_masks)
    return places


def whole(example: Example) -> PaperSample:
    """Return the uncut sample. Its first id has no predecessor, so it is not learned."""
    labels = [id if learned else NOT_LEARNED for id, learned in zip(example.ids, example.learned, strict=True)]
    return PaperSample(example.ids, [NOT_LEARNED, *labels[1:]])


def cut_at(example: Example, cut: int, mask_ids: Sequence[int]) -> PaperSample:
    """Return the sample up to y_{s-1}, s = `cut`, and group 0 of the decoding step with that root."""
    positions = DraftLayout(0, (len(mask_ids),)).mask_positions(cut - 1)
    end = positions[-1] + 1
    inputs = [*example.ids[:cut], *([0] * len(positions))]
    labels = whole(example).labels[: cut + 1] + [NOT_LEARNED] * (end - cut)
    for position, mask_id in zip(positions, mask_ids, strict=True):
        inputs[position] = mask_id
        labels[position + 1] = example.ids[position + 1]  # a row learns the id after its own position
    return PaperSample(inputs, labels)


def _example(feature: Mapping[str, Any] | Example) -> Example:
    """Return the sample as a validated example."""
    if isinstance(feature, Example):
        ids, learned = feature.ids, feature.learned
    else:
        if "input_ids" not in feature:
            raise ValueError(f"A sample needs input_ids; this one has {', '.join(feature) or 'nothing'}.")
        ids = _ints(feature["input_ids"])
        labels = _ints(feature["labels"]) if feature.get("labels") is not None else ids
        if len(labels) != len(ids):
            raise ValueError(f"A sample has {len(ids)} input_ids and {len(labels)} labels; they must be as many.")
        if any(label not in (NOT_LEARNED, id) for id, label in zip(ids, labels, strict=True)):
            raise ValueError(
                "A sample's labels must be its input_ids, or -100 where nothing is learned; the model shifts them."
            )
        if feature.get("attention_mask") is not None and not all(_ints(feature["attention_mask"])):
            raise ValueError("A sample is padded already (attention_mask has a 0): give it unpadded.")
        learned = [label != NOT_LEARNED for label in labels]
    if not ids:
        raise ValueError("A sample is empty: leave out samples without ids.")
    return Example(ids, learned)


def _ints(values: Any) -> list[int]:
    """Convert a list, tensor or array to a list."""
    return list(values.tolist() if hasattr(values, "tolist") else values)
