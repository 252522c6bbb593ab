"""The recipes that are compared, and in which part of the comparison: each is the reference with something switched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from space_train.train_plan import Anchors, HeadForm, Method, TrainPlan, paper

PARTS = ("sweep", "main", "levers", "balance", "cost")
SWEPT = ("paper", "full", "gated-lora")
"""Kinds of recipe with a learning rate of their own."""

PAPER, REFERENCE = "paper", "full + head"
"""What ratios are to, and what levers are switched from."""

RESCORING, RESCORED = "ids rescored", (64, 256, 0)
"""The reference, decoded with so many ids of each mask rescored; 0: the whole vocabulary."""


@dataclass(frozen=True)
class Recipe:
    """A way to train. Budget and seed of the plan are those of a run."""

    name: str
    plan: TrainPlan
    own_texts: int = 0  # texts the base writes to learn from; writing them is part of the compute
    own_share: float = 0.5  # of the rows, where there are own texts
    head_after: float = 0.0  # share of the compute for a draft head alone, on the frozen result of the rest
    rescored: tuple[int, ...] = ()  # decoded again with a draft head that rescores so many ids of each mask

    def as_json(self) -> dict[str, object]:
        """Everything but the name: runs of the same content are one run."""
        return {
            "plan": self.plan.as_json(),
            "own_texts": self.own_texts,
            "own_share": self.own_share,
            "head_after": self.head_after,
            "rescored": list(self.rescored),
        }


@dataclass(frozen=True)
class Kitchen:
    """What all recipes have in common."""

    common: TrainPlan  # length, rows, masks, optimiser of ours, machine
    paper_rows: int  # rows of one update of the published recipe
    own_texts: int
    rates: Mapping[str, float]  # of each kind in SWEPT

    def published(self, *, rate: float | None = None) -> TrainPlan:
        """The paper's preset, with fresh cuts in every epoch and its own learning rate."""
        plan = replace(self.common, rows_per_step=self.paper_rows, weight_decay=0.0)
        return replace(paper(plan), fixed_cuts=False, learning_rate=rate or self.rates["paper"])

    def ours(self, method: Method, *, rate: float | None = None) -> TrainPlan:
        """Our defaults with a draft head."""
        return with_rate(replace(self.common, method=method), rate or self.rates[method.value])


def with_rate(plan: TrainPlan, rate: float) -> TrainPlan:
    """`rate` is Muon's, with a fifth of it for what AdamW moves beside it; or AdamW's own."""
    if plan.optimiser == "muon":
        return replace(plan, muon_rate=rate, learning_rate=rate / 5)
    return replace(plan, learning_rate=rate)


def sweep(kitchen: Kitchen, kind: str, rates: Sequence[float]) -> list[Recipe]:
    """One recipe for each learning rate."""
    found = []
    for rate in rates:
        plan = kitchen.published(rate=rate) if kind == "paper" else kitchen.ours(Method(kind), rate=rate)
        found.append(Recipe(f"{kind}, rate {rate:g}", plan))
    return found


def start(kitchen: Kitchen) -> list[Recipe]:
    """The base with untrained masks: to be run without a budget."""
    methods = (Method.FULL, Method.GATED_LORA)
    return [Recipe(f"start, {m.value}", replace(kitchen.ours(m), head=HeadForm.NONE)) for m in methods]


def main_recipes(kitchen: Kitchen) -> list[Recipe]:
    """The paper's recipe and ours, each with and without the draft head."""
    published = kitchen.published()
    ours = with_rate(
        replace(published, optimiser=kitchen.common.optimiser, weight_decay=kitchen.common.weight_decay),
        kitchen.rates["full"],
    )
    bare = [
        Recipe(PAPER, published),
        Recipe("paper, cuts fixed", replace(published, fixed_cuts=True)),
        Recipe("paper, our optimiser", ours),
    ]
    found = [bare[0], _with_head(bare[0]), bare[1], *([bare[2]] if kitchen.common.optimiser != "adamw" else [])]
    for method in (Method.FULL, Method.GATED_LORA):
        plan = kitchen.ours(method)
        found.append(Recipe(method.value, replace(plan, head=HeadForm.NONE)))
        found.append(Recipe(f"{method.value} + head", plan))
    return found


def levers(kitchen: Kitchen) -> list[Recipe]:
    """The reference, then each lever alone switched."""
    plan = kitchen.ours(Method.FULL)
    switched = {
        "one anchor a text": {"anchors": Anchors.ONE, "pack": False, "rows_per_step": kitchen.paper_rows},
        "no distillation": {"distill": False},
        "no conditional drop": {"keep": 1.0},
        "survival weighting": {"survival": True},
        "scheduled drafting 0.5": {"scheduled_drafting": 0.5},
        "low-rank head": {"head": HeadForm.LOW_RANK},
        "head half as wide": {"head_hidden": max(1, plan.head_hidden // 2)},
        "head twice as wide": {"head_hidden": 2 * plan.head_hidden},
        "one mask id": {"shared_mask_id": True},
    }
    if plan.optimiser == "adamw":
        switched["muon for matrices"] = {"optimiser": "muon"}
    found = [Recipe(REFERENCE, plan)]
    found += [Recipe(name, replace(plan, **fields)) for name, fields in switched.items()]  # type: ignore[arg-type]
    found.append(Recipe("own text", plan, own_texts=kitchen.own_texts))
    found.append(Recipe("head trained afterwards", plan, head_after=0.3))
    found.append(Recipe(RESCORING, plan, rescored=RESCORED))
    return found


AR_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
MASK_WEIGHTS = (0.3, 1.0, 3.0)


def balance(kitchen: Kitchen) -> list[Recipe]:
    """The share of rows without masks, and the weight of the masks' loss against the ordinary one."""
    plan = kitchen.ours(Method.FULL)
    shares = [replace(plan, ar_share=share) for share in AR_SHARES]
    # The draft head's loss is a loss of masks: it moves with them.
    weights = [replace(plan, mask_loss_weight=weight, head_loss_weight=weight) for weight in MASK_WEIGHTS]
    named = [(f"ar-share {plan.ar_share:g}", plan) for plan in shares]
    named += [(f"mask weight {plan.mask_loss_weight:g}", plan) for plan in weights]
    return [Recipe(name, plan) for name, plan in named]


def cost(kitchen: Kitchen) -> list[Recipe]:
    """The methods, to be run at equal real tokens."""
    full = kitchen.ours(Method.FULL)
    return [
        Recipe("sft", replace(full, method=Method.SFT, head=HeadForm.NONE)),
        Recipe(PAPER, kitchen.published()),
        Recipe("full", full),
        Recipe("gated-lora", kitchen.ours(Method.GATED_LORA)),
    ]


def _with_head(recipe: Recipe) -> Recipe:
    return Recipe(f"{recipe.name} + head", replace(recipe.plan, head=HeadForm.MLP))
