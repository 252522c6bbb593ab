"""Where a run's texts come from: records of --data, beside them texts that the model writes; or these alone."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.free_memory import FreeMemory
from transformers import PreTrainedTokenizerBase

from space_train.data.corpus import hash_of
from space_train.data.decontamination import EvaluationTexts
from space_train.data.examples import ChatText, Example, LoadedExamples, parted, read_examples
from space_train.data.records import NothingToLearn
from space_train.data.rows import PackedExamples, RowStream, with_own_texts
from space_train.estimate import shape_of
from space_train.run_folder import LEDGER, OWN_FILES, OWN_TEXT_FILE, holds_state
from space_train.self_generation.own_cost import MOST_WRITING_SHARE, OwnCost
from space_train.self_generation.own_data import USER_TOKENS, OwnData, OwnDataRecipe, kept_prompts
from space_train.self_generation.prompts import PromptMaker
from space_train.self_generation.self_generate import (
    TextWorker,
    forget_others,
    own_examples,
    prompts_of,
    write_own_texts,
)
from space_train.train_plan import MOST_OWN_TOKENS, Anchors, InvalidPlan, TrainPlan
from space_train.training.trainer import on_cpu


@dataclass(frozen=True)
class TextSettings:
    """The model, its tokenizer and the options of the command, as a source of texts needs them."""

    options: argparse.Namespace
    checkpoint: Checkpoint
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    pad_id: int
    is_main_process: bool
    plan: TrainPlan  # before the texts are known
    started: float  # when the command was given, on `time.monotonic`

    @property
    def out(self) -> Path:
        out: Path = self.options.out
        return out

    @property
    def max_tokens(self) -> int:
        """Most ids of a text that the model writes; where none are given, its prompt has as much room."""
        given: int | None = self.options.self_generate_tokens
        return min(MOST_OWN_TOKENS, self.plan.length // 2) if given is None else given

    @property
    def is_chat(self) -> bool:
        """Whether conversations have a template."""
        return bool(self.options.template or self.tokenizer.chat_template)

    @cached_property
    def cost(self) -> OwnCost:
        """What texts and updates cost here; this device is measured once."""
        return OwnCost.here(shape_of(self.checkpoint), self.plan, self.max_tokens, cpu=on_cpu(), chat=self.is_chat)

    def writing_ends(self, plan: TrainPlan, ledger: Ledger) -> float | None:
        """Return when the writing of texts ends, on `time.monotonic`; None: with the last of them."""
        minutes = plan.budget.minutes
        if minutes is None or holds_state(self.out):
            return None
        return self.started + MOST_WRITING_SHARE * 60 * minutes - ledger.read()["seconds"]

    @property
    def has_texts(self) -> bool:
        """Whether the folder holds the texts that a saved run was built from. They are not added to."""
        return holds_state(self.out) and (self.out / OWN_TEXT_FILE).exists()

    def longest_prompt(self, plan: TrainPlan) -> int:
        """Return the most ids of a prompt of such a text. Raises InvalidPlan where none is left."""
        most = plan.length - self.max_tokens
        if most < 1:
            raise InvalidPlan(f"--self-generate-tokens must be below --length, {plan.length}.")
        return most

    def packed(self, examples: Sequence[Example], plan: TrainPlan) -> PackedExamples:
        return packed(examples, plan, self.pad_id)

    def say(self, line: str) -> None:
        """Print a line, once for all processes."""
        if self.is_main_process:
            print(line, file=sys.stderr, flush=True)

    def decontaminated(self, evaluation: EvaluationTexts | None, examples: list[Example]) -> list[Example]:
        """Return the examples that share no words with an evaluation. Raises NothingToLearn if all do."""
        if evaluation is None:
            return examples
        kept = [e for e in examples if not evaluation.is_shared_by(str(self.tokenizer.decode(e.ids)))]
        self.say(f"decontaminate: {len(examples) - len(kept):,} of {len(examples):,} texts left out.")
        if examples and not kept:
            raise NothingToLearn("All texts share words with an evaluation of --decontaminate.")
        return kept


class TextSource(Protocol):
    """The texts of a run."""

    template: str | None
    """Jinja source of the chat template of its conversations; None: it has none."""
    num_written: int
    """Prompts that the model continues itself."""

    def fit(self, plan: TrainPlan) -> TrainPlan:
        """Return the plan with rows no longer than the texts fill."""

    def inputs(self) -> dict[str, Any]:
        """Return what a resumed run must share, by name."""

    def keeps(self) -> Sequence[str]:
        """Return the files in the run's folder that a new run may use."""

    def write(self, plan: TrainPlan) -> None:
        """Write the texts that are the model's own, and their cost. One process does it."""

    def streams(self, plan: TrainPlan) -> tuple[list[RowStream], list[Example]]:
        """Return the rows to train on, and the held-out examples."""


