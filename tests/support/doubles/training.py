"""Runs of a second, for tests: random texts, and every switch at its smallest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.space_model import SpaceModel
from space_train.data.examples import Example
from space_train.data.rows import MixedRows, PackedExamples, RowStream
from space_train.data.train_batch import Texts
from space_train.train_plan import Budget, HeadForm, Method, TrainPlan
from space_train.training.trainer import TrainResult, train
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

FIRST_ID, VOCABULARY = 16, 128  # random texts have ids from FIRST_ID on: none of the special ones of a tiny checkpoint

_BLOCK = 16


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(FIRST_ID, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def random_examples(count: int, shortest: int, longest: int) -> list[Example]:
    """Texts of several lengths, a quarter of each a prompt."""
    lengths = torch.randint(shortest, longest + 1, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    return [
        Example(random_ids(length, seed), [place >= length // 4 for place in range(length)])
        for seed, length in enumerate(lengths)
    ]


def tiny_plan(method: Method = Method.GATED_LORA, **changes: Any) -> TrainPlan:
    """A plan of three updates, in float32."""
    switches: dict[str, Any] = {
        "method": method, "budget": Budget(steps=3), "num_masks": 3, "length": 32, "rows_per_step": 4,
        "head": HeadForm.NONE if method is Method.SFT else HeadForm.MLP, "head_hidden": 16, "lora_rank": 4,
        "learning_rate": 1e-2, "precision": "no", "evaluations": 1,
    }  # fmt: skip
    return TrainPlan(**switches | changes)


def rows_for(plan: TrainPlan, examples: list[Example] | None = None) -> MixedRows:
    """Texts, as rows of the plan."""
    if examples is None:
        examples = random_examples(12, plan.length // 2, plan.length)
    data = PackedExamples(examples, length=plan.length, seed=plan.seed, pad_id=0, pack=plan.pack)
    return MixedRows([RowStream(data, 1.0)], plan.seed)


def read_model(folder: Path, attention: str | None = None) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    )
    return model.eval()


def decoder_rows(model: SpaceModel, prefix: list[int], num_masks: int, adapter: int | None = None) -> Tensor:
    """Hidden rows of one decoding step of the server: those of `prefix`, then those of group 0 behind it."""
    pages = list(range(len(prefix) // _BLOCK + 1))
    batch = ForwardBatch.build(
        [Segment(prefix, 0, pages, DraftLayout(0, (num_masks,)), adapter)],
        block_size=_BLOCK,
        mask_ids=model.facts.mask_ids,
        adapter_masks=[facts.num_masks for facts in model.facts.adapters],
    )
    return model.forward(batch, model.allocate_kv(len(pages), _BLOCK))[: len(prefix) + num_masks]


TOKENIZER_SIZE = 100  # ids from there on mean nothing to the tokenizer of a tiny checkpoint


def held_out(plan: TrainPlan) -> Texts:
    """Two rows that training does not see."""
    rows = rows_for(plan, random_examples(5, 20, 32)).rows(0, 2)
    return Texts(rows.ids, rows.learned, rows.document, torch.ones(2, dtype=torch.bool))


def run(source: Path, plan: TrainPlan, out: Path, **keywords: Any) -> TrainResult:
    given: dict[str, Any] = {"tokenizer_size": TOKENIZER_SIZE, "held_out": held_out(plan), "progress": False}
    data = keywords.pop("data", None) or rows_for(plan)
    return train(read_model(source), source, data, plan, out, **given | keywords)
