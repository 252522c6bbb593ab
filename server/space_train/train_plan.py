"""Every switch of one SAR-SFT run, in units, with its default and its reason; its budget and its learning rate."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from space_model.geometry.draft_layout import MOST_HEAD_DRAFTS


@dataclass(frozen=True)
class Budget:
    """Limits of a run, which ends when the first of them is reached."""

    minutes: float | None = None  # of work: time between a kill and a restart does not count
    tokens: int | None = None  # real tokens read, masks not counted
    steps: int | None = None  # updates
    epochs: float | None = None  # rounds through the data
    flops: float | None = None  # of the model, over all rows

    def __post_init__(self) -> None:
        given = [value for value in asdict(self).values() if value is not None]
        if not given:
            raise ValueError("A run needs a budget: give minutes, tokens, steps, epochs or flops.")
        if not all(0 <= value < math.inf for value in given):
            raise ValueError(f"A budget is 0 or more, and finite; got {', '.join(f'{value:g}' for value in given)}.")

    def progress(
        self, seconds: float, num_tokens: int, *, step: int = 0, epoch: float = 0.0, flops: float = 0.0
    ) -> float:
        """Return the share used, at most 1."""
        minutes = seconds / 60
        used = ((minutes, self.minutes), (num_tokens, self.tokens), (step, self.steps), (epoch, self.epochs))
        shares = [done / most if most else 1.0 for done, most in (*used, (flops, self.flops)) if most is not None]
        return min(1.0, max(shares))

    def as_json(self) -> dict[str, float]:
        """Return the limits that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class LearningRate:
    """A multiplier of the peak rate: linear warm-up over `warmup`, flat until `decay_from`, then linear to `final`.
    `cosine`: from the end of the warm-up on, half a cosine to `final` instead."""

    warmup: float = 0.02
    decay_from: float = 0.3
    final: float = 0.0
    cosine: bool = False

    def at(self, progress: float) -> float:
        if progress < self.warmup:
            # Never zero, so that the first step already learns.
            return max(progress / self.warmup, 0.02)
        if self.cosine:
            through = (progress - self.warmup) / (1.0 - self.warmup)
            return self.final + (1.0 - self.final) * (1.0 + math.cos(math.pi * through)) / 2
        if progress < self.decay_from:
            return 1.0
        return 1.0 - (1.0 - self.final) * (progress - self.decay_from) / (1.0 - self.decay_from)


def between(start: float, end: float, progress: float) -> float:
    """Interpolate linearly from `start` to `end`."""
    return start + (end - start) * progress


MOST_OWN_TOKENS = 256
"""Ids of a text that the model writes itself, unless a flag gives another number."""


class Method(StrEnum):
    """What is trained."""

    GATED_LORA = "gated-lora"  # adapters and mask embeddings that act on mask rows only; the base stays as it is
    FULL = "full"  # all weights, the ordinary loss kept
    SFT = "sft"  # all weights, the ordinary loss alone: the control
    HEAD = "head"  # draft heads alone: on masks that a model has already, or a recurrent one


class HeadForm(StrEnum):
    """The draft head (SPACE §4)."""

    MLP = "mlp"  # h + W2·silu(W1·[h ; s·e(previous)])
    LOW_RANK = "low-rank"  # h + W2·W1·(s·e(previous))
    NONE = "none"


class DraftObjective(StrEnum):
    """What masks and draft head learn from the model's own distribution p, with their own q."""

    CROSS_ENTROPY = "cross-entropy"  # -Σ p·log q
    ACCEPTANCE = "acceptance"  # 1 - Σ min(p, q), the chance that a sampled draft is rejected
    LOG_ACCEPTANCE = "log-acceptance"  # -log Σ min(p, q)
    EXPECTED = "expected"  # minus the expected accepted drafts of a group: Σ_j Π_{i≤j} Σ min(p_i, q_i)


class Anchors(StrEnum):
    """Which places of a text get masks."""

    MANY = "many"  # many places in one pass, behind a block mask
    ONE = "one"  # one cut a text, as published: what is behind it is not read


class InvalidPlan(ValueError):
    """Switches that do not go together; the message says which and what to give instead."""


class OwnTextError(Exception):
    """Own texts cannot be generated as requested; the message names the bound, the value and the cure."""