class DataTextSource:
    """Records of --data, and with --self-generate texts of the model that continue their prompts."""

    def __init__(
        self, settings: TextSettings, plan: TrainPlan, loaded: LoadedExamples, evaluation: EvaluationTexts | None
    ) -> None:
        self._settings, self._held_out, self._evaluation = settings, loaded.held_out, evaluation
        self.template = loaded.report.template if loaded.report.has_conversations else None
        self._examples, count = settings.decontaminated(evaluation, loaded.examples), settings.options.self_generate
        most = settings.longest_prompt(plan) if count else None
        self._prompts = prompts_of(self._examples, count, longest=most, seed=plan.seed) if count else []
        self._rows, self.num_written = settings.packed(self._examples, plan), len(self._prompts)

    @classmethod
    def read(
        cls, settings: TextSettings, plan: TrainPlan, mask_ids: Sequence[int], evaluation: EvaluationTexts | None
    ) -> DataTextSource:
        loaded = read_examples(
            settings.options.data,
            settings.tokenizer,
            split=settings.options.split,
            template=settings.options.template,
            limit=settings.options.limit,
            max_length=plan.length,
            held_out_share=settings.options.held_out_share,
            vocab_size=settings.vocab_size,
            end_ids=settings.checkpoint.eos_ids(settings.vocab_size),
            mask_ids=mask_ids,
            quiet=not settings.is_main_process,
        )
        return cls(settings, plan, loaded, evaluation)

    def fit(self, plan: TrainPlan) -> TrainPlan:
        num_own = sum(len(prompt) + self._settings.max_tokens for prompt in self._prompts)
        fitted = fitted_rows(plan, self._rows.longest, self._rows.most_places, num_own)
        if fitted.length != plan.length:
            self._rows = self._settings.packed(self._examples, fitted)
        return fitted

    def inputs(self) -> dict[str, Any]:
        found: dict[str, Any] = {"self_generate": self.num_written, "own_data": 0}
        if self._prompts:
            found |= {"self_generate_tokens": self._settings.max_tokens, "own_share": self._settings.options.own_share}
        return found | {"text of --data": self._rows.digest().hex()[:12]}

    def keeps(self) -> Sequence[str]:
        return (OWN_TEXT_FILE, LEDGER) if self._prompts else ()

    def write(self, plan: TrainPlan) -> None:
        if not self._prompts or self._settings.has_texts:
            return
        home, file, ledger = (
            self._settings.checkpoint.home,
            self._settings.out / OWN_TEXT_FILE,
            Ledger(self._settings.out / LEDGER),
        )
        if self._settings.options.restart:
            ledger.scale(forget_others(home, self._prompts, max_tokens=self._settings.max_tokens, file=file))
        until = self._settings.writing_ends(plan, ledger)
        begun = time.monotonic()
        written = write_own_texts(home, self._prompts, max_tokens=self._settings.max_tokens, file=file, until=until)
        ledger.add(written.counts.num_rows, time.monotonic() - begun)
        num_whole = sum(not text.is_unfinished for text in written.texts)
        if num_whole < len(self._prompts):
            self._settings.say(
                f"own texts: half of --minutes is used: {num_whole:,} of {len(self._prompts):,} are written and "
                f"{len(written.texts) - num_whole:,} are cut."
            )

    def streams(self, plan: TrainPlan) -> tuple[list[RowStream], list[Example]]:
        if not self._prompts:
            return [RowStream(self._rows, 1.0)], self._held_out
        own = self._settings.decontaminated(
            self._evaluation, own_examples(self._settings.out / OWN_TEXT_FILE, self._prompts)
        )
        return with_own_texts(
            self._rows, self._settings.packed(own, plan), self._settings.options.own_share
        ), self._held_out


