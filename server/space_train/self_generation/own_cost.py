"""How many texts of its own a model writes for a run, how many at once, and what that and the training take."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch

from space_train.data.rows import MOST_OWN_ROUNDS
from space_train.estimate import ModelShape, estimate
from space_train.progress import duration
from space_train.train_plan import TrainPlan

DEFAULT_TEXTS, FEWEST_TEXTS, MOST_TEXTS = 2000, 64, 100_000
OWN_SHARE = 1 / 3
"""Share of a budget in minutes or operations that goes into writing the texts, if their number is not given."""
MOST_WRITING_SHARE, FEWEST_IN_TIME = 1 / 2, 8
"""Writing ends when this share of the minutes is used: a machine that other programs slow down trains on fewer texts.
The fewest texts that a budget in minutes asks for, since what it does not pay for is not written anyway."""

FEW_UPDATES = 4  # in the minutes of a run, below which it says how long one takes
WANTED_UPDATES = 8  # in the time for training; rows of an update are halved until it holds so many

PROMPT_IDS, TURN_IDS, FILLED = 90, 40, 0.75
"""Ids of a prompt and of a user's turn, and the share of an answer's most ids that is written: means of SmolLM2."""

DECODING_RATE, TRAINING_RATE = {"cpu": 0.3, "cuda": 0.1}, {"cpu": 0.4, "cuda": 0.4}
"""Operations per second of decoding and of training, as a share of those of a large matrix product; on a CPU measured
with SmolLM2."""

AT_ONCE = {"cpu": 64, "cuda": 1024}
"""Texts from which more at once are not faster: on a CPU, measured with SmolLM2, 256 took longer than 64."""
MEMORY_SHARE = {"cpu": 0.4, "cuda": 0.8}  # of the free memory, for weights, keys and values
DRAFTS_BELOW = 16  # texts at once below which drafts are worth their rows


@dataclass(frozen=True)
class OwnCost:
    """What `count` texts of at most `max_tokens` ids cost on this device."""

    shape: ModelShape | None  # None: a model that is not estimated
    max_tokens: int
    device: str  # cpu or cuda
    product_rate: float  # operations per second of a large matrix product
    has_user_turns: bool

    @classmethod
    def here(cls, shape: ModelShape | None, plan: TrainPlan, max_tokens: int, *, cpu: bool, chat: bool) -> OwnCost:
        device = "cpu" if cpu else "cuda"
        rate = 0.0 if shape is None else measured_rate(shape, device, is_half=plan.precision == "bf16")
        return cls(shape, max_tokens, device, rate, chat)

    @property
    def seconds_per_text(self) -> float | None:
        """Seconds of a text with its prompt, at full concurrency."""
        if self.shape is None:
            return None
        rows = PROMPT_IDS + FILLED * self.max_tokens + TURN_IDS / 2 * self.has_user_turns
        return rows * 2 * self.shape.num_parameters / (self.product_rate * DECODING_RATE[self.device])

    def default_count(self, plan: TrainPlan) -> int:
        """Return how many texts to write within the budget of `plan`: OWN_SHARE of its minutes or operations, and no
        more than its updates read MOST_OWN_ROUNDS times."""
        budget, ids = plan.budget, PROMPT_IDS + FILLED * self.max_tokens
        limits, in_time = list[float](), math.inf
        if budget.minutes is not None and self.seconds_per_text is not None:
            in_time = max(FEWEST_IN_TIME, OWN_SHARE * 60 * budget.minutes / self.seconds_per_text)
        if budget.flops is not None and self.shape is not None:
            limits.append(OWN_SHARE * budget.flops / (ids * 2 * self.shape.num_parameters))
        for tokens in (budget.tokens, budget.steps and budget.steps * plan.rows_per_step * plan.length):
            if tokens is not None:
                limits.append(tokens / (ids * MOST_OWN_ROUNDS))
        if not limits and in_time == math.inf:
            return DEFAULT_TEXTS
        return int(min(in_time, max(FEWEST_TEXTS, min([*limits, MOST_TEXTS]))))

    def training_seconds(self, plan: TrainPlan, count: int) -> float | None:
        """Return the seconds of the updates of `plan` on `count` texts, without limits in minutes."""
        if self.shape is None:
            return None
        budget, ids = plan.budget, count * (PROMPT_IDS + FILLED * self.max_tokens)
        found = estimate(self.shape, plan, cpu=self.device == "cpu")
        per_token = found.flops_per_token + found.recomputed
        limits = [
            budget.tokens,
            budget.steps and budget.steps * plan.rows_per_step * plan.length,
            budget.epochs and budget.epochs * ids,
            budget.flops and budget.flops / per_token,
        ]
        tokens = min((limit for limit in limits if limit is not None), default=math.inf)
        return tokens * per_token / self._training_rate

    def row_seconds(self, plan: TrainPlan) -> float | None:
        """Return the seconds that training on one row of `plan` takes."""
        if self.shape is None:
            return None
        found = estimate(self.shape, plan, cpu=self.device == "cpu")
        return plan.length * (found.flops_per_token + found.recomputed) / self._training_rate

    def with_rows_in_time(self, plan: TrainPlan, writing_share: float) -> TrainPlan:
        """Return the plan with so few rows per update that its minutes hold WANTED_UPDATES, or one. `writing_share`: of
        the minutes, for own texts."""
        one, rows = self.row_seconds(plan), plan.rows_per_step
        if one is None or plan.budget.minutes is None:
            return plan
        seconds = (1 - writing_share) * 60 * plan.budget.minutes
        while rows % (2 * plan.accumulate) == 0 and WANTED_UPDATES * rows * one > seconds:
            rows //= 2
        return replace(plan, rows_per_step=rows)

    def describe_slow_updates(self, plan: TrainPlan) -> str | None:
        """Return a line where the minutes of `plan` hold fewer than FEW_UPDATES updates, with the cure; else None."""
        one, minutes = self.row_seconds(plan), plan.budget.minutes
        if one is None or minutes is None or FEW_UPDATES * plan.rows_per_step * one <= 60 * minutes:
            return None
        rows = f"{plan.rows_per_step} {'row' if plan.rows_per_step == 1 else 'rows'}"
        cure = "A lower --length" if plan.rows_per_step == 1 else "A lower --rows-per-step or --length"
        return (
            f"time: an update of {rows} of {plan.length:,} ids takes about {duration(plan.rows_per_step * one)} here, "
            f"so that --minutes {minutes:g} hold few of them. {cure} gives more."
        )

    @property
    def _training_rate(self) -> float:
        return self.product_rate * TRAINING_RATE[self.device]

    def describe(self, plan: TrainPlan, count: int) -> str:
        """Return a line on the time that the texts and the training take."""
        line = f"estimate: {count:,} texts of up to {self.max_tokens} ids"
        one, training = self.seconds_per_text, self.training_seconds(plan, count)
        if one is None or training is None:
            return f"{line}; this kind of model is not estimated"
        writing, minutes = count * one, plan.budget.minutes
        if minutes is None:
            return f"{line} take about {duration(writing)}, training on them {duration(training)}"
        most = MOST_WRITING_SHARE * 60 * minutes
        if writing > most:
            training = min(training, 60 * minutes - most)
            return (
                f"{line} would take about {duration(writing)}. Writing ends at half of --minutes, after "
                f"{duration(most)}; training takes {duration(training)}"
            )
        training = min(training, 60 * minutes - writing)
        return f"{line} take about {duration(writing)}, training on them {duration(training)}"

    def worker_settings(self, count: int, longest: int, free_bytes: int) -> dict[str, object]:
        """Return the settings of a worker that writes `count` texts, of at most `longest` ids with their prompts: as
        many at once as the device computes at full speed and its free memory holds."""
        most = min(AT_ONCE[self.device], count)
        settings: dict[str, object] = {"max_model_len": longest}
        if self.shape is not None:
            text = longest * 4 * self.shape.num_kv_heads * self.shape.head_dim * self.shape.num_layers
            room = MEMORY_SHARE[self.device] * free_bytes - 2 * self.shape.num_parameters
            most = min(most, max(1, int(room // text)))
            if self.device == "cpu":  # on a GPU a worker takes what is free
                settings["kv_memory"] = text * (most + 1)
        settings["max_sequences"] = most
        if most >= min(DRAFTS_BELOW, count):  # few texts end before a calibration has paid
            settings |= {"speculation": "off", "calibration_seconds": 0}
        return settings


PROBE_ROWS, PROBE_SECONDS = 512, 0.3


def measured_rate(shape: ModelShape, device: str, *, is_half: bool) -> float:
    """Measure the operations per second of a product of the model's size: the best of many, and on a CPU of one thread
    at a time, because other programs disturb most of them."""
    dtype = torch.bfloat16 if is_half else torch.float32
    rows = torch.ones(PROBE_ROWS, shape.hidden_size, dtype=dtype, device=device)
    weight = torch.ones(shape.hidden_size, shape.intermediate_size, dtype=dtype, device=device)
    num_threads = torch.get_num_threads() if device == "cpu" else 1
    best, begun = math.inf, time.perf_counter()
    try:
        if device == "cpu":
            torch.set_num_threads(1)
        while best == math.inf or time.perf_counter() - begun < PROBE_SECONDS:
            started = time.perf_counter()
            (rows @ weight)[0, 0].item()  # waits for a GPU
            best = min(best, time.perf_counter() - started)
    finally:
        if device == "cpu":
            torch.set_num_threads(num_threads)
    return 2.0 * PROBE_ROWS * weight.numel() * num_threads / best
