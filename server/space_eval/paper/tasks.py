"""What the paper asks of models: data sets, prompts by model family, and the published figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from space_eval.data import load_records
from space_eval.flags import RecordError

if TYPE_CHECKING:
    from space_eval.acceptance.generation import RenderChat

_CODE = (
    "Complete the following python code. Give the answer in a code block starts with '```python' and end with '``'\n"
)
_SUMMARY = "Document: {}\nBased on the previous text, provide a brief single summary:"


@dataclass(frozen=True)
class Question:
    """One prompt of a task, before a model family's format is applied."""

    name: str
    turns: tuple[str, ...]  # user messages, each followed by an answer
    plain_turns: tuple[str, ...]  # the same for a base model, which continues text and does not follow instructions
    category: str = ""
    reference: str = ""  # reference answer


@dataclass(frozen=True)
class PaperTask:
    """A set of questions."""

    name: str
    title: str
    hub_id: str  # for `datasets`, with :CONFIG and @SPLIT; "" if there is no reliable one
    read: Callable[[Mapping[str, Any], str], Question]  # (record, default name) -> question
    quality: str = ""  # metric: ROUGE-L, pass, exact match; "" for none


def _text(record: Mapping[str, Any], *fields: str) -> str:
    for field in fields:
        if isinstance(record.get(field), str):
            return str(record[field])
    raise KeyError(" or ".join(fields))


def _xsum(record: Mapping[str, Any], name: str) -> Question:
    asked = (_SUMMARY.format(_text(record, "document")),)
    return Question(str(record.get("id", name)), asked, asked, reference=_text(record, "summary"))


def _human_eval(record: Mapping[str, Any], name: str) -> Question:
    prompt = _text(record, "prompt")
    return Question(str(record.get("task_id", name)), (_CODE + prompt,), (prompt,))


def _cip(record: Mapping[str, Any], name: str) -> Question:
    asked = _text(record, "prompt", "instruction")
    if record.get("input"):
        asked = f"{asked}\n{record['input']}"
    return Question(str(record.get("id", name)), (asked,), (asked,))


def _turns(record: Mapping[str, Any], name: str) -> Question:
    turns = record.get("turns", record.get("prompt"))
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise KeyError("turns")
    name = str(record.get("question_id", record.get("prompt_id", name)))
    return Question(name, tuple(turns), tuple(turns), category=str(record.get("category", "")))


def _gsm8k(record: Mapping[str, Any], name: str) -> Question:
    asked = (_text(record, "question"),)
    return Question(name, asked, asked, reference=_text(record, "answer").rpartition("####")[2].strip())


TASKS = {
    task.name: task
    for task in (
        PaperTask("xsum", "XSum", "EdinburghNLP/xsum@test", _xsum, "ROUGE-L"),
        PaperTask("human_eval", "HumanEval-X", "openai/openai_humaneval@test", _human_eval, "pass"),
        PaperTask("cip", "CIP", "alespalla/chatbot_instruction_prompts@test", _cip),
        PaperTask("mt_bench", "MT-Bench", "HuggingFaceH4/mt_bench_prompts@train", _turns),
        PaperTask("gsm8k", "GSM8K", "openai/gsm8k:main@test", _gsm8k, "exact match"),
        PaperTask("spec_bench", "Spec-Bench", "", _turns),
    )
}
"""CIP: chatbot instruction prompts. The published script has no prompt for XSum; ours is from the authors' next paper
(BiTA). Their script for CIP reads the first 100 records and stops at 512 new tokens."""


def load_questions(task: PaperTask, source: str, limit: int | None = None) -> list[Question]:
    """Load the first `limit` questions of `source`: a JSON(L) file, or a hub id with optional :CONFIG and @SPLIT."""
    if not source:
        raise RecordError(f"{task.title} has no home on the hub. Give --data {task.name}=FILE, a JSONL file.")
    place, split = place_and_split(source)
    try:
        records = load_records(place, needs=((),), split=split)
    except RecordError as error:
        raise RecordError(f"{task.title}: {error} (--data {task.name}=FILE)") from error
    questions = []
    for number, record in enumerate(records[:limit], start=1):
        try:
            questions.append(task.read(record, f"{task.name}/{number}"))
        except KeyError as missing:
            raise RecordError(
                f"Record {number} of {source} has no field {missing.args[0]}, which {task.title} needs. "
                f"It has: {', '.join(sorted(record))}."
            ) from None
    return questions


def place_and_split(source: str) -> tuple[str, str]:
    """Split `owner/name:config@split` at the `@`; a path is not split. The default split is `test`."""
    place, at, split = source.rpartition("@")
    return (source, "test") if not at or Path(source).expanduser().exists() else (place, split)


_ASSISTANT = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_LLAMA_2_CHAT = (
    "<<SYS>>\nYou are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while being "
    "safe.  Your answers should not include any harmful, unethical, racist, sexist, toxic, dangerous, or illegal "
    "content. Please ensure that your responses are socially unbiased and positive in nature.\n\n"
    "If a question does not make any sense, or is not factually coherent, explain why instead of answering something "
    "not correct. If you don't know the answer to a question, please don't share false information.\n<</SYS>>\n\n"
)