class OwnTextSource:
    """Texts of the model alone, for --own-data. `count`: prompts, None: by the budget."""

    def __init__(
        self, settings: TextSettings, plan: TrainPlan, count: int | None, evaluation: EvaluationTexts | None
    ) -> None:
        if plan.trains_base:
            raise InvalidPlan(
                f"Method {plan.method} trains the model's own weights, which learn nothing from its own texts: give "
                "--data. --own-data is for gated-lora and head."
            )
        chat = ChatText(settings.tokenizer, settings.options.template) if settings.is_chat else None
        self.template = None if chat is None else chat.template
        digest = None if chat is None else hashlib.sha256(chat.template.encode()).hexdigest()[:12]
        longest = settings.longest_prompt(plan)
        recipe, maker = (
            OwnDataRecipe(plan.seed, longest, settings.max_tokens, digest),
            PromptMaker(settings.tokenizer, chat),
        )
        self._settings = settings
        prompts = kept_prompts(settings.out, recipe, count)
        if prompts is None:
            count = count or settings.cost.default_count(plan)
            prompts = maker.prompts(count, longest=longest, seed=plan.seed)
        end_ids = {*settings.checkpoint.eos_ids(settings.vocab_size), settings.tokenizer.eos_token_id}
        self._data = OwnData(settings.out, prompts, recipe, maker, end_ids, evaluation)
        self.num_written = len(prompts)

    def fit(self, plan: TrainPlan) -> TrainPlan:
        most = sum(len(prompt.ids) + USER_TOKENS + self._settings.max_tokens for prompt in self._data.prompts)
        return fitted_rows(plan, 0, 0, most)

    def inputs(self) -> dict[str, Any]:
        found = {"self_generate": 0, "own_data": self.num_written, "self_generate_tokens": self._settings.max_tokens}
        return found | {"text of --data": "none", "prompts": self._data.digest().hex()[:12]}

    def keeps(self) -> Sequence[str]:
        return OWN_FILES

    def write(self, plan: TrainPlan) -> None:
        if self._settings.has_texts:
            return
        self._settings.say(f"{self._settings.cost.describe(plan, self.num_written)}.")
        ledger = Ledger(self._settings.out / LEDGER)
        if self._settings.options.restart:
            ledger.scale(self._data.forget_others(self._settings.checkpoint))
        self._data.keep_prompts()
        longest = max(len(prompt.ids) for prompt in self._data.prompts) + USER_TOKENS + self._settings.max_tokens
        free = FreeMemory.on(torch.device("cpu" if on_cpu() else "cuda")).num_bytes
        settings = self._settings.cost.worker_settings(self.num_written, longest, free)
        until = self._settings.writing_ends(plan, ledger)
        begun, counted = time.monotonic(), 0.0
        with TextWorker(self._settings.checkpoint.home, **settings) as worker:
            for rows, seconds in self._data.write(worker, until):
                ledger.add(rows, seconds)
                counted += seconds
        ledger.add(0, max(0.0, time.monotonic() - begun - counted))  # of the worker's end

    def streams(self, plan: TrainPlan) -> tuple[list[RowStream], list[Example]]:
        found, line = self._data.examples()
        self._settings.say(f"{line}.")
        digests = [(hash_of(str(example.ids)), [example]) for example in found]
        examples, held_out = parted(digests, self._settings.options.held_out_share)
        return [RowStream(self._settings.packed(examples, plan), 1.0, teaches=False)], held_out


class Ledger:
    """The rows and seconds spent on writing texts, in a file of the run."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def read(self) -> dict[str, float]:
        """Return `rows` and `seconds`."""
        found: dict[str, float] = {"rows": 0, "seconds": 0.0}
        return json.loads(self._file.read_text()) if self._file.exists() else found

    def add(self, rows: float, seconds: float) -> None:
        before = self.read()
        self._file.write_text(json.dumps({"rows": before["rows"] + rows, "seconds": before["seconds"] + seconds}))

    def scale(self, share: float) -> None:
        """Count only a share of what was spent: of the texts that are kept."""
        self._file.write_text(json.dumps({name: share * value for name, value in self.read().items()}))


def packed(examples: Sequence[Example], plan: TrainPlan, fill: int) -> PackedExamples:
    """Pack examples into rows as the plan sets."""
    return PackedExamples(examples, length=plan.length, seed=plan.seed, pad_id=fill, pack=plan.pack)


def fitted_rows(plan: TrainPlan, longest: int, most_places: int, num_own: int) -> TrainPlan:
    """Return the plan with rows as long as the fullest one at most, and with no more anchors than any row has places:
    short data is not padded, and no mask is trained twice. `longest`, `most_places`: ids and places of the fullest row
    of data; `num_own`: ids of all own texts at most."""
    length = min(plan.length, max(longest, num_own, 2 * (plan.num_masks + 1) + 1))
    places = max(1, most_places, min(length, num_own))
    if plan.anchors is Anchors.MANY:
        plan = replace(plan, anchors_per_token=min(plan.anchors_per_token, places / length))
    return replace(plan, length=length)