@dataclass(frozen=True)
class TrainPlan:
    """What a run does. Loss weights are factors of mean losses in nats; shares are of 1."""

    method: Method = Method.GATED_LORA
    budget: Budget = field(default_factory=lambda: Budget(epochs=2))  # as published
    num_masks: int = 5
    shared_mask_id: bool = False  # one id for all masks, as published; else one each, which learns faster
    # Rows
    length: int = 1024  # ids of one row
    rows_per_step: int = 8  # rows of one update, over all processes and accumulated parts
    accumulate: int = 1  # parts an update is computed in: less memory, same result
    pack: bool = True  # several short texts share a row
    anchors: Anchors = Anchors.MANY
    anchors_per_token: float = 0.375
    keep: float = 0.7  # share of the anchors that keep each next mask (PARD, arXiv 2504.18583); 1: all do
    least: float = 0.2  # share that keeps every mask
    fixed_cuts: bool = False  # the same places in every epoch, as published
    # Losses
    ar_share: float = 0.0  # share of rows without masks; the others keep the ordinary loss too
    mask_loss_weight: float = 1.0
    head_loss_weight: float = 1.0
    distill: bool = True  # learn the model's own distribution, not only the text's token
    loss: DraftObjective = DraftObjective.CROSS_ENTROPY  # with distill, over a frozen base
    focal: bool = False  # weigh a mask by the chance, by its own drafts, that those before it are accepted
    # Draft head
    head: HeadForm = HeadForm.MLP
    head_hidden: int = 384
    head_scale: float = 8.0
    # Recurrent head, which drafts without masks
    recurrent_head: int = 0  # its inner size; 0: none
    recurrent_drafts: int | None = None  # most drafts of a step; None: num_masks
    draft_vocab: int = 32768  # ids that it drafts: the most frequent ones of the texts
    recurrent_loss_weight: float = 1.0
    # Adapters
    lora_rank: int = 32
    lora_alpha: float = 32.0
    # Optimiser
    optimiser: str = "adamw"  # or muon: for the matrices, orthogonalised momentum (small models)
    learning_rate: float | None = None  # of AdamW; None: the method's own
    muon_rate: float = 0.01
    warmup: float = 0.03  # share of the budget
    decay_from: float = 0.2  # linear to 0 from here on
    cosine: bool = False  # instead, as published
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    # Machine
    seed: int = 0
    precision: str = "bf16"  # of products: bf16 or no (float32); weights and optimiser stay float32
    compile: bool = False
    activation_checkpointing: bool = False
    checkpoint_seconds: float = 300.0
    checkpoint_steps: int | None = None  # instead of by the clock
    evaluations: int = 10  # held-out figures this often, evenly over the budget

    def __post_init__(self) -> None:
        for name in ("ar_share", "keep", "least", "warmup", "decay_from"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidPlan(f"{name} is a share and lies in 0..1; got {getattr(self, name):g}.")
        sizes = ("num_masks", "length", "rows_per_step", "accumulate", "lora_rank", "head_hidden", "draft_vocab")
        for name in (*sizes, "num_recurrent_drafts"):
            if getattr(self, name) < 1:
                raise InvalidPlan(f"{name} must be at least 1; got {getattr(self, name)}.")
        for name in ("lora_alpha", "anchors_per_token", "head_scale", "muon_rate", "clip_norm", "peak_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidPlan(f"{name} must be above 0; got {getattr(self, name):g}.")
        weights = ("mask_loss_weight", "head_loss_weight", "recurrent_loss_weight", "weight_decay")
        for name in (*weights, "checkpoint_seconds", "evaluations", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidPlan(f"{name} must be 0 or more; got {getattr(self, name):g}.")
        if self.checkpoint_steps is not None and self.checkpoint_steps < 1:
            raise InvalidPlan(f"checkpoint_steps must be at least 1; got {self.checkpoint_steps}.")
        if self.rows_per_step % self.accumulate:
            raise InvalidPlan(f"rows_per_step ({self.rows_per_step}) must be a multiple of {self.accumulate} parts.")
        if self.length <= 2 * (self.num_masks + 1):
            raise InvalidPlan(f"Rows of {self.length} ids are too short for {self.num_masks} masks.")
        if self.method is Method.HEAD and self.head is HeadForm.NONE and not self.recurrent_head:
            raise InvalidPlan(
                "Method head trains the draft head alone: give it a form, mlp or low-rank, or give --recurrent-head."
            )
        self._check_recurrent_head()
        if self.activation_checkpointing and not self.trains_base:
            raise InvalidPlan("Activation checkpointing is for methods that train all weights, full and sft.")
        if self.method is Method.GATED_LORA and not self.mask_loss_weight and self.head is HeadForm.NONE:
            raise InvalidPlan("Nothing would be learnt: give mask_loss_weight, or a draft head.")
        if self.anchors is Anchors.ONE and self.pack:
            raise InvalidPlan("One cut a text needs rows of one text each: leave packing off.")
        other = self.focal or self.loss is not DraftObjective.CROSS_ENTROPY
        if other and (self.trains_base or not self.distill):
            raise InvalidPlan("--loss and --focal need the model's own distribution over a frozen base: gated-lora.")
        if self.focal and self.loss is DraftObjective.EXPECTED:
            raise InvalidPlan("--loss expected weighs each mask itself: leave --focal out.")
        if self.precision not in {"bf16", "no"}:
            raise InvalidPlan(f"precision is bf16 or no; got {self.precision!r}.")
        if self.optimiser not in {"adamw", "muon"}:
            raise InvalidPlan(f"The optimiser is adamw or muon; got {self.optimiser!r}.")

    def _check_recurrent_head(self) -> None:
        if self.recurrent_head < 0:
            raise InvalidPlan(f"recurrent_head must be 0 or more; got {self.recurrent_head}.")
        if not self.recurrent_head:
            return
        if self.trains_base:
            raise InvalidPlan(
                "A recurrent head learns over a base that stays as it is: train it with gated-lora, or afterwards by "
                "--method head --head none."
            )
        if self.anchors is Anchors.ONE:
            raise InvalidPlan("--anchors one cuts texts where masks stand: leave it out, or --recurrent-head.")
        if self.num_recurrent_drafts > MOST_HEAD_DRAFTS:
            raise InvalidPlan(
                f"A recurrent head makes at most {MOST_HEAD_DRAFTS} drafts; got {self.num_recurrent_drafts}."
            )
        if self.length <= 2 * (self.num_recurrent_drafts + 1):
            raise InvalidPlan(f"Rows of {self.length} ids are too short for {self.num_recurrent_drafts} drafts.")

    @property
    def has_masks(self) -> bool:
        """Whether mask rows are laid out at all."""
        if self.method is Method.HEAD:
            return self.head is not HeadForm.NONE
        return self.method is not Method.SFT

    @property
    def has_recurrent_head(self) -> bool:
        """Whether a recurrent head is trained."""
        return self.recurrent_head > 0

    @property
    def teaches_drafts(self) -> bool:
        """Whether rows teach masks or a recurrent head, besides what the ordinary loss learns."""
        return self.has_masks or self.has_recurrent_head

    @property
    def num_recurrent_drafts(self) -> int:
        """Most drafts of the recurrent head in a step."""
        return self.num_masks if self.recurrent_drafts is None else self.recurrent_drafts

    @property
    def trains_base(self) -> bool:
        """Whether the weights of the base move."""
        return self.method in {Method.FULL, Method.SFT}

    @property
    def has_head(self) -> bool:
        """Whether a draft head is trained."""
        return self.has_masks and self.head is not HeadForm.NONE

    @property
    def peak_rate(self) -> float:
        """AdamW's peak learning rate."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 5e-5 if self.trains_base else 1e-3

    def check_divides_among(self, num_processes: int) -> None:
        """Raises InvalidPlan where the processes' parts of an update would not be equal."""
        if self.rows_per_step % (self.accumulate * num_processes):
            raise InvalidPlan(
                f"rows_per_step ({self.rows_per_step}) must be a multiple of the {num_processes} processes times the "
                f"{self.accumulate} parts of an update."
            )

    def check_start_leaves_some(
        self, *, flops: float = 0.0, seconds: float = 0.0, startup_seconds: float = 0.0
    ) -> None:
        """Raises InvalidPlan where the budget was used up before the first update: by own texts (`flops` and `seconds`)
        and, of minutes, by `startup_seconds` of reading model and data."""
        minutes, starting = self.budget.minutes, startup_seconds / 60
        spent = (("minutes", seconds / 60, starting, minutes), ("flops", flops, 0.0, self.budget.flops))
        for name, own, start, most in spent:
            if most and own + start >= most:
                parts = (("Writing texts of its own", own), ("reading model and data", start))
                what = " and ".join(text for text, used in parts if used)
                kept = (
                    f"They are kept: the same command goes on from them with more --{name}, or with --restart and a "
                    "lower --self-generate or --own-data."
                )
                raise InvalidPlan(
                    f"{what[0].upper()}{what[1:]} took {own + start:.3g} of the {most:g} {name}, so nothing would be "
                    f"learnt. {kept if own else f'Give more --{name}.'}"
                )

    def as_json(self) -> dict[str, Any]:
        """Plain values, for `plan.json`."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        return found | {"budget": self.budget.as_json()}


PUBLISHED_SIZES: dict[str, Any] = {"length": 2048, "rows_per_step": 32, "warmup": 0.0}
"""Sizes of the published run: they are the machine's and the model's as much as the recipe's."""


def paper(plan: TrainPlan) -> TrainPlan:
    """The published recipe (arXiv 2402.11809): half of the texts are cut once, hard labels, one mask id, no head."""
    return replace(
        plan,
        method=Method.FULL,
        shared_mask_id=True,
        pack=False,
        anchors=Anchors.ONE,
        keep=1.0,
        fixed_cuts=True,
        ar_share=0.5,
        mask_loss_weight=1.0,
        distill=False,
        head=HeadForm.NONE,
        optimiser="adamw",
        cosine=True,
    )