@dataclass(frozen=True)
class PromptFamily:
    """The prompt format of a model family: text before a dialogue, around each user turn, and after each answer."""

    name: str
    system: str
    turn: str  # with {} for the user's message
    between: str = ""  # after an answer, before the next turn
    is_chat: bool = True  # False: the text is continued as it is
    render: RenderChat | None = None  # a chat template, instead of the words above

    def prompt(self, turns: Sequence[str], answers: Sequence[str]) -> str:
        """Return the text before answer number `len(answers)`; `turns` has one more item than `answers`.

        As published, the parts are joined by newlines, even if `system` is empty.
        """
        if self.render is not None:
            messages = []
            for asked, answer in zip(turns, [*answers, None], strict=False):
                messages.append({"role": "user", "content": asked})
                if answer is not None:
                    messages.append({"role": "assistant", "content": answer})
            return self.render(messages)
        if not self.is_chat:
            parts = [part for pair in zip(turns, answers, strict=False) for part in pair]
            return "".join([*(f"{part}\n" for part in parts), turns[len(answers)]])
        history = self.system
        for asked, answer in zip(turns, answers, strict=False):
            history = f"{history}\n{self.turn.format(asked)}\n{answer}{self.between}"
        return f"{history}\n{self.turn.format(turns[len(answers)])}"


_HUMAN = "Human:{}\nAssistant:"

FAMILIES = {
    family.name: family
    for family in (
        PromptFamily("llama-2", _ASSISTANT, _HUMAN),  # fine-tuned from the base, as in Table 1
        PromptFamily("vicuna", _ASSISTANT, _HUMAN),  # the paper measured its Vicuna checkpoint as `llama`
        PromptFamily("llama-2-chat", _LLAMA_2_CHAT, "[INST]{} [/INST]", " </s><s>"),
        PromptFamily("chatglm", "", "[Round 0]\n\n问：{}\n\n答："),
        PromptFamily(
            "qwen",
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n",
            "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        ),
        PromptFamily("internlm", "", _HUMAN),
        PromptFamily("falcon", "", _HUMAN),
        PromptFamily("plain", "", "{}", is_chat=False),  # a base model, such as a code model
    )
}

_IN_NAMES = ("vicuna", "chatglm", "internlm", "qwen", "falcon")


TEMPLATE = "template"  # the name of the family that has the model's own chat template


def family_of(model_name: str) -> PromptFamily:
    """Return the family named in the last part of a model's name, else `plain`.

    A last part `model` is skipped, because every trained checkpoint is in a folder of that name.
    """
    name = model_name.rstrip("/").removesuffix("/model").rpartition("/")[2].lower().replace("_", "-")
    for family in _IN_NAMES:
        if family in name:
            return FAMILIES[family]
    if "llama-2" in name or "llama2" in name:
        return FAMILIES["llama-2-chat" if "chat" in name else "llama-2"]
    return FAMILIES["plain"]


FOR_SCALE = "LLaMA-2-7B"  # reference for models of families not in the paper


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


def _published(name: str, family: str, *cells: tuple[float, float]) -> PublishedModel:
    figures = [PublishedFigure(*cell) for cell in cells]
    return PublishedModel(name, family, dict(zip(("xsum", "human_eval", "cip"), figures, strict=True)))


# (tokens per step, speed-up) of each task; greedy, batch 1, k=5 (arXiv 2402.11809, Table 1)
PUBLISHED = {
    model.name: model
    for model in (
        _published("ChatGLM-3-6B", "chatglm", (2.04, 1.48), (3.34, 2.73), (1.80, 1.50)),
        _published("LLaMA-2-7B", "llama-2", (2.23, 1.94), (3.54, 3.18), (1.85, 1.71)),
        _published("LLaMA-2-13B", "llama-2", (2.36, 2.10), (3.76, 3.44), (1.99, 1.81)),
        _published("Qwen-14B", "qwen", (2.15, 1.94), (3.51, 3.18), (1.85, 1.70)),
        _published("InternLM-20B", "internlm", (2.15, 1.96), (3.31, 3.19), (1.80, 1.64)),
        _published("Falcon-40B", "falcon", (2.17, 2.01), (3.58, 3.61), (1.96, 2.03)),
        _published("LLaMA-2-70B", "llama-2", (2.54, 2.35), (4.32, 4.01), (2.09, 1.91)),
    )
}
"""Published rows by model name."""


def published_for(family: str, model_name: str) -> PublishedModel:
    """Return the family's row of the size in `model_name` (such as 13b), else of its smallest size.

    A family that the paper has not measured gets LLaMA-2-7B as a rough reference.
    """
    rows = [row for row in PUBLISHED.values() if row.family == family.removesuffix("-chat")]
    sizes = {size.upper() for size in re.findall(r"\d+b(?![a-z])", model_name.lower())}
    for row in rows:
        if row.name.rpartition("-")[2] in sizes:
            return row
    return rows[0] if rows else PUBLISHED[FOR_SCALE]
