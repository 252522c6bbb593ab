"""The paper's published Table 1, and the options of its evaluation script beside ours."""

from __future__ import annotations

import re
from dataclasses import dataclass

from space_train.training.published_options import PublishedOption

# tokens per step / speed-up; greedy, batch 1, k=5 (arXiv 2402.11809, Table 1)
_TABLE_1 = """\
model        | family   | xsum        | human_eval  | cip
ChatGLM-3-6B | chatglm  | 2.04 / 1.48 | 3.34 / 2.73 | 1.80 / 1.50
LLaMA-2-7B   | llama-2  | 2.23 / 1.94 | 3.54 / 3.18 | 1.85 / 1.71
LLaMA-2-13B  | llama-2  | 2.36 / 2.10 | 3.76 / 3.44 | 1.99 / 1.81
Qwen-14B     | qwen     | 2.15 / 1.94 | 3.51 / 3.18 | 1.85 / 1.70
InternLM-20B | internlm | 2.15 / 1.96 | 3.31 / 3.19 | 1.80 / 1.64
Falcon-40B   | falcon   | 2.17 / 2.01 | 3.58 / 3.61 | 1.96 / 2.03
LLaMA-2-70B  | llama-2  | 2.54 / 2.35 | 4.32 / 4.01 | 2.09 / 1.91
"""

FOR_SCALE = "LLaMA-2-7B"
"""Reference for models of families not in the paper."""


@dataclass(frozen=True)
class PublishedFigure:
    """One cell of the table."""

    tokens_per_step: float
    speedup: float  # over plain decoding


@dataclass(frozen=True)
class PublishedModel:
    """One row of the table."""

    name: str
    family: str
    figures: dict[str, PublishedFigure]  # by task

    @property
    def billions(self) -> str:
        """The size in the name: 7B."""
        return self.name.rpartition("-")[2]


def _parse(table: str) -> dict[str, PublishedModel]:
    head, *lines = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    models = {}
    for name, family, *cells in lines:
        pairs = [tuple(float(number) for number in cell.split("/")) for cell in cells]
        figures = {task: PublishedFigure(*pair) for task, pair in zip(head[2:], pairs, strict=True)}
        models[name] = PublishedModel(name, family, figures)
    return models


PUBLISHED = _parse(_TABLE_1)
"""Published rows by model name."""


def published_for(family: str, model_name: str) -> PublishedModel:
    """Return the family's row of the size in `model_name` (such as 13b), else of its smallest size.

    A family that the paper has not measured gets LLaMA-2-7B as a rough reference.
    """
    rows = [row for row in PUBLISHED.values() if row.family == family.removesuffix("-chat")]
    sizes = {size.upper() for size in re.findall(r"\d+b(?![a-z])", model_name.lower())}
    for row in rows:
        if row.billions in sizes:
            return row
    return rows[0] if rows else PUBLISHED[FOR_SCALE]


EVALUATION_OPTIONS = (
    PublishedOption("--llm_dir DIR", "--model DIR", "reports went into DIR; ours go into --out"),
    PublishedOption("--dataset NAME", "--tasks NAME[,NAME...]", "xsum, human_eval, cip; mt-bench is mt_bench"),
    PublishedOption("--model_type NAME", "--family NAME", "llama is llama-2 (Vicuna too), llama-2-chat, qwen, chatglm"),
    PublishedOption("--mask_id N", "--mask-ids N", "only for checkpoints whose config.json does not say it"),
    PublishedOption("--mask_num N", "--num-masks N, --k N", "how many masks the model has; how many are used"),
    PublishedOption("--mask_diff true", "--mask-ids N N+1 ...", "one id per mask; one id alone is shared by all"),
    PublishedOption("--do_sample true", "--temperature 1", "theirs is not exact when sampling; ours always is"),
    PublishedOption("--use_cache BOOL", "(always on)", "theirs computes the prompt again each step without it"),
    PublishedOption("--save_data true", "(always)", "OUT/answers.jsonl: ids, text, steps and seconds of every prompt"),
    PublishedOption("--assist_generation", "spaceserve eval speed --against assisted:DRAFT", "transformers' own loop"),
)
"""Options of tests/eval_infer.py in the paper's repository."""
